"""Records in secret bins: drawn once for all cycles, divided publicly, accounted as drawn."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.accounting import gdp
from dpjax.accounting.guarantee import Guarantee
from dpjax.engine import keys
from dpjax.engine.run import run
from dpjax.plans import noise, plan
from dpjax.plans.protect import Protect
from dpjax.plans.samplers import BallsInBins, Cyclic, Poisson
from dpjax.topology import graphs, mixing
from tests.plans import draws
from tests.support import make_config, make_problem, retargeted

RING = mixing.metropolis_hastings(graphs.ring(4))
ALONE = np.ones((1, 1))
COUNTS = np.array([24, 60, 12, 24])
BINS = 4
T = 12


def config(**changes):
    options = {
        "relation": "zero_out_record", "sampler": BallsInBins(BINS, 6), "epsilon": 2.0,
        "noise": noise.Independent(), "rounds": T, "clip_norm": 0.5,
    }  # fmt: skip
    return make_config(**(options | changes))


@functools.cache
def made():
    return plan.make(config(), RING, counts=COUNTS)


def presence(sampler, counts, rounds, seed=3):
    """[T, n, m] which records were drawn, by one key of the run."""
    key = jax.random.key(seed)
    draws = jax.jit(jax.vmap(lambda t: sampler.draw(key, t, jnp.asarray(counts))))
    rows, padding = map(np.asarray, draws(jnp.arange(rounds)))
    result = np.zeros((rounds, len(counts), max(counts)), int)
    for t, agent, place in zip(*np.nonzero(~padding), strict=True):
        result[t, agent, rows[t, agent, place]] += 1
    return result


@pytest.mark.mutant
def test_record_is_in_one_bin_same_in_every_cycle():
    sampler = BallsInBins(BINS, 5, records=60)
    result = presence(sampler, COUNTS, T)
    for agent, count in enumerate(COUNTS):
        assert not result[:, agent, count:].any()
        own = result[:, agent, :count]
        assert (own.sum(axis=0) == T // BINS).all()
        for cycle in range(1, T // BINS):
            np.testing.assert_array_equal(own[cycle * BINS : (cycle + 1) * BINS], own[:BINS])
    # Batches vary in size, and another key deals other bins.
    assert len(set(result.sum(axis=2).ravel())) > 3
    assert (result != presence(sampler, COUNTS, T, seed=4)).any()


def test_audit_of_draws_finds_its_pattern():
    draws.audit(BallsInBins(BINS, 5, records=60), COUNTS, T)


def test_bins_are_even_and_records_apart():
    for bins in (3, 7, 50):
        times = 300
        draw = functools.partial(BallsInBins(bins, 5, records=40).draw, counts=jnp.array([40]))
        draws = jax.jit(jax.vmap(draw, in_axes=(0, None)))
        padding = draws(jax.random.split(jax.random.key(1), times), 0).padding
        drawn = np.asarray((~padding).sum(axis=(1, 2)))
        deviation = np.sqrt(40 / bins * (1 - 1 / bins))
        assert abs(drawn.mean() - 40 / bins) < 4.5 * deviation / np.sqrt(times)
        # Sizes vary as those of independent records do.
        assert drawn.var() == pytest.approx(deviation**2, rel=0.4)


def test_divisor_is_largest_expected_batch_and_public():
    sampler = made().sampler
    assert sampler.records == 60 and sampler.divisor == 60 / BINS
    np.testing.assert_allclose(sampler.fill_share(COUNTS, T), COUNTS / 60)
    assert np.isnan(BallsInBins(BINS, 6).divisor)
    with pytest.raises(ValueError, match="records is None"):
        BallsInBins(BINS, 6).draw(jax.random.key(0), 0, jnp.asarray(COUNTS))


def test_plan_states_its_loss_and_what_it_counts_on():
    stated = made().guarantee
    loss = stated.loss
    assert stated.accountant == "balls_in_bins" and stated.mu is None
    assert (loss.bins, loss.separation, loss.times) == (BINS, BINS, T // BINS)
    assert 1.99 < stated.exact_epsilon <= 2.0 == stated.epsilon
    ratio = 0.5 / float(made().factor[0]) if made().factor.ndim == 1 else 0.5 / made().factor[0, 0]
    assert loss.ratios[0] == pytest.approx(ratio, rel=1e-5)
    # It amplifies, but less than coins of the same size do not need: known bins cost more.
    assert gdp.epsilon(loss.unamplified, stated.delta) > 1.2 * stated.epsilon
    dealt = config(sampler=Cyclic(T // BINS, BINS, 15))
    cyclic = plan.make(dealt, RING, counts=COUNTS)
    assert cyclic.factor.max() > 1.1 * made().factor.max()
    text = stated.statement()
    for words in (
        "of which every record takes part in 3, 4 apart", "in one bin of rounds", "kept secret",
        "NOT protected from another participant: it may know which records were drawn",
        "agents who keep noise and batches secret",
    ):  # fmt: skip
        assert words in text, words
    assert "k = 3, b = 4, balls_in_bins accountant" in stated.caption()
    assert Guarantee.from_dict(json.loads(json.dumps(stated.to_dict()))) == stated
    assert stated.after(5).epsilon == loss.after(5).epsilon(stated.delta) < 2.0
    assert 2.0 < stated.for_records(2) < stated.for_records(3)
    result = made().forecast(200)
    assert result.epsilon(result.ratio) == pytest.approx(2.0, rel=2e-3)


def test_noise_over_few_rounds_hides_fewer_bins():
    banded = config(noise=noise.PrefixSum(bands=2))
    training_plan = plan.make(banded, ALONE, counts=[60])
    assert training_plan.guarantee.loss.bins == BINS // 2
    assert training_plan.guarantee.exact_epsilon <= 2.0
    wide = dataclasses.replace(banded, noise=noise.PrefixSum(bands=BINS))
    single = plan.make(wide, ALONE, counts=[60]).guarantee
    assert single.loss.bins == 1
    assert single.exact_epsilon == gdp.epsilon(single.loss.unamplified, single.delta)
    with pytest.raises(ValueError, match="a strategy of few bands"):
        config(noise=noise.PrefixSum(bands=BINS + 1))
    # Few bands of C^-1 are as many of C as there are rounds.
    inverse = config(noise=noise.BandedInverse(bands=2))
    with pytest.raises(ValueError, match=r"Give bands of C \(not of C\^-1\) of at most 4"):
        plan.make(inverse, ALONE, counts=[60])


@pytest.mark.mutant
def test_understated_plans_are_refused():
    reduced = dataclasses.replace(made().noise, factor=made().factor * np.float32(0.99))
    with pytest.raises(ValueError, match="guarantee states ratios"):
        dataclasses.replace(made(), noise=reduced)
    fewer = dataclasses.replace(made().config, sampler=BallsInBins(3, 6))
    with pytest.raises(ValueError, match="guarantee.bins is 4, the config runs 3"):
        retargeted(made(), config=fewer)
    twice = dataclasses.replace(made().config, rounds=2 * T)
    with pytest.raises(ValueError, match="guarantee.rounds"):
        retargeted(made(), config=twice)
    coins = dataclasses.replace(made().config, sampler=Poisson(4.0, 6))
    with pytest.raises(ValueError, match="guarantee"):
        retargeted(made(), config=coins)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"relation": "replace_record"}, "relation 'replace_record': protect zero_out_record"),
        ({"relation": "replace_agent"}, "relation 'replace_agent'"),
        ({"noise": noise.PrefixSum()}, "noise 'prefix_sum'"),
        ({"accountant": "rdp"}, "accountant 'rdp'"),
        ({"epsilon": (1.0, 2.0, 3.0, 4.0)}, "one epsilon an agent"),
        ({"release": True}, "release=True"),
        ({"protect": Protect("zero_out_record", 0.5, attacker="node")}, "attacker 'node'"),
    ],
)
def test_what_bins_do_not_amplify_is_refused(changes, text):
    with pytest.raises(ValueError, match=f"covers no privacy amplification with {text}"):
        config(**changes)


def test_numbers_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="rounds is 13 .*give a multiple of 4"):
        config(rounds=13)
    with pytest.raises(ValueError, match="counts is None"):
        plan.make(config(), RING)
    with pytest.raises(ValueError, match="bins is 4, but agent 2 has 3 records; lower it to 3"):
        plan.make(config(), RING, counts=[24, 24, 3, 24])
    with pytest.raises(ValueError, match="leave records out"):
        plan.make(config(sampler=BallsInBins(BINS, 6, records=61)), RING, counts=COUNTS)
    for invalid in ((0, 6), (4, 0), (2**17, 6)):
        with pytest.raises(ValueError, match="bins|capacity"):
            BallsInBins(*invalid)
    with pytest.raises(ValueError, match="secret batches"):
        made().save(tmp_path / "plan.npz")


@pytest.mark.mutant
def test_run_draws_its_bins_once_from_noises_key():
    """One agent without noise, against a loop whose bins are drawn by the run's secret key."""
    task = make_problem(1)
    seed = 5
    open_ = config(design="non_private", rounds=8, noise=None)
    training_plan = plan.make(open_, ALONE, counts=task.partition.counts)
    result = run(training_plan, task, seeds=[seed])
    key = jax.random.fold_in(keys.derive(seed, "noise"), 2**32 - 1)
    batches = []
    for t in range(8):
        drawn = training_plan.sampler.draw(key, t, jnp.asarray(task.partition.counts))
        rows = np.asarray(drawn.rows)[0][~np.asarray(drawn.padding)[0]]
        batches.append(sorted(task.partition.indices[0][rows].tolist()))
    assert batches[:BINS] == batches[BINS:] and len({len(batch) for batch in batches}) > 1
    params = task.init(keys.derive(seed, "initial"))
    for batch in batches:
        total = jax.tree.map(jnp.zeros_like, params)
        for row in batch:
            gradient = jax.grad(task.loss)(params, task.x[row], task.y[row])
            norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)))
            share = min(1, 0.5 / norm)
            total = jax.tree.map(lambda s, g, share=share: s + share * g, total, gradient)
        step = 0.1 / training_plan.sampler.divisor
        params = jax.tree.map(lambda p, g, step=step: p - step * g, params, total)
    mine = [leaf[0, 0, 0] for leaf in jax.tree.leaves(result.params)]
    for leaf, other in zip(mine, jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-6)


def test_private_run_and_first_rounds_of_one():
    task = make_problem(4)
    plan_ = plan.make(config(), RING, counts=task.partition.counts)
    stopped = run(plan_, task, seeds=[0], eval_every=4, stop_at=4)
    assert stopped.guarantees[0].epsilon == plan_.guarantee.after(4).epsilon
    assert np.isfinite(stopped.metrics["test_loss"]).all()
