"""The command line: train from a file, design, account, plot, look at data, sum securely.

Only the command that runs imports the packages it needs, so that ``--help`` is quick.
"""

import contextlib
import importlib
import inspect
import io
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated, Any, TextIO

import tyro
import tyro.extras

try:
    from tyro._errors import on_parse_error
except ImportError:  # Another version: its boxes are printed.
    on_parse_error = contextlib.nullcontext  # type: ignore[assignment]

__all__ = ()

_COMMANDS = {
    "init": "Write a commented file of settings, for dpjax train.",
    "train": "Train privately from a file of settings.",
    "design": "Design the noise for a network and a privacy budget, and write it to a file.",
    "account": "State what an algorithm costs every agent against an attacker.",
    "plot": "Draw a figure from stored records.",
    "data": "The data sets and their cache: list, fetch, path, check.",
    "secagg": "Secure sums between machines: serve, join.",
    "site": "A real site: request, plan, run, status, standing, replan, leave, ledger and more.",
}
"""Commands, and their lines in the help of all."""
_OVERVIEW = """\
usage: dpjax COMMAND [OPTIONS]

Differentially private learning without a trusted server.

{commands}

  dpjax COMMAND --help    its options, and an example
  dpjax --version         the version"""
"""The help of all commands, on one screen."""
_FUNCTIONS = {
    "init": "commands.train.init_command",
    "train": "commands.train.train_command",
    "design": "commands.design.design_command",
    "account": "commands.account.account_command",
    "plot": "commands.plot.plot_command",
    "data": "commands.data.data_command",
    "secagg": "sites.sum_command.secagg_command",
    "secagg serve": "sites.sum_command.serve_command",
    "secagg join": "sites.sum_command.join_command",
    "site": "sites.command.site_command",
    "site request": "sites.command.request_command",
    "site renew": "sites.command.renew_command",
    "site authority": "sites.command.authority_command",
    "site secret": "sites.command.secret_command",
    "site plan": "sites.command.plan_command",
    "site document": "sites.command.document_command",
    "site run": "sites.command.run_command",
    "site standing": "sites.command.standing_command",
    "site replan": "sites.command.replan_command",
    "site leave": "sites.command.leave_command",
    "site ledger": "sites.command.ledger_command",
    "site relay": "sites.command.relay_command",
    "site status": "sites.command.status_command",
}
"""Functions of commands and of their actions, by their modules."""


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
            lines = (f"  {name:<8} {summary}" for name, summary in _COMMANDS.items())
            print(_OVERVIEW.format(commands="\n".join(lines)))
            return 0
        if arguments[0].startswith("--tyro-"):
            # What a shell completes: this option of tyro's needs all commands.
            commands = {name: _command(name) for name in _COMMANDS}
            return tyro.extras.subcommand_cli_from_dict(commands, args=arguments, prog=prog)
        name, *options = arguments
        _check("command", [name], _COMMANDS, prog)
        prog = f"dpjax {name}"
        # Called by itself: tyro words the errors of what it calls on its way.
        actions = [words[len(name) + 1 :] for words in _FUNCTIONS if words.startswith(f"{name} ")]
        if actions and not options:
            first = ", ".join(actions[:-1])
            raise ValueError(f"missing: {first} or {actions[-1]}; see {prog} --help")
        if actions and not options[0].startswith("-"):
            action = options.pop(0)
            _check("action", [action], actions, prog)
            prog += f" {action}"
            name += f" {action}"
        command = _command(name)
        parameters = ("help", *inspect.signature(command).parameters)
        names = [f"--{parameter.replace('_', '-')}" for parameter in parameters]
        words = [word.partition("=")[0].replace("_", "-") for word in options if word[:2] == "--"]
        _check("option", (word.replace("--no-", "--") for word in words), names, prog)
        # Here, since a list of commands needs no NumPy.
        from dpjax import _files

        with warnings.catch_warnings(), on_parse_error(_refuse):
            # Python would show a line of code beside a warning.
            warnings.showwarning = lambda text, *_: _files.say(f"{prog}: warning: {text}")
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


def _command(name: str) -> Callable[..., int]:
    """Import a command's function: tyro reads options from its signature, help from its words."""
    module, _, function = _FUNCTIONS[name].rpartition(".")
    command = getattr(importlib.import_module(f"dpjax.{module}"), function)
    kinds = command.__annotations__
    for option in inspect.signature(command).parameters.values():
        # That a default is None says no more than that the option may be left out.
        if option.default is None:
            kinds[option.name] = Annotated[kinds[option.name], tyro.conf.arg(help_behavior_hint="")]
    return command


_SYNONYMS = {"--steps": "--rounds"}
"""Options that people try, and those of that meaning."""


def _check(kind: str, words: Iterable[str], names: Collection[str], prog: str) -> None:
    """Refuse a command, an action or an option that there is not, naming the nearest.

    Raises:
        ValueError: Naming both.
    """
    from dpjax import _validate

    for word in words:
        if word not in names:
            remedy = _validate.choice(_SYNONYMS.get(word, word), names, f"see {prog} --help")
            raise ValueError(f"no {kind} {word}; {remedy}")


_FAULTS = {
    "MissingArgs": "missing: {missing}",
    "BadValue": "{event.argument.lowered.name_or_flags[0]} has no value",
    "InvalidChoice": "{event.argument.lowered.name_or_flags[0]} is {event.value!r}; {remedy}",
    "InstantiationFailure": "{event.argument.lowered.name_or_flags[0]} is {value}, which is no "
    "{event.argument.lowered.metavar}",
    "UnrecognizedArgs": "{event.tokens[0]!r} is one argument too many",
}
"""What is said of tyro's events, by their classes."""


def _refuse(event: Any) -> None:
    """Say in one line, as of all errors, what tyro would say in a box.

    Raises:
        ValueError: With the line.
    """
    from dpjax import _validate

    # Events are no public part of tyro: of one that another version brings its box is printed.
    with contextlib.suppress(AttributeError, LookupError):
        fields = {"missing_arguments": (), "value": "", "choices": (), "message": ""} | vars(event)
        fault = _FAULTS[type(event).__name__].format(
            event=event,
            missing=", ".join(row.arg.display_name() for row in fields["missing_arguments"]),
            remedy=_validate.choice(fields["value"], fields["choices"]),
            value=fields["message"].rpartition(": ")[2],
        )
        raise ValueError(f"{fault}; see {event.prog} --help")
