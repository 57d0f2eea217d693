"""Tracking and its rivals against loops over agents, and how far their messages move."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.pairs import PPDOAGT, DiffTVAB, GradientTracking, Pair, PushPull
from dpjax.algorithms.random_weights import CorrelatedRandomness, Encrypted
from dpjax.algorithms.tracking import DGD, DPOP, Tracking
from dpjax.contrib import fusion
from dpjax.contrib.moves import pp_doagt
from dpjax.contrib.references import EXTRA, NIDS
from dpjax.contrib.trace import empirical_sensitivity, trace
from dpjax.engine.run import run
from dpjax.learning import samplers
from dpjax.plans import noise, plan, protect
from dpjax.plans.optimizers import Sgd
from dpjax.plans.scheduled import ScheduledGaussian, ScheduledLaplace
from dpjax.topology import graphs, mixing
from tests.algorithms import tracking_loops as loops
from tests.support import composed

N = 6
P = 2
T = 12
MATRIX = mixing.metropolis_hastings(graphs.erdos_renyi(N, 0.5, 0))
# A ring with two links one way: rows sum to 1, columns do not.
ONE_WAY = np.eye(N) + np.roll(np.eye(N), 1, axis=1) + np.eye(N, k=-2)
ONE_WAY /= ONE_WAY.sum(axis=1, keepdims=True)
COLUMNS = (ONE_WAY != 0) / (ONE_WAY != 0).sum(axis=0)
# The same without own weights but one: models leave the own one out, trackers never do.
OTHERS = np.where(np.eye(N) - np.diag(np.eye(N)[2]), 0, ONE_WAY)
OTHERS /= OTHERS.sum(axis=1, keepdims=True)
STEPS = 0.004 * 0.9 ** np.arange(T)
MADE = fusion.make(N, seed=1, high=3.0)


def gradient(i, x):
    return MADE.hessians[i] @ x - MADE.linear[i]


def of_batch(model, batch):
    hessian, linear = batch
    return hessian @ model - linear


class Given:
    """A privatizer that adds numbers known to the test."""

    def __init__(self, numbers):
        self.numbers = numbers

    def link(self):
        def update(updates, state, params=None):
            del params
            each = jax.tree.map(lambda leaf: leaf[state], self.numbers)
            return jax.tree.map(jnp.add, updates, each), state + 1

        return optax.GradientTransformation(lambda _: jnp.int32(0), update)


@functools.cache
def drawn(dtype):
    random = np.random.default_rng(5)
    noises = random.normal(size=(2, T, N, P)).astype(dtype)
    start = random.normal(size=(N, P)).astype(dtype)
    return noises, start


def both(method, oracle, *, matrix=MATRIX, pair=False, steps=STEPS, silent=False):
    """Models and messages of the package and of a loop, in the dtype that JAX computes in."""
    dtype = jnp.zeros(()).dtype
    noises, start = drawn(dtype.name)
    noises = noises * (0 if silent else 0.3)
    names = ("model", "tracker")
    told = [{name: noises[v, k] for v, name in enumerate(names)} for k in range(T)]
    added = noises[0] if not pair else Pair(noises[0], noises[1])
    optimizer = optax.scale_by_schedule(lambda k: -jnp.asarray(steps, dtype)[k])
    privatizer = None if silent else Given(jax.tree.map(jnp.asarray, added)).link()
    method = method.on(matrix) if hasattr(method, "on") else method
    result = composed(
        jnp.asarray(matrix, dtype), of_batch, optimizer, privatizer=privatizer, method=method
    )
    batch = jnp.asarray(MADE.hessians, dtype), jnp.asarray(MADE.linear, dtype)
    state = result.init(jnp.asarray(start))
    models = []
    messages = []
    step = jax.jit(result.step)
    for k in range(T):
        state, info = step(jax.random.key(k), state, batch)
        models.append(np.asarray(state.models))
        messages.append(jax.tree.map(np.asarray, info.messages))
    want = oracle(gradient, start.astype(float), steps, told)
    return np.array(models), messages, want


CASES = {
    "tracking": (Tracking(beta=20.0), lambda g, s, a, e: loops.tracking(g, MATRIX, s, a, e, 20.0)),
    "dpop": (DPOP(box=2.0), lambda g, s, a, e: loops.dpop(g, MATRIX, s, a, e, 2.0)),
    "dgd": (DGD(), lambda g, s, a, e: loops.dgd(g, MATRIX, s, a, e)),
}
PAIRS = {
    "tracking_pair": (GradientTracking(), MATRIX, MATRIX, loops.pair),
    "diff_tv_ab": (DiffTVAB(), MATRIX, MATRIX, loops.pair),
    "pp_doagt": (PPDOAGT(), MATRIX, MATRIX, loops.pp_doagt),
    "tracking_one_way": (GradientTracking(directed=True), ONE_WAY, COLUMNS, loops.pair),
    "pp_doagt_one_way": (PPDOAGT(directed=True), ONE_WAY, COLUMNS, loops.pp_doagt),
    "tracking_others": (GradientTracking(directed=True), OTHERS, COLUMNS, loops.pair),
    "pp_doagt_others": (PPDOAGT(directed=True), OTHERS, COLUMNS, loops.pp_doagt),
}


def close(mine, theirs):
    size = np.abs(theirs).max()
    np.testing.assert_allclose(mine / size, theirs / size, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_one_variable_is_sent_as_in_loop_over_agents(name):
    method, oracle = CASES[name]
    models, messages, (want, sent) = both(method, oracle)
    close(models, want)
    close(np.array(messages), sent["model"])


@pytest.mark.parametrize("name", PAIRS)
def test_two_variables_are_sent_as_in_loop_over_agents(name):
    method, rows, columns, loop = PAIRS[name]
    models, messages, (want, sent) = both(
        method, lambda g, s, a, e: loop(g, rows, columns, s, a, e), matrix=rows, pair=True
    )
    close(models, want)
    close(np.array([message.model for message in messages]), sent["model"])
    close(np.array([item.tracker for item in messages]), sent["tracker"])


def sums_over_past(states, step, beta=None):
    """x(1), .., x(T) by (8), or by (10) where there is a gain, from the states x(0), .., x(T)."""
    identity = np.eye(N)
    later = []
    for k in range(len(states) - 1):
        past = states[: k + 1]
        slope = np.array([gradient(i, past[k, i]) for i in range(N)])
        value = MATRIX @ past[k] - step * slope
        if beta is None:
            value += (MATRIX - identity) @ past[1:].sum(axis=0)
            value += (MATRIX - MATRIX @ MATRIX) @ past[:k].sum(axis=0)
        else:
            value += step * beta * (MATRIX - identity) @ past.sum(axis=0)
        later.append(value)
    return np.array(later)


@pytest.mark.parametrize(
    ("method", "pair", "beta"), [(GradientTracking(), True, None), (Tracking(250.0), False, 250.0)]
)
def test_without_noise_and_constant_step_models_are_printed_sums_over_past(method, pair, beta):
    """(8) is gradient tracking, and (10) Algorithm 1, here at alpha beta = 1."""
    step = 0.004
    models, _, _ = both(method, lambda *_: None, pair=pair, steps=np.full(T, step), silent=True)
    _, start = drawn(models.dtype.name)
    states = np.concatenate([start[None], models]).astype(float)
    size = np.abs(models).max()
    np.testing.assert_allclose(models / size, sums_over_past(states, step, beta) / size, atol=2e-5)
    # The other method's sum, and another gain, are far off.
    for wrong in (250.0 if beta is None else None, 125.0):
        assert np.abs(models - sums_over_past(states, step, wrong)).max() > 0.01 * size


def test_constant_step_of_dgd_settles_off_optimum():
    """Where x = W x - alpha (H x - b): off by alpha, to the first order, where (10) is not."""
    costs = fusion.make(30, seed=0)
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(30, 0.3, 0))
    blocks = np.zeros((30, P, 30, P))
    blocks[np.arange(30), :, np.arange(30)] = costs.hessians
    hessian = blocks.reshape(30 * P, 30 * P)
    pulled = np.kron(np.eye(30) - matrix, np.eye(P))
    optimum = np.tile(costs.minimiser, 30)
    squares = []
    for step in (1e-4, 1e-5):
        settled = np.linalg.solve(pulled + step * hessian, step * costs.linear.ravel())
        squares.append(((settled - optimum) ** 2).sum())
    assert squares == pytest.approx([6.18e-4, 6.89e-6], rel=2e-3)
    # Gradients of single agents are not 0 at the optimum, which Algorithm 1's y makes up for.
    left = hessian @ optimum - costs.linear.ravel()
    tracked = np.linalg.lstsq(pulled, -left, rcond=None)[0]
    np.testing.assert_allclose(pulled @ tracked, -left, atol=1e-9 * np.abs(left).max())


@pytest.mark.parametrize(("method", "loop"), [(EXTRA(), loops.extra), (NIDS(), loops.nids)])
def test_references_are_those_of_their_papers(method, loop):
    steps = np.full(T, 0.004)
    models, _, (want, _) = both(
        method, lambda g, s, a, e: loop(g, MATRIX, s, a), steps=steps, silent=True
    )
    close(models, want)


def test_correlated_randomness_keeps_sum_of_trackers():
    plain = CorrelatedRandomness(until=0)
    steps = np.full(T, 0.004)
    models, _, (want, _) = both(
        plain,
        # B = I and C = W afterwards: gradient tracking, whose iterations are two rounds here.
        lambda g, s, a, e: loops.adapt_then_combine(g, MATRIX, s, a[::2]),
        steps=steps,
        silent=True,
    )
    close(models[::2], want)
    random, messages, _ = both(
        CorrelatedRandomness(until=3), lambda g, s, a, e: (np.zeros(1), {}), steps=steps,
        silent=True,
    )  # fmt: skip
    assert np.abs(random[0] - models[0]).max() > 1e-3
    # Nobody sees what an agent keeps for itself.
    assert not np.diagonal(np.array(messages)[0], axis1=0, axis2=1).any()


def test_encrypted_differences_pull_by_both_ends_factors():
    models, messages, _ = both(
        Encrypted(), lambda g, s, a, e: (np.zeros(1), {}), steps=np.zeros(T), silent=True
    )
    _, start = drawn(models.dtype.name)
    # Without steps the mean stays, and agents come together.
    np.testing.assert_allclose(models[-1].mean(0), start.mean(0), atol=1e-5)
    assert models[-1].std(0).max() < 0.8 * start.std(0).max()
    assert messages[0] == ()


# ---- how far messages move


def config(method, part, *, clip=True, rounds=T, epsilon=1.0, **changes):
    norm = "l1" if isinstance(part, ScheduledLaplace) else "l2"
    bound = {"clip_norm": 0.5} if clip else {"gradient_gap": 1.0}
    budget = protect.Budget(epsilon, accountant="pure")
    if norm == "l2":
        budget = protect.Budget(epsilon, delta=1e-5)
    options = dict(
        method=method, noise=part, budget=budget, rounds=rounds,
        protect=protect.Protect("replace_agent", norm=norm, **bound),
        sampler=samplers.Random(1), optimizer=Sgd(0.01, decay=0.8),
    )  # fmt: skip
    return plan.Config(**(options | changes))


MOVING = [
    (Tracking(5.0), ScheduledLaplace(0.9)),
    (Tracking(5.0), ScheduledGaussian(0.9)),
    (DPOP(4.0), ScheduledLaplace(0.9)),
    (DGD(), ScheduledGaussian(0.9)),
    (DiffTVAB(), ScheduledLaplace(0.9)),
    (PPDOAGT(), ScheduledLaplace(0.9)),
    (PPDOAGT(directed=True), ScheduledGaussian(0.9)),
]
BETWEEN = [(*case, ONE_WAY if getattr(case[0], "directed", False) else MATRIX) for case in MOVING]
BETWEEN.append((PPDOAGT(directed=True), ScheduledLaplace(0.9), OTHERS))
# One of each method, and both parts and weights one way.
FEW = (0, 2, 3, 4, 6)


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    ("method", "part", "matrix"),
    [
        pytest.param(*case, marks=[] if place in FEW else [pytest.mark.slow])
        for place, case in enumerate(BETWEEN)
    ],
)
def test_no_pair_of_clipped_agents_moves_farther_than_stated(method, part, matrix):
    training_plan = plan.make(config(method, part), matrix)
    task = fusion.problem(MADE)
    largest = np.zeros_like(training_plan.noise.sensitivities)
    for seed in range(4):
        # Another agent's data altogether, its gradient as far as the clip lets it be.
        random = np.random.default_rng(seed)
        x = np.array(task.x)
        x[2] = random.normal(size=x.shape[1]) * 10.0 ** random.integers(-1, 3)
        other = dataclasses.replace(task, x=x)
        result = empirical_sensitivity(training_plan, task, other, seeds=(seed,))
        assert not np.delete(result, 2, axis=2).any()
        largest = np.maximum(largest, result[0, :, 2])
    assert (largest <= training_plan.noise.sensitivities * (1 + 1e-4) + 1e-6).all()
    # And the bound is no idle one: somewhere it is nearly met.
    assert (largest > 0.2 * training_plan.noise.sensitivities).any()


def test_one_round_late_is_what_messages_are():
    """The first message knows no gradient; the second carries the first step."""
    training_plan = plan.make(config(Tracking(5.0), ScheduledLaplace(0.9)), MATRIX)
    assert training_plan.noise.sensitivities[0, 0] == 0
    np.testing.assert_allclose(training_plan.noise.sensitivities[1, 0], 0.01 * 1.0, rtol=1e-5)
    np.testing.assert_allclose(training_plan.noise.sensitivities[2, 0], 0.01 * 0.8, rtol=1e-5)


def test_assumed_gap_suffices_for_gradients_at_messages():
    for method in (Tracking(5.0), DPOP()):
        training_plan = plan.make(config(method, ScheduledLaplace(0.9), clip=False), MATRIX)
        assert (
            "ASSUMED" in training_plan.guarantee.statement()
            and "ASSUMED" in training_plan.guarantee.caption()
        )
    for method in (DGD(), GradientTracking(), PPDOAGT()):
        with pytest.raises(ValueError, match="has no bound"):
            plan.make(config(method, ScheduledLaplace(0.9), clip=False), MATRIX)
        smooth = protect.Protect("replace_agent", norm="l1", gradient_gap=1.0, smoothness=60.0)
        assert plan.make(
            config(method, ScheduledLaplace(0.9), protect=smooth), MATRIX
        ).guarantee.epsilon


@pytest.mark.parametrize(
    "method",
    [GradientTracking(), *(pytest.param(m, marks=pytest.mark.slow) for m in (DGD(), PPDOAGT()))],
)
def test_smooth_costs_move_within_their_assumed_smoothness(method):
    """Two agents of one Hessian, whose gradients differ by a constant."""
    smoothness = np.abs(MADE.hessians[2]).sum(axis=0).max()
    shift = np.array([0.6, -0.4])
    # v' with 2 M'(v - v') = shift: gradients apart by |shift|_1 = 1 everywhere.
    change = np.linalg.lstsq(2 * MADE.matrices[2].T, shift, rcond=None)[0]
    task = fusion.problem(MADE)
    x = np.array(task.x)
    x[2, -3:] += change
    other = dataclasses.replace(task, x=x)
    protection = protect.Protect(
        "replace_agent", norm="l1", gradient_gap=1.0, smoothness=float(smoothness)
    )
    optimizer = Sgd(0.004, decay=0.8)
    training_plan = plan.make(
        config(method, ScheduledLaplace(0.9), protect=protection, optimizer=optimizer), MATRIX
    )
    result = empirical_sensitivity(training_plan, task, other, seeds=(0,))[0, :, 2]
    assert (result <= training_plan.noise.sensitivities * (1 + 1e-3) + 2e-4).all()
    assert (result > 0.1 * training_plan.noise.sensitivities).any()


def test_references_and_methods_without_noise_refuse_it():
    for method in (EXTRA(), NIDS(), CorrelatedRandomness(), Encrypted()):
        with pytest.raises(ValueError, match="does not join"):
            config(method, ScheduledLaplace(0.9))
    with pytest.raises(ValueError, match="does not join"):
        config(Tracking(5.0), noise.Independent(), budget=protect.Budget(1.0, delta=1e-5))
    with pytest.raises(ValueError, match="norm"):
        plan.make(
            config(
                Tracking(5.0), ScheduledLaplace(0.9), protect=protect.Protect("replace_agent", 0.5)
            ),
            MATRIX,
        )


# ---- optima


@pytest.mark.skipif(not jax.config.jax_enable_x64, reason="needs float64 (JAX_ENABLE_X64=1)")
def test_tracking_reaches_optimum_where_dgd_does_not():
    outcome = fusion.make(30, seed=0)
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(30, 0.3, 0))
    task = fusion.problem(outcome, dtype="float64")
    left = {}
    for method in (Tracking(5e3), GradientTracking(), EXTRA(), NIDS(), DGD()):
        argument = plan.Config(
            method=method, rounds=6000, sampler=samplers.Random(1), optimizer=Sgd(1e-4),
            protect=protect.Protect("replace_agent", gradient_gap=1.0, norm="l1"),
        )  # fmt: skip
        result = run(plan.make(argument, matrix), task, seeds=(0,), eval_every=6000)
        left[type(method).__name__] = float(result.metrics["residual"][-1, 0, 0])
    assert left.pop("DGD") > 1e-4
    assert max(left.values()) < 1e-8, left


@pytest.mark.slow
def test_what_trace_reads_is_what_run_does():
    training_plan = plan.make(config(Tracking(5.0), ScheduledLaplace(0.9)), MATRIX)
    task = fusion.problem(MADE)
    models = trace(training_plan, task, seeds=(0, 3), read=_after)
    result = run(training_plan, task, seeds=(0, 3), eval_every=1)
    residual = np.sum((models - np.float32(MADE.minimiser)) ** 2, axis=(2, 3)).T
    np.testing.assert_allclose(result.metrics["residual"][:, :, 0], residual, rtol=1e-4)
    # What may be published is the last message, noisy, and not the last model.
    sent = trace(training_plan, task, seeds=(0, 3), read=_message)
    np.testing.assert_allclose(result.params[:, 0], sent[:, -1], rtol=1e-6)
    assert np.abs(result.params[:, 0] - models[:, -1]).max() > 1e-3


def _after(passed):
    return passed.after.models


def _message(passed):
    return passed.message


@pytest.mark.parametrize("slope", [0.0, 30.0])
def test_what_two_variables_move_lets_signs_cancel(slope):
    """Of every agent's own weight the sums of `dpjax.contrib.moves`, far below sums of sizes."""
    steps = 0.05 * 0.95 ** np.arange(60)
    uneven = np.diag([0.1, 0.5, 0.8])
    uneven[0, 1:] = 0.45
    uneven[1, ::2] = 0.25
    uneven[2, :2] = 0.1
    sensitivity = PPDOAGT().sensitivity(lambda distance: 1 + slope * distance, steps, 1.0, uneven)
    each = [pp_doagt(steps, 1.0, number, slope) for number in (0.1, 0.5, 0.8)]
    np.testing.assert_allclose(sensitivity, np.max(each, axis=0), rtol=1e-5)
    # By sizes alone, as under weights that change by round.
    bounded = PPDOAGT().sensitivity(lambda distance: 1 + slope * distance, steps, 1.0, uneven[None])
    assert (sensitivity[2:, 0] < 0.9 * bounded[2:, 0]).all() and bounded[-1, 0] > 2 * sensitivity[
        -1, 0
    ]


def test_trackers_are_pushed_without_promoting_ranks():
    pair = Pair(jnp.ones((3, 2)), jnp.ones((3, 2)))
    with jax.numpy_rank_promotion("raise"):
        PushPull(directed=True)({"mixing": jnp.full((3, 3), 1 / 3)}, jnp.int32(0), pair)
