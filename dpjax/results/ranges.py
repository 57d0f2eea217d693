"""Mean, least and largest of a column over another one: what several victims have in common."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax.results.sheets import Notes, figure, notes_of, save, style

if TYPE_CHECKING:
    import pandas

__all__ = ["ranges"]

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442")
_MARKERS = ("o", "s", "^", "D", "v", "P", "x", "*")
_APART = 0.06


def ranges(
    frame: "pandas.DataFrame",
    x: str,
    series: str,
    *,
    columns: tuple[str, str, str] = ("mean", "min", "max"),
    dashed: tuple[str, ...] = (),
    ax: Any = None,
    path: str | os.PathLike[str] | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    title: str | None = None,
    logy: bool = True,
    ticks: Sequence[str] | None = None,
    guarantee: str | None = None,
    note: str | None = None,
) -> Any:
    """Draw means with bars from the least to the largest, a line for each series.

    Args:
        frame: One row for each x and series; infinite means are left out.
        x: Column of whole numbers across.
        series: Column that tells the lines apart.
        columns: Columns of the mean, the least and the largest.
        dashed: Series that are published bounds.
        ax: Panel to draw on; by default a figure of its own.
        path: Save the figure there.
        xlabel: By default the column's name.
        ylabel: By default none.
        title: Of the panel.
        logy: Logarithmic up; what is not above 0 is then left out.
        ticks: Names of x = 0, 1, ..., written in their stead.
        guarantee: For the caption.
        note: A sentence for the caption.

    Returns:
        The path written when one is given, else the figure.

    Raises:
        ValueError: For a missing column or nothing to draw.
    """
    from matplotlib.ticker import MaxNLocator

    for name in (x, series, *columns):
        if name not in frame.columns:
            raise ValueError(f"column {name!r} is not in the rows; they have {', '.join(frame)}")
    mean, least, most = columns
    frame = frame[np.isfinite(frame[most].to_numpy(np.float64))]
    if logy:
        frame = frame[frame[least] > 0]
    if not len(frame):
        raise ValueError("frame has no finite rows; nothing to draw")
    with style():
        if ax is None:
            ax = figure()[1][0]
        notes: Notes = notes_of(ax.get_figure(root=True))
        names = list(dict.fromkeys(frame[series]))
        for number, name in enumerate(names):
            part = frame[frame[series] == name].sort_values(x)
            middle = part[mean].to_numpy(np.float64)
            bars = [middle - part[least].to_numpy(), part[most].to_numpy() - middle]
            # Side by side, so that bars do not hide each other.
            across = part[x].to_numpy(np.float64) + _APART * (number - (len(names) - 1) / 2)
            handle = ax.errorbar(
                across,
                middle,
                np.maximum(bars, 0.0),
                color=_COLOURS[number % len(_COLOURS)],
                marker=_MARKERS[number % len(_MARKERS)],
                linestyle="--" if name in dashed else "-",
                capsize=2.5,
                elinewidth=0.9,
                label=str(name),
            )
            notes.handles.setdefault(str(name), handle)
        ax.set_xlabel(xlabel or x.replace("_", " "))
        if ticks is None:
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        else:
            ax.set_xticks(range(len(ticks)), ticks, rotation=60, ha="right")
        if ylabel:
            ax.set_ylabel(ylabel)
        if title:
            ax.set_title(title)
        if logy:
            ax.set_yscale("log")
    notes.guarantees += [guarantee] if guarantee else []
    notes.remarks += [note] if note else []
    sheet = ax.get_figure(root=True)
    return sheet if path is None else save(sheet, path)
