"""Keys: apart by purpose and seed; the secret file of a release."""

import itertools
import json
import os
import resource
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from dpjax.engine import keys
from dpjax.engine.keys import KeyFile


def bits(key):
    return np.asarray(jax.random.key_data(key)).tolist()


def test_no_two_seeds_purposes_or_phases_share_key():
    entries = list(itertools.product(range(50), keys.PURPOSES, range(2)))
    assert len({tuple(bits(keys.derive(*item))) for item in entries}) == len(entries)
    assert bits(keys.derive(7, "noise")) == bits(keys.derive(7, "noise"))
    assert str(jax.random.key_impl(keys.derive(0, "noise"))) == "threefry2x32"


@pytest.mark.parametrize("seed", [-1, 0.5, True, 2**32, "0"])
def test_bad_seed(seed):
    with pytest.raises(ValueError, match="seed is"):
        keys.derive(seed, "noise")


def test_bad_purpose():
    with pytest.raises(ValueError, match=r"purpose is .nois.; did you mean noise\? If not, choose"):
        keys.derive(0, "nois")


def test_key_file_round_trip_and_mode(tmp_path):
    path = tmp_path / "deep" / "noise.key"
    result = KeyFile(path, "run A").create()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["noise.key"]
    assert bits(KeyFile(path, "run A").key()) == bits(result)
    other = KeyFile(tmp_path / "other.key", "run A").create()
    assert bits(other) != bits(result)
    assert KeyFile(path, "run A").delete()
    assert not path.exists()
    assert not KeyFile(path, "run A").delete()


def test_key_file_is_never_overwritten(tmp_path):
    path = tmp_path / "noise.key"
    KeyFile(path, "run A").create()
    before = path.read_bytes()
    with pytest.raises(ValueError, match="exists; resume"):
        KeyFile(path, "run B").create()
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_key_file_of_another_run_missing_damaged_or_open(tmp_path):
    path = tmp_path / "noise.key"
    with pytest.raises(ValueError, match="does not exist; a release resumes only"):
        KeyFile(path, "run A").key()
    KeyFile(path, "run A").create()
    with pytest.raises(ValueError, match="belongs to another run"):
        KeyFile(path, "run B").key()
    os.chmod(path, 0o644)
    with pytest.raises(ValueError, match="open to other users"):
        KeyFile(path, "run A").key()
    os.chmod(path, 0o600)
    path.write_text(path.read_text()[:20])
    with pytest.raises(ValueError, match="cannot be read"):
        KeyFile(path, "run A").key()


def test_only_runs_own_key_is_deleted(tmp_path):
    theirs, text, old = (tmp_path / name for name in ("theirs.key", "thesis.txt", "old.key"))
    KeyFile(theirs, "run B").create()
    text.write_text("{}")
    old.write_text(json.dumps({"format": 1, "fingerprint": "run A", "key": [1, 2]}))
    (tmp_path / "folder").mkdir()
    before = {path: path.read_bytes() for path in (theirs, text, old)}
    for path in (*before, tmp_path / "folder", tmp_path / "nothing"):
        assert not KeyFile(path, "run A").delete()
    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / "folder").is_dir()


def test_copy_left_by_kill_goes_with_key(tmp_path):
    """Killed between the file beside and its name: the key would outlive its run."""
    path = tmp_path / "noise[1].key"
    KeyFile(path, "run A").create()
    left, other = (tmp_path / f".{path.name}.{i}.tmp" for i in range(2))
    os.link(path, left)
    KeyFile(other, "run B").create()
    assert KeyFile(path, "run A").delete()
    assert list(tmp_path.iterdir()) == [other]


def test_flipped_bits_and_cuts_of_key_file_are_noticed(tmp_path):
    """With another key the rounds sent again would have fresh noise."""
    path = tmp_path / "noise.key"
    KeyFile(path, "run A").create()
    complete = path.read_bytes()
    faults = [complete[:cut] for cut in range(0, len(complete), 9)]
    for place in range(len(complete)):
        changed = bytearray(complete)
        changed[place] ^= 1 << place % 8
        faults.append(bytes(changed))
    for content in faults:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="key_file .* cannot be read"):
            KeyFile(path, "run A").key()
        assert not KeyFile(path, "run A").delete()


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"\xff", b"[" * 5000, b"1" * 5000, b"{}", b'{"format": 3}', b"x" * 10**6],
)
def test_what_is_no_key_is_refused_and_left(tmp_path, content):
    path = tmp_path / "noise.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="key_file .* cannot be read .*; restore it"):
        KeyFile(path, "run A").key()
    assert path.read_bytes() == content


@pytest.mark.parametrize("fields", [{"format": 1, "fingerprint": "run A", "key": [1, 2]}, [], None])
def test_key_file_without_checksum_is_refused_by_name(tmp_path, fields):
    path = tmp_path / "noise.key"
    path.write_text(json.dumps(fields))
    path.chmod(0o600)
    with pytest.raises(ValueError, match="cannot be read .its checksum does not fit"):
        KeyFile(path, "run A").key()
    assert path.exists()


def test_nothing_hangs_on_pipe_or_endless_file(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="it is no ordinary file"):
            KeyFile(path, "run A").key()


def test_what_was_sent_is_noted_in_file_as_secret_as_before(tmp_path):
    path = tmp_path / "noise.key"
    result = KeyFile(path, "run A").create()
    KeyFile(path, "run A").note_sent(2, "message")
    assert KeyFile(path, "run A").sent() == 2
    assert bits(KeyFile(path, "run A").key()) == bits(result)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="belongs to another run"):
        KeyFile(path, "run B").note_sent(3, "message")
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_and_folder_that_cannot_be_written(tmp_path):
    path = tmp_path / "noise.key"
    kept = tmp_path / "kept.key"
    KeyFile(kept, "run A").create()
    before = kept.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        with pytest.raises(ValueError, match="noise.key', which cannot be written .*make room"):
            KeyFile(path, "run A").create()
        with pytest.raises(ValueError, match="kept.key', which cannot be written"):
            KeyFile(kept, "run A").note_sent(1, "message")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [kept] and kept.read_bytes() == before
    with pytest.raises(ValueError, match="cannot be written"):
        KeyFile("/proc/dpjax/noise.key", "run A").create()
    with pytest.raises(ValueError, match="cannot be written"):
        KeyFile(kept / "noise.key", "run A").create()


@pytest.mark.mutant
def test_of_two_threads_one_has_message_of_round(tmp_path, monkeypatch):
    file = KeyFile(tmp_path / "noise.key", "run A")
    file.create()
    read = KeyFile._read

    def slow_read(file):
        fields = read(file)
        # The other thread may read before this one writes.
        time.sleep(0.1)
        return fields

    monkeypatch.setattr(KeyFile, "_read", slow_read)
    with ThreadPoolExecutor(2) as threads:
        notes = [threads.submit(file.note_sent, 1, message) for message in ("one", "other")]
    assert sorted(note.exception() is None for note in notes) == [False, True]


def test_key_file_has_one_name(tmp_path):
    """Locks go by name, and every note leaves the old file to the other name."""
    path = tmp_path / "noise.key"
    link = tmp_path / "link.key"
    KeyFile(path, "run A").create()
    file = KeyFile(path, "run A")
    os.link(path, link)
    for function in (file.key, file.sent, lambda: file.note_sent(1, "message")):
        with pytest.raises(ValueError, match="noise.key has hard links.*delete all names but one"):
            function()
    link.unlink()
    # Killed while it was made: its temporary name is no other loop's.
    left = tmp_path / ".noise.key.0.tmp"
    os.link(path, left)
    file.note_sent(1, "message")
    assert file.sent() == 1 and not left.exists()


def test_key_file_stays_same_in_other_folders_and_behind_links(tmp_path, monkeypatch):
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        KeyFile("noise.key", "run A").create()
    monkeypatch.chdir(tmp_path / "own")
    os.symlink("noise.key", "link.key")
    for name in ("noise.key", "link.key"):
        file = KeyFile(name, "run A")
        monkeypatch.chdir(tmp_path / "other")
        file.note_sent(file.sent() + 1, name)
        monkeypatch.chdir(tmp_path / "own")
    assert KeyFile("noise.key", "run A").sent() == 2 and os.path.islink("link.key")
    assert KeyFile(tmp_path / "other" / "noise.key", "run A").sent() == 0
    # Neither the key nor a link to it outlives the run.
    assert KeyFile("link.key", "run A").delete()
    assert os.listdir() == []
