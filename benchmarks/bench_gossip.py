"""How a round of D-SGD grows with agents, parameters, rounds and batch, beside machine limits.

Logistic regression on random rings laid over each other (degree 8), one model [d] an agent, the
agent unit, independent noise (`_tasks`). One size grows at a time, from the base that ``--base``
names; a process a row. Without ``--rounds``, T is 10^6 / n, or 10^9 / (n d) where d is above
1,000, between 10 and 1,000.

- ``seconds``: one round of a full run; ``first_seconds``: of a whole first run, with compilation;
  ``plan_seconds``: of `plan.make` from a sparse mixing matrix.
- ``machine`` row: bytes a second of x + 1 in place on 256 MiB, read and written, and operations a
  second of a float32 product of 2,048 x 2,048 at full precision.
- ``limit``: models and messages are read and written once and the batch is read once, as fast as
  x + 1 in place on as many numbers as the batch has; gradients and gossip take
  4 n b d + 2 (entries of W) d operations, at the product's rate. Draws are free.
- ``times_limit``: seconds over limit. ``times_floor``: over limit and ``normals``, n d normals
  drawn and added in a loop of their own.
- ``peak``: largest resident size in bytes, of which libraries take about 400 MB; ``models``: what
  the run added to the process, in units of n d float32.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import _tasks
from _timing import Bench, forget_peak, peak, timed
from dpjax.engine.run import run
from dpjax.learning import samplers
from dpjax.plans import plan
from dpjax.transforms import variates

AXES = ("agents", "parameters", "rounds", "batch")
COPIED = 2**26
SIDE = 2048


def looped(step: Callable[[Any, Any], Any], shape: tuple[int, ...], repeats: int) -> float:
    """Seconds of ``x = step(i, x)``, in a loop that takes some milliseconds at the least."""
    loops = max(2, min(1000, 2**24 // math.prod(shape)))
    call = jax.jit(lambda x: jax.lax.fori_loop(0, loops, step, x))
    array = jnp.ones(shape)
    return timed(lambda: call(array), repeats).least / loops


def copied(shape: tuple[int, ...], repeats: int) -> float:
    """Bytes read and written a second."""
    return 8 * math.prod(shape) / looped(lambda _, x: x + 1, shape, repeats)


def machine(repeats: int) -> dict[str, Any]:
    """The two rates of the machine."""
    square = jnp.ones((SIDE, SIDE))
    product = jax.jit(lambda x: jnp.matmul(x, x, precision=jax.lax.Precision.HIGHEST))
    rate = 2 * SIDE**3 / timed(lambda: product(square), repeats).least
    return {"copy_bytes_per_second": copied((COPIED,), repeats), "matmul_per_second": rate}


def measured(
    n: int, d: int, rounds: int, batch: int, matmul: float, repeats: int
) -> dict[str, Any]:
    """One row's numbers."""
    matrix = _tasks.rings(n)
    task = _tasks.logistic(n, d, batch)
    config = _tasks.config(rounds, samplers.Random(batch))
    planning = timed(lambda: plan.make(config, matrix), 0)

    def once() -> float:
        return run(planning.result, task, seeds=[0], eval_every=rounds).seconds / rounds

    before = forget_peak()
    first = timed(once, 0).first
    seconds = timed(once, max(repeats - 1, 0), clock=float).least
    maximum = peak()
    key = jax.random.key(0, impl="threefry2x32")

    def drawn(position: Any, x: Any) -> Any:
        return x + variates.normals(jax.random.fold_in(key, position), (n, d), jnp.float32)

    normals = looped(drawn, (n, d), repeats)
    copy = copied((n, batch, d), repeats)
    limit = (16 + 4 * batch) * n * d / copy + (4 * n * batch + 2 * matrix.nnz) * d / matmul
    return {
        "rounds": rounds, "seconds": seconds, "limit": limit, "times_limit": seconds / limit,
        "normals": normals, "times_floor": seconds / (limit + normals), "first_seconds": first,
        "plan_seconds": planning.first, "peak": maximum, "models": (maximum - before) / (4 * n * d),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    defaults = (
        [8, 64, 512, 4096, 32_768, 100_000],
        [16, 4096, 65_536],
        [10, 100, 10_000],
        [8, 64, 512],
    )
    for axis, values in zip(AXES, defaults, strict=True):
        bench.parser.add_argument(f"--{axis}", type=int, nargs="*", default=values)
    bench.parser.add_argument(
        "--base", type=int, nargs=3, default=[64, 256, 1], metavar=("n", "d", "b")
    )
    options = bench.parse(argv)
    if options.one == ["machine"]:
        print(json.dumps({"axis": "machine"} | machine(options.repeats)))
        return 0
    if options.one:
        axis, *words, matmul = options.one
        n, d, rounds, batch = map(int, words)
        row = {"axis": axis, "agents": n, "parameters": d, "batch": batch}
        print(json.dumps(row | measured(n, d, rounds, batch, float(matmul), options.repeats)))
        return 0
    bench.in_own_process("machine", repeats=options.repeats)
    matmul = bench.rows[0]["matmul_per_second"]
    n, d, batch = options.base
    for axis in AXES:
        for value in getattr(options, axis):
            sizes = {"agents": n, "parameters": d, "rounds": 0, "batch": batch} | {axis: value}
            work = sizes["agents"] * max(1000, sizes["parameters"])
            sizes["rounds"] = sizes["rounds"] or max(10, min(1000, 10**9 // work))
            bench.in_own_process(axis, *sizes.values(), matmul, repeats=options.repeats)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
