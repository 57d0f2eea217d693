"""Low-pass filters at every agent of decentralized SGD, under noise of several kinds.

The agents of a network hold parts of a data set; every record takes part once an epoch, in a fixed
order, and its gradient is clipped. Each agent filters its own private gradients over rounds before
it sends its model: one link of its optimizer, the same guarantee. Compared are filters under noise
that is independent, cancels over agents (Whisper) or cancels over rounds (MAFALDA), each pair at
its own step size, on the same splits, batches and initial models.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import launch, looks, tables, tune
from dpjax.accounting.guarantee import Guarantee
from dpjax.contrib import datasets
from dpjax.contrib.rules import UpdateRule, read_filter
from dpjax.data import partition, split
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.plans import noise, plan, protect
from dpjax.results import plots
from dpjax.topology import graphs, mixing

__all__ = ["PRESETS", "Config", "experiment", "main"]

DESIGNS = noise.LABELS[1:]
"""All but no noise: budgets are given."""


@dataclass(frozen=True)
class Config:
    """What is trained, where, with which filters and noises.

    Attributes:
        dataset: Images, as `dpjax.contrib.datasets.check` takes them.
        records: Use only that many training records; 0 is all.
        agents: Number of agents.
        probability: Edge probability of the random graph.
        graph_seed: First seed tried for a connected graph.
        filters: 'none', the published 'momentum', 'first v1', 'first v2', 'second' and 'f1' to
            'f6', 'adaptive' or 'wiener' (learned at every agent, unit gain), or coefficients
            "b_0,b_1,..;a_1,..", as `dpjax.contrib.rules.read_filter` takes them.
        designs: Noise designs: 'independent', 'pairwise', 'whisper', 'whisper_horizon', 'anti_pgd',
            'prefix_sum', 'mafalda', 'spacetime', 'banded_inverse', 'one_step'.
        epsilon: Budgets.
        delta: Target delta.
        epochs: How often every record takes part, k.
        separation: Batches of an epoch, b; rounds are k b.
        clip_norm: Clip norm of one record's gradient.
        hidden: Width of the hidden layer.
        steps: Step sizes to tune over.
        seeds: Seeds of the reported runs.
        tuning_seeds: Seeds of the tuning runs; none of ``seeds``.
        validation: Fraction of the training records held out while tuning.
        measurements: How often the reported runs are measured.
    """

    dataset: str = "mnist"
    records: int = 6_000
    agents: int = 12
    probability: float = 0.3
    graph_seed: int = 0
    filters: tuple[str, ...] = ("none", "momentum", "first v1", "wiener")
    designs: tuple[str, ...] = ("independent", "whisper", "mafalda")
    epsilon: tuple[float, ...] = (8.0,)
    delta: float = 1e-5
    epochs: int = 12
    separation: int = 10
    clip_norm: float = 1.0
    hidden: int = 32
    steps: tuple[float, ...] = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)
    seeds: tuple[int, ...] = tuple(range(5))
    tuning_seeds: tuple[int, ...] = (100, 101)
    validation: float = 0.2
    measurements: int = 12

    def __post_init__(self) -> None:
        """Refuse what could not be run to its end, or would not be a fair comparison."""
        launch.check(self, known={"designs": DESIGNS})
        datasets.check(self.dataset, images=True)
        for name in self.filters:
            read_filter(name)

    @property
    def rounds(self) -> int:
        """Rounds T."""
        return self.epochs * self.separation


PRESETS = {
    "tiny": Config(
        dataset="digits", records=400, agents=4, probability=0.7, filters=("none", "first v1"),
        designs=("mafalda",), epsilon=(8.0,), epochs=3, separation=4, hidden=8, steps=(2.0, 1.0),
        seeds=(0, 1), tuning_seeds=(100,), measurements=3,
    ),
    "cpu": Config(),
    "full": Config(
        records=0, agents=20, epochs=20, separation=50, seeds=tuple(range(10)),
        tuning_seeds=(100, 101, 102), epsilon=(1.0, 2.0, 4.0, 8.0), measurements=20,
        filters=("none", "momentum", "first v1", "first v2", "second", "wiener"),
        designs=("independent", "whisper", "whisper_horizon", "mafalda", "spacetime"),
    ),
}  # fmt: skip


def train(
    config: Config, design: str, name: str, lab: launch.Lab, folder: Path
) -> list[dict[str, Any]]:
    """Tune and run one filter under one noise at every budget; rows of both phases."""
    train, test, model, loss = datasets.flat(config.dataset, config.hidden, config.records)
    graph = graphs.erdos_renyi(config.agents, config.probability, config.graph_seed)
    matrix = mixing.metropolis_hastings(graph)
    # One rule: plans of one run share it.
    optimizer = UpdateRule(filter=read_filter(name)).chain(1.0)

    def learn(train: Any, test: Any) -> Problem:
        shards = partition.iid(len(train[1]), config.agents, 0)
        return supervised(model, loss, train, test, shards, name=config.dataset)

    def plans(epsilon: float, steps: tuple[float, ...], count: int) -> list[plan.Plan]:
        largest = -(-count // config.agents)
        base = plan.Config(
            noise=noise.named(design),
            budget=protect.Budget(epsilon, config.delta),
            protect=protect.Protect("zero_out_record", clip_norm=config.clip_norm),
            sampler=samplers.Cyclic(
                config.epochs, config.separation, -(-largest // config.separation)
            ),
            optimizer=optimizer,
            rounds=config.rounds,
        )
        return tune.grid(base, steps, matrix)

    fit, validation = split.split(*train, config.validation, seed=0)
    tasks = (learn(fit, validation), learn(train, test))
    rows = []
    for epsilon in config.epsilon:
        trial = tune.Trial(name, config.steps, functools.partial(plans, epsilon))
        place = folder / f"{epsilon:g}"
        best = tune.best_step([trial], tasks, config, lab, place, measurements=config.measurements)
        rows += best.rows(filter=name, dataset=config.dataset, budget_epsilon=epsilon)
    return rows


def experiment(config: Config, lab: launch.Lab) -> None:
    """Filter private gradients at every agent of a network, under noise of several kinds."""
    cells = []
    for name in config.filters:
        for design in config.designs:
            stored = launch.stored(config, "designs", "filters", design=design, filter=name)
            compute = functools.partial(train, config, design, name, lab)
            cells.append((f"{design}_{name.replace(' ', '_')}", stored, compute))
    report(config, lab, lab.cells(cells, seed=config.seeds))


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Print the tables and draw the figure from the records."""
    final = frame[frame["phase"] == "final"].copy()
    last = final[final["round"] == config.rounds]
    for epsilon, rows in last.groupby("budget_epsilon", sort=False):
        lab.say(f"\n{config.dataset}, epsilon {epsilon:g}, {rows['seed'].nunique()} seeds:")
        table = tables.summary(rows, ["design", "filter", "step_size"], "test_accuracy")
        table["test_loss"] = tables.summary(rows, ["design", "filter"], "test_loss")["mean"]
        table["design"] = [plots.TITLES[name] for name in table["design"]]
        lab.say(tables.text(table.rename(columns={"mean": "test_accuracy", "count": "seeds"})))
        pairs = differences(config, rows)
        if pairs:
            lab.say("accuracy gained, paired over seeds:\n" + tables.text(pairs))
        lab.say_ends(
            tables.at_ends(frame[frame["budget_epsilon"] == epsilon], ["design", "filter"])
        )
    for _, first in last.drop_duplicates("design").iterrows():
        stated = Guarantee.from_dict(first["guarantee"])
        lab.say(f"\n{plots.TITLES[first['design']]}: {stated.statement()}")
    draw(config, lab, final)


def differences(config: Config, rows: Any) -> list[dict[str, Any]]:
    """Every filter against none under the same noise, every noise against independent noise."""
    rows = rows.assign(pair=rows["design"] + " + " + rows["filter"])
    present = set(rows["pair"])
    expected = [(d, f, d, "none") for d in config.designs for f in config.filters if f != "none"]
    expected += [
        (d, f, "independent", f) for d in config.designs for f in config.filters
        if d != "independent"
    ]  # fmt: skip
    results = []
    for design, name, other, theirs in expected:
        better = f"{design} + {name}"
        worse = f"{other} + {theirs}"
        if {better, worse} <= present:
            # Larger is better here: the claim is on what is missed.
            pair = tables.paired(rows, worse, better, "test_accuracy", column="pair")
            better = f"{plots.TITLES[design]} + {name}"
            worse = f"{plots.TITLES[other]} + {theirs}"
            results.append({"of": better, "over": worse, **pair.row()})
    return results


def draw(config: Config, lab: launch.Lab, final: Any) -> None:
    """One panel a noise and budget: accuracy over rounds, a line a filter."""
    kinds = [d for d in config.designs if d in set(final["design"])]
    sheet, axes = plots.figure(len(config.epsilon), len(kinds), sharey="row")
    places = [(epsilon, design) for epsilon in config.epsilon for design in kinds]
    for ax, (epsilon, design) in zip(axes, places, strict=True):
        rows = final[(final["budget_epsilon"] == epsilon) & (final["design"] == design)]
        plots.lines(
            looks.percent(rows), "round", "points", "filter", ax=ax,
            ylabel=looks.accuracy(config.dataset),
            title=f"{plots.TITLES[design]}, epsilon {epsilon:g}", looks=looks.LOOKS,
        )  # fmt: skip
    lab.figure(sheet, "doppler_decentralised.svg")


main = functools.partial(launch.main, "doppler_decentralised", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
