"""What `dpjax plot` draws where nobody said: every committed record, and what it must not mix."""

import re
from pathlib import Path

import numpy as np
import pytest

from dpjax.results import choice, plots, records

pandas = pytest.importorskip("pandas")

STORED = Path(__file__).parents[2] / "docs" / "records"
KINDS = sorted(path.name.removesuffix(".jsonl.gz") for path in STORED.iterdir()) + [
    "doppler_spectra/designs",
    "mafalda_housing/florentine_mafalda",
    "pndp_accounting/florentine_uniform",
    "spacetime_tradeoff/energy_ring",
    "spacetime_tradeoff/train_ring_8x4",
    "whisper_departure/energies",
    "whisper_departure/training",
    "whisper_variance/variances",
]
DRAWN = {
    "dome_spectrum": ("budget_epsilon", "share"),
    "mafalda_housing": ("epsilon", "test_loss"),
    "pndp_accounting": ("distance", "mean"),
    "spacetime_tradeoff": ("rounds", "test_loss"),
    "spacetime_tradeoff/energy_ring": ("rounds", "relative"),
    "doppler_spectra/designs": ("variance", "mean_square"),
    "whisper_departure": ("round", "test_loss"),
    "whisper_departure/energies": ("lost", "energy"),
    "whisper_logistic": ("budget_epsilon", "test_loss"),
    "whisper_quadratic": ("budget_epsilon", "optimality_gap"),
    "whisper_variance": ("epsilon", "energy"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_committed_record_is_drawn_by_default(kind: str) -> None:
    experiment, _, file = kind.partition("/")
    drawn = choice.choose(records.read(STORED / f"{experiment}.jsonl.gz", file or "*"))
    assert (drawn.x, drawn.y) == DRAWN.get(kind, (drawn.x, drawn.y))
    assert drawn.frame[drawn.series].nunique() > 1 or kind.endswith("florentine_mafalda")
    # Nothing but repetitions is averaged: in a group, of words only the seed's graph differs.
    for _, group in drawn.frame.groupby([drawn.series, drawn.x]):
        for name in set(group.columns) - {"guarantee", drawn.x, drawn.y, drawn.series}:
            if group[name].dtype.kind not in "fiu":
                assert group[name].nunique(dropna=False) == 1, name
        if "seed" in group:
            assert not group["seed"].duplicated().any()


def test_lines_are_told_apart_by_what_is_left_to_vary() -> None:
    rows = [
        {"algorithm": "a", "mode": mode, "rounds": rounds, "graph": graph, "test_loss": 1.0}
        for rounds in (1, 2)
        for mode, graph in (("p", None), ("q", None), ("q", "ring"), ("q", "er"))
    ]
    rows.append({"algorithm": "b", "mode": "r", "rounds": 1, "graph": None, "test_loss": 2.0})
    drawn = choice.choose(pandas.DataFrame(rows))
    # Held at its commonest mode no second algorithm is left, but graphs are; and no line is nan.
    assert (drawn.series, set(drawn.frame["graph"])) == ("graph", {"ring", "er"})
    assert "2 rows without graph left out." in str(drawn.note)


def test_a_whole_folder_becomes_a_figure(tmp_path: Path) -> None:
    made = plots.from_records(STORED / "pndp_accounting.jsonl.gz", out=tmp_path / "a.svg")
    assert "graph = " in made.read_text() and "&gt;=3 is left out" in made.read_text()
    ring = plots.from_records(
        STORED / "spacetime_tradeoff.jsonl.gz",
        y="relative",
        where=["graph=ring"],
        out=tmp_path / "r.svg",
    )
    assert "graph = " not in ring.read_text() and "At epochs" in ring.read_text()


def test_conditions_keep_rows_or_say_what_there_is() -> None:
    frame = pandas.DataFrame({"a": [0.1, 0.5, 1.0], "b": ["x", "y", "y"], "c": [True, False, True]})
    assert list(choice.where(frame, ["b=y", "a=0.50"])["a"]) == [0.5]
    assert list(choice.where(frame, ["c=true"])["a"]) == [0.1, 1.0]
    with pytest.raises(ValueError, match="where is 'b=z', of which there is no row; it is x, y"):
        choice.where(frame, ["b=z"])
    with pytest.raises(ValueError, match="where is 'd'; choose one of a, b, c"):
        choice.where(frame, ["d=1"])
    with pytest.raises(ValueError, match="write column=value"):
        choice.where(frame, ["b"])


def test_losses_of_victims_are_ranges(tmp_path: Path) -> None:
    rows = [
        {"algorithm": "dsgd", "gradients": g, "victim": u, "distance": 1 + u // 2, "mu": 0.1 * 9**u}
        for g in ("any", "view")
        for u in range(4)
    ]
    drawn = choice.choose(pandas.DataFrame(rows))
    assert drawn.ranges and (drawn.x, drawn.series) == ("distance", "gradients")
    near = drawn.frame[(drawn.frame["distance"] == 1) & (drawn.frame["gradients"] == "any")]
    np.testing.assert_allclose(near[["mean", "min", "max"]], [[0.5, 0.1, 0.9]])
    path = records.write(tmp_path / "r.jsonl", rows, {})
    assert plots.from_records(path).name == "r_mu_distance.svg"


def test_accounts_are_drawn_over_all_attackers_and_with_names(tmp_path: Path) -> None:
    told = {"algorithm": "dsgd", "relation": "replace_record", "upper_bound": False}
    rows = [
        {**told, "gradients": g, "attackers": str(a), "attacker_labels": "ab"[a], "victim": 1 - a,
         "victim_label": "ab"[1 - a], "distance": 1, "mu": 1.0 + a, "epsilon": 3.0 + a}
        for g in ("any", "view")
        for a in range(2)
    ]  # fmt: skip
    drawn = choice.choose(pandas.DataFrame(rows))
    assert (drawn.x, drawn.label, drawn.series, drawn.note) == ("distance", "mu", "gradients", None)
    assert drawn.frame[["mean", "min", "max"]].to_numpy().tolist() == [[1.5, 1, 2]] * 2
    # An eavesdropper of every message is nowhere: each agent for itself, by its name.
    for row in rows:
        row.update(attackers="", attacker_labels="", distance=None)
    path = records.write(tmp_path / "ldp.jsonl", rows, {})
    text = plots.from_records(path).read_text()
    assert "<!-- a -->" in text and "<!-- b -->" in text
    both = plots.from_records(path, where=["gradients=any"], x="victim", y="epsilon")
    assert both.name == "ldp_epsilon_victim.svg"


def test_axes_are_logarithmic_where_values_span_much(tmp_path: Path) -> None:
    rows = [{"algorithm": "a", "epsilon": e, "seed": 0, "loss": 10 / e} for e in (0.1, 1, 20.0)]
    drawn = choice.choose(pandas.DataFrame(rows))
    assert drawn.logx and drawn.logy
    assert not choice.choose(pandas.DataFrame(rows[1:])).logy
    path = records.write(tmp_path / "r.jsonl", rows, {})
    by_itself = plots.from_records(path).read_bytes()
    assert plots.from_records(path, log_y=True, log_x=True).read_bytes() == by_itself
    assert plots.from_records(path, log_y=False).read_bytes() != by_itself


def test_runs_without_privacy_stay_beside_any_budget() -> None:
    rows = [
        {"algorithm": a, "budget": "none" if a == "non_private" else b, "epsilon": e, "seed": 0,
         "loss": 1.0}
        for a, b in (("non_private", ""), ("whisper", "gdp"), ("whisper", "rdp"))
        for e in (1.0, 2.0)
    ]  # fmt: skip
    drawn = choice.choose(pandas.DataFrame(rows))
    assert drawn.note == "At budget = gdp."
    assert set(drawn.frame["algorithm"]) == {"non_private", "whisper"}


def test_lines_told_apart_by_a_number_say_which() -> None:
    rows = [
        {"algorithm": "whisper", "clip_norm": c, "epsilon": e, "seed": 0, "loss": 1.0}
        for e in (1.0, 2.0)
        for c in (1.0, 0.3)
    ]
    drawn = choice.choose(pandas.DataFrame(rows), series="clip_norm")
    assert list(dict.fromkeys(drawn.frame["clip_norm"])) == ["clip norm 0.3", "clip norm 1"]


def test_several_files_and_pdf(tmp_path: Path) -> None:
    for name in ("whisper", "pairwise"):
        rows = [{"algorithm": name, "round": r, "seed": 0, "test_loss": 1 / r} for r in (1, 2)]
        records.write(tmp_path / f"{name}.jsonl", rows, {})
    both = [tmp_path / "whisper.jsonl", tmp_path / "pairwise.jsonl"]
    made = plots.from_records(both)
    assert made.name == "whisper_and_1_more_test_loss_round.svg"
    assert re.search("DECOR.*", made.read_text()) and "Whisper" in made.read_text()
    first = plots.from_records(both, out=tmp_path / "a.pdf").read_bytes()
    assert first.startswith(b"%PDF") and b"CreationDate" not in first and b"One seed." in first
    assert plots.from_records(both, out=tmp_path / "b.pdf").read_bytes() == first
