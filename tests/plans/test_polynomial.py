"""Noise of a polynomial of W in plans and runs: its loss, its audit, and what a round draws."""

import dataclasses

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

import dpjax as dp
from dpjax._numerics import double_precision
from dpjax.accounting import views
from dpjax.learning import samplers
from dpjax.learning.quadratics import quadratics
from dpjax.mechanism import polynomial
from dpjax.plans import noise, optimizers, plan
from dpjax.topology import gossip, graphs, mixing
from dpjax.transforms import noise as noise_
from tests.support import make_config

RING = mixing.metropolis_hastings(graphs.ring(12))
REGULAR = mixing.metropolis_hastings(nx.random_regular_graph(8, 320, seed=0), sparse=True)


def make(matrix=RING, part=noise.Polynomial(), **changes):  # noqa: B008
    counts = changes.pop("counts", None)
    return plan.make(make_config(noise=part, **changes), matrix, counts=counts)


@pytest.mark.parametrize("part", [noise.Polynomial(), noise.Polynomial(3, "run")])
def test_stated_loss_is_hardly_above_exact_one(part):
    for matrix in (RING, mixing.metropolis_hastings(graphs.star(7), sparse=True)):
        result = make(matrix, part, rounds=9)
        view = views.dsgd(mixing.dense(matrix), covariance=result.covariance()).ldp()
        exact = view.gdp(result.config.pattern).max() * result.config.protect.sensitivity
        assert exact <= result.guarantee.mu * (1 + 1e-6) < exact * 1.08
        assert result.guarantee.epsilon == 8 and result.guarantee.secrets == "shared"
        again = make(matrix, part, rounds=9)
        assert result.fingerprint() == again.fingerprint()


@pytest.mark.mutant
@pytest.mark.parametrize("graph", ["ring:12", "star:7"])
def test_release_draws_by_a_factor_that_leaves_no_budget(graph):
    matrix = mixing.metropolis_hastings(graphs.parse(graph), sparse=True)
    simulated = make(matrix, rounds=9)
    released = make(matrix, rounds=9, release=True)
    assert released.guarantee.epsilon == simulated.guarantee.epsilon == 8
    assert released.guarantee.secrets == "shared" and released.grid is not None
    factor = released.factor.astype(float)
    assert factor.shape == matrix.shape and set(released.noise.arrays) == {"factor"}
    # By hand: all agents lose what the budget allows, without the reserve of a release.
    losses = np.sqrt(9 * np.diag(np.linalg.inv(factor @ factor.T)))
    losses *= released.config.protect.sensitivity
    allowed = released.config.budget.without_reserve().allowed_mu()
    np.testing.assert_allclose(losses, allowed, rtol=1e-5)
    assert losses.max() <= released.guarantee.mu
    # Correlated as what is gossiped, with no more of it.
    correlations = []
    for result in (simulated, released):
        sizes = np.sqrt(np.diag(result.covariance()))
        correlations.append(result.covariance() / np.outer(sizes, sizes))
    np.testing.assert_allclose(*correlations, atol=1e-5)
    assert np.trace(released.covariance()) < 1.01 * np.trace(simulated.covariance())
    # A row that is smaller than it was made, and all rows.
    reduced = released.factor.copy()
    reduced[3] *= np.float32(1 - 1e-3)
    for broken, agent in ((reduced, 3), (released.factor * np.float32(0.99), 0)):
        weaker = dataclasses.replace(released.noise, factor=broken)
        with pytest.raises(ValueError, match=f"guarantee states .* for agent {agent}"):
            dataclasses.replace(released, noise=weaker)


def test_release_is_refused_where_memory_holds_no_factor(monkeypatch):
    monkeypatch.setattr("dpjax._validate.memory_limit", lambda: 10**6)
    # The design itself needs none, of many agents.
    monkeypatch.setattr(polynomial, "_DENSE", 9)
    monkeypatch.setattr(polynomial, "_DRAWN", 2**12)
    make(REGULAR)
    with pytest.raises(ValueError, match="needs a dense matrix"):
        make(REGULAR, release=True)


def test_every_agent_has_its_own_budget():
    each = tuple(np.linspace(2, 8, 12))
    result = make(epsilon=each, rounds=3)
    assert result.guarantee.per_agent_epsilon == pytest.approx(each)


@pytest.mark.slow
def test_poisson_batches_need_less_noise():
    poisson = {"sampler": samplers.Poisson(2.0, 4), "relation": "zero_out_record"}
    sampled, complete = (
        make(rounds=4, counts=np.full(12, 20), **changes)
        for changes in (poisson, {"relation": "zero_out_record"})
    )
    assert sampled.guarantee.epsilon == complete.guarantee.epsilon
    assert (sampled.arrays["factor"] < 0.9 * complete.arrays["factor"]).all()


@pytest.mark.mutant
@pytest.mark.parametrize("layout", ["dense", "tables"])
def test_round_draws_what_plan_is_about(layout):
    result = make(REGULAR)
    w = REGULAR.toarray() if layout == "dense" else gossip.neighbours(REGULAR, np.float32)
    arrays = {**result.arrays, "mixing": jax.tree.map(jnp.asarray, w)}
    key = jax.random.key(1, impl="threefry2x32")
    zeros = jnp.zeros((320, 40))
    link = result.privatizer.transformation(arrays, key)
    drawn, _ = jax.jit(link.update)(zeros, link.init(zeros))
    white = noise_.correlated(np.ones(320, np.float32), key=key, rounds=20)
    normals, _ = white.update(zeros, white.init(zeros))
    expected = result.factor.astype(np.float64) @ np.asarray(normals, np.float64)
    np.testing.assert_allclose(drawn, expected, atol=3e-6 * np.abs(expected).max())
    # Without the last product with W it would be something else.
    fewer = result.arrays["polynomial"].copy()
    fewer[-1] = 0
    link = result.privatizer.transformation(arrays | {"polynomial": fewer}, key)
    drawn, _ = jax.jit(link.update)(zeros, link.init(zeros))
    assert np.abs(drawn - expected).max() > 1e-2 * np.abs(expected).max()


def test_float64_models_have_noise_of_float32_weights():
    result = make(REGULAR)
    solution = result.noise.solution
    with double_precision():
        key = jax.random.key(1, impl="threefry2x32")
        zeros = jnp.zeros((320, 3), jnp.float64)
        arrays = {**result.arrays, "mixing": jnp.asarray(REGULAR.toarray())}
        link = result.privatizer.transformation(arrays, key)
        drawn, _ = link.update(zeros, link.init(zeros))
        white = noise_.correlated(np.ones(320), key=key, rounds=20)
        normals = np.asarray(white.update(zeros, white.init(zeros))[0])
        drawn = np.asarray(drawn)
    weights = solution.coefficients, solution.scales.astype(float)
    exact = polynomial.noise_map(polynomial.rounded(REGULAR), *weights) @ normals
    np.testing.assert_allclose(drawn, exact, atol=1e-13 * np.abs(exact).max())
    other = polynomial.noise_map(mixing.HashableMatrix(REGULAR), *weights) @ normals
    assert np.abs(other - drawn).max() > 1e-10 * np.abs(exact).max()


@pytest.mark.slow
def test_runs_of_both_layouts_agree():
    task = quadratics(320)
    runs = [
        dp.run(make(matrix, rounds=5, batch_size=1), task, seeds=[0], devices=devices)
        for matrix, devices in ((REGULAR, None), (REGULAR.toarray(), 8))
    ]
    np.testing.assert_allclose(runs[0].params, runs[1].params, rtol=1e-5, atol=1e-4)


def test_plans_of_two_degrees_run_apart():
    plans = [make(part=noise.Polynomial(degree), batch_size=1) for degree in (2, 4)]
    with pytest.raises(ValueError, match="degree=2.* and .*degree=4.*use dp.sweep"):
        dp.run(plans, quadratics(12), seeds=[0])


@pytest.mark.mutant
def test_weaker_noise_is_refused():
    result = make()
    solution = result.noise.solution
    reduced = solution.scales.copy()
    reduced[3] *= np.float32(1 - 1e-6)
    changed = solution.coefficients.copy()
    changed[-1] *= np.float32(0.9)
    for values, message in (
        ({"scales": reduced}, "for agent 3"),
        ({"scales": solution.scales.astype(float)}, "factor is float64"),
        ({"scales": solution.scales[:5]}, r"factor is float32 \(5,\)"),
        ({"coefficients": changed}, "guarantee states"),
        ({"coefficients": 0 * changed}, "guarantee states"),
        ({"precision": 0.5 * solution.precision[:1]}, "guarantee states"),
    ):
        invalid = dataclasses.replace(solution, **values)
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(result, noise=dataclasses.replace(result.noise, solution=invalid))
    with pytest.raises(ValueError, match="another mixing matrix"):
        matrix = polynomial.rounded(mixing.metropolis_hastings(graphs.star(12)))
        dataclasses.replace(result, noise=dataclasses.replace(result.noise, matrix=matrix))


def test_what_it_does_not_join_is_refused(monkeypatch):
    schedule = np.stack([RING, RING])
    adam = optimizers.Chain(lambda step, noise: optax.adam(step), 0.1, uses_noise=True)
    for changes, message in (
        ({"matrix": mixing.uniform_neighbors(graphs.star(5))}, "not symmetric"),
        ({"matrix": schedule}, "one matrix"),
        ({"attacker": "node"}, "share and can subtract"),
        ({"optimizer": adam}, "no variance of noise Polynomial"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**changes)
    for invalid in ({"degree": 0}, {"degree": 40}, {"horizon": 0}, {"horizon": "all"}):
        with pytest.raises(ValueError, match=next(iter(invalid))):
            noise.Polynomial(**invalid)
    monkeypatch.setattr("dpjax.plans.polynomial._DENSE", 9)
    result = make()
    with pytest.raises(ValueError, match="no one factor says"):
        result.factor  # noqa: B018
    assert "; noise allows for " in repr(result) and "NOT protected" in repr(result)
    with pytest.raises(ValueError, match="no noise design over agents"):
        result.save("plan")
