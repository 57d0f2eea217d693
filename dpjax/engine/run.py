"""Run plans on a problem: seeds, progress, callbacks, checkpoints, resume, early stop."""

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from tqdm import tqdm

from dpjax.accounting.guarantee import Guarantee
from dpjax.engine import arguments, inference, program
from dpjax.engine import identity as identity_
from dpjax.engine.course import Course, Meter
from dpjax.engine.host import Loop, Transport
from dpjax.engine.job import Job, prepared
from dpjax.engine.result import Progress, Result
from dpjax.engine.scan import Scan
from dpjax.engine.stand import Stand
from dpjax.engine.storage import Storage
from dpjax.plans import forecasts, releases
from dpjax.plans.endings import Endings, Stopping, endings
from dpjax.plans.plan import Plan, shared
from dpjax.plans.problem import Problem
from dpjax.plans.scheduled import LostNoiseWarning

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
    transport: Transport | None = None,
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
            phase has noise and batches of its own, which a simulation derives from seed and phase:
            it must be above the number that ``spent`` states. A release draws a key of its own
            for every run, whatever its phase.
        spent: What the earlier phases have spent, one guarantee a plan (`Result.guarantees`);
            needed with ``start``. The result states both together: mu^2 adds up. Where they state
            a total that was fixed before the first phase (`Guarantee.within`), the result states
            that total, and a phase that passes it is refused.
        planned: True where this phase, its length and its noise were fixed before the first one
            began; needed with ``start`` unless ``spent`` states a total. A phase added because of
            what was released is not covered by the two together.
        stop_at: Rounds to do, fixed before the run, in place of all; states what so many rounds
            spend. A checkpoint or key file of another number is refused.
        stopping: What a run states that its callback stops: "plan", the plan's whole guarantee; or
            "curve", numbers that hold at whichever chunk's end it stops, smaller at the first ones
            and larger at the last (`dpjax.accounting.stopping`).
        transport: What carries the messages of one plan and one seed over a real network,
            ``transport(message, round) -> received`` (`dpjax.engine.host`); None exchanges them
            inside the compiled rounds. One that raises ends the run before that round; resumed from
            ``checkpoint``, which then is written before every message, the run sends the very same
            one. Never begin such a run a second time without: noise would go out again with
            another payload. A release needs the checkpoint.

    Returns:
        Metrics, final models and what was spent. A run that is resumed continues to the same
        bits on the same platform and build.

    Raises:
        ValueError: For plans that cannot run together or do not fit the problem, a device count
            that does not divide n, a checkpoint or key file of another run, or that another process
            uses.

    Warns:
        HopelessWarning: Before the first round, where a plan's noise leaves nothing to learn
            (`dpjax.plans.forecasts`).
        LostNoiseWarning: After the first block in which noise is finer than the numbers that it is
            added to (`dpjax.plans.scheduled`).

    Example:
        >>> from dpjax.engine.run import run
        >>> from dpjax.plans import optimizers, plan, problem, protect, samplers
        >>> from dpjax.topology import graphs, mixing
        >>> config = plan.Config(
        ...     protect=protect.Protect("replace_agent", clip_norm=1000.0), rounds=50,
        ...     sampler=samplers.Random(1), optimizer=optimizers.Sgd(0.05),
        ... )
        >>> made = plan.make(config, mixing.metropolis_hastings(graphs.complete(6)))
        >>> result = run(made, problem.quadratics(6), seeds=range(2), eval_every=25)
        >>> result.metrics["mean_gap"].shape
        (2, 2, 1)
        >>> [f"{gap:.2f}" for gap in result.metrics["mean_gap"][-1].ravel()]
        ['0.00', '0.00']
    """
    plans, problems, seeds = arguments.check(plans, problem, seeds)
    arguments.check_storage(plans, seeds, checkpoint, key_file)
    arguments.check_device(plans, devices)
    arguments.check_options(checkpoint_seconds, progress, callback)
    together = shared(plans)
    course = Course.of(together.rounds, stop_at, eval_every, chunk_blocks)
    phase = arguments.check_phase(plans, phase, start, spent)
    arguments.check_transport(transport, plans, seeds, devices, checkpoint)
    job = prepared(plans, problems, seeds, together, devices, phase)
    models = job.start(start, len(plans))
    # Only here is known how many numbers a release draws; nothing has been sent yet.
    rounding = job.rounding(release=any(plan.config.release for plan in plans))
    plans = tuple(releases.priced(plan, job.payload, *rounding) for plan in plans)
    terms = _Terms(
        endings(
            plans, course.ends, stopping=stopping, callback=callback is not None, before=spent,
            planned=planned, phase=phase,
        ),
        any(one.evaluation_data == "private" for one in problems) or _hidden(together.method),
        callback,
    )  # fmt: skip
    expected = forecasts.tell(plans, job.entries, problems[0].partition.counts)
    if progress and expected:
        print(expected, file=sys.stderr)
    driver: Scan | Loop = Scan(job, course)
    if transport is not None:
        driver = Loop(job, course, transport, arguments.fewest(plans[0]))
    identity = {}
    if checkpoint is not None or key_file is not None:
        options = course.options(phase, stopping) | driver.options
        # Without a start all agents' models follow from the problem's, alike.
        own_start = models if start is not None or problems[0].apart else None
        identity = _identity(job, plans, problems, seeds, driver, options, models, own_start)
    with Storage.of(identity, checkpoint, key_file) as storage:
        noise_keys = storage.noise_keys(seeds, phase)
        at = Stand.first(job, course, models, noise_keys, storage, driver.sums)
        del models  # As large as all models.
        meter = Meter(len(plans) * len(seeds))
        try:
            _drive(driver, course, at, meter, terms, storage, checkpoint_seconds, progress)
        except KeyboardInterrupt as error:
            error.add_note(_interrupted(at, storage))
            raise
        storage.end()
    return _result(job, plans, seeds, course, at, meter, terms, problems[0].frozen)


def _hidden(method: Any) -> bool:
    """Whether metrics are of models that no message shows, whatever they are measured on."""
    return hasattr(method, "sensitivity") and not hasattr(method, "measured")


def _identity(
    job: Job,
    plans: tuple[Plan, ...],
    problems: tuple[Problem, ...],
    seeds: tuple[int, ...],
    driver: Scan | Loop,
    options: dict[str, Any],
    models: Any,
    own_start: Any,
) -> dict[str, str]:
    """What the run is; ``own_start`` are the models that it was asked to start from."""
    memory, computed = job.computed(driver.traced, models, release=plans[0].config.release)
    return identity_.of_run(
        plans, problems, seeds, options, (job.models, own_start), job.arrays, memory, computed,
        job.devices,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Terms:
    """What a run states wherever it ends, and who is asked whether it shall.

    Attributes:
        states: Guarantees by round.
        private: Whether metrics are of private data.
        callback: Who is asked, or None.
    """

    states: Endings
    private: bool
    callback: Callable[[Progress], bool | None] | None

    def ask(self, at: Stand, course: Course, rate: float) -> Any:
        """The callback's answer; None where it only watches."""
        if self.callback is None:
            return None
        would = self.states.at(at.done, private_stop=self.private, lost=at.lost(course))
        return self.callback(Progress(at.done, at.latest(course), would, rate))


def _drive(
    driver: Scan | Loop,
    course: Course,
    at: Stand,
    meter: Meter,
    terms: _Terms,
    storage: Storage,
    checkpoint_seconds: float,
    progress: bool,
) -> None:
    """Advance a run to its end, chunk by chunk."""
    saved_at, warned = time.monotonic(), False
    with tqdm(
        total=course.total, initial=at.done, disable=not progress, unit=" rounds",
        desc=meter.title, smoothing=0, mininterval=0.5 if sys.stderr.isatty() else 30,
    ) as bar:  # fmt: skip
        while not at.ended:
            length = course.ahead(at.done)
            with meter.chunk(length):
                driver.advance(at, storage)
            bar.update(length)
            if progress and meter.chunks == 1:
                # The rate and the time left are of what is still to come, which is compiled.
                bar.start_t, bar.initial = bar.last_print_t, at.done
            if not warned and any(lost := at.lost(course)):
                warned = True
                _warn_of_lost(lost)
            answer = terms.ask(at, course, meter.rate)
            at.decided = at.decided or answer is not None
            at.ended = bool(answer) or at.done == course.total
            due = time.monotonic() - saved_at >= checkpoint_seconds
            if at.ended or due:
                at.save(storage.store)
                saved_at = time.monotonic()


def _interrupted(at: Stand, storage: Storage) -> str:
    """What an interrupted run leaves, and how it goes on."""
    told = f"interrupted after round {at.done:,}"
    if storage.store is None:
        return f"{told}; nothing of it is kept: give checkpoint=FOLDER, and the same call goes on"
    if at.saved is None:
        return f"{told}; the checkpoint {storage.store.folder} holds no round yet"
    return (
        f"{told}; the checkpoint {storage.store.folder} holds the first {at.saved:,} rounds, and "
        "the same call goes on from there"
    )


def _warn_of_lost(lost: list[tuple[int, float] | None]) -> None:
    """Say at once that noise is finer than what it is added to."""
    plan, round, share = next((v, *pair) for v, pair in enumerate(lost) if pair is not None)
    which = f" of plan {plan}" if len(lost) > 1 else ""
    warnings.warn(
        f"noise{which} is finer than the numbers that it is added to: from round {round:,} on up "
        f"to {share:.2g} of a message's entries have gone out without noise so far, and the "
        "guarantee does not cover them; train in float64 (JAX_ENABLE_X64=1), rescale the model, "
        "or give fewer rounds or a larger ratio of scales",
        LostNoiseWarning,
        stacklevel=4,
    )


def _result(
    job: Job,
    plans: tuple[Plan, ...],
    seeds: tuple[int, ...],
    course: Course,
    at: Stand,
    meter: Meter,
    terms: _Terms,
    frozen: Any,
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
        guarantees=terms.states.at(
            at.done, private_stop=terms.private and at.decided, lost=at.lost(course)
        ),
        params=jax.device_get(program.left(job.statics, own, at.state)),
        seconds=meter.seconds,
        rounds_per_second=meter.rate,
        ended=at.done == course.total,
        frozen=inference.frozen_digest(frozen),
    )
