"""What a run is: everything that decides the bits of its messages.

A run that resumes repeats rounds with the noise they had. With anything else in front of that
noise, the difference of two messages would be noiseless, so a checkpoint and a key file belong to
one identity: plans, data, initial models, software, device, and the very program that advances the
run, as it is lowered for the compiler, with all its constants.
"""

import dataclasses
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

import dpjax
from dpjax.plans.descriptions import described
from dpjax.plans.plan import Plan
from dpjax.plans.problem import Problem

__all__: list[str] = []

_SETTINGS = (
    "jax_enable_x64", "jax_threefry_partitionable", "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)  # fmt: skip
"""Settings that change random bits or gradients."""

_OUTSIDE = ("callback", "debug_print", "ffi_call", "infeed", "outfeed")
"""Parts of names of operations whose work is not in the program."""

_PROGRAM = "model and loss"
_COMPUTED = ("plans", "arrays", "initial memory", _PROGRAM)
"""Digests of what other entries decide too: the plans' matrices and the compiled program."""
_SHORT = 40


def of_run(
    plans: Sequence[Plan],
    problems: Sequence[Problem],
    seeds: Sequence[int],
    options: Mapping[str, Any],
    models: Any,
    arrays: Any,
    memory: Any,
    program: str,
    devices: int,
) -> dict[str, str]:
    """Return what a run is; resuming needs all of it unchanged for the same bits and noise.

    Args:
        plans: The plans.
        problems: One, or one a seed.
        seeds: The seeds.
        options: Arguments of the run by name that decide its rounds, how they are divided into
            compiled calls, and what a run that is stopped states.
        models: Pytree of what training starts from.
        arrays: What differs between plans, as the program is called with it.
        memory: Of the method, before the first round.
        program: From `computation`.
        devices: Over how many devices the agents are spread.

    Returns:
        A flat dict, name -> text.
    """
    device, frozen = jax.devices()[0], problems[0].frozen
    return {
        **_configs(plans),
        **{name: str(value) for name, value in options.items()},
        "plans": hashlib.sha256("".join(p.fingerprint() for p in plans).encode()).hexdigest(),
        "data": " ".join(problem.fingerprint() for problem in problems),
        **({} if frozen is None else {"frozen values": digest(frozen)}),
        "evaluation data": digest([problem.evaluation for problem in problems]),
        "initial models": digest(models),
        "arrays": digest(arrays),
        "initial memory": digest(memory),
        _PROGRAM: program,
        "seeds": str(tuple(seeds)),
        "devices": f"{device.device_kind} x {devices}, {_processor()}, {_threads()}",
        "software": f"dpjax {dpjax.__version__}, jax {jax.__version__}, "
        f"jaxlib {jaxlib.__version__}",
        "settings": ", ".join(f"{name} {getattr(jax.config, name)}" for name in _SETTINGS)
        + f", XLA_FLAGS {os.environ.get('XLA_FLAGS', '')}",
    }


def _configs(plans: Sequence[Plan]) -> dict[str, str]:
    """Every field of the plans' configs and of their parts, so that one that changes is named."""
    configs = [dict(_fields(plan.config, "Config")) for plan in plans]
    labels = {}
    for name in dict.fromkeys(name for each in configs for name in each):
        values = [each.get(name) for each in configs]
        same = all(value == values[0] for value in values)
        labels[name] = str(values[0] if same else tuple(values))
    return labels


def _fields(part: Any, name: str) -> Iterator[tuple[str, str]]:
    """A part's class and fields by dotted name, in text; plans' fingerprints hold the arrays."""
    if not dataclasses.is_dataclass(part):
        yield name, str(described(part, name))
        return
    if name != "Config":
        yield name, type(part).__name__
    for field in dataclasses.fields(part):
        yield from _fields(getattr(part, field.name), f"{name}.{field.name}")


def differences(stored: Mapping[str, str], current: Mapping[str, str]) -> str:
    """Say in what two identities differ, or nothing where they do not.

    Args:
        stored: One from `of_run`, as it was stored.
        current: The other, of the run that would go on.

    Returns:
        The names of what differs, with values where they are short. What is computed from the
        rest is named only where nothing else explains it.
    """
    names = [
        name for name in dict.fromkeys([*current, *stored]) if stored.get(name) != current.get(name)
    ]
    if not names:
        return ""
    named = [name for name in names if name not in _COMPUTED] or names
    lines = []
    for name in named:
        there, here = (str(each.get(name)) for each in (stored, current))
        short = max(len(there), len(here)) <= _SHORT
        lines.append(f"{name} ({there} there, {here} here)" if short else name)
    return ", ".join(lines)


def fingerprint(identity: dict[str, str]) -> str:
    """Return the SHA-256 of an identity, in hexadecimal."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def digest(tree: Any) -> str:
    """Return the SHA-256 of a pytree's arrays, their dtypes and shapes, in hexadecimal."""
    hasher = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(leaf)
        hasher.update(f"{array.dtype.name}{array.shape}".encode() + array.tobytes())
    return hasher.hexdigest()


def computation(traced: Sequence[Any], *, release: bool) -> str:
    """Return the SHA-256 of traced programs with every constant in them, in hexadecimal.

    The text is that of the lowered program: constants are written out in full wherever they were
    captured, names of source files, lines and addresses are left out. A setting of JAX turns
    captured arrays into inputs of the lowered program; they are hashed beside it.

    Guarantee: a release that passes computes nothing that is not hashed, so that it never sends a
    round again with other gradients under the same noise. What the host or foreign code would
    compute cannot be seen, and is refused.

    Args:
        traced: What ``jax.jit(f).trace(...)`` returns, for every length of a compiled call.
        release: Whether to refuse work outside the program; a simulation may do some.

    Raises:
        ValueError: For such work, naming the operation.
    """
    hasher = hashlib.sha256()
    for each in traced:
        text = each.lower().as_text()
        if release:
            _refuse_outside(each.jaxpr, text)
        hasher.update(text.encode())
        for constant in _constants(each.jaxpr):
            hasher.update(digest(constant).encode())
    return hasher.hexdigest()


def _refuse_outside(closed: Any, text: str) -> None:
    called = {
        equation.primitive.name
        for jaxpr, _ in _jaxprs(closed)
        for equation in jaxpr.eqns
        if any(part in equation.primitive.name for part in _OUTSIDE)
    }
    called = called or set(re.findall(r"custom_call @(\w*callback\w*)", text))
    if called:
        raise ValueError(
            f"problem calls {', '.join(sorted(called))} in its model, loss or metrics; a release "
            "refuses work outside the compiled program, which may give something else when the "
            "run resumes: the same noise on other gradients would cancel. Compute it in JAX, or "
            "before the run"
        )


def _constants(closed: Any) -> Iterator[Any]:
    """Every array that a program holds, at any depth: constants and literals."""
    for jaxpr, constants in _jaxprs(closed):
        yield from constants
        for equation in jaxpr.eqns:
            yield from (atom.val for atom in equation.invars if hasattr(atom, "val"))


def _jaxprs(value: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Every jaxpr within a jaxpr or within an operation's parameter, with its constants."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _jaxprs(part)
    elif hasattr(value, "eqns"):
        inner = getattr(value, "jaxpr", value)
        yield inner, getattr(value, "consts", ())
        for equation in inner.eqns:
            yield from _jaxprs(equation.params)


def _threads() -> str:
    """How many threads sums are split over, which moves their last bits."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{count} threads, NPROC {os.environ.get('NPROC', '')}"


def _processor() -> str:
    """The processor's model, where the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
