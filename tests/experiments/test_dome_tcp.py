"""The run over TCP: the models of the run in jit to the bit, and what crossed for them."""

import types

import numpy as np
import pandas
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
pytest.importorskip("msgpack", reason="the extra `secure` is not installed")

from dpjax.accounting.guarantee import Guarantee  # noqa: E402
from dpjax.results import records  # noqa: E402
from tests.experiments.test_experiments import cells  # noqa: E402
from tests.support import load_script  # noqa: E402


@pytest.mark.slow
def test_tiny_preset_has_same_models_both_ways(tmp_path, capsys):
    module = load_script("dome_tcp")
    arguments = ["--preset", "tiny", "--seeds", "1", "--output", str(tmp_path), "--quiet"]
    assert module.main(arguments) == 0
    capsys.readouterr()
    frames = {path.stem: records.read(path) for path in cells(tmp_path, "dome_tcp")}
    assert set(frames) == {"breast_cancer_4_1", "breast_cancer_4_tuning"}
    frame = frames["breast_cancer_4_1"]
    tuning = frames["breast_cancer_4_tuning"]
    assert set(frame["way"]) == {"TCP", "masks in jit"} and frame["same_models"].all()
    over, inside = (frame[frame["way"] == way] for way in ("TCP", "masks in jit"))
    assert over["test_accuracy"].tolist() == inside["test_accuracy"].tolist()
    config = module.PRESETS["tiny"]
    last = over.iloc[-1]
    assert last["round"] == config.rounds and last["aborted"] < config.rounds
    # Clients that leave at three of four stages are missing; on a slow machine late ones, too.
    expected = config.agents - 0.75 * config.dropouts
    assert config.agents - config.dropouts <= last["survivors"] <= expected + last["aborted"]
    assert last["bytes_up"] > last["numbers"] and (np.diff(over["megabytes"]) > 0).all()
    stated = Guarantee.from_dict(last["guarantee"])
    assert (stated.accountant, stated.unit, stated.attacker) == ("zcdp", "client", "aggregator")
    # Both were tuned over the same steps; what has no noise is run in the same file.
    tried = tuning[tuning["phase"] == "tuning"].groupby("way")["step_size"]
    assert {way: set(steps) for way, steps in tried} == dict.fromkeys(
        ("masks in jit", "no noise"), set(config.steps)
    )
    assert set(frame["step_size"]) == {module.recorded_step(tuning)}
    free = tuning[tuning["phase"] == "final"]
    assert set(free["way"]) == {"no noise"} and set(free["seed"]) == {1}
    assert module.main(arguments) == 0
    printed = capsys.readouterr().out
    assert ": read" in printed and "no noise" in printed
    share = np.mean(module.problems(config)[2][1] == 1)
    assert f"the most frequent class has {max(share, 1 - share):.4g}" in printed
    assert list((tmp_path / "dome_tcp" / "tiny").glob("*.svg"))


def test_step_is_that_of_least_mean_loss():
    """Of runs with noise alone; one that diverged in a seed is not passed over."""
    module = load_script("dome_tcp")
    rows = [
        ("masks in jit", 0.3, np.nan), ("masks in jit", 0.3, 0.1), ("masks in jit", 0.1, 0.5),
        ("masks in jit", 0.1, 0.6), ("masks in jit", 0.03, 0.7), ("no noise", 0.03, 0.2),
    ]  # fmt: skip
    frame = pandas.DataFrame(rows, columns=["way", "step_size", "test_loss"])
    assert module.recorded_step(frame.assign(phase="tuning")) == 0.1


def test_bit_is_another_model():
    module = load_script("dome_tcp")
    first = np.linspace(0, 1, 5, dtype=np.float32)
    other = first.copy()
    other[3] = np.nextafter(other[3], 2)
    results = [types.SimpleNamespace(params={"w": leaf}) for leaf in (first, first.copy(), other)]
    assert module.same_models(*results[:2]) and not module.same_models(*results[1:])
