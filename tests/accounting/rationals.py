"""Losses of linear views in rational numbers, and badly scaled random views to compare with.

Nothing here uses the package: impulses are simulated and orthogonalised in fractions, so that
ranks are decided exactly; only the last root is taken in 80 digits.
"""

from fractions import Fraction

import mpmath
import numpy as np

STATE = 3
AGENTS = 5
NOISE = 5
ROWS = 3


def _orthogonal(parts, rounds):
    """Rows of A and B with those of B orthogonal, their squares, and who shows without noise."""
    f, gamma, sigma, h, j, d = (np.frompyfunc(Fraction, 1, 1)(part) for part in parts)
    n = gamma.shape[1]
    q = sigma.shape[1]
    state = np.full((len(f), rounds * (n + q)), Fraction(0), object)
    results = []
    shows = np.zeros(rounds * n, bool)
    for t in range(rounds):
        mine = slice(t * n, t * n + n)
        noise = slice(rounds * n + t * q, rounds * n + t * q + q)
        rows = h @ state
        rows[:, mine] += j
        rows[:, noise] += d
        state = f @ state
        state[:, mine] += gamma
        state[:, noise] += sigma
        for row in rows:
            for other, square in results:
                share = _dot(other[rounds * n :], row[rounds * n :]) / square
                if share:
                    row = row - share * other
            square = _dot(row[rounds * n :], row[rounds * n :])
            if square:
                results.append((row, square))
            else:
                shows |= row[: rounds * n] != 0
    return results, shows


def _dot(left, right):
    return sum((a * b for a, b in zip(left, right, strict=True) if a and b), Fraction(0))


def losses(parts, participation):
    """Return mu of every agent in 80 digits, for given gradients: the sum of absolute values."""
    rounds = participation.rounds
    n = parts[1].shape[1]
    result, shows = _orthogonal(parts, rounds)
    results = []
    for u in range(n):
        if shows[u::n].any():
            results.append(mpmath.inf)
            continue
        largest = Fraction(0)
        for pattern in participation.patterns:
            total = Fraction(0)
            for s in pattern:
                for t in pattern:
                    entry = sum((r[s * n + u] * r[t * n + u] / v for r, v in result), Fraction(0))
                    total += abs(entry)
            largest = max(largest, total)
        with mpmath.workdps(80):
            results.append(mpmath.sqrt(mpmath.mpf(largest.numerator) / largest.denominator))
    return results


def condition(parts, rounds):
    """Condition number of the rows of B in units of their own noise; infinite without full rank."""
    f, _, sigma, h, _, d = (np.frompyfunc(Fraction, 1, 1)(part) for part in parts)
    q = sigma.shape[1]
    state = np.full((len(f), rounds * q), Fraction(0), object)
    scaled = []
    for t in range(rounds):
        rows = h @ state
        current = slice(t * q, t * q + q)
        rows[:, current] += d
        state = f @ state
        state[:, current] += sigma
        for row in rows:
            if row.any():
                with mpmath.workdps(40):
                    square = _dot(row, row)
                    root = mpmath.sqrt(mpmath.mpf(square.numerator) / square.denominator)
                    values = [mpmath.mpf(v.numerator) / v.denominator / root for v in row]
                    scaled.append([float(v) for v in values])
    if not scaled:
        return 1.0
    values = np.linalg.svd(np.array(scaled), compute_uv=False)
    complete = len(scaled) <= len(scaled[0]) and values[-1] > 0
    return float(values[0] / values[-1]) if complete else np.inf


def draw(random):
    """Six matrices of one shape, of fewer states, agents, noises or rows by zeros, badly scaled.

    By turns normal, of small whole numbers (with ties), of entries that differ by up to 1e30, or
    of a few values; in units of 1e-15 to 1e15 for every row, state, noise and agent.
    """
    kind = random.integers(4)
    span = random.choice([0, 3, 15])
    s = random.integers(0, STATE + 1)
    n = random.integers(1, AGENTS + 1)
    q = random.integers(1, NOISE + 1)
    m = random.integers(1, ROWS + 1)
    row, state, noise, agent = (10.0 ** random.uniform(-span, span, size) for size in (m, s, q, n))
    if random.random() < 0.5:
        noise = np.ones(q)
    parts = []
    for shape, size, left, right in (
        ((STATE, STATE), (s, s), state, 1 / state),
        ((STATE, AGENTS), (s, n), state, agent),
        ((STATE, NOISE), (s, q), state, noise),
        ((ROWS, STATE), (m, s), row, 1 / state),
        ((ROWS, AGENTS), (m, n), row, agent),
        ((ROWS, NOISE), (m, q), row, noise),
    ):
        if kind == 0:
            block = random.normal(size=size)
        elif kind == 1:
            block = random.integers(-1, 2, size).astype(float)
        elif kind == 2:
            block = random.normal(size=size) * 10.0 ** random.uniform(-span, span, size)
        else:
            block = random.choice([0, 0, 1.0, 0.5, 1 / 3, 1e-9, 1e-13], size)
        if kind != 2:
            block = block * left[:, None] * right
        block[random.random(size) < random.choice([0.1, 0.4])] = 0.0
        parts.append(np.zeros(shape))
        parts[-1][: size[0], : size[1]] = block
    parts[5][:m][random.random(m) < 0.15] = 0.0
    parts[3][:m][random.random(m) < 0.1] = 0.0
    parts[2][:s][random.random(s) < 0.2] = 0.0
    return parts
