"""A training run whose every round crosses a secure sum, over TCP, with clients that leave.

Fifty clients a round send whole numbers with discrete Gaussian noise to a server, by the protocol
of Bell et al., each message over a connection of its own on this machine; three of them leave at
one stage or another. The same run under masks that cancel in compiled code, with the same clients
missing, must give the same models to the bit. Gradients are sent through a learned
sketch (DOME) or whole.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from dpjax.accounting.guarantee import Guarantee
from dpjax.algorithms import federated
from dpjax.algorithms.exchange import Masked
from dpjax.data import load, partition, split
from dpjax.engine import host, tune
from dpjax.engine.run import Result, run
from dpjax.models.linear import Linear
from dpjax.plans import integers, optimizers, plan, problem, protect, rules, samplers
from dpjax.results import launch, plots, tables
from dpjax.secagg import graph, tcp, transport
from dpjax.topology import graphs, mixing

__all__ = ["PRESETS", "Config", "experiment", "main"]

WHOLE = 0
"""Of ``sketches``: gradients as they are."""


@dataclass(frozen=True)
class Config:
    """What is trained, and over what.

    Attributes:
        dataset: a9a comes from the data cache, breast_cancer needs no download.
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
        seed: Of the reported run.
        tuning_seeds: Seeds of the tuning runs; none is ``seed``.
        validation: Fraction of the training records held out while tuning.
        measurements: How often a run is measured.
        enrol: Seconds that the server waits for clients that do not enrol.
    """

    dataset: Literal["a9a", "breast_cancer"] = "a9a"
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
    steps: tuple[float, ...] = (0.1, 0.03, 0.01, 0.003, 0.001)
    seed: int = 0
    tuning_seeds: tuple[int, ...] = (100, 101, 102)
    validation: float = 0.2
    measurements: int = 15
    enrol: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no run."""
        launch.check_numbers(
            self,
            whole={"sketches": 0, "measurements": 1},
            positive=["enrol", "steps"],
            filled=["sketches", "steps"],
        )

    @property
    def rounds(self) -> int:
        """T."""
        return self.clients * self.examples * self.epochs


PRESETS = {
    "tiny": Config(
        dataset="breast_cancer", agents=8, clients=6, examples=2, sketches=(4,), dropouts=2,
        steps=(0.1, 0.03), colluders=0, tuning_seeds=(100,), measurements=3, enrol=0.5,
    ),
    "cpu": Config(),
    "full": Config(clients=150, sketches=(8, 16, 32, WHOLE)),
}  # fmt: skip


def configured(
    config: Config, k: int, size: int, missing: tuple[tuple[int, ...], ...]
) -> plan.Config:
    """The run's parts, with clients missing by round."""
    masked = Masked(config.dropouts, missing, degree=degree(config))
    method = federated.dome(k, masked) if k else federated.Federated(masked, centre=0.0)
    return plan.Config(
        method=method,
        noise=integers.Discrete(k or size, config.dropouts, config.colluders),
        budget=protect.Budget(config.epsilon, config.delta, accountant="zcdp"),
        protect=protect.Protect("zero_out_client", config.clip_norm, attacker="aggregator"),
        sampler=samplers.Clients(config.clients, config.examples, config.epochs),
        optimizer=optimizers.Chain(rules.UpdateRule("adam"), config.steps[0], uses_noise=True),
        rounds=config.rounds,
    )


def degree(config: Config) -> int:
    """Neighbours of a client, as the protocol has them where all enrol."""
    return graph.parameters(
        config.agents, config.colluders / config.agents, config.dropouts / config.agents
    ).degree


def problems(config: Config) -> tuple[Callable[[Any, Any], problem.Problem], Any, Any]:
    """What makes a problem of training and test records; all of both."""
    whole, test = split.with_test(load.load(config.dataset), 0.2, seed=1)
    wanted = config.agents * config.clients * config.examples

    def made(train: Any, test: Any) -> problem.Problem:
        # Every place has the records of its clients; a smaller set deals each fewer of them.
        count = min(wanted, len(train[1]))
        sizes = [count // config.agents] * config.agents
        shards = partition.by_size(sum(sizes), sizes, 0)
        kept = tuple(part[: sum(sizes)] for part in train)
        return problem.supervised(Linear(), "logistic", kept, test, shards, name=config.dataset)

    return made, whole, test


def train(config: Config, k: int, lab: launch.Lab, folder: Path) -> list[dict[str, Any]]:
    """Tune in jit, run over TCP, and run under masks in jit: rows of the last two."""
    learn, whole, test = problems(config)
    matrix = mixing.metropolis_hastings(graphs.complete(config.agents))
    leaves = transport.taking_turns(config.agents, config.dropouts)
    base = configured(config, k, whole[0].shape[1] + 1, transport.absent(leaves, config.rounds))
    fit, held = split.split(*whole, config.validation, seed=0)
    tuning = run(
        tune.grid({"discrete": base}, config.steps, matrix),
        learn(fit, held),
        seeds=config.tuning_seeds,
        eval_every=config.rounds,
        **lab.run_options(folder / "tuning"),
    )
    step = tune.best_steps(tuning)["discrete"]
    (made,) = tune.grid({"discrete": base}, [step], matrix)
    every = max(1, config.rounds // config.measurements)
    task, options = learn(whole, test), {"seeds": [config.seed], "eval_every": every}
    options["progress"] = lab.run_options(None)["progress"]
    code = made.noise.code  # type: ignore[union-attr]
    sums = transport.SecureSums(
        transport.terms_of(code, dropouts=config.dropouts, colluders=config.colluders),
        leaves,
        skip=True,
        limits=tcp.Limits(enrol=config.enrol),
    )
    # Not resumed: a round is asked for once, and traffic is that of one process.
    crossed = run(made, task, transport=sums, **options)
    # The same clients missing, late ones too, and the same two halves of a round: compiled as one
    # program a sketch may round otherwise in its last bits.
    after = configured(config, k, whole[0].shape[1] + 1, sums.missing())
    (again,) = tune.grid({"discrete": after}, [step], matrix)
    inside = run(again, task, transport=host.local(again), **options)
    same = same_models(inside, crossed)
    lab.say(f"  {name(k)}: step {step:g}, {code.bits} bits, {'the' if same else 'OTHER'} models")
    where = {
        "sketch": k, "series": name(k), "bits": code.bits, "numbers": code.padded,
        "parameters": whole[0].shape[1] + 1, "same_models": same,
    }  # fmt: skip
    rows = inside.rows(way="masks in jit", **where)
    return rows + [row | traffic(sums, row["round"], config) for row in crossed.rows(
        way="TCP", **where
    )]  # fmt: skip


def same_models(one: Result, other: Result) -> bool:
    """Whether two runs have the same models, to the bit."""
    pairs = zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def name(k: int) -> str:
    """What figures call a sketch."""
    return f"learned sketch, k = {k}" if k else "whole gradients"


def traffic(sums: transport.SecureSums, rounds: int, config: Config) -> dict[str, Any]:
    """What has crossed in the first rounds, for one client of each, on average."""
    crossed = sums.crossed[:rounds]
    opened = [each for each in crossed if not each.aborted]
    parts = max(1, len(opened)) * config.agents
    return {
        "bytes_up": sum(each.received for each in opened) / parts,
        "bytes_down": sum(each.sent for each in opened) / parts,
        "megabytes": sum(each.received + each.sent for each in opened) / 1e6,
        "seconds_a_round": float(np.mean([each.seconds for each in crossed])) if crossed else 0.0,
        "aborted": len(crossed) - len(opened),
        "survivors": float(np.mean([len(each.survivors) for each in opened])) if opened else 0.0,
    }


def experiment(config: Config, lab: launch.Lab) -> None:
    """Train logistic regression over a secure sum, every round of it over TCP."""
    cells = [
        (
            f"{config.dataset}_{k or 'whole'}",
            launch.stored(config, "sketches", sketch=k),
            functools.partial(train, config, k, lab),
        )
        for k in config.sketches
    ]
    report(config, lab, lab.cells(cells, seed=config.seed))


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Print the table and draw the figure from the records."""
    last = frame[frame["round"] == frame["round"].max()]
    lab.say(f"\n{config.dataset}: {config.agents} clients a round, {config.rounds} rounds")
    columns = ["series", "way", "test_accuracy", "test_loss", "bits", "numbers", "same_models"]
    lab.say(tables.text(last[columns]))
    over = last[last["way"] == "TCP"]
    measured = ["bytes_up", "bytes_down", "seconds_a_round", "survivors", "aborted"]
    lab.say("\na client's bytes in a round, and the round:")
    lab.say(tables.text(over[["series", *measured]]))
    stated = Guarantee.from_dict(last["guarantee"].iloc[0]).statement()
    lab.say(f"\nguarantee: {stated} Step sizes were tuned on training data, on other seeds; that "
            "is outside epsilon.")  # fmt: skip
    path = plots.lines(
        frame[frame["way"] == "TCP"], "round", "test_accuracy", series="series",
        path=lab.folder / "dome_tcp.svg", xlabel="round", ylabel=f"accuracy ({config.dataset})",
        note="Every round crossed a secure sum over TCP, with clients leaving at all stages.",
    )  # fmt: skip
    lab.say(f"figure: {path}")


main = functools.partial(launch.main, "dome_tcp", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
