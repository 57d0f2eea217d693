"""What a run keeps on disk: its checkpoints and its key file, tied to what the run is.

A run that resumes repeats rounds with the noise they had. With anything else in front of that
noise, the difference of two messages would be noiseless, so a checkpoint and a key file belong to
one identity: plans, data, initial models, software, device, and the very program that advances the
run, as it is lowered for the compiler, with all its constants.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

import dpjax
from dpjax import _files, _numerics, _validate
from dpjax.engine import keys
from dpjax.plans.plan import Plan, described
from dpjax.plans.problem import Problem

__all__: list[str] = []

_SETTINGS = (
    "jax_enable_x64", "jax_threefry_partitionable", "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)  # fmt: skip
"""Settings that change random bits or gradients."""

_OUTSIDE = ("callback", "debug_print", "ffi_call", "infeed", "outfeed")
"""Parts of names of operations whose work is not in the program."""

_PROGRAM = "model and loss"
_VALUES = ("initial models", "arrays", "initial memory")
_COMPUTED = ("plans", *_VALUES[1:], _PROGRAM)
"""Digests of what other entries decide too: the plans' matrices and the compiled program."""
_SHORT = 40


def of_run(
    plans: Sequence[Plan],
    problems: Sequence[Problem],
    seeds: Sequence[int],
    options: Mapping[str, Any],
    values: Sequence[Any],
    traced: Sequence[Any],
    devices: int,
) -> dict[str, str]:
    """Return what a run is; resuming needs all of it unchanged for the same bits and noise.

    To be called before a callback may change what the model closes over: what a run calls later is
    what was traced for this. The keys of the noise are arguments of the programs, so that any will
    do to trace them, with arrays and not shapes: a release keeps past noise in float64, which
    shapes are traced without.

    Args:
        plans: The plans.
        problems: One, or one a seed.
        seeds: The seeds.
        options: Arguments of the run by name that decide its rounds, how they are divided into
            compiled calls, and what a run that is stopped states.
        values: What the programs are called with: models to start from, the plans' arrays, the
            method's memory before the first round.
        traced: Its compiled programs, traced; see `computation`.
        devices: Over how many devices the agents are spread.

    Returns:
        A flat dict, name -> text.
    """
    device, frozen = jax.devices()[0], problems[0].frozen
    return {
        **_configs(plans),
        **{name: str(value) for name, value in options.items()},
        "plans": hashlib.sha256("".join(p.fingerprint() for p in plans).encode()).hexdigest(),
        "data": " ".join(problem.fingerprint() for problem in problems),
        **({} if frozen is None else {"frozen values": digest(frozen)}),
        "evaluation data": digest([problem.evaluation for problem in problems]),
        **dict(zip(_VALUES, map(digest, values), strict=True)),
        _PROGRAM: computation(traced, release=plans[0].config.release),
        "seeds": str(tuple(seeds)),
        "devices": f"{device.device_kind} x {devices}, {_processor()}, {_threads()}",
        "software": f"dpjax {dpjax.__version__}, jax {jax.__version__}, "
        f"jaxlib {jaxlib.__version__}",
        "settings": ", ".join(f"{name} {getattr(jax.config, name)}" for name in _SETTINGS)
        + f", XLA_FLAGS {os.environ.get('XLA_FLAGS', '')}",
    }


def _configs(plans: Sequence[Plan]) -> dict[str, str]:
    """Every field of the plans' configs and of their parts, so that one that changes is named."""
    configs = [dict(_fields(plan.config, "Config")) for plan in plans]
    names = dict.fromkeys(name for each in configs for name in each)
    return {n: ", ".join(dict.fromkeys(str(each.get(n)) for each in configs)) for n in names}


def _fields(part: Any, name: str) -> Iterator[tuple[str, str]]:
    """A part's class and fields by dotted name, in text; plans' fingerprints hold the arrays."""
    if not dataclasses.is_dataclass(part):
        yield name, str(described(part, name))
        return
    if name != "Config":
        yield name, type(part).__name__
    for field in dataclasses.fields(part):
        yield from _fields(getattr(part, field.name), f"{name}.{field.name}")


def differences(stored: Mapping[str, str], current: Mapping[str, str]) -> str:
    """Say in what two identities differ, or nothing where they do not.

    Args:
        stored: One from `of_run`, as it was stored.
        current: The other, of the run that would go on.

    Returns:
        The names of what differs, with values where they are short. What is computed from the
        rest is named only where nothing else explains it.
    """
    both = {n: (str(stored.get(n)), str(current.get(n))) for n in {**current, **stored}}
    changed = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    named = {name: changed[name] for name in changed if name not in _COMPUTED} or changed
    return ", ".join(
        f"{name} ({there} there, {here} here)" if max(len(there), len(here)) <= _SHORT else name
        for name, (there, here) in named.items()
    )


def fingerprint(identity: dict[str, str]) -> str:
    """Return the SHA-256 of an identity, in hexadecimal."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def digest(tree: Any) -> str:
    """Return the SHA-256 of a pytree's arrays, their dtypes and shapes, in hexadecimal."""
    hasher = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(leaf)
        hasher.update(f"{array.dtype.name}{array.shape}".encode() + array.tobytes())
    return hasher.hexdigest()


def computation(traced: Sequence[Any], *, release: bool) -> str:
    """Return the SHA-256 of traced programs with every constant in them, in hexadecimal.

    The text is that of the lowered program: constants are written out in full wherever they were
    captured, names of source files, lines and addresses are left out. A setting of JAX turns
    captured arrays into inputs of the lowered program; they are hashed beside it.

    Guarantee: a release that passes computes nothing that is not hashed, so that it never sends a
    round again with other gradients under the same noise. What the host or foreign code would
    compute cannot be seen, and is refused.

    Args:
        traced: What ``jax.jit(f).trace(...)`` returns, for every length of a compiled call.
        release: Whether to refuse work outside the program; a simulation may do some.

    Raises:
        ValueError: For such work, naming the operation.
    """
    hasher = hashlib.sha256()
    for each in traced:
        text = each.lower().as_text()
        if release:
            _refuse_outside(each.jaxpr, text)
        hasher.update(text.encode())
        for constant in _numerics.constants(each.jaxpr):
            hasher.update(digest(constant).encode())
    return hasher.hexdigest()


def _refuse_outside(closed: Any, text: str) -> None:
    called = {
        equation.primitive.name
        for jaxpr, _ in _numerics.jaxprs(closed)
        for equation in jaxpr.eqns
        if any(part in equation.primitive.name for part in _OUTSIDE)
    }
    called = called or set(re.findall(r"custom_call @(\w*callback\w*)", text))
    if called:
        raise ValueError(
            f"problem calls {', '.join(sorted(called))} in its model, loss or metrics; a release "
            "refuses work outside the compiled program, which may give something else when the "
            "run resumes: the same noise on other gradients would cancel. Compute it in JAX, or "
            "before the run"
        )


def _threads() -> str:
    """How many threads sums are split over, which moves their last bits."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{count} threads, NPROC {os.environ.get('NPROC', '')}"


def _processor() -> str:
    """The processor's model, where the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


_MARK = "dpjax.json"
"""The file that makes a folder one of checkpoints and says of which run."""
_FORMAT = 2
_KEPT = 2
"""How many checkpoints are kept, the newest."""


class Checkpoints:
    """The checkpoints of one run, an npz file each.

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
        self.folder = Path(folder).absolute()
        self._fingerprint = fingerprint(identity)
        with self._using("be used"):
            _check_folder(self.folder, identity)
            # Models of every saved round are not for everybody's eyes.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            mark = {"format": _FORMAT, "identity": identity}
            with contextlib.suppress(FileExistsError):
                _files.create(self.folder / _MARK, json.dumps(mark, indent=1).encode())
            self._lock = _files.Lock("checkpoint", self.folder, self.folder / _MARK)
            try:
                _check_folder(self.folder, identity)  # Another run may have been quicker.
                for half in self.folder.glob(".*.npz.*.tmp"):  # What a kill has left.
                    half.unlink()
            except BaseException:
                self._lock.close()
                raise

    def status(self) -> tuple[bool, bool]:
        """Whether the run has begun, and whether it has ended.

        Raises:
            ValueError: If the newest checkpoint is damaged.
        """
        newest = self._newest()
        return (False, False) if newest is None else (True, newest[2])

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
        entries: dict[str, Any] = {f"leaf_{i}": leaf for i, leaf in enumerate(leaves)}
        entries |= {"ended": np.array(ended), "digest": self._digest(rounds, ended, leaves)}
        with self._using("be written"):
            path = self.folder / f"{rounds}.npz"
            _files.replace(path, lambda file: np.savez(file, **entries))
            for old in self._files()[:-_KEPT]:
                old.unlink()

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
        newest = self._newest()
        if newest is None:
            return None
        rounds, leaves, ended = newest
        expected, structure = jax.tree.flatten(like)
        # To NumPy alone narrow floats are bytes.
        kinds = [np.asarray(leaf).dtype for leaf in expected]
        values = [leaf.view(kind) for leaf, kind in zip(leaves, kinds, strict=True)]
        return rounds, jax.tree.unflatten(structure, values), ended

    def close(self) -> None:
        """Release the folder to others."""
        self._lock.close()

    def _files(self) -> list[Path]:
        """The checkpoints, by their rounds."""
        files = [path for path in self.folder.glob("*.npz") if path.stem.isdecimal()]
        return sorted(files, key=lambda path: int(path.stem))

    def _newest(self) -> tuple[int, list[np.ndarray], bool] | None:
        """Rounds, leaves and end of the newest checkpoint, if its digest fits."""
        if not (files := self._files()):
            return None
        path = files[-1]
        try:
            entries = _files.archive(path)
            digest, ended = str(entries.pop("digest")), bool(entries.pop("ended"))
            leaves = [entries[f"leaf_{i}"] for i in range(len(entries))]
            if self._digest(int(path.stem), ended, leaves) != digest:
                raise ValueError("its digest does not fit")
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"checkpoint {path} is damaged ({_brief(error)}); restore it from a copy, or move "
                "it away to carry on from the one before it"
            ) from None
        return int(path.stem), leaves, ended

    def _digest(self, rounds: int, ended: bool, leaves: list[np.ndarray]) -> str:
        # As they are read: narrow floats as bytes.
        plain = [x.view(f"V{x.itemsize}") if x.dtype.kind == "V" else x for x in leaves]
        parts = {"run": self._fingerprint, "rounds": str(rounds), "ended": str(ended)}
        return fingerprint(parts | {"state": digest(plain)})

    @contextlib.contextmanager
    def _using(self, what: str) -> Iterator[None]:
        """Name the folder when the system fails."""
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"checkpoint {self.folder} cannot {what} ({_brief(error)}); what it held before is "
                "unharmed. Make room, or name a folder that can be written, and resume"
            ) from None


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
            "checkpoints; name an empty or a new one"
        )
    if differing := differences(_marked(folder), identity):
        raise ValueError(
            f"checkpoint {folder} belongs to another run, which differs in {differing}; "
            "give each run a folder of its own, or resume with what it was started with"
        )


def _marked(folder: Path) -> dict[str, str]:
    """The identity of the run whose folder this is."""
    try:
        mark = json.loads((folder / _MARK).read_text())
        stored = mark["identity"]
        if mark["format"] != _FORMAT or not isinstance(stored, dict):
            raise ValueError("another format; end the run with the version that began it")
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
    key_file: keys.KeyFile | None = None

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
        with contextlib.ExitStack() as stack:
            store = file = None
            if key_file is not None:
                # Beside it: the file itself is replaced with every note.
                target = Path(key_file).resolve()
                beside = target.with_name(f".{target.name}.lock")
                lock = _files.Lock("key_file", key_file, beside, passing=True)
                stack.enter_context(contextlib.closing(lock))
                file = keys.KeyFile(key_file, fingerprint(identity))
            if checkpoint is not None:
                store = Checkpoints(checkpoint, identity)
                stack.enter_context(contextlib.closing(store))
            yield cls(identity, store, file)

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
        file = self.key_file
        if file is None:
            return keys.stacked(seeds, "noise", phase)
        begun, ended = (False, False) if self.store is None else self.store.status()
        if ended:
            return keys.spent_key()[None]
        folder = None if self.store is None else self.store.folder
        if not begun and not os.path.lexists(file.path):
            return file.create(folder)[None]
        key, noted = file.key(), file.checkpoint()
        if not begun and noted not in (None, folder) and unfinished(noted, self.identity):
            raise ValueError(
                f"key_file {file.path} keeps the noise of a release whose checkpoint is "
                f"{noted}; give checkpoint={str(noted)!r} to carry on, or move that folder away to "
                "send all rounds again, with the same noise"
            )
        if folder is not None and folder != noted:
            file.note_checkpoint(folder)
        return key[None]

    def check_message(self, round: int, message: Any) -> None:
        """Note, in a release, that the message of a round is about to go out.

        Args:
            round: Rounds done before it.
            message: What goes out.

        Raises:
            ValueError: If the key file cannot be read or written, or another message of that round
                has gone out; this one is not sent then.
        """
        if self.key_file is not None:
            self.key_file.note_sent(round + 1, digest(message))

    def check_sent(self, done: int) -> None:
        """Refuse a release whose messages went further than what is left of its state.

        Guarantee: of the rounds that may have been sent, all but the last are done here; that one
        is sent again as it was. Others would get their noise a second time, on other gradients.

        Args:
            done: Rounds done.

        Raises:
            ValueError: If more were sent.
        """
        if self.key_file is not None and (sent := self.key_file.sent()) > done + 1:
            raise ValueError(
                f"key_file {self.key_file.path} says that {sent} rounds were sent, the checkpoint "
                f"is of {done}: their noise would go out again with other gradients. Restore the "
                "newest checkpoint, or begin another run and account for both"
            )

    def end(self) -> None:
        """End the run: its checkpoints stay, its key is deleted."""
        if self.key_file is not None:
            self.key_file.delete()


def check_storage(
    plans: Sequence[Plan], seeds: Sequence[int], checkpoint: Any, key_file: Any
) -> None:
    """Check that a release, and only a release, has a file for its key, apart from checkpoints.

    Args:
        plans: The plans.
        seeds: The seeds.
        checkpoint: Folder, or None.
        key_file: File, or None.

    Raises:
        ValueError: Naming what does not fit.
    """
    _check_path("checkpoint", checkpoint, "name a folder, or None to keep nothing")
    _check_path("key_file", key_file, "name a file to keep the noise key in")
    if not any(plan.config.release for plan in plans):
        if key_file is not None:
            raise ValueError(
                f"key_file is {key_file} but no plan has release=True; leave it out, a "
                "simulation's noise key derives from its seed"
            )
        return
    if len(plans) * len(seeds) != 1:
        raise ValueError(
            f"a release came with {len(plans)} plans and {len(seeds)} seeds; run one plan with "
            "one seed, since runs side by side share raw noise"
        )
    if key_file is None or Path(key_file).is_dir():
        raise ValueError(f"key_file is {key_file} for a release; name a file to keep its key in")
    if checkpoint is not None:
        folder = Path(checkpoint).absolute().resolve()
        if folder in Path(key_file).absolute().resolve().parents:
            raise ValueError(
                f"key_file {key_file} lies inside checkpoint {checkpoint}; keep the key apart, "
                "checkpoints may be copied or shared"
            )


def _check_path(name: str, value: Any, remedy: str) -> None:
    if value is None:
        return
    if not isinstance(value, str | os.PathLike) or not str(value).strip() or "\0" in str(value):
        raise ValueError(f"{name} is {_validate.shown(value)}; {remedy}")
    try:
        Path(value).is_dir()
    except OSError as error:
        raise ValueError(f"{name} {value} cannot be used ({error.strerror}); {remedy}") from None
