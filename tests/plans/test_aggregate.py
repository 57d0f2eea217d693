"""Noise in shares of a secure sum: its loss derived again, what joins it, and broken twins."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.accounting import gdp
from dpjax.accounting.discrete import Cohort
from dpjax.accounting.guarantee import Guarantee
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.exchange import Sum, Trusted
from dpjax.algorithms.federated import Federated
from dpjax.contrib.trace import trace
from dpjax.data import partition
from dpjax.engine.run import run
from dpjax.learning.samplers import Clients, Cyclic, Poisson, Random
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.plans import noise, plan
from dpjax.plans.noise import SumShares
from dpjax.plans.optimizers import Sgd
from dpjax.plans.protect import Budget, Protect
from dpjax.plans.sums import Discrete
from dpjax.protocols import Aggregator
from dpjax.topology import graphs, mixing

N = 6
M = 3
EACH = 2
EPOCHS = 2
CLIP = 0.5
T = M * EACH * EPOCHS
COMPLETE = mixing.metropolis_hastings(graphs.complete(N))
DELTA = 1e-5
ZCDP = Budget(2.0, DELTA, accountant="zcdp")


def task():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N * M * EACH, 4))
    y = np.where(x @ rng.normal(size=4) > 0, 1, -1)
    shards = partition.iid(len(x), N, 0)
    return supervised(Linear(), "logistic", (x, y), (x[:20], y[:20]), shards)


def config(relation="zero_out_client", part=None, aggregate=None, **changes):
    part = SumShares() if part is None else part
    aggregate = Trusted(part.dropouts) if aggregate is None else aggregate
    options = dict(
        protect=Protect(relation, clip_norm=CLIP, attacker="aggregator"),
        sampler=Clients(M, EACH, EPOCHS), optimizer=Sgd(0.1), rounds=T, noise=part,
        budget=Budget(2.0, DELTA), method=Federated(aggregate),
    )  # fmt: skip
    return plan.Config(**(options | changes))


@pytest.mark.parametrize(
    ("relation", "moved", "times", "dropouts", "colluders"),
    [
        ("zero_out_record", CLIP, EPOCHS, 0, 0),
        ("replace_record", 2 * CLIP, EPOCHS, 2, 0),
        ("zero_out_client", CLIP, EPOCHS * EACH, 0, 1),
        ("replace_client", 2 * CLIP, EPOCHS * EACH, 2, 1),
    ],
)
def test_loss_is_that_of_sum_with_fewest_shares(relation, moved, times, dropouts, colluders):
    """Sums of k rounds as one vector: a mean shift over its covariance, inverted densely."""
    training_plan = plan.make(config(relation, SumShares(dropouts, colluders)), COMPLETE)
    deviation = float(training_plan.noise.scale)
    # Every share of who is there and does not collude, over all rounds.
    shares = np.kron(np.eye(times), np.full((1, N - dropouts - colluders), deviation))
    shift = np.full(times, moved)
    mu = math.sqrt(shift @ np.linalg.inv(shares @ shares.T) @ shift)
    assert (
        training_plan.guarantee.mu == pytest.approx(mu, rel=1e-12)
        and training_plan.guarantee.mu >= mu
    )
    assert gdp.epsilon(mu, DELTA) == pytest.approx(2.0, rel=1e-5)
    assert gdp.epsilon(training_plan.guarantee.mu, DELTA) <= 2.0
    assert training_plan.guarantee.unit == relation.rpartition("_")[2]
    assert f"per {training_plan.guarantee.unit}" in training_plan.guarantee.statement()
    assert (training_plan.guarantee.dropouts, training_plan.guarantee.colluders) == (
        dropouts,
        colluders,
    )
    text = f"at most {dropouts} are missing from a sum that is opened and at most {colluders} show"
    assert text in training_plan.guarantee.statement()
    assert (
        f"every {training_plan.guarantee.unit} takes part in at most {times}"
        in training_plan.guarantee.statement()
    )
    assert Guarantee.from_dict(training_plan.guarantee.to_dict()) == training_plan.guarantee
    assert "sum of the agents' messages" in training_plan.guarantee.statement()


@pytest.mark.mutant
def test_noise_of_sum_is_what_guarantee_needs(monkeypatch):
    """Over many seeds the sums' spread, with as many missing as there may be."""
    missing = (0, 4)

    def spread(part):
        training_plan = plan.make(config(part=part, aggregate=Trusted(2, missing)), COMPLETE)
        observed = trace(
            training_plan, task(), seeds=range(400), read=lambda passed: passed.message, rounds=2
        )
        first = np.concatenate([np.asarray(leaf)[:, 0].reshape(400, -1) for leaf in
                                jax.tree.leaves(observed)], axis=1)  # fmt: skip
        # Without noise every seed sends the same in the first round, but for its initial model.
        return training_plan.guarantee.mu, float(np.mean(first.std(axis=0)))

    mu, result = spread(SumShares(dropouts=2))
    needed = CLIP * math.sqrt(EPOCHS * EACH) / mu
    assert result == pytest.approx(needed, rel=0.05)
    # The broken twin: the shares of who is missing are counted.
    monkeypatch.setattr(SumShares, "cohort", lambda part, agents: Cohort(agents))
    _, twin = spread(SumShares(dropouts=2))
    assert twin < 0.9 * needed


def test_clients_take_turns_and_records_come_once_epoch():
    sampler = Clients(M, EACH, EPOCHS)
    counts = np.full(N, M * EACH)
    key = jax.random.key(0)
    drawn = [sampler.draw(key, t, counts) for t in range(T)]
    assert not any(np.asarray(draw.padding).any() for draw in drawn)
    rows = np.stack([np.asarray(draw.rows)[:, 0] for draw in drawn])
    for record in range(M * EACH):
        (rounds,) = np.nonzero(rows[:, 2] == record)
        assert len(rounds) == sampler.participation[0] == EPOCHS
        assert (np.diff(rounds) == sampler.participation[1]).all()
    for client in range(M):
        (rounds,) = np.nonzero(rows[:, 2] % M == client)
        assert len(rounds) == sampler.turns[0] == EPOCHS * EACH
        assert (np.diff(rounds) == sampler.turns[1]).all()


def test_places_share_model_and_without_noise_it_is_plain_descent():
    training_plan = plan.make(config(noise=None, budget=None, method=Federated()), COMPLETE)
    final_task = task()
    result = run(training_plan, final_task, seeds=[0])
    leaves = [np.asarray(leaf)[0, 0].reshape(N, -1) for leaf in jax.tree.leaves(result.params)]
    params = np.concatenate(leaves, axis=1)  # The bias first.
    assert (params == params[:1]).all()
    x = np.asarray(final_task.x)
    y = np.asarray(final_task.y)
    rows = np.asarray(partition.iid(len(x), N, 0).indices)
    model = np.zeros(x.shape[1] + 1)
    for t in range(T):
        record = rows[:, t % (M * EACH)]
        features = np.column_stack([x[record], np.ones(N)])
        slope = -y[record] / (1 + np.exp(y[record] * (features @ model)))
        each = slope[:, None] * features
        each *= np.minimum(1, CLIP / np.linalg.norm(each, axis=1))[:, None]
        model -= 0.1 * each.mean(axis=0)
    np.testing.assert_allclose(params[0], np.roll(model, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"), [("dropouts", 1), ("colluders", 1), ("sum_only", False)]
)
def test_nothing_else_is_counted_on_than_noise_is_for(field, value):
    """A guarantee that lets more be missing, collude, or read messages, is of other noise."""
    training_plan = plan.make(config(protect=Protect("zero_out_client", CLIP)), COMPLETE)
    stated = training_plan.guarantee.replace(**{field: value})
    with pytest.raises(ValueError, match=f"guarantee.{field} is {value}"):
        dataclasses.replace(training_plan, guarantee=stated)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aggregate": Sum()}, "shows single messages"),
        ({"aggregate": Trusted(2)}, "give dropouts=2"),
        ({"part": SumShares(3, 3)}, "may drop out or collude"),
        ({"method": DSGD()}, "which noise SumShares does not join"),
        ({"sampler": Random(1)}, "knows no clients"),
        ({"sampler": Cyclic(EPOCHS, M * EACH, 1)}, "knows no clients"),
        ({"rounds": T + 1}, "give rounds=12"),
        ({"release": True}, "release is True"),
        ({"protect": Protect("zero_out_client", CLIP, attacker="node")}, "attacker 'node'"),
        ({"protect": Protect("replace_agent", CLIP, attacker="aggregator")}, "replace_agent"),
        ({"noise": noise.Independent()}, "attacker 'aggregator'"),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        plan.make(config(**change), COMPLETE)


class Half(SumShares):
    """A user's own, which states half of its loss."""

    def unit(self, target):
        return 0.5 * super().unit(target)


@pytest.mark.mutant
def test_shares_of_ones_own_state_at_least_loss_of_their_sum():
    for colluders in (0, 1):
        part = type("Same", (SumShares,), {})(0, colluders)
        assert plan.make(config(part=part), COMPLETE).guarantee.custom == ("Same",)
    with pytest.raises(ValueError, match=r"Half, which states mu .* at least s sqrt\(k / 1' F F"):
        plan.make(config(part=Half()), COMPLETE)


class First(Trusted):
    """Opens the first message in place of the sum."""

    def _total(self, messages, present, round):
        return jax.tree.map(lambda leaf: leaf[0], messages)


@dataclasses.dataclass(frozen=True)
class Own(Aggregator):
    """A user's own aggregate."""

    sum_only: ClassVar[bool] = True

    def min_survivors(self, agents):
        return agents - 1

    def __call__(self, messages):
        (leaf,) = jax.tree.leaves(messages)
        total = jax.tree.map(lambda value: jnp.sum(value, axis=0), messages)
        return total, jnp.float32(len(leaf))

    def observed(self, messages, total):
        return total


def test_aggregate_of_ones_own_joins_and_is_named():
    for part, extra in ((SumShares(1), {}), (Discrete(5, 1), {"budget": ZCDP})):
        training_plan = plan.make(config(part=part, aggregate=Own(), **extra), COMPLETE)
        assert training_plan.guarantee.custom == ("Own",)
        assert "relies on your own `Own`" in training_plan.guarantee.statement()
    assert plan.make(config(aggregate=First()), COMPLETE).guarantee.custom == ("First",)
    with pytest.raises(ValueError, match="sums of 0 of 6 agents .* give an aggregate that aborts"):
        plan.make(config(aggregate=Trusted(7)), COMPLETE)


def test_single_messages_are_hidden_by_noise_of_their_own():
    """An outsider's guarantee of a client: as many times the noise as there are shares."""
    outsider = Protect("zero_out_client", CLIP)
    argument = config(noise=noise.Independent(), method=Federated(), protect=outsider)
    local = plan.make(argument, COMPLETE)
    shared = plan.make(config(), COMPLETE)
    assert local.guarantee.attacker == "outsider" and not local.guarantee.sum_only
    assert local.guarantee.participation == (4, 3)
    ratio = float(np.diag(local.factor)[0]) / float(shared.noise.scale)
    assert ratio == pytest.approx(math.sqrt(N), rel=1e-5)


def test_outsider_on_masked_links_loses_what_sums_tell():
    """The same noise and loss as to the aggregator; in the clear a share hides far too little."""
    outsider = Protect("zero_out_client", CLIP)
    outside, inside = (plan.make(config(**case), COMPLETE) for case in ({"protect": outsider}, {}))
    assert outside.noise.scale == inside.noise.scale
    assert outside.guarantee.mu == inside.guarantee.mu
    assert outside.guarantee.attacker == "outsider"
    # Said wherever the guarantee is: it is of sums, though nobody is missing and none colludes.
    text = outside.guarantee.statement()
    assert "single messages under the masks of a secure sum alone" in text
    assert "at most 0 are missing" in text and "every message" not in text
    assert "outsider of a secure sum, T" in outside.guarantee.caption()
    assert Guarantee.from_dict(outside.guarantee.to_dict()).sum_only
    # What goes over the links in a run is the sum alone: no axis of agents.
    observed = trace(outside, task(), seeds=[0], read=lambda passed: passed.message, rounds=1)
    assert sum(np.asarray(leaf)[0, 0].size for leaf in jax.tree.leaves(observed)) == 5
    with pytest.raises(ValueError, match="shows single messages"):
        plan.make(config(protect=outsider, aggregate=Sum()), COMPLETE)
    # The broken twin that this refuses: one share between an outsider and a message.
    bare = CLIP * math.sqrt(EPOCHS * EACH) / float(outside.noise.scale)
    assert (
        bare == pytest.approx(math.sqrt(N) * outside.guarantee.mu) and gdp.epsilon(bare, DELTA) > 5
    )
    with pytest.raises(ValueError, match="with noise 'aggregate'"):
        poisson = {"sampler": Poisson(1, 4), "protect": Protect("zero_out_record", CLIP)}
        plan.make(config(**poisson), COMPLETE, counts=np.full(N, M * EACH))
