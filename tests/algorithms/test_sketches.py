"""Sketches between gradients and what clients send: DOME by hand, twins, and what joins them."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms import sketches
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.exchange import Sum, Trusted
from dpjax.algorithms.federated import Federated, dome
from dpjax.contrib.optimizers import scale_by_adam
from dpjax.contrib.rules import UpdateRule
from dpjax.contrib.scaled import Quantile, Scaled
from dpjax.contrib.sketches import Count, FixedFrame, GivenFrame
from dpjax.data import partition
from dpjax.engine.host import local_transport
from dpjax.engine.run import run
from dpjax.learning.samplers import Clients, Random
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.plans import plan
from dpjax.plans.noise import Independent, SumShares
from dpjax.plans.optimizers import Chain, Sgd
from dpjax.plans.protect import Budget, Protect
from dpjax.protocols import Answer
from dpjax.topology import graphs, mixing
from dpjax.transforms import sketch as sketch_
from dpjax.transforms.lowpass import SHARES, passed
from tests.support import cut_and_resumed, make_algorithm

N = 5
D = 12
K = 4
CLIP = 1.0
SHARE = 0.5
COMPLETE = mixing.metropolis_hastings(graphs.complete(N))
KEY = jax.random.key(3, impl="threefry2x32")
GIVEN = np.linalg.qr(np.random.default_rng(4).normal(size=(D, K)))[0]
SKETCHES = {
    "learned": sketches.Learned(K, probes=2),
    "fixed": FixedFrame(K),
    "count": Count(K, rows=2),
    "given": GivenFrame(GIVEN),
}


def clipping(models, batch, encode=None):
    """A query of gradients that are the batch, less a tenth of the model."""

    def one(model, gradient):
        sent = gradient - 0.1 * model
        sent = sent if encode is None else encode(sent)
        return sent * jnp.minimum(1, CLIP / jnp.linalg.norm(sent))

    return Answer(jax.vmap(one)(models, batch))


def unclipped(models, batch, encode=None):
    """The broken twin: clipped before the sketch."""
    short = batch * jnp.minimum(1, CLIP / jnp.linalg.norm(batch, axis=1, keepdims=True))
    return Answer(short if encode is None else jax.vmap(encode)(short))


def made(method, optimizer, query=clipping, privatizer=None, share=SHARE):
    return make_algorithm(
        method,
        {"mixing": jnp.asarray(COMPLETE, jnp.float32), SHARES: jnp.full(N, share, jnp.float32)},
        query=query, privatizer=privatizer, optimizer=optimizer, divisor=1,
    )  # fmt: skip


def adam(step=0.1, floor=1e-4):
    rule = UpdateRule("adam", floor=floor)
    return Chain(rule, step, uses_noise=True).chain(
        {"step_size": jnp.float32(step), SHARES: jnp.zeros(N, jnp.float32)}
    )


def gradients(length, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(length, N, D)).astype(np.float32) + np.linspace(0, 1, D, dtype="f")


update = jax.jit(sketch_.update, static_argnames=("probes", "as_published"))


def by_hand(length, missing, *, printed=False, centred=True, own=True, of_mean=True):
    """DOME as the note has it, in float64; the sketch's update alone is the package's.

    Args:
        length: Rounds.
        missing: Agents that no sum has.
        printed: The paper's second-moment line.
        centred: Whether the mean is added back.
        own: Whether the frame is this round's.
        of_mean: Whether noise is divided by who was there.
    """
    present = np.setdiff1d(np.arange(N), missing)
    start = sketch_.start(D, K, jax.random.fold_in(KEY, 1), jnp.float32)
    learned = start
    before = np.asarray(start.frame, np.float64)
    theta = first = second = running = np.zeros(D)
    for t, batch in enumerate(gradients(length), 1):
        frame = np.asarray(learned.frame, np.float64)
        centre = running / (1 - 0.9 ** (t - 1)) if t > 1 else np.zeros(D)
        sent = (batch - 0.1 * theta - centre) @ frame
        sent *= np.minimum(1, CLIP / np.linalg.norm(sent, axis=1, keepdims=True))
        result = frame @ sent[present].mean(0) + centre * centred
        reference = np.square(frame if own and not printed else before).sum(1)
        reference *= SHARE / (1 if printed or not of_mean else len(present))
        first, running = (0.9 * old + 0.1 * result for old in (first, running))
        second = 0.999 * second + 0.001 * (result**2 - reference)
        corrected = second / (1 - 0.999**t)
        theta = theta - 0.1 * first / (1 - 0.9**t) / np.sqrt(np.maximum(corrected, 1e-4))
        before = frame
        key = jax.random.fold_in(KEY, 100 + t)
        gradient = jnp.asarray(result, jnp.float32)
        learned = update(learned, gradient, key, probes=2, as_published=printed)
    return theta


def trained(method, length, query=clipping, privatizer=None):
    made_ = made(method, adam(), query, privatizer)
    state = made_.init(jnp.zeros((N, D), jnp.float32), jax.random.fold_in(KEY, 1))
    step = jax.jit(made_.step)
    for t, batch in enumerate(gradients(length), 1):
        state, _ = step(jax.random.fold_in(KEY, 100 + t), state, jnp.asarray(batch))
    return state


@pytest.mark.parametrize("missing", [(), (1, 3)])
def test_dome_is_notes_algorithm(missing):
    state = trained(dome(K, Trusted(2, missing), probes=2), 6)
    result = np.asarray(state.models)
    expected = by_hand(6, missing)
    np.testing.assert_allclose(result, np.tile(expected, (N, 1)), rtol=1e-3, atol=1e-3)
    for broken in ({"centred": False}, {"own": False}, {"of_mean": False}, {"printed": True}):
        assert np.abs(by_hand(6, missing, **broken) - expected).max() > 0.02, broken


def test_printed_lines_read_frame_before():
    state = trained(dome(K, Trusted(2), as_published=True), 2)
    sketch = state.memory.sketch
    key = jax.random.fold_in(KEY, 9)
    after = dome(K, as_published=True).sketch.learn(sketch, jnp.arange(float(D), dtype="f"), key)
    noise = np.asarray(dome(K, as_published=True).sketch.noise(after, 2.0, 5))
    np.testing.assert_allclose(noise, 2 * np.square(sketch.sketch.frame).sum(1), rtol=1e-5)
    assert np.abs(np.square(after.sketch.frame).sum(1) * 2 - noise).max() > 0.1
    # From the second round on what QR invents is rounding's; the first is comparable.
    first = np.asarray(trained(dome(K, Trusted(2), as_published=True), 1).models)[0]
    np.testing.assert_allclose(first, by_hand(1, (), printed=True), rtol=1e-3, atol=1e-3)


@pytest.mark.mutant
@pytest.mark.parametrize("name", sorted(SKETCHES))
def test_what_is_sent_is_no_longer_than_clip(name):
    method = Federated(Sum(), SKETCHES[name], centre=0.9)
    for query in (clipping, unclipped):
        made_ = made(method, adam(), query)
        state = made_.init(jnp.zeros((N, D), jnp.float32), KEY)
        step = jax.jit(made_.step)
        longest = 0.0
        for batch in 50 * gradients(4):
            state, info = step(KEY, state, jnp.asarray(batch))
            assert info.messages.shape == (N, K)
            longest = max(longest, float(np.linalg.norm(info.messages, axis=1).max()))
        if query is clipping:
            assert longest <= CLIP * (1 + 1e-6)
        elif name == "count":
            # Two gradients' coordinates in one bucket: clipped before, they are longer after.
            assert longest > CLIP * 1.05


@pytest.mark.parametrize("printed", [False, True])
def test_noise_alone_leaves_no_second_moment(printed):
    """Lemma 3.2 in a run: gradients of zero, noise of known variance; the printed line is off."""
    deviation = 0.3
    length = 400
    method = dome(K, Trusted(), probes=K, as_published=printed)
    method = dataclasses.replace(method, centre=0.0)
    noise = np.random.default_rng(0).normal(size=(length, N, K)) * deviation

    def noisy(models, batch, encode=None):
        return Answer(batch)

    made_ = made(method, adam(floor=1e3), noisy, share=deviation**2)
    state = made_.init(jnp.zeros((N, D), jnp.float32), KEY)

    def one(state, value):
        key, batch = value
        return made_.step(key, state, batch)[0], None

    keys = jax.random.split(KEY, length)
    state, _ = jax.lax.scan(one, state, (keys, jnp.asarray(noise, jnp.float32)))
    second = jax.tree.leaves(optax.tree.get(state.memory.optimizer, "second"))[0]
    # Of d coordinates each has k/d of a round's variance.
    added = deviation**2 / N * K / D * (1 - 0.999**length)
    mean = float(np.mean(second))
    # T rounds of k squares: a relative spread of sqrt(2 / (T k)).
    tolerance = 4 * math.sqrt(2 / (length * K))
    assert (abs(mean / added) < tolerance) != printed
    if printed:
        assert mean / added == pytest.approx(1 - N, abs=5 * tolerance)


def test_adam_takes_off_what_it_is_told_of_each_coordinate():
    link = scale_by_adam(passed, b1=0.0, b2=0.5, floor=1e-6)
    options = {"a": jnp.array([2.0, 3.0]), "b": jnp.array([1.0])}
    reported = {"a": jnp.array([1.0, 5.0]), "b": jnp.array([0.0])}
    state = link.init(options)
    out, state = link.update(options, state, noise_variance=reported)
    np.testing.assert_allclose(out["a"], [2 / math.sqrt(3), 3 / math.sqrt(4)], rtol=1e-6)
    np.testing.assert_allclose(out["b"], [1.0], rtol=1e-6)
    same, _ = link.update(options, link.init(options), noise_variance=jnp.float32(0.5))
    np.testing.assert_allclose(same["a"][0], 2 / math.sqrt(3.5), rtol=1e-6)
    with pytest.raises(ValueError, match="noise_variance is None"):
        link.update(options, state)
    with pytest.raises(ValueError, match="passed with every update"):
        passed(3)


# Whole runs.

M = 4
EPOCHS = 2
T = M * EPOCHS


def task(features=11):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N * M, features))
    y = np.where(x @ rng.normal(size=features) > 0, 1, -1)
    return supervised(Linear(), "logistic", (x, y), (x, y), partition.iid(len(x), N, 0))


def config(method, rule=None, **changes):
    rule = UpdateRule("adam", floor=1e-3).chain(0.05) if rule is None else rule
    options = dict(
        protect=Protect("zero_out_record", clip_norm=CLIP, attacker="aggregator"),
        sampler=Clients(M, 1, EPOCHS), optimizer=rule, rounds=T, noise=SumShares(1),
        budget=Budget(8.0, 1e-5), method=method,
    )  # fmt: skip
    return plan.Config(**(options | changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learned", "fixed", "count", "given"])
def test_sketch_changes_what_is_sent_and_no_guarantee(name):
    complete, small = (
        plan.make(config(Federated(Trusted(1, (2,)), sketch, 0.9)), COMPLETE)
        for sketch in (None, SKETCHES[name])
    )
    # Sketches of contrib are named as custom parts, and change nothing else.
    assert small.guarantee.replace(custom=complete.guarantee.custom) == complete.guarantee
    assert small.arrays[SHARES].shape == (N,)
    deviation = float(small.noise.scale)
    np.testing.assert_allclose(small.arrays[SHARES], deviation**2, rtol=1e-6)
    result = run(small, task(), seeds=[0, 1])
    assert np.isfinite(result.metrics["test_loss"]).all()
    # Seeds have sketches of their own; only what is given is one for all.
    first, second = (np.asarray(jax.tree.leaves(result.params)[0])[i] for i in (0, 1))
    assert not np.array_equal(first, second)


@pytest.mark.slow
@pytest.mark.optimized
def test_run_over_network_is_same():
    training_plan = plan.make(config(dome(K, Trusted(1, (2,)), probes=2)), COMPLETE)
    expected = run(training_plan, task(), seeds=[0])
    over = run(training_plan, task(), seeds=[0], transport=local_transport(training_plan))
    for a, b in zip(jax.tree.leaves(expected.params), jax.tree.leaves(over.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.optimized
def test_run_after_stop_is_same(tmp_path):
    training_plan = plan.make(config(dome(K, Trusted(1, (2,)), probes=2)), COMPLETE)
    argument = task()
    expected = run(training_plan, argument, seeds=[0])
    again = cut_and_resumed(training_plan, argument, tmp_path, seeds=[0], eval_every=2)
    for a, b in zip(jax.tree.leaves(expected.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)


@dataclasses.dataclass(frozen=True)
class Peeking(Federated):
    """The broken twin: encoded by what the batch says."""

    def _encoder(self, memory):
        inner = super()._encoder(memory)
        return lambda gradient: inner(gradient)

    def emit(self, ctx, public_state):
        scale = 1 + jnp.mean(jax.tree.leaves(ctx.batch)[0])
        inner = self._encoder(public_state.memory)
        answer = ctx.query(public_state.models, ctx.batch, lambda g: inner(g) * scale)
        return super().emit(ctx, public_state)._replace(private=answer.total)


@pytest.mark.mutant
def test_encoder_that_knows_batch_is_refused():
    with pytest.raises(ValueError, match="encoders that know no data"):
        plan.make(config(Peeking(Trusted(1), SKETCHES["fixed"])), COMPLETE)


@dataclasses.dataclass(frozen=True)
class Mine(sketches.Learned):
    """A user's sketch."""


QUANTILE = Quantile(clip_norm=CLIP, first=1.0)


def delegated(name):
    return lambda self, *args, **options: getattr(sketches.Learned(4), name)(*args, **options)


SKETCH = {"k": 4, "min_entries": 4}
SKETCH |= {name: delegated(name) for name in ("start", "projection", "noise", "learn")}
Bare = type("Bare", (), SKETCH)
Pair = type("Pair", (collections.namedtuple("Pair", "width"),), SKETCH)


@pytest.mark.mutant
@pytest.mark.parametrize("part", [Mine(4), Scaled(Mine(4), QUANTILE), Bare(), Pair(4)])
def test_users_part_of_packaged_method_is_named(part):
    """Whatever it is made of: a dataclass, a plain class, a named tuple."""
    training_plan = plan.make(config(Federated(Trusted(1), part), Sgd(0.1)), COMPLETE)
    names = [type(part).__name__]
    if isinstance(part, Scaled):
        names += ["Mine", "Quantile"]
    assert training_plan.guarantee.custom == tuple(names)
    packaged = plan.make(config(dome(4, Trusted(1)), Sgd(0.1)), COMPLETE)
    assert packaged.guarantee.custom == ()


def test_what_does_not_fit_is_refused_before_any_work():
    wide = plan.make(config(dome(40, Trusted(1))), COMPLETE)
    with pytest.raises(ValueError, match="k is 40 for a model of 12 entries"):
        run(wide, task(), seeds=[0])
    with pytest.raises(ValueError, match="columns has 12 rows for a model of 8"):
        run(
            plan.make(config(Federated(Trusted(1), SKETCHES["given"])), COMPLETE),
            task(7),
            seeds=[0],
        )
    with pytest.raises(ValueError, match="sketch is 16"):
        Federated(Trusted(), 16)
    with pytest.raises(ValueError, match="centre is 1"):
        Federated(Trusted(), None, 1.0)
    with pytest.raises(ValueError, match="no multiple of rows"):
        Count(5, rows=2)
    with pytest.raises(ValueError, match="probes is 9"):
        sketches.Learned(4, probes=9)
    with pytest.raises(ValueError, match="probes is 4; k is 2: give more columns, or fewer random"):
        sketches.Learned(2)
    with pytest.raises(ValueError, match="share is 0"):
        sketches.Learned(4, share=0)
    with pytest.raises(ValueError, match="columns"):
        GivenFrame([[np.nan]])
    with pytest.raises(ValueError, match="columns has 1e.300, beyond float32"):
        GivenFrame([[1e300]])
    for rule in (UpdateRule("galore"), UpdateRule("sgd", "adaptive")):
        with pytest.raises(ValueError, match="noise_variance is None|one number a round"):
            plan.make(config(dome(4, Trusted(1)), rule.chain(0.1)), COMPLETE)


def test_given_frames_are_equal_by_their_numbers():
    same = GivenFrame(GIVEN.copy())
    other = GivenFrame(GIVEN[:, :2])
    assert same == SKETCHES["given"] and hash(same) == hash(SKETCHES["given"]) and same != other
    assert "12, 4" in repr(same)


def test_plans_of_other_methods_are_told_as_before():
    training_plan = plan.make(
        plan.Config(
            protect=Protect("replace_record", clip_norm=1.0), sampler=Random(2),
            optimizer=UpdateRule("adam").chain(0.1), rounds=T, budget=Budget(8.0, 1e-5),
            method=DSGD(), noise=Independent(),
        ),
        COMPLETE,
    )  # fmt: skip
    assert SHARES not in training_plan.arrays and training_plan.arrays["noise_variance"].shape == (
        N,
    )
    assert plan.make(config(Federated(Trusted(1)), Sgd(0.1)), COMPLETE).arrays.keys() == {
        "mixing", "noise_scale", "step_size"
    }  # fmt: skip
