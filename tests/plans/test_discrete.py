"""Whole numbers with noise in shares of a secure sum: their loss derived again, broken twins."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from dpjax.accounting import losses
from dpjax.accounting.discrete import Cohort
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.exchange import Server, Sum, Trusted
from dpjax.contrib.masks import Masked
from dpjax.contrib.trace import empirical_sensitivity, trace
from dpjax.data import partition
from dpjax.engine.run import run
from dpjax.learning.samplers import Cyclic, Full, Poisson, Random
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.plans import plan
from dpjax.plans.noise import SumShares
from dpjax.plans.optimizers import Sgd
from dpjax.plans.protect import Budget, Protect
from dpjax.plans.sums import CalibratedCode, Discrete
from dpjax.protocols import Draw, Emission, Method, Round, Sampler
from dpjax.transforms import noise
from tests.plans.test_aggregate import (
    CLIP,
    COMPLETE,
    DELTA,
    EACH,
    EPOCHS,
    ZCDP,
    M,
    N,
    T,
    config,
    task,
)  # fmt: skip
from tests.support import composed, cut_and_resumed

SIZE = 5


def made(part, relation="zero_out_client", **changes):
    counts = changes.pop("counts", None)
    return plan.make(config(relation, part, **{"budget": ZCDP} | changes), COMPLETE, counts=counts)


def epsilon_of(rho, delta):
    """The best order of zCDP's conversion, over a fine list of them."""
    alpha = 1 + np.geomspace(1e-2, 1e4, 200_000)
    terms = rho * alpha + np.log1p(-1 / alpha) - (np.log(delta) + np.log(alpha)) / (alpha - 1)
    return terms.min()


def test_code_of_ones_own_that_spends_unevenly_says_so(monkeypatch):
    assert made(Discrete(SIZE)).guarantee.loss.even
    monkeypatch.setattr(CalibratedCode, "spends_evenly", lambda *_: False)
    stated = made(Discrete(SIZE)).guarantee
    assert stated.after(1).loss.rho == stated.loss.rho


@pytest.mark.parametrize(("dropouts", "colluders"), [(0, 0), (2, 1)])
@pytest.mark.parametrize(
    ("relation", "copies", "times"),
    [
        ("zero_out_record", 1, EPOCHS),
        ("replace_record", 2, EPOCHS),
        ("zero_out_client", 1, EPOCHS * EACH),
        ("replace_client", 2, EPOCHS * EACH),
    ],
)
def test_loss_is_that_of_sum_with_fewest_shares(relation, copies, times, dropouts, colluders):
    """Sums of k rounds as one vector: a shift over its covariance, inverted densely."""
    single = made(Discrete(SIZE, dropouts, colluders), relation)
    code = single.noise.code
    guarantee = single.guarantee
    deviation = math.sqrt(code.variance)
    shares = np.kron(np.eye(times), np.full((1, N - dropouts - colluders), deviation))
    shift = np.full(times, copies * math.sqrt(code.limit))
    rho = shift @ np.linalg.inv(shares @ shares.T) @ shift / 2
    assert isinstance(guarantee.loss, losses.Concentrated)
    # What sums of discrete Gaussians add, tau, is below 1e-15 from a variance of four on.
    assert guarantee.loss.rho == pytest.approx(rho, rel=1e-9) and guarantee.loss.rho >= rho
    assert epsilon_of(rho, DELTA) == pytest.approx(2.0, rel=1e-5)
    assert guarantee.loss.epsilon(DELTA) <= guarantee.epsilon == 2.0
    assert (guarantee.mu, guarantee.accountant) == (None, "zcdp")
    assert guarantee.unit == relation.rpartition("_")[2]
    assert "concentrated DP" in guarantee.statement()
    assert "sum of the agents' messages" in guarantee.statement()
    assert CLIP < code.sensitivity <= 1.01 * CLIP and code.bits <= 24


@pytest.mark.mutant
@pytest.mark.parametrize("twin", [None, "failure", "copies", "records"])
@pytest.mark.parametrize("relation", ["zero_out_record", "replace_record"])
def test_loss_of_records_is_derived_again(relation, twin, monkeypatch):
    """Random batches of eight: a shift by the formula, and epsilon at what is left of delta.

    The twins forget what roundings take of delta, that a replaced record moves twice as far, or
    how long a sum of eight is.
    """
    batch = 1 if twin == "records" else 8
    if twin == "failure":
        monkeypatch.setattr("dpjax.plans.sums._SHARE", 1e-60)
    if twin == "copies":
        monkeypatch.setattr("dpjax.plans.sums._relation", lambda target: "zero_out")
    value = made(Discrete(SIZE, 1, 1), relation, sampler=Random(batch))
    code = value.noise.code
    stated = value.guarantee
    beta = 1e-3 * DELTA / T
    n = CLIP / code.grid * (2 if relation == "replace_record" else 1)
    deviation = math.sqrt(2 * math.log(1 / beta))
    square = n**2 + code.padded / 4 + deviation * (n + math.sqrt(code.padded) / 2)
    # Two members of the sum are not counted: one is missing, one colludes.
    rho = T * min(square, (n + math.sqrt(code.padded)) ** 2) / (2 * (N - 2) * code.variance)
    exact = epsilon_of(rho * (1 - 1e-3), 0.999 * DELTA)
    bounds = stated.loss.epsilon(DELTA), stated.epsilon
    fine = exact <= bounds[0] <= bounds[1] == 2.0 and code.records == 8
    fine = fine and stated.loss.failure == pytest.approx(1e-3 * DELTA)
    harmless = twin is None or (twin == "copies" and relation == "zero_out_record")
    assert fine == harmless
    if harmless:
        assert exact == pytest.approx(2.0, rel=2e-3)
        assert "1e-08 of delta for rounding" in stated.statement().replace("1.00001e-08", "1e-08")
        assert type(stated).from_dict(stated.to_dict()) == stated
        assert stated.after(T // 2).loss.failure == stated.loss.failure
        # Rounding takes a few percent of the noise that real numbers need.
        assert 1 < code.sensitivity / CLIP < 1.05 and code.variance == 2**20


def test_record_in_few_rounds_has_fewer_roundings():
    value = made(Discrete(SIZE), "zero_out_record", sampler=Cyclic(2, T // 2, 3))
    assert value.noise.code.beta == pytest.approx(1e-3 * DELTA / 2)
    assert value.guarantee.loss.failure == pytest.approx(1e-3 * DELTA)
    assert value.noise.code.records == 3
    complete = made(
        Discrete(SIZE), "zero_out_record", sampler=Full(), counts=[M * EACH - 1] + [M * EACH] * 5
    )
    assert complete.noise.code.records == M * EACH


def test_opened_sums_of_records_have_noise_that_is_stated():
    """Of batches of two, as of real noise; nothing but the noise is in them."""
    present = [1, 2, 3, 5]
    options = dict(
        protect=Protect("zero_out_record", CLIP, attacker="aggregator"), sampler=Random(2)
    )
    part = Discrete(SIZE, dropouts=2)
    single, noise = opened_noise(part, Trusted(2, (0, 4)), present, 2, budget=ZCDP, **options)
    assert single.noise.code.records == 2
    assert stats.kstest(noise, stats.norm(0, 2).cdf).pvalue > 0.01
    assert stats.kstest(noise, stats.norm(0, 2.4).cdf).pvalue < 1e-3
    plan_, real = opened_noise(SumShares(dropouts=2), Trusted(2, (0, 4)), present, 2, **options)
    assert stats.ks_2samp(noise, real).pvalue > 0.01
    # Beyond real noise: zCDP's conversion, and what roundings take.
    ratio = single.factor[0, 0] / plan_.factor[0, 0]
    assert 1.0 < ratio < 1.25


def test_whole_numbers_learn_what_real_noise_lets_learn():
    """Six agents in batches of eight, one of whom may be missing and one collude."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1200, 10))
    y = np.where(x @ rng.normal(size=10) > 0, 1, -1)
    shards = partition.iid(900, N, 0)
    problem = supervised(Linear(), "logistic", (x[:900], y[:900]), (x[900:], y[900:]), shards)
    accuracies = []
    for part, accountant in ((Discrete(11, 1, 1), "zcdp"), (SumShares(1, 1), "gdp")):
        value = plan.make(
            config(
                "zero_out_record", part, sampler=Random(8), rounds=40, optimizer=Sgd(1.0),
                budget=Budget(16.0, DELTA, accountant=accountant),
            ),
            COMPLETE,
        )  # fmt: skip
        result = run(value, problem, seeds=[0, 1, 2], eval_every=40)
        accuracies.append(float(np.mean(np.asarray(result.metrics["test_accuracy"])[..., -1])))
        # Sums of float32 are priced by the clip, of whole numbers too.
        assert 0 < result.guarantees[0].sum_rounding < 1e-4
    assert accuracies[0] > 0.8 and abs(accuracies[0] - accuracies[1]) < 0.03


def divergence(value, survivors):
    """Largest Renyi divergence over its order of one opened sum and the same moved, exactly."""
    code = value.noise.code
    reach = 60 * int(math.sqrt(code.variance))
    law = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * code.variance))
    law /= law.sum()
    total = np.ones(1)
    for _ in range(survivors):
        total = np.convolve(total, law)
    moved = math.isqrt(code.limit)
    here = total[moved:]
    present = total[:-moved]
    near = (here > 1e-250) & (present > 1e-250)
    here = np.log(here[near])
    present = np.log(present[near])
    orders = np.array([1.5, 2.0, 4.0])
    return max(np.log(np.exp(a * here - (a - 1) * present).sum()) / (a - 1) / a for a in orders)


@pytest.mark.mutant
@pytest.mark.parametrize("twin", [False, True])
def test_sum_of_those_who_are_left_has_loss_that_is_stated(twin, monkeypatch):
    """The twin counts the noise of agents who are gone, and of those who collude."""
    if twin:
        monkeypatch.setattr(Discrete, "cohort", lambda part, agents: Cohort(agents, 0, 0))
    single = made(Discrete(1, dropouts=2, colluders=1, variance=2**10))
    stated = single.guarantee.loss.rho / (EPOCHS * EACH)
    result = divergence(single, N - 3)
    assert (result <= stated) == (not twin)
    assert twin or result == pytest.approx(stated, rel=0.15)


def opened_noise(part, aggregate, survivors, batch=1, seeds=40, **changes):
    """What is left of the opened sums of a run, over the noise of one agent."""
    training_plan = plan.make(config(part=part, aggregate=aggregate, **changes), COMPLETE)

    def read(passed):
        return passed.private, passed.before.models, passed.after.models

    private, before, after = trace(training_plan, task(), seeds=range(seeds), read=read)
    flat = lambda tree: np.concatenate(  # noqa: E731
        [np.asarray(leaf).reshape(seeds, T, N, -1) for leaf in jax.tree.leaves(tree)], axis=-1
    )
    steps = (flat(before) - flat(after))[:, :, 0] / 0.1
    noise = len(survivors) * batch * steps - flat(private)[:, :, survivors].sum(2)
    return training_plan, (noise / float(training_plan.factor[0, 0])).ravel()


@pytest.mark.mutant
def test_opened_sums_have_noise_of_those_who_are_there(monkeypatch):
    """And on a fine grid it is that of real noise, as far as a test can tell."""
    present = [1, 2, 3, 5]
    part = Discrete(SIZE, dropouts=2)
    single, noise = opened_noise(part, Trusted(2, (0, 4)), present, budget=ZCDP)
    assert stats.kstest(noise, stats.norm(0, 2).cdf).pvalue > 0.01
    assert stats.kstest(noise, stats.norm(0, 2.4).cdf).pvalue < 1e-3
    _, real = opened_noise(SumShares(dropouts=2), Trusted(2, (0, 4)), present)
    assert stats.ks_2samp(noise, real).pvalue > 0.01
    assert stats.ks_2samp(noise, 1.25 * real).pvalue < 1e-3
    # What the guarantee takes: a move of `sensitivity` over four shares, in every round.
    needed = single.noise.code.sensitivity * math.sqrt(
        EPOCHS * EACH / (2 * single.guarantee.loss.rho)
    )
    result = float(single.factor[0, 0]) * noise.std()
    assert result == pytest.approx(needed, rel=0.05)
    # The broken twin: the shares of who is missing are counted.
    monkeypatch.setattr(Discrete, "cohort", lambda part, agents: Cohort(agents, 0, 0))
    twin = made(Discrete(SIZE, dropouts=2))
    assert 2 * float(twin.factor[0, 0]) < 0.9 * needed


@pytest.mark.slow
@pytest.mark.optimized
def test_run_goes_on_to_bit_and_rounds_are_told_apart(tmp_path):
    first = made(Discrete(SIZE, dropouts=1))
    options = dict(seeds=[0, 1], eval_every=3)
    complete = run(first, task(), **options)
    again = cut_and_resumed(first, task(), tmp_path, **options)
    for a, b in zip(jax.tree.leaves(complete.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert complete.guarantees[0].to_dict()["other_loss"]["kind"] == "zcdp"


@pytest.mark.slow
@pytest.mark.parametrize("missing", [pytest.param((), marks=pytest.mark.slow), ((2,), (), (0, 5))])
def test_run_under_masks_is_one_without(missing):
    """Also with seeds side by side; which masks there are makes no difference."""
    options = dict(seeds=[0, 1], eval_every=T)
    part = Discrete(SIZE, dropouts=2)
    trusted = run(made(part, aggregate=Trusted(2, missing)), task(), **options)
    hidden = run(made(part, aggregate=Masked(2, missing, degree=4, seed=9)), task(), **options)
    for a, b in zip(jax.tree.leaves(trusted.params), jax.tree.leaves(hidden.params), strict=True):
        np.testing.assert_array_equal(a, b)
    # Masks of contrib are named as a custom part, and change nothing else.
    custom = trusted.guarantees[0].custom
    assert trusted.guarantees == tuple(
        stated.replace(custom=custom) for stated in hidden.guarantees
    )


def test_neighbours_move_payloads_by_less_than_is_hidden():
    """What was sent is played back, in its whole numbers, on other data."""
    single = made(Discrete(SIZE))
    here = task()
    present = dataclasses.replace(here, y=-np.asarray(here.y))
    result = empirical_sensitivity(single, here, present, seeds=[0])
    assert 0 < result.max() and np.sqrt((result**2).sum(-1)).max() <= 2 * CLIP * (1 + 1e-6)


def test_first_rounds_and_runs_in_row_are_stated():
    guarantee = made(Discrete(SIZE)).guarantee
    assert "every client takes part in at most 4, 3 apart," in guarantee.statement()
    assert ", k = 4, b = 3" in guarantee.caption() and guarantee.after(0).epsilon == 0
    # Turns counted one by one: client c of a place comes in the rounds c mod M.
    for rounds in range(1, T + 1):
        turns = max(sum(t % M == client for t in range(rounds)) for client in range(M))
        first = guarantee.after(rounds)
        assert first.loss.rho == pytest.approx(guarantee.loss.rho * turns / 4, rel=1e-9)
        assert first.loss.rho >= guarantee.loss.rho * turns / 4
        apart = ", 3 apart" if turns > 1 else ""
        assert f"takes part in at most {turns}{apart}," in first.statement()
    entries = made(
        Discrete(SIZE), protect=Protect("replace_agent", CLIP, attacker="aggregator"),
        sampler=Random(1),
    ).guarantee  # fmt: skip
    assert entries.after(T // 2).loss.rho == pytest.approx(entries.loss.rho / 2, rel=1e-9)
    pair = guarantee.followed_by(guarantee, planned=True)
    assert pair.loss.rho == pytest.approx(2 * guarantee.loss.rho)
    # Two runs cost differently a round: the whole from the first on.
    assert pair.loss.participation == (8, 3) and pair.after(1).loss.rho == pair.loss.rho
    anytime = dataclasses.replace(guarantee.loss, even=False, participation=None)
    with pytest.raises(ValueError, match="participation is .4, 3., then None"):
        guarantee.followed_by(guarantee.replace(other_loss=anytime), planned=True)
    assert type(guarantee).from_dict(guarantee.to_dict()) == guarantee
    with pytest.raises(ValueError, match="Gaussian losses"):
        guarantee.stopping_at([6, 12])


def test_plan_of_other_numbers_is_refused():
    first = made(Discrete(SIZE))
    code = first.noise.code
    for change, message in [
        ({"grid": 0.9 * code.grid}, "guarantee states"),
        ({"variance": code.variance // 2}, "guarantee states"),
        ({"variance": 2}, "code is .*variance=2,"),
        ({"bound": 0.4}, "code is .*bound=0.4"),
        ({"clients": 5}, "code is .*clients=5"),
        ({"beta": 0.0}, "guarantee states"),
    ]:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(
                first, noise=CalibratedCode(first.config.noise, dataclasses.replace(code, **change))
            )
    for dealt, message in [
        (None, "participation is None"),
        ((4, 4), "runs .4, 3."),
        ((2, 3), "runs"),
    ]:
        loss = dataclasses.replace(first.guarantee.loss, participation=dealt)
        stated = first.guarantee.replace(other_loss=loss)
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(first, guarantee=stated)
    other = made(Discrete(SIZE, variance=2**12))
    assert other.fingerprint() != first.fingerprint() and first.forecast(5).ratio > 0


@dataclass(frozen=True)
class Pairs(Sampler):
    """A sampler of one's own, of which nobody knows how many records it draws."""

    divisor: ClassVar[float] = 2.0

    def draw(self, key, round, counts):
        return Draw(jnp.tile(jnp.arange(3), (N, 1)), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aggregate": Sum()}, "shows single messages"),
        ({"aggregate": Trusted(2)}, "give dropouts=2"),
        ({"part": Discrete(SIZE, 3, 3)}, "may drop out or collude"),
        ({"method": DSGD()}, "which noise Discrete does not join"),
        ({"budget": Budget(2.0, DELTA)}, r"'gdp' with noise Discrete; give Budget\(.*'zcdp'\)"),
        ({"part": SumShares(), "budget": ZCDP}, "SumShares; give .* 'gdp' or 'rdp'"),
        ({"part": SumShares(), "aggregate": Masked()}, "adds up whole numbers"),
        ({"aggregate": Masked(1)}, "give dropouts=1"),
        ({"aggregate": Masked(degree=8)}, "degree is 8"),
        ({"release": True}, "release is True"),
        ({"protect": Protect("zero_out_client", CLIP)}, "attacker 'outsider'"),
        (
            {"protect": Protect("zero_out_record", CLIP, attacker="aggregator"),
             "sampler": Poisson(2, capacity=4), "counts": [N] * N},
            "accounting covers no privacy amplification",
        ),
        (
            {"protect": Protect("zero_out_record", CLIP, attacker="aggregator"),
             "sampler": Pairs()},
            "give samplers.Random, Cyclic or Full, batches of one record",
        ),
        (
            {"protect": Protect("zero_out_record", CLIP, attacker="aggregator"),
             "sampler": Random(8), "budget": Budget(1e-4, 1e-30, accountant="zcdp")},
            "no grid",
        ),
        ({"budget": Budget(1e-4, 1e-30, accountant="zcdp")}, "no grid"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        made(**{"part": Discrete(SIZE), **change})


def test_payloads_of_another_size_and_too_little_noise_are_refused():
    with pytest.raises(ValueError, match="give size=5"):
        run(made(Discrete(4)), task(), seeds=[0])
    with pytest.raises(ValueError, match="variance is 3"):
        Discrete(4, variance=3)


@dataclass(frozen=True)
class Momentum(Method):
    """Another method over a server: what it keeps is an average of opened sums."""

    aggregate: Trusted = Trusted()
    stochastic: ClassVar[str] = "rows"

    @property
    def exchange(self):
        return Server(self.aggregate)

    def start(self, ctx: Round, models):
        return jax.tree.map(jnp.zeros_like, models)

    def payload(self, models):
        return models

    def emit(self, ctx, public_state):
        return Emission(ctx.query(public_state.models, ctx.batch).total)

    def send(self, ctx, public_state, emission, noisy):
        return noisy, ()

    def absorb(self, ctx, public_state, carry, received):
        mean = ctx.mean(*received)
        memory = jax.tree.map(lambda old, new: 0.5 * old + new, public_state.memory, mean)
        return jax.tree.map(lambda x, m: x - m, public_state.models, memory), memory

    def released(self, public_state):
        return public_state.models


@pytest.mark.slow
@pytest.mark.parametrize("missing", [(), (1, 2)])
def test_any_method_reads_sums_of_whole_numbers_by_its_mean(missing):
    """Not one of the package's own: the same step with noise's form as without it."""
    code = made(Discrete(SIZE)).noise.code
    fine = dataclasses.replace(code, size=8, grid=2.0**-18, variance=4)
    gradients = np.random.default_rng(0).normal(size=(N, 8)).astype(np.float32) / 10
    key = jax.random.key(3, impl="threefry2x32")

    def models(privatizer, opened=None):
        algorithm = composed(
            COMPLETE, lambda model, batch: batch, optax.identity(),
            method=Momentum(Trusted(2, missing)), privatizer=privatizer, opened=opened,
        )  # fmt: skip
        state = algorithm.init(jnp.zeros((N, 8)))
        step = jax.jit(algorithm.step)
        for round in range(2):
            state, info = step(jax.random.fold_in(key, round), state, gradients)
        return np.asarray(state.models), info

    bare, _ = models(None)
    decoded = functools.partial(noise.opened, fine)
    noisy, info = models(noise.discrete(fine, key=key, rounds=2), decoded)
    assert info.messages.dtype == jnp.uint32 and info.messages.shape == (8,)
    np.testing.assert_allclose(noisy, bare, atol=2e-4)
    assert np.abs(noisy - bare).max() > 1e-6
