"""Comparisons of systems and of sketches: fair by what is stated, judged by what is measured."""

import copy
import dataclasses
import math
from pathlib import Path

import numpy as np
import pandas
import pytest

from _common.claims import UNTOLD
from dpjax.algorithms.exchange import Trusted
from dpjax.data import partition
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.results import records
from tests.support import load_script

ROOT = Path(__file__).resolve().parents[2]


def test_every_system_is_tried_as_often_and_goes_as_far():
    module = load_script("compare")
    for preset in module.PRESETS.values():
        for name in preset.systems:
            trials = module.trials(preset, name)
            assert sum(len(steps) for _, steps in trials) == len(preset.paths), name
            reach = sorted(
                step * setting.clip_norm / setting.unit for setting, steps in trials
                for step in steps
            )  # fmt: skip
            assert np.allclose(reach, sorted(preset.paths))
    few = dataclasses.replace(module.PRESETS["cpu"], paths=(0.1, 0.2))
    with pytest.raises(ValueError, match="2 entries for 4 settings"):
        module.trials(few, "tracking")
    with pytest.raises(ValueError, match="whose noise by schedule"):
        dataclasses.replace(module.PRESETS["cpu_epochs"], systems=("tracking",))


@pytest.mark.mutant
def test_all_systems_state_one_guarantee_and_twin_is_told():
    module = load_script("compare")
    config = dataclasses.replace(module.PRESETS["tiny"], systems=tuple(module.SYSTEMS))
    config = dataclasses.replace(config, paths=(0.3, 0.2, 0.1, 0.05), clip_norms=(0.1, 0.3))
    rows = []
    for name in config.systems:
        setting, steps = module.trials(config, name)[0]
        (result,) = module.plans(config, setting, 10.0, steps[:1], 60)
        trust = module.SYSTEMS[name].trust
        # Plans without noise are the reference alone.
        assert (result.noise is None) == (trust == "no privacy")
        stated = {"guarantee": result.guarantee.to_dict(), "trust": trust}
        rows.append({"budget_epsilon": 10.0, **stated})
    assert len(rows) == 13 and module.differing(pandas.DataFrame(rows)) == []
    for field, value, text in (
        ("attacker", "aggregator", "attacker is aggregator, outsider"),
        ("epsilon", 11.0, "to 11 is stated"),
        ("epsilon", 9.0, "9 to 10 is stated"),
        ("delta", 1e-4, "delta is"),
    ):
        twin = copy.deepcopy(rows)
        twin[3]["guarantee"][field] = value
        if field in ("epsilon", "delta"):
            # A guarantee says its numbers together, and is refused where they disagree.
            budget = module.protect.Budget(
                value if field == "epsilon" else 10.0, value if field == "delta" else 1e-5
            )
            setting, steps = module.trials(config, "independent")[0]
            (result,) = module.plans(config, setting, budget.epsilon, steps[:1], 60)
            twin[3]["guarantee"] = result.guarantee.to_dict()
            if field == "delta":
                other = dataclasses.replace(config, delta=value)
                (result,) = module.plans(other, setting, 10.0, steps[:1], 60)
                twin[3]["guarantee"] = result.guarantee.to_dict()
        differences = module.differing(pandas.DataFrame(twin))
        assert differences and text in " ".join(differences), differences


def test_what_agent_sends_is_counted():
    """On a ring of six with five parameters: two neighbours, or a server."""
    module = load_script("compare")
    config = dataclasses.replace(module.PRESETS["tiny"], rounds=7)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    y = np.repeat([1, -1], 30)
    shards = partition.iid(60, 6, 0)
    task = supervised(Linear(), "logistic", (x, y), (x, y), shards)
    for name, numbers in (("whisper", None), ("server", 5), ("dome", 4)):
        small = dataclasses.replace(config, sketches=(4,))
        setting, steps = module.trials(small, name)[0]
        (result,) = module.plans(small, setting, 10.0, steps[:1], 60)
        links = np.count_nonzero(result.mixing - np.diag(np.diag(result.mixing)))
        numbers = 5 * links / 6 if numbers is None else numbers
        assert module.sent(result, task) == (5, pytest.approx(4 * numbers * 7))


def rows_of(points, **columns):
    return [
        {"seed": seed, "points": value, **columns}
        for seed, value in enumerate(points)
    ]  # fmt: skip


def test_choice_is_by_paired_differences_beyond_chance():
    module = load_script("compare")
    rows = [
        *rows_of([60.0, 62.0, 64.0], system="independent", trust="nobody"),
        *rows_of([60.5, 61.8, 64.1], system="MAFALDA", trust="nobody"),
        *rows_of([50.0, 52.0, 54.1], system="gradient tracking", trust="nobody"),
        *rows_of([80.0, 81.0, 82.0], system="DOME", trust="secure sum"),
        *rows_of([99.0, 99.0, 99.0], system="no noise", trust="no privacy"),
        *rows_of([math.nan, 99.0, 99.0], system="server SGD", trust="secure sum"),
    ]
    results = {row["trust"]: row for row in module.choices(pandas.DataFrame(rows))}
    assert set(results) == {"nobody", "secure sum", "any"}
    assert results["nobody"]["best"] == "MAFALDA"
    assert results["nobody"]["within chance"] == "independent"
    assert results["nobody"]["next"] == "gradient tracking"
    assert results["nobody"]["gap in points"] == pytest.approx(10.1, abs=0.01)
    # The reference is nobody's choice.
    assert results["any"]["best"] in ("DOME", "server SGD")


def test_outcome_of_sketches_follows_records():
    module = load_script("dome_benchmark")
    rows = [
        *rows_of([70.0, 71.0, 72.0], design="dome", k=16),
        *rows_of([60.0, 61.0, 62.5], design="count", k=16),
        *rows_of([90.0, 90.0, 90.0], design="count", k=64),
        *rows_of([80.0, 81.5, 82.0], design="adam", k=1000),
        *rows_of([70.5, 70.5, 72.2], design="fixed", k=16),
    ]
    frame = pandas.DataFrame(rows).assign(budget_epsilon=1.0)
    results = {row["against"]: row for row in module.wins(frame)}
    count = results[module.TITLES["count"]]
    adam = results[module.TITLES["adam"]]
    assert count["outcome"] == "wins" and count["gain in points"] == pytest.approx(9.833, abs=1e-3)
    assert adam["outcome"] == "loses" and adam["times the bytes"] == pytest.approx(62.5)
    assert results[module.TITLES["fixed"]]["outcome"] == (chance := f"{UNTOLD}: within chance")
    table = module.summary(list(results.values()))
    assert "against count sketch: wins at epsilon 1 k 16 (+9.8)" in table
    # Twins: signs turned, a rival at another k, one that diverged, one seed.
    turned = frame.assign(points=-frame["points"])
    assert [row["outcome"] for row in module.wins(turned)][:2] == ["wins", chance]
    broken = frame.copy()
    broken.loc[0, "points"] = math.nan
    assert {row["outcome"] for row in module.wins(broken)} == {"diverged"}
    single = frame[frame["seed"] == 0]
    assert {row["outcome"] for row in module.wins(single)} == {f"{UNTOLD}: one seed"}


def test_every_sketch_is_tried_as_often():
    module = load_script("dome_benchmark")
    for preset in module.PRESETS.values():
        for name in preset.methods:
            trials = preset.trials(name, preset.k[0], np.eye(300)[:, : preset.k[0]])
            assert sum(len(steps) for _, steps in trials) == len(preset.paths), name
            assert all(setting.method.exchange.aggregate == Trusted() for setting, _ in trials)
            sketches = {getattr(setting.method.sketch, "k", None) for setting, _ in trials}
            assert sketches == ({preset.k[0]} if name in module.SKETCHES else {None})


def test_public_directions_are_of_public_records_alone():
    module = load_script("dome_benchmark")
    config = dataclasses.replace(module.PRESETS["tiny"], k=(4,))
    directions = module.directions(config, 4)
    assert directions.shape == (31, 4)
    np.testing.assert_allclose(directions.T @ directions, np.eye(4), atol=1e-5)
    data = module._records(config)
    assert len(data.public[1]) == config.public and len(data.train[1]) == config.records
    overlap = {row.tobytes() for row in data.public[0]} & {row.tobytes() for row in data.train[0]}
    assert not overlap
    # Private records are in no part of it.
    x, y = data.train
    module._records = lambda config: data._replace(train=(x + 1, y))
    module.directions.cache_clear()
    np.testing.assert_array_equal(module.directions(config, 4), directions)


@pytest.mark.slow
def test_small_run_stores_equal_guarantees(tmp_path, capsys):
    module = load_script("dome_benchmark")
    assert module.main(["--preset", "tiny", "--output", str(tmp_path), "--quiet"]) == 0
    output = capsys.readouterr().out
    assert "DOME against others" in output and "trials of each: 2" in output
    frame = records.read(tmp_path / "dome_benchmark" / "tiny")
    final = frame[frame["phase"] == "final"]
    stated = {str(row["epsilon"]) for row in final["guarantee"]}
    assert stated == {"8.0"} and set(frame[frame["phase"] == "tuning"]["seed"]) == {100}
    sizes = final.groupby("design")["bytes_a_turn"].first()
    assert sizes["dome"] == 4 * 8 and sizes["momentum"] == 4 * 31


def test_stored_records_of_both_say_what_page_says():
    """Of the committed records: one guarantee a budget, equal trials, and the page's verdicts."""
    module = load_script("compare")
    folder = ROOT / "docs" / "records"
    frame = module.named(records.read(folder / "compare.jsonl.gz", "a9a_*"))
    final = frame[(frame["phase"] == "final") & (frame["round"] == 300)]
    assert module.differing(final) == [] and set(final["design"]) == set(module.SYSTEMS)
    tuning = frame[frame["phase"] == "tuning"].groupby(["design", "budget_epsilon"])
    assert {len(rows) for _, rows in tuning} == {2 * 20}
    final = final.assign(points=100 * final["test_accuracy"])
    subset = final[final["budget_epsilon"] == 10]
    best = {row["trust"]: row["best"] for row in module.choices(subset)}
    assert best == {
        "nobody": "gradient tracking", "shared seed": "Whisper, whole run, filtered",
        "secure sum": "server Adam", "any": "server Adam",
    }  # fmt: skip
    bench = load_script("dome_benchmark")
    frame = records.read(folder / "dome_benchmark.jsonl.gz", "a9a_*")
    last = frame[(frame["phase"] == "final") & (frame["round"] == frame["rounds"])]
    result = bench.wins(last.assign(points=100 * last["test_accuracy"]))
    wins = {
        (row["epsilon"], row["k"]) for row in result
        if row["against"] == "count sketch" and row["outcome"] == "wins"
    }  # fmt: skip
    assert wins == {(1.0, 16), (3.0, 16), (1.0, 4)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "nobody"), [("digits_[!e]*", "independent"), ("digits_e*", "MAFALDA")]
)
def test_noise_over_rounds_leads_for_rare_records_alone(names, nobody):
    module = load_script("compare")
    frame = module.named(records.read(ROOT / "docs" / "records" / "compare.jsonl.gz", names))
    final = frame[(frame["phase"] == "final") & (frame["round"] == 100)]
    assert module.differing(final) == []
    tuning = frame[frame["phase"] == "tuning"].groupby(["design", "budget_epsilon"])
    assert {len(rows) for _, rows in tuning} == {20}
    level = final[final["budget_epsilon"] == 4].assign(points=100 * final["test_accuracy"])
    best = {row["trust"]: row["best"] for row in module.choices(level)}
    assert best == {
        "nobody": nobody, "shared seed": "Whisper, whole run, filtered",
        "any": best["secure sum"],
        "secure sum": "server Adam" if nobody == "independent" else "server SGD",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("names", "ahead", "behind"),
    [
        ("mnist_*", {(4.0, 64), (4.0, 16)}, {(4.0, 64), (4.0, 16), (4.0, 256), (1.0, 64)}),
        ("cifar10_small_*", {(8.0, 64)}, {(8.0, 64)}),
    ],
)
def test_sketches_win_on_images_where_page_says(names, ahead, behind):
    bench = load_script("dome_benchmark")
    frame = records.read(ROOT / "docs" / "records" / "dome_benchmark.jsonl.gz", names)
    last = frame[(frame["phase"] == "final") & (frame["round"] == frame["rounds"])]
    result = bench.wins(last.assign(points=100 * last["test_accuracy"]))
    subject = {"wins": set(), "loses": set()}
    for row in result:
        rival = {"count sketch": "wins", "DP momentum, all numbers": "loses"}.get(row["against"])
        if rival == row["outcome"]:
            subject[rival].add((row["epsilon"], row["k"]))
    assert subject == {"wins": ahead, "loses": behind}
