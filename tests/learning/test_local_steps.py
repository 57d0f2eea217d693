"""Local training as a query, and clients who come with several records."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.algorithms.exchange import Sum, Trusted
from dpjax.algorithms.federated import Federated
from dpjax.data import partition
from dpjax.engine.run import run
from dpjax.learning.query import AgentQuery, RecordQuery
from dpjax.learning.samplers import Clients
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.plans import plan
from dpjax.plans.noise import SumShares
from dpjax.plans.optimizers import Sgd
from dpjax.plans.protect import Budget, Protect
from dpjax.topology import graphs, mixing

N = 3
B = 4
D = 5
CLIP = 0.3
RATE = 0.5
COMPLETE = mixing.metropolis_hastings(graphs.complete(N))
_RNG = np.random.default_rng(0)
MODELS = jnp.asarray(_RNG.normal(size=(N, D)), jnp.float32)
X = jnp.asarray(_RNG.normal(size=(N, B, D)), jnp.float32)
Y = jnp.asarray(_RNG.normal(size=(N, B)), jnp.float32)
PADDING = jnp.arange(B)[None] >= jnp.asarray([4, 2, 0])[:, None]


def loss(params, x, y):
    return (x @ params - y) ** 2 / 2


def walked(model, x, y, steps):
    """(x_0 - x_K) / (K step), by hand in float64."""
    model, x, y = (np.asarray(each, np.float64) for each in (model, x, y))
    at = model.copy()
    for _ in range(steps):
        at = at - RATE * x.T @ (x @ at - y) / max(len(x), 1)
    return (model - at) / (steps * RATE)


def clipped(vector):
    return vector * min(1, CLIP / max(np.linalg.norm(vector), 1e-30))


@pytest.mark.parametrize("steps", [1, 4])
def test_agents_local_training_is_clipped_as_whole(steps):
    query = jax.jit(AgentQuery(loss, None, CLIP, "flat").local_steps(steps, RATE))
    total = query(MODELS, (X, Y, PADDING)).total
    for i, length in enumerate([4, 2, 0]):
        expected = clipped(walked(MODELS[i], X[i, :length], Y[i, :length], steps))
        np.testing.assert_allclose(total[i], expected, rtol=2e-5, atol=1e-7)
    if steps == 1:
        plain = jax.jit(AgentQuery(loss, None, CLIP, "flat"))(MODELS, (X, Y, PADDING)).total
        np.testing.assert_allclose(total, plain, rtol=1e-6)
        return
    # The broken twin clips every step's gradient: longer, or another direction.
    each = [clipped(walked(MODELS[0], X[0], Y[0], 1)) for _ in range(steps)]
    assert np.abs(total[0] - np.mean(each, 0)).max() > 1e-3


def test_records_local_training_moves_sum_no_farther_than_clip():
    query = jax.jit(RecordQuery(loss, None, CLIP, "flat", None).local_steps(3, RATE))
    total = query(MODELS, (X, Y, PADDING)).total
    for i, length in enumerate([4, 2, 0]):
        each = [
            clipped(walked(MODELS[i], X[i, j : j + 1], Y[i, j : j + 1], 3)) for j in range(length)
        ]
        np.testing.assert_allclose(total[i], np.sum(each, 0) if each else 0, rtol=2e-5, atol=1e-6)
    wild = X.at[0, 1].multiply(1e3)
    moved = query(MODELS, (wild, Y, PADDING)).total - total
    without = query(MODELS, (X, Y, PADDING.at[0, 1].set(True))).total - total
    assert np.linalg.norm(moved[0]) <= 2 * CLIP * (1 + 1e-6)
    assert np.linalg.norm(without[0]) <= CLIP * (1 + 1e-6)


def test_encoders_see_whole_walk():
    query = AgentQuery(loss, None, CLIP, "flat").local_steps(3, RATE)
    frame = jnp.eye(D, 2)
    function = jax.jit(lambda *given: query(*given, lambda gradient: gradient @ frame).total)(
        MODELS, (X, Y, None)
    )
    for i in range(N):
        expected = clipped(walked(MODELS[i], X[i], Y[i], 3)[:2])
        np.testing.assert_allclose(function[i], expected, rtol=2e-5, atol=1e-7)


M = 3
EACH = 4
BATCH = 2
EPOCHS = 2
T = EPOCHS * M * EACH // BATCH


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_leaving_client_out_moves_message_by_clip_whatever_encoder(steps):
    centre = jnp.zeros(D, jnp.float32).at[0].set(3.0)
    query = AgentQuery(loss, None, CLIP, "flat").local_steps(steps, RATE)

    @jax.jit
    def answer(x, padding):
        y = jnp.full((1, 1), -100.0, jnp.float32)
        return query(jnp.zeros((1, D), jnp.float32), (x, y, padding), lambda g: g - centre).total

    # A gradient along the centre, and far longer: the answer to it is C, that to none not -C.
    present, gone = (
        answer(jnp.zeros((1, 1, D), jnp.float32).at[0, 0, 0].set(1.0), jnp.asarray([[left]]))
        for left in (False, True)
    )
    assert float(jnp.linalg.norm(present)) > 0.99 * CLIP
    np.testing.assert_array_equal(gone, 0)
    assert float(jnp.linalg.norm(present - gone)) <= CLIP


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_records_in_places_of_padding_move_nothing(steps):
    query = jax.jit(AgentQuery(loss, None, CLIP, "flat").local_steps(steps, RATE))
    models = jnp.ones((1, D), jnp.float32)
    y = jnp.zeros((1, 2), jnp.float32)
    # Others' records there may overflow: a gradient times zero is then nan.
    x = np.ones((1, 2, D), np.float32)
    huge = x * np.asarray([1, 3e38], np.float32)[None, :, None]
    first, second = (query(models, (each, y, jnp.asarray([[False, True]]))).total
                     for each in (jnp.asarray(x), jnp.asarray(huge)))  # fmt: skip
    assert float(jnp.linalg.norm(first)) > 0.1 * CLIP
    np.testing.assert_array_equal(first, second)


def test_clients_come_with_several_records_of_their_own():
    dealt = Clients(M, EACH, EPOCHS, BATCH)
    counts = np.full(2, M * EACH)
    dealt.check(counts)
    assert dealt.turns == (EPOCHS * EACH // BATCH, M) and dealt.participation == (EPOCHS, T // 2)
    taken = np.zeros(M * EACH, int)
    for t in range(T):
        drawn = dealt.draw(jax.random.key(0), jnp.int32(t), jnp.asarray(counts))
        rows = np.asarray(drawn.rows)[0]
        assert set(rows % M) == {t % M} and len(set(rows)) == BATCH
        taken[rows] += 1
    np.testing.assert_array_equal(taken, EPOCHS)
    with pytest.raises(ValueError, match="batch is 3, which does not divide examples"):
        Clients(M, EACH, EPOCHS, 3)
    with pytest.raises(ValueError, match="in 5 rounds; give rounds=12"):
        dealt.pattern(5)


def task():
    x = _RNG.normal(size=(N * M * EACH, D))
    y = np.where(x @ np.ones(D) > 0, 1, -1)
    return supervised(Linear(), "logistic", (x, y), (x, y), partition.iid(len(x), N, 0))


def config(relation, **changes):
    given = dict(
        protect=Protect(relation, clip_norm=CLIP, attacker="aggregator"), rounds=T,
        sampler=Clients(M, EACH, EPOCHS, BATCH), optimizer=Sgd(0.5), noise=SumShares(),
        budget=Budget(4.0, 1e-5), method=Federated(Trusted(), local_steps=3, local_step_size=RATE),
    )  # fmt: skip
    return plan.Config(**(given | changes))


@pytest.mark.parametrize("relation", ["zero_out_client", "zero_out_record"])
def test_what_is_clipped_is_relations(relation):
    """A message is a client's clipped walk, or the sum of its records'."""
    training_plan = plan.make(
        config(relation, noise=None, budget=None, method=Federated(Sum())), COMPLETE
    )
    assert training_plan.config.protect.clips == ("agent" if "client" in relation else "record")
    private = plan.make(config(relation), COMPLETE)
    times = {"zero_out_client": EPOCHS * EACH // BATCH, "zero_out_record": EPOCHS}[relation]
    mu = CLIP * np.sqrt(times / N) / float(private.noise.scale)
    assert private.guarantee.mu == pytest.approx(mu, rel=1e-6)
    result = run(private, task(), seeds=[0])
    assert np.isfinite(result.metrics["test_loss"]).all()


def test_local_steps_cost_nothing_in_guarantee_and_are_checked():
    plain = plan.make(config("zero_out_client", method=Federated(Trusted())), COMPLETE)
    walks = plan.make(config("zero_out_client"), COMPLETE)
    assert plain.guarantee == walks.guarantee
    with pytest.raises(ValueError, match="local_steps is 0"):
        Federated(Trusted(), local_steps=0)
    with pytest.raises(ValueError, match="local_step_size is -1"):
        Federated(Trusted(), local_step_size=-1)


@dataclasses.dataclass(frozen=True)
class Unclipped(Federated):
    """The broken twin: the walk's models go out, which nothing has clipped."""

    def emit(self, ctx, public_state):
        answer = ctx.query.local_steps(3, RATE)(public_state.models, ctx.batch)
        return (
            super()
            .emit(ctx, public_state)
            ._replace(
                private=jax.tree.map(lambda x, g: x - RATE * g, public_state.models, answer.total)
            )
        )


@pytest.mark.mutant
def test_walk_beside_clip_is_refused():
    with pytest.raises(ValueError, match="none of the . answers"):
        plan.make(config("zero_out_client", method=Unclipped(Trusted())), COMPLETE)
