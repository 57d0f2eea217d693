"""Spectra of private training: what gradients, noise and filters are over rounds.

One agent trains a small network with DP-SGD, with and without a low-pass filter; 4,096 fixed
coordinates of its gradients are kept in every round, before and after the noise (Figs. 1, 2 and 6
of DOPPLER). Beside their autocorrelation and spectra: how near every filter comes to the gradient,
what the published signal-to-noise ratio says of it, and what filter and noise chosen together gain.
The preset full is the paper's ResNet-50 on CIFAR-10, with group norms; paper_spectra is the
five-layer CNN in minutes of a GPU.

Gradients before the noise are private. They are looked at here as one looks into a simulation: no
guarantee covers these records, whatever the noise was calibrated for.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from _common import launch, looks, tables
from dpjax.contrib import datasets, filtered, resnet, snr
from dpjax.contrib.wiener import adaptive, wiener
from dpjax.data import load, partition, split
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.query import RecordQuery
from dpjax.learning.supervised import supervised
from dpjax.mechanism import filters, temporal
from dpjax.mechanism.participation import Participation
from dpjax.models import cnn, mlp
from dpjax.plans import noise, optimizers, plan, protect
from dpjax.results import plots
from dpjax.transforms.lowpass import FILTERS, lowpass

__all__ = ["PRESETS", "Config", "experiment", "main"]

MODELS = {
    "mlp": lambda classes: mlp.MLP((16,), classes, "tanh"),
    "small_cnn": lambda classes: cnn.SmallCNN(classes, "patches"),
    "cnn5": cnn.CNN5,
    "resnet50": lambda classes: resnet.ResNet(classes, stem="small"),
}
DRAWN = ("gradient", "noise", "private", "momentum", "first v1", "second", "wiener")
"""What the figures show of what is recorded."""


@dataclass(frozen=True)
class Config:
    """What is trained and recorded, and for which gradients designs are made.

    Attributes:
        dataset: Images, as `dpjax.contrib.datasets.check` takes them.
        model: Network: mlp for digits, small_cnn for MNIST, cnn5 or resnet50 for CIFAR.
        trained: Filters of the training runs: 'sgd' is none; 'momentum', 'first v1', 'first v2',
            'second', 'f1' to 'f6'.
        epsilon: Budget that the noise is calibrated for, at delta = N^-1.1, zero-out of a record.
        rounds: Rounds T.
        batch_size: Expected size of a Poisson-sampled batch.
        capacity: Records a pass; None is as many as the network's own sum chooses.
        clip_norm: Clip norm.
        step_size: Step size.
        fixed_records: Records whose gradient, not clipped, stands for the full one; 0 is all.
        steps: Step sizes at which the full gradient is recorded, of SGD without a filter.
        coordinates: How many are kept of every gradient, the same in every round and run.
        skip: First rounds that are left out of all means.
        lags: Autocovariances up to this lag.
        segment: Rounds of a segment of the spectra (Welch).
        taps: Lengths of finite responses whose ratio and error are compared.
        seeds: Initial model, batches and noise.
        horizon: Rounds of the joint designs.
        correlations: AR(1) coefficients of the gradients that these are made for.
        variances: Variance of their noise at sensitivity 1, the gradient's power being 1.
        epochs: How often a record takes part in the rounds of a design.
    """

    dataset: str = "mnist"
    model: Literal["mlp", "small_cnn", "cnn5", "resnet50"] = "small_cnn"
    trained: tuple[str, ...] = ("sgd", "first v1")
    epsilon: float = 8.0
    rounds: int = 400
    batch_size: int = 512
    capacity: int | None = None
    clip_norm: float = 1.0
    step_size: float = 1.0
    fixed_records: int = 4096
    steps: tuple[float, ...] = (1.0, 4.0)
    coordinates: int = 4096
    skip: int = 80
    lags: int = 40
    segment: int = 64
    taps: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    seeds: tuple[int, ...] = (0, 1)
    horizon: int = 16
    correlations: tuple[float, ...] = (0.95,)
    variances: tuple[float, ...] = (1.0, 10.0)
    epochs: tuple[int, ...] = (1, 4)

    def __post_init__(self) -> None:
        """Refuse what could not be run to its end, or leaves nothing to measure."""
        minimum = {"segment": 2, "skip": 0}
        launch.check(self, minimum, known={"trained": FILTERS}, free=("correlations",))
        datasets.check(self.dataset, images=True)
        for rho in self.correlations:
            if not -1 < rho < 1:
                raise ValueError(f"correlations holds {rho}; give numbers between -1 and 1")
        for epochs in self.epochs:
            if self.horizon % epochs:
                raise ValueError(
                    f"epochs holds {epochs}; give divisors of the horizon, {self.horizon} rounds"
                )
        minimum = self.skip + max(self.segment, self.lags, *self.taps)
        if self.rounds < minimum:
            raise ValueError(
                f"rounds is {self.rounds}; give at least {minimum}, what is skipped and the "
                "longest segment, lag or response"
            )


_GPU = Config(
    dataset="cifar10", model="cnn5", rounds=4000, batch_size=1000, step_size=0.5, skip=400,
    lags=200, segment=256, taps=(1, 2, 4, 8, 16, 32, 64, 128, 256), seeds=(0, 1, 2),
    horizon=128,
)  # fmt: skip

PRESETS = {
    "tiny": Config(
        dataset="digits", model="mlp", trained=("sgd",), rounds=30, batch_size=64, step_size=1.0,
        coordinates=128, skip=6, lags=8, segment=16, taps=(1, 2, 4, 8), seeds=(0,), horizon=4,
        fixed_records=256, steps=(1.0,),
        correlations=(0.9,), variances=(1.0,), epochs=(1,),
    ),
    "cpu": Config(),
    "gpu": _GPU,
    # A pass takes a whole batch, and half of the fixed records. Designs, which need no GPU, are
    # those of the preset cpu.
    "paper_spectra": dataclasses.replace(
        _GPU, capacity=2048, steps=(0.5,), seeds=(0, 1), horizon=16
    ),
    "full": Config(
        dataset="cifar10", model="resnet50", rounds=4000, batch_size=500, step_size=0.5, skip=400,
        lags=200, segment=256, taps=(1, 2, 4, 8, 16, 32, 64, 128, 256), seeds=(0, 1, 2, 3, 4),
        horizon=128,
    ),
}  # fmt: skip


class Recorded(NamedTuple):
    """The coordinates kept of a run.

    Attributes:
        gradient: [T, k] of the mean of clipped gradients: private.
        private: [T, k] the same with the noise.
        variance: Of the noise in a coordinate.
        accuracy: Of the last model on the test records.
        full: [T, k] of the gradient of the mean loss of fixed records; None where none are given.
    """

    gradient: np.ndarray
    private: np.ndarray
    variance: float
    accuracy: float
    full: np.ndarray | None = None


def learn(config: Config) -> Problem:
    """Data and network."""
    data = load.load(config.dataset)
    train, test = split.with_test(data, 0.2, seed=1)
    if train[0].dtype == np.uint8:
        train, test = ((x.astype(np.float32) / 127.5 - 1, y) for x, y in (train, test))
    shard = partition.iid(len(train[1]), 1, 0)
    model = MODELS[config.model](int(train[1].max()) + 1)
    return supervised(model, "cross_entropy", train, test, shard, name=config.dataset)


def record(config: Config, trained: str, task: Problem, seed: int, fixed: Any = None) -> Recorded:
    """Train as DP-SGD does, and keep coordinates of what it never shows."""
    assert task.batch_loss is not None
    count = len(task.y)
    # A record a batch more than eight standard deviations above the expected size, or none is cut.
    places = min(count, math.ceil(config.batch_size + 8 * math.sqrt(config.batch_size)))
    training_plan = plan.make(
        plan.Config(
            noise=noise.Independent(),
            budget=protect.Budget(config.epsilon, count**-1.1),
            protect=protect.Protect("zero_out_record", clip_norm=config.clip_norm),
            sampler=samplers.Poisson(config.batch_size, places),
            optimizer=optimizers.Sgd(config.step_size),
            rounds=config.rounds,
        ),
        np.eye(1),
        counts=[count],
    )
    deviation = float(training_plan.factor[0, 0]) / config.batch_size
    query = RecordQuery(task.loss, task.weighted, config.clip_norm, "flat", config.capacity)
    link = optax.chain(lowpass(*FILTERS[trained]), optax.sgd(config.step_size))
    first, batches, raw = jax.random.split(jax.random.key(seed), 3)
    params = task.init(first)
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    some = min(config.coordinates, flat.size)
    selection = np.sort(np.random.default_rng(0).choice(flat.size, some, replace=False))
    counts = jnp.array([count])

    def step(data: Any, carry: Any, round: Any) -> Any:
        x, y = data
        params, state = carry
        drawn = training_plan.sampler.draw(jax.random.fold_in(batches, round), round, counts)
        rows = drawn.rows[:, :places]
        padding = drawn.padding[:, :places]
        models = jax.tree.map(lambda leaf: leaf[None], params)
        answer = query(models, (x[rows], y[rows], padding)).total
        total = jax.flatten_util.ravel_pytree(jax.tree.map(lambda leaf: leaf[0], answer))[0]
        clean = total / config.batch_size
        normal = jax.random.normal(jax.random.fold_in(raw, round), flat.shape)
        noisy = clean + deviation * normal
        updates, state = link.update(unravel(noisy), state, params)
        after = optax.apply_updates(params, updates)
        full = () if fixed is None else whole_gradient(params)[selection]
        return (after, state), (clean[selection], noisy[selection], jnp.sum(~drawn.padding), full)

    def whole_gradient(params: Any) -> Any:
        def part(total: Any, block: Any) -> Any:
            own = jax.grad(task.batch_loss)(params, *block)
            return total + jax.flatten_util.ravel_pytree(own)[0], None

        total, _ = jax.lax.scan(part, jnp.zeros_like(flat), fixed)
        return total / len(fixed[1])

    @jax.jit
    def whole(data: Any, start: Any) -> Any:
        return jax.lax.scan(functools.partial(step, data), start, jnp.arange(config.rounds))

    data = jnp.asarray(task.x), jnp.asarray(task.y)
    (params, _), (gradient, private, sizes, complete) = whole(data, (params, link.init(params)))
    if int(sizes.max()) > places:
        raise ValueError(f"seeds {seed} drew a batch of {sizes.max()}; give another seed")
    models = jax.tree.map(lambda leaf: leaf[None], params)
    accuracy = float(task.metrics(models, task.evaluation)["test_accuracy"])
    recorded = np.asarray(gradient, float), np.asarray(private, float)
    observed = None if fixed is None else np.asarray(complete, float)
    return Recorded(*recorded, deviation**2, accuracy, observed)


def streams(selection: Recorded) -> dict[str, np.ndarray]:
    """All that is compared, [T, k] each: before the noise, the noise, and behind each filter."""
    noisy = jnp.asarray(selection.private, jnp.float32)
    links = {name: lowpass(*item) for name, item in FILTERS.items() if name != "sgd"}
    links |= {"adaptive": adaptive(4, selection.variance), "wiener": wiener(selection.variance)}
    links |= {"wiener, unit": wiener(selection.variance, unit=True)}

    def step(states: Any, value: Any) -> Any:
        pair = {name: link.update(value, states[name]) for name, link in links.items()}
        return {k: state for k, (_, state) in pair.items()}, {
            k: out for k, (out, _) in pair.items()
        }

    states = {name: link.init(noisy[0]) for name, link in links.items()}
    behind = jax.lax.scan(step, states, noisy)[1]
    plain = {"gradient": selection.gradient, "noise": selection.private - selection.gradient}
    plain |= {"private": selection.private}
    return plain | {name: np.asarray(out, float) for name, out in behind.items()}


def autocovariance(values: np.ndarray, lags: int) -> np.ndarray:
    """Means over rounds and coordinates of x_t x_{t+k}, no mean taken off, [lags + 1]."""
    return np.array([np.mean(values[k:] * values[: len(values) - k]) for k in range(lags + 1)])


def spectrum(values: np.ndarray, segment: int) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies from 0 to 1/2, and the mean over coordinates of Welch's density at them.

    Two-sided, so that white noise has its variance everywhere: one-sided, all frequencies but the
    first and the last would count twice.
    """
    from scipy import signal

    _, density = signal.welch(values, nperseg=segment, detrend=False, axis=0, return_onesided=False)
    kept = segment // 2 + 1
    return np.arange(kept) / segment, density[:kept].mean(axis=1)


def train(config: Config, trained: str, lab: launch.Lab, folder: Path) -> list[dict[str, Any]]:
    """Record a run of every seed; rows of all that is measured of it."""
    del folder  # Minutes, in one piece.
    task = learn(config)
    rows = []
    for seed in config.seeds:
        kept = record(config, trained, task, seed)
        lab.say(f"  {trained}, seed {seed}: test accuracy {kept.accuracy:.3f}")
        where = {"trained": trained, "seed": seed, "budget_epsilon": config.epsilon}
        where |= {"dataset": config.dataset, "guarantee": None}
        entries = {k: values[config.skip :] for k, values in streams(kept).items()}
        power = float(np.mean(entries["gradient"] ** 2))
        ratio = kept.variance / power
        rows.append(where | {"kind": "run", "test_accuracy": kept.accuracy, "noise/power": ratio})
        lags = autocovariance(entries["gradient"], config.lags)
        # The paper's c_tau, 1/2 at 0; none of them below 0, which its filters cannot use.
        c = np.maximum(lags / lags[0] - 0.5, 0.0)
        for name, values in entries.items():
            where["series"] = name
            own = autocovariance(values, config.lags) / power
            rows += [
                where | {"kind": "lag", "lag": k, "covariance": own[k]} for k in range(len(own))
            ]
            frequencies, density = spectrum(values, config.segment)
            density = density / power
            rows += [
                where | {"kind": "spectrum", "frequency": f, "density": p}
                for f, p in zip(frequencies, density, strict=True)
            ]
            if name in ("gradient", "noise"):
                continue
            error = float(np.mean((values - entries["gradient"]) ** 2)) / power
            b, a = FILTERS["sgd" if name == "private" else name] if name in (
                *FILTERS, "private",
            ) else ((), ())  # fmt: skip
            value = snr.signal_to_noise(b, a, c) if len(b) else math.nan
            rows.append(where | {"kind": "error", "mean_square": error, "ratio": value})
        rows += longer(config, kept, c, power, where)
    return rows


BLOCK = 32
"""Records whose gradient is taken at once, without a capacity: more leave a CPU's caches."""


def assume(config: Config, step: float, lab: launch.Lab, folder: Path) -> list[dict[str, Any]]:
    """Correlations over rounds of the full gradient, which A4 is about, and of a batch's.

    A4 asks for constants with <g_t, g_{t-k}> >= c_k |g_t|^2 + c_-k |g_{t-k}|^2 in every round. The
    paper's c_-k = 1/2 leaves c_k = correlation - 1/2 in the mean; ``least`` is the largest number
    that both may be at once in all rounds, above 0 where there are positive constants at all.
    """
    del folder  # Minutes, in one piece.
    task = learn(config)
    rows = []
    used = min(config.fixed_records or len(task.y), len(task.y))
    size = math.gcd(used, config.capacity or BLOCK)
    fixed = jax.tree.map(
        lambda leaf: jnp.asarray(leaf[:used]).reshape(-1, size, *leaf.shape[1:]), (task.x, task.y)
    )
    for seed in config.seeds:
        kept = record(dataclasses.replace(config, step_size=step), "sgd", task, seed, fixed)
        lab.say(f"  step {step:g}, seed {seed}: test accuracy {kept.accuracy:.3f}")
        where = {"step_size": step, "seed": seed, "budget_epsilon": config.epsilon}
        where |= {"dataset": config.dataset, "guarantee": None, "fixed_records": used}
        rows.append(where | {"kind": "assumed run", "test_accuracy": kept.accuracy})
        for name, values in (("full gradient", kept.full), ("of a batch", kept.gradient)):
            g = values[config.skip :]
            lags = autocovariance(g, config.lags)
            squares = np.sum(g**2, axis=1)
            for k in range(config.lags + 1):
                products = np.sum(g[k:] * g[: len(g) - k], axis=1)
                minimum = float(np.min(products / (squares[k:] + squares[: len(g) - k])))
                row = where | {"kind": "assumption", "series": name, "lag": k}
                rows.append(row | {"correlation": lags[k] / lags[0], "least": minimum})
        rows += near(config, kept, where)
    return rows


def near(config: Config, selection: Recorded, where: dict[str, Any]) -> list[dict[str, Any]]:
    """What every published filter misses of the full gradient, and the ratio of its c_k.

    ``missed`` is the share of the gradient's power that no multiple of the output has: the private
    gradients are clipped, the full one is not.
    """
    complete = selection.full[config.skip :]
    lags = autocovariance(complete, len(complete) // 2)
    c = np.maximum(lags / lags[0] - 0.5, 0.0)
    rows = []
    for name, values in streams(selection).items():
        if name in FILTERS or name == "private":
            m = values[config.skip :]
            missed = 1 - float(np.sum(m * complete) ** 2 / (np.sum(m**2) * np.sum(complete**2)))
            ratio = snr.signal_to_noise(*FILTERS["sgd" if name == "private" else name], c)
            row = where | {"kind": "full error", "series": name}
            rows.append(row | {"missed": missed, "ratio": ratio})
    return rows


def longer(
    config: Config, selection: Recorded, c: np.ndarray, power: float, where: dict[str, Any]
) -> list[dict[str, Any]]:
    """Finite responses of ever more taps, each the best by the ratio: ratio and error."""
    from scipy import signal

    rows = []
    for taps in config.taps:
        coefficients = snr.optimal_fir(np.pad(c, (0, max(0, taps - len(c))))[:taps])
        out = signal.lfilter(coefficients.b, [1.0], selection.private, axis=0)
        missed = (out - selection.gradient)[max(config.skip, taps) :]
        row = where | {"kind": "taps", "series": "best by the ratio", "taps": taps}
        error = float(np.mean(missed**2)) / power
        rows.append(row | {"ratio": snr.signal_to_noise(*coefficients, c), "mean_square": error})
    return rows


def responses(config: Config, folder: Path) -> list[dict[str, Any]]:
    """Gain and impulse response of every published filter; no data."""
    del folder
    rows = []
    for name, (b, a) in FILTERS.items():
        response = snr.frequency_response(b, a, 65)
        row = {"series": name, "guarantee": None}
        rows += [
            row | {"kind": "gain", "frequency": f, "gain": abs(g)}
            for f, g in zip(*response, strict=True)
        ]
        kappa = filters.impulse_response(b, a, config.lags + 1)
        rows += [row | {"kind": "impulse", "lag": k, "kappa": v} for k, v in enumerate(kappa)]
    return rows


def design(config: Config, folder: Path) -> list[dict[str, Any]]:
    """Filter and noise apart and together, for AR(1) gradients; no data."""
    del folder
    rounds = config.horizon
    rows = []
    none = np.eye(rounds)
    sums = np.tri(rounds)
    weights = {"steps": none, "sums of steps": sums.T @ sums}
    first = [filters.impulse_response(*FILTERS["first v1"], rounds)[: t + 1] for t in range(rounds)]
    fixed = np.stack([np.pad(k[::-1] / k.sum(), (0, rounds - len(k))) for k in first])
    for epochs in config.epochs:
        pattern = Participation(rounds, epochs, rounds // epochs)
        for name, gram in weights.items():
            single = temporal.solve(gram, pattern).strategy
            colour = np.linalg.inv(single.T @ single)
            for rho in config.correlations:
                signal = filtered.covariance(rho ** np.arange(rounds), rounds)
                for variance in config.variances:
                    union = filtered.solve(signal, variance, pattern, gram=gram)
                    after = filtered.wiener(signal, variance * colour, gram=gram)
                    pairs = {
                        "neither": (none, none),
                        "first v1 alone": (fixed, none),
                        "strategy alone": (none, single),
                        "strategy, then filter": (after, single),
                    }
                    results = {
                        key: filtered.filtered_error(*pair, signal, variance, pattern, gram=gram)
                        for key, pair in pairs.items()
                    }
                    results |= {"filter alone": union.errors[0], "together": union.error}
                    results |= {"bound": union.lower_bound}
                    row = {"kind": "design", "epochs": epochs, "weight": name, "rho": rho}
                    row |= {"variance": variance, "guarantee": None}
                    rows += [row | {"series": k, "mean_square": e} for k, e in results.items()]
    return rows


def experiment(config: Config, lab: launch.Lab) -> None:
    """Record spectra of DP-SGD's gradients, noise and filters; and choose filters and noise."""
    complete = dataclasses.asdict(config)
    designs = {
        name: complete.pop(name) for name in ("horizon", "correlations", "variances", "epochs")
    }
    assumed = {name: value for name, value in complete.items() if name not in ("segment", "taps")}
    for name in ("trained", "steps"):
        del complete[name], assumed[name]
    del complete["fixed_records"]
    cells = [
        (f"run_{name.replace(' ', '_')}", complete | {"trained": name},
         functools.partial(train, config, name, lab))
        for name in config.trained
    ]  # fmt: skip
    cells += [
        (f"assumption_{step:g}", assumed | {"step_size": step},
         functools.partial(assume, config, step, lab))
        for step in config.steps
    ]  # fmt: skip
    runs = lab.cells(cells, seed=config.seeds)
    gains = lab.cell("responses", {"lags": config.lags}, functools.partial(responses, config))
    cell = lab.cell("designs", designs, functools.partial(design, config))
    report(config, lab, runs, cell)
    draw(config, lab, runs, gains)


def report(config: Config, lab: launch.Lab, runs: Any, result: Any) -> None:
    """Print the tables."""
    lab.say("\nNo guarantee covers these records: gradients before the noise are among them.")
    for trained in config.trained:
        own = runs[runs["trained"] == trained]
        run = own[own["kind"] == "run"]
        lab.say(
            f"\ntrained with {trained}: test accuracy {run['test_accuracy'].mean():.3f}; variance "
            f"of the noise {run['noise/power'].mean():.3g} times the gradient's"
        )
        for kind, key in (("error", "series"), ("taps", "taps")):
            rows = own[own["kind"] == kind]
            table = tables.summary(rows, key, "mean_square").rename(
                columns={"mean": "mean square error / power", "count": "seeds"}
            )
            table["ratio (4)"] = rows.groupby(key, sort=False)["ratio"].mean().to_numpy()
            lab.say(tables.text(table))
    assumed = runs[(runs["kind"] == "assumption") & runs["lag"].isin((1, 2, 10, 40))]
    for value in ("correlation", "least"):
        table = assumed.pivot_table(
            index=["series", "step_size"], columns="lag", values=value, sort=False,
            aggfunc="mean" if value == "correlation" else "min",
        ).reset_index()  # fmt: skip
        lab.say(f"\n{value} at lags, by step size:\n" + tables.text(table))
    of_full = runs[runs["kind"] == "full error"]
    table = of_full.groupby(["step_size", "series"], sort=False)[["missed", "ratio"]].mean()
    lab.say(
        "\nshare of the full gradient that a filter misses:\n" + tables.text(table.reset_index())
    )
    wide = result.pivot_table(
        index=["epochs", "weight", "rho", "variance"], columns="series", values="mean_square",
        sort=False,
    ).reset_index()  # fmt: skip
    lab.say("\nmean square error a round, AR(1) gradients of power 1:\n" + tables.text(wide))


def draw(config: Config, lab: launch.Lab, runs: Any, gains: Any) -> None:
    """Figures: autocorrelation, spectra, responses."""
    note = "Gradients before the noise are private: no guarantee covers a figure that shows them."
    display = looks.LOOKS | {"private": looks.look("none", "private gradient")}
    own = runs[(runs["trained"] == config.trained[0]) & runs["series"].isin(DRAWN)]
    panels = (
        ("lags", own[(own["kind"] == "lag") & (own["lag"] > 0)], "lag", "covariance",
         "autocovariance over\nthe gradient's power", False),
        ("spectrum", own[own["kind"] == "spectrum"], "frequency", "density",
         "spectral density over\nthe gradient's power", True),
    )  # fmt: skip
    for name, rows, x, y, label, log_y in panels:
        sheet = plots.lines(
            rows, x, y, "series", ylabel=label,
            xlabel="lag, rounds" if x == "lag" else "frequency, cycles a round", log_y=log_y,
            note=note, looks=display,
        )  # fmt: skip
        lab.figure(sheet, f"doppler_spectra_{name}{lab.suffix}.svg")
    for kind, name, x, xlabel, ylabel in (
        ("gain", "responses", "frequency", "frequency, cycles a round", "gain of a wave"),
        ("impulse", "impulse", "lag", "rounds since the impulse", "weight of the impulse, kappa"),
    ):
        sheet, axes = plots.figure(1, 2, sharey=True)
        rows = gains[(gains["kind"] == kind) & (gains["series"] != "sgd")]
        few = rows["series"].str.fullmatch("f[1-6]")
        for ax, part in zip(axes, (rows[~few], rows[few]), strict=True):
            plots.lines(
                part, x, "gain" if kind == "gain" else "kappa", "series", ax=ax, xlabel=xlabel,
                ylabel=ylabel, looks=display, note="Left: the paper's Table 2. Right: its Table 4.",
            )  # fmt: skip
        lab.figure(sheet, f"doppler_spectra_{name}{lab.suffix}.svg")


main = functools.partial(launch.main, "doppler_spectra", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
