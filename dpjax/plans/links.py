"""Noise on links: secrets that two ends share (DECOR), and noises that sum to zero (Zip-DL).

Each is one shape of noise times one scale, and its loss one over that scale: whichever agent is
the attacker, what it cannot take away is calibrated by `dpjax.accounting.views`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax
from jaxtyping import Float, PRNGKeyArray

from dpjax import _numerics, _validate
from dpjax._validate import fixed
from dpjax.accounting import views
from dpjax.algorithms import zip_dl
from dpjax.mechanism.participation import Participation
from dpjax.plans.calibration import Target
from dpjax.plans.noise import ScaledNoise
from dpjax.plans.protect import Protect
from dpjax.plans.strategies import Fixed
from dpjax.protocols import Privatizer
from dpjax.transforms import noise as noise_

__all__ = ["PairKeys", "ZeroSum"]

_ROUNDING = 1 + 2.0**-20
"""More than the float32 products of scales and shapes round by."""


@dataclass(frozen=True)
class PairKeys(ScaledNoise):
    """DECOR with keys at both ends: own noise, and a secret of the two ends of every link.

    Agent i adds s (z_i + sqrt(shared) sum over its links of +-z_e), each z from a key of its own:
    the agent's, or that of the two ends. Messages of neighbours cancel each other's secrets.

    Guarantee: agents know their own keys and those of their links, and no other. Against "node"
    (each single agent), "coalition" or "outsider", with gradients clipped as the relation says,
    agent u loses `dpjax.accounting.views.decor`'s ``pndp`` (an outsider's ``ldp``) at noise s, its
    sensitivity C or 2C. Under gradients "any" that is s'^2 [(I + shared L_H)^-1]_uu T over T
    rounds, L_H the Laplacian of the links among those who do not attack, s' = sensitivity / s: it
    also covers attackers who see every message on every link. Under "view" it is smaller, and
    holds only for gradients that do not depend on what attackers cannot see. The largest loss over
    victims (over attackers too, for "node") meets the budget. A coalition's own agents are no
    victims: to an outsider they may lose more. One process that draws all keys, as a run here, is a
    simulation.

    Attributes:
        shared: Variance of a link's secret over that of an agent's own noise.

    Reference:
        Allouah et al. (2024), DECOR.

    Example:
        >>> from dpjax.plans.links import PairKeys
        >>> PairKeys(shared=2.0).label
        'pair_keys'
    """

    shared: float = 1.0

    label, secrets = "pair_keys", "links"

    def __post_init__(self) -> None:
        """Refuse what is no ratio of variances."""
        shared = _validate.single_precision("shared", self.shared, 1e-12, 1e12)
        object.__setattr__(self, "shared", shared)

    def unit(self, target: Target) -> Float[np.ndarray, " n"]:
        """Loss mu of every agent at own noise 1."""
        steps = 1
        if target.protect.gradients == "view":
            # Under "any" whatever is made of the noisy sums is post-processing.
            steps = target.method.gossip_steps  # type: ignore[union-attr]
        options = (("shared", self.shared), ("gossip_steps", steps))
        each = _largest(views.decor, options, Fixed(target.mixing), target.protect, target.pattern)
        return each * (target.protect.sensitivity * _ROUNDING)

    def source(self, target: Target) -> Float[np.ndarray, "n q"]:
        """Own noise beside that of links."""
        return views.decor(target.mixing, 1.0, self.shared).source

    def drawn(self, target: Target) -> "PairKeysPrivatizer":
        """How it is drawn."""
        pairs = tuple((int(i), int(j)) for i, j in _numerics.link_pairs(target.mixing))
        return PairKeysPrivatizer(target.rounds, target.agents, pairs, self.shared)


@dataclass(frozen=True)
class ZeroSum(ScaledNoise):
    """Zip-DL's noise: another one on each message of a sender, summing to zero over them.

    Guarantee: against "node" (each single agent) or a "coalition", and only for gradients that do
    not depend on what these cannot see (gradients="view"): training breaks that, and captions say
    so. What a clipped gradient moves is the model that is sent, by sensitivity x step size (over
    the sampler's divisor); the loss is `dpjax.accounting.views.zip_dl`'s ``pndp`` at the noise
    over that. The largest loss over victims meets the budget. Under "any" and for outsiders of
    "messages" it is infinite. One process that draws all keys, as a run here, is a simulation.

    Attributes:
        over: "with_own_copy": the noises of all messages and of the sender's own copy sum to zero;
            "messages": those of messages alone, none where there is one neighbour.

    Reference:
        Biswas et al. (2025), Low-cost privacy-preserving decentralized learning.

    Example:
        >>> from dpjax.plans.links import ZeroSum
        >>> ZeroSum().label
        'zip_dl'
    """

    over: noise_.Over = "with_own_copy"

    label, secrets = "zip_dl", "links"

    def __post_init__(self) -> None:
        """Refuse another rule."""
        _validate.one_of("over", self.over, ("messages", "with_own_copy"))

    def unit(self, target: Target) -> Float[np.ndarray, " n"]:
        """Loss mu of every agent at a deviation of 1, in units of the model."""
        options, network = (("zero_sum", self.over),), Fixed(target.mixing)
        each = _largest(views.zip_dl, options, network, target.protect, target.pattern)
        return each * (target.protect.sensitivity * self._sensitivity(target) * _ROUNDING)

    def source(self, target: Target) -> Float[np.ndarray, "n q"]:
        """What the messages' noise adds to the models after the exchange, over the step."""
        sent = zip_dl.links(target.mixing)
        gather = np.zeros((target.agents, len(sent.sender)))
        gather[sent.receiver, np.arange(len(sent.sender))] = sent.weight
        return (
            gather
            @ _numerics.zero_sum(sent.sender, sent.receiver, self.over)
            / self._sensitivity(target)
        )

    def drawn(self, target: Target) -> "ZeroSumPrivatizer":
        """How it is drawn."""
        sent = zip_dl.links(target.mixing)
        pairs = tuple(zip(sent.sender.tolist(), sent.receiver.tolist(), strict=True))
        return ZeroSumPrivatizer(target.rounds, pairs, self.over)

    def _sensitivity(self, target: Target) -> float:
        """How far a model moves for one unit of the noisy sum; the run's step is a float32."""
        step = max(target.first_step, float(np.float32(target.first_step)))
        method: Any = target.method
        moves = method.sensitivity(lambda _: 1.0, np.array([step]), target.divisor, target.mixing)
        return float(moves[0, 0])


@dataclass(frozen=True)
class PairKeysPrivatizer(Privatizer):
    """How `PairKeys` is drawn; see `dpjax.transforms.noise.pairwise`.

    Attributes:
        rounds: Rounds that the noise is accounted for.
        agents: n.
        edges: Links (i, j), i < j.
        shared: As in `PairKeys`.
    """

    rounds: int
    agents: int
    edges: tuple[tuple[int, int], ...]
    shared: float

    def transformation(self, arrays: Any, key: PRNGKeyArray) -> optax.GradientTransformation:
        """The noise of one plan, its keys all from one: a simulation."""
        pairs = np.array(self.edges, np.int64).reshape(-1, 2)
        own, shared = noise_.simulated_keys(key, self.agents, len(pairs))
        return noise_.pairwise(
            pairs,
            1.0,
            self.shared,
            own_keys=own,
            edge_keys=shared,
            rounds=self.rounds,
            scale=arrays["noise_scale"],
        )


@dataclass(frozen=True)
class ZeroSumPrivatizer(Privatizer):
    """How `ZeroSum` is drawn; see `dpjax.transforms.noise.zero_sum`.

    Attributes:
        rounds: Rounds that the noise is accounted for.
        links: (sender, receiver) of every message, own copies among them.
        over: As in `ZeroSum`.
    """

    rounds: int
    links: tuple[tuple[int, int], ...]
    over: noise_.Over

    def transformation(self, arrays: Any, key: PRNGKeyArray) -> optax.GradientTransformation:
        """The noise of one plan; ``arrays["noise_scale"]`` is its deviation."""
        sender, receiver = np.array(self.links, np.int64).T
        return noise_.zero_sum(
            sender, receiver, arrays["noise_scale"], key=key, rounds=self.rounds, over=self.over
        )

    def lost(self, arrays: Any, round: Any, payload: Any) -> Any:
        """How likely the largest entry of a message is to go out without its noise, at most."""
        # Of k normals whose sum is taken away each keeps 1 - 1/k of its variance.
        return noise_.lost(payload, arrays["noise_scale"] * np.sqrt(0.5), "normal")


@functools.lru_cache(maxsize=64)
def _largest(
    view: Callable[..., Any],
    options: tuple[tuple[str, Any], ...],
    network: Fixed,
    protect: Protect,
    pattern: Participation,
) -> Float[np.ndarray, " n"]:
    """[n] largest loss to the attackers, at clip 1, noise 1 and zero-out; 0 for attackers."""
    algorithm, n = view(network.matrix, **dict(options)), network.matrix.shape[-1]
    if protect.attacker == "outsider":
        every = [algorithm.ldp()]
    elif protect.attacker == "coalition":
        every = [algorithm.pndp(protect.nodes)]
    else:
        every = [algorithm.pndp(node) for node in range(n)]
    losses = [each.guaranteed(pattern, gradients=protect.gradients) for each in every]
    return fixed(np.nan_to_num(np.fmax.reduce(losses), nan=0.0, posinf=np.inf))
