"""The command line: train from a file, design, account, plot, look at data, sum securely.

Only the command that runs imports the packages it needs, so that ``--help`` is quick.
"""

import contextlib
import dataclasses
import difflib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import tyro.extras

__all__: list[str] = []

_Relation = Literal["replace_agent", "replace_record", "zero_out_record"]


@dataclass(frozen=True)
class InitCommand:
    """Write a commented file of settings, for dpjax train.

    Attributes:
        path: The file; must not exist.
    """

    path: Annotated[Path, tyro.conf.Positional] = Path("dpjax.toml")

    def run(self, typed: str) -> int:
        from dpjax.commands import train

        return train.init(self.path)


@dataclass(frozen=True)
class TrainCommand:
    """Train privately from a file of settings.

    Prints the last metrics and the guarantees, and writes the result, its rows and a report of one
    page. dpjax init writes a file to begin with: eight agents learn digits under two noise designs.

    Example: dpjax train dpjax.toml

    Attributes:
        path: The file of settings.
        out: Folder to write to, in place of the file's; must not exist.
    """

    path: Annotated[Path, tyro.conf.Positional]
    out: Path | None = None

    def run(self, typed: str) -> int:
        from dpjax.commands import train

        return train.run(self.path, self.out)


@dataclass(frozen=True)
class DesignCommand:
    """Design the noise for a network and a privacy budget, and write it to a file.

    Prints the guarantee, the covariance's figures, its certified gap, and how much noise other
    designs need at the same guarantee. The attacker is an outsider, who reads every message on
    every link; against other participants, see dpjax account --epsilon.

    Example: dpjax design --graph er:20:0.5 --relation replace_agent --epsilon 10 --delta 1e-5
    --rounds 5000 --clip 0.1

    Attributes:
        graph: An edge-list file (its weights are ignored), or er:AGENTS:PROBABILITY[:SEED], ring:N,
            complete:N, star:N, path:N, grid:ROWS:COLUMNS, exponential:N, florentine, facebook_ego.
        relation: What the guarantee hides: replace_agent (all data of one agent), replace_record
            (one record, against another) or zero_out_record (one record, against its absence).
            There is no default: the same epsilon means different things.
        epsilon: Privacy budget of the whole run.
        delta: Probability with which epsilon may fail; below one over the number of units.
        rounds: Rounds of training that the budget covers.
        clip: Norm at which gradients are clipped.
        design: Which noise: whisper_horizon (least over all rounds), whisper (least in one round),
            pairwise (DECOR) or independent (LDP).
        horizon: Rounds that whisper_horizon looks ahead and the comparison counts; all by default.
        mixing: How neighbours average: metropolis (symmetric weights) or uniform (row-stochastic).
        accountant: How noise follows from the budget: gdp (exact), rdp (looser), paper (the
            Whisper paper's rule, refused where it is false).
        allow_unsound: Use the paper's rule also where it is false; the guarantee then says so.
            With --accountant paper only.
        seed: First seed of a random graph that names none.
        out: Where to write the design; must not exist. By default dpjax-design.npz here, numbered
            if that is taken.
        parameters: Entries of the model to be trained: forecasts whether this noise leaves it
            something to learn, and says what would help.
        batch_size: Records in an agent's batch, by which noise is divided; relations of records
            need it, and replace_agent takes none.
        all_designs: Above 300 agents, compare also with the Whisper designs, which take minutes.
    """

    graph: str
    relation: _Relation
    epsilon: float
    delta: float
    rounds: int
    clip: float
    design: Literal["whisper_horizon", "whisper", "pairwise", "independent"] = "whisper_horizon"
    horizon: int | None = None
    mixing: Literal["metropolis", "uniform"] = "metropolis"
    accountant: Literal["gdp", "rdp", "paper"] = "gdp"
    allow_unsound: bool = False
    seed: int = 0
    out: Path | None = None
    parameters: int | None = None
    batch_size: int | None = None
    all_designs: bool = False

    def run(self, typed: str) -> int:
        from dpjax.commands import design

        return design.run(self)


@dataclass(frozen=True)
class AccountCommand:
    """State what an algorithm costs every agent against an attacker, by distance from it.

    With --sigma the losses of that noise; with --epsilon the least noise that keeps the budget.

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
        sigma: Noise multiplier, as above; or
        epsilon: Budget at --delta that every agent keeps, for which the least sigma is found.
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
        delta: Epsilon is stated at this delta, beside mu; 1e-5 by default.
        gradients: Which loss the budget and the closing line are about: any (what training needs)
            or view (only for gradients that are fixed in advance or functions of what the attacker
            sees). The table has both.
        gossip_steps: Gossip rounds a gradient, each observed (muffliato).
        shared: decor: variance of a link's secret over that of an agent's own noise; 1 by default.
        zero_sum: zip_dl: over what noises sum to zero: with_own_copy (the default) or messages.
        mixing: How neighbours average: metropolis (symmetric weights) or uniform (row-stochastic).
        seed: First seed of a random graph that names none.
        out: Record file to write; must not exist. By default dpjax-account.jsonl here, numbered if
            that is taken. The figure has its name and ends in .svg.
    """

    graph: str
    algorithm: Literal["dsgd", "anti_pgd", "mafalda", "prefix_sum", "muffliato", "decor", "zip_dl"]
    relation: _Relation
    rounds: int
    sigma: float | None = None
    epsilon: float | None = None
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

    def run(self, typed: str) -> int:
        from dpjax.commands import account

        return account.run(self, typed)


@dataclass(frozen=True)
class PlotCommand:
    """Draw a figure from stored records.

    Rows of several settings are refused, with the column that tells them apart: --where chooses
    one of its values. Unless x is the round, a run's last round is drawn.

    Example: dpjax plot docs/records/spacetime_tradeoff.jsonl.gz --where graph=ring --where epochs=1
    --x rounds --y relative

    Attributes:
        source: One or several record files, or folders of them, drawn together.
        out: The figure's file, ending in .svg, .png or .pdf; beside the records by default.
        x: Column of the horizontal axis; by default what the records propose, else the round.
        y: Column of the vertical axis; by default the same, else test_loss or the first metric.
        series: Column that tells the lines apart; by default the same, else the algorithm.
        where: A condition column=value that rows must keep; may be given again.
        log_x: Logarithmic across.
        log_y: Logarithmic up.
        file: The files to read, in archives too: a name, or a pattern such as 'a9a_*'.
    """

    source: Annotated[tuple[Path, ...], tyro.conf.Positional]
    out: Path | None = None
    x: str | None = None
    y: str | None = None
    series: str | None = None
    where: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    log_x: bool = False
    log_y: bool = False
    file: str = "*"

    def run(self, typed: str) -> int:
        from dpjax.results import plots

        if not self.source:
            raise ValueError("source is missing; name a record file, or a folder of them")
        options = dataclasses.asdict(self)
        print(f"written: {plots.from_records(options.pop('source'), **options)}")
        return 0


@dataclass(frozen=True)
class DataCommand:
    """The data sets and their cache: list, fetch, path, check.

    The cache is $DPJAX_DATA, else $XDG_CACHE_HOME/dpjax, else ~/.cache/dpjax.

    Attributes:
        task: list: the data sets, which of them are in the cache, and where the others come from.
            fetch: bring one into the cache, or verify the one that is there. path: print the
            cache's folder. check: read every data set in the cache and compare its records with the
            published ones.
        name: With fetch, the data set's name, or facebook_ego.
    """

    task: Annotated[Literal["list", "fetch", "path", "check"], tyro.conf.Positional] = "list"
    name: Annotated[str | None, tyro.conf.Positional] = None

    def run(self, typed: str) -> int:
        from dpjax.commands import data

        return data.run(self.task, self.name)


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """Terms, the same at both ends: who holds others is turned away.

    Attributes:
        clients: Most clients that take part; 3 or more.
        length: Entries of a vector.
        bound: Largest absolute entry, a whole number.
        bits: Sums are computed modulo 2^bits; clients times bound must stay below 2^(bits-1).
        corrupt: Fraction of clients whose knowledge the server may have.
        dropout: Fraction of clients that may be missing.
        adversary: What the server may do: follow the protocol and be curious (semi_honest), or tell
            survivors different dropout sets (semi_malicious: one more stage, the consistency check,
            in which they confirm to each other what they received; see docs/secagg.md).
        host: The server's address.
        enrol: Seconds for clients to enrol.
        stage: Seconds for each stage after it.
    """

    clients: int
    length: int
    bound: int
    bits: int = 32
    corrupt: float = 0.05
    dropout: float = 0.05
    adversary: Literal["semi_honest", "semi_malicious"] = "semi_honest"
    host: str = "127.0.0.1"
    enrol: float = 60.0
    stage: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Serve(Agreed):
    """Listen for clients and sum their vectors, round after round.

    Example: dpjax secagg serve --clients 5 --length 100 --bound 1000 --dropout 0.2 --port 7000

    Attributes:
        port: TCP port; 0 takes a free one and prints it.
        rounds: How many sums.
        out: Where to write the sums, a .npy file [rounds, length]; must not exist. It is made at
            once and written again after each sum.
    """

    port: int = 0
    rounds: int = 1
    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Join(Agreed):
    """Take part in one sum with a vector from a file.

    Example: dpjax secagg join values.npy --clients 5 --length 100 --bound 1000 --dropout 0.2
    --port 7000

    Attributes:
        values: A .npy file of whole numbers [length].
        port: The server's TCP port.
        out: Where to write the sum, a .npy file [length]; must not exist. It is made at once.
    """

    values: Annotated[Path, tyro.conf.Positional]
    port: int
    out: Path | None = None


_SecaggAction = (
    Annotated[Serve, tyro.conf.subcommand(name="serve")]
    | Annotated[Join, tyro.conf.subcommand(name="join")]
)


@dataclass(frozen=True)
class SecaggCommand:
    """Secure sums over TCP: serve, join.

    A server learns the sum of whole-number vectors and nothing else about them: docs/secagg.md says
    against whom. Connections are not encrypted and clients not authenticated.

    Attributes:
        action: What to do.
    """

    action: tyro.conf.OmitSubcommandPrefixes[_SecaggAction]

    def run(self, typed: str) -> int:
        from dpjax.commands import secagg

        return getattr(secagg, type(self.action).__name__.lower())(self.action)


_COMMANDS: dict[str, Any] = {
    "init": InitCommand,
    "train": TrainCommand,
    "design": DesignCommand,
    "account": AccountCommand,
    "plot": PlotCommand,
    "data": DataCommand,
    "secagg": SecaggCommand,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments; None is the process's.

    Returns:
        Exit status: 0; 1 when ``dpjax data check`` finds a bad file, or ``dpjax secagg`` gets no
        sum; 2 after an error of the user's, whose message is printed; 130 after Ctrl-C.

    Example:
        >>> from dpjax import cli
        >>> cli.main(["design", "--graph", "nowhere.edges", "--relation", "replace_agent"]) == 0
        False
    """
    from dpjax import __version__

    arguments = list(sys.argv[1:] if argv is None else argv)
    # Python's streams are None where the process began without them (`2>&-`).
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")
    if arguments == ["--version"]:
        print(f"dpjax {__version__}")
        return 0
    prog = " ".join(["dpjax", *(name for name in arguments[:1] if name in _COMMANDS)])
    command: Any = None
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of sites have letters that a terminal's encoding may lack.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if arguments in ([], ["--help"], ["-h"]):
            print(_overview())
            return 0
        _suggest(arguments)
        with _plain_help() if {"-h", "--help"} & set(arguments) else contextlib.nullcontext():
            command = tyro.extras.subcommand_cli_from_dict(_COMMANDS, args=arguments, prog="dpjax")
        return command.run(shlex.join(["dpjax", *arguments]))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2 * (stop.code is not None)
    except BrokenPipeError:  # Whoever read has read enough, as `head` does.
        # For the interpreter's last flush.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        return 1
    except (ValueError, OSError, ImportError, MemoryError) as error:
        message = str(error) or "out of memory; give a smaller network"
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}"
        message = message if command is None else _by_option(command, message)
        print(f"{prog}: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130


def _overview() -> str:
    """The help of all commands, on one screen."""
    lines = [
        "usage: dpjax COMMAND [OPTIONS]",
        "",
        "Differentially private learning without a trusted server.",
        "",
    ]
    for name, command in _COMMANDS.items():
        lines.append(f"  {name:<8} {(command.__doc__ or '').splitlines()[0]}")
    lines += [
        "",
        "  dpjax COMMAND --help    its options, and an example",
        "  dpjax --version         the version",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _plain_help() -> Iterator[None]:
    """Leave out of a help text that an option may be None, which is what leaving it out means."""
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held):
            yield
    finally:
        # In a column as wide as before.
        text = re.sub(r"\{None\}\|(\S+)( *)", r"\1\2       ", held.getvalue())
        print(re.sub(r" ?\(default: None\)", lambda found: " " * len(found[0]), text), end="")


_MEANT = {"eps": "epsilon", "clip-norm": "clip", "output": "out", "steps": "rounds"}
"""Options that people try, and those of that meaning."""


def _suggest(arguments: Sequence[str]) -> None:
    """Refuse a command or an option that there is not, naming the nearest.

    Raises:
        ValueError: Naming it.
    """
    name, *rest = arguments
    if name.startswith("-"):
        return
    if name not in _COMMANDS:
        raise ValueError(f"no command {name!r}{_near(name, _COMMANDS)}; see dpjax --help")
    kinds = [_COMMANDS[name]] if name != "secagg" else [Serve, Join]
    fields = [field for kind in kinds for field in dataclasses.fields(kind)]
    known = [field.name.replace("_", "-") for field in fields] + ["help"]
    for word in rest:
        option = word.partition("=")[0].removeprefix("--").replace("_", "-")
        option = option.removeprefix("no-") if option not in known else option
        if word.startswith("--") and len(word) > 2 and option not in known:
            meant = _MEANT.get(option, option)
            raise ValueError(
                f"no option --{option}{_near(meant, known, '--')}; see dpjax {name} --help"
            )


def _near(name: str, known: Iterable[str], before: str = "") -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {before}{near[0]}?" if near else ""


_ELSEWHERE = {"clip_norm": "clip", "attackers": "attacker", "paths": "source"}
_ELSEWHERE |= {"logx": "log_x", "logy": "log_y"}
"""Arguments in Python, and the options that they are on the command line."""
_POSITIONAL = {"source": "PATH", "name": "NAME", "path": "PATH", "values": "PATH"}
_WORDS = re.compile(
    r"^[a-z]\w*(?= (?:is|holds|has|names|and)\b)|(?<=\()where(?= )"
    # Not where it is part of Python: config.clip_norm, clip_norm(...).
    r"|(?<![\w.'\"-])[a-z]+(?:_[a-z]+)+\b(?!\()"
)


def _by_option(command: Any, text: str) -> str:
    """An error in the words of the command line: options in place of Python's arguments."""
    command = getattr(command, "action", command)
    names = [field.name for field in dataclasses.fields(command)]
    options = {name: _POSITIONAL.get(name, f"--{name.replace('_', '-')}") for name in names}
    options |= {name: options[to] for name, to in _ELSEWHERE.items() if to in options}
    # What is called a path in Python is the option whose value it is, and no option's elsewhere.
    options.pop("path", None)
    for name in names:
        values = getattr(command, name)
        for value in values if isinstance(values, tuple) else (values,):
            if value is not None and text.startswith(f"path is {str(value)!r}"):
                options["path"] = _POSITIONAL.get(name) or options[name]
    return _WORDS.sub(lambda word: options.get(word[0], word[0]), text)
