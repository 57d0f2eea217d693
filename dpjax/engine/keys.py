"""Randomness of a run: nested keys for simulations, a secret key file for releases.

A simulation derives everything from its seed, the privacy noise too, under a key of its own
purpose; whoever knows the seed can subtract the noise. A release draws the noise key from the
operating system and keeps it in a file apart from records and checkpoints until the run ends:
sending a round again with fresh noise would spend its budget again, so a run that lost the file
cannot go on.
"""

import json
import os
import secrets
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from dpjax import _validate

__all__ = ["PURPOSES", "create_key_file", "delete_key_file", "derive", "read_key_file", "spent_key"]

PURPOSES = {"initial": 0, "batches": 1, "noise": 2}
"""What a seed's keys are for; the number is folded into the seed's key."""

_IMPLEMENTATION = "threefry2x32"


def derive(seed: int, purpose: str, phase: int = 0) -> PRNGKeyArray:
    """Derive the key of one purpose from a seed.

    Args:
        seed: Whole number of at least 0, below 2**32.
        purpose: One of `PURPOSES`.
        phase: Which of several runs in a row, so that no later one repeats the noise of an earlier.

    Returns:
        A threefry key; rounds fold their number into it.

    Raises:
        ValueError: For another seed, purpose or phase.
    """
    seed = _validate.integer("seed", seed, least=0)
    if seed >= 2**32:
        raise ValueError(f"seed is {seed}; give a whole number below 2**32")
    _validate.one_of("purpose", purpose, PURPOSES)
    phase = _validate.integer("phase", phase, least=0)
    key = jax.random.fold_in(jax.random.key(seed, impl=_IMPLEMENTATION), PURPOSES[purpose])
    return jax.random.fold_in(key, phase)


def create_key_file(path: str | os.PathLike, fingerprint: str) -> PRNGKeyArray:
    """Draw a noise key from the operating system and store it, mode 0600, never overwriting.

    Guarantee: the key has the 64 bits a threefry key holds, drawn by ``secrets``; it is tied to
    one run by the run's fingerprint, so that it cannot give two runs the same noise.

    Args:
        path: The file to make.
        fingerprint: Of plan, data and seed, checked by `read_key_file`.

    Returns:
        The key.

    Raises:
        ValueError: If the file exists already.
    """
    path = Path(path)
    words = [secrets.randbits(32), secrets.randbits(32)]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    handle = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"format": 1, "fingerprint": fingerprint, "key": words}, file)
            file.flush()
            os.fsync(file.fileno())
        # A hard link is atomic and, unlike a rename, fails when the name is taken.
        os.link(beside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileExistsError:
        raise ValueError(
            f"key_file {path} exists; resume the run that made it, or name another file"
        ) from None
    finally:
        beside.unlink()
    return _wrap(words)


def read_key_file(path: str | os.PathLike, fingerprint: str) -> PRNGKeyArray:
    """Read the noise key of a release that is being resumed.

    Args:
        path: The file `create_key_file` made.
        fingerprint: Of the run that resumes.

    Returns:
        The key.

    Raises:
        ValueError: If the file is missing, damaged, readable by others, or another run's.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"key_file {path} is a folder; name a file")
    if not path.exists():
        raise ValueError(
            f"key_file {path} does not exist; a release resumes only with its own noise key: "
            "with fresh noise the rounds sent again would spend their budget again. Restore the "
            "file, or start a new run and account for both"
        )
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ValueError(f"key_file {path} is open to other users; chmod 600 it if still secret")
    try:
        content = json.loads(path.read_text())
        words = [int(word) for word in content["key"]]
        owner = content["fingerprint"]
        if content["format"] != 1 or len(words) != 2:
            raise KeyError("format")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"key_file {path} is damaged ({error}); restore it from a copy") from None
    if owner != fingerprint:
        raise ValueError(
            f"key_file {path} belongs to another run (plan, data, seed, software or device "
            "differ); the same noise on other gradients would cancel. Name another file"
        )
    return _wrap(words)


def delete_key_file(path: str | os.PathLike) -> None:
    """Delete the key of a release that has ended; a missing file is no error."""
    Path(path).unlink(missing_ok=True)


def spent_key() -> PRNGKeyArray:
    """A placeholder for the key of a release that has ended; it draws nothing."""
    return _wrap([0, 0])


def _wrap(words: list[int]) -> PRNGKeyArray:
    return jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl=_IMPLEMENTATION)
