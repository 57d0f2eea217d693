"""Noise over rounds: the workload's Gram and the solver, against jax_privacy's dense search.

- ``versus``: T = 128, 256, 512, 1024 with (k, 32)-participation, k = T / 32, on the Florentine
  graph, both in one run: seconds for the Gram and for each solver, their ratio, the certified gap
  and the relative difference of the objectives (below 0: dpjax's is lower).
- ``design``: the optimum alone at (T, k) = (380, 20), (5000, 10) and (5000, 1) on the same graph,
  each in a process of its own: seconds with compilation, objective, certified gap, peak memory.
  Beside it the best Toeplitz strategy of 32 bands (or b), and up to 512 rounds the best banded one:
  seconds, and the gap of their objectives to the optimum over all strategies.
- ``gram``: `workload_gram` alone at (n, T) = (271, 380) and (1000, 2000), for a symmetric and for
  a row-stochastic mixing matrix, each in a process of its own: seconds and peak memory, that of
  the imports included (``import_bytes``).

jax_privacy compiles in every call, so its first call is its time; dpjax's solver compiles once for
a size, from 256 rounds on. Medians of repeated calls for dpjax, the first of which compiles; one
call for jax_privacy.
"""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from _timing import Bench, installed, peak, timed
from dpjax.contrib.bands import toeplitz
from dpjax.mechanism import banded, temporal
from dpjax.mechanism.participation import Participation
from dpjax.topology import graphs, mixing

SEPARATION = BANDS = 32
LONGEST_BANDED = 512  # jax_privacy's search for banded strategies takes minutes beyond
WEIGHTS = {
    "metropolis_hastings": mixing.metropolis_hastings,
    "uniform_neighbors": mixing.uniform_neighbors,
}


def versus(sizes: list[int], repeats: int, bench: Bench) -> None:
    """Both solvers on the same workloads."""
    from jax_privacy.matrix_factorization import dense

    matrix = mixing.metropolis_hastings(graphs.florentine())
    for rounds in sizes:
        k = rounds // SEPARATION
        participation = Participation(rounds, k, SEPARATION)
        workload = timed(lambda t=rounds: temporal.workload_gram(matrix, t), repeats - 1)
        gram = workload.result
        solved = timed(lambda h=gram, p=participation: temporal.solve(h, p), repeats - 1)

        def theirs(gram: np.ndarray = gram, rounds: int = rounds, k: int = k) -> np.ndarray:
            root = np.linalg.cholesky(gram).T
            with jax.enable_x64(True):
                return np.array(dense.optimize(rounds, epochs=k, A=jnp.asarray(root)))

        other = timed(theirs, 0)
        solution = solved.result
        value = temporal.objective(other.result, gram, participation)
        row = {"algorithm": "versus", "rounds": rounds, "epochs": k, "seconds": solved.median}
        row |= {"gram_seconds": workload.median, "jax_privacy_seconds": other.first}
        row |= {"ratio": other.first / solved.median, "difference": solution.value / value - 1.0}
        bench.row(**row, iterations=solution.iterations, gap=solution.gap)


def designed(rounds: int, epochs: int) -> dict[str, Any]:
    """Return the row of one design, made by a process that has compiled nothing."""
    matrix = mixing.metropolis_hastings(graphs.florentine())
    participation = Participation(rounds, epochs, rounds // epochs)
    gram = temporal.workload_gram(matrix, rounds)
    solved = timed(lambda: temporal.solve(gram, participation), 0)
    solution = solved.result
    bands = min(BANDS, participation.separation)
    row = {"algorithm": "design", "rounds": rounds, "epochs": epochs, "seconds": solved.first}
    row |= {"value": solution.value, "gap": solution.gap, "iterations": solution.iterations}
    row |= {"converged": solution.converged, "peak_bytes": peak(), "bands": bands}
    for few in (toeplitz, banded.banded)[: 1 + (rounds <= LONGEST_BANDED)]:
        result = timed(lambda few=few: few(matrix, participation, bands), 0)
        value = temporal.objective(result.result, gram, participation)
        gap = value / solution.lower_bound - 1.0
        row |= {f"{few.__name__}_seconds": result.first, f"{few.__name__}_gap": gap}
    return row


def gram_alone(agents: int, rounds: int, weights: str) -> dict[str, Any]:
    """Return the row of one Gram; the process's memory is its own."""
    # Small networks need a larger share of the edges to be connected.
    density = min(1.0, max(0.05, 2.0 * math.log(agents + 1) / agents))
    matrix = WEIGHTS[weights](graphs.erdos_renyi(agents, density, 0))
    before = peak()
    seconds = timed(lambda: temporal.workload_gram(matrix, rounds), 0).first
    row = {"algorithm": "gram", "mixing": weights, "n": agents, "rounds": rounds}
    return row | {"seconds": seconds, "import_bytes": before, "peak_bytes": peak()}


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--versus", type=int, nargs="*", default=[128, 256, 512, 1024])
    bench.parser.add_argument(
        "--gram", nargs="*", default=["271x380", "1000x2000"], metavar="NxT", help="agents x rounds"
    )
    bench.parser.add_argument(
        "--design", nargs="*", default=["380x20", "5000x10", "5000x1"], metavar="TxK",
        help="rounds x appearances of a record, which divide them",
    )  # fmt: skip
    options = bench.parse(argv)
    if options.one is not None:
        size, *weights = options.one
        first, other = map(int, size.split("x"))
        row = gram_alone(first, other, weights[0]) if weights else designed(first, other)
        print(json.dumps(row))
        return 0
    if any(rounds % SEPARATION for rounds in options.versus):
        bench.parser.error(f"--versus takes multiples of {SEPARATION}")
    for size in options.gram:
        for weights in WEIGHTS:
            bench.in_own_process(size, weights, repeats=0)
    for size in options.design:
        bench.in_own_process(size, repeats=0)
    if options.versus and installed("jax_privacy"):
        versus(options.versus, options.repeats, bench)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
