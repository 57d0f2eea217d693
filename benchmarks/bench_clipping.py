"""Speed of per-record clipping by how many records are differentiated at once.

A model of one matrix and one example's loss, as a user writes them: n agents by vmap, a batch of
records each, the sum of the clipped gradients. Each way takes turns with the others in one
process; times are a call's, the least of repeated ones, compilation excluded. ``default`` is
``microbatch=None``, which chooses by cost; ``whole`` is the whole batch at once.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dpjax.results import records, tables
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
    x, y = jax.random.normal(key, (agents, batch, features)), jnp.zeros((agents, batch), int)
    ways = {
        name: jax.jit(jax.vmap(clipping.per_example(loss, 1.0, microbatch=count)))
        for name, count in (("default", None), ("whole", batch), ("one", 1))
    }
    best = {}
    for name, fn in ways.items():
        jax.block_until_ready(fn(params, x, y))
        best[name] = float("inf")
    for _ in range(repeats):
        for name, fn in ways.items():
            began = time.perf_counter()
            jax.block_until_ready(fn(params, x, y))
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000, 400_000])
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None, help="record file to write")
    options = parser.parse_args(argv)
    if options.output is not None and options.output.exists():
        parser.error(f"--output {options.output} exists; records are never overwritten")
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        best = seconds(size, options.agents, options.batch, options.repeats)
        for name, value in best.items():
            row = {"experiment": "bench_clipping", "algorithm": name, "parameters": size}
            row |= {"agents": options.agents, "batch_size": options.batch}
            rows.append(row | {"milliseconds": 1e3 * value})
            rows[-1]["times_best"] = value / min(best.values())
    print(tables.text(rows))
    if options.output is not None:
        command = " ".join(["python", "benchmarks/bench_clipping.py", *(argv or sys.argv[1:])])
        records.write(options.output, rows, records.metadata(command=command, seed=0))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
