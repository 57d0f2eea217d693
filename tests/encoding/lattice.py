"""The law of discrete Gaussians, samplers that break it, and the test that tells them apart."""

from fractions import Fraction

import numpy as np
import scipy.stats

VARIANCES = [Fraction(1, 4), Fraction(2, 3), 1, 4, Fraction(50, 3)]


def law(variance: int | Fraction, minimum: int, maximum: int) -> np.ndarray:
    """Return the probabilities of least, ..., most."""
    reach = np.arange(-2000, 2001)
    weights = np.exp(-(reach**2) / (2 * float(variance)))
    return (weights / weights.sum())[minimum + 2000 : maximum + 2001]


def moment(variance: int | Fraction, power: int) -> float:
    """Return E y^power."""
    return float(np.sum(law(variance, -500, 500) * np.arange(-500, 501.0) ** power))


def fit(values: np.ndarray, variance: int | Fraction) -> float:
    """Return the p-value of a chi-square test; what is rarer than 5 in all is one class a side."""
    end = 40 * int(float(variance) ** 0.5 + 1)
    reference = law(variance, -end, end) * values.size
    counts = np.bincount(np.clip(values, -end, end) + end, minlength=2 * end + 1)
    inner = np.flatnonzero(reference >= 5)
    first = inner[0]
    last = inner[-1] + 1
    parts = [slice(0, first), slice(last, None)]
    observed = [*counts[first:last], *(counts[part].sum() for part in parts)]
    expected = [*reference[first:last], *(reference[part].sum() for part in parts)]
    return float(scipy.stats.chisquare(observed, expected, sum_check=False).pvalue)


def same(first: np.ndarray, second: np.ndarray) -> float:
    """Return the p-value of two samples having one law."""
    end = int(max(np.abs(first).max(), np.abs(second).max()))
    counts = np.array([np.bincount(case + end, minlength=2 * end + 1) for case in (first, second)])
    common = counts.sum(0) >= 20
    table = np.column_stack([counts[:, common], counts[:, ~common].sum(1)])
    return float(scipy.stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue)


class Script:
    """A stream whose words are given, and zero after that."""

    def __init__(self, words: list[int]) -> None:
        self.left = list(words)

    def words(self, count: int) -> np.ndarray:
        taken = self.left[:count]
        self.left = self.left[count:]
        return np.array(taken + [0] * (count - len(taken)), np.uint32)


class Coins:
    """Events of rational probability, decided by a real whose digits are words.

    A new real for every event: one word after the other narrows the interval it lies in, in
    fractions, until the event is decided.
    """

    def __init__(self, words) -> None:
        self.words = iter(words)

    def both(self, first: Fraction, second: Fraction) -> bool:
        """Two events by the two words of each pair; an answer as soon as one of them failed."""
        places = [Fraction(0)] * 2
        width = Fraction(1)
        while True:
            width /= 2**32
            pair = next(self.words)
            places = [place + width * word for place, word in zip(places, pair, strict=True)]
            ends = list(zip(places, (first, second), strict=True))
            if any(place >= end for place, end in ends):
                return False
            if all(place + width <= end for place, end in ends):
                return True

    def run(self, rest: Fraction) -> bool:
        """True with probability exp(-rest)."""
        length = 1 if rest < 1 else 2
        while self.both(rest, Fraction(1, length)):
            length += 1
        return length % 2 == 1


def replayed(words, variance: Fraction, centre: int) -> int:
    """Return the number that pairs of words lead to, computed in fractions."""
    coins = Coins(words)
    top = Fraction(variance).numerator
    bottom = Fraction(variance).denominator
    while True:
        word, sign = next(coins.words)
        if word * top % 2**32 < 2**32 % top:
            continue
        uniform = word * top >> 32
        runs = 0
        while coins.run(Fraction(1)):
            runs += 1
        size = (uniform + top * runs) // (bottom * centre)
        if size == 0 and sign >> 31:
            continue
        exponent = Fraction(uniform, top) + (size - centre) ** 2 / (2 * Fraction(variance))
        while exponent >= 1 and coins.run(Fraction(1)):
            exponent -= 1
        if exponent < 1 and coins.run(exponent):
            return -size if sign >> 31 else size


def rounded_twin(rng: np.random.Generator, count: int, variance: int, bits: int) -> np.ndarray:
    """Rejection with probabilities of so many bits: what floats do, told sooner."""
    selection: list[np.ndarray] = []
    scale = np.sqrt(variance)
    while sum(map(len, selection)) < count:
        sizes = rng.geometric(1 - np.exp(-1 / scale), count) - 1
        signs = rng.choice([-1, 1], count)
        odds = np.exp(-((sizes - scale) ** 2) / (2 * variance))
        odds = np.round(odds * 2**bits) / 2**bits
        fine = (rng.random(count) < odds) & ~((sizes == 0) & (signs < 0))
        selection.append((sizes * signs)[fine])
    return np.concatenate(selection)[:count]
