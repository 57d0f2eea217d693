"""Any optax chain behind the noise: one changed argument, the same guarantee, its own state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.average import Average
from dpjax.algorithms.disk import DiSK
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.federated import Federated
from dpjax.contrib.optimizers import scale_by_adam, scale_by_galore
from dpjax.engine import keys, program
from dpjax.plans import optimizers, plan
from dpjax.transforms.lowpass import FILTERS, NoiseVariance, lowpass
from tests.support import diagonal, make_config, run


def filtered(step):
    """A published low-pass filter in front of plain steps."""
    return optax.chain(lowpass(*FILTERS["f1"]), optax.sgd(step))


def momentum(step):
    """Heavy ball behind a schedule or a number."""
    return optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(step))


CHAINS = {
    "adam": optimizers.Chain(optax.adam, 0.05),
    "momentum": optimizers.Chain(momentum, 0.05),
    "filter": optimizers.Chain(filtered, 0.05),
    "schedule": optimizers.Chain(optax.sgd, optax.cosine_decay_schedule(0.1, 20)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "schedule", "momentum", "filter"])
def test_optimizer_is_one_changed_argument_and_costs_nothing(network, small, name):
    plain = plan.make(make_config(), network)
    config = dataclasses.replace(plain.config, optimizer=CHAINS[name])
    training_plan = plan.make(config, network)
    assert training_plan.guarantee.replace(custom=()) == plain.guarantee
    np.testing.assert_array_equal(training_plan.factor, plain.factor)
    assert training_plan.fingerprint() != plain.fingerprint()
    result = run(training_plan, small, seeds=[0])
    assert np.isfinite(result.metrics["test_loss"]).all()
    assert result.rows()[0]["step_size"] == pytest.approx(config.optimizer.first)


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", CHAINS)
def test_updates_are_those_of_optax(network, small, name):
    """With no noise and no clip, against a loop over the messages of plain agents."""
    changes = {"design": "non_private", "clip_norm": 1e6, "rounds": 3, "batch_size": 24}
    training_plan = plan.make(make_config(**changes, optimizer=CHAINS[name]), network)
    result = run(training_plan, small, seeds=[2], eval_every=1)
    single = small.init(keys.derive(2, "initial"))
    models = jax.tree.map(lambda leaf: np.stack([np.asarray(leaf)] * 6), single)
    chain = CHAINS[name].chain({"step_size": np.float32(0.05)})
    state = chain.init(models)
    rows, x, y = (jnp.asarray(part) for part in (small.partition.indices, small.x, small.y))
    # Batches of all records: their order does not matter.
    step = jax.jit(jax.vmap(jax.grad(lambda p, i: small.batch_loss(p, x[i], y[i]))))
    update = jax.jit(chain.update)
    for _ in range(3):
        updates, state = update(step(models, rows), state, models)
        moved = optax.apply_updates(models, updates)
        models = jax.tree.map(lambda leaf: np.tensordot(network, leaf, 1), moved)
    for a, b in zip(jax.tree.leaves(models), jax.tree.leaves(result.params), strict=True):
        np.testing.assert_allclose(b[0, 0], a, rtol=2e-3, atol=2e-5)


def test_agents_optimizer_sees_that_agent_alone():
    """A norm over all leaves, and one over matrices, agent by agent as in loops of their own."""
    rng = np.random.default_rng(0)
    models = {"w": rng.normal(size=(3, 4, 5)).astype(np.float32), "b": np.ones((3, 5), np.float32)}
    updates = jax.tree.map(lambda leaf: leaf * np.float32(3.0) ** leaf.shape[-1], models)

    def links(step):
        return optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(step))

    together = optimizers.Chain(links, 0.05).chain({"step_size": np.float32(0.05)})
    moved, state = jax.jit(together.update)(updates, together.init(models), models)
    single = links(np.float32(0.05))
    of_one = jax.jit(single.update)
    for agent in range(3):
        own = [jax.tree.map(lambda leaf, i=agent: leaf[i], tree) for tree in (updates, models)]
        expected, _ = of_one(own[0], single.init(own[1]), own[1])
        for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a[agent], b, rtol=2e-4, atol=1e-6)
    assert all(len(leaf) == 3 for leaf in jax.tree.leaves(state))


@pytest.mark.slow
def test_step_sizes_of_one_chain_share_run(network, small):
    config = make_config(optimizer=optimizers.Chain(optax.adam, 0.05))
    plans = [
        plan.make(
            dataclasses.replace(config, optimizer=optimizers.Chain(optax.adam, step)), network
        )
        for step in (0.01, 0.05)
    ]
    before = program.traces()
    pair = run(plans, small, seeds=[0])
    single = run(plans[1], small, seeds=[0])
    assert program.traces() - before <= 2
    np.testing.assert_allclose(
        pair.metrics["test_loss"][:, :, 1], single.metrics["test_loss"][:, :, 0], rtol=1e-5
    )
    assert np.abs(np.diff(pair.metrics["test_loss"][-1, 0])).min() > 1e-4
    other = dataclasses.replace(config, optimizer=optimizers.Chain(optax.sgd, 0.05))
    with pytest.raises(ValueError, match=r"plans differ in optimizer \(Chain\(.*step_size=0\.01"):
        run([plans[0], plan.make(other, network)], small, seeds=[0])


def _empty_state(step):
    """Adam beside a link whose state has an array without numbers."""
    empty = optax.GradientTransformation(
        lambda params: jnp.zeros((0, 3)), lambda updates, state, params=None: (updates, state)
    )
    return optax.chain(empty, optax.adam(step))


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("release", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_its_state_is_kept_in_checkpoints(tmp_path, network, small, release):
    """A stopped run with Adam goes on to the same bits; without its state it would not."""
    chain = CHAINS["adam"] if release else optimizers.Chain(_empty_state, 0.05)
    config = make_config(optimizer=chain, design="anti_pgd", release=release, rounds=12)
    training_plan = plan.make(config, network)
    extra = {"key_file": tmp_path / "key"} if release else {}
    options = {"seeds": [1], "eval_every": 4, "checkpoint_seconds": 0}

    def cut(progress):
        if progress.round == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(training_plan, small, checkpoint=tmp_path / "c", callback=cut, **options, **extra)
    resumed = run(training_plan, small, checkpoint=tmp_path / "c", **options, **extra)
    assert resumed.ended and resumed.rounds[-1] == 12
    if not release:
        straight = run(training_plan, small, **options)
        for a, b in zip(
            jax.tree.leaves(straight.params), jax.tree.leaves(resumed.params), strict=True
        ):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            (0.1, 0.1),
            "make is 0.1, which makes no optimizer: TypeError.*Give a function of the step",
        ),
        ((lambda step: step, 0.1), "makes no optimizer: AttributeError"),
        ((lambda step: "sgd", 0.1), "makes no optimizer: AttributeError"),
        ((optax.adam, -1.0), "step_size is -1.0"),
        ((optax.adam, "fast"), "step_size is 'fast'"),
        ((optax.sgd, lambda t: np.nan), r"step_size\(0\) is nan; give a schedule of finite steps"),
        ((optax.sgd, lambda t: jnp.inf), r"step_size\(0\) is inf"),
        ((optax.sgd, lambda t: -0.1), r"step_size\(0\) is -0.1"),
        ((optax.sgd, lambda t: "fast"), r"step_size\(0\) is 'fast'"),
        ((optax.sgd, lambda: 0.1), r"step_size\(0\) fails: TypeError: .* takes 0 positional"),
        ((optax.sgd, lambda t: 0.1 if t < 5 else 0.01), "TracerBoolConversionError: .*any tree"),
    ],
)
def test_what_is_no_optimizer_is_refused(value, text):
    with pytest.raises(ValueError, match=text):
        optimizers.Chain(*value)


def _validating(step):
    if not step < 1.0:
        raise ValueError("too long")
    return optax.sgd(step)


def _growing(step):
    del step
    return optax.GradientTransformation(
        lambda params: jnp.zeros(1), lambda updates, state, params=None: (updates, jnp.zeros(2))
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (optax.lbfgs, "TypeError: .* required keyword-only arguments: 'value', 'grad'"),
        (optax.contrib.momo, "'value'"),
        (optax.polyak_sgd, "'value'"),
        (lambda step: optax.contrib.reduce_on_plateau(), "'value'"),
        (lambda step: optax.lookahead(optax.sgd(step), 5, 0.5), "no attribute 'fast'"),
        (lambda step: optax.sgd(float(step)), "ConcretizationTypeError"),
        (lambda: optax.sgd(0.1), "takes 0 positional arguments"),
        (_validating, "TracerBoolConversionError"),
    ],
)
def test_what_asks_for_more_than_updates_and_state_is_refused_when_it_is_made(make, message):
    """In one line that names what was given, what it said and what to give."""
    text = f"make is .*, which makes no optimizer: .*{message}.*Give a function of the step size"
    with pytest.raises(ValueError, match=text) as refused:
        optimizers.Chain(make, 0.1)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda step: optax.chain(optax.add_noise(0.1, 0.9, jax.random.key(0)), optax.sgd(step)),
        lambda step: optax.noisy_sgd(step, key=0),
    ],
)
def test_noise_of_optimizer_is_refused_for_no_guarantee_counts_it(make):
    with pytest.raises(ValueError, match=r"make is .*add_noise.*; leave it out: .*Config\(noise="):
        optimizers.Chain(make, 0.1)


LABELS = {"params": {"Dense_0": {"kernel": "a", "bias": "b"}}}


@pytest.mark.parametrize(
    "make",
    [
        lambda step: optax.masked(optax.sgd(step), {"params": {"kernel": True, "bias": False}}),
        lambda step: optax.adamw(step, mask={"params": {"kernel": True, "bias": False}}),
        lambda step: optax.partition({"a": optax.sgd(step), "b": optax.sgd(step)}, LABELS),
    ],
)
def test_masks_and_labels_as_trees_are_told_to_be_functions(make):
    text = "Masks and labels are functions of the parameters, as in mask=lambda params: "
    with pytest.raises(ValueError, match=text):
        optimizers.Chain(make, 0.1)
    functions = optax.masked(optax.sgd(0.1), lambda params: jax.tree.map(lambda _: True, params))
    assert optimizers.Chain(lambda step: functions, 0.1).first == 0.1


def test_optimizers_with_changing_states_are_refused(network):
    config = make_config(design="independent", optimizer=optimizers.Chain(_growing, 0.1))
    with pytest.raises(ValueError, match="optimizer turns a state of .* keep shapes"):
        plan.make(config, network)


def test_schedules_that_warm_up_from_nothing_are_taken_and_later_steps_are_checked():
    warming = optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 10)
    assert optimizers.Chain(optax.adam, warming).first == 0
    breaking = optimizers.Chain(optax.sgd, lambda t: 1.0 / jnp.asarray(3.0 - t))
    with pytest.raises(ValueError, match=r"step_size\(3\) is .*inf"):
        breaking.relative(5)
    below = optimizers.Chain(optax.sgd, lambda t: 0.5 - 0.25 * t)
    np.testing.assert_array_equal(below.relative(4), [1, 0.5, 0, -0.5])


def test_step_that_is_no_number_is_refused_before_run(network):
    """Of a part of one's own too: a result could not be saved with it."""

    @dataclasses.dataclass(frozen=True)
    class Own(optimizers.Sgd):
        first: float = float("nan")

    with pytest.raises(ValueError, match="optimizer.first is nan"):
        make_config(optimizer=Own(0.1))


def _adam(step, noise):
    return optax.chain(scale_by_adam(noise), optax.scale_by_learning_rate(step))


def _watching(step, noise):
    """Plain steps that keep the variances they were told."""

    def init(params):
        return jnp.zeros(()), jnp.stack([jnp.asarray(noise(0, lag)) for lag in (0, 1, 2)])

    def update(updates, state, params=None):
        lags = jnp.stack([jnp.asarray(noise(state[0].astype(int), lag)) for lag in (0, 1, 2)])
        return jax.tree.map(lambda leaf: -step * leaf, updates), (state[0] + 1, lags)

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    ("design", "unit"), diagonal(["independent", "whisper", "anti_pgd"], ["agent", "record"])
)
def test_noise_told_is_noise_drawn(network, small, design, unit):
    """From the privatizer's own draws: variance by agent and round, and covariance of rounds."""
    changes = {} if unit == "agent" else {"relation": "zero_out_record", "batch_size": 4}
    config = make_config(design=design, rounds=6, **changes)
    config = dataclasses.replace(
        config, optimizer=optimizers.Chain(_watching, 0.1, uses_noise=True)
    )
    training_plan = plan.make(config, network)
    link = training_plan.privatizer.transformation(training_plan.arrays, jax.random.key(0))
    zeros = jnp.zeros((6, 40_000))
    state = link.init(zeros)
    drawn = []
    update = jax.jit(link.update)
    for _ in range(6):
        noisy, state = update(zeros, state)
        drawn.append(np.asarray(noisy) / training_plan.target.divisor)
    chain = training_plan.config.optimizer.shared().chain(training_plan.arrays)
    models = {"w": jnp.zeros((6, 3))}
    messages = []
    kept = chain.init(models)
    update = jax.jit(chain.update)
    for _ in range(6):
        _, kept = update(models, kept, models)
        messages.append(np.asarray(kept[1]))
    for t in (0, 2, 5):
        for lag in range(min(t + 1, 3)):
            mean = np.mean(drawn[t] * drawn[t - lag], axis=1)
            spread = np.sqrt(messages[t][:, 0] * messages[t - lag][:, 0] / 40_000)
            assert (np.abs(mean - messages[t][:, lag]) < 5 * spread).all()
    # A sum's variance in the place of a mean's would be far off.
    assert unit == "agent" or training_plan.target.divisor == 4
    assert messages[0][0, 0] == pytest.approx(
        np.square(training_plan.factor[0]).sum()
        * (
            1
            if training_plan.strategy is None
            else np.linalg.inv(training_plan.strategy)[0, 0] ** 2
        )
        / training_plan.target.divisor**2,
        rel=1e-5,
    )


@pytest.mark.slow
def test_optimizer_that_uses_noise_runs_and_costs_nothing(network, small):
    config = make_config(rounds=8)
    reported = dataclasses.replace(config, optimizer=optimizers.Chain(_adam, 0.05, uses_noise=True))
    plans = [plan.make(reported, network), plan.make(reported.using(None), network)]
    assert plans[0].guarantee.replace(custom=()) == plan.make(config, network).guarantee
    pair = run(plans, small, seeds=[0])
    assert np.isfinite(pair.metrics["test_loss"]).all()
    # Without noise nothing is taken off: plain Adam, but for its epsilon.
    plain = dataclasses.replace(
        config.using(None), optimizer=optimizers.Chain(lambda step: _adam(step, 0.0), 0.05)
    )
    single = run(plan.make(plain, network), small, seeds=[0])
    np.testing.assert_allclose(
        pair.metrics["test_loss"][:, :, 1], single.metrics["test_loss"][:, :, 0], rtol=1e-5
    )


def test_noise_is_told_where_optimizer_is_given_noisy_means_alone():
    reported = optimizers.Chain(_adam, 0.05, uses_noise=True)
    plain = make_config(design="independent")
    with pytest.raises(ValueError, match="uses the noise's variance, but method DiSK"):
        dataclasses.replace(plain, optimizer=reported, method=DiSK())
    with pytest.raises(ValueError, match="but method Average"):
        dataclasses.replace(plain, optimizer=reported, method=Average(DiSK()))
    for method in (Federated(), Average(Federated())):
        assert dataclasses.replace(plain, optimizer=reported, method=method).optimizer == reported
    assert (
        dataclasses.replace(plain, optimizer=reported, method=Average(DSGD())).optimizer == reported
    )
    with pytest.raises(ValueError, match="uses_noise is 'yes'"):
        optimizers.Chain(optax.adam, 0.1, uses_noise="yes")
    with pytest.raises(ValueError, match="lag is 64"):
        NoiseVariance(1.0)(0, 64)


def test_one_agents_branches_stay_branches():
    """Under vmap both sides of a branch are computed; of one agent only the one taken."""
    chain = optimizers.Chain(
        lambda step: optax.chain(scale_by_galore(0.0, rank=1, every=5), optax.sgd(step)), 0.1
    ).chain({"step_size": np.float32(0.1)})

    def branches(agents):
        models = {"w": jnp.zeros((agents, 4, 3))}
        state = chain.init(models)
        return "cond" in str(jax.make_jaxpr(chain.update)(models, state, models))

    assert branches(1) and not branches(2)
