"""The memory that a run takes, refused where there is less."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from dpjax import _validate
from dpjax.learning.problem import Problem
from dpjax.protocols import State
from dpjax.transforms.rounds import WIDEST

__all__: list[str] = []


class Usage(NamedTuple):
    """Bytes of a process or a device.

    Attributes:
        in_use: Now.
        peak: The most so far.
        limit: All that there are.
    """

    in_use: int
    peak: int
    limit: int


class RunMemory(NamedTuple):
    """The memory of all runs of a call.

    Attributes:
        mesh: From `dpjax.engine.processes.agent_mesh`.
        agents: Number of agents n.
        seeds: Number of seeds.
        plans: Number of plans.
    """

    mesh: Mesh | None
    agents: int
    seeds: int
    plans: int

    @property
    def devices(self) -> int:
        """Devices that the agents are spread over."""
        return 1 if self.mesh is None else self.mesh.size

    def usage(self) -> Usage:
        """The usage of this process, or of its fullest device."""
        # The fullest one decides: devices hold equal parts, but other work may use them too.
        devices = self._device_usages()
        return max(devices) if devices else Usage(*_validate.resident(), _validate.memory_limit())

    def check_models(self, problem: Problem) -> None:
        """Refuse models that do not fit twice: those to start from, and the state's.

        Args:
            problem: The problem, whose ``init`` is not run.

        Raises:
            ValueError: With the bytes that they take and those that there are.
        """
        leaves = jax.tree.leaves(jax.eval_shape(problem.init, jax.random.key(0)))
        entries = sum(leaf.size for leaf in leaves)
        shape = f"[{self.seeds} seeds, {self.plans} plans, {self.agents} agents, {entries:,}"
        _validate.memory(
            "problem",
            problem,
            f"the array {shape} entries] of models, with their first state,",
            *(2, self.seeds, self.plans, self.agents, byte_count(leaves)),
            item=1,
            maximum=sum(usage.limit for usage in self._device_usages()) or None,
        )

    def check_state(self, state: State, keeps_noise: bool) -> None:
        """Refuse a first state that does not fit.

        Args:
            state: Its shapes, a `dpjax.protocols.State`.
            keeps_noise: Whether its secret holds noise of past rounds.

        Raises:
            ValueError: With its bytes and those that there are.
        """
        size = byte_count(state)
        secret_size = byte_count(state.secret)
        remedy = "run fewer seeds or plans at once, or use more devices"
        # More than half of the state: fewer diagonals help more than fewer runs.
        if keeps_noise and 2 * secret_size > size:
            remedy = (
                "give the noise over rounds few diagonals, such as bands=8, of which a run keeps 7 "
                f"rounds (it keeps all rounds of more than {WIDEST + 1} diagonals), or {remedy}"
            )
        part = f"the first state, {secret_size / 2**30:,.2f} of them for noise kept over rounds"
        self._require(-(-size // self.devices), part, remedy)

    def check_programs(self, programs: Iterable[Any], state: State) -> tuple[int, int]:
        """Compile the rounds of a run, and refuse them where they do not fit.

        Args:
            programs: Traced, not compiled.
            state: Of their arrays, which are waited for: they count as held.

        Returns:
            The bytes held, and those that the largest program adds: its outputs and intermediate
            values, without the state whose buffers it uses again.

        Raises:
            ValueError: With both and the limit.
        """
        added = 0
        for program in programs:
            analysis = program.lower().compile().memory_analysis()
            if analysis is not None:  # Not every platform has one.
                # An alias is an output in the place of an argument, which is held already.
                size = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
                added = max(added, size - analysis.alias_size_in_bytes)
        # Arrays that are still under way would not count as held.
        jax.block_until_ready(state)
        remedy = (
            "run fewer seeds or plans at once, give Protect(microbatch=...) for clipped records, "
            "or use more devices"
        )
        return self._require(added, "the compiled program", remedy)

    def _require(self, added: int, part: str, remedy: str) -> tuple[int, int]:
        """Refuse ``added`` bytes a device that do not fit beside the held ones; return both."""
        machine = "device"
        if not self._device_usages():
            # On CPUs all devices share the host's memory.
            machine = "machine"
            added *= len(self._local_devices())
        in_use, _, limit = self.usage()
        total = in_use + added
        if total > limit:
            sizes = [f"{size / 2**30:,.2f}" for size in (total, in_use, added, limit)]
            raise ValueError(
                f"seeds has {_validate.counted(self.seeds, 'seed')}, with "
                f"{_validate.counted(self.plans, 'plan')} of {self.agents} agents. Their rounds "
                f"take {sizes[0]} GiB ({sizes[1]} held and {sizes[2]} more in {part}); this "
                f"{machine} has {sizes[3]} GiB: {remedy}"
            )
        return in_use, added

    def _local_devices(self) -> Sequence[jax.Device]:
        return jax.local_devices()[:1] if self.mesh is None else self.mesh.local_devices

    def _device_usages(self) -> list[Usage]:
        """The usage of each device; empty where devices use the host's memory."""
        usages = []
        for device in self._local_devices():
            stats = device.memory_stats() or {}
            names = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
            if not all(name in stats for name in names):
                return []
            usages.append(Usage(*(stats[name] for name in names)))
        return usages


def byte_count(tree: Any) -> int:
    """Return the bytes of a tree of arrays or shapes.

    Args:
        tree: The tree.
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
