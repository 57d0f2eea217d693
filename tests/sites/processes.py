"""Sites as processes, with certificates, over TCP of this machine: what tests of them start."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks._local_sites import LocalChannel, Network
from dpjax.sites import project as project_
from dpjax.sites import start
from dpjax.sites.identity import Authority, Identity, Roster, request
from dpjax.sites.project import Project
from dpjax.sites.site import Site, Waits
from tests.sites.proxy import Proxy

NAMES = ("geneva", "lyon", "turin")
RECORDS = 40
FEATURES = 5
ROOT = Path(__file__).resolve().parents[2]
SCHEMA = {
    "shape": [FEATURES],
    "columns": [{"name": "x", "type": "number", "low": -4, "high": 4}],
    "label": {"name": "y", "type": "category", "classes": ["0", "1"]},
}
LINES = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (INFO|WARNING) ")
Models = dict[str, dict[str, np.ndarray]]


def settings(rounds: int, **changes: Any) -> dict[str, Any]:
    """Settings of a plan for three sites, each the neighbour of the two others."""
    plain = {
        "rounds": rounds,
        "network": {"edges": [["geneva", "lyon"], ["lyon", "turin"], ["turin", "geneva"]]},
        "model": {"name": "Linear", "loss": "logistic"},
        "protect": {"relation": "zero_out_record", "clip_norm": 1.0},
        "budget": {"epsilon": 8.0, "delta": 1e-3},
        "noise": [{"name": "Independent"}],
        "sampler": {"name": "Random", "batch_size": 8},
        "optimizer": {"name": "Sgd", "step_size": 0.3},
    }
    return plain | changes


def records(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Records of a site, which no other site has."""
    rng = np.random.default_rng(list(name.encode()))
    x = rng.normal(size=(RECORDS, FEATURES))
    return x, (x[:, 0] > 0).astype(np.int64)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def make_keys(home: Path) -> None:
    """An authority and a key for each site: the noise of a run hangs on the keys, too."""
    authority = Authority(home / "authority")
    for name in NAMES:
        _, demand = request(name, home / name)
        authority.sign(demand)


class Sites:
    """Three sites, each with a folder: key, certificate, records, site.toml, and a run.

    Every link goes through a proxy. Nonces and secrets are the same in all of them, as if each site
    had drawn these, so that two runs have the same noise.
    """

    def __init__(self, home: Path, keys: Path, rounds: int, **changes: Any) -> None:
        self.home = home
        shutil.copytree(keys, home)
        self.authority = Authority(home / "authority")
        self.certificates = {name: home / "authority" / f"{name}.pem" for name in NAMES}
        self.roster = Roster.of_certificates(self.certificates.values())
        plan = settings(rounds, **changes)
        self.project = project_.write(plan, self.roster, SCHEMA, home / "plan.json")
        self.ports = {name: free_port() for name in NAMES}
        # By who dials, then who is dialled.
        self.links: dict[tuple[str, str], Proxy] = {}
        self.changes: dict[str, Any] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.started: list[subprocess.Popen[bytes]] = []
        for number, name in enumerate(NAMES):
            for other in NAMES[:number]:
                self.links[name, other] = Proxy(f"127.0.0.1:{self.ports[other]}")
            x, y = records(name)
            np.savez(home / name / "records.npz", x=x, y=y)
            self.configure(name)
        self.prepare()

    def prepare(self) -> None:
        """Folders as if every site had drawn these numbers itself."""
        for number, name in enumerate(NAMES):
            run = self.run_of(name)
            run.mkdir(mode=0o700)
            (run / "nonce").write_bytes(bytes([number + 1] * 32))
            (run / "secret").write_bytes(bytes([number + 101] * 32))

    def run_of(self, name: str) -> Path:
        return self.home / name / "run"

    def configure(self, name: str, text: str = "", **changes: str) -> None:
        """Write site.toml; changes are texts of values by their keys."""
        values = {
            "name": f'"{name}"',
            "plan": '"../plan.json"',
            "certificate": f'"{self.certificates[name]}"',
            "key": f'"{name}.key"',
            "authority": f'"{self.authority.certificate}"',
            "folder": '"run"',
            "listen": f'"127.0.0.1:{self.ports[name]}"',
            "held_out": "0.2",
            "waits": "{ late = 2.0, linger = 20.0 }",
            "limits": "{ hello = 5.0, keepalive = 6.0, longest_wait = 1.0 }",
            "data": '{ file = "records.npz" }',
        }
        dialled = [
            f'{other} = "{proxy.address}"'
            for (dialler, other), proxy in self.links.items()
            if dialler == name
        ]
        values["neighbours"] = "{ " + ", ".join(dialled) + " }"
        lines = [f"{key} = {value}" for key, value in (values | changes).items()]
        (self.home / name / "site.toml").write_text("\n".join(lines) + text + "\n")

    def start(self, name: str, *killed: str | int, home: Path | None = None) -> None:
        """Start a site; with a point and a number, one that kills itself there."""
        command = ["-m", "dpjax", "site", "run", "site.toml"]
        if killed:
            command = [str(Path(__file__).with_name("killed.py")), *map(str, killed)]
        if killed == ("opened",):
            command = [str(Path(__file__).with_name("opened.py"))]
        place = home or self.home / name
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
        with open(place / "log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.started.append(process)
        self.processes[place.name] = process

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(10)

    def log(self, name: str) -> str:
        path = self.home / name / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def rounds(self, name: str) -> int:
        """Rounds that a site has absorbed."""
        audit = self.run_of(name) / "audit.jsonl"
        return audit.read_bytes().count(b'"absorbed"') if audit.exists() else 0

    def until(self, reached: Callable[[], object], seconds: float = 120.0) -> None:
        """Wait until something is so, else fail with all logs."""
        end = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > end:
                logs = "\n".join(f"== {name}\n{self.log(name)[-3000:]}" for name in NAMES)
                raise AssertionError(f"nothing after {seconds:g} s\n{logs}")
            time.sleep(0.02)

    def ended(self, *names: str, seconds: float = 120.0) -> list[int]:
        """Exit statuses of sites, once they have ended."""
        running = [self.processes[name] for name in names or NAMES]
        self.until(lambda: all(process.poll() is not None for process in running), seconds)
        return [process.returncode for process in running]

    def models(self, seconds: float = 120.0) -> Models:
        """What all sites end with."""
        codes = self.ended(*NAMES, seconds=seconds)
        assert codes == [0, 0, 0], "\n".join(self.log(name)[-3000:] for name in NAMES)
        return {name: model_of(self.run_of(name) / "model.npz") for name in NAMES}

    def digests(self) -> dict[tuple[str, int], set[str]]:
        """By sender and round, the digests that any site ever took down."""
        digests: dict[tuple[str, int], set[str]] = {}
        for path in self.home.glob("*/run/headers"):
            for line in path.read_text().splitlines():
                sender, round, digest, _ = line.split()
                digests.setdefault((sender, int(round)), set()).add(digest)
        return digests

    def identity(self, name: str) -> Identity:
        return Identity.load(
            name,
            certificate=self.certificates[name],
            key=self.home / name / f"{name}.key",
            authority=self.authority.certificate,
        )

    def stop(self) -> None:
        """End all processes of this test, and all proxies."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
        for process in self.started:
            process.wait(10)
        for proxy in self.links.values():
            proxy.close()


def model_of(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files if name.startswith("[")}


def flat(models: Models) -> dict[str, bytes]:
    """The bits of models."""
    return {
        name: b"".join(key.encode() + model[key].tobytes() for key in sorted(model))
        for name, model in models.items()
    }


def in_one_process(project: Project, sites: Sites, folder: Path) -> Models:
    """The models of the same loop in threads of this process, over queues."""
    import threading

    network = Network()
    results: Models = {}

    def live(name: str) -> None:
        place = folder / name
        place.mkdir(parents=True, mode=0o700)
        number = NAMES.index(name)
        (place / "nonce").write_bytes(bytes([number + 1] * 32))
        (place / "secret").write_bytes(bytes([number + 101] * 32))
        values = {"home": sites.home / name, "held_out": 0.2}
        problem, *_ = start._problem(project, name, {"file": "records.npz"}, values)
        channel = LocalChannel(network, name, set(NAMES) - {name})
        site = Site(
            project,
            problem,
            sites.identity(name),
            channel,
            place,
            waits=Waits(late=10.0, linger=10.0),
        )
        try:
            models = site.run()
        finally:
            site.close()
        results[name] = {
            jax.tree_util.keystr(path): np.asarray(leaf)[0]
            for path, leaf in jax.tree.leaves_with_path(models)
        }

    threads = [threading.Thread(target=live, args=(name,), daemon=True) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert set(results) == set(NAMES)
    return results


def contents(folder: Path, without: Iterable[str] = ()) -> dict[str, bytes]:
    """All files of a folder."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in without]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def tracebacks(sites: Sites) -> list[str]:
    """Names of the sites whose logs have a traceback."""
    return [
        path.parent.name for path in sites.home.glob("*/log") if "Traceback" in path.read_text()
    ]
