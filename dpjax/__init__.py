"""Differentially private learning without a trusted server, in JAX.

Rooms are imported by module path, for example ``from dpjax.topology import graphs``; importing
``dpjax`` alone loads nothing but this file.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
