"""Methods that hide gradients behind random weights, without noise and without any DP."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from dpjax import _validate
from dpjax.algorithms.exchange import Transition, beside
from dpjax.algorithms.tracking import Apart, Steps
from dpjax.protocols import (
    Arrays,
    Carry,
    Emission,
    Exchange,
    Message,
    Method,
    MethodTerms,
    Models,
    Networked,
    PublicState,
    Received,
    Round,
    Updates,
)
from dpjax.topology import gossip
from dpjax.topology.gossip import RoundNumber
from dpjax.topology.mixing import Mixing, SquareMatrix, Stochastic

__all__ = ["CorrelatedRandomness", "Encrypted"]

_select = optax.tree.where
_Weights: TypeAlias = Float[Array, "n n"]
"""Weights of all links."""


class Unbounded:
    """Methods that run without noise alone, since no accounting covers their messages.

    They release nothing, because nothing has noise.
    """

    stochastic: ClassVar[Stochastic] = "double"
    reads_private_models = True
    terms = MethodTerms(
        payload="bare",
        steps="plain",
        why=(
            "it sends what no noise was accounted for, a reference or a method without DP: give "
            "noise=None and optimizer=dp.optimizers.Sgd(step_size, decay)"
        ),
    )

    def sensitivity(
        self, answer: Apart, steps: Steps, divisor: float, mixing: Mixing
    ) -> np.ndarray:
        """Infinite: no bound is known for these messages.

        Args:
            answer: How far answers are apart.
            steps: [T] step sizes.
            divisor: What the sampler divides sums by.
            mixing: The mixing matrix.
        """
        # No finite noise hides an infinite move, so plans with noise refuse these methods.
        return np.full((len(steps), 1), math.inf)


def _over_links(weights: _Weights, leaf: Array) -> Array:
    """[sender, receiver, ...] values of senders times the weights of receivers."""
    # Entry [j, i] is what j sends to i: W_ij x_j.
    values = leaf[:, None]
    return beside(weights.T, values).astype(leaf.dtype) * values


@dataclass(frozen=True)
class _PerLink(Exchange):
    """Every receiver adds up the received messages; its own share is never sent."""

    per_link = True

    def __call__(self, arrays: Arrays, round: RoundNumber, message: Message) -> Received:
        """Add up messages [sender, receiver, ...] for each receiver."""
        value = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), message)

        def sent(leaf: Array) -> Array:
            # What an agent sends itself crosses no link, and no attacker sees it.
            loop = jnp.eye(len(leaf), dtype=bool)
            return jnp.where(beside(loop, leaf), 0, leaf)

        return Received(value, jax.tree.map(sent, message))


class _TrackerMemory(NamedTuple):
    """An agent's memory in `CorrelatedRandomness`.

    Attributes:
        optimizer: The optimizer's state.
        tracker: y.
        gradient: The last gradient.
    """

    optimizer: optax.OptState
    tracker: Updates
    gradient: Updates


@dataclass(frozen=True)
class CorrelatedRandomness(Unbounded, Method):
    """Tracking with random weights and steps in the first iterations, reconstructed.

        x+ = R (x - Lam_k y),   y+ = C_k y + B_k (grad f(x+) - grad f(x)),   y_0 = grad f(x_0)

    An iteration takes two rounds: agents send models in one and shares of trackers in the next,
    since the newest gradient is computed at the mixed models. Up to iteration ``until`` the columns
    of C_k and B_k are random over the links, and every agent's step is multiplied by a random
    number in (0, 2). Afterwards C = W, B = I and the steps are unchanged. It is reconstructed from
    its description, since no code is public.

    Guarantee: none. No noise is added, no DP holds, and an outsider can solve for gradients. The
    weights follow from the run's public key.

    Attributes:
        until: Iterations with random weights.

    Reference:
        Gao, Wang and Nedic (2023), Dynamics-based privacy preservation in decentralized
        optimization.

    Example:
        >>> from dpjax.algorithms.random_weights import CorrelatedRandomness
        >>> CorrelatedRandomness(until=5)
        CorrelatedRandomness(until=5)
    """

    until: int = 10

    exchange = _PerLink()
    terms = replace(
        Unbounded.terms,
        unprotected=(
            "weights and steps are random, and no epsilon follows; whoever sees all links can "
            "solve for gradients"
        ),
    )

    def __post_init__(self) -> None:
        """Check the number of iterations."""
        _validate.fields(self, _validate.integer, "until", minimum=0, maximum=2**30)

    def start(self, ctx: Round, models: Models) -> _TrackerMemory:
        """Nothing tracked, no gradient yet."""
        zeros = optax.tree.zeros_like(models)
        return _TrackerMemory(ctx.optimizer.init(models), zeros, zeros)

    def payload(self, models: Models) -> Updates:
        """A message for every receiver."""
        return jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], len(leaf), axis=1), models)

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """Shares of models, then shares of trackers and of the newest gradient's change."""
        matrix = gossip.at(ctx.arrays["mixing"], ctx.round)
        models, memory = public_state
        trackers_next = ctx.round % 2 == 1
        random = ctx.round // 2 < self.until
        gradient = ctx.gradient(models)
        # The first round has no tracker yet: it is the gradient itself.
        tracker = _select(ctx.round > 0, memory.tracker, gradient)
        last = _select(ctx.round > 0, memory.gradient, gradient)
        steps, shares, changes = jax.random.split(jax.random.fold_in(ctx.key, 1), 3)
        # Steps of mean 1, so that the expected step is the optimizer's.
        factor = jnp.where(random, 2 * jax.random.uniform(steps, (len(matrix),)), 1.0)
        updates, optimizer = ctx.optimizer.update(tracker, memory.optimizer, models)
        moved = jax.tree.map(
            lambda x, step: _over_links(matrix, x + beside(factor, x).astype(x.dtype) * step),
            models,
            updates,
        )
        by_shares = jnp.where(random, _columns(shares, matrix), matrix)
        # Without randomness an agent keeps its own change, as gradient tracking does.
        by_changes = jnp.where(random, _columns(changes, matrix), jnp.eye(len(matrix)))
        tracked = jax.tree.map(
            lambda y, new, old: _over_links(by_shares, y) + _over_links(by_changes, new - old),
            tracker,
            gradient,
            last,
        )
        private = _select(trackers_next, tracked, moved)
        # Only rounds that mix models take a step.
        optimizer = _select(trackers_next, memory.optimizer, optimizer)
        # The gradient of the round that mixes models is that of before; the next one's is new.
        return Emission(private, carry=(trackers_next, optimizer, tracker, gradient))

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Carry, received: Message
    ) -> Transition:
        """Sums of shares are the model, or the tracker."""
        trackers, optimizer, tracker, gradient = carry
        models = _select(trackers, public_state.models, received)
        tracker = _select(trackers, received, tracker)
        return models, _TrackerMemory(optimizer, tracker, gradient)


def _columns(key: PRNGKeyArray, matrix: _Weights) -> _Weights:
    """Random weights on the links of a matrix whose columns sum to 1."""
    # Bounded away from 0: each neighbour gets some of what is shared.
    weights = jax.random.uniform(key, matrix.shape, minval=0.05)
    weights = jnp.where(matrix != 0, weights, 0)
    return weights / jnp.sum(weights, axis=0)


class Shielded(NamedTuple):
    """An agent's input to an exchange that shows no value.

    Attributes:
        model: Its model, leaves [n, ...].
        weights: [n, n] weights b_{i->j} for every other agent.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.algorithms.random_weights import Shielded
        >>> Shielded(model=jnp.ones((3, 2)), weights=jnp.zeros((3, 3))).weights.shape
        (3, 3)
    """

    model: Models
    weights: _Weights


@dataclass(frozen=True)
class Pulls(Exchange):
    """sum_j b_ij b_ji (x_j - x_i) in the clear: the result of the encrypted exchange.

    Under encryption the links carry ciphertexts, which reveal nothing without a key;
    ``dpjax.contrib.paillier`` implements that exchange.
    """

    def __call__(self, arrays: Arrays, round: RoundNumber, message: Shielded) -> Received:
        """Weigh differences; no message is visible."""
        # The two ends of a link draw a factor each; their product is symmetric and keeps the mean.
        product = message.weights * message.weights.T

        def pulled(leaf: Array) -> Array:
            flat = leaf.reshape(len(leaf), -1)
            weights = product.astype(flat.dtype)
            products = jnp.matmul(weights, flat, precision=jax.lax.Precision.HIGHEST)
            return (products - jnp.sum(weights, axis=1)[:, None] * flat).reshape(leaf.shape)

        return Received(jax.tree.map(pulled, message.model), ())


@dataclass(frozen=True)
class Encrypted(Unbounded, Networked):
    """Gradient descent over encrypted differences with random weights, reconstructed.

        x_i <- x_i + sum_j b_ij b_ji (x_j - x_i) + opt(grad f_i(x_i)),   b drawn anew in every round

    Each end of a link draws its own secret factor. The difference is computed under Paillier's
    additively homomorphic encryption, so that neither end sees the other's model. It is
    reconstructed from its description, since no code is public.

    Guarantee: none. No DP holds: if all but one neighbour collude, differences times random numbers
    still reveal information on a model. Messages are ciphertexts where
    `dpjax.contrib.paillier` carries them. Compiled runs compute the same sums in the
    clear, with weights from the run's public key.

    Reference:
        Zhang and Wang (2019), Enabling privacy-preservation in decentralized optimization.

    Example:
        >>> import numpy as np
        >>> from dpjax.algorithms.random_weights import Encrypted
        >>> round(Encrypted().on(np.full((3, 3), 1 / 3)).largest, 4)
        0.5774
    """

    terms = replace(
        Unbounded.terms,
        unprotected=(
            "links carry ciphertexts where a transport encrypts them, and no epsilon follows; a "
            "neighbour learns weighted differences of models"
        ),
    )

    def on(self, mixing: SquareMatrix) -> "EncryptedOnLinks":
        """The method on a network's links: factors are drawn below a root of 1 / (degree + 1).

        Args:
            mixing: [n, n] mixing matrix.

        Raises:
            ValueError: For a schedule, a matrix that is not square, and one-way links, on which a
                factor of b_ij b_ji would be 0.
        """
        if np.ndim(mixing) == 3:
            raise ValueError(
                f"mixing is a schedule of shape {np.shape(mixing)}; give one matrix [n, n], of "
                "encrypted exchanges in all rounds"
            )
        matrix = _validate.square("mixing", mixing)
        # Runs may hold it in float32, where the smallest weights are no links.
        linked = matrix.astype(np.float32) != 0
        if (linked != linked.T).any():
            i, j = (int(end) for end in np.argwhere(linked & ~linked.T)[0])
            raise ValueError(
                f"mixing has a weight at ({i}, {j}) and none at ({j}, {i}); encrypted exchanges "
                "need links that go both ways: give an undirected network"
            )
        # Products of two factors below 1 / sqrt(degree + 1) sum to less than 1 in a row.
        degrees = np.count_nonzero(matrix - np.diag(np.diagonal(matrix)), axis=1)
        return EncryptedOnLinks(1 / math.sqrt(int(degrees.max()) + 1))


@dataclass(frozen=True)
class EncryptedOnLinks(Unbounded, Method):
    """`Encrypted` on the links of a network.

    Attributes:
        largest: Bound on each end's factor; the products' sum at an agent stays below 1.

    Example:
        >>> from dpjax.algorithms.random_weights import EncryptedOnLinks
        >>> EncryptedOnLinks(largest=0.2).largest
        0.2
    """

    largest: float

    exchange = Pulls()
    terms = Encrypted.terms

    def payload(self, models: Models) -> Shielded:
        """A model and the weights of a round."""
        n = len(jax.tree.leaves(models)[0])
        return Shielded(models, jnp.zeros((n, n), jnp.float32))

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """Model and weights are private."""
        matrix = gossip.at(ctx.arrays["mixing"], ctx.round)
        models, memory = public_state
        answer = ctx.query(models, ctx.batch)
        updates, state = ctx.optimizer.update(ctx.mean(answer.total), memory, models)
        key = jax.random.fold_in(ctx.key, 1)
        drawn = self.largest * jax.random.uniform(key, matrix.shape, jnp.float32)
        links = (matrix != 0) & ~jnp.eye(len(matrix), dtype=bool)
        # Where there is no link nothing is pulled, and an agent does not pull at itself.
        shielded = Shielded(models, jnp.where(links, drawn, jnp.float32(0)))
        return Emission(shielded, carry=(updates, state), metrics=answer.metrics)

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Carry, received: Message
    ) -> Transition:
        """Add the weighted differences, and step."""
        updates, state = carry
        models = jax.tree.map(jnp.add, public_state.models, received)
        return optax.apply_updates(models, updates), state
