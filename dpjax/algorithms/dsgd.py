"""Decentralized SGD: private gradients, an optimizer behind the noise, gossip."""

from dataclasses import dataclass

from dpjax import _validate
from dpjax.algorithms.exchange import Gossip, Transmission
from dpjax.protocols import Emission, Method, MethodTerms, Models, PublicState, Round, Updates

__all__ = ["DSGD"]


@dataclass(frozen=True)
class DSGD(Method):
    """Decentralized SGD: adapt, then combine; X <- W^K (X + opt(G / divisor)).

    The private payload is the query's answer, and the message is the updated models. With one
    agent it is central DP-SGD. With K > 1 gossip steps for each gradient it is Muffliato-SGD(K).

    Guarantee: none by itself; it is the plan's. An agent's messages depend on its gradients
    through the noisy sum alone. Messages of the gossip steps after the first are functions of the
    first. So against an outsider, and against nodes under gradients="any", K steps cost as much
    as one.

    Attributes:
        gossip_steps: K. A schedule of matrices gives one matrix for each gradient.

    Reference:
        Rodio et al., Whisper D-SGD, Algorithm 1; Lian et al. 2017 for the update; Cyffers et al.
        2022 (Muffliato) for several gossip steps.

    Example:
        >>> from dpjax.algorithms.dsgd import DSGD
        >>> DSGD(gossip_steps=4).exchange
        Gossip(steps=4)
    """

    gossip_steps: int = 1

    stochastic = "rows"
    by_agent = True
    terms = MethodTerms(payload="dsgd", noisy_means="own", one_answer=True)

    def __post_init__(self) -> None:
        """Check the number of gossip steps."""
        _validate.fields(self, _validate.integer, "gossip_steps")

    @property
    def exchange(self) -> Gossip:
        """Gossip, K steps."""
        return Gossip(self.gossip_steps)

    @property
    def mixes_by_tables(self) -> bool:
        """Yes; a class of a user's own that inherits it may read the matrix, and says so itself."""
        return type(self) is DSGD

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """The gradients are private."""
        # Clipped inside the query, before the noise that is calibrated for the clip.
        answer = ctx.query(public_state.models, ctx.batch)
        return Emission(answer.total, metrics=answer.metrics)

    def send(
        self, ctx: Round, public_state: PublicState, emission: Emission, noisy: Updates
    ) -> Transmission:
        """The updated models; the agent keeps the optimizer's state."""
        return ctx.step(public_state.models, ctx.mean(noisy), public_state.memory)

    def released(self, public_state: PublicState) -> Models:
        """All models: functions of messages."""
        return public_state.models
