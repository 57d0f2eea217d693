"""Run plans on a problem: seeds, progress, callbacks, checkpoints, resume, early stop."""

import contextlib
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from tqdm import tqdm

import dpjax
from dpjax import _validate
from dpjax.accounting.guarantee import Guarantee
from dpjax.algorithms.base import State
from dpjax.engine import forecasts, keys, placing, program, sharding
from dpjax.engine.checkpoint import Checkpoints
from dpjax.engine.plan import Plan, statics
from dpjax.engine.problem import Problem
from dpjax.transforms.noise import NoiseState

__all__ = ["Progress", "Result", "run"]


class Progress(NamedTuple):
    """What a callback sees at a chunk's end: metrics only, never data, models or keys.

    Attributes:
        round: Rounds done.
        metrics: name -> [S, V], the latest.
        guarantees: What each of the V plans has spent so far.
        rounds_per_second: One seed's round of one plan counts one; this process only.
    """

    round: int
    metrics: dict[str, np.ndarray]
    guarantees: tuple[Guarantee, ...]
    rounds_per_second: float


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What a run leaves.

    Attributes:
        plans: The V plans.
        seeds: The S seeds.
        rounds: [E] rounds at which metrics were taken.
        metrics: name -> [E, S, V].
        guarantees: What each plan has spent, which is less than planned after an early stop.
        params: Final agent-stacked parameters, leaves [S, V, n, ...].
        seconds: Time in the compiled loop, this process only, compilation included.
        rounds_per_second: One seed's round of one plan counts one; the first chunk, which
            compiles, is left out where there is a second one.
        ended: False when a callback stopped the run.
    """

    plans: tuple[Plan, ...]
    seeds: tuple[int, ...]
    rounds: np.ndarray
    metrics: dict[str, np.ndarray]
    guarantees: tuple[Guarantee, ...]
    params: Any
    seconds: float
    rounds_per_second: float
    ended: bool

    def __repr__(self) -> str:
        """One line: how many runs, how far, which metrics."""
        return (
            f"Result({len(self.plans)} plans, {len(self.seeds)} seeds, {self.rounds[-1]} rounds, "
            f"metrics {', '.join(self.metrics)})"
        )

    def rows(self, **extra: Any) -> list[dict[str, Any]]:
        """Tidy rows, one for each plan, seed and measured round.

        Args:
            extra: Columns to add to every row.

        Returns:
            Rows of plain Python values.
        """
        rows = []
        for v, plan in enumerate(self.plans):
            config = plan.config
            private = config.design != "non_private"
            shared = {
                **extra,
                "algorithm": config.design,
                "agents": plan.agents,
                "epsilon": plan.guarantee.epsilon,
                "delta": config.delta if private else 0.0,
                "budget": config.accountant if private else "none",
                "relation": config.relation,
                "unit": config.unit,
                "step_size": config.step_size,
                "guarantee": self.guarantees[v].to_dict(),
            }
            for s, seed in enumerate(self.seeds):
                for e, rounds in enumerate(self.rounds):
                    taken = {name: float(value[e, s, v]) for name, value in self.metrics.items()}
                    rows.append({**shared, "seed": seed, "round": int(rounds), **taken})
        return rows


def run(
    plans: Plan | Sequence[Plan],
    problem: Problem | Sequence[Problem],
    *,
    seeds: Sequence[int],
    eval_every: int | None = None,
    chunk_blocks: int = 1,
    devices: int | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_seconds: float = 20.0,
    key_file: str | os.PathLike | None = None,
    progress: bool = False,
    callback: Callable[[Progress], bool | None] | None = None,
    start: Any = None,
    phase: int = 0,
    spent: Sequence[Guarantee] | None = None,
) -> Result:
    """Run every plan with every seed, in one compiled call a chunk.

    Guarantee: each plan's own, for each of its runs alone. Plans and seeds run together are
    simulations: with one seed all plans share batches and raw normals, so their messages must not
    be published together. A release (``config.release``) is one plan and one seed; its noise key
    comes from the operating system, lives in ``key_file`` and is deleted when the run ends.
    Metrics and the callback's values are computed on unprotected data and are not private.

    Args:
        plans: One plan, or several that share rounds, clip norm, batch size and unit.
        problem: Model, data and metrics; or several, one a seed, that differ in their data alone
            (say, in how it is split), each array of the same shape.
        seeds: Seeds; initial models and batches derive from them, in simulations the noise too.
        eval_every: Rounds between metrics; None is a twentieth of the rounds. The last round is
            always measured.
        chunk_blocks: How many such blocks run in one call; callbacks and checkpoints come between.
        devices: Spread the agents over this many devices; must divide n.
        checkpoint: Folder to save to and resume from; None keeps nothing.
        checkpoint_seconds: Least time between two checkpoints; the last state is always saved.
        key_file: Where a release keeps its noise key; mode 0600, not inside ``checkpoint``.
        progress: Show a progress bar with rounds/s and the time left.
        callback: Called with `Progress` at every chunk's end; True stops the run.
        start: Parameters to start from, leaves [S, V, n, ...] as in `Result.params`, in place of
            the problem's; when a run carries on after an agent has left, say.
        phase: Number of this run among several in a row, above 0 where ``start`` is given: each
            phase has noise and batches of its own.
        spent: What the earlier phases have spent, one guarantee a plan (`Result.guarantees`);
            needed with ``start``. The result states both together: mu^2 adds up.

    Returns:
        Metrics, final models and what was spent. A run that is resumed continues to the same
        bits on the same platform and build.

    Raises:
        ValueError: For plans that cannot run together or do not fit the problem, a device count
            that does not divide n, a checkpoint or key file of another run.

    Warns:
        HopelessWarning: Before the first round, where a plan's noise leaves nothing to learn
            (`dpjax.engine.forecasts`).
    """
    plans = (plans,) if isinstance(plans, Plan) else tuple(plans)
    shared = statics(plans)
    problems = tuple(problem) if isinstance(problem, list | tuple) else (problem,)
    seeds = _check(plans, problems, seeds, checkpoint, key_file)
    task = problems[0]
    mesh = sharding.agent_mesh(task.agents, devices)
    total = shared["rounds"]
    if eval_every is None:
        eval_every = max(1, total // 20)
    every = min(_validate.integer("eval_every", eval_every), total)
    chunk_blocks = _validate.integer("chunk_blocks", chunk_blocks)
    marks = np.append(np.arange(every, total, every), total)

    record = shared["unit"] == "record"
    by_norms = record and task.weighted is not None and shared["microbatch"] is None
    settings = program.Settings(
        loss=task.loss,
        batch_loss=task.batch_loss,
        metrics=task.metrics,
        rounds=total,
        clip_norm=shared["clip_norm"],
        batch_size=shared["batch_size"],
        step_decay=shared["step_decay"],
        clipping=shared["clipping"],
        microbatch=shared["microbatch"],
        unit=shared["unit"],
        mesh=mesh,
        separation=shared["separation"],
        strategy=None if plans[0].strategy is None else program.Strategy(plans[0].strategy),
        noisy=any(plan.config.design != "non_private" for plan in plans),
        weighted=task.weighted if by_norms else None,
        sequential=record and not by_norms and jax.default_backend() == "cpu",
        own_data=len(problems) > 1,
    )
    arrays, data = placing.arrays(plans, mesh), placing.data(problems, mesh)
    phase = _validate.integer("phase", phase, least=0)
    if phase >= 2**31:
        raise ValueError(f"phase is {phase}; give a number below 2**31")
    if (start is not None) != (phase > 0) or (start is not None) != (spent is not None):
        raise ValueError(
            f"phase is {phase}, start is {'given' if start is not None else 'None'} and spent is "
            f"{'given' if spent is not None else 'None'}; a run that carries on has a start, a "
            "phase above 0, which keeps it from repeating noise, and what was spent before"
        )
    models = jax.vmap(task.init)(_stack([keys.derive(seed, "initial") for seed in seeds]))
    batch_keys = _stack([keys.derive(seed, "batches", phase) for seed in seeds])
    one = jax.tree.map(lambda leaf: leaf[0], models)
    expected = forecasts.tell(plans, forecasts.entries(one), task.partition.counts)
    if progress and expected:
        print(expected, file=sys.stderr)
    if start is not None:
        start = _starting(start, models, len(plans), task.agents)
    if settings.unit == "record":
        _check_dtypes(models)
    identity = _identity(
        plans, problems, seeds, (every, chunk_blocks, phase), (models, start), mesh
    )
    text = program.gradient_text(settings, arrays, data, models)
    identity["model and loss"] = hashlib.sha256(text.encode()).hexdigest()
    store = Checkpoints(checkpoint, identity) if checkpoint is not None else None
    noise_keys = _noise_keys(plans, seeds, identity, key_file, store, phase)
    state = program.initial(settings, arrays, models, noise_keys)
    params = state.params if start is None else start
    state = state._replace(params=sharding.place(params, mesh, 2))
    names = program.metric_names(settings, data, state)
    taken = {name: np.full((len(marks), len(seeds), len(plans)), np.nan) for name in names}
    done, ended = 0, False
    if store is not None and (restored := store.restore(_portable(state, taken))) is not None:
        done, (portable, taken), ended = restored
        state = _adopt(portable, state, mesh)
        if settings.strategy is not None and not ended:
            state = program.replay(settings, arrays, state, jnp.int32(done))
    elif store is not None and plans[0].config.release:
        # Before anything is sent: from here on, losing the key is noticed.
        store.save(0, _portable(state, taken), ended=False)

    meter = _Meter(len(plans) * len(seeds))
    saved_at = time.monotonic()
    with tqdm(
        total=total, initial=done, disable=not progress, unit=" rounds", desc=meter.title,
        smoothing=0, mininterval=0.5 if sys.stderr.isatty() else 30,
    ) as bar:  # fmt: skip
        while not ended:
            blocks = min(chunk_blocks, (total - done) // every)
            # Whole chunks, then one shorter chunk with the rest: two compilations at most.
            tail = 0 if blocks == chunk_blocks else total - done - blocks * every
            length = blocks * every + tail
            with meter.chunk(length):
                state, new = program.advance(
                    settings, arrays, data, state, batch_keys, noise_keys,
                    blocks=blocks, every=every, tail=tail,
                )  # fmt: skip
                new = jax.device_get(new)
            inside = (marks > done) & (marks <= done + length)
            for name, value in new.items():
                taken[name][inside] = value
            done += length
            bar.update(length)
            if progress and meter.chunks == 1:
                # The rate and the time left are of what is still to come, which is compiled.
                bar.start_t, bar.initial = bar.last_print_t, done
            ended = done == total
            if callback is not None:
                latest = {name: value[inside][-1].copy() for name, value in taken.items()}
                seen = Progress(done, latest, _spent(plans, done, spent), meter.rate)
                ended = bool(callback(seen)) or ended
            if store is not None and (ended or time.monotonic() - saved_at >= checkpoint_seconds):
                store.save(done, _portable(state, taken), ended=ended)
                saved_at = time.monotonic()
    if store is not None:
        store.close()
    if key_file is not None:
        keys.delete_key_file(key_file)
    keep = marks <= done
    return Result(
        plans=plans,
        seeds=seeds,
        rounds=marks[keep],
        metrics={name: value[keep] for name, value in taken.items()},
        guarantees=_spent(plans, done, spent),
        params=jax.device_get(state.params),
        seconds=meter.seconds,
        rounds_per_second=meter.rate,
        ended=done == total,
    )


def _spent(
    plans: tuple[Plan, ...], done: int, before: Sequence[Guarantee] | None
) -> tuple[Guarantee, ...]:
    """What the plans have spent: exact after a part of the rounds, as planned after all."""
    now = [
        plan.guarantee if done == plan.config.rounds else plan.guarantee.after(done)
        for plan in plans
    ]
    if before is None:
        return tuple(now)
    return tuple(first.followed_by(second) for first, second in zip(before, now, strict=True))


_SETTINGS = (
    "jax_enable_x64", "jax_threefry_partitionable", "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)  # fmt: skip
"""Settings that change random bits or gradients."""


def _processor() -> str:
    """The processor's model, where the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


class _Meter:
    """Times chunks; the first one compiles and leaves the rate once there is another."""

    def __init__(self, runs: int):
        self.runs = runs
        self.title = f"{runs} run{'s' if runs > 1 else ''}"
        self.seconds = 0.0
        self._chunks: list[tuple[int, float]] = []

    @contextlib.contextmanager
    def chunk(self, length: int) -> Iterator[None]:
        """Time one chunk of ``length`` rounds."""
        began = time.monotonic()
        yield
        self._chunks.append((length, time.monotonic() - began))
        self.seconds += self._chunks[-1][1]

    @property
    def chunks(self) -> int:
        """Chunks done in this process."""
        return len(self._chunks)

    @property
    def rate(self) -> float:
        """Rounds per second over all runs; nan before the first chunk."""
        chunks = self._chunks[1:] or self._chunks
        seconds = sum(spent for _, spent in chunks)
        return self.runs * sum(length for length, _ in chunks) / seconds if chunks else np.nan


def _check(
    plans: tuple[Plan, ...],
    problems: tuple[Problem, ...],
    seeds: Sequence[int],
    checkpoint: Any,
    key_file: Any,
) -> tuple[int, ...]:
    """Check that plans, problem and storage fit, before any work."""
    if not isinstance(seeds, Iterable):
        raise ValueError(f"seeds is {seeds!r}; give a sequence of whole numbers, such as [0]")
    seeds = tuple(_validate.integer("seeds", seed, least=0) for seed in seeds)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds is {seeds}; give at least one, each once")
    placing.check(plans, problems, len(seeds))
    releases = [plan for plan in plans if plan.config.release]
    if not releases:
        if key_file is not None:
            raise ValueError(
                f"key_file is {key_file} but no plan has release=True; leave it out, a "
                "simulation's noise key derives from its seed"
            )
        return seeds
    if len(plans) * len(seeds) != 1:
        raise ValueError(
            f"a release came with {len(plans)} plans and {len(seeds)} seeds; run one plan with "
            "one seed, since runs side by side share raw noise"
        )
    if key_file is None:
        raise ValueError("key_file is None for a release; name a file to keep its noise key in")
    if not str(key_file) or Path(key_file).is_dir():
        raise ValueError(f"key_file is {str(key_file)!r}; name a file to keep the noise key in")
    if checkpoint is not None:
        folder = Path(checkpoint).absolute().resolve()
        if folder in Path(key_file).absolute().resolve().parents:
            raise ValueError(
                f"key_file {key_file} lies inside checkpoint {checkpoint}; keep the key apart, "
                "checkpoints may be copied or shared"
            )
    return seeds


def _stack(tree: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *tree)


def _identity(
    plans: tuple[Plan, ...],
    problems: tuple[Problem, ...],
    seeds: tuple[int, ...],
    chunks: tuple[int, ...],
    start: Any,
    mesh: Any,
) -> dict[str, str]:
    """What a run is; resuming needs all of it unchanged for the same bits, and the same noise."""
    device = jax.devices()[0]
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(start):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode() + np.asarray(leaf).tobytes())
    return {
        "plans": hashlib.sha256("".join(p.fingerprint() for p in plans).encode()).hexdigest(),
        "data": " ".join(problem.fingerprint() for problem in problems),
        "initial models": digest.hexdigest(),
        "seeds": str(seeds),
        "chunks": str(chunks),
        "devices": f"{device.device_kind} x {1 if mesh is None else mesh.size}, {_processor()}",
        "software": f"dpjax {dpjax.__version__}, jax {jax.__version__}, "
        f"jaxlib {jaxlib.__version__}",
        "settings": ", ".join(f"{name} {getattr(jax.config, name)}" for name in _SETTINGS)
        + f", XLA_FLAGS {os.environ.get('XLA_FLAGS', '')}",
    }


def _noise_keys(
    plans: tuple[Plan, ...],
    seeds: tuple[int, ...],
    identity: dict[str, str],
    key_file: Any,
    store: Checkpoints | None,
    phase: int,
) -> Any:
    """The noise key of each seed: derived in a simulation, secret in a release."""
    if not plans[0].config.release:
        return _stack([keys.derive(seed, "noise", phase) for seed in seeds])
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    begun, ended = (False, False) if store is None else store.status()
    if ended:
        return _stack([keys.spent_key()])
    if begun or Path(key_file).exists():
        return _stack([keys.read_key_file(key_file, fingerprint)])
    return _stack([keys.create_key_file(key_file, fingerprint)])


def _starting(start: Any, models: Any, plans: int, agents: int) -> Any:
    """The given parameters, copied, if they fit the problem's."""
    wanted = jax.tree.map(lambda leaf: (leaf.shape[0], plans, agents, *leaf.shape[1:]), models)
    given = jax.tree.map(jnp.shape, start)
    if wanted != given:
        raise ValueError(f"start has shapes {given}, this run's models {wanted}; give one a run")
    for leaf in jax.tree.leaves(start):
        _validate.finite_array("start", leaf)
    return jax.tree.map(lambda leaf, model: jnp.array(leaf, model.dtype), start, models)


def _check_dtypes(models: Any) -> None:
    """Refuse narrow parameters for the record unit, whose sum is rounded before the noise."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(models):
        if jnp.finfo(leaf.dtype).bits < 32:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} are {leaf.dtype}; the sum of clipped records "
                "is rounded to that before the noise, which moves it further than stated. Use "
                "float32 parameters with per-record relations"
            )


def _is_noise(leaf: Any) -> bool:
    return isinstance(leaf, NoiseState)


def _portable(state: State, taken: dict[str, np.ndarray]) -> Any:
    """The state without noise or its keys, and the metrics: what a checkpoint may hold."""

    def of_leaf(leaf: Any) -> Any:
        # Past noise would give later rounds' away; it follows from the key, see program.replay.
        return leaf.round if _is_noise(leaf) else leaf

    return jax.device_get(jax.tree.map(of_leaf, state, is_leaf=_is_noise)), taken


def _adopt(portable: State, state: State, mesh: Any) -> State:
    """Put a checkpoint's values into a fresh state, which has the keys."""
    values = iter(jax.tree.leaves(portable))

    def of_leaf(leaf: Any) -> Any:
        value = jnp.asarray(next(values))
        return leaf._replace(round=value) if _is_noise(leaf) else value

    state = jax.tree.map(of_leaf, state, is_leaf=_is_noise)
    state = jax.tree.map(jnp.asarray, state)
    return state._replace(params=sharding.place(state.params, mesh, 2))
