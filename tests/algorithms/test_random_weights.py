"""Encrypted differences mix where links go both ways, and are refused elsewhere."""

import math

import numpy as np
import pytest

from dpjax.algorithms.random_weights import Encrypted, EncryptedOnLinks, Pulls, Shielded
from dpjax.topology import graphs, mixing

CYCLE = 0.5 * np.eye(4) + 0.5 * np.roll(np.eye(4), 1, axis=1)


def test_factors_are_bounded_by_largest_degree():
    ring = mixing.metropolis_hastings(graphs.ring(5))
    assert Encrypted().on(ring) == EncryptedOnLinks(1 / math.sqrt(3))
    assert Encrypted().on(mixing.metropolis_hastings(graphs.star(5))).largest == 1 / math.sqrt(5)


def test_one_way_links_mix_nothing_and_are_refused():
    weights = ((CYCLE != 0) & ~np.eye(4, dtype=bool)).astype(np.float32)
    models = np.arange(4, dtype=np.float32)[:, None]
    assert not np.asarray(Pulls()({}, 0, Shielded(models, weights)).value).any()
    assert np.asarray(Pulls()({}, 0, Shielded(models, weights + weights.T)).value).any()
    with pytest.raises(ValueError, match=r"weight at \(0, 1\) and none at \(1, 0\); .* both ways"):
        Encrypted().on(CYCLE)
    # A weight that float32 has not is no link of a run.
    thin = np.array([[0.5, 0.5], [1e-50, 1.0]])
    with pytest.raises(ValueError, match=r"weight at \(0, 1\) and none at \(1, 0\)"):
        Encrypted().on(thin)
    assert Encrypted().on((CYCLE + CYCLE.T) / 2).largest == 1 / math.sqrt(3)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ([2, 3], r"mixing has shape \(2,\); give an array of 2 dimensions"),
        (np.ones((2, 3)), r"mixing has shape \(2, 3\); give a square matrix"),
        (np.ones((2, 3, 3)), r"mixing is a schedule of shape \(2, 3, 3\); give one matrix"),
        ("x", "mixing is not an array of numbers"),
    ],
)
def test_what_is_no_network_is_refused(value, match):
    with pytest.raises(ValueError, match=match):
        Encrypted().on(value)
