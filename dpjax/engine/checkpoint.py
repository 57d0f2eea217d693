"""What a run keeps on disk: its checkpoints and its key file, tied to the run's identity.

A run that resumes repeats rounds with the same noise. With other gradients under that noise, the
difference of two messages would be noiseless. So a checkpoint and a key file belong to one
identity: plans, data, initial models, software, device, and the program that advances the run, as
it is lowered for the compiler, with all its constants.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jaxlib
import numpy as np
from jax.stages import Traced
from jaxtyping import PRNGKeyArray

from dpjax import _files, _programs, _validate
from dpjax._version import __version__
from dpjax.engine import keys, processes
from dpjax.engine.arguments import Tasks
from dpjax.learning.problem import Problem
from dpjax.plans.identity import described
from dpjax.plans.plan import Plan
from dpjax.protocols import Message, Tree

__all__ = ()

Identity: TypeAlias = dict[str, str]
"""What a run depends on, by name, in words or as a digest."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run keeps on disk: its newest state, and a release its noise key.

    Attributes:
        folder: Folder to save to and resume from; None keeps no state.
        seconds: Least time between two saved states; the last one is always saved.
        key_file: Where a release keeps its noise key; mode 0600, not inside the folder.

    Raises:
        ValueError: For values that are no paths, or no number of seconds of at least 0.

    Example:
        >>> from dpjax.engine.run import Checkpoint
        >>> Checkpoint("folder", key_file="noise.key").seconds
        20.0
    """

    folder: _files.PathLike | None = None
    seconds: float = 20.0
    key_file: _files.PathLike | None = None

    def __post_init__(self) -> None:
        """Refuse what is no path, and no time."""
        for name, kind in (("folder", "folder"), ("key_file", "file")):
            path = getattr(self, name)
            text = str(path)
            if not isinstance(path, str | os.PathLike | None) or "\0" in text or not text.strip():
                raise _validate.refusal(name, path, f"name a {kind}, or leave it out")
        remedy = "give seconds of at least 0, or math.inf for the last state alone"
        if not isinstance(self.seconds, float) or self.seconds != math.inf:
            _validate.number("seconds", self.seconds, remedy=remedy, holds=lambda x: x >= 0)


_SETTINGS = (
    "jax_enable_x64", "jax_threefry_partitionable", "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)  # fmt: skip
"""Settings that change random bits or gradients."""

_OUTSIDE = ("callback", "debug_print", "ffi_call", "infeed", "outfeed")
"""Parts of names of operations whose work is not in the program."""

_PROGRAM = (
    "the program: model, loss or metrics, or the code of a custom sampler, noise, method or "
    "optimizer"
)
_VALUES = ("initial models", "arrays", "initial memory")
_COMPUTED = ("plans", *_VALUES[1:], _PROGRAM)
"""Digests that follow from other entries: of the plans' matrices and the compiled program."""
_LOCAL = "records of this process"
_SHORT = 80


def of_run(
    tasks: Tasks,
    options: Mapping[str, Any],
    values: Sequence[Tree],
    traced: Sequence[Traced],
    devices: int,
) -> Identity:
    """Return the identity of a run; a resumed run with the same one has the same bits and noise.

    Call it before a callback can change what the model closes over, since the run uses the programs
    traced here. The keys of the noise are arguments of the programs, so any keys will do. They are
    traced as arrays and not as shapes: a release keeps past noise in float64, which shapes lose.

    Args:
        tasks: Plans, problems and seeds.
        options: Arguments of the run by name that decide its rounds, how they are divided into
            compiled calls, and what a run that is stopped states.
        values: What the programs are called with: models to start from (the problem's, and a
            caller's own or None), the plans' arrays, the method's memory before the first round.
        traced: Its compiled programs, traced; see `computation`.
        devices: Over how many devices the agents are spread.

    Returns:
        A flat dict, name -> text.
    """
    identity = of_arguments(*tasks, options)
    for name, value in zip(_VALUES, processes.collected(tuple(values)), strict=True):
        identity[name] = tree_digest(value)
    identity[_PROGRAM] = computation(traced, release=tasks[0][0].config.release)
    identity["devices"] = _machine(devices)
    # Processes of one run may differ in these, but not the calls that one run is made of.
    identity["settings"] += f", XLA_FLAGS {os.environ.get('XLA_FLAGS', '')}"
    return identity


def of_arguments(
    plans: Sequence[Plan],
    problems: Sequence[Problem],
    seeds: Sequence[int],
    options: Mapping[str, Any],
) -> Identity:
    """Return the part of a run's identity that is known before anything is traced.

    Args:
        plans: The plans.
        problems: One, or one a seed.
        seeds: The seeds.
        options: Other arguments of the run by name.
    """
    return {
        **_configs(plans),
        **{name: str(value) for name, value in options.items()},
        "plans": hashlib.sha256("".join(p.fingerprint() for p in plans).encode()).hexdigest(),
        "data": " ".join(problem.fingerprint() for problem in problems),
        _LOCAL: tree_digest([(problem.x, problem.y) for problem in problems if problem.local]),
        "augmentation_multiplicity": str(problems[0].augmentation_multiplicity),
        "init_per_agent": str(problems[0].init_per_agent),
        "frozen values": tree_digest(problems[0].frozen),
        "evaluation data": tree_digest([problem.evaluation for problem in problems]),
        "seeds": str(tuple(seeds)),
        "software": f"dpjax {__version__}, jax {jax.__version__}, jaxlib {jaxlib.__version__}",
        "settings": ", ".join(f"{name} {getattr(jax.config, name)}" for name in _SETTINGS),
    }


def check_alike(arguments: Sequence[Identity]) -> Identity:
    """Refuse processes that were called with different arguments, but for their own records.

    Guarantee: all agents of a run have the noise of the guarantee that the first process states.

    Args:
        arguments: From `of_arguments`, one of each process; empty where there is one.

    Returns:
        What ties a run to the records of all processes, for its identity.

    Raises:
        ValueError: On all processes, naming what differs.
    """
    # Of the training data each process may hold its own agents' alone.
    shared = [{**identity, _LOCAL: ""} for identity in arguments]
    for number, identity in enumerate(shared):
        differing = _differences(identity, shared[0])
        if differing:
            raise ValueError(
                f"process {number} (there) was not called like process 0 (here), which differs in "
                f"{differing}; make the same call in every process"
            )
    return {"records of processes": " ".join(identity[_LOCAL] for identity in arguments)}


def _configs(plans: Sequence[Plan]) -> Identity:
    """Every field of the plans' configs and of their parts, so that a change is named."""
    fields: dict[str, dict[str, None]] = {}
    for plan in plans:
        parts = described(plan.config, "Config")
        leaves = jax.tree.leaves_with_path(parts, lambda part: not isinstance(part, dict))
        for path, value in leaves:
            name = "Config." + jax.tree_util.keystr(path, simple=True, separator=".")
            # A dict keeps the order of plans, and a value that several share once.
            fields.setdefault(name, {})[str(value)] = None
    return {name: ", ".join(values) for name, values in fields.items()}


def _differences(stored: Identity, current: Identity) -> str:
    """Describe the differences of two identities; empty where there are none.

    Args:
        stored: One from `of_run`, as it was stored.
        current: The identity of the run that resumes.

    Returns:
        The names of entries that differ, with short values. Derived entries are named only where no
        other entry differs.
    """
    names = [n for n in {**current, **stored} if stored.get(n) != current.get(n)]
    names = [name for name in names if name not in _COMPUTED] or names
    # A part of another class has other fields, which say no more than its class does.
    names = [name for name in names if name in stored and name in current] or names
    texts = []
    for name in names:
        values = f"{stored.get(name, 'nothing')} there, {current.get(name, 'nothing')} here"
        texts.append(f"{name} ({values})" if len(values) < _SHORT else name)
    return ", ".join(texts)


def tree_digest(tree: Tree) -> str:
    """Return the SHA-256 of a pytree's arrays, their dtypes and shapes, in hexadecimal."""
    hasher = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(leaf)
        # Equal bytes of another shape or dtype are another array.
        hasher.update(f"{array.dtype.name}{array.shape}".encode() + array.tobytes())
    return hasher.hexdigest()


def computation(traced: Sequence[Traced], *, release: bool) -> str:
    """Return the SHA-256 of traced programs with every constant in them, in hexadecimal.

    The text is that of the lowered program: constants are written out in full wherever they were
    captured, names of source files, lines and addresses are left out. A setting of JAX turns
    captured arrays into inputs of the lowered program; they are hashed beside it.

    Guarantee: a release that passes computes only what is hashed, so that it never sends a round
    again with other gradients under the same noise. Work of the host or of foreign code cannot be
    hashed, and is refused.

    Args:
        traced: What ``jax.jit(f).trace(...)`` returns, for every length of a compiled call.
        release: Whether to refuse work outside the program; a simulation may do some.

    Raises:
        ValueError: For such work, naming the operation.
    """
    hasher = hashlib.sha256()
    for program in traced:
        text = program.lower().as_text()
        # Callbacks of any origin are custom calls in the text.
        outside = set(re.findall(r"custom_call @(\w*callback\w*)", text))
        for jaxpr, _ in _programs.jaxprs(program.jaxpr):
            names = {equation.primitive.name for equation in jaxpr.eqns}
            outside |= {name for name in names if any(part in name for part in _OUTSIDE)}
        if release and outside:
            raise ValueError(
                f"problem calls {', '.join(sorted(outside))} in its model, loss or metrics; a "
                "release refuses work outside the compiled program, which may differ when the run "
                "resumes: the same noise on other gradients would cancel. Compute it in JAX"
            )
        hasher.update(text.encode())
        for constant in _programs.constants(program.jaxpr):
            hasher.update(tree_digest(constant).encode())
    return hasher.hexdigest()


def _machine(devices: int) -> str:
    """Devices, processor and threads, on which the last bits of sums depend."""
    processor = platform.processor()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        match = re.search(r"model name\s*:(.*)", text)
        if match:
            processor = match[1].strip()
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kind = jax.devices()[0].device_kind
    share = os.environ.get("NPROC", "")
    return f"{kind} x {devices}, {processor}, {threads} threads, NPROC {share}"


_STATE = "state.npz"
"""The newest state."""
_LOCK = "dpjax.lock"
"""The file that makes a folder one of checkpoints."""
_FORMAT = 3
_State: TypeAlias = tuple[dict[str, Any], dict[str, np.ndarray]]
"""A stored state: its header and its arrays."""


class Storage:
    """The files of one run: its newest state in a separate folder, and a release's key.

    The state has models, optimizer states and metrics, but no noise key. Keys are derived from
    the seed, or kept in the key file of a release. A digest detects changed bits, which would put a
    release's noise on other gradients. Folder and key file are
    locked until `close` or the end of the process.

    Of several processes the first reads and writes, and the others receive what it read.

    Args:
        identity: From `of_run`, a flat dict of strings; a folder of another run is refused.
        place: The folder, made when missing, else empty or this run's; and a release's key file.

    Attributes:
        folder: Of the state, or None.
        key_file: A release's, or None.
        begun: Whether a state was ever stored in the folder, even if it is lost by now.
        ended: Whether the run had ended then.

    Raises:
        ValueError: If the folder holds the state of another run, naming what differs, or something
            else; where folder or key file are in use, or cannot be used.
    """

    def __init__(self, identity: Identity, place: Checkpoint):
        self.folder = None if place.folder is None else Path(place.folder).absolute()
        self.key_file: keys.KeyFile | None = None
        self.begun = False
        self.ended = False
        self._identity = identity
        with contextlib.ExitStack() as stack:
            if place.key_file is not None:
                text = json.dumps(identity, sort_keys=True)
                digest = hashlib.sha256(text.encode()).hexdigest()
                self.key_file = keys.KeyFile(place.key_file, digest)
                # Beside it: the file itself is replaced with every note.
                file = self.key_file.file
                beside = file.with_name(f".{file.name}.lock")
                self._key_lock = _files.Lock("key_file", place.key_file, beside, passing=True)
                stack.callback(self._key_lock.close)
            with processes.all_gather_errors_and_values():
                if self.folder is not None and processes.is_first():
                    self._open(self.folder, stack)
            self._locks = stack.pop_all()

    def _open(self, folder: Path, stack: contextlib.ExitStack) -> None:
        """Lock the folder and learn how far its run is."""
        with _files.writing("checkpoint", folder):
            names = sorted(os.listdir(folder)) if folder.exists() else []
            if names and _LOCK not in names:
                raise ValueError(
                    f"checkpoint {folder} holds {names[0]} and no {_LOCK}, so it is not one of "
                    "this version; name an empty or a new folder"
                )
            # Models of saved rounds are private, so only the owner may read them.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _files.Lock("checkpoint", folder, folder / _LOCK)
            stack.callback(self._lock.close)
            # A killed process leaves them behind.
            for remnant in folder.glob(f".{_STATE}.*.tmp"):
                remnant.unlink()
        stored = self._read()
        self.begun = stored is not None or os.fstat(self._lock.handle).st_size > 0
        self.ended = stored is not None and stored[0]["ended"]

    def close(self) -> None:
        """Release folder and key file to others."""
        self._locks.close()

    def save(self, rounds: int, tree: Tree, *, ended: bool) -> None:
        """Store the state after ``rounds`` rounds; returns when it is on disk.

        Args:
            rounds: Rounds done.
            tree: Pytree of arrays without random keys.
            ended: Whether the run has ended (all rounds, or stopped early).

        Raises:
            ValueError: If it cannot be written; the previous state stays.
        """
        assert self.folder is not None
        header = {"format": _FORMAT, "identity": self._identity, "rounds": rounds, "ended": ended}
        with processes.all_gather_errors_and_values():
            if processes.is_first():
                leaves = enumerate(jax.tree.leaves(tree))
                arrays = {f"leaf_{i}": np.asarray(leaf) for i, leaf in leaves}
                with _files.writing("checkpoint", self.folder):
                    # First the note: a folder whose state is lost must not pass for a new one.
                    os.pwrite(self._lock.handle, b"begun", 0)
                    _files.replace(self.folder / _STATE, _files.packed(json.dumps(header), arrays))

    def restore(self, like: Tree) -> tuple[int, Tree, bool] | None:
        """Load the state.

        Args:
            like: Pytree of arrays with the structure, shapes and dtypes that were saved.

        Returns:
            Rounds done, the pytree as numpy arrays, and whether the run had ended; None when
            there is no state yet.

        Raises:
            ValueError: If it is damaged.
        """
        with processes.all_gather_errors_and_values() as headers:
            stored = self._read() if processes.is_first() else None
            # Whether there is a state, all processes must agree on.
            headers.append(None if stored is None else stored[0])
        header = headers[0]
        if header is None:
            return None
        values, structure = jax.tree.flatten(like)
        if stored is not None:
            # Narrow floats are stored as whole numbers.
            kinds = [np.asarray(leaf).dtype for leaf in values]
            values = [stored[1][f"leaf_{i}"].view(kind) for i, kind in enumerate(kinds)]
        values = processes.broadcast(values)
        return header["rounds"], jax.tree.unflatten(structure, values), header["ended"]

    def _read(self) -> _State | None:
        """The stored state, if it is undamaged and of this run; None where there is none."""
        if self.folder is None or not (self.folder / _STATE).exists():
            return None
        path = self.folder / _STATE
        with _files.reading(f"checkpoint {path}", "restore it from a copy, or move it away"):
            text, arrays = _files.unpacked(path)
            header = json.loads(text)
            if header["format"] != _FORMAT:
                raise ValueError("another format; end the run with the version that began it")
        differing = _differences(header["identity"], self._identity)
        if differing:
            raise ValueError(
                f"checkpoint {self.folder} belongs to another run, which differs in {differing}; "
                "resume with the same arguments, or name another folder"
            )
        return header, arrays

    def noise_keys(self) -> PRNGKeyArray:
        """The [1] noise key of a release.

        Guarantee: a release that has begun gets its first key, or none: rounds sent again with
        fresh noise would spend their budget again. The key of a finished release is not read.

        Raises:
            ValueError: For a key file that is missing, damaged or another run's.
        """
        file = self.key_file
        assert file is not None
        if self.ended:
            return keys.throwaway(1)
        # A folder that has begun remembers it without its state, and so gives no second key.
        new = not self.begun and not os.path.lexists(file.path)
        return (file.create() if new else file.key())[None]

    def check_sent(self, done: int, *, is_noted: bool = False) -> None:
        """Refuse a release that sent more rounds than its stored state covers.

        Guarantee: the stored state covers all rounds that may have been sent, but for the last one,
        which is sent again unchanged. Other rounds would reuse their noise on other gradients.

        Args:
            done: Rounds done.
            is_noted: Whether the key file has a note of every round that the state has done. A file
                without it is another one: fresh noise would send the state's round again.

        Raises:
            ValueError: If more were sent, or fewer.
        """
        if self.key_file is None:
            return
        sent = self.key_file.sent()
        # A killed run may have noted a round that its stored state lacks: it is sent again. A state
        # from before the first round proves nothing, and is refused beside a new file.
        if sent > done + 1 or (is_noted and sent < max(done, 1)):
            raise ValueError(
                f"key_file {self.key_file.path} says that {sent} rounds were sent, the state is of "
                f"{done}; go on from the newest state with the key file of its own noise, or begin "
                "another run and account for both"
            )

    def note_sent(self, done: int, message: Message) -> None:
        """Note that the message of a round may be out; `KeyFile.note_sent` refuses another one.

        Args:
            done: Rounds done before.
            message: Of this round.
        """
        if self.key_file is not None:
            # In a forked process the lock keeps the other one out no more.
            self._key_lock.check()
            self.key_file.note_sent(done + 1, tree_digest(message))


def check_storage(plans: Sequence[Plan], storage: Checkpoint) -> None:
    """Check that a release, and only a release, has a file for its key, apart from checkpoints.

    Args:
        plans: The plans.
        storage: Folder and key file.

    Raises:
        ValueError: For a missing or superfluous key file, or one inside the checkpoint.
    """
    folder = storage.folder
    key_file = storage.key_file
    if not plans[0].config.release:
        if key_file is not None:
            raise ValueError(f"key_file is {key_file} but no plan has release=True; leave it out")
        return
    if key_file is None or os.path.isdir(key_file):
        raise ValueError(f"key_file is {key_file} for a release; name a file to keep its key in")
    # Whoever reads models and key subtracts the noise of all messages.
    if folder is not None and Path(folder).resolve() in Path(key_file).resolve().parents:
        raise ValueError(
            f"key_file {key_file} lies inside checkpoint {folder}, which may be copied or "
            "shared; keep the key apart"
        )
