"""Secure sums from the command line: a server process, its end and its second start."""

import errno
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
pytest.importorskip("grpc", reason="the extra `sites` is not installed")
pytest.importorskip("msgpack", reason="the extra `secure` is not installed")

from dpjax import cli  # noqa: E402
from dpjax.secagg import client as client_  # noqa: E402
from dpjax.secagg.messages import Delivery  # noqa: E402
from dpjax.secagg.server import Total  # noqa: E402
from dpjax.secagg.terms import Abort, Limits, Terms  # noqa: E402
from dpjax.sites import sums  # noqa: E402
from dpjax.sites.carrier import GrpcChannel  # noqa: E402
from dpjax.sites.identity import Authority, Identity, Roster, request  # noqa: E402
from tests.support import load_script  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TERMS = Terms(clients=3, length=4, bits=32, bound=100, corrupt=0.0, dropout=0.0)
AGREED = "--clients 3 --length 4 --bound 100 --corrupt 0 --dropout 0".split()
LIMITS = Limits(20.0, 20.0, 5.0)
VALUES = np.array([[1, 2, 3, -4], [100, -100, 0, 7], [5, 5, 5, 5]])
NAMES = ("server", "lyon", "turin", "rome")

# Shells start what runs in the background with interrupts ignored, which children inherit.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from dpjax import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Keys and certificates of a server and three clients."""
    home = tmp_path_factory.mktemp("parties")
    authority = Authority(home)
    for name in NAMES:
        _, demand = request(name, home)
        authority.sign(demand)
    return home


def party(folder, name):
    """The options that say who a party is."""
    certificates = [str(folder / f"{other}.pem") for other in NAMES]
    return [
        *("--name", name, "--certificate", str(folder / f"{name}.pem")),
        *("--key", str(folder / f"{name}.key")),
        *("--authority", str(folder / "authority_root.pem")),
        *("--certificates", *certificates),
    ]


def server(folder, *options):
    """A server process and its port."""
    command = [sys.executable, "-c", PROGRAM, "secagg", "serve", *AGREED, *party(folder, "server")]
    process = subprocess.Popen(
        [*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    return process, int(re.match(r"listening at 127\.0\.0\.1:(\d+)", line)[1])


def channel_of(folder, row, port):
    """A client's channel, and the server behind it."""
    name = NAMES[row + 1]
    files = {"certificate": folder / f"{name}.pem", "key": folder / f"{name}.key"}
    identity = Identity.load(name, authority=folder / "authority_root.pem", **files)
    roster = Roster.of_certificates([folder / f"{other}.pem" for other in NAMES])
    peers = {"server": f"127.0.0.1:{port}"}
    return GrpcChannel(identity, roster, peers, None, sums.channel_limits(TERMS))


def join(folder, row, port):
    """What a client ends with."""
    return sums.join(TERMS, VALUES[row], channel_of(folder, row, port), "server", LIMITS)


def all_join(folder, port):
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(join, folder, row, port) for row in range(3)]
    return [job.exception() or job.result() for job in jobs]


def test_killed_server_gives_no_sum_and_its_successor_does(folder, tmp_path, monkeypatch):
    first, port = server(folder)

    def killing(client, message):
        if isinstance(message, Delivery):
            first.send_signal(signal.SIGKILL)
        return client_.reply(client, message)

    monkeypatch.setattr(sums, "reply", killing)
    ends = all_join(folder, port)
    monkeypatch.undo()
    assert first.wait(10) == -signal.SIGKILL
    first.communicate()
    assert all(isinstance(end, Abort) for end in ends)
    out = tmp_path / "sums.npy"
    listen = ("--listen", f"127.0.0.1:{port}")
    second, again = server(folder, *listen, "--rounds", "2", "--out", str(out))
    assert again == port
    for _ in range(2):
        for total in all_join(folder, port):
            np.testing.assert_array_equal(total.values, VALUES.sum(axis=0))
    text, _ = second.communicate(timeout=30)
    assert second.returncode == 0 and "round 2: the sum of 3 vectors" in text
    np.testing.assert_array_equal(np.load(out), np.stack([VALUES.sum(axis=0)] * 2))


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_stopped_server_keeps_opened_sums(folder, tmp_path, stop):
    out = tmp_path / "folder" / "sums.npy"  # The folder is made.
    process, port = server(folder, "--rounds", "3", "--out", str(out))
    assert np.load(out).shape == (0, 4)
    all_join(folder, port)
    assert process.stdout.readline() == "round 1: the sum of 3 vectors\n"
    process.send_signal(stop)
    text, errors = process.communicate(timeout=30)
    np.testing.assert_array_equal(np.load(out), [VALUES.sum(axis=0)])
    assert [path.name for path in out.parent.iterdir()] == ["sums.npy"]
    if stop == signal.SIGINT:
        assert process.returncode == 130
        assert errors == "dpjax secagg serve: interrupted\n" and text == f"sums: {out}\n"


def test_interrupted_server_leaves_no_empty_file(folder, tmp_path):
    out = tmp_path / "sums.npy"
    process, _ = server(folder, "--out", str(out))
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate(timeout=30)
    assert (process.returncode, text, errors) == (130, "", "dpjax secagg serve: interrupted\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["serve", "join"])
def test_unwritable_sum_is_refused_before_enrolment(folder, tmp_path, capsys, command):
    np.save(tmp_path / "values.npy", VALUES[0])
    (tmp_path / "file").write_text("no folder")
    name = "lyon" if command == "join" else "server"
    ask = ["secagg", command, *AGREED, *party(folder, name), "--enrol", "0.1"]
    if command == "join":
        # The vector first: what follows the certificates would be one of them.
        ask[2:2] = [str(tmp_path / "values.npy"), "--server", "127.0.0.1:9"]
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


def test_disk_that_fills_up_keeps_sums_before(folder, tmp_path, monkeypatch, capsys):
    totals = [Total(VALUES[index], (0, 1, 2)) for index in range(3)]

    def opened(collector):
        if len(totals) == 1:
            monkeypatch.setattr(os, "fsync", full)
        return totals.pop(0)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sums.Collector, "aggregate", opened)
    out = tmp_path / "sums.npy"
    ask = [*AGREED, *party(folder, "server")]
    assert cli.main(["secagg", "serve", *ask, "--rounds", "3", "--out", str(out)]) == 2
    output = capsys.readouterr()
    assert (
        "cannot be written (No space left on device)" in output.err and f"sums: {out}" in output.out
    )
    np.testing.assert_array_equal(np.load(out), VALUES[:2])
    assert os.listdir(tmp_path) == ["sums.npy"]


@pytest.mark.parametrize("address", ["lyon", "lyon:-1", "lyon:0", "lyon:65536", ":9", "lyon:x"])
def test_address_that_is_none_is_refused_by_its_name(folder, tmp_path, capsys, address):
    np.save(tmp_path / "values.npy", VALUES[0])
    ask = ["secagg", "join", str(tmp_path / "values.npy"), *AGREED, *party(folder, "lyon")]
    assert cli.main([*ask, "--server", address]) == 2
    assert f"server is '{address}'; give host:port, a port of 1 to" in capsys.readouterr().err


def test_join_takes_part_with_file(folder, tmp_path, capsys):
    for index, row in enumerate(VALUES):
        np.save(tmp_path / f"{index}.npy", row)
    # The one that comes first waits for its server.
    process, port = server(folder, "--insecure-loopback")
    clients = []
    for index, name in enumerate(NAMES[1:]):
        ask = ["secagg", "join", str(tmp_path / f"{index}.npy"), *AGREED, *party(folder, name)]
        ask += ["--server", f"127.0.0.1:{port}", "--insecure-loopback"]
        ask += ["--out", str(tmp_path / f"sum{index}.npy")]
        # A process each, as clients have it: tyro parses one command at a time.
        clients.append(subprocess.Popen([sys.executable, "-c", PROGRAM, *ask], cwd=ROOT))
    codes = [client.wait(timeout=60) for client in clients]
    process.communicate(timeout=30)
    assert codes == [0, 0, 0] and process.returncode == 0
    for index in range(3):
        np.testing.assert_array_equal(np.load(tmp_path / f"sum{index}.npy"), VALUES.sum(axis=0))
    # Nobody listens there any more.
    ask = ["secagg", "join", str(tmp_path / "0.npy"), *AGREED, *party(folder, "lyon")]
    assert cli.main([*ask, "--server", f"127.0.0.1:{port}", "--enrol", "0.2"]) == 1
    assert "its vector stayed here" in capsys.readouterr().out


def test_round_that_nobody_joins_has_no_sum(folder, capsys):
    ask = [*AGREED, *party(folder, "server"), "--enrol", "0.1"]
    assert cli.main(["secagg", "serve", *ask]) == 1
    output = capsys.readouterr().out
    assert "; 3 to 3 clients must enrol, and 3 of them must finish; " in output
    assert "round 1: no sum: enrolled is 0" in output
    assert "; missing: lyon, turin, rome, and --dropout 0 lets 0 be\n" in output


def test_server_names_who_was_missing_in_a_later_stage(folder, monkeypatch, capsys):
    enter = sums.Collector.__enter__
    clients = ThreadPoolExecutor(3)

    def leave(port):
        channel = channel_of(folder, 1, port)
        with sums.member(TERMS, channel, "server"):
            sums.take_part(client_.Client(TERMS, VALUES[1]), channel, "server", LIMITS, answers=1)

    def with_clients(collector):
        enter(collector)
        port = collector._channel.port
        clients.submit(join, folder, 0, port)
        clients.submit(leave, port)
        clients.submit(join, folder, 2, port)
        return collector

    monkeypatch.setattr(sums.Collector, "__enter__", with_clients)
    assert cli.main(["secagg", "serve", *AGREED, *party(folder, "server")]) == 1
    clients.shutdown()
    output = capsys.readouterr().out
    assert "2 clients shared" in output and "; missing: turin, and --dropout 0 lets 0 be" in output


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
        (["--listen", "127.0.0.1:70000"], "listen is '127.0.0.1:70000'"),
        (["--out", "sums.txt"], "out is sums.txt"),
        (["--name", "lyon"], "of server; give that of 'lyon'"),
        (["--certificate", "nothing.pem"], "nothing.pem"),
        (["--insecure-loopback", "--listen", "0.0.0.0:7000"], "without TLS"),
    ],
)
def test_options_that_cannot_be_are_refused_by_their_name(folder, change, reported, capsys):
    assert cli.main(["secagg", "serve", *AGREED, *party(folder, "server"), *change]) == 2
    assert reported in capsys.readouterr().err


def test_certificates_are_those_of_all_parties_in_order(folder, capsys):
    ask = party(folder, "server")
    first, *others = ask[-4:]
    for given, reported in (
        ([*others, first], "certificates begin with that of lyon, and this server is server"),
        ([first, *others[:2]], "certificates are of 2 clients, and 3 must enrol"),
    ):
        assert cli.main(["secagg", "serve", *AGREED, *ask[:-4], *given]) == 2
        assert reported in capsys.readouterr().err


def test_nothing_listens_without_certificates(capsys):
    for command in ("serve", "join"):
        options = ["values.npy", "--server", "127.0.0.1:9"] if command == "join" else []
        assert cli.main(["secagg", command, *options, *AGREED, "--insecure-loopback"]) == 2
        output = capsys.readouterr()
        assert "--certificate" in output.err and "--key" in output.err and not output.out


def test_file_that_holds_no_vector_is_refused(folder, tmp_path, capsys):
    path = tmp_path / "values.npy"
    ask = ["secagg", "join", str(path), *AGREED, *party(folder, "lyon")]
    ask += ["--server", "127.0.0.1:9"]
    path.write_bytes(b"nothing")
    assert cli.main(ask) == 2 and "it is no file of arrays" in capsys.readouterr().err
    np.save(path, np.ones(4))
    assert cli.main(ask) == 2 and "float64[4]; give 4 whole numbers" in capsys.readouterr().err
