"""Compiled programs, of which a bounded number is kept."""

import functools
from collections.abc import Callable
from typing import Any

import jax

__all__ = ["Compiled", "compiled"]

_PROGRAMS = 16


class Compiled:
    """``jax.jit`` of a function whose first arguments are static, for at most 16 values of them.

    `jax.jit` keeps a program for every value of a static argument for good. Statics hold the
    problem's functions, so a process that makes one problem after another would keep all their
    programs. Here a program lives as long as its own `jax.jit`, and the one that was used longest
    ago makes room.

    Args:
        function: What to compile.
        static: How many of its first arguments are static.
        options: Of `jax.jit`.
    """

    def __init__(self, function: Callable[..., Any], static: int = 1, **options: Any):
        functools.update_wrapper(self, function)
        self._static = static

        @functools.lru_cache(maxsize=_PROGRAMS)
        def program(*given: Any) -> Any:
            return jax.jit(functools.partial(function, *given), **options)

        self._program = program

    def __call__(self, *given: Any) -> Any:
        """Call the program of these static arguments."""
        return self._program(*given[: self._static])(*given[self._static :])

    def trace(self, *given: Any) -> Any:
        """Trace it, as ``jax.jit(function).trace`` does; a later call runs what was traced."""
        return self._program(*given[: self._static]).trace(*given[self._static :])


def compiled(static: int = 1, **options: Any) -> Callable[[Callable[..., Any]], Compiled]:
    """Return a decorator that makes a function `Compiled`.

    Args:
        static: How many of its first arguments are static.
        options: Of `jax.jit`.
    """
    return functools.partial(Compiled, static=static, **options)
