"""The graph of clients that share masks: its degree, and the threshold of shares.

n clients form a ring in random order, c of them corrupt and up to m dropping out. Each is linked to
the k/2 next ones on both sides (a Harary graph). A client's secrets are shared among its k
neighbours, t of whom rebuild them. Three events may go wrong:

    disconnected   the honest survivors are not connected, and the server learns each part's sum
    exposed        a client has t corrupt neighbours, who rebuild its secrets
    stuck          a client keeps fewer than t surviving neighbours, and the round aborts

With the ring's order uniform, and corruption and dropouts fixed apart from it:

    disconnected   needs two runs of k/2 removed neighbours on the ring, with clients on both sides
                   between them: n (n-k-1) / 2 pairs of runs, each of them removed with
                   probability (c+m)_k / (n)_k, falling factorials: the sum bounds it
    exposed        corrupt neighbours of an honest client are hypergeometric: k draws of the n-1
                   others, c of them corrupt; the sum over clients of P[X >= t] bounds it
    stuck          surviving neighbours of a survivor, itself excluded, are hypergeometric:
                   k draws of n-1, n-m-1 of them survivors (a dropout has one more to draw from);
                   the sum over clients of P[Y < t] bounds it

The first two get 2^-41 each, 2^-40 in all; the last 2^-20. Under ``semi_malicious`` a server may
tell different survivors different dropout sets after the keys are collected. Then each of k - X
honest neighbours gives one of a client's two shares, and X corrupt ones give both. Both secrets
take 2t shares of at most k + X, so 2t > k + X protects one of them. X's tail is bounded as before.

Reference:
    Bell, Bonawitz, Gascon, Lepoint, Raykova (CCS 2020), Secure single-server aggregation with
    (poly)logarithmic overhead: the good graphs of the semi-honest protocol, and the threshold of
    the semi-malicious one.
"""

import functools
import math
import random
import secrets
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from dpjax import _validate

__all__ = ["Parameters", "parameters"]

_ADVERSARIES = ("semi_honest", "semi_malicious")
# A loss of security cannot be undone; a round that aborts is only repeated.
_SECURITY_BITS = 40
_CORRECTNESS_BITS = 20
MOST_CLIENTS = 10**6

_SLACK = 1e-6
"""What rounding may add to a logarithm: sums of logarithms of factorials stray by 1e-8."""


class Parameters(NamedTuple):
    """How many neighbours a client has, and how many of their shares rebuild its secrets.

    Attributes:
        degree: k.
        threshold: t.
        clients: n.
        corrupt: c, the most clients that the server may read, sharing all that they know.
        dropouts: m, the most clients that leave at any stage after the graph is drawn.
        adversary: "semi_honest" or "semi_malicious".
        security: Bits: a corrupt server learns more than the sum with probability below 2^-this.
        correctness: Bits: a round within the dropouts aborts with probability below 2^-this.

    Example:
        >>> from dpjax.secagg import graph
        >>> graph.parameters(100, corrupt=0.1, dropout=0.1).dropouts
        10
    """

    degree: int
    threshold: int
    clients: int
    corrupt: int
    dropouts: int
    adversary: str
    security: int = _SECURITY_BITS
    correctness: int = _CORRECTNESS_BITS


def parameters(
    clients: int,
    corrupt: float,
    dropout: float,
    adversary: Literal["semi_honest", "semi_malicious"] = "semi_honest",
) -> Parameters:
    """Return the smallest even degree, and its threshold, that keep all three bounds.

    Where no even degree below n - 1 does, the graph is complete, and nothing depends on chance.

    Guarantee: with probability 1 - 2^-40 over the graph, no honest client has t corrupt neighbours
    and the honest survivors are connected. Then a server and c clients, who all follow the
    protocol, learn the sum of the honest survivors alone. With probability 1 - 2^-20 every needed
    secret keeps t neighbours. The order on the ring must be uniform and unknown to whoever corrupts
    or removes clients. ``semi_malicious`` raises the threshold so
    that no two requests open both secrets of one client, and that clients who
    answer only what t neighbours confirmed show no vector alone (`dpjax.secagg.client`); the
    server still collects keys and draws the graph honestly. A server that invents clients (Sybils)
    or keys is outside of both: keys have no signatures here.

    Args:
        clients: n, 3 to 1,000,000.
        corrupt: Fraction of clients whose knowledge the server has, 0 to below 1.
        dropout: Fraction of clients that may leave, 0 to below 1.
        adversary: What the server may do.

    Returns:
        Degree, threshold and what they were made for.

    Raises:
        ValueError: For what no graph can carry.

    Reference:
        Bell et al. (2020); the exponents are those of google-parfait/federated-compute.

    Example:
        >>> from dpjax.secagg import graph
        >>> sizes = graph.parameters(1000, corrupt=0.05, dropout=0.05)
        >>> sizes.degree, sizes.threshold
        (30, 17)
    """
    n = _validate.integer("clients", clients, minimum=3, maximum=MOST_CLIENTS)
    colluders = allowed_clients(n, "corrupt", corrupt)
    dropouts = allowed_clients(n, "dropout", dropout)
    return of_counts(n, colluders, dropouts, adversary)


def allowed_clients(clients: int, name: str, fraction: float) -> int:
    """Return the whole number of clients that a fraction allows, of the decimal as it is written.

    Args:
        clients: n.
        name: What messages call the fraction.
        fraction: From 0 to below 1.
    """
    remedy = "give a fraction of the clients, from 0 to below 1"
    value = _validate.number(name, fraction, remedy=remedy, holds=lambda x: 0 <= x < 1)
    return math.floor(Fraction(repr(value)) * clients)


@functools.lru_cache(maxsize=512)
def of_counts(clients: int, corrupt: int, dropouts: int, adversary: str) -> Parameters:
    """Return `parameters` for whole numbers of corrupt clients and of dropouts.

    Args:
        clients: n.
        corrupt: c.
        dropouts: m.
        adversary: What the server may do.
    """
    _validate.one_of("adversary", adversary, _ADVERSARIES)
    counts = (clients, corrupt, dropouts, adversary)
    refusal = (
        f"corrupt is {corrupt} and dropout {dropouts} of {clients} clients, too many for any graph "
        f"that is {adversary.replace('_', '-')} secure; give lower fractions or more clients"
    )
    # A sum of one is its input.
    if clients - corrupt - dropouts < 2:
        raise ValueError(refusal)
    for degree in range(2, clients - 1, 2):
        if log_disconnected(clients, degree, corrupt + dropouts) > _budget(_SECURITY_BITS + 1):
            continue
        threshold = _threshold(degree, *counts)
        if threshold is not None:
            return Parameters(degree, threshold, *counts)
    # A single remaining neighbour must suffice.
    floor = 1 if clients == 3 and dropouts == 1 else 2
    # The complete graph: nothing depends on chance.
    survivors = clients - dropouts - 1
    threshold = _smallest_threshold(clients - 1, corrupt, survivors, adversary, floor)
    if threshold is None:
        raise ValueError(refusal)
    return Parameters(clients - 1, threshold, *counts)


def _budget(bits: int) -> float:
    """The logarithm of 2^-bits, less what rounding may add."""
    return -bits * math.log(2) - _SLACK


def log_disconnected(clients: int, degree: int, removed: int) -> float:
    """Return the logarithm of the bound on honest survivors falling apart.

    Args:
        clients: n.
        degree: k, even.
        removed: c + m, uniform over the ring.
    """
    # Two runs need as many removed clients as a client has neighbours.
    if degree > removed or degree >= clients - 1:
        return -math.inf
    pairs = math.log(clients) + math.log(clients - degree - 1) - math.log(2)
    # Falling factorials (c+m)_k / (n)_k.
    falling = math.lgamma(removed + 1) - math.lgamma(removed - degree + 1)
    return pairs + falling - math.lgamma(clients + 1) + math.lgamma(clients - degree + 1)


def log_masses(population: int, marked: int, draws: int) -> np.ndarray:
    """Return log P[X = x], x = 0 to draws, X the marked ones among draws without replacement.

    Args:
        population: How many there are.
        marked: How many of them are marked.
        draws: How many are drawn.
    """
    from scipy import special

    def log_comb(n: int, k: np.ndarray) -> np.ndarray:
        # The factorial of a number below 0 is infinite, and so no way is left outside 0 to n.
        return special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)

    x = np.arange(draws + 1)
    ways = log_comb(marked, x) + log_comb(population - marked, draws - x)
    return ways - log_comb(population, np.asarray(draws))


def _threshold(
    degree: int, clients: int, corrupt: int, dropouts: int, adversary: str
) -> int | None:
    """The least threshold that keeps secrets, if survivors reach it."""
    # P[X >= x], added up from the smallest terms.
    masses = log_masses(clients - 1, corrupt, degree)
    exposed = np.logaddexp.accumulate(masses[::-1])[::-1]
    safe = exposed + math.log(clients) <= _budget(_SECURITY_BITS + 1)
    # The least count that X reaches with a probability inside the budget: X stays below it.
    above = int(np.argmax(safe)) if safe.any() else degree + 1
    alive = log_masses(clients - 1, clients - dropouts - 1, degree)
    # P[Y <= y] = P[Y < y + 1].
    stuck = np.logaddexp.accumulate(alive)
    fine = stuck + math.log(clients) <= _budget(_CORRECTNESS_BITS)
    return _smallest_threshold(degree, above - 1, int(np.count_nonzero(fine)), adversary)


def _smallest_threshold(
    degree: int, most_corrupt: int, survivors: int, adversary: str, floor: int = 2
) -> int | None:
    """The least threshold against so many corrupt neighbours; None where survivors miss it."""
    threshold = most_corrupt + 1
    if adversary == "semi_malicious":
        # 2t > k + X: two requests do not open both secrets of one client.
        threshold = (degree + most_corrupt) // 2 + 1
    threshold = max(threshold, floor)
    if threshold > min(survivors, degree):
        return None
    return threshold


def harary(
    clients: int, degree: int, generator: random.Random | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return every client's neighbours on a ring in random order.

    Args:
        clients: n.
        degree: k, even and below n - 1; or n - 1, everybody.
        generator: Draws the order; None is the operating system's.

    Returns:
        A sorted tuple of neighbours for each client, numbered from 0.

    Example:
        >>> from dpjax.secagg import graph
        >>> {len(near) for near in graph.harary(10, 4)}
        {4}
    """
    everyone = range(clients)
    if degree == clients - 1:
        return tuple(tuple(j for j in everyone if j != i) for i in everyone)
    # Uniform, and unknown to whoever corrupts clients: the bounds take it so.
    order = list(everyone)
    (generator or secrets.SystemRandom()).shuffle(order)
    near: list[tuple[int, ...]] = [()] * clients
    half = degree // 2
    for position, client in enumerate(order):
        places = [*range(position - half, position), *range(position + 1, position + half + 1)]
        near[client] = tuple(sorted(order[place % clients] for place in places))
    return tuple(near)
