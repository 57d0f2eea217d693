"""What a terminal shows is wrapped to its width; what a program reads is not."""

import io
import sys
from pathlib import Path

import pytest

from dpjax import _terminal, cli

LONG = "guarantee: every victim is told at great length " * 6
ACCOUNT = ["account", "--graph", "florentine", "--algorithm", "dsgd", "--rounds", "2", "--sigma",
           "1", "--relation", "replace_record", "--trust", "pndp", "--attacker", "Medici",
           "--delta", "1e-5"]  # fmt: skip


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


def opened(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 60 columns for standard output."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    return shown


def test_lines_break_between_words_and_tables_do_not() -> None:
    lines = _terminal.wrapped("  " + LONG, 60).split("\n")
    assert max(map(len, lines)) <= 60 and " ".join("".join(lines).split()) != ""
    assert " ".join(" ".join(lines).split()) == " ".join(LONG.split())
    assert lines[0].startswith("  g") and all(line.startswith("    ") for line in lines[1:])
    table = f"{'a':<50}{'b':>50}"
    assert _terminal.wrapped(table, 60) == table
    assert _terminal.wrapped("short", 60) == "short"
    word = "x" * 100
    assert _terminal.wrapped(f"path {word}", 60).endswith(word)


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with _terminal.wrapping():
        print(LONG)
    assert capsys.readouterr().out == LONG + "\n"
    assert _terminal.width(io.StringIO()) is None


def test_a_terminal_gets_wrapped_lines_and_bars_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    with _terminal.wrapping():
        print("\r 1%", end="")
        assert terminal.getvalue() == "\r 1%"
        print("\r 2%")
        print("no", "end", end="")
        sys.stdout.flush()
        assert terminal.getvalue().endswith("no end")
        print("\n" + LONG)
    assert terminal.getvalue().startswith("\r 1%\r 2%\nno end\n")
    assert max(map(len, terminal.getvalue().split("\n"))) <= 60


def test_the_report_of_an_account_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    terminal = opened(monkeypatch)
    assert cli.main(ACCOUNT) == 0
    shown = terminal.getvalue().split("\n")
    assert max(map(len, shown)) <= 60
    # Tables stand below each other, each agent once in each.
    assert shown.count("gradients: any:") == shown.count("gradients: view:") == 2
    assert sum(line.startswith("Guadagni ") for line in shown) == 2
