"""What a command refuses: one line, in the words of the options, whatever the parser draws."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpjax import _terminal, cli

ROOT = Path(__file__).resolve().parents[1]
DESIGN = ["design", "--graph", "ring:4", "--relation", "replace_agent", "--epsilon", "1",
          "--delta", "1e-5", "--rounds", "20", "--clip", "1"]  # fmt: skip
ACCOUNT = ["account", "--graph", "ring:4", "--relation", "replace_record", "--algorithm", "dsgd",
           "--rounds", "5", "--sigma", "1"]  # fmt: skip


def error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command writes to standard error, and nothing else."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.endswith("\n")
    return err.removesuffix("\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["design"], "dpjax design: error: missing --graph, --relation, --epsilon, --delta, "
         "--rounds, --clip; see dpjax design --help"),
        (["desing"], "dpjax: error: Unrecognized options: desing; Available subcommands: design, "
         "account, plot, data, secagg; see dpjax --help"),
        ([*DESIGN, "--relation", "all"], "dpjax design: error: invalid choice 'all' for argument "
         "'--relation'. Expected one of ('replace_agent', 'replace_record', 'zero_out_record'); "
         "see dpjax design --help"),
        ([*DESIGN, "--rounds", "many"], "dpjax design: error: Error parsing --rounds: invalid "
         "literal for int() with base 10: 'many'; see dpjax design --help"),
        ([*DESIGN, "--grahp", "x"], "dpjax design: error: Unrecognized options: --grahp, x; "
         "perhaps you meant --graph; see dpjax design --help"),
        (["data", "ftech"], "dpjax data: error: Unrecognized options: ftech; Available "
         "subcommands: list, fetch, path, check; see dpjax data --help"),
    ],
)  # fmt: skip
def test_what_does_not_parse_is_one_line_with_a_remedy(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error(arguments, capsys) == told


def test_it_is_the_same_line_where_the_terminal_draws_no_boxes() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "dpjax.cli", "design", "--graph", "ring:4"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        "dpjax design: error: missing --relation, --epsilon, --delta, --rounds, --clip; see dpjax "
        "design --help\n"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*DESIGN, "--clip", "0"], "--clip is 0.0;"),
        ([*DESIGN, "--graph", "empty.txt"], "--graph is 'empty.txt', which holds no edge;"),
        ([*DESIGN, "--graph", "header.csv"], "--graph is not connected: agent source (index 0)"),
        ([*DESIGN, "--graph", "complete:-2"], "--graph is 'complete:-2': n is -2;"),
        ([*DESIGN, "--batch-size", "3"], "--batch-size is 3 under relation 'replace_agent'"),
        ([*DESIGN, "--out", "."], "--out is '.', a folder"),
        ([*ACCOUNT, "--gossip-steps", "0"], "--gossip-steps is 0;"),
        ([*ACCOUNT, "--zero-sum", "messages"], "--zero-sum is messages with dsgd"),
        ([*ACCOUNT, "--trust", "pndp", "--attacker", "9"], "--attacker is '9', which is no node"),
        (["plot", "nothing.jsonl"], "SOURCE is 'nothing.jsonl', which is not there"),
        (["data", "fetch", "nothing"], "NAME is 'nothing'; choose one of"),
    ],
)
def test_errors_name_options_not_arguments_of_python(
    arguments: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("# nothing\n")
    (tmp_path / "header.csv").write_text("source,target\na,b\nb,c\nc,a\n")
    line = error(arguments, capsys)
    assert line.startswith(f"dpjax {arguments[0]}: error: {told}"), line


def test_words_that_are_no_options_stay() -> None:
    command = cli.AccountCommand("ring:4", "dsgd", "replace_record", 5, 1.0)
    for text in (
        "plan.make(config, clip_norm=1) takes config.gossip_steps and gossip_steps(2)",
        "rounds of training", "line 3 of a.txt is 'a a'; give two", "max_variance is 1",
    ):  # fmt: skip
        assert "--" not in _terminal.by_option(command, text).replace("--help", "")
    assert _terminal.by_option(command, "graph is 'a'; give zero_sum") == (
        "--graph is 'a'; give --zero-sum"
    )
    assert _terminal.by_option(command, "path is 'elsewhere'; gone") == "path is 'elsewhere'; gone"
    assert _terminal.plain("") == "not understood"
