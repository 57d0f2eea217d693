"""The progress of a run: its blocks and chunks, its state, and its checkpoints."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from dpjax import _validate
from dpjax.engine import processes, program
from dpjax.engine.checkpoint import Storage
from dpjax.engine.inputs import Inputs
from dpjax.engine.processes import place
from dpjax.engine.program import Blocks, zeros
from dpjax.engine.step import LOST
from dpjax.protocols import State

__all__: list[str] = []

TOLERATED_LOSS = 0.01
"""Share of a message's entries without noise above which a run warns."""


@dataclass(frozen=True)
class RunSchedule:
    """The rounds of a run, in chunks of blocks; metrics are taken after every block.

    Attributes:
        total: Rounds.
        every: Rounds of a block.
        chunk_blocks: Blocks of a chunk; callbacks and checkpoints come between chunks.
    """

    total: int
    every: int
    chunk_blocks: int

    @classmethod
    def of(cls, rounds: int, stop_at: Any, eval_every: Any, chunk_blocks: Any) -> "RunSchedule":
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
        every = min(_validate.integer("eval_every", eval_every), total)
        return cls(total, every, _validate.integer("chunk_blocks", chunk_blocks))

    @property
    def options(self) -> dict[str, int]:
        """Settings that are part of the run's identity, by name."""
        names = ("eval_every", "chunk_blocks", "stop_at")
        return dict(zip(names, (self.every, self.chunk_blocks, self.total), strict=True))

    @property
    def marks(self) -> Int[np.ndarray, " e"]:
        """Rounds after which metrics are taken."""
        return np.append(np.arange(self.every, self.total, self.every), self.total)

    @property
    def chunk(self) -> int:
        """Rounds of a whole chunk."""
        return self.every * self.chunk_blocks

    @property
    def ends(self) -> list[int]:
        """Rounds at which a callback may stop the run."""
        return [*range(self.chunk, self.total, self.chunk), self.total]

    def ahead(self, done: int) -> int:
        """Rounds to the end of the chunk after so many rounds."""
        return min(self.total, (done // self.chunk + 1) * self.chunk) - done

    def blocks(self, done: int) -> Blocks:
        """The next call's blocks: whole chunks, then a shorter one, in at most two compilations."""
        remaining = self.total - done
        whole = min(self.chunk_blocks, remaining // self.every)
        tail = 0 if whole == self.chunk_blocks else remaining - whole * self.every
        return Blocks(whole, self.every, tail)

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
        chunks = self.chunks[1:] or self.chunks or [(0, np.nan)]
        return self.runs * sum(n for n, _ in chunks) / sum(seconds for _, seconds in chunks)


@dataclass(eq=False)
class RunState:
    """The state of a run between chunks.

    Attributes:
        inputs: Inputs of the run.
        schedule: Its rounds.
        state: The stacked state.
        noise_keys: [S] keys of the noise.
        storage: Its files.
        metrics: name -> [E, S, V] metrics, nan where none were taken yet.
        done: Rounds done.
        ended: Whether it has ended: all rounds, or stopped.
        decided: Whether a callback may have decided the end.
        sums: name -> [S, V] sums of metrics since the last mark, for runs stored between marks.
        saved: Rounds done in the stored state, or None.
    """

    inputs: Inputs
    schedule: RunSchedule
    state: State
    noise_keys: Any
    storage: Storage
    metrics: dict[str, np.ndarray]
    done: int = 0
    ended: bool = False
    decided: bool = False
    sums: dict[str, Any] = field(default_factory=dict)
    saved: int | None = None

    @classmethod
    def first(
        cls, inputs: Inputs, schedule: RunSchedule, start: Any, noise_keys: Any, storage: Storage
    ) -> "RunState":
        """The first state of a run: before its first round, or at its newest checkpoint.

        Args:
            inputs: Inputs of the run.
            schedule: Its rounds.
            start: Models to start from, leaves [S, V, n, ...].
            noise_keys: [S] keys of the noise.
            storage: Its files.

        Raises:
            ValueError: For a checkpoint that is damaged or cannot be written, or that is older
                than the messages of its release.
        """
        state = inputs.initial(start, noise_keys)
        shape = (len(schedule.marks), *jax.tree.leaves(start)[0].shape[:2])
        metrics = {name: np.full(shape, np.nan) for name in inputs.names}
        sums = zeros(inputs.statics, state)
        run = cls(inputs, schedule, state, noise_keys, storage, metrics, sums=sums)
        restored = None if storage.folder is None else storage.restore(run._portable())
        if restored is not None:
            run.done, portable, run.ended = restored
            run.saved = run.done
            run._adopt(portable)
        elif storage.key_file is not None:
            # Before anything is sent: from here on, losing the key is noticed.
            run.save()
        if not run.ended:
            storage.check_sent(run.done)
        return run

    def record(self, length: int, new: dict[str, Any]) -> None:
        """Record the metrics of rounds that were just done.

        Args:
            length: Rounds done since.
            new: name -> [e, S, V] metrics of the marks among them.
        """
        marks = self.schedule.marks
        inside = (marks > self.done) & (marks <= self.done + length)
        for name, value in new.items():
            self.metrics[name][inside] = value
        self.done += length

    def latest(self) -> dict[str, np.ndarray]:
        """Metrics of the last mark, name -> [S, V]."""
        last = np.flatnonzero(self.schedule.marks <= self.done)[-1]
        return {name: value[last].copy() for name, value in self.metrics.items()}

    def lost_noise(self) -> list[tuple[int, float] | None]:
        """For each plan, the round from which a message lacked more noise than tolerated.

        Returns:
            (round, share) for each plan: the first round of the block, and the largest share of
            all blocks; None where no noise was lost.
        """
        if LOST not in self.metrics:
            return [None] * jax.tree.leaves(self.state.models)[0].shape[1]
        marks = self.schedule.marks
        known = self.metrics[LOST][marks <= self.done]
        # A share of nan counts as 1.
        shares = np.where(known <= 1, known, 1.0).max(axis=1)
        losses: list[tuple[int, float] | None] = []
        for each in shares.T:
            above = np.flatnonzero(each > TOLERATED_LOSS)
            begin = [1, *(marks[:-1] + 1)]
            losses.append((int(begin[above[0]]), float(each.max())) if above.size else None)
        return losses

    @property
    def stored(self) -> str:
        """The stored rounds, in words."""
        return f"{self.storage.folder or 'no checkpoint'} holds {self.saved or 0} rounds"

    def save(self) -> None:
        """Store the state, if there is a folder that does not hold it yet.

        Raises:
            ValueError: If it cannot be written.
        """
        if self.storage.folder is not None and self.saved != self.done:
            self.storage.save(self.done, self._portable(), ended=self.ended)
            self.saved = self.done

    def _portable(self) -> Any:
        """The state without its secret, metrics, and whether a callback decided anything."""
        # Past noise would reveal later noise; program.replay draws it again from the key.
        state = self.state
        public = processes.collected((state.models, state.memory, state.round))
        return public, self.metrics, np.asarray(self.decided), processes.collected(self.sums)

    def _adopt(self, portable: Any) -> None:
        """Put a checkpoint's values into a fresh state, which has the keys; draw past noise."""
        public, self.metrics, decided, sums = portable
        self.sums = jax.tree.map(jnp.asarray, sums)
        self.decided = bool(decided)
        models, memory, done = jax.tree.map(jnp.asarray, public)
        inputs, fresh = self.inputs, program.at_round(self.state, done)
        mesh, n = inputs.statics.mesh, inputs.statics.agents
        models, memory = place((models, memory), mesh, 2, n)
        self.state = State(models, memory, fresh.secret, done)
        if program.keeps_noise(self.state) and not self.ended:
            self.state = program.replay(
                inputs.statics, inputs.arrays, self.state, self.noise_keys, jnp.int32(self.done)
            )
