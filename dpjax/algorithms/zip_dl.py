"""Zip-DL: a sender adds different noise for every receiver."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from dpjax.algorithms.exchange import AgentNumbers, PerLinkMessages
from dpjax.algorithms.tracking import Apart, Steps
from dpjax.protocols import (
    Emission,
    Method,
    MethodTerms,
    Models,
    Networked,
    PublicState,
    Round,
    Updates,
)
from dpjax.topology.links import MessageEnds, message_pairs
from dpjax.topology.mixing import Mixing, SquareMatrix

__all__ = ["ZipDL"]


class _Links(NamedTuple):
    """Links by sender; agents also send to themselves.

    Attributes:
        sender: [L] agents.
        receiver: [L] agents.
        weight: [L] the receiver's weight on the sender.
    """

    sender: MessageEnds
    receiver: MessageEnds
    weight: Float[np.ndarray, " l"]


def links(mixing: SquareMatrix) -> _Links:
    """Return the links of a mixing matrix.

    Args:
        mixing: [n, n] W.

    Raises:
        ValueError: For a schedule.
    """
    matrix = np.asarray(mixing, np.float64)
    if matrix.ndim != 2:
        raise ValueError(f"mixing has shape {matrix.shape}; Zip-DL takes one matrix [n, n]")
    sender, receiver = message_pairs(matrix)
    return _Links(sender, receiver, matrix[receiver, sender])


@dataclass(frozen=True)
class ZipDL(Networked):
    """Zip-DL: agent i sends h_i + e_ij to j, h_i = x_i + opt(G_i / divisor), x_j <- W of these.

    The e_ij are the noise, `dpjax.plans.links.ZeroSum`, different on every message. The private
    payload is the updated model, once for every link. Its sensitivity is step size times clip
    norm, so the optimizer must take plain steps.

    Guarantee: none by itself; it is the plan's, against single nodes or coalitions, and only for
    gradients that do not depend on values hidden from them.

    Reference:
        Biswas et al. (2025), Low-cost privacy-preserving decentralized learning.

    Example:
        >>> from dpjax.algorithms.zip_dl import ZipDL
        >>> ZipDL().sensitivity(lambda distance: 2.0, steps=[0.1], divisor=8, mixing=None)
        array([[0.025]])
    """

    stochastic = "rows"
    terms = MethodTerms(
        payload="links",
        steps="constant",
        why=(
            "it hides updated models by noise of their own on every link, which a step of constant "
            "size moves by a known amount: give noise=dp.noise.ZeroSum() and "
            "optimizer=dp.optimizers.Sgd(step_size)"
        ),
    )

    def on(self, mixing: SquareMatrix) -> "ZipDLOnLinks":
        """The method on a network's links.

        Args:
            mixing: [n, n] mixing matrix.

        Raises:
            ValueError: For a schedule.
        """
        sent = links(mixing)
        return ZipDLOnLinks(tuple(sent.sender.tolist()), tuple(sent.receiver.tolist()))

    def sensitivity(
        self, answer: Apart, steps: Steps, divisor: float, mixing: Mixing
    ) -> np.ndarray:
        """How far each copy of a model moves in a round, in L2, behind plain steps.

        Args:
            answer: How far answers are apart, by the distance of the models that are asked at,
                which both neighbours know here.
            steps: [T] step sizes.
            divisor: What the sampler divides sums by.
            mixing: The mixing matrix.
        """
        return answer(0.0) / divisor * np.asarray(steps)[:, None]


@dataclass(frozen=True)
class ZipDLOnLinks(ZipDL, Method):
    """`ZipDL` on the links of a network.

    It releases nothing, since its loss assumes that nodes do not see other nodes' models.

    Attributes:
        sender: [L] agents.
        receiver: [L] agents.
    """

    sender: AgentNumbers
    receiver: AgentNumbers

    @property
    def exchange(self) -> PerLinkMessages:
        """Every receiver averages its messages."""
        return PerLinkMessages(self.sender, self.receiver)

    def payload(self, models: Models) -> Updates:
        """One model for each link."""
        # Each link carries a copy of its own, which gets noise of its own.
        senders = np.array(self.sender)
        return jax.tree.map(lambda leaf: leaf[senders], models)

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """The updated models are private, one copy for each link."""
        answer = ctx.query(public_state.models, ctx.batch)
        models, memory = ctx.step(public_state.models, ctx.mean(answer.total), public_state.memory)
        return Emission(self.payload(models), carry=memory, metrics=answer.metrics)
