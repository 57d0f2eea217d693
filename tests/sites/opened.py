"""python opened.py: `dpjax site run site.toml`, which writes down every file that it opens."""

import os
import sys

if __name__ == "__main__":
    from dpjax.cli import main

    handle = os.open("opened", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            os.write(handle, os.fsencode(os.path.abspath(os.fsdecode(arguments[0]))) + b"\n")

    sys.addaudithook(note)
    sys.argv = ["dpjax", "site", "run", "site.toml"]
    sys.exit(main())
