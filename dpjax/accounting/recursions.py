"""State-space models of gossip algorithms with noise correlated over rounds.

x_t are the models before round t's gradients, u_t = g_t + xi_t what agents add, K gossip steps:

    messages   W^k (D x_t + u_t), k = 0 .. K - 1        x_t+1 = W^K (D x_t + u_t)

D is the identity, or I - diag(curvature) where gradients are linear in the models. A strategy C
over rounds with few bands (or whose inverse has few) adds a few past noises to the state.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax.accounting.kalman import Model
from dpjax.mechanism import strategy as strategy_

__all__: list[str] = []

LARGEST_STATE = 1500
"""Numbers in the state beyond which a strategy takes the dense route."""


class Memory(NamedTuple):
    """A strategy as a recursion: xi_t = scale_t z_t + sum_k weights_t,k past_t,k.

    Attributes:
        scale: [P] factor of the fresh noise.
        weights: [P, width] of the past, most recent first.
        of_noise: True where the past is xi itself (C has few bands), False where it is the fresh
            noise (the inverse of C has few).
    """

    scale: Float[np.ndarray, " p"]
    weights: Float[np.ndarray, "p w"]
    of_noise: bool


class GossipRounds(NamedTuple):
    """An algorithm, less its noise.

    Attributes:
        mixing: [P, n, n] W of every round.
        steps: Gossip steps K a gradient.
        contraction: [n] diagonal of D.
    """

    mixing: Float[np.ndarray, "p n n"]
    steps: int
    contraction: Float[np.ndarray, " n"]


NO_MEMORY = Memory(np.ones(1), np.zeros((1, 0)), True)


def remember(strategy: Float[np.ndarray, "t t"]) -> Memory:
    """Write noise C^-1 Z as the recursion of least width.

    Args:
        strategy: [T, T] lower triangular C with a positive diagonal.

    Returns:
        The recursion, of period 1 where C is Toeplitz.
    """
    matrix = np.asarray(strategy)
    rounds = len(matrix)
    inverse = strategy_.sparse_inverse_of(matrix)
    diagonal = np.diag(matrix)
    of_noise = strategy_.width(matrix) <= strategy_.width(inverse)
    weights = strategy_.bands(-matrix / diagonal[:, None] if of_noise else inverse)
    constant = all(
        np.ptp(np.diag(matrix, -lag)) <= 1e-15 * np.abs(matrix).max() for lag in range(rounds)
    )
    if constant:
        # Before its first rounds the past is zero, so the late weights serve from the start.
        return Memory(1 / diagonal[:1], weights[-1:], of_noise)
    return Memory(1 / diagonal, weights, of_noise)


def rational_model_of(
    gossip: GossipRounds,
    source: Float[np.ndarray, "n q"],
    seen: Float[np.ndarray, "p m n"],
    victims: Float[np.ndarray, " n"],
    memory: Memory = NO_MEMORY,
) -> Model:
    """`model_of` in fractions: no product of the matrices given is rounded.

    Args:
        gossip: The algorithm.
        source: As in `model_of`; so are all.
        seen: Rows seen.
        victims: Whose gradients are unknown.
        memory: The strategy over rounds.

    Returns:
        The model, of objects.
    """
    whole = np.frompyfunc(Fraction, 1, 1)
    exactly = GossipRounds(whole(gossip.mixing), gossip.steps, whole(gossip.contraction))
    past = Memory(whole(memory.scale), whole(memory.weights), memory.of_noise)
    return model_of(exactly, whole(source), whole(seen), whole(victims), past)


def model_of(
    gossip: GossipRounds,
    source: Float[np.ndarray, "n q"],
    seen: Float[np.ndarray, "p m n"],
    victims: Float[np.ndarray, " n"],
    memory: Memory = NO_MEMORY,
) -> Model:
    """State-space model of what an attacker does not know.

    An attacker receives all that its own models are made of, in every gossip step: these are
    known, and no part of the state.

    Args:
        gossip: The algorithm.
        source: [n, q] map of a round's fresh noise to the agents, without known columns.
        seen: [P, m, n] rows of the messages seen each round, zero rows where none.
        victims: [n] 1 for agents whose gradients are unknown, else 0.
        memory: The strategy over rounds.

    Returns:
        The model.

    Raises:
        ValueError: If the state would be too large.
    """
    n, width = source.shape[0], memory.weights.shape[1]
    size = n * (1 + width)
    if size > LARGEST_STATE:
        raise ValueError(
            f"strategy has {width} bands for {n} agents, a state of {size} numbers (at most "
            f"{LARGEST_STATE}); give a strategy of fewer bands"
        )
    period = math.lcm(len(gossip.mixing), len(seen), len(memory.scale))
    rounds = [_round(gossip, source, seen, victims, memory, t) for t in range(period)]
    return Model(*(np.stack(parts) for parts in zip(*rounds, strict=True)))


def _round(
    gossip: GossipRounds,
    source: Float[np.ndarray, "n q"],
    seen: Float[np.ndarray, "p m n"],
    victims: Float[np.ndarray, " n"],
    memory: Memory,
    t: int,
) -> tuple[np.ndarray, ...]:
    mixing = gossip.mixing[t % len(gossip.mixing)]
    rows = seen[t % len(seen)]
    n, width = source.shape[0], memory.weights.shape[1]
    scale = memory.scale[t % len(memory.scale)]
    weights = memory.weights[t % len(memory.weights)]
    # u_t less the gradients, as a function of the state (x, past noises).
    kind = source.dtype
    own = np.diag(gossip.contraction * victims)
    from_state = np.hstack([own, np.kron(weights[None], np.eye(n, dtype=kind))])
    observe, power = [], np.eye(n, dtype=kind)
    for _ in range(gossip.steps):
        observe.append(rows @ power)
        power = victims[:, None] * (mixing @ power)
    watch = np.concatenate(observe) * victims
    power = power * victims
    transition, noise = [power @ from_state], [power @ source * scale]
    if width:
        past = np.zeros((n, n * (1 + width)), kind)
        if memory.of_noise:
            past[:, n:] = from_state[:, n:]
        shift = np.eye(n * (width - 1), n * (1 + width), n, dtype=kind)
        transition += [past, shift]
        noise += [
            source * (scale if memory.of_noise else 1.0),
            np.zeros((n * (width - 1), source.shape[1]), kind),
        ]
    gradient = np.zeros((n * (1 + width), n), kind)
    gradient[:n] = power
    return (
        np.concatenate(transition),
        gradient,
        np.concatenate(noise),
        watch @ from_state,
        watch,
        watch @ source * scale,
    )
