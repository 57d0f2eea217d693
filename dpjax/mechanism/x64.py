"""Double precision inside the design functions, whatever the global flag says."""

from dpjax._wide import double_precision

__all__ = ["double_precision"]
