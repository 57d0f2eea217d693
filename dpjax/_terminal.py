"""Commands and people: text wrapped to a terminal's width, errors in one line.

Errors use the words of the options that were typed, in place of Python's arguments.
"""

import contextlib
import dataclasses
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, TextIO

__all__: list[str] = []

_TABLE = re.compile(r"\S {2,}\S")
_CONTROL = re.compile(r"[\r\x1b]")

_ELSEWHERE = {"clip_norm": "clip", "attackers": "attacker", "paths": "source"}
"""Arguments in Python, and the options that they are on the command line."""
_POSITIONAL = {"source": "SOURCE", "name": "NAME"}
_TITLES = ("Required options", "Unrecognized options", "Invalid choice", "Value error")
_EDGE = re.compile(r"^│ ?|\s*│?$")
_RULE = re.compile(r"^\s*[─-]{8,}$|^[╭╰].*[╮╯]$")
_OPTION = re.compile(r"^ {2,6}(--[\w-]+)")


def width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that a stream writes to, None for a file or a pipe.

    Args:
        stream: By default standard output.
    """
    stream = sys.stdout if stream is None else stream
    return shutil.get_terminal_size().columns if stream.isatty() else None


def wrapped(line: str, columns: int) -> str:
    """A line, broken between words, its continuation indented; a table's is left as it is.

    Args:
        line: Without its end.
        columns: Where it must end.
    """
    if len(line) <= columns or _TABLE.search(line.strip()) or _CONTROL.search(line):
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    parts = textwrap.wrap(
        line.strip(),
        max(columns, 20),
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(parts)


@contextlib.contextmanager
def wrapping() -> Iterator[None]:
    """Wrap what is printed inside a ``with`` block; files and pipes get whole lines."""
    with contextlib.ExitStack() as stack:
        if sys.stdout.isatty():
            stack.enter_context(contextlib.redirect_stdout(_Wrapping(sys.stdout)))
        if sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stderr(_Wrapping(sys.stderr)))
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


class _Wrapping:
    """A terminal whose whole lines are wrapped; the rest is its own."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._rest = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        columns = width(self._stream) or sys.maxsize
        for line in lines:
            self._stream.write(wrapped(line, columns) + "\n")
        if _CONTROL.search(self._rest):  # a progress bar, drawn as it comes
            self.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.write(self._rest)
        self._rest = ""
        self._stream.flush()


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
