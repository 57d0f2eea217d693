"""Shares of a secret: any t of them rebuild it, fewer say nothing (Shamir).

    f(z) = s + a_1 z + ... + a_(t-1) z^(t-1)  mod p        a uniform, f(x) is the share at x != 0
    s = sum_i f(x_i) prod_(j != i) x_j / (x_j - x_i)        over any t shares

For t - 1 points and each s there is exactly one f through (0, s) and the shares, and all f are
equally likely: so are all secrets. Arithmetic is Python's whole numbers, not in constant time.

Reference:
    Shamir (1979), How to share a secret.
"""

import functools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

__all__: list[str] = []

PRIME = 2**256 + 297
"""The least prime above 2^256: every secret of 32 bytes is below it."""


def split(
    secret: int,
    points: Iterable[int],
    threshold: int,
    *,
    prime: int = PRIME,
    draw: Callable[[int], int] = secrets.randbelow,
) -> dict[int, int]:
    """Return a share of the secret for each point.

    Guarantee: fewer than ``threshold`` shares have the same distribution whatever the secret is,
    if ``draw`` is uniform.

    Args:
        secret: From 0 to below the prime.
        points: Distinct, from 1 to below the prime.
        threshold: t, how many shares rebuild the secret.
        prime: p, the field.
        draw: Gives a uniform whole number below its argument.

    Raises:
        ValueError: For points that repeat or are too few, and what is outside of the field.

    Example:
        >>> from dpjax.secagg import shamir
        >>> shares = shamir.split(7, [1, 2, 3], 2)
        >>> shamir.join({1: shares[1], 3: shares[3]})
        7
    """
    places = list(points)
    _check_points(places, prime)
    if not 1 <= threshold <= len(places):
        raise ValueError(
            f"threshold is {threshold} of {len(places)} points; give 1 to {len(places)}"
        )
    if not 0 <= secret < prime:
        raise ValueError("secret is outside of the field; give a whole number from 0 below prime")
    powers = [secret, *(draw(prime) for _ in range(threshold - 1))]
    return {x: functools.reduce(lambda y, a: (y * x + a) % prime, reversed(powers), 0)
            for x in places}  # fmt: skip


def join(shares: Mapping[int, int], *, prime: int = PRIME) -> int:
    """Return the secret that exactly these shares stand for.

    Fewer than the threshold, or one that is wrong, give some other number: check what comes out
    against something public.

    Args:
        shares: A share by its point, as many as the threshold.
        prime: p.

    Raises:
        ValueError: For no shares, and points or shares outside of the field.
    """
    places = tuple(sorted(shares))
    if not places:
        raise ValueError("shares are empty; give as many as the threshold")
    _check_points(places, prime)
    if any(not 0 <= shares[x] < prime for x in places):
        raise ValueError("shares hold one outside of the field; give what split returned")
    return sum(c * shares[x] for c, x in zip(_weights(places, prime), places, strict=True)) % prime


def _check_points(points: Sequence[int], prime: int) -> None:
    if len(set(points)) < len(points):
        raise ValueError(f"points hold one of {sorted(points)[:8]} twice; give distinct ones")
    wrong = [x for x in points if not 0 < x < prime]
    if wrong:
        # The share at 0 is the secret itself.
        raise ValueError(f"points hold {wrong[0]}; give numbers from 1 to below prime")


@functools.lru_cache(maxsize=4096)
def _weights(points: tuple[int, ...], prime: int) -> tuple[int, ...]:
    """Lagrange's coefficients at 0."""
    weights = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above = above * other % prime
                below = below * (other - x) % prime
        weights.append(above * pow(below, -1, prime) % prime)
    return tuple(weights)
