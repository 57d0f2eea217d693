"""Samplers that bring their own accounting: what they state, whom it covers, and a user's own."""

import dataclasses
import json
import math
import sys
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.accounting import gdp
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.loss import KINDS, AmplifiedLoss, draw_ratios, draw_sensitivity
from dpjax.engine import keys
from dpjax.engine.run import run
from dpjax.plans import noise, plan
from dpjax.plans.samplers import BallsInBins, Cyclic, Full, Poisson
from dpjax.protocols import Amplification, Draw, Sampler
from dpjax.topology import graphs, mixing
from tests.support import load_script, make_config, make_problem

RING = mixing.metropolis_hastings(graphs.ring(4))
ALONE = np.ones((1, 1))
EQUAL = [24] * 4
UNEQUAL = [24, 40, 33, 60]


def sampled(counts=EQUAL, network=RING, **changes):
    options = {
        "relation": "zero_out_record", "sampler": Poisson(4.0, 6), "epsilon": 2.0, "rounds": 20,
        "clip_norm": 0.5, "delta": 1e-5,
    }  # fmt: skip
    return plan.make(make_config(**(options | changes)), network, counts=counts)


GROUPS = {
    "counts": [60],
    "network": ALONE,
    "rounds": 12,
    "sampler": Poisson(4.0, 8, separation=3),
    "noise": noise.PrefixSum(bands=3),
}

# Epsilon, the same after 5 rounds, of 2 and of 5 records; the first rate and ratio, the Gaussian-DP
# mu of the same noise without sampling, and the factor's first entry.
# Designs of solvers differ in their last digits between machines.
STATED = {
    "equal": (
        {},
        1e-7,
        (1.999573061816797, 1.1140663226703083, 4.700518324594426, 20.268711936090824),
        (0.16666666666666677, 0.5304088589632239, 2.3720606471919963, 1.0539360046386719),
    ),
    "unequal": (
        {"counts": UNEQUAL},
        1e-7,
        (1.9995961861224592, 1.3576598218373643, 4.971040132642348, 34.58207906748478),
        (0.16666666666666677, 0.530408858992603, 4.007583745502766, 1.0537898540496826),
    ),
    "independent": (
        {"noise": noise.Independent()},
        1e-12,
        (1.999573061816797, 1.1140663226703083, 4.700518324594426, 20.268711936090824),
        (0.16666666666666677, 0.5304088853868144, 2.3720606471919963, 0.9426689743995667),
    ),
    "groups": (
        GROUPS,
        1e-7,
        (1.999528078882991, 1.6030846164775907, 4.907099247957853, 27.98084157673542),
        (0.20000000000000012, 0.7160407397225177, 1.4320814794464676, 0.3491421639919281),
    ),
}


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", STATED)
def test_poisson_states_what_it_stated_before_it_had_its_own_accounting(name):
    changes, tolerance, epsilons, noise_numbers = STATED[name]
    result = sampled(**changes)
    stated = result.guarantee
    results = [
        stated.exact_epsilon,
        stated.after(5).epsilon,
        stated.for_records(2),
        stated.for_records(5),
        stated.loss.phases[0].rates[0],
        stated.loss.phases[0].ratios[0],
        stated.loss.unamplified,
        result.factor[0, 0],
    ]
    np.testing.assert_allclose(results, [*epsilons, *noise_numbers], rtol=tolerance)
    assert Guarantee.from_dict(json.loads(json.dumps(stated.to_dict()))) == stated


EVENTS = {
    "poisson": {"noise": noise.Independent()},
    "unequal": {"noise": noise.Independent(), "counts": UNEQUAL},
    "groups": GROUPS,
    "gaussian": {"noise": noise.Independent(), "sampler": Cyclic(4, 5, 12), "rounds": 20},
    "strategy": {"noise": noise.PrefixSum(), "sampler": Cyclic(4, 5, 12), "rounds": 20},
    "agents": {"noise": noise.Independent(), "sampler": Cyclic(4, 5, 12), "epsilon": (2, 3, 1, 2)},
}


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", EVENTS)
def test_another_accountant_finds_same_epsilon_from_event(name):
    from dp_accounting import pld
    from dp_accounting.privacy_accountant import NeighboringRelation

    stated = sampled(**EVENTS[name]).guarantee
    accountant = pld.PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    result = accountant.compose(stated.dp_event()).get_epsilon(stated.delta)
    assert result == pytest.approx(stated.exact_epsilon, rel=2e-3)


def test_events_that_there_are_not_are_refused(monkeypatch):
    import dp_accounting

    bins = sampled(sampler=BallsInBins(4, 6), noise=noise.Independent()).guarantee
    with pytest.raises(ValueError, match="loss is BinLoss, for which dp_accounting has no event"):
        bins.dp_event()
    assert Guarantee.none(3).dp_event() == dp_accounting.NonPrivateDpEvent()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match="pip install dp-accounting"):
        bins.dp_event()


@dataclasses.dataclass(frozen=True)
class Halves(Sampler):
    """A user's own: the first or the last half of the records, by a coin for each epoch of four."""

    size: int
    key_of: ClassVar[str] = "run"

    @property
    def divisor(self):
        return self.size / 2

    def draw(self, key, round, counts):
        epoch = jax.random.fold_in(key, round // 4)
        half = self.size // 2
        start = half * jax.random.bernoulli(epoch).astype(jnp.int32)
        return Draw(jnp.tile(start + jnp.arange(half), (len(counts), 1)), None)


def test_sampler_of_ones_own_inherits_defaults_and_knows_its_epoch():
    """It claims nothing: its loss is that of records in every round."""
    config = make_config(sampler=Halves(24), relation="replace_record", rounds=12)
    training_plan = plan.make(config, RING, counts=EQUAL)
    assert (
        training_plan.guarantee.custom == ("Halves",)
        and training_plan.guarantee.participation is None
    )
    task = make_problem(4)
    result = run(training_plan, task, seeds=[0])
    assert np.isfinite(result.metrics["test_loss"]).all()
    # One key for the run, apart from all rounds' keys: batches stay through an epoch.
    key = jax.random.fold_in(keys.derive(0, "batches"), 2**32 - 3)
    draws = [training_plan.sampler.draw(key, t, jnp.array(EQUAL)).rows[0, 0] for t in range(40)]
    starts = np.array(draws).reshape(10, 4)
    assert (starts == starts[:, :1]).all() and set(starts[:, 0]) == {0, 12}


@dataclasses.dataclass(frozen=True)
class Once(AmplifiedLoss):
    """A loss of a user's own: one draw of a record, in a round that nobody knows.

    By joint convexity a mixture costs no more than its worst part.
    """

    kind: ClassVar[str] = "once"
    accounting: ClassVar[str] = "with one draw of every record, kept secret"
    ratios: tuple[float, ...]
    rounds: int

    @property
    def draw_ratios(self):
        return self.ratios

    @property
    def unamplified(self):
        return max(self.ratios)

    def epsilon(self, delta):
        return float(gdp.epsilon(self.unamplified, delta))

    def first_rounds(self, rounds):
        return dataclasses.replace(self, rounds=rounds)

    def scaled(self, factor):
        return dataclasses.replace(self, ratios=tuple(factor * ratio for ratio in self.ratios))


class OneDraw(Amplification):
    """What stands behind it."""

    kind = Once.kind

    def bound(self, target, strategy):
        moved = draw_sensitivity(target, strategy)
        allowed = float(gdp.mu(target.budget.largest, target.budget.delta))
        return np.asarray((allowed * (1 - 1e-9) / moved) ** 2)

    def loss(self, target, noise):
        return Once(tuple(draw_ratios(target, noise).tolist()), target.rounds)


@dataclasses.dataclass(frozen=True)
class Single(Sampler):
    """A sampler of a user's own: every record in one round of all, drawn by the run's key."""

    rounds: int
    size: int
    key_of: ClassVar[str] = "run"
    counted: ClassVar[bool] = True
    capacity: int = 6

    @property
    def divisor(self):
        return self.size / self.rounds

    def amplification(self, counts=None):
        return OneDraw()

    def draw(self, key, round, counts):
        turns = jax.random.randint(key, (len(counts), self.size), 0, self.rounds)
        return Draw.of_flags(turns == round, self.capacity)


def test_sampler_of_ones_own_brings_its_accounting():
    config = make_config(
        sampler=Single(8, 24), relation="zero_out_record", rounds=8, noise=noise.Independent()
    )
    training_plan = plan.make(config, RING, counts=EQUAL)
    stated = training_plan.guarantee
    assert stated.accountant == "once" and stated.custom == ("Single", "Once")
    # The noise is that of one round, and not that of eight.
    deviation = float(training_plan.factor.max())
    assert stated.exact_epsilon == pytest.approx(stated.epsilon, rel=1e-5)
    assert math.isclose(stated.loss.unamplified, config.protect.clip_norm / deviation, rel_tol=1e-5)
    assert "with one draw of every record, kept secret" in stated.statement()
    assert Guarantee.from_dict(stated.to_dict()) == stated
    result = run(training_plan, make_problem(4), seeds=[0])
    assert np.isfinite(result.metrics["test_loss"]).all()
    for changes in ({"relation": "replace_record"}, {"release": True}):
        with pytest.raises(ValueError, match="covers no privacy amplification with"):
            make_config(**({"sampler": Single(8, 24), "relation": "zero_out_record"} | changes))
    with pytest.raises(ValueError, match="guarantee states ratios"):
        reduced = dataclasses.replace(
            training_plan.noise, factor=training_plan.factor * np.float32(0.99)
        )
        dataclasses.replace(training_plan, noise=reduced)
    # What it need not define: two runs are refused, and a forecast scales its ratios.
    with pytest.raises(ValueError, match="loss is Once, then Once; state the two runs apart"):
        stated.followed_by(stated, planned=True)
    assert training_plan.forecast(50).epsilon(0.1) > stated.exact_epsilon


@dataclasses.dataclass(frozen=True)
class Partial(AmplifiedLoss):
    """A loss without what records and plans ask for."""

    kind: ClassVar[str] = "partial"
    rounds: int


def test_losses_say_what_they_lack_and_take_no_name_of_another():
    missing = "abstract class Partial.*draw_ratios.*epsilon.*first_rounds.*scaled.*unamplified"
    with pytest.raises(TypeError, match=missing):
        Partial(3)
    with pytest.raises(TypeError, match="abstract class Amplification.*bound.*kind.*loss"):
        Amplification()
    for kind in ("gdp", "pld", "once"):
        with pytest.raises(ValueError, match=f"kind is '{kind}' for Copied, the kind of"):
            type("Copied", (AmplifiedLoss,), {"kind": kind})
    # The same class again, as where a cell of a notebook runs twice.
    again = {"kind": "once", "__module__": Once.__module__, "__qualname__": Once.__qualname__}
    assert KINDS["once"] is Once
    newer = type("Once", (Once,), again)
    assert KINDS["once"] is newer
    KINDS["once"] = Once


def test_record_of_loss_that_is_not_imported_says_so():
    record = dict(sampled().guarantee.to_dict())
    record["other_loss"] = dict(record["other_loss"], kind="elsewhere")
    with pytest.raises(ValueError, match="loss of kind 'elsewhere'.*import the module that"):
        Guarantee.from_dict(record)


@pytest.mark.mutant
@pytest.mark.parametrize(("ratio", "rounds"), [(0.3, 10), (1.0, 4), (0.05, 1)])
def test_example_of_sampler_states_what_it_costs(ratio, rounds):
    """Its epsilon against both directions of a mixture of two Gaussians, integrated."""
    module = load_script("own_sampler", "examples")
    loss = module.CoinLoss((ratio, ratio / 2), rounds)
    mu = ratio * math.sqrt(rounds)
    places = np.linspace(-12, 14, 200_001)
    absent = np.exp(-(places**2) / 2) / math.sqrt(2 * math.pi)
    present = (1 - module.SHARE) * absent + module.SHARE * absent * np.exp(mu * places - mu**2 / 2)

    def delta(epsilon):
        sides = ((present, absent), (absent, present))
        excess = [np.maximum(p - math.exp(epsilon) * q, 0).sum() for p, q in sides]
        return max(excess) * (places[1] - places[0])

    for share in (1e-5, 1e-3):
        stated = loss.epsilon(share)
        assert delta(stated) <= share * (1 + 1e-4)
        # The bound is tight, and the broken copy counts the coin twice.
        base = float(gdp.epsilon(mu, share / module.SHARE))
        for reduced in (0.99 * stated, math.log1p(module.SHARE**2 * math.expm1(base))):
            assert stated == 0 or delta(reduced) > share
    assert loss.epsilon(0.3) == 0 and loss.first_rounds(0).epsilon(1e-5) < 1e-12


def test_example_of_sampler_keeps_its_budget():
    module = load_script("own_sampler", "examples")
    config = make_config(
        sampler=module.OneCoin(), relation="zero_out_record", rounds=8, epsilon=2.0,
        noise=noise.Independent(),
    )  # fmt: skip
    training_plan = plan.make(config, RING, counts=UNEQUAL)
    assert training_plan.guarantee.custom == ("OneCoin", "CoinLoss")
    assert 0.9999 < training_plan.guarantee.exact_epsilon / 2.0 <= 1
    # Less noise than for records that all take part.
    complete = plan.make(dataclasses.replace(config, sampler=Full()), RING, counts=UNEQUAL)
    assert training_plan.factor.max() < 0.7 * complete.factor.max()
    key = jax.random.key(1, impl="threefry2x32")
    padding = training_plan.sampler.draw(key, 3, jnp.array(UNEQUAL)).padding
    assert abs((~padding).sum() / sum(UNEQUAL) - module.SHARE) < 0.15
