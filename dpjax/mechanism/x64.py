"""Double precision inside the design functions, whatever the global flag says."""

import contextlib
from collections.abc import Iterator

import jax

from dpjax._wide import double_precision as in_float64

__all__ = ["double_precision"]


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Return a context in which jax computes in float64; the global flag is restored after.

    Ranks are promoted as numpy does, too, whatever jax is configured to: nothing of a user's is
    computed here.
    """
    with in_float64(), jax.numpy_rank_promotion("allow"):
        yield
