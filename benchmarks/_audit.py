"""What audits share: the small problem, its parts, and when a measured loss is too large."""

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy import stats

from dpjax.data.partition import Partition
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.plans import noise, scheduled, sums
from dpjax.topology import graphs, mixing

AGENTS = 4
ROUNDS = 4
EPSILON = 8.0
DELTA = 1e-5
NETWORK = mixing.metropolis_hastings(graphs.path(AGENTS))
LONG = 3.0
"""Gradients are so much longer than the clip norm, which is 1."""
ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "records" / "audit.jsonl.gz"
SITES = RECORD.with_name("audit_sites.jsonl.gz")
"""The record of `audit_sites`, which has a table of the page."""
WORST = 1.02
"""Measured over stated above this, its interval included, is a finding."""
NOISES: dict[str, tuple[Any, ...]] = {name: (part,) for name, part in noise.DESIGNS.items()} | {
    "prefix_sum": (noise.PrefixSum(), noise.PrefixSum(bands=2)),
    "mafalda": (noise.Mafalda(), noise.Mafalda(bands=2)),
    "banded_inverse": (noise.BandedInverse(bands=3),),
    "laplace": (scheduled.ScheduledLaplace(0.8),),
    "normal": (scheduled.ScheduledGaussian(0.8),),
    "aggregate": (noise.SumShares(dropouts=1, colluders=1),),
    "discrete": (sums.Discrete(size=2, dropouts=1, colluders=1, variance=2_500),),
}
"""The same of noise designs, by label."""
SAMPLERS: dict[str, tuple[tuple[Any, tuple[int, ...]], ...]] = {
    "Random": ((samplers.Random(2), (2, 2, 2, 2)), (samplers.Random(1), (1, 1, 1, 1))),
    "Full": ((samplers.Full(), (2, 1, 3, 2)), (samplers.Full(), (1, 1, 1, 1))),
    "Cyclic": ((samplers.Cyclic(2, 2, 1), (2, 2, 2, 2)),),
    "Clients": ((samplers.Clients(clients=2, examples=2, epochs=1), (4, 4, 4, 4)),),
    "Poisson": (
        (samplers.Poisson(expected=1.0, capacity=2), (3, 2, 4, 3)),
        (samplers.Poisson(expected=1.0, capacity=2, separation=2), (4, 4, 5, 4)),
    ),
    "BallsInBins": ((samplers.BallsInBins(bins=2, capacity=2), (4, 4, 5, 4)),),
}
"""The same of samplers, with the records of each agent."""
TURNING = {"GradientTracking": 9}
"""Methods that send how gradients change: their worst pair turns its sign from round to round, as
two records of it are drawn in turn, under the public batches of this seed."""


def _start(key: Any) -> Any:
    del key
    return {"a": jnp.zeros(1), "b": jnp.zeros(1)}


def _loss(params: Any, x: Any, y: Any) -> Any:
    del y
    return params["a"][0] * x[0] + params["b"][0] * x[1]


def _metrics(params: Any, evaluation: Any) -> dict[str, Any]:
    del params, evaluation
    return {}


def problem(result: Any, victim: int | None = None) -> Problem:
    """Data of all agents; with a victim, the neighbour that differs in this one's.

    Gradients that change are `LONG` times the worst way: C and -C of replaced data, C and 0 of
    those that are zeroed out. What changes is one record, all of an agent, or all of a client.
    """
    counts = np.array(result.counts)
    protected = result.config.protect
    sampler = result.config.sampler
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    x = np.zeros((counts.sum(), 2))
    if sampler.capacity is None:  # Else batches of others are secret, too.
        x[:] = np.random.default_rng(3).normal(size=x.shape) / 4
    for agent, (start, count) in enumerate(zip(starts, counts, strict=True)):
        step = getattr(sampler, "clients", 1) if protected.unit == "client" else 1
        which = np.arange(1 if protected.unit == "record" else count)[::step]
        other = 0.0 if protected.relation.startswith("zero_out") else -1.0
        turned = (-1.0) ** which if type(result.config.method).__name__ in TURNING else which**0.0
        side = turned * (other if agent == victim else 1.0)
        x[start + which] = LONG * side[:, None] * np.array([0.6, 0.8])
    places = np.arange(counts.max())
    indices = starts[:, None] + np.where(places < counts[:, None], places, 0)
    shards = Partition(indices.astype(np.int32), counts.astype(np.int32))
    return Problem(_start, _loss, _metrics, x, np.zeros(len(x)), shards, ())


class Found(NamedTuple):
    """What was measured of a cell, in the loss's own unit."""

    unit: str
    stated: float
    measured: float
    low: float
    high: float
    tested: float | None = None


def separated(value: np.ndarray, other: np.ndarray) -> float:
    """A lower bound at 95 % on mu, from one event: the test is made on half of the seeds."""
    half = len(value) // 2
    d = (other - value).mean(axis=0)
    weights = np.linalg.pinv(np.cov(value[:half].T), rcond=1e-9, hermitian=True) @ d
    middle = (value[:half].mean(axis=0) + d / 2) @ weights
    # Halves of the fresh seeds, so that the two counts are independent.
    fresh = half + (len(value) - half) // 2
    alarms = int((value[half:fresh] @ weights > middle).sum()), fresh - half
    hits = int((other[fresh:] @ weights > middle).sum()), len(value) - fresh
    low = stats.binomtest(*hits).proportion_ci(0.95, "exact").low
    high = stats.binomtest(*alarms).proportion_ci(0.95, "exact").high
    return float(stats.norm.ppf(low) - stats.norm.ppf(high))


def flagged(result: Found) -> bool:
    """Whether a mechanism loses more than it states, beyond the interval."""
    return bool(result.low > WORST * result.stated)
