"""`dpjax.rounds`: a loop of one's own has the bits of a run, and what it refuses."""

import secrets

import jax
import numpy as np
import optax
import pytest

import dpjax as dp
from dpjax.algorithms.exchange import Trusted
from dpjax.engine.host import local
from dpjax.plans.scheduled import ScheduledLaplace
from tests.support import make_problem

N = 6
T = 6
RING = dp.mixing.metropolis_hastings(dp.graphs.ring(N))
AGENTS = dp.Protect("replace_agent", clip_norm=0.5)
RECORDS = dp.Protect("zero_out_record", clip_norm=0.5)

CASES = {
    "no noise": {"noise": None, "budget": None},
    "whisper": {},
    "independent": {"noise": dp.noise.Independent()},
    "anti-pgd": {"noise": dp.noise.AntiPgd()},
    "mafalda": {
        "noise": dp.noise.Mafalda(),
        "protect": RECORDS,
        "sampler": dp.samplers.Cyclic(epochs=2, separation=3, batch_size=8),
    },
    "poisson": {
        "noise": dp.noise.Independent(),
        "protect": RECORDS,
        "sampler": dp.samplers.Poisson(expected=4.0, capacity=4),
    },
    "pair keys": {"noise": dp.noise.PairKeys()},
    "disk": {"method": dp.methods.DiSK(), "sampler": dp.samplers.Full()},
    "tracking": {
        "method": dp.methods.Tracking(beta=0.1),
        "noise": ScheduledLaplace(0.9),
        "budget": dp.Budget(20.0, accountant="pure"),
        "protect": dp.Protect("replace_agent", clip_norm=0.5, norm="l1"),
    },
    "server": {
        "method": dp.methods.Federated(Trusted(1)),
        "noise": dp.noise.Aggregate(1),
        "protect": dp.Protect("zero_out_record", clip_norm=0.5, attacker="aggregator"),
    },
}


def make(name, **changes):
    """A plan, and a problem for it."""
    task = make_problem(N)
    parts = {
        "noise": dp.noise.Whisper("run"),
        "budget": dp.Budget(8.0, delta=1e-5),
        "protect": AGENTS,
        "sampler": dp.samplers.Random(4),
        "optimizer": dp.optimizers.Sgd(0.1),
        "rounds": T,
    }
    config = dp.Config(**(parts | CASES[name] | changes))
    return dp.make_plan(config, RING, counts=task.partition.counts), task


def models_of(rounds, step=None):
    """The models after all rounds."""
    state = rounds.init()
    for _ in range(T):
        state, _ = (step or rounds.step)(state)
    return state


def test_an_optimizer_that_compilers_fuse_differently_agrees_to_rounding():
    plan, task = make("server", optimizer=dp.optimizers.Chain(optax.adam, 0.01))
    state = models_of(dp.rounds(plan, task))
    params = dp.run(plan, task, seeds=[0]).params
    for leaf, other in zip(jax.tree.leaves(state.models), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(leaf, other[0, 0], rtol=1e-6, atol=1e-7)


def same_bits(models, result):
    """Whether models of a loop are those of a run."""
    for leaf, other in zip(jax.tree.leaves(models), jax.tree.leaves(result.params), strict=True):
        np.testing.assert_array_equal(leaf, other[0, 0])


@pytest.mark.optimized
@pytest.mark.parametrize("name", CASES)
def test_a_loop_has_the_bits_of_a_run(name):
    plan, task = make(name)
    state = models_of(dp.rounds(plan, task, seed=3))
    models = state.memory.message if name == "tracking" else state.models
    same_bits(models, dp.run(plan, task, seeds=[3]))


@pytest.mark.parametrize("name", ["whisper", "tracking", "server"])
def test_the_two_halves_are_a_step(name):
    plan, task = make(name)
    rounds, deliver = dp.rounds(plan, task), local(plan)
    state = rounds.init()
    for number in range(2):
        sent = rounds.outgoing(state)
        received = deliver(jax.device_get(sent.message), number)
        state, before = rounds.incoming(state, sent, received), state
        whole, info = rounds.step(before)
        jax.tree.map(np.testing.assert_array_equal, sent.metrics, info.metrics)
        for leaf, other in zip(
            jax.tree.leaves(state.models), jax.tree.leaves(whole.models), strict=True
        ):
            np.testing.assert_allclose(leaf, other, rtol=1e-6, atol=1e-7)


def test_a_loop_can_be_compiled_and_continued_from_a_stored_state():
    plan, task = make("whisper")
    rounds = dp.rounds(plan, task)
    step = jax.jit(rounds.step)
    state = rounds.init()
    for _ in range(3):
        state, _ = step(state)
    # What is stored has no secret: noise follows from the seed again.
    stored = jax.device_get(state._replace(secret=()))
    later = dp.rounds(plan, task)
    state = later.init()
    noise = state.secret.noise._replace(round=stored.round)
    state = stored._replace(secret=state.secret._replace(noise=noise))
    for _ in range(3):
        state, _ = later.step(state)
    same_bits(state.models, dp.run(plan, task, seeds=[0]))


@pytest.mark.parametrize("name", ["no noise", "whisper", "server"])
def test_models_are_nan_past_the_last_round(name):
    plan, task = make(name)
    rounds = dp.rounds(plan, task)
    state = models_of(rounds)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.models))
    state, _ = rounds.step(state)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(state.models))


def test_a_release_has_the_bits_of_a_run_with_its_key(tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "randbits", lambda bits: 12345)
    plan, task = make("anti-pgd", release=True)
    with pytest.raises(ValueError, match="key_file is None for a release"):
        dp.rounds(plan, task)
    path = tmp_path / "loop.key"
    rounds = dp.rounds(plan, task, key_file=path)
    state = models_of(rounds)
    assert float(rounds.step(state)[1].metrics["not_finite"]) == 1
    same_bits(state.models, dp.run(plan, task, seeds=[0], key_file=tmp_path / "run.key"))
    # No other loop may use the key meanwhile, and no other problem at all.
    with pytest.raises(ValueError, match="which another process uses"):
        dp.rounds(plan, task, key_file=path)
    del rounds
    with pytest.raises(ValueError, match="belongs to another run"):
        dp.rounds(plan, make_problem(N, seed=1), key_file=path)
    again = models_of(dp.rounds(plan, task, key_file=path))
    jax.tree.map(np.testing.assert_array_equal, again.models, state.models)


def test_what_does_not_fit_is_refused(tmp_path):
    plan, task = make("whisper")
    with pytest.raises(ValueError, match="plan is 2 plans; give one"):
        dp.rounds([plan, plan], task)
    with pytest.raises(ValueError, match="seed is 'a'"):
        dp.rounds(plan, task, seed="a")
    with pytest.raises(ValueError, match="no plan has release=True"):
        dp.rounds(plan, task, key_file=tmp_path / "key")
