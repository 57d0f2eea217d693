"""Which system to take: all of the suite's on one data set, at one guarantee, equally tuned.

Agents hold parts of a data set. Every system trains the same model for as many rounds on as many
records, at the same (epsilon, delta), unit and relation, against the same outsider: who reads all
that goes over every link, and whatever the protocol opens. Each is tuned with as many trials, on
other seeds and held-out records, and is told by what it asks to be trusted: nobody, a seed that all
agents share, or a secure sum.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from _common import claims, launch, looks, tables, tune
from dpjax.accounting.guarantee import Guarantee
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.exchange import Server, Trusted
from dpjax.algorithms.federated import Federated, dome
from dpjax.algorithms.sketches import Learned
from dpjax.algorithms.tracking import Tracking
from dpjax.contrib import datasets, traffic
from dpjax.contrib.rules import UpdateRule, read_filter
from dpjax.data import partition, split
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.plans import noise, optimizers, plan, protect, scheduled
from dpjax.plans.noise import SumShares
from dpjax.results import plots
from dpjax.topology import graphs, mixing

__all__ = ["PRESETS", "Config", "experiment", "main"]


class System(NamedTuple):
    """A row of `SYSTEMS`.

    Attributes:
        title: In tables and legends; that of a design alone is the design's name.
        trust: What all agents must trust for the guarantee: "nobody", "shared seed", "secure sum";
            "no privacy" for the reference.
        kind: How its trials are made, of `KINDS`.
        design: Label of its noise over agents and rounds.
    """

    title: str
    trust: str
    kind: str
    design: str = "independent"


NAMES = plots.TITLES
SYSTEMS = {
    "non_private": System("no noise", "no privacy", "gossip", "non_private"),
    "independent": System(NAMES["independent"], "nobody", "gossip"),
    "pairwise": System(NAMES["pairwise"], "shared seed", "gossip", "pairwise"),
    "whisper": System(NAMES["whisper"], "shared seed", "gossip", "whisper"),
    "whisper_horizon": System(NAMES["whisper_horizon"], "shared seed", "gossip", "whisper_horizon"),
    "mafalda": System(NAMES["mafalda"], "nobody", "gossip", "mafalda"),
    "spacetime": System(NAMES["spacetime"], "shared seed", "gossip", "spacetime"),
    "tracking": System("gradient tracking", "nobody", "tracking"),
    "doppler": System("independent, filtered", "nobody", "filtered"),
    "doppler_whisper": System(
        "Whisper, whole run, filtered", "shared seed", "filtered", "whisper_horizon"
    ),
    "server": System("server SGD", "secure sum", "server"),
    "adam": System("server Adam", "secure sum", "adam"),
    "dome": System("DOME", "secure sum", "dome"),
}  # fmt: skip
"""Systems by name, in the order of the tables."""

TRUSTS = ("nobody", "shared seed", "secure sum")

BARS = {
    "independent": ("nobody trusted", "independent noise"),
    "doppler_whisper": ("a shared seed", "Whisper for the whole run, filtered"),
    "server": ("a server that sees sums", "server SGD"),
    "non_private": ("no privacy", "no noise"),
}
"""Systems whose accuracy says what trust is worth: what is trusted, and what they do."""


@dataclass(frozen=True)
class Config:
    """What is trained, at which guarantee, by which systems.

    Attributes:
        dataset: A name that `dpjax.data.load.load` takes, of a file in the data cache too.
        records: Use only that many training records; 0 is all.
        hidden: Width of the hidden layer; 0 is none, and all that labels -1 and +1 take.
        relation: What is protected: an agent's data, or a record.
        agents: Agents n.
        probability: Edge probability of the random graph.
        graph_seed: First seed tried for a connected graph.
        systems: Names of `SYSTEMS`.
        epsilon: Budgets.
        delta: Target delta.
        rounds: Rounds, of every system.
        batch_size: Records an agent draws each round; 0 is all that it has.
        separation: Rounds between two times that a record takes part, in a fixed order: so many
            rounds are an epoch. None draws batches anew, and a record may be in any.
        clip_norms: Clip norms that are tried.
        paths: Step size times clip norm, of plain steps: how far a round goes at most. Other
            optimizers have the step sizes that go as far.
        floors: Least second moments of Adam that are tried, over the clip norm squared; DOME has
            the largest.
        sketches: Columns of DOME's sketch that are tried.
        metric: What is tuned for.
        seeds: Seeds of the reported runs.
        tuning_seeds: Seeds of the tuning runs; none of ``seeds``.
        validation: Fraction of the training records held out while tuning.
        measurements: How often the reported runs are measured.
    """

    dataset: str = "a9a"
    records: int = 0
    hidden: int = 0
    relation: Literal["replace_agent", "zero_out_record", "replace_record"] = "replace_agent"
    agents: int = 20
    probability: float = 0.5
    graph_seed: int = 0
    systems: tuple[str, ...] = tuple(SYSTEMS)
    epsilon: tuple[float, ...] = (3.0, 10.0, 30.0)
    delta: float = 1e-5
    rounds: int = 300
    batch_size: int = 64
    separation: int | None = None
    clip_norms: tuple[float, ...] = (0.1, 0.3)
    paths: tuple[float, ...] = tuple(0.6 * 0.6**power for power in range(-2, 18))
    floors: tuple[float, ...] = (0.01, 1.0)
    sketches: tuple[int, ...] = (16, 48)
    metric: Literal["test_accuracy", "test_loss"] = "test_accuracy"
    seeds: tuple[int, ...] = tuple(range(5))
    tuning_seeds: tuple[int, ...] = (100, 101)
    validation: float = 0.2
    measurements: int = 6

    def __post_init__(self) -> None:
        """Refuse what could not be run to its end, or would not be a fair comparison."""
        minimum = {"agents": 2, "batch_size": 0, "hidden": 0, "rounds": 2}
        launch.check(self, minimum, known={"systems": SYSTEMS})
        datasets.check(self.dataset)
        if self.separation is not None and self.rounds % self.separation:
            raise ValueError(
                f"separation is {self.separation} for {self.rounds} rounds; give a divisor"
            )
        if self.separation is not None and "tracking" in self.systems:
            raise ValueError(
                f"separation is {self.separation} with system 'tracking', whose noise by schedule "
                "is accounted for what may take part in every round; leave one out"
            )

    @property
    def stem(self) -> str:
        """How files are called."""
        return self.dataset + ("_epochs" if self.separation is not None else "")

    def cells(self) -> list[tuple[str, float]]:
        """System and budget of each cell; what has no noise has none."""
        return [
            (name, epsilon)
            for name in self.systems
            for epsilon in (self.epsilon if name != "non_private" else (math.inf,))
        ]


_CPU = Config(metric="test_loss")
_DIGITS = Config(
    dataset="digits", hidden=32, relation="zero_out_record", epsilon=(1.0, 4.0, 16.0), rounds=100,
    batch_size=0, clip_norms=(0.3, 1.0), floors=(1e-4, 1e-2), sketches=(32, 96),
    tuning_seeds=(100,),
    paths=tuple(8.0 * 0.65**power for power in range(-5, 15)),
)  # fmt: skip

PRESETS = {
    "tiny": Config(
        dataset="breast_cancer", agents=6, probability=0.7, epsilon=(10.0,), rounds=12,
        batch_size=8, systems=("non_private", "whisper", "dome"), seeds=(0, 1), clip_norms=(0.3,),
        tuning_seeds=(100,), paths=(0.2, 0.05), floors=(0.1,), sketches=(8,),
        measurements=2,
    ),
    "cpu": _CPU,
    "cpu_digits": _DIGITS,
    "cpu_epochs": dataclasses.replace(
        _DIGITS, separation=10, epsilon=(4.0, 16.0),
        systems=tuple(name for name in SYSTEMS if name != "tracking"),
    ),
    "full": Config(
        dataset="mnist", hidden=64, relation="zero_out_record", epsilon=(0.1, 0.3, 1.0, 3.0),
        rounds=400, batch_size=0, clip_norms=(0.3, 1.0), floors=(1e-4, 1e-2), sketches=(64, 256),
        paths=_DIGITS.paths,
        seeds=tuple(range(10)),
    ),
}  # fmt: skip


class Setting(NamedTuple):
    """What a system is tried with, beside its step sizes.

    Attributes:
        name: What records call it.
        clip_norm: Clip norm C.
        method: What agents compute and send.
        noise: The design; None is no noise.
        rule: ``rule(step)``: the optimizer.
        unit: Its step size times the clip norm, for a path of 1.
    """

    name: str
    clip_norm: float
    method: Any
    noise: Any
    rule: Any
    unit: float = 1.0


def _gossip(config: Config, system: System) -> list[Setting]:
    """D-SGD under a noise design."""
    return [
        Setting(f"C {clip:g}", clip, DSGD(), noise.named(system.design), optimizers.Sgd)
        for clip in config.clip_norms
    ]


def _filtered(config: Config, system: System) -> list[Setting]:
    """The same with a low-pass filter behind the noise, of every agent's own."""
    rule = UpdateRule(filter=read_filter("first v1")).chain
    return [setting._replace(rule=rule) for setting in _gossip(config, system)]


def _tracking(config: Config, system: System) -> list[Setting]:
    """Gradient tracking, its steps and noise by schedule: constant, or down to a tenth."""
    del system
    last = 0.1 ** (1 / config.rounds)
    results = []
    for index, (weight, ratio) in enumerate(((0.3, 1.0), (3.0, last), (3.0, 1.0), (0.3, last))):
        clip = config.clip_norms[index % len(config.clip_norms)]
        decay = "constant" if ratio == 1 else ratio
        results.append(Setting(
            f"C {clip:g}, beta {weight * clip:g}, {'constant' if ratio == 1 else 'down'}", clip,
            Tracking(weight * clip), scheduled.ScheduledGaussian(ratio),
            functools.partial(optimizers.Sgd, decay=decay),
        ))  # fmt: skip
    return results


def _server(config: Config, system: System) -> list[Setting]:
    """One model at a server, which sees sums alone, by plain steps."""
    del system
    return [
        Setting(f"C {clip:g}", clip, Federated(Trusted()), SumShares(), optimizers.Sgd)
        for clip in config.clip_norms
    ]


def _moments(setting: Setting, share: float) -> Setting:
    """The same by Adam, whose second moment is without the noise, and at least a share of C^2."""
    rule = UpdateRule("adam", floor=share * setting.clip_norm**2)
    # Where the floor rules, a step is as long as a plain one of the same path.
    unit = setting.clip_norm * math.sqrt(share)
    name = f"{setting.name}, floor {share:g}"
    return setting._replace(name=name, rule=rule.chain, unit=unit)


def _adam(config: Config, system: System) -> list[Setting]:
    """One model at a server by Adam."""
    return [
        _moments(setting, share) for setting in _server(config, system) for share in config.floors
    ]


def _dome(config: Config, system: System) -> list[Setting]:
    """The same through a sketch that learns, less a running mean or not."""
    pairs = [(k, centred) for centred in (True, False) for k in config.sketches]
    results = []
    for index, (k, centred) in enumerate(pairs):
        # Each clip norm meets each of both.
        clip = config.clip_norms[(index + (not centred)) % len(config.clip_norms)]
        method = dome(k, Trusted()) if centred else Federated(Trusted(), sketch=Learned(k))
        name = f"C {clip:g}, k {k}, {'centred' if centred else 'not centred'}"
        setting = Setting(name, clip, method, SumShares(), optimizers.Sgd)
        results.append(_moments(setting, max(config.floors)))
    return results


KINDS = {
    "gossip": _gossip, "filtered": _filtered, "tracking": _tracking, "server": _server,
    "adam": _adam, "dome": _dome,
}  # fmt: skip


def trials(config: Config, name: str) -> list[tuple[Setting, tuple[float, ...]]]:
    """Settings of a system with the step sizes of each: as many trials for every system.

    Raises:
        ValueError: For fewer step sizes than settings.
    """
    settings = KINDS[SYSTEMS[name].kind](config, SYSTEMS[name])
    results = []
    for index, setting in enumerate(settings):
        dealt = tune.dealt(config.paths, len(settings))[index]
        results.append((setting, tuple(path * setting.unit / setting.clip_norm for path in dealt)))
    return results


@functools.cache
def matrix(agents: int, probability: float, graph_seed: int) -> np.ndarray:
    """The network's mixing matrix."""
    graph = graphs.erdos_renyi(agents, probability, graph_seed)
    return mixing.metropolis_hastings(graph)


def plans(
    config: Config, setting: Setting, epsilon: float, steps: Iterable[float], count: int
) -> list[plan.Plan]:
    """A plan for every step size, for so many training records."""
    weights = matrix(config.agents, config.probability, config.graph_seed)
    counts = partition.iid(count, config.agents, 0).counts
    private = setting.noise is not None
    results: list[plan.Plan] = []
    for step in steps:
        result = plan.Config(
            method=setting.method,
            noise=setting.noise,
            budget=protect.Budget(epsilon, config.delta) if private else None,
            protect=protect.Protect(config.relation, clip_norm=setting.clip_norm),
            sampler=sampler(config, counts),
            optimizer=setting.rule(step),
            rounds=config.rounds,
        )
        design = results[0].design if results else None
        results.append(plan.make(result, weights, design=design, counts=counts))
    return results


def sampler(config: Config, counts: np.ndarray) -> Any:
    """Which records take part in a round."""
    if config.separation is not None:
        epochs = config.rounds // config.separation
        places = int(counts.max())
        return samplers.Cyclic(epochs, config.separation, -(-places // config.separation))
    return samplers.Random(config.batch_size) if config.batch_size else samplers.Full()


def train(
    config: Config, name: str, epsilon: float, lab: launch.Lab, folder: Path
) -> list[dict[str, Any]]:
    """Tune and run one system at one budget; rows of both phases."""
    train, test, model, loss = datasets.flat(config.dataset, config.hidden, config.records)

    def learn(train: Any, test: Any) -> Problem:
        shards = partition.iid(len(train[1]), config.agents, 0)
        return supervised(model, loss, train, test, shards, name=config.dataset)

    tried = [
        tune.Trial(setting.name, steps, functools.partial(plans, config, setting, epsilon))
        for setting, steps in trials(config, name)
    ]
    fit, validation = split.split(*train, config.validation, seed=0)
    final_task = learn(train, test)
    best = tune.reported(
        tried, learn(fit, validation), final_task, seeds=config.seeds,
        tuning_seeds=config.tuning_seeds, measurements=config.measurements, metric=config.metric,
        runner=lab.run, checkpoint=folder,
    )  # fmt: skip
    final = best.final
    lab.say(
        f"  {SYSTEMS[name].title}, epsilon {epsilon:g}: {best.trial.name}, step "
        f"{best.step_size:.3g}, test accuracy {final.metrics['test_accuracy'][-1].mean():.4f}, "
        f"{final.rounds_per_second:,.0f} rounds/s"
    )
    extra = {"budget_epsilon": epsilon, "system": SYSTEMS[name].title}
    extra |= {"trust": SYSTEMS[name].trust, "dataset": config.dataset}
    extra |= dict(zip(("parameters", "bytes_sent"), sent(final.plans[0], final_task), strict=True))
    return best.rows(lambda trial, result: {"setting": trial.name}, design=name, **extra)


def sent(training_plan: plan.Plan, task: Problem) -> tuple[int, float]:
    """Parameters of the model, and the bytes that an agent sends in a run, on average.

    To every neighbour by itself, or to the server once a round: numbers of four bytes, without the
    keys and shares of a secure sum. What it receives is as much: the neighbours' messages, or the
    sum.
    """
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    method = training_plan.config.method
    if isinstance(getattr(method, "exchange", None), Server):
        sketch = getattr(method, "sketch", None)
        numbers = getattr(sketch, "k", parameters)
        return parameters, 4.0 * numbers * training_plan.config.rounds
    result = traffic.per_round(training_plan, task)
    return (
        parameters,
        result.bytes * result.links / training_plan.agents * training_plan.config.rounds,
    )


def experiment(config: Config, lab: launch.Lab) -> None:
    """Train by every system of the suite at one guarantee, equally tuned, and say which to take."""
    for name in config.systems:
        trials(config, name)  # Refuses too few step sizes before any work.
    cells = []
    for name, epsilon in config.cells():
        stored = launch.stored(config, "systems", system=name, epsilon=epsilon)
        file = launch.file_name(f"{config.stem}_{name}_{epsilon:g}")
        cells.append((file, stored, functools.partial(train, config, name, epsilon, lab)))
    report(config, lab, named(lab.cells(cells, seed=config.seeds, plot=default_plot(config))))


def named(frame: Any) -> Any:
    """Rows with the systems' titles of today: older records have others."""
    titles = {name: system.title for name, system in SYSTEMS.items()}
    return frame.assign(system=frame["design"].map(titles))


def default_plot(config: Config) -> dict[str, Any]:
    """What `dpjax plot` draws: all systems over the budgets."""
    where = ["phase=final", f"dataset={config.dataset}"]
    display = {"x": "budget_epsilon", "y": "test_accuracy", "series": "system", "where": where}
    return display | {"log_x": len(config.epsilon) > 1}


def differing(frame: Any) -> list[str]:
    """What private runs at one budget state differently: nothing, if the comparison is fair.

    Args:
        frame: Tidy rows with their guarantees.

    Returns:
        A line for each budget and field of the guarantee that is not one for all.
    """
    results = []
    private = frame[frame["trust"] != "no privacy"]
    for budget, rows in private.groupby("budget_epsilon", sort=False):
        stated = [Guarantee.from_dict(item) for item in rows["guarantee"]]
        for field in ("unit", "relation", "attacker", "gradients", "delta", "rounds", "release"):
            values = sorted({str(getattr(guarantee, field)) for guarantee in stated})
            if len(values) > 1:
                results.append(f"epsilon {budget:g}: {field} is {', '.join(values)}")
        epsilons = [value.epsilon for value in stated]
        if max(epsilons) > budget or min(epsilons) < 0.999 * budget:
            results.append(f"epsilon {budget:g}: {min(epsilons):g} to {max(epsilons):g} is stated")
        if any(case.gradient_gap is not None or case.unsound for case in stated):
            results.append(f"epsilon {budget:g}: a gap is assumed, or what is stated is false")
    return results


def choices(rows: Any) -> list[dict[str, Any]]:
    """Which system is the best at one budget, by what is trusted, and which are not behind it.

    Args:
        rows: Rows of the last round at one budget, ``points`` of accuracy among them.

    Returns:
        For each trust, and for all together: "trust", "best", its points, "within chance" of it
        (by Student's t, paired over seeds), the next one "behind" and the "gap in points" to that
        with its standard error.
    """
    results = []
    for trust in (*TRUSTS, "any"):
        group = rows[rows["trust"] == trust] if trust != "any" else rows
        group = group[group["trust"] != "no privacy"]
        if not len(group):
            continue
        means = group.groupby("system", sort=False)["points"].mean()
        # A run that diverged is nobody's best.
        best = means.fillna(-math.inf).idxmax()
        close = []
        behind = []
        for row in claims.gains(group, best, "points", column="system"):
            chance = -row["gain in points"] <= row["margin"]
            (close if chance else behind).append(row)
        behind.sort(key=lambda row: np.nan_to_num(row["gain in points"], nan=-math.inf))
        line = {"trust": trust, "best": best, "points": means[best]}
        line |= {"within chance": ", ".join(row["method"] for row in close) or "-"}
        if behind:
            line |= {"next": behind[-1]["method"], "gap in points": -behind[-1]["gain in points"]}
            line |= {"standard error": behind[-1]["standard error"]}
        results.append(line)
    return results


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Print the tables and the choice, and draw the figure, from the records."""
    final = frame[frame["phase"] == "final"]
    last = final[final["round"] == config.rounds]
    last = last.assign(points=100 * last["test_accuracy"], megabytes=last["bytes_sent"] / 1e6)
    differences = differing(last)
    lab.say("guarantees: " + ("the same for all" if not differences else "; ".join(differences)))
    tuning = frame[frame["phase"] == "tuning"]
    tried = tuning.groupby(["design", "budget_epsilon"])[["setting", "step_size"]]
    trials = tried.apply(lambda rows: len(rows.drop_duplicates()))
    bare = last[last["trust"] == "no privacy"]
    for epsilon in config.epsilon:
        group = last[last["budget_epsilon"] == epsilon]
        if not len(group):
            continue
        complete = last[last.index.isin([*bare.index, *group.index])]
        lab.say(
            f"\n{config.dataset}, {config.relation}, epsilon {epsilon:g}, "
            f"{complete['seed'].nunique()} seeds: test accuracy in %, MB that an agent sends"
        )
        keys = ["system", "trust", "setting", "step_size", "megabytes"]
        table = tables.summary(complete, keys, "points")
        table["test_loss"] = tables.summary(complete, keys, "test_loss")["mean"]
        lab.say(tables.text(table.rename(columns={"mean": "accuracy", "count": "seeds"})))
        if "independent" in set(group["design"]):
            base = SYSTEMS["independent"].title
            pairs = claims.gains(group, base, "points", column="system")
            lab.say("over independent noise, paired over seeds:\n" + tables.text(pairs))
        lab.say("which to take:\n" + tables.text(choices(group)))
        lab.say_ends(tables.at_ends(frame[frame["budget_epsilon"] == epsilon], "system"))
    lab.say(f"trials a system and budget: {', '.join(map(str, sorted(set(trials))))}")
    for _, first in last.drop_duplicates("trust").iterrows():
        stated = Guarantee.from_dict(first["guarantee"]).statement()
        lab.say(f"\n{first['trust']}: {stated}")
    lab.say(
        "Step sizes and settings were tuned on the training data, on other seeds; that is outside "
        "epsilon."
    )
    draw(config, lab, last)


def stated(config: Config, epsilon: str = "") -> str:
    """What captions say of the guarantee, of one budget or of all that are shown."""
    return (
        f"({epsilon}{config.relation}, outsider, delta = {config.delta:g}, T = {config.rounds}), "
        "gdp accountant, simulation"
    )


def draw(config: Config, lab: launch.Lab, last: Any) -> None:
    """Accuracy over budgets, a panel for each kind of trust, and what trust is worth at one."""
    display = [trust for trust in TRUSTS if trust in set(last["trust"])]
    sheet, axes = plots.figure(1, len(display), sharey="row")
    for ax, trust in zip(np.ravel(axes), display, strict=True):
        rows = last[last["trust"].isin([trust, "no privacy"])]
        plots.lines(
            rows, "budget_epsilon", "points", ax=ax, log_x=len(config.epsilon) > 1,
            xlabel="epsilon", ylabel=looks.accuracy(config.dataset), title=f"trusts: {trust}",
            guarantee=stated(config),
            note="Tuning is outside epsilon.",
            looks={name: looks.look(name, system.title) for name, system in SYSTEMS.items()},
        )  # fmt: skip
    lab.figure(sheet, f"compare_{config.stem}.svg")
    tightest = last[last["budget_epsilon"].isin([min(config.epsilon), math.inf])]
    if config.stem == "digits" and set(BARS) <= set(tightest["design"]):
        for name, ink, paper in (("light", "#333333", "white"), ("dark", "#E6E6E6", "none")):
            lab.figure(bars(config, tightest, ink, paper), f"trust_{name}.svg")


def bars(config: Config, rows: Any, ink: str, paper: str) -> Any:
    """Accuracy at the tightest budget, a labelled bar for each kind of trust.

    Args:
        config: The experiment's.
        rows: Of the last round, at that budget and without privacy.
        ink: Colour of texts.
        paper: Colour of the sheet, "none" for transparent.
    """
    sheet, (ax,) = plots.figure()
    with plots.style():
        sheet.set_size_inches(7.0, 2.3)
        sheet.patch.set_facecolor(paper)
        ax.set_axis_off()
        ax.set(xlim=(-67, 112), ylim=(3.5, -0.5))
        for place, (name, (trust, system)) in enumerate(BARS.items()):
            points = rows[rows["design"] == name]["points"]
            color = looks.look(name).color if name != "non_private" else "#8A8A8A"
            ax.barh(place, points.mean(), 0.62, color=color)
            ax.text(-2, place - 0.14, trust, ha="right", va="center", fontsize=11.0, color=ink)
            ax.text(-2, place + 0.23, system, ha="right", va="center", fontsize=8.5, color=ink)
            ax.text(
                points.mean() + 1.5, place, f"{points.mean():.0f} %", va="center", fontsize=12.0,
                color=ink, weight="bold",
            )  # fmt: skip
    note = f"Test accuracy on {looks.words(config.dataset)}, mean over {len(config.seeds)} seeds."
    plots.finish(sheet, guarantee=stated(config, f"epsilon = {min(config.epsilon):g}, "), note=note)
    for text in sheet.texts:
        text.set_color(ink)
    return sheet


main = functools.partial(launch.main, "compare", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
