"""Errors on the command line: one line each, in the words of the options that were typed."""

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["by_option", "parsing", "plain"]

_ELSEWHERE = {"clip_norm": "clip", "attackers": "attacker", "paths": "source"}
"""Arguments in Python, and the options that they are on the command line."""
_POSITIONAL = {"source": "SOURCE", "name": "NAME"}
_TITLES = ("Required options", "Unrecognized options", "Invalid choice", "Value error")
_EDGE = re.compile(r"^│ ?|\s*│?$")
_RULE = re.compile(r"^\s*[─-]{8,}$|^[╭╰].*[╮╯]$")
_OPTION = re.compile(r"^ {2,6}(--[\w-]+)")


def by_option(command: Any, text: str) -> str:
    """Return an error in the words of the command line: options in place of Python's arguments.

    Args:
        command: The options, a dataclass.
        text: The error; its first word may be an argument ("clip_norm is 0; ..."), and words with
            underscores may be arguments anywhere.

    Returns:
        The text; what is no option is left as it is.
    """
    command = getattr(command, "action", command)
    fields = [field.name for field in dataclasses.fields(command)]
    options = {name: _POSITIONAL.get(name, f"--{name.replace('_', '-')}") for name in fields}
    options |= {name: options[to] for name, to in _ELSEWHERE.items() if to in options}
    for name in fields:
        value = getattr(command, name)
        values = value if isinstance(value, tuple) else (value,)
        # What is called a path in Python is the option whose value it is.
        if any(text.startswith(f"path is {str(one)!r}") for one in values if one is not None):
            options["path"] = options[name]
    subject = re.match(r"([a-z]\w*)(?= (is|holds|has|names|and)\b)", text)
    if subject and subject[1] in options:
        text = options[subject[1]] + text[subject.end() :]
    # Not where it is part of Python: config.clip_norm, clip_norm(...).
    alone = re.compile(r"(?<![\w.'\"-])[a-z]+(?:_[a-z]+)+\b(?!\()")
    return alone.sub(lambda word: options.get(word[0], word[0]), text)


def plain(text: str) -> str:
    """Return what a parser drew as a box in one line, without its border, help and title.

    Args:
        text: What `tyro` printed.
    """
    parts: list[str] = []
    missing: list[str] = []
    unknown: list[str] = []
    meant: list[str] = []
    section = ""
    for line in [_EDGE.sub("", each) for each in text.splitlines()]:
        words = line.strip()
        if words.startswith(("For full helptext", "Argument helptext")):
            break
        if words.startswith("Missing from"):
            section = "missing"
        elif words == "Unrecognized options:":
            section = "unknown"
        elif words.startswith(("Perhaps you meant", "Arguments similar to")):
            section = "meant"
        elif _RULE.match(line):
            parts += [";"] if parts and parts[-1] != ";" else []
        elif section in ("missing", "meant"):
            option = _OPTION.match(line)
            (missing if section == "missing" else meant).extend([option[1]] if option else [])
        elif section == "unknown":
            unknown.append(words)
        elif words not in _TITLES:
            parts.append(words)
    parts += [f"missing {', '.join(missing)}"] if missing else []
    parts += [f"{'and ' if missing else ''}unrecognized {' '.join(unknown)}"] if unknown else []
    parts += [f"; perhaps you meant {' or '.join(dict.fromkeys(meant))}"] if meant else []
    joined = re.sub(r"(\s*;)+", ";", " ".join(" ".join(parts).split()))
    return joined.rstrip("; .") or "not understood"


@contextlib.contextmanager
def parsing(prog: str) -> Iterator[None]:
    """Print what a parser refuses inside a ``with`` block in one line, and exit with status 2.

    Args:
        prog: What was run, such as "dpjax design".
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as stop:
        if stop.code != 2:
            sys.stderr.write(said.getvalue())
            raise
        print(f"{prog}: error: {plain(said.getvalue())}; see {prog} --help", file=sys.stderr)
        raise
    sys.stderr.write(said.getvalue())
