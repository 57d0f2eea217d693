"""Checkpoints of a run: orbax folders, written beside and renamed, tied to one run."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints of one run.

    A checkpoint holds models, optimizer states and metrics, never a noise key: those are derived
    from the seed, or kept in the key file of a release.

    Args:
        folder: Where; made when missing.
        identity: What the run is, a flat dict of strings; a folder of another run is refused.

    Raises:
        ValueError: If the folder holds checkpoints of another run, naming what differs.
    """

    def __init__(self, folder: str | os.PathLike, identity: dict[str, str]):
        import orbax.checkpoint as ocp  # Slow to import; only runs with checkpoints need it.

        self._ocp = ocp
        self.folder = Path(folder).absolute()
        self._identity = identity
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"checkpoint {self.folder} is a file; name a folder")
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2, enable_async_checkpointing=False, create=True
            ),
        )
        step = self._manager.latest_step()
        if step is not None:
            self._check(self._meta(step))

    def _meta(self, step: int) -> dict[str, Any]:
        restored = self._manager.restore(
            step, args=self._ocp.args.Composite(meta=self._ocp.args.JsonRestore())
        )
        return restored["meta"]

    def _check(self, meta: dict[str, Any]) -> None:
        stored = meta["identity"]
        names = sorted(set(stored) | set(self._identity))
        differing = [name for name in names if stored.get(name) != self._identity.get(name)]
        if differing:
            raise ValueError(
                f"checkpoint {self.folder} belongs to another run: {', '.join(differing)} differ; "
                "give each run a folder of its own, or resume with what it was started with"
            )

    def status(self) -> tuple[bool, bool]:
        """Whether the run has begun, and whether it has ended."""
        step = self._manager.latest_step()
        return (False, False) if step is None else (True, bool(self._meta(step)["ended"]))

    def save(self, rounds: int, tree: Any, *, ended: bool) -> None:
        """Store the state after ``rounds`` rounds; returns when it is on disk.

        Args:
            rounds: Rounds done.
            tree: Pytree of arrays without random keys.
            ended: Whether the run has ended (all rounds, or stopped early).
        """
        leaves = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
        self._manager.save(
            rounds,
            args=self._ocp.args.Composite(
                state=self._ocp.args.StandardSave(leaves),
                meta=self._ocp.args.JsonSave({"identity": self._identity, "ended": ended}),
            ),
            force=True,
        )
        self._manager.wait_until_finished()

    def restore(self, like: Any) -> tuple[int, Any, bool] | None:
        """Load the newest checkpoint.

        Args:
            like: Pytree of arrays with the structure, shapes and dtypes that were saved.

        Returns:
            Rounds done, the pytree as numpy arrays, and whether the run had ended; None when
            there is no checkpoint yet.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        leaves, structure = jax.tree.flatten(like)
        template = {
            str(i): np.empty(np.shape(leaf), np.asarray(leaf).dtype)
            for i, leaf in enumerate(leaves)
        }
        restored = self._manager.restore(
            step,
            args=self._ocp.args.Composite(
                state=self._ocp.args.StandardRestore(template),
                meta=self._ocp.args.JsonRestore(),
            ),
        )
        values = [np.asarray(restored["state"][str(i)]) for i in range(len(leaves))]
        return step, jax.tree.unflatten(structure, values), restored["meta"]["ended"]

    def close(self) -> None:
        """Release orbax's resources."""
        self._manager.close()
