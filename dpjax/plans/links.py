"""Noise of one shape times one scale, and noise on links.

The loss is one over the scale. On links two ends share secrets (DECOR), or noises sum to zero
(Zip-DL): whichever agent is the attacker, what it cannot take away is calibrated by
`dpjax.accounting.views`.
"""

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from dpjax import _validate
from dpjax._validate import fixed
from dpjax.accounting import budget as budget_
from dpjax.accounting import records, views
from dpjax.accounting.trust import LinearAlgorithm
from dpjax.algorithms import zip_dl
from dpjax.algorithms.dsgd import DSGD
from dpjax.mechanism.participation import Participation
from dpjax.plans.calibration import ByFactor, Calibrated, DrawnNoise, PerAgent, Target
from dpjax.plans.compatibility import KEYS_APART, SIMULATED, NoiseTerms
from dpjax.plans.protect import Protect
from dpjax.protocols import Arrays, Look, Privatizer, Updates
from dpjax.topology.links import link_pairs, zero_sum_map
from dpjax.topology.mixing import HashableMatrix
from dpjax.transforms import noise as noise_

__all__ = ["PairKeys", "ScaledNoise", "ZeroSum"]

_Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Links as pairs of agents; tuples, since what compiles a run is hashed."""
_Source = Float[np.ndarray, "n q"]
_ROUNDING = 1 + 2.0**-20
"""More than the float32 products of scales and shapes round by."""


class ScaledNoise(abc.ABC):
    """A noise design that is one shape times one scale.

    Guarantee: a class of your own states its loss in `unit`, which is your word, and who knows its
    secrets in ``secrets``, an attribute of the class itself that counts for no subclass: "own"
    (every agent draws its noise alone) or "links" let it state a loss to nodes and coalitions.
    Nobody loses less than to an outsider, who sees all noisy sums. With F = `source`,
    s = ``target.protect.sensitivity`` (twice the clip norm where data are replaced) and
    k = ``target.pattern.epochs`` rounds of a unit, agent i loses to it

        mu_i = s sqrt(k [(F F')^-1]_ii)

    and a plan refuses a `unit` below that, for every attacker under gradients "any". Of noise in
    shares, whose sums alone are seen, it is s sqrt(k / 1' F F' 1) in its place.

    Example:
        >>> import numpy as np
        >>> from dpjax.plans.links import ScaledNoise
        >>> class Plain(ScaledNoise):
        ...     secrets = "own"
        ...     def source(self, target):
        ...         return np.eye(target.agents)
        ...     def unit(self, target):
        ...         size = target.protect.sensitivity * target.pattern.epochs**0.5
        ...         return np.full(target.agents, size)
        ...     def drawn(self, target): ...  # independent normals, times arrays["noise_scale"]
        >>> issubclass(Plain, ScaledNoise)
        True
    """

    label = ""
    """What records, plans and the command line call the design."""
    paper = ""
    """What its paper calls it; "" where it is of no paper."""
    secrets: ClassVar[records.Secrets | None] = None
    """As `dpjax.plans.calibration.Calibrated.secrets`."""

    @abc.abstractmethod
    def unit(self, target: Target) -> PerAgent:
        """Loss mu of every agent at scale 1, an upper bound; 0 for attackers."""

    @abc.abstractmethod
    def source(self, target: Target) -> _Source:
        """Map of a round's normals to the agents' sums at scale 1, in units of what is clipped."""

    @abc.abstractmethod
    def drawn(self, target: Target) -> Privatizer:
        """How it is drawn, from ``arrays["noise_scale"]``."""

    def calibrate(self, target: Target) -> "_CalibratedScale":
        """Make the noise for a budget on a network.

        Args:
            target: What it is for.

        Returns:
            The noise, of the least float32 scale at which every agent's loss is within its budget.

        Raises:
            ValueError: For an attacker to whom some agent's loss is
                infinite at every scale.
        """
        # The loss is inverse to the scale, so that one agent decides it.
        unit = self.unit(target)
        worst = int(np.argmax(unit))
        if not np.isfinite(unit[worst]):
            raise ValueError(
                f"noise is {self}, under which agent {worst} has a neighbour or a coalition that "
                "sees its gradients without noise, at any scale; give ZeroSum(over="
                "'with_own_copy'), another attacker, or a network with more links"
            )
        budget = target.budget
        smallest = float(np.max(unit / budget.allowed_mu()))
        scale = np.float32(_validate.spread("scale", smallest))
        noise = _CalibratedScale(self, scale, self.source(target))
        # Rounding to float32 may have taken the scale below the budget's.
        while (noise.loss(target).epsilon > np.asarray(budget.epsilon)).any():
            scale = np.nextafter(noise.scale, np.float32(np.inf))
            noise = _CalibratedScale(self, scale, noise.source)
        return noise


@dataclass(frozen=True, eq=False)
class _CalibratedScale(Calibrated):
    """A shape of noise at the scale that keeps a budget.

    Guarantee: `loss` is that of the target's attacker and gradients, with what float32 rounds.

    Attributes:
        part: The design.
        scale: Float32 factor of all noise.
        source: [n, q] as `ScaledNoise.source`, at scale 1.
    """

    part: ScaledNoise
    scale: np.float32
    source: _Source

    @property
    def secrets(self) -> records.Secrets | None:
        """The design's."""
        return self.part.secrets

    @property
    def arrays(self) -> Arrays:
        """The scale."""
        return {"noise_scale": np.asarray(self.scale)}

    @property
    def factor(self) -> _Source:
        """Map of a round's fresh normals to the agents' noisy sums."""
        return (float(self.scale) * self.source).astype(np.float32)

    def spends_evenly(self, target: Target) -> bool:
        """Not under "view": what a round costs there depends on how many follow."""
        return target.protect.gradients == "any"

    def loss(self, target: Target) -> budget_.AgentLoss:
        """What every agent loses to the target's attacker; attackers lose nothing to themselves."""
        return target.budget.spent(self.part.unit(target) / float(self.scale))

    def privatizer(self, target: Target) -> Privatizer:
        """How it is drawn."""
        return self.part.drawn(target)


class _Released(ByFactor, _CalibratedScale):
    """Own noise and that of links as sites draw it, from F = [own | links]."""


@dataclass(frozen=True)
class PairKeys(ScaledNoise):
    """DECOR with keys at both ends: own noise, and a secret of the two ends of every link.

    Agent i adds s (z_i + sqrt(shared) sum over its links of +-z_e), each z from a key of its own:
    the agent's, or that of the two ends. Messages of neighbours cancel each other's secrets.

    Guarantee: agents know their own keys and those of their links, and no other. Against "node"
    (each single agent), "coalition" or "outsider", with gradients clipped as the relation says,
    agent u loses `dpjax.accounting.views.decor`'s ``pndp`` (an outsider's ``ldp``) at noise s, its
    sensitivity the clip norm or twice it. Under gradients "any" that is
    s'^2 [(I + shared L_H)^-1]_uu T over T rounds, L_H the Laplacian of the links among those who do
    not attack, s' = sensitivity / s: it also covers attackers who see every message on every link.
    Under "view" it is smaller, and holds only for gradients that do not depend on what attackers
    cannot see. The largest loss over victims (over attackers too, for "node") meets the budget. A
    coalition's own agents are no victims: to an outsider they may lose more. One process that draws
    all keys, as a run here, is a simulation; a release is one of sites, which covers what finite
    precision costs against these attackers too (`dpjax.accounting.finite.release_cost`).

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

    label = "pair_keys"
    secrets = "links"
    look = Look("pair keys", "#44AA99", "<", (0, (5, 1.5, 1, 1.5, 1, 1.5)))
    paper = "DECOR"
    terms = NoiseTerms(
        attackers=KEYS_APART,
        payloads=("dsgd",),
        one_process=False,
        why=(
            "its loss is known for D-SGD (method=DSGD()), and with gradients='view' for steps of "
            "constant size (optimizer=Sgd(step_size))"
        ),
    )

    def __post_init__(self) -> None:
        """Refuse what is no ratio of variances."""
        _validate.fields(self, _validate.single_precision, "shared", minimum=1e-12, maximum=1e12)

    def unit(self, target: Target) -> PerAgent:
        """Loss mu of every agent at own noise 1."""
        steps = 1
        if target.protect.gradients == "view":
            # Under "any" whatever is made of the noisy sums is post-processing.
            method = target.config.method
            # Its terms name D-SGD alone.
            assert isinstance(method, DSGD)
            steps = method.gossip_steps
        # At noise 1 and clip 1: one filter serves every budget.
        losses = _largest_losses(views.decor, target, shared=self.shared, gossip_steps=steps)
        return losses * (target.protect.sensitivity * _ROUNDING)

    def source(self, target: Target) -> _Source:
        """Own noise beside that of links."""
        return views.decor(target.dense, 1.0, self.shared).source

    def calibrate(self, target: Target) -> _CalibratedScale:
        """Make the noise for a budget on a network, as `ScaledNoise.calibrate`."""
        noise = super().calibrate(target)
        if target.config.release:
            return _Released(self, noise.scale, noise.source)
        return noise

    def drawn(self, target: Target) -> DrawnNoise:
        """How it is drawn, its keys all from one: a simulation."""
        pairs = tuple(map(tuple, link_pairs(target.dense).tolist()))
        options = (target.rounds, target.agents, pairs, self.shared)
        return DrawnNoise(_pair_keys, options, by_agent=True)


def _pair_keys(
    arrays: Arrays,
    key: PRNGKeyArray,
    rounds: int,
    agents: int,
    edges: _Pairs,
    shared: float,
    members: tuple[int, ...] | None = None,
) -> optax.GradientTransformation:
    # Of a network without links, too, an array of pairs.
    pairs = np.array(edges, np.int64).reshape(-1, 2)
    agent_keys, link_keys = noise_.simulated_keys(key, agents, len(pairs))
    return noise_.pairwise_cancelling(
        pairs,
        1.0,
        shared,
        own_keys=agent_keys,
        edge_keys=link_keys,
        rounds=rounds,
        scale=arrays["noise_scale"],
        agents=members,
    )


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

    label = "zip_dl"
    secrets = "links"
    look = Look("zero sum", "#CC6677", ">", "--")
    paper = "Zip-DL"
    terms = NoiseTerms(
        attackers=(("node", "view"), ("coalition", "view")),
        payloads=("links",),
        released=False,
        why=(
            "it is Zip-DL's (method=ZipDL()), whose loss is finite only for nodes, and for "
            "gradients that do not depend on what these cannot see: give "
            "Protect(..., attacker='node', gradients='view'), an assumption that captions state; "
            f"{SIMULATED}"
        ),
    )

    def __post_init__(self) -> None:
        """Refuse another rule."""
        _validate.one_of("over", self.over, ("messages", "with_own_copy"))

    def unit(self, target: Target) -> PerAgent:
        """Loss mu of every agent at a deviation of 1, in units of the model."""
        # A model moves by the step times the gradient, and its message by as much.
        losses = _largest_losses(views.zip_dl, target, zero_sum=self.over)
        moves = target.protect.sensitivity * self._sensitivity(target)
        return losses * (moves * _ROUNDING)

    def source(self, target: Target) -> _Source:
        """What the messages' noise adds to the models after the exchange, over the step."""
        links = zip_dl.links(target.dense)
        # What each message adds to its receiver's model.
        messages = len(links.sender)
        gather = np.zeros((target.agents, messages))
        gather[links.receiver, np.arange(messages)] = links.weight
        noise = zero_sum_map(links.sender, links.receiver, self.over)
        return gather @ noise / self._sensitivity(target)

    def drawn(self, target: Target) -> DrawnNoise:
        """How it is drawn."""
        links = zip_dl.links(target.dense)
        pairs = tuple(zip(links.sender.tolist(), links.receiver.tolist(), strict=True))
        return DrawnNoise(_zero_sum, (target.rounds, pairs, self.over), _lost_zero_sum)

    def _sensitivity(self, target: Target) -> float:
        """How far a model moves for one unit of the noisy sum; the run's step is a float32."""
        first = target.config.optimizer.first
        # Whichever is larger: the run rounds it to the nearest, up or down.
        step = max(first, float(np.float32(first)))
        method: Any = target.config.method
        moves = method.sensitivity(lambda _: 1.0, np.array([step]), target.divisor, target.dense)
        return float(moves[0, 0])


def _zero_sum(
    arrays: Arrays,
    key: PRNGKeyArray,
    rounds: int,
    pairs: _Pairs,
    over: noise_.Over,
) -> optax.GradientTransformation:
    sender, receiver = np.array(pairs, np.int64).T
    scale = arrays["noise_scale"]
    return noise_.zero_sum(sender, receiver, scale, key=key, rounds=rounds, over=over)


def _lost_zero_sum(arrays: Arrays, round: Array, payload: Updates, *_: object) -> Array:
    """How likely the largest entry of a message is to go out without its noise, at most."""
    # Of k normals whose sum is taken away each keeps 1 - 1/k of its variance.
    return noise_.lost(payload, arrays["noise_scale"] * np.sqrt(0.5), "normal")


def _largest_losses(
    view: Callable[..., LinearAlgorithm], target: Target, **options: float | str
) -> PerAgent:
    """[n] largest loss to the target's attackers, at clip 1, noise 1 and zero-out."""
    return _cached_losses(
        view, tuple(options.items()), target.network.dense, target.protect, target.pattern
    )


# One Kalman filter an attacker: budgets of one network share them.
@functools.lru_cache(maxsize=64)
def _cached_losses(
    view: Callable[..., LinearAlgorithm],
    options: tuple[tuple[str, float | str], ...],
    network: HashableMatrix,
    protect: Protect,
    pattern: Participation,
) -> PerAgent:
    algorithm = view(network.matrix, **dict(options))
    if protect.attacker == "outsider":
        attackers = [algorithm.ldp()]
    elif protect.nodes is not None:
        attackers = [algorithm.pndp(protect.nodes)]
    else:
        attackers = [algorithm.pndp(node) for node in range(network.matrix.shape[-1])]
    losses = [attack.guaranteed(pattern, gradients=protect.gradients) for attack in attackers]
    # NaN is an attacker's own loss, none of which counts.
    largest = np.fmax.reduce(losses)
    return fixed(np.nan_to_num(largest, nan=0.0, posinf=np.inf))
