"""The example of central training: short, learns, and every way states one guarantee."""

from pathlib import Path

import numpy as np
import pytest

from tests.support import load_script

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "examples" / "central.py"
ALL = ("SGD", "filter", "average", "banded")


@pytest.mark.slow
@pytest.mark.parametrize("tried", [ALL])
def test_central_example_is_short_and_learns(capsys, tried):
    assert len(PATH.read_text().splitlines()) < 45
    module = load_script("central", "examples")
    results = module.main(rounds=24, tried=tried)
    out = capsys.readouterr().out
    banded = tried.count("banded")
    assert list(results) == list(tried)
    assert out.count("(epsilon = 2, delta = 0.0001)-differentially private per record") == len(
        tried
    )
    assert out.count("over 24 rounds against") == len(tried) - banded
    assert out.count("in 6 of which, 4 apart") == banded
    models = []
    for way, result in results.items():
        # Ten classes: a tenth is chance.
        assert result.metrics["test_accuracy"][-1].mean() > 0.3, way
        assert result.guarantees[0].relation == "zero_out_record"
        models.append(np.asarray(result.model(seed=0)["params"]["layers_0"]["kernel"]))
    # Each way is one of its own.
    assert all(not np.allclose(a, b) for i, a in enumerate(models) for b in models[:i])
