"""Memory and time of a run before it starts, from its compiled program and a timed block."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from dpjax import _files, _validate
from dpjax.engine import arguments, processes, program
from dpjax.engine.state import RunSchedule, RunState
from dpjax.learning.problem import Problem
from dpjax.plans.plan import Plan
from dpjax.transforms.rounds import BLOCK

__all__ = ["Estimate", "estimate"]

_SECONDS = 1.0
"""Least time of a timed block."""
_CALLS = 5
"""Most calls of a single round, and of the block."""
_ALIKE = 1.1
"""Ratio of the longest to the shortest time up to which times of a block agree."""


@dataclass(frozen=True)
class Estimate:
    """What a run takes, measured and computed before it starts.

    Attributes:
        memory: Largest number of bytes: of the process, or of its fullest device.
        limit: Bytes of the machine (or its container), or of the device.
        in_use: Bytes in use before the first round: libraries, data, plans and models.
        added: Bytes that the compiled rounds add, from the compiler's own analysis.
        setup_seconds: Time outside the rounds, mostly tracing and compiling.
        round_seconds: Mean time of a round of all runs together, with its share of metrics.
        rounds: Rounds of the run.
        runs: Seeds times plans.

    Example:
        >>> from dpjax.engine.estimate import Estimate
        >>> estimate = Estimate(
        ...     memory=300, limit=1000, in_use=200, added=100, setup_seconds=2.0,
        ...     round_seconds=0.01, rounds=100, runs=1,
        ... )
        >>> estimate.seconds
        3.0
    """

    memory: int
    limit: int
    in_use: int
    added: int
    setup_seconds: float
    round_seconds: float
    rounds: int
    runs: int

    @property
    def seconds(self) -> float:
        """Seconds of the run, compilation included."""
        return self.setup_seconds + self.rounds * self.round_seconds

    def statement(self) -> str:
        """The numbers in two sentences."""
        sizes = (self.memory, self.limit, self.in_use, self.added)
        memory, limit, before, added = (f"{size / 2**30:,.2f} GiB" for size in sizes)
        return (
            f"{_validate.counted(self.runs, 'run')} of {_validate.counted(self.rounds, 'round')}: "
            f"about {memory} of {limit} of memory ({before} before the first round, {added} more "
            f"in the compiled rounds), and about {self.seconds:,.1f} s: "
            f"{self.setup_seconds:,.1f} s until the first round and at the end, mostly "
            f"compilation, and {self.round_seconds * 1e3:,.3g} ms a round."
        )


def estimate(
    plans: Plan | Sequence[Plan],
    problem: Problem | Sequence[Problem],
    *,
    seeds: Sequence[int],
    eval_every: int | None = None,
    chunk_blocks: int = 1,
    devices: int | None = None,
    stop_at: int | None = None,
    progress: bool = False,
) -> Estimate:
    """Estimate memory and time of `run` with the same arguments, without beginning it.

    Memory is that of the process with the inputs of the run, and what the compiled rounds add
    (outputs + intermediate values - reused buffers), or the most that was in use so far. Time is
    that of preparing and compiling, and of a block of rounds from the middle of the run: about a
    second, or more where `BLOCK` rounds of noise that are drawn together take longer. The block is
    repeated until its times agree, for about 5 seconds at most. Checkpoints, callbacks, transports
    and, beside an accelerator, the host's memory are not counted.

    Guarantee: no message and no metric leaves this function. The rounds start from copies, and a
    throwaway key draws their noise, which neither a seed nor a release has. So a later run spends
    what it would have spent, and has the same bits.

    Args:
        plans: As in `run`, and so are the other arguments.
        problem: Model, data and metrics.
        seeds: Seeds.
        eval_every: Rounds of a block, after which metrics are taken.
        chunk_blocks: Blocks in one compiled call.
        devices: Devices over which agents are spread.
        stop_at: Rounds to do in place of all.
        progress: Say on standard error what is under way: compiling may take a minute.

    Returns:
        The estimate. It holds for this machine, with as much other work as it has now.

    Raises:
        ValueError: As in `run`; also where the rounds do not fit in memory.

    Example:
        >>> import dpjax as dp
        >>> parts = dict(sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.1), rounds=9)
        >>> config = dp.Config(protect=dp.Protect("replace_agent", clip_norm=1.0), **parts)
        >>> plan = dp.make_plan(config, dp.mixing.metropolis_hastings(dp.graphs.ring(3)))
        >>> expected = dp.estimate(plan, dp.quadratics(3), seeds=[0, 1])
        >>> expected.runs, expected.rounds, expected.memory < expected.limit
        (2, 9, True)
    """

    def say(line: str) -> None:
        if progress and processes.is_first():
            _files.say(f"estimate: {line}")

    _validate.flag("progress", progress)
    began = time.perf_counter()
    say("preparing and compiling the rounds")
    tasks = arguments.check_run(plans, problem, seeds)
    rounds = tasks[0][0].config.rounds
    schedule = RunSchedule.of(rounds, stop_at, eval_every, chunk_blocks)
    run = RunState.first(tasks, schedule, devices, throwaway_key=True)
    data = run.inputs
    processes.collected(program.final_models(data.statics, False, run.state))
    blocks = np.zeros_like(schedule.blocks(0).lengths)
    compiling = time.perf_counter()
    traced = program.advance.trace(*run.arguments, blocks)
    in_use, added = data.memory.check_programs([traced], run.state)
    compiled = time.perf_counter()
    # A last chunk of another number of blocks is compiled for itself.
    repeats = len({len(variant.lengths) for variant in schedule.variants})
    setup = compiled - began + (repeats - 1) * (compiled - compiling)

    say(f"compiled after {setup:.1f} s, timing rounds for some seconds")

    def timed(rounds: int) -> float:
        """Seconds of a call of so many rounds, with the metrics of its blocks."""
        # In the middle, since noise over rounds may take longer in later ones.
        first = max(schedule.total - rounds, 0) // 2 // BLOCK * BLOCK + 1
        run.state = program.at_round(run.state, first)
        blocks[0] = rounds
        began = time.perf_counter()
        # Rounds of blocks are data on every device, so that a block of any length runs at once.
        run.state, metrics = program.advance(*run.arguments, blocks)
        jax.block_until_ready((run.state, processes.collected(metrics)))
        # Several processes agree on the first one's time, and so on how long to go on.
        return float(processes.broadcast(time.perf_counter() - began))

    # A first call also moves arrays to where they stay.
    timed(1)
    singles = [timed(1)]
    while len(singles) < _CALLS and sum(singles) < _SECONDS:
        singles.append(timed(1))
    single = statistics.median(singles)
    # Noise of `BLOCK` rounds may be drawn together.
    unit = BLOCK if program.keeps_noise(run.state) else 1
    length = unit
    several = timed(1 + length)
    while several - single < _SECONDS and length + unit < schedule.total:
        length = min(4 * length, (schedule.total - 1) // unit * unit)
        several = timed(1 + length)
    # Other work on the machine comes in bursts as long as a block.
    times = [several]
    while len(times) < _CALLS and sum(times) < _CALLS * _SECONDS:
        times.append(timed(1 + length))
        if max(times) <= _ALIKE * min(times):
            break
    # The difference of two calls is that of their rounds: both start and measure alike.
    round_seconds = max(statistics.mean(times) - single, 0.0) / length
    measures = max(single - round_seconds, 0.0) / len(blocks) * len(schedule.marks)
    usage = data.memory.usage()
    return Estimate(
        memory=max(usage.peak, in_use + added), limit=usage.limit, in_use=in_use, added=added,
        setup_seconds=setup, round_seconds=round_seconds + measures / schedule.total,
        rounds=schedule.total, runs=data.memory.seeds * data.memory.plans,
    )  # fmt: skip
