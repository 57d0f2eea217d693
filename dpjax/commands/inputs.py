"""What commands share: the network that is named, the file to write, what relations hide."""

import inspect
import itertools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import networkx as nx

from dpjax import _validate
from dpjax.accounting.rounding import loose_delta
from dpjax.topology import graphs
from dpjax.topology import mixing as matrices
from dpjax.topology.mixing import SquareMatrix

__all__ = ()

_Command: TypeAlias = Callable[..., int]
"""What the command line calls with its options, for an exit status."""
Arguments: TypeAlias = Mapping[str, Any]
"""Arguments of a Python function that a command hands over, by name."""
CommandRelation = Literal["replace_agent", "replace_record", "zero_out_record"]
Weights = Literal["metropolis", "uniform"]

FEW = 24
"""Up to how many agents a table has a line for each."""
HIDDEN = {
    "replace_agent": "all data of one agent",
    "replace_record": "one record of one agent, against another",
    "zero_out_record": "one record of one agent, against its absence",
}


def with_arguments(function: Callable[..., Any]) -> Callable[[_Command], _Command]:
    """Give a command the arguments of a Python function: names, types, defaults and words.

    What the command declares itself stays: the name of a network in place of its matrix, say.

    Args:
        function: Its arguments become the command's ``**terms``.
    """

    def extend(command: _Command) -> _Command:
        declared = inspect.signature(command).parameters
        inherited = inspect.signature(function).parameters
        options = []
        for parameter in {**declared, **inherited, **declared}.values():
            if parameter.kind != parameter.VAR_KEYWORD:
                options.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
        # Options that must be given come first in the help.
        options.sort(key=lambda option: option.default is not option.empty)

        def extended(**values: Any) -> int:
            return command(**values)

        # Tyro makes options of these three. Of two texts for an argument it takes the last.
        extended.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        extended.__annotations__ = {option.name: option.annotation for option in options}
        words = inspect.getdoc(function) or ""
        inherited_words = words.partition("Args:\n")[2].partition("\n\n")[0]
        text = inspect.getdoc(command) or ""
        text = text.replace("Args:\n", f"Args:\n{inherited_words}\n")
        # A paragraph is one line, so that an example can be copied: terminals break lines.
        extended.__doc__ = re.sub(r"(?<=\S)\n(?: {8}|(?=\S))", " ", text)
        return extended

    return extend


def network(graph: str, mixing: Weights, seed: int) -> tuple[nx.Graph, SquareMatrix, str]:
    """Return the graph, its mixing matrix, and a line about both.

    Args:
        graph: An edge-list file or a name, as `dpjax.topology.graphs.parse` reads it.
        mixing: How neighbours average.
        seed: First seed of a random graph that names none.

    Raises:
        ValueError: For a graph that cannot be read, a negative seed, or one that nothing reads.
    """
    _validate.integer("seed", seed, minimum=0)
    spec = graph
    # A random graph without a seed of its own takes the command's.
    if str(graph).startswith("er:") and graph.count(":") == 2:
        spec = f"{graph}:{seed}"
    elif seed:
        raise ValueError(
            f"seed is {seed} for graph {graph!r}, which is not random or names its own; leave it "
            "out, or give er:AGENTS:PROBABILITY"
        )
    weights = {"metropolis": matrices.metropolis_hastings, "uniform": matrices.uniform_neighbors}
    _validate.one_of("mixing", mixing, weights)
    links = graphs.parse(spec)
    matrix = weights[mixing](links)
    drawn = ""
    if "seed" in links.graph:
        drawn = f", seed {links.graph['seed']}"
    title = (
        f"network: {graph}, {_validate.counted(len(matrix), 'agent')}, "
        f"{_validate.counted(links.number_of_edges(), 'edge')}{drawn}; "
        f"{mixing} mixing, spectral gap {matrices.spectral_gap(matrix):.4g}"
    )
    return links, matrix, title


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
        paths = map(Path, itertools.chain([default], numbered))
        return next(path for path in paths if not os.path.exists(path))
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
    # Delta is to be below one over the units that are protected.
    of_agents = relation == "replace_agent"
    if of_agents:
        units = agents
        unit = "agent"
    else:
        units = agents * records
        unit = "record"
    fault = loose_delta(delta, units, unit, open_ended=not of_agents)
    if fault:
        print(f"NOTE: {fault}")
