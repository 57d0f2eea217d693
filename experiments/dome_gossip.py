"""DOME without a server: sketches summed by relays, beside D-SGD in the full dimension.

Agents hold parts of a data set and see their own network alone; who listens sees every message, so
that every agent adds noise enough of its own, the same to all systems. In D-SGD a message is a
model. By relays (`dpjax.contrib.relays`) it is a clipped gradient, or a sketch of it, and all
agents replay one step from the very same sum: what reaches them does not depend on the network,
traffic and hops do. Part ``train``: accuracy over epsilon and over bytes, each system tuned with
as many trials. Part ``drift``: what becomes of sketches that are summed by gossip, nearly.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from _common import launch, looks, tables, tune
from dpjax.accounting.guarantee import Guarantee
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.federated import Federated
from dpjax.algorithms.sketches import Learned
from dpjax.contrib import datasets, traffic
from dpjax.contrib.relays import Relayed, spanning
from dpjax.contrib.rules import UpdateRule
from dpjax.contrib.sketches import Count, FixedFrame
from dpjax.data import partition, split
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.plans import noise, plan, protect
from dpjax.protocols import Look
from dpjax.results import plots
from dpjax.topology import graphs, mixing
from dpjax.transforms import sketch

__all__ = ["PRESETS", "Config", "experiment", "main"]

GRAPHS = ("ring", "erdos_renyi", "star", "complete")
KINDS = {"dome": "DOME", "fixed": "random sketch", "count": "count sketch"}


@dataclass(frozen=True)
class Config:
    """What is trained, where, by which systems.

    Attributes:
        dataset: A name that `dpjax.data.load.load` takes, of a file in the data cache too.
        records: Use only that many training records; 0 is all.
        hidden: Width of the hidden layer; 0 is none, and all that labels -1 and +1 take.
        agents: Number of agents n.
        graphs: Networks of D-SGD; relays are trained on the first.
        probability: Edge probability of the random graph.
        graph_seed: First seed tried for a connected graph.
        systems: "dsgd", "relays" (whole gradients), and sketches with their columns: "dome 32",
            "fixed 32", "count 32".
        relation: Whose data are protected.
        epsilon: Budgets.
        delta: Target delta.
        epochs: How often every record takes part.
        separation: Batches of an epoch.
        clip_norm: Clip norm of what is summed over records.
        steps: Plain step sizes to tune over.
        moment_steps: Adam's.
        floor: Least second moment of Adam.
        seeds: Seeds of the reported runs.
        tuning_seeds: Seeds of the tuning runs; none of ``seeds``.
        validation: Fraction of the training records held out while tuning.
        measurements: How often the reported runs are measured.
        gossip: Gossip steps tried in ``drift``.
        drift_rounds: Rounds of ``drift``.
        drift_dimension: Entries of its gradients.
        drift_columns: Columns of its sketches.
    """

    dataset: str = "a9a"
    records: int = 0
    hidden: int = 0
    agents: int = 16
    graphs: tuple[str, ...] = ("erdos_renyi", "ring", "complete")
    probability: float = 0.3
    graph_seed: int = 0
    systems: tuple[str, ...] = (
        "dsgd", "relays", "dome 8", "dome 32", "fixed 8", "fixed 32", "count 8", "count 32",
    )  # fmt: skip
    relation: Literal["zero_out_record", "replace_record", "replace_agent"] = "zero_out_record"
    epsilon: tuple[float, ...] = (0.3, 1.0, 3.0)
    delta: float = 1e-5
    epochs: int = 5
    separation: int = 40
    clip_norm: float = 0.5
    steps: tuple[float, ...] = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)
    moment_steps: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
    floor: float = 1e-4
    seeds: tuple[int, ...] = tuple(range(5))
    tuning_seeds: tuple[int, ...] = (100, 101)
    validation: float = 0.2
    measurements: int = 10
    gossip: tuple[int, ...] = (1, 4, 16, 64)
    drift_rounds: int = 400
    drift_dimension: int = 200
    drift_columns: int = 16

    def __post_init__(self) -> None:
        """Refuse what could not be run to its end, or would not be a fair comparison."""
        minimum = {"agents": 3, "drift_columns": 5, "drift_dimension": 6, "hidden": 0}
        launch.check(self, minimum, known={"graphs": GRAPHS}, empty=("gossip", "systems"))
        datasets.check(self.dataset)
        for name in self.systems:
            self.sketch(name)

    @property
    def rounds(self) -> int:
        """Rounds T."""
        return self.epochs * self.separation

    def sketch(self, system: str) -> Any:
        """The sketch that a system's name says; None for whole gradients."""
        kind, _, columns = system.partition(" ")
        if system in ("dsgd", "relays"):
            return None
        if kind not in KINDS or not columns.isdigit():
            raise ValueError(
                f"systems holds {system!r}; choose from dsgd, relays, or {', '.join(KINDS)} with a "
                "number of columns, as in 'dome 32'"
            )
        kinds = {"dome": Learned, "fixed": FixedFrame, "count": Count}
        return kinds[kind](int(columns))

    def network(self, name: str) -> np.ndarray:
        """The mixing matrix of a graph."""
        if name == "erdos_renyi":
            graph = graphs.erdos_renyi(self.agents, self.probability, self.graph_seed)
        else:
            graph = getattr(graphs, name)(self.agents)
        return mixing.metropolis_hastings(graph)

    def cells(self) -> list[tuple[str, str]]:
        """System and graph of each cell: what relays deliver is the same on all."""
        return [
            (system, graph)
            for system in self.systems
            for graph in (self.graphs if system == "dsgd" else self.graphs[:1])
        ]


PRESETS = {
    "tiny": Config(
        dataset="breast_cancer", agents=5, graphs=("ring",), systems=("dsgd", "relays", "dome 8"),
        epsilon=(8.0,), epochs=2, separation=4, steps=(1.0,), moment_steps=(0.1,), seeds=(0, 1),
        tuning_seeds=(100,), measurements=2, gossip=(1, 8), drift_rounds=20, drift_dimension=20,
        drift_columns=6,
    ),
    "cpu": Config(),
    "cpu_digits": Config(
        dataset="digits", hidden=32, agents=8, epsilon=(2.0, 8.0, 32.0), epochs=20, separation=10,
        systems=("dsgd", "relays", "dome 32", "dome 128", "fixed 128", "count 128"),
        graphs=("ring",), clip_norm=1.0, steps=(4.0, 2.0, 1.0, 0.5, 0.25, 0.12),
    ),
    "full": Config(
        dataset="mnist", hidden=64, agents=20, epsilon=(0.3, 1.0, 3.0, 10.0), epochs=10,
        systems=("dsgd", "relays", "dome 64", "dome 256", "fixed 256", "count 256"),
        separation=60, clip_norm=1.0, seeds=tuple(range(10)), drift_rounds=2000,
    ),
}  # fmt: skip


def plans(
    config: Config, system: str, network: np.ndarray, rule: str, epsilon: float,
    steps: tuple[float, ...], count: int,
) -> list[plan.Plan]:  # fmt: skip
    """A plan of a system for each step size of a rule, for so many training records."""
    base = UpdateRule("sgd") if rule == "sgd" else UpdateRule("adam", floor=config.floor)
    part = config.sketch(system)
    if system == "dsgd":
        method: Any = DSGD()
    else:
        centre = 0.9 if system.startswith("dome") else 0.0
        method = Federated(Relayed(spanning(network)), part, centre)
    counts = partition.iid(count, config.agents, 0).counts
    batch_size = -(-int(counts.max()) // config.separation)
    return [
        plan.make(
            plan.Config(
                method=method,
                noise=noise.Independent(),
                budget=protect.Budget(epsilon, config.delta),
                protect=protect.Protect(config.relation, clip_norm=config.clip_norm),
                sampler=samplers.Cyclic(config.epochs, config.separation, batch_size),
                optimizer=base.chain(step),
                rounds=config.rounds,
            ),
            network,
        )
        for step in steps
    ]


def train(
    config: Config, system: str, graph: str, lab: launch.Lab, folder: Path
) -> list[dict[str, Any]]:
    """Tune and run one system on one network at every budget; rows of both phases."""
    complete, test, model, loss = datasets.flat(config.dataset, config.hidden, config.records)
    network = config.network(graph)
    fit, validation = split.split(*complete, config.validation, seed=0)

    def learn(train: Any, test: Any) -> Problem:
        shards = partition.iid(len(train[1]), config.agents, 0)
        return supervised(model, loss, train, test, shards, name=config.dataset)

    tuned = learn(fit, validation)
    final = learn(complete, test)
    rows = []
    for epsilon in config.epsilon:
        trials = []
        for rule, steps in (("sgd", config.steps), ("adam", config.moment_steps)):
            make = functools.partial(plans, config, system, network, rule, epsilon)
            trials.append(tune.Trial(rule, steps, make))
        best = tune.best_step(
            trials, (tuned, final), config, lab, folder / f"{epsilon:g}",
            measurements=config.measurements,
        )  # fmt: skip
        where = {"section": "train", "system": system, "graph": graph, "dataset": config.dataset}
        where |= {"budget_epsilon": epsilon}
        where |= sent(config, system, network, best.final.plans[0], final)
        rows += best.rows(lambda trial, result: {"rule": trial.name}, **where)
    return rows


def sent(
    config: Config, system: str, network: np.ndarray, training_plan: plan.Plan, task: Problem
) -> dict[str, Any]:
    """Bytes over all links in a round, entries of a message, and hops of a round."""
    if system == "dsgd":
        counted = traffic.per_round(training_plan, task)
        return {
            "entries": counted.numbers, "bytes": counted.bytes * counted.links, "hops": 1
        }  # fmt: skip
    relays = Relayed(spanning(network))
    part = config.sketch(system)
    models = jax.eval_shape(task.init, jax.random.key(0))
    entries = sum(leaf.size for leaf in jax.tree.leaves(models)) if part is None else part.k
    return {
        "entries": float(entries), "bytes": 4.0 * entries * relays.vectors,
        "hops": 2 * relays.levels,
    }  # fmt: skip


def drifted(config: Config, graph: str, steps: int) -> dict[str, float]:
    """What a loop of sketches by gossip comes to: each agent's own frame, of its own totals.

    Every agent sends S_i' g_i + z_i, gossips it ``steps`` times, decodes n times what it has then
    through its own frame and learns from that; 0 gossip steps are an exact sum.
    """
    n = config.agents
    d = config.drift_dimension
    k = config.drift_columns
    network = config.network(graph)
    weights = np.full((n, n), 1 / n) if steps == 0 else np.linalg.matrix_power(network, steps)
    mix = jnp.asarray(weights, jnp.float32)
    truth = sketch.orthonormal(jax.random.normal(jax.random.key(0), (d, 3), jnp.float32))
    first = sketch.start(d, k, jax.random.key(1), jnp.float32)
    states = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], n, axis=0), first)

    def step(states: sketch.Sketch, round: Any) -> tuple[sketch.Sketch, Any]:
        probes = jax.random.fold_in(jax.random.key(2), round)
        key = jax.random.key(3)
        keys = jax.random.split(jax.random.fold_in(key, round), 3)
        common = jax.random.normal(keys[0], (3,), jnp.float32)
        own = 0.3 * jax.random.normal(keys[1], (n, 3), jnp.float32)
        gradients = (common + own) @ truth.T
        z = 0.1 * jax.random.normal(keys[2], (n, k), jnp.float32)
        exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        sketched = jnp.einsum("ndk,nd->nk", states.frame, gradients) + z
        means = exact(mix, sketched)
        if steps == 0:  # one total, sent to all
            means = jnp.broadcast_to(means[:1], means.shape)
        decoded = jnp.einsum("ndk,nk->nd", states.frame, means)
        new = jax.vmap(lambda s, g: sketch.update(s, g, probes))(states, decoded)
        mean = jnp.mean(gradients, axis=0)
        error = jnp.mean(jnp.sum(jnp.square(decoded - mean), axis=1)) / jnp.sum(jnp.square(mean))
        shared = jnp.einsum("dj,ndk->njk", states.frame[0], states.frame)
        difference = 1 - jnp.min(jnp.sum(jnp.square(shared), axis=(1, 2))) / k
        return new, (error, difference)

    rounds = jnp.arange(config.drift_rounds, dtype=jnp.int32)
    _, (errors, apart) = jax.jit(lambda s: jax.lax.scan(step, s, rounds))(states)
    late = config.drift_rounds - max(config.drift_rounds // 4, 1)
    return {
        "error": float(np.median(errors[late:])),
        "apart": float(np.mean(apart[late:])),
        "apart_first": float(np.max(apart[: max(config.drift_rounds // 20, 1)])),
    }


def drift(config: Config, lab: launch.Lab, folder: Path) -> list[dict[str, Any]]:
    """A row for each network and number of gossip steps; 0 is an exact sum by relays."""
    del lab, folder
    rows = []
    for graph in config.graphs:
        gap = mixing.spectral_gap(config.network(graph))
        for steps in (0, *config.gossip):
            row = {"section": "drift", "graph": graph, "gossip_steps": steps}
            row |= {"algorithm": "relays" if steps == 0 else "gossip", "spectral_gap": float(gap)}
            rows.append(row | drifted(config, graph, steps))
    return rows


def experiment(config: Config, lab: launch.Lab) -> None:
    """DOME without a server, beside D-SGD in the full dimension."""
    cells = []
    for system, graph in config.cells():
        stored = launch.stored(
            config, "systems", "graphs", "gossip", "drift_rounds", "drift_dimension",
            "drift_columns", system=system, graph=graph,
        )  # fmt: skip
        compute = functools.partial(train, config, system, graph, lab)
        name = launch.file_name(f"{config.dataset}_{system}_{graph}")
        cells.append((name, stored, compute))
    names = (
        "agents", "probability", "graph_seed", "graphs", "gossip", "drift_rounds",
        "drift_dimension", "drift_columns",
    )  # fmt: skip
    stored = {name: getattr(config, name) for name in names}
    cells.append(("drift", stored, functools.partial(drift, config, lab)))
    report(config, lab, lab.cells(cells, seed=config.seeds))


def title(config: Config, row: Any) -> str:
    """What a legend calls a row's system."""
    if row["system"] == "dsgd":
        return f"D-SGD, {row['graph']}".replace("erdos_renyi", "random graph")
    kind, _, columns = str(row["system"]).partition(" ")
    return "relays, whole gradients" if not columns else f"{KINDS[kind]}, k = {columns}"


def look_of(row: Any) -> Look:
    """How a row's system is drawn: a colour a kind, a line a network or number of columns."""
    kind, _, columns = str(row["system"]).partition(" ")
    if kind == "dsgd":
        line, marker = {"erdos_renyi": ("-", "o"), "ring": (":", "8")}.get(
            row["graph"], ("--", "p")
        )
        return looks.look("independent", row["title"], line, marker)
    if columns and int(columns) < 16:
        few = {"dome": "<", "fixed": "h", "count": "*"}[kind]
        return looks.look(kind, row["title"], ":", few)
    return looks.look("whole" if kind == "relays" else kind, row["title"])


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Print the tables and draw the figure from the records."""
    trained = frame[frame["section"] == "train"].copy()
    trained["title"] = [title(config, row) for _, row in trained.iterrows()]
    final = trained[trained["phase"] == "final"]
    last = final[final["round"] == config.rounds]
    for epsilon, rows in last.groupby("budget_epsilon"):
        lab.say(f"\n{config.dataset}, epsilon {epsilon:g}, {rows['seed'].nunique()} seeds:")
        table = tables.summary(
            rows, ["title", "rule", "step_size", "bytes", "hops"], "test_accuracy"
        )
        names = {"mean": "test_accuracy", "count": "seeds", "hops": "hops_a_round",
                 "bytes": "bytes_a_round_all_links"}  # fmt: skip
        lab.say(tables.text(table.rename(columns=names)))
    budgets = trained["budget_epsilon"].map("{:g}".format)
    # Rules have steps of their own.
    tuned = trained.assign(
        tuned=trained["title"] + " at epsilon " + budgets, setting=trained["rule"]
    )
    lab.say_ends(tables.at_ends(tuned, "tuned"))
    first = last.iloc[0]
    lab.say(f"\n{Guarantee.from_dict(first['guarantee']).statement()}")
    drifts = frame[frame["section"] == "drift"]
    lab.say(
        "\nsketches summed by gossip, 0 steps exactly: squared error of decoded gradients over "
        "their energy,\nand the share of a frame that another agent does not have, in the first "
        "rounds and in the last"
    )
    lab.say(tables.text(shares(drifts)))
    draw(config, lab, last)


def shares(drifts: Any) -> Any:
    """Rows of ``drift`` for a reader: frames in float32 agree to 1e-6 at best."""
    names = {"graph": "graph", "gossip_steps": "gossip_steps", "error": "error",
             "apart_first": "apart_first", "apart": "apart_last"}  # fmt: skip
    result = drifts[list(names)].rename(columns=names)
    differences = ["apart_first", "apart_last"]
    return result.assign(**{name: result[name].clip(lower=0).round(5) for name in differences})


def draw(config: Config, lab: launch.Lab, last: Any) -> None:
    """Accuracy over epsilon, and over bytes of the run at the middle budget."""
    sheet, (left, right) = plots.figure(1, 2)
    display = {row["title"]: look_of(row) for _, row in last.drop_duplicates("title").iterrows()}
    ylabel = looks.accuracy(config.dataset)
    last = looks.percent(last)
    plots.lines(
        last, "budget_epsilon", "points", "title", ax=left, xlabel="epsilon", ylabel=ylabel,
        log_x=True, looks=display,
    )  # fmt: skip
    middle = sorted(config.epsilon)[len(config.epsilon) // 2]
    rows = last[last["budget_epsilon"] == middle]
    rows = rows.assign(megabytes=rows["bytes"] * config.rounds / 1e6)
    plots.lines(
        rows, "megabytes", "points", "title", ax=right, ylabel=ylabel, log_x=True,
        xlabel="megabytes over all links", title=f"epsilon {middle:g}", looks=display,
    )  # fmt: skip
    lab.figure(sheet, "dome_gossip.svg")


main = functools.partial(launch.main, "dome_gossip", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
