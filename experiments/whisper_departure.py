"""An agent leaves, messages are lost: what correlated noise then costs, and how to carry on.

Correlated noise cancels only between messages that meet. Two questions, both answered beside
theory: how much noise energy is left in one round when agents or messages are lost (sampled noise
against the closed form), and how training goes on after agents have left, with the old design cut
down to those who stay or with the design solved again.
"""

import dataclasses
import functools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from _common import launch, tables
from dpjax.accounting import gdp
from dpjax.contrib import datasets
from dpjax.data import load, partition, split
from dpjax.engine import keys
from dpjax.engine.run import Continuation, Result
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.mechanism import design as design_
from dpjax.mechanism import spatial
from dpjax.models.linear import Linear
from dpjax.plans import noise, optimizers, plan, protect
from dpjax.results import plots
from dpjax.topology import graphs, mixing
from dpjax.transforms import noise as noise_

__all__ = ["PRESETS", "Config", "experiment", "main"]


@dataclass(frozen=True)
class Config:
    """What is lost, and what is trained meanwhile.

    Attributes:
        dataset: A name that `dpjax.data.load.load` takes, of a file in the data cache too, with
            labels -1 and +1.
        agents: Number of agents at the start.
        departed: How many leave at half time, those of most neighbours first.
        loss: Probabilities that a message between two agents is lost.
        samples: Rounds of noise to sample against theory.
        designs: Noise designs.
        epsilon: Budget of the whole run.
        delta: Target delta.
        rounds: Rounds in all; half before the departure.
        clip_norm: Clip norm.
        batch_size: Records an agent draws each round.
        step_size: Step size.
        probability: Edge probability of the random graph.
        seeds: Seeds.
        measurements: How often each half is measured.
    """

    dataset: str = "a9a"
    agents: int = 20
    departed: int = 2
    loss: tuple[float, ...] = (0.0, 0.01, 0.05, 0.1, 0.2)
    samples: int = 4000
    designs: tuple[str, ...] = ("independent", "pairwise", "whisper", "whisper_horizon")
    epsilon: float = 10.0
    delta: float = 1e-5
    rounds: int = 4000
    clip_norm: float = 0.1
    batch_size: int = 128
    step_size: float = 0.01
    probability: float = 0.5
    seeds: tuple[int, ...] = tuple(range(10))
    measurements: int = 8

    def __post_init__(self) -> None:
        """Refuse data that there are not."""
        datasets.check(self.dataset)


PRESETS = {
    "tiny": Config(
        dataset="breast_cancer", agents=8, departed=1, loss=(0.0, 0.2), samples=400, rounds=60,
        batch_size=8, seeds=(0, 1), measurements=2, designs=("independent", "whisper"),
    ),
    "cpu": Config(),
    "full": Config(seeds=tuple(range(50)), samples=40_000),
}  # fmt: skip


def energies(config: Config) -> list[dict[str, Any]]:
    """Noise energy of one round with messages or agents lost: sampled, and in closed form."""
    matrix = network(config)
    rows = []
    for name in config.designs:
        result = _designed(name, matrix, 1.0, config.rounds)
        base = spatial.energy(result.covariance, matrix)
        for loss in config.loss:
            theory = expected_energy(result.covariance, matrix, loss)
            sampled, error = lossy_rounds(config, result.covariance, matrix, loss)
            rows.append(
                {"algorithm": name, "what": "messages", "lost": loss, "energy": sampled / base,
                 "standard_error": error / base, "theory": theory / base}
            )  # fmt: skip
        for count in range(1, config.departed + 1):
            gone = leavers(matrix, count)
            arrived = np.ones((config.agents, config.agents), dtype=bool)
            arrived[gone, :] = arrived[:, gone] = False
            applied = effective_mixing(matrix, arrived)
            theory = energy_of(applied, result.covariance)
            sampled, error = sample(config, result.covariance, lambda key, a=applied: a)
            rows.append(
                {"algorithm": name, "what": "agents", "lost": count, "energy": sampled / base,
                 "standard_error": error / base, "theory": theory / base}
            )  # fmt: skip
    return rows


def effective_mixing(matrix: np.ndarray, arrived: np.ndarray) -> np.ndarray:
    """The mixing that a round applies: lost weight goes to the agent's own model.

    Entry (i, j) of ``arrived`` says whether j's message reached i; a lost agent has no entry, not
    even its own, and its row is 0.
    """
    selection = np.where(arrived, matrix, 0.0)
    alive = arrived.diagonal()
    selection[alive, alive] += (matrix - selection).sum(axis=1)[alive]
    return selection


def energy_of(applied: np.ndarray, covariance: np.ndarray) -> float:
    """tr(W_A R W_A'), the noise energy in the agents' models after a round."""
    return float(np.einsum("ij,jk,ik->", applied, covariance, applied, optimize=True))


def expected_energy(covariance: np.ndarray, matrix: np.ndarray, loss: float) -> float:
    """The mean of `energy_of` when each message is lost on its own with probability q.

    For row i with means m_i and independent entries,
    E = m_i R m_i' + q (1 - q) sum_j W_ij^2 (R_jj - 2 R_ij + R_ii).
    """
    others = matrix - np.diag(matrix.diagonal())
    mean = matrix - loss * others + loss * np.diag(others.sum(axis=1))
    variances = np.broadcast_to(covariance.diagonal(), covariance.shape)
    spread = variances - 2.0 * covariance + variances.T
    certain = energy_of(mean, covariance)
    return certain + loss * (1.0 - loss) * float(np.sum(others**2 * spread))


def resolve(
    design: design_.Design, matrix: np.ndarray, gone: list[int], horizon: int | None
) -> design_.Design:
    """The design of those who stay, from the last multipliers and without compiling anew."""
    options: dict[str, Any] = {}
    if design.kind.startswith("whisper"):
        options = {"pad_to": design.n, "warm_start": np.delete(design.multipliers, gone)}
    return _designed(design.kind, matrix, design.precision_bound, horizon, **options)


def _designed(
    name: str, matrix: np.ndarray, bound: float | np.ndarray, rounds: int | None, **options: Any
) -> design_.Design:
    """The design of a name, that of the whole run with its rounds as horizon."""
    if name == "whisper_horizon":
        return design_.Design.whisper(matrix, bound, rounds, **options)
    return getattr(design_.Design, name)(matrix, bound, **options)


def lossy_rounds(
    config: Config, covariance: np.ndarray, matrix: np.ndarray, loss: float
) -> tuple[float, float]:
    """Sampled energy when every message is lost with a probability of its own."""
    weights = jnp.asarray(matrix)
    own = jnp.eye(len(matrix), dtype=bool)

    def applied(key: Any) -> Any:
        arrived = jax.random.bernoulli(key, 1 - loss, weights.shape) | own
        selection = jnp.where(arrived, weights, 0)
        return selection + jnp.diag((weights - selection).sum(axis=1))

    return sample(config, covariance, applied)


def sample(config: Config, covariance: np.ndarray, applied: Any) -> tuple[float, float]:
    """Mean energy of W_A V over sampled rounds, with its standard error."""
    n = len(covariance)
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2.0)
    factor = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    chain = noise_.correlated(
        factor.astype(np.float32),
        key=keys.derive(0, "noise"),
        rounds=config.samples,
    )
    losses = jax.random.split(keys.derive(0, "batches"), config.samples)

    @jax.jit
    def all_rounds(losses: Any) -> Any:
        def body(state: Any, key: Any) -> Any:
            drawn, state = chain.update(jnp.zeros((n, 1)), state)
            return state, jnp.sum(jnp.square(applied(key).astype(jnp.float32) @ drawn))

        return jax.lax.scan(body, chain.init(jnp.zeros((n, 1))), losses)[1]

    taken = np.asarray(all_rounds(losses), np.float64)
    return float(taken.mean()), float(taken.std(ddof=1) / math.sqrt(len(taken)))


def network(config: Config) -> np.ndarray:
    """The mixing matrix at the start."""
    return mixing.metropolis_hastings(graphs.erdos_renyi(config.agents, config.probability, 0))


def horizon(name: str, rounds: int) -> int | None:
    """How far a design for the whole run looks ahead."""
    return rounds if name == "whisper_horizon" else None


def leavers(matrix: np.ndarray, count: int) -> list[int]:
    """The agents of most neighbours whose departure keeps the others connected."""
    gone: list[int] = []
    for agent in np.argsort(-(matrix > 0).sum(axis=1), kind="stable"):
        if len(gone) == count:
            break
        try:
            mixing.survivors(matrix, [*gone, int(agent)])
        except ValueError:
            continue
        gone.append(int(agent))
    return sorted(gone)


def training(config: Config, lab: launch.Lab, folder: Path) -> list[dict[str, Any]]:
    """Half the rounds with everyone; the other half without those who left, two ways."""
    train, test = split.with_test(load.load(config.dataset), 0.2, seed=1)
    matrix = network(config)
    shards = partition.iid(len(train[1]), config.agents, 0)

    def learn(rows: np.ndarray) -> Problem:
        kept = shards._replace(indices=shards.indices[rows], counts=shards.counts[rows])
        return supervised(Linear(), "logistic", train, test, kept, name=config.dataset)

    half = config.rounds // 2
    mu = float(gdp.mu(config.epsilon, config.delta))
    # Fixed before the first half: the departure is not planned. Half the rounds at the whole run's
    # noise spend mu / sqrt(2); both halves make up mu.
    total = protect.Budget(config.epsilon, config.delta)
    epsilon = float(gdp.epsilon(mu * math.sqrt(half / config.rounds), config.delta))
    everyone = np.arange(config.agents)
    gone = leavers(matrix, config.departed)
    stay = np.setdiff1d(everyone, gone)
    rest = mixing.survivors(matrix, gone)
    base = plan.Config(
        noise=noise.Independent(),
        budget=protect.Budget(epsilon, config.delta),
        protect=protect.Protect("replace_agent", clip_norm=config.clip_norm),
        sampler=samplers.Random(config.batch_size),
        optimizer=optimizers.Sgd(config.step_size),
        rounds=half,
    )
    rows: list[dict[str, Any]] = []
    for name in config.designs:
        selection = base.using(noise.named(name))
        options: dict[str, Any] = {
            "seeds": config.seeds,
            "eval_every": math.ceil(half / config.measurements),
        }
        first_plan = plan.make(selection, matrix)
        first = lab.run(first_plan, learn(everyone), **options, checkpoint=folder / f"{name}-first")
        assert first_plan.design is not None
        resolve(first_plan.design, rest, gone, horizon(name, half))
        began = time.perf_counter()
        solved = resolve(first_plan.design, rest, gone, horizon(name, half))
        seconds = time.perf_counter() - began
        # The old noise without the departed: partners' noise stays uncancelled, and the marginal
        # of a covariance has no larger precision, so the budget is kept.
        old = dataclasses.replace(
            solved,
            covariance=first_plan.design.covariance[np.ix_(stay, stay)],
            value=spatial.energy(
                first_plan.design.covariance[np.ix_(stay, stay)], rest, horizon(name, half)
            ),
        )
        rows += label(first, "before", 0, 0.0, first_plan.design.covariance, matrix)
        start = jax.tree.map(lambda leaf: leaf[:, :, stay], first.params)
        for policy, result in (("old noise", old), ("solved again", solved)):
            totals = [guarantee.within(total) for guarantee in first.guarantees]
            second = lab.run(
                plan.make(selection, rest, design=result), learn(stay), **options,
                continuation=Continuation(start, 1, totals),
                checkpoint=folder / f"{name}-{policy.replace(' ', '-')}",
            )  # fmt: skip
            spent = seconds if policy == "solved again" else 0.0
            rows += label(second, policy, half, spent, result.covariance, rest)
    return rows


def label(
    result: Result, policy: str, offset: int, seconds: float, covariance: np.ndarray,
    matrix: np.ndarray,
) -> list[dict[str, Any]]:  # fmt: skip
    """A half's rows, counted over the whole run."""
    rows = result.rows(policy=policy, solve_seconds=seconds)
    energy = spatial.energy(covariance, matrix)
    return [{**row, "round": row["round"] + offset, "one_step_energy": energy} for row in rows]


def experiment(config: Config, lab: launch.Lab) -> None:
    """What lost messages and departed agents cost correlated noise, and how to carry on."""
    stored = dataclasses.asdict(config)
    noises = lab.cell("energies", stored, lambda folder: energies(config), seed=0)
    trained = lab.cell(
        "training", stored, lambda folder: training(config, lab, folder), seed=config.seeds
    )
    report(config, lab, noises, trained)


def report(config: Config, lab: launch.Lab, noises: Any, trained: Any) -> None:
    """Tables of both parts, and one figure."""
    noises = noises.assign(
        deviation=(noises["energy"] - noises["theory"]) / noises["standard_error"]
    )
    lab.say(
        "\nnoise energy of one round over the same design's with nothing lost (deviation from "
        "theory in standard errors)"
    )
    columns = ["algorithm", "what", "lost", "energy", "standard_error", "theory", "deviation"]
    named = noises.assign(algorithm=noises["algorithm"].map(plots.TITLES))
    lab.say(tables.text(named, columns))
    last = trained[trained["round"] == 2 * (config.rounds // 2)]
    gone = leavers(network(config), config.departed)
    lab.say(f"\ntest loss ({config.dataset}) after agents {gone} have left at half time")
    summary = tables.summary(last, ["design", "policy"], "test_loss")
    summary["design"] = summary["design"].map(plots.TITLES)
    details = last.groupby(["design", "policy"], sort=False)[["one_step_energy"]].first()
    summary["one_step_energy"] = details["one_step_energy"].to_numpy()
    solve = last.groupby(["design", "policy"], sort=False)["solve_seconds"].first()
    summary["solve_milliseconds"] = 1000 * solve.to_numpy()
    lab.say(tables.text(summary.rename(columns={"mean": "test_loss"})))
    messages = noises[noises["what"] == "messages"]
    figure, panels = plots.figure(1, 2)
    plots.lines(
        messages, "lost", "energy", "algorithm", ax=panels[0], guarantee=[],
        xlabel="probability of a lost message",
        ylabel="noise energy of one round\nover that with nothing lost",
    )  # fmt: skip
    for _, group in messages.groupby("algorithm", sort=False):
        panels[0].plot(
            group["lost"], group["theory"], ":", color="black", linewidth=0.8, label="theory"
        )
    solved = trained[trained["policy"] != "old noise"]
    plots.lines(
        solved, "round", "test_loss", ax=panels[1], xlabel="round",
        ylabel=f"test loss ({config.dataset})",
    )  # fmt: skip
    panels[1].axvline(config.rounds // 2, color="grey", linewidth=0.8)
    note = (
        "Left: sampled, beside theory. Right: agents leave at the grey line and the design "
        f"is solved again; both halves keep a total of epsilon = {config.epsilon:g}."
    )
    lab.figure(figure, "whisper_departure.svg", note=note)


main = functools.partial(launch.main, "whisper_departure", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
