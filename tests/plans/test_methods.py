"""What must hold of every method and noise design: a row is tested the moment it is added.

`METHODS` has a line a method, `tests.support.make_config`'s changes that make a plan of it. The
views are those of `dpjax.accounting.views`, which know nothing of the code that runs.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.accounting import views
from dpjax.accounting.loss import AmplifiedLoss
from dpjax.algorithms.average import Average
from dpjax.algorithms.disk import DiSK
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.pmlf import PMLF
from dpjax.algorithms.zip_dl import ZipDL
from dpjax.engine import inputs, keys, program
from dpjax.engine.step import Data, Statics
from dpjax.learning import samplers
from dpjax.learning.query import UngatheredBatch
from dpjax.mechanism.participation import Participation
from dpjax.plans import noise, plan
from dpjax.plans.links import PairKeys, ZeroSum
from dpjax.protocols import Answer, Draw, Privatizer
from dpjax.topology import graphs, mixing
from tests.plans.draws import audit
from tests.support import algorithm_of, cut_and_resumed, make_config, make_problem, run

N = 6
ROUNDS = 4
RECORDS = 24
MATRIX = mixing.metropolis_hastings(graphs.erdos_renyi(N, 0.5, 0))
KEY = jax.random.key(11, impl="threefry2x32")

DESIGNS = {f"dsgd-{label}": {"design": label} for label in noise.LABELS}
METHODS = DESIGNS | {
    "dsgd-record": {"relation": "replace_record", "clip_norm": 0.3},
    "dsgd-cyclic": {
        "relation": "zero_out_record",
        "participation": (2, 2),
        "batch_size": 12,
        "design": "mafalda",
    },
    "dsgd-poisson": {
        "relation": "zero_out_record",
        "sampler": samplers.Poisson(6.0, 4),
        "design": "whisper",
        "epsilon": 2.0,
    },
    "dsgd-groups": {
        "relation": "zero_out_record",
        "sampler": samplers.Poisson(3.0, 4, separation=2),
        "noise": noise.PrefixSum(bands=2),
        "epsilon": 2.0,
    },
    "dsgd-bins": {
        "relation": "zero_out_record",
        "sampler": samplers.BallsInBins(2, 4),
        "design": "independent",
        "epsilon": 2.0,
    },
    "dsgd-full": {"relation": "zero_out_record", "sampler": samplers.Full()},
    "disk": {"method": DiSK(), "design": "whisper"},
    "pmlf-poisson": {
        "method": PMLF(length=3, beta=0.5, gossip_steps=2),
        "relation": "zero_out_record",
        "sampler": samplers.Poisson(6.0, 4),
        "design": "independent",
        "epsilon": 2.0,
    },
    "average": {"method": Average(DSGD(), decay=0.6), "design": "whisper"},
    "muffliato": {"method": DSGD(gossip_steps=3), "design": "independent"},
    "decor": {"noise": PairKeys(2.0), "attacker": "outsider"},
    "decor-nodes": {"noise": PairKeys(2.0), "attacker": "node", "method": DSGD(gossip_steps=2)},
    "zip_dl": {
        "method": ZipDL(), "noise": ZeroSum(), "attacker": "node", "gradients": "view",
    },
}  # fmt: skip
# Written out in tests of their own: gradients of other points, or other models at the end.
ELSEWHERE = ("disk", "pmlf-poisson", "average")
# Without noise all designs are one method.
PLAIN = [
    name
    for name in METHODS
    if name not in ELSEWHERE and (name not in DESIGNS or name == "dsgd-whisper")
]
# Losses that are not an outsider's of one message an agent are tested in tests/plans/test_links.py.
PRIVATE = [name for name in METHODS if name not in ("dsgd-non_private", "decor-nodes", "zip_dl")]


# Designs differ in noise alone: one is enough for what is of queries and samplers.
QUERIES = [name for name in METHODS if name not in DESIGNS or name == "dsgd-whisper"]


def few(*names, among=METHODS):
    """These of `METHODS`; the others on demand."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in among]


# One for each kind of noise, of sampler and of message.
KINDS = (
    *("dsgd-independent", "dsgd-whisper", "dsgd-mafalda", "dsgd-spacetime", "dsgd-cyclic"),
    *("dsgd-poisson", "pmlf-poisson", "average", "muffliato", "decor"),
)


@functools.cache
def made(name, **changes):
    config = make_config(**{"rounds": ROUNDS, **METHODS[name], **changes})
    return plan.make(config, MATRIX, counts=np.full(N, RECORDS))


@functools.cache
def problem():
    return make_problem(N)


def parts(value):
    """Statics and arrays of one plan, as a run has them."""
    statics = Statics.of((value,), (problem(),))
    arrays = jax.tree.map(lambda leaf: leaf[0], inputs.stacked_arrays((value,)))
    return statics, arrays


def batch_of(value):
    """A batch of every agent, as the sampler shapes it."""
    statics, _ = parts(value)
    task = problem()
    data = Data(*(jnp.asarray(part) for part in (task.x, task.y, *task.partition[:2])), 0)
    return statics.batch(data, KEY, KEY, 0)


def started(value):
    statics, arrays = parts(value)
    models = {"w": jnp.linspace(-1, 1, N * 3).reshape(N, 3)}
    return algorithm_of(statics, arrays, KEY).init(models)


@pytest.mark.slow
@pytest.mark.parametrize("name", few("disk"))
def test_round_keeps_tree_and_is_compiled_one(name):
    single = made(name)
    statics, arrays = parts(single)
    step = algorithm_of(statics, arrays, KEY).step
    models = jax.tree.map(lambda leaf: jnp.stack([leaf] * N), problem().init(KEY))
    state = algorithm_of(statics, arrays, KEY).init(models)
    eager, info = step(KEY, state, batch_of(single))
    jitted, sent = jax.jit(step)(KEY, state, batch_of(single))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(eager), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    for a, b in zip(
        jax.tree.leaves((eager.models, eager.memory, info)),
        jax.tree.leaves((jitted.models, jitted.memory, sent)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    lost = {"lost_noise"} if single.privatizer and single.privatizer.lost else set()
    assert set(info.metrics) == set(statics.query.metrics) | lost


@pytest.mark.parametrize("name", METHODS)
def test_keys_are_in_secret_slot_alone(name):
    single = made(name)
    state = jax.eval_shape(lambda: started(single))
    results = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    assert all(name.startswith(".secret") for name in results)
    assert bool(results) == (single.config.noise is not None)


@dataclasses.dataclass(frozen=True)
class Given:
    """A query that answers what a test says, one column a coordinate."""

    metrics = ()

    def __call__(self, models, batch, encode=None):
        return Answer({"w": batch})

    def points(self, weights=None):
        return self


def sent_by(item, *value, step=-1.0, flip=lambda privatizer: privatizer):
    """What goes out in every round of gradients that are given, under the same noise."""
    statics, arrays = parts(item)
    statics = statics._replace(privatizer=flip(statics.privatizer), query=Given(), divisor=1)
    algorithm = algorithm_of(statics, arrays | {"step_size": jnp.float32(step)}, KEY)
    compiled = jax.jit(algorithm.step)
    sent = []
    for gradients in value:
        state = algorithm.init({"w": jnp.zeros(gradients.shape[1:], jnp.float32)})
        messages = []
        for gradient in gradients:
            state, info = compiled(KEY, state, jnp.asarray(gradient, jnp.float32))
            messages.append(np.asarray(info.messages["w"], np.float64))
        sent.append(np.stack(messages))
    return sent


def steps_of(value):
    """Gossip steps between two gradients."""
    return getattr(value.config.method, "gossip_steps", 1)


def filtered(value, answers):
    """What the optimizer gets of the answers of the rounds."""
    gain = getattr(value.config.method, "gain", 1.0)
    new = [answers[0]]
    for item in answers[1:]:
        new.append((1 - gain) * new[-1] + gain * item)
    return np.stack(new)


def unfiltered(item, value):
    """The answers of the rounds, of what the optimizer got."""
    gain = getattr(item.config.method, "gain", 1.0)
    later = [(new - (1 - gain) * old) / gain for old, new in itertools.pairwise(value)]
    return np.stack([value[0], *later])


@pytest.mark.parametrize("name", few(*KINDS, among=PRIVATE))
def test_messages_are_those_of_view(name):
    """Differences of two runs that share the noise are A (G - G'), and what is left is B Z."""
    one = made(name)
    random = np.random.default_rng(0)
    first, second = random.normal(size=(2, ROUNDS, N, 2))
    sent = sent_by(one, first, second)
    k = steps_of(one)
    view = views.dsgd(MATRIX) if k == 1 else views.muffliato(MATRIX, k)
    a, b = view.ldp().materialize(ROUNDS)
    moved = (sent[0] - sent[1]).reshape(-1, 2)
    # The eavesdropper's view is of gradients and their noise in turn; models add them up, so the
    # messages of the run are sums of what went before, mixed.
    expected = models_of(filtered(one, first - second), k).reshape(-1, 2)
    np.testing.assert_allclose(moved, expected, atol=2e-4)
    assert a.shape[1] == ROUNDS * N and b.shape[0] == a.shape[0]


def models_of(gradients, k):
    """Messages x + g of the rounds, each gossip step's, by hand."""
    x = np.zeros(gradients.shape[1:])
    messages = []
    for gradient in gradients:
        x = x + gradient
        steps = []
        for _ in range(k):
            steps.append(x)
            x = MATRIX @ x
        messages.append(steps[0] if k == 1 else np.stack(steps))
    return np.stack(messages)


def mu_of_what_is_sent(value, flip=lambda privatizer: privatizer):
    """The loss that follows from the covariance of what goes out, from the very key."""
    d = 20_000
    (sent,) = sent_by(value, np.zeros((ROUNDS, N, d)), flip=flip)
    if steps_of(value) > 1:
        sent = sent[:, 0]
    # Back to what each agent added: x_t+1 = W^k m_t, so the noise of a round is m_t less that.
    power = np.linalg.matrix_power(MATRIX, steps_of(value))
    added = np.stack([sent[0], *(sent[t] - power @ sent[t - 1] for t in range(1, ROUNDS))])
    added = unfiltered(value, added)
    covariance = np.einsum("sid,tjd->sitj", added, added).reshape(ROUNDS * N, -1) / d
    precision = np.linalg.inv(covariance).reshape(ROUNDS, N, ROUNDS, N)
    when = value.config.pattern
    worst = 0.0
    for i in range(N):
        of_agent = precision[:, i, :, i]
        for pattern in when.patterns:
            worst = max(worst, np.abs(of_agent[np.ix_(pattern, pattern)]).sum())
    return value.config.protect.sensitivity * np.sqrt(worst)


def stated_mu(value):
    """Of sampled batches: what their noise would be worth if they were known."""
    loss = value.guarantee.loss
    return loss.unamplified if isinstance(loss, AmplifiedLoss) else value.guarantee.mu


@pytest.mark.parametrize("name", few(*KINDS, among=PRIVATE))
def test_noise_sent_has_loss_that_is_stated(name):
    single = made(name)
    assert mu_of_what_is_sent(single) == pytest.approx(stated_mu(single), rel=0.1)


@dataclasses.dataclass(frozen=True)
class Half(Privatizer):
    """The broken twin of a privatizer: half of the noise that it says."""

    inner: Privatizer

    def transformation(self, arrays, key):
        """The inner one's, with half of what it adds."""
        link = self.inner.transformation(arrays, key)

        def update(payload, state, params=None):
            noisy, state = link.update(payload, state, params)
            return jax.tree.map(lambda a, b: (a + b) / 2, payload, noisy), state

        return optax.GradientTransformation(link.init, update)


@pytest.mark.mutant
@pytest.mark.parametrize("name", ["dsgd-whisper", "dsgd-mafalda", "dsgd-poisson", "decor"])
def test_privatizer_with_half_noise_is_caught(name):
    single = made(name)
    result = mu_of_what_is_sent(single, Half)
    assert not result == pytest.approx(stated_mu(single), rel=0.3)
    assert result == pytest.approx(2 * stated_mu(single), rel=0.1)


def norms_of(tree):
    """[n] L2 norm of each agent's part."""
    squares = [(np.asarray(leaf).reshape(N, -1) ** 2).sum(1) for leaf in jax.tree.leaves(tree)]
    return np.sqrt(sum(squares))


@pytest.mark.parametrize("name", QUERIES)
def test_one_record_moves_one_agents_payload_by_no_more_than_stated(name):
    """Replayed on a neighbouring input: the query's answers, with the same batch positions."""
    single = made(name)
    statics, _ = parts(single)
    norms = moved_by_a_record(single, statics.query)
    assert 0 < norms[2] <= 2 * single.config.protect.clip_norm * (1 + 1e-6)
    assert np.delete(norms, 2).max() == 0


@functools.partial(jax.jit, static_argnums=0)
def answer(query, models, batch):
    return query(models, batch).total


def moved_by_a_record(value, query):
    """[n] how far the answers of two batches are apart that differ in a record of agent 2."""
    models = jax.tree.map(lambda leaf: jnp.stack([leaf + 3] * N), problem().init(KEY))
    batch = batch_of(value)
    # Where the query gathers the batch itself, its first record among all.
    where = batch.rows[2, 0] if isinstance(batch, UngatheredBatch) else (2, 0)
    x, y, *rest = batch
    other = x.at[where].set(50 * x[where] + 9), y.at[where].set(-y[where]), *rest
    other = UngatheredBatch(*other) if isinstance(batch, UngatheredBatch) else other
    answers = [answer(query, models, case) for case in (batch, other)]
    return norms_of(jax.tree.map(lambda a, b: a - b, *answers))


@pytest.mark.mutant
@pytest.mark.parametrize("name", ["dsgd-whisper", "dsgd-record", "dsgd-full"])
def test_query_that_clips_at_twice_norm_is_caught(name):
    """The broken twin of the test above."""
    single = made(name)
    statics, _ = parts(single)
    wide = dataclasses.replace(statics.query, clip_norm=2 * single.config.protect.clip_norm)
    assert moved_by_a_record(single, wide)[2] > 2 * single.config.protect.clip_norm * (1 + 1e-6)


@pytest.mark.parametrize("name", few("dsgd-record", "dsgd-cyclic", "zip_dl", among=PLAIN))
def test_without_noise_and_clip_it_is_plain_method(name):
    changes = {"clip_norm": 1e6, "noise": None, "budget": None, "step_size": 0.3}
    first = made(name, **changes)
    task = problem()
    if name in DESIGNS:
        assert all(made(other, **changes).config == first.config for other in DESIGNS)
    result = run(first, task, seeds=[3])
    statics, _ = parts(first)
    power = np.linalg.matrix_power(MATRIX, steps_of(first))

    def of_agent(p, x, y, skip):
        grads = jax.vmap(jax.grad(task.loss), (None, 0, 0))(p, x, y)
        over = statics.sampler.divisor
        return jax.tree.map(lambda g: jnp.tensordot(~skip, g, 1) / over, grads)

    of_agents = jax.jit(jax.vmap(of_agent))
    models = jax.tree.map(lambda leaf: jnp.stack([leaf] * N), task.init(keys.derive(3, "initial")))
    data = Data(*(jnp.asarray(part) for part in (task.x, task.y, *task.partition[:2])), 0)
    for t in range(ROUNDS):
        key = keys.derive(3, "batches")
        if statics.sampler.amplification() is not None:
            key = jax.random.fold_in(keys.derive(3, "noise"), 2**32 - 1)
        if statics.sampler.key_of == "round":
            key = jax.random.fold_in(key, t)
        drawn = statics.sampler.draw(key, t, data.counts)
        rows = jnp.take_along_axis(data.indices, drawn.rows, axis=1)
        skip = np.zeros(rows.shape, bool) if drawn.padding is None else drawn.padding
        step = of_agents(models, data.x[rows], data.y[rows], np.asarray(skip))
        models = jax.tree.map(
            lambda p, g: jnp.tensordot(power, np.asarray(p) - 0.3 * np.asarray(g), 1), models, step
        )
    for a, b in zip(jax.tree.leaves(models), jax.tree.leaves(result.params), strict=True):
        np.testing.assert_allclose(b[0, 0], a, rtol=2e-4, atol=2e-5)


@pytest.mark.optimized
@pytest.mark.parametrize("name", few("dsgd-mafalda"))
def test_stopped_run_goes_on_to_same_bits(name, tmp_path):
    single = made(name)
    task = problem()
    options = {"seeds": [0, 1], "eval_every": 2, "checkpoint_seconds": 0}
    straight = run(single, task, **options)
    resumed = cut_and_resumed(single, task, tmp_path / "c", **options)
    for a, b in zip(jax.tree.leaves(straight.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(len(jax.devices()) < 6, reason="needs six devices")
# Poisson batches over devices are in tests/plans/test_poisson.py, covariances in test_run.py.
@pytest.mark.slow
@pytest.mark.parametrize("name", few("decor"))
def test_agents_on_several_devices_give_same_numbers(name):
    first = made(name)
    task = problem()
    single = run(first, task, seeds=[0])
    spread = run(first, task, seeds=[0], devices=3)
    for metric, values in single.metrics.items():
        np.testing.assert_allclose(spread.metrics[metric], values, rtol=2e-5, atol=2e-6)


class Greedy:
    """The broken twin of a sampler: a record that is drawn twice moves a sum by twice the clip."""

    divisor = 4

    def draw(self, key, round, counts):
        return Draw(jnp.zeros((len(counts), 4), jnp.int32), None)


@pytest.mark.mutant
@pytest.mark.parametrize("name", QUERIES)
def test_no_record_is_drawn_twice_or_beyond_what_is_stated(name):
    """The rounds in which each record takes part, counted, against the pattern accounted for."""
    single = made(name)
    pattern: Participation = single.config.pattern
    counts = np.array([6, 6, 7, 8, 8, 8])
    sampler = single.config.sampler.with_max_records(8)

    def rounds_of(sampler):
        taken = np.zeros((len(counts), counts.max(), ROUNDS), int)
        for t in range(ROUNDS):
            key = KEY if single.config.sampler.key_of == "run" else jax.random.fold_in(KEY, t)
            drawn = sampler.draw(key, t, jnp.asarray(counts))
            rows = np.asarray(drawn.rows)
            skip = np.zeros_like(rows, bool) if drawn.padding is None else np.asarray(drawn.padding)
            for i in range(len(counts)):
                np.add.at(taken[i, :, t], rows[i][~skip[i]], 1)
        return taken

    def kept(taken):
        if taken.max() > 1 or any(taken[i, count:].any() for i, count in enumerate(counts)):
            return False
        allowed = {tuple(item) for item in pattern.patterns.tolist()}
        complete = pattern.epochs == ROUNDS
        return complete or all(
            any(set(np.flatnonzero(record)) <= set(value) for value in allowed)
            for agent in taken for record in agent
        )  # fmt: skip

    assert kept(rounds_of(sampler))
    assert not kept(rounds_of(Greedy()))


@dataclasses.dataclass(frozen=True)
class Restless(samplers.Cyclic):
    """The broken twin: every cycle is one round longer than it says."""

    def draw(self, key, round, counts):
        """Deal by another separation."""
        longer = dataclasses.replace(self, separation=self.separation + 1)
        return samplers.Cyclic.draw(longer, key, round, counts)


@dataclasses.dataclass(frozen=True)
class Repeating(samplers.Random):
    """The broken twin: one record fills the batch."""

    def draw(self, key, round, counts):
        """The first record, again and again."""
        return Draw(jnp.zeros((len(counts), self.batch_size), jnp.int32), None)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("sampler", "text"),
    [
        (Restless(2, 2, 16), "its pattern says 2 apart"),
        (Repeating(4), "which draws a record of agent 0 twice"),
    ],
)
def test_sampler_that_draws_otherwise_than_it_says_is_refused(sampler, text):
    with pytest.raises(ValueError, match=text):
        audit(sampler, problem().partition.counts, 4)


@dataclasses.dataclass(frozen=True)
class Remembers(DSGD):
    """A method whose memory holds models, as those of directed graphs do."""

    def start(self, ctx, models):
        """The optimizer's state, and the models."""
        return ctx.optimizer.init(models), models

    def send(self, ctx, public_state, emission, noisy):
        """As D-SGD."""
        inner = public_state._replace(memory=public_state.memory[0])
        message, state = super().send(ctx, inner, emission, noisy)
        return message, (state, message)


def test_run_that_carries_on_starts_its_memory_from_given_models():
    training_plan = plan.make(make_config(method=Remembers(), rounds=2), MATRIX)
    statics, _ = parts(training_plan)
    options = {"w": jnp.arange(2.0 * N * 3).reshape(2, 1, N, 3)}
    keys_ = jax.random.split(KEY, 2)
    state = program.initial(statics, inputs.stacked_arrays((training_plan,)), options, keys_, keys_)
    np.testing.assert_array_equal(state.memory[1]["w"], options["w"])
