"""The run over TCP: the models of the run in jit to the bit, and what crossed for them."""

import types

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
pytest.importorskip("msgpack", reason="the extra `secure` is not installed")

from dpjax.accounting.guarantee import Guarantee  # noqa: E402
from dpjax.results import records  # noqa: E402
from tests.experiments.test_experiments import cells, script  # noqa: E402


def test_tiny_preset_has_the_same_models_both_ways(tmp_path, capsys):
    module = script("experiments", "dome_tcp")
    arguments = ["--preset", "tiny", "--output", str(tmp_path), "--quiet"]
    assert module.main(arguments) == 0
    capsys.readouterr()
    (path,) = cells(tmp_path, "dome_tcp")
    frame = records.read(path)
    assert set(frame["way"]) == {"TCP", "masks in jit"} and frame["same_models"].all()
    over, inside = (frame[frame["way"] == way] for way in ("TCP", "masks in jit"))
    assert over["test_accuracy"].tolist() == inside["test_accuracy"].tolist()
    config, last = module.PRESETS["tiny"], over.iloc[-1]
    assert last["round"] == config.rounds and last["aborted"] < config.rounds
    # Clients that leave at three of four stages are missing; on a slow machine late ones, too.
    expected = config.agents - 0.75 * config.dropouts
    assert config.agents - config.dropouts <= last["survivors"] <= expected + last["aborted"]
    assert last["bytes_up"] > last["numbers"] and (np.diff(over["megabytes"]) > 0).all()
    stated = Guarantee.from_dict(last["guarantee"])
    assert (stated.accountant, stated.unit, stated.attacker) == ("zcdp", "client", "aggregator")
    assert module.main(arguments) == 0 and ": read" in capsys.readouterr().out
    assert list((tmp_path / "dome_tcp" / "tiny").glob("*.svg"))


def test_a_bit_is_another_model():
    module = script("experiments", "dome_tcp")
    one = np.linspace(0, 1, 5, dtype=np.float32)
    other = one.copy()
    other[3] = np.nextafter(other[3], 2)
    results = [types.SimpleNamespace(params={"w": leaf}) for leaf in (one, one.copy(), other)]
    assert module.same_models(*results[:2]) and not module.same_models(*results[1:])
