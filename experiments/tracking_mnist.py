"""Gradient tracking under pure DP on MNIST: Figs. 6-10 of the gradient tracking paper.

The paper's claims rest on a gap between gradients that it never states: here it is swept. In the
"assumed" mode nothing is clipped, as in the paper, and the guarantee says that the gap is an
assumption; in the "clipped" mode gradients are clipped in L1 to half the gap, so that it holds.
Methods and networks are compared in the assumed mode, in which something is learned: two rivals ask
for gradients at models that nobody else knows, and their cost assumes a smoothness besides.

The preset full has the paper's agents, rounds and layers, with group norms in place of batch norms:
statistics of batches are private, and are never sent.
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from _common import launch, looks, tables
from dpjax.algorithms.pairs import PPDOAGT, DiffTVAB
from dpjax.algorithms.tracking import DPOP, Tracking
from dpjax.contrib import datasets, images
from dpjax.data import partition
from dpjax.engine import keys
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.mechanism import laplace
from dpjax.plans import plan, protect, scheduled
from dpjax.plans.optimizers import Sgd
from dpjax.results import plots
from dpjax.topology import graphs, mixing

__all__ = ["PRESETS", "Config", "experiment", "main"]

METHODS = ("tracking", "dpop", "pp_doagt", "diff_tv_ab")
PARTS = ("gaps", "methods", "border", "networks", "spread")


@dataclass(frozen=True)
class Config:
    """Network, schedules, sweeps.

    Attributes:
        dataset: Images, as `dpjax.contrib.datasets.check` takes them.
        model: Network by name.
        layout: How convolutions are computed: mapped over agents' kernels a CPU's own are slow.
        parts: Which of the sweeps: "gaps" (gap, mode, budget), "methods" (Figs. 6-8), "border"
            (Fig. 9: gamma and beta without noise), "networks" (Fig. 10: graph, agents, budget),
            "spread" (how far gradients are apart at the start, for a gap that would hold).
        agents: Agents n.
        probability: Edge probability of the random graph; it rises to 2 log n / n where less would
            hardly connect n agents.
        graph_seed: First seed tried for a connected one.
        batch_size: Records an agent draws each round.
        rounds: Rounds.
        gamma: First step size.
        beta: Weight of disagreement.
        q1: Decay of the steps.
        q2: Decay of the noise.
        epsilon: Budgets of the sweep over gaps.
        gaps: Gaps between gradients, in L1.
        modes: "assumed", as in the paper, or "clipped".
        gap: Of the comparison of methods and of networks.
        at_epsilon: Budget of the comparison of methods.
        smoothness: Of gradients, assumed for PP-DOAGT and Diff-TV-AB, in L1 over L1.
        gammas: First step sizes of the border.
        betas: Weights of the border.
        border_rounds: Rounds of the border.
        graphs: Graphs of Fig. 10.
        sizes: Numbers of agents of Fig. 10.
        budgets: Budgets of Fig. 10.
        pairs: Pairs of gradients of the spread, at most.
        seeds: Seeds.
        measurements: How often a run is measured.
        records: Use only that many training records; 0 is all.
        test_records: Measure on only that many test records; 0 is all.
        train_records: Measure on that many training records, too; None is on none.
    """

    dataset: str = "mnist"
    model: str = "cnn2"
    layout: Literal["conv", "patches"] = "conv"
    parts: tuple[str, ...] = PARTS
    agents: int = 100
    probability: float = 0.1
    graph_seed: int = 0
    batch_size: int = 16
    rounds: int = 3000
    gamma: float = 0.001
    beta: float = 100.0
    q1: float = 0.998
    q2: float = 0.999
    epsilon: tuple[float, ...] = (1.0, 10.0)
    gaps: tuple[float, ...] = (1.0, 0.1, 0.01, 0.001, 0.0001)
    modes: tuple[Literal["assumed", "clipped"], ...] = ("assumed", "clipped")
    gap: float = 0.001
    at_epsilon: float = 1.0
    smoothness: float = 1.0
    gammas: tuple[float, ...] = (0.001, 0.005, 0.01, 0.05, 0.1)
    betas: tuple[float, ...] = (0.1, 1.0, 10.0, 100.0, 1000.0)
    border_rounds: int = 3000
    graphs: tuple[Literal["ring", "er"], ...] = ("ring", "er")
    sizes: tuple[int, ...] = (50, 100)
    budgets: tuple[float, ...] = (0.1, 0.5, 1.0, 5.0, 10.0)
    pairs: int = 20
    seeds: tuple[int, ...] = (0, 1, 2)
    measurements: int = 20
    records: int = 0
    test_records: int = 0
    train_records: int | None = None


PRESETS = {
    "tiny": Config(
        dataset="digits", model="mlp", agents=4, probability=0.6, rounds=12, gamma=0.05, beta=2.0,
        q1=0.9, q2=0.95, batch_size=8, epsilon=(1.0,), gaps=(0.01,), gammas=(0.05,),
        betas=(1.0, 1000.0), border_rounds=12, sizes=(4,), graphs=("ring",), budgets=(1.0,),
        pairs=4, seeds=(0,), measurements=2, records=200, train_records=50,
    ),
    "cpu": Config(
        model="small_cnn", layout="patches",
        agents=20, probability=0.3, rounds=240, gamma=0.1, beta=2.0, q1=0.99, q2=0.995,
        gaps=(1.0, 0.01, 0.0001), gammas=(0.01, 0.1, 0.5), betas=(1.0, 10.0, 100.0),
        border_rounds=60, sizes=(20, 50), budgets=(0.5, 10.0), measurements=4,
        test_records=1000,
    ),
    "long": Config(
        model="small_cnn", layout="patches", parts=("gaps", "methods", "networks"),
        gamma=0.1, beta=2.0, q1=0.998, q2=0.999, epsilon=(1.0,), gaps=(0.001,), sizes=(100,),
        budgets=(0.5, 10.0), test_records=1000, train_records=1000,
    ),
    "gpu": Config(seeds=(0,), sizes=(50, 100)),
    "full": Config(),
}  # fmt: skip


def check(config: Config) -> None:
    """Refuse options that no run could use, before any work."""
    minimum = {"agents": 2, "rounds": 2, "border_rounds": 2, "sizes": 2}
    launch.check(config, minimum, known={"parts": PARTS})
    datasets.check(config.dataset, images=True)
    laplace.decays(config.q1, config.q2)


def network(config: Config, kind: str, agents: int) -> Any:
    """A mixing matrix."""
    if kind == "ring":
        return mixing.metropolis_hastings(graphs.ring(agents))
    likely = max(config.probability, min(1.0, 2 * math.log(agents) / agents))
    return mixing.metropolis_hastings(graphs.erdos_renyi(agents, likely, config.graph_seed))


@functools.cache
def read(config: Config) -> images.Images:
    """The data set, of whose records every agent has a batch at least."""
    frame = images.read(config.dataset, config.model, config.layout, records=config.records)
    minimum = config.batch_size
    maximum = len(frame.train[1])
    argument = {"sizes": config.sizes} if "networks" in config.parts else {}
    for name, agents in ({"agents": (config.agents,)} | argument).items():
        if max(agents, default=0) * minimum > maximum:
            raise ValueError(
                f"{name} holds {max(agents)}, a batch of {minimum} each, and there are "
                f"{maximum} records; give at most {maximum // minimum} agents, smaller "
                "batches or more records"
            )
    return frame


@functools.cache
def task(config: Config, agents: int) -> Problem:
    """The classifier over agents, its records dealt evenly."""
    frame = read(config)
    shards = partition.iid(len(frame.train[1]), agents, 0)
    x, y = (part[: config.test_records or None] for part in frame.test)
    problem = supervised(
        frame.model, "cross_entropy", frame.train, (x, y), shards, name=config.dataset
    )
    if config.train_records is None:
        return problem
    observed = tuple(part[: config.train_records] for part in frame.train)

    def metrics(models: Any, evaluation: Any) -> dict[str, Any]:
        test, train = (problem.metrics(models, part) for part in evaluation)
        return test | {name.replace("test_", "train_"): value for name, value in train.items()}

    return replace(problem, metrics=metrics, evaluation=((x, y), observed))


def config_of(
    config: Config, method: str = "tracking", *, epsilon: float | None, gap: float, mode: str,
    gamma: float | None = None, beta: float | None = None, rounds: int | None = None,
    smoothness: float | None = None,
) -> plan.Config:  # fmt: skip
    """The config of a method at a budget; no epsilon is no noise."""
    result = {
        "tracking": Tracking(beta or config.beta), "dpop": DPOP(), "pp_doagt": PPDOAGT(),
        "diff_tv_ab": DiffTVAB(),
    }[method]  # fmt: skip
    bound: dict[str, Any] = {"gradient_gap": gap, "smoothness": smoothness}
    if mode == "clipped":
        bound = {"clip_norm": gap / 2}
    return plan.Config(
        method=result,
        noise=None if epsilon is None else scheduled.ScheduledLaplace(config.q2),
        budget=None if epsilon is None else protect.Budget(epsilon, accountant="pure"),
        protect=protect.Protect("replace_agent", norm="l1", **bound),
        sampler=samplers.Random(config.batch_size),
        optimizer=Sgd(gamma or config.gamma, decay=config.q1),
        rounds=rounds or config.rounds,
    )  # fmt: skip


def same_noise(config: Config, method: str, matrix: Any) -> plan.Plan:
    """A rival with the noise of tracking, at whatever that costs it."""
    options: dict[str, Any] = {"gap": config.gap, "mode": "assumed"}
    mine = plan.make(config_of(config, epsilon=config.at_epsilon, **options), matrix)
    options["smoothness"] = config.smoothness
    bare = config_of(config, method, epsilon=1.0, **options)
    spent = scheduled.cost(bare, matrix, float(mine.noise.scales[0]))
    return plan.make(config_of(config, method, epsilon=spent, **options), matrix)


def cells(config: Config) -> list[tuple[str, dict[str, Any], Any, Any]]:
    """Name, columns, network and plan of every cell."""
    results = []
    matrix = network(config, "er", config.agents)
    if "gaps" in config.parts:
        for mode, gap, epsilon in itertools.product(config.modes, config.gaps, config.epsilon):
            argument = config_of(config, epsilon=epsilon, gap=gap, mode=mode)
            columns = {"part": "gaps", "mode": mode, "gap": gap, "setting": epsilon}
            results.append((f"gap_{mode}_{gap:g}_{epsilon:g}", columns, matrix, argument))
        bare = config_of(config, epsilon=None, gap=1.0, mode="assumed")
        columns = {"part": "gaps", "mode": "no noise", "gap": 0.0, "setting": 0.0}
        results.append(("gap_none", columns, matrix, bare))
    if "methods" in config.parts:
        for method in METHODS:
            columns = {"part": "methods", "mode": "assumed", "gap": config.gap}
            columns |= {"algorithm": method, "setting": config.at_epsilon}
            columns |= {"assumed_smoothness": config.smoothness}
            argument: Any = functools.partial(same_noise, config, method, matrix)
            if method in ("tracking", "dpop"):
                argument = config_of(
                    config, method, epsilon=config.at_epsilon, gap=config.gap, mode="assumed"
                )
            results.append((f"method_{method}", columns, matrix, argument))
    if "border" in config.parts:
        for gamma, beta in itertools.product(config.gammas, config.betas):
            argument = config_of(
                config, epsilon=None, gap=1.0, mode="assumed", gamma=gamma, beta=beta,
                rounds=config.border_rounds,
            )  # fmt: skip
            columns = {"part": "border", "mode": "no noise", "gap": 0.0, "setting": 0.0}
            columns |= {"gamma": gamma, "beta": beta}
            results.append((f"border_{gamma:g}_{beta:g}", columns, matrix, argument))
    if "networks" in config.parts:
        product = itertools.product(config.graphs, config.sizes, config.budgets)
        for kind, agents, epsilon in product:
            argument = config_of(config, epsilon=epsilon, gap=config.gap, mode="assumed")
            columns = {"part": "networks", "mode": "assumed", "gap": config.gap}
            columns |= {"graph": kind, "setting": epsilon}
            name = f"network_{kind}_{agents}_{epsilon:g}"
            results.append((name, columns, network(config, kind, agents), argument))
    return results


def train(
    config: Config, columns: dict[str, Any], matrix: Any, value: Any, lab: launch.Lab, folder: Path
) -> list[dict[str, Any]]:
    """One run of every seed."""
    read(config)  # Refuses before the first round what a later cell could not run.
    outcome = value() if callable(value) else plan.make(value, matrix)
    rounds = outcome.config.rounds
    result = lab.run(
        outcome, task(config, outcome.agents),
        seeds=config.seeds, eval_every=math.ceil(rounds / config.measurements),
        checkpoint=folder,
    )  # fmt: skip
    lab.say(f"  {result.rounds_per_second:.2f} rounds/s")
    rest = dict(columns)
    method = rest.pop("algorithm", "tracking")
    return result.rows(design=method, rounds=rounds, **rest)


def spread(config: Config, folder: Path) -> list[dict[str, Any]]:
    """How far gradients are apart in L1 at the models that runs start from."""
    del folder
    result = task(config, config.agents)
    rows = []
    shards = [part[:count] for part, count in zip(*result.partition[:2], strict=True)]
    gradient = jax.jit(jax.grad(result.batch_loss))

    def of(params: Any, records: np.ndarray) -> np.ndarray:
        """Mean gradient of some records, few at a time."""
        total = 0.0
        for part in np.array_split(records, -(-len(records) // 50)):
            leaves = jax.tree.leaves(gradient(params, result.x[part], result.y[part]))
            total = total + len(part) * np.concatenate(
                [np.ravel(leaf).astype(np.float64) for leaf in leaves]
            )
        return total / len(records)

    for seed in config.seeds:
        params = result.init(keys.derive(seed, "initial"))
        random = np.random.default_rng(seed)
        deals = [
            random.choice(len(result.y), (2, config.batch_size), replace=False)
            for _ in range(config.pairs)
        ]
        batches = [[of(params, records) for records in deal] for deal in deals]
        second = random.permutation(list(itertools.combinations(range(len(shards)), 2)))
        complete = {
            agent: of(params, shards[agent]) for agent in set(second[: config.pairs].ravel())
        }
        agents = [[complete[i], complete[j]] for i, j in second[: config.pairs]]
        for compared, size, pairs in (
            ("batches", config.batch_size, batches), ("agents", len(shards[0]), agents),
        ):  # fmt: skip
            differences = [np.abs(item - other).sum() for item, other in pairs]
            rows.append({
                "part": "spread", "compared": compared, "records": size, "pairs": len(differences),
                "apart": np.mean(differences), "least": np.min(differences),
                "largest": np.max(differences),
                "agents": len(shards), "seed": seed,
            })  # fmt: skip
    return rows


def spread_cell(config: Config) -> tuple[str, dict[str, Any], Any]:
    """Name, columns and rows of the spread, which no option of a run decides."""
    decides = (
        "dataset", "model", "layout", "agents", "batch_size", "pairs", "seeds", "records",
    )  # fmt: skip
    columns = {name: getattr(config, name) for name in decides}
    return "spread", columns | {"part": "spread"}, functools.partial(spread, config)


def experiment(config: Config, lab: launch.Lab) -> None:
    """Accuracy of private gradient tracking on digits, over gaps, methods, steps and networks."""
    check(config)
    arguments = []
    for name, columns, matrix, result in cells(config):
        stored = launch.stored(config, *_SWEPT, **columns, agents=len(matrix))
        compute = functools.partial(train, config, columns, matrix, result, lab)
        arguments.append((name, stored, compute))
    frame = lab.cells(arguments, seed=config.seeds)
    if "spread" in config.parts:
        apart = lab.cells([spread_cell(config)], seed=config.seeds)
        lab.say("\nspread: how far gradients at the start are apart, in L1")
        display = apart[["compared", "records", "pairs", "apart", "least", "largest", "seed"]]
        lab.say(tables.text(display.to_dict("records")))
    if arguments:
        report(config, lab, frame[frame["round"] == frame["rounds"]], frame)


_SWEPT = (
    "parts", "epsilon", "gaps", "modes", "gammas", "betas", "graphs", "sizes", "budgets",
    "smoothness", "pairs",
)  # fmt: skip


def report(config: Config, lab: launch.Lab, last: Any, frame: Any) -> None:
    """A table a sweep, and the figures."""
    settings = {
        "gaps": ["mode", "gap", "setting"], "methods": ["design"], "border": ["gamma", "beta"],
        "networks": ["graph", "agents", "setting"],
    }  # fmt: skip
    for part in (name for name in config.parts if name in settings):
        mine = last[last["part"] == part]
        lab.say(f"\n{part}: test accuracy in %, mean and deviation over {len(config.seeds)} seeds")
        rows = []
        for names, group in mine.groupby(settings[part], sort=False):
            named = names if isinstance(names, tuple) else (names,)
            row = dict(zip(settings[part], named, strict=True))
            row |= {"accuracy": 100 * group["test_accuracy"].mean()}
            if len(config.seeds) > 1:
                row |= {"deviation": 100 * group["test_accuracy"].std()}
            row |= {"loss": group["test_loss"].mean(), "consensus": group["consensus"].mean()}
            stated = group["guarantee"].iloc[0]
            rows.append(row | {"epsilon": float(stated["epsilon"])})
        lab.say(tables.text(rows))
    if "methods" in config.parts:
        draw_methods(config, lab, frame[frame["part"] == "methods"])
    if "border" in config.parts:
        draw_border(config, lab, last[last["part"] == "border"])


def draw_methods(config: Config, lab: launch.Lab, curves: Any) -> None:
    """Accuracy over rounds, a line a method."""
    figure, panels = plots.figure(1, 1)
    plots.lines(
        looks.percent(curves), "round", "points", ax=panels[0], xlabel="round",
        ylabel=looks.accuracy(config.dataset), title=f"gap {config.gap:g} assumed",
        looks=looks.LOOKS,
    )  # fmt: skip
    note = (
        "DPOP has tracking's epsilon, PP-DOAGT and Diff-TV-AB its noise; all three reconstructed."
    )
    lab.figure(figure, f"tracking_mnist{lab.suffix}.svg", note=note)


def draw_border(config: Config, lab: launch.Lab, rows: Any) -> None:
    """Accuracy over beta and over gamma beta, a line a gamma: where runs still converge."""
    rows = looks.percent(rows).assign(
        product=(rows["gamma"] * rows["beta"]).round(9),
        first=rows["gamma"].map("gamma {:g}".format),
    )
    figure, panels = plots.figure(1, 2, sharey=True)
    for ax, x, label in zip(panels, ("beta", "product"), ("beta", "gamma times beta"), strict=True):
        plots.lines(
            rows, x, "points", "first", ax=ax, xlabel=label, log_x=True, guarantee=[],
            ylabel=looks.accuracy(config.dataset),
        )  # fmt: skip
    panels[1].axvline(1, color="grey", linewidth=0.8)
    note = f"Without noise, {config.border_rounds} rounds. The grey line is the paper's border."
    lab.figure(figure, f"tracking_mnist_border{lab.suffix}.svg", note=note)


main = functools.partial(launch.main, "tracking_mnist", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
