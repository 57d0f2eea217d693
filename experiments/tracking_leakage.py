"""What an attacker learns of one agent's gradients: Table 4 of the gradient tracking paper.

Three agents in a complete network, one number each, the data drawn anew in every trial: with fixed
data the gradient is a function of a message that the attacker sees, and the truth is 1 at every
budget. The value is the mutual information of agent 1's gradient and of what the attacker has, by
Kraskov's estimator over trials, over what that estimator gives for a variable and itself; its
maximum over rounds is judged beside the same for trials that were dealt anew (the null). It is an
estimate of what these coordinates tell one at a time, no bound on what an attacker can learn. Where
the attacker can solve for the gradient, up to noise or unknown weights, the solution alone is
judged too, "guess": one coordinate, which no other hides.

The paper has no law of the data. What the first round of tracking tells of a normal gradient is
known without trials: it is seen through Laplace noise. The spread that the paper's values would
need is printed beside them.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from _common import launch, looks, tables
from dpjax.algorithms.random_weights import CorrelatedRandomness, Encrypted
from dpjax.algorithms.tracking import Tracking
from dpjax.contrib import fusion, leakage
from dpjax.contrib.trace import Passed, trace
from dpjax.learning import samplers
from dpjax.mechanism import laplace
from dpjax.plans import plan, protect
from dpjax.plans.optimizers import Sgd
from dpjax.plans.scheduled import ScheduledLaplace
from dpjax.results import plots

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
        spread: Deviation of gradients: matrices are 1, and measurements normal around 0 with half
            of it. None has M ~ U[0, 10] and measurements of one vector.
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
    spread: float | None = None
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
    minimum = {"trials": 5, "rounds": 4, "until": 0, "permutations": 0}
    launch.check(config, minimum, each={"epsilon": _EACH})
    for pair in zip(config.q1, config.q2, strict=True):
        laplace.decays(*pair)
    if config.trials < config.k + 2:
        raise ValueError(f"trials is {config.trials} for k = {config.k}; give k + 2 at least")


class View(NamedTuple):
    """Gradients [N, R], what an attacker sees of them [N, R, d], and its guess [N, R] if any."""

    private: np.ndarray
    seen: np.ndarray
    guess: np.ndarray | None = None


@functools.lru_cache(maxsize=1)
def drawn(
    kind: Literal["redrawn", "fixed"], spread: float | None, trials: int
) -> tuple[fusion.Fusion, ...]:
    """The costs of every trial."""

    def one(seed: int) -> fusion.Fusion:
        if spread is None:
            return fusion.make(AGENTS, seed, 1, 1)
        values = spread / 2 * np.random.default_rng(seed).standard_normal((AGENTS, 1))
        return fusion.costs_of(np.ones((AGENTS, 1, 1)), values, 0.01, np.zeros(1))

    return (one(0),) * trials if kind == "fixed" else tuple(one(seed) for seed in range(trials))


def problems(config: Config) -> list[Any]:
    """One problem a trial, in float64: late rounds divide by steps that float32 rounds away."""
    costs = drawn(config.data, config.spread, config.trials)
    return [fusion.problem(cost, dtype="float64") for cost in costs]


def gradients(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """[N] slope and constant of agent 1's gradient in every trial."""
    costs = drawn(config.data, config.spread, config.trials)
    return (
        np.array([cost.hessians[0, 0, 0] for cost in costs]),
        np.array([item.linear[0, 0] for item in costs]),
    )


def marked(config: Config, rounds: int) -> np.ndarray:
    """Rounds at which the estimate is taken, from 0."""
    spread = np.geomspace(1, rounds, config.marks).round().astype(int) - 1
    return np.unique(np.concatenate([np.arange(min(20, rounds)), spread]))


def config_of(config: Config, name: str, index: int = 0) -> plan.Config:
    """The config of a method; of tracking at the budget of this number."""
    options: dict[str, Any] = {
        "protect": protect.Protect("replace_agent", norm="l1", gradient_gap=config.gradient_gap),
        "sampler": samplers.Random(1), "rounds": config.rounds, "optimizer": Sgd(config.step),
    }  # fmt: skip
    if name == "correlated_randomness":
        return plan.Config(
            **options | {"method": CorrelatedRandomness(config.until), "rounds": 2 * config.rounds}
        )
    if name == "encrypted":
        return plan.Config(method=Encrypted(), **options)
    gamma, beta, q1, q2 = (getattr(config, key)[index] for key in _EACH)
    options |= {
        "method": Tracking(beta),
        "noise": ScheduledLaplace(q2),
        "optimizer": Sgd(gamma, decay=q1),
    }
    return plan.Config(**options, budget=protect.Budget(config.epsilon[index], accountant="pure"))


def of_tracking(passed: Passed) -> tuple[Any, ...]:
    """Message, tracker and mean of agent 1, before and after a round."""
    mean = passed.message.mean(axis=0)
    return passed.message[0, 0], passed.after.memory.tracked[0, 0], mean[0]


def tracking(config: Config, index: int) -> dict[str, View]:
    """Agent 1's gradient and what all attackers have of it, (44) with the message that it needs."""
    argument = config_of(config, "tracking", index)
    gamma = config.gamma[index]
    q1 = config.q1[index]
    with jax.enable_x64(True):
        read = trace(
            plan.make(argument, MATRIX),
            problems(config),
            seeds=range(config.trials),
            read=of_tracking,
        )
    z, y, mean = (np.asarray(part, np.float64) for part in read)
    slope, constant = gradients(config)
    private = slope[:, None] * z - constant[:, None]
    # What is left of the next message once all that is known is taken off it.
    steps = gamma * q1 ** np.arange(config.rounds - 1)
    solved = (mean[:, :-1] - z[:, 1:]) / steps - y[:, :-1]
    observed = np.stack([z[:, :-1], y[:, :-1], solved], axis=-1)
    # Every message is broadcast: colluding neighbours and an outsider have the same.
    return {"both": View(private[:, :-1], observed, solved)}


def of_correlated(passed: Passed) -> tuple[Any, ...]:
    """Agent 1's model, what it sends to agents 2 and 3, and the sum of what they send to it."""
    sent = passed.private[..., 0]
    return passed.before.models[0, 0], sent[0, 1], sent[0, 2], sent[1, 0] + sent[2, 0]


def correlated(config: Config) -> dict[str, View]:
    """Agent 1's gradient; what agent 2 gets of it, agent 3 honest, and what the links show."""
    argument = config_of(config, "correlated_randomness")
    with jax.enable_x64(True):
        read = trace(
            plan.make(argument, MATRIX), problems(config), seeds=range(config.trials),
            read=of_correlated,
        )  # fmt: skip
    x, to_second, to_third, got = (np.asarray(part, np.float64) for part in read)
    slope, constant = gradients(config)
    private = slope[:, None] * x[:, 0::2] - constant[:, None]
    # Even rounds carry the moved model (x - Lam y) / 3, odd ones shares of the tracker.
    moved = AGENTS * to_second[:, 0::2]
    share = to_second[:, 1::2]
    other = to_third[:, 1::2]
    # The paper's set, which gives the model and the step apart.
    insider = np.stack([x[:, 0::2], x[:, 0::2] - moved, share], axis=-1)
    # Whoever sees all links sees both shares; what agent 1 keeps for itself is the rest of them.
    outsider = np.stack([x[:, 0::2], x[:, 0::2] - moved, share, other], axis=-1)
    # Columns of weights sum to 1: y - grad grows by what came in less what went out, known. And y
    # is a difference of models over the step, exactly so once steps are as they are.
    grown = np.cumsum(got[:, 1::2] - share - other, axis=1)
    reference = np.concatenate([np.zeros_like(grown[:, :1]), grown[:, :-1]], axis=1)
    guess = (x[:, 0::2] - moved) / config.step - reference
    return {"insiders": View(private, insider), "outsider": View(private, outsider, guess)}


def of_encrypted(passed: Passed) -> tuple[Any, ...]:
    """Agent 1's model, and the pulls between it and the others."""
    model = passed.private.model
    weights = passed.private.weights
    product = weights[0] * weights[:, 0]
    return model[0, 0], (product * (model[:, 0] - model[0, 0])).sum()


def encrypted(config: Config) -> dict[str, View]:
    """Agent 1's gradient, and what colluding neighbours have of it: their pulls, over the step."""
    argument = config_of(config, "encrypted")
    with jax.enable_x64(True):
        read = trace(
            plan.make(argument, MATRIX), problems(config), seeds=range(config.trials),
            read=of_encrypted,
        )  # fmt: skip
    x, pulls = (np.asarray(part, np.float64) for part in read)
    slope, constant = gradients(config)
    private = slope[:, None] * x - constant[:, None]
    return {"insiders": View(private, pulls[:, :, None] / config.step)}


def accuracy(
    config: Config, name: str, index: int, lab: launch.Lab, folder: Path
) -> list[dict[str, Any]]:
    """Table 4's accuracy: |x_i - x*|^2 after the last round, summed over agents, over trials."""
    argument = config_of(config, name, index)
    with jax.enable_x64(True):
        result = lab.run(
            plan.make(argument, MATRIX), problems(config), seeds=range(config.trials),
            eval_every=argument.rounds, checkpoint=folder,
        )  # fmt: skip
    left = np.asarray(result.metrics["residual"][-1, :, 0], np.float64)
    epsilon = config.epsilon[index] if name == "tracking" else None
    row = {"algorithm": name, "setting": epsilon, "data": config.data, "trials": config.trials}
    quantiles = zip(("lower", "median", "upper"), np.quantile(left, (0.25, 0.5, 0.75)), strict=True)
    return [row | {"kind": "accuracy", "residual": left.mean()} | dict(quantiles)]


def rows_of(config: Config, name: str, epsilon: float | None, result: Any) -> list[dict[str, Any]]:
    """M-NMI under both conventions of the normaliser, by coordinates."""
    rows = []
    for attacker, view in result.items():
        position = marked(config, view.private.shape[1])
        x = view.private[:, position].T[:, :, None]
        y = np.moveaxis(view.seen[:, position], 1, 0)
        ways: dict[str, Any] = {"raw": (y, "raw"), "standardised": (y, "standardised")}
        if view.guess is not None:
            ways["guess"] = view.guess[:, position].T[:, :, None], "standardised"
        for coordinates, (observed, scaled) in ways.items():
            outcome = leakage.normalised(
                x, observed, config.k, coordinates=scaled, jitter="ties", seed=config.seed,
                permutations=config.permutations,
            )  # fmt: skip
            maximum = float(outcome.information.max())
            pair = {
                kind: maximum / leakage.normaliser(config.trials, config.k, kind) for kind in _KINDS
            }
            row = {
                "algorithm": name, "setting": epsilon, "attacker": attacker, "data": config.data,
                "spread": config.spread,
                "coordinates": coordinates, "trials": config.trials, "k": config.k,
                "at": int(position[outcome.round]) + 1, "information": maximum,
                "m_nmi": pair["exact"],
                "m_nmi_jittered": pair["jittered"], "paper": PAPER.get((name, epsilon, attacker)),
            }  # fmt: skip
            null = outcome.null
            if null is not None:
                row |= {"null": null.maximum_mean, "p_value": null.p_value}
            rows += [
                row | {"round": int(item) + 1, "value": float(outcome.rounds[place])}
                for place, item in enumerate(position)
            ]
    return rows


def told(spread: float, scale: float) -> float:
    """Nats that a normal number tells through Laplace noise, by quadrature.

    With G of deviation s and L of scale b, exp(-|t| / b) / 2b, it is h(G + L) - h(L), where
    h(L) = 1 + log 2b and the density of G + L is

        exp(s^2 / 2b^2) (e^(y/b) Phi(-y/s - s/b) + e^(-y/b) Phi(y/s - s/b)) / 2b.
    """
    from scipy import special

    ratio = spread / scale
    position = np.linspace(0, 12 * ratio + 40, 20_001)
    sides = [
        side * position + special.log_ndtr(-side * position / ratio - ratio) for side in (1, -1)
    ]
    log_density = ratio**2 / 2 + np.logaddexp(*sides) - np.log(2)
    return float(-2 * np.trapezoid(np.exp(log_density) * log_density, position) - 1 - np.log(2))


def first_rounds(config: Config) -> list[dict[str, Any]]:
    """Which spread of normal gradients gives the paper's values of tracking in the first round."""
    from scipy import optimize

    complete = leakage.normaliser(5000, 3, "jittered")  # The paper's trials, and its tool.
    rows = []
    for place, epsilon in enumerate(config.epsilon):
        if ("tracking", epsilon, "both") not in PAPER:
            continue
        gamma, q1, q2 = (getattr(config, name)[place] for name in ("gamma", "q1", "q2"))
        # The gradient is hidden by the next message's noise over the step.
        scale = laplace.first_scale(epsilon, config.gradient_gap, gamma, q1, q2) * q2 / gamma
        value = PAPER["tracking", epsilon, "both"]
        ratio = optimize.brentq(lambda r: told(r, 1.0) - value * complete, 1e-3, 1e6)  # noqa: B023
        rows.append(
            {"epsilon": epsilon, "noise": scale, "paper": value, "spread for it": ratio * scale}
        )

    def missed(log_spread: float) -> float:
        results = (told(np.exp(log_spread), row["noise"]) / complete - row["paper"] for row in rows)
        return max(map(abs, results))

    if rows:
        needed = [np.log(row["spread for it"]) for row in rows]
        among = np.linspace(min(needed), max(needed), 101)
        best = float(np.exp(min(among, key=missed)))
        for row in rows:
            row[f"at {best:.3g}"] = told(best, row["noise"]) / complete
    return rows


def experiment(config: Config, lab: launch.Lab) -> None:
    """Mutual information of gradients and messages, for three ways of hiding them."""
    check(config)

    def cell(name: str, epsilon: float | None, compute: Any) -> Any:
        def run(folder: Path) -> list[dict[str, Any]]:
            del folder
            return rows_of(config, name, epsilon, compute())

        return run

    law = config.data if config.spread is None else f"{config.data}_{config.spread:g}"
    cells: list[Any] = []
    swept = ("epsilon", "gamma", "beta", "q1", "q2")
    for index, epsilon in enumerate(config.epsilon):
        own = {name: getattr(config, name)[index] for name in swept}
        stored = launch.stored(config, "step", "until", **own)
        compute = functools.partial(tracking, config, index)
        cells.append((f"{law}_tracking_{epsilon:g}", stored, cell("tracking", epsilon, compute)))
    for name, method in (("correlated_randomness", correlated), ("encrypted", encrypted)):
        stored = launch.stored(config, *swept)
        compute = functools.partial(method, config)
        cells.append((f"{law}_{name}", stored, cell(name, None, compute)))
    frame = lab.cells(cells, seed=range(config.trials))
    ways = [("tracking", index) for index in range(len(config.epsilon))]
    ways += [("correlated_randomness", 0), ("encrypted", 0)]
    shared = ("trials", "rounds", "data", "spread", "gradient_gap")
    ends = []
    for name, index in ways:
        own = {"step": config.step, "until": config.until}
        suffix = ""
        if name == "tracking":
            own = {key: getattr(config, key)[index] for key in swept}
            suffix = f"_{config.epsilon[index]:g}"
        stored = {key: getattr(config, key) for key in shared} | {"method": name} | own
        compute = functools.partial(accuracy, config, name, index, lab)
        ends.append((f"{law}_accuracy_{name}{suffix}", stored, compute))
    left = lab.cells(ends, seed=range(config.trials))
    lab.say(f"\nsquared error of all agents after {config.rounds} rounds")
    lab.say(tables.text(left.drop(columns=["experiment", "kind"]).to_dict("records")))
    report(config, lab, frame)


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """The table, and the estimate over rounds."""
    lab.say(f"\nM-NMI over {config.rounds} rounds, {config.trials} trials, k = {config.k}")
    keys = ["algorithm", "setting", "attacker", "coordinates"]
    once = frame.drop_duplicates(keys)
    display = [*keys, "at", "m_nmi", "m_nmi_jittered", "null", "p_value", "paper"]
    lab.say(tables.text(once[[name for name in display if name in once]].to_dict("records")))
    lab.say("\nthe first round, if gradients were normal: the spread that gives the paper's value")
    lab.say(tables.text(first_rounds(config)))
    lines = dict(zip(config.epsilon, ("-", "--", ":", "-."), strict=False))
    title = looks.look("tracking").label
    display = {
        f"tracking, {epsilon:g}": looks.look("tracking", f"{title}, epsilon {epsilon:g}", line)
        for epsilon, line in lines.items()
    }
    figure, panels = plots.figure(1, 2)
    for ax, coordinates in zip(panels, ("raw", "standardised"), strict=True):
        mine = frame[
            (frame["coordinates"] == coordinates) & frame["attacker"].isin(["both", "insiders"])
        ]
        names = mine["algorithm"] + mine["setting"].map(
            lambda e: "" if e is None or e != e else f", {e:g}"
        )
        plots.lines(
            mine.assign(algorithm=names), "round", "value", "algorithm", ax=ax, xlabel="round",
            log_x=True, ylabel="normalised mutual information", title=f"{coordinates} coordinates",
            looks=looks.LOOKS | display,
        )  # fmt: skip
    note = f"An estimate from {config.trials:,} trials, no bound."
    lab.figure(figure, "tracking_leakage.svg", note=note)


main = functools.partial(launch.main, "tracking_leakage", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
