"""What a method measures in its rounds is reported, averaged over blocks, by both drivers."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.algorithms.dsgd import DSGD
from dpjax.engine import host
from dpjax.engine.run import run
from dpjax.plans import plan
from tests.support import make_config


@dataclass(frozen=True)
class Watched(DSGD):
    """D-SGD that measures its own models before each round."""

    name: str = "size"

    def emit(self, ctx, public_state):
        """What D-SGD emits, with a metric of its own, and the round as a whole number."""
        emission = super().emit(ctx, public_state)
        squares = [jnp.square(leaf).sum() for leaf in jax.tree.leaves(public_state.models)]
        own = {self.name: sum(squares), "number": ctx.round}
        return emission._replace(metrics={**emission.metrics, **own})


def made(network, **options):
    return plan.make(make_config(method=Watched(**options), rounds=7), network)


@pytest.mark.slow
def test_methods_own_metrics_are_reported(network, small):
    single = made(network)
    result = run(single, small, seeds=[0, 4], eval_every=3, chunk_blocks=2)
    assert list(result.metrics)[-4:] == ["gradient_norm", "clip_fraction", "number", "size"]
    # Averages over blocks of 3, 3 and 1 rounds.
    np.testing.assert_allclose(result.metrics["number"][:, 1, 0], [1, 4, 6])
    each = run(single, small, seeds=[0, 4], eval_every=1)
    blocks = np.split(each.metrics["size"][:, 1, 0], [3, 6])
    expected = [block.mean() for block in blocks]
    np.testing.assert_allclose(result.metrics["size"][:, 1, 0], expected, rtol=1e-6)
    assert {"size", "number"} <= set(result.rows()[0])


@pytest.mark.slow
def test_both_drivers_report_same(network, small):
    single = made(network)
    scan = run(single, small, seeds=[4], eval_every=3)
    loop = run(single, small, seeds=[4], eval_every=3, transport=host.local_transport(single))
    for name in ("size", "number", "gradient_norm"):
        np.testing.assert_array_equal(scan.metrics[name], loop.metrics[name])


@pytest.mark.parametrize("name", ["consensus", "test_loss"])
def test_names_of_metrics_that_stand_twice_are_refused(network, small, name):
    with pytest.raises(ValueError, match=rf"method reports \['{name}'\]"):
        run(made(network, name=name), small, seeds=[0])
