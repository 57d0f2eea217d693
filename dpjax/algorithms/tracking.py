"""Gradient tracking that sends one variable, with noise in proportion to its steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from dpjax import _validate
from dpjax.algorithms.exchange import Gossip, Transition, Transmission
from dpjax.protocols import (
    Carry,
    Emission,
    Message,
    Method,
    MethodTerms,
    Models,
    PublicState,
    Round,
    Updates,
)
from dpjax.topology.mixing import Mixing

__all__ = ["DGD", "DPOP", "Tracking"]

Apart = Callable[[float], float]
"""The distance of two neighbours' answers as a function of the distance of their models."""
Steps: TypeAlias = Float[np.ndarray, " T"]
"""Step sizes of all rounds."""


HIDDEN_MODELS = MethodTerms(
    payload="models",
    steps="plain",
    one_answer=True,
    why=(
        "it hides models, which plain steps move by amounts known beforehand: give "
        "noise=dp.noise.ScheduledLaplace(ratio) or ScheduledGaussian(ratio), or None, and "
        "optimizer=dp.optimizers.Sgd(step_size, decay)"
    ),
)
"""Of methods that send models with noise."""


class Sent(NamedTuple):
    """The memory of an agent that sends its model alone.

    Attributes:
        optimizer: The optimizer's state.
        message: The last message, which may be published.
        tracked: The tracker of the average gradient; () without one.
    """

    optimizer: optax.OptState
    message: Message
    tracked: Updates = ()


class KeepsMessage(Method):
    """A method whose agents keep their last noisy message, which may be published."""

    def send(
        self, ctx: Round, public_state: PublicState, emission: Emission, noisy: Updates
    ) -> Transmission:
        """The noisy payload, which the agent keeps too."""
        return noisy, (noisy, emission.carry)

    def released(self, public_state: PublicState) -> Models:
        """The last message: the model itself has a step without noise."""
        return public_state.memory.message


class ModelSent(KeepsMessage):
    """Base of `Tracking`, `DPOP` and `DGD`: the model is private, its noisy form is sent."""

    stochastic = "double"
    exchange = Gossip()
    by_agent = True

    def start(self, ctx: Round, models: Models) -> Sent:
        """The optimizer's state; the common starting point counts as sent."""
        return Sent(ctx.optimizer.init(models), models)

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """The model is private."""
        return Emission(public_state.models)

    def send(
        self, ctx: Round, public_state: PublicState, emission: Emission, noisy: Updates
    ) -> Transmission:
        """The noisy model, which the agent keeps too."""
        return noisy, noisy

    def sensitivity(
        self, answer: Apart, steps: Steps, divisor: float, mixing: Mixing
    ) -> np.ndarray:
        """How far each message moves, all others replayed: by the step of the round before.

        Args:
            answer: How far answers are apart, by the distance of the models that are asked at.
            steps: [T] step sizes of plain steps.
            divisor: What the sampler divides sums by.
            mixing: The mixing matrix.
        """
        # Message 1 is the common starting point: it moves by nothing.
        moves = np.zeros((len(steps), 1))
        moves[1:, 0] = answer(0.0) / divisor * np.asarray(steps)[:-1]
        return moves


@dataclass(frozen=True)
class Tracking(ModelSent):
    """Implicit gradient tracking: agents send one variable, and never the tracker.

        z_i = x_i + xi_i,  zbar = W z,  y_i += beta (z_i - zbar_i),
        x_i = zbar_i + opt(y_i + grad f_i(z_i))

    The optimizer takes plain steps, -alpha_k times its input. y starts at zero, and its sum over
    agents stays zero. So gradients sum to zero where models agree and y is constant.

    Guarantee: none by itself; it is the plan's. Message k carries the gradient step of round k - 1
    at z, which is public. With all messages replayed its sensitivity is alpha_{k-1} times the
    distance of neighbouring gradients at one point, and that of message 1 is 0. The paper hides
    message k by nu_{k-1};
    `dpjax.mechanism.laplace.geometric` has both forms. x_K is never released: `released` is the
    last message.

    Attributes:
        beta: Weight of disagreement in the tracker. The paper's condition gamma beta <= 1 is
            neither necessary nor sufficient (the page 'Gradient tracking under pure DP' of the
            manual).

    Reference:
        Xie, Liu and Chai (2025), Algorithm 1.

    Example:
        >>> from dpjax.algorithms.tracking import Tracking
        >>> steps = [0.5, 0.25, 0.125]
        >>> shifts = Tracking(beta=1e3).sensitivity(lambda distance: 2.0, steps, 1, None)
        >>> shifts.ravel().tolist()
        [0.0, 1.0, 0.5]
    """

    beta: float

    terms = HIDDEN_MODELS

    def __post_init__(self) -> None:
        """Check that float32 holds beta."""
        _validate.fields(self, _validate.single_precision, "beta", minimum=1e-9, maximum=1e9)

    def start(self, ctx: Round, models: Models) -> Sent:
        """The optimizer's state, and a tracker of zeros."""
        return super().start(ctx, models)._replace(tracked=optax.tree.zeros_like(models))

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Carry, received: Message
    ) -> Transition:
        """Track disagreement, and step along it and the gradient at the message."""
        memory = public_state.memory
        # y_i += beta (z_i - zbar_i): sums to zero over agents where W is doubly stochastic.
        tracked = jax.tree.map(
            lambda y, z, mean: y + self.beta * (z - mean), memory.tracked, carry, received
        )
        # The gradient is at the message z, which is public, and not at the private x.
        direction = jax.tree.map(jnp.add, tracked, ctx.gradient(carry))
        models, optimizer = ctx.step(received, direction, memory.optimizer)
        return models, Sent(optimizer, carry, tracked)


@dataclass(frozen=True)
class DPOP(ModelSent):
    """DPOP, reconstructed: models are mixed, and each agent steps from the mix, in a box.

        x_i <- Proj( (W z)_i + opt(grad f_i((W z)_i)) ),   z_i = x_i + xi_i

    It is reconstructed, since no code is public. The authors' analysis assumes bounded gradients.
    Here it is accounted as a method whose message k carries the step of round k - 1 at a public
    point. Projection onto a box increases no coordinate's distance; onto a ball it could increase
    the L1 distance.

    Guarantee: none by itself; it is the plan's.

    Attributes:
        box: Half the side of the box, about 0; None is no projection.

    Reference:
        Huang, Mitra and Vaidya (2015), Differentially private distributed optimization.

    Example:
        >>> from dpjax.algorithms.tracking import DPOP
        >>> DPOP(box=10.0)
        DPOP(box=10.0)
    """

    box: float | None = None

    terms = HIDDEN_MODELS

    def __post_init__(self) -> None:
        """Check the box."""
        if self.box is not None:
            _validate.fields(self, _validate.single_precision, "box", minimum=1e-9, maximum=1e9)

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Carry, received: Message
    ) -> Transition:
        """Step from the mix, back into the box."""
        before = public_state.memory.optimizer
        box = self.box
        models, optimizer = ctx.step(received, ctx.gradient(received), before)
        if box is not None:
            # A box moves no coordinate further from its neighbour's; a ball may, in L1.
            models = jax.tree.map(lambda leaf: jnp.clip(leaf, -box, box), models)
        return models, Sent(optimizer, carry)


@dataclass(frozen=True)
class DGD(ModelSent):
    """Decentralized gradient descent: x <- W z + opt(grad f(x)), z = x plus noise.

    It is a reference. With constant steps it stops at a distance from the optimum that grows with
    the step size. The gradient is computed at the agent's private model, which differs between
    neighbouring data: a clip or an assumed smoothness must bound this difference.

    Guarantee: none by itself; it is the plan's.

    Reference:
        Nedic and Ozdaglar (2009).

    Example:
        >>> from dpjax.algorithms.tracking import DGD
        >>> DGD()
        DGD()
    """

    reads_private_models = True
    terms = HIDDEN_MODELS

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Carry, received: Message
    ) -> Transition:
        """Step from the mix along the gradient at the agent's own model."""
        # At the private model: neighbours' models differ, so the gradients' distance grows.
        gradient = ctx.gradient(public_state.models)
        models, optimizer = ctx.step(received, gradient, public_state.memory.optimizer)
        return models, Sent(optimizer, carry)

    def sensitivity(
        self, answer: Apart, steps: Steps, divisor: float, mixing: Mixing
    ) -> np.ndarray:
        """How far each message moves, all others replayed.

        Args:
            answer: How far answers are apart, by the distance of the models that are asked at.
            steps: [T] step sizes.
            divisor: What the sampler divides sums by.
            mixing: The mixing matrix.
        """
        moves = np.zeros((len(steps), 1))
        # A message moves by the last step, whose gradient moved with the message before.
        for k, step in enumerate(np.asarray(steps)[:-1], start=1):
            moves[k] = step * answer(float(moves[k - 1, 0])) / divisor
        return moves
