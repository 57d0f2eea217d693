"""Full batches: all records in every round, divided by a public number, whatever the counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import _numerics
from dpjax.accounting import sampled
from dpjax.data import partition
from dpjax.engine import keys
from dpjax.engine.run import run
from dpjax.engine.step import Statics
from dpjax.learning import samplers
from dpjax.learning.samplers import Full, Poisson, Random
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.plans import plan
from dpjax.protocols import Draw
from dpjax.topology import graphs, mixing
from tests.plans import draws
from tests.support import make_config, make_problem, retargeted

N = 4
RING = mixing.metropolis_hastings(graphs.ring(N))
COUNTS = np.array([5, 9, 2, 8])


def task():
    """Records split unequally."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(COUNTS.sum(), 3)).astype(np.float32)
    y = np.sign(x @ rng.normal(size=3)).astype(np.float32)
    places = np.split(np.arange(COUNTS.sum()), np.cumsum(COUNTS)[:-1])
    indices = np.zeros((N, COUNTS.max()), np.int32)
    for agent, place in enumerate(places):
        indices[agent, : len(place)] = place
    shards = partition.Partition(indices, COUNTS)
    return supervised(Linear(), "logistic", (x, y), (x, y), shards)


def made(relation="zero_out_record", **changes):
    config = make_config(sampler=Full(), relation=relation, rounds=3, **changes)
    return plan.make(config, RING, counts=COUNTS)


def test_every_record_is_in_every_round_and_padding_is_none():
    sampler = Full().with_max_records(9)
    rows, padding = sampler.draw(jax.random.key(0), 2, jnp.asarray(COUNTS))
    for agent, count in enumerate(COUNTS):
        assert sorted(np.asarray(rows[agent])[~np.asarray(padding[agent])]) == [*range(count)]
    assert sampler.divisor == 9 and sampler.participation is None
    np.testing.assert_allclose(sampler.fill_share(COUNTS, 3), COUNTS / 9)
    assert sampler.pattern(7) == (7, 1)


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["zero_out_record", "replace_agent"])
def test_run_is_full_gradient_descent(relation):
    """Without noise or clip: sums over the largest count, or the agents' own means."""
    single = made(relation, clip_norm=1e6, noise=None, budget=None, step_size=0.3)
    argument = task()
    result = run(single, argument, seeds=[3])
    models = jax.tree.map(
        lambda leaf: np.stack([leaf] * N), argument.init(keys.derive(3, "initial"))
    )

    @jax.jit
    @jax.grad
    def gradient(params, x, y):
        return jax.vmap(argument.loss, (None, 0, 0))(params, x, y).sum()

    for _ in range(3):
        steps = []
        for agent in range(N):
            own = argument.partition.indices[agent, : COUNTS[agent]]
            model = jax.tree.map(lambda leaf: leaf[agent], models)  # noqa: B023
            over = COUNTS.max() if relation == "zero_out_record" else COUNTS[agent]
            outcome = gradient(model, argument.x[own], argument.y[own])
            steps.append(jax.tree.map(lambda g: g / over, outcome))  # noqa: B023
        step = jax.tree.map(lambda *leaves: np.stack(leaves), *steps)
        models = jax.tree.map(lambda p, g: np.tensordot(RING, p - 0.3 * g, 1), models, step)
    for a, b in zip(jax.tree.leaves(models), jax.tree.leaves(result.params), strict=True):
        np.testing.assert_allclose(b[0, 0], a, rtol=2e-5, atol=2e-6)


def test_guarantee_is_that_of_records_that_may_come_in_every_round():
    complete = made()
    random = plan.make(make_config(relation="zero_out_record", rounds=3, batch_size=2), RING)
    assert complete.guarantee == random.guarantee
    np.testing.assert_array_equal(complete.factor, random.factor)
    assert complete.sampler == Full(9) and complete.target.divisor == 9
    # The forecast knows how many places of the batch hold records.
    entire = complete.forecast(5, counts=np.full(N, 9))
    assert complete.forecast(5).ratio == pytest.approx(entire.ratio / np.mean(COUNTS / 9))
    assert complete.forecast(5) == complete.forecast(5, counts=COUNTS)


def test_record_moves_its_agents_sum_by_no_more_than_clip():
    single = made()
    argument = task()
    statics = Statics.of((single,), (argument,))
    assert statics.divisor == 9
    rows, padding = statics.sampler.draw(jax.random.key(0), 0, jnp.asarray(COUNTS))
    rows = np.take_along_axis(argument.partition.indices, np.asarray(rows), 1)
    models = jax.vmap(argument.init)(jax.random.split(jax.random.key(0), N))
    x = np.asarray(argument.x)
    y = np.asarray(argument.y)
    changed = x.copy()
    changed[rows[1, 4]] *= -40
    query = jax.jit(statics.query)
    totals = [query(models, (each[rows], y[rows], padding)).total for each in (x, changed)]
    moved = jax.tree.map(lambda a, b: np.asarray(a - b).reshape(N, -1), *totals)
    norms = np.sqrt(sum((leaf**2).sum(1) for leaf in jax.tree.leaves(moved)))
    assert 0 < norms[1] <= 2 * 0.5 * (1 + 1e-6) and np.delete(norms, 1).max() == 0


def test_counts_are_needed_and_are_those_of_problem():
    config = make_config(sampler=Full(), relation="zero_out_record")
    with pytest.raises(ValueError, match=r"counts is None for sampler Full.*counts=shards"):
        plan.make(config, RING)
    with pytest.raises(ValueError, match="counts is None"):
        retargeted(made(), counts=None)
    with pytest.raises(ValueError, match=r"the problem has \[24, 24, 24, 24\]"):
        run(made(), make_problem(N), seeds=[0])
    with pytest.raises(ValueError, match="records is None"):
        Full().draw(jax.random.key(0), 0, jnp.asarray(COUNTS))
    with pytest.raises(ValueError, match="records is 8, but the most records of an agent are 9"):
        plan.make(make_config(sampler=Full(8), relation="zero_out_record"), RING, counts=COUNTS)
    with pytest.raises(ValueError, match="records is 0"):
        Full(0)


class Doubled(Full):
    """The broken twin: the first record stands in for padding."""

    def draw(self, key, round, counts):
        """No place is padding."""
        rows, padding = super().draw(key, round, counts)
        return Draw(rows, jnp.zeros_like(padding))


@pytest.mark.mutant
def test_full_sampler_that_repeats_record_is_found():
    with pytest.raises(ValueError, match="draws a record of agent 0 twice"):
        draws.audit(dataclasses.dataclass(frozen=True)(Doubled)(9), COUNTS, 3)


@dataclasses.dataclass(frozen=True)
class OwnFlips(Random):
    """A user's own sampler that claims an amplification, under a name of its own."""

    needs_counts = True

    def amplification(self, counts=None):
        return sampled.CoinFlips()


def test_sampler_of_ones_own_that_claims_rates_keeps_their_rules():
    with pytest.raises(ValueError, match="covers no privacy amplification with"):
        make_config(sampler=OwnFlips(4), relation="replace_record")


@dataclasses.dataclass(frozen=True)
class Quiet(Random):
    """The broken twin: rates without a claim, so that no rule would be asked."""

    needs_counts = True

    def rates(self, counts):
        """Next to nothing."""
        return np.full(len(counts), 1e-3)


@pytest.mark.mutant
def test_rates_without_claim_amplify_nothing():
    config = make_config(sampler=Quiet(2), relation="replace_record", rounds=3)
    training_plan = plan.make(config, RING, counts=COUNTS)
    plain = make_config(sampler=Random(2), relation="replace_record", rounds=3)
    plain = plan.make(plain, RING).guarantee
    assert training_plan.guarantee == plain.replace(custom=("Quiet",))


@pytest.mark.parametrize("sampler", [Full(records=100), Poisson(2.0, 8, records=100)])
def test_number_of_records_that_is_not_counts_is_refused(sampler):
    """It was replaced without a word, and sums divided by another number than was asked for."""
    config = make_config(sampler=sampler, relation="zero_out_record", rounds=3)
    text = "records is 100, but the most records of an agent are 9; leave records out"
    for each in (config, config.using(None)):
        with pytest.raises(ValueError, match=text):
            plan.make(each, RING, counts=COUNTS)
    same = dataclasses.replace(sampler, records=9)
    made_so = plan.make(dataclasses.replace(config, sampler=same), RING, counts=COUNTS)
    assert made_so.sampler.records == 9


class Replaced(samplers.Random):
    """Draws with replacement: a record may come twice in a round."""

    def draw(self, key, round, counts):
        shape = (len(counts), self.batch_size)
        return Draw(jax.random.randint(key, shape, 0, counts[:, None]), None)


class Late(samplers.Random):
    """Draws its first record twice, long after the first rounds."""

    def draw(self, key, round, counts):
        drawn = super().draw(key, round, counts)
        twice = drawn.rows.at[:, 1].set(drawn.rows[:, 0])
        return drawn._replace(rows=jnp.where(round == 150, twice, drawn.rows))


class Plain(samplers.Random):
    """A user's own that draws as it should."""


@pytest.mark.parametrize(("kind", "batch_size"), [(Replaced, 2), (Late, 5)])
def test_own_samplers_that_repeat_record_are_refused(kind, batch_size):
    counts = np.full(3, 10_000)
    draws.audit(Plain(batch_size), counts, 200)
    with pytest.raises(ValueError, match="draws one twice, or one that is not there, in round"):
        draws.audit(kind(batch_size), counts, 200)


class Early(samplers.Clients):
    """Draws another client's record in one late round, as one of its own pattern."""

    def draw(self, key, round, counts):
        drawn = super().draw(key, round, counts)
        other = {8: 9, 9: 8}  # Clients 2 and 0 of three, in each other's rounds.
        rows = drawn.rows
        for name, put in other.items():
            rows = jnp.where(round == name, put, rows)
        return drawn._replace(rows=rows)

    @property
    def participation(self):
        return None


@pytest.mark.parametrize("counts", [[12, 12], [12, 7]])
def test_clients_of_ones_own_sampler_come_in_their_turns(counts):
    dealt = samplers.Clients(clients=3, examples=4, epochs=2)
    counts = np.asarray(counts)
    draws.audit(dealt, counts, 24, turns=dealt.turns)
    with pytest.raises(ValueError, match="records of client 0 of agent 0 in rounds .* 3 apart"):
        draws.audit(Early(3, 4, 2), counts, 24, turns=dealt.turns)
    with pytest.raises(ValueError, match="its turns say 2 times"):
        draws.audit(dealt, counts, 24, turns=(2, 3))


def test_clients_of_more_records_than_they_are_said_to_have_are_refused():
    dealt = samplers.Clients(clients=10, examples=4, epochs=1, batch=2)
    dealt.check(np.array([40, 17]))
    with pytest.raises(ValueError, match="North has 41 records in cycles of 20 batches"):
        dealt.check(np.array([3, 41]), ["South", "North"])


@pytest.mark.parametrize("sampler", [samplers.Full(records=4), samplers.Poisson(2, 4, records=4)])
def test_draws_promote_no_ranks(sampler):
    with jax.numpy_rank_promotion("raise"):
        sampler.draw(jax.random.key(0), jnp.int32(0), jnp.array([3, 4]))


@pytest.mark.mutant
@pytest.mark.parametrize(
    "sampler",
    [samplers.Poisson(1000, 2000, records=2000), samplers.BallsInBins(2, 2000, records=2000)],
    ids=["coins", "bins"],
)
@pytest.mark.parametrize("is_broken", [False, True], ids=["", "broken"])
def test_agents_draw_apart_from_each_other(sampler, is_broken, monkeypatch) -> None:
    """Whoever knows the batch of one agent learns nothing of another's."""
    if is_broken:
        bits = _numerics.threefry_bits

        def shared(key, shape):
            return jnp.broadcast_to(bits(key, (1, shape[1])), shape)

        monkeypatch.setattr(_numerics, "threefry_bits", shared)
    rows, padding = sampler.draw(jax.random.key(0), 0, jnp.array([2000, 2000]))
    presence = np.zeros((2, 2000))
    for agent in range(2):
        presence[agent, np.asarray(rows[agent])[~np.asarray(padding[agent])]] = 1
    correlation = np.corrcoef(presence)[0, 1]
    # Of independent ones its deviation is 1 / sqrt(2000).
    assert (abs(correlation) > 0.9) == is_broken
    assert is_broken or abs(correlation) < 4.5 / np.sqrt(2000)
