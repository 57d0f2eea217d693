"""What of some records is drawn where nobody said: columns, rows, and what is held fixed."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dpjax import _validate
from dpjax.results import captions

if TYPE_CHECKING:
    import pandas

__all__: list[str] = []

SETTINGS = (
    *("experiment", "dataset", "budget", "budget_name", "budget_epsilon", "delta", "relation"),
    *("unit", "probability", "graph", "agents", "rounds", "epochs", "separation", "round"),
    *("participation", "phase", "clip_norm", "batch_size", "horizon", "lanes", "sigma", "alpha"),
    *("attackers", "gossip_steps", "algorithm", "seed", "guarantee"),
    *("epsilon", "step_size", "lost", "distance", "victim"),
    *("kind", "weight", "rho", "variance", "series", "lag", "frequency", "taps", "trained"),
    *("gap", "gradient_gap", "gamma", "beta", "setting", "trials", "k", "at"),
    *("entries", "columns", "directions"),
)
"""Columns that say what a row is, not what was measured; so do all columns of words."""
_ACROSS = (
    *("budget_epsilon", "epsilon", "mu", "probability", "lost", "distance", "rounds", "round"),
    *("lag", "frequency", "taps", "variance", "directions"),
)
_UP = ("test_loss", "optimality_gap", "relative", "energy", "mean", "residual", "value", "share")
_SERIES = (
    *("series", "algorithm", "gradients", "policy", "mode", "graph", "mixing", "setting"),
    *("trained", "experiment"),
)
_NEVER_HELD = ("seed", "guarantee", "victim", "victim_label", "upper_bound")
_OF_LOSSES = ("attackers", "attacker_labels", "distance", "epsilon", "mu")
"""What differs between victims and attackers, whose losses are drawn from least to largest."""
_HELD_LAST = ("epsilon", "mu", "delta", "step_size")
_OF_NOISE = ("budget", "budget_name", "participation", "delta", "sound")
"""Settings that runs without privacy do not have."""
_KIND = "what"
"""Says what a row's other columns mean, and so never varies along a line."""
_SPREAD = 100


class Choice(NamedTuple):
    """What is drawn.

    Attributes:
        frame: Rows; where they are means already, with columns mean, min and max.
        x: Column across.
        y: Column up.
        label: What that is, in the records.
        series: Column that tells the lines apart.
        note: What was held and left out, for the caption, or None.
        ranges: Whether a line is a mean with least and largest, rather than repeated runs.
        logx: Whether x spans so much that its axis is better logarithmic.
        logy: The same of y.
        ticks: Names of x = 0, 1, ..., where those are agents that have names.
    """

    frame: "pandas.DataFrame"
    x: str
    y: str
    label: str
    series: str
    note: str | None
    ranges: bool
    logx: bool
    logy: bool
    ticks: tuple[str, ...] | None


def where(frame: "pandas.DataFrame", conditions: Iterable[str]) -> "pandas.DataFrame":
    """Rows that keep every condition ``column=value``.

    Args:
        frame: Rows.
        conditions: Each a column and its value, compared as numbers where both are.

    Returns:
        The rows.

    Raises:
        ValueError: For a condition without =, a column that is not there, or a value of no row.
    """
    for condition in conditions:
        name, equals, value = condition.partition("=")
        if not equals:
            raise ValueError(f"where is {condition!r}; write column=value, as in graph=ring")
        _validate.one_of("where", name, list(map(str, frame.columns)))
        kept = frame[frame[name].map(lambda cell, value=value: _same(cell, value))]
        if not len(kept):
            values = sorted({f"{cell:g}" if isinstance(cell, float) else str(cell)
                             for cell in frame[name]})  # fmt: skip
            shown = ", ".join(values[:12]) + (", ..." if len(values) > 12 else "")
            raise ValueError(f"where is {condition!r}, of which there is no row; it is {shown}")
        frame = kept
    return frame


def choose(
    frame: "pandas.DataFrame", x: str | None = None, y: str | None = None, series: str | None = None
) -> Choice:
    """Choose what to draw of records.

    The tuning phase of an experiment is left out, and so are rows without a value, and all rounds
    but the last of a run unless the round is across. Whatever else varies is held at its most
    frequent value.

    Args:
        frame: Rows of records.
        x: Column across; by default what varies of a budget, a distance, rounds.
        y: Column up; by default a test loss, an energy, the first metric.
        series: Column that tells the lines apart; by default the algorithm, if it varies.

    Returns:
        The choice.

    Raises:
        ValueError: For a column that is not there, or where nothing is left to draw.
    """
    columns = list(map(str, frame.columns))
    frame = _comparable(frame)
    for name, value in (("x", x), ("y", y), ("series", series)):
        if value is not None:
            _validate.one_of(name, value, columns)
    y = y or _default_y(frame, x)
    notes = []
    before = len(frame)
    frame, _ = _numbers(frame, y)
    frame = _plain_graphs(frame[frame[y].notna()])
    if len(frame) < before:
        notes.append(_left_out(before - len(frame), y))
    if "phase" in frame.columns and (frame["phase"] == "final").any():
        frame = frame[frame["phase"] == "final"]
    losses = "victim" in frame.columns
    x = x or (_place(frame) if losses else _default_x(frame, y))
    lines = [series] if series else _default_series(frame, x)
    for name in dict.fromkeys([x, "round"]):
        frame, dropped = _numbers(frame, name)
        if dropped:
            notes.append(f"{name.replace('_', ' ').capitalize()} {dropped} is left out.")
    if x != "round" and "round" in frame.columns and frame["round"].notna().any():
        runs = frame.groupby("rounds", dropna=False) if "rounds" in frame.columns else frame
        last = runs["round"].transform("max") if runs is not frame else frame["round"].max()
        frame = frame[frame["round"] == last]
    if "guarantee" in frame.columns:
        frame = frame.assign(participation=frame["guarantee"].map(captions.participation))
    # What is held may leave one line of the words that were to tell lines apart.
    sliced = [(each, *_slice(frame, x, y, each)) for each in lines]
    series, frame, held = next((it for it in sliced if _varies(it[1], it[0])), sliced[0])
    if held:
        notes.insert(0, f"At {', '.join(held)}.")
    if not (lines_of := frame[series].notna()).all():
        notes.append(_left_out((~lines_of).sum(), series))
        frame = frame[lines_of]
    spread = y == "mean" and {"min", "max"} <= set(columns)
    label = y
    ticks = _names(frame) if x == "victim" else None
    if losses:
        frame, y, spread = _over_victims(frame, x, y, series), "mean", True
    if not len(frame):
        raise ValueError(f"x is {x!r} and y {y!r}, of which no row has both; name other columns")
    if frame[series].dtype.kind in "fiu" and series not in (x, y):
        # A number alone would not say what it is.
        name = series.replace("_", " ")
        frame = frame.sort_values(series, kind="stable")
        frame = frame.assign(**{series: [f"{name} {value:g}" for value in frame[series]]})
    logs = (_wide(frame[x]), _wide(frame[y]))
    return Choice(frame, x, y, label, series, " ".join(notes) or None, spread, *logs, ticks)


def _left_out(rows: int, name: str) -> str:
    some = "1 row" if rows == 1 else f"{rows} rows"
    return f"{some} without {name.replace('_', ' ')} left out."


def _comparable(frame: "pandas.DataFrame") -> "pandas.DataFrame":
    """Lists as their texts, which can be told apart."""
    columns = {
        name: [str(cell) if isinstance(cell, list | dict) else cell for cell in frame[name]]
        for name in frame.columns
        if name != "guarantee" and any(isinstance(cell, list | dict) for cell in frame[name])
    }
    return frame.assign(**columns)


def _same(cell: Any, value: str) -> bool:
    if isinstance(cell, int | float | np.number) and not isinstance(cell, bool):
        try:
            return bool(np.isclose(float(cell), float(value), rtol=1e-12, atol=0))
        except ValueError:
            return False
    return str(cell).lower() == value.lower() if isinstance(cell, bool) else str(cell) == value


def _varies(frame: "pandas.DataFrame", name: str) -> bool:
    return name in frame.columns and frame[name].nunique() > 1


def _default_x(frame: "pandas.DataFrame", y: str) -> str:
    for name in _ACROSS:
        if name != y and name in frame.columns:
            values = _numbers(frame, name)[0][name].to_numpy(np.float64)
            if len(set(values[np.isfinite(values)])) > 1:
                return name
    for name in ("round", "rounds", "budget_epsilon", "epsilon", "probability", "victim"):
        if name in frame.columns and name != y:
            return name
    raise ValueError(f"x is None and the records have none of {', '.join(_ACROSS)}; name it")


def _place(frame: "pandas.DataFrame") -> str:
    """Where victims are: at a distance from the attacker, or each for itself."""
    away = "distance" in frame.columns and frame["distance"].notna().any()
    return "distance" if away else "victim"


def _names(frame: "pandas.DataFrame") -> tuple[str, ...] | None:
    if "victim_label" not in frame.columns:
        return None
    names = dict(zip(frame["victim"], map(str, frame["victim_label"]), strict=True))
    return tuple(names.get(i, "") for i in range(int(max(names)) + 1))


def _default_y(frame: "pandas.DataFrame", x: str | None) -> str:
    measured = [
        str(name)
        for name in frame.columns
        if name not in SETTINGS and name != x and frame[name].dtype.kind in "fi"
    ]
    for name in (*(each for each in _UP if each in measured), *measured):
        return name
    raise ValueError("y is None and the records have no column of numbers but settings; name it")


def _default_series(frame: "pandas.DataFrame", x: str) -> list[str]:
    there = [name for name in _SERIES if name in frame.columns and name != x]
    return [name for name in there if _varies(frame, name)] or there[:1] or [x]


def _numbers(frame: "pandas.DataFrame", name: str) -> tuple["pandas.DataFrame", str]:
    """The rows whose cell is a number, as such, and the cells of the others."""
    import pandas

    if name not in frame.columns or frame[name].dtype.kind in "fiu":
        return frame, ""
    values = pandas.to_numeric(frame[name], errors="coerce")
    others = ", ".join(sorted(set(map(str, frame[name][values.isna()]))))
    return frame.assign(**{name: values})[values.notna()], others


def _plain_graphs(frame: "pandas.DataFrame") -> "pandas.DataFrame":
    """Random graphs drawn anew for every seed are repetitions, not settings."""
    if not {"graph", "seed"} <= set(frame.columns):
        return frame
    pairs = list(zip(map(str, frame["graph"]), frame["seed"], strict=True))
    if not all(graph.startswith("er:") and graph.endswith(f":{seed}") for graph, seed in pairs):
        return frame
    return frame.assign(graph=[graph.rpartition(":")[0] for graph, _ in pairs])


def _slice(
    frame: "pandas.DataFrame", x: str, y: str, series: str
) -> tuple["pandas.DataFrame", list[str]]:
    """Hold what would mix different settings in one mean at its most frequent value."""
    held = []
    own = {*_NEVER_HELD, *_HELD_LAST, x, y, series}
    own |= set(_OF_LOSSES) if "victim" in frame.columns else set()
    words = [str(c) for c in frame.columns if frame[c].dtype.kind not in "fiu"]
    names = [c for c in dict.fromkeys([*SETTINGS, *words]) if c in frame.columns and c not in own]
    # What is tuned, or follows from a budget, only where repetitions would still be mixed.
    if "victim" not in frame.columns:
        names += [c for c in _HELD_LAST if c in frame.columns and c not in (x, y, series)]
    for name in names:
        keys = [series] if name == _KIND else [series, x]
        if name in _HELD_LAST:
            if "seed" not in frame.columns:
                continue
            keys.append("seed")
        if not (frame.groupby(keys, dropna=False)[name].nunique(dropna=False) > 1).any():
            continue
        value = frame[name].mode().iloc[0]
        kept = frame[name] == value
        if "algorithm" in frame.columns:
            # Runs without privacy have no budget, and are there beside any.
            without = frame["algorithm"] == "non_private"
            kept |= without & (name in _OF_NOISE and not (kept & without).any())
        frame = frame[kept]
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        held.append(f"{name.replace('_', ' ')} = {shown}")
    return frame, held


def _over_victims(frame: "pandas.DataFrame", x: str, y: str, series: str) -> "pandas.DataFrame":
    """Mean, least and largest over the victims."""
    grouped = frame.groupby([series, x], sort=False)[y]
    return grouped.agg(["mean", "min", "max"]).reset_index()


def _wide(column: Any) -> bool:
    values = column.to_numpy(np.float64)
    values = values[np.isfinite(values)]
    return bool(len(values) and values.min() > 0 and values.max() >= _SPREAD * values.min())
