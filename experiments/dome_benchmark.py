"""DOME beside its rivals: accuracy at equal guarantee, over budgets, bytes sent and columns.

Clients bring one record each to a round, whose gradient they send through a sketch of k numbers, or
as it is; a secure sum shows a server their noisy sum alone. Every record takes part once an epoch,
in a fixed order. Compared are a learned sketch (DOME), a fixed random one, a count sketch, the
leading directions of public gradients (an oracle: nobody else has public data), and the full
dimension, by Adam without the noise in its second moment and by momentum.

Every method is tuned with as many trials on a tuning seed and held-out records, the settings that
are its own among them; the best is trained on all records with other seeds. A budget or a data set
at a time divides a preset: what is there is read.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from _common import claims, launch, looks, tables, tune
from dpjax.accounting.guarantee import Guarantee
from dpjax.algorithms.exchange import Trusted
from dpjax.algorithms.federated import Federated, dome
from dpjax.algorithms.sketches import Learned
from dpjax.contrib import networks
from dpjax.contrib.rules import UpdateRule
from dpjax.contrib.sketches import Count, FixedFrame, GivenFrame
from dpjax.data import load, partition, split
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.plans import plan, protect
from dpjax.plans.noise import SumShares
from dpjax.results import plots
from dpjax.topology import graphs, mixing
from dpjax.transforms.sketch import flat

__all__ = ["PRESETS", "Config", "experiment", "main"]

TITLES = {
    "adam": "DP-Adam, all numbers",
    "momentum": "DP momentum, all numbers",
    "fedavg": "DP-FedAvg, all numbers",
    "dome": "DOME",
    "fixed": "random sketch",
    "count": "count sketch",
    "oracle": "public directions",
}
"""Methods by name, in the order of the tables."""

SKETCHES = ("dome", "fixed", "count", "oracle")
RIVALS = ("adam", "momentum", "fedavg", "fixed", "count")
LOCAL_STEPS = 4
"""Steps of DP-FedAvg at a client, on its own record."""
"""What has no more than DOME has: the oracle needs public data."""


@dataclass(frozen=True)
class Config:
    """What is trained, at which guarantees, and how it is tuned.

    Attributes:
        dataset: A name that `dpjax.data.load.load` takes, of a file in the data cache too.
        model: One of `dpjax.contrib.networks.NETWORKS`, or "linear" for two classes.
        layout: How convolutions are computed.
        records: Training records, at most; 0 is all.
        public: Further records, of which the oracle knows all.
        test_records: Measure on only that many test records; 0 is all.
        methods: Names of `TITLES`.
        epsilon: Budgets, at ``k[0]``.
        k: Numbers of a sketch; the others are run at ``at_epsilon``, by ``swept``.
        at_epsilon: Budget of the sweep over k.
        swept: Sketches of the sweep over k.
        delta: Target delta.
        places: Agents whose messages are summed.
        batch_size: Clients at each place in a round, each with one record.
        epochs: How often every record takes part.
        clip_norm: What gradients, or sketches of them, are scaled to (automatic clipping).
        floors: Least second moments of Adam that are tried in the full dimension; sketches have the
            largest.
        paths: Step sizes over the square root of the floor: what a direction without a second
            moment is stepped by.
        seeds: Seeds of the reported runs.
        tuning_seed: Seed of the trials.
        validation: Fraction of the training records held out while tuning.
        measurements: How often the reported runs are measured.
    """

    dataset: str = "mnist"
    model: str = "small_cnn"
    layout: Literal["conv", "patches"] = "patches"
    records: int = 3_840
    public: int = 400
    test_records: int = 2_000
    methods: tuple[str, ...] = tuple(TITLES)
    epsilon: tuple[float, ...] = (4.0, 1.0)
    k: tuple[int, ...] = (64, 16, 256)
    at_epsilon: float = 4.0
    swept: tuple[str, ...] = ("dome", "count")
    delta: float = 1e-5
    places: int = 4
    batch_size: int = 16
    epochs: int = 2
    clip_norm: float = 1.0
    floors: tuple[float, ...] = (1e-5, 1e-3)
    paths: tuple[float, ...] = (20.0, 10.0, 5.0, 2.5, 1.2, 0.6, 0.3, 0.15, 0.08, 0.04)
    seeds: tuple[int, ...] = tuple(range(5))
    tuning_seed: int = 100
    validation: float = 0.2
    measurements: int = 5

    def __post_init__(self) -> None:
        """Refuse what could not be run to its end, or would not be a fair comparison."""
        reference = {"methods": TITLES, "swept": SKETCHES}
        launch.check(self, {"places": 2}, known=reference, empty=("swept",))
        for name in self.methods:
            self.trials(name, self.k[0], None)

    def cells(self) -> list[tuple[str, float, int]]:
        """Method, budget and k of each cell; 0 is no sketch."""
        results = [
            (name, epsilon, self.k[0] if name in SKETCHES else 0)
            for epsilon in self.epsilon
            for name in self.methods
        ]
        return results + [
            (name, self.at_epsilon, k)
            for k in self.k[1:]
            for name in self.methods
            if name in self.swept
        ]

    def trials(self, name: str, k: int, public: Any) -> list[tuple["Setting", tuple[float, ...]]]:
        """Settings of a method with the step sizes of each: as many trials for every method.

        Raises:
            ValueError: For fewer step sizes than settings.
        """
        settings = _settings(self, name, k, public)
        dealt = tune.dealt(self.paths, len(settings))
        return [
            (setting, tuple(setting.unit * path for path in paths))
            for setting, paths in zip(settings, dealt, strict=True)
        ]


class Setting(NamedTuple):
    """What a method is tried with, beside its step sizes.

    Attributes:
        name: What records call it.
        method: What clients send.
        rule: How noisy means become steps.
        unit: Step size of a path of 1.
    """

    name: str
    method: Federated
    rule: UpdateRule
    unit: float


def _settings(config: Config, name: str, k: int, public: Any) -> list[Setting]:
    """Two settings of each method, of what it is most sensitive to."""
    floor = max(config.floors)

    def adam(label: str, method: Federated, minimum: float = floor) -> Setting:
        return Setting(label, method, UpdateRule("adam", floor=minimum), math.sqrt(minimum))

    trusted = Trusted()
    if name == "adam":
        return [adam(f"floor {item:g}", Federated(trusted), item) for item in config.floors]
    if name == "momentum":
        return [
            Setting(f"beta {beta:g}", Federated(trusted), UpdateRule("momentum", beta=beta), 1.0)
            for beta in (0.9, 0.7)[: len(config.paths)]
        ]
    if name == "fedavg":
        return [
            Setting(
                f"local step {number:g}",
                Federated(trusted, local_steps=LOCAL_STEPS, local_step_size=number),
                UpdateRule(),
                1.0,
            )
            for number in (0.3, 0.1)
        ]
    if name == "dome":
        return [
            adam("centred", dome(k, trusted)),
            adam("not centred", Federated(trusted, sketch=Learned(k))),
        ]
    if name == "count":
        rows = [rows for rows in (1, 4) if k % rows == 0]
        return [adam(f"{row} rows", Federated(trusted, sketch=Count(k, row))) for row in rows]
    if name == "fixed":
        sketch: Any = FixedFrame(k, is_orthonormal=False)
    else:
        sketch = None if public is None else GivenFrame(public)
    return [
        adam(f"floor {value:g}", Federated(trusted, sketch=sketch), value)
        for value in config.floors
    ]


PRESETS = {
    "tiny": Config(
        dataset="breast_cancer", model="linear", records=320, public=60,
        methods=("momentum", "dome"), epsilon=(8.0,), k=(8,), at_epsilon=8.0, places=2,
        batch_size=16, epochs=1, floors=(1e-3,), paths=(1.2, 0.6), seeds=(0, 1), measurements=2,
    ),
    "cpu": Config(),
    "cpu_a9a": Config(
        dataset="a9a", model="linear", records=6_400, epsilon=(1.0, 0.3, 3.0), k=(16, 4, 64),
        at_epsilon=1.0, swept=SKETCHES, epochs=3, floors=(1e-4, 1e-3),
    ),
    "cpu_cifar": Config(
        dataset="cifar10_small", epsilon=(8.0,), k=(64,), at_epsilon=8.0,
        methods=("momentum", "dome", "count"),
    ),
    "full": Config(
        records=0, public=2_000, test_records=0, places=16, batch_size=32, epochs=10,
        epsilon=(1.0, 0.25, 0.5, 2.0, 4.0, 8.0), at_epsilon=1.0, k=(64, 16, 256, 1024),
        seeds=tuple(range(10)), swept=SKETCHES,
    ),
    "full_cifar": Config(
        dataset="cifar10", model="cnn5", layout="conv", records=0, public=2_000, test_records=0,
        places=16, batch_size=64, epochs=30, epsilon=(4.0, 1.0, 2.0, 8.0), k=(64, 16, 256),
        swept=SKETCHES,
    ),
}  # fmt: skip


class Records(NamedTuple):
    """What is trained on, measured on, and public.

    Attributes:
        train: Training records, those of clients.
        public: Further records.
        test: Test records.
        model: The network.
        loss: Its loss.
    """

    train: tuple[np.ndarray, np.ndarray]
    public: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    model: Any
    loss: str


@functools.cache
def read(
    dataset: str, model: str, layout: Any, records: int, public: int, test_records: int
) -> Records:
    """Read a data set; the public records are the first ones."""
    (x, y), test = split.with_test(load.load(dataset), 0.2, seed=1)
    if model == "linear":
        network = Linear()
        loss = "logistic"
    else:
        classes = int(y.max()) + 1
        network = networks.network(model, classes, layout, pixels=x.dtype == np.uint8)
        loss = "cross_entropy"
    last = public + records if records else None
    test = tuple(part[: test_records or None] for part in test)
    return Records((x[public:last], y[public:last]), (x[:public], y[:public]), test, network, loss)


def learn(config: Config, records: Records, train: Any, test: Any) -> Problem:
    """The problem of as many records as fill whole rounds."""
    each = config.places * config.batch_size
    count = len(train[1]) // each * each
    if not count:
        raise ValueError(
            f"records is {config.records}, fewer for training than the {each} of a round; give more"
        )
    shards = partition.iid(count, config.places, 0)
    train = tuple(part[:count] for part in train)
    return supervised(records.model, records.loss, train, test, shards, name=config.dataset)


@functools.cache
def directions(config: Config, k: int) -> np.ndarray:
    """The leading directions [d, k] of public gradients, along a training by public records.

    Adam's, at a step size of 3e-3, by batches of a quarter of the records.
    """
    records = _records(config)
    x, y = records.public
    shards = partition.iid(len(y), 1, 0)
    task = supervised(
        records.model, records.loss, (x, y), records.test, shards, name=config.dataset
    )
    params = task.init(jax.random.key(config.tuning_seed))
    link = optax.adam(3e-3)
    random = np.random.default_rng(config.tuning_seed)
    size = max(1, len(y) // 4)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        gradient = jax.grad(task.batch_loss)(params, *batch)
        updates, state = link.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, flat(gradient)[0]

    state = link.init(params)
    selection = []
    for _ in range(max(200, 2 * k)):
        rows = random.choice(len(y), size, replace=False)
        params, state, gradient = step(params, state, (task.x[rows], task.y[rows]))
        selection.append(gradient)
    _, _, leading = jnp.linalg.svd(jnp.stack(selection), full_matrices=False)
    return np.asarray(leading[:k].T)


def _records(config: Config) -> Records:
    return read(
        config.dataset, config.model, config.layout, config.records, config.public,
        config.test_records,
    )  # fmt: skip


def plans(
    config: Config, setting: Setting, epsilon: float, steps: Iterable[float], count: int
) -> list[plan.Plan]:
    """A plan for every step size, for so many training records."""
    separation = count // (config.places * config.batch_size)
    weights = mixing.metropolis_hastings(graphs.complete(config.places))
    rounds = config.epochs * separation
    return [
        plan.make(
            plan.Config(
                method=setting.method,
                noise=SumShares(),
                budget=protect.Budget(epsilon, config.delta),
                protect=protect.Protect(
                    "zero_out_record", clip_norm=config.clip_norm, clipping="automatic",
                    attacker="aggregator",
                ),
                sampler=samplers.Cyclic(config.epochs, separation, config.batch_size),
                optimizer=setting.rule.chain(step),
                rounds=rounds,
            ),
            weights,
        )
        for step in steps
    ]  # fmt: skip


def train(
    config: Config, name: str, epsilon: float, k: int, lab: launch.Lab, folder: Path
) -> list[dict[str, Any]]:
    """Tune and run one method at one budget and one k; rows of both phases."""
    records = _records(config)
    public = directions(config, k) if name == "oracle" else None
    tried = [
        tune.Trial(setting.name, steps, functools.partial(plans, config, setting, epsilon))
        for setting, steps in config.trials(name, k, public)
    ]
    fit, validation = split.split(*records.train, config.validation, seed=0)
    final_task = learn(config, records, records.train, records.test)
    best = tune.reported(
        tried, learn(config, records, fit, validation), final_task, seeds=config.seeds,
        tuning_seeds=(config.tuning_seed,), measurements=config.measurements,
        runner=lab.run, checkpoint=folder,
    )  # fmt: skip
    final = best.final
    clients = final.rounds_per_second * config.places * config.batch_size
    lab.say(
        f"  {TITLES[name]}, epsilon {epsilon:g}, k {k}: {best.trial.name}, step "
        f"{best.step_size:.3g}, test accuracy {final.metrics['test_accuracy'][-1].mean():.4f}, "
        f"{clients:,.0f} clients/s"
    )
    shapes = jax.eval_shape(final_task.init, jax.random.key(0))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    extra = {"budget_epsilon": epsilon, "method": TITLES[name], "k": k or parameters}
    extra |= {"parameters": parameters, "bytes_a_turn": 4 * (k or parameters)}
    return best.rows(
        lambda trial, result: {"setting": trial.name}, design=name, dataset=config.dataset,
        model=config.model, **extra,
    )  # fmt: skip


def experiment(config: Config, lab: launch.Lab) -> None:
    """Train in a learned sketch over a secure sum, beside other sketches and none."""
    cells = []
    for name, epsilon, k in config.cells():
        listed = ("methods", "swept", "at_epsilon")
        stored = launch.stored(config, *listed, method=name, epsilon=epsilon, k=k)
        file = launch.file_name(f"{config.dataset}_{config.model}_{name}_{k}_{epsilon:g}")
        compute = functools.partial(train, config, name, epsilon, k, lab)
        cells.append((file, stored, compute))
    report(config, lab, lab.cells(cells, seed=config.seeds))


def wins(rows: Any, minimum: float = 0.0) -> list[dict[str, Any]]:
    """Where DOME wins and where not: against each rival at each budget and k, paired over seeds.

    Args:
        rows: Rows of the last round with "design", "budget_epsilon", "k", "seed", ``points``.
            A rival without a sketch is at one k of its own, and compared at every k of DOME's.
        minimum: Points that a win is at least.

    Returns:
        "epsilon", "k", "against", "gain in points", "standard error", "seeds", how many times as
        many "bytes" the rival sends, and the "outcome": "wins", "loses",
        "undecided: ..." (within chance by Student's t, or one seed), or "diverged" where a run of
        DOME's has no number.
    """
    results = []
    own = rows[rows["design"] == "dome"]
    for (epsilon, k), mine in own.groupby(["budget_epsilon", "k"], sort=False):
        for rival in (*RIVALS, "oracle"):
            theirs = rows[(rows["design"] == rival) & (rows["budget_epsilon"] == epsilon)]
            if rival in SKETCHES:
                theirs = theirs[theirs["k"] == k]
            if not len(theirs):
                continue
            pair = tables.paired(rows.loc[[*mine.index, *theirs.index]], rival, "dome", "points")
            gain = pair.mean
            margin = claims.margin(pair.standard_error, pair.count)
            results.append({
                "epsilon": epsilon, "k": k, "against": TITLES[rival], "gain in points": gain,
                "standard error": pair.standard_error, "seeds": pair.count,
                "times the bytes": float(theirs["k"].iloc[0] / k),
                "outcome": _outcome(gain, margin, minimum),
            })  # fmt: skip
    return results


def _outcome(gain: float, margin: float, minimum: float) -> str:
    if math.isnan(gain):
        return "diverged"
    if not math.isfinite(margin):
        return f"{claims.UNTOLD}: one seed"
    if gain > max(margin, minimum):
        return "wins"
    return "loses" if -gain > max(margin, minimum) else f"{claims.UNTOLD}: within chance"


def summary(result: list[dict[str, Any]]) -> str:
    """The outcomes in a line a rival: where DOME wins, where it loses, what cannot be told.

    Args:
        result: Rows of `wins`.
    """
    lines = []
    for rival in dict.fromkeys(row["against"] for row in result):
        own = [row for row in result if row["against"] == rival]
        parts = []
        for word in ("wins", "loses", claims.UNTOLD, "diverged"):
            level = [
                f"epsilon {row['epsilon']:g} k {row['k']} ({row['gain in points']:+.1f})"
                for row in own
                if row["outcome"].startswith(word)
            ]
            parts += [f"{word} at {', '.join(level)}"] if level else []
        lines.append(f"against {rival}: {'; '.join(parts)}")
    return "\n".join(lines)


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Print the tables and the outcomes, and draw the figure, from the records."""
    final = frame[frame["phase"] == "final"]
    last = final[final["round"] == final["rounds"]]
    last = last.assign(points=100 * last["test_accuracy"])
    keys = ["budget_epsilon", "method", "setting", "step_size", "k", "bytes_a_turn"]
    table = tables.summary(last, keys, "points")
    lab.say(f"\n{config.dataset}, {config.model}: test accuracy in %, bytes a client sends a turn")
    lab.say(tables.text(table.rename(columns={"mean": "accuracy", "count": "seeds"})))
    tuning = frame[frame["phase"] == "tuning"]
    tried = tuning.groupby(["design", "budget_epsilon", "k"])[["setting", "step_size"]]
    counts = tried.apply(lambda rows: len(rows.drop_duplicates()))
    lab.say(f"trials of each: {', '.join(map(str, sorted(set(counts))))}")
    lab.say_ends(tables.at_ends(frame, ["method", "budget_epsilon", "k"]))
    result = wins(last)
    if result:
        lab.say("DOME against others, paired over seeds:\n" + tables.text(result))
        lab.say("\n" + summary(result))
    stated = Guarantee.from_dict(last["guarantee"].iloc[0])
    lab.say(
        f"\nguarantee of the first run: {stated.statement()} All others at the same epsilon state "
        "the same. Step sizes and settings were tuned on the training data, on another seed; that "
        "is outside epsilon."
    )
    draw(config, lab, last)


def draw(config: Config, lab: launch.Lab, last: Any) -> None:
    """Accuracy over budgets at one k, and over the numbers sent at one budget."""
    several = len(config.epsilon) > 1
    sheet, panels = plots.figure(1, 1 + several, sharey="row")
    own = last["k"].isin([config.k[0], *last["parameters"]])
    ylabel = looks.accuracy(config.dataset)
    note = "Numbers have four bytes. Tuning is outside epsilon."
    display = {name: looks.look(name, title) for name, title in TITLES.items()}
    if several:
        plots.lines(
            last[own], "budget_epsilon", "points", ax=panels[0], ylabel=ylabel,
            looks=display, xlabel="epsilon", log_x=True,
            title=f"sketches of {config.k[0]} numbers",
        )  # fmt: skip
    subset = last[last["budget_epsilon"] == config.at_epsilon]
    if not len(subset):
        subset = last[last["budget_epsilon"] == last["budget_epsilon"].iloc[0]]
    plots.lines(
        subset, "k", "points", ax=panels[-1], ylabel=ylabel, log_x=True, looks=display,
        xlabel="numbers that a client sends",
        title=f"epsilon {subset['budget_epsilon'].iloc[0]:g}", note=note,
    )  # fmt: skip
    lab.figure(sheet, f"dome_benchmark_{config.dataset}.svg")


main = functools.partial(launch.main, "dome_benchmark", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
