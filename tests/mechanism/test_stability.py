"""The mode condition against the spectral radius at its exact border, and gamma beta <= 1."""

import numpy as np
import pytest

from dpjax.mechanism import quadratic, stability
from dpjax.topology import graphs, mixing

RING = mixing.metropolis_hastings(graphs.ring(7))
RANDOM = mixing.metropolis_hastings(graphs.erdos_renyi(12, 0.4, seed=1))


@pytest.mark.parametrize("w", [RING, RANDOM], ids=["ring", "random"])
@pytest.mark.parametrize(("h", "alpha"), [(1.0, 0.1), (3.0, 0.2), (0.5, 1.0)])
def test_the_border_is_where_the_radius_is_one(w, h, alpha):
    border = stability.largest_gain(w, h, alpha)
    hessians = h * np.ones((len(w), 1, 1))
    assert border > 0
    for factor, stable in ((0.5, True), (1 - 1e-6, True), (1 + 1e-6, False), (2.0, False)):
        gain = factor * border
        assert (stability.margins(w, h, alpha, gain) > 0).all() == stable
        radius = stability.spectral_radius(w, hessians, alpha, gain)
        assert (radius < 1) == stable, (factor, radius)
    assert stability.spectral_radius(w, hessians, alpha, border) == pytest.approx(1, abs=1e-6)


def test_steps_too_long_for_the_curvature_have_no_stable_gain():
    hessians = np.ones((7, 1, 1))
    assert stability.largest_gain(RING, 1.0, 2.5) == 0
    for gain in (0.01, 0.4, 2.0):
        assert stability.spectral_radius(RING, hessians, 2.5, gain) > 1


def test_the_papers_condition_is_neither_necessary_nor_sufficient():
    """Gamma beta <= 1: above it a run may settle, below it one may not."""
    complete = np.full((6, 6), 1 / 6)
    ones = np.ones((6, 1, 1))
    alpha = 0.1
    assert stability.spectral_radius(complete, ones, alpha, 1.5 / alpha) < 1
    # Two agents that weigh each other more than themselves: the least eigenvalue is -0.6.
    swapped = np.array([[0.2, 0.8], [0.8, 0.2]])
    assert stability.spectral_radius(swapped, ones[:2], alpha, 1.0 / alpha) > 1
    assert stability.largest_gain(swapped, 1.0, alpha) * alpha < 1


def test_decaying_steps_come_back_from_where_the_condition_fails():
    """Gamma beta = 2 on the ring: far astray first, back in the end, unlike the constant step."""
    hessians, linear = np.ones((7, 1, 1)), np.arange(7, dtype=np.float64)[:, None]
    gamma, beta = 0.1, 20.0
    assert stability.spectral_radius(RING, hessians, gamma, beta) > 1
    decaying = gamma * 0.97 ** np.arange(600)
    found = stability.peak(RING, hessians, linear, decaying, beta)
    last = quadratic.error(RING, hessians, linear, decaying, beta, np.zeros(600), start_variance=0)
    assert found > 1e4 and last.bias < 10
    assert stability.peak(RING, hessians, linear, np.full(20_000, gamma), beta) == np.inf
    calm = stability.peak(RING, hessians, linear, decaying, 2.0)
    assert calm < 7 * 3.0**2


def test_unequal_hessians_follow_the_run():
    """The radius tells whether the literal recursion settles."""
    rng = np.random.default_rng(0)
    hessians = rng.uniform(0.2, 3.0, (7, 1, 1))
    for alpha, beta in ((0.3, 1.0), (0.3, 3.2), (0.3, 6.0), (0.9, 0.5)):
        x, y = rng.standard_normal((7, 1)), np.zeros((7, 1))
        for _ in range(4000):
            mixed = RING @ x
            y = y + beta * (x - mixed)
            x = mixed - alpha * (y + hessians[:, :, 0] * x)
            if np.abs(x).max() > 1e6:
                break
        settles = np.abs(x).max() < 1e-6
        assert settles == (stability.spectral_radius(RING, hessians, alpha, beta) < 1)


def test_bad_input_is_named():
    lopsided = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])
    with pytest.raises(ValueError, match="mixing"):
        stability.margins(lopsided, 1.0, 0.1, 1.0)
    with pytest.raises(ValueError, match="beta"):
        stability.margins(RING, 1.0, 0.1, -1.0)
    with pytest.raises(ValueError, match="curvature"):
        stability.largest_gain(RING, 0.0, 0.1)
