"""A training run whose every round crosses a secure sum, over TCP, with clients that leave.

Fifty clients a round send whole numbers with discrete Gaussian noise to a server, by the protocol
of Bell et al., each message over a connection of its own on this machine; three of them leave at
one stage or another. The same run under masks that cancel in compiled code, with the same clients
missing, must give the same models to the bit. Gradients are sent through a learned
sketch (DOME) or whole. Beside them stand the same without noise, its steps tuned alike, and who
always answers the class that most test records have.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from _common import launch, looks, tables, tune
from dpjax.accounting.guarantee import Guarantee
from dpjax.algorithms import federated
from dpjax.algorithms.exchange import Trusted
from dpjax.contrib import datasets, departures
from dpjax.contrib.masks import Masked
from dpjax.contrib.rules import UpdateRule
from dpjax.data import load, partition, split
from dpjax.engine import host
from dpjax.engine.run import Result
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.plans import plan, protect
from dpjax.plans.sums import Discrete
from dpjax.results import plots
from dpjax.secagg import graph, transport
from dpjax.secagg.terms import Limits
from dpjax.topology import graphs, mixing

__all__ = ["PRESETS", "Config", "experiment", "main"]

WHOLE = 0
"""Of ``sketches``: gradients as they are."""

INSIDE = "masks in jit"
OVER = "TCP"
FREE = "no noise"
"""Ways in which a sum is taken."""


@dataclass(frozen=True)
class Config:
    """What is trained, and over what.

    Attributes:
        dataset: A name that `dpjax.data.load.load` takes, of a file in the data cache too, with
            labels -1 and +1.
        agents: Clients of a round.
        clients: Clients that take turns at one place: agents x clients in all.
        examples: Records of a client, one a turn.
        epochs: How often a record takes part.
        sketches: Numbers that a gradient is sent as, k of a learned sketch; 0 is whole.
        dropouts: Clients of a round that leave, others each time, at all stages in turn.
        colluders: Clients whose noise the server may know.
        epsilon: Budget of the whole run, for a client.
        delta: Target delta.
        clip_norm: Clip norm.
        steps: Step sizes of Adam to tune over, in jit.
        floor: Adam's least second moment; not tuned.
        seeds: Of the reported runs.
        tuning_seeds: Seeds of the tuning runs; none of ``seeds``.
        validation: Fraction of the training records held out while tuning.
        measurements: How often a run is measured.
        enrol: Seconds that the server waits for clients that do not enrol.
    """

    dataset: str = "a9a"
    agents: int = 50
    clients: int = 50
    examples: int = 4
    epochs: int = 1
    sketches: tuple[int, ...] = (16, WHOLE)
    dropouts: int = 3
    colluders: int = 2
    epsilon: float = 8.0
    delta: float = 1e-5
    clip_norm: float = 1.0
    steps: tuple[float, ...] = (0.6, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
    floor: float = 1e-3
    seeds: tuple[int, ...] = tuple(range(3))
    tuning_seeds: tuple[int, ...] = (100, 101, 102)
    validation: float = 0.2
    measurements: int = 15
    enrol: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no run."""
        launch.check(self, {"sketches": 0, "dropouts": 0, "colluders": 0})
        datasets.check(self.dataset)

    @property
    def rounds(self) -> int:
        """T."""
        return self.clients * self.examples * self.epochs


PRESETS = {
    "tiny": Config(
        dataset="breast_cancer", agents=8, clients=6, examples=2, sketches=(4,), dropouts=2,
        steps=(0.1, 0.03), colluders=0, seeds=(0, 1), tuning_seeds=(100,), measurements=3,
        enrol=0.5,
    ),
    "cpu": Config(),
    "full": Config(clients=150, sketches=(8, 16, 32, WHOLE)),
}  # fmt: skip


def configured(
    config: Config, k: int, size: int, missing: tuple[tuple[int, ...], ...]
) -> plan.Config:
    """The run's parts, with clients missing by round."""
    masked = Masked(config.dropouts, missing, degree=degree(config))
    return plan.Config(
        method=method(k, masked),
        noise=Discrete(k or size, config.dropouts, config.colluders),
        budget=protect.Budget(config.epsilon, config.delta, accountant="zcdp"),
        protect=protect.Protect("zero_out_client", config.clip_norm, attacker="aggregator"),
        sampler=samplers.Clients(config.clients, config.examples, config.epochs),
        optimizer=UpdateRule("adam", floor=config.floor).chain(config.steps[0]),
        rounds=config.rounds,
    )


def method(k: int, aggregate: Any) -> federated.Federated:
    """DOME of k numbers, or whole gradients."""
    return federated.dome(k, aggregate) if k else federated.Federated(aggregate, centre=0.0)


def degree(config: Config) -> int:
    """Neighbours of a client, as the protocol has them where all enrol."""
    return graph.parameters(
        config.agents, config.colluders / config.agents, config.dropouts / config.agents
    ).degree


def problems(config: Config) -> tuple[Callable[[Any, Any], Problem], Any, Any]:
    """What makes a problem of training and test records; all of both."""
    records, test = split.with_test(load.load(config.dataset), 0.2, seed=1)
    expected = config.agents * config.clients * config.examples

    def made(train: Any, test: Any) -> Problem:
        # Every place has the records of its clients; a smaller set deals each fewer of them.
        count = min(expected, len(train[1]))
        sizes = [count // config.agents] * config.agents
        shards = partition.by_size(sum(sizes), sizes, 0)
        selection = tuple(part[: sum(sizes)] for part in train)
        return supervised(Linear(), "logistic", selection, test, shards, name=config.dataset)

    return made, records, test


def tune_and_compare(config: Config, k: int, lab: launch.Lab, folder: Path) -> list[dict[str, Any]]:
    """Tune in jit, with noise and without, and run the best of those without: their rows."""
    learn, complete, test = problems(config)
    matrix = mixing.metropolis_hastings(graphs.complete(config.agents))
    leaves = departures.taking_turns(config.agents, config.dropouts)
    missing = departures.absent(leaves, config.rounds)
    base = configured(config, k, complete[0].shape[1] + 1, missing)
    # Masks hide whole numbers alone; without noise there are none.
    trusted = method(k, Trusted(config.dropouts, missing))
    free = replace(base, method=trusted, noise=None, budget=None)
    fit, validation = split.split(*complete, config.validation, seed=0)
    tuned = learn(fit, validation)
    shared = {"tuning_seeds": config.tuning_seeds, "metric": "test_loss", "runner": lab.run}

    def trial(way: str, part: plan.Config) -> tune.Trial:
        return tune.Trial(way, config.steps, lambda steps, count: tune.grid(part, steps, matrix))

    # What has noise is run over TCP, seed by seed, with the step size that is found here.
    private = tune.search(
        [trial(INSIDE, base)], tuned, checkpoint=folder / f"tuning_{INSIDE}", **shared
    )
    silent = tune.reported(
        [trial(FREE, free)],
        tuned,
        learn(complete, test),
        seeds=config.seeds,
        measurements=math.ceil(config.rounds / every(config)),
        checkpoint=folder / "free",
        **shared,
    )
    where = columns(k, complete, test)
    return private.rows(way=INSIDE, **where) + silent.rows(way=FREE, **where)


def train(
    config: Config, k: int, step: float, seed: int, lab: launch.Lab, folder: Path
) -> list[dict[str, Any]]:
    """Run one seed over TCP, and under masks in jit: rows of both."""
    del folder  # Not resumed: traffic is that of one process.
    learn, complete, test = problems(config)
    matrix = mixing.metropolis_hastings(graphs.complete(config.agents))
    leaves = departures.taking_turns(config.agents, config.dropouts)

    def tuned(missing: tuple[tuple[int, ...], ...]) -> plan.Plan:
        base = configured(config, k, complete[0].shape[1] + 1, missing)
        (outcome,) = tune.grid(base, [step], matrix)
        return outcome

    result = tuned(departures.absent(leaves, config.rounds))
    task = learn(complete, test)
    options = {"seeds": [seed], "eval_every": every(config), "devices": None}
    code = result.noise.code  # type: ignore[union-attr]
    sums = transport.SecureSums(
        transport.terms_of(code, dropouts=config.dropouts, colluders=config.colluders),
        leaves,
        over="tcp",
        skip=True,
        limits=Limits(enrol=config.enrol),
    )
    crossed = lab.run(result, task, transport=sums, **options)
    # The same clients missing, late ones too, and the same two halves of a round: compiled as one
    # program a sketch may round otherwise in its last bits.
    again = tuned(sums.missing())
    inside = lab.run(again, task, transport=host.local_transport(again), **options)
    same = same_models(inside, crossed)
    lab.say(
        f"  {name(k)}, seed {seed}: step {step:g}, sums modulo 2^{code.bits}, "
        f"{'the models' if same else 'OTHER models than those'} under masks"
    )
    where = columns(k, complete, test) | {
        "phase": "final", "bits": code.bits, "numbers": code.padded, "same_models": same,
    }  # fmt: skip
    rows = inside.rows(way=INSIDE, **where)
    return rows + [row | traffic(sums, row["round"], config) for row in crossed.rows(
        way=OVER, **where
    )]  # fmt: skip


def columns(k: int, train: Any, test: Any) -> dict[str, Any]:
    """What every row says of what is sent, and how often the most frequent answer is right."""
    counts = np.unique(test[1], return_counts=True)[1]
    return {
        "sketch": k, "series": name(k), "parameters": train[0].shape[1] + 1,
        "majority": float(counts.max() / counts.sum()),
    }  # fmt: skip


def every(config: Config) -> int:
    """Rounds between measurements."""
    return max(1, config.rounds // config.measurements)


def same_models(result: Result, other: Result) -> bool:
    """Whether two runs have the same models, to the bit."""
    pairs = zip(jax.tree.leaves(result.params), jax.tree.leaves(other.params), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def name(k: int) -> str:
    """What figures call a sketch."""
    return f"learned sketch, k = {k}" if k else "whole gradients"


def traffic(sums: transport.SecureSums, rounds: int, config: Config) -> dict[str, Any]:
    """What has crossed in the first rounds, for one client of each, on average."""
    crossed = sums.crossed[:rounds]
    opened = [message for message in crossed if not message.aborted]
    parts = max(1, len(opened)) * config.agents
    return {
        "bytes_up": sum(total.received for total in opened) / parts,
        "bytes_down": sum(item.sent for item in opened) / parts,
        "megabytes": sum(value.received + value.sent for value in opened) / 1e6,
        "seconds_a_round": float(np.mean([case.seconds for case in crossed])) if crossed else 0.0,
        "aborted": len(crossed) - len(opened),
        "survivors": float(np.mean([len(each.survivors) for each in opened])) if opened else 0.0,
    }


def experiment(config: Config, lab: launch.Lab) -> None:
    """Train logistic regression over a secure sum, every round of it over TCP."""
    import pandas

    frames = []
    for k in config.sketches:
        label = f"{config.dataset}_{k or 'whole'}"
        selection = launch.stored(config, "sketches", sketch=k)
        compute = functools.partial(tune_and_compare, config, k, lab)
        frames.append(lab.cell(f"{label}_tuning", selection, compute, seed=config.seeds))
        step = recorded_step(frames[-1])
        # Seeds may join; what else was tried is in the step.
        selection = launch.stored(config, "sketches", "seeds", "steps", "tuning_seeds", sketch=k)
        for seed in config.seeds:
            cell = selection | {"seed": seed, "step": step}
            compute = functools.partial(train, config, k, step, seed, lab)
            frames.append(lab.cell(f"{label}_{seed}", cell, compute, seed=seed))
    report(config, lab, pandas.concat(frames, ignore_index=True))


def recorded_step(frame: Any) -> float:
    """The step size with the least mean loss in tuning, with noise; a diverged run is infinite."""
    tried = frame[(frame["phase"] == "tuning") & (frame["way"] == INSIDE)]
    return float(tried["test_loss"].fillna(np.inf).groupby(tried["step_size"]).mean().idxmin())


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Print the tables and draw the figure from the records."""
    final = frame[frame["phase"] == "final"]
    last = final[final["round"] == final["round"].max()]
    majority = float(last["majority"].iloc[0])
    lab.say(
        f"\n{config.dataset}: {config.agents} clients a round, {config.rounds} rounds; "
        f"the most frequent class has {majority:.4g} of the test records"
    )
    table = tables.summary(last, ["series", "way", "step_size"], "test_accuracy")
    table = table.rename(columns={"mean": "test_accuracy", "count": "seeds"})
    loss = tables.summary(last, ["series", "way", "step_size"], "test_loss")
    table["test_loss"] = loss["mean"]
    lab.say(tables.text(table))
    over = last[last["way"] == OVER]
    same = "the same, to the bit" if over["same_models"].all() else "NOT THE SAME"
    lab.say(f"models over TCP and under masks in jit: {same}")
    named = frame.assign(tuned=frame["series"] + " (" + frame["way"] + ")")
    lab.say_ends(tables.at_ends(named, "tuned"))
    lab.say("\na client's bytes in a round, its seconds, and who was left; aborted of all rounds:")
    lab.say(tables.text(costs(config, over)))
    stated = Guarantee.from_dict(over["guarantee"].iloc[0]).statement()
    lab.say(f"\nguarantee: {stated} Step sizes were tuned on training data, on other seeds; that "
            "is outside epsilon.")  # fmt: skip
    free = last[last["way"] == FREE].groupby("series", sort=False)["test_accuracy"].mean()
    names = {name(k): f"DOME, k = {k}" if k else name(k) for k in config.sketches}
    levels = {f"{names[series]}, no noise": 100 * level for series, level in free.items()}
    sheet = plots.lines(
        looks.percent(final[final["way"] == OVER]), "round", "points", series="series",
        xlabel="round", ylabel=looks.accuracy(config.dataset),
        hlines=levels | {"most frequent class": 100 * majority},
        looks={
            name(k): looks.look("dome" if k else "whole", names[name(k)]) for k in config.sketches
        },
        note="Every round crossed a secure sum over TCP, with clients leaving at all stages.",
    )  # fmt: skip
    lab.figure(sheet, "dome_tcp.svg")


def costs(config: Config, over: Any) -> list[dict[str, Any]]:
    """What crossed, a row a series: means over seeds, but for the rounds that were aborted."""
    rows = []
    for series, part in over.groupby("series", sort=False):
        means = part[["bytes_up", "bytes_down", "seconds_a_round", "survivors"]].mean()
        aborted = f"{int(part['aborted'].sum())} of {config.rounds * len(part)}"
        subject = {"series": series, "numbers": int(part["numbers"].iloc[0]),
              "bits": int(part["bits"].iloc[0])}  # fmt: skip
        rows.append(subject | dict(means) | {"aborted": aborted})
    return rows


main = functools.partial(launch.main, "dome_tcp", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
