"""Run plans on a problem: seeds, progress, callbacks, checkpoints, resume, early stop."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dpjax import _validate
from dpjax.accounting.guarantee import Guarantee
from dpjax.engine import arguments, keys, placing, program, sharding
from dpjax.engine import identity as identity_
from dpjax.engine.checkpoint import Checkpoints, unfinished
from dpjax.plans import forecasts, releases
from dpjax.plans.plan import Plan, Statics, shared
from dpjax.plans.problem import Problem
from dpjax.plans.query import AgentQuery, RecordQuery
from dpjax.plans.stated import Stopping, check_stop_at, stated
from dpjax.protocols import State

__all__ = ["Progress", "Result", "run"]


class Progress(NamedTuple):
    """What a callback sees at a chunk's end: metrics only, never data, models or keys.

    Attributes:
        round: Rounds done.
        metrics: name -> [S, V], the latest.
        guarantees: What each of the V plans states if the run ends here because of it, see
            ``stopping`` of `run`.
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
        guarantees: What each plan states: its own guarantee, also after an early stop, which
            anything seen on the way may have decided; less only where the rounds were fixed
            beforehand (``stop_at``) or a curve over marks was (``stopping="curve"``).
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
            extra: Columns to add to every row; ``algorithm`` takes the place of the design's name.

        Returns:
            Rows of plain Python values.

        Raises:
            ValueError: For a column that the result states itself, or one ``algorithm`` for plans
                of several designs.
        """
        rows = []
        if "algorithm" in extra and len({plan.config.label for plan in self.plans}) > 1:
            raise ValueError(
                f"algorithm is {extra['algorithm']!r} for plans of several designs, which it would "
                "not tell apart; leave it out"
            )
        for v, plan in enumerate(self.plans):
            config, budget = plan.config, plan.config.budget
            columns = {
                "algorithm": config.label,
                "agents": plan.agents,
                # Several phases together, and a curve's last numbers, are above the plan's.
                "epsilon": max(plan.guarantee.epsilon, self.guarantees[v].epsilon),
                "delta": 0.0 if budget is None else budget.delta,
                "budget": "none" if budget is None else budget.accountant,
                "relation": config.protect.relation,
                "unit": config.protect.unit,
                "step_size": config.optimizer.first,
                "guarantee": self.guarantees[v].to_dict(),
            }
            own = [*columns, "seed", "round", *self.metrics]
            for name in extra:
                if name in own and name != "algorithm":
                    raise ValueError(
                        f"{name} is {extra[name]!r}, a column that the result states itself; give "
                        "it another name"
                    )
            columns = {**extra, **columns, "algorithm": extra.get("algorithm", config.label)}
            for s, seed in enumerate(self.seeds):
                for e, rounds in enumerate(self.rounds):
                    taken = {name: float(value[e, s, v]) for name, value in self.metrics.items()}
                    rows.append({**columns, "seed": seed, "round": int(rounds), **taken})
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
    planned: bool = False,
    stop_at: int | None = None,
    stopping: Stopping = "plan",
) -> Result:
    """Run every plan with every seed, in one compiled call a chunk.

    Guarantee: each plan's own, for each of its runs alone. Plans and seeds run together are
    simulations: with one seed all plans share batches and raw normals, so their messages must not
    be published together. A release (``config.release``) is one plan and one seed; its noise key
    comes from the operating system, lives in ``key_file`` and is deleted when the run ends.
    Metrics and the callback's values are computed on unprotected data and are not private.

    A run that a callback stopped states its plan's whole guarantee: where it stopped may depend on
    all that was released, and the first rounds' smaller loss is theirs only if their number was
    fixed before. The result says so where the metrics that the callback read come from private
    data (`Problem.evaluation_data`): then the stopping round itself is outside the guarantee, also
    where a callback that answers True or False let the run end by itself.

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
        callback: Called with `Progress` at every chunk's end; True stops the run. One that only
            watches returns None.
        start: Parameters to start from, leaves [S, V, n, ...] as in `Result.params`, in place of
            the problem's; when a run carries on after an agent has left, say.
        phase: Number of this run among several in a row, above 0 where ``start`` is given: each
            phase has noise and batches of its own. That no number is given twice with one seed
            is the caller's to see to: such phases would repeat noise, in a simulation. A release
            draws a key of its own for every run, whatever its phase.
        spent: What the earlier phases have spent, one guarantee a plan (`Result.guarantees`);
            needed with ``start``. The result states both together: mu^2 adds up.
        planned: True where this phase, its length and its noise were fixed before the first one
            began; needed with ``start``. A phase added because of what was released is not covered
            by the two together.
        stop_at: Rounds to do, fixed before the run, in place of all; states what so many rounds
            spend. A checkpoint or key file of another number is refused.
        stopping: What a run states that its callback stops: "plan", the plan's whole guarantee; or
            "curve", numbers that hold at whichever chunk's end it stops, smaller at the first ones
            and larger at the last (`dpjax.accounting.stopping`).

    Returns:
        Metrics, final models and what was spent. A run that is resumed continues to the same
        bits on the same platform and build.

    Raises:
        ValueError: For plans that cannot run together or do not fit the problem, a device count
            that does not divide n, a checkpoint or key file of another run.

    Warns:
        HopelessWarning: Before the first round, where a plan's noise leaves nothing to learn
            (`dpjax.plans.forecasts`).
    """
    plans, problems, seeds = arguments.check(plans, problem, seeds)
    arguments.check_storage(plans, seeds, checkpoint, key_file)
    arguments.check_options(checkpoint_seconds, progress, callback)
    together = shared(plans)
    task = problems[0]
    mesh = sharding.agent_mesh(task.agents, devices)
    total = check_stop_at(stop_at, together.rounds)
    if eval_every is None:
        eval_every = max(1, total // 20)
    every = min(_validate.integer("eval_every", eval_every), total)
    chunk_blocks = _validate.integer("chunk_blocks", chunk_blocks)
    phase = arguments.check_phase(plans, phase, start, spent)
    marks = np.append(np.arange(every, total, every), total)
    ends = [*range(every * chunk_blocks, total, every * chunk_blocks), total]
    private = any(one.evaluation_data == "private" for one in problems)

    statics = _statics(together, problems, mesh)
    arrays, data = placing.arrays(plans, mesh), placing.data(problems, mesh)
    models = jax.vmap(task.init)(_stack([keys.derive(seed, "initial") for seed in seeds]))
    batch_keys = _stack([keys.derive(seed, "batches", phase) for seed in seeds])
    if start is not None:
        start = arguments.starting(start, models, len(plans), task.agents)
    if together.unit == "record":
        arguments.check_dtypes(models)
    one = jax.tree.map(lambda leaf: leaf[0], models)
    # Only here is known how many numbers a release draws; nothing has been sent yet.
    plans = tuple(releases.priced(plan, forecasts.entries(one)) for plan in plans)
    states = stated(
        plans, ends, stopping=stopping, callback=callback is not None, before=spent, planned=planned
    )
    expected = forecasts.tell(plans, forecasts.entries(one), task.partition.counts)
    if progress and expected:
        print(expected, file=sys.stderr)
    identity = {}
    if checkpoint is not None or key_file is not None:
        # The keys of the noise are arguments of the program, so that any will do. Arrays and not
        # shapes: a release keeps past noise in float64, which shapes are traced without.
        state = program.initial(statics, arrays, models, batch_keys)
        # Every chunk's length now, before a callback may change what the model closes over: the
        # calls below find what was traced here.
        traced = [
            program.advance.trace(statics, arrays, data, state, batch_keys, batch_keys, **lengths)
            for lengths in _variants(total, every, chunk_blocks)
        ]
        del state
        identity = identity_.of_run(
            plans,
            problems,
            seeds,
            {
                "eval_every": every,
                "chunk_blocks": chunk_blocks,
                "phase": phase,
                "stop_at": total,
                "stopping": stopping,
            },  # fmt: skip
            (models, start),
            identity_.computation(traced, release=plans[0].config.release),
            1 if mesh is None else mesh.size,
        )
    store = Checkpoints(checkpoint, identity) if checkpoint is not None else None
    noise_keys = _noise_keys(plans, seeds, identity, key_file, store, phase)
    state = program.initial(statics, arrays, models, noise_keys)
    begun = state.models if start is None else start
    state = state._replace(models=sharding.place(begun, mesh, 2))
    names = program.metric_names(statics, data, state)
    taken = {name: np.full((len(marks), len(seeds), len(plans)), np.nan) for name in names}
    done, ended, decided = 0, False, False
    if store is not None and (restored := store.restore(_portable(state, taken))) is not None:
        done, (portable, taken), ended = restored
        # What the callback answered before is not known, but whether there was one.
        decided = ended and (callback is not None or done < total)
        state = _adopt(portable, state, mesh)
        if program.keeps_noise(state) and not ended:
            state = program.replay(statics, arrays, state, noise_keys, jnp.int32(done))
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
            lengths = _lengths(total - done, every, chunk_blocks)
            length = lengths["blocks"] * every + lengths["tail"]
            with meter.chunk(length):
                state, new = program.advance(
                    statics, arrays, data, state, batch_keys, noise_keys, **lengths
                )
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
                would = states.at(done, private_stop=private)
                answer = callback(Progress(done, latest, would, meter.rate))
                decided = decided or answer is not None
                ended = bool(answer) or ended
            if store is not None and (ended or time.monotonic() - saved_at >= checkpoint_seconds):
                store.save(done, _portable(state, taken), ended=ended)
                saved_at = time.monotonic()
    if store is not None:
        store.close()
    if key_file is not None:
        keys.delete_key_file(key_file, identity_.fingerprint(identity))
    keep = marks <= done
    return Result(
        plans=plans,
        seeds=seeds,
        rounds=marks[keep],
        metrics={name: value[keep] for name, value in taken.items()},
        guarantees=states.at(done, private_stop=private and decided),
        params=jax.device_get(state.models),
        seconds=meter.seconds,
        rounds_per_second=meter.rate,
        ended=done == total,
    )


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


def _statics(together: Statics, problems: tuple[Problem, ...], mesh: Any) -> program.Statics:
    """What all runs of the call share and one compilation is for."""
    task, record = problems[0], together.unit == "record"
    query: AgentQuery | RecordQuery
    if record:
        query = RecordQuery(
            task.loss, task.weighted, together.clip_norm, together.clipping, together.microbatch
        )
    else:
        query = AgentQuery(task.loss, task.batch_loss, together.clip_norm, together.clipping)
    return program.Statics(
        agents=together.agents,
        method=together.method,
        query=query,
        sampler=together.sampler,
        optimizer=together.optimizer,
        divisor=together.sampler.divisor if record else 1,
        privatizer=together.noise,
        metrics=task.metrics,
        mesh=mesh,
        sequential=query.one_by_one and jax.default_backend() == "cpu",
        own_data=len(problems) > 1,
    )


def _variants(total: int, every: int, chunk_blocks: int) -> list[dict[str, int]]:
    """The lengths of a run's chunks, whole and last, each once; resumed, a run has no others."""
    chunk = every * chunk_blocks
    lefts = {min(chunk, total), total % chunk} - {0}
    return [_lengths(left, every, chunk_blocks) for left in sorted(lefts)]


def _lengths(left: int, every: int, chunk_blocks: int) -> dict[str, int]:
    """The next call's blocks: whole chunks, then one shorter one, so two compilations at most."""
    blocks = min(chunk_blocks, left // every)
    tail = 0 if blocks == chunk_blocks else left - blocks * every
    return {"blocks": blocks, "every": every, "tail": tail}


def _stack(tree: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *tree)


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
    fingerprint = identity_.fingerprint(identity)
    begun, ended = (False, False) if store is None else store.status()
    if ended:
        return _stack([keys.spent_key()])
    folder = None if store is None else store.folder
    if not begun and not os.path.lexists(key_file):
        return _stack([keys.create_key_file(key_file, fingerprint, checkpoint=folder)])
    key, noted = (
        keys.read_key_file(key_file, fingerprint),
        keys.noted_checkpoint(key_file, fingerprint),
    )
    if not begun and noted not in (None, folder) and unfinished(noted, identity):
        raise ValueError(
            f"key_file {key_file} keeps the noise of a release whose checkpoint is {noted}; give "
            f"checkpoint={str(noted)!r} to carry on, or move that folder away to send all rounds "
            "again, with the same noise"
        )
    if folder is not None and folder != noted:
        keys.note_checkpoint(key_file, fingerprint, folder)
    return _stack([key])


def _portable(state: State, taken: dict[str, np.ndarray]) -> Any:
    """The state without its secret, and the metrics: what a checkpoint may hold."""
    # Past noise would give later rounds' away; it follows from the key, see program.replay.
    return jax.device_get((state.models, state.memory, state.round)), taken


def _adopt(portable: Any, state: State, mesh: Any) -> State:
    """Put a checkpoint's values into a fresh state, which has the keys."""
    models, memory, done = jax.tree.map(jnp.asarray, portable)

    def counted(leaf: Any) -> Any:
        # A copy: buffers are given to the program, and none twice.
        return jnp.array(done, leaf.dtype, copy=True) if program.is_counter(leaf) else leaf

    secret = jax.tree.map(counted, state.secret)
    return State(sharding.place(models, mesh, 2), memory, secret, done)
