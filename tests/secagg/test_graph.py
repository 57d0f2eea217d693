"""Degrees and thresholds against published values, exact enumeration and real graphs."""

import csv
import itertools
import math
import random
import re
from fractions import Fraction
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from scipy import stats

from dpjax.secagg import graph

# (clients, corrupt, dropout): (degree, threshold), from the test of federated-compute's finder.
PUBLISHED = {
    "semi_honest": {
        (100, 0.45, 0.45): (92, 46),
        (10, 0.33, 0.33): (8, 4),
        (100, 0.33, 0.33): (68, 34),
        (1000, 0.33, 0.33): (286, 150),
        (10**4, 0.33, 0.33): (422, 221),
        (10**5, 0.33, 0.33): (480, 251),
        (10**6, 0.33, 0.33): (518, 270),
        (100, 0.05, 0.33): (28, 6),
        (1000, 0.05, 0.33): (72, 24),
        (10**4, 0.05, 0.33): (86, 29),
        (10**6, 0.05, 0.33): (102, 34),
        (10, 0.33, 0.05): (4, 4),
        (100, 0.33, 0.05): (34, 29),
        (1000, 0.33, 0.05): (78, 60),
        (10**6, 0.33, 0.05): (110, 83),
        (10, 0.05, 0.05): (2, 2),
        (100, 0.05, 0.05): (12, 6),
        (1000, 0.05, 0.05): (30, 17),
        (10**4, 0.05, 0.05): (34, 20),
        (10**5, 0.05, 0.05): (36, 21),
        (10**6, 0.05, 0.05): (38, 22),
        (100, 0.33, 0.0): (26, 25),
        (1000, 0.33, 0.0): (38, 36),
        (100, 0.0, 0.33): (26, 2),
        (1000, 0.0, 0.33): (38, 2),
        (1000, 0.0, 0.0): (2, 2),
    },
    "semi_malicious": {
        (100, 0.3, 0.3): (92, 62),
        (1000, 0.3, 0.3): (872, 584),
        (10, 0.05, 0.33): (8, 5),
        (100, 0.05, 0.33): (72, 39),
        (1000, 0.05, 0.33): (398, 223),
        (10**4, 0.05, 0.33): (746, 420),
        (100, 0.33, 0.05): (42, 37),
        (1000, 0.33, 0.05): (132, 109),
        (10**6, 0.33, 0.05): (212, 173),
        (10, 0.05, 0.05): (2, 2),
        (100, 0.05, 0.05): (16, 11),
        (1000, 0.05, 0.05): (52, 37),
        (10**4, 0.05, 0.05): (62, 44),
        (10**5, 0.05, 0.05): (68, 48),
        (10**6, 0.05, 0.05): (74, 52),
        (100, 0.33, 0.0): (26, 26),
        (100, 0.0, 0.33): (68, 35),
        (10**4, 0.0, 0.33): (326, 164),
    },
}
CASES = [(adversary, *ends) for adversary, rows in PUBLISHED.items() for ends in rows]

# There the published test draws the neighbours of a survivor from all clients, itself among them;
# drawn from the others, the next even degree is needed, or (first two) a threshold of 2 is met.
STRICTER = {
    ("semi_honest", 10, 0.05, 0.33): ((4, 2), (6, 2)),
    ("semi_honest", 10, 0.0, 0.33): ((4, 2), (6, 2)),
    ("semi_honest", 1000, 0.45, 0.45): ((822, 417), (824, 418)),
    ("semi_malicious", 1000, 0.0, 0.33): ((228, 115), (230, 116)),
}


@pytest.mark.parametrize(("adversary", "clients", "corrupt", "dropout"), CASES)
def test_published_values_are_met(adversary, clients, corrupt, dropout):
    parameters = graph.parameters(clients, corrupt, dropout, adversary)
    assert (parameters.degree, parameters.threshold) == PUBLISHED[adversary][
        clients, corrupt, dropout
    ]
    assert (parameters.security, parameters.correctness) == (40, 20)


def test_table_of_documentation_is_code_s():
    docs = Path(__file__).parents[2] / "docs"
    file = docs / "artifact" / "data" / "secagg_neighbours.csv"
    rows = list(csv.reader(file.read_text(encoding="utf-8").splitlines()))[1:]
    assert len(rows) == 5
    for clients, corrupt, dropout, *reported in rows:
        ends = int(clients), float(corrupt), float(dropout)
        results = [graph.parameters(*ends, adversary) for adversary in PUBLISHED]
        assert [f"{item.degree}, {item.threshold}" for item in results] == reported
    page = (docs / "howto" / "server.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\|.*\| semi-(?:honest|malicious) \| (\d+, \d+) \|", page, re.MULTILINE)
    assert listed == [*rows[0][3:], *rows[1][3:]]


def exact_tail(population, marked, draws, minimum):
    """P[X >= least] in whole numbers."""
    ways = [
        math.comb(marked, x) * math.comb(population - marked, draws - x)
        for x in range(minimum, draws + 1)
    ]
    return Fraction(sum(ways), math.comb(population, draws))


def holds(adversary, clients, corrupt, dropouts, degree, threshold):
    """The three bounds in exact arithmetic, written anew."""
    removed = corrupt + dropouts
    disconnected = Fraction(clients * (clients - degree - 1), 2) * Fraction(
        math.comb(clients - degree, removed - degree) if removed >= degree else 0,
        math.comb(clients, removed),
    )
    limit = threshold
    if adversary == "semi_malicious":
        limit = 2 * threshold - degree  # 2 t > degree + X must hold for all X below this.
    exposed = clients * exact_tail(clients - 1, corrupt, degree, max(limit, 0))
    stuck = clients * (
        1 - exact_tail(clients - 1, clients - dropouts - 1, degree, min(threshold, degree + 1))
    )
    return (
        disconnected <= Fraction(1, 2**41)
        and exposed <= Fraction(1, 2**41)
        and stuck <= Fraction(1, 2**20)
    )


@pytest.mark.parametrize("adversary", ["semi_honest", "semi_malicious"])
@pytest.mark.parametrize(
    ("clients", "corrupt", "dropout"),
    [(10, 0.05, 0.33), (20, 0.1, 0.2), (60, 0.2, 0.1), (100, 0.05, 0.05), (300, 0.1, 0.1)],
)
def test_bounds_hold_exactly_and_no_smaller_degree_keeps_them(adversary, clients, corrupt, dropout):
    parameters = graph.parameters(clients, corrupt, dropout, adversary)
    assert (parameters.corrupt, parameters.dropouts) == (
        int(Fraction(str(corrupt)) * clients), int(Fraction(str(dropout)) * clients)
    )  # fmt: skip
    ends = (adversary, clients, parameters.corrupt, parameters.dropouts)
    if parameters.degree < clients - 1:
        assert holds(*ends, parameters.degree, parameters.threshold)
        assert parameters.threshold == 2 or not holds(
            *ends, parameters.degree, parameters.threshold - 1
        )
    for degree in range(2, parameters.degree, 2):
        assert not any(holds(*ends, degree, t) for t in range(2, degree + 1))


@pytest.mark.parametrize("case", STRICTER, ids=str)
def test_published_degrees_below_ours_break_bound(case):
    published, needed = STRICTER[case]
    adversary, clients, corrupt, dropout = case
    parameters = graph.parameters(clients, corrupt, dropout, adversary)
    assert (parameters.degree, parameters.threshold) == needed
    ends = (adversary, clients, parameters.corrupt, parameters.dropouts)
    assert holds(*ends, *needed) and not holds(*ends, *published)


@pytest.mark.parametrize(("n", "marked", "draws"), [(99, 5, 12), (999, 330, 286), (7, 0, 4)])
def test_masses_are_hypergeometric(n, marked, draws):
    result = graph.log_masses(n, marked, draws)
    want = stats.hypergeom(n, marked, draws).logpmf(np.arange(draws + 1))
    np.testing.assert_allclose(np.exp(result), np.exp(want), rtol=1e-9, atol=0)


def circulant(n, degree):
    return nx.circulant_graph(n, range(1, degree // 2 + 1))


@pytest.mark.parametrize(("n", "degree", "removed"), [(8, 4, 4), (9, 4, 5), (10, 4, 5), (9, 2, 3)])
def test_bound_on_disconnection_exceeds_enumeration(n, degree, removed):
    complete = circulant(n, degree)
    apart = total = 0
    for gone in itertools.combinations(range(n), removed):
        left = complete.subgraph(set(range(n)) - set(gone))
        apart += not nx.is_connected(left)
        total += 1
    bound = math.exp(graph.log_disconnected(n, degree, removed))
    assert 0 < apart / total <= bound * (1 + 1e-9)
    # It is a sum over pairs of runs: a set that holds several pairs is counted several times.
    assert bound < 4 * apart / total
    assert graph.log_disconnected(n, degree, degree - 1) == -math.inf
    for gone in itertools.combinations(range(n), degree - 1):
        assert nx.is_connected(complete.subgraph(set(range(n)) - set(gone)))


@pytest.mark.parametrize(("n", "degree"), [(3, 2), (4, 3), (4, 2), (5, 4), (10, 6), (11, 8)])
def test_harary_graph_is_ring_with_chords_in_random_order(n, degree):
    near = graph.harary(n, degree, random.Random(1))
    result = nx.Graph([(i, j) for i in range(n) for j in near[i]])
    assert all(len(set(row)) == degree and i not in row for i, row in enumerate(near))
    assert all(i in near[j] for i in range(n) for j in near[i])
    want = nx.complete_graph(n) if degree == n - 1 else circulant(n, degree)
    assert nx.is_isomorphic(result, want)


def test_order_is_uniform_over_ring():
    # On 5 places with degree 2 there are 4! / 2 = 12 rings; each as often as the others.
    generator = random.Random(2)
    counts: dict = {}
    for _ in range(6000):
        ring = graph.harary(5, 2, generator)
        counts[ring] = counts.get(ring, 0) + 1
    assert len(counts) == 12
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3
    # One's own source of randomness is the operating system's, and no two calls agree.
    assert len({graph.harary(50, 4) for _ in range(5)}) == 5


def test_three_and_four_clients_are_everybodys_neighbours():
    assert graph.parameters(3, 0.0, 0.0)[:2] == (2, 2)
    assert graph.parameters(3, 0.0, 0.34)[:2] == (2, 1)
    assert graph.parameters(4, 0.0, 0.25)[:2] == (3, 2)
    assert graph.parameters(4, 0.25, 0.25)[:2] == (3, 2)
    assert graph.parameters(5, 0.2, 0.2)[:2] == (4, 2)


def test_decimals_are_what_they_say():
    # 0.29 * 100 is 28.999999999999996 in floating point.
    assert graph.parameters(100, 0.29, 0.0).corrupt == 29


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ((2, 0.1, 0.1), "clients is 2"),
        ((10.0, 0.1, 0.1), "clients is 10.0"),
        ((100, 1.0, 0.1), "corrupt is 1.0"),
        ((100, -0.1, 0.1), "corrupt is -0.1"),
        ((100, 0.1, float("nan")), "dropout is nan"),
        ((1000, 0.5, 0.5), "corrupt is 500 and dropout 500"),
        ((3, 0.34, 0.34), "corrupt is 1 and dropout 1"),
        ((100, 0.4, 0.4, "semi_malicious"), "semi-malicious"),
        ((100, 0.1, 0.1, "malicious"), "adversary is 'malicious'"),
    ],
)
def test_what_no_graph_carries_is_refused(arguments, reported):
    with pytest.raises(ValueError, match=reported):
        graph.parameters(*arguments)
