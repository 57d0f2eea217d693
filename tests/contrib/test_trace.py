"""What a trace reads, how far payloads move by replay, what is sent: of D-SGD too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.algorithms.dsgd import DSGD
from dpjax.contrib import fusion, traffic
from dpjax.contrib.trace import empirical_sensitivity, trace
from dpjax.engine.run import run
from dpjax.plans import plan
from dpjax.topology import graphs, mixing
from tests.support import make_config, make_problem

N = 4
MATRIX = mixing.metropolis_hastings(graphs.ring(N))


def after(passed):
    return passed.after.models


def everything(passed):
    return passed


def made(**changes):
    return plan.make(make_config(rounds=5, design="independent", **changes), MATRIX)


@pytest.mark.slow
def test_trace_is_run_of_its_seeds():
    single = made()
    task = make_problem(N)
    models = trace(single, task, seeds=(3, 8), read=after)
    result = run(single, task, seeds=(3, 8), eval_every=5)
    for leaf, mine in zip(jax.tree.leaves(result.params), jax.tree.leaves(models), strict=True):
        np.testing.assert_allclose(leaf[:, 0], mine[:, -1], rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_noise_is_what_lies_between_private_and_noisy_payloads():
    single = made()
    task = make_problem(N)
    passed = trace(single, task, seeds=range(40), read=everything, rounds=3)
    gaps = jax.tree.map(jnp.subtract, passed.noisy, passed.private)
    spread = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gaps)]).std()
    np.testing.assert_allclose(spread, single.factor[0, 0], rtol=0.05)
    assert jax.tree.leaves(passed.message)[0].shape[:3] == (40, 3, N)


@pytest.mark.slow
def test_replayed_gradients_move_by_twice_clip_norm():
    first = made(clip_norm=0.1)
    task = make_problem(N)
    y = np.array(task.y)
    mine = task.partition.indices[1]
    y[mine] = -y[mine]
    x = np.array(task.x)
    x[mine] *= 3
    other = dataclasses.replace(task, x=x, y=y)
    result = empirical_sensitivity(first, task, other, seeds=(0, 1))
    assert result.shape[:3] == (2, 5, N)
    complete = np.sqrt((result**2).sum(axis=-1))
    assert not np.delete(complete, 1, axis=2).any()
    assert 0.1 < complete.max() <= 0.2 + 1e-6


def test_what_cannot_be_traced_is_refused():
    single = made()
    task = make_problem(N)
    with pytest.raises(ValueError, match="rounds is"):
        trace(single, task, seeds=(0,), read=after, rounds=6)
    with pytest.raises(ValueError, match="plan is 2 plans"):
        trace([single, single], task, seeds=(0,), read=after)
    smaller = make_problem(N, records=20)
    with pytest.raises(ValueError, match="shapes"):
        empirical_sensitivity(single, task, smaller, seeds=(0,))
    release = plan.make(make_config(rounds=5, design="independent", release=True), MATRIX)
    with pytest.raises(ValueError, match="release"):
        trace(release, task, seeds=(0,), read=after)


def test_messages_are_counted_by_number_byte_and_link():
    task = make_problem(N)
    sizes = sum(leaf.size for leaf in jax.tree.leaves(task.init(jax.random.key(0))))
    once = traffic.per_round(made(), task)
    assert (once.numbers, once.bytes, once.links) == (sizes, 4 * sizes, 2 * N)
    # Every gossip step is a message of its own.
    assert traffic.per_round(made(method=DSGD(gossip_steps=3)), task).numbers == 3 * sizes
    assert once.total == sizes * 2 * N


def test_noise_over_agents_sends_no_more_than_none():
    """Once the agents share covariance and seed: same numbers, bytes and links as plain D-SGD."""
    task = make_problem(N)
    plans = {
        design: plan.make(make_config(rounds=5, design=design), MATRIX)
        for design in (None, "independent", "whisper", "whisper_horizon")
    }
    sent = {design: traffic.per_round(item, task) for design, item in plans.items()}
    assert len(set(sent.values())) == 1
    # And yet the last agent's noise is made of all agents' draws.
    assert np.abs(plans["whisper"].factor[-1]).min() > 0.1


@pytest.mark.slow
def test_agents_may_start_apart_in_any_method():
    task = fusion.problem(fusion.make(N, seed=0))
    alike = fusion.problem(fusion.make(N, seed=0), init_per_agent=False)
    for item, spread in ((task, True), (alike, False)):
        first = trace(
            made(batch_size=1), item, seeds=(0, 1), read=lambda passed: passed.before.models
        )[:, 0]
        assert (first.std(axis=1).max() > 0.1) == spread
        # Seeds differ, and a seed gives the same start twice.
        assert not spread or np.abs(first[0] - first[1]).max() > 0.1
    again = trace(made(batch_size=1), task, seeds=(1,), read=after)
    np.testing.assert_array_equal(again, trace(made(batch_size=1), task, seeds=(1,), read=after))
    other = dataclasses.replace(task, init_per_agent=False)
    with pytest.raises(ValueError, match="init_per_agent"):
        run(made(batch_size=1), [task, other], seeds=(0, 1))


@pytest.mark.skipif(not jax.config.jax_enable_x64, reason="needs float64 (JAX_ENABLE_X64=1)")
def test_averages_keep_mean_of_float64_models():
    task = fusion.problem(fusion.make(N, seed=0), dtype="float64")
    config = make_config(
        rounds=40, design="non_private", step_size=1e-30, clip_norm=1e-9, batch_size=1
    )
    models = trace(plan.make(config, MATRIX), task, seeds=(0,), read=after)[0]
    assert models.dtype == np.float64
    means = models.mean(axis=1)
    np.testing.assert_allclose(means[-1], means[0], rtol=1e-14)
    # Rows in float32 would have lost 1e-8 by then.
    assert models[-1].std(axis=0).max() < 1e-3


@pytest.mark.gate(1)
@pytest.mark.parametrize("result", ["text", {"a": "text"}, print])
def test_what_is_read_must_be_arrays(result):
    with pytest.raises(ValueError, match="read gives .*; give a function that returns arrays"):
        trace(made(), make_problem(N), seeds=(0,), read=lambda passed: result, rounds=1)
    number = trace(made(), make_problem(N), seeds=(0,), read=lambda passed: 2.5, rounds=1)
    assert number.tolist() == [[2.5]]


def test_moves_are_of_two_problems():
    single = made()
    task = make_problem(N)
    with pytest.raises(ValueError, match="problem is list; give a learning.problem.Problem"):
        empirical_sensitivity(single, [task, task], task, seeds=(0,))
    with pytest.raises(ValueError, match="problem is NoneType; give a learning.problem.Problem"):
        empirical_sensitivity(single, task, None, seeds=(0,))
