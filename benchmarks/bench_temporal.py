"""Noise over rounds: the workload's Gram and the solver, against jax_privacy's dense search.

- ``versus``: T = 128, 256, 512, 1024 with (k, 32)-participation, k = T / 32, on the Florentine
  graph, both in one run: seconds for the Gram and for each solver, their ratio, the certified gap
  and the relative difference of the objectives (below 0: dpjax's is lower).
- ``gram``: `workload_gram` alone at (n, T) = (271, 380) and (1000, 2000), for a symmetric and for
  a row-stochastic mixing matrix, each in a process of its own: seconds and peak memory, that of
  the imports included (``import_bytes``).

jax_privacy compiles in every call, so its first call is its time; dpjax's solver compiles nothing
for k > 1. Medians of repeated calls for dpjax, one call for jax_privacy.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.mechanism import temporal
from dpjax.mechanism.participation import Participation
from dpjax.topology import graphs, mixing

SEPARATION = 32
WEIGHTS = {
    "metropolis_hastings": mixing.metropolis_hastings,
    "uniform_neighbors": mixing.uniform_neighbors,
}


def timed(call: Callable[[], Any], repeats: int = 1) -> tuple[Any, float]:
    """Return the result and the median seconds of ``repeats`` calls."""
    times = []
    for _ in range(max(1, repeats)):
        began = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - began)
    return result, statistics.median(times)


def peak() -> int:
    """Return the process's largest resident size so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def versus(sizes: list[int], repeats: int, report: Callable[[dict[str, Any]], None]) -> None:
    """Both solvers on the same workloads."""
    from jax_privacy.matrix_factorization import dense

    matrix = mixing.metropolis_hastings(graphs.florentine())
    for rounds in sizes:
        k = rounds // SEPARATION
        participation = Participation(rounds, k, SEPARATION)
        gram, gram_seconds = timed(lambda t=rounds: temporal.workload_gram(matrix, t), repeats)
        solution, seconds = timed(lambda h=gram, p=participation: temporal.solve(h, p), repeats)

        def theirs(gram: np.ndarray = gram, rounds: int = rounds, k: int = k) -> np.ndarray:
            root = np.linalg.cholesky(gram).T
            with jax.enable_x64(True):
                return np.array(dense.optimize(rounds, epochs=k, A=jnp.asarray(root)))

        other, slow = timed(theirs)
        value = temporal.objective(other, gram, participation)
        row = {"algorithm": "versus", "rounds": rounds, "epochs": k, "seconds": seconds}
        row |= {"gram_seconds": gram_seconds, "jax_privacy_seconds": slow}
        row |= {"ratio": slow / seconds, "difference": solution.value / value - 1.0}
        report(row | {"iterations": solution.iterations, "gap": solution.gap})


def gram_alone(agents: int, rounds: int, weights: str) -> dict[str, Any]:
    """Return the row of one Gram; the process's memory is its own."""
    # Small networks need a larger share of the edges to be connected.
    density = min(1.0, max(0.05, 2.0 * math.log(agents + 1) / agents))
    matrix = WEIGHTS[weights](graphs.erdos_renyi(agents, density, 0))
    before = peak()
    _, seconds = timed(lambda: temporal.workload_gram(matrix, rounds))
    row = {"algorithm": "gram", "mixing": weights, "n": agents, "rounds": rounds}
    return row | {"seconds": seconds, "import_bytes": before, "peak_bytes": peak()}


def grams(sizes: list[str], report: Callable[[dict[str, Any]], None]) -> None:
    """Each Gram in a fresh process."""
    for size in sizes:
        for weights in WEIGHTS:
            command = [sys.executable, __file__, "--one", size, weights]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
            report(json.loads(answer.stdout.splitlines()[-1]))


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versus", type=int, nargs="*", default=[128, 256, 512, 1024])
    parser.add_argument(
        "--gram", nargs="*", default=["271x380", "1000x2000"], metavar="NxT", help="agents x rounds"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None, help="record file to write")
    parser.add_argument("--one", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)

    if options.one is not None:
        agents, rounds = map(int, options.one[0].split("x"))
        print(json.dumps(gram_alone(agents, rounds, options.one[1])))
        return 0
    if any(rounds % SEPARATION for rounds in options.versus):
        parser.error(f"--versus takes multiples of {SEPARATION}")
    rows: list[dict[str, Any]] = []
    busy = os.getloadavg()[0]

    def report(row: dict[str, Any]) -> None:
        rows.append({"experiment": "bench_temporal"} | row)
        told = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("  ".join(told), flush=True)

    grams(options.gram, report)
    versus(options.versus, options.repeats, report)
    if options.output is not None:
        from dpjax.results import records

        command = " ".join(["python", "benchmarks/bench_temporal.py", *(argv or sys.argv[1:])])
        about = records.metadata(command=command, seed=0)
        # Times on a busy machine say little; readers see how busy it was.
        about["load_average"] = [busy, os.getloadavg()[0]]
        records.write(options.output, rows, about)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
