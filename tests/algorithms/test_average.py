"""Averages over rounds: what is measured and released is the average, what is sent is not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.average import Average
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.exchange import PerLinkMessages
from dpjax.algorithms.zip_dl import ZipDL
from dpjax.contrib.trace import trace
from dpjax.engine import host
from dpjax.engine.run import run
from dpjax.plans import plan
from dpjax.protocols import Emission
from dpjax.topology import graphs, mixing
from tests.support import composed, load_script, make_config, make_problem

N = 4
T = 6
MATRIX = mixing.metropolis_hastings(graphs.ring(N))


def by_hand(models, decay, begin):
    """The weighted mean of the models of the rounds [T, ...] after ``begin``, after every round."""
    averages = []
    for t in range(1, len(models) + 1):
        if t <= begin:
            averages.append(models[t - 1])
            continue
        weights = decay ** np.arange(t - begin - 1, -1, -1.0)
        averages.append(np.tensordot(weights / weights.sum(), models[begin:t], 1))
    return np.stack(averages)


@pytest.mark.parametrize(("decay", "begin"), [(0.9, 0), (1.0, 0), (1.0, 3), (0.5, 2), (0.9999, 1)])
def test_it_is_weighted_mean_of_rounds(decay, begin):
    target = np.random.default_rng(0).normal(size=(T, N, 3)).astype(np.float32)
    observed = {}
    sent = {}
    for name, method in (("plain", DSGD()), ("average", Average(DSGD(), decay, begin))):
        result = composed(
            jnp.asarray(MATRIX, jnp.float32), lambda x, y: x - y, optax.sgd(0.2, 0.9),
            method=method,
        )  # fmt: skip
        state = result.init(jnp.zeros((N, 3)))
        observed[name] = []
        sent[name] = []
        for batch in target:
            state, info = jax.jit(result.step)(jax.random.key(0), state, jnp.asarray(batch))
            reported = method.released(state)
            np.testing.assert_array_equal(reported, method.released(state))
            observed[name].append(reported)
            sent[name].append(info.messages)
    np.testing.assert_array_equal(sent["plain"], sent["average"])
    expected = by_hand(np.stack(observed["plain"]).astype(float), decay, begin)
    np.testing.assert_allclose(np.stack(observed["average"]), expected, rtol=2e-4, atol=1e-6)


def test_it_is_optaxs_debiased_average():
    link = optax.ema(0.8, debias=True)
    method = Average(DSGD(), 0.8)
    state = link.init(jnp.zeros(()))
    average = jnp.zeros(())
    for t, value in enumerate((3.0, -1.0, 4.0, 1.5)):
        expected, state = link.update(jnp.float32(value), state)
        average = average + method.weight(t) * (value - average)
        np.testing.assert_allclose(average, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.optimized
def test_run_measures_and_leaves_average():
    task = make_problem(N)
    config = make_config(rounds=T, relation="zero_out_record")
    methods = DSGD(), Average(DSGD(), decay=1.0, begin=2)
    plain, averaged = (
        plan.make(dataclasses.replace(config, method=method), MATRIX) for method in methods
    )
    assert plain.guarantee == averaged.guarantee
    models = trace(plain, task, seeds=[1], read=lambda passed: passed.after.models)
    result = run(averaged, task, seeds=[1], eval_every=1)
    tail = jax.tree.map(lambda leaf: leaf[0, 2:].mean(axis=(0, 1)), models)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), result.model(), tail
    )
    # Metrics are of every agent's average, so consensus is too.
    agents = result.params
    spread = sum(((leaf[0, 0] - leaf[0, 0].mean(0)) ** 2).sum() for leaf in jax.tree.leaves(agents))
    np.testing.assert_allclose(result.metrics["consensus"][-1, 0, 0], spread / N, rtol=1e-4)
    own = jax.tree.map(lambda leaf: jnp.asarray(leaf[0, 0]), agents)
    for name, value in task.metrics(own, task.evaluation).items():
        np.testing.assert_allclose(result.metrics[name][-1, 0, 0], value, rtol=1e-5)
    scores = result.predictor(task)(task.x[:3])
    expected = task.predict(jax.tree.map(jnp.asarray, tail), jnp.asarray(task.x[:3]))
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)
    over_network = run(
        averaged, task, seeds=[1], eval_every=1, transport=host.local_transport(averaged)
    )
    np.testing.assert_array_equal(over_network.metrics["test_loss"], result.metrics["test_loss"])


def push():
    """The method of examples/own_method.py, whose models are x / w."""
    return load_script("own_method", "examples").Push()


@dataclasses.dataclass(frozen=True)
class Ratio(DSGD):
    """The same method, which keeps x alone and measures x / w."""

    stochastic = "columns"

    def start(self, ctx, models):
        """The optimizer's state, and the weights."""
        return ctx.optimizer.init(models), jnp.ones(ctx.arrays["mixing"].shape[-1], "f4")

    def measured(self, public_state):
        """Models over weights."""
        return jax.tree.map(lambda leaf: (leaf.T / public_state.memory[1]).T, public_state.models)

    def released(self, public_state):
        """The same: the weights are public."""
        return self.measured(public_state)

    def emit(self, ctx, public_state):
        """Gradients at x / w."""
        total, metrics = ctx.query(self.measured(public_state), ctx.batch)
        return Emission(total, public=public_state.memory[1], metrics=metrics)

    def send(self, ctx, public_state, emission, noisy):
        """The updated x, and the weights."""
        updates, state = ctx.optimizer.update(
            ctx.mean(noisy), public_state.memory[0], public_state.models
        )
        return (optax.apply_updates(public_state.models, updates), emission.public), state

    def absorb(self, ctx, public_state, carry, received):
        """What came."""
        x, w = received
        return x, (carry, w)


@pytest.mark.slow
def test_method_may_measure_other_models_than_it_keeps():
    sends = np.eye(N) + np.roll(np.eye(N), 1, axis=0) + np.eye(N, k=-2)
    task = make_problem(N)
    results = []
    for method in (push(), Ratio(), Average(Ratio(), decay=0.5)):
        config = make_config(design="independent", method=method, rounds=T)
        results.append(run(plan.make(config, sends / sends.sum(0)), task, seeds=[0]))
    first, second, averaged = results
    for name, values in first.metrics.items():
        np.testing.assert_allclose(values, second.metrics[name], rtol=1e-5, atol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        first.params,
        second.params,
    )
    # The average is of x / w, not of x.
    assert not np.allclose(averaged.metrics["test_loss"], first.metrics["test_loss"])


@dataclasses.dataclass(frozen=True)
class Silent(DSGD):
    """Releases nothing."""

    def released(self, public_state):
        """Nothing."""
        return ()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Average(ZipDL()), "give a method of any network"),
        (lambda: Average(DSGD), "give a method of any network"),
        (lambda: Average(PerLinkMessages((0,), (0,))), "give a method of any network"),
        (lambda: Average(DSGD(), decay=1.1), "decay is 1.1; give .* at most 1"),
        (lambda: Average(DSGD(), begin=-1), "begin is -1"),
        (
            lambda: plan.make(make_config(method=Average(Silent())), MATRIX),
            "which releases nothing to average",
        ),
        (
            lambda: make_config(method=Average(Average(DSGD(), begin=6)), rounds=6),
            "begin is 6, and the run ends after 6 rounds",
        ),
    ],
)
def test_what_cannot_be_averaged_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
