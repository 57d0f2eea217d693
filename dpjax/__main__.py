"""``python -m dpjax``: the command ``dpjax``, where its script is not on the path."""

import sys

from dpjax.cli import main

__all__ = ()

if __name__ == "__main__":
    sys.exit(main())
