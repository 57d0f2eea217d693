"""Gradient tracking with one variable on the network: its noise is as small as its steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _validate
from dpjax.algorithms.exchange import Gossip
from dpjax.protocols import Emission, Method, PublicState, Round

__all__ = ["DGD", "DPOP", "Tracking"]

Apart = Callable[[float], float]
"""How far the answers of an agent and of its neighbour are apart, by how far their models are."""


class Sent(NamedTuple):
    """What an agent keeps that sends its model and nothing else.

    Attributes:
        optimizer: The optimizer's state.
        message: What it sent last, which may be published.
        tracked: What tracks the average gradient; () where nothing does.
    """

    optimizer: Any
    message: Any
    tracked: Any = ()


class KeepsMessage(Method):
    """A method whose agents keep what they sent last, noisy, which may be published."""

    def send(self, ctx: Round, public_state: PublicState, emission: Emission, noisy: Any) -> Any:
        """The noisy payload, which the agent keeps too."""
        return noisy, (noisy, emission.carry)

    def released(self, public_state: PublicState) -> Any:
        """The last message: the model itself carries a step that no noise was added to."""
        return public_state.memory.message


class ModelSent(KeepsMessage):
    """What `Tracking`, `DPOP` and `DGD` share: the model is private, its noisy form is sent."""

    stochastic: ClassVar[Literal["rows", "columns", "double"]] = "double"
    exchange: ClassVar[Gossip] = Gossip()

    def start(self, ctx: Round, models: Any) -> Sent:
        """The optimizer's state; the common starting point counts as sent."""
        return Sent(ctx.optimizer.init(models), models)

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """The model is private."""
        return Emission(public_state.models)

    def send(self, ctx: Round, public_state: PublicState, emission: Emission, noisy: Any) -> Any:
        """The noisy model, which the agent keeps too."""
        return noisy, noisy

    def sensitivity(self, answer: Apart, steps: Any, divisor: float, mixing: Any) -> np.ndarray:
        """How far each message moves, all others replayed: by the step of the round before.

        Args:
            answer: How far answers are apart, by the distance of the models that are asked at.
            steps: [T] step sizes of plain steps.
            divisor: What the sampler divides sums by.
            mixing: The mixing matrix.
        """
        moves = np.zeros((len(steps), 1))
        moves[1:, 0] = answer(0.0) / divisor * np.asarray(steps)[:-1]
        return moves


@dataclass(frozen=True)
class Tracking(ModelSent):
    """Implicit gradient tracking: one variable is sent, the tracker never is.

        z_i = x_i + xi_i,  zbar = W z,  y_i += beta (z_i - zbar_i),
        x_i = zbar_i + opt(y_i + grad f_i(z_i))

    The optimizer takes plain steps -alpha_k times what it is given. y starts at zero, and its sum
    over agents stays there, so that where models agree and y rests, gradients sum to zero.

    Guarantee: none by itself; it is the plan's. Message k carries the gradient step of round k - 1,
    asked at z, which everybody knows: with all messages replayed it moves by alpha_{k-1} times how
    far gradients are apart at one point, and message 1 not at all. The paper hides it by nu_{k-1};
    `dpjax.mechanism.laplace.geometric` has both forms. x_K is never released: `released` is the
    last message.

    Attributes:
        beta: Weight of disagreement in the tracker; the paper asks for gamma beta <= 1, which is
            neither necessary nor sufficient (docs/tracking.md).

    Reference:
        Xie, Liu and Chai (2025), Algorithm 1.

    Example:
        >>> from dpjax.algorithms.tracking import Tracking
        >>> moves = Tracking(beta=1e3).sensitivity(lambda apart: 2.0, [0.5, 0.25, 0.125], 1, None)
        >>> moves.ravel().tolist()
        [0.0, 1.0, 0.5]
    """

    beta: float

    def __post_init__(self) -> None:
        """Refuse what float32 cannot weigh with."""
        _validate.fields(self, _validate.single_precision, "beta", least=1e-9, most=1e9)

    def start(self, ctx: Round, models: Any) -> Sent:
        """The optimizer's state, and nothing tracked yet."""
        return super().start(ctx, models)._replace(tracked=jax.tree.map(jnp.zeros_like, models))

    def absorb(self, ctx: Round, public_state: PublicState, carry: Any, received: Any) -> Any:
        """Track disagreement, and step along it and the gradient at the message."""

        def disagreement(y: Any, z: Any, mean: Any) -> Any:
            return y + self.beta * (z - mean)

        memory = public_state.memory
        tracked = jax.tree.map(disagreement, memory.tracked, carry, received)
        direction = jax.tree.map(jnp.add, tracked, ctx.gradient(carry))
        models, optimizer = ctx.step(received, direction, memory.optimizer)
        return models, Sent(optimizer, carry, tracked)


@dataclass(frozen=True)
class DPOP(ModelSent):
    """DPOP, reconstructed: models are mixed, and each agent steps from the mix, in a box.

        x_i <- Proj( (W z)_i + opt(grad f_i((W z)_i)) ),   z_i = x_i + xi_i

    A reconstruction: no code is public. Its own analysis assumes bounded gradients; here it is
    accounted as what it is, a method whose message k carries the step of round k - 1, asked at a
    point that everybody knows. Projection onto a box moves no coordinate farther; onto a ball it
    could in L1.

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

    def __post_init__(self) -> None:
        """Refuse what is no box."""
        if self.box is not None:
            _validate.fields(self, _validate.single_precision, "box", least=1e-9, most=1e9)

    def absorb(self, ctx: Round, public_state: PublicState, carry: Any, received: Any) -> Any:
        """Step from the mix, back into the box."""
        before, box = public_state.memory.optimizer, self.box
        models, optimizer = ctx.step(received, ctx.gradient(received), before)
        if box is not None:
            models = jax.tree.map(lambda leaf: jnp.clip(leaf, -box, box), models)
        return models, Sent(optimizer, carry)


@dataclass(frozen=True)
class DGD(ModelSent):
    """Decentralized gradient descent: x <- W z + opt(grad f(x)), z = x and its noise.

    A reference: with steps of constant size it stops beside the optimum, by what the steps weigh
    against the network. The gradient is asked at the agent's own model, which neighbours need not
    share: its noise is accounted where a clip, or an assumed smoothness, bounds what that adds.

    Guarantee: none by itself; it is the plan's.

    Reference:
        Nedic and Ozdaglar (2009).

    Example:
        >>> from dpjax.algorithms.tracking import DGD
        >>> DGD()
        DGD()
    """

    asks_own: ClassVar[bool] = True

    def absorb(self, ctx: Round, public_state: PublicState, carry: Any, received: Any) -> Any:
        """Step from the mix along the gradient at the agent's own model."""
        gradient = ctx.gradient(public_state.models)
        models, optimizer = ctx.step(received, gradient, public_state.memory.optimizer)
        return models, Sent(optimizer, carry)

    def sensitivity(self, answer: Apart, steps: Any, divisor: float, mixing: Any) -> np.ndarray:
        """How far each message moves, all others replayed.

        Args:
            answer: How far answers are apart, by the distance of the models that are asked at.
            steps: [T] step sizes.
            divisor: What the sampler divides sums by.
            mixing: The mixing matrix.
        """
        moves = np.zeros((len(steps), 1))
        for k, step in enumerate(np.asarray(steps)[:-1], start=1):
            moves[k] = step * answer(float(moves[k - 1, 0])) / divisor
        return moves
