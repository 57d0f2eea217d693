"""Accuracy of real sites: who holds what, what sums cost, and the figure from its record alone."""

import math
from pathlib import Path

import numpy as np
import pytest

from _common import launch
from dpjax.accounting import gdp
from dpjax.results import records
from tests.support import load_script

script = load_script("sites_accuracy")
ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = ROOT / "docs" / "records" / "sites_accuracy.jsonl.gz"


def test_hospitals_have_unequal_files_and_others_measure(tmp_path: Path) -> None:
    config = script.PRESETS["tiny"]
    script.write_hospitals(config, tmp_path)
    everyone = script.load(config, tmp_path)
    assert [len(y) for _, y in everyone.parts] == [20, 40, 20, 40, 20] == config.counts.tolist()
    assert len(everyone.test[1]) == 35
    own = script.load(config, tmp_path, 3)
    assert len(own.parts) == 1
    np.testing.assert_array_equal(own.parts[0][0], everyone.parts[3][0])
    assert not set(map(bytes, own.test[0])) & {bytes(row) for x, _ in everyone.parts for row in x}


@pytest.mark.parametrize("number", [0, 9])
def test_digits_of_sites_are_disjoint(tmp_path: Path, number: int) -> None:
    config = script.PRESETS["cpu"]
    everyone = script.load(config, tmp_path)
    own = script.load(config, tmp_path, number)
    np.testing.assert_array_equal(own.parts[0][0], everyone.parts[number][0])
    rows = [bytes(row) for x, _ in everyone.parts for row in x]
    assert len(rows) == config.counts.sum() == 1416
    assert len(set(rows)) > 0.98 * len(rows)  # Some digits are written twice.


def test_noise_of_sums_is_that_of_honest_shares_and_more() -> None:
    """At a large budget whole numbers cost little, and what stays are the shares."""
    config = script.PRESETS["tiny"]
    (row,) = script.noises(config)
    assert row["shares"] == pytest.approx(math.sqrt(5 / 3))
    assert row["shares"] < row["ratio"] < 1.2 * row["shares"]
    parts = "central", 1.0, 16.0, (1.0,), config.counts
    (central,) = script.plans(config, *parts)
    # A record in all rounds moves each sum by at most the clip norm.
    expected = math.sqrt(config.rounds) / gdp.mu(16.0, config.delta)
    assert np.linalg.norm(central.noise.factor) == pytest.approx(expected, rel=1e-3)


def test_plans_of_sites_keep_one_budget() -> None:
    config = script.PRESETS["cpu"].parts[0]
    for method in ("independent", "mafalda", "aggregate"):
        agreed = script.released(config, script.Chosen(method, 1.0, 1.0, 0.1))
        stated = agreed.guarantee
        assert 0.99 < stated.epsilon <= 1.0 and stated.delta == 1e-5
        assert stated.relation == "zero_out_record" and stated.gradients == "any"


def test_figure_is_drawn_from_its_record(tmp_path: Path) -> None:
    config = script.PRESETS["cpu"]
    frames = [records.read(ARCHIVE, f"{part.stem}_*") for part in config.parts]
    lab = launch.Lab("sites_accuracy", "cpu", launch.Options(output=tmp_path), "a test")
    script.draw(config, lab, frames)
    drawn = (lab.folder / "sites_accuracy.svg").read_text(encoding="utf-8")
    for title in script.TITLES.values():
        assert f"<!-- {title} -->" in drawn
    for frame in frames:
        real = frame[frame["way"] == "sites"]
        assert real["guarantee"].map(lambda stated: stated["sites"]).all()
        assert (real["epsilon"] <= real["budget_epsilon"]).all()
