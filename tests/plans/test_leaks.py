"""Methods, samplers and optimizers of one's own that would make a guarantee false are refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.dsgd import DSGD
from dpjax.data import partition
from dpjax.engine.round import rounds
from dpjax.learning.problem import Problem
from dpjax.learning.query import AgentQuery
from dpjax.plans import identity, optimizers, plan
from dpjax.protocols import Emission, Exchange, Method, Received, Sampler
from tests.support import make_config, retargeted, run

frozen = dataclasses.dataclass(frozen=True)


def raw_of(ctx, public_state):
    return ctx.query(public_state.models, ctx.batch).total


class Hidden(DSGD):
    """Sends what it computes from bare gradients by ``smuggle``."""

    def emit(self, ctx, public_state):
        total = raw_of(ctx, public_state)
        return Emission(total, carry=total)

    def send(self, ctx, public_state, emission, noisy):
        message, memory = super().send(ctx, public_state, emission, noisy)
        return jax.tree.map(self.smuggle, message, emission.carry), memory


@frozen
class Written(Hidden):
    """By an array that is written in place."""

    def smuggle(self, message, raw):
        box = jax.new_ref(jnp.zeros_like(raw))
        box[...] = raw
        return message + box[...]


@frozen
class Reduced(Hidden):
    """By a reduction whose combination drops its first argument."""

    def smuggle(self, message, raw):
        first = jax.lax.reduce(raw[..., None], jnp.float32(0), lambda a, b: b, (raw.ndim,))
        return message + first


@frozen
class Mapped(Hidden):
    """By a function that is another one when it is mapped."""

    def smuggle(self, message, raw):
        @jax.custom_batching.custom_vmap
        def left(noisy, bare):
            return noisy

        @left.def_vmap
        def rule(size, mapped, noisy, bare):
            return bare, True

        return left(message, raw)


@frozen
class Unreported(Exchange):
    """An exchange that does not report what went out."""

    def __call__(self, arrays, round, message):
        """Deliver, and say that nothing was sent."""
        return Received(message, ())


@frozen
class Silent(Hidden):
    """By an exchange that does not report it."""

    exchange = Unreported()

    def smuggle(self, message, raw):
        return raw

    def absorb(self, ctx, public_state, carry, received):
        return public_state.models, carry


@frozen
class Encoded(DSGD):
    """By an encoder that knows the other records."""

    def emit(self, ctx, public_state):
        other = raw_of(ctx, public_state)
        shift = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), other)
        answer = ctx.query(
            public_state.models, ctx.batch, lambda g: jax.tree.map(jnp.add, g, shift)
        )
        return Emission(answer.total)


@pytest.mark.mutant
@pytest.mark.parametrize("method", [Written(), Reduced(), Mapped(), Silent(), Encoded()])
def test_no_way_around_noise(network, method):
    with pytest.raises(ValueError, match="method shows"):
        plan.make(make_config(method=method), network)
    training_plan = plan.make(make_config(), network)
    with pytest.raises(ValueError, match="method shows"):
        retargeted(training_plan, config=make_config(method=method))


@frozen
class Local(DSGD):
    """Adapts models with gradients that no noise was added to, and publishes what it received."""

    def start(self, ctx, models):
        return models

    def emit(self, ctx, public_state):
        total = ctx.query(public_state.memory, ctx.batch).total
        return Emission(total, carry=total)

    def send(self, ctx, public_state, emission, noisy):
        message = jax.tree.map(lambda x, g: x - 0.1 * g, public_state.memory, noisy)
        return message, emission.carry

    def absorb(self, ctx, public_state, carry, received):
        return jax.tree.map(jnp.subtract, received, carry), received

    def released(self, public_state):
        return public_state.memory


def test_run_leaves_what_its_method_releases(network, small):
    """Its local models stay inside: what is published, and started from, is D-SGD's."""
    plain = run(plan.make(make_config(rounds=2), network), small, seeds=[0])
    local = run(plan.make(make_config(method=Local(), rounds=2), network), small, seeds=[0])
    for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(local.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert local.metrics["test_loss"][-1] != plain.metrics["test_loss"][-1]


@frozen
class Greedy(optimizers.Sgd):
    """An optimizer with an array of the noise's name."""

    def arrays(self):
        return super().arrays() | {"factor": np.zeros((6, 6), np.float32)}


def test_optimizer_has_no_array_of_noise(network, small):
    training_plan = plan.make(make_config(optimizer=Greedy(0.1)), network)
    with pytest.raises(ValueError, match="optimizer has an array 'factor'"):
        run(training_plan, small, seeds=[0])
    arrays = plan.make(make_config(), network).arrays
    with pytest.raises(TypeError):
        arrays["factor"] = 0
    with pytest.raises(ValueError, match="read-only"):
        arrays["factor"][:] = 0


@frozen
class Secretive(DSGD):
    """Two of these are equal, and are not."""

    leak: bool = dataclasses.field(default=False, compare=False)


@dataclasses.dataclass
class Open(Sampler):
    """A sampler that may change."""

    batch_size: int = 4
    divisor = 4

    def draw(self, key, round, counts):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"method": Secretive()}, "make it a frozen dataclass, all fields compared"),
        ({"sampler": Open()}, "make it a frozen dataclass"),
    ],
)
def test_parts_that_contradict_themselves_or_may_change_are_refused(change, text):
    with pytest.raises(ValueError, match=text):
        make_config(**change)


def stepped(table):
    """An optimizer whose step sizes are arrays, which no field holds."""

    @frozen
    class Table(optimizers.Sgd):
        def arrays(self):
            return {"step_size": np.float32(table)}

        def shared(self):
            return self

    return Table(0.1)


def remembering(value):
    """A method whose first memory no field holds."""

    @frozen
    class Remembering(DSGD):
        def start(self, ctx, models):
            return ctx.optimizer.init(models), jnp.full((), value)

        def send(self, ctx, public_state, emission, noisy):
            message, state = super().send(
                ctx, public_state._replace(memory=public_state.memory[0]), emission, noisy
            )
            moved = jax.tree.map(lambda leaf: leaf + public_state.memory[1], message)
            return moved, (state, public_state.memory[1])

    return Remembering()


@pytest.mark.gate(1)
@pytest.mark.parametrize(("part", "make"), [("optimizer", stepped), ("method", remembering)])
def test_release_resumes_with_its_own_arrays_and_memory_only(tmp_path, network, small, part, make):
    """Else two messages of one round would differ by a gradient without noise."""
    key = tmp_path / "key"

    def stop(progress):
        raise KeyboardInterrupt

    def once(value):
        config = make_config(release=True, rounds=4, **{part: make(value)})
        run(plan.make(config, network), small, seeds=[0], eval_every=2, key_file=key, callback=stop)

    with pytest.raises(KeyboardInterrupt):
        once(1.0)
    with pytest.raises(ValueError, match="another run|belongs to"):
        once(3.0)
    assert key.exists()


def test_functions_in_parts_have_one_fingerprint_in_all_processes(network):
    """Not their addresses: a killed release with Adam is resumed by another process."""
    training_plan = plan.make(make_config(optimizer=optimizers.Chain(optax.adam, 0.01)), network)
    described = identity.described(training_plan.config)
    assert described["optimizer"]["make"].endswith(".adam")
    assert "0x" not in str(described)


@pytest.mark.parametrize("answer", [False, None])
def test_what_callback_decided_is_told_by_whoever_resumes(tmp_path, network, small, answer):
    """On private metrics: an answer, also No, chose the round; one that only watched did not."""
    training_plan = plan.make(make_config(), network)
    options = {"seeds": [0], "eval_every": 5, "checkpoint_seconds": 0}
    options["checkpoint"] = tmp_path / "c"

    def cut(progress):
        if progress.round == 15:
            raise KeyboardInterrupt
        return answer

    with pytest.raises(KeyboardInterrupt):
        run(training_plan, small, callback=cut, **options)
    for callback in (None, lambda _: None):
        (stated,) = run(training_plan, small, callback=callback, **options).guarantees
        assert stated.private_stop == (answer is not None)


@frozen
class Bare(DSGD):
    """Sends what was private, which it is not given."""

    def send(self, ctx, public_state, emission, noisy):
        return jax.tree.map(jnp.add, noisy, emission.private), ()


@frozen
class MessageAlone(DSGD):
    """Forgets the carry."""

    def send(self, ctx, public_state, emission, noisy):
        return super().send(ctx, public_state, emission, noisy)[0]["w"]


@pytest.mark.parametrize("kind", [Bare, MessageAlone])
def test_what_method_is_given_is_said_where_it_fails(network, kind):
    text = rf"send .* withheld .* \(message, carry\).* of {kind.__name__} fails: "
    with pytest.raises(ValueError, match=text):
        plan.make(make_config(method=kind(), design="independent"), network)


@frozen
class Unfinished(Method):
    """Says what is private, and not how it crosses the network."""

    stochastic = "rows"

    def emit(self, ctx, public_state):
        return Emission(ctx.query(public_state.models, ctx.batch)[0])


@frozen
class Silent(DSGD):
    """Emits nothing."""

    emit = Method.emit


@pytest.mark.parametrize("kind", [Unfinished, Silent])
def test_method_without_part_of_its_round_is_refused(network, kind):
    with pytest.raises(
        ValueError, match=f"method is {kind.__name__}, which lacks emit or exchange"
    ):
        plan.make(make_config(method=kind(), design="independent"), network)


@jax.custom_batching.custom_vmap
def mixed(x):
    """One record as it is, and of several each their sum."""
    return x


@mixed.def_vmap
def mix(size, batched, x):
    return jnp.broadcast_to(jnp.sum(x, axis=0), x.shape), True


@jax.custom_vjp
def derived(x):
    """As it is, with a derivative that is mixed."""
    return x


derived.defvjp(lambda x: (x, None), lambda _, cotangent: (mixed(cotangent),))


def by_derivative(x):
    return jax.grad(lambda x: derived(x) @ x)(x)


def on_host(x, vmap_method):
    return jax.pure_callback(np.asarray, x, x, vmap_method=vmap_method)


def foreign(x):
    return jax.ffi.ffi_call("mix", x, vmap_method="expand_dims")(x)


def task_of(of_record=lambda x: x, of_model=lambda params: params):
    """A linear regression with a function of one record, and of the model."""
    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    return Problem(
        init=lambda key: jnp.ones(3),
        loss=lambda params, x, y: (of_model(params) @ of_record(x) - y) ** 2,
        metrics=lambda params, evaluation: {},
        x=x, y=x[:, 0], partition=partition.iid(24, 6, seed=0), evaluation=(),
    )  # fmt: skip


@pytest.mark.mutant
@pytest.mark.parametrize(
    "function",
    [mixed, by_derivative, functools.partial(on_host, vmap_method="broadcast_all"), foreign],
)
@pytest.mark.parametrize("unit", ["record", "agent"])
def test_nothing_mixes_records_or_agents_before_clip(network, function, unit):
    """By a rule of its own for several: one record would move the terms of all others."""
    made = plan.make(make_config(relation=f"replace_{unit}"), network)

    def of_model(params):
        # An agent's own records may be mixed, as by a batch loss, and its model not.
        return params if unit == "record" else params * function(jax.lax.stop_gradient(params))

    task = task_of(function if unit == "record" else jnp.asarray, of_model)
    with pytest.raises(ValueError, match="may mix them before the clip"):
        rounds(made, task)


@pytest.mark.mutant
def test_encoder_mixes_no_agents_before_clip():
    query = AgentQuery(lambda params, x, y: params @ x, None, 1.0, "flat")
    batch = jnp.ones((2, 4, 3)), jnp.ones((2, 4)), None
    with pytest.raises(ValueError, match="holds custom_vmap_call"):
        query(jnp.ones((2, 3)), batch, mixed)


def test_what_takes_records_one_by_one_or_is_within_one_is_accepted(network):
    made = plan.make(make_config(relation="replace_record", rounds=2), network)
    plain = run(made, task_of(), seeds=[0]).params
    for function in (
        jax.custom_batching.sequential_vmap(lambda x: x * 1),
        functools.partial(on_host, vmap_method="sequential"),
        lambda x: jax.vmap(mixed)(jnp.stack([x, 0 * x]))[1],
    ):
        same = run(made, task_of(function), seeds=[0]).params
        np.testing.assert_allclose(same, plain, rtol=1e-6)
