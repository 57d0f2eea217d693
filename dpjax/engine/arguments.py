"""What a run is asked for, checked before any work."""

import math
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _validate
from dpjax.accounting.guarantee import Guarantee
from dpjax.engine import placing, sharding
from dpjax.plans.plan import Plan
from dpjax.plans.problem import Problem

__all__: list[str] = []


def check(
    plans: Any, problem: Any, seeds: Any
) -> tuple[tuple[Plan, ...], tuple[Problem, ...], tuple[int, ...]]:
    """Check that plans, problems and seeds fit.

    Args:
        plans: One plan or several.
        problem: One problem, or one a seed.
        seeds: Whole numbers below 2**32, each once.

    Returns:
        All as tuples.

    Raises:
        ValueError: Naming what does not fit.
    """
    plans = tuple(plans) if isinstance(plans, list | tuple) else (plans,)
    for plan in plans:
        if not isinstance(plan, Plan):
            raise ValueError(f"plans is {type(plan).__name__}; give plans from plans.plan.make")
    if not plans:
        raise ValueError("plans is empty; give at least one plan")
    problems = tuple(problem) if isinstance(problem, list | tuple) else (problem,)
    if isinstance(seeds, str | bytes) or not isinstance(seeds, Iterable):
        raise ValueError(
            f"seeds is {_validate.shown(seeds)}; give a sequence of whole numbers, such as [0]"
        )
    seeds = tuple(_validate.integer("seeds", seed, least=0, most=2**32 - 1) for seed in seeds)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds is {seeds}; give at least one, each once")
    placing.check(plans, problems, len(seeds))
    return plans, problems, seeds


def check_storage(
    plans: Sequence[Plan], seeds: Sequence[int], checkpoint: Any, key_file: Any
) -> None:
    """Check that a release, and only a release, has a file for its key, apart from checkpoints.

    Args:
        plans: The plans.
        seeds: The seeds.
        checkpoint: Folder, or None.
        key_file: File, or None.

    Raises:
        ValueError: Naming what does not fit.
    """
    _check_path("checkpoint", checkpoint, "name a folder, or None to keep nothing")
    _check_path("key_file", key_file, "name a file to keep the noise key in")
    if not any(plan.config.release for plan in plans):
        if key_file is not None:
            raise ValueError(
                f"key_file is {key_file} but no plan has release=True; leave it out, a "
                "simulation's noise key derives from its seed"
            )
        return
    if len(plans) * len(seeds) != 1:
        raise ValueError(
            f"a release came with {len(plans)} plans and {len(seeds)} seeds; run one plan with "
            "one seed, since runs side by side share raw noise"
        )
    if key_file is None:
        raise ValueError("key_file is None for a release; name a file to keep its noise key in")
    if Path(key_file).is_dir():
        raise ValueError(f"key_file is {str(key_file)!r}; name a file to keep the noise key in")
    if checkpoint is not None:
        folder = Path(checkpoint).absolute().resolve()
        if folder in Path(key_file).absolute().resolve().parents:
            raise ValueError(
                f"key_file {key_file} lies inside checkpoint {checkpoint}; keep the key apart, "
                "checkpoints may be copied or shared"
            )


def check_device(plans: Sequence[Plan], devices: Any) -> None:
    """Check that a release runs where its sums are as exact, and as repeatable, as is stated.

    XLA reads XLA_FLAGS once, when it starts. Flags that Python sets later are seen here, without
    being in force, and no public interface tells: set them before Python starts.

    Args:
        plans: The plans.
        devices: To spread the agents over, or None.

    Raises:
        ValueError: For a release on neither a CPU nor a GPU, under flags that let compiled code
            take nan for a number, or on a GPU without deterministic operations.
    """
    if not any(plan.config.release for plan in plans):
        return
    mesh = sharding.agent_mesh(plans[0].agents, devices)
    used = [*jnp.zeros(()).devices(), *(() if mesh is None else mesh.devices.flat)]
    platforms = sorted({device.platform for device in used})
    for platform in platforms:
        if platform not in ("cpu", "gpu"):
            raise ValueError(
                f"release is True on a {platform}, whose float64 is not known to be as fine as "
                "2^-53; run releases on a CPU or a GPU"
            )
    flags = _flags()
    for name, on in flags.items():
        if on and "enable_fast_" in name:
            raise ValueError(
                f"release is True with {name} in XLA_FLAGS, under which nan may pass for a number "
                "and a gradient be longer than its clip norm; leave it out before Python starts"
            )
    name = "--xla_gpu_deterministic_ops"
    if "gpu" in platforms and not flags.get(name, False):
        raise ValueError(
            "release is True on a gpu, whose sums differ from one time to the next; set "
            f"XLA_FLAGS={name}=true before Python starts, since XLA reads it once"
        )


def _flags() -> dict[str, bool]:
    """XLA's flags by name, whether they are on; the last one counts."""
    text = os.environ.get("XLA_FLAGS", "")
    if text and text[0] != "-" and not text[0].isspace():  # The name of a file, as XLA reads it.
        text = Path(text).read_text() if Path(text).is_file() else ""
    pairs = (word.partition("=") for word in shlex.split(text))
    return {name: not equal or on.lower() in ("true", "1") for name, equal, on in pairs}


def check_options(checkpoint_seconds: Any, progress: Any, callback: Any) -> None:
    """Check what a run does beside its rounds.

    Args:
        checkpoint_seconds: At least 0, infinity included.
        progress: True or False.
        callback: Something to call, or None.

    Raises:
        ValueError: For anything else.
    """
    remedy = "give seconds of at least 0, or math.inf for the last state alone"
    forever = isinstance(checkpoint_seconds, float) and checkpoint_seconds == math.inf
    if (
        not forever
        and _validate.number("checkpoint_seconds", checkpoint_seconds, remedy=remedy) < 0
    ):
        raise ValueError(f"checkpoint_seconds is {checkpoint_seconds!r}; {remedy}")
    _validate.flag("progress", progress)
    if callback is not None and not callable(callback):
        raise ValueError(f"callback is {callback!r}; give a function of Progress, or None")


def check_transport(
    transport: Any, plans: Sequence[Plan], seeds: Sequence[int], devices: Any, checkpoint: Any
) -> None:
    """Check that a run whose messages cross a network is one run, and a release is kept.

    Args:
        transport: What carries messages, or None.
        plans: The plans.
        seeds: The seeds.
        devices: To spread the agents over, or None.
        checkpoint: Folder, or None.

    Raises:
        ValueError: Naming what does not fit.
    """
    if transport is None:
        return
    if not callable(transport):
        raise ValueError(
            f"transport is {_validate.shown(transport)}; give a function of a message and a round"
        )
    if len(plans) * len(seeds) != 1:
        raise ValueError(
            f"transport came with {len(plans)} plans and {len(seeds)} seeds; run one plan with one "
            "seed, since a network carries the messages of one run"
        )
    if devices is not None:
        raise ValueError(
            f"devices is {devices} with a transport, which gets all messages here; leave it out"
        )
    if plans[0].config.protect.gradients == "view":
        raise ValueError(
            "transport came with gradients 'view', whose loss is that of the method's own exchange "
            "alone; protect gradients of 'any' kind, or leave it out"
        )
    if plans[0].config.release and checkpoint is None:
        raise ValueError(
            "checkpoint is None for a release over a transport; name a folder: begun again without "
            "its state, the run would send noise again with another payload"
        )
    least, opened = fewest(plans[0]), getattr(transport, "min_survivors", None)
    if opened is not None and opened < least:
        raise ValueError(
            f"transport opens sums of {opened} of {plans[0].agents} agents, and the plan's noise "
            f"is for sums of {least} or more; give one that aborts earlier, or a plan with "
            f"dropouts={plans[0].agents - opened}"
        )
    most, defended = plans[0].guarantee.colluders, getattr(transport, "colluders", None)
    if most and defended is None:
        raise ValueError(
            f"transport says no colluders, and the plan's noise is for {most}: give the SecureSums "
            "itself; one of your own has an attribute colluders, the number of clients whose "
            "knowledge the server may have while it opens no single message, which is your word"
        )
    if defended is not None and _validate.integer("colluders", defended, least=0) < most:
        raise ValueError(
            f"transport has terms for {defended} colluders, and the plan's noise is for {most}: "
            "the server could open single messages with the others' help; give "
            f"transport.terms_of(plan.noise.code, colluders={most}, dropouts=...)"
        )


def fewest(plan: Plan) -> int:
    """Agents in a sum that a plan's exchange opens, at least: what its noise is for.

    Args:
        plan: The plan of a run.

    Returns:
        0 for an exchange that is no sum, or whose parts anybody may see.
    """
    aggregate: Any = getattr(plan.method.exchange, "aggregate", None)
    sealed = getattr(aggregate, "sealed", False) and hasattr(aggregate, "least")
    return aggregate.least(plan.agents) if sealed else 0


def check_delivered(said: str, received: Any, wanted: Any) -> None:
    """Refuse what an exchange does not deliver.

    Args:
        said: What came, for messages.
        received: What came of a round, numpy leaves or jax's.
        wanted: Shapes and dtypes of what the method's exchange delivers.

    Raises:
        ValueError: For other shapes, dtypes or trees.
    """

    def told(leaf: Any) -> str:
        leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        return f"{leaf.dtype}{list(leaf.shape)}"

    given, expected = (jax.tree.map(told, tree) for tree in (received, wanted))
    if given != expected:
        raise ValueError(f"{said} {given}, the method's exchange delivers {expected}; give that")


def _check_path(name: str, value: Any, remedy: str) -> None:
    if value is None:
        return
    if not isinstance(value, str | os.PathLike) or not str(value).strip() or "\0" in str(value):
        raise ValueError(f"{name} is {_validate.shown(value)}; {remedy}")
    try:
        Path(value).is_dir()
    except OSError as error:
        raise ValueError(f"{name} {value} cannot be used ({error.strerror}); {remedy}") from None


def check_phase(plans: Sequence[Plan], phase: Any, start: Any, spent: Any) -> int:
    """Check a run that carries on: what was spent before must compose with what it will spend.

    Args:
        plans: The plans.
        phase: Number of this run among several in a row.
        start: Parameters to start from, or None.
        spent: One guarantee a plan, or None.

    Returns:
        The phase.

    Raises:
        ValueError: Naming what does not fit.
    """
    phase = _validate.integer("phase", phase, least=0, most=2**31 - 1)
    if (start is not None) != (phase > 0) or (start is not None) != (spent is not None):
        raise ValueError(
            f"phase is {phase}, start is {'given' if start is not None else 'None'} and spent is "
            f"{'given' if spent is not None else 'None'}; a run that carries on has a start, a "
            "phase above 0, which keeps it from repeating noise, and what was spent before"
        )
    if spent is None:
        return phase
    if not isinstance(spent, list | tuple) or len(spent) != len(plans):
        count = len(spent) if isinstance(spent, list | tuple) else type(spent).__name__
        raise ValueError(
            f"spent is {count} for {len(plans)} plans; give one guarantee a plan, the guarantees "
            "of the earlier phase's result"
        )
    for place, (before, plan) in enumerate(zip(spent, plans, strict=True)):
        if not isinstance(before, Guarantee):
            raise ValueError(f"spent[{place}] is {type(before).__name__}; give a Guarantee")
        # Older records do not say their number.
        least = max(before.phase + 1, len(before.phases))
        if phase < least and not plan.config.release:
            raise ValueError(
                f"phase is {phase} and spent[{place}] has had phases up to {least - 1}, whose "
                f"noise a simulation would draw again from one seed; give {least} or more"
            )
        if before.phases:  # Under a total the rounds that are done count, `plans.endings`.
            continue
        try:
            before.followed_by(plan.guarantee, planned=True)
        except ValueError as error:
            raise ValueError(
                f"spent[{place}] does not compose with the plan's guarantee: {error}"
            ) from None
    return phase


def starting(start: Any, models: Any, plans: int, agents: int) -> Any:
    """Return the given parameters, copied, if they fit the problem's.

    Args:
        start: Leaves [S, V, n, ...].
        models: The problem's parameters of one agent, leaves [S, ...].
        plans: V.
        agents: n.

    Raises:
        ValueError: For other shapes, or entries that are not finite.
    """
    wanted = jax.tree.map(lambda leaf: (leaf.shape[0], plans, agents, *leaf.shape[1:]), models)
    try:
        shapes = jax.tree.map(np.shape, start)
    except (TypeError, ValueError) as error:
        raise ValueError(f"start is no pytree of arrays ({error}); give one a run") from None
    if wanted != shapes:
        raise ValueError(f"start has shapes {shapes}, this run's models {wanted}; give one a run")
    for leaf in jax.tree.leaves(start):
        _validate.finite_array("start", leaf)
    return jax.tree.map(lambda leaf, model: jnp.array(leaf, model.dtype), start, models)


def check_dtypes(models: Any) -> None:
    """Refuse narrow parameters where what is private is rounded before the noise.

    Sums of clipped records are, and models that are sent themselves.

    Args:
        models: The problem's parameters.

    Raises:
        ValueError: Naming the first such leaf.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(models):
        if jnp.finfo(leaf.dtype).bits < 32:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} are {leaf.dtype}; the sum of clipped records, "
                "or the model that is sent, is rounded to that before the noise, which moves it "
                "further than stated. Use float32 parameters with per-record relations, and with "
                "methods that send models"
            )
