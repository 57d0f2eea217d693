"""Printing for people: what goes to a terminal is wrapped to its width, what goes elsewhere not."""

import contextlib
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, TextIO

__all__ = ["width", "wrapped", "wrapping"]

_TABLE = re.compile(r"\S {2,}\S")
_CONTROL = re.compile(r"[\r\x1b]")


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
