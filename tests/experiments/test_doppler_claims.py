"""Verdicts on DOPPLER's ablations, on made-up rows with known answers."""

import math

import pandas
import pytest

from _common import ablations
from _common.claims import NO, UNTOLD, YES

SPREAD = (-0.2, 0.1, 0.1)
"""What differences of three seeds stray by: a standard error of 0.1."""


def made(ends, early=None, rounds=20):
    """Rows of curves by their points in the end; those of a name in ``early`` at round 5 too."""
    rows = []
    for number, (name, points) in enumerate(ends.items()):
        for seed, extra in enumerate(SPREAD):
            own = {"series": name, "seed": seed, "rounds": rounds}
            # Seeds differ by far more than curves do; every other curve strays.
            base = 10.0 * seed + extra * (number % 2)
            if early:
                rows.append(own | {"round": 5, "points": early[name] + base})
            rows.append(own | {"round": rounds, "points": points + base})
    return pandas.DataFrame(rows)


def verdicts(result):
    return {claim.words: claim.verdict for claim in result}


def numbers(result, words):
    (claim,) = (claim for claim in result if claim.words == words)
    return claim.parts


def test_gains_are_of_last_round_and_have_standard_error():
    rows = made({"a, no filter": 50.0, "a, f": 54.0}, {"a, no filter": 20.0, "a, f": 10.0})
    networks = ablations.networks(rows, "f", ["a"])
    (part,) = numbers(networks, "every network is better behind a filter")
    assert part["gain in points"] == pytest.approx(4.0) and part["seeds"] == 3
    assert part["standard error"] == pytest.approx(0.1)
    assert verdicts(networks) == {"every network is better behind a filter": YES}
    assert networks[0].source == "Fig. 7"
    text = networks[0].text().splitlines()
    assert text[0].endswith(f"behind a filter: {YES}") and text[-1].split()[1] == "4"


def test_every_network_is_one_that_none_contradicts():
    ends = {"a, no filter": 50.0, "a, f": 54.0, "b, no filter": 50.0, "b, f": 49.0}
    (claim,) = ablations.networks(made(ends), "f", ["a", "b"])
    assert claim.verdict == NO and [part["verdict"] for part in claim.parts] == [YES, NO]
    (claim,) = ablations.networks(made(ends | {"b, f": 50.1}), "f", ["a", "b"])
    assert claim.verdict == UNTOLD and claim.parts[1]["verdict"] == f"{UNTOLD}: within chance"
    (claim,) = ablations.networks(made(ends), "f", ["a", "c"])
    assert claim.verdict == UNTOLD and claim.parts[1]["verdict"] == f"{UNTOLD}: not run"


def test_optimizers_are_judged_one_by_one_and_by_points():
    ends = {"sgd 1, no filter": 50.0, "sgd 1, f": 54.0, "sgd 8, no filter": 60.0, "sgd 8, f": 61.0}
    ends |= {"adam 1, no filter": 50.0, "adam 1, f": 49.0}
    optimizers = ablations.optimizers(
        made(ends), "f", {"SGD": ["sgd 1", "sgd 8"], "Adam": ["adam 1"]}
    )
    assert verdicts(optimizers) == {
        "SGD is better behind a filter at every budget": YES,
        "Adam is better behind a filter at every budget": NO,
        "the gain is 3 to 10 points": NO,
    }
    parts = numbers(optimizers, "the gain is 3 to 10 points")
    assert [part["verdict"] for part in parts] == [YES, NO, NO]


def test_filters_that_are_as_paper_says_and_that_are_not():
    names = ("no filter", "first v1", "first v2", "f1", "f2", "f3", "f4", "f5", "f6", "second")
    as_said = dict(zip(names, (50, 56, 53, 56, 54, 55, 52, 56, 50, 51), strict=True))
    slow = dict.fromkeys(names, 30.0) | {"second": 20.0}
    filters = ablations.filters(made(as_said, slow))
    assert set(verdicts(filters).values()) == {YES} and len(filters) == 4
    worse = dict.fromkeys(names, 50.0) | {"no filter": 53.0, "first v1": 49.0, "second": 52.0}
    fast = dict.fromkeys(names, 30.0) | {"second": 32.0}
    filters = verdicts(ablations.filters(made(worse, fast)))
    # Whether two are different, no equal numbers decide.
    assert filters.pop("filters of other coefficients have another accuracy") == UNTOLD
    assert set(filters.values()) == {NO}
    # Without a measurement before the end, nothing is known of the beginning.
    once = verdicts(ablations.filters(made(as_said)))
    assert once["the second order is slower early"] == f"{UNTOLD}: not run"


@pytest.mark.parametrize("sign, verdict", [(1, YES), (-1, NO)])
def test_clips_are_compared_each_way(sign, verdict):
    ends = {
        "automatic, flat": 55.0, "automatic, per layer": 55.0 - 2 * sign,
        "Abadi, flat": 55.0 - 3 * sign, "Abadi, per layer": 55.0 - 5 * sign,
    }  # fmt: skip
    assert set(verdicts(ablations.clips(made(ends))).values()) == {verdict}


def test_steps_have_best_inside_or_at_end():
    names = ["f, step 0.1", "f, step 0.2", "f, step 0.4", "f, step 0.8"]

    def judged(ends, early):
        rows = made(*(dict(zip(names, part, strict=True)) for part in (ends, early)))
        return verdicts(ablations.steps(rows, names))

    assert set(judged((50, 55, 58, 52), (20, 25, 30, 35)).values()) == {YES}
    rising = judged((50, 52, 54, 56), (20, 25, 30, 35))
    assert rising == {
        "the best step size is inside the grid": NO,
        "the largest is faster early": YES,
        "and worse in the end": NO,
        "the smallest is slow early": YES,
    }
    lost = judged((50, 55, math.nan, 52), (20, 25, math.nan, 35))
    assert lost["the best step size is inside the grid"] == YES
    with pytest.raises(ValueError, match="three steps or more"):
        ablations.steps(made({"a": 1.0}), ["a"])


def test_schedules():
    for late, soon, text in (
        (58.0, 20.0, (YES, YES)),
        (54.0, 35.0, (NO, NO)),
        (58.0, 35.0, (YES, NO)),
    ):
        rows = made({"constant": 55.0, "cosine": late}, {"constant": 30.0, "cosine": soon})
        assert tuple(verdicts(ablations.schedules(rows)).values()) == text


def test_finetuning_gains_little_and_less_at_large_budgets():
    places = ["epsilon 1", "epsilon 8"]

    def judged(low, high, value=places):
        ends = {"epsilon 1, no filter": 50.0, "epsilon 1, f": 50.0 + low}
        ends |= {"epsilon 8, no filter": 60.0, "epsilon 8, f": 60.0 + high}
        return tuple(verdicts(ablations.finetuning(made(ends), "f", value)).values())

    assert judged(0.5, 0.0) == (YES, YES, YES)
    assert judged(3.0, 5.0) == (YES, NO, NO)
    assert judged(-1.0, -0.5) == (NO, NO, NO)
    # What loses less where budgets are small gains nothing there.
    assert judged(-9.0, -19.0) == (NO, NO, NO)
    complete = made({"epsilon 1, no filter": 50.0, "epsilon 1, f": 50.5})
    result = verdicts(ablations.finetuning(complete, "f", places))
    assert tuple(result.values()) == (YES, YES, f"{UNTOLD}: not run")
    assert judged(0.5, 0.0, places[:1])[2] == f"{UNTOLD}: one budget"


def test_texts_gain_over_one_adam_and_not_over_other():
    ends = {"epsilon 3, no filter": 90.0, "epsilon 3, f": 91.0, "epsilon 3, uncorrected": 91.2}
    result = verdicts(ablations.texts(made(ends), "f", ["epsilon 3"]))
    assert set(result.values()) == {YES}
    del ends["epsilon 3, uncorrected"]
    result = verdicts(ablations.texts(made(ends), "f", ["epsilon 3"]))
    assert tuple(result.values()) == (YES, f"{UNTOLD}: not run")


def test_one_seed_tells_nothing():
    rows = made({"a, no filter": 50.0, "a, f": 54.0})
    (claim,) = ablations.networks(rows[rows["seed"] == 0], "f", ["a"])
    assert claim.verdict == f"{UNTOLD}: one seed"


def test_waves():
    rows = [
        {"series": "no filter", "slow": 1.0, "fast": 1.0, "drift": 0.0},
        {"series": "good", "slow": 0.9, "fast": 0.2, "drift": 1e-7},
        {"series": "flat", "slow": 1.0, "fast": 0.9, "drift": 1e-2},
        {"series": "high", "slow": 0.1, "fast": 0.9, "drift": 0.0},
    ]
    passed, selection = ablations.waves(pandas.DataFrame(rows))
    assert [part["verdict"] for part in passed.parts] == [YES, NO, NO]
    assert [part["verdict"] for part in selection.parts] == [YES, NO, YES]
    assert passed.verdict == selection.verdict == NO
