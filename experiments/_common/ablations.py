"""Claims of DOPPLER's ablations and of its Table 3, judged on tidy rows.

Rows have a ``series``, a ``seed``, the ``round`` of a measurement, the ``rounds`` of the run, and
``points`` of accuracy; with and without a filter the series are "{place}, {filter}" and
"{place}, no filter".
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from _common import claims

if TYPE_CHECKING:
    import pandas

__all__ = [
    "clips",
    "early",
    "filters",
    "finetuning",
    "last",
    "networks",
    "optimizers",
    "schedules",
    "steps",
    "texts",
    "waves",
]

_NONE = "no filter"


def last(rows: "pandas.DataFrame") -> "pandas.DataFrame":
    """Return the rows of the last round.

    Args:
        rows: Tidy rows.
    """
    return rows[rows["round"] == rows["rounds"]]


def early(rows: "pandas.DataFrame") -> "pandas.DataFrame":
    """Return the rows of the first measured round, where the last is another.

    Args:
        rows: Tidy rows.
    """
    first = rows.groupby("series")["round"].transform("min")
    return rows[(rows["round"] == first) & (first < rows["rounds"])]


def optimizers(
    rows: "pandas.DataFrame", filter: str, places: Mapping[str, Sequence[str]]
) -> list[claims.Judged]:
    """Fig. 4: every optimizer is better behind a filter at every budget, by 3 to 10 points.

    Args:
        rows: Tidy rows.
        filter: What series call it.
        places: Optimizer -> its places, one a budget.
    """
    end = last(rows)
    results = {
        f"{name} is better behind a filter at every budget": [
            _gain(end, filter, subject) for subject in place
        ]
        for name, place in places.items()
    }
    entries = [of for own in places.values() for of in own]
    results["the gain is 3 to 10 points"] = [_gain(end, filter, of, _three) for of in entries]
    return _listed("Fig. 4", results)


def networks(rows: "pandas.DataFrame", filter: str, places: Sequence[str]) -> list[claims.Judged]:
    """Fig. 7: every network is better behind a filter.

    Args:
        rows: Tidy rows.
        filter: What series call it.
        places: Networks.
    """
    parts = [_gain(last(rows), filter, place) for place in places]
    return _listed("Fig. 7", {"every network is better behind a filter": parts})


def filters(rows: "pandas.DataFrame") -> list[claims.Judged]:
    """Fig. 8: coefficients matter, the first order is enough, the second smooths too much.

    Args:
        rows: Tidy rows whose series are filters by name, and "no filter".
    """
    end = last(rows)
    pairs = (("first v1", "first v2"), ("f1", "f2"), ("f3", "f4"), ("f5", "f6"))
    enough = "the first order is enough: better than none, the second ahead by less than a point"
    return _listed(
        "Fig. 8",
        {
            "filters of other coefficients have another accuracy": [
                _part(end, *pair, claims.unequal) for pair in pairs
            ],
            enough: [_part(end, "first v1", _NONE), _part(end, "second", "first v1", _one)],
            "the second order is slower early": [_part(early(rows), "first v1", "second")],
            "and worse in the end": [_part(end, "first v1", "second")],
        },
    )


def clips(rows: "pandas.DataFrame") -> list[claims.Judged]:
    """Fig. 9: automatic clipping is better than Abadi's, flat than per layer.

    Args:
        rows: Tidy rows whose series are "automatic, flat", "Abadi, per layer" and so on.
    """
    end = last(rows)
    return _listed(
        "Fig. 9",
        {
            "automatic clipping is better than Abadi's": [
                _part(end, f"automatic, {way}", f"Abadi, {way}") for way in ("flat", "per layer")
            ],
            "one clip of all layers is better than one each": [
                _part(end, f"{kind}, flat", f"{kind}, per layer") for kind in ("automatic", "Abadi")
            ],
        },
    )


def steps(rows: "pandas.DataFrame", names: Sequence[str]) -> list[claims.Judged]:
    """Fig. 10: the best step is inside the grid, larger ones are fast and end worse, smaller slow.

    The best one is that of the same runs, as in a figure, which favours it a little.

    Args:
        rows: Tidy rows, a series for each step size.
        names: These series from the smallest step to the largest, three or more.

    Raises:
        ValueError: For fewer than three steps.
    """
    if len(names) < 3:
        raise ValueError(f"names is {list(names)}; give three steps or more, ends and a middle")
    low, *inner, high = names
    end = last(rows)
    begin = early(rows)
    scores = end.groupby("series")["points"].mean()
    # A run that diverged is nobody's best.
    best = max(inner, key=lambda name: np.nan_to_num(scores.get(name, -1.0), nan=-1.0))
    return _listed(
        "Fig. 10",
        {
            "the best step size is inside the grid": [
                _part(end, best, low), _part(end, best, high),
            ],
            "the largest is faster early": [_part(begin, high, best)],
            "and worse in the end": [_part(end, best, high)],
            "the smallest is slow early": [_part(begin, best, low)],
        },
    )  # fmt: skip


def schedules(rows: "pandas.DataFrame") -> list[claims.Judged]:
    """Fig. 11: a cosine with warm-up is slower early and better in the end.

    Args:
        rows: Tidy rows whose series are "cosine" and "constant".
    """
    return _listed(
        "Fig. 11",
        {
            "the schedule is better in the end of a long run": [
                _part(last(rows), "cosine", "constant")
            ],
            "the schedule is slower early": [_part(early(rows), "constant", "cosine")],
        },
    )


def finetuning(rows: "pandas.DataFrame", filter: str, places: Sequence[str]) -> list[claims.Judged]:
    """Fig. 12: less than a point is gained at small budgets, and less at large ones.

    Args:
        rows: Tidy rows.
        filter: What series call it.
        places: One a budget, from the smallest to the largest.
    """
    import pandas

    end = last(rows)
    wide = end.pivot(index="seed", columns="series", values="points")
    ends = (places[0], places[-1])
    parts = []
    for place in ends:
        pair = (f"{place}, {filter}", f"{place}, {_NONE}")
        if {*pair} <= {*wide.columns}:
            gain = wide[pair[0]] - wide[pair[1]]
            parts.append(gain.rename("points").reset_index().assign(series=place))
    first = _gain(end, filter, ends[0])
    extra = {"of": f"{ends[0]} over {ends[1]}", "verdict": f"{claims.UNTOLD}: one budget"}
    if ends[0] != ends[1]:
        extra["verdict"] = f"{claims.UNTOLD}: not run"
        if parts:
            extra = _part(pandas.concat(parts, ignore_index=True), *ends)
    if first["verdict"] == claims.NO:
        # What loses gains neither little nor more.
        extra["verdict"] = claims.NO
    return _listed(
        "Fig. 12",
        {
            "it gains at the smallest budget": [first],
            "and less than a point": [_gain(end, filter, ends[0], _slight)],
            "it gains more at the smallest budget than at the largest": [extra],
        },
    )


def texts(rows: "pandas.DataFrame", filter: str, places: Sequence[str]) -> list[claims.Judged]:
    """Table 3: a slight gain over the corrected Adam, none to speak of over the plain one.

    Args:
        rows: Tidy rows; the plain Adam's series are "{place}, uncorrected".
        filter: What series call it.
        places: One a budget.
    """
    end = last(rows)
    over = [_part(end, f"{place}, {filter}", f"{place}, uncorrected", _one) for place in places]
    return _listed(
        "Table 3",
        {
            "it gains over AdamBC at every budget": [
                _gain(end, filter, subject) for subject in places
            ],
            "and less than a point over DPAdam without correction": over,
        },
    )


def waves(rows: "pandas.DataFrame") -> list[claims.Judged]:
    """Fig. 5: what is slow passes a low-pass filter, what is fast does not, a mean is kept.

    Args:
        rows: One a filter: its ``series``, the amplitudes kept of a ``slow`` and of a ``fast`` wave
            and the ``drift``, how far a constant comes out from itself at most.
    """
    half = 0.5**0.5
    passed = []
    selection = []
    for row in rows[rows["series"] != _NONE].to_dict("records"):
        text = claims.YES if row["slow"] > half > row["fast"] else claims.NO
        numbers = {"of": row["series"], "slow wave kept": row["slow"]}
        passed.append(numbers | {"fast wave kept": row["fast"], "verdict": text})
        off = {"of": row["series"], "constant off by": row["drift"]}
        selection.append(off | {"verdict": claims.YES if row["drift"] < 1e-5 else claims.NO})
    words = ("a slow wave passes, a fast one does not", "a mean stays as it is")
    return _listed("Fig. 5", dict(zip(words, (passed, selection), strict=True)))


def _three(gain: float, margin: float) -> str:
    """The least of the points that the paper says a filter gains."""
    return claims.verdict(gain, margin, 3.0)


def _one(gain: float, margin: float) -> str:
    return claims.below(gain, margin, 1.0)


def _slight(gain: float, margin: float) -> str:
    """A gain, but less than a point."""
    return claims.NO if claims.verdict(gain, margin) == claims.NO else _one(gain, margin)


def _part(
    rows: Any, better: str, worse: str, judge: Callable[[float, float], str] = claims.verdict
) -> dict[str, Any]:
    return claims.part(rows, better, worse, "points", of=f"{better} over {worse}", judge=judge)


def _gain(
    rows: Any, filter: str, subject: str, judge: Callable[[float, float], str] = claims.verdict
) -> dict[str, Any]:
    pair = (f"{subject}, {filter}", f"{subject}, {_NONE}")
    return claims.part(rows, *pair, "points", of=subject, judge=judge)


def _listed(source: str, result: Mapping[str, list[dict[str, Any]]]) -> list[claims.Judged]:
    return [claims.Judged(source, words, tuple(parts)) for words, parts in result.items()]
