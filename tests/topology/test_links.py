"""Who sends to whom, in one place."""

import numpy as np
import pytest

from dpjax.accounting import trust, views
from dpjax.mechanism import strategy, temporal
from dpjax.mechanism.participation import Participation
from dpjax.topology import graphs, mixing
from dpjax.topology.links import adjacency, incidence, link_pairs, message_pairs
from dpjax.transforms import rounds

DIRECTED = np.array(
    [[0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0], [0.5, 0, 0, 0.5]]
)


def test_pairs_exchange_in_either_direction() -> None:
    expected = [[0, 1], [0, 3], [1, 2]]
    assert link_pairs(DIRECTED).tolist() == link_pairs(DIRECTED.T).tolist() == expected
    # A schedule's links are those of all its matrices.
    ring, path = (mixing.metropolis_hastings(make(4)) for make in (graphs.ring, graphs.path))
    assert link_pairs(np.stack([path, ring])).tolist() == link_pairs(ring).tolist()
    assert len(link_pairs(path)) == 3


def test_incidence_is_laplacian_s_root() -> None:
    weights = mixing.metropolis_hastings(graphs.erdos_renyi(7, 0.5, seed=1))
    signs = incidence(link_pairs(weights), 7)
    linked = adjacency(weights)
    assert np.array_equal(signs @ signs.T, np.diag(linked.sum(1)) - linked)


def test_copies_are_all_messages_of_round_by_sender() -> None:
    sender, receiver = message_pairs(DIRECTED)
    # Row i averages what column j sends.
    assert list(zip(sender.tolist(), receiver.tolist(), strict=True)) == [
        *((0, 0), (0, 3), (1, 0), (1, 1), (2, 1), (2, 2), (3, 3)),
    ]
    assert views.zip_dl(DIRECTED).owners == tuple(frozenset([i]) for i in sender.tolist())


@pytest.mark.parametrize("name", ["banded", "inverse", "full"])
def test_runs_and_accounting_keep_same_past(name: str) -> None:
    banded = np.eye(8) + np.diag(np.full(7, 0.4), -1)
    matrix = {
        "banded": banded,
        "inverse": np.linalg.inv(banded),
        "full": temporal.prefix_sum(Participation(8, 1, 8)),
    }[name]
    memory = trust.remember(matrix)
    route = rounds.route(matrix, 8)
    inverse = strategy.sparse_inverse_of(matrix)
    assert strategy.is_triangular(inverse) and not strategy.is_triangular(inverse.T)
    assert memory.of_noise == (strategy.width(matrix) <= strategy.width(inverse))
    if route.kind == "recursion":
        assert memory.of_noise and np.array_equal(memory.weights[-1], route.weights[-1])
    if route.kind == "moving":
        assert not memory.of_noise and np.array_equal(memory.weights[-1], route.weights[-1])
