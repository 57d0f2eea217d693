"""A small problem and its plans, shared by the rooms' tests."""

import dataclasses
import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.dsgd import DSGD
from dpjax.data import partition
from dpjax.engine import run as run_
from dpjax.engine.run import Checkpoint, Continuation
from dpjax.engine.step import RoundDraw, make_rounds
from dpjax.learning.samplers import Cyclic, Random
from dpjax.learning.supervised import supervised
from dpjax.mechanism import design as design_
from dpjax.models.linear import Linear
from dpjax.plans import noise
from dpjax.plans.calibration import Factored
from dpjax.plans.config import Config
from dpjax.plans.optimizers import Sgd
from dpjax.plans.protect import Budget, Protect
from dpjax.protocols import Answer

ROOT = Path(__file__).resolve().parents[1]


def run(plans, task, *, checkpoint=None, start=None, **options):
    """A run, with the fields of `Checkpoint` and `Continuation` among its options."""
    fields = {"checkpoint_seconds": "seconds", "key_file": "key_file"}
    stored = {field: options.pop(name) for name, field in fields.items() if name in options}
    fields = {"phase": "number", "spent": "guarantees", "planned": "planned"}
    onward = {field: options.pop(name) for name, field in fields.items() if name in options}
    if start is not None or onward:
        onward = {"number": 1, "guarantees": None} | onward
        options["continuation"] = Continuation(start, **onward)
    if stored:
        checkpoint = Checkpoint(checkpoint, **stored)
    return run_.run(plans, task, checkpoint=checkpoint, **options)


def load_script(name, folder="experiments"):
    """A script beside the package, executed as a new module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def diagonal(*axes):
    """Cases in which every value of every axis comes, in place of their product."""
    axes = [tuple(axis) for axis in axes]
    longest = max(map(len, axes))
    return [tuple(axis[k % len(axis)] for axis in axes) for k in range(longest)]


def make_problem(agents, records=24, features=5, seed=0):
    """Logistic regression on a fixed random data set."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(agents * records, features))
    y = np.where(x @ rng.normal(size=features) + 0.3 * rng.normal(size=len(x)) > 0, 1, -1)
    shards = partition.iid(len(x), agents, 0)
    return supervised(Linear(), "logistic", (x, y), (x[:50], y[:50]), shards)


def with_norms(gradients, params, x, y, weights):
    """Compiled, the sum of gradients with weights of their norms, and the norms."""
    observed = []

    def weighted(params, x, y):
        def of(norms):
            # As words: callbacks know nothing of double precision here.
            kind = np.promote_types(norms.dtype, np.float32)
            words = jax.lax.bitcast_convert_type(norms.astype(kind), jnp.uint32)
            jax.debug.callback(lambda result: observed.append(np.ravel(result).view(kind)), words)
            return weights(norms)

        return gradients(params, x, y, of)

    total = jax.block_until_ready(jax.jit(weighted)(params, x, y))
    jax.effects_barrier()
    (norms,) = observed
    return total, norms


def make_config(**changes):
    """A small private config, its parts from plain values."""
    options = dict(
        design="whisper", epsilon=8.0, delta=1e-5, relation="replace_agent", rounds=20,
        clip_norm=0.5, batch_size=4, step_size=0.1,
    )  # fmt: skip
    options |= changes

    def taken(*names):
        return {name: options.pop(name) for name in names if name in options}

    parts = taken("noise", "budget", "sampler", "optimizer", "protect", "method")
    design = options.pop("design")
    part = noise.named(design)
    if design == "whisper_horizon":
        part = noise.Whisper(options.pop("horizon", None) or "run")
    budget = Budget(**taken("epsilon", "delta", "accountant", "allow_unsound"))
    sampler = Random(**taken("batch_size"))
    if (participation := options.pop("participation", None)) is not None:
        sampler = Cyclic(*participation, sampler.batch_size)
    results = dict(
        noise=dataclasses.replace(part, **taken("max_variance", "subgroups")) if part else None,
        budget=None if part is None else budget,
        protect=Protect(
            **taken(
                "relation", "clip_norm", "clipping", "microbatch", "attacker", "gradients", "nodes"
            )
        ),
        sampler=sampler,
        optimizer=Sgd(options.pop("step_size"), options.pop("step_decay", "constant")),
    )
    return Config(**(results | parts), **options)


class Algorithm(NamedTuple):
    """`Rounds` whose models, keys and batches a test gives: ``step(key, state, batch)``."""

    init: Any
    outgoing: Any
    incoming: Any
    step: Any


def make_algorithm(method, arrays, *, privatizer, **parts):
    """`make_rounds` of given keys and batches."""
    added = optax.with_extra_args_support(privatizer or optax.identity())
    make = functools.partial(make_rounds, method, arrays, transformation=added, **parts)
    return _algorithm(make)


def algorithm_of(statics, arrays, noise_key):
    """The rounds of a run's parts, of given keys and batches."""
    return _algorithm(functools.partial(statics.rounds, arrays, noise_key))


def _algorithm(make):
    def rounds(key, batch):
        return make(draw=lambda _: RoundDraw(key, batch))

    return Algorithm(
        lambda models, key=None: make(draw=None).init(models, key),
        lambda key, state, batch: rounds(key, batch).outgoing(state),
        lambda key, state, batch, *others: rounds(key, batch).incoming(state, *others),
        lambda key, state, batch: rounds(key, batch).step(state),
    )


def composed(matrix, gradient, optimizer, *, privatizer=None, opened=None, method=None, **arrays):
    """A method on given gradients, ``gradient(model, batch)`` of one agent, without any clip.

    Args:
        matrix: The mixing matrix or schedule.
        gradient: One agent's gradient.
        optimizer: An optax chain with the negative step.
        privatizer: An optax transformation that adds the noise; None adds none.
        opened: Decodes its sums, where they have a form of their own.
        method: What agents compute, keep and send; None is D-SGD.
        arrays: Of the method, beside the mixing matrix.
    """

    def query(models, batch, encode=None):
        return Answer(jax.vmap(gradient)(models, batch))

    return make_algorithm(
        DSGD() if method is None else method,
        {"mixing": jnp.asarray(matrix), **arrays},
        query=query,
        privatizer=privatizer,
        opened=opened,
        optimizer=optimizer,
        divisor=1,
    )


DESIGNED = ("independent", "pairwise", "whisper", "whisper_horizon")
"""Kinds of `dpjax.mechanism.design`."""


def designed(kind, matrix, bound, rounds):
    """The design over agents of a kind, its horizon some rounds where it has one."""
    if kind == "whisper_horizon":
        return design_.Design.whisper(matrix, bound, rounds)
    return getattr(design_.Design, kind)(matrix, bound)


def retargeted(result, guarantee=None, **changes):
    """The plan for another config, mixing matrix or counts, audited again."""
    target = dataclasses.replace(result.target, **changes)
    return dataclasses.replace(result, target=target, guarantee=guarantee or result.guarantee)


def with_factor(result, factor):
    """The plan with another factor in its noise, audited again."""
    noise_ = None if factor is None else Factored(factor, result.strategy, result.design)
    return dataclasses.replace(result, noise=noise_)


def cut_and_resumed(value, task, folder, **options):
    """A run that a callback cut at its first chunk's end, and that went on from its checkpoint."""

    class Cut(Exception):
        pass

    def cut(_):
        raise Cut

    with pytest.raises(Cut):
        run(value, task, checkpoint=folder, callback=cut, **options)
    # A callback that raises leaves the checkpoint before it; the run goes on from there.
    return run(value, task, checkpoint=folder, **options)
