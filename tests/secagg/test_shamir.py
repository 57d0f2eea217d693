"""Shares rebuild what they should, from every subset, and say nothing where they should not."""

import itertools
import secrets
from collections import Counter

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import strategies as st  # noqa: E402

from dpjax.secagg import primitives  # noqa: E402

TOP = [0, 1, 2**256 - 1, 2**255, primitives.PRIME - 1]


def test_field_is_prime_and_holds_every_secret_of_32_bytes():
    gmpy2 = pytest.importorskip("gmpy2")
    assert gmpy2.next_prime(2**256) == primitives.PRIME


@pytest.mark.parametrize("n", range(1, 7))
def test_every_subset_of_threshold_rebuilds_secret(n):
    for threshold, secret in itertools.product(range(1, n + 1), [*TOP, secrets.randbits(256)]):
        shares = primitives.split_secret(secret, range(1, n + 1), threshold)
        for subset in itertools.combinations(shares, threshold):
            assert primitives.join_shares({x: shares[x] for x in subset}) == secret
        for extra in range(threshold, n + 1):
            assert primitives.join_shares({x: shares[x] for x in list(shares)[:extra]}) == secret


@hypothesis.given(
    secret=st.integers(0, 2**256 - 1),
    points=st.sets(st.integers(1, 10**6), min_size=2, max_size=12),
    data=st.data(),
)
def test_any_points_do(secret, points, data):
    threshold = data.draw(st.integers(1, len(points)))
    shares = primitives.split_secret(secret, points, threshold)
    selection = data.draw(st.permutations(sorted(points)))[:threshold]
    assert primitives.join_shares({x: shares[x] for x in selection}) == secret


def views(split, threshold, points, prime=5):
    """How often each view of threshold - 1 shares comes, for each secret, over all polynomials."""
    observed: dict = {}
    for secret in range(prime):
        counts: Counter = Counter()
        for drawn in itertools.product(range(prime), repeat=threshold - 1):
            feed = iter(drawn)
            shares = split(secret, [1, 2, 3, 4], threshold, prime=prime, draw=lambda _: next(feed))  # noqa: B023
            counts[tuple(shares[x] for x in points)] += 1
        observed[secret] = counts
    return observed


@pytest.mark.parametrize("threshold", [2, 3, 4])
def test_fewer_shares_than_threshold_say_nothing(threshold):
    for points in itertools.combinations([1, 2, 3, 4], threshold - 1):
        observed = views(primitives.split_secret, threshold, points)
        # All shares alike under every secret, and uniform.
        assert all(observed[secret] == observed[0] for secret in observed)
        assert set(observed[0].values()) == {1} and len(observed[0]) == 5 ** (threshold - 1)
    with_all = views(primitives.split_secret, threshold, (1, 2, 3, 4)[:threshold])
    assert with_all[0] != with_all[1]


@pytest.mark.mutant
def test_polynomial_of_too_low_degree_is_caught():
    def twin(secret, points, threshold, **options):
        return primitives.split_secret(secret, points, threshold - 1, **options)

    observed = views(twin, 3, (1, 2))
    assert observed[0] != observed[1]


def test_coefficients_never_repeat():
    shares = [
        primitives.split_secret(0, [1], 1)[1],
        *(primitives.split_secret(0, [1, 2], 2)[1] for _ in range(8)),
    ]
    assert shares[0] == 0 and len(set(shares[1:])) == 8


def test_wrong_share_gives_another_secret():
    shares = primitives.split_secret(7, [1, 2, 3], 3)
    assert primitives.join_shares({**shares, 2: (shares[2] + 1) % primitives.PRIME}) != 7
    assert primitives.join_shares({1: shares[1], 2: shares[2]}) != 7
