"""The task that growth and rivals share, logistic regression, and the comparison with a rival."""

import json
import statistics
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from _timing import turns
from dpjax.data.partition import Partition
from dpjax.engine.run import run
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.plans import noise, optimizers, plan, protect
from dpjax.plans.statements import HopelessWarning

__all__ = ["CLIP_NORM", "STEP_SIZE", "compared", "config", "logistic", "rings"]

CLIP_NORM = 0.1
STEP_SIZE = 0.5
SAME = 1e-3
"""Of the models' norm: a rival whose models without noise differ by more has another task. dpjax
clips to (1 - d 2^-24) C, so that the float32 norm of d numbers is at most C."""

warnings.simplefilter("ignore", HopelessWarning)  # what noise leaves to learn changes no time


def rings(n: int, degree: int = 8) -> scipy.sparse.csr_array:
    """The mean over an agent and its two neighbours on each of ``degree / 2`` random rings."""
    rng = np.random.default_rng(0)
    matrix = scipy.sparse.eye_array(n, format="csr")
    for _ in range(degree // 2):
        ring = rng.permutation(n)
        pairs = np.ones(n), (ring, np.roll(ring, 1))
        links = scipy.sparse.csr_array(pairs, shape=(n, n))
        matrix = matrix + links + links.T
    return matrix.tocsr() / (degree + 1)


def logistic(n: int, d: int, value: int) -> Problem:
    """Agents with as many random records each, one after the other; models [d] begin at 0."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n * value, d), np.float32) / np.float32(np.sqrt(d))
    y = np.where(x.sum(axis=1) + rng.standard_normal(n * value) > 0, 1, -1).astype(np.float32)
    rows = np.arange(n * value, dtype=np.int32).reshape(n, value)
    return Problem(
        init=lambda key: jnp.zeros(d),
        loss=lambda w, x, y: jax.nn.softplus(-y * (x @ w)),
        metrics=lambda models, evaluation: {"mean": jnp.mean(models)},
        x=x, y=y, partition=Partition(rows, np.full(n, value, np.int32)), evaluation=(),
    )  # fmt: skip


def config(rounds: int, sampler: samplers.Random | samplers.Full) -> plan.Config:
    """Protection of agents, with independent noise."""
    return plan.Config(
        noise=noise.Independent(), budget=protect.Budget(8.0, 1e-7), rounds=rounds,
        protect=protect.Protect("replace_agent", clip_norm=CLIP_NORM), sampler=sampler,
        optimizer=optimizers.Sgd(STEP_SIZE),
    )  # fmt: skip


def compared(
    name: str, command: list[str], config: plan.Config, mixing: Any, task: Problem,
    repeats: int, share: float = 1.0, **arrays: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of dpjax and of a rival script, which take turns.

    Args:
        name: The rival's.
        command: Its words; a file of ``arrays``, rounds and the scale of noise follow. It prints
            the seconds of all rounds and, as a list, models, without noise where the scale is 0.
        config: dpjax's.
        mixing: Its matrix.
        task: Its problem, of equally many records an agent.
        repeats: After a first one.
        share: Scale of the rival's noise in units of that of an agent in dpjax.
        arrays: What the rival needs beside x [n, m, d], y [n, m] and the clip norm.
    """
    rounds = config.rounds
    counts = task.partition.counts
    noisy, plain = (plan.make(case, mixing, counts=counts) for case in (config, config.using(None)))
    scale = share * float(np.asarray(noisy.factor).flat[0])
    agents = len(counts)
    arrays |= {"x": task.x.reshape(agents, -1, task.x.shape[-1]), "y": task.y.reshape(agents, -1)}

    def ours(training_plan: plan.Plan) -> Any:
        return run(training_plan, task, seeds=[0], eval_every=rounds)

    def theirs(file: Path, scale: float) -> Any:
        words = [*command, str(file), str(rounds), str(scale)]
        answer = subprocess.run(words, capture_output=True, encoding="utf-8")
        if answer.returncode:
            raise RuntimeError(f"{name} failed:\n{answer.stderr[-2000:]}")
        return json.loads(answer.stdout.splitlines()[-1])

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "task.npz")
        np.savez(file, clip_norm=CLIP_NORM, **arrays)
        expected = np.asarray(ours(plain).params)[0, 0]
        difference = np.linalg.norm(np.array(theirs(file, 0.0)[1]) - expected)
        difference = float(difference / np.linalg.norm(expected))
        if difference > SAME:
            raise RuntimeError(
                f"models differ by {difference:.2g} of their norm: not the same task"
            )
        calls = {
            "dpjax": lambda: ours(noisy).seconds,
            name: lambda: theirs(file, scale)[0],
        }
        taken = turns(calls, repeats, clock=float)
    rows = []
    for item, timing in taken.items():
        pairs = zip(timing.times, taken["dpjax"].times, strict=True)
        row = {"algorithm": item, "agents": agents, "parameters": task.x.shape[-1]}
        row |= {"rounds": rounds, "scale": scale, "rounds_per_second": rounds / timing.median}
        row |= {"times_dpjax": statistics.median(value / other for value, other in pairs)}
        rows.append(row | {"difference": difference})
    return rows
