"""Accounting for insiders: the recursion against the dense route, and alone at size.

- ``versus``: one attacker of DP-D-SGD, (T, T, 1), T = 5 to 60 on the Florentine and the Facebook
  ego graph, recursion and dense route (singular values of the stacked view) in one process:
  seconds, their ratio, the largest relative difference. Where the dense route asks for more than
  `MEMORY` it is left out.
- ``alone``: the recursion at n = 271, T = 400 and n = 1,000, T = 100 (random graphs, one attacker,
  a record every 20 or 10 rounds), and on the ego graph at T = 380, (20, 19).
- ``every``: all 148 single attackers of the ego graph at T = 10.

Each row is made in a process of its own: seconds, compilation included (``first_seconds``) and
without it, and peak memory, that of the imports included (``import_bytes``).
"""

import json
from typing import Any

import numpy as np

from _timing import Bench, peak, timed
from dpjax.accounting import dense, kalman, views
from dpjax.mechanism.participation import Participation
from dpjax.topology import graphs, mixing

MEMORY = 4 * 2**30
"""Bytes that the dense route may take in all."""


def dense_bytes(weights: np.ndarray, rounds: int) -> float:
    """Bytes of the dense route: A and B, copies of both, and B's singular vectors."""
    n = len(weights)
    heard = int((weights[0] != 0).sum())
    rows = 1 << (heard - 1).bit_length()
    return 8.0 * 6 * (rounds * rows) * (rounds * n)


def versus(graph: str, rounds: int, repeats: int) -> dict[str, Any]:
    """Both routes on one view; recursion first, so that its memory is told apart."""
    weights = mixing.uniform_neighbors(graphs.parse(graph))
    view = views.dsgd(weights).pndp(0)
    when = Participation(rounds, rounds, 1)
    before = peak()
    timing = timed(lambda: view.loss(when, gradients="view"), repeats)
    loss = timing.result
    row = {"algorithm": "versus", "graph": graph, "n": len(weights), "rounds": rounds}
    row |= {"seconds": timing.median, "first_seconds": timing.first}
    row |= {"import_bytes": before, "peak_bytes": peak()}
    row |= {"upper_bounds": int(loss.upper_bound.sum())}
    if dense_bytes(weights, rounds) > MEMORY:
        return row | {"dense_seconds": None, "ratio": None, "difference": None}

    def slowly() -> np.ndarray:
        energies = dense.energies(*view.materialize(rounds), when)
        return np.sqrt(kalman.pattern_sums(energies.values, when))

    # Nothing is compiled there, and a call takes seconds at the larger sizes: one is enough.
    dense_timing = timed(slowly, 0)
    victims = np.nan_to_num(loss.mu) > 0  # 0 where no message arrives within T
    difference = float(np.abs(dense_timing.result[victims] / loss.mu[victims] - 1).max())
    row |= {"dense_seconds": dense_timing.first, "difference": difference}
    row |= {"ratio": dense_timing.first / timing.median}
    return row | {"dense_peak_bytes": peak()}


def alone(graph: str, participation: str, repeats: int) -> dict[str, Any]:
    """The recursion for one attacker."""
    when = Participation(*map(int, participation.split(",")))
    weights = mixing.uniform_neighbors(graphs.parse(graph))
    view = views.dsgd(weights).pndp(0)
    before = peak()
    timing = timed(lambda: view.loss(when, gradients="view"), repeats)
    loss = timing.result
    row = {"algorithm": "alone", "graph": graph, "n": len(weights), "rounds": when.rounds}
    row |= {"epochs": when.epochs, "separation": when.separation}
    row |= {"seconds": timing.median, "first_seconds": timing.first}
    row |= {"import_bytes": before, "peak_bytes": peak()}
    return row | {"upper_bounds": int(loss.upper_bound.sum())}


def every(graph: str, rounds: int, repeats: int) -> dict[str, Any]:
    """All single attackers."""
    weights = mixing.uniform_neighbors(graphs.parse(graph))
    algorithm = views.dsgd(weights)
    when = Participation(rounds, rounds, 1)
    observed = [algorithm.pndp(attacker) for attacker in range(len(weights))]
    before = peak()
    timing = timed(lambda: [item.loss(when, gradients="view") for item in observed], repeats)
    row = {"algorithm": "every", "graph": graph, "n": len(weights), "rounds": rounds}
    row |= {"attackers": len(observed), "seconds": timing.median, "first_seconds": timing.first}
    row |= {"import_bytes": before, "peak_bytes": peak()}
    return row | {"upper_bounds": int(sum(value.upper_bound.sum() for value in timing.result))}


def one(words: list[str], repeats: int) -> dict[str, Any]:
    """The row that one process makes."""
    kind, graph, setting = words
    if kind == "alone":
        return alone(graph, setting, repeats)
    return {"versus": versus, "every": every}[kind](graph, int(setting), repeats)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--graphs", nargs="*", default=["florentine", "facebook_ego"])
    bench.parser.add_argument("--versus", type=int, nargs="*", default=[5, 10, 20, 40, 60])
    bench.parser.add_argument(
        "--alone", nargs="*", metavar="GRAPH/T,k,b",
        default=["facebook_ego/380,20,19", "er:271:0.05/400,20,20", "er:1000:0.02/100,10,10"],
    )  # fmt: skip
    bench.parser.add_argument("--every", nargs="*", default=["facebook_ego/10"], metavar="GRAPH/T")
    options = bench.parse(argv)
    if options.one is not None:
        print(json.dumps(one(options.one, options.repeats)))
        return 0
    for graph in options.graphs:
        for rounds in options.versus:
            bench.in_own_process("versus", graph, rounds, repeats=options.repeats)
    for kind, cases in (("alone", options.alone), ("every", options.every)):
        for case in cases:
            # Edge-list files have slashes of their own.
            graph, _, setting = case.rpartition("/")
            # These take minutes: they are repeated once.
            bench.in_own_process(kind, graph, setting, repeats=min(options.repeats, 1))
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
