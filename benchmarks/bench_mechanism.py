"""Noise design: dpjax's solver against cvxpy with Clarabel, and alone against the machine's limit.

- ``versus``: the same graphs solved by both in one run, n = 10, 20, 30: seconds, their ratio, both
  gaps, and the relative difference of the values.
- ``alone``: n = 100, 300, 1000 beside ``floor``, the time of as many bare jitted decompositions of
  the same size as the solve makes iterations: no solver that decomposes once an iteration is
  faster.

Compilation is excluded (reported as ``first_seconds``); medians of repeated calls.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from _timing import Bench, Timing, installed, timed, turns
from dpjax.mechanism import fixed_point
from dpjax.mechanism.factorization import Solution, minimize_trace
from dpjax.topology import graphs, mixing


def decomposition(factor: np.ndarray, times: int) -> Callable[[], None]:
    """Return a call that decomposes as the solver does, ``times`` times and nothing else."""
    svd = len(factor) <= fixed_point.LARGEST_SVD

    @jax.jit
    def decompose(a: jax.Array) -> jax.Array:
        return jnp.linalg.svd(a)[1] if svd else jnp.linalg.eigh(a)[0]

    def call() -> None:
        with jax.enable_x64(True):
            matrix = jnp.asarray(factor if svd else factor @ factor.T)
            for _ in range(times):
                decompose(matrix).block_until_ready()

    return call


def described(solution: Solution) -> dict[str, Any]:
    """Return what a row says of a solution."""
    return {
        "iterations": solution.iterations,
        "gap": solution.gap,
        "variance_ratio": solution.variance_ratio,
    }


def seconds(timing: Timing) -> dict[str, float]:
    """Return what a row says of a call's time."""
    return {"seconds": timing.median, "first_seconds": timing.first}


def versus(sizes: list[int], repeats: int, bench: Bench) -> None:
    """Both solvers on the same graphs."""
    for n in sizes:
        factor = mixing.metropolis_hastings(graphs.erdos_renyi(n, 0.5, 0))

        def ours(factor: np.ndarray = factor) -> Solution:
            return minimize_trace(factor=factor)

        def theirs(factor: np.ndarray = factor) -> Solution:
            return minimize_trace(factor=factor, solver="sdp")

        minimize_trace(factor=np.eye(3), solver="sdp")  # imports cvxpy outside the clock
        timing = timed(ours, repeats)
        # Nothing is compiled there, and at n = 30 a call takes a minute: one is enough.
        slow = timed(theirs, 0)
        result = timing.result
        other = slow.result
        row = {"algorithm": "versus", "n": n} | seconds(timing)
        row |= {"clarabel_seconds": slow.first, "ratio": slow.first / timing.median}
        row |= {"clarabel_gap": other.gap, "difference": result.value / other.value - 1.0}
        bench.row(**row, **described(result))


def alone(sizes: list[int], repeats: int, bench: Bench) -> None:
    """The solver beside as many bare decompositions."""
    for n in sizes:
        factor = mixing.metropolis_hastings(graphs.erdos_renyi(n, 0.05 if n >= 200 else 0.1, 0))

        def ours(factor: np.ndarray = factor) -> Solution:
            return minimize_trace(factor=factor)

        compiling = timed(ours, 0)
        bare = decomposition(factor, compiling.result.iterations)
        pair = turns({"ours": ours, "floor": bare}, repeats)
        took = pair["ours"].median
        floor = pair["floor"].median
        row = {"algorithm": "alone", "n": n, "seconds": took, "first_seconds": compiling.first}
        row |= {"floor_seconds": floor, "times_floor": took / floor}
        bench.row(**row, **described(compiling.result))


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--versus", type=int, nargs="*", default=[10, 20, 30])
    bench.parser.add_argument("--alone", type=int, nargs="*", default=[100, 300, 1000])
    options = bench.parse(argv)
    if options.versus and installed("cvxpy"):
        versus(options.versus, options.repeats, bench)
    alone(options.alone, options.repeats, bench)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
