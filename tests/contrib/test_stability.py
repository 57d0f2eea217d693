"""The mode condition against the spectral radius at its exact border, and gamma beta <= 1."""

import functools

import numpy as np
import pytest

from dpjax.contrib import fusion
from dpjax.topology import graphs, mixing

RING = mixing.metropolis_hastings(graphs.ring(7))
RANDOM = mixing.metropolis_hastings(graphs.erdos_renyi(12, 0.4, seed=1))


def margins(w, h, alpha, beta):
    """Of every mode l of W, from the least: all above 0 where the run settles."""
    modes = np.linalg.eigvalsh(w)
    return 2 * (1 + modes) - 2 * alpha * h - alpha * beta * (1 - modes)


def radius(w, hessians, alpha, beta):
    """Spectral radius of a round without noise, on errors whose tracking variables sum to 0."""
    n, p = hessians.shape[:2]
    e, u = np.eye(2 * n * p).reshape(2, n, p, -1)
    mixed = np.einsum("ij,jpc->ipc", w, e)
    u = u + beta * (e - mixed)
    e = mixed - alpha * (u + hessians @ e)
    complete = np.stack([e, u]).reshape(2 * n * p, -1)
    spread = np.kron(np.linalg.svd(np.ones((1, n)))[2][1:].T, np.eye(p))
    basis = np.block([[np.eye(n * p), np.zeros_like(spread)], [np.zeros((n * p, n * p)), spread]])
    return float(np.abs(np.linalg.eigvals(basis.T @ complete @ basis)).max())


@pytest.mark.parametrize("w", [RING, RANDOM], ids=["ring", "random"])
@pytest.mark.parametrize(("h", "alpha"), [(1.0, 0.1), (3.0, 0.2), (0.5, 1.0)])
def test_border_is_where_radius_is_one(w, h, alpha):
    gaps = 1 - np.linalg.eigvalsh(w)[:-1]
    border = float((margins(w, h, alpha, 0.0)[:-1] / (alpha * gaps)).min())
    hessians = h * np.ones((len(w), 1, 1))
    assert border > 0
    for factor, stable in ((0.5, True), (1 - 1e-6, True), (1 + 1e-6, False), (2.0, False)):
        assert (margins(w, h, alpha, factor * border) > 0).all() == stable
        assert (radius(w, hessians, alpha, factor * border) < 1) == stable, factor
    assert radius(w, hessians, alpha, border) == pytest.approx(1, abs=1e-6)


def test_steps_too_long_for_curvature_have_no_stable_gain():
    assert margins(RING, 1.0, 2.5, 0.0).min() <= 0
    for gain in (0.01, 0.4, 2.0):
        assert radius(RING, np.ones((7, 1, 1)), 2.5, gain) > 1


def test_papers_condition_is_neither_necessary_nor_sufficient():
    """Gamma beta <= 1: above it a run may settle, below it one may not."""
    complete = np.full((6, 6), 1 / 6)
    ones = np.ones((6, 1, 1))
    alpha = 0.1
    assert radius(complete, ones, alpha, 1.5 / alpha) < 1
    # Two agents that weigh each other more than themselves: the least eigenvalue is -0.6.
    swapped = np.array([[0.2, 0.8], [0.8, 0.2]])
    assert radius(swapped, ones[:2], alpha, 1.0 / alpha) > 1
    assert margins(swapped, 1.0, alpha, 1.0 / alpha)[0] < 0


# Constant steps on random graphs, with the gains that make gamma beta 1 and a half.
STEP = 1e-4
LONG = 1e4
SHORT = 5e3
COSTS = fusion.make(agents=100, seed=2)
MEAN = np.broadcast_to(COSTS.hessians.mean(axis=0), COSTS.hessians.shape)
GRAPHS = [mixing.metropolis_hastings(graphs.erdos_renyi(100, 0.1, seed=s)) for s in range(12)]


@functools.cache
def runs():
    """Which graphs algorithm 1 diverges on without noise: by Hessians and gain.

    All graphs, both gains, the sensor fusion costs and those with their mean Hessian in the place
    of everybody's (whose minimiser is the same), 4,000 rounds, side by side.
    """
    w = np.array(GRAPHS)
    linear = COSTS.linear[:, None]
    hessians = np.stack([COSTS.hessians, MEAN], axis=1)
    gains = np.array([LONG, SHORT])
    hessians = hessians.repeat(2, axis=1)
    gains = np.tile(gains, 2)[:, None]
    start = np.random.default_rng(0).standard_normal((100, 1, 2))
    x = np.broadcast_to(start, (12, 100, 4, 2)).copy()
    y = np.zeros_like(x)
    left = []
    for k in range(2000):
        mixed = (w @ x.reshape(12, 100, 8)).reshape(x.shape)
        y += gains * (x - mixed)
        curved = hessians[..., 0] * x[..., :1] + hessians[..., 1] * x[..., 1:]
        x = mixed - STEP * (y + curved - linear)
        if k % 1000 == 999:
            left.append(((x - COSTS.minimiser) ** 2).sum(axis=(1, 3)))
    ratio = left[1] / left[0]
    # Nothing is left in between; what settles at the short gain is at the optimum.
    assert ((ratio > 2) | (ratio < 0.5)).all()
    assert (left[1][ratio > 1] > 1).all() and (left[1][:, 1::2] < 1e-6).all()
    results = {("own", LONG): 0, ("own", SHORT): 1, ("mean", LONG): 2, ("mean", SHORT): 3}
    return {name: set(np.flatnonzero(ratio[:, position] > 1)) for name, position in results.items()}


def test_least_eigenvalues_tell_which_random_graphs_diverge_under_one_hessian():
    """Gamma beta = 1 on all twelve, and two of them diverge; at half of it none does."""
    h = float(np.linalg.eigvalsh(MEAN[0])[-1])
    for gain, expected in ((LONG, {3, 8}), (SHORT, set())):
        # W's eigenvalues come from the least, whose margin is the one that fails.
        reported = {i for i, w in enumerate(GRAPHS) if margins(w, h, STEP, gain)[0] <= 0}
        assert reported == runs()["mean", gain] == expected
    minimum = [np.linalg.eigvalsh(w)[0] for w in GRAPHS]
    assert set(np.argsort(minimum)[:2]) == {3, 8}


def least_of_all(w, hessians, gain):
    """Least eigenvalue of 2 (I + W) - 2 alpha H - alpha beta (I - W), H the agents' own Hessians.

    v z^k is a course of the models where [z (z - 1) - (z - 1) (W - alpha H) + z alpha beta (I - W)]
    v = 0. From the left, v* makes Jury's conditions of it, as for one mode, with v* W v and v* H v
    in the places of l and h, so that all courses die out where this matrix is positive definite.
    It is the bracket at z = -1, whose value far left of it is positive definite: where it has an
    eigenvalue below 0, the bracket is singular at a z < -1, and that course grows.
    """
    single = np.eye(len(w))
    complete = np.kron(2 * (single + w) - STEP * gain * (single - w), np.eye(2)).reshape(
        len(w), 2, -1, 2
    )
    for i, hessian in enumerate(hessians):
        complete[i, :, i] -= 2 * STEP * hessian
    return np.linalg.eigvalsh(complete.reshape(2 * len(w), -1))[0]


@pytest.mark.slow
def test_unequal_hessians_take_their_weight_in_mode():
    """The formula at the least and largest Hessian encloses the border; a matrix tells it."""
    ends = np.linalg.eigvalsh(COSTS.hessians)
    for gain, expected in ((LONG, {3}), (SHORT, set())):
        reported = {i for i, w in enumerate(GRAPHS) if least_of_all(w, COSTS.hessians, gain) <= 0}
        assert reported == runs()["own", gain] == expected
    low, high = (
        {i for i, w in enumerate(GRAPHS) if margins(w, h, STEP, LONG)[0] <= 0}
        for h in (ends.min(), ends.max())
    )
    assert low == set() and {3} < high == {2, 3, 4, 5, 6, 7, 8, 10}
    for i in (3, 6):
        largest = radius(GRAPHS[i], COSTS.hessians, STEP, LONG)
        assert (largest > 1) == (i == 3)
    # Of other data it is others.
    for seed, expected in ((0, {3, 4, 7, 8}), (1, {3})):
        hessians = fusion.make(agents=100, seed=seed).hessians
        assert {i for i, w in enumerate(GRAPHS) if least_of_all(w, hessians, LONG) <= 0} == expected
        assert all(least_of_all(w, hessians, SHORT) > 0 for w in GRAPHS)
