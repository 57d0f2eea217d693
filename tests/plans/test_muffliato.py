"""Several gossip steps a gradient: the plan's loss is that of all messages of all steps."""

import dataclasses

import numpy as np
import pytest

from dpjax.accounting import views
from dpjax.algorithms.dsgd import DSGD
from dpjax.engine.run import run
from dpjax.mechanism.participation import Participation
from dpjax.plans import noise, plan
from tests.support import make_config, with_factor

K = 3
T = 4
EVERY = Participation(T, T, 1)


def make(network, **changes):
    options = {"design": "independent", "rounds": T, "method": DSGD(gossip_steps=K)}
    return plan.make(make_config(**(options | changes)), network)


def dense_mu(result, rows=slice(None)):
    """Loss of the worst agent, from the dense view of the messages of all steps of all rounds.

    ``rows`` chooses among the K n messages of a round.
    """
    n = result.agents
    rounds = result.config.rounds
    view = views.muffliato(result.mixing, K, covariance=result.covariance()).ldp()
    parts = view.materialize(rounds)
    a, b = (part.reshape(rounds, K * n, -1)[:, rows].reshape(-1, part.shape[1]) for part in parts)
    gram = a.T @ np.linalg.pinv(b @ b.T, rcond=1e-12, hermitian=True) @ a
    # Gradients of an agent move together in every round.
    each = np.abs(gram.reshape(rounds, n, rounds, n)).sum(axis=(0, 2)).diagonal()
    return result.config.protect.sensitivity * np.sqrt(each.max())


@pytest.mark.parametrize("design", ["independent", "whisper"])
def test_outsiders_loss_is_that_of_all_messages(network, design):
    result = make(network, design=design)
    assert result.guarantee.attacker == "outsider" and result.guarantee.gradients == "any"
    assert result.guarantee.mu == pytest.approx(dense_mu(result), rel=1e-6)
    # Messages of later steps are functions of the first one's, and cost nothing more.
    n = result.agents
    assert dense_mu(result, slice(0, n)) == pytest.approx(result.guarantee.mu, rel=1e-6)
    single = make(network, design=design, method=DSGD())
    assert single.guarantee.mu == result.guarantee.mu
    # Whoever sees the last step alone sees less: accounting of that would understate.
    assert dense_mu(result, slice(n, n + 2)) < 0.99 * result.guarantee.mu
    with pytest.raises(ValueError, match="guarantee states epsilon"):
        with_factor(result, np.float32(0.5) * result.factor)


def test_nodes_gain_no_less_than_outsiders_under_any_gradients(network):
    result = make(network)
    sensitivity = result.config.protect.sensitivity
    algorithm = views.muffliato(network, K, covariance=result.covariance())
    for node in range(result.agents):
        loss = algorithm.pndp(node).gdp(EVERY)
        assert np.nanmax(loss) * sensitivity == pytest.approx(result.guarantee.mu, rel=1e-6)


@pytest.mark.slow
def test_run_gossips_as_often(network, small):
    plans = [make(network, method=DSGD(steps)) for steps in (1, K)]
    once, often = (run(item, small, seeds=[0]) for item in plans)
    assert often.metrics["consensus"][-1] < 0.5 * once.metrics["consensus"][-1]
    assert once.guarantees[0] == often.guarantees[0]
    with pytest.raises(ValueError, match="plans differ in method"):
        run(plans, small, seeds=[0])


def test_it_is_one_changed_argument(network):
    config = make_config(design="independent")
    changed = dataclasses.replace(config, method=DSGD(gossip_steps=4))
    assert plan.make(changed, network).guarantee == plan.make(config, network).guarantee
    assert changed.noise == noise.Independent()
