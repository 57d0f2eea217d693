"""Lost agents and messages: residual energy by Monte Carlo, policies, and the re-solve."""

import time

import numpy as np
import pytest

from dpjax.mechanism import departure, design, fixed_point, spatial
from dpjax.plans import noise
from dpjax.topology import graphs, mixing

W = mixing.metropolis_hastings(graphs.erdos_renyi(12, 0.4, 1))
R = spatial.whisper(W, 1.0)
FACTOR = spatial.sampling_factor(R)


@pytest.mark.parametrize("policy", departure.POLICIES)
def test_residual_energy_is_what_a_round_leaves(policy: departure.Policy) -> None:
    """Agents send their noise; those who stay average what came, by themselves, per policy."""
    arrived = departure.arrivals(12, agents=[2], messages=[(0, 5), (7, 3)])
    draws = 20_000
    sent = FACTOR @ np.random.default_rng(0).normal(size=(12, draws))
    energies = np.zeros(draws)
    for i in set(range(12)) - {2}:
        came = [j for j in range(12) if arrived[i, j]]
        mixed = sum(W[i, j] * sent[j] for j in came)
        missing = 1 - sum(W[i, j] for j in came)
        if policy == "renormalise":
            mixed = mixed / (1 - missing)
        elif policy == "keep_own":
            mixed = mixed + missing * sent[i]
        energies += mixed**2
    error = energies.std() / np.sqrt(draws)
    expected = departure.residual_energy(R, W, arrived, policy)
    assert abs(energies.mean() - expected) < 4 * error
    assert abs(energies.mean() - 1.5 * expected) > 20 * error


def test_nothing_lost_is_the_design() -> None:
    for policy in departure.POLICIES:
        found = departure.residual_energy(R, W, departure.arrivals(12), policy)
        assert found == pytest.approx(spatial.energy(R, W))


def test_policies_keep_averages() -> None:
    pair = [(0, 1), (1, 0)] if W[0, 1] else [(0, 5), (5, 0)]
    arrived = departure.arrivals(12, agents=[4], messages=pair)
    stay = [i for i in range(12) if i != 4]
    for policy in ("renormalise", "keep_own"):
        applied = departure.effective_mixing(W, arrived, policy)
        np.testing.assert_allclose(applied.sum(axis=1)[stay], 1)
        assert not applied[4].any() and not applied[:, 4].any()
    np.testing.assert_allclose(applied.sum(axis=0)[stay], 1)
    shrunk = departure.effective_mixing(W, arrived, "ignore")
    assert shrunk.sum(axis=1)[stay].min() < 1


@pytest.mark.parametrize("policy", ["keep_own", "ignore"])
@pytest.mark.parametrize("loss", [0.0, 0.1, 1.0])
def test_expected_energy_under_random_losses(policy: departure.Policy, loss: float) -> None:
    rng = np.random.default_rng(1)
    found = []
    for _ in range(400 if 0 < loss < 1 else 1):
        mask = (rng.random((12, 12)) >= loss) | np.eye(12, dtype=bool)
        found.append(departure.residual_energy(R, W, mask, policy))
    error = np.std(found) / np.sqrt(len(found)) + 1e-9
    assert abs(np.mean(found) - departure.expected_energy(R, W, loss, policy)) < 4 * error


def test_losses_hurt_correlated_noise_more_than_independent_noise() -> None:
    alone = spatial.independent(W, 1.0)
    growth = [
        departure.expected_energy(noise, W, 0.1) / departure.expected_energy(noise, W, 0.0)
        for noise in (R, alone)
    ]
    assert growth[0] > growth[1] > 1


def test_survivors_keep_a_doubly_stochastic_matrix() -> None:
    kept = departure.survivors(W, [3, 7])
    mixing.check(kept, stochastic="double", symmetric=True)
    star = mixing.metropolis_hastings(graphs.star(5))
    with pytest.raises(ValueError, match="survivors is not connected"):
        departure.survivors(star, [0])
    with pytest.raises(ValueError, match="everyone"):
        departure.survivors(star, range(5))


@pytest.mark.parametrize("kind", design.KINDS)
def test_resolve_equals_a_new_design(kind: str) -> None:
    bounds = np.linspace(1, 2, 12)
    made = design.make(kind, W, bounds, horizon=20)
    kept = departure.survivors(W, [3])
    left = departure.resolve(made, kept, [3], horizon=8)
    fresh = design.make(kind, kept, np.delete(bounds, 3), horizon=8)
    assert left.value == pytest.approx(fresh.value, rel=1e-7)
    left.check(kept, np.delete(bounds, 3))


def test_resolve_takes_milliseconds_and_compiles_nothing() -> None:
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(20, 0.5, 0))
    made = design.make("whisper_horizon", matrix, 1.0, horizon=100)
    compiled = fixed_point.climb._cache_size()
    times = []
    for gone in ([0], [1, 2], [5, 6, 7]):
        kept = departure.survivors(matrix, gone)
        start = time.perf_counter()
        left = departure.resolve(made, kept, gone)
        times.append(time.perf_counter() - start)
        assert left.gap < 1e-8
    assert fixed_point.climb._cache_size() == compiled
    assert min(times) < 0.2  # 3 ms on a quiet machine


def test_resolve_asks_again_for_what_it_cannot_keep() -> None:
    made = design.make("whisper_horizon", W, 1.0, step_sizes=np.ones(6))
    kept = departure.survivors(W, [3])
    with pytest.raises(ValueError, match="step_sizes was part of the design"):
        departure.resolve(made, kept, [3])
    assert departure.resolve(made, kept, [3], step_sizes=np.ones(4)).horizon == 4
    with pytest.raises(ValueError, match="the 10 agents who stay"):
        departure.resolve(made, kept, [3, 4])
    grouped = design.make("whisper", W, 1.0, subgroups=[range(6), range(6, 12)])
    again = departure.resolve(grouped, kept, [3], subgroups=[range(5), range(5, 11)])
    assert again.n == 11


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: departure.arrivals(3, agents=[3]), "names agent 3"),
        (lambda: departure.survivors(W, 5), r"departed is 5; give a list, \[5\]"),
        (lambda: departure.survivors(W, ["Fulda"]), r"departed names 'Fulda'.*nodes\.find"),
        (lambda: design.make("whisper", W, 1.0, subgroups=[["Bonn"]]), "subgroups names 'Bonn'"),
        (lambda: noise.Whisper(subgroups=(("Bonn",),)), "subgroups names 'Bonn'"),
        (lambda: noise.Whisper("all"), "horizon is 'all'; give \"run\", None for one step"),
        (lambda: departure.effective_mixing(W, np.ones((3, 3))), "arrived has shape"),
        (lambda: departure.effective_mixing(W, np.ones((12, 12)), "hope"), "policy is 'hope'"),
        (lambda: departure.expected_energy(R, W, 1.5), "probability"),
        (lambda: departure.expected_energy(R, W, 0.5, "renormalise"), "policy is"),
    ],
)
def test_refusals(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_half_lost_agents_are_refused() -> None:
    mask = np.ones((12, 12), dtype=bool)
    mask[4, 4] = False
    with pytest.raises(ValueError, match="agent 4 lost its own model"):
        departure.effective_mixing(W, mask)
