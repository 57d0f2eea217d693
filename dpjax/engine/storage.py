"""Where a run keeps its state and its key: the checkpoint folder and the key file, together."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpjax import _files
from dpjax.engine import identity, keys
from dpjax.engine.checkpoint import Checkpoints, unfinished

__all__: list[str] = []


@dataclass(frozen=True, eq=False)
class Storage:
    """What a run keeps on disk, tied to it by its identity.

    Attributes:
        identity: What the run is; empty where nothing is kept.
        store: Its checkpoints, or None.
        key_file: Where a release keeps its noise key, or None.
    """

    identity: dict[str, str]
    store: Checkpoints | None = None
    key_file: str | os.PathLike | None = None

    @classmethod
    @contextlib.contextmanager
    def of(cls, identity: dict[str, str], checkpoint: Any, key_file: Any) -> Iterator["Storage"]:
        """Lock the key file and open the folder of checkpoints, for a ``with`` block.

        Args:
            identity: What the run is.
            checkpoint: Folder, or None.
            key_file: File, or None.

        Raises:
            ValueError: For a folder of another run, or what is in use or cannot be used.
        """
        with contextlib.ExitStack() as held:
            store = None
            if key_file is not None:
                # Beside it: the file itself is replaced with every note.
                own = Path(key_file).resolve()
                beside = own.with_name(f".{own.name}.lock")
                lock = _files.Lock("key_file", key_file, beside, passing=True)
                held.enter_context(contextlib.closing(lock))
            if checkpoint is not None:
                store = Checkpoints(checkpoint, identity)
                held.enter_context(contextlib.closing(store))
            yield cls(identity, store, key_file)

    def noise_keys(self, seeds: tuple[int, ...], phase: int) -> Any:
        """The [S] noise keys: derived from the seeds in a simulation, secret in a release.

        Guarantee: a release that has begun gets the key that it began with, or none: rounds sent
        again with fresh noise would spend their budget again. The key of one that has ended is
        not read.

        Args:
            seeds: The seeds.
            phase: Number of the run among several in a row.

        Raises:
            ValueError: For a key file that is missing, damaged or another run's, or whose release
                has its checkpoints elsewhere.
        """
        if self.key_file is None:
            return keys.stacked(seeds, "noise", phase)
        fingerprint = identity.fingerprint(self.identity)
        begun, ended = (False, False) if self.store is None else self.store.status()
        if ended:
            return keys.spent_key()[None]
        folder = None if self.store is None else self.store.folder
        if not begun and not os.path.lexists(self.key_file):
            return keys.create_key_file(self.key_file, fingerprint, checkpoint=folder)[None]
        key = keys.read_key_file(self.key_file, fingerprint)
        self._note(folder, fingerprint, begun)
        return key[None]

    def _note(self, folder: Path | None, fingerprint: str, begun: bool) -> None:
        """Keep the key file's note of the checkpoints, and refuse to begin beside others."""
        assert self.key_file is not None
        noted = keys.noted_checkpoint(self.key_file, fingerprint)
        if not begun and noted not in (None, folder) and unfinished(noted, self.identity):
            raise ValueError(
                f"key_file {self.key_file} keeps the noise of a release whose checkpoint is "
                f"{noted}; give checkpoint={str(noted)!r} to carry on, or move that folder away to "
                "send all rounds again, with the same noise"
            )
        if folder is not None and folder != noted:
            keys.note_checkpoint(self.key_file, fingerprint, folder)

    def sending(self, round: int, message: Any) -> None:
        """Note, in a release, that the message of a round is about to go out.

        Args:
            round: Rounds done before it.
            message: What goes out.

        Raises:
            ValueError: If the key file cannot be read or written, or another message of that round
                has gone out; this one is not sent then.
        """
        if self.key_file is not None:
            run = identity.fingerprint(self.identity)
            keys.note_sent(self.key_file, run, round + 1, identity.digest(message))

    def check_sent(self, done: int) -> None:
        """Refuse a release whose messages went further than what is left of its state.

        Guarantee: of the rounds that may have been sent, all but the last are done here; that one
        is sent again as it was. Others would get their noise a second time, on other gradients.

        Args:
            done: Rounds done.

        Raises:
            ValueError: If more were sent.
        """
        if self.key_file is None:
            return
        sent = keys.noted_sent(self.key_file, identity.fingerprint(self.identity))
        if sent > done + 1:
            raise ValueError(
                f"key_file {self.key_file} says that {sent} rounds were sent, the checkpoint is of "
                f"{done}: their noise would go out again with other gradients. Restore the newest "
                "checkpoint, or begin another run and account for both"
            )

    def end(self) -> None:
        """End the run: its checkpoints stay, its key is deleted."""
        if self.key_file is not None:
            keys.delete_key_file(self.key_file, identity.fingerprint(self.identity))
