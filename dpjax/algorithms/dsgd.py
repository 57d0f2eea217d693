"""Decentralized SGD: private gradients, an optimizer behind the noise, gossip."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dpjax import _validate
from dpjax.algorithms.exchange import Gossip
from dpjax.protocols import Emission, Method, PublicState, Round

__all__ = ["DSGD"]


@dataclass(frozen=True)
class DSGD(Method):
    """Decentralized SGD: adapt, then combine; X <- W^K (X + opt(G / divisor)).

    What is private is the query's answer, and what is sent the updated models; with one agent it
    is central DP-SGD, with K > 1 gossip steps a gradient Muffliato-SGD(K).

    Guarantee: none by itself; it is the plan's. What leaves an agent is a function of its
    gradients through the noisy sum alone. Messages of all K gossip steps are seen, and those after
    the first are functions of it: to an outsider, and to nodes for gradients of "any" kind, K
    steps cost as much as one.

    Attributes:
        gossip_steps: K. A schedule of matrices gives one a gradient.

    Reference:
        Rodio et al., Whisper D-SGD, Algorithm 1; Lian et al. 2017 for the update; Cyffers et al.
        2022 (Muffliato) for several gossip steps.

    Example:
        >>> from dpjax.algorithms.dsgd import DSGD
        >>> DSGD(gossip_steps=4).exchange
        Gossip(steps=4)
    """

    gossip_steps: int = 1

    stochastic: ClassVar[Literal["rows", "columns", "double"]] = "rows"

    def __post_init__(self) -> None:
        """Refuse no gossip."""
        _validate.fields(self, _validate.integer, "gossip_steps")

    @property
    def exchange(self) -> Gossip:
        """Gossip, K steps."""
        return Gossip(self.gossip_steps)

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """The gradients are private."""
        answer = ctx.query(public_state.models, ctx.batch)
        return Emission(answer.total, metrics=answer.metrics)

    def send(self, ctx: Round, public_state: PublicState, emission: Emission, noisy: Any) -> Any:
        """The updated models; the optimizer's state stays."""
        return ctx.step(public_state.models, ctx.mean(noisy), public_state.memory)

    def released(self, public_state: PublicState) -> Any:
        """All models: functions of messages."""
        return public_state.models
