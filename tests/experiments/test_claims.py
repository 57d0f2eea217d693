"""Verdicts on claims, on numbers with known answers."""

import math

import pandas
import pytest

from _common import claims
from _common.claims import NO, UNTOLD, YES


def test_gains_are_paired_over_seeds():
    rows = [
        {"design": name, "seed": seed, "points": base + extra}
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
    chance = f"{UNTOLD}: within chance"
    assert judged == [YES, chance, NO, NO, f"{UNTOLD}: one seed", NO, NO]
    # More than chance, and what is claimed is not excluded.
    assert claims.verdict(2.5, 1.0, 3.0) == chance
    judged = [claims.verdict(gain, 0.1) for gain in (0.3, 0.1, 0.0, -0.1, -0.3)]
    assert judged == [YES, chance, chance, chance, NO]
    assert math.isnan(claims.margin(math.nan, 1))
    # A run that diverged among several is no lack of seeds.
    assert claims.verdict(math.nan, math.nan) == claims.below(math.nan, math.nan, 1.0) == NO


def test_upper_bounds_are_judged():
    pairs = ((0.4, 0.4), (0.8, 0.4), (1.2, 0.4), (2.0, 0.4), (-3.0, 0.2), (0.4, math.nan))
    assert [claims.below(*pair, 1.0).partition(":")[0] for pair in pairs] == [
        *(YES, UNTOLD, UNTOLD, NO, YES, UNTOLD),
    ]


def test_claims_of_several_parts():
    for parts, complete in (
        ((YES, YES), YES),
        ((NO, NO), NO),
        ((YES, NO), NO),
        ((YES, f"{UNTOLD}: one seed"), UNTOLD),
        ((NO, f"{UNTOLD}: within chance"), NO),
        ((YES, NO, UNTOLD), NO),
        ((UNTOLD,), UNTOLD),
    ):
        assert claims.joined(*parts) == complete, parts
    for invalid in ((), ("maybe",)):
        with pytest.raises(ValueError, match="verdicts"):
            claims.joined(*invalid)


def test_parts_say_what_was_not_run_and_claims_join_them():
    rows = [
        {"series": name, "seed": seed, "points": 50.0 + extra * (1 + 0.01 * seed)}
        for name, extra in (("plain", 0.0), ("better", 4.0))
        for seed in (0, 1)
    ]
    frame = pandas.DataFrame(rows)
    run = claims.part(frame, "better", "plain", "points", of="a")
    assert run["gain in points"] == pytest.approx(4.02) and run["verdict"] == YES
    assert claims.part(frame, "plain", "better", "points", of="a")["verdict"] == NO
    two_sided = claims.part(frame, "plain", "better", "points", of="a", judge=claims.unequal)
    assert two_sided["verdict"] == YES and two_sided["gain in points"] == pytest.approx(-4.02)
    missing = claims.part(frame, "better", "third", "points", of="b")
    assert missing == {"of": "b", "verdict": f"{UNTOLD}: not run"}
    assert claims.Judged("Fig. 0", "words", (run, missing)).verdict == UNTOLD
    lost = pandas.concat([frame, frame.assign(series="lost", points=[1.0, math.nan] * 2)[:2]])
    assert claims.part(lost, "lost", "plain", "points", of="c")["verdict"] == NO
    diverged = claims.part(lost, "plain", "lost", "points", of="c")["verdict"]
    assert diverged == f"{UNTOLD}: diverged"
    assert claims.Judged("Fig. 0", "words", (missing,)).verdict == f"{UNTOLD}: not run"
    lines = claims.Judged("Fig. 0", "words", (run, missing)).text().splitlines()
    assert lines[0] == f"Fig. 0: words: {UNTOLD}" and len(lines) == 5
