"""`dpjax.rounds`: a loop of one's own has the bits of a run, and what it refuses."""

import copy
import dataclasses
import functools
import os
import pickle
import secrets
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax as dp
from dpjax import _programs
from dpjax.algorithms.exchange import Trusted
from dpjax.contrib.optimizers import scale_by_adam
from dpjax.engine import checkpoint, keys
from dpjax.engine import round as round_
from dpjax.engine.host import local_transport
from dpjax.plans.scheduled import ScheduledLaplace
from dpjax.plans.sums import Discrete, SumShares
from dpjax.protocols import Emission
from dpjax.topology import links
from dpjax.transforms import noise
from tests.plans import test_aggregate
from tests.support import make_problem, with_factor

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


QUICK = ("whisper", "blocks", "mafalda", "poisson", "pair keys", "tracking", "push-sum", "server")


def marked(names):
    """The names of cases, the slow ones marked."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def make(name, mixing=RING, **changes):
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
    config = dp.Config(**(parts | ALONE[name] | changes))
    return dp.make_plan(config, mixing, counts=task.partition.counts), task


def models_of(rounds, step=None):
    """The models after all rounds."""
    state = rounds.init()
    for _ in range(T):
        state, _ = (step or rounds.step)(state)
    return state


@pytest.mark.slow
def test_optimizer_that_compilers_fuse_differently_agrees_to_rounding():
    plan, task = make("server", optimizer=dp.optimizers.Chain(optax.adam, 0.01))
    state = models_of(dp.rounds(plan, task))
    params = dp.run(plan, task, seeds=[0]).params
    for leaf, other in zip(jax.tree.leaves(state.models), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(leaf, other[0, 0], rtol=1e-6, atol=1e-7)


def same_bits(models, result):
    """Whether models of a loop are those of a run."""
    for leaf, other in zip(jax.tree.leaves(models), jax.tree.leaves(result.params), strict=True):
        np.testing.assert_array_equal(leaf, other[0, 0])


@pytest.mark.gate(3)
@pytest.mark.optimized
@pytest.mark.parametrize("name", marked(CASES))
def test_loop_has_bits_of_run(name):
    plan, task = make(name)
    state = models_of(dp.rounds(plan, task, seed=3))
    models = state.memory.message if name == "tracking" else state.models
    same_bits(models, dp.run(plan, task, seeds=[3]))


@pytest.mark.optimized
@pytest.mark.gate(1)
@pytest.mark.parametrize("name", ["whisper", "tracking", "server"])
def test_two_halves_are_step(name):
    plan, task = make(name)
    rounds = dp.rounds(plan, task)
    deliver = local_transport(plan)
    state = rounds.init()
    for number in range(2):
        sent = rounds.outgoing(state)
        received = deliver(jax.device_get(sent.message), number)
        state, before = rounds.incoming(state, sent, received), state
        complete, info = rounds.step(before)
        jax.tree.map(np.testing.assert_array_equal, sent.metrics, info.metrics)
        for leaf, other in zip(
            jax.tree.leaves(state.models), jax.tree.leaves(complete.models), strict=True
        ):
            np.testing.assert_allclose(leaf, other, rtol=1e-6, atol=1e-7)


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", ["whisper", "poisson", "anti-pgd", "mafalda"])
def test_loop_can_be_compiled_and_continued_from_stored_state(name):
    plan, task = make(name)
    rounds = dp.rounds(plan, task)
    step = jax.jit(rounds.step)
    state = rounds.init()
    for _ in range(3):
        state, _ = step(state)
    # What is stored has no secret: noise follows from the seed again.
    stored = jax.device_get(state._replace(secret=()))
    later = dp.rounds(plan, task)
    state = later.init(stored)
    for _ in range(3):
        state, _ = later.step(state)
    same_bits(state.models, dp.run(plan, task, seeds=[0]))
    # With the secret of the first round, noise would go out a second time.
    repeated = stored._replace(secret=later.init().secret)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(later.outgoing(repeated).message))


@pytest.mark.parametrize("name", ["no noise", "whisper", "server"])
def test_models_are_nan_past_last_round(name):
    plan, task = make(name)
    rounds = dp.rounds(plan, task)
    state = models_of(rounds)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.models))
    state, _ = rounds.step(state)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(state.models))


def all_nan(tree):
    """Whether all numbers of a tree are NaN."""
    return all(np.isnan(leaf).all() for leaf in jax.tree.leaves(tree))


def test_release_has_bits_of_run_with_its_key(tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "randbits", lambda bits: 12345)
    plan, task = make("anti-pgd", release=True)
    with pytest.raises(ValueError, match="key_file is None for a release"):
        dp.rounds(plan, task)
    path = tmp_path / "loop.key"
    rounds = dp.rounds(plan, task, key_file=path)
    # What a notebook shows of them holds neither the key nor records.
    assert "Array" not in repr(rounds) and len(repr(rounds)) < 1000
    state = models_of(rounds)
    result = dp.run(plan, task, seeds=[0], checkpoint=dp.Checkpoint(key_file=tmp_path / "run.key"))
    same_bits(state.models, result)
    assert rounds.guarantee == result.guarantees[0] and rounds.guarantee.added_epsilon > 0
    for function in (rounds.step, rounds.outgoing):
        with pytest.raises(ValueError, match="state.round is 6, so all messages are sent; end"):
            function(state)
    # No other loop may use the key meanwhile, and no other problem at all.
    with pytest.raises(ValueError, match="which another process uses"):
        dp.rounds(plan, task, key_file=path)
    stored = state._replace(secret=())
    # Each of its functions that may send holds the lock.
    del rounds
    with pytest.raises(ValueError, match="which another process uses"):
        dp.rounds(plan, task, key_file=path)
    del function
    with pytest.raises(ValueError, match="says that 0 rounds were sent, the state is of 6"):
        dp.rounds(plan, task, key_file=tmp_path / "fresh.key").init(stored)
    with pytest.raises(ValueError, match="belongs to another run"):
        dp.rounds(plan, make_problem(N, seed=1), key_file=path)
    assert dp.rounds(plan, task, key_file=path).init(stored).round == state.round


def test_key_file_is_of_all_programs(tmp_path, monkeypatch):
    plan, task = make("whisper", release=True)
    programs = []

    def of_run(tasks, options, values, traced, devices):
        programs.extend(traced)
        return {}

    monkeypatch.setattr(checkpoint, "of_run", of_run)
    dp.rounds(plan, task, key_file=tmp_path / "key")
    # The first state, both halves, and both in one.
    assert len({program.lower().as_text() for program in programs}) == 4


@pytest.mark.mutant
def test_release_sends_one_message_round(tmp_path, monkeypatch):
    plan, task = make("whisper", release=True)
    path = tmp_path / "key"
    rounds = dp.rounds(plan, task, key_file=path)
    first = rounds.init()
    stored = jax.device_get(first._replace(secret=()))
    sent = rounds.outgoing(first)
    # The same message may go out again, also after a restart.
    rounds.outgoing(first)
    del rounds
    rounds = dp.rounds(plan, task, key_file=path)
    first = rounds.init(stored)
    rounds.outgoing(first)
    other = jax.tree.map(lambda leaf: leaf + 1, stored.models)
    for function in (rounds.outgoing, rounds.step):
        with pytest.raises(ValueError, match="notes another message of round 1, or a later"):
            function(first._replace(models=other))
    state = first
    for _ in range(2):
        state, _ = rounds.step(state)
    with pytest.raises(ValueError, match="notes another message of round 1, or a later"):
        rounds.outgoing(first)
    # A round that was set back, before any of its messages.
    with pytest.raises(ValueError, match="says that 2 rounds were sent, the state is of 0"):
        rounds.init(stored)
    with pytest.raises(ValueError, match="says that 2 rounds were sent, the state is of 0"):
        rounds.init()
    assert rounds.init(state._replace(secret=())).round == 2
    with pytest.raises(ValueError, match="says that 2 rounds were sent, the state is of 3"):
        rounds.init(state._replace(secret=(), round=state.round + 1))

    # A broken copy that notes nothing sends the noise of a round with two payloads.
    monkeypatch.setattr(checkpoint.Storage, "note_sent", lambda storage, done, message: None)
    again = rounds.outgoing(first._replace(models=other))
    payloads = jax.tree.map(lambda leaf, other: other - leaf, sent.message, again.message)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(payloads))


def test_release_cannot_be_compiled_into_another_program(tmp_path):
    plan, task = make("whisper", release=True)
    rounds = dp.rounds(plan, task, key_file=tmp_path / "key")
    state = rounds.init()
    for function in (rounds.outgoing, rounds.step):
        with pytest.raises(ValueError, match="state is traced in a release.*as they are"):
            jax.jit(function)(state)
    # It was not noted.
    rounds.outgoing(state)


@pytest.mark.mutant
def test_release_sends_nothing_where_its_lock_keeps_nobody_out(tmp_path, monkeypatch):
    plan, task = make("whisper", release=True)
    rounds = dp.rounds(plan, task, key_file=tmp_path / "key")
    state = rounds.init()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(ValueError, match="key_file .* was opened before .* was forked"):
            rounds.outgoing(state)
    rounds.outgoing(state)
    (tmp_path / ".key.lock").unlink()
    with pytest.raises(ValueError, match="key_file .* was deleted, moved or replaced"):
        rounds.outgoing(state)


def test_new_key_is_not_that_of_state_before_first_round(tmp_path):
    """Its message may be out, under a key that was lost."""
    plan, task = make("whisper", release=True)
    stored = dp.rounds(plan, task, key_file=tmp_path / "lost").init()._replace(secret=())
    with pytest.raises(ValueError, match="says that 0 rounds were sent, the state is of 0"):
        dp.rounds(plan, task, key_file=tmp_path / "fresh").init(stored)


@pytest.mark.gate(1)
@pytest.mark.parametrize("release", [False, True])
def test_states_of_another_form_are_refused(release, tmp_path):
    adam = dp.optimizers.Chain(optax.adam, 0.01)
    plan, task = make("anti-pgd", optimizer=adam, release=release)
    rounds = dp.rounds(plan, task, key_file=tmp_path / "key" if release else None)
    state, _ = rounds.step(rounds.init())
    stored = jax.device_get(state._replace(secret=()))
    changes = [lambda leaf: np.ravel(leaf)[:1], *UNLIKE.values()]
    slots = ("models", "memory")
    others = [{slot: jax.tree.map(f, getattr(stored, slot))} for slot in slots for f in changes]
    others += [{"round": np.float32(1)}, {"round": np.int32([1])}]
    for change in others:
        with pytest.raises(ValueError, match=r"state is .*, these rounds have .*; give that"):
            rounds.init(stored._replace(**change))
        for function in (rounds.outgoing, rounds.step):
            with pytest.raises(ValueError, match=r"state is .*, these rounds have .*; give that"):
                function(state._replace(**change))
    lost = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), stored.models)
    with pytest.raises(ValueError, match=r"stored.models holds nan"):
        rounds.init(stored._replace(models=lost))
    assert rounds.init(stored).round == 1


@pytest.mark.parametrize("name", ["whisper", "poisson", "server"])
def test_rounds_state_guarantee_of_run(name):
    plan, task = make(name)
    # A loss of one's own, which the guarantee names as custom.
    loss = task.loss
    task = dataclasses.replace(task, loss=lambda *arguments: loss(*arguments))
    rounds = dp.rounds(plan, task)
    assert len(rounds) == 4
    assert rounds.guarantee == dp.run(plan, task, seeds=[0]).guarantees[0] != plan.guarantee
    if name != "server":
        assert dp.rounds(plan, task, agents=(3,)).guarantee == rounds.guarantee


UNLIKE = {
    "broadcasts": lambda leaf: leaf[None],
    "more axes": lambda leaf: leaf[..., None],
    "float16": lambda leaf: leaf.astype(np.float16),
    "bfloat16": lambda leaf: leaf.astype(jnp.bfloat16),
    "int32": lambda leaf: leaf.astype(np.int32),
    "another tree": lambda leaf: [leaf],
}


@pytest.mark.parametrize("name", ["whisper", "server", "agents"])
def test_received_values_unlike_those_of_exchange_are_refused(name):
    plan, task = make("server" if name == "server" else "whisper")
    agents = (3, 0) if name == "agents" else None
    rounds = dp.rounds(plan, task, agents=agents)
    state = rounds.init()
    sent = rounds.outgoing(state)
    if agents:
        received = received_by(plan, agents, dp.rounds(plan, task).outgoing(state_of(plan)).message)
    else:
        received = local_transport(plan)(jax.device_get(sent.message), 0)
    rounds.incoming(state, sent, received)
    for incoming in (rounds.incoming, jax.jit(rounds.incoming)):
        for change in UNLIKE.values():
            with pytest.raises(ValueError, match="received is .*, the method's exchange delivers"):
                incoming(state, sent, jax.tree.map(change, received))


def state_of(plan):
    """The first state of all agents."""
    return dp.rounds(plan, make_problem(N)).init()


def test_wide_received_values_do_not_widen_models():
    plan, task = make("whisper")
    rounds = dp.rounds(plan, task)
    state = rounds.init()
    sent = rounds.outgoing(state)
    received = local_transport(plan)(jax.device_get(sent.message), 0)
    wide = jax.tree.map(np.float64, received)
    with jax.enable_x64(True), pytest.raises(ValueError, match="received is .*float64"):
        rounds.incoming(state, sent, wide)
    # Outside of double precision JAX shortens them itself.
    models = rounds.incoming(state, sent, wide).models
    assert {leaf.dtype for leaf in jax.tree.leaves(models)} == {np.dtype(np.float32)}


def test_received_nan_shows_in_next_round(tmp_path):
    for release in (False, True):
        plan, task = make("whisper", release=release)
        rounds = dp.rounds(plan, task, key_file=tmp_path / "key" if release else None)
        state = rounds.init()
        sent = rounds.outgoing(state)
        received = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), sent.message)
        state = rounds.incoming(state, sent, received)
        assert all_nan(state.models)
        if release:
            with pytest.raises(ValueError, match="nothing goes out.*that no epsilon covers"):
                rounds.outgoing(state)
        else:
            assert all_nan(rounds.outgoing(state).message)


@pytest.mark.mutant
@pytest.mark.parametrize("name", ["whisper", "server", "poisson", "no noise"])
def test_states_of_other_seeds_give_nan(name, monkeypatch):
    plan, task = make(name)
    rounds = dp.rounds(plan, task, seed=1)
    others = dp.rounds(plan, task, seed=2)
    state = others.init()
    # A server's clients clip gradients that are not finite to zero: the message itself is NaN.
    sent = rounds.outgoing(state)
    assert all_nan(sent.message)
    assert all_nan(jax.jit(rounds.outgoing)(state).message)
    new, info = rounds.step(state)
    assert all_nan(new.models) and all_nan(info.messages)
    received = local_transport(plan)(jax.device_get(others.outgoing(state).message), 0)
    assert all_nan(rounds.incoming(rounds.init(), others.outgoing(state), received).models)
    # The plan's own state.
    assert not all_nan(rounds.outgoing(rounds.init()).message)

    # A broken copy whose states all have one mark.
    monkeypatch.setattr(round_, "_mark", lambda key, agents=(): jax.random.key(0))
    rounds, others = [dp.rounds(plan, task, seed=seed) for seed in (1, 2)]
    assert not all_nan(rounds.outgoing(others.init()).message)


@pytest.mark.parametrize("of_last", [False, True])
def test_what_agents_keep_of_other_states_is_nan(of_last):
    """A method may release a message that it keeps, whose noise is another round's or seed's."""
    plan, task = make("tracking")
    rounds = dp.rounds(plan, task, seed=1)
    others = dp.rounds(plan, task, seed=2)
    state = models_of(rounds) if of_last else others.init()
    assert not all_nan(state.memory)
    sent = rounds.outgoing(state)
    assert all_nan(sent.carry)
    new, info = rounds.step(state)
    assert all_nan(new.memory.message) and all_nan(info.messages)
    good = rounds.outgoing(rounds.init())
    received = local_transport(plan)(jax.device_get(good.message), 0)
    assert all_nan(rounds.incoming(state, sent, received).memory.message)
    assert not all_nan(rounds.incoming(rounds.init(), good, received).memory.message)
    # Whoever puts an own carry beside a foreign secret gets nothing, either.
    mixed = good._replace(secret=sent.secret)
    assert all_nan(rounds.incoming(rounds.init(), mixed, received).memory.message)


def test_states_of_other_agents_or_seeds_give_nan_with_agents():
    plan, task = make("whisper")
    single = dp.rounds(plan, task, agents=(3,))
    states = [
        dp.rounds(plan, task, agents=(0,)).init(),
        dp.rounds(plan, task, agents=(3,), seed=1).init(),
    ]
    received = received_by(plan, (3,), dp.rounds(plan, task).outgoing(state_of(plan)).message)
    for state in states:
        sent = single.outgoing(state)
        assert all_nan(sent.message)
        assert all_nan(single.incoming(state, sent, received).models)
    assert not all_nan(single.outgoing(single.init()).message)


def test_messages_of_whole_numbers_are_zero_for_other_states():
    task = test_aggregate.task()
    config = test_aggregate.config(part=Discrete(size=5), budget=test_aggregate.ZCDP)
    plan = dp.make_plan(config, test_aggregate.COMPLETE)
    rounds = dp.rounds(plan, task, seed=1)
    for seed in (1, 2):
        message = rounds.outgoing(dp.rounds(plan, task, seed=seed).init()).message
        for leaf in jax.tree.leaves(message):
            assert leaf.dtype.kind in "iu" and np.any(leaf) == (seed == 1)


def test_loss_of_methods_own_exchange_covers_no_other_network():
    view = dataclasses.replace(AGENTS, attacker="node", gradients="view")
    plan, task = make("pair keys", protect=view)
    config = test_aggregate.config(part=SumShares(colluders=1))
    of_sums = dp.make_plan(config, test_aggregate.COMPLETE)
    for text, loop in (
        ("gradients 'view' and colluders=0", dp.rounds(plan, task)),
        ("gradients 'any' and colluders=1", dp.rounds(of_sums, test_aggregate.task())),
    ):
        with pytest.raises(ValueError, match=f"plan has {text}, whose loss is not.*call step"):
            loop.outgoing(loop.init())
        state, _ = loop.step(loop.init())
        assert state.round == 1
    with pytest.raises(ValueError, match="plan has gradients 'view'"):
        dp.rounds(plan, task, agents=(0,))


def test_sums_of_fewer_agents_than_noise_is_for_are_refused():
    plan, task = make("server")
    rounds = dp.rounds(plan, task)
    state = rounds.init()
    sent = rounds.outgoing(state)
    total, present = local_transport(plan)(jax.device_get(sent.message), 0)
    for number in (0, N - 1, N):
        received = total, np.full_like(present, number)
        rounds.incoming(state, sent, received)
        assert not all_nan(jax.jit(rounds.incoming)(state, sent, received).models)
    received = total, np.full_like(present, N - 2)
    with pytest.raises(ValueError, match="received is a sum of 4 agents, less than the 5 of"):
        rounds.incoming(state, sent, received)
    # Compiled code cannot raise.
    assert all_nan(jax.jit(rounds.incoming)(state, sent, received).models)


@pytest.mark.parametrize("name", ["no noise", "whisper", "server"])
def test_no_message_follows_last_round(name):
    plan, task = make(name)
    rounds = dp.rounds(plan, task)
    assert all_nan(rounds.outgoing(models_of(rounds)).message)


def test_secrets_are_neither_shown_nor_pickled():
    plan, task = make("mafalda")
    for agents in (None, (3,)):
        rounds = dp.rounds(plan, task, agents=agents)
        state = rounds.init()
        sent = rounds.outgoing(state)
        for value in (state, sent):
            assert "secret=Secret(...)" in repr(value) and "key" not in repr(value)
            with pytest.raises(TypeError, match=r"store state._replace\(secret=\(\)\)"):
                pickle.dumps(value)
        assert copy.deepcopy(state).secret is state.secret
        pickle.dumps(jax.device_get(state._replace(secret=())))
        # Handed on without its secret, it is refused by name.
        with pytest.raises(ValueError, match="state has no secret; give init"):
            rounds.outgoing(state._replace(secret=()))


@pytest.mark.mutant
@pytest.mark.parametrize("agents", [None, (3,)])
def test_tracebacks_with_local_variables_show_no_key_and_no_record(agents, tmp_path):
    plan, task = make("whisper", release=agents is None)
    rounds = dp.rounds(plan, task, agents=agents, key_file=None if agents else tmp_path / "key")
    state = rounds.init()
    try:
        rounds.outgoing(state._replace(memory=3))
    except ValueError as error:
        shown = "".join(
            traceback.TracebackException.from_exception(error, capture_locals=True).format()
        )
    assert "instance = Instance(...)" in shown
    words = jax.random.key_data(state.secret.mark).tolist()
    assert not any(str(word) in shown for word in words) and "overlaying" not in shown
    assert "Instance(...)" in repr(round_.Instance(*[0] * 7))


@dataclasses.dataclass(frozen=True)
class PushSum(dp.methods.DSGD):
    """Models and public weights travel together; each agent divides what it sends."""

    stochastic = "columns"
    by_agent = True

    def start(self, ctx, models):
        return ctx.optimizer.init(models), models, jnp.ones(len(jax.tree.leaves(models)[0]))

    def emit(self, ctx, public_state):
        answer = ctx.query(public_state.models, ctx.batch)
        return Emission(answer.total, public=public_state.memory[2], metrics=answer.metrics)

    def send(self, ctx, public_state, emission, noisy):
        state, models, _ = public_state.memory
        models, state = ctx.step(models, ctx.mean(noisy), state)
        return (models, emission.public), state

    def absorb(self, ctx, public_state, carry, received):
        models, weights = received
        return jax.tree.map(lambda leaf: (leaf.T / weights).T, models), (carry, models, weights)


def adam(step_size, noise):
    return optax.chain(scale_by_adam(noise), optax.scale_by_learning_rate(step_size))


def blocks(change=0.0):
    """A covariance whose agents 0, 2 and 4 share normals, and 1, 3 and 5 do."""
    covariance = np.eye(N)
    for group, share in ((slice(0, N, 2), 0.3 + change), (slice(1, N, 2), 0.4)):
        covariance[group, group] += share
    return dp.noise.Covariance(covariance, "blocks")


ALONE = CASES | {
    "blocks": {"noise": blocks()},
    "push-sum": {"method": PushSum()},
    "pairs": {
        "method": dp.methods.GradientTracking(),
        "noise": ScheduledLaplace(0.9),
        "budget": dp.Budget(50.0, accountant="pure"),
        "protect": dp.Protect("replace_agent", gradient_gap=0.5, smoothness=1.0, norm="l1"),
    },
    "adam": {
        "noise": dp.noise.Independent(),
        "optimizer": dp.optimizers.Chain(adam, 0.01, uses_noise=True),
    },
}


def received_by(plan, agents, message):
    """The messages of others that some agents receive; places without a sender are NaN."""
    senders = [plan.senders[agent] for agent in agents]
    widest = max(map(len, senders))

    def leaf_of(leaf):
        received = np.full((len(agents), widest, *leaf.shape[1:]), np.nan, leaf.dtype)
        for row, numbers in enumerate(senders):
            received[row, : len(numbers)] = np.asarray(leaf)[list(numbers)]
        return received

    return jax.tree.map(leaf_of, message)


@pytest.mark.gate(3)
@pytest.mark.parametrize("name", marked(name for name in ALONE if name != "server"))
def test_agents_alone_compute_their_part_of_run(name):
    """Among agents of a path, of which one has one neighbour and another two."""
    path = dp.mixing.metropolis_hastings(dp.graphs.path(N))
    plan, task = make(name, mixing=path)
    selection = (3, 0)
    everyone = dp.rounds(plan, task, seed=2)
    single = dp.rounds(plan, task, seed=2, agents=selection)
    state = everyone.init()
    own = single.init()
    assert plan.senders[0] == (1,) and plan.senders[3] == (2, 4)
    for _ in range(T):
        message = everyone.outgoing(state).message
        sent = single.outgoing(own)
        own = single.incoming(own, sent, received_by(plan, selection, message))
        state, _ = everyone.step(state)
        for leaf, part in zip(
            jax.tree.leaves((message, state.models)),
            jax.tree.leaves((sent.message, own.models)),
            strict=True,
        ):
            np.testing.assert_allclose(part, leaf[np.array(selection)], rtol=2e-5, atol=2e-6)


AGENT = 3


def contents(plan, task):
    """Digests of the programs of one agent, with all constants, and of its state."""
    rounds = dp.rounds(plan, task, agents=(AGENT,))
    state = rounds.init()
    sent = rounds.outgoing(state)
    senders = len(plan.senders[AGENT])
    received = jax.tree.map(lambda leaf: np.zeros((1, senders, *leaf.shape[1:])), sent.message)
    programs = [
        jax.jit(rounds.outgoing).trace(state),
        jax.jit(rounds.incoming).trace(state, sent, received),
    ]
    return checkpoint.computation(programs, release=False), checkpoint.tree_digest(state)


def with_records(task, agents):
    """The problem with other records of some agents."""
    x = task.x.copy()
    x[task.partition.indices[agents]] += 1.0
    return dataclasses.replace(task, x=x)


def with_factor_of(plan, group):
    """The plan with more noise of some agents, who share their normals."""
    factor = plan.factor.copy()
    factor[np.ix_(group, group)] *= 2.0
    return with_factor(plan, factor)


def kept_arrays(value, observed):
    """All arrays that a function keeps, in its closures and in what these hold."""
    if id(value) in observed:
        return []
    observed.add(id(value))
    if isinstance(value, jax.Array | np.ndarray):
        return [value]
    parts = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    parts += [getattr(value, "__wrapped__", None)]
    if isinstance(value, functools.partial):
        parts += [value.func, value.args, value.keywords]
    if isinstance(value, dict):
        parts += value.values()
    if isinstance(value, list | tuple):
        parts += value
    return [array for part in parts if part is not None for array in kept_arrays(part, observed)]


def test_one_agents_functions_keep_nothing_of_other_agents():
    plan, task = make("pair keys")
    rounds = dp.rounds(plan, task, agents=(AGENT,))
    secret = {bytes(jax.random.key_data(keys.derive(0, "noise")))}
    own = len(task.partition.indices[AGENT])
    for function in rounds[:3]:
        arrays = kept_arrays(function, set())
        assert arrays
        for array in arrays:
            assert not (array.shape[1:] == task.x.shape[1:] and len(array) > own)
            if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
                assert bytes(jax.random.key_data(array)) not in secret
    # All agents' functions keep all records, and the walk finds them.
    arrays = kept_arrays(dp.rounds(plan, task).outgoing, set())
    assert any(array.shape[1:] == task.x.shape[1:] for array in arrays)


OTHERS = [agent for agent in range(N) if agent != AGENT]


@pytest.mark.mutant
def test_one_agents_program_holds_nothing_of_other_agents(monkeypatch):
    plan, task = make("blocks")
    own = contents(plan, task)
    assert contents(plan, with_records(task, OTHERS)) == own
    assert contents(with_factor_of(plan, [0, 2, 4]), task) == own
    # Weights of links between others, agents 0 and 1 say, are no part of its row of W.
    weights = plan.mixing.copy()
    weights[[0, 0, 1, 1], [0, 1, 0, 1]] += [0.1, -0.1, -0.1, 0.1]
    assert contents(make("blocks", mixing=weights)[0], task) == own
    # Its own records and its own group are parts of it.
    assert contents(plan, with_records(task, [AGENT]))[0] != own[0]
    assert contents(with_factor_of(plan, [1, 3, 5]), task)[0] != own[0]

    # A broken copy that keeps the records of all agents.
    records_of = round_._records_of

    def records_of_all(problem, agents):
        records = records_of(problem, list(range(N)))
        part = jnp.array(agents)
        return records._replace(
            indices=records.indices[part],
            counts=records.counts[part],
            offsets=records.offsets[part],
        )

    monkeypatch.setattr(round_, "_records_of", records_of_all)
    assert contents(plan, with_records(task, OTHERS)) != contents(plan, task)


def programs_of_agent(plan, task, monkeypatch, seed=0):
    """Digests of the programs that one agent compiles, as they may be stored on disk."""
    call = _programs.Compiled.__call__
    digests = []

    def traced(program, *arguments):
        digests.append(checkpoint.computation([program.trace(*arguments)], release=False))
        return call(program, *arguments)

    loop = dp.rounds(plan, task)
    everyone = loop.outgoing(loop.init()).message
    rounds = dp.rounds(plan, task, seed=seed, agents=(AGENT,))
    with monkeypatch.context() as patched:
        patched.setattr(_programs.Compiled, "__call__", traced)
        state = rounds.init()
        sent = rounds.outgoing(state)
        rounds.incoming(state, sent, received_by(plan, (AGENT,), everyone))
    return digests


@pytest.mark.mutant
def test_one_agents_programs_hold_nothing_of_its_own(monkeypatch):
    """JAX may store them, and others may read that folder."""
    plan, task = make("blocks")
    digests = programs_of_agent(plan, task, monkeypatch)
    assert len(digests) == 2
    others = [
        (plan, with_records(task, [AGENT])),
        (with_factor_of(plan, [1, 3, 5]), task),
        (make("blocks", mixing=(RING + np.eye(N)) / 2)[0], task),
    ]
    for other in others:
        assert programs_of_agent(*other, monkeypatch) == digests
    assert programs_of_agent(plan, task, monkeypatch, seed=1) == digests


def test_first_states_may_be_donated():
    plan, task = make("whisper")
    for agents in (None, (AGENT,)):
        rounds = dp.rounds(plan, task, agents=agents)
        outgoing = jax.jit(rounds.outgoing, donate_argnums=0)
        first, again = [outgoing(rounds.init()).message for _ in range(2)]
        jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.mutant
def test_one_agents_state_holds_no_key_of_other_links(monkeypatch):
    plan, task = make("pair keys")
    drawn = noise.simulated_keys

    def others_drawn_anew(root, agents, edges):
        own_keys, edge_keys = drawn(root, agents, edges)
        other_own, other_edges = drawn(jax.random.fold_in(root, 7), agents, edges)
        ends = links.link_pairs(RING)
        kept = (ends == AGENT).any(axis=1)
        return (
            jnp.where(np.arange(agents) == AGENT, own_keys, other_own),
            jnp.where(kept, edge_keys, other_edges),
        )

    def state_of_agent():
        # Programs of the code before a patch would be called again.
        jax.clear_caches()
        return checkpoint.tree_digest(dp.rounds(plan, task, agents=(AGENT,)).init())

    own = state_of_agent()
    with monkeypatch.context() as patched:
        patched.setattr(noise, "simulated_keys", others_drawn_anew)
        assert state_of_agent() == own

    # A broken copy whose state holds the keys of all links.
    pairwise = noise.pairwise_cancelling

    def pairwise_of_all(*value, own_keys, edge_keys, **options):
        link = pairwise(*value, own_keys=own_keys, edge_keys=edge_keys, **options)

        def update(payload, state, params=None):
            noisy, inner = link.update(payload, state[0])
            return noisy, (inner, state[1])

        return optax.GradientTransformation(lambda payload: (link.init(payload), edge_keys), update)

    monkeypatch.setattr(noise, "pairwise_cancelling", pairwise_of_all)
    leaky = state_of_agent()
    monkeypatch.setattr(noise, "simulated_keys", others_drawn_anew)
    assert state_of_agent() != leaky


def test_agents_draw_normals_of_their_group_alone():
    plan, _ = make("blocks")
    privatizer, arrays = plan.privatizer.for_agents(plan.arrays, (AGENT, 1))
    assert privatizer.rows == (1, 3, 5) and arrays["factor"].shape == (2, 3)
    privatizer, arrays = make("independent")[0].privatizer.for_agents(
        make("independent")[0].arrays, (AGENT,)
    )
    assert privatizer.rows == (AGENT,) and arrays["factor"].shape == (1,)


@dataclasses.dataclass(frozen=True)
class ByTurns(dp.samplers.Random):
    """A sampler of one's own, which may read the counts of all agents."""


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("whisper", {"sampler": ByTurns(4)}, "whose rows may depend on the counts of others"),
        ("server", {}, "whose rounds need all agents"),
        ("whisper", {"method": dp.methods.DSGD(gossip_steps=2)}, "whose rounds need all agents"),
        ("whisper", {"noise": dp.noise.Polynomial(2)}, "drawn for all agents together"),
        ("whisper", {"release": True}, "of a release, whose groups would need a key file each"),
    ],
)
def test_agents_that_need_all_others_are_refused(name, changes, text, tmp_path):
    plan, task = make(name, **changes)
    key_file = tmp_path / "key" if plan.config.release else None
    with pytest.raises(ValueError, match=text):
        dp.rounds(plan, task, agents=(0,), key_file=key_file)


def test_what_does_not_fit_is_refused(tmp_path):
    plan, task = make("whisper")
    with pytest.raises(ValueError, match="plan is 2 plans; give one"):
        dp.rounds([plan, plan], task)
    with pytest.raises(ValueError, match="plan is 1 plans; give one, not a list"):
        dp.rounds([plan], task)
    rounds = dp.rounds(plan, task)
    with pytest.raises(ValueError, match="agents is .* of a release"):
        dp.rounds(make("whisper", release=True)[0], task, agents=(0,))
    with pytest.raises(ValueError, match="state is int; give a State"):
        rounds.init(3)
    state = rounds.init()
    sent = rounds.outgoing(state)
    for loop in (rounds, dp.rounds(plan, task, agents=(1,))):
        with pytest.raises(ValueError, match="state is Outgoing; give a State"):
            loop.incoming(sent, state, sent.message)
    with pytest.raises(ValueError, match="sent is dict; give what outgoing returned"):
        rounds.incoming(state, sent.message, sent.message)
    with pytest.raises(ValueError, match="seed is 'a'"):
        dp.rounds(plan, task, seed="a")
    with pytest.raises(ValueError, match="no plan has release=True"):
        dp.rounds(plan, task, key_file=tmp_path / "key")
    for agents, text in (((6,), "agents is 6"), ((), "give one or more"), ((1, 1), "each once")):
        with pytest.raises(ValueError, match=text):
            dp.rounds(plan, task, agents=agents)
    single = dp.rounds(plan, task, agents=(1,))
    with pytest.raises(ValueError, match="init has a stored state of agents"):
        single.init(single.init())
    with pytest.raises(ValueError, match="step needs messages of others than agents"):
        single.step(single.init())
