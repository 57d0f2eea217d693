"""The tiny preset of noise over agents and rounds: records, figures, and who costs less."""

import numpy as np
import pytest

from dpjax.accounting.guarantee import Guarantee
from dpjax.results import records
from tests.support import load_script


@pytest.fixture(scope="module")
def module():
    return load_script("spacetime_tradeoff")


@pytest.fixture(scope="module")
def folder(module, tmp_path_factory):
    path = tmp_path_factory.mktemp("records")
    assert module.main(["--preset", "tiny", "--output", str(path), "--quiet"]) == 0
    return path / "spacetime_tradeoff" / "tiny"


@pytest.mark.slow
def test_records_are_read_back(module, folder, capsys):
    paths = sorted(folder.glob("*.jsonl"))
    assert len(paths) == 3 and len(list(folder.glob("*.svg"))) == 2
    before = [path.read_bytes() for path in paths]
    arguments = ["--preset", "tiny", "--output", str(folder.parents[1]), "--quiet"]
    assert module.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count(": read") == 3 and "noise energy relative" in out
    assert [path.read_bytes() for path in paths] == before
    metadata = records.read_metadata(paths[0])
    assert metadata["command"].startswith("python experiments/spacetime_tradeoff.py")


@pytest.mark.slow
def test_joint_noise_is_between_its_parents_and_bound(folder):
    frame = records.read([folder / "energy_florentine.jsonl", folder / "energy_ring.jsonl"])
    table = frame.pivot(index=["graph", "epochs", "rounds"], columns="algorithm", values="relative")
    assert len(table) == 8 and np.isfinite(table.to_numpy()).all()
    parents = table[["independent", "whisper", "whisper_horizon", "mafalda"]].min(axis=1)
    assert (table["spacetime"] < 0.999 * parents).all()
    assert (table["unrestricted"] <= table["spacetime"]).all()
    assert (table["whisper_horizon"] <= table["whisper"] * (1 + 1e-6)).all()
    assert frame[frame["algorithm"] == "spacetime"]["converged"].all()


@pytest.mark.slow
def test_runs_state_equal_guarantees(folder):
    frame = records.read(folder / "train_florentine_3x2.jsonl")
    final = frame[frame["phase"] == "final"]
    stated = [Guarantee.from_dict(value) for value in final["guarantee"]]
    assert {(g.epsilon, g.relation) for g in stated} == {(3.0, "replace_record")}
    np.testing.assert_allclose([g.mu for g in stated], stated[0].mu, rtol=1e-4)
    assert set(final["design"]) == {"independent", "spacetime"}
    assert set(final["seed"]) == {0, 1} and set(frame["seed"]) == {0, 1, 100}


def test_bad_configs_are_refused(module, capsys):
    for arguments, match in (
        (["--rounds", "6", "--epochs", "4"], "rounds holds 6"),
        (["--tuning-seeds", "0", "5"], "tuning_seeds share [0]"),
        (["--designs", "central"], "designs holds 'central'"),
    ):
        code = module.main(["--preset", "tiny", *arguments])
        streams = capsys.readouterr()
        assert code == 2 and match in streams.err + streams.out
