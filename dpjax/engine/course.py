"""The rounds of a run: where it measures, calls back and may stop, and how long they take."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from dpjax import _validate
from dpjax.plans.endings import check_stop_at

__all__: list[str] = []


@jax.tree_util.register_static
@dataclass(frozen=True)
class Blocks:
    """The rounds of a call, as part of its program: a static leaf of its arguments.

    Attributes:
        whole: Whole blocks.
        every: Rounds a block, after which metrics are taken.
        tail: Rounds of a last, shorter block; 0 is none.
    """

    whole: int
    every: int
    tail: int = 0

    @property
    def data(self) -> Int[np.ndarray, " e"]:
        """The rounds of each block, as data: then blocks of all lengths are one program."""
        each = [self.every] * self.whole + [self.tail] * bool(self.tail)
        return np.array(each, np.int32)


@dataclass(frozen=True)
class Course:
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
    def of(cls, rounds: int, stop_at: Any, eval_every: Any, chunk_blocks: Any) -> "Course":
        """Check what a run is asked for.

        Args:
            rounds: Rounds T of its plans.
            stop_at: Rounds to do, or None.
            eval_every: Rounds between metrics; None is a twentieth of the rounds.
            chunk_blocks: How many such blocks run in one call.

        Raises:
            ValueError: For anything but whole numbers above 0, or more rounds than are planned.
        """
        total = check_stop_at(stop_at, rounds)
        if eval_every is None:
            eval_every = max(1, total // 20)
        every = min(_validate.integer("eval_every", eval_every), total)
        return cls(total, every, _validate.integer("chunk_blocks", chunk_blocks))

    @property
    def marks(self) -> Int[np.ndarray, " e"]:
        """Rounds after which metrics are taken."""
        return np.append(np.arange(self.every, self.total, self.every), self.total)

    @property
    def ends(self) -> list[int]:
        """Rounds at which a callback may stop the run."""
        chunk = self.every * self.chunk_blocks
        return [*range(chunk, self.total, chunk), self.total]

    def blocks(self, left: int) -> Blocks:
        """The next call's blocks: whole chunks, then a shorter one, so two compilations at most.

        Args:
            left: Rounds to do.
        """
        whole = min(self.chunk_blocks, left // self.every)
        tail = 0 if whole == self.chunk_blocks else left - whole * self.every
        return Blocks(whole, self.every, tail)

    def ahead(self, done: int) -> int:
        """Rounds to the end of a chunk.

        Args:
            done: Rounds done.
        """
        chunk = self.every * self.chunk_blocks
        return min(self.total, (done // chunk + 1) * chunk) - done

    @property
    def variants(self) -> list[Blocks]:
        """The blocks of all chunks, each once; resumed, a run has no others."""
        chunk = self.every * self.chunk_blocks
        lefts = {min(chunk, self.total), self.total % chunk} - {0}
        return [self.blocks(left) for left in sorted(lefts)]

    def options(self, phase: int, stopping: str) -> dict[str, Any]:
        """What of a run's arguments is part of what it is, by name."""
        return {
            "eval_every": self.every,
            "chunk_blocks": self.chunk_blocks,
            "phase": phase,
            "stop_at": self.total,
            "stopping": stopping,
        }


class Meter:
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
