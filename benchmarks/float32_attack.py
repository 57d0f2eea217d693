"""What float32 noise of a simulation gives away: python benchmarks/float32_attack.py

Of Laplace and Gaussian noise, as `dpjax.transforms.noise.scheduled` adds it to one number:

- ``end`` rows: the largest number drawn at scale 1, the nearest to zero, and the probability that a
  real variable lies beyond the largest.
- ``grid`` rows: of all float32 numbers from ``low`` to ``high``, the share that a draw can give.
- ``attack`` rows: a number is ``state`` or ``other``, ``shift`` times the noise's scale away, and
  an attacker sees the float32 sum of it and the noise. ``excluded`` is the probability that no draw
  leads from the other to what is seen: the attacker is then certain, so that no epsilon holds with
  a delta below it. ``real`` is the total variation distance, the largest delta at epsilon 0 of real
  noise; ``messages`` is how many such numbers exclude the other with a probability of 99 %.
  ``unchanged`` is how often the noise is rounded away.

All 2^24 normals are counted. Of Laplace variables there are too many: ``--draws`` random ones are
taken, for each of which the attacker looks for words of the generator that lead to the same sum.
"""

import math

import jax
import numpy as np
from scipy import stats

from _timing import Bench
from dpjax.transforms import variates

CASES = ((0.0, 1.0), (1 / 3, 1.0), (1.0, 1.0), (1.0, 1e-2), (1.0, 1e-4), (1.0, 1e-7))
"""Numbers and scales of the noise."""
SHIFTS = (0.001, 0.1, 1.0)
BINADES = (-20, -10, -3, -1, 0, 1)
NEAREST = 4

_laplace = jax.jit(variates.laplaces_of_words, static_argnums=2)
_normal = jax.jit(variates.normals_of_words)


def every_normal() -> np.ndarray:
    """All float32 normals, [2^24], each as likely as the others."""
    return np.asarray(_normal(np.arange(2**24, dtype=np.uint32) << np.uint32(8)))


def random_laplaces(count: int, seed: int = 0) -> np.ndarray:
    """Float32 Laplace variables, from random words."""
    high, low = np.random.default_rng(seed).integers(0, 2**32, (2, count), dtype=np.uint32)
    return np.asarray(_laplace(high, low, np.float32))


def of_tails(tails: np.ndarray, beyond: np.ndarray | bool, negative: np.ndarray) -> np.ndarray:
    """The float32 variables of whose hash 62 bits are this probability, in (0, 1/2)."""
    bits = (np.clip(tails, 2.0**-40, 0.5).astype(np.float64) * 2.0**63).astype(np.uint64)
    bits = np.minimum(bits, np.uint64(2**62 - 1))
    high = (bits >> np.uint64(32)).astype(np.uint32) + (np.uint32(1 << 30) * np.uint32(beyond))
    high = high + np.uint32(1 << 31) * negative.astype(np.uint32)
    return np.asarray(_laplace(high, bits.astype(np.uint32), np.float32))


def has_words(messages: np.ndarray, state: float, scale: float) -> np.ndarray:
    """Whether some words of the generator lead from the state to each message."""
    here = np.float32(state)
    times = np.float32(scale)
    expected = (messages.astype(np.float64) - float(here)) / float(times)
    result = np.zeros(messages.shape, bool)
    for beyond in (True, False):
        size = np.abs(expected)
        tail = np.exp(-size) if beyond else -np.expm1(-size)
        near = np.clip(tail, 2.0**-40, 0.5).astype(np.float32)
        for step in range(-NEAREST, NEAREST + 1):
            # Floats a few places up or down.
            tried = (near.view(np.int32) + np.int32(step)).view(np.float32)
            result |= here + times * of_tails(tried, beyond, expected < 0) == messages
    return result


def attack(kind: str, state: float, scale: float, shift: float, draws: np.ndarray) -> dict:
    """The probability of a message to which no draw leads from the other number."""
    here = np.float32(state)
    other = np.float32(state + shift * scale)
    messages = here + np.float32(scale) * draws
    if kind == "laplace":
        # Where the own state is not found, the search is at fault.
        if not has_words(messages[:100_000], here, scale).all():
            raise RuntimeError("the search misses words that lead to a message")
        excluded = float(1 - has_words(messages, other, scale).mean())
    else:
        reached = np.unique(other + np.float32(scale) * draws)
        excluded = float(1 - np.isin(messages, reached).mean())
    needed = math.ceil(math.log(0.01) / math.log1p(-excluded)) if 0 < excluded < 1 else None
    return {
        "kind": kind, "state": state, "scale": scale, "shift": shift, "excluded": excluded,
        "real": distance(kind, shift), "messages": needed,
        "unchanged": float((messages == here).mean()),
    }  # fmt: skip


def share_of_floats(kind: str, exponent: int, draws: np.ndarray) -> float:
    """Of the 2^23 float32 numbers from 2^exponent to its double, the share that is ever drawn."""
    low = 2.0**exponent
    high = 2.0 ** (exponent + 1)
    if kind == "normal":
        inside = draws[(draws >= low) & (draws < high)]
        return len(np.unique(inside)) / 2**23
    values = []
    for beyond, ends in (
        (True, (math.exp(-high), math.exp(-low))),
        (False, (-math.expm1(-low), -math.expm1(-high))),
    ):
        first, last = np.clip(ends, 2.0**-40, 0.5).astype(np.float32).view(np.int32)
        tails = np.arange(first - 2, last + 3, dtype=np.int32).view(np.float32)
        values.append(of_tails(tails, beyond, np.zeros(tails.shape, bool)))
    inside = np.concatenate(values)
    return len(np.unique(inside[(inside >= low) & (inside < high)])) / 2**23


def ends(kind: str, draws: np.ndarray) -> tuple[float, float, float]:
    """The largest number, the nearest to zero, the probability of a real one beyond the largest."""
    if kind == "normal":
        size = np.abs(draws)
        return float(size.max()), float(size.min()), float(2 * stats.norm.sf(float(size.max())))
    words = np.array([[1 << 30, 0], [0, 0]], np.uint32)
    largest, nearest = np.asarray(_laplace(words[0], words[1], np.float32))
    return float(largest), float(nearest), math.exp(-float(largest))


def distance(kind: str, shift: float) -> float:
    """Total variation distance of real noise of scale 1 from itself, moved."""
    return (
        -math.expm1(-shift / 2) if kind == "laplace" else 2 * float(stats.norm.cdf(shift / 2)) - 1
    )


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--draws", type=int, default=1_000_000)
    options = bench.parse(argv)
    drawn = {"laplace": random_laplaces(options.draws), "normal": every_normal()}
    for kind, draws in drawn.items():
        largest, nearest, beyond = ends(kind, draws)
        bench.row(what="end", kind=kind, largest=largest, nearest=nearest, probability=beyond)
    for kind, draws in drawn.items():
        for exponent in BINADES:
            share = share_of_floats(kind, exponent, draws)
            bench.row(
                what="grid", kind=kind, low=2.0**exponent, high=2.0 ** (exponent + 1), share=share
            )
    for kind, draws in drawn.items():
        for state, scale in CASES:
            for shift in SHIFTS:
                bench.row(what="attack", **attack(kind, state, scale, shift, draws))
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
