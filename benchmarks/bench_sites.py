"""Rounds of real sites on one machine beside the simulation, plain sockets and Flower.

Ten sites on the complete graph with equal weights, a CNN of 26,010 parameters, images of MNIST's
size that are random, batches of 32, a gradient clipped for every record, and one step: each site's
next model is the mean of all messages, which is federated averaging with one local step. All
processes run on this machine, in a network of their own where the system allows it.

- ``sites``: `dp.site`, a process a site: TLS with certificates at both ends, signatures, fsync,
  receipts, digests handed on, and metrics in every round.
- ``simulation``: the same plan in one process (`dp.run`), with metrics after the last round: ten
  models on the held-out records of all would be ten times what sites measure.
- ``sockets``: as many processes that send as many bytes on the same links by TCP and acknowledge
  them. They compute, sign, encrypt and store nothing: no carrier in Python does less.
- ``computing``: the same, and each computes as a site does, with a site's noise.
- ``flower``: a `flower-superlink`, as many `flower-supernode`s with TLS, and `FedAvg` over as many
  parameters. Clients return what they get and compute nothing, which favours Flower: by default it
  starts a process for every message, that would import JAX each time. A client sends one model to
  the server and gets one back, where a site sends its model to nine others. No server reads a model
  of its own there.

All but the simulation take turns, ``--repeats`` times. ``seconds`` is the median over rounds of the
time from one round's end to the next, at the first site (Flower: at the server), without the first
round, which compiles; then the median over turns. ``processor`` is all processes' seconds of CPU a
round, and ``bytes`` what loopback carried a round, TCP's headers and receipts among it. On few
cores a round takes what the CPUs need for all sites: sites of their own machines overlap.

Flower has an environment of its own (``--python``); without one there is no row:

    python -m venv .venv-flower && .venv-flower/bin/pip install 'flwr>=1.41,<2' numpy
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import _sites
from _timing import Bench, timed
from dpjax.data.partition import by_owner
from dpjax.engine.run import Checkpoint, run
from dpjax.learning.supervised import supervised
from dpjax.models import cnn
from dpjax.sites import project
from dpjax.sites.identity import Authority, Roster, request

PARAMETERS = 26_010
SHAPE = (28, 28, 1)
CLASSES = 10
RECORDS = 80
"""Of a site; a fifth is held out."""
OWN = Path(__file__).resolve().parents[1] / ".venv-flower" / "bin" / "python"
FLOWER = Path(__file__).with_name("_flower_sites.py")
NODES = Path(_sites.__file__)
LIMIT = 900.0


def settings(sites: int, rounds: int) -> dict[str, Any]:
    """The shared plan's."""
    names = _sites.names(sites)
    edges = [[one, other] for place, one in enumerate(names) for other in names[place + 1 :]]
    return {
        "rounds": rounds,
        "network": {"edges": edges},
        "model": {"name": "SmallCNN"},
        "protect": {"relation": "zero_out_record", "clip_norm": 1.0},
        "budget": {"epsilon": 8.0, "delta": 1e-5},
        "noise": [{"name": "Independent"}],
        "sampler": {"name": "Random", "batch_size": 32},
        "optimizer": {"name": "Sgd", "step_size": 0.05},
    }


def records(number: int) -> tuple[np.ndarray, np.ndarray]:
    """A site's images and labels."""
    rng = np.random.default_rng(number)
    return rng.random((RECORDS, *SHAPE), np.float32), rng.integers(0, CLASSES, RECORDS)


def prepare(folder: Path, sites: int, rounds: int) -> project.Project:
    """Certificates, records, the plan and each site's settings."""
    names = _sites.names(sites)
    authority = Authority(folder / "authority")
    keys = {}
    certificates = []
    for name in names:
        keys[name], demand = request(name, folder / name)
        certificates.append(authority.sign(demand))
    roster = Roster.of_certificates(certificates)
    pixel = {"name": "x", "type": "number", "low": 0, "high": 1}
    label = {"name": "y", "type": "category", "classes": [str(digit) for digit in range(CLASSES)]}
    schema = {"columns": [pixel], "label": label, "shape": list(SHAPE)}
    shared_plan = _sites.write(settings(sites, rounds), roster, schema, folder / "plan.json")
    ports = free_ports(sites)
    for number, name in enumerate(names):
        x, y = records(number)
        np.savez(folder / name / "records.npz", x=x, y=y)
        # Of two sites the later one dials.
        earlier = zip(names[:number], ports, strict=False)
        addresses = {other: f"localhost:{port}" for other, port in earlier}
        values = {
            "name": name,
            "plan": str(folder / "plan.json"),
            "certificate": str(certificates[number]),
            "key": str(keys[name]),
            "authority": str(authority.certificate),
            "folder": str(folder / name / "run"),
            "listen": f"localhost:{ports[number]}",
            "neighbours": addresses,
            "data": {"file": str(folder / name / "records.npz")},
        }
        (folder / name / "site.json").write_text(json.dumps(values), encoding="utf-8")
    about = {"parameters": PARAMETERS, "rounds": rounds, "ports": ports}
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")
    return shared_plan


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def simulated(shared_plan: project.Project, repeats: int) -> float:
    """Seconds a round of the same plan in one process."""
    parts = [records(number) for number in range(len(shared_plan.names))]
    x = np.concatenate([part[0] for part in parts])
    y = np.concatenate([part[1] for part in parts])
    owners = np.repeat(np.arange(len(parts)), RECORDS)
    is_held_out = np.arange(len(y)) % RECORDS >= RECORDS * 4 // 5
    train = x[~is_held_out], y[~is_held_out]
    test = x[is_held_out], y[is_held_out]
    shards = by_owner(owners[~is_held_out], range(len(parts)))
    task = supervised(cnn.SmallCNN(), "cross_entropy", train, test, shards)
    leaves = jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0)))
    size = sum(leaf.size for leaf in leaves)
    assert size == PARAMETERS, f"the model has {size} parameters"

    def once() -> float:
        with tempfile.TemporaryDirectory() as folder:
            key = Checkpoint(key_file=Path(folder, "key"))
            return run(shared_plan.plan, task, seeds=[0], checkpoint=key).seconds

    return timed(once, repeats, clock=float).median / shared_plan.plan.config.rounds


def apart() -> list[str]:
    """Words that give a command a network of its own, where the system allows it."""
    inside = 'ip link set lo up && exec "$@"'
    words = ["unshare", "--map-root-user", "--net", "sh", "-c", inside, "sh"]
    if shutil.which("unshare") is None:
        return []
    answer = subprocess.run([*words, "true"], capture_output=True)
    return words if answer.returncode == 0 else []


def together(folder: Path, sites: int, kind: str) -> dict[str, Any]:
    """Run all processes of a kind at once."""
    environment = {**os.environ, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    if kind != "sockets":
        # One compiles for all.
        words = [sys.executable, str(NODES), str(folder), "0", "alone"]
        subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
    processes = []
    try:
        for number in range(sites):
            words = [sys.executable, str(NODES), str(folder), str(number), kind]
            process = subprocess.Popen(
                words,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
            )
            processes.append(process)
        answers = []
        for process in processes:
            out, error = process.communicate(timeout=LIMIT)
            if process.returncode:
                raise RuntimeError(f"{kind} failed:\n{error[-2000:]}")
            answers.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    ended = answers[0]["ended"]
    rounds = len(ended) - 1
    carried = answers[0]["marks"][1][1] - answers[0]["marks"][0][1]
    used = sum(answer["marks"][1][0] - answer["marks"][0][0] for answer in answers)
    return {
        "seconds": statistics.median(np.diff(ended).tolist()),
        "processor": used / rounds,
        "bytes": carried / rounds,
        "rounds": rounds + 1,
    }


def flower(python: str, sites: int, rounds: int) -> dict[str, Any]:
    """The same of Flower."""
    with tempfile.TemporaryDirectory() as folder:
        words = [python, str(FLOWER), folder, str(sites), str(rounds), str(PARAMETERS)]
        answer = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=LIMIT)
        if answer.returncode:
            raise RuntimeError(f"Flower failed:\n{answer.stderr[-2000:]}")
        return json.loads(answer.stdout.splitlines()[-1])


def flower_version(python: str) -> str:
    """Of an interpreter that has it; else empty."""
    words = [python, "-c", "import importlib.metadata as m; print(m.version('flwr'))"]
    return subprocess.run(words, capture_output=True, encoding="utf-8").stdout.strip()


def measured(options: Any, kind: str) -> dict[str, Any]:
    """One turn of a kind, in this process's network."""
    if kind == "flower":
        return flower(options.python, options.sites, options.flower_rounds)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        place = Path(folder)
        # The site's folder is new, as its run is.
        shared_plan = prepare(place, options.sites, options.rounds)
        if kind == "simulation":
            seconds = simulated(shared_plan, 1)
            return {"seconds": seconds, "processor": None, "bytes": 0, "rounds": options.rounds}
        return together(place, options.sites, kind)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__, repeats=1)
    kinds = ("sites", "simulation", "sockets", "computing", "flower")
    bench.parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    bench.parser.add_argument("--sites", type=int, default=10)
    bench.parser.add_argument("--rounds", type=int, default=100)
    bench.parser.add_argument("--flower-rounds", type=int, default=5)
    bench.parser.add_argument("--folder", help="on the disk that is measured; /tmp by default")
    bench.parser.add_argument("--python", default=str(OWN if OWN.exists() else sys.executable))
    options = bench.parse(argv)
    if options.one:
        print(json.dumps(measured(options, *options.one)))
        return 0
    version = flower_version(options.python)
    if not version:
        print("flwr is not installed: left out (bench_sites.py --help says how to)")
    kinds = [kind for kind in options.kinds if version or kind != "flower"]
    prefix = apart()
    words = [*prefix, sys.executable, __file__]
    for name in ("sites", "rounds", "flower_rounds", "python"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    words += ["--folder", options.folder] if options.folder else []
    turns: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(options.repeats):
        for kind in kinds:
            answer = subprocess.run(
                [*words, "--one", kind], stdout=subprocess.PIPE, encoding="utf-8", check=True
            )
            turns[kind].append(json.loads(answer.stdout.splitlines()[-1]))
            print(kind, turns[kind][-1], flush=True)
    for kind, results in turns.items():
        row = dict(results[0])
        for name in ("seconds", "processor", "bytes"):
            values = [result[name] for result in results if result[name] is not None]
            row[name] = statistics.median(values) if values else None
        if "sites" in turns:
            pairs = zip(results, turns["sites"], strict=True)
            ratios = [result["seconds"] / sites["seconds"] for result, sites in pairs]
            row["times_sites"] = statistics.median(ratios)
        row |= {"algorithm": kind, "agents": options.sites, "parameters": PARAMETERS}
        versions = {"flwr": version} if kind == "flower" else {}
        bench.row(**row, versions=versions, own_network=bool(prefix))
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
