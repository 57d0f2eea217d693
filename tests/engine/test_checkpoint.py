"""Folders of checkpoints: what is read is what was written, and nobody else's is touched."""

import json
import os
import random
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

from dpjax.engine import checkpoint
from dpjax.engine.checkpoint import Checkpoints

RUN = {"plans": "A", "seeds": "(0,)"}
STATE = {"a": np.linspace(0, 1, 1000, dtype=np.float32), "b": np.zeros((3, 4))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("whole") / "c"
    store = Checkpoints(folder, RUN)
    for done in (0, 5, 10):
        store.save(done, {**STATE, "b": STATE["b"] + done}, ended=False)
    store.close()
    return folder


def read(folder):
    """What is stored, or the refusal."""
    store = Checkpoints(folder, RUN)
    try:
        assert store.status() == (True, False)
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
def test_a_damaged_file_is_named_or_does_not_matter(tmp_path, whole, kind):
    """Other models under the same noise would be another run of it."""
    numbers = random.Random(3)
    names = [path.relative_to(whole) for path in content(whole) if path.name != "5.npz"]
    folder, refused = tmp_path / "c", 0
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
        try:
            done, state, _ = read(folder)
            # Without the newest the run goes on from the one before it.
            assert done == (5 if kind == "deleted" else 10)
            np.testing.assert_array_equal(state["b"], STATE["b"] + done)
            np.testing.assert_array_equal(state["a"], STATE["a"])
        except ValueError as error:
            refused += 1
            assert str(error).startswith("checkpoint ") and ";" in str(error), error
        shutil.rmtree(folder)
    assert refused >= 1


@pytest.mark.mutant
def test_another_state_with_a_whole_folder_is_refused(tmp_path, whole):
    """Whole files, but of another round or end."""
    for change in ("renamed", "swapped", "ended"):
        folder = tmp_path / change
        shutil.copytree(whole, folder)
        newest = folder / "10.npz"
        if change == "renamed":
            newest.rename(folder / "15.npz")
        elif change == "swapped":
            (folder / "5.npz").rename(newest)
        else:
            with np.load(newest) as file:
                entries = dict(file) | {"ended": np.array(True)}
            np.savez(newest, **entries)
        store = Checkpoints(folder, RUN)
        with pytest.raises(ValueError, match=r"is damaged \(its digest does not fit\); restore"):
            store.restore(STATE)
        store.close()


def test_folders_of_others_are_refused_and_left(tmp_path, whole):
    for name in ("2023", "thesis.txt"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        for year in ("2021", "2022", "2023"):
            (folder / year).mkdir()
            (folder / year / "taxes").write_text("mine")
        (folder / "thesis.txt").write_text("mine")
        before = content(folder)
        with pytest.raises(ValueError, match="holds 2021 and no dpjax.json, so it is not"):
            Checkpoints(folder, RUN)
        assert content(folder) == before
    with pytest.raises(ValueError, match=r"another run, which differs in seeds .* there"):
        Checkpoints(whole, RUN | {"seeds": "(1,)"})


@pytest.mark.parametrize("stray", ["3", "40", "40.npz"])
def test_a_stray_number_among_checkpoints_is_left_or_named(tmp_path, whole, stray):
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    (folder / stray).write_text("mine")
    if stray.endswith(".npz"):
        with pytest.raises(ValueError, match=f"/{stray} is damaged .* move it away"):
            read(folder)
    else:
        assert read(folder)[0] == 10
    assert (folder / stray).read_text() == "mine"


@pytest.mark.parametrize("mark", [b"", b"[]", b"{}", b"\xff", b'{"format": 9, "identity": {}}'])
def test_a_damaged_mark_is_named(tmp_path, whole, mark):
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    (folder / "dpjax.json").write_bytes(mark)
    with pytest.raises(ValueError, match="dpjax.json is damaged .*; restore it from a copy, or"):
        Checkpoints(folder, RUN)


def test_a_full_disk_keeps_what_was_saved(tmp_path, whole):
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    before = content(folder)
    store = Checkpoints(folder, RUN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(ValueError, match=f"{folder} cannot be written .*Make room"):
            store.save(
                15, {"a": np.random.default_rng(0).random(10_000), "b": STATE["b"]}, ended=True
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.close()
    assert {path: data for path, data in content(folder).items() if path in before} == before
    assert read(folder)[0] == 10
    store = Checkpoints(folder, RUN)
    store.save(15, STATE, ended=True)
    store.close()
    assert checkpoint.unfinished(folder, RUN) is False


def test_folders_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("/proc/dpjax/c", tmp_path / "file" / "c", tmp_path / ("x" * 300)):
        with pytest.raises(ValueError, match="checkpoint .* cannot be used .* name a folder"):
            Checkpoints(folder, RUN)


def test_unfinished_makes_nothing(tmp_path, whole):
    assert checkpoint.unfinished(whole, RUN)
    assert not checkpoint.unfinished(whole, RUN | {"seeds": "(1,)"})
    assert not checkpoint.unfinished(tmp_path / "none", RUN)
    assert not os.listdir(tmp_path)
    assert json.loads((whole / "dpjax.json").read_text())["identity"] == RUN


def test_a_new_folder_is_its_owners_alone(tmp_path):
    """Models of saved rounds are in it; a folder that was there keeps its mode."""
    Checkpoints(tmp_path / "new" / "c", {"plans": "a"}).close()
    assert (tmp_path / "new" / "c").stat().st_mode & 0o777 == 0o700
    (tmp_path / "mine").mkdir(mode=0o750)
    before = (tmp_path / "mine").stat().st_mode
    Checkpoints(tmp_path / "mine", {"plans": "a"}).close()
    assert (tmp_path / "mine").stat().st_mode == before


HOLDS = """
import fcntl, sys, time
held = open(sys.argv[1])
fcntl.flock(held, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_is_locked_over_processes_until_a_kill(tmp_path, whole):
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    before = content(folder)
    command = [sys.executable, "-c", HOLDS, str(folder / "dpjax.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        for use in (Checkpoints, checkpoint.unfinished):
            with pytest.raises(ValueError, match=f"checkpoint is '{folder}', which another proc"):
                use(folder, RUN)
        assert content(folder) == before
    finally:
        process.kill()
        process.communicate()
    store = Checkpoints(folder, RUN)
    with pytest.raises(ValueError, match="another process uses, or another object of this one"):
        Checkpoints(folder, RUN)
    store.close()
    assert read(folder)[0] == 10


FULL = """
import resource, signal, sys
import numpy as np
from dpjax.engine.checkpoint import Checkpoints

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store, tree = Checkpoints(sys.argv[1], {"run": "a"}), {"w": np.arange(999.0), "b": np.ones(3)}
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


def test_a_full_disk_is_one_error_and_loses_nothing(tmp_path):
    """The checkpoint before stays, and the next one can be written."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "new")], capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and "cannot be written" in lines[0] and "Make room" in lines[0]
    assert lines[1:] == ["1", "3"]
    assert "Traceback" not in done.stderr and "ERROR" not in done.stderr, done.stderr
