"""The bound against the supremum over unit vectors, found by optimisation, and over signs."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax.mechanism import temporal
from dpjax.mechanism.participation import Participation
from dpjax.mechanism.temporal import sensitivity
from tests.mechanism.patterns import is_exact

NEGATIVE = np.array([[1, -0.5, -0.5], [-0.5, 1, -0.5], [-0.5, -0.5, 1]])


def root_of(gram: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(gram)
    return np.sqrt(np.maximum(values, 0))[:, None] * vectors.T


def by_signs(gram: np.ndarray) -> float:
    signs = itertools.product([-1.0, 1.0], repeat=len(gram))
    return max(float(np.array(e) @ gram @ np.array(e)) for e in signs)


def by_vectors(gram: np.ndarray, starts: int = 20) -> float:
    """Maximise sum X_st <u_s, u_t> over unit vectors, one at a time, from random starts."""
    rng = np.random.default_rng(0)
    k = len(gram)
    best = 0.0
    for _ in range(starts):
        u = rng.normal(size=(k, k))
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        for _ in range(300):
            for s in range(k):
                pull = gram[s] @ u - gram[s, s] * u[s]
                if np.linalg.norm(pull) > 1e-12:
                    u[s] = pull / np.linalg.norm(pull)
        best = max(best, float(np.sum(gram * (u @ u.T))))
    return best


def worst(measure, strategy: np.ndarray, participation: Participation) -> float:
    gram = strategy.T @ strategy
    return max(measure(gram[np.ix_(rounds, rounds)]) for rounds in participation.patterns)


def by_formula(gram: np.ndarray) -> float:
    return float(np.abs(gram).sum())


def test_counter_example() -> None:
    everywhere = Participation(3, 3, 1)
    strategy = root_of(NEGATIVE)
    assert by_signs(NEGATIVE) == pytest.approx(4.0)
    assert by_vectors(NEGATIVE) == pytest.approx(4.5)
    assert sensitivity(strategy, everywhere) ** 2 == pytest.approx(6.0)
    assert not is_exact(strategy, everywhere)


PARTICIPATIONS = [(6, 1, 6), (6, 2, 3), (6, 3, 2), (6, 2, 2), (6, 3, 1), (5, 2, 4)]


@given(st.integers(0, 10_000), st.sampled_from(PARTICIPATIONS))
def test_bound_is_above_vectors_and_vectors_above_signs(seed, fields) -> None:
    participation = Participation(*fields)
    rng = np.random.default_rng(seed)
    strategy = np.tril(rng.normal(size=(fields[0], fields[0])))
    bound = sensitivity(strategy, participation) ** 2
    vectors = worst(lambda gram: by_vectors(gram, 4), strategy, participation)
    assert bound >= vectors * (1 - 1e-12)
    assert vectors >= worst(by_signs, strategy, participation) * (1 - 1e-6)
    assert bound == pytest.approx(worst(by_formula, strategy, participation), rel=1e-12)
    if is_exact(strategy, participation):
        assert vectors == pytest.approx(bound, rel=1e-9)


@given(st.integers(0, 10_000), st.sampled_from(PARTICIPATIONS))
def test_equality_where_gram_is_non_negative(seed, fields) -> None:
    participation = Participation(*fields)
    rng = np.random.default_rng(seed)
    strategy = np.tril(rng.uniform(0.1, 1, size=(fields[0], fields[0])))
    assert is_exact(strategy, participation)
    bound = sensitivity(strategy, participation)
    # Equal gradients, all of norm 1 and in one direction, reach it.
    reached = max(
        np.linalg.norm(strategy[:, rounds].sum(axis=1)) for rounds in participation.patterns
    )
    assert reached == pytest.approx(bound, rel=1e-12)


def test_negative_pattern_matters_only_where_it_is_worst() -> None:
    pairs = Participation(4, 2, 2)  # rounds {0, 2} and {1, 3}
    gram = np.eye(4)
    gram[0, 2] = gram[2, 0] = -0.5
    assert not is_exact(root_of(gram), pairs)
    gram[1, 3] = gram[3, 1] = 0.9
    assert is_exact(root_of(gram), pairs)
    assert sensitivity(root_of(gram), pairs) ** 2 == pytest.approx(3.8)


def test_fresh_noise() -> None:
    for fields in [(6, 1, 6), (6, 2, 3), (12, 4, 3), (5, 5, 1), (9, 2, 3)]:
        participation = Participation(*fields)
        assert sensitivity(np.eye(fields[0]), participation) == pytest.approx(
            np.sqrt(fields[1]), rel=1e-13
        )
        assert is_exact(np.eye(fields[0]), participation)


def test_anti_pgd() -> None:
    strategy = temporal.anti_pgd(9)
    assert sensitivity(strategy, Participation(9, 1, 9)) == pytest.approx(3.0)
    # Rounds 0, 3, 6 leave steps of height 1, 2, 3, three rounds each.
    assert sensitivity(strategy, Participation(9, 3, 3)) ** 2 == pytest.approx(3 * (1 + 4 + 9))


def test_rounding_only_raises_it() -> None:
    participation = Participation(4, 2, 2)
    plain_falls_short = 0
    for seed in range(20):
        # Columns 0, 2 and 1, 3 nearly cancel: their products are mostly rounding.
        strategy = np.random.default_rng(seed).normal(size=(6, 4)) * 10.0 ** np.arange(6)[:, None]
        strategy[::2, :2] = -strategy[::2, 2:] * strategy[1::2, 2:] / strategy[1::2, :2]
        columns = [[Fraction(x) for x in column] for column in strategy.T.tolist()]

        def exact(s: int, t: int, columns: list = columns) -> Fraction:
            return sum((x * y for x, y in zip(columns[s], columns[t], strict=True)), Fraction(0))

        truth = max(
            sum(abs(exact(s, t)) for s, t in itertools.product(pattern, repeat=2))
            for pattern in ((0, 2), (1, 3))
        )
        result = sensitivity(strategy, participation)
        assert truth <= Fraction(result) ** 2 <= truth * Fraction(1 + 1e-9)
        plain_falls_short += Fraction(worst(by_formula, strategy, participation)) < truth
    assert plain_falls_short > 0


@given(st.floats(1e-6, 1e6), st.integers(0, 1000))
def test_scales_with_strategy(scale, seed) -> None:
    strategy = np.tril(np.random.default_rng(seed).normal(size=(6, 6)))
    participation = Participation(6, 2, 3)
    expected = scale * sensitivity(strategy, participation)
    assert sensitivity(scale * strategy, participation) == pytest.approx(expected, rel=1e-10)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="strategy has shape"):
        sensitivity(np.eye(5), Participation(6, 2, 3))
    with pytest.raises(ValueError, match="strategy holds nan"):
        sensitivity(np.full((6, 6), np.nan), Participation(6, 2, 3))


def test_never_below_exact_arithmetic():
    """Squares in fractions; plain float64 falls short in a fifth of these."""
    from fractions import Fraction

    random = np.random.default_rng(0)
    for _ in range(60):
        rounds = int(random.integers(1, 7))
        when = Participation(rounds, 1 if rounds < 4 else 2, 1 if rounds < 4 else 2)
        strategy = np.tril(random.normal(size=(rounds, rounds)))
        exact = [[Fraction(value) for value in row] for row in strategy.tolist()]
        gram = [
            [sum(row[s] * row[t] for row in exact) for t in range(rounds)] for s in range(rounds)
        ]
        truth = max(
            sum(abs(gram[s][t]) for s in pattern for t in pattern) for pattern in when.patterns
        )
        assert Fraction(sensitivity(strategy, when)) ** 2 >= truth
    for scale in (1e-170, 1e170):
        assert sensitivity(scale * np.eye(3), Participation(3, 1, 1)) == pytest.approx(scale)


def test_tuple_is_no_participation():
    with pytest.raises(ValueError, match=r"participation is \(3, 1, 1\); give a mechanism"):
        sensitivity(np.eye(3), (3, 1, 1))


def test_rounding_of_many_products_is_covered() -> None:
    strategy = np.tril(np.random.default_rng(0).uniform(0.1, 1, (300, 300)))
    exact = max(sum(Fraction(v) ** 2 for v in column) for column in strategy.T)
    bound = Fraction(sensitivity(strategy, Participation(300, 1, 300))) ** 2
    assert exact <= bound <= exact * (1 + Fraction(1, 10**12))
