"""Published claims against records: gains paired over seeds, and plain verdicts on them.

A verdict is one of `VERDICTS`; where runs cannot tell, the reason follows a colon. It is on the
runs alone, whatever their size beside the paper's.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from _common import tables
from dpjax import _validate

if TYPE_CHECKING:
    import pandas

__all__ = [
    *("NO", "UNTOLD", "VERDICTS", "YES"),
    *("Judged", "below", "gains", "joined", "margin", "part", "unequal", "verdict"),
]

VERDICTS = YES, NO, UNTOLD = "reproduced", "not reproduced", "undecided"


class Judged(NamedTuple):
    """A published claim and what records say of its parts.

    Attributes:
        source: Where it stands, such as "Fig. 4".
        words: What is claimed.
        parts: A row for each part: "of", numbers, "verdict".
    """

    source: str
    words: str
    parts: tuple[dict[str, Any], ...]

    @property
    def verdict(self) -> str:
        """Of all parts together."""
        words = [item["verdict"] for item in self.parts]
        return words[0] if len(words) == 1 else joined(*words)

    def text(self) -> str:
        """The claim, its verdict, and its parts as a table."""
        return f"{self.source}: {self.words}: {self.verdict}\n{tables.text(self.parts)}"


def gains(
    frame: "pandas.DataFrame", base: Any, value: str, column: str = "design"
) -> list[dict[str, Any]]:
    """How much more than one method each other one has, on the same seeds.

    Args:
        frame: Tidy rows, one for each method and seed.
        base: Entry of ``column`` that the others are compared with.
        value: Column of numbers, larger is better.
        column: Column that tells methods apart.

    Returns:
        A row for each other method, in the order of their first rows: "method", "gain in
        {value}", its "standard error", "seeds" and `margin`.

    Raises:
        ValueError: As `_common.tables.paired`.
    """
    rows = []
    for name in dict.fromkeys(frame[column]):
        if name != base:
            rows.append({"method": name, **_gain(frame, base, name, value, column)})
    return rows


def _gain(
    frame: "pandas.DataFrame", base: Any, better: Any, value: str, column: str
) -> dict[str, Any]:
    pair = tables.paired(frame, base, better, value, column=column)
    row = {f"gain in {value}": pair.mean, "standard error": pair.standard_error}
    return row | {"seeds": pair.count, "margin": margin(pair.standard_error, pair.count)}


def margin(error: float, seeds: int) -> float:
    """Half the 95 % interval of a mean of normal differences, by Student's t.

    Args:
        error: The mean's standard error.
        seeds: Of how many differences.

    Returns:
        The margin; nan for one seed.
    """
    from scipy import stats

    return math.nan if seeds < 2 else float(stats.t.ppf(0.975, seeds - 1)) * error


def verdict(gain: float, margin: float, minimum: float = 0.0) -> str:
    """Whether a gain is what is claimed: more than chance, and at least so much.

    Args:
        gain: The mean gain.
        margin: Half its interval; nan for one seed.
        minimum: What is claimed.

    Returns:
        `YES` above 0 by more than the margin and not below the claim; `NO` below the claim by more
        than the margin, or for no number; else `UNTOLD`, "one seed" or "within chance".
    """
    if not (math.isnan(gain) or math.isfinite(margin)):
        return f"{UNTOLD}: one seed"
    if gain > margin and gain >= minimum:
        return YES
    return f"{UNTOLD}: within chance" if gain + margin >= minimum else NO


def unequal(gain: float, margin: float) -> str:
    """Whether two methods differ, whichever is better.

    Args:
        gain: The mean difference.
        margin: Half its interval; nan for one seed.

    Returns:
        `YES` beyond the margin, else `UNTOLD`, "one seed" or "within chance".
    """
    return verdict(abs(gain), margin)


def part(
    frame: "pandas.DataFrame",
    better: Any,
    worse: Any,
    value: str,
    *,
    of: str,
    judge: Callable[[float, float], str] = verdict,
    column: str = "series",
) -> dict[str, Any]:
    """One part of a claim: a gain paired over seeds, and what it says.

    Args:
        frame: Tidy rows, one for each of the two and each seed.
        better: Entry of ``column`` claimed to have the larger values.
        worse: Entry of ``column`` that it is compared with.
        value: Column of numbers.
        of: What the part is about.
        judge: ``judge(gain, margin) -> verdict``, see `margin`.
        column: Column that tells the two apart.

    Returns:
        "of", "gain in {value}", "standard error", "seeds" and "verdict", which is `UNTOLD`: "not
        run", without numbers, where one of the two is in no row, and "diverged" where a run of
        ``worse`` has no number, which no gain measures.

    Raises:
        ValueError: As `_common.tables.paired`.
    """
    if not {better, worse} <= set(frame[column]):
        return {"of": of, "verdict": f"{UNTOLD}: not run"}
    row = _gain(frame, worse, better, value, column)
    text = judge(row[f"gain in {value}"], row.pop("margin"))
    if frame.loc[frame[column] == worse, value].isna().any():
        text = f"{UNTOLD}: diverged"
    return {"of": of, **row, "verdict": text}


def below(gain: float, margin: float, maximum: float) -> str:
    """Whether a gain is less than what is claimed, by more than chance.

    Args:
        gain: The mean gain.
        margin: Half its interval; nan for one seed.
        maximum: What it shall be less than.

    Returns:
        `YES` where it is less by more than the margin, `NO` where it is more by that or no number,
        else `UNTOLD`, "one seed" or "within chance".
    """
    if math.isnan(gain) or gain - margin >= maximum:
        return NO
    if gain + margin < maximum:
        return YES
    return f"{UNTOLD}: {'within chance' if math.isfinite(margin) else 'one seed'}"


def joined(*verdicts: str) -> str:
    """One verdict on a claim that several parts hold, all of them.

    Args:
        verdicts: Of the parts: `VERDICTS`, or these with more words.

    Returns:
        `NO` where one part is not reproduced, else `UNTOLD` where one cannot be told, else `YES`.

    Raises:
        ValueError: For no verdicts, or what is none.
    """
    words = [item.partition(":")[0] for item in verdicts]
    if not words:
        raise ValueError("verdicts is empty; give at least one")
    for word in words:
        _validate.one_of("verdicts", word, VERDICTS)
    return next(word for word in (NO, UNTOLD, YES) if word in words)
