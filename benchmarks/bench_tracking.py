"""Gradient tracking's tools against their peers, in one process, each way in turn with the others.

- ``estimator``: mutual information from trials (`dpjax.accounting.leakage`). ``tree`` and ``dense``
  are dpjax's two routes, ``scikit_learn`` its `mutual_info_regression`, which takes scalar pairs
  alone, and ``plain`` a k-d tree asked trial by trial in Python, as public toolboxes do. Pairs (one
  a round) a second, trials a second, how many times as long as ``tree`` a way takes (the median
  over turns), and the largest difference of its values from ``tree``'s, all on the same numbers.
- ``runs``: trials x rounds of Algorithm 1 on sensor fusion a second. ``dpjax`` runs all trials in
  one compiled call, as its experiments do, ``numpy`` trial after trial with arrays over agents, and
  ``loop`` with a loop over agents, too, as scripts do. One trial more gives the time of a round of
  one run alone. The noise is each library's own.
- ``bias``: no times. ``gaussians``: what is found of a known truth, both variables normal and of
  so many coordinates, those of x and y correlated in pairs. ``maximum``: the largest of so many
  rounds in which y tells nothing of a scalar x, over psi(N) - psi(k), its mean over as many groups
  of rounds as there are.

Compilation is excluded; times are medians of repeated calls.
"""

import functools
import math
import statistics
from argparse import Namespace
from collections.abc import Callable

import numpy as np

from _timing import Bench, turns
from dpjax.contrib import leakage

WAYS = ("tree", "dense", "scikit_learn", "plain")
K = 3
GROUP = 1000
"""Rounds of the study that the estimator is for."""

Estimator = Callable[[np.ndarray, np.ndarray], np.ndarray]


def rounds(pairs: int, trials: int, coordinates: int) -> tuple[np.ndarray, np.ndarray]:
    """Scalars x [R, N, 1] and, from nearly free of them to nearly equal, y [R, N, d]."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(pairs, trials, 1))
    noise = rng.normal(size=(pairs, trials, coordinates))
    strength = np.geomspace(0.1, 10.0, pairs)[:, None, None]
    y = strength * x + noise
    # scikit-learn scales what it is given; scaled before, all ways see the same distances.
    return x / x.std(axis=1, keepdims=True), y / y.std(axis=1, keepdims=True)


def scikit_learn(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pair after pair, scalars alone; it has one seed, and cuts negative values."""
    from sklearn.feature_selection import mutual_info_regression

    return np.array(
        [
            mutual_info_regression(item, other[:, 0], n_neighbors=K, random_state=0)[0]
            for item, other in zip(x, y, strict=True)
        ]
    )


def plain(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pair after pair and trial after trial, one question to a tree each."""
    from scipy import spatial, special

    results = []
    for item, other in zip(x, y, strict=True):
        pair = np.hstack([item, other])
        tree = spatial.cKDTree(pair)
        total = 0.0
        radii = [np.nextafter(tree.query(point, K + 1, p=np.inf)[0][K], 0.0) for point in pair]
        for case in (item, other):
            single = spatial.cKDTree(case)
            for point, radius in zip(case, radii, strict=True):
                total += special.digamma(len(single.query_ball_point(point, radius, p=np.inf)))
        results.append(special.digamma(len(pair)) + special.digamma(K) - total / len(pair))
    return np.array(results)


def ways(coordinates: int, expected: list[str]) -> dict[str, Estimator]:
    """The ways that take so many coordinates, by name."""
    entries: dict[str, Estimator] = {
        "tree": functools.partial(leakage.over_rounds, k=K, backend="tree"),
        "dense": functools.partial(leakage.over_rounds, k=K, backend="dense"),
        "scikit_learn": scikit_learn,
        "plain": plain,
    }
    left = () if coordinates == 1 else ("scikit_learn",)
    return {name: entries[name] for name in WAYS if name in expected and name not in left}


def estimator(bench: Bench, options: Namespace) -> None:
    """A row for each way, number of trials, and number of y's coordinates."""
    for trials in options.trials:
        for coordinates in options.coordinates:
            x, y = rounds(options.pairs, trials, coordinates)
            calls = {
                name: functools.partial(way, x, y)
                for name, way in ways(coordinates, options.ways).items()
            }
            result = turns(calls, options.repeats)
            for name, item in result.items():
                row = {"algorithm": name, "pairs": options.pairs, "trials": trials}
                row |= {"coordinates": coordinates, "seconds": item.median}
                row |= {"pairs_per_second": options.pairs / item.median}
                row |= {"trials_per_second": options.pairs * trials / item.median}
                if (ours := result.get("tree")) is not None:
                    pair = zip(item.times, ours.times, strict=True)
                    times = [other / mine for other, mine in pair]
                    row["times_tree"] = statistics.median(times or [item.first / ours.first])
                    # scikit-learn's are never below 0.
                    cut = np.maximum if name == "scikit_learn" else np.add
                    gap = np.abs(item.result - cut(ours.result, 0.0))
                    row["difference"] = float(gap.max())
                bench.row(section="estimator", **row)


def gaussians(trials: int, coordinates: int, truth: float, seed: int) -> tuple[np.ndarray, ...]:
    """Standard normal x and y [1, N, d] that have ``truth`` nats in common."""
    rng = np.random.default_rng(seed)
    correlation = math.sqrt(-math.expm1(-2.0 * truth / coordinates))
    x, noise = rng.normal(size=(2, 1, trials, coordinates))
    return x, correlation * x + math.sqrt(1.0 - correlation**2) * noise


def bias(bench: Bench, options: Namespace) -> None:
    """A row for each truth and number of coordinates; one for each number of rounds."""
    trials = options.bias_trials
    for truth in options.truths:
        for coordinates in options.gaussians:
            results = [
                float(leakage.over_rounds(*gaussians(trials, coordinates, truth, seed), K)[0])
                for seed in range(options.seeds)
            ]
            row = {"algorithm": "gaussians", "trials": trials, "coordinates": coordinates}
            row |= {"truth": truth, "found": statistics.mean(results)}
            row |= {"share": row["found"] / truth, "deviation": statistics.pstdev(results)}
            bench.row(section="bias", **row)
    for coordinates in options.coordinates:
        nothing = np.concatenate(
            [
                leakage.over_rounds(*independent(trials, coordinates, seed), K)
                for seed in range(options.groups)
            ]
        ) / leakage.normaliser(trials, K)
        for rounds_ in (1, 10, 100, GROUP):
            maxima = nothing.reshape(-1, rounds_).max(axis=1)
            row = {"algorithm": "maximum", "trials": trials, "coordinates": coordinates}
            row |= {"rounds": rounds_, "found": float(maxima.mean())}
            row |= {"deviation": float(maxima.std()), "groups": len(maxima)}
            bench.row(section="bias", **row)


def independent(trials: int, coordinates: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A group of rounds in which y tells nothing."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(GROUP, trials, 1)), rng.normal(size=(GROUP, trials, coordinates))


def compiled(options: Namespace, trials: int) -> Callable[[], object]:
    """All trials side by side."""
    from dpjax.algorithms.tracking import Tracking
    from dpjax.contrib import fusion
    from dpjax.engine.run import run
    from dpjax.learning import samplers
    from dpjax.plans import plan, protect
    from dpjax.plans.optimizers import Sgd
    from dpjax.plans.scheduled import ScheduledLaplace

    config = plan.Config(
        method=Tracking(STEPS["beta"]), noise=ScheduledLaplace(STEPS["q2"]),
        sampler=samplers.Random(1),
        budget=protect.Budget(1.0, accountant="pure"), rounds=options.run_rounds,
        protect=protect.Protect("replace_agent", norm="l1", gradient_gap=1.0),
        optimizer=Sgd(STEPS["gamma"], decay=STEPS["q1"]),
    )  # fmt: skip
    training_plan = plan.make(config, network(options.agents))
    task = fusion.problem(fusion.make(options.agents, seed=0))
    return lambda: run(training_plan, task, seeds=range(trials), eval_every=options.run_rounds)


def network(agents: int) -> np.ndarray:
    """A random graph's weights."""
    from dpjax.topology import graphs, mixing

    return mixing.metropolis_hastings(graphs.erdos_renyi(agents, min(1.0, max(0.1, 8 / agents)), 0))


def scripted(options: Namespace, trials: int, loop: bool) -> Callable[[], object]:
    """Trial after trial in NumPy, with a loop over agents or without."""
    from dpjax.contrib import fusion

    costs = fusion.make(options.agents, seed=0)
    weights = network(options.agents)
    agents = range(options.agents)
    neighbours = [np.flatnonzero(weights[i]) for i in agents]
    scale = STEPS["gamma"] / (STEPS["q2"] - STEPS["q1"])

    def one(rng: np.random.Generator) -> np.ndarray:
        x = rng.normal(size=(options.agents, 2))
        y = np.zeros_like(x)
        for k in range(options.run_rounds):
            step = STEPS["gamma"] * STEPS["q1"] ** k
            nu = scale * STEPS["q2"] ** k
            if not loop:
                z = x + rng.laplace(0, nu, x.shape)
                mean = weights @ z
                y += STEPS["beta"] * (z - mean)
                slope = np.einsum("nij,nj->ni", costs.hessians, z) - costs.linear
                x = mean - step * (y + slope)
                continue
            z = np.array([x[i] + rng.laplace(0, nu, 2) for i in agents])
            new = np.empty_like(x)
            for i in agents:
                mean = sum(weights[i, j] * z[j] for j in neighbours[i])
                y[i] = y[i] + STEPS["beta"] * (z[i] - mean)
                new[i] = mean - step * (y[i] + costs.hessians[i] @ z[i] - costs.linear[i])
            x = new
        return x

    return lambda: [one(np.random.default_rng(seed)) for seed in range(trials)]


STEPS = {"gamma": 0.001, "beta": 1000.0, "q1": 0.97, "q2": 0.99}
"""The paper's at epsilon 1."""


def runs(bench: Bench, options: Namespace) -> None:
    """Trials x rounds a second, each way with as many trials as it can do in seconds."""
    counts = {"dpjax": options.run_trials, "dpjax, one trial": 1, "numpy": 5, "loop": 1}
    calls = {
        "dpjax": compiled(options, counts["dpjax"]),
        "dpjax, one trial": compiled(options, 1),
        "numpy": scripted(options, counts["numpy"], loop=False),
        "loop": scripted(options, counts["loop"], loop=True),
    }
    taken = turns(calls, options.repeats)
    rates = {
        name: counts[name] * options.run_rounds / np.array(item.times)
        for name, item in taken.items()
    }
    for name, rate in rates.items():
        bench.row(
            what="runs", algorithm=name, agents=options.agents, rounds=options.run_rounds,
            trials=counts[name], trials_rounds_per_second=float(np.median(rate)),
            times_loop=float(np.median(rate / rates["loop"])),
        )  # fmt: skip


SECTIONS = {"estimator": estimator, "bias": bias, "runs": runs}
"""What ``--what`` chooses from: functions of the bench and its options."""


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__, repeats=5)
    bench.parser.add_argument("--what", nargs="+", choices=SECTIONS, default=["estimator"])
    group = bench.parser.add_argument_group("estimator")
    group.add_argument("--pairs", type=int, default=20, help="pairs of variables in a call")
    group.add_argument("--trials", type=int, nargs="+", default=[500, 5000])
    group.add_argument("--coordinates", type=int, nargs="+", default=[1, 3], help="of y")
    group.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    group = bench.parser.add_argument_group("bias")
    group.add_argument("--bias-trials", type=int, default=5000)
    group.add_argument("--gaussians", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    group.add_argument("--truths", type=float, nargs="+", default=[0.8, 4.0])
    group.add_argument("--seeds", type=int, default=3, help="of each truth")
    group.add_argument("--groups", type=int, default=3, help="of 1,000 rounds that tell nothing")
    group = bench.parser.add_argument_group("runs")
    group.add_argument("--agents", type=int, default=100)
    group.add_argument("--run-rounds", type=int, default=1000)
    group.add_argument("--run-trials", type=int, default=1000, help="side by side")
    options = bench.parse(argv)
    for name in options.what:
        SECTIONS[name](bench, options)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
