"""Double precision inside the design functions, whatever the global flag says."""

from contextlib import AbstractContextManager

import jax

__all__ = ["double_precision"]


def double_precision() -> AbstractContextManager:
    """Return a context in which jax computes in float64; the global flag is restored after."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax import experimental

    return experimental.enable_x64()  # type: ignore[attr-defined]  # before it moved to jax
