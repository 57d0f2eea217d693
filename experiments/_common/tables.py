"""Paired differences over seeds, and what was tuned to an end of its grid, beside the package's."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from _common import looks
from dpjax.contrib.summaries import summary
from dpjax.results import tables
from dpjax.results.tables import comparable, moments, number_column

if TYPE_CHECKING:
    import pandas

__all__ = ["Paired", "at_ends", "paired", "summary", "text"]


METHODS = ("design", "algorithm", "method")
"""Columns of names that records have of designs and methods."""


class Paired(NamedTuple):
    """How much two algorithms differ on the same seeds.

    Attributes:
        mean: Mean of (worse - better) over the pairs; positive when the better one is smaller.
        standard_error: Of that mean, from the differences; nan for one pair.
        count: Number of pairs.
        t: mean / standard_error, Student's statistic with count - 1 degrees of freedom.
    """

    mean: float
    standard_error: float
    count: int  # type: ignore[assignment]  # tuples have a method of this name
    t: float

    def row(self) -> dict[str, float]:
        """The comparison as columns of a table."""
        return {
            "difference": self.mean,
            "standard error": self.standard_error,
            "seeds": self.count,
            "t": self.t,
        }


def text(
    rows: "pandas.DataFrame | Iterable[Mapping[str, Any]]", columns: Sequence[str] | None = None
) -> str:
    """Return rows as aligned text, where designs and methods are called as in figures.

    Args:
        rows: As `dpjax.results.tables.text` takes them.
        columns: The same.
    """
    if hasattr(rows, "to_dict"):
        named = [name for name in METHODS if name in rows]
        titles = {name: list(map(looks.title, rows[name])) for name in named}
        return tables.text(rows.assign(**titles), columns)
    display = []
    for row in rows:
        titles = {name: looks.title(row[name]) for name in METHODS if name in row}
        display.append({**row, **titles})
    return tables.text(display, columns)


def at_ends(frame: "pandas.DataFrame", by: str | Sequence[str] = "design") -> list[str]:
    """What was tuned to the least or the largest step size that was tried: its grid is too short.

    Where one step size alone was tried, nothing was tuned.

    Args:
        frame: Tidy rows of both phases, "tuning" and "final", with their ``step_size``; with a
            ``setting``, the ends are those of the steps that the best setting was tried with.
        by: Columns that tell what was tuned apart.

    Returns:
        Their entries, as figures call them, joined by " + ", in the order of their first rows.

    """
    results = []
    for key, group in frame.groupby([by] if isinstance(by, str) else list(by), sort=False):
        tuning, best = (group[group["phase"] == phase] for phase in ("tuning", "final"))
        if "setting" in group:
            tuning = tuning[tuning["setting"].isin(best["setting"])]
        tried = tuning["step_size"]
        ends = {tried.min(), tried.max()}
        if len(ends) > 1 and best["step_size"].isin(ends).any():
            results.append(" + ".join(str(looks.title(part)) for part in key))
    return results


def paired(
    frame: "pandas.DataFrame",
    better: Any,
    worse: Any,
    value: str,
    on: str | Sequence[str] = "seed",
    column: str = "design",
) -> Paired:
    """Compare two algorithms on the same seeds, where what seeds change alike cancels.

    Args:
        frame: Tidy rows; one for each of the two and each value of ``on``: one round, one budget.
        better: Entry of ``column`` claimed to have the smaller values.
        worse: Entry of ``column`` that it is compared with.
        value: Column of numbers.
        on: Columns that say which rows belong together.
        column: Column that tells the two apart.

    Returns:
        The mean difference worse - better, its standard error, the number of pairs, and t.

    Raises:
        ValueError: For columns or entries that are not there, lists in place of plain values,
            several rows for one seed, or a seed that only one of the two has.

    """
    names = [on] if isinstance(on, str) else list(on)
    comparable(frame, [*names, column])
    frame = frame.assign(**{value: number_column(frame, value)})
    sides = []
    for entry in (better, worse):
        side = frame[frame[column] == entry]
        if not len(side):
            raise ValueError(
                f"{column} {entry!r} is in no row; it holds {list(frame[column].unique())}"
            )
        keys = list(side[names].itertuples(index=False, name=None))
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(
                f"{column} {entry!r} has several rows with {', '.join(names)} = {twice}; choose "
                "one round, budget and graph first"
            )
        sides.append(dict(zip(keys, map(float, side[value]), strict=True)))
    first, second = sides
    single = [key for key in first if key not in second] + [
        key for key in second if key not in first
    ]
    if single:
        raise ValueError(
            f"{', '.join(names)} = {single[0]} is in only one of {better!r} and {worse!r}; run "
            "both on the same"
        )
    mean, error, count = moments([second[key] - first[key] for key in first])
    if error == 0:
        return Paired(mean, error, count, math.copysign(math.inf, mean) if mean else math.nan)
    return Paired(mean, error, count, mean / error)
