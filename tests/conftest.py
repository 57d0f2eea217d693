"""The suite's platform (eight fake CPU devices), data, hypothesis profile and small problem."""

import fcntl
import gc
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GPU = os.environ.get("DPJAX_TEST_PLATFORM", "cpu") == "gpu"
AS_USERS = os.environ.get("DPJAX_TEST_EMITTERS") == "users"
# Most of their time is LLVM's, whose optimisations none of their claims is about but those of
# files marked `optimized`. Runs (engine) claim the same bits of several programs, but for those of
# the files named here.
CHEAP = (
    *("accounting", "algorithms", "commands", "contrib", "encoding", "experiments", "learning"),
    *("mechanism", "models", "plans", "secagg", "transforms"),
    *("test_cli", "test_docstrings", "test_identity", "test_result", "test_round", "test_run"),
    *("test_sharding", "test_trace"),
)
# Compiled programs by their text and options: whoever runs the suite again compiles what changed.
COMPILED = ROOT / ".pytest_cache" / "compiled"

# Backends read these when they start, so they are set before the first import of jax.
if not GPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    wanted = {"xla_force_host_platform_device_count": "8"}
    if metadata.version("jaxlib").startswith("0.10.") and not AS_USERS:
        # Three quarters of the suite is compiling, which takes half as long without; no other
        # release need know the flag, and one that does not would end the process.
        wanted["xla_cpu_use_fusion_emitters"] = "false"
        # Every core has a worker of its own: threads for parts of one program gain nothing.
        wanted["xla_cpu_parallel_codegen_split_count"] = "1"
    flags = os.environ.get("XLA_FLAGS", "")
    added = [f"--{name}={value}" for name, value in wanted.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("MPLBACKEND", "agg")

try:
    from hypothesis import settings
except ImportError:  # a bare GPU image may lack it; its tests skip themselves
    pass
else:
    settings.register_profile("dpjax", deadline=None, max_examples=25, print_blob=True)
    settings.register_profile("ci", settings.get_profile("dpjax"), derandomize=True, database=None)
    settings.load_profile("ci" if os.environ.get("CI") else "dpjax")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which a bare GPU image may lack
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker a core for `-n auto`, and none for what one process has done sooner."""
    named = [ROOT / name.partition("::")[0] for name in config.args]
    files = sum(len(list(path.rglob("test_*.py"))) if path.is_dir() else 1 for path in named)
    few = config.option.collectonly or files < (20 if config.option.keyword else 2)
    return 0 if few else min(len(os.sched_getaffinity(0)), files)


def pytest_configure(config: pytest.Config) -> None:
    """Empty the cache of compiled programs once it holds a gigabyte."""
    if "PYTEST_XDIST_WORKER" not in os.environ and COMPILED.exists():
        if sum(entry.stat().st_size for entry in os.scandir(COMPILED)) > 2**30:
            shutil.rmtree(COMPILED)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort out what is slow, and what needs a GPU where there is none; keep mutants in the gate."""
    gate: dict[str, bool] = {}
    cases: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        few = item.get_closest_marker("gate")
        if few is not None and not item.get_closest_marker("slow"):
            cases[name] += 1
            if cases[name] > few.args[0]:
                item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("mutant"):
            gate[name] = gate.get(name, False) or not item.get_closest_marker("slow")
        if not GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: set DPJAX_TEST_PLATFORM=gpu"))
    slow = [name for name, fast in gate.items() if not fast]
    if slow and not any("::" in named for named in config.args):
        raise pytest.UsageError(f"{slow[0]} is marked mutant and slow: leave one case in the gate")


def pytest_collection_finish() -> None:
    """Take modules and tests out of what the garbage collector looks through again and again.

    What tests leave is collected at each file's end, so seldom in between.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compile what is neither of a run's room nor marked with few optimisations."""
    cheap = item.path.parent.name in CHEAP or item.path.stem in CHEAP
    cheap = cheap and not item.get_closest_marker("optimized")
    cheap = cheap and not (GPU or AS_USERS)
    # Processes that a test starts read the variable, as JAX does where it is not imported yet.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(cheap))
    jax = sys.modules.get("jax")
    if jax is not None and jax.config.read("jax_disable_most_optimizations") != cheap:
        jax.config.update("jax_disable_most_optimizations", cheap)
        jax.clear_caches()  # else the one would run what the other compiled


@pytest.fixture(scope="session", autouse=True)
def data_folder() -> Path:
    """The data cache of the whole session: the user's own if one is named, else the suite's."""
    named = os.environ.get("DPJAX_DATA")
    folder = Path(named) if named else ROOT / ".pytest_cache" / "dpjax-data"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["DPJAX_DATA"] = str(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def compiled_code(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drop what a file compiled if it piled up, or if a copy it broke would run in another."""
    yield
    text = request.path.read_text()
    breaks = "patch" in text or "mutant" in text
    much = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 2**22
    if (jax := sys.modules.get("jax")) is not None and (breaks or much):
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def real_data(data_folder: Path) -> Callable[[str], Path]:
    """Return ``get``: ``get("a9a")`` is the file of a real data set, or the test is skipped."""

    def get(name: str) -> Path:
        target = data_folder / (f"{name}.edgelist" if name == "facebook_ego" else f"{name}.npz")
        if not target.exists():
            export = ROOT.parent / "shared" / "data" / "export.py"
            if not export.exists():
                pytest.skip(f"{target.name} is not in {data_folder}; get it with `dpjax data`")
            _export(export, name, target)
        return target

    return get


@pytest.fixture(scope="session")
def network():
    """The mixing matrix of a small graph."""
    from dpjax.topology import graphs, mixing

    return mixing.metropolis_hastings(graphs.erdos_renyi(6, 0.5, 0))


@pytest.fixture(scope="session")
def small(network):
    """A problem over that graph's agents."""
    from tests.support import make_problem

    return make_problem(len(network))


def _export(script: Path, name: str, target: Path) -> None:
    """Make ``target`` once, however many processes ask for it at the same time."""
    with open(target.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        with tempfile.TemporaryDirectory(dir=target.parent) as beside:
            command = [sys.executable, str(script), "--to", beside, name]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{script} could not write {name}: {done.stderr}")
            os.replace(Path(beside) / target.name, target)
