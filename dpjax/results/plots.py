"""Figures from records alone: one style, one colour an algorithm, the guarantee in the caption.

The same rows give the same bytes: files hold no dates and no random identifiers.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax import _validate
from dpjax.plans import compatibility
from dpjax.results import captions, choice, records, tables
from dpjax.results.sheets import INK, Notes, figure, finish, notes_of, save, style

if TYPE_CHECKING:
    import pandas

__all__ = [
    "COLOURS",
    "TITLES",
    "MARKERS",
    "figure",
    "finish",
    "from_records",
    "lines",
    "ranges",
    "save",
    "style",
]

_KNOWN = {
    **compatibility.REFERENCES,
    **{row.label: (row.title, row.colour, row.marker) for row in compatibility.NOISES},
}

COLOURS: dict[str, str] = {name: colour for name, (_, colour, _) in _KNOWN.items()}
"""Colour by algorithm, from the table of parts."""

TITLES: dict[str, str] = {name: title for name, (title, _, _) in _KNOWN.items()}
"""What the legend says."""

MARKERS: dict[str, str] = {name: marker for name, (_, _, marker) in _KNOWN.items()}
"""Marker by algorithm, so that a figure also reads in grey."""

_OTHERS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442")
_OTHER_MARKERS = ("o", "s", "^", "D", "v", "P", "x", "*")
_OTHER_LINES = ("-", "--", ":", "-.")
_REFERENCES = ("non_private", "central")  # dashed: no design that an outsider's guarantee covers
_NAMED = 24  # agents that a figure names
_BANDS = ("standard error", "none")
_APART = 0.06  # bars of ranges


def lines(
    frame: "pandas.DataFrame",
    x: str,
    y: str,
    series: str = "algorithm",
    *,
    ax: Any = None,
    band: str | None = "standard error",
    guarantee: Any = None,
    path: str | os.PathLike[str] | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    title: str | None = None,
    logx: bool = False,
    logy: bool = False,
    hlines: Mapping[str, float] | None = None,
    note: str | None = None,
) -> Any:
    """Draw the mean of a column over another one, a line for each series.

    Rows that agree in ``series`` and ``x`` are averaged; they must be of different seeds. A
    series whose ``x`` is not finite (the epsilon of a non-private run) becomes a horizontal line.

    Args:
        frame: Tidy rows.
        x: Column of numbers across.
        y: Column of numbers up.
        series: Column that tells the lines apart; algorithms have fixed colours.
        ax: Panel to draw on; by default a figure of its own.
        band: "standard error" shades the mean +- one standard error, None shades nothing.
        guarantee: For the caption: a text, a Guarantee, its dict, or several; by default those of
            the rows' ``guarantee`` column.
        path: Save the figure there, after the last panel.
        xlabel: By default the column's name.
        ylabel: By default the column's name.
        title: Of the panel.
        logx: Logarithmic across.
        logy: Logarithmic up.
        hlines: Labelled reference levels.
        note: A sentence for the caption.

    Returns:
        The path written when one is given, else the figure, for `save` or more panels.

    Raises:
        ValueError: For a missing column, cells that are lists or no numbers where there must be
            some, no rows, or rows that only a column not named tells apart.
    """
    if band is not None:
        _validate.one_of("band", band, _BANDS)
    if not len(frame):
        raise ValueError("frame has no rows; nothing to draw")
    keys = list(dict.fromkeys([series, x]))
    means = tables.summary(frame, keys, y)
    # Runs without privacy are repeated for every budget, and become one level.
    _refuse_mixtures(frame[np.isfinite(tables.numbers(frame, x))], keys)
    with style():
        if ax is None:
            ax = figure()[1][0]
        notes = notes_of(ax.get_figure(root=True))
        # An empty cell is a series of its own.
        several = means.groupby(series, sort=False, dropna=False)
        for number, (name, part) in enumerate(several):
            part = part.sort_values(x)
            look = _look(name, number)
            finite = np.isfinite(part[x].to_numpy(np.float64))
            if not finite.any():
                for level in part["mean"]:
                    handle = ax.axhline(level, **{**look, "linestyle": "--", "marker": ""})
            else:
                part = part[finite]
                handle = _draw(ax, part, x, look, band == "standard error", notes)
                notes.counts |= set(map(int, part["count"]))
            notes.handles.setdefault(look["label"], handle)
        notes.over.add("seed" if "seed" in frame.columns else "row")
        for name, level in (hlines or {}).items():
            handle = ax.axhline(level, color=INK, linestyle=":", linewidth=1.1, label=name)
            notes.handles.setdefault(name, handle)
        _dress(ax, frame, x, y, xlabel, ylabel, title, logx, logy)
    if guarantee is None and "guarantee" in frame.columns:
        guarantee = frame["guarantee"]
    notes.guarantees += captions.listed(guarantee)
    notes.remarks += [note] if note else []
    sheet = ax.get_figure(root=True)
    return sheet if path is None else save(sheet, path)


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
        notes = notes_of(ax.get_figure(root=True))
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
                color=_OTHERS[number % len(_OTHERS)],
                marker=_OTHER_MARKERS[number % len(_OTHER_MARKERS)],
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


def from_records(
    path: Any,
    *,
    x: str | None = None,
    y: str | None = None,
    series: str | None = None,
    where: Iterable[str] = (),
    log_x: bool | None = None,
    log_y: bool | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Path:
    """Draw a figure from stored records.

    Of an experiment's rows the tuning phase is left out, and unless ``x`` is the round, so are
    all rounds but the last. Whatever else varies is held at its most frequent value, which the
    caption tells; see `dpjax.results.choice`. Losses of several victims become their mean, least
    and largest.

    Args:
        path: A file of records, a folder, or several.
        x: Column across; by default what varies of a budget, a distance, rounds.
        y: Column up; by default test_loss, an energy, else the first metric.
        series: Column that tells the lines apart; by default the algorithm.
        where: Conditions ``column=value`` that rows must keep.
        log_x: Logarithmic across; by default where the values span a factor of 100.
        log_y: The same up.
        out: File to write, ending in .svg, .png or .pdf; by default beside the records.

    Returns:
        The path written.

    Raises:
        ValueError: For records that cannot be read, or a column that they lack.
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    frame = records.read(paths)
    if not len(frame):
        raise ValueError(f"path is {path!r}, whose records have no rows; nothing to draw")
    drawn = choice.choose(choice.where(frame, where), x, y, series)
    if out is None:
        first = Path(paths[0])
        folder = first if os.path.isdir(first) else first.parent
        stem = folder.resolve().name if os.path.isdir(first) else first.stem
        more = f"_and_{len(paths) - 1}_more" if len(paths) > 1 else ""
        out = folder / f"{stem}{more}_{drawn.label}_{drawn.x}.svg"
    logs = (drawn.logx if log_x is None else log_x, drawn.logy if log_y is None else log_y)
    if drawn.ranges:
        return ranges(
            drawn.frame,
            drawn.x,
            drawn.series,
            ylabel=drawn.label.replace("_", " "),
            logy=logs[1],
            ticks=drawn.ticks if drawn.ticks and len(drawn.ticks) <= _NAMED else None,
            note=" ".join(filter(None, ["Bars from the least to the largest.", drawn.note])),
            path=out,
        )
    return lines(
        drawn.frame,
        drawn.x,
        drawn.y,
        drawn.series,
        note=drawn.note,
        path=out,
        logx=logs[0],
        logy=logs[1],
    )


def _refuse_mixtures(frame: "pandas.DataFrame", keys: list[str]) -> None:
    """Refuse a mean over rows that are not repetitions of one setting."""
    if "seed" not in frame.columns:
        return
    tables.comparable(frame, ["seed"])
    twice = frame.duplicated([*keys, "seed"], keep=False)
    if not twice.any():
        return
    first = frame[twice].iloc[0]
    alike = frame[(frame[[*keys, "seed"]] == first[[*keys, "seed"]]).all(axis=1)]
    varying = [
        str(name)
        for name in alike.columns
        if name in choice.SETTINGS and name != "guarantee" and alike[name].map(str).nunique() > 1
    ]
    if varying:
        remedy = (
            f"choose one value of {', '.join(varying)} first (--where {varying[0]}="
            f"{alike[varying[0]].iloc[0]}, say)"
        )
    else:
        remedy = (
            "no column tells them apart: draw one file at a time, or write the rows of every run "
            "with a column of its own, result.rows(run='first')"
        )
    raise ValueError(
        f"records hold several rows for {', '.join(f'{k} = {first[k]}' for k in [*keys, 'seed'])}; "
        f"{remedy}"
    )


def _look(name: Any, number: int) -> dict[str, Any]:
    """How a series is drawn: fixed for the algorithms, in turn for others."""
    if name in COLOURS:
        line = {"linestyle": "--" if name in _REFERENCES else "-"}
        return {"color": COLOURS[name], "marker": MARKERS[name], "label": TITLES[name], **line}
    label = f"{name:g}" if isinstance(name, float) else str(name)
    lap, place = divmod(number, len(_OTHERS))
    look = {"color": _OTHERS[place], "marker": _OTHER_MARKERS[place], "label": label}
    return look | {"linestyle": _OTHER_LINES[lap % len(_OTHER_LINES)]}


def _draw(ax: Any, part: Any, x: str, look: dict[str, Any], band: bool, notes: Notes) -> Any:
    across, mean = part[x].to_numpy(np.float64), part["mean"].to_numpy(np.float64)
    error = part["standard error"].to_numpy(np.float64)
    # Markers at a dozen places: more of them hide the line.
    every = max(1, math.ceil(len(across) / 12))
    (handle,) = ax.plot(across, mean, markevery=every, **look)
    if band and np.isfinite(error).any():
        notes.banded = True
        low, high = mean - error, mean + error
        if len(across) == 1:
            ax.errorbar(across, mean, error, color=look["color"], capsize=3)
        else:
            ax.fill_between(across, low, high, color=look["color"], alpha=0.18, linewidth=0)
    return handle


def _dress(
    ax: Any,
    frame: "pandas.DataFrame",
    x: str,
    y: str,
    xlabel: str | None,
    ylabel: str | None,
    title: str | None,
    logx: bool,
    logy: bool,
) -> None:
    from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

    ax.set_xlabel(xlabel or x.replace("_", " "))
    place = ax.get_subplotspec()
    shared = len(ax.get_shared_y_axes().get_siblings(ax)) > 1
    if place is None or place.is_first_col() or not shared:
        ax.set_ylabel(ylabel or y.replace("_", " "))
    if title:
        ax.set_title(title)
    if logx:
        ax.set_xscale("log")
        _plain_decades(ax.xaxis)
        values = sorted(set(frame[x][np.isfinite(frame[x].to_numpy(np.float64))]))
        if len(values) <= 10:
            ax.xaxis.set_major_locator(FixedLocator(values))
            ax.xaxis.set_minor_locator(NullLocator())
    elif frame[x].dtype.kind == "i":
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if logy:
        ax.set_yscale("log")
        _plain_decades(ax.yaxis)
    if x == "round" and not logx and frame[x].max() >= 10_000:
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))


def _plain_decades(axis: Any) -> None:
    """Label a logarithmic axis 0.5 and 200 rather than in powers, between decades where short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs = (1.0,) if high > 30 * low else (1.0, 2.0, 3.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{float(f'{value:.3g}'):g}"))
    axis.set_minor_formatter(NullFormatter())
