"""What commands share: the network that is named, the file to write, what relations hide."""

import itertools
import os
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from jaxtyping import Float

from dpjax import _numerics, _validate
from dpjax.topology import graphs, mixing

__all__: list[str] = []

FEW = 24
"""Up to how many agents a table has a line for each."""
HIDDEN = {
    "replace_agent": "all data of one agent",
    "replace_record": "one record of one agent, against another",
    "zero_out_record": "one record of one agent, against its absence",
}


def network(command: Any) -> tuple[nx.Graph, Float[np.ndarray, "n n"], str]:
    """Return the graph, its mixing matrix, and a line about both.

    Args:
        command: The options, `dpjax.cli.DesignCommand` or `dpjax.cli.AccountCommand`.

    Raises:
        ValueError: For a graph that cannot be read, a negative seed, or one that nothing reads.
    """
    spec, seed = command.graph, command.seed
    if not isinstance(spec, str):
        raise ValueError(f"graph is {spec!r}; give text, such as 'ring:8' or the path of a file")
    _validate.integer("seed", seed, least=0)
    if spec.startswith("er:") and spec.count(":") == 2:
        spec = f"{spec}:{seed}"
    elif seed:
        raise ValueError(
            f"seed is {seed} for graph {spec!r}, which is not random or names its own; leave it "
            "out, or give er:AGENTS:PROBABILITY"
        )
    graph = graphs.parse(spec)
    weights = {"metropolis": mixing.metropolis_hastings, "uniform": mixing.uniform_neighbors}
    matrix = weights[command.mixing](graph)
    used = f", seed {graph.graph['seed']}" if "seed" in graph.graph else ""
    title = (
        f"network: {command.graph}, {_validate.counted(len(matrix), 'agent')}, "
        f"{_validate.counted(graph.number_of_edges(), 'edge')}{used}; "
        f"{command.mixing} mixing, spectral gap {mixing.spectral_gap(matrix):.4g}"
    )
    return graph, matrix, title


def free(out: Path | None, default: str) -> Path:
    """Return the path to write to; an existing file is never replaced.

    Args:
        out: What was asked for; None is the default, numbered if that is taken.
        default: A file's name, whose ending is the one of a path without.

    Raises:
        ValueError: For a folder, an existing file, or a folder that does not exist.
    """
    stem, suffix = os.path.splitext(default)
    if out is None:
        numbered = (f"{stem}-{number}{suffix}" for number in itertools.count(2))
        every = map(Path, itertools.chain([default], numbered))
        return next(path for path in every if not os.path.exists(path))
    fault = None
    if not out.name or os.path.isdir(out):
        fault = "a folder or empty; name a file"
    elif os.path.exists(named := out if out.suffix else out.with_suffix(suffix)):
        fault = "which exists; name another file or delete it"
    elif not os.path.exists(out.parent):
        fault = "whose folder does not exist; make it first"
    if fault:
        raise ValueError(f"out is {str(out)!r}, {fault}")
    return named


def note_delta(delta: float, agents: int, relation: str, records: int = 1) -> None:
    """Print a note of a delta that promises an agent, or a record, nothing.

    Args:
        delta: Of the budget.
        agents: How many agents there are.
        relation: Neighbouring relation.
        records: That an agent has at least.
    """
    whole = relation == "replace_agent"
    units, unit = (agents, "agent") if whole else (agents * records, "record")
    if wrong := _numerics.loose_delta(delta, units, unit, more=not whole):
        print(f"NOTE: {wrong}")
