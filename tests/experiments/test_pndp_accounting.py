"""The tiny preset of Fig. 2: records, figure, ratios; missing graphs are passed over."""

import math

import networkx as nx
import numpy as np
import pytest

from dpjax.results import records
from dpjax.topology import graphs
from tests.support import load_script


@pytest.fixture(scope="module")
def module():
    return load_script("pndp_accounting")


def run(module, folder, *extra):
    arguments = ["--preset", "tiny", "--output", str(folder), "--quiet", *extra]
    assert module.main(arguments) == 0
    return folder / "pndp_accounting" / "tiny"


@pytest.mark.slow
def test_tiny_preset(module, tmp_path, capsys):
    folder = run(module, tmp_path)
    first = capsys.readouterr().out
    assert "peertube: passed over" in first and "published over exact" in first
    paths = sorted(folder.glob("*.jsonl"))
    assert len(paths) == 4 and (folder / "pndp_accounting.svg").exists()
    before = [path.read_bytes() for path in paths]
    run(module, tmp_path)
    again = capsys.readouterr().out
    assert again.count(": read") == 4 and [path.read_bytes() for path in paths] == before
    frame = records.read(folder)
    assert (frame["min"] <= frame["mean"] * (1 + 1e-12)).all()
    table = frame.pivot(
        index=["graph", "mixing", "scope", "distance"], columns="algorithm", values="mean"
    )
    assert (table["view"] <= table["any"] * (1 + 1e-9)).all()
    assert (table["squared"] <= table["plain"] * (1 + 1e-9)).all()
    np.testing.assert_allclose(table["any"], 4, rtol=1e-8)
    ratio = frame[frame["algorithm"] == "plain"].set_index(
        ["graph", "mixing", "scope", "distance"]
    )["ratio_of_means"]
    np.testing.assert_allclose(ratio, (table["plain"] / table["view"]).loc[ratio.index], rtol=1e-9)


def test_paper_s_numbers_on_florentine_families(module, tmp_path):
    extras = ["--graphs", "florentine", "--mixing", "uniform", "--rounds", "10", "--attackers", "1"]
    frame = records.read(run(module, tmp_path, *extras))
    mine = frame[frame["scope"] == "attacker 0"].set_index(["algorithm", "distance"])
    exact = [mine.loc[("view", str(d)), "uncapped"] for d in range(1, 5)]
    np.testing.assert_allclose(exact, [10.9, 0.45, 0.15, 0.049], rtol=0.02)
    assert mine.loc[("view", "1"), "mean"] == pytest.approx(10, rel=1e-8)
    assert mine.loc[("plain", "3"), "ratio_of_means"] == pytest.approx(68, rel=0.01)
    assert 6 < mine.loc[("squared", "3"), "ratio_of_means"] < 26
    assert mine.loc[("plain", "1"), "ratio_of_means"] == pytest.approx(1, rel=1e-8)
    pooled = mine.loc[("view", ">=3")]
    assert pooled["pairs"] == 8 and pooled["max"] == mine.loc[("view", "3"), "max"]


@pytest.mark.slow
def test_scale_is_alpha_over_two_sigma_squared(module, tmp_path):
    common = ["--graphs", "ring:6", "--mixing", "uniform"]
    frame = records.read(run(module, tmp_path / "one", *common))
    second = records.read(run(module, tmp_path / "two", *common, "--alpha", "3", "--sigma", "2"))
    np.testing.assert_allclose(second["mean"], frame["mean"] * 1.5 / 4, rtol=1e-12)
    np.testing.assert_allclose(second["ratio_of_means"], frame["ratio_of_means"], rtol=1e-12)


@pytest.mark.slow
def test_missing_network_is_skipped_unless_named(module, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DPJAX_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "own.txt").write_text("0 1\n1 2\n2 3\n")
    extras = ["--graphs", "facebook_ego", "--mixing", "uniform"]
    folder = run(module, tmp_path / "a", *extras, "--peertube", str(tmp_path / "own.txt"))
    text = capsys.readouterr().out
    assert "facebook_ego: passed over: graph is 'facebook_ego': facebook_ego.edgelist" in text
    assert set(records.read(folder)["graph"]) == {"peertube"}
    arguments = ["--preset", "tiny", "--output", str(tmp_path / "b")]
    assert module.main([*arguments, "--peertube", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err


def test_sparse_graph_is_that_of_authors_code(module):
    drawn = nx.erdos_renyi_graph(100, math.log(100) / 100, seed=1000 * 42)
    assert nx.is_connected(drawn)
    assert set(graphs.parse(module.SPARSE).edges) == set(drawn.edges)
    for name in ("cpu", "full"):
        assert module.SPARSE in module.PRESETS[name].graphs


@pytest.mark.slow
def test_numbers_on_authors_random_graph(module, tmp_path):
    extras = [
        "--graphs",
        module.SPARSE,
        "--mixing",
        "uniform",
        "--rounds",
        "10",
        "--attackers",
        "1",
    ]
    frame = records.read(run(module, tmp_path, *extras))
    plain = frame[(frame["scope"] == "attacker 0") & (frame["algorithm"] == "plain")]
    result = plain.set_index("distance")["ratio_of_means"].loc[list("12345")]
    np.testing.assert_allclose(result, [1.016, 16.67, 184.8, 1438, 9671], rtol=1e-3)


def test_bad_configs_are_refused(module, capsys):
    for arguments, match in ((["--rounds", "0"], "rounds is 0"), (["--alpha", "1"], "alpha is 1")):
        code = module.main(["--preset", "tiny", *arguments])
        streams = capsys.readouterr()
        assert code == 2 and match in streams.err + streams.out
