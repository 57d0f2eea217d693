"""Experiments of gradient tracking: options, stored records, what is printed with them."""

import dataclasses
import itertools
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.stats

from _common import archives
from dpjax.accounting.leakage import mutual_information
from dpjax.contrib import leakage
from dpjax.engine import keys
from dpjax.results import records
from tests.support import load_script

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = ("gaps", "methods", "border", "networks")


@pytest.mark.parametrize("name", ["tracking_fusion", "tracking_leakage"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--gamma", "0.1", "0.2"], "gamma has 2 entries and epsilon 1; give one for each"),
        (["--q1", "0.99"], "q1 is 0.99 and q2 0.99; give q1 < q2"),
        (["--q2", "1.5"], "q2 is 1.5"),
        (["--beta", "-1"], "beta is -1"),
    ],
)
def test_options_of_budget_are_refused_before_any_work(tmp_path, capsys, name, options, text):
    arguments = ["--preset", "tiny", "--output", str(tmp_path), *options]
    assert load_script(name).main(arguments) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_spread_is_number_above_zero(tmp_path, capsys):
    module = load_script("tracking_leakage")
    assert module.main(["--preset", "tiny", "--output", str(tmp_path), "--spread", "0"]) == 2
    assert "spread is 0" in capsys.readouterr().err


def test_decays_of_images_are_checked_too(tmp_path, capsys):
    module = load_script("tracking_mnist")
    assert module.main(["--preset", "tiny", "--output", str(tmp_path), "--q1", "0.97"]) == 2
    assert "q1 is 0.97 and q2 0.95; give q1 < q2" in capsys.readouterr().err


def test_by_norm_over_all_agents_tracking_stops_before_dpop():
    """Rows of claims of Fig. 5: what is sent follows from rounds, and time nearly so."""
    path = ROOT / "docs" / "records" / "tracking_fusion.jsonl.gz"
    frame = records.read(path, "stops_2000*")
    assert set(frame.groupby(["algorithm", "norm", "steps"]).size()) == {2000}
    arrived = frame[frame["reached"]]
    groups = arrived.groupby(["norm", "steps", "algorithm"])
    counts = groups.size()["all agents"]
    assert list(counts["printed"]) == [182, 679] and list(counts["tuned"]) == [1842, 1949]
    medians = groups["rounds"].median()
    assert list(medians["all agents", "printed"]) == [142, 110]
    assert list(medians["all agents", "tuned"]) == [109, 82]
    assert list(medians["an agent", "printed"]) == [24, 29]
    assert list(medians["an agent", "tuned"]) == [14, 78]
    sent = arrived[(arrived["norm"] == "all agents") & (arrived["steps"] == "printed")]
    sides = [part["numbers"] for _, part in sent.groupby("algorithm")]
    assert 1e-17 < scipy.stats.mannwhitneyu(*sides).pvalue < 1e-16
    turns = records.read(path, "turns_10")
    seconds = turns.pivot(index="turn", columns="algorithm", values="seconds_a_round")
    ratio = (seconds["tracking"] / seconds["dpop"]).to_numpy()
    rng = np.random.default_rng(0)
    draws = np.median(rng.choice(ratio, (2000, len(ratio))), axis=1)
    interval = np.percentile(draws, [2.5, 97.5])
    assert len(ratio) == 200 and round(np.median(ratio), 3) == 1.011
    np.testing.assert_allclose(interval, [1.001, 1.016], atol=0.002)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--sizes", "4", "100"], "sizes holds 100, a batch of 8 each, and there are 200 records"),
        (["--agents", "26", "--parts", "spread"], "agents holds 26, a batch of 8 each"),
    ],
)
def test_agents_without_batch_are_refused_before_any_work(
    tmp_path, capsys, monkeypatch, options, text
):
    module = load_script("tracking_mnist")
    monkeypatch.setattr(module.launch.Lab, "run", None)
    assert module.main(["--preset", "tiny", "--output", str(tmp_path), *options]) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.slow
def test_spread_of_gradients_is_that_of_plain_loop(tmp_path, capsys):
    module = load_script("tracking_mnist")
    arguments = ["--preset", "tiny", "--parts", "spread", "--output", str(tmp_path), "--pairs", "9"]
    assert module.main(arguments) == 0
    rows = {row["compared"]: row for _, row in records.read(tmp_path).iterrows()}
    assert rows["batches"]["pairs"] == 9 and rows["agents"]["pairs"] == 6
    config = dataclasses.replace(module.PRESETS["tiny"], pairs=9)
    task = module.task(config, 4)
    params = task.init(keys.derive(0, "initial"))
    each = [
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(
            jax.grad(lambda p, m: sum(task.loss(p, task.x[i], task.y[i]) for i in m) / len(m))(
                params, shard
            )
        )])
        for shard in task.partition.indices
    ]  # fmt: skip
    differences = [np.abs(item - other).sum() for item, other in itertools.combinations(each, 2)]
    result = rows["agents"]
    assert result["records"] == 50
    np.testing.assert_allclose(result[["apart", "least", "largest"]].astype(float), [
        np.mean(differences), np.min(differences), np.max(differences)
    ], rtol=1e-4)  # fmt: skip
    # A batch has fewer records than an agent, and is farther from another.
    assert rows["batches"]["least"] > result["largest"]
    assert "batches" in capsys.readouterr().out
    # Of the sweeps nothing decides it, and it decides nothing of theirs.
    assert module.main([*arguments, "--gaps", "0.5", "--rounds", "20"]) == 0
    assert capsys.readouterr().out.count(": read") == 1


def test_records_of_images_are_read_as_stored(tmp_path, capsys):
    """With the seeds and networks that were recorded; the spread is one more, of all three."""
    stored = ROOT / "docs" / "records" / "tracking_mnist.jsonl.gz"
    seeds = records.read_metadata(stored, "gap_none")["seed"]
    paths = archives.unpack(stored, tmp_path / "stored")
    sizes = sorted({int(path.stem.split("_")[2]) for path in paths if "network_" in path.name})
    lines = read_again(
        tmp_path, capsys, "tracking_mnist", "--parts", *SWEEPS,
        "--seeds", *map(str, seeds), "--sizes", *map(str, sizes),
    )  # fmt: skip
    read = sum(": read" in line for line in lines)
    assert read == len(paths) - 1 >= 30
    module = load_script("tracking_mnist")
    assert module.main(["--output", str(tmp_path), "--quiet", "--parts", "spread"]) == 0
    assert capsys.readouterr().out.count(": read") == 1


def read_again(tmp_path, capsys, name, *options):
    """What is printed of the records in the documentation, none of which may be made anew."""
    archives.unpack(ROOT / "docs" / "records" / f"{name}.jsonl.gz", tmp_path / name / "cpu")
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / name).rglob("*.jsonl")}
    module = load_script(name)
    assert module.main(["--output", str(tmp_path), "--quiet", *options]) == 0
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / name).rglob("*.jsonl")} == stored
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_tables_of_fusion_say_what_epsilon_is_of(tmp_path, capsys):
    lines = read_again(tmp_path, capsys, "tracking_fusion")
    assumed, smooth = (next(i for i, x in enumerate(lines) if name in x) for name in (
        "at most 1 apart in L1 at every model", "for PP-DOAGT and Diff-TV-AB also"
    ))  # fmt: skip
    heads = [i for i, line in enumerate(lines) if "algorithm" in line.split()]
    assert len(heads) == 2 and assumed < smooth < heads[0]
    for head in heads:
        assert "epsilon" in lines[head].split()
    last = next(i for i in range(heads[0], len(lines)) if not lines[i])
    first = [line.split() for line in lines[heads[0] + 2 : last]]
    column = lines[heads[0]].replace("per agent", "per_agent").split().index("epsilon")
    for row in first:
        own = row[2] in ("tracking", "dpop")
        assert (float(row[column].replace(",", "")) == float(row[0])) == own


def test_records_of_leakage_are_read_as_stored(tmp_path, capsys):
    lines = read_again(tmp_path, capsys, "tracking_leakage")
    assert sum(": read" in line for line in lines) == 10


def test_quadrature_of_normal_number_behind_laplace_noise():
    reported = load_script("tracking_leakage").told
    rng = np.random.default_rng(0)
    for spread, scale in ((4.0, 1.0), (1.0, 1.0), (30.0, 60.0)):
        private = spread * rng.standard_normal((4000, 1))
        observed = private + rng.laplace(scale=scale, size=(4000, 1))
        value = mutual_information(private, observed)
        assert abs(reported(spread, scale) - value) < 0.04
        assert abs(reported(spread, 1.5 * scale) - value) > 0.04
    # Far above the noise it is the difference of entropies, far below it goes with the square.
    difference = np.log(1000 * np.sqrt(2 * np.pi * np.e)) - np.log(2 * np.e)
    assert reported(1000.0, 1.0) == pytest.approx(difference, abs=1e-4)
    assert reported(0.02, 1.0) / reported(0.01, 1.0) == pytest.approx(4, rel=0.05)


def test_no_spread_gives_values_of_paper_at_one_and_tenth():
    module = load_script("tracking_leakage")
    # Noise b times longer hides at most log b nats more: Laplace is Laplace and something else.
    for spread in (3.0, 30.0, 300.0, 3000.0):
        fall = module.told(spread, 49.5) - module.told(spread, 141.4)
        assert 0 < fall < np.log(141.4 / 49.5)
    rows = {row["epsilon"]: row for row in module.first_rounds(module.PRESETS["cpu"])}
    noise = {epsilon: row["noise"] for epsilon, row in rows.items()}
    assert noise == pytest.approx({10.0: 4.95, 1.0: 49.5, 0.1: 141.43}, rel=1e-4)
    expected = (rows[1.0]["paper"] - rows[0.1]["paper"]) * leakage.normaliser(5000, 3, "jittered")
    assert expected > 1.3 * np.log(noise[0.1] / noise[1.0])


@pytest.mark.slow
def test_whoever_sees_all_links_solves_for_gradient_of_correlated_randomness():
    module = load_script("tracking_leakage")
    config = dataclasses.replace(module.PRESETS["tiny"], until=4, rounds=10, trials=5)
    views = module.correlated(config)
    assert views["insiders"].guess is None
    private, observed, guess = views["outsider"]
    np.testing.assert_allclose(guess[:, 4:], private[:, 4:], rtol=1e-5)
    assert (np.abs(guess[:, :4] / private[:, :4] - 1) > 1e-4).all()
    # The tracker alone is something else.
    tracker = (observed[..., 1] / config.step)[:, 4:9]
    assert (np.abs(tracker / private[:, 4:9] - 1) > 1e-4).all()


def test_gradients_are_spread_as_asked():
    module = load_script("tracking_leakage")
    tiny = dataclasses.replace(module.PRESETS["tiny"], trials=2000, spread=30.0)
    slope, constant = module.gradients(tiny)
    assert (slope == 2.02).all() and constant.std() == pytest.approx(30, rel=0.05)
    fixed = dataclasses.replace(tiny, data="fixed")
    assert np.ptp(module.gradients(fixed)[1]) == 0
    measured = module.gradients(dataclasses.replace(tiny, spread=None))
    assert measured[0].max() > 150 and np.ptp(measured[0]) > 100
