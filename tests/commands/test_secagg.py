"""Secure sums from the command line: a server process, its end and its second start."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
pytest.importorskip("msgpack", reason="the extra `secure` is not installed")

from dpjax import cli  # noqa: E402
from dpjax.secagg import tcp  # noqa: E402
from dpjax.secagg.client import Client  # noqa: E402
from dpjax.secagg.messages import Delivery, decoded, encoded  # noqa: E402
from dpjax.secagg.server import Total  # noqa: E402
from dpjax.secagg.terms import Abort, Terms  # noqa: E402
from tests.support import load_script  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TERMS = Terms(clients=3, length=4, bits=32, bound=100, corrupt=0.0, dropout=0.0)
AGREED = "--clients 3 --length 4 --bound 100 --corrupt 0 --dropout 0".split()
LIMITS = tcp.Limits(20.0, 20.0, 5.0)
VALUES = np.array([[1, 2, 3, -4], [100, -100, 0, 7], [5, 5, 5, 5]])

# Shells start what runs in the background with interrupts ignored, which children inherit.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from dpjax import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def server(*options):
    """A server process and its port."""
    command = [sys.executable, "-c", PROGRAM, "secagg", "serve", *AGREED, *options]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    return process, int(re.match(r"listening at 127\.0\.0\.1:(\d+)", line)[1])


async def masked_then_waits(port, killed):
    """A client at whose turn to send its vector the server is killed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = Client(TERMS, VALUES[0])
    try:
        while True:
            message = decoded(await tcp.read_frame(reader, 10**5))
            if isinstance(message, Delivery):
                killed.send_signal(signal.SIGKILL)
            await tcp.write_frame(writer, encoded(tcp.reply(client, message)), 5)
    finally:
        writer.close()


async def all_join(port):
    combined = [tcp.join(TERMS, row, "127.0.0.1", port, LIMITS) for row in VALUES]
    return await asyncio.gather(*combined)


def test_killed_server_gives_no_sum_and_its_successor_does(tmp_path):
    first, port = server()

    async def cut_off():
        combined = [tcp.join(TERMS, row, "127.0.0.1", port, LIMITS) for row in VALUES[1:]]
        return await asyncio.gather(
            masked_then_waits(port, first), *combined, return_exceptions=True
        )

    ends = asyncio.run(cut_off())
    assert first.wait(10) == -signal.SIGKILL
    first.communicate()
    assert isinstance(ends[0], EOFError | OSError)
    assert all(isinstance(end, Abort) for end in ends[1:])
    out = tmp_path / "sums.npy"
    second, again = server("--port", str(port), "--rounds", "2", "--out", str(out))
    assert again == port
    for _ in range(2):
        for total in asyncio.run(all_join(port)):
            np.testing.assert_array_equal(total.values, VALUES.sum(axis=0))
    text, _ = second.communicate(timeout=30)
    assert second.returncode == 0 and "round 2: the sum of 3 vectors" in text
    np.testing.assert_array_equal(np.load(out), np.stack([VALUES.sum(axis=0)] * 2))


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_stopped_server_keeps_opened_sums(tmp_path, stop):
    out = tmp_path / "folder" / "sums.npy"  # The folder is made.
    process, port = server("--rounds", "3", "--out", str(out))
    assert np.load(out).shape == (0, 4)
    asyncio.run(all_join(port))
    assert process.stdout.readline() == "round 1: the sum of 3 vectors\n"
    process.send_signal(stop)
    text, errors = process.communicate(timeout=30)
    np.testing.assert_array_equal(np.load(out), [VALUES.sum(axis=0)])
    assert [path.name for path in out.parent.iterdir()] == ["sums.npy"]
    if stop == signal.SIGINT:
        assert process.returncode == 130
        assert errors == "dpjax secagg serve: interrupted\n" and text == f"sums: {out}\n"


def test_interrupted_server_leaves_no_empty_file(tmp_path):
    out = tmp_path / "sums.npy"
    process, _ = server("--out", str(out))
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate(timeout=30)
    assert (process.returncode, text, errors) == (130, "", "dpjax secagg serve: interrupted\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["serve", "join"])
def test_unwritable_sum_is_refused_before_enrolment(tmp_path, capsys, command):
    np.save(tmp_path / "values.npy", VALUES[0])
    (tmp_path / "file").write_text("no folder")
    ask = ["secagg", command, *AGREED, "--port", "9"]
    ask += [str(tmp_path / "values.npy")] if command == "join" else ["--enrol", "0.1"]
    for out, reported in (
        (tmp_path / "file" / "sum.npy", f"{tmp_path / 'file'} is a file)"),
        (tmp_path / "values.npy", "which exists; give another file"),
        (tmp_path / "sum.txt", "give a file that ends in .npy"),
    ):
        assert cli.main([*ask, "--out", str(out)]) == 2
        output = capsys.readouterr()
        assert f"out is {out}" in output.err.replace("'", "") and reported in output.err
        assert not output.out  # Neither a port that is listened at, nor an answer.
    np.testing.assert_array_equal(np.load(tmp_path / "values.npy"), VALUES[0])
    # No sum, no file: its folder alone was made.
    if command == "join":
        assert cli.main([*ask, "--out", str(tmp_path / "new" / "sum.npy")]) == 1
        assert not list((tmp_path / "new").iterdir())


def test_disk_that_fills_up_keeps_sums_before(tmp_path, monkeypatch, capsys):
    totals = [Total(VALUES[index], (0, 1, 2)) for index in range(3)]

    async def opened(listener):
        if len(totals) == 1:
            monkeypatch.setattr(os, "fsync", full)
        return totals.pop(0)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tcp.Listener, "aggregate", opened)
    out = tmp_path / "sums.npy"
    assert cli.main(["secagg", "serve", *AGREED, "--rounds", "3", "--out", str(out)]) == 2
    output = capsys.readouterr()
    assert (
        "cannot be written (No space left on device)" in output.err and f"sums: {out}" in output.out
    )
    np.testing.assert_array_equal(np.load(out), VALUES[:2])
    assert os.listdir(tmp_path) == ["sums.npy"]


@pytest.mark.parametrize("port", ["-1", "0", "65536"])
def test_port_that_is_none_is_refused_by_its_name(tmp_path, capsys, port):
    np.save(tmp_path / "values.npy", VALUES[0])
    ask = ["secagg", "join", str(tmp_path / "values.npy"), *AGREED, "--port", port]
    assert cli.main(ask) == 2
    assert f"port is {port}; give a whole number from 1 to 65535" in capsys.readouterr().err


def test_join_takes_part_with_file(tmp_path, capsys):
    for index, row in enumerate(VALUES):
        np.save(tmp_path / f"{index}.npy", row)
    process, port = server()
    clients = []
    for index in range(3):
        arguments = ["secagg", "join", str(tmp_path / f"{index}.npy"), *AGREED, "--port", str(port)]
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            *arguments,
            "--out",
            str(tmp_path / f"sum{index}.npy"),
        ]
        # A process each, as clients have it: tyro parses one command at a time.
        clients.append(subprocess.Popen(command, cwd=ROOT))
    codes = [client.wait(timeout=60) for client in clients]
    process.communicate(timeout=30)
    assert codes == [0, 0, 0] and process.returncode == 0
    for index in range(3):
        np.testing.assert_array_equal(np.load(tmp_path / f"sum{index}.npy"), VALUES.sum(axis=0))
    # Nobody listens there any more.
    assert cli.main(["secagg", "join", str(tmp_path / "0.npy"), *AGREED, "--port", str(port)]) == 1
    assert "its vector stayed here" in capsys.readouterr().out


def test_round_that_nobody_joins_has_no_sum(capsys):
    assert cli.main(["secagg", "serve", *AGREED, "--enrol", "0.1"]) == 1
    output = capsys.readouterr().out
    assert "; 3 to 3 clients must enrol, and 3 of them must finish; " in output
    assert "round 1: no sum: enrolled is 0" in output


def test_example_is_exact(capsys):
    example = load_script("secure_sum", "examples")
    example.main(8, 50, dropout=0.25, corrupt=0.0)
    output = capsys.readouterr().out
    assert "the sum of 6 vectors is exact" in output
    assert all(f"left after its {name}" in output for name in ("keys", "shares"))
    example.main(8, 50, dropout=0.4, corrupt=0.0, adversary="semi_malicious")
    output = capsys.readouterr().out
    assert "the sum of 6 vectors is exact" in output and "left after its vector" in output


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (["--bound", "0"], "bound is 0"),
        (["--bits", "8"], "bound is 100, and a sum of 3 entries may reach 300"),
        (["--dropout", "1"], "dropout is 1.0"),
        (["--enrol", "0"], "enrol is 0"),
        (["--rounds", "0"], "rounds is 0"),
        (["--port", "70000"], "port is 70000"),
        (["--out", "sums.txt"], "out is sums.txt"),
    ],
)
def test_options_that_cannot_be_are_refused_by_their_name(change, reported, capsys):
    assert cli.main(["secagg", "serve", *AGREED, *change]) == 2
    assert reported in capsys.readouterr().err


def test_file_that_holds_no_vector_is_refused(tmp_path, capsys):
    path = tmp_path / "values.npy"
    ask = ["secagg", "join", str(path), *AGREED, "--port", "9"]
    path.write_bytes(b"nothing")
    assert cli.main(ask) == 2 and "it is no file of arrays" in capsys.readouterr().err
    np.save(path, np.ones(4))
    assert cli.main(ask) == 2 and "float64[4]; give 4 whole numbers" in capsys.readouterr().err
