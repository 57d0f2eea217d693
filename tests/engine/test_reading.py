"""How many files one reads to follow a run, and a step: those whose functions are called."""

import functools
import re
import sys
from pathlib import Path

import jax
import pytest

from dpjax.engine.inputs import Inputs
from dpjax.engine.run import run
from dpjax.plans import plan
from tests.support import make_config, make_problem

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dpjax"
ASIDE = (
    "_validate.py",
    "_numerics.py",
    "_agents.py",
    "_programs.py",
    "models/",
    "accounting/",
    "plans/statements.py",
)
"""Checks of all packages, the user's model and loss, and what is stated of a plan."""


def files(function, *values):
    """Files of the package whose functions are called by a call, but for those of modules."""
    called = set()

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_name != "<module>":
            called.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        function(*values)
    finally:
        sys.setprofile(None)
    paths = (Path(name) for name in called)
    inside = {p.relative_to(PACKAGE).as_posix() for p in paths if p.is_relative_to(PACKAGE)}
    return sorted(name for name in inside if not name.startswith(ASIDE))


@pytest.fixture(scope="module")
def made(network):
    """A plan, and a problem that nothing was compiled for."""
    training_plan = plan.make(make_config(rounds=4), network)
    # What a plan makes when it is first asked is a part of making it.
    assert (
        training_plan.arrays
        and training_plan.privatizer
        and training_plan.sampler
        and training_plan.method
        and training_plan.grid is None
    )
    return training_plan, make_problem(len(network), seed=7)


def test_run_is_read_in_few_files(made):
    single, task = made
    read = files(lambda: run(single, task, seeds=[0]))
    assert len(read) <= 30, read


def test_step_is_read_in_few_files(made):
    single, task = made
    inputs = Inputs.of((single,), (task,), (0,))
    statics = inputs.statics
    key = inputs.batch_keys[0]
    arrays = jax.tree.map(lambda leaf: leaf[0], inputs.arrays)
    models = jax.tree.map(lambda leaf: leaf[0, 0], inputs.start(None, 1))
    state = statics.initial(arrays, models, key, key)

    rounds = statics.rounds(arrays, key, functools.partial(statics.draw, inputs.data, key))
    read = files(lambda: jax.eval_shape(rounds.step, state))
    assert len(read) <= 12, read
    section = (
        (ROOT / "docs" / "developers" / "architecture.md")
        .read_text()
        .partition("## From a run to a step")[2]
    )
    listed = re.findall(r"`(\w+/\w+\.py|\w+\.py)`", section.partition("\n## ")[0])
    assert set(read) <= set(listed), set(read) - set(listed)
