"""Messages and agents lost: residual energy by Monte Carlo, and the design solved again."""

import time

import numpy as np
import pytest
import scipy.linalg

from dpjax.mechanism import fixed_point, spatial
from dpjax.topology import graphs, mixing
from tests.support import DESIGNED, designed, load_script

script = load_script("whisper_departure")
W = mixing.metropolis_hastings(graphs.erdos_renyi(12, 0.4, 1))
R = spatial.whisper(W, 1.0)
FACTOR = scipy.linalg.sqrtm(R).real


def test_residual_energy_is_what_round_leaves() -> None:
    """Agents send their noise; those who stay average what came, by themselves."""
    arrived = np.ones((12, 12), dtype=bool)
    arrived[2, :] = arrived[:, 2] = arrived[0, 5] = arrived[7, 3] = False
    draws = 20_000
    sent = FACTOR @ np.random.default_rng(0).normal(size=(12, draws))
    energies = np.zeros(draws)
    for i in set(range(12)) - {2}:
        came = [j for j in range(12) if arrived[i, j]]
        missing = 1 - sum(W[i, j] for j in came)
        energies += (sum(W[i, j] * sent[j] for j in came) + missing * sent[i]) ** 2
    error = energies.std() / np.sqrt(draws)
    applied = script.effective_mixing(W, arrived)
    expected = script.energy_of(applied, R)
    assert abs(energies.mean() - expected) < 4 * error
    assert abs(energies.mean() - 1.5 * expected) > 20 * error
    assert not applied[2].any() and not applied[:, 2].any()
    np.testing.assert_allclose(np.delete(applied.sum(axis=1), 2), 1)


@pytest.mark.parametrize("loss", [0.0, 0.1, 1.0])
def test_expected_energy_under_random_losses(loss: float) -> None:
    rng = np.random.default_rng(1)
    sampled = []
    for _ in range(400 if 0 < loss < 1 else 1):
        mask = (rng.random((12, 12)) >= loss) | np.eye(12, dtype=bool)
        sampled.append(script.energy_of(script.effective_mixing(W, mask), R))
    error = np.std(sampled) / np.sqrt(len(sampled)) + 1e-9
    assert abs(np.mean(sampled) - script.expected_energy(R, W, loss)) < 4 * error
    if loss == 0:
        assert script.expected_energy(R, W, 0.0) == pytest.approx(spatial.energy(R, W))


def test_lost_messages_hurt_correlated_noise_more() -> None:
    growth = [
        script.expected_energy(noise, W, 0.1) / script.expected_energy(noise, W, 0.0)
        for noise in (R, spatial.independent(W, 1.0))
    ]
    assert growth[0] > growth[1] > 1


@pytest.mark.parametrize("kind", DESIGNED)
def test_design_solved_again_compiles_nothing(kind: str) -> None:
    before = designed(kind, W, 1.5, 20)
    rest = mixing.survivors(W, [3])
    compiled = fixed_point.climb._cache_size()
    began = time.perf_counter()
    again = script.resolve(before, rest, [3], 8)
    seconds = time.perf_counter() - began
    assert fixed_point.climb._cache_size() == compiled and seconds < 2  # 3 ms where it is quiet
    assert again.value == pytest.approx(designed(kind, rest, 1.5, 8).value, rel=1e-7)
    again.check(rest, 1.5)
