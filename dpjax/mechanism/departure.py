"""Agents and messages lost in mid-round, and the design after an agent has left.

Correlated noise cancels only between messages that meet. What is lost leaves its partners' noise
uncancelled: accuracy suffers, privacy does not, since whoever sees fewer of the messages of a
round learns no more than from all of them, and mixing is post-processing.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float

from dpjax import _validate
from dpjax.mechanism import design as design_
from dpjax.topology import mixing as mixing_

__all__ = [
    "Policy",
    "arrivals",
    "effective_mixing",
    "expected_energy",
    "residual_energy",
    "resolve",
    "survivors",
]

Policy = Literal["renormalise", "keep_own", "ignore"]
POLICIES = ("renormalise", "keep_own", "ignore")


def arrivals(
    n: int, *, agents: Iterable[int] = (), messages: Iterable[tuple[int, int]] = ()
) -> Bool[np.ndarray, "n n"]:
    """Return A, [n, n] bool: A_ij says whether j's message of this round reached i.

    Args:
        n: number of agents.
        agents: those lost in mid-round; all they sent and should receive is lost with them.
        messages: lost ones as (receiver, sender).

    Raises:
        ValueError: for a number that is no agent's.
    """
    n = _validate.integer("n", n)
    mask = np.ones((n, n), dtype=bool)
    for agent in _agents("agents", agents, n):
        mask[agent, :] = mask[:, agent] = False
    for pair in messages:
        receiver, sender = _agents("messages", pair, n)
        mask[receiver, sender] = False
    return mask


def effective_mixing(
    mixing: Float[np.ndarray, "n n"],
    arrived: Bool[np.ndarray, "n n"],
    policy: Policy = "renormalise",
) -> Float[np.ndarray, "n n"]:
    """Return the mixing that the round really applies; row i is what agent i computes.

    Args:
        mixing: [n, n] W, rows summing to 1.
        arrived: [n, n] bool, see :func:`arrivals`. An agent always has its own model unless it
            is itself lost.
        policy: "renormalise" divides a row by the weight that arrived; "keep_own" puts lost
            weight on the agent's own model (both keep the rows' sums, the second also the
            columns' when links fail in both directions); "ignore" does nothing, and the models
            shrink.

    Returns:
        [n, n]; the row of a lost agent is 0.

    Raises:
        ValueError: for an unknown policy or shapes that do not fit.
    """
    _validate.one_of("policy", policy, POLICIES)
    matrix = mixing_.check(mixing, stochastic="rows", connected=False)
    mask = np.asarray(arrived, dtype=bool)
    if matrix.ndim != 2 or mask.shape != matrix.shape:
        raise ValueError(
            f"arrived has shape {mask.shape}, mixing {matrix.shape}; give two of shape [n, n]"
        )
    alive = mask.diagonal()
    if (mask & ~alive[:, None]).any() or (mask & ~alive[None, :]).any():
        lost = int(np.flatnonzero(~alive & (mask.any(axis=0) | mask.any(axis=1)))[0])
        raise ValueError(
            f"arrived says that agent {lost} lost its own model but not its other messages; use "
            f"arrivals(n, agents=[{lost}])"
        )
    kept = np.where(mask, matrix, 0.0)
    if policy == "keep_own":
        kept[alive, alive] += (matrix - kept).sum(axis=1)[alive]
    elif policy == "renormalise":
        total = kept.sum(axis=1)
        if (total[alive] == 0).any():
            agent = int(np.flatnonzero(alive & (total == 0))[0])
            raise ValueError(
                f'arrived leaves agent {agent} without any weight; use policy="keep_own"'
            )
        kept[alive] /= total[alive, None]
    return kept


def residual_energy(
    covariance: Float[np.ndarray, "n n"],
    mixing: Float[np.ndarray, "n n"],
    arrived: Bool[np.ndarray, "n n"],
    policy: Policy = "renormalise",
) -> float:
    """Return tr(W_A R W_A'), the noise energy in the surviving agents' models after the round.

    W_A is :func:`effective_mixing`. With nothing lost it is the design's own tr(W R W').

    Raises:
        ValueError: as for :func:`effective_mixing`.
    """
    applied = effective_mixing(mixing, arrived, policy)
    matrix = _validate.square("covariance", covariance)
    return float(np.einsum("ij,jk,ik->", applied, matrix, applied, optimize=True))


def expected_energy(
    covariance: Float[np.ndarray, "n n"],
    mixing: Float[np.ndarray, "n n"],
    loss: float,
    policy: Policy = "keep_own",
) -> float:
    """Return the mean of :func:`residual_energy` when each message is lost on its own.

    For row i with means m_i and independent entries,
    E = m_i R m_i' + q (1 - q) sum_j W_ij^2 (R_jj - 2 R_ij + R_ii), where the last two terms
    appear under "keep_own" only (lost weight moves to the own model).

    Args:
        covariance: [n, n] R.
        mixing: [n, n] W, rows summing to 1.
        loss: probability q in [0, 1] that a message between two agents is lost.
        policy: "keep_own" or "ignore"; renormalised rows are not linear in what arrives.

    Raises:
        ValueError: for another policy or a loss outside [0, 1].
    """
    loss = _validate.number("loss", loss, remedy="give a probability in [0, 1]")
    if not 0 <= loss <= 1:
        raise ValueError(f"loss is {loss!r}; give a probability in [0, 1]")
    if policy not in ("keep_own", "ignore"):
        raise ValueError(f'policy is {policy!r}; choose "keep_own" or "ignore"')
    matrix = mixing_.check(mixing, stochastic="rows", connected=False)
    noise = _validate.square("covariance", covariance)
    others = matrix - np.diag(matrix.diagonal())
    mean = matrix - loss * others
    variances = np.broadcast_to(noise.diagonal(), noise.shape)
    spread = variances
    if policy == "keep_own":
        mean = mean + loss * np.diag(others.sum(axis=1))
        spread = variances - 2.0 * noise + variances.T
    certain = float(np.einsum("ij,jk,ik->", mean, noise, mean, optimize=True))
    return certain + loss * (1.0 - loss) * float(np.sum(others**2 * spread))


def survivors(
    mixing: Float[np.ndarray, "n n"], departed: Sequence[int]
) -> Float[np.ndarray, "k k"]:
    """Return the mixing of those who stay: the departed's weights go to each one's own model.

    Symmetric doubly stochastic matrices stay so.

    Raises:
        ValueError: when the departure disconnects the network, or nobody stays.
    """
    matrix = mixing_.check(mixing, stochastic="rows")
    gone = _agents("departed", departed, matrix.shape[-1])
    if len(set(gone)) == matrix.shape[-1]:
        raise ValueError(f"departed is {gone}, everyone; leave at least one agent")
    mask = arrivals(matrix.shape[-1], agents=gone)
    stay = np.flatnonzero(mask.diagonal())
    kept = effective_mixing(matrix, mask, "keep_own")[np.ix_(stay, stay)]
    return mixing_.check(kept, stochastic="rows", name="mixing of the survivors")


def resolve(
    design: design_.Design,
    mixing: Float[np.ndarray, "k k"],
    departed: Sequence[int],
    horizon: int | None = None,
    **options: Any,
) -> design_.Design:
    """Return the design for those who stay, solved from the last multipliers.

    The solve runs inside a matrix of the old size, so that nothing is compiled again; at
    twenty agents it takes milliseconds.

    Args:
        design: the design before the departure.
        mixing: the survivors' matrix, from :func:`survivors` or of the remaining graph.
        departed: the agents, by their numbers in ``design``, that left.
        horizon: rounds left, for "whisper_horizon"; None keeps the design's.
        options: further options of ``design.make`` (step sizes of the rounds left, say).

    Returns:
        A design of the same kind and bounds for the survivors, renumbered in order.

    Raises:
        ValueError: when shapes do not fit, or the design has an objective that must be given
            again (step sizes, weights, subgroups) and is not.
    """
    gone = sorted(set(_agents("departed", departed, design.n)))
    matrix = _validate.finite_array("mixing", mixing)
    if matrix.shape[-1] != design.n - len(gone):
        raise ValueError(
            f"mixing has shape {matrix.shape}; give the matrix of the {design.n - len(gone)} "
            f"agents who stay"
        )
    for name, held in design.options.items():
        if name in ("discount", "final_model"):
            options.setdefault(name, held)
        elif name not in options:
            raise ValueError(f"{name} was part of the design; give it again for those who stay")
    bound = design.precision_bound
    if np.ndim(bound):
        bound = np.delete(np.asarray(bound), gone)
    horizon = design.horizon if horizon is None else horizon
    if "step_sizes" in options:
        horizon = None
    if design.kind.startswith("whisper"):
        options.setdefault("pad_to", design.n)
        if design.multipliers.size and "subgroups" not in options:
            options.setdefault("warm_start", np.delete(design.multipliers, gone))
    return design_.make(design.kind, matrix, bound, horizon, **options)


def _agents(name: str, agents: Iterable[int], n: int) -> list[int]:
    numbers = _validate.agents(name, agents)
    for number in numbers:
        if number >= n:
            raise ValueError(f"{name} names agent {number}; give numbers from 0 to {n - 1}")
    return numbers
