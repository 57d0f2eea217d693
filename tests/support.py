"""A small problem and its plans, shared by the rooms' tests."""

import numpy as np

from dpjax.data import partition
from dpjax.models.linear import Linear
from dpjax.plans import plan, problem


def make_problem(agents, records=24, features=5, seed=0):
    """Logistic regression on a fixed random data set."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(agents * records, features))
    y = np.where(x @ rng.normal(size=features) + 0.3 * rng.normal(size=len(x)) > 0, 1, -1)
    shards = partition.iid(len(x), agents, 0)
    return problem.supervised(Linear(), "logistic", (x, y), (x[:50], y[:50]), shards)


def make_config(**changes):
    """A small private config."""
    settings = dict(
        design="whisper", epsilon=8.0, delta=1e-5, relation="replace_agent", rounds=20,
        clip_norm=0.5, batch_size=4, step_size=0.1,
    )  # fmt: skip
    return plan.Config(**(settings | changes))
