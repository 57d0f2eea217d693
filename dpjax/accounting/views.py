"""What an attacker sees of a linear algorithm under a trust model, and what that costs.

An algorithm is `dsgd`, `muffliato`, `decor` or `zip_dl`, or a user's own matrices in `linear`;
`.ldp()`, `.pndp(attackers)` and `.secldp(attackers, protected)` make a `View` of it.

=======  ==============================  ==================================  =====================
trust    who                             sees                                knows
=======  ==============================  ==================================  =====================
LDP      an outside eavesdropper         every message on every link         nothing else
PNDP     a set of nodes                  the messages that they receive      own gradients and noise
SecLDP   an eavesdropper, or nodes       as above                            also pairwise secrets
                                                                             but a protected set's
=======  ==============================  ==================================  =====================

Agent j sends to i where W_ij != 0. Messages are scaled to x + (gradients + noise): step size,
clip norm and noise multiplier are 1.

Reference: "Unified Privacy Guarantees for Decentralized Learning via Matrix Factorization",
section 4 and appendix A.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from dpjax import _validate
from dpjax.accounting import dense
from dpjax.accounting.arrays import Matrix, Numbers
from dpjax.accounting.attacker import View, ViewLoss, of_model, seeing
from dpjax.accounting.kalman import Model
from dpjax.accounting.rounding import UNIT
from dpjax.accounting.trust import GossipRounds, LinearAlgorithm, LinearZipDL
from dpjax.mechanism import strategy as strategy_
from dpjax.mechanism.spatial import partition
from dpjax.topology.links import incidence, link_pairs, message_pairs, zero_sum_map

__all__ = [
    "LinearAlgorithm",
    "ViewLoss",
    "View",
    "decor",
    "dsgd",
    "linear",
    "muffliato",
    "zip_dl",
]


def dsgd(
    mixing: ArrayLike,
    strategy: ArrayLike | None = None,
    covariance: ArrayLike | None = None,
    edge_noise: float | None = None,
    *,
    gossip_steps: int = 1,
    subgroups: Sequence[Sequence[int]] | None = None,
    curvature: ArrayLike | None = None,
) -> LinearAlgorithm:
    """Decentralized SGD with Gaussian noise: DP-D-SGD, Anti-PGD, MAFALDA, Whisper, DECOR.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n] by round.
        strategy: [T, T] lower triangular C: noise C^-1 Z over rounds; None is independent noise.
        covariance: [n, n] R of one round's noise over agents; None is the identity. One that is
            not diagonal comes of a seed that all agents share, or those of a subgroup.
        edge_noise: Variance c of the pairwise secret of every link, +z at one end and -z at the
            other (DECOR); the covariance is then R + c L, L the graph's Laplacian.
        gossip_steps: K gossip rounds a gradient, each observed.
        subgroups: Agents who share a seed; R must be zero between groups.
        curvature: [n] h_i where gradients are linear in the models, g_i = -h_i x_i + what is
            protected (step size times second derivative): the closed loop is then exact.

    Returns:
        The algorithm; call ``ldp()``, ``pndp(attackers)`` or ``secldp(...)`` on it.

    Raises:
        ValueError: For matrices that do not fit, a covariance that is not positive semidefinite,
            or a strategy that runs refuse too.

    Example:
        >>> from dpjax.accounting import views
        >>> from dpjax.mechanism.participation import Participation
        >>> from dpjax.topology import graphs, mixing
        >>> view = views.dsgd(mixing.metropolis_hastings(graphs.ring(4))).ldp()
        >>> view.gdp(Participation(9, 9, 1)).round(3)
        array([3., 3., 3., 3.])
    """
    schedule = _validate.stochastic("mixing", mixing, ("row",))
    schedule = schedule[None] if schedule.ndim == 2 else schedule
    n = schedule.shape[-1]
    steps = _validate.integer("gossip_steps", gossip_steps)
    contraction = np.ones(n)
    if curvature is not None:
        bends = _validate.finite_array("curvature", curvature)
        if bends.shape not in ((), (n,)):
            raise ValueError(f"curvature has shape {bends.shape}; give one number, or [{n}]")
        contraction = 1.0 - np.broadcast_to(bends, (n,))
    gossip = GossipRounds(schedule, steps, contraction)
    over_rounds = None if strategy is None else strategy_.check_strategy(strategy)
    source, owners = _agent_noise(covariance, subgroups, n)
    secret = [False] * len(owners)
    if edge_noise is not None:
        spread = np.sqrt(_validate.positive("edge_noise", edge_noise))
        ends = link_pairs(schedule)
        source = np.hstack([source, spread * incidence(ends, n)])
        owners += [frozenset(map(int, pair)) for pair in ends]
        secret += [True] * len(ends)
    return LinearAlgorithm(gossip, source, tuple(owners), tuple(secret), over_rounds)


def muffliato(mixing: ArrayLike, gossip_steps: int, **options: Any) -> LinearAlgorithm:
    """Muffliato-SGD(K): K gossip rounds a gradient, every one observed; T counts gradients.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n].
        gossip_steps: K.
        options: As in `dsgd`.

    Returns:
        The algorithm.

    Example:
        >>> from dpjax.accounting import views
        >>> from dpjax.mechanism.participation import Participation
        >>> from dpjax.topology import graphs, mixing
        >>> view = views.muffliato(mixing.metropolis_hastings(graphs.ring(4)), gossip_steps=3).ldp()
        >>> view.gdp(Participation(3, 1, 1)).round(3)
        array([1., 1., 1., 1.])
    """
    return dsgd(mixing, gossip_steps=gossip_steps, **options)


def decor(
    mixing: ArrayLike, variance: float = 1.0, shared: float = 1.0, **options: Any
) -> LinearAlgorithm:
    """DECOR: own noise of variance ``variance``, and a secret of variance ``shared`` on every link.

    Args:
        mixing: [n, n] W, or a schedule.
        variance: s.
        shared: c; the covariance over agents is s I + c L.
        options: As in `dsgd`.

    Returns:
        The algorithm.

    Reference:
        Allouah et al. (2024).

    Example:
        >>> from dpjax.accounting import views
        >>> from dpjax.mechanism.participation import Participation
        >>> from dpjax.topology import graphs, mixing
        >>> view = views.decor(mixing.metropolis_hastings(graphs.ring(4))).ldp()
        >>> view.gdp(Participation(4, 4, 1)).round(3)
        array([1.366, 1.366, 1.366, 1.366])
    """
    variance = _validate.positive("variance", variance)
    shared = _validate.positive("shared", shared)
    covariance = variance * np.eye(np.shape(mixing)[-1])
    return dsgd(mixing, covariance=covariance, edge_noise=shared, **options)


def _agent_noise(
    covariance: ArrayLike | None, subgroups: Sequence[Sequence[int]] | None, n: int
) -> tuple[Numbers, list[frozenset[int]]]:
    """Factor of the covariance with the owners of each column."""
    matrix = np.eye(n) if covariance is None else _validate.square("covariance", covariance)
    if len(matrix) != n or abs(matrix - matrix.T).max() > 1e-12 * abs(matrix).max():
        raise ValueError(f"covariance has shape {matrix.shape}; give a symmetric {(n, n)} matrix")
    variances = matrix.diagonal()
    if subgroups is None and (matrix == np.diag(variances)).all():
        if variances.min() < 0:
            raise ValueError(f"covariance has the variance {variances.min()}; give none < 0")
        # Independent noise needs no factorisation: every agent owns a column.
        return np.diag(np.sqrt(variances)), [frozenset([agent]) for agent in range(n)]
    outside = matrix.copy()
    source = np.zeros((n, n))
    owners: list[frozenset[int]] = []
    for group in partition(subgroups, n):
        columns = range(len(owners), len(owners) + len(group))
        block = np.ix_(group, group)
        source[np.ix_(group, columns)] = _factor(matrix[block])
        outside[block] = 0.0
        owners += [frozenset(group)] * len(group)
    # Noise that is shared across groups has no owner.
    if outside.any():
        raise ValueError("covariance couples different subgroups; design it with these subgroups")
    return source, owners


def _factor(covariance: Matrix) -> Matrix:
    """S with S S' <= R and no more than rounding below it, in units of each agent's own noise."""
    variances = covariance.diagonal()
    spread = np.sqrt(np.maximum(variances, 0.0))
    if (covariance[spread == 0] != 0).any() or not spread.any():
        raise ValueError(
            f"covariance has the variance {variances.min()}; give none below 0, and zero "
            "only to an agent without noise"
        )
    unit = np.where(spread > 0, spread, 1.0)
    symmetric = (covariance + covariance.T) / 2
    values, vectors = np.linalg.eigh(symmetric / unit[:, None] / unit)
    if values[0] < -1e-12 * values[-1]:
        raise ValueError(f"covariance has the eigenvalue {values[0]:.3g}; give none below 0")
    # Noise that rounding alone would make hides nothing.
    rounding = 4 * len(values) * UNIT * values[-1]
    deviations = np.sqrt(np.maximum(values - rounding, 0.0))
    return unit[:, None] * vectors * deviations


def zip_dl(
    mixing: ArrayLike, *, zero_sum: Literal["messages", "with_own_copy"] = "with_own_copy"
) -> LinearAlgorithm:
    """Zip-DL: another noise on each outgoing message, summing to zero over a node's messages.

    A node's m messages carry z_k - mean(z), z_k standard normal; ``"messages"`` counts those it
    sends (an eavesdropper of all of them averages the noise away), ``"with_own_copy"`` also the
    one it keeps.

    Args:
        mixing: [n, n] W.
        zero_sum: Over what the noises sum to zero.

    Returns:
        The algorithm, with ``ldp()`` and ``pndp(attackers)``.

    Reference:
        Biswas et al. (2025).

    Example:
        >>> from dpjax.accounting import views
        >>> from dpjax.topology import graphs, mixing
        >>> view = views.zip_dl(mixing.metropolis_hastings(graphs.ring(4))).pndp([0])
        >>> gradients, noise = view.materialize(rounds=3)
        >>> gradients.shape
        (9, 12)
    """
    _validate.one_of("zero_sum", zero_sum, ("messages", "with_own_copy"))
    matrix = _validate.stochastic("mixing", mixing, ("row",))
    if matrix.ndim != 2:
        raise ValueError(f"mixing has shape {matrix.shape}; Zip-DL takes one matrix [n, n]")
    if np.count_nonzero(matrix) == np.count_nonzero(matrix.diagonal()):
        raise ValueError(
            f"mixing is of {len(matrix)} agents without a link; Zip-DL's noise goes out on links: "
            "give a connected network of at least 2 agents"
        )
    sender, receiver = message_pairs(matrix)
    noise = zero_sum_map(sender, receiver, zero_sum)
    owners = tuple(frozenset([int(i)]) for i in sender)
    gossip = GossipRounds(matrix[None], 1, np.ones(len(matrix)))
    return LinearZipDL(gossip, noise, owners, (False,) * len(owners))


def linear(
    F: ArrayLike,
    Gamma: ArrayLike,
    Sigma: ArrayLike,
    H: ArrayLike,
    J: ArrayLike,
    D: ArrayLike,
    *,
    known_sums: ArrayLike | None = None,
    models: ArrayLike | None = None,
) -> View:
    """View of a user's own linear algorithm, taken as given.

    State s_t+1 = F s_t + Gamma g_t + Sigma w_t from a public start, observed y_t = H s_t + J g_t +
    D w_t. What the attacker sees, less what it knows, is the caller's to state: leave known noise
    out of Sigma and D, known gradients out of Gamma and J (or name them in ``known_sums``).

    Args:
        F: [s, s], or [P, s, s] by round; so are all.
        Gamma: [s, n].
        Sigma: [s, q].
        H: [m, s].
        J: [m, n].
        D: [m, q].
        known_sums: [c, n] combinations of a round's gradients that the attacker knows (Lemma 11).
            An agent that a row names alone is public (its own, say), and has no loss; of all others
            in a combination a change shows, so that their loss is infinite, also where several
            combinations together tell them apart.
        models: [., s] rows that read every agent's model off the state; needed for
            ``gradients="any"``, the default of a loss, which asks for them otherwise.

    Returns:
        The view; no agent counts as an attacker.

    Raises:
        ValueError: Naming the matrix that does not fit.

    Example:
        >>> import numpy as np
        >>> from dpjax.accounting import views
        >>> unit, zero = np.ones((1, 1)), np.zeros((1, 1))
        >>> view = views.linear(zero, zero, zero, zero, J=unit, D=2 * unit)
        >>> [part.tolist() for part in view.materialize(rounds=2)]
        [[[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 2.0]]]
    """
    model = Model.of(F, Gamma, Sigma, H, J, D)
    size, n = model.gradient.shape[1:]
    if known_sums is not None:
        combinations = _validate.finite_array("known_sums", known_sums, ndim=2)
        if combinations.shape[1] != n:
            raise ValueError(f"known_sums has shape {combinations.shape}; give [c, {n}]")
        # Named by itself: public. In every other combination a change shows, whatever else is
        # known: knowing more hides nothing.
        singles = np.count_nonzero(combinations, axis=1) == 1
        hidden = 1.0 - (combinations[singles] != 0).any(axis=0)
        model = model._replace(
            gradient=model.gradient * hidden, gradient_output=model.gradient_output * hidden
        )
        mixed = combinations[~singles] * hidden
        if mixed.any():
            model = seeing(model, mixed, output="gradient_output")
    any_gradients = None
    if models is not None:
        rows = _validate.finite_array("models", models, ndim=2)
        if rows.shape[1] != size:
            raise ValueError(f"models has shape {rows.shape}; give [., {size}]")
        wide = seeing(model, rows, output="state_output")
        any_gradients = of_model(lambda: wide, (), None)
    loss = of_model(lambda: model, (), any_gradients)
    return View(n, (), None, lambda rounds: dense.materialize(model, rounds), loss, any_gradients)
