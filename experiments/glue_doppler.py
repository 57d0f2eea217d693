"""Private fine-tuning of RoBERTa on GLUE with and without a low-pass filter: DOPPLER, Table 3.

One agent holds the texts: central DP training with Poisson-sampled batches, noise calibrated by
privacy loss distributions, delta = N^-1.1. Step sizes are tuned on one seed and a validation part
of the training data, as many for each method; the dev file is the test set. Without a file of
pretrained weights it runs from a small random start, which is not the paper's run, and says so. The
preset full has the paper's sizes with ``--weights FILE``, and one of its four tasks at a time.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from _common import ablations, claims, launch, looks, tables, tune
from dpjax.accounting.guarantee import Guarantee
from dpjax.contrib import roberta, texts, tokenizer
from dpjax.contrib.central import Central
from dpjax.contrib.rules import UpdateRule, read_filter
from dpjax.data import cache, partition, split
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.plans import plan
from dpjax.results import plots

__all__ = ["PRESETS", "Config", "experiment", "main"]

UNCORRECTED = "adam, uncorrected"
TUNED = "Step sizes were tuned on a validation part, which is outside epsilon."
NOT_THE_PAPERS = "Not the paper's run: a small network from a random start."


class Uncorrected(UpdateRule):
    """Adam as Li et al. run it: its second moment holds the noise's variance too."""

    def __call__(self, step_size: Any, noise: Any = 0.0) -> Any:
        """Return the optax chain of one model."""
        return super().__call__(step_size, 0.0)


@dataclass(frozen=True)
class Config:
    """What is trained, by which methods, at which budgets.

    Attributes:
        task: A task of GLUE, whose files lie in the data cache.
        weights: A safetensors file of roberta-base; None is a random start of the size below.
        frozen: Parts of the paths of parameters that stay as they start, as "words" or "layer_0".
        width: Channels of a token, for a random start.
        depth: Layers, for a random start.
        length: Tokens a record.
        optimizer: What stands behind the filters, or has them as its first moment.
        filter: Filters: none, the published ones by name, adaptive, or coefficients.
        uncorrected: Whether Adam whose second moment keeps the noise's variance is run too, which
            Table 3 compares with; of adam alone.
        epsilon: Budgets.
        steps: Step sizes to tune over.
        schedule: Constant steps, or cosine: 5 % of the rounds up, then down.
        clipping: flat or automatic.
        clip_norm: C.
        epochs: Rounds are the epochs over the sampling rate, rounded up.
        batch_size: Expected size of a Poisson-sampled batch.
        capacity: Records a pass.
        records: Use only that many training records; 0 is all.
        seeds: Seeds of the reported runs.
        tuning_seed: Seed of the tuning runs; none of ``seeds``.
        validation: Fraction of the training records held out while tuning.
        measurements: How often the reported runs are measured.
    """

    task: Literal["sst2", "qnli", "qqp", "mnli", "rte", "mrpc"] = "sst2"
    weights: Path | None = None
    frozen: tuple[str, ...] = ()
    width: int = 32
    depth: int = 1
    length: int = 32
    optimizer: Literal["sgd", "momentum", "nesterov", "adam", "galore", "muon"] = "adam"
    filter: tuple[str, ...] = ("none", "first v1")
    uncorrected: bool = False
    epsilon: tuple[float, ...] = (3.0, 8.0)
    steps: tuple[float, ...] = (3e-3, 1e-3, 3e-4)
    schedule: Literal["constant", "cosine"] = "constant"
    clipping: Literal["flat", "automatic"] = "automatic"
    clip_norm: float = 1.0
    epochs: float = 3.0
    batch_size: int = 1024
    capacity: int = 128
    records: int = 0
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 100
    validation: float = 0.05
    measurements: int = 5

    def __post_init__(self) -> None:
        """Refuse what could not be run to its end."""
        launch.check(self, {"length": 3, "width": 2}, empty=("frozen",))
        if self.width % 2:
            raise ValueError(f"width is {self.width}; give an even number, for two heads")
        if self.uncorrected and self.optimizer != "adam":
            raise ValueError(
                f"uncorrected is True with {self.optimizer}, which corrects nothing; take adam"
            )
        for name in self.methods:
            self.rule(name)

    @property
    def methods(self) -> dict[str, str]:
        """Every method's filter by the method's name."""
        plain = self.optimizer
        own = {plain if text == "none" else f"{plain} + {text}": text for text in self.filter}
        return own | ({UNCORRECTED: "none"} if self.uncorrected else {})

    def rule(self, name: str) -> UpdateRule:
        """What becomes of a method's noisy means.

        Args:
            name: Of the method.
        """
        kind = Uncorrected if name == UNCORRECTED else UpdateRule
        return kind(self.optimizer, read_filter(self.methods[name]))

    @property
    def remark(self) -> str:
        """What every caption says of a start without pretrained weights."""
        return "" if self.weights else NOT_THE_PAPERS


PRESETS = {
    "tiny": Config(
        width=8, length=8, epsilon=(8.0,), steps=(1e-2,), epochs=1.0, batch_size=128, capacity=64,
        records=1024, seeds=(0,), measurements=2, optimizer="sgd",
    ),
    "cpu": Config(uncorrected=True, steps=(3e-2, 1e-2, 3e-3, 1e-3)),
    "gpu": Config(
        uncorrected=True, length=128, steps=(1e-3, 3e-4, 1e-4, 3e-5), epochs=10.0,
        batch_size=2048, capacity=64,
    ),
    "full": Config(
        uncorrected=True, length=256, steps=(3e-3, 1e-3, 3e-4, 1e-4, 3e-5), epochs=20.0,
        batch_size=4096, capacity=64, seeds=(0, 1, 2, 3, 4),
    ),
}  # fmt: skip


def learner(config: Config) -> Any:
    """The data, and the function that makes the one agent's problem of two parts of them."""
    spelling = tokenizer.load(cache.folder() / "bpe")
    data = texts.read_task(config.task, spelling, config.length)
    classes = int(data.y_train.max()) + 1
    if config.weights is None:
        model = roberta.RoBERTa(
            classes, positions=config.length + 2, width=config.width, depth=config.depth, heads=2,
            hidden=4 * config.width,
        )  # fmt: skip
        start = model.init(jax.random.key(0), jnp.asarray(data.x_train[:1]))
    else:
        model = roberta.RoBERTa(classes)
        start = roberta.load_roberta(config.weights, model, key=jax.random.key(0))
    argument = {"params": start} if config.weights or config.frozen else {}
    if config.frozen:
        argument["frozen"] = lambda path: any(part in path for part in config.frozen)

    def learn(train: Any, test: Any) -> Problem:
        shard = partition.iid(len(train[1]), 1, 0)
        name = f"GLUE, {config.task}"
        return supervised(model, "cross_entropy", train, test, shard, name=name, **argument)

    train, test = split.with_test(data, 0.1, seed=1)
    x, y = (part[: config.records or None] for part in train)
    return learn, (x, y), test


def plans(
    config: Config, name: str, epsilon: float, delta: float, steps: tuple[float, ...], count: int
) -> list[plan.Plan]:
    """A plan for every step size, for so many training records."""
    recipe = Central(
        epochs=config.epochs,
        batch_size=config.batch_size,
        capacity=config.capacity,
        clip_norm=config.clip_norm,
        clipping=config.clipping,
        schedule=config.schedule,
    )
    return recipe.plans(config.rule(name), steps, epsilon, count, delta=delta)


def train(
    config: Config, name: str, epsilon: float, lab: launch.Lab, folder: Path
) -> list[dict[str, Any]]:
    """Tune and run one method at one budget; rows of both phases."""
    learn, complete, test = learner(config)
    delta = len(complete[1]) ** -1.1
    where = {"design": name, "dataset": config.task, "budget_epsilon": epsilon}
    where |= {"start": "random" if config.weights is None else "pretrained"}
    fit, validation = split.split(*complete, config.validation, seed=0)
    make = functools.partial(plans, config, name, epsilon, delta)
    best = tune.reported(
        [tune.Trial(name, config.steps, make)],
        learn(fit, validation),
        learn(complete, test),
        seeds=config.seeds,
        tuning_seeds=(config.tuning_seed,),
        measurements=config.measurements,
        runner=lab.run,
        checkpoint=folder,
    )
    return best.rows(**where)


def experiment(config: Config, lab: launch.Lab) -> None:
    """Fine-tune a text classifier privately on a task of GLUE, with and without a filter."""
    cells = []
    for name in config.methods:
        for epsilon in config.epsilon:
            stored = launch.stored(config, "filter", "uncorrected", method=name, epsilon=epsilon)
            file = launch.file_name(f"{config.task}_{name}_{epsilon:g}")
            compute = functools.partial(train, config, name, epsilon, lab)
            cells.append((file, stored, compute))
    report(config, lab, lab.cells(cells, seed=config.seeds))


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Print the tables and draw the figures from the records."""
    final = frame[frame["phase"] == "final"]
    last = final[final["round"] == final["rounds"]]
    last = last.assign(points=100 * last["test_accuracy"])
    for epsilon, group in last.groupby("budget_epsilon", sort=False):
        lab.say(f"\nGLUE, {config.task}, epsilon {epsilon:g}: accuracy on the dev file in %")
        if config.remark:
            lab.say(config.remark)
        summary = tables.summary(group, ["design", "step_size"], "points")
        summary["trials"] = len(config.steps)
        lab.say(tables.text(summary.rename(columns={"mean": "accuracy", "count": "seeds"})))
        lab.say_ends(tables.at_ends(frame[frame["budget_epsilon"] == epsilon]))
        names = list(dict.fromkeys(group["design"]))
        rows = claims.gains(group, names[0], "points")
        if rows:
            lab.say(f"against {looks.title(names[0])}, paired over seeds:\n" + tables.text(rows))
    judge(config, lab, last)
    stated = Guarantee.from_dict(last["guarantee"].iloc[0])
    lab.say(
        f"\nguarantee of the first run: {stated.statement()} Others at the same epsilon state the "
        "same. Step sizes were tuned on the training data, on another seed; that is outside "
        "epsilon."
    )
    for epsilon, rows in final.groupby("budget_epsilon", sort=False):
        sheet = plots.lines(
            looks.percent(rows),
            "round",
            "points",
            xlabel=f"round (epsilon {epsilon:g})",
            ylabel=looks.accuracy(config.task, of="accuracy on the dev file"),
            note=f"{TUNED} {config.remark}".strip(),
            looks=looks.titled(rows["design"]),
        )
        lab.figure(sheet, f"glue_doppler_{config.task}_{epsilon:g}.svg")


def judge(config: Config, lab: launch.Lab, last: Any) -> None:
    """Print the verdicts on Table 3, for every filter."""
    if config.optimizer != "adam":
        lab.say(f"\nTable 3 is of Adam, and this of {config.optimizer}: not judged")
        return
    titles = {name: text for name, text in config.methods.items() if text != "none"}
    titles |= {config.optimizer: "no filter", UNCORRECTED: "uncorrected"}
    places = [f"epsilon {epsilon:g}" for epsilon in config.epsilon]
    series = [
        f"epsilon {epsilon:g}, {titles[name]}"
        for epsilon, name in zip(last["budget_epsilon"], last["design"], strict=True)
    ]
    for text in config.filter:
        if text != "none":
            lab.say(f"\n{text}, {config.task}: {config.remark}".rstrip(": "))
            for claim in ablations.texts(last.assign(series=series), text, places):
                lab.say(claim.text())


main = functools.partial(launch.main, "glue_doppler", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
