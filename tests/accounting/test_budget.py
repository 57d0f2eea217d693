"""Budgets: the published numbers, the paper's limits, and Theorem 2 against a dense oracle."""

import math

import numpy as np
import pytest

from dpjax.accounting import budget, gdp
from dpjax.contrib import published
from dpjax.topology import graphs, mixing

SETTING = {"rounds": 5000, "clip_norm": 0.1, "relation": "replace_agent"}
CHECKED = {
    3: (1023.4, 576.4, 386.8),
    10: (92.10, 64.50, 49.98),
    40: (5.76, 6.98, 6.11),
}


@pytest.mark.parametrize("epsilon", CHECKED)
def test_variance_of_independent_noise_as_published(epsilon):
    results = [
        1 / budget.precision_bound(epsilon, 1e-5, accountant=name, allow_unsound=True, **SETTING)
        for name in ("paper", "rdp", "gdp")
    ]
    assert results == pytest.approx(CHECKED[epsilon], rel=1.2e-3)


def test_formulas_of_note():
    epsilon = 7.0
    delta = 1e-6
    rounds = 300
    clip = 0.25
    setting = {"rounds": rounds, "clip_norm": clip, "relation": "replace_record"}
    log = math.log(1 / delta)
    paper = epsilon**2 / (16 * clip**2 * rounds * log)
    rdp = (math.sqrt(log + epsilon) - math.sqrt(log)) ** 2 / (2 * rounds * clip**2)
    exact = gdp.mu(epsilon, delta) ** 2 / (4 * clip**2 * rounds)
    for name, value in (("paper", paper), ("rdp", rdp), ("gdp", exact)):
        bound = budget.precision_bound(epsilon, delta, accountant=name, **setting)
        assert bound == pytest.approx(value, rel=1e-12)
        assert bound <= value


def test_sensitivity_and_unit_follow_relation():
    assert budget.clipped_sensitivity("replace_agent", 0.5) == 1.0
    assert budget.clipped_sensitivity("replace_record", 0.5) == 1.0
    assert budget.clipped_sensitivity("zero_out_record", 0.5) == 0.5
    units = ["agent", "record", "record", "client", "client"]
    assert [budget.unit(relation) for relation in budget.RELATIONS] == units
    # A client fills an agent's cohort slot: its gradient is then the agent's.
    clips = ["agent", "record", "record", "agent", "agent"]
    assert [budget.clips(relation) for relation in budget.RELATIONS] == clips
    for invalid in ("replace", "", None, "add_or_remove"):
        with pytest.raises(ValueError, match="relation is"):
            budget.clipped_sensitivity(invalid, 1.0)
        with pytest.raises(ValueError, match="relation is"):
            budget.unit(invalid)


def test_relation_has_no_default():
    with pytest.raises(TypeError, match="relation"):
        budget.precision_bound(1.0, 1e-5, rounds=1, clip_norm=1.0)
    with pytest.raises(TypeError, match="relation"):
        budget.loss(np.eye(2), 1e-5, rounds=1, clip_norm=1.0)


def test_limits_of_papers_rule():
    limits = published.paper_limits(1e-5)
    assert limits == pytest.approx((11.513, 26.976, 36.087), rel=1e-4)
    # Independent: each limit is where the conversion of the paper's mu meets the claim.
    costs = ((3, 2.22, 1.74), (10, 8.16, 6.90), (30, 31.0, 27.9), (40, 45.7, 41.8))
    for epsilon, rdp, exact in costs:
        mu = budget.allowed_mu(epsilon, 1e-5, accountant="paper", allow_unsound=True)
        assert budget.claimed_epsilon(mu, 1e-5, accountant="rdp") == pytest.approx(rdp, abs=0.05)
        assert gdp.epsilon(mu, 1e-5) == pytest.approx(exact, abs=0.05)


def test_papers_rule_is_refused_where_it_is_false():
    fine = budget.precision_bound(36, 1e-5, accountant="paper", **SETTING)
    assert fine > 0
    with pytest.raises(ValueError, match=r"exact epsilon 41\.7.*allow_unsound"):
        budget.precision_bound(40, 1e-5, accountant="paper", **SETTING)
    bound = budget.precision_bound(40, 1e-5, accountant="paper", allow_unsound=True, **SETTING)
    with pytest.raises(ValueError, match="its rule is false"):
        budget.loss(np.eye(3) / bound, 1e-5, accountant="paper", **SETTING)
    pair = budget.loss(np.eye(3) / bound, 1e-5, accountant="paper", allow_unsound=True, **SETTING)
    assert pair.epsilon[0] == pytest.approx(40)
    assert pair.exact_epsilon[0] == pytest.approx(41.76, abs=0.01)


@pytest.mark.parametrize("accountant", ["gdp", "rdp"])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
def test_safe_accountants_never_claim_less_than_exact_epsilon(accountant, delta):
    mu = np.geomspace(1e-6, 100, 60)
    claimed = budget.claimed_epsilon(mu, delta, accountant=accountant)
    assert (claimed >= gdp.epsilon(mu, delta)).all()


@pytest.mark.parametrize("accountant", budget.ACCOUNTANTS)
@pytest.mark.parametrize("relation", budget.RELATIONS)
def test_loss_undoes_bound(accountant, relation):
    epsilons = np.array([0.5, 3.0, 10.0, 20.0])
    setting = {"rounds": 70, "clip_norm": 0.3, "relation": relation, "accountant": accountant}
    bounds = budget.precision_bound(epsilons, 1e-5, **setting)
    loss = budget.loss(np.diag(1 / bounds * (1 + 1e-9)), 1e-5, **setting)
    assert (loss.epsilon <= epsilons).all()
    assert loss.epsilon == pytest.approx(epsilons, rel=1e-8)
    assert np.argmax(loss.size) == 3
    assert (loss.exact_epsilon <= loss.epsilon).all()


def dense_mu(covariance, rounds, shift, victim, mixing=None):
    """The loss of the stacked mechanism: |Sigma^-1/2 mean shift|, from the messages themselves.

    Messages are x_t = W x_t-1 + g_t + v_t (less a step size), every round's gradient of the victim
    moved by ``shift`` along one coordinate.
    """
    n = len(covariance)
    weights = np.eye(n) if mixing is None else mixing
    view = np.zeros((rounds * n, rounds * n))
    for t in range(rounds):
        for s in range(t + 1):
            power = np.linalg.matrix_power(weights, t - s)
            view[t * n : (t + 1) * n, s * n : (s + 1) * n] = power
    sigma = view @ np.kron(np.eye(rounds), covariance) @ view.T
    gradients = np.zeros(rounds * n)
    gradients[victim::n] = shift
    mean = view @ gradients
    return math.sqrt(mean @ np.linalg.solve(sigma, mean))


def random_covariance(n, seed):
    square = np.random.default_rng(seed).normal(size=(n, 2 * n))
    return square @ square.T / n


def check_loss_against_dense(loss_function, seed):
    n = 4
    rounds = 3
    clip = 0.7
    covariance = random_covariance(n, seed)
    weights = mixing.metropolis_hastings(graphs.erdos_renyi(n, 0.6, seed))
    for relation, shift in (("replace_agent", 2 * clip), ("zero_out_record", clip)):
        loss = loss_function(covariance, 1e-5, rounds=rounds, clip_norm=clip, relation=relation)
        for victim in range(n):
            for matrix in (None, weights):
                truth = dense_mu(covariance, rounds, shift, victim, matrix)
                assert loss.size[victim] == pytest.approx(truth, rel=1e-9)
                assert loss.epsilon[victim] == pytest.approx(gdp.epsilon(truth, 1e-5), rel=1e-8)


@pytest.mark.parametrize("seed", range(4))
def test_loss_equals_dense_mechanism(seed):
    check_loss_against_dense(budget.loss, seed)


@pytest.mark.mutant
def test_broken_losses_are_caught():
    def swapped(covariance, delta, *, relation, **rest):
        other = {"replace_agent": "zero_out_record", "zero_out_record": "replace_agent"}[relation]
        return budget.loss(covariance, delta, relation=other, **rest)

    def one_round(covariance, delta, *, rounds, **rest):
        return budget.loss(covariance, delta, rounds=1, **rest)

    def marginal(covariance, delta, **rest):
        # 1 / R_ii, as if the other agents' messages were not seen.
        return budget.loss(np.diag(np.diag(covariance)), delta, **rest)

    for broken in (swapped, one_round, marginal):
        with pytest.raises(AssertionError):
            check_loss_against_dense(broken, 0)


def test_loss_from_factor_and_of_reference_that_is_none():
    covariance = random_covariance(6, 1)
    factor = np.linalg.cholesky(covariance)
    by_factor = budget.loss(None, 1e-5, factor=factor, **SETTING)
    by_covariance = budget.loss(covariance, 1e-5, **SETTING)
    assert by_factor.size == pytest.approx(by_covariance.size, rel=1e-9)
    with pytest.raises(ValueError, match="central"):
        budget.loss(np.ones((6, 6)), 1e-5, **SETTING)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"rounds": 0}, "rounds"),
        ({"rounds": 2.5}, "rounds"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"clip_norm": math.inf}, "clip_norm"),
        ({"accountant": "renyi"}, "accountant"),
    ],
)
def test_invalid_budgets_are_refused(change, name):
    call = {"epsilon": 1.0, "delta": 1e-5, "accountant": "gdp", **SETTING} | change
    with pytest.raises(ValueError, match=f"{name} (is|holds)"):
        budget.precision_bound(call.pop("epsilon"), call.pop("delta"), **call)


def test_squared_sensitivity_takes_place_of_rounds():
    setting = {"clip_norm": 0.5, "relation": "zero_out_record"}
    for number in (1, 20):
        bound = budget.precision_bound(2.0, 1e-6, rounds=number, **setting)
        assert bound == budget.precision_bound(2.0, 1e-6, sensitivity_squared=number, **setting)
        mine = budget.loss(np.eye(3), 1e-6, rounds=number, **setting)
        other = budget.loss(np.eye(3), 1e-6, sensitivity_squared=number, **setting)
        np.testing.assert_array_equal(mine.size, other.size)
    half = budget.precision_bound(2.0, 1e-6, sensitivity_squared=0.5, **setting)
    assert half == pytest.approx(2 * budget.precision_bound(2.0, 1e-6, rounds=1, **setting))
    for invalid in ({}, {"rounds": 1, "sensitivity_squared": 1.0}):
        with pytest.raises(ValueError, match="give exactly one"):
            budget.precision_bound(2.0, 1e-6, **setting, **invalid)
    with pytest.raises(ValueError, match="sensitivity_squared is 0"):
        budget.loss(np.eye(3), 1e-6, sensitivity_squared=0, **setting)


def test_loss_of_correlated_noise_is_dense_one():
    """A record in rounds 1 and 4 of 6 of agent 1: the whitened distance in the full covariance."""
    rng = np.random.default_rng(0)
    strategy = np.tril(rng.uniform(0.1, 1, (6, 6)))
    factor = rng.normal(size=(3, 3))
    inverse = np.linalg.inv(strategy)
    covariance = np.kron(inverse @ inverse.T, factor @ factor.T)
    squared = 0.0
    dense = 0.0
    for start in range(3):
        taking = np.zeros(6)
        taking[[start, start + 3]] = 1
        squared = max(squared, np.sum((strategy @ taking) ** 2))
        for agent in range(3):
            shift = 0.7 * np.kron(taking, np.eye(3)[agent])
            dense = max(dense, np.sqrt(shift @ np.linalg.solve(covariance, shift)))
    result = budget.loss(
        None, 1e-6, factor=factor, clip_norm=0.7, relation="zero_out_record",
        sensitivity_squared=squared,
    )  # fmt: skip
    assert result.size.max() == pytest.approx(dense, rel=1e-9)
