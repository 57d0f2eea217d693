"""Averages of models over rounds, for metrics and release; training uses the models."""

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax import _validate
from dpjax._numerics import Scalar
from dpjax.algorithms.exchange import Transition, Transmission
from dpjax.protocols import (
    Carry,
    Emission,
    Memory,
    Message,
    Method,
    MethodTerms,
    Models,
    PublicState,
    Round,
    Timed,
    Updates,
)
from dpjax.topology.gossip import RoundNumber

__all__ = ["Average"]


class _AveragedMemory(NamedTuple):
    """What an averaged method keeps.

    Attributes:
        inner: The method's own memory.
        average: Of what it released after every round.
    """

    inner: Memory
    average: Models


@dataclass(frozen=True)
class Average(Method):
    """A method with models averaged over rounds; it computes and sends the same as without.

    With x_t the released model after round t, and k = t - begin,

        a_t = a_{t-1} + w_k (x_t - a_{t-1}),    w_k = (1 - decay) / (1 - decay^k);  1 up to k = 1

    which is the mean of x_{begin+1}, .., x_t under weights decay^(t-s), without a bias to the
    start; for decay 1 it is the plain mean. Up to round ``begin`` it is x_t. Metrics,
    `Result.params` and predictors use the average, gradients the models. A run that continues from
    ``Result.params`` starts from the average.

    Guarantee: the method's. The average is a function of the method's released models, and no
    message depends on it. It takes the memory of one more copy of the models.

    Attributes:
        method: The averaged method. It must release models, and run on any network.
        decay: In (0, 1]: 0.999 averages over about the last 1,000 rounds, 1 over all alike.
        begin: Rounds before the average begins. For the uniform average of the second half take
            decay 1 and half of the rounds.

    Raises:
        ValueError: For a value that is no method, or a method on the links of a network; for a
            decay outside (0, 1]; in a config, for no rounds after ``begin``; in a run, for a method
            that releases nothing.

    Reference:
        Polyak and Juditsky 1992; for private training, De et al. 2022 (arXiv 2204.13650).

    Example:
        >>> from dpjax.algorithms.average import Average
        >>> from dpjax.algorithms.dsgd import DSGD
        >>> [round(float(Average(DSGD(), decay=0.5).weight(t)), 3) for t in (0, 1, 2)]
        [1.0, 0.667, 0.571]
    """

    method: Method
    decay: float = 0.999
    begin: int = 0

    terms = MethodTerms(wraps="method")

    def __post_init__(self) -> None:
        """Check the method and the weights."""
        if isinstance(self.method, type) or not isinstance(self.method, Method):
            raise _validate.refusal(
                "method",
                self.method,
                "give a method of any network, such as algorithms.dsgd.DSGD()",
            )
        _validate.fields(self, _validate.fraction, "decay")
        _validate.fields(self, _validate.integer, "begin", minimum=0, maximum=2**31 - 2)

    def check_rounds(self, rounds: int) -> None:
        """Refuse a run that ends before the average begins, or that the method refuses.

        Args:
            rounds: Rounds of the run.

        Raises:
            ValueError: For a run of at most ``begin`` rounds.
        """
        if self.begin >= rounds:
            raise ValueError(
                f"begin is {self.begin}, and the run ends after {rounds} rounds with no average; "
                "give fewer"
            )
        if isinstance(self.method, Timed):
            self.method.check_rounds(rounds)

    # As the method has them.
    stochastic = property(attrgetter("method.stochastic"))
    exchange = property(attrgetter("method.exchange"))
    sensitivity = property(attrgetter("method.sensitivity"))
    reads_private_models = property(attrgetter("method.reads_private_models"))
    min_entries = property(attrgetter("method.min_entries"))

    def weight(self, round: RoundNumber) -> Scalar:
        """Weight w of the newest models after a round.

        Args:
            round: Rounds done before it.
        """
        # Up to `begin` the newest models have weight 1, so that nothing earlier remains.
        count = jnp.maximum(jnp.asarray(round, jnp.int32) + 1 - self.begin, 1).astype(jnp.float32)
        if self.decay == 1:
            return 1 / count
        # expm1: near decay 1 the difference 1 - decay^k would lose all digits.
        return (1 - self.decay) / -jnp.expm1(count * math.log(self.decay))

    def start(self, ctx: Round, models: Models) -> _AveragedMemory:
        """The method's memory, and its released models before the first round."""
        inner = self.method.start(ctx, models)
        average = self.method.released(PublicState(models, inner))
        # Known only here: what a method releases may depend on its memory.
        if not jax.tree.leaves(average):
            raise ValueError(
                f"method is {type(self.method).__name__}, which releases nothing to average; give "
                "one that releases its models"
            )
        return _AveragedMemory(inner, average)

    def payload(self, models: Models) -> Updates:
        """The method's."""
        return self.method.payload(models)

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """The method's."""
        return self.method.emit(ctx, _inner(public_state))

    def send(
        self, ctx: Round, public_state: PublicState, emission: Emission, noisy: Updates
    ) -> Transmission:
        """The method's."""
        return self.method.send(ctx, _inner(public_state), emission, noisy)

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Carry, received: Message
    ) -> Transition:
        """The method's models, added to the average."""
        # The method reads its own memory, never the average: messages stay as they were.
        new = PublicState(*self.method.absorb(ctx, _inner(public_state), carry, received))
        weight = self.weight(ctx.round)
        average = jax.tree.map(
            lambda old, leaf: old + weight.astype(leaf.dtype) * (leaf - old),
            public_state.memory.average,
            self.method.released(new),
        )
        return new.models, _AveragedMemory(new.memory, average)

    @property
    def measures_private(self) -> bool:
        """False: the average is over released models."""
        return False

    def released(self, public_state: PublicState) -> Models:
        """The average, a function of the method's released models."""
        return public_state.memory.average

    # Metrics are of what is released.
    measured = released


def _inner(public_state: PublicState) -> PublicState:
    return PublicState(public_state.models, public_state.memory.inner)
