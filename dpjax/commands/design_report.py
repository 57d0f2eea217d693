"""What `dpjax design` says: the forecast, whom the seed betrays, the figures of its noise."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpjax._rounding import up
from dpjax.accounting import budget
from dpjax.accounting.forecast import Forecast
from dpjax.commands import loss_tables
from dpjax.mechanism import spatial
from dpjax.mechanism.design import Design
from dpjax.plans import noise
from dpjax.plans import plan as plan_

__all__: list[str] = []

COMPARED = (
    ("independent", "LDP (independent)"),
    ("pairwise", "DECOR (pairwise)"),
    ("whisper", "Whisper, one step"),
    ("whisper_horizon", "Whisper, horizon"),
    ("central", "CDP (reference only)"),
)
"""Designs that are compared, and their titles."""

FIGURES = {
    "lambda_min": "lambda_min, smallest eigenvalue of R",
    "energy": "energy of one step, tr(W R W')",
    "per_agent_energy": "that per agent, tr(W R W') / n",
    "network_mean_variance": "variance of the network's mean, 1'R1 / n^2",
    "largest_variance": "largest variance of an agent's noise, max R_ii",
    "largest_variance_ratio": "largest_variance_ratio: that over independent's",
}
"""What the figures of a covariance are called."""


def plans(
    config: plan_.Config, mixing: np.ndarray, designs: Mapping[str, Design]
) -> dict[str, Any]:
    """Plans of one budget for every design that outsiders' accounting takes.

    Args:
        config: The chosen design's config.
        mixing: [n, n] mixing matrix.
        designs: Designs by kind.

    Returns:
        Plans by kind.
    """
    parts = {kind: noise.named(kind) for kind in designs if kind != "central"}
    parts["whisper_horizon"] = noise.Whisper(designs["whisper_horizon"].horizon)
    return {
        kind: plan_.make(config.using(part), mixing, design=designs[kind])
        for kind, part in parts.items()
    }


def forecast(by_kind: Mapping[str, plan_.Plan], chosen: str, parameters: int | None) -> list[str]:
    """The chosen design's forecast, and a line for each of the others.

    Args:
        by_kind: Plans of one budget, by kind.
        chosen: The kind that is written.
        parameters: d; None tells the largest models alone.
    """
    forecasts = {
        kind: each.forecast(1 if parameters is None else parameters)
        for kind, each in by_kind.items()
    }
    mine = forecasts[chosen]
    size = "" if mine.unit == "agent" else f", batches of {mine.batch_size:,}"
    if parameters is None:
        head = [
            f"largest model for which noise in the average model stays within {mine.good:g} of the",
            f"largest drift of clipped gradients{size}; --parameters d forecasts yours",
        ]
        return [*head, *(_line(kind, each, False) for kind, each in forecasts.items())]
    return [
        mine.statement(),
        f"  {'under the same guarantee' + size:<40}{'noise / drift':>14}   affords",
        *(_line(kind, each, True) for kind, each in forecasts.items()),
    ]


def _line(title: str, each: Forecast, ratio: bool) -> str:
    figure = f"{each.ratio:>14.3g}" if ratio else ""
    return f"  {title:<40}{figure}   {each.affords():,.0f} parameters"


def trust(plan: plan_.Plan, independent: plan_.Plan) -> list[str]:
    """What it would cost that sites need not trust each other, where they share a seed.

    Args:
        plan: The plan that is written.
        independent: The plan of the same budget in which every site draws its own noise.

    Returns:
        Lines; none where sites share no seed.
    """
    if plan.guarantee.secrets in ("own", "alone"):
        return []
    assert plan.design is not None and independent.design is not None
    variances = [
        spatial.figures(each.design.covariance, each.mixing)["network_mean_variance"]
        for each in (plan, independent)
        if each.design is not None
    ]
    return [
        "trust: sites who share the seed of this noise can subtract it. If they do not trust each",
        f"  other: --design independent, whose noise has {variances[1] / variances[0]:.3g} times "
        "the variance in",
        "  the network's mean; its figures stand beside",
    ]


def figures(plan: plan_.Plan, independent: plan_.Plan, width: int = 52) -> list[str]:
    """The covariance's figures, with independent noise's under the same guarantee beside.

    Args:
        plan: The plan that is written.
        independent: Independent noise of the same budget.
        width: Columns of the titles.
    """
    assert plan.design is not None and independent.design is not None
    mine = spatial.figures(plan.design.covariance, plan.mixing)
    other = spatial.figures(independent.design.covariance, independent.mixing)
    if plan.config.label == "independent":
        return [f"  {FIGURES[name]:<{width}}{value:>12.6g}" for name, value in mine.items()]
    return [
        f"  {'':<{width}}{'this':>12}{'independent':>14}",
        *(f"  {FIGURES[name]:<{width}}{mine[name]:>12.6g}{other[name]:>14.6g}" for name in mine),
    ]


def by_agent(plan: plan_.Plan, names: Sequence[str]) -> list[str]:
    """What every agent of a small network adds and is promised, a line for each.

    Guarantee: epsilon is the loss of the agent's data (or of one record of its) to an outsider,
    for the plan's relation, clip norm, rounds and accountant, from the covariance alone.

    Args:
        plan: The plan that is written.
        names: The agents' labels.

    Returns:
        Lines; none for a large network.
    """
    if len(names) > loss_tables.FEW or plan.design is None:
        return []
    asked, protect, covariance = plan.config.budget, plan.config.protect, plan.design.covariance
    assert asked is not None
    spent = budget.loss(
        covariance,
        asked.delta,
        rounds=plan.config.rounds,
        clip_norm=protect.clip_norm,
        relation=protect.relation,
        accountant=asked.rule,
        allow_unsound=asked.allow_unsound,
    )
    linked = (plan.mixing != 0).sum(axis=1) - (np.diag(plan.mixing) != 0)
    wide = max(5, *map(len, names))
    lines = [f"  {'agent':<{wide}}{'neighbours':>12}{'noise, std':>12}{'epsilon':>13}"]
    for i, name in enumerate(names):
        deviation, epsilon = np.sqrt(covariance[i, i]), up(spent.epsilon[i])
        lines.append(f"  {name:<{wide}}{linked[i]:>12}{deviation:>12.4g}{epsilon:>13}")
    return lines


def gap(chosen: Design) -> str:
    """Return a design's certified gap in words.

    Args:
        chosen: The design.
    """
    return "none known" if chosen.gap is None else f"{max(chosen.gap, 0.0):.1e}"


def energies(designs: Mapping[str, Design], matrix: np.ndarray, horizon: int) -> str:
    """Return the designs' noise energies under one bound, beside independent noise's.

    Args:
        designs: Designs by kind.
        matrix: [n, n] mixing matrix.
        horizon: Rounds of the second column.
    """
    spent = {
        kind: [spatial.energy(each.covariance, matrix, count) for count in (None, horizon)]
        for kind, each in designs.items()
    }
    lines = [
        "noise energy at this guarantee",
        f"  {'':<22}{'one step':>12}{'of LDP':>9}{f'{horizon:,} rounds':>16}{'of LDP':>9}",
    ]
    for kind, title in COMPARED:
        one, all_ = spent[kind]
        first, last = spent["independent"]
        lines.append(
            f"  {title:<22}{one:>12.5g}{one / first:>9.3f}{all_:>16.5g}{all_ / last:>9.3f}"
        )
    lines.append(
        "  CDP is what a trusted server would need: it gives outsiders no such guarantee, and runs"
        "\n  refuse it"
    )
    return "\n".join(lines)
