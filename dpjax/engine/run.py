"""Run plans on a problem: seeds, progress, callbacks, checkpoints, resume, early stop."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dpjax.accounting.guarantee import Guarantee
from dpjax.engine import arguments, keys, placing, program, sharding
from dpjax.engine import identity as identity_
from dpjax.engine.checkpoint import Checkpoints, unfinished
from dpjax.engine.course import Course, Meter
from dpjax.engine.result import Progress, Result
from dpjax.plans import dependence, forecasts, registry, releases
from dpjax.plans.plan import Plan, Statics, shared
from dpjax.plans.problem import Problem
from dpjax.plans.stated import Stated, Stopping, stated
from dpjax.protocols import State

__all__ = ["Progress", "Result", "run"]


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
    course = Course.of(together.rounds, stop_at, eval_every, chunk_blocks)
    phase = arguments.check_phase(plans, phase, start, spent)
    job = _prepared(plans, problems, seeds, together, devices, phase)
    begun = job.start(start, len(plans))
    # Only here is known how many numbers a release draws; nothing has been sent yet.
    plans = tuple(releases.priced(plan, job.payload) for plan in plans)
    states = stated(
        plans, course.ends, stopping=stopping, callback=callback is not None, before=spent,
        planned=planned,
    )  # fmt: skip
    expected = forecasts.tell(plans, job.entries, problems[0].partition.counts)
    if progress and expected:
        print(expected, file=sys.stderr)
    identity = {}
    if checkpoint is not None or key_file is not None:
        identity = identity_.of_run(
            plans,
            problems,
            seeds,
            course.options(phase, stopping),
            # Without a start all agents' models follow from the problem's.
            (job.models, None if start is None else begun),
            job.arrays,
            *job.computed(course, begun, release=plans[0].config.release),
            1 if job.mesh is None else job.mesh.size,
        )
    store = Checkpoints(checkpoint, identity) if checkpoint is not None else None
    noise_keys = _noise_keys(plans, seeds, identity, key_file, store, phase)
    at = _begun(job, course, begun, noise_keys, store, plans[0].config.release)
    del begun  # As large as all models.
    private = any(one.evaluation_data == "private" for one in problems)

    def ask(at: _Stand, latest: dict[str, np.ndarray], rate: float) -> Any:
        if callback is None:
            return None
        would = states.at(at.done, private_stop=private)
        return callback(Progress(at.done, latest, would, rate))

    meter = Meter(len(plans) * len(seeds))
    _drive(job, course, at, meter, ask, store, checkpoint_seconds, progress)
    if store is not None:
        store.close()
    if key_file is not None:
        keys.delete_key_file(key_file, identity_.fingerprint(identity))
    return _result(job, plans, seeds, course, at, meter, states, private)


@dataclass(frozen=True, eq=False)
class _Job:
    """What the compiled program is called with, but for the secret.

    Attributes:
        statics: What is static.
        arrays: What differs between plans, stacked.
        data: Training and evaluation data.
        batch_keys: [S] keys of the batches.
        models: Initial models of one agent, leaves [S, ...].
        mesh: Over which the agents are spread; None is one device.
    """

    statics: program.Statics
    arrays: Any
    data: program.Data
    batch_keys: Any
    models: Any
    mesh: Any

    @property
    def entries(self) -> int:
        """Numbers in one model."""
        return forecasts.entries(jax.tree.map(lambda leaf: leaf[0], self.models))

    @property
    def payload(self) -> int:
        """Numbers that an agent adds noise to in a round, the most."""
        return -(-forecasts.entries(self._payload()) // self.statics.agents)

    def _agents_models(self) -> Any:
        n = self.statics.agents
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((n, *leaf.shape[1:]), leaf.dtype), self.models
        )

    def _payload(self) -> Any:
        return jax.eval_shape(self.statics.method.payload, self._agents_models())

    def check(self, *, summed: bool) -> None:
        """Refuse payloads too narrow for sums, and what a method of one's own shows on this task.

        The plan has looked at a small model; sizes, metrics and divisors are those of the run here.

        Args:
            summed: Whether records' gradients are summed before the noise.
        """
        if summed:
            arguments.check_dtypes(self._payload())
        method, statics = self.statics.method, self.statics
        if registry.packaged(type(method)):
            return
        arrays = jax.tree.map(lambda leaf: leaf[0], self.arrays)
        dependence.check(
            method,
            arrays,
            query=statics.query,
            optimizer=statics.optimizer.chain(arrays),
            divisor=statics.divisor,
            models=self._agents_models(),
            batch=program.batch_shapes(statics, self.data, self.batch_keys),
        )

    def start(self, given: Any, plans: int) -> Any:
        """Models to start from, leaves [S, V, n, ...]: those given, or all agents alike."""
        n = self.statics.agents
        if given is not None:
            return arguments.starting(given, self.models, plans, n)

        def spread(leaf: Any) -> Any:
            return jnp.broadcast_to(leaf[:, None, None], (len(leaf), plans, n, *leaf.shape[1:]))

        return jax.tree.map(spread, self.models)

    def initial(self, start: Any, noise_keys: Any) -> State:
        """The state before the first round."""
        state = program.initial(self.statics, self.arrays, start, noise_keys)
        return state._replace(models=sharding.place(state.models, self.mesh, 2))

    def computed(self, course: Course, start: Any, *, release: bool) -> tuple[Any, str]:
        """The memory before the first round, and the hash of the program of every chunk's length.

        Now, before a callback may change what the model closes over: later calls find what was
        traced here. The keys of the noise are arguments of the program, so that any will do. Arrays
        and not shapes: a release keeps past noise in float64, which shapes are traced without.
        """
        state = self.initial(start, self.batch_keys)
        given = self.statics, self.arrays, self.data, state, self.batch_keys, self.batch_keys
        traced = [program.advance.trace(*given, **lengths) for lengths in course.variants]
        return state.memory, identity_.computation(traced, release=release)


def _prepared(
    plans: tuple[Plan, ...],
    problems: tuple[Problem, ...],
    seeds: tuple[int, ...],
    together: Statics,
    devices: Any,
    phase: int,
) -> _Job:
    """Put on the devices what a run reads, its models checked."""
    task, mesh = problems[0], sharding.agent_mesh(together.agents, devices)
    models = jax.vmap(task.init)(_stack([keys.derive(seed, "initial") for seed in seeds]))
    if together.unit == "record":
        arguments.check_dtypes(models)
    job = _Job(
        statics=placing.statics(together, problems, mesh),
        arrays=placing.arrays(plans, mesh),
        data=placing.data(problems, mesh),
        batch_keys=_stack([keys.derive(seed, "batches", phase) for seed in seeds]),
        models=models,
        mesh=mesh,
    )
    job.check(summed=together.unit == "record")
    return job


@dataclass(eq=False)
class _Stand:
    """How far a run is.

    Attributes:
        state: The stacked state.
        noise_keys: [S] keys of the noise.
        taken: name -> [E, S, V] metrics, nan where none were taken yet.
        done: Rounds done.
        ended: Whether it has ended: all rounds, or stopped.
        decided: Whether a callback may have decided where.
    """

    state: State
    noise_keys: Any
    taken: dict[str, np.ndarray]
    done: int = 0
    ended: bool = False
    decided: bool = False


def _begun(
    job: _Job,
    course: Course,
    start: Any,
    noise_keys: Any,
    store: Checkpoints | None,
    release: bool,
) -> _Stand:
    """Where a run begins: before its first round, or at its newest checkpoint."""
    state = job.initial(start, noise_keys)
    names = program.metric_names(job.statics, job.data, state)
    shape = (len(course.marks), *jax.tree.leaves(start)[0].shape[:2])
    at = _Stand(state, noise_keys, {name: np.full(shape, np.nan) for name in names})
    if store is None:
        return at
    if (restored := store.restore(_portable(at))) is not None:
        at.done, (portable, at.taken, decided), at.ended = restored
        at.decided = bool(decided)
        at.state = _adopt(portable, at.state, job.mesh)
        if program.keeps_noise(at.state) and not at.ended:
            at.state = program.replay(
                job.statics, job.arrays, at.state, noise_keys, jnp.int32(at.done)
            )
    elif release:
        # Before anything is sent: from here on, losing the key is noticed.
        store.save(0, _portable(at), ended=False)
    return at


def _drive(
    job: _Job,
    course: Course,
    at: _Stand,
    meter: Meter,
    ask: Callable[[_Stand, dict[str, np.ndarray], float], Any],
    store: Checkpoints | None,
    checkpoint_seconds: float,
    progress: bool,
) -> None:
    """Advance a run to its end, chunk by chunk."""
    marks, saved_at = course.marks, time.monotonic()
    with tqdm(
        total=course.total, initial=at.done, disable=not progress, unit=" rounds",
        desc=meter.title, smoothing=0, mininterval=0.5 if sys.stderr.isatty() else 30,
    ) as bar:  # fmt: skip
        while not at.ended:
            lengths = course.lengths(course.total - at.done)
            length = lengths["blocks"] * course.every + lengths["tail"]
            with meter.chunk(length):
                at.state, new = program.advance(
                    job.statics, job.arrays, job.data, at.state, job.batch_keys, at.noise_keys,
                    **lengths,
                )  # fmt: skip
                new = jax.device_get(new)
            inside = (marks > at.done) & (marks <= at.done + length)
            for name, value in new.items():
                at.taken[name][inside] = value
            at.done += length
            bar.update(length)
            if progress and meter.chunks == 1:
                # The rate and the time left are of what is still to come, which is compiled.
                bar.start_t, bar.initial = bar.last_print_t, at.done
            latest = {name: value[inside][-1].copy() for name, value in at.taken.items()}
            answer = ask(at, latest, meter.rate)
            at.decided = at.decided or answer is not None
            at.ended = bool(answer) or at.done == course.total
            due = time.monotonic() - saved_at >= checkpoint_seconds
            if store is not None and (at.ended or due):
                store.save(at.done, _portable(at), ended=at.ended)
                saved_at = time.monotonic()


def _result(
    job: _Job,
    plans: tuple[Plan, ...],
    seeds: tuple[int, ...],
    course: Course,
    at: _Stand,
    meter: Meter,
    states: Stated,
    private: bool,
) -> Result:
    """What a run leaves."""
    keep = course.marks <= at.done
    # Nothing is published under "view": agents keep their own models, and phases are refused.
    own = any(plan.config.protect.gradients == "view" for plan in plans)
    return Result(
        plans=plans,
        seeds=seeds,
        rounds=course.marks[keep],
        metrics={name: value[keep] for name, value in at.taken.items()},
        guarantees=states.at(at.done, private_stop=private and at.decided),
        params=jax.device_get(at.state.models if own else program.released(job.statics, at.state)),
        seconds=meter.seconds,
        rounds_per_second=meter.rate,
        ended=at.done == course.total,
    )


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


def _portable(at: _Stand) -> Any:
    """The state without its secret, the metrics, and whether a callback has decided anything."""
    # Past noise would give later rounds' away; it follows from the key, see program.replay.
    state = at.state
    open_ = jax.device_get((state.models, state.memory, state.round))
    return open_, at.taken, np.asarray(at.decided)


def _adopt(portable: Any, state: State, mesh: Any) -> State:
    """Put a checkpoint's values into a fresh state, which has the keys."""
    models, memory, done = jax.tree.map(jnp.asarray, portable)

    def counted(leaf: Any) -> Any:
        # A copy: buffers are given to the program, and none twice.
        return jnp.array(done, leaf.dtype, copy=True) if program.is_counter(leaf) else leaf

    secret = jax.tree.map(counted, state.secret)
    return State(sharding.place(models, mesh, 2), memory, secret, done)
