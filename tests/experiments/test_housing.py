"""Networks of the housing experiment: by name, or by a file of edges such as PeerTube's."""

import dataclasses

import numpy as np
import pandas
import pytest

from dpjax.results import plots, records
from dpjax.topology import graphs, mixing
from tests.support import load_script


@pytest.fixture(scope="module")
def module():
    return load_script("mafalda_housing")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "peertube.csv"
    path.write_text("tube.one,tube.two\ntube.two,tube.three\n# follows\ntube.three,tube.one\n")
    return path


def given(module, *specs):
    return dataclasses.replace(module.PRESETS["tiny"], graphs=tuple(map(str, specs)))


def test_file_s_network_has_file_s_name(module, file):
    networks = module.networks(given(module, "florentine", file, "ring:4"))
    assert list(networks) == ["florentine", "peertube", "ring:4"]
    np.testing.assert_array_equal(networks["peertube"], np.full((3, 3), 1 / 3))
    expected = mixing.uniform_neighbors(graphs.from_edgelist(file))
    np.testing.assert_array_equal(networks["peertube"], expected)


def test_what_is_no_network_is_refused_before_any_work(module, file, tmp_path, capsys):
    apart = tmp_path / "apart.txt"
    own = tmp_path / "florentine.txt"
    apart.write_text("a b\nc d\n")
    own.write_text("a b\n")
    for specs, reported in (
        ((tmp_path / "none.txt",), "none.txt'?: graph is .*give an edge-list file"),
        ((apart,), "apart.txt'?: .*is not connected"),
        (("florentine", own), "another network 'florentine'; rename the file"),
    ):
        with pytest.raises(ValueError, match=f"graphs holds .*{reported}"):
            module.networks(given(module, *specs))
    arguments = ["--preset", "tiny", "--output", str(tmp_path / "out"), "--quiet"]
    assert module.main([*arguments, "--graphs", str(apart)]) == 2
    assert "graphs holds" in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("*.jsonl"))


def test_every_panel_with_loss_above_cut_ends_there(module):
    rows = {"design": ["mafalda", "anti_pgd"] * 2, "round": [1, 1, 2, 2]}
    rows = pandas.DataFrame(rows | {"test_loss": [2.0, 70.0, 1.0, 8000.0]})
    _, (ax,) = plots.figure()
    note = module.cut(ax, rows, "round", "test_loss")
    assert note == "Losses above 6 are cut off: anti-PGD, 8,000 at most."
    assert ax.get_ylim() == (0.95, module.CUT)
    assert module.cut(ax, rows[rows["design"] == "mafalda"], "round", "test_loss") == ""


@pytest.mark.slow
def test_run_on_file_s_network(module, file, tmp_path, monkeypatch, real_data):
    monkeypatch.setenv("DPJAX_DATA", str(real_data("housing").parent))
    arguments = ["--preset", "tiny", "--output", str(tmp_path), "--quiet", "--graphs", str(file)]
    arguments += ["--designs", "independent", "mafalda", "--seeds", "0", "--together", "1"]
    assert module.main(arguments) == 0
    folder = tmp_path / "mafalda_housing" / "tiny"
    frame = records.read(folder)
    assert set(frame["graph"]) == {"peertube"} and set(frame["agents"]) == {3}
    assert {path.stem for path in folder.glob("*.svg")} == {
        "mafalda_housing_peertube_privacy", "mafalda_housing_peertube_rounds",
    }  # fmt: skip
    # The same name with other edges is another network.
    file.write_text("a,b\nb,c\n")
    assert module.main(arguments) == 2
