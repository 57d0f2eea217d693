"""The bodies of `dpjax account` and `dpjax design --trust pndp`: options in, lines out."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from jaxtyping import Float

from dpjax import _terminal, _validate
from dpjax.accounting.attacker import Gradients
from dpjax.commands import account_report, inputs, loss_tables, pasted, victims
from dpjax.commands import multiplier as multiplier_
from dpjax.topology import nodes

__all__: list[str] = []

_OF_LDP: dict[str, Any] = {
    "design": None,
    "horizon": None,
    "out": None,
    "accountant": "gdp",
    "allow_unsound": False,
    "parameters": None,
    "batch_size": None,
}


def run(command: Any) -> int:
    """Account for an algorithm on a network: print the losses, write records and figure.

    Args:
        command: The options, `dpjax.cli.AccountCommand`.

    Returns:
        Exit status.

    Raises:
        ValueError: For options that do not go together.
    """
    graph, matrix, title = inputs.network(command)
    out = inputs.free(command.out, "dpjax-account.jsonl")
    print("\n".join([title, *_account(command, graph, matrix, out)]))
    return 0


def insiders(command: Any) -> int:
    """Print the noise multiplier that a budget needs against insiders; nothing is written.

    Args:
        command: The options, `dpjax.cli.DesignCommand`, under trust "pndp".

    Returns:
        Exit status.

    Raises:
        ValueError: For options that do not go together, or a loss that no noise makes finite.
    """
    _refuse_of_ldp(command)
    graph, matrix, title = inputs.network(command)
    print("\n".join([title, *_multiplier(command, graph, matrix)]))
    return 0


def _account(
    command: Any,
    graph: nx.Graph,
    mixing: Float[np.ndarray, "n n"],
    out: Path,
) -> list[str]:
    """Account, write records and figure, and return the report.

    Args:
        command: The options, `dpjax.cli.AccountCommand`.
        graph: The network.
        mixing: [n, n] W.
        out: Record file to write.

    Returns:
        Lines to print.

    Raises:
        ValueError: For options that do not go together.
    """
    setting = victims.Setting(
        command.algorithm,
        mixing,
        victims.participation(command.rounds, command.epochs, command.separation),
        command.relation,
        command.gossip_steps,
        command.shared,
        command.zero_sum,
    )
    account_report.check_place(out)
    names = nodes.labels(graph)
    everyone = ("all",) if command.trust == "pndp" else ()
    sets = account_report.attackers(command.attacker or everyone, names)
    protected = command.protected
    if protected is not None:
        protected = nodes.find_all(names, protected, "protected")
    losses = victims.rows_of_each(
        setting,
        command.trust,
        sets,
        protected=protected,
        sigma=command.sigma,
        delta=command.delta,
    )
    lines = account_report.lines(
        setting,
        command.trust,
        losses,
        sets,
        protected,
        names,
        sigma=command.sigma,
        delta=command.delta,
        gradients=command.gradients,
        columns=_terminal.width(),
    )
    when = setting.participation
    about = {**dataclasses.asdict(command), "epochs": when.epochs, "separation": when.separation}
    del about["out"]
    written = account_report.write(out, losses, about, names, _typed("account", command))
    inputs.note_delta(command.delta, len(names), command.relation)
    return [_relation(command), *lines, "", *(f"written: {p}" for p in written)]


def _multiplier(command: Any, graph: nx.Graph, mixing: Float[np.ndarray, "n n"]) -> list[str]:
    """Find the noise multiplier of a budget against insiders, and return the report.

    Args:
        command: The options, `dpjax.cli.DesignCommand`.
        graph: The network.
        mixing: [n, n] W.

    Returns:
        Lines to print.

    Raises:
        ValueError: For options that do not go together, or a loss that no noise makes finite.
    """
    clip = _validate.positive("clip", command.clip)
    setting = victims.Setting(
        command.algorithm or "dsgd",
        mixing,
        victims.participation(command.rounds, command.epochs, command.separation),
        command.relation,
        1 if command.gossip_steps is None else command.gossip_steps,
    )
    names = nodes.labels(graph)
    sets = account_report.attackers(command.attacker or ("all",), names)
    gradients: Gradients = command.gradients or "any"
    budget = {"epsilon": command.epsilon, "delta": command.delta}
    multiplier = multiplier_.least_multiplier(setting, sets, **budget, gradients=gradients)
    inputs.note_delta(command.delta, len(names), command.relation)
    each: list[str] = []
    if len(names) <= loss_tables.FEW:
        with_it = {"sigma": multiplier.sigma, "delta": command.delta}
        spent = victims.rows_of_each(setting, "pndp", sets, **with_it)
        each = loss_tables.by_agent(spent, names, _terminal.width())
    spec = inputs.seeded(command.graph, command.seed)
    said = {**budget, "clip": clip, "gradients": gradients}
    program = pasted.of_multiplier(setting, sets, graph=spec, mixing=command.mixing, **said)
    lines = account_report.multiplier_lines(setting, multiplier, sets, names, each, program, **said)
    return [_relation(command), *lines]


def _refuse_of_ldp(command: Any) -> None:
    """Refuse options of `dpjax design` that only an eavesdropper's design has.

    Args:
        command: The options, `dpjax.cli.DesignCommand`.

    Raises:
        ValueError: Naming the first one.
    """
    for name, kept in _OF_LDP.items():
        value = getattr(command, name)
        if value != kept:
            shown = repr(str(value)) if isinstance(value, Path | str) else value
            remedy = "name an --algorithm instead" if name == "design" else "leave it out"
            if name == "out":
                remedy += "; plan.make(config, W).save(path) saves a design, from Python"
            raise ValueError(f"{name} is {shown} with trust 'pndp'; {remedy}")


def _relation(command: Any) -> str:
    return f"relation: {command.relation} ({inputs.HIDDEN[command.relation]})"


def _typed(name: str, command: Any) -> str:
    """The command line that gives these options."""
    words = ["dpjax", name]
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if value != field.default:
            several = value if isinstance(value, tuple) else (value,)
            words += [f"--{field.name.replace('_', '-')}", *map(str, several)]
    return shlex.join(words)
