"""Figures from records alone: one style, one colour an algorithm, the guarantee in the caption.

The same rows give the same bytes: files hold no dates and no random identifiers.
"""

import contextlib
import io
import math
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from dpjax import _files, _validate
from dpjax.plans import compatibility
from dpjax.results import captions, choice, records, tables

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
_LARGEST = 200_000  # bytes of a figure that is kept with the code
INK = "#333333"

_STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.labelsize": 9.0,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.unicode_minus": False,
    "text.usetex": False,
    "svg.fonttype": "path",  # looks the same where the font is missing
    "svg.hashsalt": "dpjax",
    "pdf.fonttype": 42,
    "text.hinting": "none",  # as wide at every resolution
    "figure.dpi": 160.0,
}


@dataclass
class Notes:
    """What a figure's panels have drawn, for the one legend and the one caption."""

    handles: dict[str, Any] = field(default_factory=dict)
    guarantees: list[Any] = field(default_factory=list)
    counts: set[int] = field(default_factory=set)
    over: set[str] = field(default_factory=set)
    banded: bool = False
    remarks: list[str] = field(default_factory=list)
    finished: bool = False


_NOTES: WeakKeyDictionary[Any, Notes] = WeakKeyDictionary()


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


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Matplotlib settings of every figure, for the time of a ``with`` block."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a figure does not depend on the user's own settings
        matplotlib.rcParams.update(_STYLE)
        yield


def figure(
    rows: int = 1, columns: int = 1, *, width: float | None = None, height: float = 2.9, **axes: Any
) -> tuple[Any, np.ndarray]:
    """A figure of panels, drawn by Agg whatever the display.

    Args:
        rows: Rows of panels.
        columns: Columns of panels.
        width: Inches; by default 5.4 for one column, 3.6 for each of several.
        height: Inches of one panel; legend and caption come on top of it.
        axes: More for ``Figure.subplots``, such as ``sharey=True``.

    Returns:
        The figure and its axes [rows * columns], to give to `lines` as ``ax``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _validate.integer("rows", rows)
    columns = _validate.integer("columns", columns)
    width = width or (5.4 if columns == 1 else 3.6 * columns)
    with style():
        figure_ = Figure(figsize=(width, height * rows))
        FigureCanvasAgg(figure_)
        panels = figure_.subplots(rows, columns, squeeze=False, **axes)
    return figure_, panels.ravel()


def finish(figure: Any, *, guarantee: Any = None, note: str | None = None) -> str:
    """Add the one legend above the panels and the one caption below them; `save` does it too.

    Args:
        figure: A figure that `lines` has drawn on.
        guarantee: In place of those that `lines` was given.
        note: A sentence to add to the caption.

    Returns:
        The caption. A figure that is finished already is left as it is.
    """
    notes = notes_of(figure)
    if guarantee is not None:
        notes.guarantees = captions.listed(guarantee)
    notes.remarks += [note] if note else []
    caption = _caption(notes)
    if notes.finished:
        return caption
    notes.finished = True
    with style():
        width, height = figure.get_size_inches()
        legend = _legend(figure, list(notes.handles.values()), width)
        above = _height(figure, legend) + 0.1 if legend is not None else 0.0
        text = _wrapped(figure, caption, width - 0.3) if caption else None
        below = _height(figure, text) + 0.14 if text is not None else 0.0
        # The sheet grows by what is written above and below, so that the panels keep their size.
        total = height + above + below
        figure.set_size_inches(width, total)
        if legend is not None:
            legend.set_bbox_to_anchor((0.5, 1 - 0.06 / total), figure.transFigure)
        if text is not None:
            text.set_position((0.15 / width, (below - 0.06) / total))
        side = 0.1 / width
        rect = (side / 2, below / total, 1 - 1.5 * side, height / total)
        figure.set_layout_engine("constrained", rect=rect)
        figure.canvas.draw()  # now, in this style, and once for all
        figure.set_layout_engine("none")
    return caption


def save(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write a figure, finished first, and replace the one before it.

    Args:
        figure: The figure.
        path: Ending in .svg, .png or .pdf; its folder is made.

    Returns:
        The path written: where the SVG would take more than 200 kB, a PNG's beside it, and an
        older SVG of that name is removed.

    Raises:
        ValueError: For another ending, or where the system refuses to write.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"path is {str(path)!r}; end it in .svg, .png or .pdf")
    if figure in _NOTES:
        finish(figure)
    named = path
    with style():
        if path.suffix != ".png":
            content = _render(figure, path.suffix[1:])
            if path.suffix == ".svg" and len(content) > _LARGEST:
                path = path.with_suffix(".png")
        if path.suffix == ".png":
            for dots in (160, 120, 90):
                content = _render(figure, "png", dots)
                if len(content) <= _LARGEST:
                    break
    with _files.writing("path", path):
        _files.replace(path, content)
        if named != path:
            named.unlink(missing_ok=True)
    return path


def notes_of(figure: Any) -> Notes:
    """The notes that a figure's legend and caption are made from.

    Args:
        figure: The figure.

    Returns:
        Its notes, new for a new figure.
    """
    return _NOTES.setdefault(figure, Notes())


def _caption(notes: Notes) -> str:
    """Guarantees, what the bands are, remarks."""
    sentences = []
    if text := captions.guarantees(notes.guarantees):
        sentences.append(f"Guarantee: {'; '.join(text)}.")
    if notes.counts:
        low, high = min(notes.counts), max(notes.counts)
        what = next(iter(notes.over)) if len(notes.over) == 1 else "row"
        count = f"{high} {what}s" if low == high else f"{low} to {high} {what}s"
        if high > 1:
            band = ", bands one standard error either way" if notes.banded else ""
            sentences.append(f"Lines are means over {count}{band}.")
        elif what == "seed":
            sentences.append("One seed.")
    return " ".join([*sentences, *dict.fromkeys(notes.remarks)])


def _legend(figure: Any, handles: list[Any], width: float) -> Any:
    """A legend of as few rows as fit, or none for a single line."""
    if len(handles) < 2:
        return None
    labels = [handle.get_label() for handle in handles]
    for columns in range(len(handles), 0, -1):
        rows = math.ceil(len(handles) / columns)
        if columns > 1 and math.ceil(len(handles) / (columns - 1)) == rows:
            continue  # fewer columns are as low, and more even
        legend = figure.legend(
            handles,
            labels,
            loc="upper center",
            ncols=columns,
            handlelength=2.4,
            columnspacing=1.4,
            borderaxespad=0,
            borderpad=0.2,
        )
        legend.set_in_layout(False)
        if columns == 1 or _extent(figure, legend).width <= (width - 0.2) * figure.dpi:
            return legend
        legend.remove()
    return None


def _wrapped(figure: Any, caption: str, width: float) -> Any:
    """The caption as a text object no wider than the sheet."""
    text = figure.text(0, 0, caption, va="top", ha="left", fontsize=7.5, linespacing=1.3)
    text.set_in_layout(False)
    # A dollar sign would start a formula.
    text.set_parse_math(False)
    length = int(width * 20)
    while length > 20:
        # "T = 5" stays on one line.
        tied = caption.replace(" = ", "\xa0=\xa0")
        wrapped = textwrap.wrap(tied, length, break_on_hyphens=False)
        text.set_text("\n".join(wrapped).replace("\xa0", " "))
        if _extent(figure, text).width <= 0.98 * width * figure.dpi:
            break
        length -= 2
    return text


def _extent(figure: Any, artist: Any) -> Any:
    return artist.get_window_extent(figure.canvas.get_renderer())


def _height(figure: Any, artist: Any) -> float:
    return float(_extent(figure, artist).height / figure.dpi)


def _render(figure: Any, kind: str, dots: int = 160) -> bytes:
    buffer = io.BytesIO()
    # Neither dates nor versions: the same rows give the same bytes.
    metadata: dict[str, Any] = {"Software": None}
    if kind == "svg":
        metadata = {"Date": None, "Creator": "dpjax"}
    if kind == "pdf":
        metadata = {"CreationDate": None, "Producer": None, "Creator": "dpjax"}
    if figure in _NOTES:
        # The text is drawn as outlines: here it can be searched and read out.
        metadata["Subject" if kind == "pdf" else "Description"] = _caption(_NOTES[figure])
    figure.savefig(buffer, format=kind, dpi=dots, metadata=metadata)
    return buffer.getvalue()
