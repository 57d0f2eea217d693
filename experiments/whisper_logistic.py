"""Logistic regression over a network, with noise designs compared at equal guarantee.

Twenty agents hold parts of a data set and train with decentralized SGD. For every privacy budget
and graph the designs (none, independent, pairwise, Whisper for one step and for the whole run) are
tuned over step sizes on other seeds and a validation split, then trained and tested: Fig. 3 of the
Whisper paper. The presets cpu and full have the paper's sizes, on the files' own split, preset
graphs ten graphs, on each of which steps are tuned anew.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from _common import launch, tables, tune
from dpjax.accounting.guarantee import Guarantee
from dpjax.contrib import coupling, datasets
from dpjax.data import load, partition, split
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.plans import noise, optimizers, plan, protect
from dpjax.results import plots
from dpjax.topology import graphs, mixing

__all__ = ["PRESETS", "Config", "experiment", "main"]


DESIGNS = ("non_private", "independent", "pairwise", "whisper", "whisper_horizon")
"""Designs over agents."""


@dataclass(frozen=True)
class Config:
    """What is trained, on what, and at which budgets.

    Attributes:
        dataset: A name that `dpjax.data.load.load` takes, of a file in the data cache too, with
            labels -1 and +1.
        agents: Number of agents.
        epsilon: Budgets; each is run at ``probability[0]``.
        probability: Edge probabilities of the random graph; each is run at ``at_epsilon``.
        at_epsilon: The budget of the sweep over edge probabilities.
        delta: Target delta.
        budgets: How the noise follows from the budget: gdp (exact), rdp, paper. The first has
            both sweeps, the others are run at ``compared``.
        relations: replace_agent (the agent's gradient is clipped) or replace_record (every
            record's is) or zero_out_record. The first has both sweeps.
        compared: Budgets at which the other rules and units are run.
        designs: Noise designs.
        steps: Step sizes to tune over.
        rounds: Rounds.
        clip_norm: Clip norm.
        batch_size: Records an agent draws each round.
        concentration: Dirichlet concentration of each label over the agents.
        seeds: Seeds of the reported runs.
        tuning_seeds: Seeds of the tuning runs; none of ``seeds``.
        validation: Fraction of the training records held out while tuning.
        graph_seed: First seed tried for a connected graph.
        graphs: Number of graphs for each edge probability; each has ``seeds`` of its own.
        measurements: How often the reported runs are measured.
    """

    dataset: str = "a9a"
    agents: int = 20
    epsilon: tuple[float, ...] = (3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0)
    probability: tuple[float, ...] = (0.5, 0.2, 0.4, 0.6, 0.8, 1.0)
    at_epsilon: float = 10.0
    delta: float = 1e-5
    budgets: tuple[Literal["gdp", "rdp", "paper"], ...] = ("gdp",)
    relations: tuple[Literal["replace_agent", "replace_record", "zero_out_record"], ...] = (
        "replace_agent",
    )
    compared: tuple[float, ...] = (3.0, 10.0)
    designs: tuple[str, ...] = DESIGNS
    steps: tuple[float, ...] = (0.1, 0.05, 0.01, 0.005, 0.001)
    rounds: int = 5000
    clip_norm: float = 0.1
    batch_size: int = 128
    concentration: float = 10.0
    seeds: tuple[int, ...] = tuple(range(10))
    tuning_seeds: tuple[int, ...] = (100, 101, 102)
    validation: float = 0.2
    graph_seed: int = 0
    graphs: int = 1
    measurements: int = 5

    def __post_init__(self) -> None:
        """Refuse tuning on the reported seeds."""
        launch.check(self, empty=("compared",))
        datasets.check(self.dataset)


PRESETS = {
    "tiny": Config(
        dataset="breast_cancer", epsilon=(10.0,), probability=(0.5,), steps=(0.1, 0.02),
        rounds=60, batch_size=8, seeds=(0, 1), tuning_seeds=(100,), measurements=3,
    ),
    "demo": Config(
        dataset="breast_cancer", epsilon=(5.0,), at_epsilon=5.0, probability=(0.5,), rounds=200,
        batch_size=8, steps=(0.5, 0.2, 0.1, 0.05, 0.02, 0.01), tuning_seeds=tuple(range(100, 110)),
        measurements=20,
    ),
    "cpu": Config(
        budgets=("gdp", "rdp", "paper"), relations=("replace_agent", "replace_record")
    ),
    "graphs": Config(
        epsilon=(5.0, 30.0), probability=(0.5,), graphs=10, seeds=(0, 1, 2),
        tuning_seeds=(1000, 1001, 1002), designs=("independent", "pairwise", "whisper"),
        measurements=1,
    ),
    "full": Config(
        budgets=("gdp", "rdp", "paper"), relations=("replace_agent", "replace_record"),
        tuning_seeds=tuple(range(100, 110)), measurements=20,
    ),
}  # fmt: skip


def cells(config: Config) -> list[dict[str, Any]]:
    """The (relation, budget, epsilon, p) to run: both sweeps, then the other rules and units."""
    points = [(epsilon, config.probability[0]) for epsilon in config.epsilon]
    points += [(config.at_epsilon, p) for p in config.probability[1:]]
    relation = config.relations[0]
    budget = config.budgets[0]
    selection = [(relation, budget, *point) for point in points]
    others = [(relation, other) for other in config.budgets[1:]]
    others += [(other, budget) for other in config.relations[1:]]
    selection += [(*pair, e, config.probability[0]) for pair in others for e in config.compared]
    names = ("relation", "budget", "epsilon", "probability")
    return [
        dict(zip(names, (r, b, float(e), float(p)), strict=True))
        for r, b, e, p in dict.fromkeys(selection)
    ]


def train(config: Config, cell: dict[str, Any], lab: launch.Lab, folder: Path) -> list[dict]:
    """Tune and run one cell on each graph; rows of both phases."""
    rows = []
    for part, place in launch.on_graphs(config, folder):
        rows += on_graph(part, cell, lab, place)
    return rows


def on_graph(config: Config, cell: dict[str, Any], lab: launch.Lab, folder: Path) -> list[dict]:
    """Tune and run one cell on one graph; rows of both phases."""
    data = load.load(config.dataset)
    graph = graphs.erdos_renyi(config.agents, cell["probability"], config.graph_seed)
    matrix = mixing.metropolis_hastings(graph)
    base = plan.Config(
        noise=noise.Independent(),
        budget=protect.Budget(cell["epsilon"], config.delta, accountant=cell["budget"]),
        protect=protect.Protect(cell["relation"], clip_norm=config.clip_norm),
        sampler=samplers.Random(config.batch_size),
        optimizer=optimizers.Sgd(config.steps[0]),
        rounds=config.rounds,
    )
    records, test = split.with_test(data, 0.2, seed=1)

    def learn(train: Any, test: Any) -> Problem:
        shards = partition.dirichlet(
            train[1], config.agents, config.concentration, 0, minimum=config.batch_size
        )
        return supervised(Linear(), "logistic", train, test, shards, name=config.dataset)

    where = {"graph": f"er:{config.agents}:{cell['probability']:g}:{config.graph_seed}"}
    where |= {"dataset": config.dataset, "probability": cell["probability"]}
    where |= {"budget_epsilon": cell["epsilon"], "budget_name": cell["budget"]}
    fit, validation = split.split(*records, config.validation, seed=0)
    tasks = (learn(fit, validation), learn(records, test))

    def plans(design: str, steps: tuple[float, ...], count: int) -> list[plan.Plan]:
        return tune.grid(base.using(noise.named(design)), steps, matrix)

    rows = []
    for design in config.designs:
        trial = tune.Trial(design, config.steps, functools.partial(plans, design))
        best = tune.best_step(
            [trial], tasks, config, lab, folder / design, measurements=config.measurements
        )
        lab.say(
            f"  {design}: step {best.step_size:g}, {best.final.rounds_per_second:,.0f} rounds/s"
        )
        rows += best.rows(**where)
    return rows


def experiment(config: Config, lab: launch.Lab) -> None:
    """Train logistic regression over a network under several noise designs at equal guarantee."""
    sweep = []
    for cell in cells(config):
        name = "_".join(str(value) for value in (config.dataset, *cell.values()))
        name = f"graphs_{name}" if config.graphs > 1 else name
        stored = launch.stored(config, "budgets", "relations", "at_epsilon", "compared", **cell)
        sweep.append((name, stored, functools.partial(train, config, cell, lab)))
    report(config, lab, lab.cells(sweep, seed=config.seeds))


CLAIMS = (
    ("whisper_horizon", "whisper"),
    ("whisper_horizon", "independent"),
    ("whisper", "pairwise"),
    ("whisper", "independent"),
    ("pairwise", "independent"),
    ("non_private", "whisper_horizon"),
)
"""Pairs (better, worse) judged on paired seeds."""


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Print the tables and draw the figures from the records."""
    final = frame[frame["phase"] == "final"]
    last = final[final["round"] == config.rounds]
    keys = ["unit", "budget_name", "budget_epsilon", "probability"]
    by = ["design", "step_size"]
    for cell, group in last.groupby(keys, sort=False):
        lab.say(
            "\n{}: unit {}, budget {}, epsilon {:g}, edge probability {:g}, {} seeds".format(
                config.dataset, *cell, group["seed"].nunique()
            )
        )
        summary = tables.summary(group, by, "test_loss")
        accuracy = tables.summary(group, by, "test_accuracy")
        summary["test_accuracy"] = accuracy["mean"]
        summary["design"] = [plots.TITLES[name] for name in summary["design"]]
        lab.say(tables.text(summary.rename(columns={"mean": "test_loss", "count": "seeds"})))
        present = set(group["design"])
        if config.graphs > 1:
            # Seeds of one graph share what it does to the designs.
            group = group.groupby(["design", "graph"], sort=False)["test_loss"].mean()
            group = group.reset_index().rename(columns={"graph": "seed"})
        rows = []
        for better, worse in CLAIMS:
            if {better, worse} <= present:
                pair = tables.paired(group, better, worse, "test_loss")
                labels = {"better": plots.TITLES[better], "worse": plots.TITLES[worse]}
                rows.append({**labels, **pair.row()})
        if rows:
            units = "seeds" if config.graphs == 1 else f"{config.graphs} graphs"
            lab.say(f"paired over {units}, worse - better:\n" + tables.text(rows))
    private = last[last["design"] != "non_private"]
    for _, cell in private.groupby(["relation", "budget_name"], sort=False):
        text = f"at epsilon {cell['budget_epsilon'].iloc[0]:g}"
        cell = cell[cell["budget_epsilon"] == cell["budget_epsilon"].iloc[0]]
        # Designs state the same against an outsider, and differ in who else is protected.
        named: dict[str, list[str]] = {}
        for _, first in cell.drop_duplicates("design").iterrows():
            names = named.setdefault(statement(first["guarantee"]), [])
            names.append(plots.TITLES[first["design"]])
        for stated, names in named.items():
            lab.say(f"\nguarantee of {'; '.join(names)}, {text}: {stated}")
    draw(config, lab, final, last)


def statement(record: dict[str, Any]) -> str:
    """A guarantee, and what it leaves out here."""
    return (
        Guarantee.from_dict(record).statement()
        + " Step sizes were tuned on the training data, on other seeds; that is outside epsilon."
    )


def draw(config: Config, lab: launch.Lab, final: Any, last: Any) -> None:
    """Figures of the first relation and budget: over rounds, epsilon and edge probability."""
    unit = last["unit"].iloc[0]
    budget = last["budget_name"].iloc[0]

    def chosen(rows: Any) -> Any:
        return rows[(rows["unit"] == unit) & (rows["budget_name"] == budget)]

    level = config.at_epsilon if config.at_epsilon in set(last["budget_epsilon"]) else None
    level = last["budget_epsilon"].iloc[0] if level is None else level
    middle = chosen(final)
    middle = middle[middle["probability"] == config.probability[0]]
    figures = [("rounds", middle[middle["budget_epsilon"] == level], "round", "round")]
    if len(config.epsilon) > 1:
        rows = chosen(last)
        rows = rows[rows["probability"] == config.probability[0]]
        figures.append(("epsilon", rows, "budget_epsilon", "epsilon"))
    if len(config.probability) > 1:
        rows = chosen(last)
        rows = rows[rows["budget_epsilon"] == config.at_epsilon]
        figures.append(("connectivity", rows, "probability", "edge probability p"))
    graph = (config.agents, config.probability[0], config.rounds, config.graph_seed)
    is_one = config.graphs == 1 and "pairwise" in config.designs
    note = coupling.remark(*graph) if is_one else None
    mark = "_graphs" if config.graphs > 1 else ""
    for name, rows, x, label in figures:
        sheet = plots.lines(
            rows,
            x,
            "test_loss",
            xlabel=label,
            ylabel=f"test loss ({config.dataset})",
        )
        lab.figure(sheet, f"whisper_logistic_{name}{mark}.svg", note=note)


main = functools.partial(launch.main, "whisper_logistic", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
