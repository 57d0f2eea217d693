"""A sketch with a clip norm that is learned from released values."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from dpjax import _validate
from dpjax.algorithms import sketches
from dpjax.protocols import Memory, Updates
from dpjax.transforms.sketch import CountSketch, Frame, Quantile

__all__ = ["Scaled"]


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

    inner: Frame | CountSketch
    rule: Quantile
    size: Any

    def encode(self, vector: sketches.Vector) -> Array:
        """The vector before the clip."""
        return self.rule.encode(self.size, self.inner.encode(vector))

    def decode(self, coordinates: Array) -> sketches.Vector:
        """A c y."""
        return self.inner.decode(self.rule.decode(self.size, coordinates))

    def diagonal(self) -> sketches.Vector:
        """diag(A c^2 A'): the variance of decoded noise over that of a number's."""
        # Noise is multiplied by the scale that decodes it, so its variance by the square.
        return self.inner.diagonal() * jnp.square(self.rule.gain(self.size))


@dataclass(frozen=True)
class Scaled:
    """A sketch that is scaled before the clip, and back at the server.

        client    u = A' (g - m) / c, clipped to C        server    g^ = A c q + m

    c follows a quantile of the norms of A' (g - m), which takes one more number in a message:
    `dpjax.transforms.sketch`.

    Guarantee: none by itself; it is the plan's, at the plan's clip norm and noise. c is a function
    of sums of earlier rounds. Given these, one unit's message has norm C at most.

    Attributes:
        sketch: The scaled sketch.
        quantile: The rule of c.

    Raises:
        ValueError: For an unknown sketch or rule.

    Example:
        >>> from dpjax.contrib.scaled import Scaled
        >>> from dpjax.algorithms.sketches import Learned
        >>> from dpjax.transforms.sketch import Quantile
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
            raise ValueError(
                f"quantile is {_validate.shown(rule)}; give transforms.sketch.Quantile"
            )

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

    def noise(
        self, state: ScaledState, variance: sketches.Scalar, present: sketches.Scalar
    ) -> sketches.Vector:
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
