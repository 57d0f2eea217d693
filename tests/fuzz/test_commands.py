"""Malformed command lines: exit code 2 and a message, never a traceback, a hang or a file."""

import importlib
import signal

import numpy as np
import pytest

from dpjax import cli

NAMES = ("whisper_quadratic", "whisper_variance", "pndp_accounting")
SECONDS = 60

WHOLE = ["0", "-1", "1.5", "x", "", "nan", "1e3", "0x10", "9" * 40]
SIZE = ["0", "-1", "nan", "inf", "x", "", "1e999", "-0.0"]
GRAPHS = [
    *("complete:0", "complete:-2", "complete:x", "complete", "complete:3:3", ""),
    *("er:5", "er:5:0", "er:5:2", "er:5:nan", "er:0:.5", "er:x:.5", "er:5:.5:-1", "er:30:1e-9"),
    *("ring:2", "ring:1e3", "ring:", ":", "grid:0:3", "grid:3", "star:1", "path:0"),
    *("exponential:1", "exponential:1:1", "nothing", "nothing:3", "folder", "empty.txt"),
    *("bytes.txt", "loop.txt", "apart.txt", "complete:99999999", "ring:99999999999", "\0"),
    "er:999999:0.5",
]  # fmt: skip
WORD = ["nothing", "", "1", "ALL"]
BAD = {
    "--graph": GRAPHS,
    "--rounds": [*WHOLE, "99999999999"],
    "--epsilon": SIZE,
    "--delta": [*SIZE, "1", "2"],
    "--clip-norm": [*SIZE, "1e300", "1e-300"],
    "--relation": WORD,
    "--mixing": WORD,
    "--trust": WORD,
    "--horizon": WHOLE,
    "--kind": WORD,
    "--accountant": WORD,
    "--out": ["folder", "no/such/folder/a", "", "loop.txt"],
    "--seed": ["-1", "1.5", "x", ""],
    "--parameters": WHOLE[:-1],
    "--sigma": SIZE,
    "--algorithm": WORD,
    "--gossip-steps": WHOLE,
    "--epochs": WHOLE,
    "--separation": WHOLE,
    "--attackers": ["9", "-1", "nobody", "1.5", "label:", "index:7"],
    "--shared": SIZE,
    "--zero-sum": WORD,
    "--unknown": ["1"],
    "--x": ["nothing"],
    "--y": ["nothing", "design"],
    "--series": ["nothing"],
    "--where": ["nothing", "a=b", "=", "round"],
    "--preset": ["", "nothing", "TINY"],
    "--devices": WHOLE,
    "--output": ["loop.txt"],
}
DESIGN = (
    "--graph ring:4 --relation replace_agent --epsilon 4 --delta 1e-5 --rounds 20 --clip-norm 1"
)
ACCOUNT = "--graph ring:4 --relation replace_record --algorithm dsgd --rounds 5 --sigma 1"
USES = {
    "design": (
        DESIGN,
        "--graph --rounds --epsilon --delta --clip-norm --relation --mixing --trust --horizon "
        "--kind --accountant --out --parameters --unknown",
    ),
    "account": (
        ACCOUNT + " --trust pndp --attackers 0",
        "--graph --rounds --sigma --relation --mixing --trust --algorithm --gossip-steps --epochs "
        "--separation --attackers --shared --zero-sum --delta --out --unknown",
    ),
    "plot": ("records.jsonl", "--x --y --series --where --out --unknown"),
}


def malformed(rng):
    """One malformed command line of dpjax: its arguments and the option that is wrong."""
    command = str(rng.choice(["design", "account", "plot", "data"]))
    if command == "data":
        tails = [["fetch"], ["fetch", "nothing"], ["fetch", "../x"], ["check", "x"], ["nothing"]]
        return ["data", *tails[int(rng.integers(len(tails)))]]
    base, options = USES[command]
    words = base.split()
    selection = str(rng.choice(options.split()))
    kind = rng.integers(8)
    if kind == 0 and command != "plot":
        position = 2 * int(rng.integers(len(words) // 2))  # a required option is left out ...
        if words[position] in ("--algorithm", "--trust", "--attackers"):
            position = 0
        return [command, *words[:position], *words[position + 2 :]]
    if kind == 1 and selection != "--attackers":  # which takes any number of them
        return [command, *words, selection]  # ... or stands without its value
    value = str(rng.choice(BAD[selection]))
    if selection in words:
        position = words.index(selection)
        words = words[:position] + words[position + 2 :]
    if command == "plot" and kind == 2:
        words = [str(rng.choice(["folder", "no-such", "empty.txt", "bytes.txt", "loop.txt"]))]
    return [command, *words, f"{selection}={value}"]


def launched(rng):
    """A malformed command line of an experiment's launcher."""
    selection = str(rng.choice(["--preset", "--devices", "--output", "--unknown"]))
    value = str(rng.choice(BAD.get(selection, WHOLE)))
    words = ["--preset", "tiny"] if selection != "--preset" else []
    if selection != "--output" and "--preset" not in selection:
        words += ["--output", "loop.txt/out"]
    return str(rng.choice(NAMES)), [*words, f"{selection}={value}"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, content in (
        ("empty.txt", b""),
        ("bytes.txt", b"\xff\xfe\x00\x01" * 9),
        ("loop.txt", b"a a\n"),
        ("apart.txt", b"a b\nc d\n"),
    ):
        (tmp_path / name).write_bytes(content)
    from dpjax.results import records

    rows = [{"design": "a", "round": k, "loss": 1.0 / (k + 1)} for k in range(3)]
    records.write(tmp_path / "records.jsonl", rows, {"experiment": "fuzz"})
    return tmp_path


def refused(run, arguments, folder, capsys):
    """Run a command line that must be refused, within a minute and leaving no file."""
    before = sorted(folder.rglob("*"))

    def late(*_):
        raise AssertionError(f"{arguments} takes more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        code = run(arguments)
    except SystemExit as stop:  # how the launchers' parser refuses
        code = stop.code
    finally:
        signal.alarm(0)
    out, err = capsys.readouterr()
    assert code == 2, f"{arguments} gave {code}: {out[-300:]} {err[-300:]}"
    assert err.strip() and "Traceback" not in err, arguments
    own = [line for line in err.splitlines() if ": error: " in line]
    assert not own or len(err.strip().splitlines()) == 1, (arguments, err)
    assert sorted(folder.rglob("*")) == before, arguments


def check(count, seed, folder, capsys):
    rng = np.random.default_rng(seed)
    for number in range(count):
        if number % 10 == 9:
            name, arguments = launched(rng)
            run = importlib.import_module(f"experiments.{name}").main
        else:
            arguments = malformed(rng)
            run = cli.main
        refused(run, arguments, folder, capsys)


def test_malformed_command_lines(folder, capsys):
    check(12, 3, folder, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_malformed_command_lines(seed, folder, capsys):
    check(100, 50 + seed, folder, capsys)


@pytest.mark.parametrize("graph", GRAPHS)
def test_malformed_graphs(graph, folder, capsys):
    words = DESIGN.split()
    words[1] = graph
    refused(cli.main, ["design", *words], folder, capsys)


def test_one_agent_has_no_links_to_zip(folder, capsys):
    words = ACCOUNT.replace("ring:4", "complete:1").replace("dsgd", "zip_dl").split()
    refused(cli.main, ["account", *words], folder, capsys)
