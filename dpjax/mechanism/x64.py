"""Double precision inside the design functions, whatever the global flag says."""

from dpjax._numerics import double_precision

__all__ = ["double_precision"]
