"""The command line: train from a file, design, account, plot, look at data, sum securely.

Only the command that runs imports the packages it needs, so that ``--help`` is quick.
"""

import difflib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TextIO

import tyro
import tyro.extras

__all__ = ()

_COMMANDS = {
    "init": "Write a commented file of settings, for dpjax train.",
    "train": "Train privately from a file of settings.",
    "design": "Design the noise for a network and a privacy budget, and write it to a file.",
    "account": "State what an algorithm costs every agent against an attacker.",
    "plot": "Draw a figure from stored records.",
    "data": "The data sets and their cache: list, fetch, path, check.",
    "secagg": "Secure sums over TCP: serve, join.",
}
"""Commands, and their lines in the help of all."""
_FUNCTIONS = {
    "init": "train.init_command",
    "train": "train.train_command",
    "design": "design.design_command",
    "account": "account.account_command",
    "plot": "plot.plot_command",
    "data": "data.data_command",
    "secagg": "secagg.secagg_command",
    "serve": "secagg.serve_command",
    "join": "secagg.join_command",
}
"""Functions of commands and of secagg's actions, by their modules in `dpjax.commands`."""
_WITHOUT_DEFAULT = tyro.conf.arg(help_behavior_hint="")
"""Leaves the default out of an option's help."""


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
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    if arguments == ["--version"]:
        print(f"dpjax {__version__}")
        return 0
    prog = "dpjax"
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of sites have letters that a terminal's encoding may lack.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if arguments in ([], ["--help"], ["-h"]):
            print(_overview())
            return 0
        if arguments[0].startswith("-"):
            # What a shell completes: this option of tyro's needs all commands.
            commands = {name: _command(name) for name in _COMMANDS}
            return tyro.extras.subcommand_cli_from_dict(commands, args=arguments, prog=prog)
        name = arguments[0]
        if name not in _COMMANDS:
            raise ValueError(f"no command {name!r}{_near(name, _COMMANDS)}; see dpjax --help")
        prog = f"dpjax {name}"
        command = _command(name)
        options = arguments[1:]
        if name == "secagg" and options[:1] in (["serve"], ["join"]):
            # Called by itself: tyro words the errors of what it calls on its way.
            command = _command(options.pop(0))
        _refuse_unknown(name, command, options)
        return tyro.cli(command, args=options, prog=prog, config=(tyro.conf.DisallowNone,))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2 * (stop.code is not None)
    except BrokenPipeError:  # Whoever read has read enough, as `head` does.
        # For the interpreter's last flush.
        sys.stdout = _nowhere()
        return 1
    except (ValueError, OSError, ImportError, MemoryError) as error:
        message = str(error) or "out of memory; give a smaller network"
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}"
        print(f"{prog}: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130


def _nowhere() -> TextIO:
    """A stream that nobody reads."""
    return open(os.devnull, "w", encoding="utf-8")


def _overview() -> str:
    """The help of all commands, on one screen."""
    lines = [
        "usage: dpjax COMMAND [OPTIONS]",
        "",
        "Differentially private learning without a trusted server.",
        "",
    ]
    lines += [f"  {name:<8} {summary}" for name, summary in _COMMANDS.items()]
    lines += [
        "",
        "  dpjax COMMAND --help    its options, and an example",
        "  dpjax --version         the version",
    ]
    return "\n".join(lines)


def _command(name: str) -> Callable[..., int]:
    """Import a command's function: tyro reads options from its signature, help from its words."""
    module, _, function = _FUNCTIONS[name].partition(".")
    command = getattr(importlib.import_module(f"dpjax.commands.{module}"), function)
    kinds = command.__annotations__
    for option in inspect.signature(command).parameters.values():
        # That a default is None says no more than that the option may be left out.
        if option.default is None:
            kinds[option.name] = Annotated[kinds[option.name], _WITHOUT_DEFAULT]
    return command


_SYNONYMS = {"eps": "epsilon", "clip": "clip-norm", "output": "out", "steps": "rounds"}
"""Options that people try, and those of that meaning."""


def _refuse_unknown(name: str, command: Callable[..., int], words: Iterable[str]) -> None:
    """Refuse an option that a command lacks, naming the nearest.

    Raises:
        ValueError: Naming it.
    """
    parameters = (*inspect.signature(command).parameters, "help")
    options = [parameter.replace("_", "-") for parameter in parameters]
    for word in words:
        option = word.partition("=")[0].removeprefix("--").replace("_", "-")
        if not word.startswith("--") or len(word) == 2 or option.removeprefix("no-") in options:
            continue
        near = _near(_SYNONYMS.get(option, option), options, "--")
        raise ValueError(f"no option --{option}{near}; see dpjax {name} --help")


def _near(name: str, names: Iterable[str], prefix: str = "") -> str:
    matches = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {prefix}{matches[0]}?" if matches else ""
