"""Programs of JAX: a bounded number of compiled ones, and what traced ones hold."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

__all__ = ()

_PROGRAMS = 16


class Compiled:
    """``jax.jit`` of a function whose first arguments are static, for at most 16 values of them.

    `jax.jit` keeps a program for every value of a static argument for good. Statics hold the
    problem's functions, so a process that makes one problem after another would keep all their
    programs. Here a program lives as long as its own `jax.jit`, and the least recently used one
    makes room.

    Args:
        function: What to compile.
        static: How many of its first arguments are static.
        options: Of `jax.jit`.
    """

    def __init__(self, function: Callable[..., Any], static: int = 1, **options: Any):
        functools.update_wrapper(self, function)
        self._static = static

        # Each program has a `jax.jit` of its own, which goes with it.
        @functools.lru_cache(maxsize=_PROGRAMS)
        def program(*statics: object) -> Any:
            return jax.jit(functools.partial(function, *statics), **options)

        self._program = program

    def __call__(self, *arguments: object) -> Any:
        """Call the program of these static arguments."""
        program = self._program(*arguments[: self._static])
        return program(*arguments[self._static :])

    def trace(self, *arguments: object) -> Any:
        """Trace it, as ``jax.jit(function).trace`` does; a later call runs that trace."""
        return self._program(*arguments[: self._static]).trace(*arguments[self._static :])


def compiled(static: int = 1, **options: Any) -> Callable[[Callable[..., Any]], Compiled]:
    """Return a decorator that makes a function `Compiled`."""
    return functools.partial(Compiled, static=static, **options)


def jaxprs(value: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Every jaxpr within a jaxpr or within an operation's parameter, with its constants."""
    # Parameters of operations nest programs in dicts, lists and tuples.
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from jaxprs(part)
    elif hasattr(value, "eqns"):
        # A closed jaxpr holds constants, an open one takes them as arguments.
        inner = getattr(value, "jaxpr", value)
        yield inner, getattr(value, "consts", ())
        for equation in inner.eqns:
            yield from jaxprs(equation.params)


def constants(closed: Any) -> Iterator[Any]:
    """Every array that a program holds, at any depth: constants and literals."""
    for jaxpr, arrays in jaxprs(closed):
        yield from arrays
        # A literal is a constant that its equation holds itself.
        for equation in jaxpr.eqns:
            yield from (atom.val for atom in equation.invars if hasattr(atom, "val"))
