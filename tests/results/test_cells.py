"""Records whose cells are empty or lists: drawn, or refused by the column's name."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from _common import tables
from dpjax.results import plots, records
from dpjax.results.tables import means

pytest.importorskip("pandas")

COLUMNS = ("seed", "round", "epsilon", "other")
CELLS = (None, [1, 2.5], [], {"a": [1]}, "word")


def rows() -> list[dict[str, Any]]:
    """Two algorithms, seeds, budgets and rounds."""
    return [
        {"design": a, "seed": s, "round": r, "epsilon": e, "test_loss": e / (r + s + 1)}
        for a, s, e, r in itertools.product(("whisper", "independent"), (0, 1), (1.0, 3.0), (1, 2))
    ]


def stored(folder: Path, column: str, cell: Any, every: bool) -> Path:
    """Records of which one row, or every one, has a cell in a column."""
    argument = rows()
    for row in argument if every else argument[3:4]:
        row[column] = cell
    return records.write(folder / "run.jsonl", argument, {})


# Each draws twenty figures: here two columns, all of them with the slow tests.
@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "column",
    ["test_loss", *(pytest.param(c, marks=pytest.mark.slow) for c in ("design", *COLUMNS))],
)
def test_each_is_drawn_or_refused_with_reason(column: str, every: bool, tmp_path: Path) -> None:
    for number, cell in enumerate(CELLS):
        path = stored(tmp_path / str(number), column, cell, every)
        frame = records.read(path)
        for draw in (
            lambda path=path: plots.from_records(path),
            lambda path=path: plots.from_records(path, x="round"),
            lambda path=path: plots.from_records(path, series=column),
            lambda path=path: plots.from_records(path, where=[f"{column}=1"]),
            lambda frame=frame: plots.lines(frame, "epsilon", "test_loss"),
            lambda frame=frame: tables.summary(frame, ["design", "epsilon"], "test_loss"),
            lambda frame=frame: tables.paired(frame, "whisper", "independent", "test_loss"),
        ):
            try:
                draw()
            except ValueError as refusal:
                starts = ("colum", "where", "frame", "recor", "desig", "seed ", "x is ", "y is ")
                assert str(refusal)[:5] in starts, refusal
        # A table shows what there is.
        text = tables.text(frame)
        assert cell != "word" or "word" in text
        assert cell != [1, 2.5] or "[1, 2.5]" in text


def test_refusals_name_column_and_cell(tmp_path: Path) -> None:
    listed = records.read(stored(tmp_path / "a", "design", [1, 2], False))
    with pytest.raises(ValueError, match=r"column 'design' holds \[1, 2\].*in its place"):
        tables.summary(listed, "design", "test_loss")
    worded = records.read(stored(tmp_path / "b", "test_loss", "n/a", False))
    for use in (tables.summary, lambda *those: plots.lines(those[0], "epsilon", those[2])):
        with pytest.raises(ValueError, match="column 'test_loss' holds 'n/a', which is no number"):
            use(worded, "design", "test_loss")


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    path = stored(tmp_path / "a", "test_loss", [1, 2], False)
    with pytest.raises(ValueError, match=r"column 'test_loss' holds \[1, 2\]"):
        plots.from_records(path, y="test_loss", where=["epsilon=3"])
    path = stored(tmp_path / "b", "test_loss", None, False)
    text = plots.from_records(path, y="test_loss", where=["epsilon=3"]).read_text()
    assert "1 rows without round, test_loss or design left out." in text
    # An empty value makes the mean nan: what diverged is not passed over.
    empty = records.read(stored(tmp_path / "c", "test_loss", None, False))
    assert means(empty, ["design"], "test_loss")["mean"].isna().tolist() == [True, False]
