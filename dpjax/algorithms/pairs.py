"""Gradient tracking that sends two variables, the model and the tracker."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from dpjax import _validate
from dpjax.algorithms.exchange import Transition, beside
from dpjax.algorithms.tracking import HIDDEN_MODELS, Apart, KeepsMessage, Steps
from dpjax.protocols import (
    Arrays,
    Carry,
    Combine,
    Emission,
    Exchange,
    Message,
    Models,
    PublicState,
    Received,
    Round,
    Updates,
)
from dpjax.topology import gossip
from dpjax.topology.gossip import RoundNumber, Senders
from dpjax.topology.mixing import Mixing, Stochastic

__all__ = ["PPDOAGT", "DiffTVAB", "GradientTracking"]


class Pair(NamedTuple):
    """The message: a model and a tracker of the average gradient."""

    model: Models
    tracker: Updates


class _PairMemory(NamedTuple):
    """What an agent keeps.

    Attributes:
        optimizer: The optimizer's state.
        message: The last message.
        tracker: The tracker before its next gradient.
        gradient: The last gradient.
    """

    optimizer: optax.OptState
    message: Message
    tracker: Updates
    gradient: Updates = ()


@dataclass(frozen=True)
class PushPull(Exchange):
    """Models are averaged by W, whose rows sum to 1; trackers by B, whose columns do.

    Attributes:
        directed: False takes B = W, which must be doubly stochastic. True shares each tracker
            equally among its sender, also where W_jj = 0, and the others who hear it: B_ij = 1 /
            (1 + number of them).
    """

    directed: bool = False

    def __call__(self, arrays: Arrays, round: RoundNumber, message: Pair) -> Received:
        """Mix a pair with ``arrays["mixing"]``."""
        pull = gossip.at(arrays["mixing"], round)
        push = pull
        if self.directed:
            shared = _shared(pull).astype(pull.dtype)
            push = shared / jnp.sum(shared, axis=0, keepdims=True)
        mixed = Pair(gossip.mix(pull, message.model), gossip.mix(push, message.tracker))
        return Received(mixed, message)

    def for_agents(self, mixing: Mixing, agents: Sequence[int], senders: Senders) -> Combine | None:
        """Rows of W and of B; None on directed graphs, where B counts who hears a sender."""
        return None if self.directed else gossip.combining(mixing, agents, senders)


def _shared(pull: Float[Array, "n n"]) -> Bool[Array, "n n"]:
    """The receivers of each tracker's shares: the agent and those who hear it."""
    return (pull != 0) | jnp.eye(pull.shape[-1], dtype=bool)


@dataclass(frozen=True)
class _PairSent(KeepsMessage):
    """Base of the methods that send a `Pair`."""

    directed: bool = False

    reads_private_models = True

    def __post_init__(self) -> None:
        """Check the flag."""
        _validate.flag("directed", self.directed)

    @property
    def stochastic(self) -> Stochastic:
        """Rows alone on directed graphs."""
        return "rows" if self.directed else "double"

    @property
    def exchange(self) -> PushPull:
        """Both variables are mixed."""
        return PushPull(self.directed)

    def payload(self, models: Models) -> Pair:
        """A model and a tracker."""
        return Pair(models, models)

    def released(self, public_state: PublicState) -> Models:
        """The model of the last message."""
        return public_state.memory.message.model

    def start(self, ctx: Round, models: Models) -> _PairMemory:
        """Nothing tracked, no gradient yet."""
        zeros = optax.tree.zeros_like(models)
        return _PairMemory(ctx.optimizer.init(models), Pair(models, zeros), zeros, zeros)


@dataclass(frozen=True)
class GradientTracking(_PairSent):
    """Gradient tracking: x <- A x~ + opt(y), y <- B y~ + grad f(x+) - grad f(x), y_0 = grad f(x_0).

    With noise on both variables (x~ = x + noise, y~ = y + noise) it is Diff-TV-AB, see `DiffTVAB`;
    without, the noise-free reference, which reaches the optimum under steps of constant size.

    Guarantee: none by itself; it is the plan's. The tracker's sensitivity is that of whole
    gradients, however small the steps, so noise that shrinks with the steps hides it less and
    less.

    Attributes:
        directed: True for graphs with one-way links: the rows of W sum to 1, and trackers are
            shared by columns, see `PushPull`.

    Reference:
        Di Lorenzo and Scutari (2016); Nedic, Olshevsky and Shi (2017); Pu et al. (2021) and Xin and
        Khan (2018) for directed graphs.

    Example:
        >>> from dpjax.algorithms.pairs import GradientTracking
        >>> GradientTracking(directed=True).stochastic
        'rows'
    """

    by_agent = True
    terms = HIDDEN_MODELS

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """Model and tracker are private; the tracker has the newest gradient."""
        models, old = public_state
        # The gradient at the newest models, before they are sent.
        gradient = ctx.gradient(models)
        tracker = jax.tree.map(lambda b, g, h: b + (g - h), old.tracker, gradient, old.gradient)
        return Emission(Pair(models, tracker), carry=(tracker, gradient))

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Carry, received: Message
    ) -> Transition:
        """Step from the mixed models along the agent's own tracker."""
        message, (tracker, gradient) = carry
        models, state = ctx.step(received.model, tracker, public_state.memory.optimizer)
        return models, _PairMemory(state, message, received.tracker, gradient)

    def sensitivity(
        self, answer: Apart, steps: Steps, divisor: float, mixing: Mixing
    ) -> np.ndarray:
        """How far model and tracker move in each message, all messages replayed.

        x moves by the last step times the tracker's move; the tracker by the newest gradient's move
        and by the one before, since what it had of that went out.

        Args:
            answer: How far answers are apart, by the distance of the models that are asked at.
            steps: [T] step sizes.
            divisor: What the sampler divides sums by.
            mixing: The mixing matrix.
        """
        moves = np.zeros((len(steps), 2))
        model = 0.0
        last = 0.0
        for k, step in enumerate(steps):
            # How far this round's gradient moves, at models so far apart.
            change = answer(model) / divisor
            # The tracker carries the newest gradient and takes back the one before.
            moves[k] = model, change + last
            model = step * moves[k, 1]
            last = change
        return moves


@dataclass(frozen=True)
class DiffTVAB(GradientTracking):
    """Diff-TV-AB, reconstructed: gradient tracking with noise on both variables.

    It is reconstructed from its description, since no code is public. Here it takes the decaying
    steps of the other methods.

    Guarantee: none by itself; it is the plan's, see `GradientTracking`.

    Reference:
        Yang, He and Yang (2025).

    Example:
        >>> from dpjax.algorithms.pairs import DiffTVAB
        >>> shifts = DiffTVAB().sensitivity(lambda distance: 1.0, [0.5, 0.25], 1, None)
        >>> shifts.tolist()
        [[0.0, 1.0], [0.5, 2.0]]
    """


@dataclass(frozen=True)
class PPDOAGT(_PairSent):
    """PP-DOAGT, reconstructed: its tracker is the sum of all earlier steps.

        s+ = W s~ - opt(grad f(x)),   x+ = W x~ - (s+ - s),   s_0 = 0

    s~ and x~ have noise when sent; an agent's own values enter its mix without noise. It is
    reconstructed in push-pull form from its description, since no code is public.

    Guarantee: none by itself; it is the plan's. The change of s is the step, plus its last change
    times the agent's own weight. The change of x is its last one times that weight, plus both
    changes of s.

    Attributes:
        directed: As in `GradientTracking`.

    Reference:
        Huang, Wu, Shi, Dey and Shi (2024).

    Example:
        >>> from dpjax.algorithms.pairs import PPDOAGT
        >>> PPDOAGT().stochastic
        'double'
    """

    terms = HIDDEN_MODELS

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """Model and tracker are private."""
        models, memory = public_state
        return Emission(Pair(models, memory.tracker), carry=ctx.gradient(models))

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Carry, received: Message
    ) -> Transition:
        """Mix with the agent's own values as they are, and step."""
        noisy, gradient = carry
        models, memory = public_state
        pull = gossip.at(ctx.arrays["mixing"], ctx.round)
        # An agent knows its own values: in its mix they enter without noise. A tracker's shares are
        # equal on directed graphs, whatever W says.
        own_weight = jnp.diagonal(pull)
        pulled = _noiseless_self(own_weight, received.model, noisy.model, models)
        own_weight = 1 / jnp.sum(_shared(pull), axis=0) if self.directed else own_weight
        pushed = _noiseless_self(own_weight, received.tracker, noisy.tracker, memory.tracker)
        updates, state = ctx.optimizer.update(gradient, memory.optimizer, models)
        tracker = optax.tree.sub(pushed, updates)
        models = jax.tree.map(lambda x, new, old: x - (new - old), pulled, tracker, memory.tracker)
        return models, _PairMemory(state, noisy, tracker, memory.gradient)

    def sensitivity(
        self, answer: Apart, steps: Steps, divisor: float, mixing: Mixing
    ) -> np.ndarray:
        """How far model and tracker move in each message, all messages replayed.

        Args:
            answer: How far answers are apart, by the distance of the models that are asked at.
            steps: [T] step sizes.
            divisor: What the sampler divides sums by.
            mixing: The mixing matrix; the largest and the least weight of an agent's own are taken.
        """
        # As float32 runs see it and as float64 ones do: weights may vanish, or round up.
        matrices = np.stack([np.asarray(mixing, np.float32).astype(np.float64), mixing])
        pull = np.diagonal(matrices, axis1=-2, axis2=-1)
        shared = ((matrices != 0) | np.eye(pull.shape[-1], dtype=bool)).sum(axis=-2)
        push = 1 / shared if self.directed else pull
        if np.ndim(mixing) == 3:
            return _bounded(answer, steps, divisor, pull, push)
        rounds = len(steps)
        # Agents of equal own weights move alike; they are counted once.
        keeps = np.unique(np.stack([pull.ravel(), push.ravel()]), axis=1)
        # Each step is still in the model and the tracker some rounds later.
        lags = _lags(keeps[0], keeps[1], rounds)
        # gaps[i, -k - 1] is of round k, so that a slice holds the newest first.
        moves = np.zeros((rounds, 2))
        gaps = np.zeros((keeps.shape[1], rounds))
        for k, step in enumerate(steps):
            past = gaps[:, rounds - k :]
            with np.errstate(invalid="ignore", over="ignore"):
                distances = np.einsum("aik,ik->ai", lags[..., :k], past)
            # No part of what moves without bound is no number.
            distances[np.isnan(distances)] = np.inf
            moves[k] = distances.max(axis=1)
            gaps[:, -k - 1] = [step * answer(distance) / divisor for distance in distances[0]]
        return moves


def _noiseless_self(weight: Array, mixed: Updates, sent: Updates, exact: Updates) -> Updates:
    """A mix in which agents' own values enter without noise."""
    return jax.tree.map(
        lambda mean, noisy, value: (
            mean + beside(weight, value).astype(value.dtype) * (value - noisy)
        ),
        mixed,
        sent,
        exact,
    )


def _lags(pull: np.ndarray, push: np.ndarray, rounds: int) -> np.ndarray:
    """Sizes of what a step j rounds ago is in an agent's model and in its sum of steps, [2, m, T].

    s+ = push s + a g and x+ = pull x - (s+ - s), so that a g is push^j of s, and of x what
    this makes of it; signs cancel. Rounded up by more than the sums' rounding.
    """
    lags = np.zeros((2, len(pull), rounds))
    x, s, size = np.zeros((3, len(pull)))
    # Rounded up: sums of so many terms may be off by this share of their size.
    slack = 8 * (rounds + 1) * np.finfo(np.float64).eps
    for j in range(rounds):
        new = push * s if j else np.ones(len(pull))
        x = pull * x - (new - s)
        size = pull * size + new + s
        s = new
        lags[0, :, j] = np.abs(x) + slack * size
        lags[1, :, j] = s * (1 + slack)
    return lags


def _bounded(
    answer: Apart,
    steps: Steps,
    divisor: float,
    pull: np.ndarray,
    push: np.ndarray,
) -> np.ndarray:
    """Moves under weights that change by round, by the largest and the least of them all."""
    largest = (float(pull.max()), float(push.max()))
    smallest = float(push.min())
    moves = np.zeros((len(steps), 2))
    model = 0.0
    tracker = 0.0
    for k, step in enumerate(steps):
        moves[k] = model, tracker
        moved = step * answer(model) / divisor
        # Weights differ by round, so signs cannot cancel as they do in `_lags`.
        model = largest[0] * model + (1 - smallest) * tracker + moved
        tracker = largest[1] * tracker + moved
    return moves
