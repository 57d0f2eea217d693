"""How much pairwise noise remains on the graph that a run is on, and on others."""

from dpjax.mechanism import spatial
from dpjax.topology import graphs, mixing

__all__ = ["remark", "shares"]


def shares(agents: int, probability: float, rounds: int, seed: int, count: int = 5) -> list[float]:
    """Return pairwise noise over a run relative to independent noise, on connected random graphs.

    Args:
        agents: Number of agents.
        probability: Edge probability.
        rounds: Rounds of the run.
        seed: First seed tried; the connected graphs that follow are taken.
        count: How many graphs.

    Example:
        >>> from dpjax.contrib import coupling
        >>> [f"{share:.3f}" for share in coupling.shares(20, 0.5, 5000, seed=0, count=2)]
        ['0.859', '0.495']
    """
    energy_shares: list[float] = []
    for _ in range(count):
        graph = graphs.erdos_renyi(agents, probability, seed)
        # The first seed of the next graph, so that no graph comes twice.
        seed = graph.graph["seed"] + 1
        matrix = mixing.metropolis_hastings(graph)
        pairwise = spatial.energy(spatial.pairwise(matrix, 1.0), matrix, horizon=rounds)
        independent = spatial.energy(spatial.independent(matrix, 1.0), matrix, horizon=rounds)
        energy_shares.append(pairwise / independent)
    return energy_shares


def remark(agents: int, probability: float, rounds: int, seed: int) -> str:
    """Return a caption's sentences on the graphs of a sweep over edge probabilities.

    Args:
        agents: Number of agents.
        probability: The edge probability of the sweep over budgets.
        rounds: Rounds of the run.
        seed: First seed tried for each graph.

    Example:
        >>> from dpjax.contrib import coupling
        >>> coupling.remark(8, 0.5, rounds=10, seed=0)[:44]
        '8 agents; one graph for each edge probabilit'
    """
    first, *others = shares(agents, probability, rounds, seed)
    return (
        f"{agents} agents; one graph for each edge probability (seed {seed}). On the one of "
        f"{probability:g} pairwise noise over the run is {first:.2f} of independent noise; "
        f"{min(others):.2f} to {max(others):.2f} on four others."
    )
