"""Noise design: dpjax's solver against cvxpy with Clarabel, and alone against the machine's limit.

- ``versus``: the same graphs solved by both in one run, n = 10, 20, 30: seconds, their ratio, both
  gaps, and the relative difference of the values.
- ``alone``: n = 100, 300, 1000 beside ``floor``, the time of as many bare jitted decompositions of
  the same size as the solve makes iterations: no solver that decomposes once an iteration is
  faster.
- ``sweep``: nine values of epsilon times five of p at n = 20: one vmapped call for all 45, and
  one for the five graphs, rescaled (R(b) = R(1) / b).

Compilation is excluded (reported as ``first_seconds``); medians of repeated calls.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.mechanism import fixed_point
from dpjax.mechanism.factorization import Solution, minimize_trace, minimize_traces
from dpjax.mechanism.x64 import double_precision
from dpjax.topology import graphs, mixing

_EPSILONS = (3, 5, 7, 10, 15, 20, 25, 30, 40)
_PROBABILITIES = (0.2, 0.4, 0.6, 0.8, 1.0)


def timed(call: Callable[[], Any], repeats: int) -> tuple[Any, float, float]:
    """Return the result, the seconds of the first call, and the median of ``repeats`` more."""
    began = time.perf_counter()
    result = call()
    first = time.perf_counter() - began
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - began)
    return result, first, statistics.median(times) if times else first


def decomposition(factor: np.ndarray, times: int) -> Callable[[], None]:
    """Return a call that decomposes as the solver does, ``times`` times and nothing else."""
    svd = len(factor) <= fixed_point.LARGEST_SVD

    @jax.jit
    def decompose(a: jax.Array) -> jax.Array:
        return jnp.linalg.svd(a)[1] if svd else jnp.linalg.eigh(a)[0]

    def call() -> None:
        with double_precision():
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


def versus(sizes: list[int], repeats: int, report: Callable[[dict[str, Any]], None]) -> None:
    """Both solvers on the same graphs."""
    for n in sizes:
        factor = mixing.metropolis_hastings(graphs.erdos_renyi(n, 0.5, 0))

        def ours(factor: np.ndarray = factor) -> Solution:
            return minimize_trace(factor=factor)

        def theirs(factor: np.ndarray = factor) -> Solution:
            return minimize_trace(factor=factor, solver="sdp")

        minimize_trace(factor=np.eye(3), solver="sdp")  # imports cvxpy outside the clock
        one, first, seconds = timed(ours, repeats)
        # Nothing is compiled there, and at n = 30 a call takes a minute: one is enough.
        began = time.perf_counter()
        other = theirs()
        slow = time.perf_counter() - began
        row = {"algorithm": "versus", "n": n, "seconds": seconds, "first_seconds": first}
        row |= {"clarabel_seconds": slow, "ratio": slow / seconds, "clarabel_gap": other.gap}
        report(row | {"difference": one.value / other.value - 1.0} | described(one))


def alone(sizes: list[int], repeats: int, report: Callable[[dict[str, Any]], None]) -> None:
    """The solver beside as many bare decompositions."""
    for n in sizes:
        factor = mixing.metropolis_hastings(graphs.erdos_renyi(n, 0.05 if n >= 200 else 0.1, 0))

        def ours(factor: np.ndarray = factor) -> Solution:
            return minimize_trace(factor=factor)

        solution, first, _ = timed(ours, 1)
        bare = decomposition(factor, solution.iterations)
        bare()
        # In turn, so that whatever else the machine does falls on both alike.
        pairs = [(timed(ours, 0)[1], timed(bare, 0)[1]) for _ in range(repeats)]
        seconds, floor = (statistics.median(times) for times in zip(*pairs, strict=True))
        row = {"algorithm": "alone", "n": n, "seconds": seconds, "first_seconds": first}
        row |= {"floor_seconds": floor, "times_floor": seconds / floor}
        report(row | described(solution))


def sweep(repeats: int, report: Callable[[dict[str, Any]], None]) -> None:
    """The 9 x 5 sweep over epsilon and p at twenty agents."""
    five = [mixing.metropolis_hastings(graphs.erdos_renyi(20, p, 0)) for p in _PROBABILITIES]
    problems = np.stack(five * len(_EPSILONS))
    for name, factors in (("sweep 45", problems), ("sweep 5 rescaled", np.stack(five))):
        solutions, first, seconds = timed(lambda f=factors: minimize_traces(factors=f), repeats)
        worst = max(solutions, key=lambda solution: solution.gap if solution.attained else 0.0)
        row = {"algorithm": name, "n": 20, "seconds": seconds, "first_seconds": first}
        report(row | described(worst))


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versus", type=int, nargs="*", default=[10, 20, 30])
    parser.add_argument("--alone", type=int, nargs="*", default=[100, 300, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None, help="record file to write")
    options = parser.parse_args(argv)

    rows: list[dict[str, Any]] = []
    busy = os.getloadavg()[0]

    def report(row: dict[str, Any]) -> None:
        rows.append({"experiment": "bench_mechanism"} | row)
        told = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("  ".join(told), flush=True)

    versus(options.versus, options.repeats, report)
    alone(options.alone, options.repeats, report)
    sweep(options.repeats, report)
    if options.output is not None:
        from dpjax.results import records

        command = " ".join(["python", "benchmarks/bench_mechanism.py", *(argv or sys.argv[1:])])
        about = records.metadata(command=command, seed=0)
        # Times on a busy machine say little; readers see how busy it was.
        about["load_average"] = [busy, os.getloadavg()[0]]
        records.write(options.output, rows, about)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
