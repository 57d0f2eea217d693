"""Poisson-sampled batches: drawn as often as they say, never cut, accounted as they are drawn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.accounting.sampled import Pld
from dpjax.algorithms.dsgd import DSGD
from dpjax.engine import keys
from dpjax.learning.query import RecordQuery, UngatheredBatch
from dpjax.learning.samplers import Poisson
from dpjax.plans import plan as plan_
from dpjax.plans.links import PairKeys
from dpjax.plans.protect import Protect
from dpjax.topology import graphs, mixing
from tests.plans.draws import audit
from tests.support import make_config, make_problem, retargeted, run

RING = mixing.metropolis_hastings(graphs.ring(4))
EQUAL = np.full(4, 24)
UNEQUAL = np.array([24, 60, 12, 24])


def config(**changes):
    options = {"relation": "zero_out_record", "sampler": Poisson(4.0, 6), "epsilon": 2.0}
    return make_config(**(options | changes))


@functools.cache
def made(unequal=False):
    return plan_.make(config(), RING, counts=UNEQUAL if unequal else EQUAL)


def draws(sampler, counts, rounds):
    function = jax.vmap(lambda t: sampler.draw(jax.random.fold_in(jax.random.key(3), t), t, counts))
    return jax.jit(function)(jnp.arange(rounds))


def presence(sampler, counts, rounds):
    """[T, n, m] which records were drawn."""
    rows, padding = map(np.asarray, draws(sampler, jnp.asarray(counts), rounds))
    result = np.zeros((rounds, len(counts), max(counts)), int)
    for t, agent, place in zip(*np.nonzero(~padding), strict=True):
        result[t, agent, rows[t, agent, place]] += 1
    return result


def test_records_are_drawn_at_their_rate_apart_from_each_other():
    counts = np.array([24, 60, 7])
    rounds = 2000
    sampler = Poisson(4.0, 5, records=60)
    result = presence(sampler, counts, rounds)
    assert result.max() == 1
    for agent, count in enumerate(counts):
        rate = sampler.rates(counts)[agent]
        assert rate == pytest.approx(4 / count)
        own = result[:, agent, :count]
        assert not result[:, agent, count:].any()
        deviation = np.sqrt(rate * (1 - rate) / rounds)
        assert np.abs(own.mean(axis=0) - rate).max() < 4.5 * deviation
        # Sizes vary as sums of independent flips do, and rounds know nothing of each other.
        assert own.sum(axis=1).var() == pytest.approx(count * rate * (1 - rate), rel=0.15)
        again = (own[1:] * own[:-1]).mean()
        assert again == pytest.approx(rate**2, abs=5 * rate / np.sqrt(rounds * count))


def test_batch_of_all_records_and_rates_that_never_exceed_what_is_stated():
    sampler = Poisson(7, 3, records=7)
    assert sampler.rates(np.array([7])) == [1.0]
    assert presence(sampler, np.array([7]), 50).mean() == 1
    # The threshold of 32 random bits, as the draw computes it, for many numbers of records.
    counts = np.arange(8, 70_000, 13)
    rate = jnp.float32(7 * (1 - 2.0**-20)) / jnp.asarray(counts).astype(jnp.float32)
    maximum = np.asarray((rate * jnp.float32(2.0**32)).astype(jnp.uint32), np.float64) / 2.0**32
    assert (maximum <= 7 / counts).all() and (maximum > (1 - 1e-5) * 7 / counts).all()


def query(task, capacity=None):
    return RecordQuery(task.loss, None, 0.5, "flat", None, capacity=capacity)


@pytest.mark.slow
def test_batches_beyond_capacity_are_computed_in_passes():
    task = make_problem(4)
    models = jax.vmap(task.init)(jax.random.split(jax.random.key(0), 4))
    x = jnp.asarray(task.x)
    y = jnp.asarray(task.y)
    maximum = 0
    passes = {
        size: jax.jit(lambda *value, size=size: query(task, size)(*value).total)
        for size in (2, 5, 24)
    }
    at_once = jax.jit(lambda *argument: query(task)(*argument).total)
    for seed in range(3):
        totals = []
        for capacity, total in passes.items():
            sampler = Poisson(9.0, capacity, records=24)
            drawn = sampler.draw(jax.random.key(seed), 0, jnp.asarray(EQUAL))
            rows = jnp.take_along_axis(jnp.asarray(task.partition.indices), drawn.rows, axis=1)
            totals.append(total(models, UngatheredBatch(x, y, rows, drawn.padding)))
            maximum = max(maximum, int((~drawn.padding).sum(axis=1).max()))
        # The whole batch at once, by the query that knows no passes.
        complete = at_once(models, (x[rows], y[rows], drawn.padding))
        for item in totals:
            for a, b in zip(jax.tree.leaves(item), jax.tree.leaves(complete), strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
    assert maximum > 9


def test_empty_batch_is_zero():
    task = make_problem(4)
    models = jax.vmap(task.init)(jax.random.split(jax.random.key(0), 4))
    batch = UngatheredBatch(
        jnp.asarray(task.x), jnp.asarray(task.y), jnp.zeros((4, 6), int), jnp.ones((4, 6), bool)
    )
    total = query(task, 3)(models, batch).total
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(total))


@pytest.mark.parametrize("unequal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_guarantee_against_another_accountant(unequal):
    from dp_accounting import dp_event, pld
    from dp_accounting.privacy_accountant import NeighboringRelation

    plan = made(unequal)
    counts = UNEQUAL if unequal else EQUAL
    assert plan.guarantee.accountant == "pld" and plan.guarantee.mu is None
    precision = np.linalg.inv(plan.covariance())
    results = []
    for agent, count in enumerate(counts):
        ratio = 0.5 * np.sqrt(precision[agent, agent])
        accountant = pld.PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
        event = dp_event.PoissonSampledDpEvent(4 / count, dp_event.GaussianDpEvent(1 / ratio))
        results.append(accountant.compose(event, 20).get_epsilon(1e-5))
    # Never above the budget, and close to it.
    assert max(results) <= 2.0 and max(results) > 1.99
    assert plan.guarantee.epsilon == 2.0 and plan.guarantee.exact_epsilon <= 2.0
    # Without sampling, the same noise is worth far less: mu 1.5 is epsilon 7.
    loss = plan.guarantee.loss
    assert isinstance(loss, Pld) and loss.unamplified > 1.5
    assert plan.guarantee.after(5).epsilon < 1.5


@pytest.mark.mutant
def test_understated_plans_are_refused():
    plan = made()
    with pytest.raises(ValueError, match="guarantee states ratios"):
        reduced = dataclasses.replace(plan.noise, factor=plan.factor * np.float32(0.99))
        dataclasses.replace(plan, noise=reduced)
    with pytest.raises(ValueError, match="guarantee states rates"):
        retargeted(plan, counts=EQUAL - 1)
    with pytest.raises(ValueError, match="counts is None"):
        retargeted(plan, counts=None)
    extra = dataclasses.replace(plan.config, sampler=Poisson(4.1, 6))
    with pytest.raises(ValueError, match="guarantee states rates"):
        retargeted(plan, config=extra)
    twice = dataclasses.replace(plan.config, rounds=40)
    with pytest.raises(ValueError, match="guarantee.rounds"):
        retargeted(plan, config=twice)


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"relation": "replace_record"}, "relation 'replace_record'"),
        ({"relation": "replace_agent"}, "relation 'replace_agent'"),
        ({"design": "prefix_sum"}, "noise 'prefix_sum'"),
        ({"design": "spacetime"}, "noise 'spacetime'"),
        ({"accountant": "rdp"}, "accountant 'rdp'"),
        ({"epsilon": (1.0, 2.0, 3.0, 4.0)}, "one epsilon an agent"),
        ({"release": True}, "release=True"),
        ({"noise": PairKeys()}, "noise 'pair_keys'"),
        (
            {"protect": Protect("zero_out_record", 0.5, attacker="node"), "noise": PairKeys()},
            "attacker 'node'",
        ),
    ],
)
def test_what_sampling_does_not_amplify_is_refused(changes, reported):
    with pytest.raises(ValueError, match=f"covers no privacy amplification with {reported}"):
        config(**changes)


def test_counts_are_needed_and_checked(tmp_path):
    with pytest.raises(ValueError, match=r"counts is None .* counts=shards.counts"):
        plan_.make(config(), RING)
    with pytest.raises(ValueError, match="for 4 agents"):
        plan_.make(config(), RING, counts=[24, 24])
    with pytest.raises(ValueError, match="expected is 4, but agent 2 has 3"):
        plan_.make(config(), RING, counts=[24, 24, 3, 24])
    with pytest.raises(ValueError, match="batch_size is 4"):
        plan_.make(make_config(), RING, counts=[24, 24, 3, 24])
    with pytest.raises(ValueError, match="the plan is for"):
        run(made(unequal=True), make_problem(4), seeds=[0])
    with pytest.raises(ValueError, match="delta is 1e-05, but a record is in any batch"):
        plan_.make(config(sampler=Poisson(1e-5, 4), rounds=2), RING, counts=[240] * 4)
    with pytest.raises(ValueError, match="expected is 0"):
        Poisson(0, 4)
    with pytest.raises(ValueError, match="capacity is 0"):
        Poisson(3, 0)
    with pytest.raises(ValueError, match="coin flips"):
        made().save(tmp_path / "plan.npz")


class Oftener(Poisson):
    """Draws twice as often as its rates say."""

    def draw(self, key, round, counts):
        return Poisson(2 * self.expected, self.capacity, self.records).draw(key, round, counts)


class Alike(Poisson):
    """Draws one batch for ever."""

    def draw(self, key, round, counts):
        return super().draw(jax.random.key(0), round, counts)


@pytest.mark.parametrize("kind", [Oftener, Alike])
def test_sampler_that_draws_more_often_than_it_says_is_refused(kind):
    audit(Poisson(4.0, 6, 24), EQUAL, 20)
    with pytest.raises(ValueError, match="draws .* times, its rate says"):
        audit(kind(4.0, 6, 24), EQUAL, 20)


def test_runs_and_what_capacity_does_to_them():
    complete = retargeted(made(), config=config(sampler=Poisson(4.0, 24)))
    # Of a model's own sum, rounding of a pass lowers the clip norm, and passes differ.
    task = dataclasses.replace(make_problem(4), weighted=None)
    small, large = (run(case, task, seeds=[0, 1], eval_every=10) for case in (made(), complete))
    for name, value in small.metrics.items():
        np.testing.assert_allclose(value, large.metrics[name], rtol=2e-5, err_msg=name)
    assert np.isfinite(large.metrics["test_loss"]).all()
    assert large.rows()[0]["accountant"] == "pld"
    stopped = run(made(), make_problem(4), seeds=[0, 1], eval_every=10, stop_at=5)
    assert stopped.guarantees[0].epsilon == made().guarantee.after(5).epsilon


@pytest.mark.slow
@pytest.mark.optimized
def test_stopped_run_goes_on_with_same_batches(tmp_path):
    options = {"seeds": [0, 1], "eval_every": 5, "checkpoint_seconds": 0, "stop_at": 10}
    straight = run(made(), make_problem(4), **options)

    class Cut(Exception):
        pass

    def cut(progress):
        if progress.round == 10:
            raise Cut

    with pytest.raises(Cut):
        run(made(), make_problem(4), checkpoint=tmp_path / "c", callback=cut, **options)
    resumed = run(made(), make_problem(4), checkpoint=tmp_path / "c", **options)
    for a, b in zip(jax.tree.leaves(straight.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_agents_on_two_devices_give_same_numbers():
    single, spread = (run(made(), make_problem(4), seeds=[0], devices=count) for count in (1, 2))
    for metric, values in single.metrics.items():
        np.testing.assert_allclose(spread.metrics[metric], values, rtol=2e-5, atol=2e-6)


def drawn_rows(plan, task, seed, rounds):
    """The only agent's records in every round of a run."""
    key = jax.random.fold_in(keys.derive(seed, "noise"), 2**32 - 1)
    results = []
    for t in range(rounds):
        drawn = plan.sampler.draw(jax.random.fold_in(key, t), t, jnp.asarray(task.partition.counts))
        rows = np.asarray(drawn.rows)[0][~np.asarray(drawn.padding)[0]]
        results.append(task.partition.indices[0][rows])
    return results


def dp_sgd(task, params, batches, divisor):
    """Steps of 0.1 along clipped sums over a divisor, ``divisor(batch)``, in a few lines."""
    for batch in batches:
        total = jax.tree.map(jnp.zeros_like, params)
        for row in batch:
            gradient = jax.grad(task.loss)(params, task.x[row], task.y[row])
            norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)))
            share = min(1, 0.5 / norm)
            total = jax.tree.map(lambda s, g, share=share: s + share * g, total, gradient)
        step = 0.1 / divisor(batch)
        params = jax.tree.map(lambda p, g, step=step: p - step * g, params, total)
    return jax.tree.leaves(params)


ALONE = np.ones((1, 1))


@pytest.mark.parametrize(
    ("expected", "seed", "empty"), [pytest.param(4.0, 5, 0, marks=pytest.mark.slow), (1.5, 0, 2)]
)
def test_one_agent_is_dp_sgd(expected, seed, empty):
    """A run of one agent without noise, against a loop with the same flips.

    The twin, which divides by what was drawn and so tells how much it was, goes elsewhere.
    """
    task = make_problem(1)
    open_ = config(design="non_private", rounds=6, sampler=Poisson(expected, 6))
    plan = plan_.make(open_, ALONE, counts=task.partition.counts)
    result = run(plan, task, seeds=[seed])

    batches = drawn_rows(plan, task, seed, 6)
    sizes = [len(batch) for batch in batches]
    assert sizes.count(0) == empty and len(set(sizes)) > 2
    start = task.init(keys.derive(seed, "initial"))
    mine = [leaf[0, 0, 0] for leaf in jax.tree.leaves(result.params)]
    for a, b in zip(mine, dp_sgd(task, start, batches, lambda _: expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    twin = dp_sgd(task, start, batches, lambda batch: max(1, len(batch)))
    assert max(np.abs(a - b).max() for a, b in zip(mine, twin, strict=True)) > 5e-3


@pytest.mark.slow
def test_rounds_that_draw_nobody_move_by_their_noise_alone():
    task = make_problem(1)
    seed = 5
    other = dataclasses.replace(task, y=-task.y)

    def ends(value, **changes):
        plan = plan_.make(config(rounds=3, **changes), ALONE, counts=task.partition.counts)
        models = jax.tree.leaves(run(plan, value, seeds=[seed]).params)
        sizes = [len(batch) for batch in drawn_rows(plan, task, seed, 3)]
        return [np.asarray(leaf)[0, 0, 0] for leaf in models], sizes

    start = jax.tree.leaves(task.init(keys.derive(seed, "initial")))
    rare = Poisson(0.05, 6)
    often = Poisson(4.0, 6)
    still, sizes = ends(task, sampler=rare, design="non_private")
    assert sizes == [0, 0, 0]
    for a, b in zip(still, start, strict=True):
        np.testing.assert_array_equal(a, b)
    # Noise moves it, the same on other labels; where records are drawn, labels tell.
    for sampler, alike in ((rare, True), (often, False)):
        (first, sizes), (second, _) = (ends(case, sampler=sampler) for case in (task, other))
        assert any(sizes) != alike
        for a, b, begun in zip(first, second, start, strict=True):
            assert np.isfinite(a).all() and (a != begun).all()
            assert np.array_equal(a, b) == alike


def test_one_agent_states_its_own_loss():
    task = make_problem(1)
    private = plan_.make(config(rounds=6), ALONE, counts=task.partition.counts)
    assert private.guarantee.loss.agents == 1
    assert np.isfinite(run(private, task, seeds=[5]).metrics["test_loss"]).all()


@dataclasses.dataclass(frozen=True)
class Telling(DSGD):
    """Tells the key that it is given for public randomness."""

    def emit(self, ctx, public_state):
        if ctx.key is not None:
            jax.debug.callback(told.append, jax.random.key_data(ctx.key))
        return super().emit(ctx, public_state)


told: list = []


def test_public_randomness_does_not_tell_batch():
    plan = plan_.make(config(method=Telling(), rounds=20), RING, counts=EQUAL)
    told.clear()
    run(plan, make_problem(4), seeds=[0], stop_at=2)
    jax.effects_barrier()
    public = {tuple(np.asarray(key).ravel().tolist()) for key in told}
    sampler = jax.random.fold_in(keys.derive(0, "noise"), 2**32 - 1)
    assert public == {
        tuple(jax.random.key_data(jax.random.fold_in(keys.derive(0, "batches"), t)).tolist())
        for t in range(2)
    }
    secret = {tuple(jax.random.key_data(jax.random.fold_in(sampler, t)).tolist()) for t in range(2)}
    words = np.asarray(jax.random.bits(jax.random.fold_in(sampler, 0), (4, 24), jnp.uint32))
    assert not public & secret
    assert not {word for key in public for word in key} & set(words.ravel().tolist())


def test_payload_that_carries_records_into_later_rounds_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Tracking(DSGD):
        def sensitivity(self, rounds):
            return np.eye(rounds)

    with pytest.raises(ValueError, match="method Tracking"):
        config(method=Tracking())


def test_forecast_tells_epsilon_of_sampled_batches():
    result = made().forecast(200)
    # At its own ratio the epsilon is the budget's, not the much larger one without sampling.
    assert result.epsilon(result.ratio) == pytest.approx(2.0, rel=1e-3)
    assert result.floor <= result.ratio * (1 + 1e-9)
