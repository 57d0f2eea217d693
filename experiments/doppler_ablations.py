"""The ablations of DOPPLER, each with a plain verdict: its Figs. 4, 5, 7, 8, 9, 10, 11 and 12.

One study a figure. Each compares low-pass filtered private training with and without one thing
changed: the optimizer, the network, the filter, the clip, the step size, the schedule, the start.
Step sizes are tuned on one seed and a validation part, as many for every curve; reported runs have
other seeds. Runs that several studies need are run once. Gains are paired over seeds, and a claim
is reproduced where they are more than chance by Student's t. Verdicts are on the runs made, also
where these are much smaller than the paper's. The preset full has the paper's sizes at fixed epochs
and batches, with group norms; fine-tuning needs ``--weights FILE``, which is not here. The preset
paper_ablations is for one study at a time, in minutes of a GPU.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from _common import ablations, claims, launch, looks, tables, tune
from dpjax.accounting.guarantee import Guarantee
from dpjax.contrib import datasets, images, networks
from dpjax.contrib.central import TITLES, Central
from dpjax.contrib.rules import BASES, UpdateRule, read_filter
from dpjax.data import split
from dpjax.results import plots
from dpjax.transforms.lowpass import FILTERS, lowpass

__all__ = ["PRESETS", "STUDIES", "Cell", "Config", "experiment", "main"]

Study = Literal[
    "response", "optimizers", "models", "filters", "clipping", "steps", "schedules", "finetuning"
]
STUDIES: tuple[Study, ...] = Study.__args__  # type: ignore[attr-defined]
TABLE_2 = ("momentum", "first v1", "first v2", "second")
TABLE_4 = ("f1", "f2", "f3", "f4", "f5", "f6")
NOT_THE_PAPERS = "Not the paper's run: no pretrained weights, a start at random."


@dataclass(frozen=True)
class Config:
    """Which studies, on which data.

    Attributes:
        study: The studies: response is Fig. 5, optimizers 4, models 7, filters 8, clipping 9, steps
            10, schedules 11, finetuning 12.
        dataset: Data of all studies but models and finetuning: 'digits', 'mnist', 'fashion_mnist',
            'cifar10', 'cifar10_small', 'cifar100', or the name of an npz file in the data cache.
        model: Their network: 'mlp' (of digits), 'small_cnn', 'cnn2', 'cnn5', 'wrn16_4', 'wrn40_4',
            'resnet50', 'efficientnet', 'vit_small', 'vit_tiny'.
        records: Use only that many training records; 0 is all.
        epochs: Rounds are the epochs over the sampling rate, rounded up.
        batch_size: Expected size of a Poisson-sampled batch.
        filter: The filter of every study but filters and response: 'momentum', 'first v1',
            'first v2', 'second', 'f1' to 'f6', 'adaptive', 'wiener' or "b_0,b_1,..;a_1,..".
        optimizers: Of the study of that name: 'sgd', 'momentum', 'nesterov', 'adam', 'galore',
            'muon'.
        models: Networks of the study of that name, as ``model``.
        filters: Of the study of that name, as ``filter``, and 'none'.
        stepped: Optimizer of the study of step sizes.
        epsilon: Budgets of optimizers and finetuning.
        at_epsilon: Budget of the others.
        pictures: Data of models and finetuning, as ``dataset``.
        picture_records: Use only that many of these; 0 is all.
        picture_epochs: Epochs of models and finetuning.
        picture_batch: Their expected batch size.
        tuned_model: Network of finetuning where there are no weights.
        weights: A safetensors file of vit_small_patch16_224 for finetuning; None is a random start.
        steps: Step sizes to tune over, and those of the study of step sizes.
        moment_steps: The same for Adam and GaLore.
        moves: Most further step sizes, one by one, while the best is an end of those tried.
        space_every: Rounds between changes of GaLore's space.
        clip_norm: C.
        capacity: Records a pass.
        seeds: Seeds of the reported runs.
        tuning_seed: Seed of the tuning runs; none of ``seeds``.
        validation: Fraction of the training records held out while tuning.
        tested: Measure on the first so many test records; 0 is all.
        measurements: How often the reported runs are measured; the first is "early".
        layout: How convolutions are computed.
    """

    study: tuple[Study, ...] = STUDIES
    dataset: str = "cifar10"
    model: str = "cnn5"
    records: int = 0
    epochs: float = 150.0
    batch_size: int = 1000
    filter: str = "first v1"
    optimizers: tuple[str, ...] = ("sgd", "adam", "galore")
    models: tuple[str, ...] = ("cnn5", "vit_small", "efficientnet", "resnet50")
    filters: tuple[str, ...] = ("none", *TABLE_2, *TABLE_4)
    stepped: str = "adam"
    epsilon: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    at_epsilon: float = 8.0
    pictures: str = "cifar10"
    picture_records: int = 0
    picture_epochs: float = 150.0
    picture_batch: int = 1000
    tuned_model: str = "vit_small"
    weights: Path | None = None
    steps: tuple[float, ...] = (0.8, 0.5, 0.4, 0.2, 0.1)
    moment_steps: tuple[float, ...] = (3e-3, 1e-3, 3e-4, 1e-4, 3e-5)
    moves: int | None = None
    space_every: int = 50
    clip_norm: float = 1.0
    capacity: int = 512
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 100
    validation: float = 0.1
    tested: int = 0
    measurements: int = 20
    layout: Literal["conv", "patches"] = "conv"

    def __post_init__(self) -> None:
        """Refuse what could not be run to its end, or would not be a fair comparison."""
        reference: dict[str, Any] = dict.fromkeys(("optimizers", "stepped"), BASES)
        reference |= dict.fromkeys(("models", "model", "tuned_model"), networks.NETWORKS)
        reference["study"] = STUDIES
        launch.check(self, {"capacity": 0, "moves": 0, "tested": 0}, known=reference)
        if len(self.steps) < 3:
            raise ValueError(f"steps is {self.steps}; give three or more, ends and a middle")
        if len(self.steps) != len(self.moment_steps):
            raise ValueError(
                f"steps has {len(self.steps)} entries and moment_steps {len(self.moment_steps)}; "
                "give as many each, so that every optimizer has as many trials"
            )
        if self.filter == "none":
            raise ValueError("filter is 'none', which would be compared with itself; give another")
        for name, text in (("filter", self.filter), *(("filters", text) for text in self.filters)):
            if changes_nothing(read_filter(text)):
                raise ValueError(
                    f"{name} has {text!r}, which changes nothing and would be compared with "
                    "itself; give another"
                )
        datasets.check(self.dataset, images=True)
        datasets.check(self.pictures, "pictures", images=True)
        for study, bases in (("optimizers", self.optimizers), ("steps", (self.stepped,))):
            for base in bases if study in self.study else ():
                UpdateRule(base, read_filter(self.filter))  # type: ignore[arg-type]

    def tried(self, optimizer: str) -> tuple[float, ...]:
        """Step sizes of an optimizer.

        Args:
            optimizer: One of `dpjax.contrib.rules.BASES`.
        """
        return self.moment_steps if optimizer in ("adam", "galore") else self.steps


def changes_nothing(link: Any) -> bool:
    """Whether a filter lets all pass as it is."""
    return isinstance(link, tuple) and not (any(link[0][1:]) or any(link[1]))


_SMALL = Config(
    dataset="mnist", model="small_cnn", records=6_000, epochs=1.5, batch_size=128,
    epsilon=(1.0, 8.0), models=("cnn5", "vit_tiny"), pictures="cifar10_small",
    picture_records=4_000, picture_epochs=1.0, picture_batch=125, tuned_model="vit_tiny",
    steps=(12.0, 4.0, 1.3, 0.4), moment_steps=(3e-3, 1e-3, 3e-4, 1e-4), space_every=10,
    capacity=32, tested=3_000, measurements=5, layout="patches",
)  # fmt: skip

_GPU = Config(epochs=80.0, picture_epochs=20.0, models=("cnn5", "wrn16_4", "vit_small"))

PRESETS = {
    "tiny": Config(
        dataset="digits", model="mlp", epochs=1.0, batch_size=128, optimizers=("sgd",),
        models=("mlp",), filters=("none", "first v1", "second"), epsilon=(8.0,), pictures="digits",
        picture_epochs=1.0, picture_batch=128, tuned_model="mlp", steps=(2.0, 1.0, 0.5),
        moment_steps=(0.03, 0.01, 0.003), capacity=32, seeds=(0, 1), measurements=3,
    ),
    "cpu": _SMALL,
    "gpu": _GPU,
    # A pass takes a whole batch: a third slower with half as many.
    "paper_ablations": dataclasses.replace(
        _GPU, epochs=50.0, picture_epochs=50.0, steps=(0.8, 0.4, 0.2),
        moment_steps=(1e-3, 3e-4, 1e-4), moves=2, capacity=1120, layout="patches",
    ),
    "full": Config(seeds=(0, 1, 2, 3, 4)),
}  # fmt: skip


class Cell(NamedTuple):
    """One curve: what decides its runs, whichever studies show it.

    Attributes:
        dataset: Data.
        model: Network.
        records: Training records; 0 is all.
        epochs: Epochs.
        batch_size: Expected batch size.
        optimizer: Optimizer.
        filter: Filter, or none.
        epsilon: Budget.
        clipping: Kind of clip.
        per_layer: Whether layers are clipped apart.
        schedule: Schedule of the steps.
        every: Whether every step size is reported, and none tuned.
        pretrained: Whether training starts from the weights.
    """

    dataset: str
    model: str
    records: int
    epochs: float
    batch_size: int
    optimizer: str
    filter: str
    epsilon: float
    clipping: Literal["flat", "automatic"] = "automatic"
    per_layer: bool = False
    schedule: Literal["constant", "cosine"] = "constant"
    every: bool = False
    pretrained: bool = False

    @property
    def name(self) -> str:
        """Of its records."""
        words = [self.dataset, str(self.records or "all"), f"{self.epochs:g}x{self.batch_size}"]
        words += [self.model, self.optimizer, self.filter, f"{self.epsilon:g}"]
        words += [self.clipping] if self.clipping != "automatic" else []
        words += ["per_layer"] if self.per_layer else []
        words += [self.schedule] if self.schedule != "constant" else []
        words += ["every_step"] if self.every else []
        words += ["pretrained"] if self.pretrained else []
        return launch.file_name("_".join(words))

    @property
    def columns(self) -> dict[str, Any]:
        """What its rows say of it."""
        plain = self.filter == "none"
        clip = self.clipping + (", per layer" if self.per_layer else "")
        return {
            "design": self.optimizer if plain else f"{self.optimizer} + {self.filter}",
            "optimizer": self.optimizer, "filter": self.filter, "budget_epsilon": self.epsilon,
            "dataset": self.dataset, "model": self.model, "epochs": self.epochs,
            "batch_size": self.batch_size, "clipping": clip, "schedule": self.schedule,
            "start": "pretrained" if self.pretrained else "random",
        }  # fmt: skip


LISTED = (
    *("study", "optimizers", "models", "filters", "stepped", "at_epsilon", "moment_steps"),
    *("pictures", "picture_records", "picture_epochs", "picture_batch", "tuned_model"),
)
"""What says which curves there are: not stored with one of them."""


def plain(config: Config, **changes: Any) -> Cell:
    """The curve of most studies: SGD behind the filter."""
    cell = Cell(
        config.dataset, config.model, config.records, config.epochs, config.batch_size, "sgd",
        config.filter, config.at_epsilon,
    )  # fmt: skip
    return cell._replace(**changes)


def pictured(config: Config, **changes: Any) -> Cell:
    """The same on the data of other networks."""
    return plain(
        config, dataset=config.pictures, records=config.picture_records,
        epochs=config.picture_epochs, batch_size=config.picture_batch, **changes,
    )  # fmt: skip


def curves(config: Config, study: str) -> dict[str, Cell]:
    """What a study shows: its curves by what a legend says of them."""
    pair = {config.filter: config.filter, "no filter": "none"}
    if study == "optimizers":
        return {
            f"{base}, epsilon {epsilon:g}, {name}": plain(
                config, optimizer=base, filter=text, epsilon=epsilon
            )
            for base in config.optimizers
            for epsilon in config.epsilon
            for name, text in pair.items()
        }
    if study == "models":
        return {
            f"{model}, {name}": pictured(config, model=model, filter=text)
            for model in config.models
            for name, text in pair.items()
        }
    if study == "filters":
        texts = dict.fromkeys((*config.filters, config.filter))
        return {"no filter" if t == "none" else t: plain(config, filter=t) for t in texts}
    if study == "clipping":
        return {
            f"{title}, {'per layer' if layers else 'flat'}": plain(
                config, clipping=kind, per_layer=layers
            )
            for title, kind in (("automatic", "automatic"), ("Abadi", "flat"))
            for layers in (False, True)
        }
    if study == "steps":
        return {
            name: plain(config, optimizer=config.stepped, filter=text, every=True)
            for name, text in pair.items()
        }
    if study == "schedules":
        return {kind: plain(config, schedule=kind) for kind in ("constant", "cosine")}
    if study == "finetuning":
        # ViT-S/16 has one size; without its weights any network does.
        model = "vit_small" if config.weights else config.tuned_model
        return {
            f"epsilon {epsilon:g}, {name}": pictured(
                config, model=model, filter=text, epsilon=epsilon,
                pretrained=config.weights is not None,
            )
            for epsilon in config.epsilon
            for name, text in pair.items()
        }  # fmt: skip
    return {}


def train(config: Config, cell: Cell, lab: launch.Lab, folder: Path) -> list[dict[str, Any]]:
    """Tune and run one curve; rows of both phases, or of every step size."""
    weights = config.weights if cell.pretrained else None
    data = images.read(cell.dataset, cell.model, config.layout, cell.records, weights)
    x, y = (part[: config.tested or None] for part in data.test)
    data = data._replace(test=(x, y))
    count = len(data.train[1])
    recipe = Central(
        epochs=cell.epochs,
        batch_size=cell.batch_size,
        capacity=config.capacity,
        clip_norm=config.clip_norm,
        clipping=cell.clipping,
        per_layer=cell.per_layer,
        schedule=cell.schedule,
    )
    rule: Any = UpdateRule(
        cell.optimizer,
        read_filter(cell.filter),
        every=config.space_every,  # type: ignore[arg-type]
    )
    delta = count**-1.1

    def make(steps: tuple[float, ...], count: int) -> list[Any]:
        return recipe.plans(rule, steps, cell.epsilon, count, delta=delta)

    final_task = data.problem(data.train, data.test)
    where = cell.columns
    steps = config.tried(cell.optimizer)
    if cell.every:
        outcome = make(steps, count)
        rounds = outcome[0].config.rounds
        interval = -(-rounds // config.measurements)
        result = lab.run(
            outcome, final_task, seeds=config.seeds, eval_every=interval, checkpoint=folder
        )
        return result.rows(phase="every step", rounds=rounds, **where)
    fit, validation = split.split(*data.train, config.validation, seed=0)
    best = tune.reported(
        [tune.Trial(cell.name, steps, make)],
        data.problem(fit, validation),
        final_task,
        seeds=config.seeds,
        tuning_seeds=(config.tuning_seed,),
        measurements=config.measurements,
        moves=config.moves or 0,
        runner=lab.run,
        checkpoint=folder,
    )
    accuracy = best.final.metrics["test_accuracy"][-1].mean()
    lab.say(f"  {cell.name}: step {best.step_size:g}, test accuracy {accuracy:.4f}")
    return best.rows(**where)


def experiment(config: Config, lab: launch.Lab) -> None:
    """Judge the ablations of DOPPLER: optimizers, networks, filters, clips, steps, schedules."""
    display = {study: curves(config, study) for study in config.study}
    frames = {}
    for cell in dict.fromkeys(cell for item in display.values() for cell in item.values()):
        own = cell._asdict() | {"steps": config.tried(cell.optimizer)}
        own |= {"weights": config.weights if cell.pretrained else None}
        own |= {"space_every": config.space_every if cell.optimizer == "galore" else None}
        compute = functools.partial(train, config, cell, lab)
        stored = launch.stored(config, *LISTED, **own)
        frames[cell] = lab.cell(cell.name, stored, compute, seed=config.seeds)
    for study in config.study:
        if study == "response":
            rows = lab.cell(study, {"rounds": ROUNDS, "periods": PERIODS}, response)
            report(config, lab, study, rows)
            continue
        edges = [name for name, cell in display[study].items() if tables.at_ends(frames[cell])]
        report(config, lab, study, chosen(frames, display[study]), edges)
    for frame in list(frames.values())[:1]:
        # Runs that tune are of fewer records, and rounds.
        reported = frame[frame["phase"] != "tuning"]
        stated = Guarantee.from_dict(reported["guarantee"].iloc[0])
        lab.say(
            f"\nguarantee of the first reported run: {stated.statement()} Others of the same data "
            "and epsilon state the same. Step sizes were tuned on the training data, on another "
            "seed, or are all shown; that is outside epsilon."
        )


def chosen(frames: Mapping[Cell, Any], display: Mapping[str, Cell]) -> Any:
    """The reported rows of a study, with what a legend says of each curve."""
    import pandas

    parts = []
    for label, cell in display.items():
        rows = frames[cell][frames[cell]["phase"] != "tuning"]
        names = [f"{label}, step {s:g}" for s in rows["step_size"]] if cell.every else label
        curve = "no filter" if cell.filter == "none" else cell.filter
        parts.append(rows.assign(series=names, curve=curve, points=100 * rows["test_accuracy"]))
    return pandas.concat(parts, ignore_index=True)


def judged(config: Config, study: str, rows: Any) -> list[claims.Judged]:
    """The verdicts of a study."""
    budgets = [f"epsilon {epsilon:g}" for epsilon in sorted(config.epsilon)]
    if study == "response":
        return ablations.waves(rows.drop_duplicates("series"))
    if study == "optimizers":
        places = {TITLES[base]: [f"{base}, {e}" for e in budgets] for base in config.optimizers}
        return ablations.optimizers(rows, config.filter, places)
    if study == "models":
        return ablations.networks(rows, config.filter, config.models)
    if study == "steps":
        tried = sorted(config.tried(config.stepped))
        return ablations.steps(rows, [f"{config.filter}, step {step:g}" for step in tried])
    if study == "finetuning":
        return ablations.finetuning(rows, config.filter, budgets)
    complete = {"filters": ablations.filters, "clipping": ablations.clips}
    return complete.get(study, ablations.schedules)(rows)


ROUNDS = 400
PERIODS = (100, 10)
WAVES = "The input is the sum of two waves, of {} and {} rounds.".format(*PERIODS)


def response(folder: Path) -> list[dict[str, Any]]:
    """A slow wave and one ten times as fast, behind every published filter; no data."""
    del folder
    rounds = np.arange(ROUNDS)
    waves = [np.sin(2 * np.pi * rounds / period) for period in PERIODS]
    # What each wave, both and a constant become, in one pass.
    stream = jnp.asarray(np.stack([*waves, sum(waves), np.ones(ROUNDS)], axis=1), jnp.float32)
    rows = []
    for name in ("sgd", *TABLE_2, *TABLE_4):
        link = lowpass(*FILTERS[name])

        def step(state: Any, x: Any, link: Any = link) -> Any:
            out, state = link.update(x, state)
            return state, out

        out = np.asarray(jax.lax.scan(step, link.init(stream[0]), stream)[1], float)
        # Two whole periods of the slow wave, long after the start.
        slow, fast = np.sqrt(2 * np.mean(out[-2 * PERIODS[0] :, :2] ** 2, axis=0))
        drift = float(np.abs(out[:, 3] - 1).max())
        row = {"series": "no filter" if name == "sgd" else name, "guarantee": None}
        row |= {"slow": float(slow), "fast": float(fast), "drift": drift}
        rows += [row | {"round": int(t), "value": float(out[t, 2])} for t in rounds]
    return rows


def remark(config: Config, study: str) -> str:
    """What tables and captions say of how a study differs from the paper's."""
    if study == "response":
        return ""
    if study == "finetuning" and config.weights is None:
        return NOT_THE_PAPERS
    other = study in ("models", "finetuning")
    cell = pictured(config) if other else plain(config)
    size = f"{cell.records:,} records, " if cell.records else ""
    complete = cell.dataset == "cifar10" and not cell.records and cell.epochs >= 50
    if complete and (other or cell.model == "cnn5"):
        return ""
    network = "" if other else f"{looks.words(cell.model)}, "
    # A part of some records is stated by their number.
    name = cell.dataset.removesuffix("_small") if cell.records else cell.dataset
    setting = f"{looks.words(name)}, {size}{network}{looks.counted(cell.epochs)}"
    return f"Not the paper's setting: {setting}."


def report(
    config: Config, lab: launch.Lab, study: str, rows: Any, edges: Sequence[str] = ()
) -> None:
    """Print a study's table and verdicts, and draw its figures."""
    result = judged(config, study, rows)
    lab.say(f"\n{study}, {result[0].source}: {remark(config, study)}".rstrip(": "))
    if study != "response":
        table = tables.summary(ablations.last(rows), ["series", "step_size"], "points")
        lab.say(tables.text(table.rename(columns={"mean": "accuracy in %", "count": "seeds"})))
        lab.say_ends(edges)
    for claim in result:
        lab.say(claim.text())
    for stem, panels in sheets(config, study, rows).items():
        sheet, axes = plots.figure(1, len(panels), sharey=len(panels) > 1)
        for ax, (title, part, x, series) in zip(axes, panels, strict=True):
            plots.lines(
                part, x, "value" if study == "response" else "points", series, ax=ax, title=title,
                ylabel="wave behind the filter" if study == "response" else looks.accuracy(),
                xlabel={"budget_epsilon": "epsilon", "step_size": "step size"}.get(x),
                log_x=x != "round",
                note=WAVES if study == "response" else remark(config, study) or None,
                looks=looks.titled(part[series]),
            )  # fmt: skip
        lab.figure(sheet, f"doppler_ablations_{stem}{lab.suffix}.svg")


Panel = tuple[str, Any, str, str]


def sheets(config: Config, study: str, rows: Any) -> dict[str, list[Panel]]:
    """Figures of a study: title, rows, column across and series of each panel."""
    several = len(config.epsilon) > 1
    over, ends = ("budget_epsilon", ablations.last) if several else ("round", lambda rows: rows)
    if study == "optimizers":
        return {study: [
            (TITLES[base], ends(rows[rows["optimizer"] == base]), over, "curve")
            for base in config.optimizers
        ]}  # fmt: skip
    if study == "models":
        panels = [(looks.words(name), rows[rows["model"] == name]) for name in config.models]
        return {study: [(*panel, "round", "curve") for panel in panels]}
    if study == "filters":
        few = rows["series"].isin(TABLE_4)
        panels = {"filters_2": rows[~few], "filters_4": rows[few | (rows["series"] == "no filter")]}
        named = {"filters_2": "Table 2", "filters_4": "Table 4"}
        return {
            stem: [(named[stem], part, "round", "series")]
            for stem, part in panels.items()
            if part["series"].nunique() > 1
        }
    if study == "steps":
        return {study: [(TITLES[config.stepped], ablations.last(rows), "step_size", "curve")]}
    if study == "finetuning":
        return {}
    if study == "response":
        few = rows["series"].isin(("no filter", *TABLE_2)) & (rows["round"] < 2 * PERIODS[0])
        rows = rows[few]
    return {study: [("", rows, "round", "series")]}


main = functools.partial(launch.main, "doppler_ablations", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
