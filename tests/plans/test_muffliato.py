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

K, T = 3, 4
EVERY = Participation(T, T, 1)


def make(network, **changes):
    given = {"design": "independent", "rounds": T, "method": DSGD(gossip_steps=K)}
    return plan.make(make_config(**(given | changes)), network)


def dense_mu(made, rows=slice(None)):
    """Loss of the worst agent, from the dense view of the messages of all steps of all rounds.

    ``rows`` chooses among the K n messages of a round.
    """
    n, rounds = made.agents, made.config.rounds
    view = views.muffliato(made.mixing, K, covariance=made.covariance()).ldp()
    parts = view.materialize(rounds)
    a, b = (part.reshape(rounds, K * n, -1)[:, rows].reshape(-1, part.shape[1]) for part in parts)
    gram = a.T @ np.linalg.pinv(b @ b.T, rcond=1e-12, hermitian=True) @ a
    # Gradients of an agent move together in every round.
    each = np.abs(gram.reshape(rounds, n, rounds, n)).sum(axis=(0, 2)).diagonal()
    return made.config.protect.sensitivity * np.sqrt(each.max())


@pytest.mark.parametrize("design", ["independent", "whisper"])
def test_the_outsiders_loss_is_that_of_all_messages(network, design):
    made = make(network, design=design)
    assert made.guarantee.attacker == "outsider" and made.guarantee.gradients == "any"
    assert made.guarantee.mu == pytest.approx(dense_mu(made), rel=1e-6)
    # Messages of later steps are functions of the first one's, and cost nothing more.
    n = made.agents
    assert dense_mu(made, slice(0, n)) == pytest.approx(made.guarantee.mu, rel=1e-6)
    one = make(network, design=design, method=DSGD())
    assert one.guarantee.mu == made.guarantee.mu
    # Whoever sees the last step alone sees less: accounting of that would understate.
    assert dense_mu(made, slice(n, n + 2)) < 0.99 * made.guarantee.mu
    with pytest.raises(ValueError, match="guarantee states epsilon"):
        with_factor(made, np.float32(0.5) * made.factor)


def test_nodes_gain_no_less_than_outsiders_under_any_gradients(network):
    made = make(network)
    sensitivity = made.config.protect.sensitivity
    algorithm = views.muffliato(network, K, covariance=made.covariance())
    for node in range(made.agents):
        loss = algorithm.pndp(node).gdp(EVERY)
        assert np.nanmax(loss) * sensitivity == pytest.approx(made.guarantee.mu, rel=1e-6)


@pytest.mark.slow
def test_a_run_gossips_as_often(network, small):
    plans = [make(network, method=DSGD(steps)) for steps in (1, K)]
    once, often = (run(one, small, seeds=[0]) for one in plans)
    assert often.metrics["consensus"][-1] < 0.5 * once.metrics["consensus"][-1]
    assert once.guarantees[0] == often.guarantees[0]
    with pytest.raises(ValueError, match="plans differ in method"):
        run(plans, small, seeds=[0])


def test_it_is_one_changed_argument(network):
    config = make_config(design="independent")
    changed = dataclasses.replace(config, method=DSGD(gossip_steps=4))
    assert plan.make(changed, network).guarantee == plan.make(config, network).guarantee
    assert changed.noise == noise.Independent()
