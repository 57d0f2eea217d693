"""Verdicts on claims, on numbers with known answers."""

import math

import pandas
import pytest

from _common import claims


def test_gains_are_paired_over_seeds():
    rows = [
        {"algorithm": name, "seed": seed, "points": base + extra}
        for seed, base in enumerate((10.0, 50.0, 90.0))
        for name, extra in (("plain", 0.0), ("better", 4.0 + seed), ("worse", -1.0))
    ]
    first, second = claims.gains(pandas.DataFrame(rows), "plain", "points")
    assert first["method"] == "better" and first["gain in points"] == pytest.approx(5.0)
    # The seeds differ by forty points, their differences by one.
    assert first["standard error"] == pytest.approx(1 / math.sqrt(3)) and first["seeds"] == 3
    # Student's t of two degrees of freedom.
    assert first["margin"] == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert second["method"] == "worse" and second["gain in points"] == pytest.approx(-1.0)
    with pytest.raises(ValueError, match="'none' is in no row"):
        claims.gains(pandas.DataFrame(rows), "none", "points")


def test_claims_of_points_are_judged():
    pairs = ((5, 1), (3.5, 4), (2, 0.5), (-4, 0.1), (4, math.nan), (math.nan, 0.1), (1, 1.5))
    judged = [claims.verdict(*pair, 3.0) for pair in pairs]
    chance = "open: within chance"
    assert judged == ["holds", chance, "partly", "not", "open: one seed", "not", "not"]
    judged = [claims.verdict(gain, 0.1) for gain in (0.3, 0.1, 0.0, -0.1, -0.3)]
    assert judged == ["holds", chance, chance, chance, "not"]
    assert math.isnan(claims.margin(math.nan, 1))
    # A run that diverged among several is no lack of seeds.
    assert claims.verdict(math.nan, math.nan) == claims.below(math.nan, math.nan, 1.0) == "not"


def test_upper_bounds_are_judged():
    pairs = ((0.4, 0.4), (0.8, 0.4), (1.2, 0.4), (2.0, 0.4), (-3.0, 0.2), (0.4, math.nan))
    assert [claims.below(*pair, 1.0).partition(":")[0] for pair in pairs] == [
        *("holds", "open", "open", "not", "holds", "open"),
    ]


def test_claims_of_several_parts():
    for parts, whole in (
        (("holds", "holds"), "holds"),
        (("not", "not"), "not"),
        (("holds", "not"), "partly"),
        (("partly", "partly"), "partly"),
        (("holds", "open: one seed"), "open"),
        (("not", "open: within chance"), "not"),
        (("holds", "not", "open"), "partly"),
        (("open",), "open"),
    ):
        assert claims.joined(*parts) == whole, parts
    for wrong in ((), ("maybe",)):
        with pytest.raises(ValueError, match="verdicts"):
            claims.joined(*wrong)


def test_parts_say_what_was_not_run_and_claims_join_them():
    rows = [
        {"series": name, "seed": seed, "points": 50.0 + extra * (1 + 0.01 * seed)}
        for name, extra in (("plain", 0.0), ("better", 4.0))
        for seed in (0, 1)
    ]
    frame = pandas.DataFrame(rows)
    run = claims.part(frame, "better", "plain", "points", of="a")
    assert run["gain in points"] == pytest.approx(4.02) and run["verdict"] == "holds"
    assert claims.part(frame, "plain", "better", "points", of="a")["verdict"] == "not"
    two_sided = claims.part(frame, "plain", "better", "points", of="a", judge=claims.unequal)
    assert two_sided["verdict"] == "holds" and two_sided["gain in points"] == pytest.approx(-4.02)
    missing = claims.part(frame, "better", "third", "points", of="b")
    assert missing == {"of": "b", "verdict": "open: not run"}
    assert claims.Judged("Fig. 0", "words", (run, missing)).verdict == "open"
    lost = pandas.concat([frame, frame.assign(series="lost", points=[1.0, math.nan] * 2)[:2]])
    assert claims.part(lost, "lost", "plain", "points", of="c")["verdict"] == "not"
    assert claims.part(lost, "plain", "lost", "points", of="c")["verdict"] == "open: diverged"
    assert claims.Judged("Fig. 0", "words", (missing,)).verdict == "open: not run"
    lines = claims.Judged("Fig. 0", "words", (run, missing)).text().splitlines()
    assert lines[0] == "Fig. 0: words: open" and len(lines) == 5
