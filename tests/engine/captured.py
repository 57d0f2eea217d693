"""Losses that hold an array in every way a program can, and a process that starts such a release.

usage: python -m tests.engine.captured KEY_FILE KIND ...

Starts or resumes releases up to where each has its noise key KEY_FILE.KIND, and prints their kinds.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.engine.keys import KeyFile
from dpjax.plans import plan
from dpjax.topology import graphs, mixing
from tests.support import make_config, make_problem, run


def plain(weights):
    """The array in the loss itself."""
    return lambda x: x * weights


def jitted(weights):
    """In a function compiled on its own."""
    return jax.jit(lambda x: x * weights)


def vmapped(weights):
    """In a function mapped over rows."""
    return lambda x: jax.vmap(lambda row: row * weights)(x)


def scanned(weights):
    """In the body of a scan."""
    return lambda x: jax.lax.scan(lambda _, row: (None, row * weights), None, x)[1]


def branched(weights):
    """In a branch that is taken for some batches."""
    return lambda x: jax.lax.cond(x.sum() > 0, lambda v: v * weights, lambda v: v, x)


def looped(weights):
    """In the body of a loop without a derivative, on data alone."""

    def factors(x):
        return jax.lax.while_loop(
            lambda carry: carry[0] < 2, lambda carry: (carry[0] + 1, carry[1] * weights), (0, x)
        )[1]

    return factors


def checkpointed(weights):
    """In a function whose values are computed again for the derivative."""
    return jax.checkpoint(lambda x: jnp.sin(x * weights))


def nested(weights):
    """In all of them, one in the other."""

    @jax.checkpoint
    def inner(row):
        return jax.lax.cond(row[0] > 0, jax.jit(lambda v: v * weights), jnp.sin, row)

    return jax.jit(lambda x: jax.lax.scan(lambda _, row: (None, inner(row)), None, x)[1])


def _between(function):
    """A loss of a map of features."""
    return lambda weights: lambda loss: lambda p, x, y: loss(p, function(weights)(x), y)


def backward(weights):
    """In the derivative alone, given backwards."""

    @jax.custom_vjp
    def same(value):
        return value

    shift = jax.jit(lambda g: g * weights[0])
    same.defvjp(lambda value: (value, None), lambda _, g: (shift(g),))
    return lambda loss: lambda p, x, y: same(loss(p, x, y))


def forward(weights):
    """In the derivative alone, given forwards."""

    @jax.custom_jvp
    def same(value):
        return value

    shift = jax.jit(lambda g: g * weights[0])
    same.defjvp(lambda primals, tangents: (primals[0], shift(tangents[0])))
    return lambda loss: lambda p, x, y: same(loss(p, x, y))


def large(weights):
    """In a matrix too large to print."""
    matrix = np.zeros((400, 400), np.float32)
    matrix[200, :5] = weights
    project = jax.jit(lambda x: x * (jnp.asarray(matrix) @ jnp.ones(400))[200] + matrix[200, :5])
    return lambda loss: lambda p, x, y: loss(p, project(x), y)


KINDS = {
    case.__name__: _between(case)
    for case in (plain, jitted, vmapped, scanned, branched, looped, checkpointed, nested)
} | {case.__name__: case for case in (backward, forward, large)}

WEIGHTS = np.linspace(0.5, 2.0, 5, dtype=np.float32)


def changed(weights):
    """The last bit of one number, another one."""
    other = weights.copy()
    other[0] = np.nextafter(other[0], np.float32(9))
    return other


def make(kind, weights=WEIGHTS):
    """The small problem with such a loss."""
    small = make_problem(6)
    wrap = KINDS[kind](weights)
    return dataclasses.replace(small, batch_loss=wrap(small.batch_loss))


@functools.cache
def release():
    """The plan of a short release."""
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(6, 0.5, 0))
    return plan.make(make_config(release=True, rounds=2), matrix)


class Reached(Exception):
    """The run has its key: it would now compile and send."""


def reach(task, key, made_plan=None):
    """Start or resume a release up to where it has its noise key.

    Raises:
        Reached: Where it was let.
    """
    methods = {name: getattr(KeyFile, name) for name in ("create", "key")}

    def stopping(function):
        def wrapped(*args, **kwargs):
            function(*args, **kwargs)
            raise Reached

        return wrapped

    try:
        for name, function in methods.items():
            setattr(KeyFile, name, stopping(function))
        run(made_plan or release(), task, seeds=[0], eval_every=1, key_file=key)
    finally:
        for name, function in methods.items():
            setattr(KeyFile, name, function)


if __name__ == "__main__":
    for kind_ in sys.argv[2:]:
        try:
            reach(make(kind_), f"{sys.argv[1]}.{kind_}")
        except Reached:
            print(kind_)
