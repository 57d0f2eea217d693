"""A sketch with a clip norm that is learned from released values.

A scale stands between encode and clip, and follows released values:

    encode   u = s / (c D)           s [k]: a record's sketch; D [k] public, c a rule's
    clip     |u| <= C                the plan's clip norm, which never changes
    noise    mean of u + z           the plan's noise, which never changes
    decode   s^ = c D (mean + z)     before the step

In units of sketches the clip is an ellipsoid c C D and the noise has deviations c D a: both change
together. Let c and D be functions of public numbers and of values released in earlier rounds. Given
these rounds, a round is a Gaussian mechanism whose sensitivity over noise is C / a for all c and D,
and the plan's loss is that of all rounds. A scale that depends on this round's gradients would
change every record's term with one record, which no clip bounds; `dpjax.plans.dependence` refuses
a method that does so. Noise D z on gradients that were
clipped in L2, as the paper prints it, has sensitivity C / min(D) and not C.

Reference:
    Andrew, Thakkar, McMahan, Ramaswamy, Differentially private learning with adaptive clipping
    (2021).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from dpjax import _validate
from dpjax._numerics import FlatVector, Scalar
from dpjax.algorithms import sketches
from dpjax.protocols import Memory, Updates

__all__ = ["Quantile", "Scaled"]

_Scalar = Float[Array, ""]
_Coordinates = Float[Array, " k"]
_Extended = Float[Array, " k+1"]
"""A sketch and the entry that says whether its record is within the clip norm."""

_FARTHEST = 1e6
"""By how much a clip norm may leave its first value."""
_RANGE = 4.0
"""How far what a round shows, around 1, is read at most."""


class _Size(NamedTuple):
    """What `Quantile` knows: a function of released numbers.

    Attributes:
        bound: c C, the clip norm in the sketch's units.
    """

    bound: _Scalar


@dataclass(frozen=True, kw_only=True)
class Quantile:
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
        >>> from dpjax.contrib import scaled
        >>> rule = scaled.Quantile(clip_norm=1.0, first=10.0, share=0.6)
        >>> [round(float(x), 2) for x in rule.encode(rule.start(), jnp.array([30.0, 40.0]))]
        [0.48, 0.64, -0.6]
    """

    clip_norm: float
    first: float
    rate: float = 0.2
    quantile: float = 0.5
    share: float = 0.1

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        check = _validate.single_precision
        _validate.fields(self, check, "clip_norm", "first", minimum=1e-9, maximum=1e9)
        _validate.fields(self, check, "rate", minimum=1e-6, maximum=1.0)
        _validate.fields(self, check, "quantile", "share", minimum=1e-3, maximum=1 - 1e-3)

    def start(self, dtype: DTypeLike = jnp.float32) -> _Size:
        """Return the state before anything is released.

        Args:
            dtype: Of the sketches.
        """
        return _Size(jnp.asarray(self.first, dtype))

    def size(self, k: int) -> int:
        """Return how many numbers are clipped, noised and sent for a sketch of k."""
        return k + 1

    def gain(self, state: _Size) -> _Scalar:
        """Return what decoded noise is multiplied by: c over sqrt(1 - share^2).

        Args:
            state: From `start` or `learn`.
        """
        return state.bound / np.asarray(self._norm, state.bound.dtype)

    def encode(self, state: _Size, vector: _Coordinates) -> _Extended:
        """Return what is to be clipped to C, and already is but for rounding.

        A vector that is not finite becomes nan, which the clip leaves out.

        Args:
            state: Of this round: it knows earlier rounds alone.
            vector: One record's sketch, over a public shape where noise is shaped.
        """
        # Of numbers scaled by the largest, squares neither vanish nor overflow.
        top = jnp.maximum(jnp.max(jnp.abs(vector)), jnp.finfo(vector.dtype).tiny)
        norm = top * jnp.sqrt(jnp.sum(jnp.square(vector / top)))
        scaled = vector / jnp.maximum(norm, state.bound) * np.asarray(self._norm, vector.dtype)
        entry = np.asarray(self.share * self.clip_norm, vector.dtype)
        within = jnp.where(norm <= state.bound, entry, -entry)
        encoded = jnp.concatenate([scaled, within[None]])
        return jnp.where(jnp.isfinite(vector).all(), encoded, jnp.nan)

    def decode(self, state: _Size, mean: _Extended) -> _Coordinates:
        """Return a noisy average in the sketch's units, without the entry.

        Args:
            state: As given to `encode`.
            mean: Average of clipped vectors with its noise.
        """
        return mean[:-1] * self.gain(state)

    def learn(self, state: _Size, mean: _Extended) -> _Size:
        """Return the state of the next round.

        Args:
            state: As given to `encode`.
            mean: As given to `decode`; one with numbers that are not finite teaches nothing.
        """
        entry = np.asarray(self.share * self.clip_norm, mean.dtype)
        # Noise may show more records than there are, or fewer than none.
        inside = (1 + mean[-1] / entry) / 2
        excess = np.asarray(self.quantile, mean.dtype) - jnp.clip(inside, -_RANGE, _RANGE)
        bound = state.bound * jnp.exp(np.asarray(self.rate, mean.dtype) * excess)
        low = np.asarray(self.first / _FARTHEST, bound.dtype)
        high = np.asarray(self.first * _FARTHEST, bound.dtype)
        bound = jnp.clip(bound, low, high)
        return _Size(jnp.where(jnp.isfinite(inside), bound, state.bound))

    @property
    def _norm(self) -> float:
        """What the entry leaves of C for the sketch."""
        return self.clip_norm * math.sqrt(1 - self.share**2)


class ScaledState(NamedTuple):
    """The state of `Scaled`, a function of sums and public keys.

    Attributes:
        sketch: The state of the sketch within.
        size: The clip norm.
    """

    sketch: Memory
    size: Any


class ScaledProjection(NamedTuple):
    """A projection with a scale: encoding divides by it, decoding multiplies.

    Attributes:
        inner: The projection.
        rule: The rule of the clip norm.
        size: The clip norm.
    """

    inner: sketches.Projection
    rule: Quantile
    size: Any

    def encode(self, vector: FlatVector) -> Array:
        """The vector before the clip."""
        return self.rule.encode(self.size, self.inner.encode(vector))

    def decode(self, coordinates: Array) -> FlatVector:
        """A c y."""
        return self.inner.decode(self.rule.decode(self.size, coordinates))

    def diagonal(self) -> FlatVector:
        """diag(A c^2 A'): the variance of decoded noise over that of a number's."""
        # Noise is multiplied by the scale that decodes it, so its variance by the square.
        return self.inner.diagonal() * jnp.square(self.rule.gain(self.size))


@dataclass(frozen=True)
class Scaled:
    """A sketch that is scaled before the clip, and back at the server.

        client    u = A' (g - m) / c, clipped to C        server    g^ = A c q + m

    c follows a quantile of the norms of A' (g - m), which takes one more number in a message:
    see the module.

    Guarantee: none by itself; it is the plan's, at the plan's clip norm and noise. c is a function
    of sums of earlier rounds. Given these, one unit's message has norm C at most.

    Attributes:
        sketch: The scaled sketch.
        quantile: The rule of c.

    Raises:
        ValueError: For an unknown sketch or rule.

    Example:
        >>> from dpjax.algorithms.sketches import Learned
        >>> from dpjax.contrib.scaled import Quantile, Scaled
        >>> Scaled(Learned(16), Quantile(clip_norm=0.1, first=1.0)).k
        17
    """

    sketch: sketches.LinearSketch
    quantile: Quantile

    def __post_init__(self) -> None:
        """Check the sketch and the rule."""
        sketches.check_sketch(self.sketch)
        rule: Any = self.quantile
        if not isinstance(rule, Quantile):
            raise ValueError(f"quantile is {_validate.shown(rule)}; give contrib.scaled.Quantile")

    @property
    def k(self) -> int:
        """Numbers in a message."""
        return self.quantile.size(self.sketch.k)

    @property
    def min_entries(self) -> int:
        """The fewest entries, which the sketch needs."""
        return self.sketch.min_entries

    def start(self, key: PRNGKeyArray, entries: int, dtype: DTypeLike) -> ScaledState:
        """The sketch's start and the first clip norm."""
        return ScaledState(self.sketch.start(key, entries, dtype), self.quantile.start(dtype))

    def projection(self, state: ScaledState) -> ScaledProjection:
        """A of this round with its scale."""
        return ScaledProjection(self.sketch.projection(state.sketch), self.quantile, state.size)

    def noise(self, state: ScaledState, variance: Scalar, present: Scalar) -> FlatVector:
        """(a^2 / B) diag(A c^2 A')."""
        return self.projection(state).diagonal() * (variance / present)

    def learn(
        self, state: Memory, gradient: Array, key: PRNGKeyArray, mean: Updates | None = None
    ) -> Memory:
        """The sketch and the clip norm of the next round."""
        # The clip norm's next value follows from counts that travel within the noisy sum.
        assert mean is not None
        inner = self.sketch.learn(state.sketch, gradient, key, mean)
        return ScaledState(inner, self.quantile.learn(state.size, mean))
