"""Private regression over a network with noise correlated over rounds: Figs. 3-5 of MAFALDA-SGD.

The agents of a social network hold parts of California housing and train a small network with
decentralized SGD; every record takes part once an epoch, in a fixed order, and its gradient is
clipped. At each privacy level the designs are compared on the same splits, models and raw noise:
fresh noise ("independent"), noise that cancels over rounds ("anti_pgd", "prefix_sum", "mafalda"),
and noise that cancels over agents and rounds ("spacetime"), whose shared seed defends from
outsiders only.

On a smaller graph agents hold more records. Preset cpu_batches leaves the small one as many for an
agent as the large one has, so that graphs differ and batches do not.

The presets cpu and full have the paper's sizes and two of its three graphs: PeerTube is not here,
and ``--graphs FILE`` takes its edge list. The authors' code takes it from fedivertex: software
peertube, follow graph 1, largest component.
"""

import dataclasses
import functools
import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from _common import launch, looks, tables
from dpjax.accounting import gdp
from dpjax.accounting.guarantee import Guarantee
from dpjax.data import load, partition, split
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.models.mlp import MLP
from dpjax.plans import noise, optimizers, plan, protect
from dpjax.results import plots
from dpjax.topology import graphs, mixing

__all__ = ["PRESETS", "Config", "experiment", "main"]

DESIGNS = ("non_private", "independent", "anti_pgd", "prefix_sum", "mafalda", "spacetime")
LABELS = {name: plots.TITLES[name] for name in DESIGNS}
"""Designs in the order of the tables."""

MIXING = {
    "uniform_neighbors": mixing.uniform_neighbors,
    "metropolis_hastings": mixing.metropolis_hastings,
}


@dataclass(frozen=True)
class Config:
    """What is trained, where, and at which privacy.

    Attributes:
        graphs: Networks, as `dpjax account --graph` takes them: by name, or files of edge lists.
            The authors' PeerTube is fedivertex, software peertube, follow graph 1, largest
            component.
        mixing: How agents average: uniform_neighbors (row-normalised with self-loops, the paper's
            code) or metropolis_hastings.
        designs: Noise designs.
        mu: Gaussian-DP levels.
        delta: Delta at which epsilon is printed.
        relation: What is protected: a record zeroed out (the paper's), or replaced.
        epochs: How often every record takes part, k.
        separation: Batches of an epoch, b; rounds are k b.
        step_size: Constant step size.
        clip_norm: Clip norm of one record's gradient.
        hidden: Width of the hidden layer.
        seeds: Each decides split, partition, initial model and noise.
        together: Seeds vmapped in one call; a CPU gains nothing from more than one.
        every: Rounds between two measurements.
        tail: Last rounds over which the loss is averaged.
        level: Test loss at which designs are compared by the epsilon they need.
        at_mu: Level whose course over rounds is drawn.
        records: Use only that many records; 0 is all.
    """

    graphs: tuple[str, ...] = ("facebook_ego", "florentine")
    mixing: Literal["uniform_neighbors", "metropolis_hastings"] = "uniform_neighbors"
    designs: tuple[str, ...] = tuple(LABELS)
    mu: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
    delta: float = 1e-6
    relation: Literal["zero_out_record", "replace_record"] = "zero_out_record"
    epochs: int = 20
    separation: int = 19
    step_size: float = 0.1
    clip_norm: float = 1.0
    hidden: int = 64
    seeds: tuple[int, ...] = tuple(range(20))
    together: int = 1
    every: int = 10
    tail: int = 50
    level: float = 0.75
    at_mu: float = 0.5
    records: int = 0

    def __post_init__(self) -> None:
        """Refuse a config without anything to run."""
        launch.check(self, {"hidden": 0}, known={"designs": LABELS})

    @property
    def drawn(self) -> float:
        """The level whose course is drawn."""
        return self.at_mu if self.at_mu in self.mu else self.mu[0]

    @property
    def rounds(self) -> int:
        """Rounds T."""
        return self.epochs * self.separation


PRESETS = {
    "tiny": Config(
        graphs=("florentine",), mu=(0.5, 5.0), epochs=4, separation=5, seeds=(0, 1), together=2,
        every=4, tail=8, records=1500,
    ),
    "cpu": Config(),
    "cpu_batches": Config(
        graphs=("florentine",), designs=("non_private", "independent", "mafalda"),
        mu=(0.5, 1.0, 2.0), records=2092, seeds=tuple(range(40)),
    ),
    "full": Config(every=5, together=20),
}  # fmt: skip


def networks(config: Config) -> dict[str, np.ndarray]:
    """The mixing matrices by network; a file's network has the name of the file.

    Raises:
        ValueError: Naming a file that is no connected network, or whose name another network has.
    """
    results: dict[str, np.ndarray] = {}
    for spec in config.graphs:
        name = Path(spec).stem if os.path.isfile(spec) else spec
        if name in results:
            raise ValueError(f"graphs holds {spec!r}, another network {name!r}; rename the file")
        try:
            results[name] = MIXING[config.mixing](graphs.parse(spec))
        except ValueError as error:
            raise ValueError(f"graphs holds {spec!r}: {error}") from None
    return results


def learn(config: Config, agents: int, seed: int) -> Problem:
    """The data of one seed: split, dealt to the agents at random, and the network to train."""
    data = load.load("housing")
    x, _ = split.standardise(data.x_train, data.x_train)
    x, y = (part[: config.records or None] for part in (x, data.y_train))
    train, test = split.split(x, y, 0.2, seed=seed)
    shards = partition.iid(len(train[1]), agents, seed)
    model = MLP(hidden=(config.hidden,), outputs=None, activation="relu")
    return supervised(model, "squared", train, test, shards, name="housing")


def plans(config: Config, design: str, matrix: Any, counts: np.ndarray) -> list[plan.Plan]:
    """A plan for every mu; one where there is no noise."""
    places = -(-int(counts.max()) // config.separation)
    base = plan.Config(
        protect=protect.Protect(config.relation, clip_norm=config.clip_norm),
        sampler=samplers.Cyclic(config.epochs, config.separation, places),
        optimizer=optimizers.Sgd(config.step_size),
        rounds=config.rounds,
    )
    if design == "non_private":
        return [plan.make(base, matrix)]
    levels = [protect.Budget(gdp.epsilon(mu, config.delta), config.delta) for mu in config.mu]
    part = noise.named(design)
    return [
        plan.make(dataclasses.replace(base, noise=part, budget=level), matrix) for level in levels
    ]


def train(
    config: Config, graph: str, matrix: np.ndarray, design: str, lab: launch.Lab, folder: Path
) -> list[dict[str, Any]]:
    """Run one design on one graph; every seed has a split of its own."""
    results: list[plan.Plan] = []
    rows = []
    rates = []
    for first in range(0, len(config.seeds), config.together):
        seeds = config.seeds[first : first + config.together]
        data = [learn(config, len(matrix), seed) for seed in seeds]
        # Shares differ by one at most: the same sizes for every seed.
        results = results or plans(config, design, matrix, data[0].partition.counts)
        result = lab.run(
            results,
            data,
            seeds=seeds,
            eval_every=config.every,
            chunk_blocks=math.ceil(config.rounds / config.every),
            checkpoint=folder / "_".join(map(str, seeds)),
        )
        rates.append(result.rounds_per_second)
        rows += _kept(config, graph, result.rows(graph=called(config, graph), mixing=config.mixing))
    lab.say(f"  {graph}, {LABELS[design]}: {np.nanmedian(rates):,.0f} rounds/s, median of calls")
    return rows


def called(config: Config, graph: str) -> str:
    """A network in records: with fewer records than there are it is another one."""
    return f"{graph}:{config.records}" if config.records else graph


def _kept(config: Config, graph: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last measurement with the mean over the tail, and the course at one level."""
    selection = []
    last: list[float] = []
    for row in rows:
        row["mu"] = _level(config, row["guarantee"])
        tail = row["round"] > config.rounds - config.tail
        last = [*last, row["test_loss"]] if tail else []
        if row["round"] == config.rounds:
            row["tail_loss"] = float(np.mean(last))
            last = []
        drawn = row["mu"] in (config.drawn, math.inf) and row["round"] % (2 * config.every) == 0
        if drawn or row["round"] == config.rounds:
            selection.append(row)
    return selection


def _level(config: Config, guarantee: dict[str, Any]) -> float:
    """The mu asked for: the guarantee's, which is the rounded-up one of the noise that is run."""
    if guarantee["relation"] is None:
        return math.inf
    return min(config.mu, key=lambda mu: abs(math.log(mu / guarantee["mu"])))


def experiment(config: Config, lab: launch.Lab) -> None:
    """Train on California housing over a network under noise correlated over rounds."""
    cells = []
    for graph, matrix in networks(config).items():
        # A file may change, a name may not.
        own = {} if graph in config.graphs else {"fingerprint": mixing.fingerprint(matrix)}
        for design in config.designs:
            listed = ("graphs", "designs", "level", "together")
            stored = launch.stored(config, *listed, graph=graph, design=design, **own)
            compute = functools.partial(train, config, graph, matrix, design, lab)
            cells.append((launch.file_name(f"{called(config, graph)}_{design}"), stored, compute))
    report(config, lab, lab.cells(cells, seed=config.seeds))


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Print the tables and draw the figures from the records."""
    last = frame[frame["round"] == config.rounds]
    for graph, rows in last.groupby("graph", sort=False):
        for mu in config.mu:
            epsilon = gdp.epsilon(mu, config.delta)
            selection = rows[(rows["mu"] == mu) | (rows["design"] == "non_private")]
            lab.say(f"\n{graph}, mu {mu:g} (epsilon {epsilon:.4g} at delta {config.delta:g}):")
            lab.say(tables.text(losses(selection)))
            for column, name in MEASURES.items():
                if pairs := differences(selection, column):
                    title = f"MAFALDA against others, {name}, paired over seeds:\n"
                    lab.say(title + tables.text(pairs))
        needed(config, lab, rows)
    private = last[last["design"] != "non_private"]
    for _, first in private.drop_duplicates("design").iterrows():
        stated = Guarantee.from_dict(first["guarantee"])
        lab.say(f"\n{LABELS[first['design']]}: {stated.statement()}")
    draw(config, lab, frame, last)


MEASURES = {"test_loss": "final test loss", "tail_loss": "test loss over the last rounds"}
"""The paper plots the first against epsilon, and states its gain at one budget by the second."""


def losses(rows: Any) -> list[dict[str, Any]]:
    """Test loss at the end and over the last rounds, by design."""
    final = tables.summary(rows, "design", "test_loss")
    tail = tables.summary(rows, "design", "tail_loss")
    medians = rows.groupby("design")["tail_loss"].median()
    return [
        {
            "design": LABELS[end["design"]],
            "final test loss": end["mean"],
            "standard error": end["standard error"],
            "last rounds": over["mean"],
            "median over seeds": medians[end["design"]],
            "seeds": end["count"],
        }
        for (_, end), (_, over) in zip(final.iterrows(), tail.iterrows(), strict=True)
    ]


def differences(rows: Any, column: str) -> list[dict[str, Any]]:
    """How much smaller a loss of MAFALDA's is than each other design's."""
    present = [name for name in LABELS if name in set(rows["design"])]
    if "mafalda" not in present:
        return []
    mean = rows[rows["design"] == "mafalda"][column].mean()
    rows_of_pairs = []
    for name in present:
        if name in ("mafalda", "non_private"):
            continue
        pair = tables.paired(rows, "mafalda", name, column)
        theirs = rows[rows["design"] == name][column].mean()
        gain = 100 * (1 - mean / theirs)
        rows_of_pairs.append({"against": LABELS[name], "gain in %": gain, **pair.row()})
    return rows_of_pairs


def needed(config: Config, lab: launch.Lab, rows: Any) -> None:
    """Print which epsilon each design needs for the level, and its ratio to MAFALDA's.

    Of the mean over seeds and of the median: some splits put the few houses with absurd features
    into the test part, whose squared errors rule the mean.
    """
    for mode, column in itertools.product(("mean", "median"), MEASURES):
        epsilons = {}
        for name in LABELS:
            own = rows[(rows["design"] == name) & np.isfinite(rows["mu"])]
            if len(own):
                losses = own.groupby("mu")[column].agg(mode)
                mu = crossing(list(losses.index), list(losses), config.level)
                epsilons[name] = math.nan if mu is None else float(gdp.epsilon(mu, config.delta))
        base = epsilons.get("mafalda", math.nan)
        table = [
            {"design": LABELS[name], "epsilon": value, "times MAFALDA's": value / base}
            for name, value in epsilons.items()
        ]
        if table:
            lab.say(
                f"\nepsilon for a {mode} {MEASURES[column]} of {config.level:g} (nan: not reached "
                "between levels)"
            )
            lab.say(tables.text(table))


def crossing(mus: list[float], values: list[float], level: float) -> float | None:
    """The mu from which the loss stays below a level, by interpolation of logarithms."""
    below = [value <= level for value in values]
    if not below[-1] or all(below):
        return None
    first = max(index for index, met in enumerate(below) if not met)
    x = np.log(mus[first : first + 2])
    y = np.log(values[first : first + 2])
    return float(np.exp(x[0] + (math.log(level) - y[0]) / (y[1] - y[0]) * (x[1] - x[0])))


ALIKE = ("florentine",)
"""Graphs on which all designs but anti-PGD have one curve over rounds, which is not drawn."""

CUT = 6.0
"""Largest loss that figures show: the paper says of its Fig. 3 that anti-PGD is always above it."""


def cut(ax: Any, rows: Any, x: str, y: str) -> str:
    """End the axis of losses at `CUT`, and say what is above."""
    means = rows.groupby(["design", x], sort=False)[y].mean()
    above = means[means > CUT]
    if len(above) in (0, len(means)):
        return ""
    ax.set_ylim(0.95 * means.min(), CUT)
    largest = above.groupby("design", sort=False).max()
    texts = [f"{LABELS[name]}, {float(f'{v:.3g}'):,.10g} at most" for name, v in largest.items()]
    return f"Losses above {CUT:g} are cut off: {'; '.join(texts)}."


def draw(config: Config, lab: launch.Lab, frame: Any, last: Any) -> None:
    """Figures: the loss over privacy, and over rounds at one level."""
    note = "Space and time share a seed: they defend from outsiders only."
    position = config.drawn
    epsilons = {mu: gdp.epsilon(mu, config.delta) for mu in config.mu} | {math.inf: math.inf}
    last = last.assign(stated=last["mu"].map(epsilons))
    for graph, own in last.groupby("graph", sort=False):
        course = frame[(frame["graph"] == graph) & frame["mu"].isin([position, math.inf])]
        for name, rows, x, label, loss in (
            ("privacy", own, "stated", "epsilon", "final test loss"),
            ("rounds", course, "round", f"round (epsilon {epsilons[position]:.3g})", "test loss"),
        ):
            if name == "rounds" and graph in ALIKE:
                continue
            sheet, (ax,) = plots.figure()
            above = cut(ax, rows, x, "test_loss")
            # Far above the panel viewers lose precision; a mean with a clipped seed stays above it.
            near = rows.assign(test_loss=rows["test_loss"].clip(upper=1000 * CUT))
            plots.lines(
                near,
                x,
                "test_loss",
                ax=ax,
                xlabel=label,
                ylabel=f"{loss} ({looks.words(graph)})",
                log_x=x == "stated",
                log_y=x == "round",
                note=" ".join([above, note if "spacetime" in config.designs else ""]).strip(),
            )
            lab.figure(sheet, f"mafalda_housing_{launch.file_name(graph)}_{name}.svg")


main = functools.partial(launch.main, "mafalda_housing", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
