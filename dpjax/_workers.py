"""Files that several processes or cluster jobs make together, each file by one of them.

Whoever makes a file holds a lock beside it, which ends with its process: the others then take the
file over. Machines of a cluster need a file system whose locks reach all of them, as those of NFS
do, and of Lustre mounted with ``flock``.
"""

import contextlib
import functools
import io
import os
import pickle
import platform
import re
import sys
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from dpjax import _files, _validate

__all__ = ()

_PAUSE = 0.2
"""Seconds between two looks at what others make."""


def shared_files(
    paths: Iterable[Path], team: "Team | None" = None, say: Callable[[str], None] = print
) -> Iterator[tuple[Path, bool]]:
    """Yield every file once, those that are there first, until all are there.

    Args:
        paths: The files.
        team: Makes the missing ones; None is this process, beside others that do the same.
        say: Told whom this process waits for.

    Returns:
        Path, and whether the caller is to make the file before it asks for the next one.

    Raises:
        ValueError: If the team ended and a file is missing.
    """
    pending = list(dict.fromkeys(paths))
    running = True
    waiting = False
    while True:
        # What is there already is read while others are at the rest.
        for path in [path for path in pending if os.path.exists(path)]:
            pending.remove(path)
            yield path, False
        if not pending:
            return
        if not running:
            raise ValueError(f"{pending[0]} is missing: {team}; the same command carries on")
        if claim := None if team else _claim(pending):
            path, lock = claim
            with contextlib.closing(lock):
                if not os.path.exists(path):  # It was made while the lock was taken.
                    pending.remove(path)
                    yield path, True
            continue
        if team:
            running = team.running()  # What it ends with is looked for once more.
        elif not waiting:
            waiting = True
            with contextlib.suppress(OSError):
                other = _beside(pending[0]).read_text(encoding="utf-8")
                say(f"{pending[0]}: waits for {other}, which makes it")
        time.sleep(_PAUSE)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.claim")


def _claim(paths: list[Path]) -> tuple[Path, _files.Lock] | None:
    """The first file that nobody makes, locked; those that a dead process left come last."""
    for path in sorted(paths, key=lambda path: os.path.exists(_beside(path))):
        with contextlib.suppress(_files.Busy):
            lock = _files.Lock("output", path, _beside(path), passing=True)
            # Of a process that was killed there may be a longer text.
            os.ftruncate(lock.handle, 0)
            os.pwrite(lock.handle, f"process {os.getpid()} on {platform.node()}".encode(), 0)
            return path, lock
    return None


class Team:
    """Workers that call the same function, in processes of this machine or in cluster jobs.

    They start when something is missing (`running`), with this process's settings of JAX. Sums
    depend in their last bits on the number of threads, so every worker has as many as this process.

    Args:
        parallel: How many processes, or the path of a YAML file for submitit: ``workers`` is how
            many jobs, ``cluster`` is ``slurm`` or ``local`` (by default what is there), and
            everything else is a parameter of ``submitit.AutoExecutor``.
        work: What each calls.
        folder: Of compiled programs, which all share, and of the jobs' logs.
        say: Told of workers that failed.

    Raises:
        ValueError: For another number or file, or where submitit is missing; where `running` finds
            that the work cannot be sent.
    """

    def __init__(
        self, parallel: Any, work: Callable[[], None], folder: Path, say: Callable[[str], None]
    ):
        self._work = work
        self._folder = folder
        self._say = say
        self._processes: list[Any] = []
        self._jobs: list[Any] = []
        self._ended: dict[int, str] = {}
        self._executor: Any = None
        if not isinstance(parallel, str | os.PathLike):
            remedy = "give how many processes, or the path of a YAML file for submitit"
            self.count = _validate.integer("parallel", parallel, remedy=remedy)
            return
        import yaml

        name = f"parallel is {os.fspath(parallel)!r}"
        try:
            options = dict(yaml.safe_load(Path(parallel).read_text(encoding="utf-8-sig")))
            self.count = _validate.integer("workers", options.pop("workers", None))
            import submitit

            self._executor = submitit.AutoExecutor(
                folder / "jobs", cluster=options.pop("cluster", None)
            )
            self._executor.update_parameters(**options)
        except ImportError:
            text = "a file for submitit, which is not installed; pip install submitit"
            raise ValueError(f"{name}, {text}") from None
        except Exception as error:  # of the file system, YAML, or submitit, which raises NameError
            text = f"which cannot be used ({_reason(error)})"
            remedy = "give a file of `workers: 4` and parameters of submitit.AutoExecutor"
            raise ValueError(f"{name}, {text}; {remedy}") from None

    def __enter__(self) -> "Team":
        """Leave the start to `running`."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Say who failed, and end what still runs or waits for a machine."""
        if self._jobs:
            self.running()
        for process, job in zip(self._processes, self._jobs, strict=False):
            # Killed, a process leaves semaphores, of which Python warns.
            process.shutdown(kill_workers=not job.done())
        for job in self._jobs:
            if not job.done():
                job.cancel()

    def __str__(self) -> str:
        """How the workers ended."""
        reasons = "; ".join(dict.fromkeys(filter(None, self._ended.values())))
        return f"all {self.count} workers ended" + (f" ({reasons})" if reasons else "")

    def running(self) -> bool:
        """Whether a worker still runs; the first call starts them."""
        # Workers take seconds to start, and nothing may be missing.
        if not self._jobs:
            self._start()
        for number, job in enumerate(self._jobs, start=1):
            if number not in self._ended and job.done():
                error = job.exception()
                self._ended[number] = reason = _reason(error) if error else ""
                if reason:
                    others = "others take over what it was at"
                    self._say(f"worker {number} of {self.count}: {reason}; {others}")
        return len(self._ended) < self.count

    def _start(self) -> None:
        from joblib.externals import loky

        environment = {
            "JAX_COMPILATION_CACHE_DIR": str(self._folder.absolute() / "compiled"),
            # Several processes share a GPU's memory.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        environment |= {name: os.environ[name] for name in environment if name in os.environ}
        try:
            work = _pickled(self._work)
        except Exception as error:  # TypeError, PicklingError, or of a class's own methods
            text = f"whose work cannot be sent to processes ({_reason(error)})"
            remedy = "give parallel=1, or make what it names inside the function that uses it"
            raise ValueError(f"parallel asks for {self.count} workers, {text}; {remedy}") from error
        arguments = _begin, sys.path, environment, _settings(), work
        if self._executor is not None:
            with self._executor.batch():
                self._jobs = [self._executor.submit(*arguments) for _ in range(self.count)]
            return
        for _ in range(self.count):
            # One pool each: a pool ends all its processes when one dies.
            self._processes.append(loky.ProcessPoolExecutor(1))
            self._jobs.append(self._processes[-1].submit(*arguments, os.getpid()))


def _pickled(work: Any) -> bytes:
    """A function as bytes; functions that JAX compiles are compiled anew from their Python code."""
    import cloudpickle
    import jax

    def reduced(function: Any) -> tuple[Any, ...]:
        info = function._jit_info
        static = {"static_argnums": info.static_argnums, "static_argnames": info.static_argnames}
        return functools.partial(jax.jit, **static), (function.__wrapped__,)

    class Pickler(cloudpickle.Pickler):
        # What JAX itself sends runs, and cannot be traced.
        dispatch_table = ChainMap({type(jax.jit(abs)): reduced}, cloudpickle.Pickler.dispatch_table)

    Pickler(stream := io.BytesIO()).dump(work)
    return stream.getvalue()


def _settings() -> bytes:
    """This process's settings of JAX, each with what its environment says of it."""
    import jax

    settings = dict(jax.config.values)
    # A device is of one process; its platform means the same in all.
    device = settings["jax_default_device"]
    settings["jax_default_device"] = getattr(device, "platform", device)
    if settings["jax_compilation_cache_dir"] is None:  # Workers have one of their own.
        del settings["jax_compilation_cache_dir"]
    return pickle.dumps(
        {name: (value, os.environ.get(name.upper())) for name, value in settings.items()}
    )


def _begin(
    path: list[str], environment: dict[str, str], settings: bytes, work: bytes, parent: int = 0
) -> None:
    """What a worker calls; modules are found, and JAX is imported, as in the first process."""

    # A process that is killed ends none of those that it started.
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)  # The first process was killed.

    if parent:
        threading.Thread(target=watch, daemon=True).start()
    sys.path[:] = path
    os.environ.update(environment)
    import jax

    for name, (value, outside) in pickle.loads(settings).items():
        # A cluster job's own environment comes first.
        if jax.config.values.get(name, value) != value and os.environ.get(name.upper()) == outside:
            jax.config.update(name, value)
    pickle.loads(work)()


def _reason(error: BaseException) -> str:
    """An error in one line: a dead process's exit code, the end of a whole traceback."""
    text = " ".join(re.sub(r"\[Errno -?\d+\] ", "", str(error)).split())
    # Of a dead process its exit code is all that tells what happened.
    if code := re.search(r"exit codes of the workers are \{(.*?)\}", text):
        return f"it died with {code[1]}"
    name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return name + (text if len(text) < 400 else f"... {text[-400:]}")
