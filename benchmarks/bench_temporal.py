"""Noise over rounds: the workload's Gram and the solver, against jax_privacy's dense search.

- ``versus``: T = 128, 256, 512, 1024 with (k, 32)-participation, k = T / 32, on the Florentine
  graph, both in one run: seconds for the Gram and for each solver, their ratio, the certified gap
  and the relative difference of the objectives (below 0: dpjax's is lower).
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

from _timing import Bench, peak, timed
from dpjax.mechanism import temporal
from dpjax.mechanism.participation import Participation
from dpjax.topology import graphs, mixing

SEPARATION = 32
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

        other, solution = timed(theirs, 0), solved.result
        value = temporal.objective(other.result, gram, participation)
        row = {"algorithm": "versus", "rounds": rounds, "epochs": k, "seconds": solved.median}
        row |= {"gram_seconds": workload.median, "jax_privacy_seconds": other.first}
        row |= {"ratio": other.first / solved.median, "difference": solution.value / value - 1.0}
        bench.row(**row, iterations=solution.iterations, gap=solution.gap)


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
    options = bench.parse(argv)
    if options.one is not None:
        agents, rounds = map(int, options.one[0].split("x"))
        print(json.dumps(gram_alone(agents, rounds, options.one[1])))
        return 0
    if any(rounds % SEPARATION for rounds in options.versus):
        bench.parser.error(f"--versus takes multiples of {SEPARATION}")
    for size in options.gram:
        for weights in WEIGHTS:
            bench.in_own_process(size, weights, repeats=0)
    versus(options.versus, options.repeats, bench)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
