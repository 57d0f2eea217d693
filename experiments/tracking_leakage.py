"""What an attacker learns of one agent's gradients: Table 4 of the gradient tracking paper.

Three agents in a complete network, one number each, the data drawn anew in every trial: with fixed
data the gradient is a function of a message that the attacker sees, and the truth is 1 at every
budget. The value is the mutual information of agent 1's gradient and of what the attacker has, by
Kraskov's estimator over trials, over what that estimator gives for a variable and itself; its
maximum over rounds is judged beside the same for trials that were dealt anew (the null). It is an
estimate of what these coordinates tell one at a time, no bound on what an attacker can learn.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpjax.accounting import leakage
from dpjax.algorithms.random_weights import CorrelatedRandomness, Encrypted
from dpjax.algorithms.tracking import Tracking
from dpjax.data import fusion as data
from dpjax.engine.trace import Passed, trace
from dpjax.mechanism import laplace
from dpjax.mechanism.x64 import double_precision
from dpjax.plans import fusion, plan, protect, samplers
from dpjax.plans.optimizers import Sgd
from dpjax.plans.scheduled import Laplace
from dpjax.results import launch, plots, tables

__all__ = ["PRESETS", "Config", "experiment", "main"]

AGENTS = 3
MATRIX = np.full((AGENTS, AGENTS), 1 / AGENTS)
_EACH = ("gamma", "beta", "q1", "q2")
_KINDS: Any = ("exact", "jittered")
PAPER = {
    ("tracking", 10.0, "both"): 0.52, ("tracking", 1.0, "both"): 0.24,
    ("tracking", 0.1, "both"): 0.047, ("correlated_randomness", None, "outsider"): 1.0,
    ("correlated_randomness", None, "insiders"): 0.47, ("encrypted", None, "insiders"): 0.30,
}  # fmt: skip
"""Table 4: method, epsilon, attacker -> M-NMI."""


@dataclass(frozen=True)
class Config:
    """Trials, schedules, estimator.

    Attributes:
        trials: Trials N; data, starting points and noise differ.
        rounds: Rounds.
        marks: Rounds at which the estimate is taken: all of the first 20, and so many in all,
            spread evenly in their logarithm.
        data: "redrawn" in every trial, or "fixed", the degenerate case.
        gradient_gap: How far gradients of neighbours are assumed to be apart in L1.
        epsilon: Budgets of tracking; gamma, beta, q1 and q2 have one entry for each.
        gamma: First step sizes.
        beta: Weights of disagreement.
        q1: Decays of the steps.
        q2: Decays of the noise.
        step: Step size of the methods without noise, constant.
        until: Iterations with random weights of correlated randomness.
        k: Neighbours of the estimator.
        permutations: Trials dealt anew for the null.
        seed: Of jitter and permutations.
    """

    trials: int = 5000
    rounds: int = 1000
    marks: int = 20
    data: Literal["redrawn", "fixed"] = "redrawn"
    gradient_gap: float = 1.0
    epsilon: tuple[float, ...] = (10.0, 1.0, 0.1)
    gamma: tuple[float, ...] = (0.002, 0.001, 0.001)
    beta: tuple[float, ...] = (100.0, 1000.0, 1000.0)
    q1: tuple[float, ...] = (0.97, 0.97, 0.92)
    q2: tuple[float, ...] = (0.99, 0.99, 0.99)
    step: float = 0.002
    until: int = 50
    k: int = 3
    permutations: int = 9
    seed: int = 0


PRESETS = {
    "tiny": Config(
        trials=60, rounds=12, marks=6, epsilon=(10.0,), gamma=(0.002,), beta=(100.0,), q1=(0.97,),
        q2=(0.99,), permutations=3, until=2,
    ),
    "cpu": Config(),
    "full": Config(marks=1000, permutations=99),
}  # fmt: skip


def check(config: Config) -> None:
    """Refuse options that no run could use, before any work."""
    launch.check_numbers(
        config,
        whole={
            "k": 1, "trials": 5, "rounds": 4, "marks": 1, "until": 0, "permutations": 0, "seed": 0,
        },
        positive=("epsilon", "gradient_gap", "step", "gamma", "beta"),
        filled=("epsilon",),
        each={"epsilon": _EACH},
    )  # fmt: skip
    for pair in zip(config.q1, config.q2, strict=True):
        laplace.decays(*pair)
    if config.trials < config.k + 2:
        raise ValueError(f"trials is {config.trials} for k = {config.k}; give k + 2 at least")


@functools.lru_cache(maxsize=1)
def drawn(law: Literal["redrawn", "fixed"], trials: int) -> tuple[data.Fusion, ...]:
    """The costs of every trial."""
    if law == "fixed":
        return (data.make(AGENTS, 0, 1, 1),) * trials
    return tuple(data.make(AGENTS, seed, 1, 1) for seed in range(trials))


def problems(config: Config) -> list[Any]:
    """One problem a trial, in float64: late rounds divide by steps that float32 rounds away."""
    return [fusion.problem(one, dtype="float64") for one in drawn(config.data, config.trials)]


def gradients(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """[N] slope and constant of agent 1's gradient in every trial."""
    costs = drawn(config.data, config.trials)
    return (
        np.array([one.hessians[0, 0, 0] for one in costs]),
        np.array([one.linear[0, 0] for one in costs]),
    )


def marked(config: Config, rounds: int) -> np.ndarray:
    """Rounds at which the estimate is taken, from 0."""
    spread = np.geomspace(1, rounds, config.marks).round().astype(int) - 1
    return np.unique(np.concatenate([np.arange(min(20, rounds)), spread]))


def of_tracking(passed: Passed) -> tuple[Any, ...]:
    """Message, tracker and mean of agent 1, before and after a round."""
    mean = passed.message.mean(axis=0)
    return passed.message[0, 0], passed.after.memory.tracked[0, 0], mean[0]


def tracking(config: Config, index: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Agent 1's gradient and what all attackers have of it, (44) with the message that it needs."""
    gamma, beta, q1, q2 = (getattr(config, name)[index] for name in ("gamma", "beta", "q1", "q2"))
    given = plan.Config(
        method=Tracking(beta), noise=Laplace(q2), sampler=samplers.Random(1), rounds=config.rounds,
        budget=protect.Budget(config.epsilon[index], accountant="pure"),
        protect=protect.Protect("replace_agent", norm="l1", gradient_gap=config.gradient_gap),
        optimizer=Sgd(gamma, decay=q1),
    )  # fmt: skip
    with double_precision():
        read = trace(
            plan.make(given, MATRIX), problems(config), seeds=range(config.trials), read=of_tracking
        )
    z, y, mean = (np.asarray(part, np.float64) for part in read)
    slope, constant = gradients(config)
    private = slope[:, None] * z - constant[:, None]
    # What is left of the next message once all that is known is taken off it.
    steps = gamma * q1 ** np.arange(config.rounds - 1)
    solved = (mean[:, :-1] - z[:, 1:]) / steps - y[:, :-1]
    seen = np.stack([z[:, :-1], y[:, :-1], solved], axis=-1)
    # Every message is broadcast: colluding neighbours and an outsider have the same.
    return {"both": (private[:, :-1], seen)}


def of_correlated(passed: Passed) -> tuple[Any, ...]:
    """Agent 1's model, its gradient and what it sends to agent 2."""
    return (
        passed.before.models[0, 0], passed.after.memory.tracker[0, 0], passed.private[0, 1, 0],
        passed.private[0, 2, 0],
    )  # fmt: skip


def correlated(config: Config) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Agent 1's gradient; what agent 2 gets of it, agent 3 honest, and what the links show."""
    given = plan.Config(
        method=CorrelatedRandomness(config.until), sampler=samplers.Random(1),
        rounds=2 * config.rounds, optimizer=Sgd(config.step),
        protect=protect.Protect("replace_agent", norm="l1", gradient_gap=config.gradient_gap),
    )  # fmt: skip
    with double_precision():
        read = trace(
            plan.make(given, MATRIX), problems(config), seeds=range(config.trials),
            read=of_correlated,
        )  # fmt: skip
    x, _, to_second, to_third = (np.asarray(part, np.float64) for part in read)
    slope, constant = gradients(config)
    private = slope[:, None] * x[:, 0::2] - constant[:, None]
    # Even rounds carry the moved model (x - Lam y) / 3, odd ones shares of the tracker.
    moved, share, other = AGENTS * to_second[:, 0::2], to_second[:, 1::2], to_third[:, 1::2]
    # The paper's set, which gives the model and the step apart.
    insider = np.stack([x[:, 0::2], x[:, 0::2] - moved, share], axis=-1)
    # Whoever sees all links sees both shares; what agent 1 keeps for itself is the rest of them.
    outsider = np.stack([x[:, 0::2], x[:, 0::2] - moved, share, other], axis=-1)
    return {"insiders": (private, insider), "outsider": (private, outsider)}


def of_encrypted(passed: Passed) -> tuple[Any, ...]:
    """Agent 1's model, and the pulls between it and the others."""
    model, weights = passed.private.model, passed.private.weights
    product = weights[0] * weights[:, 0]
    return model[0, 0], (product * (model[:, 0] - model[0, 0])).sum()


def encrypted(config: Config) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Agent 1's gradient, and what colluding neighbours have of it: their pulls, over the step."""
    given = plan.Config(
        method=Encrypted(), sampler=samplers.Random(1), rounds=config.rounds,
        optimizer=Sgd(config.step),
        protect=protect.Protect("replace_agent", norm="l1", gradient_gap=config.gradient_gap),
    )  # fmt: skip
    with double_precision():
        read = trace(
            plan.make(given, MATRIX), problems(config), seeds=range(config.trials),
            read=of_encrypted,
        )  # fmt: skip
    x, pulls = (np.asarray(part, np.float64) for part in read)
    slope, constant = gradients(config)
    return {"insiders": (slope[:, None] * x - constant[:, None], pulls[:, :, None] / config.step)}


def rows_of(config: Config, name: str, epsilon: float | None, found: Any) -> list[dict[str, Any]]:
    """M-NMI under both conventions of the normaliser, of raw and of standardised coordinates."""
    rows = []
    for attacker, (private, seen) in found.items():
        at = marked(config, private.shape[1])
        x, y = private[:, at].T[:, :, None], np.moveaxis(seen[:, at], 1, 0)
        for coordinates in ("raw", "standardised"):
            made = leakage.normalised(
                x, y, config.k, coordinates=coordinates, jitter="ties", seed=config.seed,
                permutations=config.permutations,
            )  # fmt: skip
            most = float(made.information.max())
            both = {
                kind: most / leakage.normaliser(config.trials, config.k, kind) for kind in _KINDS
            }
            row = {
                "algorithm": name, "setting": epsilon, "attacker": attacker, "data": config.data,
                "coordinates": coordinates, "trials": config.trials, "k": config.k,
                "at": int(at[made.round]) + 1, "information": most, "m_nmi": both["exact"],
                "m_nmi_jittered": both["jittered"], "paper": PAPER.get((name, epsilon, attacker)),
            }  # fmt: skip
            null = made.null
            if null is not None:
                row |= {"null": null.maximum_mean, "p_value": null.p_value}
            rows += [
                row | {"round": int(one) + 1, "value": float(made.rounds[place])}
                for place, one in enumerate(at)
            ]
    return rows


def experiment(config: Config, lab: launch.Lab) -> None:
    """Mutual information of gradients and messages, for three ways of hiding them."""
    check(config)

    def cell(name: str, epsilon: float | None, compute: Any) -> Any:
        def run(folder: Path) -> list[dict[str, Any]]:
            del folder
            return rows_of(config, name, epsilon, compute())

        return run

    cells: list[Any] = []
    swept = ("epsilon", "gamma", "beta", "q1", "q2")
    for index, epsilon in enumerate(config.epsilon):
        own = {name: getattr(config, name)[index] for name in swept}
        stored = launch.stored(config, "step", "until", **own)
        compute = functools.partial(tracking, config, index)
        cells.append(
            (f"{config.data}_tracking_{epsilon:g}", stored, cell("tracking", epsilon, compute))
        )
    for name, method in (("correlated_randomness", correlated), ("encrypted", encrypted)):
        stored = launch.stored(config, *swept)
        compute = functools.partial(method, config)
        cells.append((f"{config.data}_{name}", stored, cell(name, None, compute)))
    report(config, lab, lab.cells(cells, seed=range(config.trials)))


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """The table, and the estimate over rounds."""
    lab.say(f"\nM-NMI over {config.rounds} rounds, {config.trials} trials, k = {config.k}")
    keys = ["algorithm", "setting", "attacker", "coordinates"]
    once = frame.drop_duplicates(keys)
    shown = [*keys, "at", "m_nmi", "m_nmi_jittered", "null", "p_value", "paper"]
    lab.say(tables.text(once[[name for name in shown if name in once]].to_dict("records")))
    figure, panels = plots.figure(1, 2)
    for ax, coordinates in zip(panels, ("raw", "standardised"), strict=True):
        mine = frame[
            (frame["coordinates"] == coordinates) & frame["attacker"].isin(["both", "insiders"])
        ]
        names = mine["algorithm"] + mine["setting"].map(
            lambda e: "" if e is None or e != e else f", {e:g}"
        )
        plots.lines(
            mine.assign(algorithm=names), "round", "value", ax=ax, xlabel="round", logx=True,
            ylabel="normalised mutual information", title=f"{coordinates} coordinates",
        )  # fmt: skip
    note = f"An estimate from {config.trials} trials, no bound. Numbers behind names are epsilons."
    plots.finish(figure, note=note)
    lab.say(f"figure: {plots.save(figure, lab.folder / 'tracking_leakage.svg')}")


main = functools.partial(launch.main, "tracking_leakage", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
