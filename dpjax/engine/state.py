"""The progress of a run: its blocks and chunks, its state, and its checkpoints."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from dpjax import _validate
from dpjax.engine import keys, processes, program
from dpjax.engine.arguments import Tasks, check_device
from dpjax.engine.checkpoint import Storage
from dpjax.engine.inputs import Inputs
from dpjax.engine.processes import place
from dpjax.engine.program import Blocks, zeros
from dpjax.engine.step import LOST, NOT_FINITE, Data, Metrics, Statics
from dpjax.protocols import Arrays, Models, State, Tree

__all__ = ()

_TOLERATED_LOSS = 0.01
"""Share of a message's entries without noise above which a run warns."""


def not_finite(where: str) -> str:
    """The error of a run that ends since a message holds numbers that are not finite.

    Args:
        where: Which rounds, or which leaves of which round.
    """
    return (
        f"a message of {where} is not finite, so the run is over: nothing of these rounds goes "
        "out, and they are spent. Where models diverge, take a smaller step size. The run's end by "
        "this error is an output that no epsilon covers"
    )


class LostNoise(NamedTuple):
    """Noise that a plan's messages lacked, since it is finer than the numbers it is added to.

    Attributes:
        round: The first round of the first block whose messages lacked more than is tolerated.
        share: The largest share of a message's entries, over all blocks.
    """

    round: int
    share: float


@dataclass(frozen=True)
class RunSchedule:
    """The rounds of a run, in chunks of blocks; metrics are taken after every block.

    Attributes:
        total: Rounds.
        block_rounds: Rounds of a block.
        chunk_blocks: Blocks of a chunk; callbacks and checkpoints come between chunks.
    """

    total: int
    block_rounds: int
    chunk_blocks: int

    @classmethod
    def of(
        cls, rounds: int, stop_at: int | None, eval_every: int | None, chunk_blocks: int
    ) -> "RunSchedule":
        """Check the arguments of a run.

        Args:
            rounds: Rounds T of its plans.
            stop_at: Rounds to do, or None.
            eval_every: Rounds between metrics; None is a twentieth of the rounds.
            chunk_blocks: Blocks in one compiled call.

        Raises:
            ValueError: For anything but whole numbers above 0, or more rounds than are planned.
        """
        total = rounds if stop_at is None else _validate.integer("stop_at", stop_at)
        if total > rounds:
            raise ValueError(f"stop_at is {stop_at}, the plan covers {rounds}; plan the longer run")
        if eval_every is None:
            eval_every = max(1, total // 20)
        block_rounds = min(_validate.integer("eval_every", eval_every), total)
        return cls(total, block_rounds, _validate.integer("chunk_blocks", chunk_blocks))

    @property
    def options(self) -> dict[str, int]:
        """Settings that are part of the run's identity, by name."""
        return {
            "eval_every": self.block_rounds,
            "chunk_blocks": self.chunk_blocks,
            "stop_at": self.total,
        }

    @property
    def marks(self) -> Int[np.ndarray, " e"]:
        """Rounds after which metrics are taken."""
        return np.append(np.arange(self.block_rounds, self.total, self.block_rounds), self.total)

    @property
    def chunk(self) -> int:
        """Rounds of a whole chunk."""
        return self.block_rounds * self.chunk_blocks

    @property
    def ends(self) -> list[int]:
        """Rounds at which a callback may stop the run."""
        return [*range(self.chunk, self.total, self.chunk), self.total]

    def ahead(self, done: int) -> int:
        """Rounds to the end of the chunk after so many rounds."""
        return min(self.total, (done // self.chunk + 1) * self.chunk) - done

    def blocks(self, done: int) -> Blocks:
        """The next call's blocks: full chunks, then a shorter one, in at most two compilations."""
        remaining = self.total - done
        count = min(self.chunk_blocks, remaining // self.block_rounds)
        tail = 0 if count == self.chunk_blocks else remaining - count * self.block_rounds
        return Blocks(count, self.block_rounds, tail)

    @property
    def variants(self) -> list[Blocks]:
        """The distinct blocks of all chunks; a resumed run has no others."""
        last = (self.total - 1) // self.chunk * self.chunk
        return list(dict.fromkeys([self.blocks(0), self.blocks(last)]))


@dataclass(frozen=True)
class Meter:
    """Rounds and seconds of chunks; a first chunk, which is slower, counts only if alone."""

    runs: int
    chunks: list[tuple[int, float]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Rounds per second over all runs; nan before the first chunk."""
        rounds, seconds = np.sum(self.chunks[1:] or self.chunks or [(0, np.nan)], axis=0)
        return float(self.runs * rounds / seconds)


class _Arguments(NamedTuple):
    """What all compiled rounds take first; shows neither keys nor records."""

    statics: Statics
    arrays: Arrays
    data: Data
    state: State
    batch_keys: PRNGKeyArray
    noise_keys: PRNGKeyArray

    def __repr__(self) -> str:
        return "_Arguments(...)"


@dataclass(eq=False)
class RunState:
    """The state of a run between chunks.

    Attributes:
        inputs: Inputs of the run.
        schedule: Its rounds.
        state: The stacked state.
        noise_keys: [S] keys of the noise.
        metrics: name -> [E, S, V] metrics, nan where none were taken yet.
        storage: Its files, after `open`.
        done: Rounds done.
        ended: Whether it has ended: all rounds, or stopped.
        decided: Whether a callback may have decided the end.
        sums: name -> [S, V] sums of metrics since the last mark, for runs stored between marks.
        saved: Rounds done in the stored state, or None.
    """

    inputs: Inputs
    schedule: RunSchedule
    state: State
    noise_keys: PRNGKeyArray
    metrics: dict[str, np.ndarray]
    storage: Storage = field(init=False)
    done: int = 0
    ended: bool = False
    decided: bool = False
    sums: Metrics = field(default_factory=dict)
    saved: int | None = None

    @classmethod
    def first(
        cls,
        tasks: Tasks,
        schedule: RunSchedule,
        devices: int | None,
        phase: int = 0,
        start: Models = None,
        *,
        throwaway_key: bool = False,
    ) -> "RunState":
        """The state of a run before its first round; a release has a throwaway key until `open`.

        Args:
            tasks: Plans, problems and seeds, from `dpjax.engine.arguments.check_run`.
            schedule: The rounds.
            devices: To spread the agents over, or None.
            phase: Number of the run among several in a row.
            start: Models to start from, leaves [S, V, n, ...]; None for the problem's.
            throwaway_key: Whether a simulation has one, too, so that no noise is spent.

        Raises:
            ValueError: Naming what does not fit.
        """
        plans, problems, seeds = tasks
        check_device(plans, devices)
        data = Inputs.of(plans, problems, seeds, devices, phase)
        if throwaway_key or data.statics.release:
            # The key of a release comes with its file, in `open`.
            noise_keys = keys.throwaway(len(seeds))
        else:
            noise_keys = keys.seed_keys(seeds, "noise", phase)
        state = data.initial(data.start(start, len(plans)), noise_keys)
        shape = (len(schedule.marks), len(seeds), len(plans))
        metrics = {name: np.full(shape, np.nan) for name in data.names}
        return cls(data, schedule, state, noise_keys, metrics, sums=zeros(data.statics, state))

    def __repr__(self) -> str:
        # Tracebacks that show local variables print it.
        return "RunState(...)"

    @property
    def arguments(self) -> "_Arguments":
        """The first arguments of the compiled rounds."""
        data = self.inputs
        return _Arguments(
            data.statics, data.arrays, data.data, self.state, data.batch_keys, self.noise_keys
        )

    def open(self, storage: Storage) -> None:
        """Take a release's noise key, and go on from the newest checkpoint if there is one.

        Args:
            storage: The files of the run.

        Raises:
            ValueError: For a checkpoint that is damaged or cannot be written, or that is older
                than the messages of its release; for a key file that does not fit.
        """
        self.storage = storage
        if storage.key_file is not None:
            self.noise_keys = storage.noise_keys()
            self._draw_again()
        restored = None if storage.folder is None else storage.restore(self._portable())
        if restored is not None:
            self.done, portable, self.ended = restored
            self.saved = self.done
            (models, memory, done), self.metrics, decided, sums = portable
            self.sums = jax.tree.map(jnp.asarray, sums)
            self.decided = bool(decided)
            # The first models go before those of the checkpoint come.
            self.state = program.at_round(self.state._replace(models=(), memory=()), done)
            statics = self.inputs.statics
            models, memory = place((models, memory), statics.mesh, 2, statics.agents)
            self.state = self.state._replace(models=models, memory=memory)
            if program.keeps_noise(self.state) and not self.ended:
                self._draw_again(jnp.int32(self.done))
        elif storage.key_file is not None:
            # Before anything is sent: from here on, losing the key is noticed.
            self.save()
        if not self.ended:
            storage.check_sent(self.done)

    def record(self, length: int, new: Metrics) -> None:
        """Record the metrics of rounds that were just done.

        Args:
            length: Rounds done since.
            new: name -> [e, S, V] metrics of the marks among them.

        Raises:
            ValueError: For a release whose messages were not all finite.
        """
        marks = self.schedule.marks
        end = self.done + length
        if np.any(new.get(NOT_FINITE, 0)):
            raise ValueError(not_finite(f"rounds {self.done + 1} to {end}"))
        # A host loop's rounds between two marks bring no metrics.
        for name in self.metrics.keys() & new.keys():
            self.metrics[name][(marks > self.done) & (marks <= end)] = new[name]
        self.done = end

    def latest(self) -> dict[str, np.ndarray]:
        """Metrics of the last mark, name -> [S, V]."""
        last = np.flatnonzero(self.schedule.marks <= self.done)[-1]
        # A callback may keep them, while these arrays go on changing.
        return {name: value[last].copy() for name, value in self.metrics.items()}

    def lost_noise(self) -> list[LostNoise | None]:
        """For each plan the noise that its messages lacked; None where no noise was lost."""
        if LOST not in self.metrics:
            return [None] * jax.tree.leaves(self.state.models)[0].shape[1]
        marks = self.schedule.marks
        shares = self.metrics[LOST][marks <= self.done]
        # A share of nan counts as 1. Of the seeds the largest counts.
        shares = np.where(shares <= 1, shares, 1.0).max(axis=1)
        begins = np.append(1, marks[:-1] + 1)
        losses = []
        for plan_shares in shares.T:
            above = np.flatnonzero(plan_shares > _TOLERATED_LOSS)
            loss = None
            if above.size:
                loss = LostNoise(int(begins[above[0]]), float(plan_shares.max()))
            losses.append(loss)
        return losses

    @property
    def stored(self) -> str:
        """The stored rounds, in words."""
        rounds = _validate.counted(self.saved or 0, "round")
        return f"{self.storage.folder or 'no checkpoint'} holds {rounds}"

    def save(self) -> None:
        """Store the state, if there is a folder that does not hold it yet.

        Raises:
            ValueError: If it cannot be written.
        """
        # A message that is sent again needs no second copy of its state.
        if self.storage.folder is not None and self.saved != self.done:
            self.storage.save(self.done, self._portable(), ended=self.ended)
            self.saved = self.done

    def _portable(self) -> Tree:
        """The state without its secret, metrics, and whether a callback decided anything."""
        # Past noise would reveal later noise; `program.secret` draws it again from the key.
        state = self.state
        public = processes.collected((state.models, state.memory, state.round))
        return public, self.metrics, np.asarray(self.decided), processes.collected(self.sums)

    def _draw_again(self, rounds: Int[Array, ""] | None = None) -> None:
        """Replace the secret by that of the noise keys, after so many rounds."""
        # The old one goes first, so that two never take memory at once.
        self.state = self.state._replace(secret=())
        inputs = self.inputs
        secret = program.secret(
            inputs.statics, inputs.arrays, self.state.models, self.noise_keys, rounds
        )
        self.state = self.state._replace(secret=secret)
