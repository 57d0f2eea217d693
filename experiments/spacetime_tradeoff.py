"""What noise correlated over agents and rounds gains over noise correlated over one of them.

First without training: the noise energy in all models at equal guarantee, relative to independent
noise, for noise that cancels over rounds (MAFALDA), over agents (Whisper, for one step or the
whole run) and over both, over graphs and horizons; where agents times rounds are few, beside the
least that any covariance could reach. Then the test loss of logistic regression with each.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from _common import launch, looks, tables, tune
from dpjax.accounting.guarantee import Guarantee
from dpjax.contrib import datasets
from dpjax.contrib import joint as joint_
from dpjax.data import load, partition, split
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.mechanism import spacetime, spatial, temporal
from dpjax.mechanism.participation import Participation
from dpjax.models.linear import Linear
from dpjax.plans import noise, optimizers, plan, protect
from dpjax.results import plots
from dpjax.topology import graphs, mixing

__all__ = ["PRESETS", "Config", "experiment", "main"]

_LOOKS = {
    name: looks.look(name)
    for name in ("independent", "whisper", "whisper_horizon", "mafalda", "spacetime")
} | {"unrestricted": looks.look("unrestricted", "lower bound for any covariance")}
LABELS = {name: look.label for name, look in _LOOKS.items()}
"""Designs in the order of the tables; "unrestricted" is a bound, not a design."""

GRAPHS = {
    "florentine": graphs.florentine,
    "ring": lambda: graphs.ring(16),
    "sparse": lambda: graphs.erdos_renyi(16, 0.3, 0),
    "dense": lambda: graphs.erdos_renyi(16, 0.8, 0),
    "grid": lambda: graphs.grid(4, 4),
}
Graph = Literal["florentine", "ring", "sparse", "dense", "grid"]
FINDINGS = {
    "florentine": "Florentine families, 15 agents",
    "dense": "dense random graph, 16 agents",
}
"""Graphs of the small figure: where noise over rounds and where noise over agents gains more."""

ATTACKER = "outsider who sees every message; the shared seed gives no guarantee towards agents"


@dataclass(frozen=True)
class Config:
    """Which graphs, horizons and runs; mixing is Metropolis-Hastings.

    Attributes:
        graphs: Networks whose noise energy is computed.
        rounds: Horizons T, multiples of ``epochs``.
        epochs: How often a record takes part, k; every T / k rounds.
        unrestricted: Most agents times rounds for the bound on any covariance.
        dataset: What the runs learn: a name that `dpjax.data.load.load` takes, of a file in the
            data cache too, with labels -1 and +1.
        trained: Networks that are trained.
        participations: (k, b) of the runs: k epochs of b batches.
        designs: Noise designs of the runs.
        epsilon: Target epsilon.
        delta: Target delta.
        relation: Neighbouring relation; every record's gradient is clipped.
        clip_norm: Clip norm.
        steps: Step sizes to tune over.
        seeds: Seeds of the reported runs.
        tuning_seeds: Seeds of the tuning runs; none of ``seeds``.
        validation: Fraction of the training records held out while tuning.
    """

    graphs: tuple[Graph, ...] = tuple(GRAPHS)  # type: ignore[assignment]
    rounds: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    epochs: tuple[int, ...] = (1, 4)
    unrestricted: int = 512
    dataset: str = "breast_cancer"
    trained: tuple[Graph, ...] = ("florentine", "ring", "dense")
    participations: tuple[tuple[int, int], ...] = ((8, 4), (32, 4))
    designs: tuple[str, ...] = ("independent", "whisper_horizon", "mafalda", "spacetime")
    epsilon: float = 3.0
    delta: float = 1e-5
    relation: Literal["zero_out_record", "replace_record"] = "replace_record"
    clip_norm: float = 1.0
    steps: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
    seeds: tuple[int, ...] = tuple(range(20))
    tuning_seeds: tuple[int, ...] = tuple(range(100, 110))
    validation: float = 0.2

    def __post_init__(self) -> None:
        """Refuse horizons that are not whole epochs, and tuning on the reported seeds."""
        for rounds in self.rounds:
            for k in self.epochs:
                if k < 1 or rounds < 1 or rounds % k:
                    raise ValueError(f"rounds holds {rounds}; give multiples of epochs, {k}")
        launch.check(self, known={"designs": LABELS}, empty=("trained", "participations"))
        datasets.check(self.dataset)


PRESETS = {
    "tiny": Config(
        graphs=("florentine", "ring"), rounds=(2, 4), epochs=(1, 2), unrestricted=64,
        trained=("florentine",), participations=((3, 2),), designs=("independent", "spacetime"),
        steps=(0.1, 0.5), seeds=(0, 1), tuning_seeds=(100,),
    ),
    "cpu": Config(),
    "full": Config(
        rounds=(4, 8, 16, 32, 64, 128, 256, 512), unrestricted=1024, dataset="a9a",
        trained=tuple(GRAPHS), participations=((8, 4), (32, 4), (32, 16)),  # type: ignore[arg-type]
    ),
}  # fmt: skip


def energies(config: Config, graph: str) -> list[dict[str, Any]]:
    """The noise energy of every design on one graph, over horizons and epochs."""
    matrix = mixing.metropolis_hastings(GRAPHS[graph]())
    n = len(matrix)
    rows = []
    for k in config.epochs:
        for rounds in config.rounds:
            participation = Participation(rounds, k, rounds // k)
            fresh = np.eye(rounds)
            apart = np.eye(n)
            joint = spacetime.design(matrix, participation)
            pairs = {
                "independent": (fresh, apart),
                "whisper": (fresh, spatial.whisper(matrix, 1.0)),
                "whisper_horizon": (fresh, spatial.whisper(matrix, 1.0, rounds)),
                "mafalda": (temporal.mafalda(matrix, participation), apart),
                "spacetime": (joint.strategy, joint.covariance),
            }
            values = {
                name: joint_.objective(matrix, *pair, participation) for name, pair in pairs.items()
            }
            extra: dict[str, dict[str, Any]] = {
                "spacetime": {
                    "converged": joint.converged, "gap": joint.gap,
                    "half_steps": len(joint.history),
                }
            }  # fmt: skip
            if n * rounds <= config.unrestricted:
                minimum = joint_.unrestricted_bound(matrix, participation)
                values["unrestricted"] = minimum.lower_bound
                extra["unrestricted"] = {"converged": minimum.converged, "gap": minimum.gap}
            rows += [
                {"algorithm": name, "graph": graph, "agents": n, "rounds": rounds, "epochs": k,
                 "energy": value, "relative": value / values["independent"],
                 **extra.get(name, {})}
                for name, value in values.items()
            ]  # fmt: skip
    return rows


def train(
    config: Config, graph: str, fields: tuple[int, int], lab: launch.Lab, folder: Path
) -> list[dict[str, Any]]:
    """Tune and run every design on one graph and participation; rows of both phases."""
    data = load.load(config.dataset)
    matrix = mixing.metropolis_hastings(GRAPHS[graph]())
    k, b = fields
    records, test = split.with_test(data, 0.2, seed=1)

    def learn(train: Any, test: Any) -> Problem:
        shards = partition.iid(len(train[1]), len(matrix), 0)
        return supervised(Linear(), "logistic", train, test, shards, name=config.dataset)

    def plans(design: str, steps: tuple[float, ...], count: int) -> list[plan.Plan]:
        largest = -(-count // len(matrix))
        base = plan.Config(
            noise=noise.Independent(),
            budget=protect.Budget(config.epsilon, config.delta),
            protect=protect.Protect(config.relation, clip_norm=config.clip_norm),
            sampler=samplers.Cyclic(epochs=k, separation=b, batch_size=-(-largest // b)),
            optimizer=optimizers.Sgd(config.steps[0]),
            rounds=k * b,
        )
        return tune.grid(base.using(noise.named(design)), steps, matrix)

    fit, validation = split.split(*records, config.validation, seed=0)
    tasks = (learn(fit, validation), learn(records, test))
    where = {"graph": graph, "dataset": config.dataset, "epochs": k, "rounds": k * b}
    rows = []
    # Plans of one run share their strategy over rounds: a run for each design.
    for design in config.designs:
        trial = tune.Trial(design, config.steps, functools.partial(plans, design))
        rows += tune.best_step([trial], tasks, config, lab, folder / design).rows(**where)
    return rows


def experiment(config: Config, lab: launch.Lab) -> None:
    """Noise energy and test loss of noise correlated over agents, over rounds, and over both."""
    stored = dataclasses.asdict(config)
    energy_keys = ("rounds", "epochs", "unrestricted")
    listed = ("graphs", "trained", "participations", *energy_keys)
    solved = []
    for graph in config.graphs:
        kept = {"graph": graph} | {name: stored[name] for name in energy_keys}
        solved.append((f"energy_{graph}", kept, lambda _, graph=graph: energies(config, graph)))
    runs = []
    for graph in config.trained:
        for fields in config.participations:
            kept = {name: value for name, value in stored.items() if name not in listed}
            kept |= {"graph": graph, "participation": fields}
            compute = functools.partial(train, config, graph, fields, lab)
            runs.append((f"train_{graph}_{fields[0]}x{fields[1]}", kept, compute))
    report_energies(config, lab, lab.cells(solved))
    if runs:
        report_runs(config, lab, lab.cells(runs, seed=config.seeds))


def report_energies(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Tables of the relative noise energy, and its figure: a panel for each graph and k."""
    for (graph, k), rows in frame.groupby(["graph", "epochs"], sort=False):
        lab.say(f"\nnoise energy relative to independent noise: {graph}, k = {k}")
        table = []
        for rounds, part in rows.groupby("rounds"):
            results = dict(zip(part["algorithm"], part["relative"], strict=True))
            display = {"T": rounds} | {LABELS[name]: results.get(name) for name in LABELS}
            table.append({name: value for name, value in display.items() if value is not None})
        columns = list(dict.fromkeys(name for line in table for name in line))
        lab.say(tables.text([{name: line.get(name, "") for name in columns} for line in table]))
    titles = {(k, g): f"{looks.words(g)}, k = {k}" for k in config.epochs for g in config.graphs}
    draw_energies(lab, frame, "spacetime_tradeoff_energy.svg", titles, len(config.epochs))
    once = {(1, graph): title for graph, title in FINDINGS.items()}
    if once.keys() <= titles.keys():
        draw_energies(lab, frame, "spacetime_findings.svg", once, 1)


def draw_energies(
    lab: launch.Lab, frame: Any, name: str, titles: dict[tuple[int, str], str], rows: int
) -> None:
    """Relative noise energy over horizons: a panel for each k and graph.

    Args:
        lab: Where the figure is written.
        frame: Rows of all energies.
        name: Of the figure's file.
        titles: Of the panels, by k and graph.
        rows: Of panels.
    """
    figure, panels = plots.figure(rows, len(titles) // rows, sharey=True)
    for panel, ((k, graph), title) in zip(panels, titles.items(), strict=True):
        plots.lines(
            frame[(frame["graph"] == graph) & (frame["epochs"] == k)],
            "rounds",
            "relative",
            "algorithm",
            ax=panel,
            xlabel="rounds T",
            ylabel="noise energy over that\nof independent noise",
            title=title,
            log_x=True,
            log_y=True,
            looks=_LOOKS,
        )
    times = "once" if rows == 1 else "k times"
    lab.figure(
        figure,
        name,
        guarantee="no run: noise energy at equal guarantee",
        note=f"Equal Gaussian-DP loss for one record that takes part {times}; {ATTACKER}.",
    )


def report_runs(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Tables of the test loss, the joint design against each other, and the figure."""
    final = frame[frame["phase"] == "final"]
    for (graph, k, rounds), rows in final.groupby(["graph", "epochs", "rounds"], sort=False):
        lab.say(f"\n{config.dataset} on {graph}, k = {k}, T = {rounds}:")
        summary = tables.summary(rows, ["design", "step_size"], "test_loss")
        summary["design"] = [LABELS[name] for name in summary["design"]]
        lab.say(tables.text(summary.rename(columns={"mean": "test_loss", "count": "seeds"})))
        present = set(rows["design"])
        pairs = []
        for name in [n for n in LABELS if n in present - {"spacetime"} and "spacetime" in present]:
            pair = tables.paired(rows, "spacetime", name, "test_loss")
            pairs.append({"space and time against": LABELS[name], **pair.row()})
        if pairs:
            lab.say("paired over seeds, other - joint:\n" + tables.text(pairs))
    for _, first in final.drop_duplicates("design").iterrows():
        stated = Guarantee.from_dict(first["guarantee"]).statement()
        lab.say(f"\n{LABELS[first['design']]}: {stated}")
    lab.say("\nStep sizes were tuned on the training data, on other seeds; outside epsilon.")
    figure, panels = plots.figure(1, len(config.trained), sharey=True)
    for panel, graph in zip(panels, config.trained, strict=True):
        plots.lines(
            final[final["graph"] == graph], "rounds", "test_loss", ax=panel, looks=_LOOKS,
            xlabel="rounds T", ylabel=f"test loss ({looks.words(config.dataset)})",
            title=looks.words(graph), log_x=True,
        )  # fmt: skip
    lab.figure(figure, "spacetime_tradeoff_loss.svg", note=f"Attacker: {ATTACKER}.")


main = functools.partial(launch.main, "spacetime_tradeoff", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
