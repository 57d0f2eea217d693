"""What benchmarks compare is the same work."""

import importlib.util
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import bench_dpsgd


def summed(way: str, size: int) -> list[np.ndarray]:
    """A step's sum of gradients of eight images, as a flat list."""
    total: Any = bench_dpsgd.make("cnn5", way, 8, size)()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(total)]


@pytest.mark.slow
def test_the_clipped_sums_are_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_dpsgd, "CLIP_NORM", 0.05)
    ours, theirs = summed("dpjax", 4), summed("jax_privacy", 8)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    plain = summed("plain conv", 8)
    each = (np.hstack([leaf.ravel() for leaf in total]) for total in (ours, plain))
    clipped, whole = map(np.linalg.norm, each)
    assert clipped <= 8 * 0.05 < whole
    for one, other in zip(plain, summed("plain patches", 4), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the bench extra is not here")
def test_pytorchs_network_is_as_large() -> None:
    params = list(bench_dpsgd.torch_network().parameters())
    assert sum(param.numel() for param in params) == 412_426
