"""Statistics of columns and evaluation over sites: plans of one round of sums, with their noise.

A measure is a plan that runs as any other: each record's gradient is clipped to 1, and sums of all
sites are opened with noise `Discrete`. What stands for the gradient is a public function phi of the
record alone, so that what is opened is

    the sum of phi(record) over all records of the sites that are in it, and noise.

A site's records take part together, at most ``most`` of them, a public bound that is not computed
from them. The rest of the batch is padding: no shape, message or plan tells how many there are.

Columns. With features x_j in -1 .. 1, as training has them, J = 2 for each number and 1 for each
other column,

    phi = w (r, r [label = class], x_j, 2 x_j^2 - 1 of each number),    r^2 = sqrt(J)

and w^2 = 1 / (2 r^2 + J), or 1 / (r^2 + J) without classes, |phi| is at most 1: for a number x^2 +
(2 x^2 - 1)^2 is convex in x^2, so at most 2, as at x^2 = 1; one that is missing is 0, and 1 in the
feature that says so: 2 as well. Of a category's features one is 1. Records that no schema makes are
clipped. Of images, whose one column has many numbers, phi has means over these: no longer than the
longest. Least error: a mean S / n at an end of its range errs by the noise of S and by that of n.
Over J columns this is J / w^2 + J / (w r)^2, which for w^2 (r^2 + J) = 1 is least at r^2 = sqrt(J).

Evaluation. phi is 1 at one of 2 ``bins`` places, by the model's probability and by what came true.
The model is in the plan's arrays, so that all sites evaluate the same one.

Guarantee: the plan's, whatever phi is: each record's is clipped, and one that is not finite is 0.
It is of that relation: a record that is zeroed out leaves its place in the file, from whose length
follows which others are held out.

Errors are deviations of estimates under noise alone, drawn again about the opened sums. In each its
variance is g^2 a (v + 1/4): of the grid g, a sites, the variance v of each one's noise, and that of
rounding, a quarter at most. They do not say how patients vary.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax import _files, _validate
from dpjax.data.partition import Partition
from dpjax.encoding.lattice import SumCode
from dpjax.learning.problem import Problem
from dpjax.plans.settings import Section, check_keys, check_sections
from dpjax.sites.data import Schema
from dpjax.sites.site import SiteLoop
from dpjax.sites.sum_site import SumSite

__all__ = ()

Estimates: TypeAlias = dict[tuple[str, str], np.ndarray]
"""Numbers by what they are of and what they are, each of the leading axes of sums."""
_Parts: TypeAlias = tuple[Any, Any, str]
"""A model, the shapes of its leaves, its loss."""
_EVALUATED = "evaluated"
"""What the names of a model's arrays begin with in a plan."""
_DRAWS = 1000
"""Of noise: errors are known to some two percent."""
_LEAST = 4
"""A bin with less, in deviations of the noise, has no share that says anything."""
_WIDE = 3
"""Deviations from the mean to an end of a suggested range."""
_MOST = 2**20


@dataclass(frozen=True, eq=False)
class Measure:
    """What is summed, and what is made of sums; `of` makes one.

    Attributes:
        schema: Of the records.
        limit: Records of a site, at most: public.
    """

    schema: Schema
    limit: int

    account: ClassVar[str] = "training"
    """Which of a site's records it reads."""
    page: ClassVar[str]
    """What the page for a data protection officer says that all learn."""
    composition: ClassVar[str]
    """What is to be added to its epsilon."""

    def __post_init__(self) -> None:
        """Refuse what is no number."""
        remedy = f"give a public bound of a site's records, from 1 to {_MOST}"
        _validate.integer("[model] most", self.limit, maximum=_MOST, remedy=remedy)

    @property
    def size(self) -> int:
        """How many sums there are."""
        raise NotImplementedError

    def phi(self, x: Array, y: Array) -> Array:
        """What one record adds, [size], of a length of at most 1.

        Args:
            x: The record.
            y: Its label, as `dpjax.sites.data.Records` has it.
        """
        raise NotImplementedError

    def estimates(self, sums: np.ndarray, deviation: float) -> Estimates:
        """What sums say.

        Args:
            sums: [..., size].
            deviation: Of the noise in each.
        """
        raise NotImplementedError

    @property
    def unit(self) -> float:
        """What phi is multiplied by, since clips lower the norm for the rounding of sums."""
        return 1 / (1 + self.limit * 2.0**-22)

    def problem(self, x: np.ndarray, y: np.ndarray, name: str) -> Problem:
        """The problem whose clipped gradients are phi.

        Args:
            x: [m, ...] a site's records that take part.
            y: [m] their labels.
            name: The site's.

        Raises:
            ValueError: For more records than the plan takes.
        """
        count = len(y)
        if count > self.limit:
            # How many there are is for the site alone.
            raise ValueError(
                f"[data] file has more records than the {self.limit} that the plan takes of a "
                "site; ask for a plan with a larger [model] most"
            )

        return Problem(
            init=self._start,
            loss=self._loss,
            metrics=self._metrics,
            x=x,
            y=y,
            partition=Partition(np.arange(count)[None], np.array([count]), (name,)),
            evaluation=(),
            name=name,
        )

    def _start(self, key: Array) -> Array:
        """Nothing is summed yet."""
        del key
        return jnp.zeros(self.size, jnp.float32)

    def _loss(self, sums: Array, x: Array, y: Array) -> Array:
        """What has phi as its gradient."""
        return self.unit * jnp.sum(sums * self.phi(x, y))

    def _metrics(self, sums: Array, evaluation: tuple[()]) -> dict[str, Array]:
        """None: a site's own sums are in no file."""
        del sums, evaluation
        return {}

    def result(self, released: np.ndarray, code: SumCode, present: int) -> dict[str, Any]:
        """Numbers with their errors, and lines that say them, for a file in JSON.

        Args:
            released: [size] the model after the round: minus the sum, over records and sites.
            code: Of the sum.
            present: Sites that are in it; 0 where there was none.
        """
        if not present:
            return {"numbers": {}, "lines": ["no sum was opened; the epsilon is spent"]}
        scale = code.records * present / self.unit
        sums = -np.asarray(released, np.float64) * scale
        variance = present * (float(code.variance) + 0.25)
        deviation = code.grid * variance**0.5 / self.unit
        noise = np.random.default_rng(0).normal(0, deviation, (_DRAWS, self.size))
        numbers: dict[str, dict[str, Any]] = {}
        texts: dict[str, list[str]] = {}
        with np.errstate(all="ignore"):
            drawn = self.estimates(sums + noise, deviation)
            for (subject, quantity), value in self.estimates(sums, deviation).items():
                draws = drawn[subject, quantity]
                draws = draws[np.isfinite(draws)]
                entry: dict[str, Any] = {"value": None, "error": None}
                text = f"{quantity} unknown, as noise is larger"
                if np.isfinite(value) and draws.size:
                    error = float(np.std(draws))
                    entry = {"value": float(value), "error": error}
                    text = f"{quantity} {value:.4g} (error {error:.2g})"
                numbers.setdefault(subject, {})[quantity] = entry
                texts.setdefault(subject, []).append(text)
        lines = [f"{subject}: {', '.join(parts)}" for subject, parts in texts.items()]
        lines.append("errors are those of the noise alone")
        return {"sites": present, "noise": deviation, "numbers": numbers, "lines": lines}


@dataclass(frozen=True, eq=False)
class Columns(Measure):
    """Number of records, mean and deviation of each column, share of each class of the label."""

    page = (
        "a noisy number of records, the mean of each feature, the deviation of each number, and "
        "the share of each class of the label, over the records to train on"
    )
    composition = (
        "this epsilon is of the records to train on: dpjax site ledger counts all phases together "
        "that read them, where plans have a total; add that of all else that reads them"
    )

    @property
    def size(self) -> int:
        """The count, classes, features and squares."""
        return 1 + len(self.schema.classes) + len(self._features) + len(self._numbers)

    @property
    def _features(self) -> dict[str, tuple[float, float]]:
        """Ranges by feature, and that of a label that is a number."""
        label = {} if self.schema.classes else self.schema.label.features()
        return {**self.schema.features, **label}

    @property
    def _numbers(self) -> list[int]:
        """Which features are numbers."""
        columns = (*self.schema.columns, self.schema.label)
        names = {column.name for column in columns if column.type == "number"}
        return [place for place, name in enumerate(self._features) if name in names]

    @property
    def _weights(self) -> tuple[float, float]:
        """The weight of counts, w r, and that of all others, w."""
        # Of each number there are two terms, of which the second is a square.
        labels = 0 if self.schema.classes else 1
        others = len(self.schema.columns) + labels + len(self._numbers)
        counts = 2 if self.schema.classes else 1
        share = others**0.5
        weight = (counts * share + others) ** -0.5
        return weight * share**0.5, weight

    def phi(self, x: Array, y: Array) -> Array:
        """The count, the label's class, features and squares."""
        heavy, weight = self._weights
        classes = len(self.schema.classes)
        numbers = np.array(self._numbers, int)
        # Of arrays one feature stands for all numbers.
        values = jnp.clip(x, -1, 1).reshape(len(self.schema.features), -1)
        if not classes:
            values = jnp.concatenate([values, jnp.full_like(values[:1], jnp.clip(y, -1, 1))])
        counted = jnp.concatenate([jnp.ones(1), jax.nn.one_hot(y.astype(int), classes)])
        squares = 2 * values[numbers] ** 2 - 1
        means = jnp.concatenate([values, squares]).mean(axis=1)
        return jnp.concatenate([heavy * counted, weight * means])

    def estimates(self, sums: np.ndarray, deviation: float) -> Estimates:
        """By name of a column."""
        heavy, weight = self._weights
        features = self._features
        names = list(features)
        classes = len(self.schema.classes)
        count = sums[..., 0] / heavy
        totals = np.moveaxis(sums, -1, 0)[1 + classes :] / weight
        result: Estimates = {("records", "number"): count}
        for place, name in enumerate(self.schema.classes, 1):
            share = sums[..., place] / heavy / count
            result[f"{self.schema.label.name}: {name}", "share"] = share
        for place, (name, (low, high)) in enumerate(features.items()):
            if place not in self._numbers:
                result[name, "share"] = totals[place] / count
                continue
            missing = f"{name} is missing"
            # A missing number is 0, the middle, and none of those that the mean is of.
            present = count - totals[names.index(missing)] if missing in features else count
            mean = totals[place] / present
            square = totals[len(names) + self._numbers.index(place)]
            variance = (square + count) / 2 / present - mean**2
            half = (high - low) / 2
            mean = (low + high) / 2 + half * mean
            # No number where noise made the variance negative.
            spread = half * np.sqrt(variance)
            result[name, "mean"] = mean
            result[name, "variance"] = half**2 * variance
            result[name, "deviation"] = spread
            result[name, "suggested low"] = np.maximum(mean - _WIDE * spread, low)
            result[name, "suggested high"] = np.minimum(mean + _WIDE * spread, high)
        return result


@dataclass(frozen=True, eq=False)
class Evaluation(Measure):
    """Accuracy, AUC and calibration of a model, from a noisy histogram of its probabilities.

    Of two classes bins are of the probability of the second one, which came true or not; of more
    they are of the largest probability, whose class came true or not.

    Attributes:
        bins: Of equal widths, from 0 to 1.
        module: The model.
        loss: Its loss's name.
        params: Its values, public.
    """

    bins: int
    module: Any
    loss: str
    params: Any

    account = "held_out"
    page = (
        "a noisy histogram of the model's probabilities and of what came true, from which its "
        "accuracy, calibration and, of two classes, AUC follow, over the records held out"
    )
    composition = (
        "this epsilon is of the records held out: training adds nothing to it, if it had the same "
        "file, held_out and seed; add that of all else that reads them"
    )

    def __post_init__(self) -> None:
        """Refuse what has no histogram."""
        super().__post_init__()
        remedy = "give an even number, so that one half is between two bins"
        _validate.integer("[model] bins", self.bins, minimum=2, maximum=1000, remedy=remedy)
        if self.bins % 2:
            raise _validate.refusal("[model] bins", self.bins, remedy)
        if not self.schema.classes:
            remedy = "evaluate a model of classes: of numbers there is no such histogram"
            raise _validate.refusal("[model] loss", self.loss, remedy)
        record = jax.ShapeDtypeStruct((1, *self.schema.shape), "float32")
        shape = jax.eval_shape(self.module.apply, self.params, record).shape
        expected = (1,) if self.loss == "logistic" else (1, len(self.schema.classes))
        if shape != expected:
            remedy = f"give one of outputs {expected}, as training takes it"
            raise _validate.refusal("[model] model with outputs", shape, remedy)

    @property
    def size(self) -> int:
        """Bins of what did not come true, and of what did."""
        return 2 * self.bins

    @property
    def _is_binary(self) -> bool:
        return len(self.schema.classes) == 2

    def phi(self, x: Array, y: Array) -> Array:
        """One at one place; a bin has its upper end, so that a score of 0 is a no."""
        scores = self.module.apply(self.params, x[None])[0]
        if self.loss == "logistic":
            scores = jnp.stack([jnp.zeros_like(scores), scores])
        probabilities = jax.nn.softmax(scores)
        top = jnp.argmax(probabilities)
        probability = probabilities[1] if self._is_binary else probabilities[top]
        outcome = y if self._is_binary else y == top
        place = jnp.ceil(probability * self.bins) - 1
        bin_ = jnp.clip(place, 0, self.bins - 1).astype(jnp.int32)
        return jax.nn.one_hot(bin_ + self.bins * outcome.astype(jnp.int32), self.size)

    def estimates(self, sums: np.ndarray, deviation: float) -> Estimates:
        """Of all, then bin by bin."""
        false = sums[..., : self.bins]
        true = sums[..., self.bins :]
        total = false + true
        count = total.sum(axis=-1)
        middles = (np.arange(self.bins) + 0.5) / self.bins
        result: Estimates = {("records", "number"): count}
        right = true.sum(axis=-1)
        if self._is_binary:
            half = self.bins // 2
            right = false[..., :half].sum(axis=-1) + true[..., half:].sum(axis=-1)
            # Of the pairs of a yes and a no, those where the yes has the larger one; ties half.
            below = np.cumsum(false, axis=-1) - false / 2
            pairs = true.sum(axis=-1) * false.sum(axis=-1)
            result["model", "AUC"] = (true * below).sum(axis=-1) / pairs
        result["model", "accuracy"] = right / count
        gaps = np.abs(true - middles * total)
        result["model", "calibration error"] = gaps.sum(axis=-1) / count
        # The mean of |noise|, of a model without any.
        lengths = deviation * np.sqrt(middles**2 + (1 - middles) ** 2)
        result["model", "of which by noise"] = np.sqrt(2 / np.pi) * lengths.sum() / count
        event = self.schema.classes[1] if self._is_binary else "right"
        for place, middle in enumerate(middles):
            counted = np.where(total[..., place] > _LEAST * deviation, total[..., place], np.nan)
            ends = f"{middle - 0.5 / self.bins:.3g} to {middle + 0.5 / self.bins:.3g}"
            result[f"probability {ends}", f"share of {event}"] = true[..., place] / counted
        return result


_KINDS: Mapping[str, type[Measure]] = {"Columns": Columns, "Evaluation": Evaluation}
NAMES = frozenset(_KINDS)


def is_measure(settings: Section) -> bool:
    """Whether settings are a measure's, and not those of training.

    Args:
        settings: Of a plan.
    """
    section = settings.get("model")
    return isinstance(section, Mapping) and section.get("name") in NAMES


def account(settings: Section) -> str:
    """Which of a site's records a plan reads: "training" or "held_out" ones.

    Args:
        settings: Of the plan.
    """
    return (_KINDS[settings["model"]["name"]] if is_measure(settings) else Measure).account


def of(
    section: Section, schema: Schema, parts: _Parts | None, arrays: Mapping[str, Any]
) -> Measure:
    """Return a measure.

    Args:
        section: The plan's about the model.
        schema: Of the records.
        parts: The model that is evaluated, the shapes of its leaves, its loss; or None.
        arrays: Its values, by the names that a plan has.

    Raises:
        ValueError: For what is missing or out of range, and values of another model.
    """
    kind = _KINDS[section["name"]]
    keys = {"name", "most"} | ({"model", "bins"} if kind is Evaluation else set())
    check_keys("[model] ", section, keys)
    limit: Any = section.get("most")
    if kind is Evaluation and parts is None:
        raise ValueError("[model] model is missing; give that of the study that trained it")
    module, shapes, loss = parts or (None, (), "")
    values = {}
    for place, leaf in jax.tree.leaves_with_path(shapes):
        name = jax.tree_util.keystr(place)
        value = np.asarray(arrays.get(_EVALUATED + name, ()))
        if value.shape != leaf.shape or value.dtype != leaf.dtype:
            form = f"{value.dtype}{[*value.shape]}" if value.size else "not there"
            raise ValueError(
                f"[model] file is of another model: {name} is {form}, and {leaf.dtype}"
                f"{[*leaf.shape]} in [model] model; give the settings that trained it"
            )
        _validate.finite_array(f"[model] file {name}", value)
        values[_EVALUATED + name] = value
    if arrays.keys() != values.keys():
        others = ", ".join(sorted(arrays.keys() - values.keys()))
        raise ValueError(f"[model] file has also {others}; give the settings that trained it")
    if kind is Columns:
        return Columns(schema, limit)
    params = jax.tree.unflatten(jax.tree.structure(shapes), list(values.values()))
    bins = section.get("bins", 20)
    return Evaluation(schema, limit, bins, module, loss, params)


def split(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a model that is evaluated, and all others of a plan.

    Args:
        arrays: By name.
    """
    model = {name: value for name, value in arrays.items() if name.startswith(_EVALUATED)}
    return model, {name: value for name, value in arrays.items() if name not in model}


def completed(
    settings: Section, schema: Schema, first_seed: int | None = None
) -> tuple[Section, dict[str, Any]]:
    """Return a measure's settings with all that follows, and the model that it evaluates.

    Args:
        settings: As their author writes them; those of training stay as they are.
        schema: Of the records.
        first_seed: Of a project's first plan, by which its sites hold out records in all phases.

    Raises:
        ValueError: For other values than those that follow, and a file of other records.
    """
    if not is_measure(settings):
        return settings, {}
    section = dict(settings["model"])
    arrays: dict[str, Any] = {}
    if section["name"] == "Evaluation":
        file = section.pop("file", None)
        if not isinstance(file, str):
            raise _validate.refusal("[model] file", file, "give the model.npz that a run has saved")
        with _files.reading(file, "give the model.npz that a run has saved"):
            stored = _files.archive(file)
        for name, value in schema.described().items():
            if not np.array_equal(stored.get(name, ()), value):
                raise ValueError(f"[model] file is of another schema, by its {name}; give both")
        arrays = {_EVALUATED + name: stored[name] for name in stored if name.startswith("[")}
        # By another seed other records would be held out, and some of them were trained on.
        planned = settings.get("seed") if first_seed is None else first_seed
        seed = int(stored["seed"] if "seed" in stored else planned or 0)
        if planned not in (None, seed):
            remedy = f"leave it out, or give {seed}, by which that run held out records"
            raise _validate.refusal("seed", planned, remedy)
        settings = {"seed": seed, **settings}
    settings = {**settings, "model": section}
    protect = settings.get("protect")
    if isinstance(protect, Mapping):
        # All records have a length of at most 1.
        settings["protect"] = {"clip_norm": 1.0, **protect}
    return {**_following(settings), **settings}, arrays


def as_phase(changes: Section) -> Section:
    """Return what a phase has that is a measure; any other one's changes stay as they are.

    Args:
        changes: Against the phase before.
    """
    return {**_following(changes), **changes} if is_measure(changes) else changes


def _following(settings: Section) -> dict[str, Any]:
    """What is the same in all measures of so many records."""
    sampler = {"name": "Cyclic", "epochs": 1, "separation": 1}
    return {
        "rounds": 1,
        "sampler": {**sampler, "batch_size": settings["model"].get("most")},
        "optimizer": {"name": "Sgd", "step_size": 1.0},
        "average_rounds": 0,
    }


def check(settings: Section) -> None:
    """Refuse settings of a measure with which sums would be others than those of phi.

    Args:
        settings: Of a plan; those of training pass.

    Raises:
        ValueError: Naming the setting and the remedy.
    """
    if not is_measure(settings):
        return
    name = settings["model"]["name"]
    check_sections(settings, ("protect", "noise"))
    for section in settings["noise"]:
        _validate.one_of("[[noise]] name", section.get("name"), ("Discrete",))
    for key, value in _following(settings).items():
        if settings.get(key) != value:
            raise _validate.refusal(key, settings.get(key), f"leave it out: {name} has {value}")
    protect = settings["protect"]
    keys = {"relation", "clip_norm", "attacker", "gradients"}
    check_keys(f"[protect] of {name}: ", protect, keys)
    if protect.get("clip_norm") != 1:
        remedy = f"leave it out: {name} has records of length 1"
        raise _validate.refusal("[protect] clip_norm", protect.get("clip_norm"), remedy)
    relation = protect.get("relation")
    _validate.one_of("[protect] relation", relation, ("zero_out_record", "replace_record"))


def written(member: SiteLoop) -> str:
    """Print what a site has measured, and write it to its folder: ``measure.json``.

    Args:
        member: At its end.

    Returns:
        The file, in words; nothing for a site that has trained.
    """
    measure = getattr(member.agreement, "measure", None)
    if measure is None or not isinstance(member, SumSite):
        return ""
    released, present = member.opened
    result = measure.result(released[0], member.compute.code, present)
    result["statement"] = member.statement()
    result["account"] = measure.account
    result["composition"] = measure.composition
    path = member.folder / "measure.json"
    text = json.dumps(result, indent=1, allow_nan=False)
    _files.replace(path, f"{text}\n".encode())
    print("\n".join([*result["lines"], measure.composition]))
    return f"measure {path}"
