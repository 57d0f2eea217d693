"""The task that growth and rivals share: logistic regression over a network of random rings."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from dpjax.data.partition import Partition
from dpjax.plans import noise, optimizers, plan, problem, protect, samplers

__all__ = ["CLIP_NORM", "STEP_SIZE", "config", "logistic", "records", "rings"]

CLIP_NORM, STEP_SIZE = 0.1, 0.5


def rings(n: int, degree: int = 8) -> scipy.sparse.csr_array:
    """The mean over an agent and its two neighbours on each of ``degree / 2`` random rings."""
    rng, matrix = np.random.default_rng(0), scipy.sparse.eye_array(n, format="csr")
    for _ in range(degree // 2):
        ring = rng.permutation(n)
        pairs = np.ones(n), (ring, np.roll(ring, 1))
        links = scipy.sparse.csr_array(pairs, shape=(n, n))
        matrix = matrix + links + links.T
    return matrix.tocsr() / (degree + 1)


def records(n: int, d: int, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Random records x [n * each, d] and labels -1 and 1 that a plane tells apart, mostly."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n * each, d), np.float32) / np.float32(np.sqrt(d))
    return x, np.where(x.sum(axis=1) + rng.standard_normal(n * each) > 0, 1, -1).astype(np.float32)


def logistic(n: int, d: int, each: int) -> problem.Problem:
    """Agents with as many of these records each, one after the other; models [d] begin at 0."""
    x, y = records(n, d, each)
    rows = np.arange(n * each, dtype=np.int32).reshape(n, each)
    return problem.Problem(
        init=lambda key: jnp.zeros(d),
        loss=lambda w, x, y: jax.nn.softplus(-y * (x @ w)),
        metrics=lambda models, evaluation: {"mean": jnp.mean(models)},
        x=x, y=y, partition=Partition(rows, np.full(n, each, np.int32)), evaluation=(),
    )  # fmt: skip


def config(rounds: int, sampler: samplers.Random | samplers.Full) -> plan.Config:
    """Protection of agents, with independent noise."""
    return plan.Config(
        noise=noise.Independent(), budget=protect.Budget(8.0, 1e-7), rounds=rounds,
        protect=protect.Protect("replace_agent", clip_norm=CLIP_NORM), sampler=sampler,
        optimizer=optimizers.Sgd(STEP_SIZE),
    )  # fmt: skip
