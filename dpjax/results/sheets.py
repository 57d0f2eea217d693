"""The sheet that panels are drawn on: style, legend, caption, file."""

import contextlib
import io
import math
import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from dpjax import _files, _validate
from dpjax.results import captions

__all__: list[str] = []

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
