"""What a run states is fixed, and refused, before its first round."""

import abc
import collections
import copy
import dataclasses
import functools
import importlib.util
import math
import os
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from jax.experimental.custom_partitioning import custom_partitioning

from dpjax.accounting import budget, gdp
from dpjax.contrib.rules import UpdateRule, momentum
from dpjax.data import partition
from dpjax.engine.run import run
from dpjax.learning.problem import Problem
from dpjax.learning.quadratics import quadratics
from dpjax.learning.supervised import supervised
from dpjax.mechanism.participation import Participation
from dpjax.models import losses
from dpjax.models.linear import Linear
from dpjax.models.mlp import MLP
from dpjax.plans import plan, protect
from dpjax.plans.compatibility import custom_names, packaged
from dpjax.plans.optimizers import Chain
from dpjax.plans.protect import Budget, Protect
from dpjax.plans.statements import custom_parts, stopping_rule
from dpjax.topology import graphs, mixing
from tests.support import make_config, make_problem


@pytest.fixture(scope="module")
def made(network):
    return plan.make(make_config(design="independent"), network)


def fixed(result, **change):
    options = {"stopping": "plan", "callback": False, "before": None, "planned": False}
    return stopping_rule([result], [5, 10, 20], **(options | change))


class Small(Protect):
    """A user's own: a thousandth of the noise."""

    @property
    def sensitivity(self):
        return 1e-3 * super().sensitivity


class Cheap(Budget):
    """A user's own, whatever it overrides."""


class Bare(plan.Plan):
    """A user's own: no noise is drawn."""

    privatizer = None


def rule(step):
    return optax.sgd(step)


def double(params, x, y):
    return 2 * losses.squared(x @ params["w"], y)


class Net(nn.Module):
    """A user's model."""

    @nn.compact
    def __call__(self, x):
        return Linear()(nn.Dense(3)(x))


class Task(Problem):
    """A user's problem."""


def copied(function):
    """As a pickle's, the copy of a compiled function has lost its name and `__wrapped__`."""
    return copy.copy(jax.jit(function))


def nothing(params, x, y):
    return 0.0


def quadratic(loss):
    return dataclasses.replace(quadratics(6), loss=loss)


NAMELESS = f"{__name__}.<lambda>.<locals>.<lambda>"


def own_problem(**changes):
    x = np.ones((6, 3), np.float32)
    y = np.ones(6, np.float32)
    options = dict(init=quadratics(6).init, loss=quadratics(6).loss, x=x, y=y,
                 metrics=lambda params, evaluation: {}, evaluation=(),
                 partition=partition.iid(6, 6, seed=0))  # fmt: skip
    return options | changes


def problem_with(model, **changes):
    task = make_problem(6)
    train = task.x, task.y
    return supervised(model, "logistic", train, train, task.partition, **changes)


@pytest.mark.mutant
def test_every_part_of_plan_is_packages_or_named(network):
    config = make_config(design="independent")
    small = Small("replace_agent", clip_norm=0.5)
    cheap = plan.make(dataclasses.replace(config, budget=Cheap(8.0, 1e-5)), network)
    results = {
        "Small": plan.make(dataclasses.replace(config, protect=small), network),
        "rule": plan.make(dataclasses.replace(config, optimizer=Chain(rule, 0.1)), network),
    }
    bare = plan.make(config, network)
    assert not bare.guarantee.custom and not bare.config.protect.sensitivity < 1
    results["Bare"] = Bare(*(getattr(bare, field.name) for field in dataclasses.fields(bare)))
    adam = dataclasses.replace(config, optimizer=Chain(functools.partial(optax.adam, b1=0.5), 0.1))
    assert not plan.make(adam, network).guarantee.custom
    for name, own in {**results, "Cheap": cheap}.items():
        assert own.guarantee.custom == (name,)
        for text in (own.guarantee.statement(), own.guarantee.caption(), repr(own)):
            assert f"relies on your own `{name}`" in text
    (stated,) = run(results["Bare"], make_problem(6), seeds=[0]).guarantees
    assert "`Bare`" in stated.caption()


@pytest.mark.mutant
def test_problem_model_or_loss_of_users_own_is_named(network):
    training_plan = plan.make(make_config(design="independent", rounds=2), network)
    (plain,) = run(training_plan, problem_with(Linear()), seeds=[0]).guarantees
    assert not plain.custom
    (stated,) = run(training_plan, problem_with(Net()), seeds=[0]).guarantees
    assert stated.custom == ("Net",) and "It relies on your own `Net`" in stated.statement()
    assert "relies on your own `Net`" in stated.caption()
    assert stated.replace(custom=()) == plain


@pytest.mark.parametrize(
    ("task", "names"),
    [
        (lambda: problem_with(nn.Sequential([MLP((3,), 2), Linear()])), ()),
        (lambda: problem_with(Linear(), class_weights=(1.0, 2.0)), ()),
        (lambda: problem_with(nn.Sequential([nn.Dense(3), nn.relu, Linear()])), ()),
        (lambda: problem_with(nn.Sequential([Net()])), ("Net",)),
        (lambda: problem_with(nn.remat(Net)()), ("Net",)),
        (lambda: problem_with(nn.Sequential([lambda x: x, Linear()])), (NAMELESS,)),
        (lambda: problem_with(Linear(), augment=lambda key, x: x), (NAMELESS,)),
        (lambda: problem_with(Linear(), augment=functools.partial(shifted, by=1)), ("shifted",)),
        (lambda: quadratics(6), ()),
        (lambda: Problem(**own_problem(loss=jax.jit(double), init=start)),
         ("start", "double")),
        (lambda: quadratic(copied(lambda params, x, y: 0.0)), (NAMELESS,)),
        (lambda: quadratic(copied(nothing)), ("nothing",)),
        (lambda: quadratic(copied(quadratics(6).loss)), ()),
        (lambda: Task(**vars(quadratics(6))), ("Task",)),
    ],
)  # fmt: skip
def test_what_gradients_are_made_by_is_packages_librarys_or_named(task, names):
    assert custom_parts(task()) == names


def test_code_of_users_is_named_wherever_it_says_it_is_from():
    """By `exec` it has no module, and `functools.wraps` copies that of another function."""
    task = quadratics(6)
    config = make_config()
    space = {"Protect": Protect}
    exec("class Cheap(Protect):\n    sensitivity = 0.001", space)
    fields = [field.name for field in dataclasses.fields(Protect) if field.init]
    cheap = space["Cheap"](**{name: getattr(config.protect, name) for name in fields})
    assert custom_names(dataclasses.replace(config, protect=cheap)) == ("Cheap",)

    @functools.wraps(task.loss)
    def wrapped(params, x, y):
        return 100 * task.loss(params, x, y)

    by_rule = jax.custom_vjp(task.loss)
    by_rule.defvjp(lambda *values: (task.loss(*values), values), lambda values, g: values)
    place = f"{__name__}.test_code_of_users_is_named_wherever_it_says_it_is_from"
    for loss, name in ((wrapped, "wrapped"), (by_rule, f"{place}.<locals>.<lambda>")):
        assert custom_parts(dataclasses.replace(task, loss=loss)) == (name,)
    assert custom_names(functools.partialmethod(wrapped)) == ("partialmethod",)
    # What it was traced to is all that is left of it.
    traced, _ = jax.closure_convert(lambda x: x**2, np.ones(3, np.float32))
    assert any("Jaxpr" in name for name in custom_names(traced))
    assert custom_names(config, task, (1, 2.0, "text", None, len, print, dict, task.loss)) == ()


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("field", "attribute", "value"),
    [
        ("sampler", "draw", functools.partial(np.multiply, 0)),
        ("noise", "calibrate", print),
        ("noise", "of_network", True),
        ("method", "emit", None),
        ("optimizer", "uses_noise", False),
        ("protect", "shift", 0.001),
    ],
)
def test_what_is_set_on_packaged_part_is_named(field, attribute, value):
    """A method on an instance takes the place of its class's; the package looks up others."""
    config = make_config()
    part = copy.copy(getattr(config, field))
    object.__setattr__(part, attribute, value)
    name = f"{type(part).__name__}.{attribute}"
    changed = dataclasses.replace(config, **{field: part})
    assert custom_names(changed) == (name,)


@pytest.mark.mutant
def test_what_follows_from_config_is_not_set_on_it(network):
    """A record that took part less often would get less noise, and the audit would agree."""
    config = make_config(design="independent")
    honest = plan.make(config, network)
    once = Participation(config.rounds, 1, config.rounds)
    with pytest.raises(AttributeError, match="pattern"):
        object.__setattr__(config, "pattern", once)
    vars(config).update(pattern=once)
    made = plan.make(config, network)
    assert np.array_equal(made.factor, honest.factor)
    assert made.guarantee.custom == ("Config.pattern",)


class Slotted:
    """An object that keeps a function in a slot, as if a library had made it."""

    __slots__ = ("function",)
    __module__ = "jax.slots"

    def __init__(self, function):
        self.function = function


def mapped_by(rule):
    function = jax.custom_batching.custom_vmap(jax.nn.sigmoid)
    function.def_vmap(rule)
    return function


def divided_by(rule):
    function = custom_partitioning(jax.nn.sigmoid)
    function.def_partition(rule)
    return function


@pytest.mark.mutant
@pytest.mark.parametrize("wrap", [mapped_by, divided_by, np.vectorize, Slotted])
def test_functions_in_attributes_of_librarys_objects_are_named(wrap):
    assert custom_names(nn.Sequential([wrap(rule)])) == ("rule",)
    assert custom_names(wrap(jax.nn.relu)) == ()


@pytest.mark.mutant
def test_what_library_made_of_traced_function_is_named():
    _, tangents = jax.linearize(lambda x: x**2, 1.0)
    assert custom_names(tangents) == ("Jaxpr",)


def test_statement_names_what_is_set_on_packaged_part(network):
    config = make_config(design="independent")
    noise = copy.copy(config.noise)
    assert not plan.make(config, network).guarantee.custom
    object.__setattr__(noise, "calibrate", type(noise)().calibrate)
    training_plan = plan.make(dataclasses.replace(config, noise=noise), network)
    assert training_plan.guarantee.custom == ("Independent.calibrate",)
    assert "It relies on your own `Independent.calibrate`" in training_plan.guarantee.statement()


def test_caches_and_state_of_libraries_are_no_users(made):
    assert made.privatizer and "privatizer" in vars(made)
    model = Linear()
    assert "_state" in vars(model) and custom_names(made, model) == ()
    object.__setattr__(model, "apply", print)
    assert custom_names(model) == ("Linear.apply",)


@pytest.mark.mutant
def test_parts_of_contrib_are_named(network):
    config = make_config(design="independent", optimizer=UpdateRule("momentum").chain(0.1))
    assert plan.make(config, network).guarantee.custom == ("UpdateRule",)
    assert custom_names(config, momentum) == ("UpdateRule", "momentum")
    assert not packaged(UpdateRule) and packaged(Chain)


def test_users_file_of_name_of_one_of_pythons_is_users(tmp_path, monkeypatch):
    path = tmp_path / "tabnanny.py"
    path.write_text("class Cheap:\n    pass\n\n\ndef rule(step):\n    return step\n")
    spec = importlib.util.spec_from_file_location("tabnanny", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tabnanny", module)
    spec.loader.exec_module(module)
    assert custom_names(module.Cheap, module.rule) == ("Cheap", "rule")
    assert custom_names(os.path.join, collections.OrderedDict, abc.ABC, math.sin, Path("x")) == ()


def start(key):
    return {"w": jax.random.normal(key, (3,))}


def shifted(key, x, by):
    return x + by


def test_phases_that_do_not_compose_are_refused_before_first_round(made):
    first = made.guarantee
    (pair,) = fixed(made, before=[first], planned=True).at(20)
    assert pair == first.followed_by(first, planned=True)
    # Stopped on the way, the later phase counts whole.
    assert fixed(made, before=[first], planned=True, callback=True).at(5) == (
        pair.replace(unused=15),
    )
    used = dataclasses.replace(first, delta=first.delta / 2, epsilon=first.epsilon * 2)
    with pytest.raises(ValueError, match="only equal ones compose"):
        fixed(made, before=[used], planned=True)
    with pytest.raises(ValueError, match="in a later phase"):
        fixed(made, before=[first], planned=True, callback=True, stopping="curve")
    with pytest.raises(ValueError, match="planned is False"):
        fixed(made, before=[first])
    with pytest.raises(ValueError, match="planned is 1"):
        fixed(made, before=[first], planned=1)


def test_phase_that_was_not_planned_states_total_that_was_fixed(made):
    """Ten rounds of a plan, then all of it; twice all of it would pass the total."""
    total = dataclasses.replace(made.config.budget, epsilon=1.4 * made.config.budget.epsilon)
    first = made.guarantee.after(10).within(total)
    ended = fixed(made, before=[first])
    assert [item.epsilon for item in ended.at(20)] == [total.epsilon]
    # Stopped on the way, it counts whole, but for a curve.
    assert ended.at(5)[0].spent.mu == ended.at(20)[0].spent.mu
    curve = fixed(made, before=[first], stopping="curve", callback=True)
    assert curve.at(5)[0].spent.mu == pytest.approx(first.spent.mu * 1.5**0.5)
    assert curve.at(5)[0].epsilon == total.epsilon
    complete = made.guarantee.within(total)
    with pytest.raises(ValueError, match="mu of 2 phases is .* more than the total's"):
        fixed(made, before=[complete])
    # What is done counts, where that was fixed before the phase.
    short = {"callback": False, "before": [complete], "stopping": "plan", "planned": False}
    assert stopping_rule([made], [1], **short).at(1)[0].rounds == 21
    with pytest.raises(ValueError, match=r"give guarantees=\[first.within\(total\)\]"):
        fixed(made, before=[made.guarantee])


def test_later_phase_of_those_who_stay_keeps_their_totals():
    network = mixing.metropolis_hastings(graphs.complete(6))
    total = protect.Budget((1.0, 8.0, 2.0, 2.0, 4.0, 4.0), 1e-5)
    first = make_config(design="independent", epsilon=(0.5, 4.0, 1.0, 1.0, 2.0, 2.0))
    stated = plan.make(first, network).guarantee.within(total)
    left = np.delete(budget.remaining(total, [stated]).epsilon, 1)
    config = make_config(design="independent", epsilon=tuple(left))
    later = plan.make(config, mixing.survivors(network, [1]))
    with pytest.raises(ValueError, match=r"epsilons of \[5, 6\] agents; .* by survivors"):
        fixed(later, before=[stated])
    (pair,) = fixed(later, before=[stated.survivors([1])]).at(20)
    assert pair.per_agent_epsilon == (1.0, 2.0, 2.0, 4.0, 4.0)
    text = later.export(pair).instructions()
    assert "the total of all phases, epsilon = 1 to 4 by agent" in text


def test_plan_states_what_each_agent_loses_and_anybody_may_leave():
    network = mixing.metropolis_hastings(graphs.complete(4))
    each = (1.0, 8.0, 2.0, 4.0)
    training_plan = plan.make(make_config(design="independent", epsilon=each), network)
    stated = training_plan.guarantee
    mus = np.array(stated.per_agent_mu)
    np.testing.assert_array_equal(mus, training_plan.noise.loss(training_plan.target).size)
    np.testing.assert_allclose(mus, gdp.mu(each, 1e-5), rtol=1e-6)
    # Two planned phases cost each agent what its two mus do.
    twice = stated.followed_by(stated, planned=True)
    np.testing.assert_allclose(twice.per_agent_mu, math.sqrt(2) * mus, rtol=1e-14)
    assert twice.survivors([1]).per_agent_mu == tuple(np.delete(twice.per_agent_mu, 1))
    # All of a total taken by one phase: those who stay lose what they did.
    complete = stated.within(protect.Budget(each, 1e-5))
    for departed in ([0], [1, 3]):
        stay = complete.survivors(departed)
        np.testing.assert_array_equal(stay.agents_spent, np.delete(mus, departed))
        assert stay.per_agent_epsilon == tuple(np.delete(each, departed))
    reduced = stated.replace(per_agent_mu=(*mus[:2], mus[2] * 0.999, mus[3]))
    with pytest.raises(ValueError, match="states per_agent_mu .* for agent 2, but its noise"):
        dataclasses.replace(training_plan, guarantee=reduced)


def test_curve_is_of_ends_of_chunks(made):
    curve = fixed(made, stopping="curve", callback=True)
    assert curve.totals[0].curve.marks == (5, 10, 20)
    assert curve.at(10) == (curve.totals[0].stopped(10),)
    assert curve.at(10)[0].epsilon < fixed(made, callback=True).at(10)[0].epsilon
    with pytest.raises(ValueError, match="marks are"):
        curve.at(7)
