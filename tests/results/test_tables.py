"""Statistics agree with SciPy's; tables are aligned and say no more than four digits."""

import math

import numpy as np
import pytest

from _common import tables
from dpjax.results.tables import text

pandas = pytest.importorskip("pandas")


@pytest.fixture
def frame():
    rng = np.random.default_rng(3)
    shared = rng.normal(size=10)
    rows = []
    for name, shift in (("whisper", 0.0), ("independent", 0.05)):
        for seed in range(10):
            value = shared[seed] + shift + 0.02 * rng.normal()
            rows.append({"design": name, "accountant": "gdp", "seed": seed, "loss": value})
    return pandas.DataFrame(rows)


def test_summary_agrees_with_scipy(frame):
    from scipy import stats

    table = tables.summary(frame, ["design", "accountant"], "loss")
    assert list(table.columns) == ["design", "accountant", "mean", "standard error", "count"]
    assert list(table["design"]) == ["whisper", "independent"]  # as given, not sorted
    for _, row in table.iterrows():
        values = frame[frame["design"] == row["design"]]["loss"]
        assert row["mean"] == pytest.approx(values.mean(), rel=1e-12)
        assert row["standard error"] == pytest.approx(stats.sem(values, ddof=1), rel=1e-12)
        assert row["count"] == 10
        # The biased one is 5 % smaller, and is told apart.
        assert row["standard error"] != pytest.approx(stats.sem(values, ddof=0), rel=1e-2)
    assert list(tables.summary(frame, "design", "loss")["mean"]) == list(table["mean"])


def test_summary_does_not_hide_what_diverged():
    rows = [{"a": "x", "loss": 1.0}, {"a": "x", "loss": math.nan}, {"a": "y", "loss": 2.0}]
    table = tables.summary(pandas.DataFrame(rows), "a", "loss")
    assert math.isnan(table["mean"][0]) and table["count"][0] == 2
    assert table["mean"][1] == 2.0 and math.isnan(table["standard error"][1])


def test_summary_keeps_groups_without_value():
    rows = [{"e": math.inf, "v": 1.0}, {"e": math.nan, "v": 2.0}, {"e": math.nan, "v": 4.0}]
    table = tables.summary(pandas.DataFrame(rows), "e", "v")
    assert list(table["mean"]) == [1.0, 3.0] and list(table["count"]) == [1, 2]


def test_paired_agrees_with_scipy(frame):
    from scipy import stats

    first, second = (frame[frame["design"] == n]["loss"] for n in ("whisper", "independent"))
    expected = stats.ttest_rel(second, first)
    shuffled = frame.sample(frac=1.0, random_state=1)  # seeds pair rows, not their order
    pair = tables.paired(shuffled, "whisper", "independent", "loss")
    assert pair.t == pytest.approx(expected.statistic, rel=1e-9)
    assert pair.count == 10 == expected.df + 1
    assert pair.mean == pytest.approx(second.mean() - first.mean(), rel=1e-9)
    assert pair.standard_error == pytest.approx(pair.mean / expected.statistic, rel=1e-9)
    # Paired, the difference is clear; unpaired, the seeds drown it.
    assert pair.t > 3 > stats.ttest_ind(second, first).statistic
    assert list(pair._asdict()) == ["mean", "standard_error", "count", "t"]
    other = tables.paired(frame, "independent", "whisper", "loss", on=["seed", "accountant"])
    assert other.mean == pytest.approx(-pair.mean)


def test_paired_refuses_what_cannot_be_paired(frame):
    with pytest.raises(ValueError, match="several rows with seed"):
        tables.paired(pandas.concat([frame, frame]), "whisper", "independent", "loss")
    with pytest.raises(ValueError, match="only one of"):
        tables.paired(frame.iloc[1:], "whisper", "independent", "loss")
    with pytest.raises(ValueError, match="'central' is in no row"):
        tables.paired(frame, "whisper", "central", "loss")
    with pytest.raises(ValueError, match="column 'accuracy' is not in the rows"):
        tables.paired(frame, "whisper", "independent", "accuracy")


def test_paired_at_edges():
    def pair(*differences):
        rows = [{"design": "a", "seed": i, "v": 0.0} for i in range(len(differences))]
        rows += [{"design": "b", "seed": i, "v": d} for i, d in enumerate(differences)]
        return tables.paired(pandas.DataFrame(rows), "a", "b", "v")

    assert pair(2.0, 2.0).t == math.inf and pair(-2.0, -2.0).t == -math.inf
    assert math.isnan(pair(0.0, 0.0).t)
    single = pair(2.0)
    assert single.mean == 2.0 and single.count == 1 and math.isnan(single.standard_error + single.t)
    assert math.isnan(pair(2.0, math.nan).mean)


ROWS = [
    {"design": "whisper", "steps": 5000, "step_size": 0.05, "loss": 1 / 3, "guarantee": {}},
    {"design": "a|b", "steps": 20, "step_size": 0.001, "loss": 0.5, "ended": True},
    {"design": "c\nd", "steps": None, "step_size": 10.0, "loss": math.nan},
    {"design": "", "steps": 7, "step_size": 1e-5, "loss": 123456.7},
]

TEXT = """\
design   steps  step_size     loss  ended
-------  -----  ---------  -------  -----
whisper   5000       0.05   0.3333
a|b         20      0.001   0.5000  yes
c d                    10      nan
             7      1e-05  123,500"""


def test_tables_are_aligned_with_four_digits():
    assert text(ROWS) == TEXT


def test_frames_make_same_tables_without_index(frame):
    rows = frame.to_dict("records")
    assert text(frame) == text(rows)
    assert text(frame.iloc[3:]) == text(rows[3:])


def test_columns_are_chosen_and_ordered():
    assert text(ROWS[:1], ["loss", "design"]).splitlines()[0].split() == [
        "loss", "design",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="columns has 'accuracy'"):
        text(ROWS, ["accuracy"])


def test_no_rows_make_empty_table():
    assert text([]) == "\n"
    assert text([], []).strip() == ""


def test_means_over_different_participations_are_refused():
    def row(pattern, seed, relation="zero_out_record"):
        stated = {"relation": relation, "participation": pattern}
        return {"design": "independent", "seed": seed, "loss": 1.0, "guarantee": stated}

    few = row([20, 19], 0)
    all_rounds = row(None, 1)
    open_ = row(None, 2, relation=None)
    with pytest.raises(ValueError, match="guarantees are for all rounds; k = 20, b = 19"):
        tables.summary(pandas.DataFrame([few, all_rounds]), "design", "loss")
    again = row([20, 19], 3)
    assert tables.summary(pandas.DataFrame([few, again]), "design", "loss")["count"][0] == 2
    assert tables.summary(pandas.DataFrame([few, open_]), "design", "loss")["count"][0] == 2
    apart = pandas.DataFrame([few | {"k": 20}, all_rounds | {"k": 380}])
    assert len(tables.summary(apart, ["design", "k"], "loss")) == 2


def test_means_over_runs_that_nothing_tells_apart_are_refused():
    """Two filters behind one noise, say: the label is the noise's."""
    run = [{"design": "mafalda", "seed": seed, "round": 9, "loss": 1.0} for seed in (0, 1)]
    other = [row | {"loss": 2.0} for row in run]
    with pytest.raises(ValueError, match="several rows with design = mafalda, seed = 0"):
        tables.summary(pandas.DataFrame(run + other), "design", "loss")
    frame = pandas.DataFrame({"design": "a", "seed": [0.0, 0.0, 1.0], "hits": [1, 2, 3]})
    assert tables.summary(frame[1:], "design", "hits")["mean"].tolist() == [2.5]
    with pytest.raises(ValueError, match="several rows with design = a, seed = 0"):
        tables.summary(frame, "design", "hits")
    reported = [row | {"run": "plain"} for row in run] + [
        row | {"run": "filtered"} for row in other
    ]
    assert tables.summary(pandas.DataFrame(reported), "run", "loss")["mean"].tolist() == [1.0, 2.0]


def test_what_was_tuned_to_end_of_its_grid_is_named():
    rows = [
        (name, budget, "tuning", step)
        for name in ("low", "inside", "high")
        for budget in (1.0, 8.0)
        for step in (0.5, 1.0, 2.0)
    ]
    rows += [("low", 1.0, "final", 0.5), ("low", 8.0, "final", 1.0)]
    rows += [("inside", 1.0, "final", 1.0), ("inside", 8.0, "final", 1.0)]
    rows += [("high", 1.0, "final", 1.0), ("high", 8.0, "final", 2.0)]
    rows += [("shown", 1.0, "every step", step) for step in (0.5, 2.0)]
    frame = pandas.DataFrame(rows, columns=["design", "accountant", "phase", "step_size"])
    assert tables.at_ends(frame) == ["low", "high"]
    assert tables.at_ends(frame, ["design", "accountant"]) == ["low + 1.0", "high + 8.0"]
    # Another method's grid says nothing of this one's.
    wide = pandas.DataFrame([("wide", 1.0, "tuning", 9.0)], columns=frame.columns)
    assert tables.at_ends(pandas.concat([frame, wide])) == ["low", "high"]
    # Nor do steps that another setting of the same method was tried with.
    dealt = [("a", "tuning", s, y) for s, y in ((1.0, "x"), (4.0, "x"), (2.0, "y"), (3.0, "y"))]
    dealt += [("b", "tuning", s, "x") for s in (1.0, 2.0, 4.0)] + [("b", "final", 2.0, "x")]
    dealt += [("b", "tuning", 2.0, "y"), ("a", "final", 2.0, "y")]
    several = pandas.DataFrame(dealt, columns=["design", "phase", "step_size", "setting"])
    assert tables.at_ends(several) == ["a"]


def test_one_step_size_alone_has_no_ends():
    rows = [("one", 0, "tuning", 2.0), ("one", 1, "tuning", 2.0), ("one", 0, "final", 2.0)]
    rows += [("two", 0, "tuning", 2.0), ("two", 0, "tuning", 1.0), ("two", 0, "final", 2.0)]
    frame = pandas.DataFrame(rows, columns=["design", "seed", "phase", "step_size"])
    assert tables.at_ends(frame) == ["two"]
