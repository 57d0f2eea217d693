"""Methods that leak do not pass: what data reach is followed through a round of toys."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

import dpjax as dp
from dpjax.algorithms.average import Average
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.federated import Federated
from dpjax.contrib.sketches import FixedFrame
from dpjax.plans import dependence, plan
from dpjax.plans.optimizers import Chain, Sgd
from dpjax.protocols import Emission
from dpjax.topology import graphs, mixing
from tests.plans.toys import CASES, KEY, D, Dsgd, Midway, N, Tracking
from tests.support import make_config, make_problem

RING = mixing.metropolis_hastings(graphs.ring(6))


@pytest.mark.parametrize("name", CASES)
def test_messages_depend_on_data_through_noise_alone(name):
    case = CASES[name]
    dependence.check_dependence(
        case.method, Chain(lambda _: case.optimizer, 0.1), (case.agents, case.agents)
    )


@dataclass(frozen=True)
class RawModel(Tracking):
    """The broken twin: the model that absorbed bare gradients is published."""

    def released(self, public_state):
        return public_state.models


@dataclass(frozen=True)
class BareLeaf(Dsgd):
    """The broken twin: a second leaf goes out beside the noisy one."""

    def emit(self, ctx, public_state):
        total = ctx.query(public_state.models, ctx.batch).total
        return Emission(total, carry=total)

    def send(self, ctx, public_state, emission, noisy):
        moved, memory = self.updated(ctx, public_state, noisy)
        return {"noisy": moved, "bare": emission.carry["w"]}, memory

    def absorb(self, ctx, public_state, carry, received):
        return received["noisy"], carry


@dataclass(frozen=True)
class KeptBack(Dsgd):
    """The broken twin: this round's batch goes out with the next one's message."""

    def start(self, ctx, models):
        return ctx.optimizer.init(models), jnp.zeros(N)

    def send(self, ctx, public_state, emission, noisy):
        moved, memory = self.updated(
            ctx, public_state._replace(memory=public_state.memory[0]), noisy
        )
        return jax.tree.map(lambda leaf: leaf + public_state.memory[1][:, None], moved), memory

    def absorb(self, ctx, public_state, carry, received):
        return received, (carry, ctx.batch[1].mean(1))


@dataclass(frozen=True)
class Branching(Dsgd):
    """The broken twin: data decide in a loop and a branch, not in a value."""

    def emit(self, ctx, public_state):
        total = ctx.query(public_state.models, ctx.batch).total
        return Emission(total, public=jnp.mean(ctx.batch[1]))

    def send(self, ctx, public_state, emission, noisy):
        moved, memory = self.updated(ctx, public_state, noisy)
        flag = jax.lax.cond(emission.public > 0, lambda: 1.0, lambda: -1.0)
        count = jax.lax.while_loop(lambda c: c < emission.public, lambda c: c + 1.0, flag)
        total, _ = jax.lax.scan(lambda c, _: (c + count, None), 0.0, length=3)
        return jax.tree.map(lambda leaf: leaf + 0 * total, moved), memory


@dataclass(frozen=True)
class Reported(Dsgd):
    """The broken twin: what the query reports goes out."""

    def emit(self, ctx, public_state):
        total, metrics = ctx.query(public_state.models, ctx.batch)
        return Emission(total, public=metrics)


@dataclass(frozen=True)
class TriedStep(Midway):
    """The broken twin: one of the points is where bare gradients would lead."""

    def emit(self, ctx, public_state):
        bare = ctx.query(public_state.models, ctx.batch).total
        present = jax.tree.map(lambda x, g: x - 0.1 * g, public_state.models, bare)
        return super().emit(ctx, public_state._replace(memory=(public_state.memory[0], present)))


@dataclass(frozen=True)
class Weighed(Midway):
    """The broken twin: records weigh points for each other, in the encoder."""

    def emit(self, ctx, public_state):
        pair = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf], 1), public_state.models)
        share = jnp.mean(ctx.batch[1])
        encode = lambda g: jax.tree.map(lambda leaf: leaf[0] + share * leaf[1], g)  # noqa: E731
        return Emission(ctx.query.points()(pair, ctx.batch, encode).total)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("method", "leaf"),
    [
        (TriedStep(), "models"),
        (Weighed(), "encoded"),
        (RawModel(), "released"),
        (Average(RawModel()), "released"),
        (BareLeaf(), "bare"),
        (KeptBack(), "message"),
        (Branching(), "public"),
        (Reported(), "public"),
    ],
)
def test_method_that_leaks_is_refused(method, leaf):
    with pytest.raises(ValueError, match=f"(?s)method shows.*{leaf}"):
        dependence.check_dependence(method, Sgd(0.1), (N, N))


@dataclass(frozen=True)
class ByLeaf(DSGD):
    """The broken twin: no noise on leaves of another name, or on those of a shape."""

    name: str = "bias"
    axes: int = 9

    def emit(self, ctx, public_state):
        total = ctx.query(public_state.models, ctx.batch).total
        return Emission(total, carry=total)

    def send(self, ctx, public_state, emission, noisy):
        def pick(path, safe, bare):
            special = self.name in jax.tree_util.keystr(path) or safe.ndim == self.axes
            return bare if special else safe

        mixed = jax.tree_util.tree_map_with_path(pick, noisy, emission.carry)
        return ctx.step(public_state.models, ctx.mean(mixed), public_state.memory)


@pytest.mark.mutant
@pytest.mark.parametrize("method", [ByLeaf(), ByLeaf(name="none", axes=1), Average(ByLeaf())])
def test_method_is_traced_again_for_models_of_run(method):
    """A plan knows no model: a method may tell its toy from all others."""
    problem = make_problem(6)
    training_plan = plan.make(make_config(method=method, design="independent"), RING)
    drivers = [
        lambda: dp.run(training_plan, problem, seeds=[0]),
        lambda: dp.rounds(training_plan, problem),
        lambda: dp.estimate(training_plan, problem, seeds=[0]),
    ]
    for driver in drivers:
        with pytest.raises(ValueError, match="method shows .*message"):
            driver()


def test_control_flow_passes_data_on():
    def program(data, public):
        flag = jax.lax.cond(data > 0, lambda: 1.0, lambda: -1.0)
        count = jax.lax.while_loop(lambda c: c < data, lambda c: c + 1.0, public)
        clean = jax.lax.while_loop(lambda c: c < 3, lambda c: c + public, public)
        late, stacked = jax.lax.scan(
            lambda c, x: ((c[1], c[1] + data, c[2] + x), c[2]),
            (public, public, public),
            jnp.ones(3) * public,
        )
        inner = jax.jit(lambda a, b: (a, b * 2))(data, public)
        mapped = jax.vmap(lambda a: jnp.sin(a) @ jnp.ones(2))(jnp.ones((2, 2)) * public)
        return flag, count, clean, late, stacked, inner, mapped

    closed, shapes = jax.make_jaxpr(program, return_shape=True)(1.0, 2.0)
    names = jax.tree.structure(shapes).unflatten(dependence.reached(closed.jaxpr, [True, False]))
    flag, count, clean, late, stacked, inner, mapped = names
    assert (flag, count, clean, mapped, stacked) == (True, True, False, False, False)
    assert late == (True, True, False) and inner == (True, False)


def _tell(value):
    jax.debug.callback(lambda value: None, value)
    return value


PROGRAMS = {
    "jit": lambda data, public, tell: jax.jit(lambda a, b: (a, 2 * tell(b)))(data, public),
    "cond": lambda data, public, tell: jax.lax.cond(
        public > 0, lambda a, b: (a, 2 * tell(b)), lambda a, b: (a, b), data, public
    ),
    "while": lambda data, public, tell: jax.lax.while_loop(
        lambda c: c[1] < 3, lambda c: (c[0] + 1, 2 * tell(c[1])), (data, public)
    ),
    "scan": lambda data, public, tell: jax.lax.scan(
        lambda c, x: ((c[0] + 1, 2 * tell(c[1])), None), (data, public), jnp.ones(3)
    )[0],
}


@pytest.mark.mutant
@pytest.mark.parametrize("kind", PROGRAMS)
def test_control_flow_laid_out_in_unknown_way_hides_nothing(kind):
    def only(tell):
        jaxpr = jax.make_jaxpr(lambda *pair: PROGRAMS[kind](*pair, tell))(1.0, 2.0).jaxpr
        (place,) = (k for k, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == kind)
        return jaxpr, place

    def other(jaxpr, place):
        equation = jaxpr.eqns[place]
        later = {f"later_{name}": value for name, value in equation.params.items()}
        changed = [equation.replace(params=later, invars=equation.invars[::-1])]
        if kind == "jit":  # its one program is found by any name
            changed = [equation.replace(invars=[*equation.invars, equation.invars[1]])]
        return jaxpr.replace(eqns=[*jaxpr.eqns[:place], *changed, *jaxpr.eqns[place + 1 :]])

    jaxpr, place = only(lambda value: value)
    assert dependence.reached(jaxpr, [True, False]) == [True, False]
    assert dependence.reached(other(jaxpr, place), [True, False]) == [True, True]
    jaxpr, place = only(_tell)
    assert dependence.reached(jaxpr, [True, False]) == [True, False]
    with pytest.raises(ValueError, match="callback that gets what depends on data"):
        dependence.reached(other(jaxpr, place), [True, False])


@pytest.mark.mutant
def test_host_that_data_call_is_refused():
    def branch(data):
        return jax.lax.cond(data > 0, lambda: _tell(jnp.ones(())), lambda: 0.0)

    def written(data):
        box = jax.new_ref(jnp.zeros(()))
        jax.jit(lambda value: box.__setitem__(..., _tell(value)))(data)
        return box[...]

    for program in (branch, written):
        with pytest.raises(ValueError, match="callback that gets what depends on data"):
            dependence.reached(jax.make_jaxpr(program)(1.0).jaxpr, [True])


@dataclass(frozen=True)
class Doubled(Dsgd):
    """The broken twin: twice as sensitive as what the noise is calibrated for."""

    def emit(self, ctx, public_state):
        total = ctx.query(public_state.models, ctx.batch).total
        return Emission(jax.tree.map(lambda leaf: 2 * leaf, total))


@dataclass(frozen=True)
class Twice(Dsgd):
    """The broken twin: one batch is asked about at two models."""

    def emit(self, ctx, public_state):
        present = jax.tree.map(jnp.negative, public_state.models)
        pair = [ctx.query(each, ctx.batch).total for each in (public_state.models, present)]
        return Emission(jax.tree.map(jnp.add, *pair))


@dataclass(frozen=True)
class LastRounds(Dsgd):
    """The broken twin: an answer goes out in the next round, when another one is accounted for."""

    def start(self, ctx, models):
        return ctx.optimizer.init(models), jax.tree.map(jnp.zeros_like, models)

    def emit(self, ctx, public_state):
        total = ctx.query(public_state.models, ctx.batch).total
        return Emission(public_state.memory[1], carry=total)

    def send(self, ctx, public_state, emission, noisy):
        moved, memory = self.updated(
            ctx, public_state._replace(memory=public_state.memory[0]), noisy
        )
        return moved, (memory, emission.carry)


@dataclass(frozen=True)
class Averaged(Dsgd):
    """The broken twin: smaller than what the noise is calibrated for, and scaled with it."""

    def emit(self, ctx, public_state):
        return Emission(ctx.mean(ctx.query(public_state.models, ctx.batch).total))


@pytest.mark.mutant
@pytest.mark.parametrize("method", [Doubled(), Twice(), LastRounds(), Averaged()])
def test_payload_that_is_no_answer_is_refused(method):
    with pytest.raises(ValueError, match="state a sensitivity"):
        dependence.check_dependence(method, Sgd(0.1), (N, N))


def test_what_is_written_in_place_is_followed():
    def program(data):
        box = jax.new_ref(jnp.zeros(()))
        before = box[...]

        def write(c, _):
            box[...] = data + c
            return c, None

        jax.lax.scan(write, jnp.ones(()), None, length=2)
        return before, box[...]

    closed = jax.make_jaxpr(program)(1.0)
    assert dependence.reached(closed.jaxpr, [True]) == [False, True]
    outside = jax.new_ref(jnp.zeros(()))  # an earlier round may have written to it
    assert dependence.reached(jax.make_jaxpr(lambda: outside[...])().jaxpr, []) == [True]


@dataclass(frozen=True)
class KeyInMemory(Dsgd):
    """The broken twin: a noise key where checkpoints and other plans see it."""

    def start(self, ctx, models):
        return ctx.optimizer.init(models), KEY


@pytest.mark.mutant
def test_key_outside_secret_slot_is_refused():
    with pytest.raises(ValueError, match="state has a key in"):
        dependence.check_dependence(KeyInMemory(), Sgd(0.1), (N, N))


@dataclass(frozen=True)
class OtherPayload(Dsgd):
    def payload(self, models):
        return {"w": jnp.zeros((N, D + 1))}


def test_payload_of_other_shapes_is_refused():
    with pytest.raises(ValueError, match="payload says"):
        dependence.check_dependence(OtherPayload(), Sgd(0.1), (N, N))


@dataclass(frozen=True)
class Told:
    """Encodes a gradient as it is, and tells the host what it was."""

    way: str

    def encode(self, vector):
        return jax.jit(self.tell)(vector)

    def tell(self, vector):
        if self.way == "debug":
            jax.debug.callback(lambda value: None, vector)
        elif self.way == "io":
            io_callback(lambda value: None, None, vector)
        else:
            return jax.pure_callback(lambda value: value, vector, vector, vmap_method="sequential")
        return vector

    def decode(self, coordinates):
        return coordinates


@dataclass(frozen=True)
class Talking(FixedFrame):
    """A sketch of one's own, whose encoder may talk to the host."""

    way: str = "pure"

    def projection(self, state):
        return Told(self.way)


@pytest.mark.parametrize("way", ["debug", "io", "pure"])
def test_encoders_that_talk_to_host_are_refused(way):
    method = Federated(sketch=Talking(2, way=way))
    with pytest.raises(ValueError, match="_callback that gets what depends on data"):
        dependence.check_dependence(method, Sgd(0.1), (3, 3))
    dependence.check_dependence(Federated(sketch=FixedFrame(2)), Sgd(0.1), (3, 3))
