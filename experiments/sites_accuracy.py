"""What accuracy real sites reach: each its own noise, one group's secret, or sums among themselves.

Sites of unequal sizes train over gRPC with TLS, each with its own records, key, certificate, folder
and secret noise, as `dp.site` runs them. They all protect single records, at equal epsilon. Beside
them stands a server that is trusted with all gradients, in one process. Clip norms and step sizes
are tuned in the simulation, by every method alike, on held-out training records and another seed,
which epsilon does not cover. The same plans in the simulation say whether sites lose anything.

Digits: records are dealt at random, and a process has the sites of one size, a thread each.
Hospitals: made-up CSV files, each in a hospital's own words, and a process for every site. Sites
draw their noise from the system's entropy, so accuracies differ by chance from run to run.
"""

import contextlib
import dataclasses
import functools
import json
import queue
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from _common import launch, looks, tables, tune
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.exchange import Trusted
from dpjax.algorithms.federated import Federated
from dpjax.contrib import datasets
from dpjax.contrib.rules import UpdateRule, read_filter
from dpjax.data import partition, split
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.models.mlp import MLP
from dpjax.plans import noise, optimizers, plan, protect
from dpjax.plans.sums import Discrete, SumShares
from dpjax.results import plots
from dpjax.sites import data, identity, start
from dpjax.topology import graphs, mixing

__all__ = ["PRESETS", "Config", "experiment", "main", "member"]

HOSPITALS = Path(__file__).resolve().parents[1] / "examples" / "hospitals"
LIMIT = 1200.0
"""Seconds that a run of sites may take."""
KEY_BYTES = 32

TITLES = {
    "independent": "independent noise",
    "mafalda": "MAFALDA",
    "doppler_whisper": "one secret of a group (Whisper, filtered)",
    "aggregate": "sums among sites",
    "central": "trusted server (one process)",
}
"""What is compared, by the names of looks."""


SETS: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits"},
    "hospitals": {
        "dataset": "hospitals", "sites": 9, "processes": 9, "sizes": (120, 300, 900), "rounds": 20,
        "clip_norms": (1.0,), "paths": (8.0, 4.0, 2.0, 1.0, 0.5, 0.25),
    },
    "twenty": {
        "dataset": "digits", "sites": 20, "processes": 4, "sizes": (24, 48, 72, 140),
        "epsilon": (1.0,),
        "methods": ("independent", "doppler_whisper", "aggregate", "central"),
    },
}  # fmt: skip
"""Who trains on what; the last is for the number that the comparison of systems begins with."""


@dataclass(frozen=True)
class Config:
    """What is trained, where and at which guarantee.

    Attributes:
        sets: Names of `SETS`, whose values take the place of those below; none leaves them.
        dataset: "digits", or "hospitals".
        sites: Number of sites.
        processes: Of the sites, dealt in turn, which are threads there; 0 is this one.
        sizes: Training records of the sites, in turn.
        probability: Edge probability of the random graph of those who gossip.
        methods: Names of `TITLES`.
        epsilon: Budgets.
        delta: Target delta.
        rounds: Rounds.
        clip_norms: Clip norms that are tried.
        paths: Step size times clip norm: how far a round goes at most.
        moves: Most step sizes that are tried beyond those.
        dropouts: Sites that may miss a sum.
        colluders: Sites that may put together what they know, in sums.
        cohorts: Numbers of sites of which the noise of sums is compared with a server's.
        seeds: Of the reported runs.
        tuning_seeds: Seeds of the tuning runs; none of ``seeds``.
        validation: Fraction of each site's training records that is held out while tuning.
    """

    sets: tuple[str, ...] = ()
    dataset: Literal["digits", "hospitals"] = "digits"
    sites: int = 10
    processes: int = 5
    sizes: tuple[int, ...] = (40, 80, 120, 184, 284)
    probability: float = 0.5
    methods: tuple[str, ...] = tuple(TITLES)
    epsilon: tuple[float, ...] = (1.0, 4.0, 16.0)
    delta: float = 1e-5
    rounds: int = 100
    clip_norms: tuple[float, ...] = (0.3, 1.0)
    paths: tuple[float, ...] = tuple(8.0 * 0.65**power for power in range(-5, 11))
    moves: int = 4
    dropouts: int = 1
    colluders: int = 1
    cohorts: tuple[int, ...] = (5, 9, 20)
    seeds: tuple[int, ...] = tuple(range(5))
    real: int = 1
    tuning_seeds: tuple[int, ...] = (100,)
    validation: float = 0.2

    def __post_init__(self) -> None:
        """Refuse what no sites can run."""
        minimum = {"sites": 3, "processes": 0, "dropouts": 0, "moves": 0, "cohorts": 5}
        launch.check(self, minimum, known={"methods": TITLES, "sets": SETS}, empty=("sets",))

    @property
    def parts(self) -> list["Config"]:
        """A config for each set."""
        every = [SETS[name] for name in self.sets] or [{}]
        return [dataclasses.replace(self, sets=(), **values) for values in every]

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Config":
        """The config of plain values."""
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    @property
    def stem(self) -> str:
        """How files are called."""
        return f"{self.dataset}_{self.sites}"

    @property
    def names(self) -> list[str]:
        """Of the sites."""
        return [f"site-{number:02d}" for number in range(self.sites)]

    @property
    def counts(self) -> np.ndarray:
        """Training records of each site, which are public: all take part in every round."""
        return np.resize(self.sizes, self.sites)


PRESETS = {
    "tiny": Config(
        dataset="hospitals", sites=5, processes=0, sizes=(20, 40), probability=0.8, rounds=3,
        methods=("aggregate",), epsilon=(16.0,), clip_norms=(1.0,),
        paths=(2.0, 1.0), moves=0, cohorts=(5,), seeds=(0,),
    ),
    "cpu": Config(sets=("digits", "hospitals")),
    "cpu_twenty": Config(sets=("twenty",)),
}  # fmt: skip


class Chosen(NamedTuple):
    """A method at a budget, with what was tuned."""

    method: str
    epsilon: float
    clip_norm: float
    step_size: float


class Data(NamedTuple):
    """Each site's training records, and those that measure."""

    parts: list[tuple[np.ndarray, np.ndarray]]
    test: tuple[np.ndarray, np.ndarray]


def model(config: Config) -> tuple[Any, str]:
    """What is trained, and its loss."""
    if config.dataset == "hospitals":
        return Linear(), "logistic"
    return MLP((32,), 10, "tanh"), "cross_entropy"


def task(config: Config, parts: list[Any], test: Any) -> Problem:
    """The problem of some sites' records."""
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    owners = np.repeat(np.arange(len(parts)), [len(part[1]) for part in parts])
    shards = partition.by_owner(owners.tolist(), range(len(parts)))
    return supervised(*model(config), (x, y), test, shards, name=config.dataset)


def write_hospitals(config: Config, home: Path) -> None:
    """Write the CSV files of all hospitals, and others that measure, a quarter as many."""
    for part, sizes, seed in (("train", config.counts, 40), ("test", config.counts // 4, 41)):
        words = [sys.executable, HOSPITALS / "generate.py", home / part, "--seed", str(seed)]
        with open(home / f"{part}.txt", "w", encoding="utf-8") as listed:
            subprocess.run([*words, "--counts", *map(str, sizes)], check=True, stdout=listed)


def hospital(place: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a hospital's file, as a site does."""
    schema = data.Schema.of(tomllib.loads((HOSPITALS / "schema.toml").read_text("utf-8")))
    source = tomllib.loads((place / "data.toml").read_text("utf-8"))
    records = data.read(source, schema, place)
    return records.x, records.targets("logistic")


def places(home: Path, part: str) -> list[Path]:
    """Folders of the hospitals, in the order in which they were written."""
    listed = (home / f"{part}.txt").read_text("utf-8")
    return [home / part / name for name in re.findall(r"(\w+)/records\.csv", listed)]


def load(config: Config, home: Path, number: int | None = None) -> Data:
    """Read the records of all sites, or of one of them alone.

    Args:
        config: The experiment's.
        home: Where hospitals' files are.
        number: Of one site.
    """
    if config.dataset == "hospitals":
        own = places(home, "train")[slice(number, None if number is None else number + 1)]
        tests = zip(*map(hospital, places(home, "test")), strict=True)
        x, y = (np.concatenate(arrays) for arrays in tests)
        return Data(list(map(hospital, own)), (x, y))
    train, test, *_ = datasets.flat("digits")
    order = np.random.default_rng(0).permutation(len(train[1]))[: config.counts.sum()]
    rows = np.split(order, np.cumsum(config.counts)[:-1])
    if number is not None:
        rows = [rows[number]]
    return Data([(train[0][part], train[1][part]) for part in rows], test)


def plans(
    config: Config, method: str, clip_norm: float, epsilon: float,
    steps: tuple[float, ...], counts: np.ndarray, release: bool = False,
) -> list[plan.Plan]:  # fmt: skip
    """A plan for every step size."""
    shape = jax.ShapeDtypeStruct((1, features(config)), "float32")
    shapes = jax.eval_shape(model(config)[0].init, jax.random.key(0), shape)
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    shares = {"dropouts": config.dropouts, "colluders": config.colluders}
    designs: dict[str, Any] = {
        "independent": noise.Independent(),
        "mafalda": noise.Mafalda(),
        "doppler_whisper": noise.Whisper("run"),
        "aggregate": Discrete(size, **shares),
        "central": SumShares(),
    }
    is_summed = method in ("aggregate", "central")
    accountant: Any = "zcdp" if method == "aggregate" else "gdp"
    attacker: Any = "aggregator" if is_summed else "outsider"
    tolerated = config.dropouts if method == "aggregate" else 0
    # All sites of a sum are linked; a model's steps do not depend on links there.
    links = graphs.complete(config.sites)
    if not is_summed:
        links = graphs.erdos_renyi(config.sites, config.probability, 0)
    results: list[plan.Plan] = []
    for step in steps:
        rule: Any = optimizers.Sgd(step)
        if method == "doppler_whisper":
            rule = UpdateRule(filter=read_filter("first v1")).chain(step)
        result = plan.Config(
            method=Federated(Trusted(dropouts=tolerated)) if is_summed else DSGD(),
            noise=designs[method],
            budget=protect.Budget(epsilon, config.delta, accountant=accountant),
            protect=protect.Protect("zero_out_record", clip_norm=clip_norm, attacker=attacker),
            sampler=samplers.Full(),
            optimizer=rule,
            rounds=config.rounds,
            release=release and not is_summed,
        )
        design = results[0].design if results else None
        weights = mixing.metropolis_hastings(links)
        results.append(plan.make(result, weights, design=design, counts=counts))
    return results


def features(config: Config) -> int:
    """Numbers of a record."""
    if config.dataset == "digits":
        return 64
    schema = tomllib.loads((HOSPITALS / "schema.toml").read_text("utf-8"))
    return len(data.Schema.of(schema).features)


def tuned(
    config: Config, name: str, epsilon: float, records: Data, lab: launch.Lab, folder: Path
) -> tune.Reported:
    """Tune a method at a budget, and run it in the simulation."""
    fit, rest = [], []
    for x, y in records.parts:
        train, held_out = split.split(x, y, config.validation, seed=0)
        fit.append(train)
        rest.append(held_out)
    validation = tuple(np.concatenate(arrays) for arrays in zip(*rest, strict=True))
    tasks = task(config, fit, validation), task(config, records.parts, records.test)
    counts = {len(one.y): one.partition.counts for one in tasks}

    def of_clip(clip_norm: float, steps: tuple[float, ...], count: int) -> list[plan.Plan]:
        return plans(config, name, clip_norm, epsilon, steps, counts[count])

    dealt = tune.dealt(config.paths, len(config.clip_norms))
    tried = [
        tune.Trial(f"C {c:g}", tuple(p / c for p in steps), functools.partial(of_clip, c))
        for c, steps in zip(config.clip_norms, dealt, strict=True)
    ]
    return tune.reported(
        tried, *tasks, seeds=config.seeds, tuning_seeds=config.tuning_seeds, moves=config.moves,
        metric="test_loss", runner=lab.run, checkpoint=folder,
    )  # fmt: skip


def member(job: dict[str, Any], agreed: plan.Plan) -> dict[str, Any]:
    """Run one site to its end.

    Args:
        job: Of `jobs`.
        agreed: The plan.

    Returns:
        What it measured on the test records, what it states, and its seconds.
    """
    config = Config.of(job["config"])
    records = load(config, Path(job["home"]), job["number"])
    site = start.site(agreed, task(config, *records), job["settings"])
    began = time.monotonic()
    with contextlib.closing(site):
        for progress in site.rounds():
            ended = time.monotonic()
            metrics = {name: float(np.squeeze(v)) for name, v in progress.metrics.items()}
        stated = site.guarantee.to_dict()
    return {**metrics, "guarantee": stated, "seconds": ended - began}


def released(config: Config, chosen: Chosen) -> plan.Plan:
    """The plan that all sites make by themselves."""
    steps = (chosen.step_size,)
    parts = chosen.method, chosen.clip_norm, chosen.epsilon, steps, config.counts
    return plans(config, *parts, release=True)[0]


def jobs(config: Config, chosen: Chosen, seed: int, home: Path, own: Path) -> Iterator[Any]:
    """Keys, certificates and settings of all sites of a run, and what else each needs."""
    authority = identity.Authority(own / "authority")
    pairs = [identity.request(name, own / name) for name in config.names]
    certificates = [str(authority.sign(demand)) for _, demand in pairs]
    secret = own / "group.secret"
    # All hold one file, in place of copies.
    secret.touch(0o600)
    secret.write_bytes(secrets.token_bytes(KEY_BYTES))
    ports = free_ports(config.sites)
    weights = released(config, chosen).mixing
    for number, name in enumerate(config.names):
        settings: dict[str, Any] = {
            "name": name,
            "certificate": certificates[number],
            "key": str(pairs[number][0]),
            "authority": str(authority.certificate),
            "certificates": certificates,
            "folder": str(own / name / "run"),
            "listen": f"127.0.0.1:{ports[number]}",
            # Of two sites the later one dials.
            "neighbours": {
                config.names[other]: f"127.0.0.1:{ports[other]}"
                for other in np.flatnonzero(weights[number, :number]).tolist()
            },
            "seed": seed,
            # Where one machine has all sites, none is away.
            "waits": {"linger": 20.0},
        }
        if chosen.method == "doppler_whisper":
            settings["secret"] = str(secret)
        yield {
            "config": dataclasses.asdict(config), "chosen": chosen, "number": number,
            "home": str(home), "settings": settings,
        }  # fmt: skip


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    with contextlib.ExitStack() as stack:
        create = socket.create_server
        opened = [stack.enter_context(create(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in opened]


def hosted(jobs: list[Any]) -> list[dict[str, Any]]:
    """Run sites in this process, a thread each."""
    answers: queue.Queue[Any] = queue.Queue()
    agreed = released(Config.of(jobs[0]["config"]), Chosen(*jobs[0]["chosen"]))

    def live(job: Any) -> None:
        try:
            answers.put(member(job, agreed))
        except BaseException as error:
            answers.put(error)

    for job in jobs:
        threading.Thread(target=live, args=(job,), daemon=True).start()
    results = [answers.get(timeout=LIMIT) for _ in jobs]
    for answer in results:
        if isinstance(answer, BaseException):
            raise answer
    return results


class Hosts:
    """Processes of sites, which take one run after the other: starting them takes long.

    Args:
        count: How many; site i is in process i modulo this. 0 is this process alone.
        folder: For their logs.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self._logs = [folder / f"log-{place}.txt" for place in range(count)]
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def run(self, jobs: list[Any]) -> list[dict[str, Any]]:
        """What the sites of one run reached."""
        if not self._logs:
            return hosted(jobs)
        if not self._processes:
            self._processes = list(map(self._started, self._logs))
        for place, process in enumerate(self._processes):
            assert process.stdin is not None
            print(json.dumps(jobs[place :: len(self._logs)]), file=process.stdin, flush=True)
        results = []
        for log, process in zip(self._logs, self._processes, strict=True):
            assert process.stdout is not None
            # A site that fails ends its process, and this one all others.
            line = process.stdout.readline()
            if not line:
                raise OSError(f"sites failed: {log.read_text('utf-8')[-1000:]}")
            results += json.loads(line)
        return results

    def _started(self, log: Path) -> "subprocess.Popen[str]":
        words = [sys.executable, "-c", "import sites_accuracy as s; s.host()"]
        with open(log, "w", encoding="utf-8") as file:
            return subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                encoding="utf-8",
                cwd=Path(__file__).parent,
            )


def host() -> None:
    """Run the sites of a process; its jobs come by standard input, a run a line."""
    for line in sys.stdin:
        print(json.dumps(hosted(json.loads(line))), flush=True)


def on_sites(
    config: Config, chosen: Chosen, home: Path, rows: list[dict[str, Any]], hosts: Hosts
) -> list[dict[str, Any]]:
    """Run all sites for every seed, and return the simulation's rows with what sites reached."""
    results = []
    for row in rows:
        with tempfile.TemporaryDirectory() as folder:
            answers = hosts.run(list(jobs(config, chosen, row["seed"], home, Path(folder))))
        stated = answers[0]["guarantee"]
        accuracies = [answer["test_accuracy"] for answer in answers]
        results.append(row | {
            "way": "sites",
            "processes": config.processes or 1,
            "test_accuracy": float(np.mean(accuracies)),
            "test_loss": float(np.mean([answer["test_loss"] for answer in answers])),
            "least_accuracy": min(accuracies),
            "guarantee": stated,
            "epsilon": stated["epsilon"],
            "run_seconds": max(answer["seconds"] for answer in answers),
        })  # fmt: skip
    return results


def train(
    config: Config, name: str, epsilon: float, lab: launch.Lab, hosts: Hosts, folder: Path
) -> list[dict[str, Any]]:
    """Tune one method at one budget in the simulation, and run it there and on real sites."""
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        if config.dataset == "hospitals":
            write_hospitals(config, home)
        records = load(config, home)
        best = tuned(config, name, epsilon, records, lab, folder)
        extra = {"budget_epsilon": epsilon, "dataset": config.dataset, "way": "simulation"}
        rows = best.rows(lambda trial, result: {"setting": trial.name}, design=name, **extra)
        if name == "central" or lab.options.estimate:
            return rows
        clip_norm = float(best.trial.name.removeprefix("C "))
        chosen = Chosen(name, epsilon, clip_norm, best.step_size)
        final = [row for row in rows if row["phase"] == "final"][: config.real]
        real = on_sites(config, chosen, home, final, hosts)
        for row, done in zip(final, real, strict=True):
            lab.say(
                f"  {TITLES[name]}, epsilon {epsilon:g}, seed {row['seed']}: step "
                f"{best.step_size:.3g}, {done['test_accuracy']:.4f} on sites in "
                f"{done['run_seconds']:.0f} s, {row['test_accuracy']:.4f} simulated"
            )
        return rows + real


def noises(config: Config) -> list[dict[str, Any]]:
    """Noise of a sum among n sites over that of a server: standard deviations, nobody missing."""
    rows = []
    for agents in config.cohorts:
        for epsilon in config.epsilon:
            # As many records each: of their number only what one moves a sum matters.
            equal = dataclasses.replace(config, sites=agents, sizes=(int(config.counts.mean()),))
            deviations = {}
            for name in ("aggregate", "central"):
                parts = name, 1.0, epsilon, (1.0,), equal.counts
                calibrated: Any = plans(equal, *parts)[0].noise
                deviations[name] = float(np.linalg.norm(calibrated.factor))
            ratio = deviations["aggregate"] / deviations["central"]
            # What honest shares alone make up for; the rest is whole numbers and accounting.
            shares = (agents / (agents - config.dropouts - config.colluders)) ** 0.5
            row = {"agents": agents, "budget_epsilon": epsilon, "ratio": ratio, "shares": shares}
            rows.append({"dataset": config.dataset, "phase": "noise", **row})
    return rows


def experiment(config: Config, lab: launch.Lab) -> None:
    """Tune every method in the simulation and run it on real sites; state what sums cost."""
    frames = [measured(part, lab) for part in config.parts]
    for part, frame in zip(config.parts, frames, strict=True):
        report(part, lab, frame)
    draw(config, lab, frames)


def measured(config: Config, lab: launch.Lab) -> Any:
    """The noise, and all methods at all budgets, of one set."""
    stored = launch.stored(config, "methods")
    price = lab.cell(f"{config.stem}_noise", stored, lambda folder: noises(config))
    lab.say("\nnoise of a sum among sites over that of a trusted server (standard deviations)")
    lab.say(tables.text(price, ["agents", "budget_epsilon", "ratio", "shares"]))
    display = {
        "x": "budget_epsilon", "y": "test_accuracy", "series": "design",
        "where": ["phase=final", f"agents={config.sites}", "way=sites"],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as logs, Hosts(config.processes, Path(logs)) as hosts:
        cells = []
        for name in config.methods:
            for epsilon in config.epsilon:
                cell = launch.stored(config, "methods", "cohorts", method=name, epsilon=epsilon)
                file = launch.file_name(f"{config.stem}_{name}_{epsilon:g}")
                compute = functools.partial(train, config, name, epsilon, lab, hosts)
                cells.append((file, cell, compute))
        return lab.cells(cells, seed=config.seeds, plot=display)


def last_rounds(config: Config, frame: Any) -> Any:
    """Rows of the reported runs' ends."""
    final = frame[(frame["phase"] == "final") & (frame["round"] == config.rounds)]
    return looks.percent(final).assign(method=final["design"].map(TITLES))


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """The table of one set."""
    lab.say(f"\n{config.dataset}, {config.sites} sites: test accuracy in %, mean over sites, seeds")
    keys = ["method", "budget_epsilon", "way", "setting", "step_size"]
    lab.say(tables.text(tables.summary(last_rounds(config, frame), keys, "points")))
    lab.say_ends(tables.at_ends(frame, ["design", "budget_epsilon"]))


def draw(config: Config, lab: launch.Lab, frames: list[Any]) -> None:
    """Accuracy over budgets on sites, and that of the trusted server."""
    pairs = list(zip(config.parts, frames, strict=True))
    # One budget is no line.
    pairs = [pair for pair in pairs if len(pair[0].epsilon) > 1] or pairs
    sheet, panels = plots.figure(1, len(pairs), sharey="row")
    for ax, (part, frame) in zip(panels, pairs, strict=True):
        last = last_rounds(part, frame)
        rows = last[(last["way"] == "sites") | (last["design"] == "central")]
        plots.lines(
            rows, "budget_epsilon", "points", ax=ax, log_x=len(part.epsilon) > 1,
            xlabel="epsilon", ylabel=looks.accuracy(),
            title=f"{part.dataset}, {part.sites} sites, T = {part.rounds}",
            guarantee=f"(zero_out_record, delta = {part.delta:g})",
            note="Sites are real, over TLS; the server is simulated. Tuning is outside epsilon.",
            looks={name: looks.look(name, title) for name, title in TITLES.items()},
        )  # fmt: skip
    name = "" if len(config.parts) > 1 else f"_{config.parts[0].stem}"
    lab.figure(sheet, f"sites_accuracy{name}{lab.suffix}.svg")


main = functools.partial(launch.main, "sites_accuracy", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
