"""``import dpjax as dp``: what it names, and what it does not load."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dpjax as dp

ROOT = Path(__file__).resolve().parents[1]


def test_import_is_quick_and_loads_no_library() -> None:
    code = (
        "import sys, time; before = set(sys.modules); start = time.process_time()\n"
        "import dpjax\n"
        "seconds = time.process_time() - start\n"
        "print((seconds, sorted({m.partition('.')[0] for m in set(sys.modules) - before})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    seconds, loaded = ast.literal_eval(done.stdout)
    assert seconds < 0.1
    assert not {"jax", "numpy", "networkx", "optax"} & set(loaded)
    assert [name for name in loaded if name not in sys.stdlib_module_names] == ["dpjax"]


def test_names_are_those_of_their_modules() -> None:
    from dpjax.engine.run import run
    from dpjax.plans import noise, plan, scheduled
    from dpjax.topology import graphs

    assert (dp.run, dp.make_plan, dp.Config) == (run, plan.make, plan.Config)
    assert (dp.noise.Whisper, dp.noise.ScheduledLaplace) == (
        noise.Whisper,
        scheduled.ScheduledLaplace,
    )
    assert dp.graphs is graphs
    assert dp.methods.DSGD.__module__ == "dpjax.algorithms.dsgd"


@pytest.mark.parametrize("name", sorted(set(dp.__all__) - {"__version__"}))
def test_every_name_loads_and_is_completed(name: str) -> None:
    assert getattr(dp, name) is getattr(dp, name)
    assert name in dir(dp)


def test_type_checkers_may_use_every_name() -> None:
    tree = ast.parse((ROOT / "dpjax" / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    # Checkers take a stub's import for its own use, unless it is `as` itself.
    exported = [a.name for node in imports for a in node.names if a.asname == a.name]
    exported += [ast.unparse(n).split()[0] for n in tree.body if isinstance(n, ast.Assign)]
    assert sorted(exported) == dp.__all__


def test_nothing_else_is_completed() -> None:
    assert dir(dp) == sorted(dp.__all__)


def test_unknown_name_is_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'dpjax' has no attribute 'Confg'"):
        dp.Confg  # noqa: B018


@pytest.mark.slow
def test_plans_run_where_jax_promotes_no_dtypes() -> None:
    """In a process of its own: the setting is one of all that is traced."""
    code = """
import jax
import numpy as np
import dpjax as dp
from dpjax.models.linear import Linear
from dpjax.learning.supervised import supervised

assert jax.config.jax_numpy_dtype_promotion == "strict"
x = np.random.default_rng(0).normal(size=(24, 3))
y = np.tile([1, -1], 12)
scores = ["auc", "f1", "balanced_accuracy"]
shards = dp.partition.iid(24, 4, 0)
task = supervised(Linear(), "logistic", (x, y), (x, y), shards, metrics=scores)
mixing = dp.mixing.metropolis_hastings(dp.graphs.ring(4))


def trained(relation="zero_out_record", sampler=dp.samplers.Random(2), decay="sqrt", **parts):
    config = dp.Config(
        protect=dp.Protect(relation, clip_norm=1.0), budget=dp.Budget(5.0, delta=1e-3), rounds=4,
        sampler=sampler, optimizer=dp.optimizers.Sgd(0.1, decay), **parts,
    )
    plan = dp.make_plan(config, mixing, counts=shards)
    return dp.run(plan, task, seeds=[0]).predictor(task)(x)


trained(sampler=dp.samplers.Poisson(2, 4), noise=dp.noise.Independent())
trained(sampler=dp.samplers.Cyclic(2, 2, 3), noise=dp.noise.SpaceTime())
trained("replace_agent", dp.samplers.Full(), 0.5, noise=dp.noise.Mafalda())
dp.account(mixing, relation="replace_record", rounds=3, sigma=2.0, trust="pndp")
"""
    environment = os.environ | {"JAX_NUMPY_DTYPE_PROMOTION": "strict", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
