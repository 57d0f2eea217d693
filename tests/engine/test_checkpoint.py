"""Folders of checkpoints: what is read is what was written, and nobody else's is touched."""

import json
import random
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

from dpjax import _files
from dpjax.engine.checkpoint import Checkpoint, Storage

RUN = {"plans": "A", "seeds": "(0,)"}
STATE = {"a": np.linspace(0, 1, 1000, dtype=np.float32), "b": np.zeros((3, 4))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a state."""
    folder = tmp_path_factory.mktemp("whole") / "c"
    store = Storage(RUN, Checkpoint(folder))
    for done in (0, 5, 10):
        store.save(done, {**STATE, "b": STATE["b"] + done}, ended=False)
    store.close()
    return folder


def read(folder):
    """What is stored, or the refusal."""
    store = Storage(RUN, Checkpoint(folder))
    try:
        assert (store.begun, store.ended) == (True, False)
        return store.restore(STATE)
    finally:
        store.close()


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_round_trip(whole):
    done, state, ended = read(whole)
    assert done == 10 and not ended
    np.testing.assert_array_equal(state["a"], STATE["a"])
    np.testing.assert_array_equal(state["b"], STATE["b"] + 10)


@pytest.mark.parametrize("kind", ["cut", "emptied", "flipped", "deleted"])
def test_damaged_file_is_named_or_does_not_matter(tmp_path, whole, kind):
    """Other models under the same noise would be another run of it."""
    numbers = random.Random(3)
    names = [path.relative_to(whole) for path in content(whole)]
    folder = tmp_path / "c"
    refused = 0
    for name in sorted(names):
        shutil.copytree(whole, folder)
        old = (folder / name).read_bytes()
        new = bytearray(
            old[: len(old) // 2] if kind == "cut" else b"" if kind == "emptied" else old
        )
        if kind == "flipped" and old:
            new[numbers.randrange(len(new))] ^= 1 << numbers.randrange(8)
        (folder / name).write_bytes(new)
        if kind == "deleted":
            (folder / name).unlink()
            if name.name == "state.npz":  # That there was one is still known.
                store = Storage(RUN, Checkpoint(folder))
                assert store.begun and store.restore(STATE) is None
                store.close()
                shutil.rmtree(folder)
                refused += 1
                continue
        try:
            done, state, _ = read(folder)
            assert done == 10
            np.testing.assert_array_equal(state["b"], STATE["b"] + done)
            np.testing.assert_array_equal(state["a"], STATE["a"])
        except ValueError as error:
            refused += 1
            assert str(error).startswith("checkpoint ") and ";" in str(error), error
        shutil.rmtree(folder)
    assert refused >= 1


@pytest.mark.mutant
@pytest.mark.parametrize("change", [{"rounds": 15}, {"ended": True}, {"identity": {}}])
def test_state_whose_header_was_changed_is_refused(tmp_path, whole, change):
    """Whole files, but of another round or end."""
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    with np.load(folder / "state.npz") as file:
        entries = dict(file)
    header = json.loads(str(entries["header"])) | change
    np.savez(folder / "state.npz", **entries | {"header": np.array(json.dumps(header))})
    with pytest.raises(ValueError, match=r"cannot be read \(its content was changed\); restore it"):
        Storage(RUN, Checkpoint(folder))


def test_folders_of_others_are_refused_and_left(tmp_path, whole):
    for name in ("2023", "thesis.txt"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        for year in ("2021", "2022", "2023"):
            (folder / year).mkdir()
            (folder / year / "taxes").write_text("mine")
        (folder / "thesis.txt").write_text("mine")
        before = content(folder)
        with pytest.raises(ValueError, match="holds 2021 and no dpjax.lock, so it is not"):
            Storage(RUN, Checkpoint(folder))
        assert content(folder) == before
    with pytest.raises(ValueError, match=r"another run, which differs in seeds .* there"):
        Storage(RUN | {"seeds": "(1,)"}, Checkpoint(whole))


def test_state_of_another_format_is_named_and_left(tmp_path, whole):
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    text, arrays = _files.unpacked(folder / "state.npz")
    old = _files.packed(json.dumps(json.loads(text) | {"format": 9}), arrays)
    _files.replace(folder / "state.npz", old)
    before = content(folder)
    with pytest.raises(ValueError, match="cannot be read .another format; end the run with the"):
        Storage(RUN, Checkpoint(folder))
    assert content(folder) == before


def test_full_disk_keeps_what_was_saved(tmp_path, whole):
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    before = content(folder)
    store = Storage(RUN, Checkpoint(folder))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(ValueError, match=f"{folder}', which cannot be written .*make room"):
            store.save(
                15, {"a": np.random.default_rng(0).random(10_000), "b": STATE["b"]}, ended=True
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.close()
    assert {path: data for path, data in content(folder).items() if path in before} == before
    assert read(folder)[0] == 10
    store = Storage(RUN, Checkpoint(folder))
    store.save(15, STATE, ended=True)
    store.close()
    store = Storage(RUN, Checkpoint(folder))
    assert store.ended
    store.close()


def test_folders_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("/proc/dpjax/c", tmp_path / "file" / "c", tmp_path / ("x" * 300)):
        with pytest.raises(
            ValueError, match="checkpoint is .*which cannot be written .* name a place"
        ):
            Storage(RUN, Checkpoint(folder))


def test_new_folder_is_its_owners_alone(tmp_path):
    """Models of saved rounds are in it; a folder that was there keeps its mode."""
    Storage({"plans": "a"}, Checkpoint(tmp_path / "new" / "c")).close()
    assert (tmp_path / "new" / "c").stat().st_mode & 0o777 == 0o700
    (tmp_path / "mine").mkdir(mode=0o750)
    before = (tmp_path / "mine").stat().st_mode
    Storage({"plans": "a"}, Checkpoint(tmp_path / "mine")).close()
    assert (tmp_path / "mine").stat().st_mode == before


HOLDS = """
import fcntl, sys, time
held = open(sys.argv[1])
fcntl.flock(held, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_folder_is_locked_over_processes_until_kill(tmp_path, whole):
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    before = content(folder)
    command = [sys.executable, "-c", HOLDS, str(folder / "dpjax.lock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"checkpoint is '{folder}', which another proc"):
            Storage(RUN, Checkpoint(folder))
        assert content(folder) == before
    finally:
        process.kill()
        process.communicate()
    store = Storage(RUN, Checkpoint(folder))
    with pytest.raises(ValueError, match="another process uses, or another object of this one"):
        Storage(RUN, Checkpoint(folder))
    store.close()
    assert read(folder)[0] == 10


FULL = """
import resource, signal, sys
import numpy as np
from dpjax.engine.checkpoint import Checkpoint, Storage

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = Storage({"run": "a"}, Checkpoint(sys.argv[1]))
tree = {"w": np.arange(999.0), "b": np.ones(3)}
store.save(1, tree, ended=False)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
try:
    store.save(2, tree, ended=False)
except ValueError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    print(error)
print(store.restore(tree)[0])
store.save(3, tree, ended=False)
print(store.restore(tree)[0])
store.close()
"""


def test_full_disk_is_one_error_and_loses_nothing(tmp_path):
    """The checkpoint before stays, and the next one can be written."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "new")], capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and "cannot be written" in lines[0] and "make room" in lines[0]
    assert lines[1:] == ["1", "3"]
    assert "Traceback" not in done.stderr and "ERROR" not in done.stderr, done.stderr
