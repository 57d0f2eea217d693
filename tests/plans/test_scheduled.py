"""Noise whose scale changes by round: budgets met exactly, audits, and an attacker's own odds."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from dpjax.accounting import pure
from dpjax.accounting.guarantee import Guarantee
from dpjax.algorithms.average import Average
from dpjax.algorithms.disk import DiSK
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.pairs import PPDOAGT, DiffTVAB
from dpjax.algorithms.pmlf import PMLF
from dpjax.algorithms.tracking import DPOP, ModelSent, Sent, Tracking
from dpjax.contrib import fusion
from dpjax.contrib import moves as moves_
from dpjax.contrib.trace import empirical_sensitivity, trace
from dpjax.engine.run import run
from dpjax.engine.state import RunSchedule, RunState
from dpjax.learning import samplers
from dpjax.mechanism import laplace
from dpjax.plans import noise, plan, protect, scheduled, statements
from dpjax.plans.optimizers import Chain, Sgd
from dpjax.plans.scheduled import ScheduledGaussian, ScheduledLaplace
from dpjax.topology import graphs, mixing
from dpjax.transforms import rounds as rounds_
from tests.plans import toys
from tests.support import make_problem

N = 5
T = 30
MATRIX = mixing.metropolis_hastings(graphs.ring(N))
GAMMA = 0.01
Q1 = 0.8
Q2 = 0.9


def config(**changes):
    options = dict(
        method=Tracking(5.0), noise=ScheduledLaplace(Q2),
        budget=protect.Budget(1.0, accountant="pure"),
        protect=protect.Protect("replace_agent", gradient_gap=2.0, norm="l1"), rounds=T,
        sampler=samplers.Random(1), optimizer=Sgd(GAMMA, decay=Q1),
    )  # fmt: skip
    return plan.Config(**(options | changes))


def normal(**changes):
    options = dict(
        noise=ScheduledGaussian(Q2), budget=protect.Budget(1.0, delta=1e-5),
        protect=protect.Protect("replace_agent", gradient_gap=2.0),
    )  # fmt: skip
    return config(**(options | changes))


def test_laplace_plan_spends_its_epsilon_and_says_so():
    training_plan = plan.make(config(), MATRIX)
    steps = GAMMA * Q1 ** np.arange(T)
    spent = pure.epsilon(steps, training_plan.noise.scales.astype(float), 2.0)
    assert 1 - 2e-6 < spent <= 1.0
    assert training_plan.guarantee.loss.kind == "pure" and training_plan.guarantee.delta == 0
    assert training_plan.guarantee.epsilon == 1.0 and training_plan.guarantee.exact_epsilon <= 1.0
    again = Guarantee.from_dict(training_plan.guarantee.to_dict())
    assert again == training_plan.guarantee
    # The closed form leaves what an endless run would still spend; a plan spends all of it.
    closed = laplace.geometric(1.0, 2.0, GAMMA, Q1, Q2, T)
    share = 1 - (Q1 / Q2) ** (T - 1)
    np.testing.assert_allclose(training_plan.noise.scales, closed.scales * share, rtol=1e-5)
    np.testing.assert_allclose(closed.step_sizes, steps)


def test_normal_plan_spends_its_mu():
    training_plan = plan.make(normal(), MATRIX)
    steps = GAMMA * Q1 ** np.arange(T)
    mu = np.sqrt(np.sum((2.0 * steps[:-1] / training_plan.noise.scales[1:].astype(float)) ** 2))
    np.testing.assert_allclose(training_plan.guarantee.mu, mu, rtol=3e-6)
    assert (
        training_plan.guarantee.exact_epsilon
        <= 1.0
        < training_plan.guarantee.exact_epsilon * (1 + 1e-4)
    )


@pytest.mark.parametrize(
    ("method", "name"), [(Tracking(1.0), "tracking"), (DPOP(), "dpop"), (PPDOAGT(), "pp_doagt"),
                         (DiffTVAB(), "diff_tv_ab")],
)  # fmt: skip
def test_methods_move_as_far_as_tables_of_them_say(method, name):
    """Two derivations: of a method as it runs, and of its recursion solved for coefficients."""
    clipped = protect.Protect("replace_agent", 1.0, norm="l1")
    training_plan = plan.make(config(method=method, protect=clipped), MATRIX)
    own = {"pp_doagt": float(np.diagonal(MATRIX).max())}.get(name, 0.0)
    table = moves_.moves(name, GAMMA * Q1 ** np.arange(T), 2.0, own)
    mine = training_plan.noise.sensitivities
    assert (table <= mine * (1 + 1e-9)).all()
    if name != "pp_doagt":
        np.testing.assert_allclose(mine, table, rtol=1e-5)


def test_dsgd_under_laplace_noise_moves_by_twice_its_clip_norm_in_every_round():
    argument = config(
        method=DSGD(), noise=ScheduledLaplace((1.0, 2.0, 4.0)), rounds=3,
        protect=protect.Protect("replace_agent", 0.5, norm="l1"),
    )  # fmt: skip
    training_plan = plan.make(argument, MATRIX)
    scales = training_plan.noise.scales.astype(float)
    np.testing.assert_allclose(scales, 1.75 * np.array([1.0, 2.0, 4.0]), rtol=1e-5)
    assert sum(1.0 / scales) <= 1.0


@functools.cache
def fused():
    """One problem, so that its programs are compiled once."""
    return fusion.problem(fusion.make(N, seed=0, high=2.0))


def near(size):
    """A problem whose models start, and under small steps stay, near a number."""
    return dataclasses.replace(
        fused(), init=lambda _: jnp.full(2, size, jnp.float32), init_per_agent=False
    )


@pytest.mark.parametrize("make", [config, pytest.param(normal, marks=pytest.mark.slow)])
def test_run_says_from_which_round_on_which_share_of_messages_had_no_noise(make):
    """Models near 1e5 and scales of .0044: float32 numbers there are .0078 apart."""
    kind = make().noise.__class__
    unit = plan.make(make(noise=kind(1.0), optimizer=Sgd(1e-5)), MATRIX).noise.scales[1]
    training_plan = plan.make(
        make(noise=kind(1.0), optimizer=Sgd(1e-5 * 0.0044 / float(unit))), MATRIX
    )
    assert training_plan.noise.scales[1:] == pytest.approx(0.0044, rel=1e-3)
    assert "1.2e-7" not in repr(training_plan)
    drawn = stats.laplace if kind is ScheduledLaplace else stats.norm
    for size, law in ((1e5, drawn), (1.0, None)):
        task = near(size)
        messages = []

        def watch(progress, reported=messages):
            reported.append(progress.guarantees[0].lost_noise)

        if law is None:  # Nothing is said: warnings are errors.
            result = run(training_plan, task, seeds=(0, 1), eval_every=10, callback=watch)
            assert messages == [None] * 3 and result.guarantees[0].lost_noise is None
            assert (result.metrics["lost_noise"] < 1e-4).all()
            assert "NOT covered: from" not in result.guarantees[0].statement()
            continue
        with pytest.warns(scheduled.LostNoiseWarning, match="From round 1 on up to 0.[56]") as text:
            result = run(training_plan, task, seeds=(0, 1), eval_every=10, callback=watch)
        assert len(text) == 1, "once a run"
        expected = 2 * law.cdf(2.0**-7 / 2 / 0.0044) - 1
        assert result.metrics["lost_noise"].shape == (3, 2, 1)
        np.testing.assert_allclose(result.metrics["lost_noise"], expected, rtol=1e-3)
        first, share = result.guarantees[0].lost_noise
        assert first == 1 and share == pytest.approx(expected, rel=1e-3)
        assert messages == [result.guarantees[0].lost_noise] * 3
        statement = result.guarantees[0].statement()
        (line,) = [part for part in statement.split(". ") if "NOT covered" in part]
        assert "from round 1 on up to" in line and "went out without noise" in line
        assert "NOISE LOST from round 1" in result.guarantees[0].caption()
        # What is sent: the plan's first message carries no gradient, and no noise.
        bare = trace(training_plan, task, seeds=(0, 1), read=_unchanged)[:, 1:]
        assert bare.mean() == pytest.approx(expected, abs=0.06)


def _unchanged(passed):
    return passed.private == passed.noisy


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_entry_that_is_not_finite_hides_no_lost_noise(bad):
    """The other entry is near 1e5, where numbers are .0078 apart and noise is of .0044."""
    part = ScheduledLaplace(1.0)
    unit = plan.make(config(noise=part, optimizer=Sgd(1e-5)), MATRIX).noise.scales[1]
    step = Sgd(1e-5 * 0.0044 / float(unit))
    training_plan = plan.make(config(noise=part, optimizer=step), MATRIX)
    task = dataclasses.replace(near(1e5), init=lambda _: jnp.array([bad, 1e5], jnp.float32))
    with pytest.warns(scheduled.LostNoiseWarning, match="From round 1 on up to 1 of"):
        result = run(training_plan, task, seeds=(0,), eval_every=10)
    assert result.guarantees[0].lost_noise == (1, 1.0)
    assert (result.metrics["lost_noise"] == 1).all()
    rows = result.guarantees[0].protection()
    assert {row.epsilon for row in rows} == {None}
    bare = trace(training_plan, task, seeds=(0,), read=_unchanged)[:, 1:]
    assert bare[..., 1].mean() > 0.5


def test_share_that_is_no_number_counts_as_all_of_it():
    """Whatever a privatizer of one's own returns; marks still to come count as nothing."""
    schedule = RunSchedule(6, block_rounds=2, chunk_blocks=1)
    for reference, expected in (
        (np.nan, (3, 1.0)), (np.inf, (3, 1.0)), (0.5, (3, 0.5)), (0.0, None)
    ):  # fmt: skip
        taken = np.array([0.0, reference, np.nan]).reshape(3, 1, 1)
        position = RunState(None, schedule, None, None, {"lost_noise": taken}, done=4)
        assert position.lost_noise() == [expected]


def test_run_names_first_block_whose_noise_is_lost():
    """Scales that shrink below what numbers of size 300 keep in the middle of a run."""
    shrinking = config(noise=ScheduledLaplace(0.7), optimizer=Sgd(1e-3, decay=0.6))
    training_plan = plan.make(shrinking, MATRIX)
    limit = 2.0**-16 / -np.log(0.99)  # Numbers of 256 to 512 are 2^-15 apart.
    first = (
        int(
            np.flatnonzero((training_plan.noise.scales > 0) & (training_plan.noise.scales < limit))[
                0
            ]
        )
        + 1
    )
    with pytest.warns(scheduled.LostNoiseWarning, match=f"From round {first} on up to"):
        result = run(training_plan, near(300.0), seeds=(0,), eval_every=1)
    assert 3 < first < T and result.guarantees[0].lost_noise[0] == first
    shares = result.metrics["lost_noise"][:, 0, 0]
    assert (shares[: first - 1] <= 0.01).all() and (shares[first - 1 :] > 0.01).all()
    # A block tells of its worst round.
    with pytest.warns(scheduled.LostNoiseWarning):
        complete = run(training_plan, near(300.0), seeds=(0,), eval_every=T)
    np.testing.assert_allclose(complete.metrics["lost_noise"].ravel(), shares.max(), rtol=1e-6)
    assert complete.guarantees[0].lost_noise == (1, pytest.approx(shares.max()))
    pair = complete.guarantees[0].followed_by(result.guarantees[0], planned=True)
    assert pair.lost_noise[0] == 1
    clean = result.guarantees[0].replace(lost_noise=None)
    assert clean.followed_by(result.guarantees[0], planned=True).lost_noise[0] == T + first
    assert Guarantee.from_dict(pair.to_dict()) == pair and "lost_noise" not in clean.to_dict()
    with pytest.raises(ValueError, match="lost_noise is"):
        clean.replace(lost_noise=(1, 1.5))


@pytest.mark.mutant
@pytest.mark.parametrize("make", [config, normal])
def test_less_noise_than_stated_is_refused(make):
    training_plan = plan.make(make(), MATRIX)
    for twin in (
        dataclasses.replace(
            training_plan.noise, scales=np.float32(0.999) * training_plan.noise.scales
        ),
        # Each message hidden by the noise of the round after, which is smaller.
        dataclasses.replace(
            training_plan.noise, scales=np.append(training_plan.noise.scales[1:], np.float32(1e-6))
        ),
    ):
        with pytest.raises(ValueError, match="guarantee states"):
            dataclasses.replace(training_plan, noise=twin)
    with pytest.raises(ValueError, match="gradient_gap"):
        dataclasses.replace(
            training_plan, guarantee=training_plan.guarantee.replace(gradient_gap=1.0)
        )


def test_parts_that_do_not_go_together_are_refused_with_remedy():
    cases = {
        "norm": lambda: plan.make(config(protect=protect.Protect("replace_agent", 1.0)), MATRIX),
        "accountant": lambda: plan.make(config(budget=protect.Budget(1.0, delta=1e-5)), MATRIX),
        "epsilon": lambda: plan.make(
            config(budget=protect.Budget((1.0,) * N, accountant="pure")), MATRIX
        ),
        "schedule": lambda: plan.make(config(noise=ScheduledLaplace((1.0, 0.5))), MATRIX),
        "optimizer": lambda: config(optimizer=Chain(_adam, 0.1)),
        "release": lambda: config(release=True),
        "clip norm": lambda: protect.Protect("replace_agent", 1.0, gradient_gap=1.0),
        "relation": lambda: protect.Protect("replace_record", 1.0, norm="l1"),
        "smoothness": lambda: protect.Protect("replace_agent", 1.0, smoothness=1.0),
        "delta": lambda: protect.Budget(1.0, delta=1e-5, accountant="pure"),
        "decay": lambda: Sgd(0.1, decay=1.5),
        "protect": lambda: config(
            method=DSGD(), noise=noise.Independent(), budget=protect.Budget(1.0, delta=1e-5)
        ),
    }
    for name, make in cases.items():
        with pytest.raises(ValueError, match=name):
            make()
    with pytest.raises(ValueError, match="schedule"):
        ScheduledLaplace(1.5)
    with pytest.raises(ValueError, match="decay has 2"):
        config(optimizer=Sgd(0.1, decay=(1.0, 0.5)))


def released(**changes):
    """A schedule over clipped gradients, for sites."""
    options = dict(
        method=DSGD(), protect=protect.Protect("zero_out_record", 1.0), release=True
    )  # fmt: skip
    return normal(**(options | changes))


def test_release_of_schedule_is_strategy_of_its_scales():
    result = plan.make(released(), MATRIX)
    scales = result.noise.scales.astype(np.float64)
    # As a run multiplies: in no round less than the scale that is accounted for.
    route = rounds_.route(result.strategy, T)
    assert route.kind == "recursion" and route.weights.shape == (T, 0)
    assert (route.scale >= scales).all()
    np.testing.assert_allclose(route.scale, scales, rtol=3e-16)
    assert result.guarantee.mu == result.noise.loss(result.target).size.max()
    assert result.guarantee.over_rounds == "schedule"
    assert result.grid.deviation == pytest.approx(scales.min(), rel=1e-15)
    assert result.grid.spacing <= scales.min() / 8
    priced = statements.with_precision_cost(result, 1000)
    assert 0 < priced.guarantee.added_epsilon < 1e-3
    assert priced.guarantee.epsilon == 1.0 and priced.guarantee.exact_epsilon <= 1.0
    for attacker in ("node", "outsider"):
        config_ = released(protect=protect.Protect("zero_out_record", 1.0, attacker=attacker))
        assert plan.make(config_, MATRIX).guarantee.secrets == "own"


@pytest.mark.mutant
def test_released_schedule_with_less_noise_than_stated_is_refused():
    result = plan.make(released(), MATRIX)
    twin = dataclasses.replace(result.noise, scales=np.float32(0.999) * result.noise.scales)
    with pytest.raises(ValueError, match="guarantee states"):
        dataclasses.replace(result, noise=twin)


def test_schedules_that_no_site_can_release_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="noise ScheduledLaplace.*so it is a simulation"):
        config(release=True)
    # Models, to which float64 adds noise of any size.
    text = "release is True with method Tracking, whose payload nothing bounds.*float64"
    with pytest.raises(ValueError, match=text):
        normal(release=True)
    zeros = ScheduledGaussian((1.0,) * (T - 1) + (0.0,))
    with pytest.raises(ValueError, match="with a scale of 0 in a round whose payload moves"):
        plan.make(released(noise=zeros), MATRIX)
    result = plan.make(released(), MATRIX)
    with pytest.raises(ValueError, match="in one process: its secrets are those of several"):
        run(result, make_problem(N), seeds=[0])


def _adam(step_size):
    return optax.adam(step_size)


def test_what_given_scales_cost_is_budget_that_gives_them():
    training_plan = plan.make(config(), MATRIX)
    first = float(training_plan.noise.scales[0])
    np.testing.assert_allclose(scheduled.cost(config(), MATRIX, first), 1.0, rtol=1e-5)
    twice = scheduled.cost(config(), MATRIX, first / 2)
    np.testing.assert_allclose(twice, 2.0, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [Tracking(5.0), pytest.param(DiffTVAB(), marks=pytest.mark.slow)]
)
def test_averaged_models_are_of_messages_and_cost_what_these_do(method):
    clipped = protect.Protect("replace_agent", 0.5, norm="l1")
    pair = [
        plan.make(config(method=case, protect=clipped, noise=ScheduledLaplace(1.0)), MATRIX)
        for case in (method, Average(method, decay=1.0))
    ]
    np.testing.assert_array_equal(*(outcome.noise.scales for outcome in pair))
    task = fused()
    sent = trace(pair[0], task, seeds=(0,), read=_models_sent)
    result = run(pair[1], task, seeds=(0,), eval_every=T)
    np.testing.assert_allclose(result.params[0, 0], sent[0].mean(axis=0), rtol=1e-3, atol=1e-4)


def _models_sent(passed):
    return passed.message if not hasattr(passed.message, "model") else passed.message.model


def test_rounds_without_noise_are_those_whose_payload_does_not_move():
    """Two long steps, the models averaged without noise between; seen one round late."""
    steps = (1.0, 0.0, 0.0, 0.25, 0.0, 0.0)
    argument = config(noise=ScheduledLaplace((0.0, 1.0, 0.0, 0.0, 0.5, 0.0)), rounds=6,
                   optimizer=Sgd(GAMMA, decay=steps))  # fmt: skip
    training_plan = plan.make(argument, MATRIX)
    assert (training_plan.noise.scales > 0).tolist() == [False, True, False, False, True, False]
    np.testing.assert_allclose(training_plan.noise.scales[1], 2.0 * GAMMA * 1.5, rtol=1e-5)
    result = run(
        training_plan, fusion.problem(fusion.make(N, seed=0, high=1.0)), seeds=(0,), eval_every=6
    )
    assert np.isfinite(result.metrics["residual"]).all()
    for scales in ((1.0, 0.0, 0.0, 0.5, 0.0, 0.0), (0.0,) * 6, (0.0, 1.0, 0.0, 0.0, -0.5, 0.0)):
        with pytest.raises(ValueError, match="schedule"):
            plan.make(dataclasses.replace(argument, noise=ScheduledLaplace(scales)), MATRIX)


@pytest.mark.slow
def test_optimal_parts_leave_error_that_they_predict():
    costs = fusion.make(N, seed=1, high=3.0)
    rounds = 40
    few = dict(iterations=30, pulses=(1, 2), probes=None)
    parts = fusion.optimal_parts(
        costs, MATRIX, epsilon=2.0, gradient_gap=1.0, rounds=rounds, shape="pulses", **few
    )
    training_plan = plan.make(
        config(
            method=parts.method, optimizer=parts.optimizer, noise=parts.noise, rounds=rounds,
            protect=protect.Protect("replace_agent", gradient_gap=1.0, norm="l1"),
            budget=protect.Budget(2.0, accountant="pure"),
        ),
        MATRIX,
    )  # fmt: skip
    result = run(training_plan, fusion.problem(costs), seeds=range(2000), eval_every=rounds)
    outcome = result.metrics["residual"][-1, :, 0].astype(float)
    spread = 5 * outcome.std() / np.sqrt(len(outcome))
    assert abs(outcome.mean() - parts.predicted.total) < spread + 0.02 * parts.predicted.total


@pytest.mark.slow
def test_plans_of_several_budgets_and_schedules_run_side_by_side():
    plans = [
        plan.make(
            config(noise=ScheduledLaplace(ratio), budget=protect.Budget(e, accountant="pure")),
            MATRIX,
        )
        for ratio, e in ((0.9, 1.0), (0.95, 3.0))
    ]
    task = fused()
    pair = run(plans, task, seeds=(0, 1), eval_every=T)
    for v, item in enumerate(plans):
        single = run(item, task, seeds=(0, 1), eval_every=T)
        np.testing.assert_allclose(
            pair.metrics["residual"][..., v], single.metrics["residual"][..., 0], rtol=1e-4
        )


# ---- what an attacker really finds out


RUNS = 100_000
EPSILON = 1.0
GAP = 1.0
TWO = np.full((2, 2), 0.5)


@functools.cache
def neighbours():
    """Two problems whose first agent's gradients are apart by GAP in L1 at every point."""
    first = fusion.make(2, seed=0, measurements=2, dimension=2, high=1.0)
    # v' with -2 M' (v' - v) = -(GAP, 0).
    change = np.linalg.solve(2 * first.matrices[0].T, np.array([GAP, 0.0]))
    values = first.values.copy()
    values[0] += change
    other = fusion.costs_of(first.matrices, values, first.omega, first.truth)
    return fusion.problem(first), fusion.problem(other)


@functools.cache
def ratios(halved):
    """Log likelihood ratios of all messages, under the problem and under its neighbour."""
    argument = config(
        protect=protect.Protect("replace_agent", gradient_gap=GAP, norm="l1"),
        optimizer=Sgd(0.1, decay=0.1), noise=ScheduledLaplace(0.5), rounds=3,
        budget=protect.Budget(EPSILON * (2 if halved else 1), accountant="pure"),
    )  # fmt: skip
    training_plan = plan.make(argument, TWO)
    one, other = neighbours()
    # Gradients' change is -(GAP, 0), so the next message's is the step times (GAP, 0).
    shift = np.zeros((3, 2))
    shift[1:, 0] = GAP * 0.1 * 0.1 ** np.arange(2)
    scales = training_plan.noise.scales.astype(float)[:, None]
    results = []
    for sign, task, first in ((1, one, 0), (-1, other, RUNS)):
        seeds = range(first, first + RUNS)
        xi = np.asarray(trace(training_plan, task, seeds=seeds, read=_noise), np.float64)
        lost = np.abs(xi - sign * shift) - np.abs(xi)
        results.append(sign * (lost / scales).sum(axis=(1, 2)))
    return results


def _noise(passed):
    return passed.noisy[0] - passed.private[0]


def lower_bound(halved):
    """Of log P(S) / Q(S) over events of large ratios, at 99.9 %: chosen on a half, judged on one.

    S is the event that an attacker who knows both problems would choose.
    """
    mine, theirs = ratios(halved)
    half = RUNS // 2
    cuts = np.quantile(mine[:half], np.linspace(0.3, 0.98, 40))
    rates = [
        np.log((mine[:half] >= c).mean() / max((theirs[:half] >= c).mean(), 1e-9)) for c in cuts
    ]
    cut = cuts[int(np.argmax(rates))]
    p, q = ((case[half:] >= cut).sum() for case in (mine, theirs))
    low = stats.beta.ppf(5e-4, p, half - p + 1)
    high = stats.beta.ppf(1 - 5e-4, q + 1, half - q)
    return float(np.log(low / high))


def test_attacker_never_gains_more_than_epsilon_and_does_where_noise_is_halved():
    honest = lower_bound(False)
    halved = lower_bound(True)
    assert 0.85 * EPSILON < honest <= EPSILON
    assert halved > 1.5 * EPSILON


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("method", "shifts"),
    # The toy starts its optimizer anew in every round, and steps by the first step for ever.
    [(Tracking(5.0), [0.0, 0.1, 0.01]), (toys.Tracking(5.0), [0.0, 0.1, 0.1])],
)
def test_shifts_of_audit_are_those_of_replayed_messages(method, shifts):
    """The audit's shifts are the differences of payloads that a replay finds."""
    first, other = neighbours()
    training_plan = plan.make(
        config(
            # A clip far beyond these gradients: what is a user's own is under no assumed gap.
            protect=protect.Protect("replace_agent", 500 * GAP, norm="l1"), rounds=3,
            budget=protect.Budget(1000 * EPSILON, accountant="pure"),
            optimizer=Sgd(0.1, decay=0.1), noise=ScheduledLaplace(0.5), method=method,
        ),
        TWO,
    )  # fmt: skip
    result = empirical_sensitivity(training_plan, first, other, seeds=(0,))[0, :, :, 0]
    np.testing.assert_allclose(result[:, 0], GAP * np.array(shifts), rtol=1e-3, atol=1e-6)
    assert not result[:, 1].any()
    np.testing.assert_allclose(
        training_plan.noise.sensitivities[:, 0], 1000 * GAP * np.array(shifts), rtol=1e-5
    )


# ---- what a plan must not be made of


def test_assumed_gap_is_of_one_gradient_as_it_is():
    """Combinations of gradients move by more than one, and nothing is clipped behind them."""
    for method in (DiSK(kappa=0.1), PMLF(length=2, beta=0.5), Average(DiSK(kappa=0.1))):
        with pytest.raises(ValueError, match="gradient_gap"):
            config(method=method, noise=ScheduledLaplace(1.0))
    assert config(method=DSGD(), noise=ScheduledLaplace(1.0)).protect.gradient_gap == 2.0


def heavy(self, ctx, public_state, carry, received):
    """Steps ten times as far as the sensitivity of tracking says."""
    models, memory = Tracking.absorb(self, ctx, public_state, carry, received)
    return jax.tree.map(lambda x, mean: mean + 10 * (x - mean), models, received), memory


@dataclasses.dataclass(frozen=True)
class Eager(Tracking):
    """Overrides by a method."""

    absorb = heavy


@dataclasses.dataclass(frozen=True)
class Heavy(Tracking):
    """Overrides by a field, in which no inspection of classes finds a function."""

    absorb: Any = functools.partial(heavy, Tracking(1.0))


@dataclasses.dataclass(frozen=True)
class Own(ModelSent):
    """A user's method, its sensitivity inherited or not."""

    def absorb(self, ctx, public_state, carry, received):
        gradient = ctx.mean(ctx.query(carry, ctx.batch).total)
        updates, state = ctx.optimizer.update(gradient, public_state.memory.optimizer, received)
        return jax.tree.map(jnp.add, received, updates), Sent(state, carry)


@dataclasses.dataclass(frozen=True)
class Louder(DSGD):
    """A hundred times the answer."""

    def emit(self, ctx, public_state):
        answer = ctx.query(
            public_state.models,
            ctx.batch,
            encode=lambda g: jax.tree.map(lambda leaf: 100 * leaf, g),
        )
        return super().emit(ctx, public_state)._replace(private=answer.total)


@dataclasses.dataclass(frozen=True)
class Longer(ScheduledLaplace):
    """Another class of noise."""


@dataclasses.dataclass(frozen=True)
class Step(Sgd):
    """Another class of steps."""


@pytest.mark.parametrize(
    "changes",
    [
        {"method": Eager(1.0)}, {"method": Heavy(1.0)}, {"method": Own()},
        {"method": Average(Eager(1.0))}, {"method": Louder()}, {"noise": Longer(Q2)},
        {"optimizer": Step(GAMMA, decay=Q1)},
    ],
)  # fmt: skip
def test_what_is_users_own_runs_and_is_named(changes):
    """Whatever it overrides, and how: nothing is guessed, and all texts say who is relied on."""
    (part,) = changes.values()
    name = type(getattr(part, "method", part)).__name__
    training_plan = plan.make(config(**changes), MATRIX)
    assert name in training_plan.guarantee.custom and training_plan.guarantee.epsilon == 1
    for text in (
        training_plan.guarantee.statement(),
        training_plan.guarantee.caption(),
        repr(training_plan),
    ):
        assert f"relies on your own `{name}`" in text
    assert Guarantee.from_dict(training_plan.guarantee.to_dict()) == training_plan.guarantee
    with pytest.raises(ValueError, match="guarantee.custom is"):
        dataclasses.replace(training_plan, guarantee=training_plan.guarantee.replace(custom=()))
    assert not plan.make(config(), MATRIX).guarantee.custom


def test_users_method_has_plain_steps_and_wide_models():
    with pytest.raises(ValueError, match="plain steps"):
        config(method=Own(), optimizer=Chain(_adam, 0.1))
    task = fused()
    narrow = dataclasses.replace(
        task, init=lambda key: jnp.zeros(2, jnp.bfloat16), init_per_agent=False
    )
    with pytest.raises(ValueError, match="bfloat16"):
        run(
            plan.make(config(method=DSGD(), noise=ScheduledLaplace(1.0)), MATRIX),
            narrow,
            seeds=(0,),
        )


def test_weights_that_float32_loses_count_as_lost():
    """Who hears nobody else keeps all of its own tracker."""
    thin = np.array([[0.5, 0.5, 0.0], [1e-50, 0.5, 0.5], [0.0, 0.5, 0.5]])
    moved_by = PPDOAGT(directed=True).sensitivity(lambda _: 1.0, np.full(50, 0.1), 1, thin)
    # Column 0 is heard by its own agent alone then, and forgets nothing.
    np.testing.assert_allclose(moved_by[-1, 1], 4.9, rtol=1e-6)


def test_assumptions_are_all_stated():
    smooth = protect.Protect("replace_agent", norm="l1", gradient_gap=1.0, smoothness=60.0)
    guarantee = plan.make(config(method=PPDOAGT(), protect=smooth), MATRIX).guarantee
    assert (
        "60" in guarantee.statement()
        and "60" in guarantee.caption()
        and "whatever batch" in guarantee.statement()
    )
    assert Guarantee.from_dict(guarantee.to_dict()) == guarantee
    other = guarantee.replace(smoothness=200.0)
    # Two runs cost what is stated to neighbours within both assumptions, and others more.
    assert guarantee.followed_by(other, planned=True).smoothness == 60.0
    wider = guarantee.replace(gradient_gap=2.0)
    assert wider.followed_by(guarantee, planned=True).gradient_gap == 1.0
    with pytest.raises(ValueError, match="smoothness"):
        protect.Protect("replace_agent", norm="l1", gradient_gap=1.0, smoothness=-1.0)


def test_models_that_are_sent_are_wide_and_stops_by_hidden_ones_are_told():
    task = fused()
    observed = []
    training_plan = plan.make(config(), MATRIX)
    result = run(
        training_plan, task, seeds=(0,), eval_every=10, callback=lambda p: len(observed) > 3
    )
    assert result.guarantees[0].private_stop
    narrow = dataclasses.replace(
        task, init=lambda key: jnp.zeros(2, jnp.bfloat16), init_per_agent=False
    )
    with pytest.raises(ValueError, match="bfloat16"):
        run(training_plan, narrow, seeds=(0,), eval_every=10)


def test_scales_that_float32_has_not_are_refused():
    with pytest.raises(ValueError, match="scale is .*e-3[1-9]; .* from 1e-30"):
        plan.make(config(noise=ScheduledLaplace(0.09), optimizer=Sgd(GAMMA, decay=0.05)), MATRIX)


def test_one_message_alone_shows_nothing():
    with pytest.raises(ValueError, match="2 rounds"):
        plan.make(config(rounds=1), MATRIX)


def test_what_schedule_costs_where_full_batches_divide_by_records():
    values = normal(sampler=samplers.Full(), protect=protect.Protect("replace_record", 1.0))
    counts = np.array([4, 6, 5, 6, 3], np.int64)
    training_plan = plan.make(values, MATRIX, counts=counts)
    first = float(training_plan.noise.scales[0])
    result = scheduled.cost(values, MATRIX, first, counts=counts)
    np.testing.assert_allclose(result, 1.0, rtol=1e-5)
    # Twice as many records, half the move: as at twice the noise.
    double = scheduled.cost(values, MATRIX, first, counts=2 * counts)
    np.testing.assert_allclose(
        double, scheduled.cost(values, MATRIX, 2 * first, counts=counts), rtol=1e-5
    )
    assert double < 0.6 * result
    with pytest.raises(ValueError, match="counts is None for sampler Full"):
        scheduled.cost(values, MATRIX, first)
