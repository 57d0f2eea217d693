"""What a run is: another computation, however it is hidden, is another run."""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.dsgd import DSGD
from dpjax.engine import checkpoint, keys
from dpjax.plans import identity, plan
from dpjax.plans.optimizers import Chain
from tests.engine import captured
from tests.support import make_config, make_problem, run

ROOT = Path(__file__).resolve().parents[2]


GATE = {"plain", "nested"}


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in GATE else pytest.param(kind, marks=pytest.mark.slow)
        for kind in captured.KINDS
    ],
)
def test_release_does_not_resume_with_another_captured_array(tmp_path, kind):
    """The same noise on gradients that differ in one bit of one number would cancel."""
    key = tmp_path / "noise.key"
    with pytest.raises(captured.Reached):
        captured.reach(captured.make(kind), key)
    before = key.read_bytes()
    other = captured.make(kind, captured.changed(captured.WEIGHTS))
    with pytest.raises(ValueError, match="belongs to another run"):
        captured.reach(other, key)
    assert key.read_bytes() == before
    with pytest.raises(captured.Reached):  # The same loss, made again.
        captured.reach(captured.make(kind), key)


@pytest.mark.slow
def test_same_program_in_another_process_is_same_run(tmp_path):
    kinds = ["nested"]
    for kind in kinds:
        with pytest.raises(captured.Reached):
            captured.reach(captured.make(kind), tmp_path / f"noise.{kind}")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.captured", str(tmp_path / "noise"), *kinds],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == kinds
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_captured_arrays_that_become_inputs_are_hashed_too(tmp_path):
    """By a setting of JAX, under which the lowered program holds no captured array."""
    name = "jax_use_simplified_jaxpr_constants"
    if not hasattr(jax.config, name):
        pytest.skip("this JAX has no such setting")
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        for kind in ("jitted", "nested"):
            key = tmp_path / kind
            with pytest.raises(captured.Reached):
                captured.reach(captured.make(kind), key)
            with pytest.raises(ValueError, match="belongs to another run"):
                captured.reach(captured.make(kind, captured.changed(captured.WEIGHTS)), key)
            with pytest.raises(captured.Reached):
                captured.reach(captured.make(kind), key)
    finally:
        jax.config.update(name, before)


def _pure(loss):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    same = jax.custom_jvp(
        lambda v: jax.pure_callback(lambda a: a, shape, v, vmap_method="sequential")
    )
    same.defjvp(lambda primals, tangents: (same(*primals), tangents[0]))
    return lambda p, x, y: same(loss(p, x, y))


def _ordered(loss):
    def seen(p, x, y):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        factor = jax.experimental.io_callback(lambda: np.float32(2), shape)
        return factor * loss(p, x, y)

    return seen


def _printed(loss):
    def seen(p, x, y):
        jax.debug.print("{}", y[0])
        return loss(p, x, y)

    return seen


def _watched(loss):
    @jax.jit
    def seen(p, x, y):
        jax.debug.callback(lambda a: None, y[0])
        return loss(p, x, y)

    return seen


@pytest.mark.parametrize(
    "wrap",
    [_pure, *(pytest.param(w, marks=pytest.mark.slow) for w in (_ordered, _printed, _watched))],
)
def test_release_refuses_host_callbacks(tmp_path, network, small, wrap):
    """What the host computes is in no program: it could change between two tries of a round."""
    key = tmp_path / "noise.key"
    task = dataclasses.replace(small, batch_loss=wrap(small.batch_loss))
    with pytest.raises(ValueError, match="refuses work outside the compiled program"):
        captured.reach(task, key)
    measured = dataclasses.replace(
        small, metrics=lambda p, e: {"m": wrap(lambda *_: jnp.float32(0))(p, e[0], e[1])}
    )
    with pytest.raises(ValueError, match="in its model, loss or metrics"):
        captured.reach(measured, key)
    assert not key.exists()
    simulated = plan.make(make_config(rounds=2), network)
    run(simulated, task, seeds=[0], eval_every=2, checkpoint=tmp_path / "c")


@pytest.mark.slow
def test_records_clipped_one_by_one_count_too(tmp_path, network):
    """The per-record gradient, by a custom model and by microbatches."""
    small = make_problem(6)

    def weighted(weights):
        scale = jax.jit(lambda x: x * weights)
        loss = lambda p, x, y: small.loss(p, scale(x), y)  # noqa: E731
        return dataclasses.replace(small, weighted=None, loss=loss)

    for place, changes in enumerate(({}, {"microbatch": 2})):
        config = make_config(release=True, rounds=2, relation="replace_record", **changes)
        training_plan = plan.make(config, network)
        key = tmp_path / str(place)
        with pytest.raises(captured.Reached):
            captured.reach(weighted(captured.WEIGHTS), key, training_plan)
        with pytest.raises(ValueError, match="belongs to another run"):
            captured.reach(weighted(captured.changed(captured.WEIGHTS)), key, training_plan)


def test_what_model_closes_over_is_read_before_first_round(tmp_path, network):
    """A callback may change it; the last, shorter chunk is the hashed program all the same."""
    small = make_problem(6)
    scale = np.ones(5, np.float32)

    def trained(name, callback):
        # A loss of its own: what was traced for another run is not found again.
        task = dataclasses.replace(
            small, batch_loss=lambda p, x, y: small.batch_loss(p, x * scale, y)
        )
        training_plan = plan.make(make_config(release=True, rounds=5), network)
        selection = {"checkpoint": tmp_path / name, "key_file": tmp_path / f"{name}.key"}
        with pytest.MonkeyPatch.context() as fixed:
            fixed.setattr(keys.secrets, "randbits", lambda bits: 7)
            return run(
                training_plan, task, seeds=[0], eval_every=2, callback=callback, **selection
            ).params

    def anneal(progress):
        if progress.round == 4:
            scale[:] = 0

    as_it_was = trained("a", None)
    changed = trained("b", anneal)
    assert (scale == 0).all()
    for left, right in zip(jax.tree.leaves(as_it_was), jax.tree.leaves(changed), strict=True):
        np.testing.assert_array_equal(left, right)


class _Slowing:
    """A schedule that is an object without a text of its own."""

    def __init__(self, first):
        self.first = first

    def __call__(self, count):
        return self.first / (1.0 + count)


def _adam():
    """A function as another process has it: of the same name, at another address."""

    def adam(step_size, b1, steps=None):
        return optax.adam(step_size, b1=b1)

    return adam


def _slowing(count, first, over):
    return first / (over["rounds"][0] + count)


PARTIALS = {
    "make": lambda b1: Chain(functools.partial(_adam(), b1=b1, steps=[_adam()]), 0.1),
    "nested": lambda b1: Chain(functools.partial(functools.partial(_adam()), b1=b1), 0.1),
    "schedule": lambda first: Chain(
        optax.sgd, functools.partial(_slowing, first=first, over={"rounds": (np.float32(2), None)})
    ),
    "object": lambda first: Chain(optax.sgd, _Slowing(first)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARTIALS)
def test_functions_with_arguments_are_same_run_in_every_process(tmp_path, network, kind):
    """Described by what they call and with what, and not by addresses."""
    key = tmp_path / "noise.key"
    task = make_problem(6)

    def reach(value):
        optimizer = PARTIALS[kind](value)
        config = make_config(release=True, rounds=2, optimizer=optimizer)
        captured.reach(task, key, plan.make(config, network))

    selection = []  # So that no later function gets the address of an earlier one.
    for _ in range(2):
        with pytest.raises(captured.Reached):
            reach(0.5)
        selection.append(PARTIALS[kind](0.5))
    with pytest.raises(ValueError, match="belongs to another run"):
        reach(0.25)


class _Table:
    """A value without a text of its own."""


@dataclasses.dataclass(frozen=True)
class _Marked(DSGD):
    mark: tuple = ()


def test_what_has_no_text_of_its_own_is_refused_before_first_round(tmp_path, network, small):
    """And not when the run would resume, in vain."""
    training_plan = plan.make(make_config(rounds=2, method=_Marked(mark=(1, _Table()))), network)
    text = r"Config.method.mark\[1\] is <.*_Table object at 0x.*make its class a frozen dataclass"
    with pytest.raises(ValueError, match=text):
        run(training_plan, small, seeds=[0], eval_every=1, checkpoint=tmp_path / "c")
    assert not list(tmp_path.iterdir())


@dataclasses.dataclass(frozen=True)
class Renamed(DSGD):
    """A method of a user's own."""


def test_custom_classes_are_named_with_their_module():
    assert identity.described(Renamed())["part"] == f"{__name__}.Renamed"
    assert identity.described(DSGD())["part"] == "DSGD"


@pytest.mark.parametrize(
    "change",
    [{"init_per_agent": True}, {"augment": lambda key, x: x, "augmentation_multiplicity": 2}],
    ids=["apart", "copies"],
)
def test_processes_that_differ_in_how_problem_is_used_are_refused(network, change):
    training_plan = plan.make(make_config(), network)
    task = dataclasses.replace(make_problem(len(network)), weighted=None)
    tasks = task, dataclasses.replace(task, **change)
    here, present = (checkpoint.of_arguments([training_plan], [task], [0], {}) for task in tasks)
    checkpoint.check_alike([here, here])
    with pytest.raises(ValueError, match=f"differs in .*{list(change)[-1]}"):
        checkpoint.check_alike([here, present])
