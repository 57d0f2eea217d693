"""Gradient tracking under pure DP on sensor fusion: Figs. 2-5 of the gradient tracking paper.

A hundred sensors measure one vector, each through a matrix of its own, and agree on it over a
random graph. Tracking and DPOP are compared at equal epsilon; PP-DOAGT and Diff-TV-AB, of which no
calibration was published, get the very noise of tracking, and their cost by this package's account
stands beside. All is in float64: while steps are large, models swing far before they settle, and
float32 would leave its rounding of that. The presets cpu and full have the paper's sizes, on data
of our own: the data's law is not in the paper, and is an option.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from _common import launch, looks, tables, tune
from dpjax.algorithms.pairs import PPDOAGT, DiffTVAB
from dpjax.algorithms.tracking import DPOP, Tracking
from dpjax.contrib import fusion, traffic
from dpjax.learning import samplers
from dpjax.mechanism import laplace
from dpjax.plans import plan, protect, scheduled
from dpjax.plans.optimizers import Sgd
from dpjax.results import plots
from dpjax.topology import graphs, mixing

__all__ = ["PRESETS", "Config", "experiment", "main"]

METHODS = ("tracking", "dpop", "pp_doagt", "diff_tv_ab")
TITLES = {
    "tracking": "tracking", "dpop": "DPOP", "pp_doagt": "PP-DOAGT", "diff_tv_ab": "Diff-TV-AB",
}  # fmt: skip
NOTE = (
    "DPOP, PP-DOAGT and Diff-TV-AB are reconstructions: no code is public. The last two have "
    "tracking's noise, whatever it costs them."
)


@dataclass(frozen=True)
class Config:
    """Network, data, schedules.

    Attributes:
        agents: Sensors n.
        probability: Edge probability of the random graph.
        graph_seed: First seed tried for a connected one.
        data_seed: Of matrices and measurements.
        measurements: Measurements m of a sensor.
        dimension: Entries p of what is measured.
        low: Least entry of a matrix.
        high: Largest.
        noise: Standard deviation of a measurement's error.
        omega: Weight of |x|^2.
        gradient_gap: How far gradients of neighbours are assumed to be apart in L1; the paper has
            no value.
        epsilon: Budgets; gamma, beta, q1 and q2 have one entry for each.
        gamma: First step sizes.
        beta: Weights of disagreement.
        q1: Decays of the steps.
        q2: Decays of the noise.
        methods: Which methods.
        rounds: Rounds.
        trials: Runs of each method at each budget: noise and starting points differ. With 0
            only when runs stop is asked.
        marks: How often they are measured.
        factors: First step sizes tried for every method, by the printed one: 1 is shown as
            "printed", and the best of all, by its mean residual on other seeds, as "tuned".
        tuning_trials: Runs that choose.
        below: Residual at which Fig. 5 stops.
        timed: Runs that are measured after every round for it.
        turns: How often the methods' rounds are timed in turns, at the printed steps; in place of
            all else where it is not 0.
        optimal: Of tracking, steps and noise chosen together for the last models' error: "smooth"
            steps, and "pulses", a few long ones with averaging between.
    """

    agents: int = 100
    probability: float = 0.1
    graph_seed: int = 0
    data_seed: int = 2
    measurements: int = 3
    dimension: int = 2
    low: float = 0.0
    high: float = 10.0
    noise: float = 1.0
    omega: float = 0.01
    gradient_gap: float = 1.0
    epsilon: tuple[float, ...] = (10.0, 1.0, 0.1)
    gamma: tuple[float, ...] = (0.002, 0.001, 0.001)
    beta: tuple[float, ...] = (100.0, 1000.0, 1000.0)
    q1: tuple[float, ...] = (0.97, 0.97, 0.92)
    q2: tuple[float, ...] = (0.99, 0.99, 0.99)
    methods: tuple[str, ...] = METHODS
    rounds: int = 1000
    trials: int = 1000
    marks: int = 50
    factors: tuple[float, ...] = (4.0, 2.0, 1.0, 0.5)
    tuning_trials: int = 20
    below: float = 0.01
    timed: int = 100
    turns: int = 0
    optimal: tuple[Literal["smooth", "pulses"], ...] = ("smooth", "pulses")


PRESETS = {
    "tiny": Config(
        agents=8, probability=0.5, epsilon=(10.0,), gamma=(0.002,), beta=(100.0,), q1=(0.97,),
        q2=(0.99,), rounds=40, trials=6, marks=4, timed=3, factors=(1.0, 0.25), tuning_trials=2,
        optimal=(),
        methods=("tracking", "pp_doagt"),
    ),
    "cpu": Config(),
    # Few runs arrive at the printed steps, so that medians of those that do need many.
    "stops": Config(
        epsilon=(10.0,), gamma=(0.002,), beta=(100.0,), q1=(0.97,), q2=(0.99,), trials=0,
        methods=("tracking", "dpop"), timed=2000, optimal=(),
    ),
    "turns": Config(
        epsilon=(10.0,), gamma=(0.002,), beta=(100.0,), q1=(0.97,), q2=(0.99,), trials=0,
        methods=("tracking", "dpop"), turns=200, optimal=(),
    ),
    "full": Config(),
}  # fmt: skip


def check(config: Config) -> None:
    """Refuse options that no run could use, before any work."""
    launch.check(
        config, {"rounds": 2, "trials": 0, "turns": 0, "agents": 2}, known={"methods": METHODS},
        empty=("optimal",), free=("low", "high", "noise", "omega"), each={"epsilon": _EACH},
    )  # fmt: skip
    for pair in zip(config.q1, config.q2, strict=True):
        laplace.decays(*pair)
    if 1.0 not in config.factors:
        raise ValueError(f"factors is {config.factors}; give 1 among them, the printed steps")


def data_of(config: Config) -> fusion.Fusion:
    """The measurements, the same for all budgets."""
    return fusion.make(
        config.agents, config.data_seed, config.measurements, config.dimension, config.noise,
        config.omega, config.low, config.high,
    )  # fmt: skip


def smoothness_of(costs: fusion.Fusion) -> float:
    """How far an agent's gradients at two models are apart at most, over these, both in L1."""
    return float(np.abs(costs.hessians).sum(axis=1).max())


class Setting:
    """One budget: its data, its network and the plan of each method."""

    def __init__(self, config: Config, index: int):
        self.config = config
        self.epsilon = config.epsilon[index]
        self.gamma, self.beta, self.q1, self.q2 = (
            getattr(config, name)[index] for name in ("gamma", "beta", "q1", "q2")
        )
        graph = graphs.erdos_renyi(config.agents, config.probability, config.graph_seed)
        self.matrix = mixing.metropolis_hastings(graph)
        self.data = data_of(config)
        self.problem = fusion.problem(self.data, dtype="float64")

    def made(self, method: str, factor: float) -> plan.Plan:
        """The plan of a method, its first step the printed one times a factor."""
        if method in ("tracking", "dpop"):
            return plan.make(self.config_of(method, self.epsilon, factor), self.matrix)
        # The noise of tracking at its printed steps, whatever it costs.
        first = float(self.made("tracking", 1.0).noise.scales[0])
        bare = self.config_of(method, 1.0, factor)
        spent = scheduled.cost(bare, self.matrix, first)
        return plan.make(self.config_of(method, spent, factor), self.matrix)

    def config_of(self, method: str, epsilon: float, factor: float) -> plan.Config:
        """The config of a method at a budget."""
        result = {
            "tracking": Tracking(self.beta), "dpop": DPOP(), "pp_doagt": PPDOAGT(),
            "diff_tv_ab": DiffTVAB(),
        }[method]  # fmt: skip
        # These two ask for gradients at models that nobody else knows.
        smoothness = smoothness_of(self.data) if method in ("pp_doagt", "diff_tv_ab") else None
        return plan.Config(
            method=result,
            noise=scheduled.ScheduledLaplace(self.q2),
            budget=protect.Budget(epsilon, accountant="pure"),
            protect=protect.Protect(
                "replace_agent", norm="l1", gradient_gap=self.config.gradient_gap,
                smoothness=smoothness,
            ),
            sampler=samplers.Random(1),
            optimizer=Sgd(factor * self.gamma, decay=self.q1),
            rounds=self.config.rounds,
        )  # fmt: skip

    def optimal(self, shape: Any) -> tuple[plan.Plan, Any]:
        """The plan of tracking whose steps and noise were chosen together; its predicted error."""
        parts = fusion.optimal_parts(
            self.data, self.matrix, epsilon=self.epsilon, gradient_gap=self.config.gradient_gap,
            rounds=self.config.rounds, shape=shape, iterations=60,
        )  # fmt: skip
        argument = dataclasses.replace(
            self.config_of("tracking", self.epsilon, 1.0), method=parts.method, noise=parts.noise,
            optimizer=parts.optimizer,
        )  # fmt: skip
        return plan.make(argument, self.matrix), parts.predicted

    def columns(self, method: str, steps: str, training_plan: plan.Plan) -> dict[str, Any]:
        """What every row of a method at this budget says."""
        return {
            "algorithm": method, "steps": steps, "setting": self.epsilon,
            "gamma": training_plan.config.optimizer.first, "gradient_gap": self.config.gradient_gap,
        }  # fmt: skip


def variants(
    config: Config, setting: Setting, method: str, lab: launch.Lab
) -> dict[str, plan.Plan]:
    """The plan with the printed steps, and the best of those whose steps are scaled."""
    plans = {factor: setting.made(method, factor) for factor in config.factors}

    def scaled(factors: tuple[float, ...], count: int) -> list[plan.Plan]:
        del count  # Sensors have no training records.
        return [plans[factor] for factor in factors]

    best = tune.search(
        [tune.Trial(method, config.factors, scaled)], setting.problem,
        tuning_seeds=range(_TUNING, _TUNING + config.tuning_trials), metric="residual",
        runner=lab.run,
    )  # fmt: skip
    return {"printed": plans[1.0], "tuned": plans[best.step_size]}


def curves(config: Config, index: int, method: str, lab: launch.Lab, folder: Path) -> list[Any]:
    """Mean, spread and median of the residual over trials, by round."""
    setting = Setting(config, index)
    rows = []
    interval = max(1, config.rounds // config.marks)
    display = variants(config, setting, method, lab)
    predicted = {}
    for shape in config.optimal if method == "tracking" else ():
        display[shape], error = setting.optimal(shape)
        predicted[shape] = {"predicted": error.total, "predicted_bias": error.bias}
    for steps, outcome in display.items():
        result = lab.run(
            outcome, setting.problem, seeds=range(config.trials), eval_every=interval,
            checkpoint=folder / steps,
        )  # fmt: skip
        for mark, rounds in enumerate(result.rounds):
            row = {"round": int(rounds), "trials": config.trials}
            for name in ("residual", "mean_residual", "consensus"):
                values = result.metrics[name][mark, :, 0].astype(np.float64)
                row |= {name: values.mean(), f"{name}_std": values.std(ddof=1)}
                row[f"{name}_median"] = np.median(values)
            columns = setting.columns(method, steps, outcome) | {"guarantee": _stated(outcome)}
            rows.append(columns | row | predicted.get(steps, {}))
        lab.say(f"  {method}, {steps}: {result.rounds_per_second:,.0f} trials x rounds a second")
    return rows


def stops(config: Config, index: int, method: str, lab: launch.Lab, folder: Path) -> list[Any]:
    """When each of some runs is first below the residual, and what it has sent by then."""
    setting = Setting(config, index)
    rows = []
    for steps, variant in variants(config, setting, method, lab).items():
        result = lab.run(
            variant, setting.problem, seeds=range(config.timed), eval_every=1,
            checkpoint=folder / steps,
        )  # fmt: skip
        # The time of one run alone: seeds side by side share their overhead.
        single = lab.run(variant, setting.problem, seeds=(0,), eval_every=config.rounds // 2)
        sent = traffic.per_round(variant, setting.problem)
        columns = setting.columns(method, steps, variant)
        for norm, name in (("all agents", "residual"), ("an agent", "residual_per_agent")):
            outcome = result.metrics[name][:, :, 0] < config.below
            first = np.where(outcome.any(axis=0), result.rounds[outcome.argmax(axis=0)], -1)
            for seed, rounds in zip(result.seeds, first, strict=True):
                row = {"seed": seed, "norm": norm, "below": config.below}
                row |= {"reached": bool(rounds > 0), "guarantee": _stated(variant)}
                if rounds > 0:
                    row |= {"rounds": int(rounds), "numbers": float(rounds * sent.total)}
                    row["seconds"] = float(rounds / single.rounds_per_second)
                rows.append(columns | row)
    return rows


def round_times(config: Config, index: int, lab: launch.Lab) -> list[dict[str, Any]]:
    """Seconds a round of each method, one after the other, so that all meet the same load."""
    setting = Setting(config, index)
    plans = {method: setting.made(method, 1.0) for method in config.methods}
    rows = []
    # The first turn compiles.
    for turn in range(config.turns + 1):
        # Who comes first may find the processor cooler.
        for method in sorted(plans, reverse=turn % 2 == 1):
            result = lab.run(
                plans[method], setting.problem, seeds=(0,), eval_every=config.rounds // 2
            )
            row = {"turn": turn, "seconds_a_round": 1 / result.rounds_per_second}
            if turn:
                rows.append(setting.columns(method, "printed", plans[method]) | row)
    return rows


def wide(compute: Any, *value: Any) -> list[Any]:
    """A cell's rows, computed in float64."""
    with jax.enable_x64(True):
        return compute(*value)


def experiment(config: Config, lab: launch.Lab) -> None:
    """Residuals of private gradient tracking and its rivals on sensor fusion."""
    check(config)
    if config.turns:
        for index, epsilon in enumerate(config.epsilon):
            own = {name: getattr(config, name)[index] for name in _EACH}
            stored = launch.stored(config, *_ONLY["turns"], epsilon=epsilon, **own)
            compute = functools.partial(wide, round_times, config, index, lab)
            frame = lab.cell(f"turns_{epsilon:g}", stored, lambda folder, make=compute: make())
            report_times(lab, frame)
        return
    frames: dict[str, Any] = {}
    kinds: dict[str, Any] = {"curves": curves, "stops": stops}
    if not config.trials:
        kinds = {f"stops_{config.timed}": stops}
    for kind, compute in kinds.items():
        cells = []
        for index, epsilon in enumerate(config.epsilon):
            for method in config.methods:
                own = {name: getattr(config, name)[index] for name in _EACH}
                stored = launch.stored(
                    config,
                    "methods",
                    *_ONLY[kind.partition("_")[0]],
                    epsilon=epsilon,
                    method=method,
                    **own,
                )
                cell = functools.partial(wide, compute, config, index, method, lab)
                cells.append((f"{kind}_{epsilon:g}_{method}", stored, cell))
        frames[kind] = lab.cells(cells, seed=range(config.trials or config.timed))
    stopped = frames.popitem()[1]
    if config.trials:
        report(config, lab, frames["curves"])
        draw_curves(config, lab, frames["curves"])
        draw_stops(config, lab, stopped[stopped["steps"] == "printed"])
    report_stops(config, lab, stopped)


def _stated(training_plan: plan.Plan) -> dict[str, Any]:
    return training_plan.guarantee.to_dict()


_TUNING = 1_000_000
"""The first seed of those that choose steps."""
_EACH = ("gamma", "beta", "q1", "q2")
_ONLY = {
    "curves": ("below", "timed", "turns"),
    "stops": ("trials", "marks", "turns"),
    "turns": ("trials", "marks", "below", "timed"),
}


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """A table of final residuals."""
    last = frame[frame["round"] == frame["round"].max()]
    lab.say(
        f"\nevery epsilon is of an assumption: gradients of one agent's two data sets are at most "
        f"{config.gradient_gap:g} apart in L1 at every model"
    )
    if {"pp_doagt", "diff_tv_ab"} & set(config.methods):
        lab.say(
            "for PP-DOAGT and Diff-TV-AB also that they are smooth: at two models apart at most "
            f"{smoothness_of(data_of(config)):.4g} times as far as these, both in L1"
        )
    lab.say(f"\nresidual over all agents after {config.rounds} rounds, {config.trials} trials")
    rows = []
    for _, row in last.iterrows():
        display = {name: row[name] for name in ("setting", "steps", "algorithm", "gamma")}
        display |= {"mean": row["residual"], "std": row["residual_std"]}
        display |= {"median": row["residual_median"], "per agent": row["residual"] / config.agents}
        display |= {"consensus": row["consensus"], "epsilon": float(row["guarantee"]["epsilon"])}
        display |= {"predicted": row["predicted"]} if row.get("predicted", 0) > 0 else {}
        rows.append(display)
    lab.say(tables.text(rows))


def report_times(lab: launch.Lab, frame: Any) -> None:
    """A table of the time of a round, and of its ratio to the first method's in the same turn."""
    wide_frame = frame.pivot(index="turn", columns="algorithm", values="seconds_a_round")
    base = wide_frame.columns[0]
    rows = []
    for name in wide_frame.columns:
        ratios = wide_frame[name] / wide_frame[base]
        row = {"algorithm": name, "microseconds a round": 1e6 * wide_frame[name].median()}
        row |= {f"over {base}": ratios.median()}
        row |= {"a quarter below": ratios.quantile(0.25), "above": ratios.quantile(0.75)}
        rows.append(row)
    lab.say(tables.text(rows))


def report_stops(config: Config, lab: launch.Lab, stopped: Any) -> None:
    """A table of when runs stop, and whether two methods differ by more than chance."""
    from scipy import stats

    lab.say(f"\nfirst below {config.below:g}: medians of the runs that ever were")
    rows = []
    keys = ["norm", "setting", "steps", "algorithm"]
    for names, group in stopped.groupby(keys, sort=False):
        reached = group[group["reached"]]
        display = dict(zip(keys, names, strict=True))
        display |= {"epsilon": float(group["guarantee"].iloc[0]["epsilon"])}
        display |= {"runs": len(group), "reached": len(reached)}
        if len(reached):
            display |= {name: reached[name].median() for name in ("rounds", "numbers", "seconds")}
        rows.append(display)
    lab.say(tables.text(rows))
    own = stopped[stopped["reached"]]
    for place, group in own.groupby(["norm", "setting", "steps"], sort=False):
        sent = {name: part["numbers"] for name, part in group.groupby("algorithm")}
        if {"tracking", "dpop"} <= sent.keys():
            chance = stats.mannwhitneyu(sent["tracking"], sent["dpop"]).pvalue
            lab.say(f"{', '.join(map(str, place))}: DPOP sends as many by chance of {chance:.1e}")


def draw_curves(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Residuals over rounds: budgets across, steps down."""
    figure, panels = plots.figure(2, len(config.epsilon))
    places = [(steps, epsilon) for steps in ("printed", "tuned") for epsilon in config.epsilon]
    for ax, (steps, epsilon) in zip(panels, places, strict=True):
        mine = frame[(frame["setting"] == epsilon) & (frame["steps"] == steps)]
        last = mine[mine["round"] == mine["round"].max()]["residual"].max()
        top = min(100 * last, 1.5 * mine["residual"].max())
        ax.set_ylim(0.6 * mine["residual"].min(), top)
        plots.lines(
            mine.rename(columns={"residual": "squared error"}), "round", "squared error",
            "algorithm", ax=ax, xlabel="round", title=f"epsilon = {epsilon:g}, {steps} steps",
            ylabel="residual over all agents", log_y=True, looks=looks.LOOKS,
        )  # fmt: skip
        for name, part in mine.groupby("algorithm", sort=False):
            error = part["residual_std"] / math.sqrt(config.trials)
            low = part["residual"] - error
            high = part["residual"] + error
            color = looks.look(name).color
            ax.fill_between(part["round"], low, high, color=color, alpha=0.18, linewidth=0)
    note = (
        f"Lines are means over {config.trials:,} trials, bands one standard error either way. "
        "Panels end at 100 times their largest last residual; early residuals above are cut off, "
        f"{frame['residual'].max():.0e} at most. {NOTE}"
    )
    lab.figure(figure, "tracking_fusion.svg", note=note)


def draw_stops(config: Config, lab: launch.Lab, stopped: Any) -> None:
    """Time and communication until the residual is small: norms down, budgets along the axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, panels = plots.figure(2, 2, sharex=True)
    columns = (("seconds", "milliseconds", 1e3), ("numbers", "thousands of numbers sent", 1e-3))
    places = [(norm, *display) for norm in ("all agents", "an agent") for display in columns]
    for ax, (norm, column, label, scale) in zip(panels, places, strict=True):
        with plots.style():
            for place, name in enumerate(config.methods):
                look = looks.look(name)
                middles = []
                ends = []
                across = np.arange(len(config.epsilon)) + 0.2 * (place - 1.5)
                for level, epsilon in zip(across, config.epsilon, strict=True):
                    mine = stopped[(stopped["algorithm"] == name) & (stopped["norm"] == norm)]
                    mine = mine[(mine["setting"] == epsilon) & mine["reached"]]
                    low, middle, high = np.full(3, np.nan)
                    if len(mine):
                        low, middle, high = scale * mine[column].quantile([0.25, 0.5, 0.75])
                    middles.append(middle)
                    ends.append((middle - low, high - middle))
                    ax.annotate(
                        f"{len(mine)}", (level, 0.02), xycoords=("data", "axes fraction"),
                        ha="center", fontsize=6.0,
                    )  # fmt: skip
                ax.errorbar(
                    across, middles, np.transpose(ends), label=look.label, color=look.color,
                    marker=look.marker, linestyle="none", capsize=2.5, elinewidth=1.0,
                )  # fmt: skip
            title = "residual over all agents" if norm == "all agents" else "residual per agent"
            ax.set(yscale="log", title=title, ylabel=label)
            ax.set_ylim(ax.get_ylim()[0] / 1.5)
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter(NullFormatter())
            ax.set_xticks(range(len(config.epsilon)), [f"{e:g}" for e in config.epsilon])
    for ax in panels[2:]:
        ax.set_xlabel("epsilon")
    note = (
        f"Until the residual is first below {config.below:g}, at the printed steps: median and "
        f"quartiles of those of {config.timed} runs that ever were, whose number stands below. "
        f"{NOTE}"
    )
    lab.figure(figure, "tracking_fusion_stops.svg", note=note)


main = functools.partial(launch.main, "tracking_fusion", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
