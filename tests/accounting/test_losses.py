"""Losses against independent computations: never below the truth, close above it."""

import json
import math

import mpmath
import numpy as np
import pytest

from dpjax.accounting import gdp
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.losses import Concentrated, Gaussian, Phase, Pld, Pure
from dpjax.results import captions

DELTA = 1e-5


def density(x, mean):
    return np.exp(-0.5 * (x - mean) ** 2) / math.sqrt(2 * math.pi)


def sampled_delta(rate, ratio, rounds, epsilon, *, other=0.0):
    """Exact delta of one or two rounds, the worse direction, by the midpoint rule.

    ``other`` is the mean that the record's replacement gives; 0 is a record zeroed out.
    """
    places = np.linspace(-10 - ratio, 10 + ratio, 6001 if rounds == 1 else 3001)
    places = (places[1:] + places[:-1]) / 2
    step = places[1] - places[0]
    present = (1 - rate) * density(places, 0.0) + rate * density(places, ratio)
    gone = (1 - rate) * density(places, 0.0) + rate * density(places, other)
    results = []
    for p, q in ((present, gone), (gone, present)):
        if rounds == 2:
            p = np.outer(p, p)
            q = np.outer(q, q)
        results.append(np.maximum(p - math.exp(epsilon) * q, 0).sum() * step**rounds)
    return max(results)


SAMPLED = [(0.3, 1.0, 1), (0.05, 2.0, 2), (0.9, 1.5, 1), (0.5, 0.7, 2), (0.01, 3.0, 2)]
FEW_SAMPLED = SAMPLED[:3]


@pytest.mark.parametrize(
    ("rate", "ratio", "rounds"),
    [*FEW_SAMPLED, *(pytest.param(*item, marks=pytest.mark.slow) for item in SAMPLED[3:])],
)
def test_sampled_rounds_against_their_integral(rate, ratio, rounds):
    stated = Pld.of([rate], [ratio], rounds).epsilon(DELTA)
    assert sampled_delta(rate, ratio, rounds, stated) <= DELTA * (1 + 1e-4)
    # Close: an epsilon half a percent below does not hold.
    assert sampled_delta(rate, ratio, rounds, 0.995 * stated) > DELTA


@pytest.mark.mutant
def test_rate_or_sensitivity_that_is_understated_is_seen():
    for rate, ratio, rounds in FEW_SAMPLED:
        reduced = Pld.of([rate / 2], [ratio], rounds).epsilon(DELTA)
        assert sampled_delta(rate, ratio, rounds, reduced) > 1.5 * DELTA
        reduced = Pld.of([rate], [0.9 * ratio], rounds).epsilon(DELTA)
        assert sampled_delta(rate, ratio, rounds, reduced) > 1.2 * DELTA


def test_replacement_loses_more_than_zeroing_out():
    stated = Pld.of([0.3], [1.0], 1).epsilon(DELTA)
    assert sampled_delta(0.3, 1.0, 1, stated, other=-1.0) > 2 * DELTA


@pytest.mark.parametrize(
    ("rate", "ratio", "rounds"),
    [pytest.param(0.01, 1.0, 1000, marks=pytest.mark.slow), (0.2, 0.1, 300)],
)
def test_many_sampled_rounds_against_another_accountant(rate, ratio, rounds):
    from dp_accounting import dp_event, pld
    from dp_accounting.privacy_accountant import NeighboringRelation

    accountant = pld.PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(1 / ratio))
    accountant.compose(dp_event.SelfComposedDpEvent(event, rounds))
    other = accountant.get_epsilon(DELTA)
    mine = Pld.of([rate], [ratio], rounds).epsilon(DELTA)
    assert mine == pytest.approx(other, rel=2e-3) and mine >= 0.9999 * other
    # And above what the same library gives when it rounds every loss down.
    from dp_accounting.pld import privacy_loss_distribution

    below = privacy_loss_distribution.from_gaussian_mechanism(
        1 / ratio,
        sampling_prob=rate,
        pessimistic_estimate=False,
        value_discretization_interval=1e-5,
        use_connect_dots=False,
    ).self_compose(rounds)
    assert 0.97 * mine <= below.get_epsilon_for_delta(DELTA) <= mine


def test_sampling_every_record_is_gaussian():
    assert Pld.of([1.0], [0.1], 100).epsilon(DELTA) == pytest.approx(
        gdp.epsilon(1.0, DELTA), rel=1e-10
    )
    assert Pld.of([0.0], [0.1], 100).epsilon(DELTA) == 0
    # Below what float64 tells apart, the loss without sampling stands.
    for delta in (1e-260, 0.0):
        assert Pld.of([0.5], [1.0], 10).epsilon(delta) == gdp.epsilon(
            math.sqrt(10) * (1 + 1e-12), delta
        )


def test_gaussian_that_is_not_white_counts_once_among_sampled_losses():
    single = Gaussian(1.0, rounds=9, white=False, over_rounds="correlated")
    exact = single.epsilon(1e-5)
    assert exact <= single.sampled(2).epsilon(1e-5) < 1.01 * exact


def test_agent_that_loses_most_decides():
    loss = Pld.of([0.1, 0.2, 0.1, 0.05], [0.5, 0.5, 0.4, 0.8], 20)
    single = loss.phases[0]
    pairs = zip(single.rates, single.ratios, strict=True)
    each = [Pld.of([rate], [ratio], 20).epsilon(DELTA) for rate, ratio in pairs]
    assert loss.epsilon(DELTA) == max(each) and len(each) == 4
    assert each[1] > each[0] > each[2]


def test_sampled_losses_compose_and_are_spent():
    loss = Pld.of([0.1, 0.3], [0.5, 0.2], 30)
    parts = loss.after(10).then(Pld.of([0.1, 0.3], [0.5, 0.2], 20))
    assert parts.rounds == 30
    assert parts.epsilon(DELTA) == pytest.approx(loss.epsilon(DELTA), rel=1e-3)
    assert loss.after(0).epsilon(DELTA) == 0
    with pytest.raises(ValueError, match="covers 30"):
        loss.after(31)
    # Drawn in every tenth round at most: one that has begun counts.
    dealt = Pld.of([0.1], [0.5], 30, separation=10)
    each = Pld.of([0.1], [0.5], 3)
    for rounds, draws in ((1, 1), (10, 1), (11, 2), (30, 3)):
        assert dealt.after(rounds).epsilon(DELTA) == each.after(draws).epsilon(DELTA)
    # A Gaussian run before or after: above each alone, below both without sampling.
    gaussian = Gaussian(0.5, 10)
    for pair in (gaussian.then(loss), loss.then(gaussian)):
        epsilon = pair.epsilon(DELTA)
        assert epsilon > max(loss.epsilon(DELTA), gaussian.epsilon(DELTA))
        assert epsilon < gdp.epsilon(math.hypot(0.5, 0.5 * math.sqrt(30)), DELTA)
    # White noise is spent by rounds, correlated noise at once.
    assert gaussian.then(loss).after(5).epsilon(DELTA) == pytest.approx(
        gaussian.after(5).epsilon(DELTA), rel=1e-9
    )
    late = Gaussian(0.5, 10, white=False).then(loss).after(1)
    assert late.epsilon(DELTA) == pytest.approx(gaussian.epsilon(DELTA), rel=1e-9)


def test_gaussian_in_sampled_composition_against_integral():
    """One sampled round and one Gaussian one, both directions."""
    rate = 0.2
    ratio = 1.5
    mu = 0.8
    stated = Pld.of([rate], [ratio], 1).then(Gaussian(mu)).epsilon(DELTA)
    places = np.linspace(-11, 13, 3001)
    step = places[1] - places[0]
    present = (1 - rate) * density(places, 0) + rate * density(places, ratio)
    pairs = [(present, density(places, mu)), (density(places, 0), density(places, 0))]
    p, q = (np.outer(*pair) for pair in pairs)

    def delta(epsilon):
        sides = ((p, q), (q, p))
        return max(np.maximum(a - math.exp(epsilon) * b, 0).sum() * step**2 for a, b in sides)

    assert delta(stated) <= DELTA * (1 + 1e-4) and delta(0.99 * stated) > DELTA


def best_order(rho, delta):
    """Proposition 12 of Canonne, Kamath and Steinke, by brute force in 40 digits."""
    with mpmath.workdps(40):
        rho = mpmath.mpf(rho)
        delta = mpmath.mpf(delta)
        results = []
        for exponent in np.linspace(-6, 9, 3001):
            a = mpmath.exp(mpmath.mpf(float(exponent)))
            alpha = 1 + a
            results.append(
                rho * alpha + mpmath.log(1 - 1 / alpha) - (mpmath.log(delta * alpha)) / a
            )
        return float(max(0, min(results)))


@pytest.mark.parametrize("rho", [1e-4, 0.01, 0.5, 10.0])
def test_concentrated_against_brute_force_and_gaussian(rho):
    stated = Concentrated(rho).epsilon(DELTA)
    assert stated == pytest.approx(best_order(rho, DELTA), rel=1e-5)
    # Gaussian noise is one such mechanism; a conversion that halved rho would be below it.
    exact = gdp.epsilon(math.sqrt(2 * rho), DELTA)
    assert stated >= exact
    assert Concentrated(rho / 2).epsilon(DELTA) < exact
    assert stated <= rho + 2 * math.sqrt(-rho * math.log(DELTA))


def test_concentrated_at_ends():
    assert Concentrated(0.0).epsilon(DELTA) == 0
    assert Concentrated(1.0).epsilon(0.0) == math.inf
    assert Concentrated(math.inf).epsilon(DELTA) == math.inf
    # What roundings take of delta: whole from the first round on, and of two runs both.
    partial = Concentrated(1.0, 4, True, failure=DELTA / 4)
    assert partial.epsilon(DELTA) == Concentrated(1.0).epsilon(0.75 * DELTA)
    assert partial.epsilon(DELTA / 4) == math.inf and partial.after(0).epsilon(DELTA) == 0
    assert partial.after(0).epsilon(0.0) == math.inf
    assert partial.after(1) == Concentrated(partial.after(1).rho, 1, True, failure=DELTA / 4)
    pair = partial.then(Concentrated(1.0, 2, failure=DELTA / 8))
    assert DELTA * 3 / 8 <= pair.failure <= DELTA * 3 / 8 * (1 + 1e-14)
    assert f", and {DELTA / 4:g} of delta for rounding" in partial.size_text()
    with pytest.raises(ValueError, match="failure is -1"):
        Concentrated(1.0, failure=-1.0)
    with pytest.raises(ValueError, match="dp_accounting has no event"):
        partial.dp_event(None, DELTA)
    with pytest.raises(ValueError, match="rho is -1"):
        Concentrated(-1.0)


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 4.0])
def test_pure_loss_is_concentrated_as_stated(epsilon):
    """Randomised response, the worst of its kind, has every Renyi divergence below rho alpha."""
    rho = Pure(epsilon).concentrated().rho
    high = 1 / (1 + math.exp(-epsilon))
    p = np.array([high, 1 - high])
    q = np.array([1 - high, high])
    orders = 1 + np.geomspace(1e-3, 1e3, 400)
    log_terms = orders[:, None] * np.log(p) + (1 - orders[:, None]) * np.log(q)
    divergences = np.logaddexp(*log_terms.T) / (orders - 1)
    assert (divergences <= rho * orders).all()
    # A quarter of it, which holds for smaller classes of mechanisms, does not.
    assert (divergences > rho / 4 * orders).any()


def test_what_composes():
    assert Pure(1.0, 3).then(Pure(0.5, 2)) == Pure(1.5 * (1 + 1e-15), 5)
    pair = Concentrated(0.1, 3).then(Gaussian(1.0, 2))
    assert pair.rounds == 5 and pair.rho == pytest.approx(0.6) and pair.rho >= 0.6
    assert Gaussian(1.0, 2).then(Concentrated(0.1, 3)).rho == pytest.approx(0.6)
    assert Concentrated(0.1).then(Pure(1.0)).rho == pytest.approx(0.6)
    assert Pure(1.0).then(Concentrated(0.1)).rho == pytest.approx(0.6)
    assert Gaussian(3.0).then(Gaussian(4.0)).mu == pytest.approx(5.0)
    for first, later, remedy in (
        (Pure(1.0), Gaussian(1.0), "concentrated"),
        (Gaussian(1.0), Pure(1.0), "concentrated"),
        (Pld.of([0.5], [1.0], 1), Pure(1.0), "apart"),
        (Pld.of([0.5], [1.0], 1), Concentrated(1.0), "apart"),
        (Concentrated(1.0), Pld.of([0.5], [1.0], 1), "apart"),
        (Pure(1.0), Pld.of([0.5], [1.0], 1), "apart"),
    ):
        with pytest.raises(ValueError, match=f"do not compose; .*{remedy}"):
            first.then(later)


def test_what_is_spent_after_some_rounds():
    assert Pure(2.0, 10, even=True).after(5).bound == pytest.approx(1.0)
    assert Pure(2.0, 10).after(1).bound == 2.0 and Pure(2.0, 10).after(0).bound == 0
    assert Concentrated(2.0, 10, even=True).after(5).rho >= 1.0
    dealt = Concentrated(2.0, 10, even=True, participation=(2, 4))
    assert [round(dealt.after(t).rho, 6) for t in (0, 1, 4, 5, 10)] == [0, 1, 1, 2, 2]
    for invalid in ((11, 1), (1, 0), [1, 1], (1,)):
        with pytest.raises(ValueError, match="participation"):
            Concentrated(2.0, 10, participation=invalid)
    assert Concentrated(2.0, 10).after(3).rho == 2.0
    assert Gaussian(2.0, 4).after(1).mu == pytest.approx(1.0)
    for loss in (Pure(1.0, 3), Concentrated(1.0, 3), Gaussian(1.0, 3)):
        with pytest.raises(ValueError, match="covers 3"):
            loss.after(4)


@pytest.mark.parametrize("ratio", [1e-200, 1e-13, 1e5, 1e160])
def test_ratios_of_any_size_have_loss(ratio):
    got = Pld.of([0.1], [ratio], 3).epsilon(1e-5)
    plain = gdp.epsilon(ratio * math.sqrt(3), 1e-5)
    assert 0 <= got <= plain * (1 + 1e-9)
    assert got >= Pld.of([0.1], [min(ratio, 100.0)], 3).epsilon(1e-5) * (1 - 1e-9)


def test_bad_losses_are_refused():
    with pytest.raises(ValueError, match="rates has 1.01"):
        Pld.of([1.01], [1.0], 2)
    with pytest.raises(ValueError, match="ratios has -1"):
        Pld.of([0.5], [-1.0], 2)
    with pytest.raises(ValueError, match="one each an agent"):
        Phase((0.5,), (1.0, 2.0), 3)
    with pytest.raises(ValueError, match="same agents"):
        Pld.of([0.5], [1.0], 2).then(Pld.of([0.5, 0.5], [1.0, 1.0], 2))


OTHERS = [
    Pld.of([0.1, 0.2], [0.5, 0.5], 20),
    Concentrated(0.3, 20, even=True),
    Pure(1.5, 20),
]


def guarantee(loss, **change):
    fields = {
        "epsilon": loss.epsilon(DELTA),
        "delta": DELTA,
        "mu": None,
        "relation": "zero_out_record",
        "attacker": "outsider",
        "rounds": 20,
        "clip_norm": 1.0,
        "accountant": loss.kind,
        "release": False,
        "other_loss": loss,
    }
    return Guarantee.of(**(fields | change))


@pytest.mark.parametrize("loss", OTHERS, ids=lambda loss: loss.kind)
def test_guarantee_is_never_below_its_loss(loss):
    record = guarantee(loss)
    assert record.loss == loss and record.exact_epsilon == record.epsilon
    with pytest.raises(ValueError, match=f"a {type(loss).__name__} loss"):
        guarantee(loss, epsilon=0.999 * record.epsilon)
    with pytest.raises(ValueError, match="accountant is 'gdp'"):
        guarantee(loss, accountant="gdp")
    with pytest.raises(ValueError, match="mu is 0.1"):
        guarantee(loss, mu=0.1)
    with pytest.raises(ValueError, match="covers 20"):
        guarantee(loss, rounds=21)
    with pytest.raises(ValueError, match="per_agent_epsilon is"):
        guarantee(loss, per_agent_epsilon=(record.epsilon,))
    text = json.dumps(record.to_dict(), allow_nan=False)
    assert Guarantee.from_dict(json.loads(text)) == record
    spent = record.after(10)
    assert spent.epsilon == loss.after(10).epsilon(DELTA) and spent.rounds == 10
    assert "mu =" not in record.caption() and f"{loss.kind} accountant" in record.caption()
    assert "mu =" not in record.statement() and "mu =" not in captions.guarantees(record)[0]
    with pytest.raises(ValueError, match="Gaussian losses alone"):
        record.stopping_at([10, 20])
    pair = record.after(10).followed_by(record, planned=True)
    assert pair.rounds == 30 and pair.epsilon > record.epsilon
    dearer = record.replace(epsilon=10.0, added_epsilon=0.01, added_delta=DELTA / 100)
    assert dearer.exact_epsilon >= record.exact_epsilon + 0.01


def test_sampled_guarantees_are_for_outsiders_and_zeroed_records_alone():
    loss = OTHERS[0]
    for change in ({"relation": "replace_record"}, {"attacker": "coalition"}):
        with pytest.raises(ValueError, match="zero_out_record and an outsider alone"):
            guarantee(loss, **change)


def test_gaussian_is_stated_by_its_mu():
    with pytest.raises(ValueError, match="mu is None"):
        guarantee(OTHERS[0], other_loss=None, accountant="gdp")
    plain = guarantee(OTHERS[0], other_loss=None, mu=0.5, epsilon=9.0, accountant="gdp")
    assert plain.loss == Gaussian(0.5, 20)
    # Records of before read as they did, and are written as they were.
    assert not {"other_loss", "nodes"} & set(plain.to_dict())
    # A Gaussian run and a sampled one.
    pair = plain.followed_by(guarantee(OTHERS[0]), planned=True)
    assert pair.accountant == "pld" and pair.mu is None
    assert pair.epsilon > max(plain.exact_epsilon, OTHERS[0].epsilon(DELTA))
