"""Speed of per-record clipping by how many records are differentiated at once.

A model of one matrix and one example's loss, as a user writes them: n agents by vmap, a batch of
records each, the sum of the clipped gradients. Each way takes turns with the others in one
process; times are a call's, the least of repeated ones, compilation excluded. ``default`` is
``microbatch=None``, which chooses by cost; ``whole`` is the whole batch at once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from _timing import Bench, turns
from dpjax.transforms import clipping

CLASSES = 10


def loss(params: Any, x: Any, y: Any) -> Any:
    """One example's cross-entropy under a bounded linear model."""
    return -jax.nn.log_softmax(jnp.tanh(x @ params))[y]


def seconds(size: int, agents: int, batch: int, repeats: int) -> dict[str, float]:
    """Least seconds of a call, by way."""
    key = jax.random.key(0)
    features = size // CLASSES
    params = jax.random.normal(key, (agents, features, CLASSES)) / 10
    x = jax.random.normal(key, (agents, batch, features))
    y = jnp.zeros((agents, batch), int)
    ways = {
        name: jax.jit(jax.vmap(clipping.per_example(loss, 1.0, microbatch=count)))
        for name, count in (("default", None), ("whole", batch), ("one", 1))
    }
    calls = {name: functools.partial(fn, params, x, y) for name, fn in ways.items()}
    return {name: timing.least for name, timing in turns(calls, repeats).items()}


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__, repeats=5)
    sizes = [1_000, 10_000, 100_000, 400_000]
    bench.parser.add_argument("--sizes", type=int, nargs="+", default=sizes)
    bench.parser.add_argument("--agents", type=int, default=8)
    bench.parser.add_argument("--batch", type=int, default=16)
    options = bench.parse(argv)
    for size in options.sizes:
        best = seconds(size, options.agents, options.batch, options.repeats)
        for name, value in best.items():
            row = {"algorithm": name, "parameters": size}
            row |= {"agents": options.agents, "batch_size": options.batch}
            bench.row(**row, milliseconds=1e3 * value, times_best=value / min(best.values()))
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
