"""The captions' sentences on the graphs of a sweep: pairwise noise there and on others."""

import pytest

from dpjax.contrib import coupling
from dpjax.results import records
from tests.support import ROOT


def test_shares_are_those_of_committed_variances():
    rows = records.read(ROOT / "docs" / "records" / "whisper_variance.jsonl.gz")
    rows = rows[
        (rows["probability"] == 0.5) & (rows["epsilon"] == 10) & (rows["accountant"] == "gdp")
    ]
    complete = rows.pivot(index="seed", columns="design", values="trajectory_energy")
    expected = (complete["pairwise"] / complete["independent"]).sort_index()
    assert coupling.shares(20, 0.5, 5000, seed=0) == pytest.approx(list(expected), rel=1e-6)


def test_caption_names_agents_graph_and_shares():
    assert coupling.remark(20, 0.5, 5000, seed=0) == (
        "20 agents; one graph for each edge probability (seed 0). On the one of 0.5 pairwise "
        "noise over the run is 0.86 of independent noise; 0.38 to 0.49 on four others."
    )
