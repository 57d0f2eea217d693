"""Clip norms and shapes of noise that follow what was released: stages between encode and clip.

    encode   u = s / (c D)           s [k]: a record's sketch; D [k] from `ellipsoid`, c a rule's
    clip     |u| <= C                the plan's clip norm, which never changes
    noise    mean of u + z           the plan's noise, which never changes
    decode   s^ = c D (mean + z)     at whoever steps

In units of sketches the clip is an ellipsoid c C D and the noise has deviations c D a: both move
together, and what is private never sees either.

Guarantee: none of its own and none lost, if c and D are functions of what was released in rounds
before and of public numbers. Then a round, given the rounds before, is a Gaussian mechanism whose
sensitivity over noise is C / a whatever c and D are, and the plan's loss is that of all rounds. A
scale read off this round's gradients moves every record's term with one record, which no clip
bounds; `dpjax.plans.dependence` refuses a method that does so. Noise D z on gradients that were
clipped in L2, as the paper prints it, has sensitivity C / min(D) and not C.

Rules (`Norm`, `Quantile`) have a state, made by ``start`` and moved by ``learn``: pure functions,
to be compiled, scanned and kept in a method's memory.

Reference:
    Nicolas et al., Theorem 3.3 and equation (40); Andrew, Thakkar, McMahan, Ramaswamy,
    Differentially private learning with adaptive clipping (2021), for quantiles.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpjax import _validate
from dpjax.transforms.sketch import Sketch

__all__ = ["Norm", "Quantile", "Size", "ellipsoid", "second_moments"]

_FARTHEST = 1e6
"""By how much a clip norm may leave its first value."""
_RANGE = 4.0
"""How far what a round shows, around 1, is read at most."""


class Size(NamedTuple):
    """What a rule knows: a function of released numbers.

    Attributes:
        bound: c C, the clip norm in the sketch's units.
    """

    bound: Float[Array, ""]


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """A clip norm in the sketch's units, which starts at ``first``."""

    clip_norm: float
    first: float
    rate: float = 0.2

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        for name in ("clip_norm", "first"):
            value = _validate.single_precision(name, getattr(self, name), 1e-9, 1e9)
            object.__setattr__(self, name, value)
        rate = _validate.single_precision("rate", self.rate, 1e-6, 1.0)
        object.__setattr__(self, "rate", rate)

    def start(self, dtype: Any = jnp.float32) -> Size:
        """Return the state before anything is released.

        Args:
            dtype: Of the sketches.
        """
        return Size(jnp.asarray(self.first, dtype))

    def _moved(self, state: Size, excess: Array) -> Size:
        """The clip norm after a round, larger where there is an excess; none if it is no number."""
        bound = state.bound * jnp.exp(np.asarray(self.rate, excess.dtype) * excess)
        least, most = self.first / _FARTHEST, self.first * _FARTHEST
        bound = jnp.clip(bound, np.asarray(least, bound.dtype), np.asarray(most, bound.dtype))
        return Size(jnp.where(jnp.isfinite(excess), bound, state.bound))


@dataclass(frozen=True, kw_only=True)
class Norm(_Rule):
    """A clip norm that follows the norm of noisy averages, noise's share taken off.

        x = |multiple mean / C|^2 - k v (multiple / C)^2        c <- c exp(rate (x - 1) / 2)

    in units of what was sent, so that it settles where c C is ``multiple`` times the norm of the
    decoded average in mean square. It costs nothing. But an average is shorter than its terms: of
    records so much longer than the clip norm that all are clipped, it has a share r, and the rule
    grows until fewer are where multiple r > 1, and shrinks until nothing is left where multiple
    r < 1. So it is for records that agree (whole clients' gradients, few at a time); where these do
    not, take `Quantile`.

    Attributes:
        clip_norm: C of `dpjax.plans.protect.Protect`; another number moves where it settles.
        first: The clip norm of the first round, in the sketch's units.
        rate: Step of log c, above 0, at most 1.
        multiple: Clip norm over the norm of averages, at least 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms import scaling
        >>> rule = scaling.Norm(clip_norm=1.0, first=10.0)
        >>> state = rule.start()
        >>> rule.encode(state, jnp.array([30.0, 40.0])).tolist()  # clipped to 1 afterwards
        [3.0, 4.0]
        >>> float(rule.learn(state, jnp.array([0.3, 0.4]), 0.0).bound)  # half of 1, as it should
        10.0
    """

    multiple: float = 2.0

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        super().__post_init__()
        multiple = _validate.single_precision("multiple", self.multiple, 1.0, 1e6)
        object.__setattr__(self, "multiple", multiple)

    def size(self, k: int) -> int:
        """Return how many numbers are clipped, noised and sent for a sketch of k."""
        return k

    def gain(self, state: Size) -> Float[Array, ""]:
        """Return c: what decoded noise is multiplied by.

        Args:
            state: From `start` or `learn`.
        """
        return state.bound / np.asarray(self.clip_norm, state.bound.dtype)

    def encode(self, state: Size, vector: Float[Array, " k"]) -> Float[Array, " k"]:
        """Return what is to be clipped to C.

        Args:
            state: Of this round: it knows earlier rounds alone.
            vector: One record's sketch, over `ellipsoid` where noise is shaped.
        """
        return vector / self.gain(state)

    def decode(self, state: Size, mean: Float[Array, " k"]) -> Float[Array, " k"]:
        """Return a noisy average in the sketch's units.

        Args:
            state: As given to `encode`.
            mean: Average of clipped vectors with its noise.
        """
        return mean * self.gain(state)

    def learn(self, state: Size, mean: Float[Array, " k"], variance: Any) -> Size:
        """Return the state of the next round.

        Args:
            state: As given to `encode`.
            mean: As given to `decode`; one with numbers that are not finite teaches nothing.
            variance: v, of the noise in each of its entries, as they were sent.
        """
        seen = jnp.sum(jnp.square(mean)) - mean.size * jnp.asarray(variance, mean.dtype)
        share = seen * np.asarray((self.multiple / self.clip_norm) ** 2, mean.dtype)
        # Clipped far out, so that noise on either side of 1 has its mean there.
        excess = jnp.where(jnp.isfinite(seen), jnp.clip(share, -_RANGE, _RANGE) - 1, jnp.nan)
        return self._moved(state, excess / 2)


@dataclass(frozen=True, kw_only=True)
class Quantile(_Rule):
    """A clip norm under which a stated share of all records stays, learned from one number more.

    Every record adds an entry that says whether its sketch is within the clip norm,

        u = (C sqrt(1 - share^2) clip(s / (c C), 1),  +- share C)

    whose norm is at most C, so that the whole is one vector for the plan's clip and noise. The
    average of that entry tells the fraction b within, with noise, and

        c <- c exp(rate (quantile - b))

    Against a fixed clip norm, noise on the sketch grows by 1 / sqrt(1 - share^2), half a percent at
    .1; that on b has the deviation v^(1/2) / (2 share C), and log c walks by ``rate`` times it a
    round: where it is above 1, as with few agents under noise of their own, take a larger share and
    a rate so much smaller.

    Attributes:
        clip_norm: C of `dpjax.plans.protect.Protect`; another number costs accuracy, not privacy.
        first: The clip norm of the first round, in the sketch's units.
        rate: Step of log c, above 0, at most 1.
        quantile: Records to be left unclipped, in (0, 1).
        share: What the entry takes of C, in (0, 1).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms import scaling
        >>> rule = scaling.Quantile(clip_norm=1.0, first=10.0, share=0.6)
        >>> [round(float(x), 2) for x in rule.encode(rule.start(), jnp.array([30.0, 40.0]))]
        [0.48, 0.64, -0.6]
    """

    quantile: float = 0.5
    share: float = 0.1

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        super().__post_init__()
        for name in ("quantile", "share"):
            value = _validate.single_precision(name, getattr(self, name), 1e-3, 1 - 1e-3)
            object.__setattr__(self, name, value)

    def size(self, k: int) -> int:
        """Return how many numbers are clipped, noised and sent for a sketch of k."""
        return k + 1

    def gain(self, state: Size) -> Float[Array, ""]:
        """Return what decoded noise is multiplied by: c over sqrt(1 - share^2).

        Args:
            state: From `start` or `learn`.
        """
        return state.bound / np.asarray(self._room, state.bound.dtype)

    def encode(self, state: Size, vector: Float[Array, " k"]) -> Float[Array, " k+1"]:
        """Return what is to be clipped to C, and already is but for rounding.

        Args:
            state: Of this round: it knows earlier rounds alone.
            vector: One record's sketch, over `ellipsoid` where noise is shaped.
        """
        # Of numbers scaled by the largest, squares neither vanish nor overflow.
        top = jnp.maximum(jnp.max(jnp.abs(vector)), jnp.finfo(vector.dtype).tiny)
        norm = top * jnp.sqrt(jnp.sum(jnp.square(vector / top)))
        inside = norm <= state.bound
        scaled = vector / jnp.maximum(norm, state.bound) * np.asarray(self._room, vector.dtype)
        entry = np.asarray(self.share * self.clip_norm, vector.dtype)
        return jnp.concatenate([scaled, jnp.where(inside, entry, -entry)[None]])

    def decode(self, state: Size, mean: Float[Array, " k+1"]) -> Float[Array, " k"]:
        """Return a noisy average in the sketch's units, without the entry.

        Args:
            state: As given to `encode`.
            mean: Average of clipped vectors with its noise.
        """
        return mean[:-1] * self.gain(state)

    def learn(self, state: Size, mean: Float[Array, " k+1"], variance: Any = None) -> Size:
        """Return the state of the next round.

        Args:
            state: As given to `encode`.
            mean: As given to `decode`; one with numbers that are not finite teaches nothing.
            variance: Not read: the noise in a fraction has mean 0.
        """
        del variance
        entry = np.asarray(self.share * self.clip_norm, mean.dtype)
        # Noise may show more than all, or less than none.
        inside = (1 + mean[-1] / entry) / 2
        excess = np.asarray(self.quantile, mean.dtype) - jnp.clip(inside, -_RANGE, _RANGE)
        return self._moved(state, jnp.where(jnp.isfinite(inside), excess, jnp.nan))

    @property
    def _room(self) -> float:
        return self.clip_norm * math.sqrt(1 - self.share**2)


def ellipsoid(
    moments: Float[Array, " k"],
    *,
    weights: Float[Array, " k"] | None = None,
    least: float = 1e-3,
) -> Float[Array, " k"]:
    """Return scales D with which noise does least harm at equal sensitivity.

        minimise sum_i w_i D_i^2    under    sum_i m_i / D_i^2 = sum_i m_i

    The sum is that of the noise after decoding, in units of a^2; the constraint keeps the mean
    square of what is clipped, so that one clip norm serves with D and without. By Lagrange

        D_i^2 = sqrt(m_i / w_i) sum_j sqrt(m_j w_j) / sum_j m_j

    For w = 1 noise has a variance in proportion to a coordinate's deviation, and adds
    (sum_i sqrt(m_i))^2 / (k sum_i m_i) of what round noise adds: at most 1, and 1 / k where all is
    in one coordinate. In proportion to the second moment, as the paper prints it, is best for
    w = 1 / m, errors as Adam scales them; for w = 1 it adds as much as round noise.

    Args:
        moments: m, mean squares of the coordinates, of privatised or public numbers only; negative
            ones (noise taken off) count as 0.
        weights: w, what an error in a coordinate costs, above 0; None is 1 for all.
        least: Moments below this share of the largest are raised to it, so that a coordinate can
            still be seen; in (0, 1].

    Raises:
        ValueError: For a share out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms import scaling
        >>> [round(float(x), 3) for x in scaling.ellipsoid(jnp.array([16.0, 1.0]))]
        [1.085, 0.542]

    Reference:
        Nicolas et al., equation (40).
    """
    least = _validate.single_precision("least", least, 1e-12, 1.0)
    top = jnp.max(moments)
    raised = jnp.maximum(moments / jnp.where(top > 0, top, 1), np.asarray(least, moments.dtype))
    known = jnp.where((top > 0) & jnp.isfinite(top), raised, 1)
    cost = jnp.ones_like(known) if weights is None else weights
    total = jnp.sum(jnp.sqrt(known * cost))
    return jnp.sqrt(jnp.sqrt(known / cost) * total / jnp.sum(known))


def second_moments(
    sketch: Sketch, *, forgetting: float, rounds: Any, variance: Any = 0.0
) -> Float[Array, " k"]:
    """Return mean squares of gradients along the columns of a sketch's frame.

    Those kept have their weights over the rounds remembered, less the noise's variance; of probes
    nothing is known, which is 0, and `ellipsoid` raises it.

    Args:
        sketch: Learned from privatised gradients.
        forgetting: As it was learned with, above 0, at most 1.
        rounds: Gradients taken in, at least 1.
        variance: Of the noise along a direction in what was taken in.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.transforms import scaling, sketch
        >>> found = sketch.start(9, 3, jax.random.key(0))
        >>> found = sketch.update(found, 2 * jnp.eye(9)[0], jax.random.key(1), probes=1)
        >>> scaling.second_moments(found, forgetting=0.95, rounds=1).round(3).tolist()
        [4.0, 0.0, 0.0]
    """
    forgetting = _validate.positive("forgetting", forgetting)
    if forgetting > 1:
        raise ValueError(f"forgetting is {forgetting!r}; give a number above 0, at most 1")
    weights = sketch.weights
    count = jnp.maximum(jnp.asarray(rounds, weights.dtype), 1)
    if forgetting < 1:
        factor = np.asarray(forgetting, weights.dtype)
        count = (1 - factor**count) / (1 - factor)
    seen = jnp.maximum(weights / count - jnp.asarray(variance, weights.dtype), 0)
    return jnp.where(jnp.arange(len(weights)) < sketch.kept, seen, 0)
