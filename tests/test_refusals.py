"""What a command refuses: options bear the names of arguments, as errors do."""

from pathlib import Path

import numpy as np
import pytest

from dpjax import cli
from dpjax.results import records
from dpjax.sites.identity import Authority, request

ROOT = Path(__file__).resolve().parents[1]
DESIGN = ["design", "--graph", "ring:4", "--relation", "replace_agent", "--epsilon", "1",
          "--delta", "1e-5", "--rounds", "20", "--clip-norm", "1"]  # fmt: skip
ACCOUNT = ["account", "--graph", "ring:4", "--relation", "replace_record", "--algorithm", "dsgd",
           "--rounds", "5", "--sigma", "1"]  # fmt: skip
SECAGG = ["--clients", "5", "--length", "3", "--bound", "9", "--dropout", "0.2"]
PARTY = ["--certificates", *(f"{name}.pem" for name in ("server", *"abcde")), "--authority",
         "authority_root.pem"]  # fmt: skip
SERVER = ["--name", "server", "--certificate", "server.pem", "--key", "server.key"]
JOIN = ["secagg", "join", *SECAGG, *PARTY, "--name", "a", "--certificate", "a.pem", "--key",
        "a.key", "--server", "127.0.0.1:1"]  # fmt: skip
SERVE = ["secagg", "serve", *SECAGG, *PARTY, *SERVER]


def error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command writes to standard error, and nothing else."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.endswith("\n")
    return err.removesuffix("\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["design"], "--graph --relation --epsilon --delta --rounds --clip-norm"),
        (["desing"], "desing design"),
        ([*DESIGN, "--relation", "all"], "--relation replace_agent zero_out_record"),
        ([*DESIGN, "--rounds", "many"], "--rounds many"),
        ([*DESIGN, "--grahp", "x"], "--grahp --graph"),
        (["data", "ftech"], "ftech fetch"),
    ],
)
def test_what_does_not_parse_is_refused_with_remedy(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and "--help" in err and all(word in err for word in words.split())
    # One line of the same layout as all errors: no box of the parser's.
    assert err.startswith("dpjax") and ": error: " in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ([*DESIGN, "--clip-norm", "0"], "clip_norm is 0.0;"),
        ([*DESIGN, "--graph", "empty.txt"], "path is 'empty.txt', which holds no edge;"),
        ([*DESIGN, "--graph", "header.csv"], "graph is not connected: agent source (index 0)"),
        ([*DESIGN, "--graph", "complete:-2"], "graph is 'complete:-2': n is -2;"),
        ([*DESIGN, "--batch-size", "3"], "batch_size is 3 under relation 'replace_agent'"),
        ([*DESIGN, "--out", "."], "out is '.', a folder"),
        ([*ACCOUNT, "--gossip-steps", "0"], "gossip_steps is 0;"),
        ([*ACCOUNT, "--zero-sum", "messages"], "zero_sum is messages with dsgd"),
        ([*ACCOUNT, "--trust", "pndp", "--attackers", "9"], "attackers is '9', which is no node"),
        (
            ["plot", "graphs.jsonl"],
            "records hold several rows for design = a, round = 1, seed = "
            "0; choose one value of graph first (where graph=er, say)",
        ),
        (["train", "nothing.toml"], "nothing.toml is not there; dpjax init writes one"),
        ([*JOIN, "nothing.npy"], "values is 'nothing.npy', which does not exist;"),
        ([*JOIN, "objects.npy"], "values is 'objects.npy', which cannot be read (it is no file"),
        ([*JOIN, "."], "values is '.', which cannot be read (Is a directory);"),
        (
            [*SERVE, "--listen", "203.0.113.1:1"],
            "listen is '203.0.113.1:1'; this process cannot listen there",
        ),
        (["plot", "nothing.jsonl"], "path is 'nothing.jsonl', which is not there"),
        (["data", "fetch", "nothing"], "name is 'nothing'; choose one of"),
    ],
)
def test_errors_name_arguments(
    arguments: list[str],
    reported: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "secagg":
        authority = Authority(".")
        for party in ("server", *"abcde"):
            authority.sign(request(party, ".")[1])
    (tmp_path / "empty.txt").write_text("# nothing\n")
    row = {"design": "a", "seed": 0, "round": 1, "test_loss": 0.5}
    rows = [row | {"graph": name} for name in ("er", "ring")]
    records.write(tmp_path / "graphs.jsonl", rows, {})
    np.save(tmp_path / "objects.npy", np.array([{}, 1], object))
    (tmp_path / "header.csv").write_text("source,target\na,b\nb,c\nc,a\n")
    line = error(arguments, capsys)
    name = " ".join(arguments[:2] if arguments[0] == "secagg" else arguments[:1])
    assert line.startswith(f"dpjax {name}: error: {reported}"), line


def test_what_system_refuses_is_told_without_its_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "run.jsonl")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.chdir(tmp_path)
    Path("run.jsonl").touch()
    text = "dpjax plot: error: run.jsonl cannot be used: Permission denied"
    assert error(["plot", "run.jsonl"], capsys) == text
