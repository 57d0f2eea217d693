"""Another optimizer, sampler or number of gossip steps is one changed argument, audited."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from dpjax.algorithms.dsgd import DSGD
from dpjax.engine.run import run
from dpjax.learning import samplers
from dpjax.plans import plan
from dpjax.plans.optimizers import Chain
from dpjax.topology import graphs, mixing
from tests.support import make_config, make_problem, with_factor

RING = mixing.metropolis_hastings(graphs.ring(6))
ALONE = np.ones((1, 1))

CHANGES = {
    "adam": (RING, {"optimizer": Chain(optax.adam, 0.05)}),
    "poisson": (ALONE, {"sampler": samplers.Poisson(4.0, 6)}),
    "muffliato": (RING, {"method": DSGD(gossip_steps=4)}),
}


# Of Adam: tests/plans/test_optimizers.py.
@pytest.mark.parametrize(
    "name", ["poisson", *(pytest.param(n, marks=pytest.mark.slow) for n in ("adam", "muffliato"))]
)
def test_it_is_one_changed_argument(name):
    matrix, change = CHANGES[name]
    n = len(matrix)
    config = make_config(design="independent", relation="zero_out_record", rounds=6, epsilon=2.0)
    options = {"counts": np.full(n, 24)}
    task = make_problem(n)
    before = plan.make(config, matrix, **options)
    after = plan.make(dataclasses.replace(config, **change), matrix, **options)
    # The budget is kept, with less noise where batches are secret and as much elsewhere.
    assert after.guarantee.epsilon == before.guarantee.epsilon == 2.0
    reduced = np.abs(after.factor).max() / np.abs(before.factor).max()
    assert reduced < 0.9 if name == "poisson" else reduced == 1
    # It is audited: the same plan with a hundredth less noise is refused.
    with pytest.raises(ValueError, match="guarantee states"):
        with_factor(after, after.factor * np.float32(0.99))
    # It runs, and is another run.
    first, other = (run(case, task, seeds=[0]) for case in (before, after))
    leaves = zip(jax.tree.leaves(first.params), jax.tree.leaves(other.params), strict=True)
    assert all(np.isfinite(b).all() and (a != b).any() for a, b in leaves)
    assert other.guarantees[0].epsilon <= 2.0


@pytest.mark.parametrize("change", [change for _, change in CHANGES.values()])
def test_no_other_field_of_config_moves(change):
    config = make_config(design="independent", relation="zero_out_record", rounds=6)
    other = dataclasses.replace(config, **change)
    fields = [field.name for field in dataclasses.fields(config)]
    assert [f for f in fields if getattr(config, f) != getattr(other, f)] == [*change]
