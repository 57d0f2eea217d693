"""The body of `dpjax design`: a plan for a network and a budget, printed and written."""

import dataclasses
import warnings
from typing import Any

import numpy as np

from dpjax import _validate
from dpjax.accounting import budget, wording
from dpjax.commands import design_report, inputs
from dpjax.mechanism import design, spatial
from dpjax.plans import export, noise, plan, targets
from dpjax.plans.optimizers import Sgd
from dpjax.plans.protect import Budget, Protect
from dpjax.plans.samplers import Random
from dpjax.topology import nodes

__all__: list[str] = []

_OF_PNDP = ("attacker", "algorithm", "epochs", "separation", "gossip_steps", "gradients")


def run(command: Any) -> int:
    """Design noise against an eavesdropper, print what it is and does, and write the plan.

    Args:
        command: The options, `dpjax.cli.DesignCommand`, under trust "ldp".

    Returns:
        Exit status.

    Raises:
        ValueError: For options that do not go together.
    """
    _refuse_unread(command)
    command = dataclasses.replace(command, design=command.design or "whisper_horizon")
    graph, matrix, title = inputs.network(command)
    config = _config(command)
    horizon = config.rounds if command.horizon is None else command.horizon
    horizon = _validate.integer("horizon", horizon)
    bound = float(targets.of(config, matrix).bound(None))
    designs = {
        kind: design.make(kind, matrix, bound, horizon if kind == "whisper_horizon" else None)
        for kind, _ in design_report.COMPARED
    }
    chosen = designs[command.design]
    out = inputs.free(command.out, "dpjax-design.npz")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "delta is")  # A note says it.
        plans = design_report.plans(config, matrix, designs)
    mine, independent = plans[command.design], plans["independent"]
    forecast = design_report.forecast(plans, command.design, command.parameters)
    saved = mine.save(out, nodes.labels(graph))
    print(title)
    inputs.note_delta(command.delta, len(matrix), command.relation, command.batch_size or 1)
    print(f"relation: {command.relation} ({inputs.HIDDEN[command.relation]})")
    print(f"guarantee: {wording.statement(mine.guarantee, process=False)}")
    print("".join(f"{line}\n" for line in design_report.trust(mine, independent)))
    print(f"design: {command.design}, [R^-1]_ii <= b = {bound:.6g}")
    print("\n".join(design_report.figures(mine, independent)))
    print(
        f"  {'certified gap: excess over the optimum, at most':<52}{design_report.gap(chosen):>12}"
    )
    if each := design_report.by_agent(mine, nodes.labels(graph)):
        print("\n" + "\n".join(each))
    _note(command, chosen, matrix, mine)
    print(f"\n{design_report.energies(designs, matrix, horizon)}")
    print("\n" + "\n".join(forecast))
    print(f'\nwritten: {saved}; numpy.load("{saved}")["how_to_use"] says how to train with it')
    return 0


def _config(command: Any) -> plan.Config:
    """The config whose plan is written."""
    return plan.Config(
        noise=noise.named(command.design),
        budget=Budget(command.epsilon, command.delta, command.accountant, command.allow_unsound),
        protect=Protect(command.relation, command.clip),
        # Neither decides the noise; the batch size divides it.
        sampler=Random(1 if command.batch_size is None else command.batch_size),
        optimizer=Sgd(1.0),
        rounds=command.rounds,
    )


def _note(command: Any, chosen: design.Design, matrix: np.ndarray, plan: plan.Plan) -> None:
    """Print what a reader of the figures should know."""
    ratio = spatial.figures(chosen.covariance, matrix)["largest_variance_ratio"]
    if ratio > 100:
        print(
            f"  NOTE: some agents' noise has {ratio:,.0f} times independent noise's variance before"
            "\n  it cancels (agents with the same neighbours do); messages must carry that range."
            "\n  Bound it from Python, by a plan with noise.Whisper('run', max_variance=20) that is"
            "\n  saved as in docs/own_loop.md; this command has no option for it"
        )
    if (wide := export.wide(plan)) is not None:
        print(f"  NOTE: {wide}")
    if not chosen.converged:
        print("  the solver stopped at a limit: the bound holds, the energy is not the least")


def _refuse_unread(command: Any) -> None:
    """Refuse options that the others leave without a meaning, or ask for; names the first one."""
    for name in _OF_PNDP:
        if getattr(command, name) not in ((), None):
            raise ValueError(
                f"{name} is {getattr(command, name)!r} with trust 'ldp'; leave it out, or take "
                "--trust pndp, which writes no file. A file for records in a fixed order is saved "
                "from Python: plan.make(config, W).save(path), as in docs/own_loop.md"
            )
    if command.batch_size is not None and command.relation == "replace_agent":
        raise ValueError(
            f"batch_size is {command.batch_size} under relation 'replace_agent', which protects "
            "and clips an agent as a whole, so that batches change neither the noise nor its "
            "forecast; leave it out, or protect records"
        )
    if command.batch_size is None and budget.clips(command.relation) == "record":
        raise ValueError(
            f"batch_size is None under relation {command.relation!r}: the noisy sum of a batch's "
            "records is divided by it, in the forecast and in the file's instructions; give the "
            "records in a site's batch"
        )
    if command.allow_unsound and command.accountant != "paper":
        raise ValueError(
            f"allow_unsound is True with accountant {command.accountant!r}, which is never "
            "unsound; leave it out, or take --accountant paper"
        )
