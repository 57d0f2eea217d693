"""How many files one reads to follow a run, and a step: those whose functions are called."""

import sys
from pathlib import Path

import jax
import pytest

from dpjax.engine.inputs import Inputs
from dpjax.engine.run import run
from dpjax.engine.step import start_key
from dpjax.plans import plan
from tests.support import make_config, make_problem

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dpjax"
ASIDE = {"_validate.py", "_numerics.py", "models/linear.py", "models/losses.py"}
"""Small helpers of all packages, and the user's part: the model and its loss."""


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
    return sorted(inside - ASIDE)


@pytest.fixture(scope="module")
def made(network):
    """A plan, and a problem that nothing was compiled for."""
    return plan.make(make_config(rounds=4), network), make_problem(len(network), seed=7)


def test_a_run_is_read_in_few_files(made):
    one, task = made
    read = files(lambda: run(one, task, seeds=[0]))
    assert len(read) <= 47, read  # 30 is the aim


def test_a_step_is_read_in_few_files(made):
    one, task = made
    inputs = Inputs.of((one,), (task,), (0,))
    statics, key = inputs.statics, inputs.batch_keys[0]
    arrays = jax.tree.map(lambda leaf: leaf[0], inputs.arrays)
    models = jax.tree.map(lambda leaf: leaf[0, 0], inputs.start(None, 1))
    halves = statics.halves(arrays, key)
    state = halves.init(models, start_key(key))

    def step(state, data):
        batch = statics.batch(data, key, key, state.round)
        return halves.step(key, state, batch)

    read = files(lambda: jax.eval_shape(step, state, inputs.data))
    assert len(read) <= 14, read  # 12 is the aim
