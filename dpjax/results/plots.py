"""Figures from records alone: one style, one look a design, the guarantee in the caption.

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
from dpjax.plans import noise
from dpjax.protocols import Look
from dpjax.results import captions, records, tables

if TYPE_CHECKING:
    import pandas
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = [
    "LOOKS",
    "TITLES",
    "figure",
    "finish",
    "from_records",
    "lines",
    "save",
    "style",
]


_DASHES = (0, (7, 2))
_DOTS = (0, (5, 1.5, 1, 1.5, 1, 1.5))

LOOKS = {
    "non_private": Look(noise.NAMES["non_private"], "#000000", "x", "--"),
    "central": Look(noise.NAMES["central"], "#CC79A7", "v", ":"),
    **{name: part.look for name, part in noise.DESIGNS.items()},
}
"""How rows are drawn: noise designs as their classes say. Colours are Okabe and Ito's and
Tol's, which colour-blind readers can tell apart; markers and line styles tell the series apart in a
figure that is printed in grey."""

TITLES = noise.NAMES
"""Names of designs in figures, tables and summaries, by their labels."""

_FORMER = {
    "D-SGD, no noise": "non-private",
    "LDP": "independent",
    "DECOR": "pairwise",
    "Whisper, all rounds": "Whisper, whole run",
    "DOPPLER on LDP": "independent, filtered",
    "DOPPLER on Whisper": "Whisper, whole run, filtered",
}
"""Names that older records have of designs and systems, and those of today."""

_COLORS = ("#0072B2", "#E69F00", "#117733", "#D55E00", "#AA4499", "#56B4E9", "#000000")
_TURNS = [
    turn
    for turn in zip(_COLORS * 8, "os^DvPX*" * 7, ("-", "--", "-.", ":") * 14, strict=True)
    if turn[:2] not in {(look.color, look.marker) for look in LOOKS.values()}
]
"""Colour, marker and line style of other series: open markers, where designs have full ones."""
# Reference levels differ by their line alone: colours belong to series.
_LEVELS = (":", _DASHES, "-.", _DOTS)
_LARGEST = 200_000  # bytes of a figure that is kept with the code
_INK = "#333333"

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
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.color": _INK,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "auto",  # the figure's own
    "axes.unicode_minus": False,
    "text.usetex": False,
    "svg.fonttype": "path",  # looks the same where the font is missing
    "svg.hashsalt": "dpjax",
    "pdf.fonttype": 42,
    "text.hinting": "none",  # as wide at every resolution
    "figure.dpi": 160.0,
}


@dataclass
class _Notes:
    """What a figure's panels have drawn, for the one caption."""

    guarantees: list[captions.StatedEntry] = field(default_factory=list)
    counts: dict[str, set[int]] = field(default_factory=dict)
    series: dict[records.Cell, int] = field(default_factory=dict)
    levels: dict[str, int] = field(default_factory=dict)
    banded: bool = False
    remarks: list[str | None] = field(default_factory=list)
    finished: bool = False


# Drawn figures end with their last user, and so do the notes of them.
_NOTES: WeakKeyDictionary["Figure", _Notes] = WeakKeyDictionary()


def lines(
    frame: "pandas.DataFrame",
    x: str,
    y: str,
    series: str = "design",
    *,
    ax: "Axes | None" = None,
    guarantee: captions.Stated = None,
    path: _files.PathLike | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    title: str | None = None,
    log_x: bool = False,
    log_y: bool = False,
    hlines: Mapping[str, float] | None = None,
    note: str | None = None,
    looks: Mapping[records.Cell, Look] | None = None,
) -> Any:
    """Draw the mean of a column over another one, a line for each series.

    Rows that agree in ``series`` and ``x`` are averaged; they must be of different seeds, over
    which one standard error either way is shaded. A series whose ``x`` is not finite (the epsilon
    of a non-private run) becomes a horizontal line.

    Args:
        frame: Tidy rows.
        x: Column of numbers across.
        y: Column of numbers up.
        series: Column that tells the lines apart. Algorithms have the looks of `LOOKS`; others get
            theirs in turn, the same in all panels of a figure.
        ax: Panel to draw on; by default a figure of its own.
        guarantee: For the caption: a text, a Guarantee, its dict, or several; by default those of
            the rows' ``guarantee`` column.
        path: Save the figure there, after the last panel.
        xlabel: By default the column's name.
        ylabel: By default the column's name.
        title: Of the panel.
        log_x: Logarithmic across.
        log_y: Logarithmic up.
        hlines: Labelled reference levels.
        note: A sentence for the caption.
        looks: Looks of series beside those of `LOOKS`, or in their place.

    Returns:
        The path written when one is given, else the figure, for `save` or more panels.

    Raises:
        ValueError: For a missing column, cells that are lists or no numbers where there must be
            some, no rows, or rows that only a column not named tells apart.

    Example:
        >>> import pandas
        >>> from dpjax.results import plots
        >>> rows = pandas.DataFrame({"round": [1, 2], "loss": [0.5, 0.4], "design": ["a", "a"]})
        >>> figure = plots.lines(rows, "round", "loss")
        >>> plots.save(figure, "figure.svg").name
        'figure.svg'
    """
    if not len(frame):
        raise ValueError("frame has no rows; nothing to draw")
    keys = list(dict.fromkeys([series, x]))
    means = tables.means(frame, keys, y)
    # Runs without privacy are repeated for every budget, and become one level.
    _refuse_mixtures(frame[np.isfinite(tables.number_column(frame, x))], keys, y)
    for name, log, column, cells in (("log_x", log_x, x, x), ("log_y", log_y, y, "mean")):
        if log and not (tables.number_column(means, cells) > 0).any():
            raise ValueError(f"{name} is {log}, and no {column} is above 0; leave it out")
    # Only repetitions with other seeds have a standard error that means something.
    seeded = "seed" in frame.columns and frame["seed"].notna().any()
    with style():
        if ax is None:
            ax = figure()[1][0]
        sheet: Any = ax.get_figure(root=True)
        notes = _NOTES.setdefault(sheet, _Notes())
        if seeded or means["count"].max() > 1:
            counts = notes.counts.setdefault("seed" if seeded else "row", set())
            counts.update(means["count"][np.isfinite(means[x])])
        # The caller's looks come last, so that they replace those of the package.
        styles = {look.label: look for look in LOOKS.values()} | LOOKS | dict(looks or {})
        # An empty cell is a series of its own.
        for name, part in means.groupby(series, sort=False, dropna=False):
            _draw(ax, part.sort_values(x), x, _look(name, styles, notes.series), notes)
        for name, level in (hlines or {}).items():
            # A level has the same line in all panels.
            line = _LEVELS[notes.levels.setdefault(name, len(notes.levels)) % len(_LEVELS)]
            ax.axhline(level, color=_INK, linestyle=line, linewidth=1.1, label=name)
        # A dollar sign in the name of a column or of a series starts no formula.
        ax.set_xlabel(xlabel or _named(frame, x), parse_math=bool(xlabel))
        # Panels of a row that share an axis say once what it is.
        cell = ax.get_subplotspec()
        siblings = ax.get_shared_y_axes().get_siblings(ax)
        if cell is None or cell.is_first_col() or len(siblings) == 1:
            ax.set_ylabel(ylabel or _named(frame, y), parse_math=bool(ylabel))
        ax.set_title(title or "")
        _scale(ax, frame[x], log_x, log_y)
    if guarantee is None and "guarantee" in frame.columns:
        guarantee = frame["guarantee"]
    # All panels add to one caption, which `finish` writes.
    notes.guarantees += captions.stated_guarantees(guarantee)
    notes.remarks.append(note)
    if path is None:
        return sheet
    return save(sheet, path)


def from_records(
    path: records.Paths,
    *,
    x: str | None = None,
    y: str | None = None,
    series: str | None = None,
    where: Iterable[str] = (),
    log_x: bool = False,
    log_y: bool = False,
    out: _files.PathLike | None = None,
    file: str = "*",
) -> Path:
    """Draw a figure from stored records.

    What is not given is what the first file's metadata say as ``plot``, a dict of x, y, series,
    where, log_x and log_y; else the first metric over rounds, by design. Its conditions hold but
    for the columns that ``where`` names; the caption has all that hold. Its scales are those of its
    own x and y. Unless ``x`` is the round, only a run's last round is drawn. Rows of several
    settings are refused until ``where`` chooses one.

    Args:
        path: A file of records, a folder, or several.
        x: Column across.
        y: Column up; by default test_loss, else the column after the round.
        series: Column that tells the lines apart.
        where: Conditions ``column=value`` that rows must keep, one on each column; compared as
            numbers where both are.
        log_x: Logarithmic across.
        log_y: Logarithmic up.
        out: File to write, ending in .svg, .png or .pdf; by default beside the records.
        file: The files to read, in archives too: a name, or a pattern such as ``a9a_*``.

    Returns:
        The path written.

    Raises:
        ValueError: For records that cannot be read, a column that they lack, a value of no row, or
            rows of several settings.

    Example:
        >>> from dpjax.results import plots, records
        >>> rows = [{"round": t, "test_loss": 1 / t, "design": "a", "seed": 0} for t in (1, 2)]
        >>> path = records.write("curve.jsonl", rows, {"command": "by hand"})
        >>> plots.from_records(path, out="curve.svg").name
        'curve.svg'
    """
    paths = records.path_list(path)
    frame = records.read(paths, file)
    if not len(frame):
        files = ", ".join(repr(str(path)) for path in paths)
        raise ValueError(f"path is {files}, whose records have no rows; nothing to draw")
    stored = records.read_metadata(paths, file).get("plot", {})
    kinds = {"x": str, "y": str, "series": str, "where": list, "log_x": bool, "log_y": bool}
    valid = (
        isinstance(stored, dict)
        and all(isinstance(stored.get(name, kind()), kind) for name, kind in kinds.items())
        and all(isinstance(condition, str) for condition in stored.get("where", ()))
    )
    first_path = paths[0]
    if not valid:
        raise ValueError(
            f"path is {str(first_path)!r}, of whose metadata plot is {_validate.shown(stored)}; "
            "give texts 'x', 'y', 'series', a list of texts 'where', and true or false 'log_x', "
            "'log_y'"
        )
    columns = list(map(str, frame.columns))
    x = _validate.one_of("x", stored.get("x", "round") if x is None else x, columns)
    metrics = columns
    if "round" in columns:
        metrics = columns[columns.index("round") + 1 :]
    # Metrics stand after the round, those of the problem first.
    first = "test_loss" if "test_loss" in columns else next(iter(metrics), "")
    y = _validate.one_of("y", stored.get("y", first) if y is None else y, columns)
    where = [where] if isinstance(where, str) else list(where)
    conditions = {condition.partition("=")[0]: condition for condition in where}
    if len(conditions) < len(where):
        raise ValueError(f"where is {', '.join(where)}; give one condition on each column")
    stored_where = [_current(condition, columns) for condition in stored.get("where", ())]
    by_column = {condition.partition("=")[0]: condition for condition in stored_where}
    by_column |= conditions
    for condition in by_column.values():
        frame = _chosen(frame, condition)
    if series is None:
        # Rows of no result, of an energy say, have their designs in the column algorithm.
        drawn = frame[frame[[x, y]].notna().all(axis=1)].dropna(axis=1, how="all")
        named = [name for name in ("design", "algorithm") if name in drawn]
        series = stored.get("series", next(iter(named), "design"))
    series = _validate.one_of("series", series, columns)
    present = frame[[x, y, series]].notna().all(axis=1)
    if not present.any():
        raise ValueError(f"x is {x!r} and y {y!r}, of which no row has both; name other columns")
    settings = ", ".join(_shown(condition) for condition in sorted(by_column.values()))
    note = f"Rows of {settings}." if settings else ""
    if not present.all():
        note = f"{note} {(~present).sum()} rows without {x}, {y} or {series} left out.".lstrip()
    frame = frame[present].replace({series: _FORMER})
    if x != "round" and "round" in columns and frame["round"].notna().any():
        runs = frame.get("rounds", np.zeros(len(frame)))
        frame = frame[frame["round"] == frame.groupby(runs, dropna=False)["round"].transform("max")]
    if frame[series].dtype.kind in "fiu" and series != x:
        # A number alone would not say what it is.
        name = _named(frame, series)
        frame = frame.sort_values(series, kind="stable")
        frame = frame.assign(**{series: [f"{name} {value:g}" for value in frame[series]]})
    if out is None:
        folder = first_path
        if not os.path.isdir(folder):
            folder = folder.parent
        # A folder may be given as "." and has a name all the same.
        name = first_path.resolve().name.partition(".")[0]
        out = folder / f"{name}_{y}_{x}.svg"
    log_x = log_x or (stored.get("log_x", False) and x == stored.get("x", x))
    log_y = log_y or (stored.get("log_y", False) and y == stored.get("y", y))
    return lines(frame, x, y, series, note=note, path=out, log_x=log_x, log_y=log_y)


def _current(condition: str, columns: list[str]) -> str:
    """A condition of an older file's metadata, on the column as `records.read` calls it."""
    column, _, value = condition.partition("=")
    if column not in columns:
        column = records.FORMER.get(column, column)
    return f"{column}={value}"


def _shown(condition: str) -> str:
    """A condition as a figure's note has it."""
    column, _, value = condition.partition("=")
    return f"{column} = {noise.display_name(value)}"


def _chosen(frame: "pandas.DataFrame", condition: str) -> "pandas.DataFrame":
    """The rows that keep a condition ``column=value``."""
    name, equals, value = condition.partition("=")
    if not equals:
        raise ValueError(f"where is {condition!r}; write column=value, as in graph=ring")
    cells = frame[_validate.one_of("where", name, list(map(str, frame.columns)))]

    def keeps(cell: Any) -> bool:
        # "10" and "10.0" are one number; what is no number is compared as text.
        with contextlib.suppress(TypeError, ValueError):
            if float(cell) == float(value):
                return True
        return str(cell).lower() == value.lower()  # "nan", too

    rows = frame[cells.map(keeps).astype(bool)]
    if not len(rows):
        remedy = _validate.choice(value, sorted(set(map(str, cells)))[:12])
        raise ValueError(f"where is {condition!r}, of which there is no row; {remedy}")
    return rows


def _refuse_mixtures(frame: "pandas.DataFrame", keys: list[str], y: str) -> None:
    """Refuse a mean over rows that are not repetitions of one setting."""
    if "seed" not in frame.columns:
        return
    tables.comparable(frame, ["seed"])
    keys = [*keys, "seed"]
    twice = frame[frame.duplicated(keys, keep=False)]
    if not len(twice):
        return
    first = twice.iloc[0]
    cells = twice.map(str)  # An empty cell is no other than itself.
    counts = cells.nunique()
    alike = cells[(cells[keys] == cells[keys].iloc[0]).all(axis=1)].nunique()
    # Measurements are floats, and stand after the settings.
    floats = frame.select_dtypes(np.floating).columns
    columns = list(frame.columns)
    measured = {y, "guarantee"}.union(floats.intersection(columns[columns.index(y) :]))
    varying = [name for name in columns if alike[name] > 1 and name not in measured]
    # One that stands before y has a value of its own in nearly every row.
    many = [name for name in floats if 4 * counts[name] > len(twice)]
    varying = [name for name in varying if name not in many] or varying[:1]
    # What has the fewest values comes first: one of them leaves most series in the figure.
    varying.sort(key=counts.get)
    remedy = (
        "no column tells them apart: draw one file at a time, or write the rows of every run with "
        "a column of its own, result.rows(run='first')"
    )
    if varying:
        remedy = (
            f"choose one value of {', '.join(varying)} first (where {varying[0]}="
            f"{first[varying[0]]}, say)"
        )
    values = ", ".join(f"{key} = {first[key]}" for key in keys)
    raise ValueError(f"records hold several rows for {values}; {remedy}")


def _named(frame: "pandas.DataFrame", column: str) -> str:
    """What a column is called; epsilon of agents with different ones is the largest."""
    stated = frame.get("guarantee") if column == "epsilon" else None
    by_agent = any(" by agent" in caption for caption in captions.guarantees(stated))
    return "largest epsilon of an agent" if by_agent else column.replace("_", " ")


def _look(
    name: records.Cell, styles: Mapping[records.Cell, Look], turns: dict[records.Cell, int]
) -> dict[str, Any]:
    """How a series is drawn: as it is known, else by its turn in the figure."""
    options = ("label", "color", "marker", "linestyle")
    if name in styles:
        return dict(zip(options, styles[name], strict=True))
    turn = _TURNS[turns.setdefault(name, len(turns)) % len(_TURNS)]
    if isinstance(name, float):
        label = f"{name:g}"
    else:
        label = str(name).replace("$", r"\$")
    look = (noise.display_name(label), *turn)
    return dict(zip(options, look, strict=True)) | {"markerfacecolor": "white"}


def _draw(
    ax: "Axes", part: "pandas.DataFrame", x: str, look: dict[str, Any], notes: _Notes
) -> None:
    """One series: a line with its band, or levels where x is not finite."""
    # A run without privacy has epsilon inf: no place across, so a level.
    finite = np.isfinite(part[x].to_numpy(np.float64))
    if not finite.any():
        for level in part["mean"]:
            ax.axhline(level, **{**look, "marker": ""})
        return
    part = part[finite]
    columns = (x, "mean", "standard error")
    across, mean, error = (part[name].to_numpy(np.float64) for name in columns)
    # Markers at a dozen places: more of them hide the line.
    ax.plot(across, mean, markevery=max(1, math.ceil(len(across) / 12)), **look)
    if "seed" in notes.counts and np.isfinite(error).any():
        notes.banded = True
        # A band over a single point would have no width.
        if len(across) == 1:
            ax.errorbar(across, mean, error, color=look["color"], capsize=3)
        else:
            ends = (mean - error, mean + error)
            ax.fill_between(across, *ends, color=look["color"], alpha=0.18, linewidth=0)


def _scale(ax: "Axes", across: "pandas.Series", log_x: bool, log_y: bool) -> None:
    """Scales and ticks of a panel."""
    from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

    if log_x:
        ax.set_xscale("log")
        _plain_decades(ax.xaxis)
        values = sorted({v for v in across.to_numpy(np.float64) if 0 < v < math.inf})
        # Few values are settings: they are labelled themselves, instead of decades.
        if 0 < len(values) <= 10:
            ticks = values[:1]
            for value in values[1:]:
                # Labels of near values would lie on each other.
                nearest = ticks[-1] * (values[-1] / values[0]) ** 0.12
                if value >= nearest:
                    ticks.append(value)
            ax.xaxis.set_major_locator(FixedLocator(ticks))
            ax.xaxis.set_minor_locator(NullLocator())
    elif across.dtype.kind == "i":
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if across.name == "round" and not log_x and across.max() >= 10_000:
        # Five digits each would run into one another: 20k.
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if log_y:
        ax.set_yscale("log")
        _plain_decades(ax.yaxis)


def _plain_decades(axis: "Axis") -> None:
    """Label a logarithmic axis 0.5 and 200 rather than in powers, between decades where short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7]
    # The more decades an axis has, the fewer ticks stand between them.
    for ratio, steps in ((5, [1.0, 2, 3, 5, 7]), (20, [1.0, 3]), (1000, [1.0])):
        if high > ratio * low:
            subs = steps
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    if 1e3 <= value < 1e6:
        return f"{value:.0f}"
    return f"{float(f'{value:.3g}'):g}"


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Matplotlib settings of every figure, for the time of a ``with`` block.

    Example:
        >>> from matplotlib import pyplot
        >>> from dpjax.results import plots
        >>> with plots.style():
        ...     figure, axes = pyplot.subplots()
    """
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a figure does not depend on the user's own settings
        matplotlib.rcParams.update(_STYLE)
        yield


def figure(rows: int = 1, columns: int = 1, **axes: Any) -> tuple["Figure", np.ndarray]:
    """A figure of panels, drawn by Agg whatever the display.

    It has 5.4 inches for one column and 3.6 for each of several, 2.9 for each row; legend and
    caption come on top.

    Args:
        rows: Rows of panels.
        columns: Columns of panels.
        axes: More for ``Figure.subplots``, such as ``sharey=True``.

    Returns:
        The figure and its axes [rows * columns], to give to `lines` as ``ax``.

    Example:
        >>> from dpjax.results import plots
        >>> figure, axes = plots.figure(1, 2)
        >>> len(axes)
        2
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style():
        figure_ = Figure(figsize=(5.4 if columns == 1 else 3.6 * columns, 2.9 * rows))
        # Agg needs no display, and its renderer measures texts.
        FigureCanvasAgg(figure_)
        panels = figure_.subplots(rows, columns, squeeze=False, **axes)
    return figure_, panels.ravel()


def finish(figure: "Figure", *, guarantee: captions.Stated = None, note: str | None = None) -> str:
    """Add the one legend above the panels and the one caption below them; `save` does it too.

    Args:
        figure: A figure that `lines` has drawn on.
        guarantee: In place of those that `lines` was given.
        note: A sentence to add to the caption.

    Returns:
        The caption. A figure that is finished already is left as it is.

    Example:
        >>> import pandas
        >>> from dpjax.results import plots
        >>> rows = pandas.DataFrame({"round": [1, 2], "loss": [0.5, 0.4], "design": ["a", "a"]})
        >>> plots.finish(plots.lines(rows, "round", "loss"), note="Two rounds.")
        'Two rounds.'
    """
    notes = _NOTES.setdefault(figure, _Notes())
    if guarantee is not None:
        notes.guarantees = captions.stated_guarantees(guarantee)
    notes.remarks.append(note)
    caption = _caption(notes)
    if notes.finished:
        return caption
    notes.finished = True
    with style():
        width, height = figure.get_size_inches()
        # "T = 5" stays on one line, and lines of so many letters fit the sheet.
        tied = caption.replace(" = ", "\xa0=\xa0")
        length = int(16 * (width - 0.3))
        lines = textwrap.wrap(tied, length, break_on_hyphens=False)
        text = figure.supxlabel(
            "\n".join(lines).replace("\xa0", " "),
            x=0.15 / width,
            ha="left",
            fontsize=7.5,
            linespacing=1.3,
            parse_math=False,  # A dollar sign would start a formula.
        )
        # The sheet grows by what is written above and below, so that the panels keep their size.
        artists = (text, *_legends(figure, width))
        heights = [_extent(figure, artist).height for artist in artists]
        added = sum(heights) / figure.dpi + 0.1 * len(heights)
        figure.set_size_inches(width, height + added)
        figure.set_layout_engine("constrained")
        figure.canvas.draw()  # now, in this style, and once for all
        figure.set_layout_engine("none")
    return caption


def save(figure: "Figure", path: _files.PathLike) -> Path:
    """Write a figure, finished first, and replace the one before it.

    Args:
        figure: The figure.
        path: Ending in .svg, .png or .pdf; its folder is made.

    Returns:
        The path written: where the SVG would take more than 200 kB, a PNG's beside it, and an
        older SVG of that name is removed.

    Raises:
        ValueError: For another ending, or where the system refuses to write.

    Example:
        >>> import pandas
        >>> from dpjax.results import plots
        >>> rows = pandas.DataFrame({"round": [1, 2], "loss": [0.5, 0.4], "design": ["a", "a"]})
        >>> plots.save(plots.lines(rows, "round", "loss"), "figure.svg").name
        'figure.svg'
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"path is {str(path)!r}; end it in .svg, .png or .pdf")
    if figure in _NOTES:
        finish(figure)
    with style():
        content = _render(figure, path.suffix[1:])
        large = len(content) > _LARGEST
        written = path
        if path.suffix == ".svg" and large:
            written = path.with_suffix(".png")
        # Coarser until it fits; the coarsest is kept as it is.
        for dots in (160, 120, 90) if written.suffix == ".png" and large else ():
            content = _render(figure, "png", dots)
            if len(content) <= _LARGEST:
                break
    with _files.writing("path", written):
        _files.replace(written, content)
        if written != path:
            path.unlink(missing_ok=True)
    return written


def markup(figure: "Figure") -> str:
    """A figure, finished first, as SVG for a page of HTML.

    Args:
        figure: The figure.
    """
    finish(figure)
    with style():
        text = _render(figure, "svg").decode()
    return text[text.index("<svg") :]


def _caption(notes: _Notes) -> str:
    """Guarantees, what the bands are, remarks."""
    sentences = []
    text = captions.guarantees(notes.guarantees)
    if text:
        sentences.append(f"Guarantee: {'; '.join(text)}.")
    counts = set().union(*notes.counts.values())
    unit = "row"
    # Panels over rows and over seeds have one caption, and rows are what both have.
    if len(notes.counts) == 1:
        unit = next(iter(notes.counts))
    if max(counts, default=0) > 1:
        count = " to ".join(str(end) for end in sorted({min(counts), max(counts)}))
        band = ", bands one standard error either way" if notes.banded else ""
        sentences.append(f"Lines are means over {count} {unit}s{band}.")
    elif counts and unit == "seed":
        sentences.append("One seed.")
    return " ".join([*sentences, *dict.fromkeys(filter(None, notes.remarks))])


def _legends(figure: "Figure", width: float) -> Sequence["Artist"]:
    """Add a legend of as few rows as fit, each label once, or none for a single line."""
    named: dict[str, Artist] = {}
    # Panels repeat their series, and the legend has each once.
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    count = len(named)
    if count < 2:
        return []
    for rows in range(1, count + 1):
        legend = figure.legend(
            named.values(),
            named.keys(),
            loc="outside upper center",
            ncols=math.ceil(count / rows),
            handlelength=3.2,
            columnspacing=1.4,
            borderpad=0.2,
        )
        if _extent(figure, legend).width <= (width - 0.2) * figure.dpi:
            break
        if rows < count:
            legend.remove()
    return figure.legends


def _extent(figure: Any, artist: "Artist") -> Any:
    return artist.get_window_extent(figure.canvas.get_renderer())


def _render(figure: "Figure", kind: str, dots: int = 160) -> bytes:
    buffer = io.BytesIO()
    # Neither dates nor versions: the same rows give the same bytes.
    kinds: Any = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": "dpjax"},
        "pdf": {"CreationDate": None, "Producer": None, "Creator": "dpjax"},
    }
    metadata = kinds[kind]
    if figure in _NOTES:
        # The text is drawn as outlines: here it can be searched and read out.
        metadata["Subject" if kind == "pdf" else "Description"] = _caption(_NOTES[figure])
    figure.savefig(buffer, format=kind, dpi=dots, metadata=metadata)
    return buffer.getvalue()
