"""Sparse mixing matrices: the same checks, plans and runs as dense ones, without [n, n]."""

import dataclasses
import time
from fractions import Fraction

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
import scipy.sparse

from dpjax import _agents
from dpjax.accounting import finite, precision
from dpjax.engine import run
from dpjax.engine.inputs import Inputs
from dpjax.learning.quadratics import quadratics
from dpjax.learning.query import AgentQuery
from dpjax.mechanism import design
from dpjax.plans import noise, plan, protect
from dpjax.topology import gossip, graphs, mixing
from tests.support import make_config

GRAPHS = {
    "ring": graphs.ring(12),
    "star": graphs.star(9),
    "regular": nx.random_regular_graph(8, 320, seed=0),
}
WEIGHTS = (mixing.metropolis_hastings, mixing.uniform_neighbors, mixing.push_sum)


def both(graph, weights=mixing.metropolis_hastings):
    return weights(graph), weights(graph, sparse=True)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_sparse_matrices_are_dense_ones(weights) -> None:
    directed = [] if weights is WEIGHTS[0] else [graphs.exponential(10)]
    for graph in [*GRAPHS.values(), graphs.complete(1), *directed]:
        dense, sparse = both(graph, weights)
        assert sparse.format == "csr" and sparse.dtype == np.float64
        np.testing.assert_allclose(sparse.toarray(), dense, rtol=1e-14, atol=1e-15)
    with pytest.raises(ValueError, match="not connected"):
        weights(nx.empty_graph(3), sparse=True)
    with pytest.raises(ValueError, match="sparse is 1"):
        weights(graphs.ring(3), sparse=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({(0, 1): np.nan}, r"holds nan at \(0, 1\)"),
        ({(0, 1): -0.5}, r"holds -0.5 at \(0, 1\); give weights >= 0"),
        ({(2, 1): 0.5}, "row 2 summing to 1.1"),
        ({(0, 1): 1e-39, (0, 0): 2 / 3}, r"is 1e-39 at \(0, 1\), which float32 takes for 0"),
        ({(0, 1): 0, (1, 0): 0, (3, 4): 0, (4, 3): 0}, "is not connected: agent 1"),
    ],
)
def test_bad_sparse_matrices_are_refused(change, message) -> None:
    matrix = mixing.metropolis_hastings(graphs.ring(12)).copy()
    for (i, j), value in change.items():
        if value == 0:
            matrix[i, i] += matrix[i, j]
        matrix[i, j] = value
    for kind in (np.asarray, scipy.sparse.coo_array, scipy.sparse.csc_array):
        with pytest.raises(ValueError, match=message):
            mixing.check_mixing(kind(matrix))


def test_sparse_matrices_of_other_kinds_are_refused() -> None:
    for faults, message in [
        (scipy.sparse.csr_array((2, 3)), r"shape \(2, 3\); give \[n, n\]"),
        (scipy.sparse.csr_array(np.eye(2) * 1j), "sparse matrix of complex128"),
        (scipy.sparse.csr_array(np.triu(np.full((3, 3), 0.5))), "row 0 summing to 1.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            mixing.check_mixing(faults)
    with pytest.raises(ValueError, match=r"mixing is sparse; give a dense array, mixing\.toarray"):
        mixing.survivors(both(graphs.ring(5))[1], [0])


def test_sparse_matrices_have_gaps_and_fingerprints() -> None:
    large = nx.random_regular_graph(4, 520, seed=1)
    for graph in (graphs.ring(7), large):
        dense, sparse = both(graph)
        assert mixing.spectral_gap(sparse) == pytest.approx(mixing.spectral_gap(dense), abs=1e-9)
    assert mixing.fingerprint(sparse) == mixing.fingerprint(sparse.tocoo())
    other = sparse.copy()
    other.data[0] = np.nextafter(other.data[0], 1)
    assert mixing.fingerprint(other) != mixing.fingerprint(sparse)
    assert mixing.fingerprint(sparse) != mixing.fingerprint(dense)


@pytest.mark.parametrize("name", GRAPHS)
def test_plans_of_both_forms_state_same(name) -> None:
    dense, sparse = both(GRAPHS[name])
    n = len(dense)
    for changes in (
        {},
        {"budget": protect.Budget(tuple(np.linspace(1, 4, n)), delta=1e-5)},
        {"noise": noise.AntiPgd()},
        {"noise": None, "budget": None},
    ):
        config = make_config(**{"noise": noise.Independent(), **changes})
        training_plan = plan.make(config, dense)
        second = plan.make(config, sparse)
        assert second.factor.shape == (n,) and training_plan.factor.shape == (n, n)
        np.testing.assert_array_equal(np.diag(second.factor), training_plan.factor)
        np.testing.assert_array_equal(np.diag(second.covariance()), training_plan.covariance())
        assert second.guarantee == training_plan.guarantee
        assert second.forecast(9).ratio == pytest.approx(training_plan.forecast(9).ratio, rel=1e-12)
        assert second.forecast(9).independent is training_plan.forecast(9).independent
        assert second.fingerprint() != training_plan.fingerprint()
        if training_plan.design is not None:
            assert second.design.value == pytest.approx(training_plan.design.value, rel=1e-12)


def test_other_noise_of_sparse_matrix_is_that_of_dense_one(tmp_path) -> None:
    config = make_config(noise=noise.Whisper())
    dense, sparse = both(GRAPHS["ring"])
    training_plan = plan.make(config, sparse.toarray())
    second = plan.make(config, sparse)
    np.testing.assert_array_equal(training_plan.factor, second.factor)
    with pytest.raises(ValueError, match=r"sparse mixing matrix.*toarray"):
        second.save(tmp_path / "plan")
    # The same design, loaded again, fits no other form.
    with pytest.raises(ValueError, match="fingerprint"):
        plan.make(config, dense, design=second.design)


def test_dense_form_beyond_memory_is_refused(monkeypatch) -> None:
    sparse = both(GRAPHS["star"])[1]
    monkeypatch.setattr("dpjax._validate.memory_limit", lambda: 1000)
    with pytest.raises(ValueError, match="mixing is 'a sparse matrix of 9 agents'"):
        design.Design.whisper(sparse, 1.0)
    assert design.Design.independent(sparse, 1.0).covariance.shape == (9,)


def below(diagonal, precisions) -> bool:
    """Whether some bound is below the exact 1 / f^2."""
    pairs = zip(diagonal, precisions, strict=True)
    return any(Fraction(float(p)) * Fraction(float(f)) ** 2 < 1 for f, p in pairs)


@pytest.mark.mutant
def test_precisions_of_diagonal_are_bounds() -> None:
    diagonal = np.random.default_rng(0).lognormal(0, 3, 300)
    precisions = precision.inverse_diagonal(factor=diagonal)
    assert not below(diagonal, precisions)
    assert below(diagonal, 1 / diagonal**2)
    np.testing.assert_allclose(precisions * diagonal**2, 1, rtol=1e-10)
    # To the bit what the products of matrices gave.
    few = diagonal[:9]
    complete = precision._from_factor(np.diag(few))
    np.testing.assert_array_equal(precision.inverse_diagonal(factor=np.diag(few)), complete)
    np.testing.assert_array_equal(precision.inverse_diagonal(factor=few), complete)
    for invalid in ([1.0, 0.0], [1.0, np.nan], [[1.0, 2.0]]):
        with pytest.raises(ValueError, match="factor"):
            precision.inverse_diagonal(factor=np.array(invalid))


def test_releases_grid_and_cost_need_diagonal_alone() -> None:
    diagonal = np.linspace(1, 3, 5).astype(np.float32)
    strategy = np.eye(4) + 0.5 * np.eye(4, k=-1)
    for c in (None, strategy):
        assert finite.release_grid(diagonal, 4, c) == finite.release_grid(np.diag(diagonal), 4, c)
    sizes = {"spacing": 2.0**-20, "parameters": 9, "mu": 1.0, "delta": 1e-5, "clip_norm": 1.0}
    assert finite.release_cost(diagonal, 4, **sizes) == finite.release_cost(
        np.diag(diagonal), 4, **sizes
    )
    with pytest.raises(ValueError, match="singular"):
        finite.release_grid(np.array([1.0, 0.0]), 4)


@pytest.mark.slow
def test_runs_of_both_layouts_agree_and_share_their_noise(monkeypatch) -> None:
    dense, sparse = both(GRAPHS["regular"])
    config = make_config(noise=noise.Independent(), rounds=50, batch_size=1)
    task = quadratics(320)
    key = jax.random.key(3, impl="threefry2x32")
    results = []
    messages = []
    for matrix, layout in ((dense, False), (dense, True), (sparse, True)):
        with monkeypatch.context() as patch:
            if not layout:
                patch.setattr(gossip, "neighbours", lambda *_: None)
            training_plan = plan.make(config, matrix)
            inputs = Inputs.of((training_plan,), (task,), (0,))
            arrays = jax.tree.map(lambda leaf: leaf[0], inputs.arrays)
            assert isinstance(arrays["mixing"], gossip.Neighbours) == layout
            models = jax.tree.map(lambda leaf: leaf[:, 0], inputs.start(None, 1))
            models = jax.tree.map(lambda leaf: leaf[0], models)
            sent = jax.jit(inputs.statics.first_round, static_argnums=())
            messages.append(sent(arrays, inputs.data, models, key).message)
            results.append(run.run(training_plan, task, seeds=[0], eval_every=50).params)
    results.append(run.run(training_plan, task, seeds=[0], eval_every=50, devices=8).params)
    for message in messages[1:]:
        np.testing.assert_array_equal(message, messages[0])
    for models in results[1:]:
        np.testing.assert_allclose(
            models, results[0], rtol=1e-6, atol=1e-6 * np.abs(results[0]).max()
        )


def test_plans_of_one_call_may_differ_in_form_and_in_noise() -> None:
    dense, sparse = both(GRAPHS["ring"])
    task = quadratics(12)
    parts = (noise.Independent(), noise.Whisper(), None)
    single = []
    together = []
    for matrix in (dense, sparse):
        configs = [
            make_config(noise=p, batch_size=1, **({} if p else {"budget": None})) for p in parts
        ]
        plans = [plan.make(config, matrix) for config in configs]
        together.append(run.run(plans, task, seeds=[0]).params)
        single.append(run.run(plans[:1], task, seeds=[0]).params)
    np.testing.assert_allclose(together[0], together[1], rtol=1e-6)
    np.testing.assert_allclose(single[0], together[1][:, :1], rtol=1e-5)


@pytest.mark.mutant
def test_plan_with_less_noise_on_diagonal_is_refused() -> None:
    training_plan = plan.make(make_config(noise=noise.Independent()), both(GRAPHS["ring"])[1])
    factor = training_plan.noise.factor.copy()
    factor[3] *= np.float32(1 - 1e-6)
    with pytest.raises(ValueError, match="agent 3"):
        dataclasses.replace(
            training_plan, noise=dataclasses.replace(training_plan.noise, factor=factor)
        )
    with pytest.raises(ValueError, match="factor is float32"):
        dataclasses.replace(
            training_plan, noise=dataclasses.replace(training_plan.noise, factor=factor[:5])
        )


@pytest.mark.slow
def test_plans_of_many_agents_take_seconds() -> None:
    graph = nx.random_regular_graph(8, 4000, seed=0)
    config = make_config(noise=noise.Independent())
    for matrix in both(graph):
        begun = time.perf_counter()
        plan.make(config, matrix)
        assert time.perf_counter() - begun < 4  # Half of it on an idle machine.


@pytest.mark.slow
def test_agents_in_blocks_answer_as_all_at_once(monkeypatch):
    """Seven agents, two at a time, of whom one has no record in its batch."""
    query = AgentQuery(lambda w, x, y: 0.5 * jnp.sum((w * x - y) ** 2), None, 1.0, "flat")
    random = np.random.default_rng(0)
    models, x, y = (
        jnp.asarray(random.normal(size=shape), jnp.float32)
        for shape in ((7, 3), (7, 2, 3), (7, 2, 3))
    )
    padding = jnp.zeros((7, 2), bool).at[3].set(True).at[5, 1].set(True)
    complete = query(models, (x, y, padding))
    monkeypatch.setattr(_agents, "_MANY", 0)
    monkeypatch.setattr(_agents, "_BLOCK", 6)
    assert "scan[" in str(jax.make_jaxpr(query)(models, (x, y, padding)))
    blocks = query(models, (x, y, padding))
    assert not np.asarray(blocks.total)[3].any() and np.asarray(blocks.total)[[0, 6]].all()
    np.testing.assert_allclose(blocks.total, complete.total, rtol=1e-6)
    for name, value in complete.metrics.items():
        np.testing.assert_allclose(blocks.metrics[name], value, rtol=1e-6)
