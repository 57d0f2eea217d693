"""A sketch under a clip norm that is learned, and noise shaped by what was released."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dpjax import _validate
from dpjax.algorithms.sketches import Learned, LearnedState, LinearSketch
from dpjax.transforms import sketch as sketch_
from dpjax.transforms.sketch import CountSketch, Frame

__all__ = ["Scaled"]


class ScaledState(NamedTuple):
    """What `Scaled` keeps: functions of sums and public keys.

    Attributes:
        sketch: The state of the sketch within.
        size: The clip norm; nothing without one that is learned.
        rounds: Sums that were opened.
    """

    sketch: Any
    size: Any
    rounds: Int[Array, ""]


class ScaledProjection(NamedTuple):
    """A projection with scales: what encodes divides, what decodes multiplies.

    Attributes:
        inner: The projection.
        shape: D, [k].
        rule: The rule of the clip norm, or None.
        size: Its state.
    """

    inner: Frame | CountSketch
    shape: Float[Array, " k"]
    rule: sketch_.Quantile | None
    size: Any

    def encode(self, vector: Float[Array, " d"]) -> Array:
        """What is to be clipped."""
        coordinates = self.inner.encode(vector) / self.shape
        return coordinates if self.rule is None else self.rule.encode(self.size, coordinates)

    def decode(self, coordinates: Array) -> Float[Array, " d"]:
        """A c D y."""
        if self.rule is not None:
            coordinates = self.rule.decode(self.size, coordinates)
        return self.inner.decode(coordinates * self.shape)

    def diagonal(self) -> Float[Array, " d"]:
        """diag(A c^2 D^2 A'): the variance of decoded noise over that of a number's."""
        if isinstance(self.inner, Frame):
            found = jnp.sum(jnp.square(self.inner.columns * self.shape), axis=1)
        else:  # never shaped
            found = self.inner.diagonal()
        return found if self.rule is None else found * jnp.square(self.rule.gain(self.size))


@dataclass(frozen=True)
class Scaled:
    """A sketch whose numbers are scaled, before the clip and back at the server.

        client    u = A' (g - m) / (c D), clipped to C        server    g^ = A c D q + m

    c follows a quantile of the norms of A' (g - m) / D, D the square roots of the deviations of
    what was released along the sketch's directions: `dpjax.transforms.sketch`.

    Guarantee: none by itself; it is the plan's, at the plan's clip norm and noise: c and D are
    functions of sums of earlier rounds, so that one unit's message has norm C at most, given these.

    Attributes:
        sketch: What is scaled.
        quantile: The rule of c, for one number more in a message; None leaves the plan's clip norm.
        shaped: Whether D is learned, of a `dpjax.algorithms.sketches.Learned` alone.
        least: Second moments below this share of the largest are raised to it; what probes get.

    Raises:
        ValueError: For what is no sketch or rule, or a shape for a sketch that learns none.

    Example:
        >>> from dpjax.algorithms.scaled import Scaled
        >>> from dpjax.algorithms.sketches import Learned
        >>> from dpjax.transforms.sketch import Quantile
        >>> Scaled(Learned(16), Quantile(clip_norm=0.1, first=1.0)).k
        17
    """

    sketch: LinearSketch
    quantile: sketch_.Quantile | None = None
    shaped: bool = False
    least: float = 0.01

    def __post_init__(self) -> None:
        """Refuse what cannot be scaled."""
        given: Any = self.sketch
        if isinstance(given, type) or not isinstance(given, LinearSketch):
            raise ValueError(f"sketch is {_validate.shown(given)}; give one of algorithms.sketches")
        rule: Any = self.quantile
        if not isinstance(rule, sketch_.Quantile | None):
            raise ValueError(
                f"quantile is {_validate.shown(rule)}; give transforms.sketch.Quantile(...)"
            )
        if _validate.flag("shaped", self.shaped):
            if not isinstance(given, Learned) or given.aligned:
                raise ValueError(
                    f"shaped is True with sketch {given}, whose columns are no directions that it "
                    "weighs; give Learned(k)"
                )
        least = _validate.single_precision("least", self.least, 1e-6, 1.0)
        object.__setattr__(self, "least", least)

    @property
    def k(self) -> int:
        """Numbers in a message."""
        return self.sketch.k if self.quantile is None else self.quantile.size(self.sketch.k)

    @property
    def entries(self) -> int:
        """The sketch's."""
        return self.sketch.entries

    def start(self, key: PRNGKeyArray, entries: int, dtype: Any) -> ScaledState:
        """The sketch's start, the first clip norm, a round shape."""
        size = () if self.quantile is None else self.quantile.start(dtype)
        inner = self.sketch.start(key, entries, dtype)
        return ScaledState(inner, size, jnp.zeros((), jnp.int32))

    def projection(self, state: ScaledState) -> Any:
        """A of this round, with its scales."""
        inner = self.sketch.projection(state.sketch)
        dtype = jnp.result_type(jnp.float32) if self.quantile is None else state.size.bound.dtype
        if isinstance(inner, Frame):
            dtype = inner.columns.dtype
        shape = jnp.ones(self.sketch.k, dtype)
        if self.shaped:
            shape = self._shape(state)
        return ScaledProjection(inner, shape, self.quantile, state.size)

    def noise(self, state: ScaledState, variance: Any, present: Any) -> Float[Array, " d"]:
        """(a^2 / B) diag(A c^2 D^2 A')."""
        return self.projection(state).diagonal() * (variance / present)

    def learn(
        self, state: ScaledState, gradient: Float[Array, " d"], key: PRNGKeyArray, mean: Any = None
    ) -> ScaledState:
        """The sketch, the clip norm and the shape of the next round."""
        inner = self.sketch.learn(state.sketch, gradient, key, mean)
        size = state.size if self.quantile is None else self.quantile.learn(state.size, mean)
        return ScaledState(inner, size, state.rounds + 1)

    def _shape(self, state: ScaledState) -> Float[Array, " k"]:
        """D of what the sketch knows; its noise counts as signal, which makes it rounder."""
        learned: Any = self.sketch
        known: LearnedState = state.sketch
        moments = sketch_.second_moments(
            known.sketch, forgetting=learned.forgetting, rounds=state.rounds
        )
        return sketch_.ellipsoid(moments, least=self.least)
