"""A plan as a file for a training loop of one's own, readable with NumPy alone.

The file is an .npz whose entries are

    how_to_use      what to do in each round, in words
    epsilon, delta, relation, unit, attacker, rounds, clip_norm, mu, accountant
    labels          [n] names of the sites; row and column i of every matrix is labels[i]
    mixing          [n, n] W, or a schedule [P, n, n]
    factor          [n, n] F: site i adds row i of F Z_t, Z_t [n, d] standard normals
    seed_group      [n] sites with the same number draw from one secret seed
    messages        "float64" where noise is too large for float32 messages, else "float32"
    strategy        [T, T] C over rounds, where the design has one
    participation   (epochs, separation), where the guarantee is for records in a fixed order
    phase           which phase this is, where the guarantee is a total over phases

beside what `dpjax.mechanism.design.Design.load` reads, so that a plan can be made from it again.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax import _validate
from dpjax._numerics import delta_text, up
from dpjax.accounting import wording
from dpjax.accounting.guarantee import Guarantee
from dpjax.algorithms.dsgd import DSGD
from dpjax.mechanism import strategy as strategy_
from dpjax.plans import calibration
from dpjax.plans.samplers import Full
from dpjax.transforms import rounds as rounds_

if TYPE_CHECKING:
    from dpjax.plans.plan import Plan

__all__: list[str] = []


def save(
    plan: "Plan",
    path: str | os.PathLike[str],
    labels: Sequence[object] | None = None,
    guarantee: Guarantee | None = None,
) -> Path:
    """Write a plan's design, terms and instructions to an .npz file, complete or not at all.

    Guarantee: the plan's, for a loop that does what ``how_to_use`` says: at most ``rounds`` rounds,
    gradients clipped at ``clip_norm`` in the stated unit, noise from seeds that the attacker does
    not know, each used once. Nothing in the file is secret.

    Args:
        plan: A private plan.
        path: Where to; ``.npz`` is appended when there is no suffix.
        labels: [n] names of the sites, in the order of the mixing matrix; None numbers them from 0.
        guarantee: The total over all phases so far, of which this plan is the last
            (`Guarantee.within`); None states the plan's own.

    Returns:
        The path written.

    Raises:
        ValueError: For a non-private plan or a release, a sampler that amplifies, another method
            than D-SGD, labels that are not n different ones, or a guarantee whose last phase is
            another.
    """
    if plan.design is None:
        remedy = "save a private plan of a design that has one"
        if plan.noise is not None and "noise_scales" in plan.noise.arrays:
            remedy = "noise by schedule is its noise.scales, one a round: write these"
        raise ValueError(
            f"plan is {plan.config.label}, which has no noise design over agents to save; {remedy}"
        )
    if plan.config.release:
        raise ValueError(
            "plan is a release, whose noise this package draws and hardens; save the plan of the "
            "same config with release=False for a loop of your own"
        )
    if plan.sampler.capacity is not None:
        raise ValueError(
            f"plan has sampler {plan.config.sampler}, whose coin flips a loop of your own would "
            "have to draw; save the plan of a config with Random, Full or Cyclic"
        )
    if type(plan.config.method) is not DSGD:
        raise ValueError(
            f"plan has method {type(plan.config.method).__name__}, whose rounds a file cannot tell "
            "yet; save a plan of DSGD, or train with dpjax"
        )
    names, stated = _labels(labels, plan.agents), plan.guarantee
    if guarantee is not None:
        if not isinstance(guarantee, Guarantee) or guarantee.phases[-1:] != (stated,):
            raise ValueError(
                f"guarantee is {_validate.shown(guarantee)}, whose last phase is not this plan's; "
                "give plan.guarantee.within(total) for the first phase, "
                "earlier.followed_by(plan.guarantee, planned=False) for a later one"
            )
        stated = guarantee
    entries: dict[str, Any] = {
        "how_to_use": instructions(plan, stated),
        "labels": names,
        "epsilon": np.asarray(stated.per_agent_epsilon or stated.epsilon),
        "mixing": plan.mixing,
        "factor": plan.factor.astype(np.float64),
        "seed_group": calibration.groups(plan.factor),
        "messages": "float32" if wide(plan) is None else "float64",
    }
    for name in ("delta", "relation", "unit", "attacker"):
        entries[name] = getattr(stated, name)
    if stated.mu is not None:  # A total may be of another kind than mu.
        entries["mu"] = stated.mu
    entries["accountant"] = str(stated.accountant)
    if stated.phases:
        entries["phase"] = len(stated.phases)
    entries |= {"rounds": plan.guarantee.rounds, "clip_norm": plan.guarantee.clip_norm}
    if plan.strategy is not None:
        entries["strategy"] = rounds_.applied(plan.strategy, np.float64)
    if plan.guarantee.participation is not None:
        entries["participation"] = np.asarray(plan.guarantee.participation)
    assert plan.design is not None
    return plan.design.save(path, entries=entries)


def wide(plan: "Plan") -> str | None:
    """Say that messages need float64, where float32 loses gradients or what noise cancels to.

    Of float32 numbers as large as four deviations of some site's noise two are 2^-23 as far apart.
    That is too far from a thousandth of the clip norm, or of what the average of all sites' noise
    is left with.

    Args:
        plan: A private plan with one factor.

    Returns:
        A sentence with its numbers; None where float32 is enough.
    """
    factor, noisy, left = plan.factor.astype(np.float64), 1.0, 1.0
    if plan.strategy is not None:
        inverse = strategy_.inverse_of(plan.strategy)
        noisy = float(np.linalg.norm(inverse, axis=1).max())
        left = float(np.linalg.norm(inverse.sum(axis=0))) / np.sqrt(len(inverse))
    largest = float(np.linalg.norm(factor, axis=1).max()) * noisy
    mean = float(np.linalg.norm(factor.mean(axis=0))) * left
    apart = 4 * largest * 2.0**-23
    if apart <= min(plan.config.protect.clip_norm, mean) / 1000:
        return None
    return (
        f"messages need float64: some noise has a deviation of {largest:,.4g}, and float32 "
        f"numbers of that size are {apart:.2g} apart, more than a thousandth of the clip norm "
        f"{plan.config.protect.clip_norm:g} or of the noise in the average, {mean:.2g}. Draw, add, "
        "send and average in float64"
    )


def _labels(labels: Sequence[object] | None, n: int) -> np.ndarray:
    names = [str(i) for i in range(n)] if labels is None else [str(label) for label in labels]
    if len(names) != n or len(set(names)) != n:
        raise ValueError(f"labels is {names!r} for {n} sites; give {n} different names")
    return np.array(names)


def instructions(plan: "Plan", stated: Guarantee) -> str:
    """What a training loop has to do for the plan's guarantee to be its own, in words.

    Args:
        plan: A private plan.
        stated: What its file states: its guarantee, or a total over phases of which it is the last.
    """
    record, groups = plan.guarantee, calibration.groups(plan.factor)
    alone = len(set(groups)) == plan.agents
    number, phase, models = len(stated.phases), list[str](), _FIRST
    if number:
        phase = [
            f"This is phase {number}. Its own rounds cost epsilon = {up(record.epsilon)} at delta",
            f"= {delta_text(record.delta)}; what to state is the total of all phases, epsilon = "
            f"{up(stated.epsilon)}.",
        ]
    if number > 1:
        models = (
            "Sites start from",
            f"the models with which phase {number - 1} ended, which were released, and from",
            "nothing else that was trained on private data.",
        )
    return "\n".join(
        [
            f"A noise design of dpjax for {plan.agents} sites and at most {record.rounds:,} rounds"
            f" ({plan.config.label}).",
            "",
            "What it guarantees, if every site does what follows:",
            wording.statement(stated, process=False),
            *([] if stated.nodes is None else ["Agent i is the site labels[i]."]),
            *phase,
            "",
            f"In each round t = 0, 1, ..., {record.rounds - 1}, site i (its name is labels[i]):",
            *_steps(plan),
            "",
            *([f"Precision: {told}.", ""] if (told := wide(plan)) is not None else []),
            "Who holds the seed:",
            *(_ALONE if alone else _SHARED),
            "",
            "Counting rounds:",
            f"The budget is spent by {record.rounds:,} rounds. Stop then: more rounds need a new",
            "design, made for all of them. A round that was interrupted is sent again with the",
            "same numbers or not at all; fresh noise for a round already sent spends it twice. A",
            "site that restarts must know t, its model and its past noise, or stop for good.",
            "",
            "One run, one secret, one first model:",
            "Every training run and every phase takes a new secret, also after a failed one: used",
            "again with other data, models or step sizes, it lets whoever saw both runs subtract",
            f"the noise. Who has left knows {'its own' if alone else 'that of its group'}. "
            f"{models[0]}",
            *models[1:],
            "",
            "Not in the guarantee: losses and metrics that are computed from the data and shown,",
            "tuning on the data, the low bits of floating-point numbers, and a generator that can",
            "be guessed: NumPy's is not cryptographic; where messages really go out, draw the bits",
            "from one that is (AES or ChaCha20 keyed by the secret, with t in the nonce).",
        ]
    )


_FIRST: tuple[str, ...] = (
    "All sites start from one public model (zeros,",
    "say): one trained on private data is sent.",
)
_ALONE = (
    "Every site draws its own noise from a secret of its own (128 random bits), which it tells",
    "nobody. Other sites then see no more than outsiders do.",
)
_SHARED = (
    "Sites with the same seed_group share one secret (128 random bits), draw the same Z_t from it",
    "and keep it from everybody else. Whoever holds it can subtract the noise of its group: sites",
    "who share a seed are NOT protected from each other, only from outsiders. All members must",
    "draw the same numbers, or the noise does not cancel: the group's rows of Z_t, in the order of",
    "labels, [members, d] at once, from one generator that is made anew in every round from",
    "(secret, t), in NumPy numpy.random.default_rng([secret, t]).standard_normal((members, d)).",
)


def _steps(plan: "Plan") -> list[str]:
    """The round's steps, by unit and kind of noise."""
    config = plan.config
    clip, divisor = config.protect.clip_norm, plan.sampler.divisor
    if config.protect.clips == "agent":
        sums = [
            "1. computes the gradient of its batch (the mean over records) at its own model x_i,",
            f"   and clips it: g_i = gradient * min(1, {clip} / norm), the norm over all",
            "   parameters together. No number of records enters after that: nothing is divided.",
        ]
    else:
        sums = [
            "1. computes the gradient of every record of its batch at its own model x_i, clips",
            f"   each: gradient * min(1, c / norm), c = {clip} * (1 - 2 * {divisor} / 2**24), and",
            "   adds them up to g_i, norms and sums in float64: c leaves room for rounding the sum",
            "   to float32. A record is in a batch once. It does not divide yet.",
        ]
    if config.participation is not None:
        epochs, separation = config.participation
        sums.append(
            f"   Batches are fixed: record r is in those of the rounds r mod {separation}, then "
            f"every {separation} rounds, {epochs} times."
        )
    full = isinstance(plan.sampler, Full)
    if full:
        sums.append("   The batch is all records that site i has, in every round.")
    noise = [
        "2. draws Z_t [n, d], standard normals for d parameters, fresh in every round and the",
        "   same at all sites that share a seed, and takes row i of factor @ Z_t: E_t.",
    ]
    if plan.strategy is None:
        noise.append("   The noise is V_t = E_t.")
    else:
        noise += [
            "   The noise is V_t = (E_t - sum_{s<t} strategy[t, s] V_s) / strategy[t, t]: keep all",
            "   earlier V_s, secret, until the last round.",
        ]
    after = ["3. adds it: u_i = g_i + V_t. Nothing else may touch g_i between clipping and this."]
    if config.protect.clips == "record":
        what = "the largest number of records of any site" if full else "one number for the run"
        after.append(
            f"   Then it divides u_i by the batch size {divisor}, {what},\n"
            "   whatever the number of records in this batch."
        )
    matrix = "mixing" if plan.mixing.ndim == 2 else f"mixing[t mod {len(plan.mixing)}]"
    return [
        *sums,
        *noise,
        *after,
        "4. steps: m_i = x_i - step_size * u_i (any optimizer on u_i will do), and sends m_i to",
        f"   its neighbours, the sites j with {matrix}[j, i] > 0. It sends nothing else.",
        f"5. averages what it received and its own: x_i = sum_j {matrix}[i, j] m_j.",
        *(
            [f"   It sends x_i in place of m_i and averages again, {steps} times in all."]
            if (steps := getattr(config.method, "gossip_steps", 1)) > 1
            else []
        ),
    ]
