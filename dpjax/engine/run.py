"""Run plans on a problem, with progress, callbacks, checkpoints, resuming and early stops."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.stages import Traced
from tqdm import tqdm

from dpjax import _files, _validate
from dpjax.accounting.arrays import Fields
from dpjax.accounting.guarantee import Guarantee
from dpjax.engine import arguments, host, processes, program, result
from dpjax.engine import checkpoint as checkpoint_
from dpjax.engine.checkpoint import Checkpoint, Storage
from dpjax.engine.host import HostDriver, Transport
from dpjax.engine.result import Progress, Result
from dpjax.engine.state import LostNoise, Meter, RunSchedule, RunState
from dpjax.learning.problem import Problem
from dpjax.plans import statements
from dpjax.plans.plan import Plan
from dpjax.plans.scheduled import LostNoiseWarning
from dpjax.plans.statements import Stopping, StoppingRule, stopping_rule
from dpjax.protocols import Models

__all__ = ["Checkpoint", "Continuation", "Result", "run"]

_Callback: TypeAlias = Callable[[Progress], bool | None] | None
"""What may end a run at a chunk's end: True stops it."""


@dataclass(frozen=True, eq=False)
class Continuation:
    """What a run carries on from: the models of an earlier phase, and what phases have spent.

    Attributes:
        start: Parameters to start from, leaves [S, V, n, ...] as in `Result.params`, in place of
            the problem's; for example where a run continues after an agent has left.
        number: Number of this run among several in a row, above 0. A simulation derives the noise
            and batches of a phase from seed and number, so it must be above the one in
            ``guarantees``. A release draws a new key for every run.
        guarantees: Those of the earlier phases, one for each plan (`Result.guarantees`). The result
            states both together: mu^2 adds up. Where they state a total that was fixed before the
            first phase (`Guarantee.within`), the result states that total, and a phase that passes
            it is refused.
        planned: True where this phase, its length and its noise were fixed before the first one
            began; needed unless ``guarantees`` state a total. The joint guarantee does not cover a
            phase that was added because of released messages.

    Raises:
        ValueError: For a number below 1, or another planned than True or False.

    Example:
        >>> import dpjax as dp
        >>> dp.Continuation(start=None, number=2, guarantees=[]).number
        2
    """

    start: Models
    number: int
    guarantees: Sequence[Guarantee]
    planned: bool = False

    def __post_init__(self) -> None:
        """Refuse the number of a first phase, whose noise would be repeated."""
        _validate.integer("number", self.number, maximum=2**31 - 1)
        _validate.flag("planned", self.planned)


def run(
    plans: Plan | Sequence[Plan],
    problem: Problem | Sequence[Problem],
    *,
    seeds: Sequence[int],
    eval_every: int | None = None,
    chunk_blocks: int = 1,
    devices: int | None = None,
    checkpoint: Checkpoint | _files.PathLike | None = None,
    progress: bool = False,
    callback: _Callback = None,
    continuation: Continuation | None = None,
    stop_at: int | None = None,
    stopping: Stopping = "plan",
    transport: Transport | None = None,
) -> Result:
    """Run every plan with every seed, in one compiled call for each chunk.

    Guarantee: each plan's own, for each of its runs alone. Plans and seeds run together are
    simulations: with one seed all plans share batches and raw normals, so their messages must not
    be published together. A release (``config.release``) is one plan and one seed; its noise key
    comes from the operating system, lives in the key file of ``checkpoint`` and is deleted when the
    run ends. Metrics and the callback's values are of unprotected data, and are not private.

    A run that a callback stopped states its plan's whole guarantee. Its stop may depend on all
    released messages, and the smaller loss of the first rounds holds only if their number was fixed
    before. If the callback read metrics of private data (`Problem.evaluation_data`), the guarantee
    does not cover the stopping round, and the result says so. This also holds for a callback that
    answered True or False and let the run end by itself.

    Args:
        plans: One plan, or several that share rounds, clip norm, batch size, unit and method, and
            the kind of noise (over agents, or over rounds); `dpjax.sweep` runs any.
        problem: Model, data and metrics; or one problem for each seed. These differ in their data
            alone (say, in its partition), and each array has the same shape.
        seeds: Seeds; initial models and batches derive from them, in simulations the noise too.
        eval_every: Rounds of a block, after which metrics are taken; None is a twentieth of the
            rounds. The last round is always measured.
        chunk_blocks: Blocks in one compiled call; callbacks and checkpoints come between calls.
        devices: Number of devices over which agents are spread, consecutive ones together, at most
            n. Batches and the normals of all noise have the same bits on any devices. Noise that a
            dense product colours, models and metrics agree to 1e-6 of their largest entry: sums
            over agents and dense products add in another order, and a compiler may round a product
            and a sum at once. Rows of the mixing matrix of at most 64
            entries, where they are tables, add in the same order. Where
            `jax.distributed.initialize` joined several processes, all of their devices: every
            process makes the same call and receives the same result, and the first one keeps the
            checkpoint and asks the callback. Arguments that differ, but for functions of the
            problem, and errors of the first process end the run in all. Of records that each
            process loads by itself (`Problem.local`) shapes and dtypes are compared.
        checkpoint: Where to save the state and a release's noise key, and to resume from; a folder
            alone stands for ``Checkpoint(folder)``. None keeps nothing.
        progress: Show a progress bar with rounds/s and the time left.
        callback: Called with `Progress` at every chunk's end; True stops the run. One that only
            observes returns None.
        continuation: Where this run continues earlier ones; None begins.
        stop_at: Rounds to do, fixed before the run, in place of all. The result states the loss
            of these rounds. A checkpoint or key file of another number is refused.
        stopping: The statement of a run that its callback stops. "plan" is the plan's whole
            guarantee. "curve" holds at whichever chunk's end the run stops; its numbers are smaller
            at the first ends and larger at the last (`dpjax.accounting.stopping`).
        transport: Carries the messages of one plan and one seed over a real network,
            ``transport(message, round) -> received`` (`dpjax.engine.host`); None exchanges them
            inside the compiled rounds. A transport that raises ends the run before that round.
            ``checkpoint`` is then written before every message, and a resumed run sends the same
            message again. Never begin such a run again without its checkpoint, which would send
            its noise with another payload. A release needs the checkpoint.

    Returns:
        Metrics, final models and guarantees. A resumed run has the same bits on the same platform
        and build.

    Raises:
        ValueError: For plans that cannot run together or do not fit the problem, more devices than
            there are, a checkpoint or key file of another run, or that another process uses.

    Warns:
        HopelessWarning: Before the first round, where a plan's noise leaves nothing to learn
            (`dpjax.plans.statements`).
        LostNoiseWarning: After the first block in which noise is finer than the numbers that it is
            added to (`dpjax.plans.scheduled`).

    Example:
        >>> from dpjax.engine.run import run
        >>> from dpjax.learning import samplers
        >>> from dpjax.learning.quadratics import quadratics
        >>> from dpjax.plans import optimizers, plan, protect
        >>> from dpjax.topology import graphs, mixing
        >>> config = plan.Config(
        ...     protect=protect.Protect("replace_agent", clip_norm=1000.0), rounds=50,
        ...     sampler=samplers.Random(1), optimizer=optimizers.Sgd(0.05),
        ... )
        >>> network = mixing.metropolis_hastings(graphs.complete(6))
        >>> noiseless = plan.make(config, network)
        >>> result = run(noiseless, quadratics(6), seeds=range(2), eval_every=25)
        >>> result.metrics["mean_gap"].shape
        (2, 2, 1)
        >>> [f"{gap:.2f}" for gap in result.metrics["mean_gap"][-1].ravel()]
        ['0.00', '0.00']
    """
    with processes.all_gather_errors_and_values() as calls:
        tasks = arguments.check_run(plans, problem, seeds)
        plans, problems, seeds = tasks
        place = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        checkpoint_.check_storage(plans, place)
        _validate.flag("progress", progress)
        _check_options(plans, callback, continuation)
        schedule = RunSchedule.of(plans[0].config.rounds, stop_at, eval_every, chunk_blocks)
        phase = continuation or _FirstPhase()
        driver: ScanDriver | HostDriver = ScanDriver()
        if transport is not None:
            driver = host.make_driver(transport, plans, seeds, devices, place.folder)
        options: Fields = {**schedule.options, **driver.options}
        options |= {"phase": phase.number, "stopping": stopping}
        # Before anything is compiled: processes whose calls differ would wait for each other.
        if jax.process_count() > 1:
            optional = {"checkpoint": place.folder, "callback": callback, "devices": devices}
            others = _compared(problems, phase, optional)
            calls.append(checkpoint_.of_arguments(*tasks, options | others))
    options |= checkpoint_.check_alike(calls)
    runs = RunState.first(tasks, schedule, devices, phase.number, phase.start)
    data = runs.inputs
    plans = data.with_precision_cost(plans, problems)
    tasks = (plans, problems, seeds)
    # Where a callback reads metrics of private data, its stop depends on them.
    private = data.statics.method.measures_private
    private |= any(task.evaluation_data == "private" for task in problems)
    rule = stopping_rule(
        plans, schedule.ends, stopping=stopping, callback=callback is not None,
        before=phase.guarantees, planned=phase.planned, phase=phase.number, private=private,
    )  # fmt: skip
    _say(progress, statements.forecast_line(plans, data.entries, problems[0].partition.counts))
    identity: checkpoint_.Identity = {}
    traced = driver.traced(runs)
    if place.folder is not None or place.key_file is not None:
        start = None if phase.start is None else runs.state.models
        values = ((data.models, start), data.arrays, runs.state.memory)
        identity = checkpoint_.of_run(tasks, options, values, traced, data.memory.devices)
    with contextlib.closing(Storage(identity, place)) as storage:
        if not storage.ended:
            # Before a release has a key.
            data.memory.check_programs(traced, runs.state)
        runs.open(storage)
        if runs.done:
            _say(progress, f"resumed at round {runs.done:,}")
        meter = Meter(len(plans) * len(seeds))
        try:
            _drive(driver, runs, meter, rule, callback, place.seconds, progress)
        except KeyboardInterrupt as error:
            error.add_note(f"interrupted at round {runs.done}; {runs.stored}")
            raise
        if storage.key_file is not None:
            # All messages are out, and nothing needs the key again.
            storage.key_file.delete()
    return _result(tasks, runs, rule, meter)


def _result(tasks: arguments.Tasks, runs: RunState, rule: StoppingRule, meter: Meter) -> Result:
    """What a run returns, after its last round."""
    plans, problems, seeds = tasks
    # Nothing is published under "view": agents keep their own models, and phases are refused.
    own_models = any(plan.config.protect.gradients == "view" for plan in plans)
    params = program.final_models(runs.inputs.statics, own_models, runs.state)
    measured = runs.schedule.marks <= runs.done
    return Result(
        plans=plans,
        seeds=seeds,
        rounds=runs.schedule.marks[measured],
        metrics={name: value[measured] for name, value in runs.metrics.items()},
        guarantees=rule.at(runs.done, decided=runs.decided, lost=runs.lost_noise()),
        params=processes.collected(params),
        seconds=sum(seconds for _, seconds in meter.chunks),
        rounds_per_second=meter.rate,
        ended=runs.done == runs.schedule.total,
        frozen=result.frozen_digest(problems[0].frozen),
        problem=problems[0].name,
        agent_names=problems[0].partition.names or (),
    )


def _say(progress: bool, line: str | None) -> None:
    """Print a line if there is one, once for all processes."""
    if progress and line and processes.is_first():
        _files.say(line)


class _FirstPhase(NamedTuple):
    """A run that continues nothing, as a `Continuation` would say it."""

    start: Models = None
    number: int = 0
    guarantees: Sequence[Guarantee] | None = None
    planned: bool = False


def _compared(
    problems: Sequence[Problem], phase: Continuation | _FirstPhase, optional: Fields
) -> Fields:
    """What several processes compare of other arguments: whether the optional ones are there."""
    start = phase.start
    optional = {**optional, "planned": phase.planned, "spent": phase.guarantees}
    return {
        "start": None if start is None else checkpoint_.tree_digest(start),
        "evaluation_data": [task.evaluation_data for task in problems],
        **{name: value is not None for name, value in optional.items()},
    }


class ScanDriver:
    """The rounds of all runs, each chunk in one compiled call, messages exchanged inside it.

    Attributes:
        options: Settings that are part of the run's identity, by name.
    """

    options: ClassVar[dict[str, str]] = {}

    def advance(self, runs: RunState) -> None:
        """Do the rounds of a chunk; nothing is stored before its end.

        Args:
            runs: The state of the runs.
        """
        blocks = _as_argument(runs.schedule.blocks(runs.done))
        runs.state, new = program.advance(*runs.arguments, blocks)
        runs.record(runs.schedule.ahead(runs.done), processes.collected(new))

    def traced(self, runs: RunState) -> list[Traced]:
        """The program of every chunk's length, traced.

        Args:
            runs: The state before the first round.
        """
        variants = runs.schedule.variants
        return [program.advance.trace(*runs.arguments, _as_argument(blocks)) for blocks in variants]


def _as_argument(blocks: program.Blocks) -> program.Blocks | np.ndarray:
    """The rounds of blocks as an argument of the program.

    On a CPU they are data, since compiling a round takes longer than many runs. Other devices would
    ask the host after every round whether to continue; there they are part of the program.
    """
    return blocks.lengths if jax.default_backend() == "cpu" else blocks


def _drive(
    driver: ScanDriver | HostDriver,
    runs: RunState,
    meter: Meter,
    rule: StoppingRule,
    callback: _Callback,
    checkpoint_seconds: float,
    progress: bool,
) -> None:
    """Advance a run to its end, chunk by chunk."""
    saved_at = monotonic()
    warned = False
    total = runs.schedule.total
    notes = _files.Notes() if progress and processes.is_first() else None
    with tqdm(
        total=total, initial=runs.done, disable=notes is None, unit=" rounds",
        desc=_validate.counted(meter.runs, "run"), smoothing=0,
        mininterval=0.5 if notes and notes.isatty() else 30, file=notes,
    ) as bar:  # fmt: skip
        while not runs.ended:
            length = runs.schedule.ahead(runs.done)
            began = monotonic()
            driver.advance(runs)
            meter.chunks.append((length, monotonic() - began))
            if notes:
                bar.set_postfix_str(_latest(runs.latest()), refresh=False)
            bar.update(length)
            if notes and len(meter.chunks) == 1:
                # The rate and the time left concern later chunks, which are compiled.
                bar.start_t = bar.last_print_t
                bar.initial = runs.done
            lost = runs.lost_noise()
            if not warned and any(lost):
                warned = True
                _warn_of_lost(lost)
            with processes.all_gather_errors_and_values() as answers:
                # One process decides, so that all end at the same chunk.
                answer = None
                if callback is not None and processes.is_first():
                    guarantees = rule.at(runs.done, decided=True, lost=lost)
                    answer = callback(Progress(runs.done, runs.latest(), guarantees, meter.rate))
                due = monotonic() - saved_at >= checkpoint_seconds
                answers.append((answer is not None, bool(answer), due))
            decided, stops, due = answers[0]
            # An answer of False is a decision as well: to go on.
            runs.decided |= decided
            runs.ended = stops or runs.done == total
            if runs.ended or due:
                runs.save()
                saved_at = monotonic()


def _latest(metrics: dict[str, np.ndarray]) -> str:
    """Metrics beside the bar: of several runs the least and the largest."""
    # Of those that have not diverged, if there are any.
    texts = []
    for name, values in metrics.items():
        text = f"{name} {np.fmin.reduce(values, axis=None):.4g}"
        if values.size > 1:
            text += f" to {np.fmax.reduce(values, axis=None):.4g}"
        texts.append(text)
    return ", ".join(texts)


def _warn_of_lost(lost: list[LostNoise | None]) -> None:
    """Warn that noise is finer than the numbers to which it is added."""
    plan, loss = next((plan, loss) for plan, loss in enumerate(lost) if loss is not None)
    warnings.warn(
        f"noise of plan {plan} is finer than the numbers that it is added to. From round "
        f"{loss.round:,} on up to {loss.share:.2g} of a message's entries have gone out without "
        "noise, which the guarantee does not cover. Train in float64 (JAX_ENABLE_X64=1), rescale "
        "the model, or give fewer rounds or a larger ratio of scales",
        LostNoiseWarning,
        stacklevel=4,
    )


def _check_options(plans: Sequence[Plan], callback: object, continuation: Any) -> None:
    """Check the options of a run that do not concern its rounds."""
    if callback is not None and not callable(callback):
        raise ValueError(f"callback is {callback!r}; give a function of Progress, or None")
    if continuation is None:
        return
    if not isinstance(continuation, Continuation):
        raise _validate.refusal("continuation", continuation, "give a Continuation, or None")
    spent = continuation.guarantees
    number = continuation.number
    listed = isinstance(spent, list | tuple) and all(isinstance(past, Guarantee) for past in spent)
    if not listed or len(spent) != len(plans):
        raise ValueError(
            f"guarantees is {_validate.shown(spent)} for {len(plans)} plans; give one guarantee a "
            "plan, those of the earlier phase's result"
        )
    # Older records do not say their number.
    first = max(max(past.phase + 1, len(past.phases)) for past in spent)
    # A release draws a new key for every phase, so its number repeats no noise.
    if number < first and not plans[0].config.release:
        raise ValueError(
            f"number is {number} and guarantees has had phases up to {first - 1}, whose noise a "
            f"simulation would draw again from one seed; give {first} or more"
        )
