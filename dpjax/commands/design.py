"""Noise for a network and a budget: `dpjax.design`, and what `dpjax design` prints of it."""

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from dpjax import _files, _validate
from dpjax.accounting import budget as budget_
from dpjax.accounting import forecast as forecast_
from dpjax.accounting import wording
from dpjax.accounting.rounding import up
from dpjax.commands import inputs
from dpjax.learning.samplers import Random
from dpjax.mechanism import spatial, workload
from dpjax.plans import noise
from dpjax.plans import plan as plan_
from dpjax.plans.optimizers import Sgd
from dpjax.plans.protect import Budget, Protect
from dpjax.results import records, tables
from dpjax.topology import nodes
from dpjax.topology.mixing import SquareMatrix

__all__ = ["design"]

COMPARED = {part.label: part for part in noise.PARTS if part.compared}
"""Designs that are compared."""
_Compared: TypeAlias = tuple[str, SquareMatrix, forecast_.Forecast | None]
"""A design's name, its covariance, and what its noise leaves to learn."""
_MANY = 300
"""Above so many agents slow designs take minutes."""

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
    mixing: SquareMatrix,
    kind: str = "whisper_horizon",
    *,
    relation: inputs.CommandRelation,
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
        kind: Which noise: whisper_horizon (Whisper, whole run: the least over all rounds), whisper
            (Whisper: the least in one round), pairwise or independent.
        relation: What the guarantee hides: replace_agent (all data of one agent), replace_record
            (one record, against another) or zero_out_record (one record, against its absence).
            There is no default: the same epsilon means different things.
        epsilon: Privacy budget of the whole run.
        delta: Probability with which epsilon may fail; below one over the number of units.
        rounds: Rounds of training that the budget covers.
        clip_norm: Norm at which gradients are clipped.
        horizon: Rounds that whisper_horizon looks ahead; all by default.
        accountant: How noise follows from the budget: gdp (exact), rdp (looser), paper (the
            Whisper paper's rule, refused where it is false).
        allow_unsound: Use the paper's rule also where it is false; the guarantee then says so.
            With accountant paper only.
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
    _validate.one_of("kind", kind, COMPARED)
    part: Any = COMPARED[kind]
    # Only designs over a whole run look ahead; the others have no horizon to set.
    if horizon is not None and getattr(part, "horizon", None) == "run":
        part = dataclasses.replace(part, horizon=horizon)
    config = plan_.Config(
        noise=part,
        budget=Budget(epsilon, delta, accountant, allow_unsound),
        protect=Protect(relation, clip_norm),
        sampler=Random(batch_size),
        optimizer=Sgd(1.0),  # decides no noise
        rounds=rounds,
    )
    return plan_.make(config, mixing)


@inputs.with_arguments(design)
def design_command(
    graph: str,
    *,
    mixing: inputs.Weights = "metropolis",
    seed: int = 0,
    batch_size: int | None = None,
    parameters: int | None = None,
    all_designs: bool = False,
    out: Path | None = None,
    **terms: Any,
) -> int:
    """Design the noise for a network and a privacy budget, and write it to a file.

    Prints the guarantee, the covariance's figures, its certified gap, and how much noise other
    designs need at the same guarantee. The attacker is an outsider, who reads every message on
    every link; against other participants, see dpjax account --epsilon.

    Example: dpjax design --graph er:20:0.5 --relation replace_agent --epsilon 10 --delta 1e-5
    --rounds 5000 --clip-norm 0.1

    Args:
        graph: An edge-list file (its weights are ignored), or er:AGENTS:PROBABILITY[:SEED], ring:N,
            complete:N, star:N, path:N, grid:ROWS:COLUMNS, exponential:N, florentine, facebook_ego.
        mixing: How neighbours average: metropolis (symmetric weights) or uniform (row-stochastic).
        seed: First seed of a random graph that names none.
        batch_size: Records in an agent's batch, by which noise is divided; relations of records
            need it, and replace_agent takes none.
        parameters: Entries of the model to be trained: forecasts whether this noise leaves it
            something to learn, and says what would help.
        all_designs: Above 300 agents, compare also with the Whisper designs, which take minutes.
        out: Where to write the design; must not exist. By default dpjax-design.npz here, numbered
            if that is taken.
    """
    chosen_kind = _validate.one_of("kind", terms.pop("kind"), COMPARED)
    relation = terms["relation"]
    _refuse_unread(relation, batch_size, terms["accountant"], terms["allow_unsound"])
    links, matrix, title = inputs.network(graph, mixing, seed)
    # Refused before the design, which may take minutes.
    path = inputs.free(out, "dpjax-design.npz")
    names = nodes.labels(links)
    # An agent's gradient is clipped as a whole: its batch divides no noise.
    terms["batch_size"] = batch_size or 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "delta is")  # A note says it.
        plans = _plans(matrix, chosen_kind, all_designs, terms)
        comparison = _comparison(plans, chosen_kind, terms["horizon"], parameters)
    plan = plans[chosen_kind]
    solution = plan.design
    assert solution is not None
    saved = plan.save(path, names)
    print(title)
    inputs.note_delta(terms["delta"], len(matrix), relation, batch_size or 1)
    print(f"relation: {relation} ({inputs.HIDDEN[relation]})")
    print(f"guarantee: {wording.statement(plan.guarantee, process=False)}")
    figures = spatial.figures(plan.covariance(), matrix)
    # Independent noise needs no trust: what it costs is the measure of all others.
    others = spatial.figures(plans["independent"].covariance(), matrix)
    # Members of a group can subtract the noise of the others.
    if plan.guarantee.secrets not in ("own", "alone"):
        ratio = others["network_mean_variance"] / figures["network_mean_variance"]
        print(
            "trust: sites who share the seed of this noise can subtract it. If they do not trust "
            "each other: --kind independent, whose noise has "
            f"{ratio:.3g} times the variance in the network's mean"
        )
    design_name = noise.display_name(plan.config.label)
    print(f"design: {design_name}, [R^-1]_ii <= b = {solution.precision_bound:.6g}")
    rows = [
        {"": text, "this": f"{figures[name]:.6g}", "independent": f"{others[name]:.6g}"}
        for name, text in FIGURES.items()
    ]
    print(tables.text(rows))
    # A gap below zero is rounding of the solver.
    if solution.gap is None:
        gap = "none known"
    else:
        gap = f"{max(solution.gap, 0.0):.1e}"
    print(f"certified gap: excess over the optimum, at most {gap}")
    if len(names) <= inputs.FEW:
        print("\n" + tables.text(_by_agent(plan, names)))
    if figures["largest_variance_ratio"] > 100:
        print(
            f"NOTE: some agents' noise has {figures['largest_variance_ratio']:,.0f} times "
            "independent noise's variance before it cancels (agents with the same neighbours do); "
            "messages must carry that range. Bound it from Python, by a plan with "
            "noise.Whisper('run', max_variance=20) that is saved as the page 'Your own training "
            "loop' of the manual says; this "
            "command has no option for it"
        )
    wide = plan.export().precision
    if wide is not None:
        print(f"NOTE: {wide}")
    if not solution.converged:
        print("the solver stopped at a limit: the bound holds, the energy is not the least")
    print(f"\n{comparison}\n")
    print(f'written: {saved}; numpy.load("{saved}")["how_to_use"] says how to train with it')
    return 0


def _plans(
    matrix: SquareMatrix,
    chosen_kind: str,
    all_designs: bool,
    terms: inputs.Arguments,
) -> dict[str, plan_.Plan]:
    """The chosen design and those to compare it with, without slow ones for many agents."""
    plans = {}
    for kind, part in COMPARED.items():
        # The chosen design is made however long it takes, the others only on request.
        slow = part.slow and len(matrix) > _MANY
        if slow and kind != chosen_kind and not all_designs:
            continue
        if slow:
            remedy = "--kind pairwise is quick"
            _files.say(f"{part.look.label} takes minutes for {len(matrix):,} agents; {remedy}")
        plans[kind] = design(matrix, kind, **terms)
        _progress(part.look.label, plans[kind].covariance(), matrix)
    return plans


def _progress(name: str, covariance: SquareMatrix, matrix: SquareMatrix) -> None:
    """Say that a design for many agents is made, and what it costs."""
    if len(matrix) > _MANY:
        energy = spatial.energy(covariance, matrix)
        _files.say(f"{name}: noise energy {energy:.5g} in one step")


def _polynomial(plan: plan_.Plan, horizon: int | None, size: int) -> _Compared:
    """Name, covariance and forecast of a polynomial of W under a plan's guarantee."""
    part = noise.Polynomial(horizon="run" if horizon is None else horizon)
    other = plan_.make(plan.config.using(part), plan.mixing)
    assert other.noise is not None
    # The plan's own factor is rounded, and of many agents there is none.
    factor = other.noise.operator @ np.eye(len(plan.mixing))
    covariance = factor @ factor.T
    _progress(part.look.label, covariance, plan.mixing)
    return part.look.label, covariance, other.forecast(size)


def _by_agent(plan: plan_.Plan, names: Sequence[str]) -> records.Rows:
    """What every agent adds and is promised, as the plan's audit computes it."""
    covariance = plan.covariance()
    assert plan.noise is not None
    spent = plan.noise.loss(plan.target)
    # An agent is no neighbour of its own.
    linked = (plan.mixing != 0).sum(axis=1) - (np.diag(plan.mixing) != 0)
    rows = []
    for i, name in enumerate(names):
        deviation = np.sqrt(covariance[i, i])
        row = {"agent": name, "neighbours": int(linked[i]), "noise, std": f"{deviation:.4g}"}
        rows.append(row | {"epsilon": up(spent.epsilon[i])})
    return rows


def _comparison(
    plans: Mapping[str, plan_.Plan], chosen_kind: str, horizon: int | None, parameters: int | None
) -> str:
    """Noise energy and forecast of every design under the same guarantee."""
    plan = plans[chosen_kind]
    size = 1 if parameters is None else parameters
    forecasts = {kind: other.forecast(size) for kind, other in plans.items()}
    forecast = forecasts[chosen_kind]
    compared: list[_Compared] = [
        (COMPARED[kind].look.label, other.covariance(), forecasts[kind])
        for kind, other in plans.items()
    ]
    with contextlib.suppress(ValueError):  # There is none of some W, such as a directed one.
        compared.append(_polynomial(plan, horizon, size))
    assert plan.design is not None
    # What a trusted server would add, at the same bound on each agent's loss.
    central = spatial.central(plan.mixing, plan.design.precision_bound)
    compared.append(("CDP (reference only)", central, None))
    rounds = horizon or plan.config.rounds
    factor = workload.factor(plan.mixing, rounds)
    # Made once: of many agents it takes longer than all energies.
    weights = factor.T @ factor
    rows = []
    for name, covariance, affordable in compared:
        row = {
            "under the same guarantee": name,
            "noise energy, one step": f"{spatial.energy(covariance, plan.mixing):.5g}",
            _validate.counted(rounds, "round"): f"{np.sum(weights * covariance):.5g}",
            "noise / drift": "",
            "affords, parameters": "",
        }
        if affordable is not None:
            row["noise / drift"] = f"{affordable.ratio:.3g}"
            row["affords, parameters"] = f"{affordable.affords():,.0f}"
        if parameters is None:
            # The ratio is of a model's size; what is affordable is not.
            del row["noise / drift"]
        rows.append(row)
    head = (
        "affords: the largest model for which noise in the average model, and of agents' own "
        f"models around it, stays within {forecast.good:g} of the largest drift of clipped "
        "gradients"
    )
    if parameters is not None:
        head = forecast.statement()
    elif forecast.unit == "record":
        head += f"; batches of {forecast.batch_size:,}"
    # Left out in words, so that nobody takes the list for complete.
    absent = [part.look.label for kind, part in COMPARED.items() if kind not in plans]
    if absent:
        names = " and ".join(absent)
        head += f"\nleft out: {names}, which take minutes here; --all-designs compares them, too"
    return (
        f"{head}\n{tables.text(rows)}\nCDP is what a trusted server would need: it gives outsiders "
        "no such guarantee, and runs refuse it"
    )


def _refuse_unread(
    relation: inputs.CommandRelation, batch_size: int | None, accountant: str, allow_unsound: bool
) -> None:
    """Refuse options that the others leave without a meaning, or ask for; names the first one."""
    # A relation of records clips each record, one of agents each agent.
    of_records = budget_.clips(relation) == "record"
    if (batch_size is not None) != of_records:
        remedy = "an agent's gradient is clipped as a whole, leave it out"
        if of_records:
            remedy = "give the records in a site's batch, by which noise is divided"
        size = _validate.argument("batch_size", batch_size)
        raise ValueError(f"{size} under relation {relation!r}; {remedy}")
    if allow_unsound and accountant != "paper":
        raise ValueError(
            f"allow_unsound is True with accountant {accountant!r}, which is never unsound; leave "
            "it out, or take --accountant paper"
        )
