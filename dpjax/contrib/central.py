"""Central private training: one agent holds all records, and batches are coin flips.

A recipe in epochs, as experiments are stated in, becomes plans of so many rounds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import optax

from dpjax import _validate
from dpjax.algorithms.dsgd import DSGD
from dpjax.contrib import filtered
from dpjax.contrib.bands import toeplitz
from dpjax.contrib.rules import UpdateRule
from dpjax.learning import samplers
from dpjax.plans import noise, plan, protect
from dpjax.plans.optimizers import Chain

__all__ = ["TITLES", "Assumed", "Central", "title"]


class Assumed(NamedTuple):
    """What is assumed of gradients where a filter and noise over rounds are chosen for them.

    Guarantee: none of its own; where it was measured on private records, no guarantee covers that.

    Attributes:
        norm: Root mean square norm of the mean gradient.
        correlation: Of a coordinate, from one round to the next, of an AR(1) sequence.
        coordinates: Of the model.
    """

    norm: float
    correlation: float
    coordinates: int


def _plain(rounds: int) -> DSGD:
    return DSGD()


TITLES = {
    "sgd": "SGD",
    "momentum": "momentum",
    "nesterov": "Nesterov",
    "adam": "AdamBC",
    "galore": "GaLore",
    "muon": "Muon",
}
"""What legends say of the bases of `UpdateRule`."""


def title(rule: UpdateRule) -> str:
    """What a legend says of a rule.

    Args:
        rule: The rule.

    Example:
        >>> from dpjax.contrib.central import title
        >>> from dpjax.contrib.rules import UpdateRule
        >>> title(UpdateRule("momentum"))
        'momentum'
    """
    name = TITLES[rule.base]
    if rule.filter is None:
        return name
    kinds = {"adaptive": "adaptively filtered", "wiener": "Wiener filtered"}
    kind = kinds[rule.filter] if isinstance(rule.filter, str) else "filtered"
    plain = rule.base in ("sgd", "adam", "galore")
    return f"{name}, {kind}" if plain else f"{name} behind a filter"


@dataclass(frozen=True)
class Central:
    """How one agent trains on Poisson-sampled batches of single records' clipped gradients.

    Guarantee: every plan states (epsilon, delta) for zeroing out one record, against whoever sees
    all rounds, amplified by sampling; the sampler, its rate, the clip and the rounds that are
    accounted for are the ones that run.

    Attributes:
        epochs: Rounds are the epochs over the sampling rate, rounded up.
        batch_size: Expected size of a batch; all records where there are fewer.
        capacity: Records a pass; 0 is an eighth of the batch size, at least 16.
        clip_norm: C.
        clipping: flat, C / max(C, norm), or automatic, C / (norm + 0.01).
        per_layer: Whether each of L layers is clipped by itself, to C / sqrt(L).
        schedule: Constant steps, or cosine: 5 % of the rounds up, then down.

    Raises:
        ValueError: For a number that is none, or not above 0.

    Example:
        >>> from dpjax.contrib.central import Central
        >>> from dpjax.contrib.rules import UpdateRule
        >>> recipe = Central(epochs=2, batch_size=100)
        >>> (made,) = recipe.plans(UpdateRule(), [0.5], 8.0, 1000)
        >>> made.config.rounds, made.guarantee.epsilon, made.guarantee.relation
        (20, 8.0, 'zero_out_record')
    """

    epochs: float
    batch_size: float
    capacity: int = 0
    clip_norm: float = 1.0
    clipping: Literal["flat", "automatic"] = "automatic"
    per_layer: bool = False
    schedule: Literal["constant", "cosine"] = "constant"

    def __post_init__(self) -> None:
        """Refuse what is no length of training."""
        _validate.positive("epochs", self.epochs)
        _validate.positive("batch_size", self.batch_size)
        _validate.integer("capacity", self.capacity, minimum=0)

    def plans(
        self,
        rule: UpdateRule,
        steps: Sequence[float],
        epsilon: float,
        count: int,
        *,
        delta: float | None = None,
        method: Callable[[int], Any] = _plain,
        larger: float = 1.0,
        bands: int = 0,
        together: Assumed | None = None,
    ) -> list[plan.Plan]:
        """Return a plan for each step size, for one run.

        Args:
            rule: What becomes of noisy means, without schedule and rounds.
            steps: Step sizes.
            epsilon: Budget.
            count: Training records.
            delta: Target delta; by default count^-1.1.
            method: What is computed; of the number of rounds.
            larger: Factor of the batch size, at equal epochs and records a pass.
            bands: Diagonals b of noise correlated over rounds, with coins flipped for every b-th
                record alone; 0 is fresh noise.
            together: Choose the bands' noise together with a filter in front of the rule, for such
                gradients (`dpjax.contrib.filtered`).

        Raises:
            ValueError: For no step sizes, a filter without bands, or what no plan can be made of.
        """
        if together and not bands:
            raise ValueError("together is given and bands is 0; give 2 or more bands")
        if not len(steps):
            raise ValueError("steps is empty; give at least one step size")
        count = _validate.integer("count", count)
        batch = min(count, _validate.positive("larger", larger) * self.batch_size)
        separation = max(1, _validate.integer("bands", bands, minimum=0))
        rounds = separation * math.ceil(self.epochs * count / batch / separation)
        capacity = self.capacity or max(16, math.ceil(self.batch_size / 8))
        part: Any = noise.PrefixSum(bands=separation) if bands else noise.Independent()
        rule = dataclasses.replace(rule, schedule=self.schedule, rounds=rounds)
        if delta is None:
            delta = count**-1.1
        protection = protect.Protect(
            "zero_out_record",
            clip_norm=self.clip_norm,
            clipping=self.clipping,
            per_layer=self.per_layer,
        )
        sampler = samplers.Poisson(batch, capacity, separation=separation)
        base = plan.Config(
            noise=part,
            budget=protect.Budget(epsilon, delta),
            protect=protection,
            sampler=sampler,
            optimizer=rule.chain(steps[0]),
            method=method(rounds),
            rounds=rounds,
        )
        strategy = _toeplitz(base.pattern, separation) if bands else None
        planned = functools.partial(plan.make, mixing=np.eye(1), counts=[count])
        if together is None:
            chains = [rule.chain(step) for step in steps]
        else:
            factor = float(planned(base, strategy=strategy).factor[0, 0])
            deviation = factor * self.clip_norm / batch
            strategy, filter = _together(base.pattern, separation, deviation, 1 / batch, together)
            behind = functools.partial(_behind, filter, rule)
            chains = [Chain(behind, step) for step in steps]
        return [
            planned(dataclasses.replace(base, optimizer=chain), strategy=strategy)
            for chain in chains
        ]


@functools.lru_cache(maxsize=8)
def _toeplitz(pattern: Any, bands: int) -> np.ndarray:
    """Noise over rounds: the optimum over all banded strategies takes minutes, and gains little."""
    return toeplitz(np.eye(1), pattern, bands)


@functools.lru_cache(maxsize=4)
def _together(
    pattern: Any, bands: int, deviation: float, fresh: float, assumed: Assumed
) -> tuple[np.ndarray, np.ndarray]:
    """A strategy, and a filter whose last row sums to 1: step sizes keep their meaning.

    Args:
        pattern: When a record appears.
        bands: Diagonals of the strategy.
        deviation: Of the noise at sensitivity 1.
        fresh: Square norm of what sampling draws anew in every round: of records' gradients of
            norm 1, one over the batch.
        assumed: The gradients.
    """
    rounds = pattern.rounds
    size = assumed.coordinates
    lags = assumed.norm**2 / size * assumed.correlation ** np.arange(rounds)
    lags[0] += fresh / size
    sums = np.tri(rounds)
    signal = filtered.covariance(lags, rounds)
    joint = filtered.solve(
        signal, deviation**2, pattern, gram=sums.T @ sums, bands=bands, tolerance=1e-2
    )
    return joint.strategy, joint.filter / joint.filter[-1].sum()


def _behind(
    filter: np.ndarray, rule: UpdateRule, step_size: Any, noise: Any = 0.0
) -> optax.GradientTransformation:
    """A rule behind a filter over rounds."""
    return optax.chain(filtered.by_matrix(filter), rule(step_size, noise))
