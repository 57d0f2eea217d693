"""Keys: apart by purpose and seed; the secret file of a release."""

import os
import stat

import jax
import numpy as np
import pytest

from dpjax.engine import keys


def bits(key):
    return np.asarray(jax.random.key_data(key)).tolist()


def test_no_two_seeds_or_purposes_share_a_key():
    seen = {tuple(bits(keys.derive(s, p))) for s in range(50) for p in keys.PURPOSES}
    assert len(seen) == 50 * len(keys.PURPOSES)
    assert bits(keys.derive(7, "noise")) == bits(keys.derive(7, "noise"))
    assert str(jax.random.key_impl(keys.derive(0, "noise"))) == "threefry2x32"


@pytest.mark.parametrize("seed", [-1, 0.5, True, 2**32, "0"])
def test_bad_seed(seed):
    with pytest.raises(ValueError, match="seed is"):
        keys.derive(seed, "noise")


def test_bad_purpose():
    with pytest.raises(ValueError, match="purpose is 'nois'; choose one of initial"):
        keys.derive(0, "nois")


def test_key_file_round_trip_and_mode(tmp_path):
    path = tmp_path / "deep" / "noise.key"
    made = keys.create_key_file(path, "run A")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["noise.key"]
    assert bits(keys.read_key_file(path, "run A")) == bits(made)
    other = keys.create_key_file(tmp_path / "other.key", "run A")
    assert bits(other) != bits(made)
    keys.delete_key_file(path)
    assert not path.exists()
    keys.delete_key_file(path)


def test_key_file_is_never_overwritten(tmp_path):
    path = tmp_path / "noise.key"
    keys.create_key_file(path, "run A")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="exists; resume"):
        keys.create_key_file(path, "run B")
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_key_file_of_another_run_missing_damaged_or_open(tmp_path):
    path = tmp_path / "noise.key"
    with pytest.raises(ValueError, match="does not exist; a release resumes only"):
        keys.read_key_file(path, "run A")
    keys.create_key_file(path, "run A")
    with pytest.raises(ValueError, match="belongs to another run"):
        keys.read_key_file(path, "run B")
    os.chmod(path, 0o644)
    with pytest.raises(ValueError, match="open to other users"):
        keys.read_key_file(path, "run A")
    os.chmod(path, 0o600)
    path.write_text(path.read_text()[:20])
    with pytest.raises(ValueError, match="damaged"):
        keys.read_key_file(path, "run A")
