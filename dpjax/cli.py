"""The command line: ``dpjax design``, ``account``, ``plot``, ``data`` and ``secagg``.

Only the command that runs imports the rooms it needs, so that ``--help`` is quick.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dpjax import _terminal
from dpjax.commands.secagg_options import Demo, Join, SecaggCommand, Serve

__all__ = [
    "AccountCommand",
    "Check",
    "DataCommand",
    "DesignCommand",
    "Fetch",
    "List",
    "PlotCommand",
    "Where",
    "main",
]

_Algorithm = Literal[
    "dsgd", "anti_pgd", "mafalda", "prefix_sum", "muffliato", "decor", "zip_dl"
]  # fmt: skip
_Relation = Literal["replace_agent", "replace_record", "zero_out_record"]


@dataclass(frozen=True)
class DesignCommand:
    """Design the noise for a network and a privacy budget, and write it to a file.

    Prints the guarantee, the covariance's figures, its certified gap, and how much noise other
    designs need at the same guarantee.

    With --trust pndp: the noise multiplier at which every agent keeps the budget against single
    agents (or colluders) who see the messages that they receive; nothing is written.

    Example: dpjax design --graph er:20:0.5 --relation replace_agent --epsilon 10 --delta 1e-5
    --rounds 5000 --clip 0.1

    Attributes:
        graph: An edge-list file, or er:AGENTS:PROBABILITY[:SEED], ring:N, complete:N, star:N,
            path:N, grid:ROWS:COLUMNS, exponential:N, florentine, facebook_ego.
        relation: What the guarantee hides: replace_agent (all data of one agent), replace_record
            (one record, against another) or zero_out_record (one record, against its absence).
            There is no default: the same epsilon means different things.
        epsilon: Privacy budget of the whole run.
        delta: Probability with which epsilon may fail; below one over the number of units.
        rounds: Rounds of training that the budget covers.
        clip: Norm at which gradients are clipped.
        design: Which noise, under --trust ldp: whisper_horizon (least over all rounds, the
            default), whisper (least in one round), pairwise (DECOR) or independent (LDP).
        horizon: Rounds that whisper_horizon looks ahead and the comparison counts; all by default.
        mixing: How neighbours average: metropolis (symmetric weights) or uniform (row-stochastic).
        accountant: How noise follows from the budget: gdp (exact), rdp (looser), paper (the
            Whisper paper's rule, refused where it is false).
        allow_unsound: Use the paper's rule also where it is false; the guarantee then says so.
            With --accountant paper only.
        seed: First seed of a random graph that names none.
        out: Where to write the design; must not exist. By default dpjax-design.npz here, numbered
            if that is taken.
        trust: Against whom: ldp (local DP: an outsider, who reads every message on every link) or
            pndp (pairwise network DP: each other participant, who reads the messages that it
            receives and knows its own gradients and noise). What follows is pndp's.
        attacker: all (every single agent in turn, the default), or agents who collude, as in
            dpjax account.
        algorithm: Which algorithm, as in dpjax account.
        epochs: Rounds in which a record takes part; with --separation. Every round by default.
        separation: Rounds from one of them to the next.
        gossip_steps: Gossip rounds a gradient.
        gradients: What the guarantee covers: any, or view (only gradients that are fixed in
            advance or functions of what the attacker sees; not so in training).
        parameters: Entries of the model to be trained: forecasts whether this noise leaves it
            something to learn, and says what would help.
        batch_size: Records in an agent's batch, by which noise is divided; relations of records
            need it, and replace_agent takes none.
    """

    graph: str
    relation: _Relation
    epsilon: float
    delta: float
    rounds: int
    clip: float
    design: Literal["whisper_horizon", "whisper", "pairwise", "independent"] | None = None
    horizon: int | None = None
    mixing: Literal["metropolis", "uniform"] = "metropolis"
    accountant: Literal["gdp", "rdp", "paper"] = "gdp"
    allow_unsound: bool = False
    seed: int = 0
    out: Path | None = None
    trust: Literal["ldp", "pndp"] = "ldp"
    attacker: tuple[str, ...] = ()
    algorithm: _Algorithm | None = None
    epochs: int | None = None
    separation: int | None = None
    gossip_steps: int | None = None
    gradients: Literal["any", "view"] | None = None
    parameters: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class AccountCommand:
    """Tell what an algorithm costs every agent against an attacker, by distance from it.

    sigma is the noise multiplier: a noise's standard deviation a coordinate over the clip norm.
    dsgd, muffliato: of the noise that each agent adds to each gradient. anti_pgd, mafalda,
    prefix_sum: of the normals Z in C^-1 Z, the strategy C scaled to sensitivity 1 for this
    participation, so that an eavesdropper's loss is mu = 1 / sigma (zero-out). decor: of an agent's
    own noise; a link's secret has --shared times its variance. zip_dl: of z_k in z_k - mean(z).

    Prints the mean, least and largest loss at each distance (and of every agent, where they are
    few), and writes the loss of every agent to a record file, and a figure beside it.

    Example: dpjax account --graph florentine --algorithm dsgd --trust pndp --attacker Medici
    --relation replace_record --rounds 380 --epochs 20 --separation 19 --sigma 1

    Attributes:
        graph: An edge-list file or a name, as in dpjax design.
        algorithm: dsgd (DP-D-SGD), anti_pgd, mafalda, prefix_sum (D-MF), muffliato, decor, zip_dl.
        relation: What is hidden: replace_record (one record, against another), zero_out_record
            (against its absence) or replace_agent (all data of one agent, in every round). There is
            no default, as in dpjax design.
        rounds: Rounds of training, counted in gradients.
        sigma: Noise multiplier, as above.
        trust: Who attacks: ldp (local DP: an outsider, who reads every message on every link), pndp
            (pairwise network DP: each other participant, who reads the messages that it receives
            and knows its own gradients and noise) or secldp (LDP with secrets between pairs: an
            outsider, or participants who collude, who knows every pair's secret but those among
            the protected).
        attacker: Agents who attack, and collude if several; or all, every single agent in turn,
            which is the default of pndp. None with ldp. An agent is its label in the network, or
            its index 0, 1, ...; label:3 and index:3 say which, where 3 may be either.
        protected: With secldp, agents whose secrets among themselves stay unknown; all but the
            attackers by default.
        epochs: Rounds in which a record takes part; with --separation. Every round by default.
        separation: Rounds from one of them to the next.
        delta: Epsilon is told at this delta, beside mu; 1e-5 by default.
        gradients: Which loss the closing line is about: any (what training needs) or view (only for
            gradients that are fixed in advance or functions of what the attacker sees). The table
            has both.
        gossip_steps: Gossip rounds a gradient, each observed (muffliato).
        shared: decor: variance of a link's secret over that of an agent's own noise; 1 by default.
        zero_sum: zip_dl: over what noises sum to zero: with_own_copy (the default) or messages.
        mixing: How neighbours average: metropolis (symmetric weights) or uniform (row-stochastic).
        seed: First seed of a random graph that names none.
        out: Record file to write; must not exist. By default dpjax-account.jsonl here, numbered if
            that is taken. The figure has its name and ends in .svg.
    """

    graph: str
    algorithm: _Algorithm
    relation: _Relation
    rounds: int
    sigma: float
    trust: Literal["ldp", "pndp", "secldp"] = "ldp"
    attacker: tuple[str, ...] = ()
    protected: tuple[str, ...] | None = None
    epochs: int | None = None
    separation: int | None = None
    delta: float = 1e-5
    gradients: Literal["any", "view"] = "any"
    gossip_steps: int = 1
    shared: float | None = None
    zero_sum: Literal["messages", "with_own_copy"] | None = None
    mixing: Literal["metropolis", "uniform"] = "metropolis"
    seed: int = 0
    out: Path | None = None


@dataclass(frozen=True)
class PlotCommand:
    """Draw a figure from stored records.

    What varies besides x, y and the series is held at its most frequent value, and the caption
    says so; --where chooses another.

    Example: dpjax plot docs/records/spacetime_tradeoff.jsonl.gz --where graph=ring --y relative

    Attributes:
        source: One or several record files, or folders of them, drawn together.
        out: The figure's file, ending in .svg, .png or .pdf; beside the records by default.
        x: Column of the horizontal axis.
        y: Column of the vertical axis.
        series: Column that tells the lines apart.
        where: A condition column=value that rows must keep; may be given again.
        log_x: Logarithmic across; so by itself where the values span a factor of 100.
        log_y: Logarithmic up; so by itself where the values span a factor of 100.
        linear: Neither, whatever the values span.
    """

    source: Annotated[tuple[Path, ...], tyro.conf.Positional]
    out: Path | None = None
    x: str | None = None
    y: str | None = None
    series: str | None = None
    where: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    log_x: bool = False
    log_y: bool = False
    linear: bool = False


@dataclass(frozen=True)
class List:
    """List the data sets, which of them are in the cache, and where the others come from."""


@dataclass(frozen=True)
class Fetch:
    """Bring a data set into the cache, or verify the one that is there.

    Attributes:
        name: The data set.
    """

    name: Annotated[str, tyro.conf.Positional]


@dataclass(frozen=True)
class Where:
    """Print the folder of the cache."""


@dataclass(frozen=True)
class Check:
    """Read every data set in the cache and compare its records with the published ones."""


_Action = (
    Annotated[List, tyro.conf.subcommand(name="list")]
    | Annotated[Fetch, tyro.conf.subcommand(name="fetch")]
    | Annotated[Where, tyro.conf.subcommand(name="path")]
    | Annotated[Check, tyro.conf.subcommand(name="check")]
)


@dataclass(frozen=True)
class DataCommand:
    """The data sets and their cache: list, fetch, path, check.

    The cache is $DPJAX_DATA, else $XDG_CACHE_HOME/dpjax, else ~/.cache/dpjax.

    Attributes:
        action: What to do; list by default.
    """

    action: tyro.conf.OmitSubcommandPrefixes[_Action] = dataclasses.field(default_factory=List)


_Command = (
    Annotated[DesignCommand, tyro.conf.subcommand(name="design")]
    | Annotated[AccountCommand, tyro.conf.subcommand(name="account")]
    | Annotated[PlotCommand, tyro.conf.subcommand(name="plot")]
    | Annotated[DataCommand, tyro.conf.subcommand(name="data")]
    | Annotated[SecaggCommand, tyro.conf.subcommand(name="secagg")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments; None is the process's.

    Returns:
        Exit status: 0; 1 when ``dpjax data check`` finds a bad file, or ``dpjax secagg`` gets no
        sum; 2 after an error of the user's, whose message is printed; 130 after Ctrl-C.
    """
    with _terminal.wrapping():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    from dpjax import __version__

    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"dpjax {__version__}")
        return 0
    commands = ("design", "account", "plot", "data", "secagg")
    known = [name for name in commands if arguments[:1] == [name]]
    prog, command = " ".join(["dpjax", *known]), None
    try:
        with _terminal.parsing(prog):
            command = tyro.cli(
                _Command,
                args=arguments or ["--help"],
                prog="dpjax",
                description="Differentially private learning without a trusted server.",
            )
        return _COMMANDS[type(command)](command)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2 * (stop.code is not None)
    except BrokenPipeError:  # Whoever read has read enough, as `head` does.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the interpreter's last flush
        return 1
    except (ValueError, OSError, ImportError) as error:
        message = str(error) if command is None else _terminal.by_option(command, str(error))
        print(f"{prog}: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except MemoryError:
        print(f"{prog}: error: out of memory; give a smaller network", file=sys.stderr)
        return 2


def _design(command: DesignCommand) -> int:
    from dpjax.commands import account, design

    return account.insiders(command) if command.trust == "pndp" else design.run(command)


def _account(command: AccountCommand) -> int:
    from dpjax.commands import account

    return account.run(command)


def _plot(command: PlotCommand) -> int:
    from dpjax.commands import plot

    return plot.run(command)


def _data(command: DataCommand) -> int:
    from dpjax.commands import data

    action = command.action
    if isinstance(action, Fetch):
        return data.fetch(action.name)
    if isinstance(action, Check):
        return data.check()
    return data.where() if isinstance(action, Where) else data.everything()


def _secagg(command: SecaggCommand) -> int:
    from dpjax.commands import secagg

    action = command.action
    if isinstance(action, Serve):
        return secagg.serve(action)
    if isinstance(action, Join):
        return secagg.join(action)
    assert isinstance(action, Demo)
    return secagg.demo(action)


_COMMANDS: dict[type, Any] = {
    DesignCommand: _design,
    AccountCommand: _account,
    PlotCommand: _plot,
    DataCommand: _data,
    SecaggCommand: _secagg,
}


if __name__ == "__main__":
    sys.exit(main())
