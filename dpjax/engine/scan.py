"""The first driver: all rounds of a chunk in one compiled call, messages exchanged inside it."""

from dataclasses import dataclass
from typing import Any

import jax

from dpjax.engine import program
from dpjax.engine.course import Blocks, Course
from dpjax.engine.job import Job
from dpjax.engine.stand import Stand
from dpjax.engine.storage import Storage
from dpjax.protocols import State

__all__: list[str] = []


@dataclass(frozen=True, eq=False)
class Scan:
    """The rounds of all runs, chunk by chunk.

    Attributes:
        job: What the program is called with.
        course: The rounds.
    """

    job: Job
    course: Course

    @property
    def options(self) -> dict[str, str]:
        """What makes a run another one, by name: nothing."""
        return {}

    def advance(self, at: Stand, storage: Storage) -> None:
        """Do the rounds of a chunk.

        Args:
            at: How far the runs are.
            storage: Where they are kept; nothing is stored before the chunk's end.
        """
        del storage
        job = self.job
        at.state, new = program.advance(
            job.statics, job.arrays, job.data, at.state, job.batch_keys, at.noise_keys,
            _told(self.course.blocks(self.course.total - at.done)),
        )  # fmt: skip
        at.measured(self.course, self.course.ahead(at.done), jax.device_get(new))

    def traced(self, state: State) -> list[Any]:
        """The program of every chunk's length, traced.

        Args:
            state: Before the first round.
        """
        job = self.job
        given = job.statics, job.arrays, job.data, state, job.batch_keys, job.batch_keys
        return [program.advance.trace(*given, _told(each)) for each in self.course.variants]

    def sums(self, state: State) -> dict[str, Any]:
        """Nothing: a call ends with a block, whose metrics are taken inside.

        Args:
            state: Of the runs.
        """
        del state
        return {}


def _told(blocks: Blocks) -> Any:
    """How the program is told the rounds of its blocks.

    As data on a CPU, where compiling a round takes longer than many runs. Other devices would ask
    the host after every round whether there is another; there they are part of the program.
    """
    return blocks.data if jax.default_backend() == "cpu" else blocks
