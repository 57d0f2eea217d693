"""Flower's federated averaging by real processes, for `bench_sites`; run by an interpreter with it.

Arguments: a folder, the number of supernodes, of rounds and of parameters. Starts a superlink and
the supernodes, with TLS and a certificate of the server, runs `FedAvg` and prints as JSON what
`bench_sites` compares. The clients return the model that they get.
"""

import datetime
import ipaddress
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

APP = """
import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()


@client.train()
def train(message, context):
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 64})}
    return Message(content=RecordDict(content), reply_to=message)


@server.main()
def main(grid, context):
    ended = []

    def evaluate(number, arrays):
        ended.append((time.monotonic(), loopback()))

    strategy = FedAvg(
        fraction_evaluate=0.0, min_train_nodes=NODES, min_available_nodes=NODES
    )
    start = ArrayRecord([np.zeros(PARAMETERS, np.float32)])
    strategy.start(grid, start, num_rounds=ROUNDS, evaluate_fn=evaluate)
    Path(FOLDER, "ended.json").write_text(json.dumps(ended), encoding="utf-8")


def loopback():
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        device, _, numbers = line.partition(":")
        if device.strip() == "lo":
            return int(numbers.split()[8])
    return 0
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "averaging"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "dpjax"
[tool.flwr.app.components]
serverapp = "averaging.app:server"
clientapp = "averaging.app:client"
"""


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """A root, and a certificate and key of this machine."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def builder(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("root"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
        )

    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    constraint = x509.BasicConstraints(ca=True, path_length=None)
    root = builder("root", root_key).add_extension(constraint, True).sign(root_key, hashes.SHA256())
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), address])
    own = builder("localhost", key).add_extension(names, False).sign(root_key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    paths = folder / "root.pem", folder / "own.pem", folder / "own.key"
    form = serialization.PrivateFormat.TraditionalOpenSSL
    private = key.private_bytes(pem, form, serialization.NoEncryption())
    for path, data in zip(
        paths, (root.public_bytes(pem), own.public_bytes(pem), private), strict=True
    ):
        path.write_bytes(data)
    return paths


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    return [server.getsockname()[1] for server in sockets]


def main() -> None:
    """Run all processes, and print what was measured."""
    folder = Path(sys.argv[1]).absolute()
    nodes, rounds, parameters = map(int, sys.argv[2:])
    package = folder / "app" / "averaging"
    package.mkdir(parents=True)
    numbers = f"NODES = {nodes}\nROUNDS = {rounds}\nPARAMETERS = {parameters}\n"
    (package / "app.py").write_text(f"{numbers}FOLDER = {str(folder)!r}\n{APP}", encoding="utf-8")
    (package / "__init__.py").write_text("", encoding="utf-8")
    (folder / "app" / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    root, own, key = certificates(folder)
    link_port, *ports = free_ports(1 + nodes)
    address = f"127.0.0.1:{link_port}"
    home = folder / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\n'
        f'root-certificates = "{root}"\n',
        encoding="utf-8",
    )
    commands = Path(sys.executable).parent
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": "",
    }
    log = (folder / "log").open("w", encoding="utf-8")
    link = [
        "flower-superlink", "--ssl-certfile", own, "--ssl-keyfile", key, "--ssl-ca-certfile", root,
        "--disable-runtime-dependency-installation", "--port", link_port,
    ]  # fmt: skip
    processes = [started(link, environment, log)]
    time.sleep(3.0)
    for port in ports:
        node = ["flower-supernode", "--root-certificates", root, "--superlink", address]
        processes.append(started([*node, "--port", port], environment, log))
    try:
        command = ["flwr", "run", folder / "app", "here", "--stream"]
        subprocess.run(list(map(str, command)), env=environment, stdout=log, stderr=log, check=True)
    finally:
        # Each has children in its group.
        for process in processes:
            os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            process.wait(20)
    ended = json.loads((folder / "ended.json").read_text(encoding="utf-8"))
    # The first call is before the first round.
    times = [when for when, _ in ended[1:]]
    steps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    carried = (ended[-1][1] - ended[1][1]) / len(steps)
    row = {"seconds": statistics.median(steps), "processor": None, "bytes": carried}
    print(json.dumps(row | {"rounds": rounds}))


def started(words: list[object], environment: dict[str, str], log: object) -> subprocess.Popen:
    """A process in a group of its own."""
    return subprocess.Popen(
        list(map(str, words)), env=environment, stdout=log, stderr=log, start_new_session=True
    )


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError:
        print(Path(sys.argv[1], "log").read_text(encoding="utf-8")[-3000:], file=sys.stderr)
        raise
