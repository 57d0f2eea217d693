"""Two-dimensional quadratics over a network: Fig. 2 of the Whisper paper.

Agent i of n holds f_i(x) = 15 (x1 +- i)^2 + x2^2, the second half rotated by 15 degrees about its
own minimiser. Clipping at 0.1 bounds how far anyone moves (0.14 in 5,000 rounds at eta_1 = 0.01),
so the start and the first step size decide what is seen. The paper does not state its start, and
the authors' code has no quadratics. Both are options; the presets show two of each. Preset cpu has
the paper's sizes, full has more seeds. Designs differ more between graphs than between seeds, so
preset graphs has 150 graphs for each edge probability, and a seed of its own for each of them.
"""

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from _common import claims, launch, tables, tune
from dpjax.contrib import coupling
from dpjax.learning import samplers
from dpjax.learning.quadratics import quadratics
from dpjax.plans import noise, optimizers, plan, protect
from dpjax.results import plots
from dpjax.topology import graphs, mixing

__all__ = ["PRESETS", "Config", "experiment", "main"]


DESIGNS = ("non_private", "independent", "pairwise", "whisper", "whisper_horizon")
"""Designs over agents."""


@dataclass(frozen=True)
class Config:
    """Which budgets, graphs and steps.

    Attributes:
        agents: Number of agents.
        epsilon: Budgets; each is run at ``probability[0]``.
        probability: Edge probabilities of the random graph; each is run at ``at_epsilon``.
        at_epsilon: The budget of the sweep over edge probabilities.
        delta: Target delta.
        budgets: How the noise follows from the budget: gdp (exact), rdp, paper.
        designs: Noise designs.
        first_steps: First step sizes eta_1 of eta_1 / sqrt(t); each is reported, none is tuned.
        starts: Where all agents start: the origin, the minimiser of the average objective, or both.
        rounds: Rounds.
        clip_norm: Clip norm.
        seeds: Seeds.
        graph_seed: First seed tried for a connected graph.
        graphs: Number of graphs for each edge probability; each has ``seeds`` of its own.
        measurements: How often a run is measured.
    """

    agents: int = 20
    epsilon: tuple[float, ...] = (3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0)
    probability: tuple[float, ...] = (0.5, 0.2, 0.4, 0.6, 0.8, 1.0)
    at_epsilon: float = 10.0
    delta: float = 1e-5
    budgets: tuple[Literal["gdp", "rdp", "paper"], ...] = ("gdp",)
    designs: tuple[str, ...] = DESIGNS
    first_steps: tuple[float, ...] = (0.01, 1.0)
    starts: tuple[Literal["origin", "optimum"], ...] = ("optimum", "origin")
    rounds: int = 5000
    clip_norm: float = 0.1
    seeds: tuple[int, ...] = tuple(range(10))
    graph_seed: int = 0
    graphs: int = 1
    measurements: int = 10


PRESETS = {
    "tiny": Config(
        agents=6, epsilon=(3.0, 10.0), probability=(0.5, 1.0), rounds=40, seeds=(0, 1),
        first_steps=(1.0,), measurements=2,
    ),
    "cpu": Config(measurements=2),
    "graphs": Config(
        epsilon=(10.0, 3.0, 30.0), probability=(0.5, 0.2, 0.4, 0.6, 0.8), graphs=150, seeds=(0,),
        designs=("independent", "pairwise", "whisper"), measurements=1,
    ),
    "full": Config(seeds=tuple(range(50)), measurements=50),
}  # fmt: skip


def sweep(
    config: Config, start: str, probability: float, epsilons: tuple[float, ...], budget: str,
    lab: launch.Lab, folder: Path,
) -> list[dict[str, Any]]:  # fmt: skip
    """All designs, budgets and steps on each graph, in a vmapped run each."""
    rows = []
    for part, place in launch.on_graphs(config, folder):
        for row in on_graph(part, start, probability, epsilons, budget, lab, place):
            rows.append({**row, "graph_seed": part.graph_seed})
    return rows


def on_graph(
    config: Config, start: str, probability: float, epsilons: tuple[float, ...], budget: str,
    lab: launch.Lab, folder: Path,
) -> list[dict[str, Any]]:  # fmt: skip
    """All designs, budgets and steps on one graph."""
    graph = graphs.erdos_renyi(config.agents, probability, config.graph_seed)
    matrix = mixing.metropolis_hastings(graph)
    plans = []
    epsilon_of = []
    for design in config.designs:
        # Without noise the budget does not matter: one run serves them all.
        for epsilon in epsilons if design != "non_private" else epsilons[:1]:
            base = plan.Config(
                noise=noise.Independent(),
                budget=protect.Budget(epsilon, config.delta, accountant=budget),
                protect=protect.Protect("replace_agent", clip_norm=config.clip_norm),
                sampler=samplers.Random(1),
                optimizer=optimizers.Sgd(config.first_steps[0], decay="sqrt"),
                rounds=config.rounds,
            )
            selection = base.using(noise.named(design))
            outcome = tune.grid(selection, config.first_steps, matrix)
            plans += outcome
            epsilon_of += [epsilon] * len(outcome)
    result = lab.run(
        plans,
        quadratics(config.agents, start=start),
        seeds=config.seeds,
        eval_every=math.ceil(config.rounds / config.measurements),
        checkpoint=folder,
    )
    lab.say(f"  {result.rounds_per_second:,.0f} rounds/s")
    rows = []
    per_plan = len(config.seeds) * len(result.rounds)
    for number, row in enumerate(result.rows(graph=f"er:{config.agents}:{probability:g}")):
        design = row["design"]
        position = epsilon_of[number // per_plan]
        for epsilon in epsilons if design == "non_private" else (position,):
            rows.append({**row, "probability": probability, "budget_epsilon": epsilon})
    return [{**row, "budget_name": budget, "start": start} for row in rows]


def experiment(config: Config, lab: launch.Lab) -> None:
    """Decentralized optimisation of quadratics under several noise designs at equal guarantee."""
    points = [
        (start, budget, probability, config.epsilon if number == 0 else (config.at_epsilon,))
        for start in config.starts
        for budget in config.budgets
        for number, probability in enumerate(config.probability)
    ]
    cells = []
    for start, budget, probability, epsilons in points:
        stored = dataclasses.asdict(config)
        stored |= {"epsilon": epsilons, "probability": probability, "budgets": budget}
        stored |= {"starts": start}
        stored.pop("at_epsilon")
        compute = functools.partial(sweep, config, start, probability, epsilons, budget, lab)
        prefix = "graphs_" if config.graphs > 1 else ""
        cells.append((f"{prefix}{start}_{budget}_{probability:g}", stored, compute))
    frame = lab.cells(cells, seed=config.seeds)
    for start in config.starts:
        report(config, lab, start, frame[frame["start"] == start])


def report(config: Config, lab: launch.Lab, start: str, frame: Any) -> None:
    """Tables for every budget, and a figure with a row of panels for each first step."""
    last = frame[frame["round"] == config.rounds]
    for budget in config.budgets:
        rows = last[last["budget_name"] == budget]
        keys = ["step_size", "probability", "budget_epsilon"]
        for (step, probability, epsilon), group in rows.groupby(keys, sort=False):
            if epsilon != config.at_epsilon and probability != config.probability[0]:
                continue
            lab.say(
                f"\nquadratics from the {start}: budget {budget}, epsilon {epsilon:g}, edge "
                f"probability {probability:g}, first step {step:g}"
            )
            gap = tables.summary(group, "design", "optimality_gap")
            gap = gap.rename(columns={"mean": "optimality_gap"})
            gap["mean_gap"] = tables.summary(group, "design", "mean_gap")["mean"]
            lab.say(tables.text(gap))
    display = last[last["budget_name"] == config.budgets[0]]
    if config.graphs > 1:
        lab.say(f"\nleads from the {start}, paired over {config.graphs} graphs")
        lab.say(tables.text(leads(config, display)))
    steps = config.first_steps
    figure, panels = plots.figure(len(steps), 2)
    for row, step in enumerate(steps):
        mine = display[display["step_size"].round(9) == round(step, 9)]
        against = (
            ("budget_epsilon", mine[mine["probability"] == config.probability[0]], "epsilon"),
            ("probability", mine[mine["budget_epsilon"] == config.at_epsilon], "edge probability"),
        )
        for column, (x, rows, label) in enumerate(against):
            plots.lines(
                rows,
                x,
                "optimality_gap",
                ax=panels[2 * row + column],
                xlabel=label,
                ylabel="optimality gap",
                title=f"first step size {step:g}",
            )
    note = f"All agents start at the {start}; the step is eta_1 / sqrt(t)."
    mark = "_graphs" if config.graphs > 1 else ""
    if config.graphs > 1:
        note += f" Means over {config.graphs} graphs."
    elif "pairwise" in config.designs:
        graph = (config.agents, config.probability[0], config.rounds, config.graph_seed)
        note += f" {coupling.remark(*graph)}"
    lab.figure(figure, f"whisper_quadratic_{start}{mark}.svg", note=note)


def leads(config: Config, frame: Any) -> list[dict[str, Any]]:
    """How far each design ends below each earlier one, on the same graphs and seeds."""
    correlated = [name for name in config.designs if name != "non_private"]
    keys = ["step_size", "probability", "budget_epsilon"]
    rows = []
    for place, group in frame.assign(lead=-frame["optimality_gap"]).groupby(keys, sort=False):
        for worse, better in itertools.combinations(correlated, 2):
            row = dict(zip(keys, place, strict=True))
            row |= claims.part(group, better, worse, "lead", of=f"{better} below {worse}",
                               column="design")  # fmt: skip
            gaps = group.groupby("design")["optimality_gap"].mean()
            rows.append(row | {"times below": gaps[worse] / gaps[better]})
    return rows


main = functools.partial(launch.main, "whisper_quadratic", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
