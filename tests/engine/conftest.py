"""The small network and problem of the engine's tests."""

import pytest

from dpjax.topology import graphs, mixing
from tests.engine.support import make_problem


@pytest.fixture(scope="session")
def network():
    """The mixing matrix of a small graph."""
    return mixing.metropolis_hastings(graphs.erdos_renyi(6, 0.5, 0))


@pytest.fixture(scope="session")
def small(network):
    """A problem over that graph's agents."""
    return make_problem(len(network))
