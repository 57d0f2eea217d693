"""Sums by relays: what goes over the links, that it is a sum's, and what it tells."""

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

from dpjax.accounting import views
from dpjax.algorithms import sketches
from dpjax.algorithms.exchange import Sum
from dpjax.algorithms.federated import Federated
from dpjax.contrib.relays import Relayed, spanning
from dpjax.engine.run import run
from dpjax.plans import dependence, plan
from dpjax.plans.noise import SumShares
from dpjax.plans.optimizers import Sgd
from dpjax.topology import graphs, mixing
from dpjax.transforms import noise, variates
from tests.support import composed, make_config, make_problem

N = 6
D = 3
GRAPHS = {
    "path": graphs.path(N),
    "ring": graphs.ring(N),
    "star": graphs.star(N),
    "complete": graphs.complete(N),
    "random": graphs.erdos_renyi(N, 0.4, 3),
}


def tree(name):
    return Relayed(spanning(mixing.metropolis_hastings(GRAPHS[name])))


def passed_on(parents, messages):
    """What every agent sends up, by messages alone: leaves first."""
    inbox = {i: [] for i in range(len(parents))}
    sent = {}
    children = {i: {c for c, p in enumerate(parents) if p == i != c} for i in range(len(parents))}
    while len(sent) < len(parents):
        for agent, parent in enumerate(parents):
            if agent not in sent and children[agent] <= set(sent):
                sent[agent] = messages[agent] + sum(inbox[agent])
                if agent != parent:
                    inbox[parent].append(sent[agent])
    return np.stack([sent[i] for i in range(len(parents))])


@pytest.mark.parametrize("name", GRAPHS)
def test_partial_sums_are_those_of_messages_on_links(name):
    relays = tree(name)
    messages = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
    total, present = relays(jnp.asarray(messages))
    observed = relays.observed(jnp.asarray(messages), total)
    expected = passed_on(relays.parents, messages.astype(float))
    np.testing.assert_allclose(observed["up"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(total, messages.sum(axis=0), rtol=1e-5, atol=1e-6)
    assert float(present) == N and relays.vectors == 2 * (N - 1)
    # The total is the root's partial sum to the bit: nobody adds it up anew.
    np.testing.assert_array_equal(total, observed["up"][relays.root])
    np.testing.assert_array_equal(total, observed["down"])


@pytest.mark.parametrize("name", GRAPHS)
def test_tree_is_of_network_s_links_and_as_flat_as_any(name):
    relays = tree(name)
    graph = GRAPHS[name]
    for child, parent in enumerate(relays.parents):
        assert child == parent or graph.has_edge(child, parent)
    assert relays.levels == nx.radius(graph)


def test_messages_of_run_are_those_that_are_accounted():
    """Up the tree goes P (G + s Z), P invertible: the loss of single messages, no less."""
    relays = tree("random")
    scale = 0.7
    rounds = 3
    gradients = np.random.default_rng(1).normal(size=(rounds, N, D)).astype(np.float32)
    key = jax.random.key(11, impl="threefry2x32")
    result = composed(
        mixing.metropolis_hastings(GRAPHS["random"]),
        lambda model, batch: batch,
        optax.sgd(0.25),
        method=Federated(relays),
        privatizer=noise.correlated(
            jnp.full(N, scale, jnp.float32), key=key, rounds=rounds
        ),
    )  # fmt: skip
    state = result.init(jnp.zeros((N, D), jnp.float32))
    step = jax.jit(result.step)
    partial = relays._descendants()
    for t, gradient in enumerate(gradients):
        state, info = step(key, state, jnp.asarray(gradient))
        drawn = jax.random.fold_in(jax.random.fold_in(key, t), 0)
        normals = np.asarray(variates.normals(drawn, (N, D), jnp.float32), float)
        expected = partial @ gradient + partial @ (scale * normals)
        np.testing.assert_allclose(info.messages["up"], expected, atol=1e-5)
        # The twin that adds noise to sums and not to messages would tell a leaf's gradient.
        assert np.abs(info.messages["up"] - (partial @ gradient + scale * normals)).max() > 0.1
    none = np.zeros((1, 1))

    def loss(observed, drawn):
        view = views.linear(
            none, np.zeros((1, N)), np.zeros((1, N)), np.zeros((len(observed), 1)), observed, drawn
        )
        first, other = view.materialize(rounds=1)
        return [
            np.linalg.norm(np.linalg.lstsq(other, first[:, i], rcond=None)[0]) for i in range(N)
        ]

    plain = loss(np.eye(N), scale * np.eye(N))
    np.testing.assert_allclose(loss(partial, scale * partial), plain, rtol=1e-9)
    np.testing.assert_allclose(plain, 1 / scale, rtol=1e-9)


@pytest.mark.slow
def test_run_by_relays_is_server_s_and_stays_one_model():
    """And what relays hide from nobody takes no noise in shares."""
    network = mixing.metropolis_hastings(GRAPHS["random"])
    results = {}
    for name, aggregated in (("sum", Sum()), ("relays", tree("random"))):
        config = make_config(design="independent", method=Federated(aggregated), rounds=6)
        training_plan = plan.make(config, network)
        results[name] = run(training_plan, make_problem(N), seeds=[0], eval_every=6), training_plan
    relayed, summed = (jax.tree.leaves(results[name][0].params) for name in ("relays", "sum"))
    for item, other in zip(relayed, summed, strict=True):
        np.testing.assert_allclose(item, other, atol=1e-5)
        agents = np.moveaxis(np.asarray(item), item.shape.index(N), 0)
        assert (agents == agents[:1]).all()
    # With a learned sketch: what its frames follow from went through noise.
    learned = Federated(tree("random"), sketches.Learned(5, probes=2), centre=0.9)
    dependence.check_dependence(learned, Sgd(0.1), network.shape)
    losses = [result.guarantee.epsilon for _, result in results.values()]
    assert losses[0] == losses[1]
    shares = make_config(noise=SumShares(), method=Federated(tree("random")), attacker="aggregator")
    with pytest.raises(ValueError, match="shows single messages"):
        plan.make(shares, network)


def test_refusals():
    one_way = np.eye(3) / 2 + np.roll(np.eye(3), 1, axis=1) / 2
    for invalid in (
        lambda: Relayed(()),
        lambda: Relayed((0, 1)),
        lambda: Relayed((0, 2, 1)),
        lambda: Relayed((0, 3, 1)),
        lambda: Relayed((1, 0)),
        lambda: spanning(one_way),
        lambda: spanning(np.eye(3)),
        lambda: spanning(np.stack([np.eye(3)] * 2)),
        lambda: Relayed((0, 0))(jnp.ones((3, 1))),
    ):
        with pytest.raises(ValueError):
            invalid()
