"""Linear sketches of gradients, of which `Learned` follows their leading directions.

    client    s = A_t' (g - m_t)        clipped after this, so that noise is for k numbers
    server    g^ = A_t q + m_t          q the noisy mean of the clients' messages

A_t and m_t follow from sums of earlier rounds and from public keys, and every client replays them.
Methods at a server take a sketch as a part (`dpjax.algorithms.federated.Federated`).
``dpjax.contrib.sketches`` has sketches that learn nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from dpjax import _validate
from dpjax._numerics import FlatVector, Scalar
from dpjax.protocols import Memory, Models, Updates
from dpjax.transforms import sketch as sketch_
from dpjax.transforms.sketch import Frame

__all__ = ["Learned", "LinearSketch"]


class Projection(Protocol):
    """A linear map from a gradient to k numbers, with its adjoint."""

    def encode(self, vector: FlatVector) -> Array:
        """A' g, [k]."""

    def decode(self, coordinates: Array) -> FlatVector:
        """A y."""

    def diagonal(self) -> FlatVector:
        """diag(A A')."""


@runtime_checkable
class LinearSketch(Protocol):
    """A linear sketch that may change from round to round; hashable.

    Example:
        >>> from dpjax.algorithms.sketches import Learned, LinearSketch
        >>> isinstance(Learned(k=4), LinearSketch)
        True
    """

    @property
    def k(self) -> int:
        """Numbers in the sketch of a gradient."""

    @property
    def min_entries(self) -> int:
        """The fewest entries of a gradient."""

    def start(self, key: PRNGKeyArray, entries: int, dtype: DTypeLike) -> Memory:
        """The state before the first round.

        Args:
            key: A public key of the run.
            entries: Entries d of a gradient.
            dtype: The dtype of gradients.
        """

    def projection(self, state: Memory) -> Projection:
        """A of this round."""

    def noise(self, state: Memory, variance: Scalar, present: Scalar) -> FlatVector:
        """The variance of the noise in the decoded mean, by coordinate.

        Args:
            state: State of this round.
            variance: Variance of one client's noise in a coordinate.
            present: Number of clients in the mean.
        """

    def learn(
        self, state: Memory, gradient: Array, key: PRNGKeyArray, mean: Updates | None = None
    ) -> Memory:
        """The state after a round.

        Args:
            state: State of this round.
            gradient: The decoded noisy mean with the centre.
            key: The round's public key.
            mean: The noisy mean before decoding, [k].
        """


class _LearnedState(NamedTuple):
    """The state of `Learned`.

    Attributes:
        sketch: Basis, weights and frame.
        before: Frame of the round before, [d, k], for the paper's lines; else empty.
    """

    sketch: sketch_.Sketch
    before: Models


@dataclass(frozen=True)
class Learned:
    """The leading directions of past privatised gradients, and probes: DOME's sketch.

    Attributes:
        k: Columns.
        forgetting: Factor on older weights in a round, above 0, at most 1.
        probes: The fewest random columns.
        share: The smallest share of the weights that the kept directions hold.
        as_published: Take the paper's lines: its UpdateSketch, and a correction of the second
            moment by a^2 diag(S_t-1 S_t-1'), which is B times too large and of the round before.
        floor: Weight that noise alone reaches (`dpjax.contrib.sketching.noise_floor`): directions
            not above it are dropped. None drops none.
        aligned: Whether a frame's columns are rotated towards those of the last frame, so that
            noise of a strategy over rounds cancels as far as the spaces agree
            (``benchmarks/_moving.py``).

    Reference:
        Nicolas et al., Algorithms 1 and 2; `dpjax.transforms.sketch.update`.

    Example:
        >>> from dpjax.algorithms.sketches import Learned
        >>> Learned(16).min_entries
        16
    """

    k: int
    forgetting: float = 0.95
    probes: int = 4
    share: float = 0.99
    as_published: bool = False
    floor: float | None = None
    aligned: bool = False

    def __post_init__(self) -> None:
        """Check the arguments of `update` before a run."""
        _validate.fields(self, _validate.integer, "k")
        _validate.fields(self, _validate.fraction, "forgetting", "share")
        remedy = (
            f"k is {self.k}: give more columns, or fewer random ones, probes from 0 to {self.k}"
        )
        _validate.fields(
            self, _validate.integer, "probes", minimum=0, maximum=self.k, remedy=remedy
        )
        _validate.fields(self, _validate.flag, "as_published", "aligned")
        if self.floor is not None:
            _validate.fields(self, _validate.positive, "floor")
            if self.as_published:
                raise ValueError(
                    "as_published is True with a floor, which the paper has not; give one"
                )

    @property
    def min_entries(self) -> int:
        """As many as columns."""
        return self.k

    def start(self, key: PRNGKeyArray, entries: int, dtype: DTypeLike) -> _LearnedState:
        """A random frame without learned directions."""
        check_entries(self, entries)
        first = sketch_.start(entries, self.k, key, dtype)
        return _LearnedState(first, first.frame if self.as_published else ())

    def projection(self, state: _LearnedState) -> Frame:
        """S_t."""
        return Frame(state.sketch.frame)

    def noise(self, state: _LearnedState, variance: Scalar, present: Scalar) -> FlatVector:
        """(a^2 / B) diag(S_t S_t'), or what the paper prints: a^2 diag(S_t-1 S_t-1').

        For q = (1/B) sum (s_i + z_i), z_i ~ N(0, a^2 I_k) and s the mean of the s_i, over the
        noise: E (A q)^2 = (A s)^2 + (a^2 / B) diag(A A'). Subtracted from g_hat^2, it leaves the
        second moment without noise.

        Reference:
            Nicolas et al., Lemma 3.2 (right, for noise of variance v^2 on the average itself) and
            Algorithm 1, line 19, which puts a^2 in the place of v^2 = a^2 / B and S_t-1 in that of
            S_t: B times too much.
        """
        if self.as_published:
            # As the paper prints it: B times too large, and of the round before.
            return Frame(state.before).diagonal() * variance
        return self.projection(state).diagonal() * (variance / present)

    def learn(
        self, state: Memory, gradient: Array, key: PRNGKeyArray, mean: Updates | None = None
    ) -> Memory:
        """UpdateSketch."""
        names = ("forgetting", "probes", "share", "floor", "as_published")
        options = {name: getattr(self, name) for name in names}
        new = sketch_.update(state.sketch, gradient, key, **options)
        if self.aligned:
            # Rotated, not changed: the space that the noise is projected on stays the same.
            new = new._replace(frame=sketch_.aligned(new.frame, state.sketch.frame))
        return _LearnedState(new, state.sketch.frame if self.as_published else ())


def check_sketch(sketch: object) -> None:
    """Check that a value is a sketch.

    Raises:
        ValueError: Naming the argument and the remedy.
    """
    if isinstance(sketch, type) or not isinstance(sketch, LinearSketch):
        raise _validate.refusal("sketch", sketch, "give one of algorithms.sketches")


def check_entries(sketch: LinearSketch, entries: int) -> None:
    """Check that a gradient has at least as many entries as columns.

    Args:
        sketch: The sketch, with its ``k`` and ``min_entries``.
        entries: Entries d of a gradient.

    Raises:
        ValueError: For fewer entries.
    """
    if entries < sketch.min_entries:
        raise ValueError(
            f"k is {sketch.k} for a model of {entries:,} entries; give at most as many, or no "
            "sketch"
        )
