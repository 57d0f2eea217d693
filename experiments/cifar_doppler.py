"""Private training of image classifiers with and without low-pass filters: DOPPLER, judged.

One agent holds the data: central DP training with Poisson-sampled batches, noise calibrated by
privacy loss distributions, delta = N^-1.1. Every method has as many trials of its step size (and
of its own settings) as every other one, on one seed and a validation part of the training data;
the best is then trained on all of them with other seeds, and tested.

A budget at a time divides a preset: ``--preset cpu_cifar --epsilon 8``, and later the preset whole,
which reads what is there. The presets gpu and full are the paper's CIFAR-10 with its five-layer CNN
at fixed epochs and batches; its other networks and data, and its search over both, are options. The
presets paper_cifar and paper_cifar100 are one of its claims each, in minutes of a GPU.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from _common import claims, launch, looks, tables, tune
from dpjax.accounting.guarantee import Guarantee
from dpjax.algorithms.average import Average
from dpjax.algorithms.disk import DiSK
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.pmlf import PMLF
from dpjax.contrib import datasets, images
from dpjax.contrib.central import Assumed, Central, title
from dpjax.contrib.rules import UpdateRule, read_filter
from dpjax.data import split
from dpjax.plans import plan
from dpjax.results import plots

__all__ = ["PRESETS", "Config", "experiment", "main"]


class Variant(NamedTuple):
    """One setting of a method; the step size is tuned beside it.

    Attributes:
        name: What records call it.
        rule: What becomes of noisy means, without schedule and rounds.
        method: What is computed; of the number of rounds where it depends on them.
        batch: Factor of the batch size, at equal epochs.
        bands: Diagonals b of noise correlated over rounds, with coins flipped for every b-th record
            alone; 0 is fresh noise.
        together: Whether a filter is chosen together with that noise, for gradients of `NORM`
            and `CORRELATION`.
    """

    name: str
    rule: UpdateRule
    method: Any = lambda rounds: DSGD()
    batch: float = 1.0
    bands: int = 0
    together: bool = False


def _fixed(method: Any) -> Any:
    return lambda rounds: method


def _opacus(kappa: float, gamma: float | None) -> DiSK:
    return DiSK(kappa=kappa, gamma=gamma, weights="opacus")


FIRST = read_filter("first v1")
RIVALS = {
    "momentum": (
        Variant("beta 0.9", UpdateRule("momentum", beta=0.9)),
        Variant("beta 0.7", UpdateRule("momentum", beta=0.7)),
    ),
    "nesterov": (
        Variant("beta 0.9", UpdateRule("nesterov", beta=0.9)),
        Variant("beta 0.7", UpdateRule("nesterov", beta=0.7)),
    ),
    "averaged": (
        Variant("last half", UpdateRule(), lambda rounds: Average(DSGD(), 1.0, rounds // 2)),
        Variant(
            "tenth", UpdateRule(), lambda rounds: Average(DSGD(), 1 - 1 / max(2, rounds // 10))
        ),
    ),
    "larger batch": (Variant("doubled", UpdateRule(), batch=2.0),),
    "banded": (
        Variant("4 bands", UpdateRule(), bands=4),
        Variant("8 bands", UpdateRule(), bands=8),
    ),
    "DiSK": (
        Variant("kappa 0.7, one gradient", UpdateRule(), _fixed(DiSK(kappa=0.7, gamma=None))),
        Variant("kappa 0.4, one gradient", UpdateRule(), _fixed(DiSK(kappa=0.4, gamma=None))),
    ),
    "DiSK (Opacus)": (
        Variant("kappa 0.7, one gradient", UpdateRule(), _fixed(_opacus(0.7, None))),
        Variant("kappa 0.9, one gradient", UpdateRule(), _fixed(_opacus(0.9, None))),
    ),
    "DiSK, two gradients": (
        Variant("paper's weights", UpdateRule(), _fixed(DiSK(kappa=0.7, gamma=0.5))),
        Variant("Opacus's weights", UpdateRule(), _fixed(_opacus(0.7, 0.5))),
    ),
    "DP-PMLF": (Variant("2 models", UpdateRule(filter=FIRST), _fixed(PMLF(length=2, beta=0.9))),),
    "muon": (Variant("optax's", UpdateRule("muon")),),
}
"""Methods beside the optimizer and its filters, each with the settings that are tuned."""

FILTERED = {
    "banded, filtered": (
        Variant("8 bands, beta 0.9", UpdateRule("momentum", beta=0.9), bands=8),
        Variant("8 bands, beta 0.7", UpdateRule("momentum", beta=0.7), bands=8),
    ),
    "banded, together": (Variant("8 bands", UpdateRule(), bands=8, together=True),),
}
"""A filter behind banded noise, and one that is chosen together with it: for some 1,000 rounds."""

NORM = 0.02
CORRELATION = 0.99
"""Of the mean gradient: as measured on MNIST, see `experiments/doppler_spectra.py`."""

_NAMED = RIVALS | FILTERED
_NAMED |= {f"{name}: {item.name}": (item,) for name, several in _NAMED.items() for item in several}
"""And with one of their settings alone, by both names."""

LISTS = {"adam": "moment_steps", "galore": "moment_steps", "muon": "muon_steps"}
PAPERS = ("cnn5", "vit_small", "efficientnet", "resnet50")
TUNED = "Step sizes were tuned on a validation part, which is outside epsilon."


@dataclass(frozen=True)
class Config:
    """What is trained, by which methods, at which budgets.

    Attributes:
        dataset: Images: 'digits', 'mnist', 'fashion_mnist', 'cifar10', 'cifar10_small', 'cifar100',
            or the name of an npz file in the data cache.
        model: One of `dpjax.contrib.networks.NETWORKS`.
        weights: A safetensors file of vit_small_patch16_224, to fine-tune vit_small from; None is a
            start at random.
        optimizer: What stands behind the filters.
        filter: Filters of the optimizer: 'none', the published 'momentum', 'first v1', 'first v2',
            'second' and 'f1' to 'f6', 'adaptive', 'wiener', or coefficients "b_0,b_1,..;a_1,..".
        rivals: Methods that are not behind the optimizer: 'momentum', 'nesterov', 'averaged',
            'larger batch', 'banded', 'DiSK', 'DiSK (Opacus)', 'DiSK, two gradients', 'DP-PMLF',
            'muon', 'banded, filtered', 'banded, together'; with one of its settings alone
            "banded: 8 bands", say.
        epsilon: Budgets.
        steps: Step sizes to tune over, one trial each; a method of several settings deals them out.
        moment_steps: The same for Adam and GaLore.
        muon_steps: The same for Muon.
        moves: Most further step sizes, one by one, while the best is an end of those tried.
        schedule: Constant steps, or cosine: 5 % of the rounds up, then down.
        clipping: flat, C / max(C, norm), or automatic, C / (norm + 0.01).
        per_layer: Whether each of L layers is clipped by itself, to C / sqrt(L).
        clip_norm: C.
        epochs: Rounds are the epochs over the sampling rate, rounded up.
        batch_size: Expected size of a Poisson-sampled batch.
        capacity: Records a pass; 0 is an eighth of the batch size, at least 16.
        copies: Random variants of an image (shifted, and mirrored but for digits), averaged before
            the clip; 0 has none.
        records: Use only that many training records; 0 is all.
        seeds: Seeds of the reported runs: initial model, batches and noise.
        tuning_seed: Seed of the tuning runs; none of ``seeds``.
        validation: Fraction of the training records held out while tuning.
        measurements: How often the reported runs are measured.
        layout: How convolutions are computed.
    """

    dataset: str = "cifar10"
    model: Literal[
        "mlp", "small_cnn", "cnn5", "wrn16_4", "wrn40_4", "resnet50", "efficientnet", "vit_small"
    ] = "cnn5"
    weights: Path | None = None
    optimizer: Literal["sgd", "momentum", "nesterov", "adam", "galore", "muon"] = "sgd"
    filter: tuple[str, ...] = ("none", "first v1")
    rivals: tuple[str, ...] = ()
    epsilon: tuple[float, ...] = (8.0,)
    steps: tuple[float, ...] = (0.8, 0.5, 0.4, 0.2, 0.1)
    moment_steps: tuple[float, ...] = (3e-3, 1e-3, 3e-4, 1e-4, 3e-5)
    muon_steps: tuple[float, ...] = (0.05, 0.02, 0.01, 0.005, 0.002)
    moves: int | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    clipping: Literal["flat", "automatic"] = "automatic"
    per_layer: bool = False
    clip_norm: float = 1.0
    epochs: float = 80.0
    batch_size: int = 1000
    capacity: int = 0
    copies: int = 0
    records: int = 0
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 100
    validation: float = 0.1
    measurements: int = 20
    layout: Literal["conv", "patches"] = "conv"

    def __post_init__(self) -> None:
        """Refuse what could not be run to its end, or would not be a fair comparison."""
        unread = ("filter", "rivals", "steps", "moment_steps", "muon_steps")
        reference = {"rivals": _NAMED}
        minimum = {"capacity": 0, "copies": 0, "moves": 0}
        launch.check(self, minimum, known=reference, empty=unread)
        datasets.check(self.dataset, images=True)
        if self.copies and self.model == "mlp":
            raise ValueError("copies are of images, and model is 'mlp'; give copies=0")
        if not (self.filter or self.rivals):
            raise ValueError("filter and rivals are empty; give at least one entry")
        used = {option: getattr(self, option) for option in map(self._tried, self.methods)}
        if len({len(steps) for steps in used.values()}) > 1:
            label = ", ".join(f"{option} is {steps}" for option, steps in used.items())
            raise ValueError(f"{label}; give as many each, so that all methods have as many trials")
        for name, variants in self.methods.items():
            steps = used[option := self._tried(name)]
            if len(variants) > len(steps):
                minimum = f"give {len(variants)} or more, one a setting of {name}"
                raise ValueError(f"{option} is {steps}; {minimum}")

    @property
    def methods(self) -> dict[str, tuple[Variant, ...]]:
        """Every method by its name, with what is tuned of it."""
        own = {}
        for text in self.filter:
            rule = UpdateRule(self.optimizer, read_filter(text))
            name = self.optimizer if text == "none" else f"{self.optimizer} + {text}"
            own[name] = (Variant(title(rule), rule),)
        # An optimizer that is a rival too is tuned as one.
        return own | {name: _NAMED[name] for name in self.rivals}

    def trials(self, name: str) -> list[tuple[Variant, tuple[float, ...]]]:
        """Settings of a method, each with the step sizes that it is tried with.

        Args:
            name: Of the method.
        """
        variants = self.methods[name]
        dealt = tune.dealt(getattr(self, self._tried(name)), len(variants))
        return list(zip(variants, dealt, strict=True))

    def _tried(self, name: str) -> str:
        """Option that holds the step sizes of a method, whose settings are of one optimizer."""
        return LISTS.get(self.methods[name][0].rule.base, "steps")

    @property
    def remark(self) -> str:
        """What tables and captions say where this is not the paper's setting."""
        complete = self.dataset in ("cifar10", "cifar100", "mnist") and not self.records
        if complete and self.model in PAPERS and self.epochs >= 50:
            return ""
        size = f"{self.records:,} records, " if self.records else ""
        words = f"{looks.words(self.dataset)}, {size}{looks.words(self.model)}"
        return f"Not the paper's setting: {words}, {looks.counted(self.epochs)}."


CPU_RIVALS = tuple(name for name in RIVALS if name != "DiSK, two gradients")
"""All but one that takes gradients one by one, twice."""

_CPU = Config(
    dataset="mnist", model="small_cnn", epsilon=(1.0, 8.0), rivals=CPU_RIVALS,
    steps=(16.0, 8.0, 4.0, 2.0, 1.0), moment_steps=(3e-2, 1e-2, 3e-3, 1e-3, 3e-4),
    muon_steps=(0.2, 0.1, 0.05, 0.02, 0.01), epochs=1.0, batch_size=256, capacity=32,
    measurements=5, layout="patches",
)  # fmt: skip

_LONG = dataclasses.replace(
    _CPU, rivals=("momentum: beta 0.9", "averaged: last half", "banded: 8 bands"),
    steps=(4.0, 2.0, 1.0), moment_steps=(3e-3, 1e-3, 3e-4), muon_steps=(0.05, 0.02, 0.01), moves=3,
    epochs=20.0, measurements=20,
)  # fmt: skip
_LONG_CIFAR = dataclasses.replace(
    _LONG, dataset="cifar10", model="cnn5", epsilon=(8.0,), steps=(2.0, 1.0, 0.5), epochs=10.0,
    rivals=("momentum: beta 0.9", "banded: 8 bands"), seeds=(0, 1),
)  # fmt: skip
# A pass takes a whole batch: a third slower with half as many. Plans and seeds are mapped: a GPU's
# own convolutions then were many times slower, see scripts/_runs.py.
_PAPER_CIFAR = dataclasses.replace(
    _LONG_CIFAR, rivals=(), steps=(0.8, 0.4, 0.2), moves=2, epochs=50.0, batch_size=1000,
    capacity=1120, seeds=(0, 1, 2, 3, 4, 5),
)  # fmt: skip

PRESETS = {
    "tiny": Config(
        dataset="digits", model="mlp", steps=(1.0, 0.5), moment_steps=(0.01, 0.003),
        muon_steps=(0.02, 0.01), epochs=2.0, batch_size=96, seeds=(0, 1), measurements=3,
        validation=0.2,
    ),
    "demo": Config(
        dataset="cifar10_small", steps=(2.0, 1.0), moment_steps=(3e-3, 1e-3),
        muon_steps=(0.02, 0.01), epochs=4.0, batch_size=250, capacity=32, measurements=8,
        layout="patches",
    ),
    "cpu": _CPU,
    "cpu_cifar": dataclasses.replace(
        _CPU, dataset="cifar10_small", model="cnn5", epochs=2.5, steps=(4.0, 2.0, 1.0, 0.5, 0.25),
        muon_steps=(0.1, 0.05, 0.02, 0.01, 0.005),
    ),
    "long": _LONG,
    "long_together": dataclasses.replace(
        _LONG, filter=("none",), batch_size=1200, steps=(8.0, 4.0, 2.0),
        rivals=(
            "momentum: beta 0.9", "banded: 8 bands", "banded, filtered: 8 bands, beta 0.9",
            "banded, together",
        ),
    ),
    "long_paper": dataclasses.replace(
        _LONG, epsilon=(8.0,), rivals=(), steps=(0.8, 0.4, 0.2), epochs=50.0, batch_size=1000
    ),
    "long_cifar": _LONG_CIFAR,
    "long_cifar100": dataclasses.replace(
        _LONG_CIFAR, dataset="cifar100", filter=("none",), rivals=("banded: 8 bands",), seeds=(0,)
    ),
    "paper_cifar": _PAPER_CIFAR,
    "paper_cifar100": dataclasses.replace(_PAPER_CIFAR, dataset="cifar100", seeds=(0, 1, 2)),
    "gpu": Config(
        epsilon=(1.0, 2.0, 4.0, 8.0), filter=("none", "first v1", "first v2", "second", "adaptive"),
        rivals=tuple(RIVALS), epochs=80.0, batch_size=1000, capacity=512,
    ),
    "full": Config(
        epsilon=(1.0, 2.0, 4.0, 8.0), rivals=("momentum",), epochs=120.0, batch_size=1000,
        capacity=512, seeds=(0, 1, 2, 3, 4),
    ),
}  # fmt: skip


def plans(
    config: Config, variant: Variant, size: int, epsilon: float, delta: float,
    steps: tuple[float, ...], count: int,
) -> list[plan.Plan]:  # fmt: skip
    """A plan for every step size, for a model of so many parameters and so many records."""
    recipe = Central(
        epochs=config.epochs, batch_size=config.batch_size, capacity=config.capacity,
        clip_norm=config.clip_norm, clipping=config.clipping, per_layer=config.per_layer,
        schedule=config.schedule,
    )  # fmt: skip
    return recipe.plans(
        variant.rule, steps, epsilon, count, delta=delta, method=variant.method,
        larger=variant.batch, bands=variant.bands,
        together=Assumed(NORM, CORRELATION, size) if variant.together else None,
    )  # fmt: skip


def train(
    config: Config, name: str, epsilon: float, lab: launch.Lab, folder: Path
) -> list[dict[str, Any]]:
    """Tune and run one method at one budget; rows of both phases."""
    data = images.read(config.dataset, config.model, config.layout, config.records, config.weights)
    delta = len(data.train[1]) ** -1.1
    where = {"design": name, "dataset": config.dataset, "model": config.model}
    clip = config.clipping + (", per layer" if config.per_layer else "")
    where |= {"budget_epsilon": epsilon, "schedule": config.schedule, "clipping": clip}
    fit, validation = split.split(*data.train, config.validation, seed=0)
    tuned, complete = (
        data.problem(*parts, config.copies)
        for parts in ((fit, validation), (data.train, data.test))
    )
    size = sum(
        leaf.size for leaf in jax.tree.leaves(jax.eval_shape(complete.init, jax.random.key(0)))
    )
    trials = [
        tune.Trial(
            variant.name, steps, functools.partial(plans, config, variant, size, epsilon, delta)
        )
        for variant, steps in config.trials(name)
    ]
    best = tune.reported(
        trials, tuned, complete, seeds=config.seeds,
        tuning_seeds=(config.tuning_seed,), measurements=config.measurements,
        moves=config.moves or 0, runner=lab.run, checkpoint=folder,
    )  # fmt: skip
    final = best.final
    accuracy = final.metrics["test_accuracy"][-1].mean()
    rate = final.rounds_per_second * final.plans[0].sampler.divisor
    lab.say(
        f"  {name}, epsilon {epsilon:g}: {best.trial.name}, step {best.step_size:g}, test accuracy "
        f"{accuracy:.4f}, {rate:,.0f} examples/s"
    )
    return best.rows(_said, **where)


def _said(trial: tune.Trial, result: Any) -> dict[str, Any]:
    """What rows say of a trial and its runs."""
    config = result.plans[0].config
    return {"rounds": config.rounds, "setting": trial.name, "batch_size": config.sampler.divisor}


MOST = 2000
"""Rounds for which a filter and noise are chosen together: of matrices [T, T]."""


def check(config: Config) -> None:
    """Refuse methods that could not run, before others have."""
    data = images.read(config.dataset, config.model, config.layout, config.records, config.weights)
    count = int(len(data.train[1]) * (1 - config.validation))
    for name, variants in config.methods.items():
        bands = max(variant.bands for variant in variants)
        if bands * config.batch_size > count:
            raise ValueError(
                f"batch_size is {config.batch_size} for {name!r}, whose batches are drawn from "
                f"one of {bands} groups of {count} records; give at most {count // bands}"
            )
        rounds = config.epochs * len(data.train[1]) / config.batch_size
        if any(item.together for item in variants) and rounds > MOST:
            raise ValueError(
                f"epochs is {config.epochs:g} and batch_size {config.batch_size}, {rounds:,.0f} "
                f"rounds for {name!r}, which takes {MOST:,} at most; give larger batches"
            )


def experiment(config: Config, lab: launch.Lab) -> None:
    """Train an image classifier privately, with and without a low-pass filter and its rivals."""
    cells = []
    for name in config.methods:
        for epsilon in config.epsilon:
            stored = launch.stored(config, "filter", "rivals", method=name, epsilon=epsilon)
            file = f"{config.dataset}_{config.model}_{name}_{epsilon:g}"
            compute = functools.partial(train, config, name, epsilon, lab)
            cells.append((launch.file_name(file), stored, compute))
    # What is stored is drawn without the data.
    if any(not (lab.folder / f"{name}.jsonl").exists() for name, *_ in cells):
        check(config)
    report(config, lab, lab.cells(cells, seed=config.seeds))


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Print the tables and draw the figures from the records."""
    final = frame[frame["phase"] == "final"]
    last = final[final["round"] == final["rounds"]]
    last = last.assign(points=100 * last["test_accuracy"])
    counts = frame[frame["phase"] == "tuning"].groupby(["budget_epsilon", "design"]).size()
    for epsilon, group in last.groupby("budget_epsilon", sort=False):
        lab.say(f"\n{config.dataset}, {config.model}, epsilon {epsilon:g}: test accuracy in %")
        if config.remark:
            lab.say(config.remark)
        summary = tables.summary(group, ["design", "setting", "step_size"], "points")
        summary["trials"] = [counts[epsilon, name] for name in summary["design"]]
        lab.say(tables.text(summary.rename(columns={"mean": "accuracy", "count": "seeds"})))
        lab.say_ends(tables.at_ends(frame[frame["budget_epsilon"] == epsilon]))
        compare(config, lab, group)
    stated = Guarantee.from_dict(last["guarantee"].iloc[0])
    lab.say(
        f"\nguarantee of the first run: {stated.statement()} All others at the same epsilon state "
        "the same, but for their rounds: filters, steps and averages cost nothing. Step sizes and "
        "settings were tuned on the training data, on another seed; that is outside epsilon."
    )
    draw(config, lab, final)


CLAIMED = (3.0, 10.0)
"""Points of accuracy that the paper says a filter gains."""


def compare(config: Config, lab: launch.Lab, group: Any) -> None:
    """Print every method's gain over the plain optimizer and over momentum, paired over seeds."""
    names = list(dict.fromkeys(group["design"]))
    bases = [n for n in names if n == config.optimizer or n.partition(":")[0] == "momentum"]
    for base in bases if len(names) > 1 else ():
        title = looks.title(base)
        rows = claims.gains(group, base, "points")
        room = 100 - group.loc[group["design"] == base, "points"].mean()
        for row in rows:
            if " + " in row["method"]:
                verdict = claims.verdict(row["gain in points"], row["margin"], CLAIMED[0])
                if room < CLAIMED[1]:
                    verdict = f"{claims.UNTOLD}: {title} leaves {room:.1f} points"
                row["3 to 10 points"] = verdict
        lab.say(f"against {title}, paired over seeds:\n" + tables.text(rows))


def draw(config: Config, lab: launch.Lab, final: Any) -> None:
    """Figures: accuracy over rounds, one for each budget."""
    stem = f"cifar_doppler_{config.dataset}_{config.model}{lab.suffix}"
    for epsilon, rows in final.groupby("budget_epsilon", sort=False):
        sheet = plots.lines(
            looks.percent(rows), "round", "points", xlabel=f"round (epsilon {epsilon:g})",
            ylabel=looks.accuracy(config.dataset),
            note=f"{TUNED} {config.remark}".strip(), looks=looks.titled(rows["design"]),
        )  # fmt: skip
        lab.figure(sheet, f"{stem}_rounds_{epsilon:g}.svg")


main = functools.partial(launch.main, "cifar_doppler", PRESETS, experiment, default="demo")
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
