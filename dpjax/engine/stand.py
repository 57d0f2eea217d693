"""How far a run is, and what of that a checkpoint holds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.engine import program, sharding, slots
from dpjax.engine.checkpoint import Checkpoints
from dpjax.engine.course import Course
from dpjax.engine.job import Job
from dpjax.engine.rounds import LOST
from dpjax.engine.storage import Storage
from dpjax.protocols import State

__all__: list[str] = []

LEAST = 0.01
"""Share of a message's entries that may go out without noise before a run says so."""


@dataclass(eq=False)
class Stand:
    """How far a run is.

    Attributes:
        state: The stacked state.
        noise_keys: [S] keys of the noise.
        taken: name -> [E, S, V] metrics, nan where none were taken yet.
        done: Rounds done.
        ended: Whether it has ended: all rounds, or stopped.
        decided: Whether a callback may have decided where.
        sums: name -> [S, V] sums of metrics since the last mark, where a run is kept between marks.
        saved: Rounds done when it was stored last, or None.
    """

    state: State
    noise_keys: Any
    taken: dict[str, np.ndarray]
    done: int = 0
    ended: bool = False
    decided: bool = False
    sums: dict[str, Any] = field(default_factory=dict)
    saved: int | None = None

    @classmethod
    def first(
        cls,
        job: Job,
        course: Course,
        start: Any,
        noise_keys: Any,
        storage: Storage,
        sums: Callable[[State], dict[str, Any]],
    ) -> "Stand":
        """Where a run begins: before its first round, or at its newest checkpoint.

        Args:
            job: What it is called with.
            course: Its rounds.
            start: Models to start from, leaves [S, V, n, ...].
            noise_keys: [S] keys of the noise.
            storage: Where it is kept.
            sums: Of a driver, what it keeps of metrics before a block.

        Raises:
            ValueError: For a checkpoint that is damaged or cannot be written, or that is older
                than the messages of its release.
        """
        state = job.initial(start, noise_keys)
        shape = (len(course.marks), *jax.tree.leaves(start)[0].shape[:2])
        taken = {name: np.full(shape, np.nan) for name in job.names}
        at = cls(state, noise_keys, taken, sums=sums(state))
        if storage.store is not None:
            if (restored := storage.store.restore(at._portable())) is not None:
                at.done, portable, at.ended = restored
                at.saved = at.done
                at._adopt(portable, job)
            elif storage.key_file is not None:
                # Before anything is sent: from here on, losing the key is noticed.
                at.save(storage.store)
        if not at.ended:
            storage.check_sent(at.done)
        return at

    def measured(self, course: Course, length: int, new: dict[str, Any]) -> None:
        """Note the metrics of rounds that were just done.

        Args:
            course: The run's rounds.
            length: Rounds done since.
            new: name -> [e, S, V] metrics of the marks among them.
        """
        inside = (course.marks > self.done) & (course.marks <= self.done + length)
        for name, value in new.items():
            self.taken[name][inside] = value
        self.done += length

    def latest(self, course: Course) -> dict[str, np.ndarray]:
        """Metrics of the last mark, name -> [S, V].

        Args:
            course: The run's rounds.
        """
        last = np.flatnonzero(course.marks <= self.done)[-1]
        return {name: value[last].copy() for name, value in self.taken.items()}

    def lost(self, course: Course) -> list[tuple[int, float] | None]:
        """Of each plan, from which round on more than `LEAST` of a message was without noise.

        Args:
            course: The run's rounds.

        Returns:
            (round, share) of each plan, the first round of the block and the largest share of all;
            None where none was lost.
        """
        if LOST not in self.taken:
            return [None] * jax.tree.leaves(self.state.models)[0].shape[1]
        known = self.taken[LOST][course.marks <= self.done]
        # A share that is no number may hide anything.
        shares = np.where(known <= 1, known, 1.0).max(axis=1)
        starts = [1, *(course.marks[:-1] + 1)]
        return [
            (int(starts[int(np.argmax(each > LEAST))]), float(each.max()))
            if (each > LEAST).any()
            else None
            for each in shares.T
        ]

    def save(self, store: Checkpoints | None) -> None:
        """Store it, where that has not been done.

        Args:
            store: The run's checkpoints, or None.

        Raises:
            ValueError: If it cannot be written.
        """
        if store is not None and self.saved != self.done:
            store.save(self.done, self._portable(), ended=self.ended)
            self.saved = self.done

    def _portable(self) -> Any:
        """The state without its secret, metrics, and whether a callback decided anything."""
        # Past noise would give later rounds' away; it follows from the key, see program.replay.
        state = self.state
        open_ = jax.device_get((state.models, state.memory, state.round))
        return open_, self.taken, np.asarray(self.decided), jax.device_get(self.sums)

    def _adopt(self, portable: Any, job: Job) -> None:
        """Put a checkpoint's values into a fresh state, which has the keys; draw past noise."""
        open_, self.taken, decided, sums = portable
        self.sums = jax.tree.map(jnp.asarray, sums)
        self.decided = bool(decided)
        models, memory, done = jax.tree.map(jnp.asarray, open_)

        def counted(leaf: Any) -> Any:
            # A copy: buffers are given to the program, and none twice.
            return jnp.array(done, leaf.dtype, copy=True) if slots.is_counter(leaf) else leaf

        secret = jax.tree.map(counted, self.state.secret)
        self.state = State(sharding.place(models, job.mesh, 2), memory, secret, done)
        if slots.keeps_noise(self.state) and not self.ended:
            self.state = program.replay(
                job.statics, job.arrays, self.state, self.noise_keys, jnp.int32(self.done)
            )
