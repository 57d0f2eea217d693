"""Randomness of a run: nested keys for simulations, a secret key file for releases.

A simulation derives everything from its seed, and the privacy noise under a separate purpose.
Whoever knows the seed can subtract the noise. A release draws the noise key from the operating
system and keeps it in a file apart from records and checkpoints until the run ends. Sending a
round again with fresh noise would spend its budget again, so a run that lost the file cannot
continue.
"""

import glob
import hashlib
import json
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from dpjax import _files, _validate
from dpjax.accounting.arrays import Fields

__all__ = ["derive"]

PURPOSES = {"initial": 0, "batches": 1, "noise": 2}
"""Purposes of a seed's keys; the number is folded into the seed's key."""

_IMPLEMENTATION = "threefry2x32"
_FORMAT = 2


def derive(seed: int, purpose: str, phase: int = 0) -> PRNGKeyArray:
    """Derive the key of one purpose from a seed.

    Args:
        seed: Whole number of at least 0, below 2**32.
        purpose: One of `PURPOSES`.
        phase: Number of the run among several in a row, so that no run repeats another's noise.

    Returns:
        A threefry key; rounds fold their number into it.

    Raises:
        ValueError: For another seed, purpose or phase.

    Example:
        >>> from dpjax.engine import keys
        >>> bool((keys.derive(0, "noise") == keys.derive(0, "noise")).all())
        True
    """
    seed = _validate.integer("seed", seed, minimum=0, maximum=2**32 - 1)
    _validate.one_of("purpose", purpose, PURPOSES)
    return seed_keys((seed,), purpose, _validate.integer("phase", phase, minimum=0))[0]


def seed_keys(seeds: Sequence[int], purpose: str, phase: int = 0) -> PRNGKeyArray:
    """Derive the keys of one purpose from several seeds.

    Args:
        seeds: S seeds.
        purpose: As in `derive`.
        phase: As in `derive`.

    Returns:
        [S] keys.
    """

    def of_seed(seed: Array) -> PRNGKeyArray:
        key = jax.random.key(seed, impl=_IMPLEMENTATION)
        # The purpose first: then no phase of one purpose has a key of another.
        return jax.random.fold_in(jax.random.fold_in(key, PURPOSES[purpose]), phase)

    # All seeds at once: one by one, thousands take seconds.
    return jax.vmap(of_seed)(jnp.asarray(np.array(seeds, np.uint32)))


class KeyFile:
    """The secret file with the noise key of a release: mode 0600, never overwritten.

    Guarantee: the key has the 64 bits of a threefry key, drawn by ``secrets``. The fingerprint
    ties it to one run, so that two runs never share noise. A checksum detects a damaged key.

    Args:
        path: The file, or a symbolic link to it.
        fingerprint: Of the run. Methods raise a ValueError for a file that is missing, damaged,
            open to others, of two names or another run's.

    Attributes:
        path: As it was given.
        file: The file itself, whatever the process's folder is and links name later.
    """

    def __init__(self, path: _files.PathLike, fingerprint: str):
        self.path = Path(path).absolute()
        self.file = self.path.resolve()
        self._fingerprint = fingerprint
        self._thread = threading.Lock()

    def create(self) -> PRNGKeyArray:
        """Draw a noise key from the operating system, and store it.

        Raises:
            ValueError: If the file exists already, or cannot be written.
        """
        # Both words of a threefry key.
        words = [secrets.randbits(32), secrets.randbits(32)]
        fields = {"fingerprint": self._fingerprint, "key": words}
        with _files.writing("key_file", self.path):
            try:
                _files.create(self.path, _checked({"format": _FORMAT, **fields}), mode=0o600)
            except FileExistsError:
                raise ValueError(
                    f"key_file {self.path} exists; resume the run that made it, or name another"
                ) from None
        return _wrapped(words)

    def key(self) -> PRNGKeyArray:
        """The noise key."""
        return _wrapped(self._read()["key"])

    def sent(self) -> int:
        """The number of rounds whose messages may be out, where a driver notes it; else 0."""
        return self._read().get("sent", 0)

    def note_sent(self, rounds: int, message: str) -> None:
        """Note the number of rounds whose messages may be out, and the last message.

        Guarantee: each round has one noted message, and others of that round are refused. They
        would put the same noise on another payload, for example on a device whose gradients are
        not deterministic.

        Args:
            rounds: The number; at least the noted one.
            message: Digest of the last one.

        Raises:
            ValueError: For another message or fewer rounds than were noted.
        """
        # Of two threads with a message each, the second must read what the first has noted.
        with self._thread:
            fields = self._read()
            noted = fields.get("sent", 0)
            if rounds > noted:
                content = _checked(fields | {"sent": rounds, "message": message})
                with _files.writing("key_file", self.path):
                    _files.replace(self.file, content, mode=0o600)
            # One message may go out again: it shows nothing new.
            elif rounds < noted or fields["message"] != message:
                raise ValueError(
                    f"key_file {self.path} notes another message of round {rounds}, or a later "
                    "round: its noise would go out twice. Use deterministic operations and the "
                    "newest checkpoint, or begin another run and account for both"
                )

    def delete(self) -> bool:
        """Delete the key of a finished release, and temporary files of killed processes.

        Guarantee: any other file of that name stays, such as another run's key.

        Returns:
            Whether the run's key existed.
        """
        deleted = False
        # The key last: whoever interrupts this finds a key that the next run deletes.
        for path in (*self._copies(), self.path, self.file):
            try:
                KeyFile(path, self._fingerprint)._read(private=False)
            except ValueError:
                continue
            path.unlink(missing_ok=True)
            deleted = deleted or path == self.path
        return deleted

    def _read(self, *, private: bool = True) -> Fields:
        """The fields of the file; a changed file is refused."""
        name = f"key_file {self.path}"
        if not self.file.exists():
            raise ValueError(
                f"{name} does not exist; a release resumes only with its own noise key: with fresh "
                "noise the rounds sent again would spend their budget again. Restore the file, or "
                "start a new run and account for both"
            )
        with _files.reading(name, "restore it from a copy, or name another file"):
            status = self.file.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > 100_000:
                raise ValueError("it is no ordinary file of a key's size")
            # A file that others may read is deleted all the same.
            if private and stat.S_IMODE(status.st_mode) & 0o077:
                raise ValueError(f"{name} is open to other users; chmod 600 it if still secret")
            if private and status.st_nlink > 1:
                self._check_names()
            fields = json.loads(self.file.read_text(encoding="utf-8"))
            is_keys = isinstance(fields, dict) and fields.get("format") == _FORMAT
            if not is_keys or fields.pop("checksum", None) != _checksum(fields):
                raise ValueError("its checksum does not fit")
        if fields["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"{name} belongs to another run (plan, data, seed, model, eval_every or another "
                "argument of the run, software or device differ); the same noise on other "
                "gradients would cancel. Name another file"
            )
        return fields

    def _copies(self) -> Iterator[Path]:
        """Temporary files of killed processes, beside the file."""
        return self.file.parent.glob(f".{glob.escape(self.file.name)}.*.tmp")

    def _check_names(self) -> None:
        """Refuse hard links: locks go by name, and a note leaves the old file to the others."""
        for path in self._copies():
            # Left by a process that was killed while it made the file.
            if path.samefile(self.file):
                path.unlink()
        if self.file.stat().st_nlink > 1:
            raise ValueError(
                f"key_file {self.path} has hard links, under which another loop could send its "
                "rounds again; delete all names but one, or use a symbolic link"
            )


def throwaway(seeds: int) -> PRNGKeyArray:
    """Noise keys [S] that no run has, for what is traced, timed or has ended; nothing is sent.

    Args:
        seeds: S.
    """
    return jax.random.split(_wrapped([0, 0]), seeds)


def _wrapped(words: list[int]) -> PRNGKeyArray:
    return jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl=_IMPLEMENTATION)


def _checked(fields: Fields) -> bytes:
    return json.dumps(fields | {"checksum": _checksum(fields)}).encode()


def _checksum(fields: Fields) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
