"""Means with standard errors over the runs of a table, refused where they would mix runs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dpjax.results.records import Cell
from dpjax.results.tables import means, pairs

if TYPE_CHECKING:
    import pandas

__all__ = ["summary"]


def summary(frame: "pandas.DataFrame", by: str | Sequence[str], value: str) -> "pandas.DataFrame":
    """Mean and standard error of a column in groups.

    The standard error is s / sqrt(count), s with count - 1 in the denominator: nan for one row.
    A nan among the values makes the mean nan, so that a run that diverged is not passed over. Rows
    with a ``guarantee`` are averaged with those of the same participation (k, b) only, rows with a
    ``seed`` with those of other seeds, rounds or whatever else a column of no floats says.

    Args:
        frame: Tidy rows.
        by: Columns that make the groups, which come in the order of their first rows.
        value: Column of numbers.

    Returns:
        Columns ``by``, "mean", "standard error", "count".

    Raises:
        ValueError: For a column that is not there or holds lists, a value that is no number, or a
            group whose guarantees are for different participations or that has one seed twice.

    Example:
        >>> import pandas
        >>> from dpjax.contrib.summaries import summary
        >>> frame = pandas.DataFrame(
        ...     [("a", 0, 1.0), ("a", 1, 2.0), ("b", 0, 3.0), ("b", 1, 3.5)],
        ...     columns=["design", "seed", "loss"],
        ... )
        >>> table = summary(frame, "design", "loss")
        >>> table["mean"].tolist()
        [1.5, 3.25]
    """
    if isinstance(by, str):
        names = [by]
    else:
        names = list(by)
    table = means(frame, names, value)
    for key, group in frame.groupby(names, sort=False, dropna=False):
        _refuse_repetitions(group, dict(zip(names, key, strict=True)), value)
    return table


def _refuse_repetitions(group: "pandas.DataFrame", keys: Mapping[str, Cell], value: str) -> None:
    """Refuse a mean over several runs of one seed that no column tells apart."""
    if "seed" not in group.columns:
        return
    # Floats and the value are measured; whatever their dtype, these two are not.
    floats = group.select_dtypes(np.floating).columns.difference(["seed", "round"])
    settings = group.drop(columns=[*floats, value, "guarantee"], errors="ignore")
    twice = group[settings.map(str).duplicated()]
    if len(twice):
        seed = twice["seed"].iloc[0]
        raise ValueError(
            f"frame has several rows with {pairs(keys)}, seed = {seed} that only floats tell "
            "apart; name their column in by, or write the rows of every run with a column of its "
            "own, result.rows(run='first')"
        )
