"""What a sketch can hold: spectra of gradients along private training, and what DOME's catches.

Clients bring one record each to a round; a secure sum shows a server their noisy sum alone. In
every round the mean of the clipped gradients of a fixed sample of records is kept beside the run:
its spectrum over the rounds, how much of its energy the learned frame holds, beside a random frame,
the leading directions of the whole run, known afterwards, and what any rule could find in as many
rounds (`dpjax.contrib.sketching.findable`); and the mean squared error that the noise makes, in
the sketch and in the full dimension, beside Lemma 3.1. Large budgets stand for noise as it is in
the mean of so many more clients, whatever they would be as guarantees.

Gradients before the noise are private. They are looked at here as one looks into a simulation: no
guarantee covers these records, whatever the noise was calibrated for.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from _common import launch, looks, tables
from dpjax.algorithms.exchange import Trusted
from dpjax.algorithms.federated import Federated
from dpjax.algorithms.sketches import Learned
from dpjax.contrib import datasets, networks, sketching
from dpjax.contrib.rules import UpdateRule
from dpjax.contrib.trace import Passed, trace
from dpjax.data import load, partition, split
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.plans import plan, protect
from dpjax.plans.noise import SumShares
from dpjax.protocols import Look
from dpjax.results import plots
from dpjax.topology import graphs, mixing
from dpjax.transforms import clipping
from dpjax.transforms.sketch import Frame, flat

__all__ = ["PRESETS", "Config", "experiment", "main"]

TITLES = {
    "non_private": "Adam, no noise",
    "adam": "DP-Adam, all numbers",
    "dome": "DOME",
    "uncentred": "DOME, no centre",
}
"""What is trained, by name."""

CENTRES = {"dome": 0.9, "uncentred": 0.0}
"""What has a sketch, and the decay of the mean that clients take off first."""


@dataclass(frozen=True)
class Config:
    """What is trained, and what is looked at.

    Attributes:
        dataset: A name that `dpjax.data.load.load` takes, of a file in the data cache too.
        model: One of `dpjax.contrib.networks.NETWORKS`; "linear" for labels -1 and +1.
        records: Training records, at most; 0 is all.
        sample: Of these, how many make the gradient that is looked at.
        trained: Names of `TITLES`.
        k: Columns of DOME's sketch, one run each; and of the frames that are compared with it.
        epsilon: Budgets of the private runs, for zeroing out a record; what has no sketch is
            trained at the first alone.
        delta: Target delta.
        places: Agents whose messages are summed.
        batch_size: Clients at each place in a round, each with one record.
        epochs: How often every record takes part.
        clip_norm: What gradients, or sketches of them, are scaled to (automatic clipping).
        floor: Least second moment of Adam.
        step_size: Of Adam.
        seeds: Seeds.
    """

    dataset: str = "mnist"
    model: str = "small_cnn"
    records: int = 3_840
    sample: int = 128
    trained: tuple[str, ...] = tuple(TITLES)
    k: tuple[int, ...] = (16, 64)
    epsilon: tuple[float, ...] = (4.0,)
    delta: float = 1e-5
    places: int = 4
    batch_size: int = 16
    epochs: int = 2
    clip_norm: float = 1.0
    floor: float = 1e-3
    step_size: float = 0.08
    seeds: tuple[int, ...] = (0, 1)

    def __post_init__(self) -> None:
        """Refuse what could not be run to its end."""
        launch.check(self, {"places": 2}, known={"trained": TITLES})
        datasets.check(self.dataset)

    def cells(self) -> list[tuple[str, int, float]]:
        """What is trained, with which sketch (0 is none), at which budget."""
        return [
            (name, k, epsilon)
            for name in self.trained
            for k in (self.k if name in CENTRES else (0,))
            for epsilon in (self.epsilon if name in CENTRES else self.epsilon[:1])
        ]


PRESETS = {
    "tiny": Config(
        dataset="digits", model="mlp", records=480, sample=60,
        trained=("non_private", "adam", "dome"), k=(8,), epsilon=(8.0,), places=2, batch_size=24,
        epochs=1, seeds=(0,),
    ),
    "cpu": Config(),
    "cpu_a9a": Config(
        dataset="a9a", model="linear", records=6_400, k=(4, 16), epsilon=(1.0, 10.0, 100.0),
        batch_size=32, epochs=3,
    ),
    "cpu_digits": Config(
        dataset="digits", model="mlp", records=0, trained=tuple(CENTRES),
        epsilon=(4.0, 40.0, 400.0), epochs=6,
    ),
    "cpu_noise": Config(trained=tuple(CENTRES), k=(64,), epsilon=(40.0, 400.0)),
    "full": Config(
        records=0, sample=4_096, k=(16, 64, 256), places=16, batch_size=32, epochs=10,
        seeds=tuple(range(10)),
    ),
}  # fmt: skip


@functools.cache
def learn(config: Config) -> Problem:
    """The problem, of as many records as fill whole rounds."""
    (x, y), test = split.with_test(load.load(config.dataset), 0.2, seed=1)
    if datasets.is_binary(y):
        model = Linear()
        loss = "logistic"
    else:
        pixels = x.dtype == np.uint8
        model = networks.network(config.model, int(y.max()) + 1, "patches", pixels=pixels)
        loss = "cross_entropy"
    each = config.places * config.batch_size
    count = len(y[: config.records or None]) // each * each
    if count < max(each, config.sample):
        raise ValueError(
            f"records is {config.records}, of which {count} fill rounds of {each}; give more than "
            f"that, and than sample, {config.sample}"
        )
    shards = partition.iid(count, config.places, 0)
    train = x[:count], y[:count]
    return supervised(model, loss, train, test, shards, name=config.dataset)


def made(config: Config, name: str, k: int, epsilon: float) -> plan.Plan:
    """The plan of a run."""
    separation = len(learn(config).y) // (config.places * config.batch_size)
    private = name != "non_private"
    trusted = Trusted()
    method = Federated(trusted)
    if name in CENTRES:
        method = Federated(trusted, sketch=Learned(k), centre=CENTRES[name])
    return plan.make(
        plan.Config(
            method=method,
            noise=SumShares() if private else None,
            budget=protect.Budget(epsilon, config.delta) if private else None,
            protect=protect.Protect(
                "zero_out_record", clip_norm=config.clip_norm, clipping="automatic",
                attacker="aggregator",
            ),
            sampler=samplers.Cyclic(config.epochs, separation, config.batch_size),
            optimizer=UpdateRule("adam", floor=config.floor).chain(config.step_size),
            rounds=config.epochs * separation,
        ),
        mixing.metropolis_hastings(graphs.complete(config.places)),
    )  # fmt: skip


def sampled(config: Config) -> Any:
    """The mean clipped gradient of the sample, as the runs clip a record's, [d] at a model."""
    task = learn(config)
    size = config.sample
    x = jnp.asarray(task.x[:size])
    y = jnp.asarray(task.y[:size])
    total = clipping.per_example(task.loss, config.clip_norm, method="automatic")

    def at(params: Any) -> Any:
        return flat(total(params, x, y))[0] / size

    return at


def watching(config: Config, k: int, decay: float) -> Any:
    """What is read of a round: the sample's gradient, what the frame holds, what the noise does.

    With a sketch, "products" are those of what was sent with the gradient and the centre in the
    frame, from which `heard` says how much of the gradient was in it.
    """
    position = sampled(config)
    places = config.places
    divisor = config.batch_size

    def mean(payload: Any) -> Any:
        """Of a payload [n, ...], as the server has it."""
        total = jax.tree.map(lambda leaf: leaf.sum(0) / (places * divisor), payload)
        return total if k else flat(total)[0]

    def read(passed: Passed) -> dict[str, Any]:
        model = jax.tree.map(lambda leaf: leaf[0], passed.before.models)
        gradient = position(model)
        noise = mean(passed.noisy) - mean(passed.private)
        decoded = mean(passed.noisy)
        results = {"gradient": gradient}
        if k:
            memory = passed.before.memory
            frame = Frame(memory.sketch.sketch.frame)
            centre = jnp.zeros_like(gradient)
            if decay:
                opened = memory.opened.astype(jnp.float32)
                correction = jnp.where(opened > 0, 1 - decay**opened, 1)
                centre = flat(memory.centre)[0] / correction
            validation = frame.encode(gradient)
            rest = gradient - centre
            results["held"] = jnp.sum(validation**2) / jnp.sum(gradient**2)
            if decay:
                results["rest_held"] = jnp.sum(frame.encode(rest) ** 2) / jnp.sum(rest**2)
                results["rest"] = jnp.sum(rest**2) / jnp.sum(gradient**2)
            three = jnp.stack([validation, frame.encode(centre), mean(passed.private)])
            results["products"] = jnp.matmul(three, three.T, precision="highest")
            noise = frame.decode(noise)
            decoded = frame.decode(decoded) + centre
        lengths = jnp.linalg.norm(decoded) * jnp.linalg.norm(gradient)
        results["noise"] = jnp.sum(noise**2)
        results["cosine"] = decoded @ gradient / jnp.maximum(lengths, 1e-30)
        return results

    return read


def spectrum(gradients: np.ndarray) -> np.ndarray:
    """Eigenvalues of the sum of g g' over rounds, [T, d] given, the largest first; exact."""
    gram = gradients.astype(np.float64) @ gradients.astype(np.float64).T
    return np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0)


def hindsight(gradients: np.ndarray, k: int) -> np.ndarray:
    """Share of each round's energy in the k leading directions of all rounds, [T]."""
    wide = gradients.astype(np.float64)
    directions = np.linalg.svd(wide, full_matrices=False)[2][:k]
    return np.square(wide @ directions.T).sum(1) / np.square(wide).sum(1)


def heard(products: np.ndarray, power: float, k: int, noise: float, entries: int) -> dict[str, Any]:
    """How loud the gradient is in what is sent, what hides it, and what could be found so.

    What is sent, p, is put as a S' g + b S' m + rest, m the centre, which the server knows, over
    all rounds of a run.

    Args:
        products: Of S' g, S' m and p with each other, [T, 3, 3].
        power: Mean of |g|^2.
        k: Columns.
        noise: Variance of the noise in a coordinate of p.
        entries: d.

    Returns:
        "gain" a, "others", the variance of the rest in a coordinate, and "findable": the mean over
        rounds of the share of the gradient that a frame could hold at most.
    """
    sums = products.astype(np.float64).sum(0)
    fit = np.append(np.linalg.lstsq(sums[:2, :2], sums[:2, 2], rcond=1e-9)[0], -1.0)
    others = max(float(fit @ sums @ fit), 0.0) / (k * len(products))
    gain = float(fit[0])
    limits = [k / entries]
    energy = gain**2 * power
    for rounds in range(1, len(products)):
        result = sketching.findable(energy, noise + others, entries, k, rounds) if energy else 0.0
        limits.append(min(1.0, k / entries + result))
    return {"gain": gain, "others": others, "findable": float(np.mean(limits))}


def look(
    config: Config, name: str, k: int, epsilon: float, lab: launch.Lab, folder: Path
) -> list[dict[str, Any]]:
    """Trace the runs of one kind; rows of spectra, of rounds, and of whole runs."""
    del folder  # Minutes, in one piece.
    single = made(config, name, k, epsilon)
    rows = []
    read = watching(config, k, CENTRES.get(name, 0.0))
    observed = trace(single, learn(config), seeds=config.seeds, read=read)
    entries = observed["gradient"].shape[-1]
    variance = 0.0
    if single.noise is not None:
        share = float(single.noise.arrays["noise_scale"]) / config.batch_size
        variance = share**2 / config.places
    expected = sketching.mean_square_error(variance, k or entries)
    for index, seed in enumerate(config.seeds):
        gradients = observed["gradient"][index]
        where = {"trained": name, "title": TITLES[name], "k": k or entries, "seed": seed}
        where |= {"dataset": config.dataset, "entries": entries, "guarantee": None}
        where |= {"budget_epsilon": epsilon if single.noise is not None else None}
        values = spectrum(gradients)
        shares = np.cumsum(values) / values.sum()
        rows += [
            where | {"kind": "spectrum", "directions": j + 1, "eigenvalue": values[j], "share": s}
            for j, s in enumerate(shares)
        ]
        power = float(np.mean(np.square(gradients.astype(np.float64)).sum(1)))
        own = {key: observed[key][index] for key in observed if key != "gradient"}
        products = own.pop("products", None)
        reported = {} if products is None else heard(products, power, k, variance, entries)
        for among in (k,) if k else config.k:
            reference = hindsight(gradients, among)
            # The mean share of a round, as the frame's is: not of all energy together.
            row = where | {"kind": "frames", "columns": among, "hindsight": float(reference.mean())}
            row |= {"random": among / entries} | reported
            row |= {key: float(own[key].mean()) for key in ("held", "rest_held") if key in own}
            rows.append(row)
        rows += [
            where | {"kind": "round", "round": t + 1}
            | {key: float(values[t]) for key, values in own.items()}
            for t in range(len(gradients))
        ]  # fmt: skip
        rows.append(
            where
            | {"kind": "run", "noise": float(own["noise"].mean()), "expected": expected}
            | {"power": power, "cosine": float(own["cosine"].mean()), "rounds": len(gradients)}
        )
    size = f"{len(gradients)} rounds, {entries:,} entries"
    lab.say(f"  {TITLES[name]}, k {k}, epsilon {epsilon:g}: {size}")
    return rows


def experiment(config: Config, lab: launch.Lab) -> None:
    """Look into private training: spectra of gradients, what sketches hold, what noise does."""
    cells = []
    for name, k, epsilon in config.cells():
        file = launch.file_name(f"{config.dataset}_{name}_{k}_{epsilon:g}")
        complete = launch.stored(config, "trained", epsilon=epsilon, name=name, columns=k)
        compute = functools.partial(look, config, name, k, epsilon, lab)
        cells.append((file, complete, compute))
    frame = lab.cells(cells, seed=config.seeds)
    report(config, lab, frame)
    draw(config, lab, frame)


def needed(rows: Any, share: float) -> int:
    """Directions that hold a share of all energy, of one run's rows of its spectrum."""
    return int(rows[rows["share"] >= share]["directions"].min())


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Print the tables."""
    lab.say("\nNo guarantee covers these records: gradients before the noise are among them.")
    results = []
    spectra = frame[frame["kind"] == "spectrum"]
    keys = ["title", "k", "budget_epsilon"]
    for (name, k, epsilon, seed), rows in spectra.groupby(
        [*keys, "seed"], sort=False, dropna=False
    ):
        row = {"trained": name, "k": k, "epsilon": epsilon, "seed": seed, "rounds": len(rows)}
        results.append(row | {f"{s:.0%}": needed(rows, s) for s in (0.5, 0.9, 0.99)})
    lab.say(f"\n{config.dataset}: directions that hold so much of all gradients' energy")
    lab.say(tables.text(results))
    frames = frame[frame["kind"] == "frames"]
    names = ("held", "findable", "rest_held", "hindsight", "random", "gain")
    names = [name for name in names if name in frames]
    by = ["title", "columns", "budget_epsilon"]
    means = frames.groupby(by, sort=False, dropna=False)[names].mean().reset_index()
    lab.say(
        "\nshare of a round's energy in a frame: the learned one, and what any rule could find at"
    )
    lab.say(
        "most; of what is left without the centre; the best of the run afterwards; a random one;"
    )
    lab.say("how many times longer the gradient is in what is sent than in the frame")
    lab.say(tables.text(means))
    runs = frame[frame["kind"] == "run"]
    table = runs.groupby(keys, sort=False, dropna=False)[
        ["noise", "expected", "power", "cosine"]
    ].mean().reset_index()  # fmt: skip
    lab.say("\nsquared error of the decoded mean by noise, measured and by Lemma 3.1; the squared")
    lab.say("gradient; the cosine between the decoded mean and the gradient")
    lab.say(tables.text(table))


def look_of(config: Config, row: Any) -> Look:
    """How a row's run is drawn: a colour a method, a marker a sketch, a line a budget or sketch."""
    if row["trained"] not in CENTRES:
        return looks.look(row["trained"], row["run"])
    markers = {4: "oh", 8: "sd", 16: "P^", 64: "<D"}.get(row["k"], "pX")
    if len(config.epsilon) > 1:
        turn = config.epsilon.index(row["budget_epsilon"])
    else:
        turn = config.k.index(row["k"])
    line = ("-", "--", ":", "-.")[turn % 4]
    marker = markers[row["trained"] == "uncentred"]
    return looks.look(row["trained"], row["run"], line, marker)


UNDRAWN = ("cpu_a9a", "cpu_digits")
"""Presets of small models, of which the tables say all."""


def draw(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Spectra, and what the frame holds over the rounds."""
    if lab.preset in UNDRAWN:
        return
    note = "Gradients before the noise are private: no guarantee covers a figure that shows them."
    sheet, (left, right) = plots.figure(1, 2)
    sketched = frame["trained"].isin(list(CENTRES))
    k = frame["k"].astype(int).astype(str)
    epsilon = frame["budget_epsilon"].astype(float).map("{:g}".format)
    words = ", k = " + k + (", epsilon " + epsilon if len(config.epsilon) > 1 else "")
    frame = frame.assign(run=frame["title"] + words.where(sketched, ""))
    runs = frame.drop_duplicates("run")
    display = {row["run"]: look_of(config, row) for _, row in runs.iterrows()}
    plots.lines(
        frame[frame["kind"] == "spectrum"], "directions", "share", "run", ax=left, log_x=True,
        xlabel="leading directions", ylabel="share of the gradients' squared norm", note=note,
        looks=display,
    )  # fmt: skip
    rounds = frame[(frame["kind"] == "round") & sketched]
    if len(rounds):
        plots.lines(
            rounds, "round", "held", "run", ax=right, xlabel="round",
            ylabel="share of the squared norm in the frame", looks=display,
        )  # fmt: skip
    kind = "spectrum" if "non_private" in config.trained else "noise"
    lab.figure(sheet, f"dome_{kind}_{config.dataset}.svg")


main = functools.partial(launch.main, "dome_spectrum", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
