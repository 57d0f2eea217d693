"""What the serverless experiment says of frames and bytes, by hand."""

import numpy as np
import pandas
import pytest

from dpjax.models.linear import Linear
from tests.support import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("dome_gossip")


@pytest.mark.slow
def test_frames_stay_one_by_exact_sums_and_part_by_gossip(script):
    config = script.PRESETS["tiny"]
    exact, near = (script.drifted(config, "ring", steps) for steps in (0, 8))
    assert abs(exact["apart"]) < 1e-5 < 0.02 < near["apart"]
    assert exact["error"] < near["error"]


def test_what_float32_cannot_tell_is_printed_as_nothing(script):
    rows = {"graph": ["ring"] * 2, "gossip_steps": [0, 8], "error": [0.43, 0.58]}
    rows |= {"apart_first": [-1.1e-7, 3e-7], "apart": [-9e-8, 0.134], "other": [1, 2]}
    shares = script.shares(pandas.DataFrame(rows))
    assert shares["apart_first"].tolist() == [0, 0] and shares["apart_last"].tolist() == [0, 0.134]


@pytest.mark.slow
def test_bytes_are_those_of_links_and_of_tree(script):
    """Models over every direction of a link against vectors up and down a tree."""
    config = script.Config(dataset="breast_cancer", agents=5, graphs=("ring",), separation=4)
    network = config.network("ring")
    shards = script.partition.iid(50, 5, 0)
    x = np.ones((50, 7), np.float32)
    y = np.tile([-1, 1], 25)
    task = script.supervised(Linear(), "logistic", (x, y), (x, y), shards)
    results = {}
    for system in ("dsgd", "relays", "dome 6"):
        (result,) = script.plans(config, system, network, "sgd", 1.0, (1.0,), len(y))
        results[system] = script.sent(config, system, network, result, task)
    entries = results["relays"]["entries"]
    assert results["dsgd"] == {"entries": entries, "bytes": 4.0 * entries * 10, "hops": 1}
    assert results["relays"] == {"entries": entries, "bytes": 4.0 * entries * 8, "hops": 4}
    assert results["dome 6"] == {"entries": 6.0, "bytes": 4.0 * 6 * 8, "hops": 4}
    for invalid in ("dome", "dome many", "gossip 8"):
        with pytest.raises(ValueError, match="systems holds"):
            script.Config(systems=(invalid,))
