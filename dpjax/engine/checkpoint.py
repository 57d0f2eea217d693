"""Checkpoints of a run: orbax folders, written beside and renamed, tied to one run."""

import contextlib
import io
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpjax import _files
from dpjax.engine import identity as identity_

__all__: list[str] = []

_MARK = "dpjax.json"
"""The file that makes a folder one of checkpoints and says of which run."""
_GONE = ".dpjax.gone."
"""How the names of checkpoints begin that are being deleted."""
_LATE = 0.5  # seconds
"""How long threads of a failed write are waited for, which have nobody to raise to."""
_KEPT = 2
"""How many checkpoints are kept, the newest."""


class Checkpoints:
    """The checkpoints of one run.

    A checkpoint holds models, optimizer states and metrics, never a noise key: those are derived
    from the seed, or kept in the key file of a release. What is read back is what was written, by
    a digest: a changed bit would put a release's noise on other gradients. The folder is locked
    until `close` or the end of the process.

    Args:
        folder: Where; made when missing. Else it must be empty, or this run's.
        identity: What the run is, a flat dict of strings; a folder of another run is refused.

    Raises:
        ValueError: If the folder holds checkpoints of another run, naming what differs, or
            something else, is in use, or cannot be used.
    """

    def __init__(self, folder: str | os.PathLike, identity: dict[str, str]):
        import orbax.checkpoint as ocp  # Slow to import; only runs with checkpoints need it.

        self._ocp = ocp
        self.folder = Path(folder).absolute()
        self._identity = identity
        self._fingerprint = identity_.fingerprint(identity)
        with self._using("be used"):
            _check_folder(self.folder, identity)
            # Models of every saved round are not for everybody's eyes.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (self.folder / _MARK).exists():
                mark = {"format": 1, "identity": identity}
                with contextlib.suppress(FileExistsError):
                    _files.create(self.folder / _MARK, json.dumps(mark, indent=1).encode())
            self._lock = _files.Lock("checkpoint", self.folder, self.folder / _MARK)
        try:
            with self._using("be used"):
                _check_folder(self.folder, identity)  # Another run may have been quicker.
                self._manager = ocp.CheckpointManager(
                    self.folder,
                    options=ocp.CheckpointManagerOptions(
                        enable_async_checkpointing=False, create=True
                    ),
                )
                self._clear()
        except BaseException:
            self._lock.close()
            raise

    def status(self) -> tuple[bool, bool]:
        """Whether the run has begun, and whether it has ended.

        Raises:
            ValueError: If the newest checkpoint is damaged.
        """
        steps = _steps(self.folder)
        return (True, self._meta(steps[-1])["ended"]) if steps else (False, False)

    def save(self, rounds: int, tree: Any, *, ended: bool) -> None:
        """Store the state after ``rounds`` rounds; returns when it is on disk.

        Args:
            rounds: Rounds done.
            tree: Pytree of arrays without random keys.
            ended: Whether the run has ended (all rounds, or stopped early).

        Raises:
            ValueError: If it cannot be written; the checkpoints before it stay.
        """
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        meta = {"ended": ended, "digest": self._digest(rounds, ended, leaves)}
        with self._using("be written"), _unlogged():
            self._manager.save(
                rounds,
                args=self._ocp.args.Composite(
                    # orbax stores no arrays without numbers; their shape is known when read back.
                    state=self._ocp.args.StandardSave(
                        {str(i): leaf for i, leaf in enumerate(leaves) if leaf.size}
                    ),
                    meta=self._ocp.args.JsonSave(meta),
                ),
                force=True,
            )
            self._manager.wait_until_finished()
            for step in _steps(self.folder)[:-_KEPT]:
                # A name of its own first: a kill leaves no half of a checkpoint under a number.
                (self.folder / str(step)).rename(self.folder / f"{_GONE}{step}")
            self._clear()

    def restore(self, like: Any) -> tuple[int, Any, bool] | None:
        """Load the newest checkpoint.

        Args:
            like: Pytree of arrays with the structure, shapes and dtypes that were saved.

        Returns:
            Rounds done, the pytree as numpy arrays, and whether the run had ended; None when
            there is no checkpoint yet.

        Raises:
            ValueError: If it is damaged.
        """
        steps = _steps(self.folder)
        if not steps:
            return None
        step = steps[-1]
        leaves, structure = jax.tree.flatten(like)
        empty = [np.empty(np.shape(leaf), np.asarray(leaf).dtype) for leaf in leaves]
        template = {str(i): leaf for i, leaf in enumerate(empty) if leaf.size}
        meta = self._meta(step)
        with self._reading(step):
            restored = self._manager.restore(
                step, args=self._ocp.args.Composite(state=self._ocp.args.StandardRestore(template))
            )["state"]
            values = [np.asarray(restored.get(str(i), leaf)) for i, leaf in enumerate(empty)]
            if self._digest(step, meta["ended"], values) != meta["digest"]:
                raise ValueError("its digest does not fit")
        return step, jax.tree.unflatten(structure, values), meta["ended"]

    def close(self) -> None:
        """Release orbax's resources, and the folder to others."""
        try:
            self._manager.close()
        finally:
            self._lock.close()

    def _meta(self, step: int) -> dict[str, Any]:
        with self._reading(step):
            meta = self._manager.restore(
                step, args=self._ocp.args.Composite(meta=self._ocp.args.JsonRestore())
            )["meta"]
            if not isinstance(meta["ended"], bool) or not isinstance(meta["digest"], str):
                raise ValueError("its description is of another kind")
        return meta

    def _clear(self) -> None:
        for gone in self.folder.glob(f"{_GONE}*"):
            shutil.rmtree(gone)

    def _digest(self, rounds: int, ended: bool, leaves: list[np.ndarray]) -> str:
        parts = {"run": self._fingerprint, "rounds": str(rounds), "ended": str(ended)}
        return identity_.fingerprint(parts | {"state": identity_.digest(leaves)})

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # orbax and tensorstore raise what they like
            place = self.folder / str(step)
            raise ValueError(
                f"checkpoint {place} is damaged ({_brief(error)}); restore it from a copy, or move "
                f"{place} away to carry on from the one before it"
            ) from None

    @contextlib.contextmanager
    def _using(self, what: str) -> Iterator[None]:
        """Name the folder when the system, or orbax for it, fails."""
        try:
            yield
        except ValueError as error:
            if str(error).startswith("checkpoint "):
                raise
            raise self._unusable(what, error) from None
        except (OSError, RuntimeError) as error:
            raise self._unusable(what, error) from None

    def _unusable(self, what: str, error: Exception) -> ValueError:
        return ValueError(
            f"checkpoint {self.folder} cannot {what} ({_brief(error)}); what it held before is "
            "unharmed. Make room, or name a folder that can be written, and resume"
        )


def unfinished(folder: str | os.PathLike, identity: dict[str, str]) -> bool:
    """Whether a folder holds checkpoints of this very run, begun and not ended.

    Args:
        folder: Any path; nothing is made there.
        identity: What the run is.

    Raises:
        ValueError: If they are damaged.
    """
    folder = Path(folder)
    if not (folder / _MARK).is_file() or _marked(folder) != identity:
        return False
    with contextlib.closing(Checkpoints(folder, identity)) as store:
        begun, ended = store.status()
    return begun and not ended


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keep orbax's threads from logging, each with a traceback, what is raised here in one line."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    before = [each.disabled for each in loggers]
    for each in loggers:
        each.disabled = True
    # tensorstore's threads print there what they have nobody to raise to.
    stream, held = sys.stderr, io.StringIO()
    sys.stderr = held
    try:
        yield
    except Exception:
        time.sleep(_LATE)
        raise
    else:
        if held.getvalue():
            stream.write(held.getvalue())
    finally:
        sys.stderr = stream
        for each, was in zip(loggers, before, strict=True):
            each.disabled = was


def _steps(folder: Path) -> list[int]:
    """The rounds of which there is a checkpoint, in order."""
    return sorted(int(entry.name) for entry in folder.iterdir() if _is_step(entry))


def _is_step(entry: Path) -> bool:
    return entry.name.isascii() and entry.name.isdigit()


def _check_folder(folder: Path, identity: dict[str, str]) -> None:
    """Refuse a folder that is not this run's, before anything in it is touched."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"checkpoint {folder} is a file; name a folder")
    entries = sorted(folder.iterdir()) if folder.exists() else []
    entries = [entry for entry in entries if not entry.name.startswith(f".{_MARK}.")]
    if not entries:
        return
    if not (folder / _MARK).is_file():
        raise ValueError(
            f"checkpoint {folder} holds {entries[0].name} and no {_MARK}, so it is not a folder of "
            "checkpoints (or of an earlier version); name an empty or a new one"
        )
    if differing := identity_.differences(_marked(folder), identity):
        raise ValueError(
            f"checkpoint {folder} belongs to another run, which differs in {differing}; "
            "give each run a folder of its own, or resume with what it was started with"
        )
    for entry in entries:
        if _is_step(entry) and not all((entry / part).is_dir() for part in ("meta", "state")):
            raise ValueError(
                f"checkpoint {entry} is damaged, or none; restore it from a copy, or move it away "
                "to carry on from the one before it"
            )


def _marked(folder: Path) -> dict[str, str]:
    """The identity of the run whose folder this is."""
    try:
        mark = json.loads((folder / _MARK).read_text())
        stored = mark["identity"]
        if mark["format"] != 1 or not isinstance(stored, dict):
            raise ValueError("another format")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"checkpoint {folder / _MARK} is damaged ({_brief(error)}); restore it from a copy, or "
            "name another folder"
        ) from None
    return stored


def _brief(error: Exception) -> str:
    """The first line of what went wrong."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.splitlines()[0][:160]
