"""Noise for a network and a budget: `dpjax.design`, and what `dpjax design` prints of it."""

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from dpjax import _files, _validate
from dpjax._numerics import up
from dpjax.accounting import budget as budget_
from dpjax.accounting import forecast as forecast_
from dpjax.accounting import wording
from dpjax.commands import inputs
from dpjax.learning.samplers import Random
from dpjax.mechanism import polynomial, spatial, workload
from dpjax.plans import noise
from dpjax.plans import plan as plan_
from dpjax.plans.optimizers import Sgd
from dpjax.plans.protect import Budget, Protect
from dpjax.results import tables
from dpjax.topology import nodes

__all__ = ["design"]

Kind = Literal["whisper_horizon", "whisper", "pairwise", "independent"]
KINDS: dict[Kind, str] = {
    "independent": "LDP (independent)",
    "pairwise": "DECOR (pairwise)",
    "whisper": "Whisper, one step",
    "whisper_horizon": "Whisper, horizon",
}
"""Designs that are compared, and their titles."""
SLOW: tuple[Kind, ...] = ("whisper", "whisper_horizon")
MANY = 300
"""Above so many agents the designs of `SLOW` take minutes."""

FIGURES = {
    "lambda_min": "lambda_min, smallest eigenvalue of R",
    "energy": "energy of one step, tr(W R W')",
    "per_agent_energy": "that per agent, tr(W R W') / n",
    "network_mean_variance": "variance of the network's mean, 1'R1 / n^2",
    "largest_variance": "largest variance of an agent's noise, max R_ii",
    "largest_variance_ratio": "largest_variance_ratio: that over independent's",
}
"""Titles of a covariance's figures."""


def design(
    mixing: Float[np.ndarray, "n n"],
    kind: Kind = "whisper_horizon",
    *,
    relation: budget_.Relation,
    epsilon: float,
    delta: float,
    rounds: int,
    clip_norm: float,
    horizon: int | None = None,
    accountant: Literal["gdp", "rdp", "paper"] = "gdp",
    allow_unsound: bool = False,
    batch_size: int = 1,
) -> plan_.Plan:
    """The plan of a noise design over agents that keeps a budget against outsiders.

    Guarantee: that of the plan, ``plan.guarantee``.

    Args:
        mixing: [n, n] W.
        kind: whisper_horizon (least noise over all rounds), whisper (in one round), pairwise
            (DECOR) or independent (LDP).
        relation: Neighbouring relation; no default.
        epsilon: Of the whole run.
        delta: Delta.
        rounds: T.
        clip_norm: Norm at which gradients are clipped.
        horizon: Rounds that whisper_horizon looks ahead; all by default.
        accountant: How noise follows from the budget: gdp (exact), rdp (looser) or paper.
        allow_unsound: Use the paper's rule also where it is false.
        batch_size: Records in an agent's batch, by which noise is divided; forecasts read it.

    Returns:
        The plan: ``plan.save(path)`` writes it, ``plan.forecast(d)`` says what it affords.

    Raises:
        ValueError: For options that do not go together.

    Example:
        >>> import dpjax as dp
        >>> W = dp.mixing.metropolis_hastings(dp.graphs.ring(6))
        >>> terms = dict(epsilon=10, delta=1e-5, rounds=100, clip_norm=0.1)
        >>> plan = dp.design(W, relation="replace_agent", **terms)
        >>> plan.guarantee.epsilon, plan.config.label, plan.covariance().shape
        (10.0, 'whisper_horizon', (6, 6))
    """
    _validate.one_of("kind", kind, KINDS)
    config = plan_.Config(
        noise=noise.Whisper("run" if horizon is None else horizon)
        if kind == "whisper_horizon"
        else noise.named(kind),
        budget=Budget(epsilon, delta, accountant, allow_unsound),
        protect=Protect(relation, clip_norm),
        sampler=Random(batch_size),
        optimizer=Sgd(1.0),  # decides no noise
        rounds=rounds,
    )
    return plan_.make(config, mixing)


def run(command: Any) -> int:
    """Design noise against an eavesdropper, print what it is and does, and write the plan.

    Args:
        command: The options, `dpjax.cli.DesignCommand`.

    Returns:
        Exit status.

    Raises:
        ValueError: For options that do not go together.
    """
    _refuse_unread(command)
    graph, matrix, title = inputs.network(command)
    out, names = inputs.free(command.out, "dpjax-design.npz"), nodes.labels(graph)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "delta is")  # A note says it.
        plans = _plans(matrix, command)
        comparison = _comparison(plans, command)
    plan = plans[command.design]
    chosen = plan.design
    assert chosen is not None
    saved = plan.save(out, names)
    print(title)
    inputs.note_delta(command.delta, len(matrix), command.relation, command.batch_size or 1)
    print(f"relation: {command.relation} ({inputs.HIDDEN[command.relation]})")
    print(f"guarantee: {wording.statement(plan.guarantee, process=False)}")
    figures, others = (
        spatial.figures(each.covariance(), matrix) for each in (plan, plans["independent"])
    )
    if plan.guarantee.secrets not in ("own", "alone"):
        ratio = others["network_mean_variance"] / figures["network_mean_variance"]
        print(
            "trust: sites who share the seed of this noise can subtract it. If they do not trust "
            "each other: --design independent, whose noise has "
            f"{ratio:.3g} times the variance in the network's mean"
        )
    print(f"design: {command.design}, [R^-1]_ii <= b = {chosen.precision_bound:.6g}")
    rows = [
        {"": text, "this": f"{figures[name]:.6g}", "independent": f"{others[name]:.6g}"}
        for name, text in FIGURES.items()
    ]
    print(tables.text(rows))
    gap = "none known" if chosen.gap is None else f"{max(chosen.gap, 0.0):.1e}"
    print(f"certified gap: excess over the optimum, at most {gap}")
    if len(names) <= inputs.FEW:
        print("\n" + tables.text(_by_agent(plan, names)))
    if figures["largest_variance_ratio"] > 100:
        print(
            f"NOTE: some agents' noise has {figures['largest_variance_ratio']:,.0f} times "
            "independent noise's variance before it cancels (agents with the same neighbours do); "
            "messages must carry that range. Bound it from Python, by a plan with "
            "noise.Whisper('run', max_variance=20) that is saved as in docs/own_loop.md; this "
            "command has no option for it"
        )
    if (wide := plan.export().precision) is not None:
        print(f"NOTE: {wide}")
    if not chosen.converged:
        print("the solver stopped at a limit: the bound holds, the energy is not the least")
    print(f"\n{comparison}\n")
    print(f'written: {saved}; numpy.load("{saved}")["how_to_use"] says how to train with it')
    return 0


def _plans(matrix: Float[np.ndarray, "n n"], command: Any) -> dict[Kind, plan_.Plan]:
    """The chosen design and those to compare it with, without slow ones for many agents."""
    same = ("relation", "epsilon", "delta", "rounds", "horizon", "accountant", "allow_unsound")
    terms = {name: getattr(command, name) for name in same}
    terms |= {"clip_norm": command.clip, "batch_size": command.batch_size or 1}
    slow: tuple[Kind, ...] = SLOW if len(matrix) > MANY else ()
    plans: dict[Kind, plan_.Plan] = {}
    for kind in KINDS:
        if kind in slow and kind != command.design and not command.all_designs:
            continue
        if kind in slow:
            remedy = "--design pairwise is quick"
            _files.say(f"{kind} takes minutes for {len(matrix):,} agents; {remedy}")
        plans[kind] = design(matrix, kind, **terms)
        _progress(kind, plans[kind].covariance(), matrix)
    return plans


def _progress(kind: str, covariance: Float[np.ndarray, "n n"], matrix: Any) -> None:
    """Say that a design for many agents is made, and what it costs."""
    if len(matrix) > MANY:
        energy = spatial.energy(covariance, matrix)
        _files.say(f"{kind}: noise energy {energy:.5g} in one step")


def _polynomial(
    plan: plan_.Plan, horizon: int | None, size: int
) -> tuple[str, Any, forecast_.Forecast | None]:
    """Title, covariance and forecast of a polynomial of W under a plan's guarantee."""
    part = noise.Polynomial(horizon="run" if horizon is None else horizon)
    other = plan_.make(plan.config.using(part), plan.mixing)
    scaled: Any = other.noise
    solution = scaled.solution
    factor = polynomial.dense(scaled.matrix, solution.coefficients, solution.scales)
    covariance = factor @ factor.T
    _progress("polynomial", covariance, plan.mixing)
    # Of many agents a plan holds no dense factor, which its forecast reads.
    forecast = None if scaled.factor is None else other.forecast(size)
    return "Polynomial of W (dp.noise.Polynomial)", covariance, forecast


def _by_agent(plan: plan_.Plan, names: Sequence[str]) -> list[dict[str, Any]]:
    """What every agent adds and is promised, from the covariance alone."""
    config, covariance = plan.config, plan.covariance()
    assert config.budget is not None
    spent = budget_.loss(
        covariance,
        config.budget.delta,
        rounds=config.rounds,
        clip_norm=config.protect.clip_norm,
        relation=config.protect.relation,
        accountant=config.budget.rule,
        allow_unsound=config.budget.allow_unsound,
    )
    linked = (plan.mixing != 0).sum(axis=1) - (np.diag(plan.mixing) != 0)
    return [
        {
            "agent": name,
            "neighbours": int(linked[i]),
            "noise, std": f"{np.sqrt(covariance[i, i]):.4g}",
            "epsilon": up(spent.epsilon[i]),
        }
        for i, name in enumerate(names)
    ]


def _comparison(plans: dict[Kind, plan_.Plan], command: Any) -> str:
    """Noise energy and forecast of every design under the same guarantee."""
    horizon, rows = command.horizon or command.rounds, []
    size = 1 if command.parameters is None else command.parameters
    forecasts = {kind: plan.forecast(size) for kind, plan in plans.items()}
    chosen, plan = forecasts[command.design], plans[command.design]
    compared: list[tuple[str, Any, forecast_.Forecast | None]] = [
        (KINDS[kind], plan.covariance(), forecasts[kind]) for kind, plan in plans.items()
    ]
    with contextlib.suppress(ValueError):  # There is none of some W, such as a directed one.
        compared.append(_polynomial(plan, command.horizon, size))
    central = spatial.central(plan.mixing, plan.design.precision_bound)  # type: ignore[union-attr]
    factor = workload.factor(plan.mixing, horizon)
    # Made once: of many agents it takes longer than all energies.
    weights = factor.T @ factor
    for title, covariance, forecast in (*compared, ("CDP (reference only)", central, None)):
        row = {"under the same guarantee": title}
        row["noise energy, one step"] = f"{spatial.energy(covariance, plan.mixing):.5g}"
        row[_validate.counted(horizon, "round")] = f"{np.sum(weights * covariance):.5g}"
        if command.parameters is not None:
            row["noise / drift"] = "" if forecast is None else f"{forecast.ratio:.3g}"
        row["affords, parameters"] = "" if forecast is None else f"{forecast.affords():,.0f}"
        rows.append(row)
    head = (
        "affords: the largest model for which noise in the average model, and of agents' own "
        f"models around it, stays within {chosen.good:g} of the largest drift of clipped gradients"
    )
    if command.parameters is not None:
        head = chosen.statement()
    elif chosen.unit == "record":
        head += f"; batches of {chosen.batch_size:,}"
    if absent := [KINDS[kind] for kind in KINDS if kind not in plans]:
        names = " and ".join(absent)
        head += f"\nleft out: {names}, which take minutes here; --all-designs compares them, too"
    return (
        f"{head}\n{tables.text(rows)}\nCDP is what a trusted server would need: it gives outsiders "
        "no such guarantee, and runs refuse it"
    )


def _refuse_unread(command: Any) -> None:
    """Refuse options that the others leave without a meaning, or ask for; names the first one."""
    of_records = budget_.clips(command.relation) == "record"
    if (command.batch_size is not None) != of_records:
        raise ValueError(
            f"batch_size is {command.batch_size} under relation {command.relation!r}; "
            + ("give the records in a site's batch, by which noise is divided" if of_records
               else "an agent's gradient is clipped as a whole, leave it out")
        )  # fmt: skip
    if command.allow_unsound and command.accountant != "paper":
        raise ValueError(
            f"allow_unsound is True with accountant {command.accountant!r}, which is never "
            "unsound; leave it out, or take --accountant paper"
        )
