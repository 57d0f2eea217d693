"""What a guarantee's record refuses: fields that contradict each other, or state too little."""

import math
from typing import TYPE_CHECKING

from dpjax import _validate
from dpjax.accounting import budget, losses, parties, spending
from dpjax.accounting.wording import ATTACKERS

if TYPE_CHECKING:
    from dpjax.accounting.guarantee import Guarantee

__all__: list[str] = []

_SUMS = ("aggregator", "outsider")
"""Attackers who may see sums and no single message."""


def check(of: "Guarantee") -> None:
    """Refuse a record that contradicts itself.

    Args:
        of: The record, while it is made; its unit and its tuples are put into one form.

    Raises:
        ValueError: Naming the field, its value and the remedy.
    """
    _validate.integer("rounds", of.rounds, least=0)
    _added(of)
    _loss(of)
    _curve(of)
    for name in ("release", "white", "unsound", "private_stop", "sealed"):
        _validate.flag(name, getattr(of, name))
    exact = of.exact_epsilon  # Refuses a bad delta.
    if not of.epsilon >= 0:
        raise ValueError(f"epsilon is {of.epsilon}; give a number >= 0")
    if of.relation is None:
        if not of.epsilon == of.mu == math.inf or of.release:
            raise ValueError(
                f"relation is None with epsilon {of.epsilon}; name the neighbouring relation "
                f"({', '.join(budget.RELATIONS)}), or use Guarantee.none"
            )
        return
    _participation(of)
    unit = budget.unit(of.relation)
    if of.unit is not None and of.unit != unit:
        raise ValueError(
            f"unit is {of.unit!r}, relation {of.relation!r} protects {unit!r}; leave it out"
        )
    object.__setattr__(of, "unit", unit)
    _validate.one_of("attacker", of.attacker, ATTACKERS)
    if of.nodes is not None and (of.attacker != "coalition" or not of.nodes):
        raise ValueError(
            f"nodes is {of.nodes} with attacker {of.attacker!r}; give the agents of a coalition"
        )
    for name in ("dropouts", "colluders"):
        number = _validate.integer(name, getattr(of, name), least=0)
        object.__setattr__(of, name, number)
        if number and of.attacker not in _SUMS:
            raise ValueError(
                f"{name} is {number} with attacker {of.attacker!r}, who is no aggregator of sums; "
                "leave it out"
            )
    if of.sealed and of.attacker not in _SUMS:
        raise ValueError(
            f"sealed is True with attacker {of.attacker!r}, who reads single messages; state what "
            "whoever sees sums alone is told"
        )
    if of.secrets is not None:
        _validate.one_of("secrets", of.secrets, parties.SECRETS)
    if of.over_rounds is not None:
        _validate.one_of("over_rounds", of.over_rounds, ("correlated", "schedule", "phases"))
        if of.white:
            raise ValueError(
                f"over_rounds is {of.over_rounds!r} of noise that is white over rounds; leave it "
                "out, or give white=False"
            )
    rules = budget.ACCOUNTANTS if of.other_loss is None else (of.other_loss.kind,)
    _validate.one_of("accountant", of.accountant, rules)
    _release(of)
    _bound(of)
    _validate.integer("phase", of.phase, least=0)
    if any(not (isinstance(name, str) and name.isidentifier()) for name in of.custom):
        raise ValueError(f"custom is {_validate.shown(of.custom)}; give names of classes")
    _validate.integer("unused", of.unused, least=0, most=of.rounds)
    if of.lost_noise is not None:
        first, share = of.lost_noise
        if _validate.integer("lost_noise", first) and not 0 < share <= 1:
            raise ValueError(f"lost_noise is {of.lost_noise}; give (round, share), a share up to 1")
    if of.per_agent_epsilon is not None:
        values = tuple(float(value) for value in of.per_agent_epsilon)
        if not values or max(values) != of.epsilon or min(values) < 0:
            raise ValueError(
                f"per_agent_epsilon is {values} with epsilon {of.epsilon}; epsilon is their maximum"
            )
        object.__setattr__(of, "per_agent_epsilon", values)
    _phases(of)
    if of.unsound != (exact > of.epsilon) or (of.unsound and of.accountant != "paper"):
        raise ValueError(
            f"epsilon is {of.epsilon} with {_loss_text(of)} and delta {of.delta}, whose exact "
            f"epsilon is {exact}; state at least that (unsound=True only for the paper's rule "
            "where it is false)"
        )


def _phases(of: "Guarantee") -> None:
    """Refuse phases that pass the total that the record states, or are about something else."""
    if not of.phases:
        return
    for one in of.phases:
        if not isinstance(one, type(of)) or one.phases or one.relation is None:
            raise ValueError(
                f"phases has {_validate.shown(one)}; give the guarantees of single phases"
            )
    if of.gradients == "view" or of.nodes is not None:
        said = f"gradients is {of.gradients!r}" if of.nodes is None else f"nodes is {of.nodes}"
        raise ValueError(
            f"{said} under a total; messages of later phases tell of earlier gradients, and agents "
            "are numbered anew where some have left: plan every phase for gradients='any' and "
            "attacker 'outsider' or 'node'"
        )
    every = spending.joined(of.phases)
    for name in (
        "relation", "attacker", "delta", "release", "gradients", "norm", "clip_norm", "rounds",
        "gradient_gap", "smoothness", "dropouts", "colluders", "sealed", "private_stop",
        "secrets", "lost_noise", "unused", "phase", "custom",
    ):  # fmt: skip
        if getattr(of, name) != getattr(every, name):
            raise ValueError(
                f"{name} is {getattr(of, name)!r}, and {getattr(every, name)!r} of its phases; "
                "make it with Guarantee.within"
            )
    spent, whole = of.spent, of.loss
    name = {"gdp": "mu", "zcdp": "rho", "pure": "epsilon"}[spent.kind]
    if budget.size(spent) > budget.size(whole):
        raise ValueError(
            f"{name} of {len(of.phases)} phases is {budget.size(spent):.6g} together, more than "
            f"the total's {budget.size(whole):.6g} (epsilon {of.epsilon:.6g} at delta "
            f"{of.delta:g}); plan the next phase for what budget.remaining(total, spent) leaves"
        )
    if every.added_epsilon > of.added_epsilon or every.added_delta > of.added_delta:
        raise ValueError(
            f"added_epsilon is {every.added_epsilon:.3g} and added_delta {every.added_delta:.3g} "
            f"of {len(of.phases)} phases together, more than the {of.added_epsilon:.3g} and "
            f"{of.added_delta:.3g} that the total keeps for noise of finite precision; fix a total "
            "of a larger Budget(..., reserve=...), run fewer rounds or train a smaller model"
        )


def _bound(of: "Guarantee") -> None:
    """Refuse gradients that nothing bounds, or that are bounded twice."""
    _validate.one_of("norm", of.norm, ("l2", "l1"))
    if of.gradient_gap is None:
        _validate.positive("clip_norm", of.clip_norm)
        if of.smoothness is not None:
            raise ValueError(f"smoothness is {of.smoothness} without a gradient gap; leave it out")
        return
    if of.smoothness is not None:
        _validate.positive("smoothness", of.smoothness)
    _validate.positive("gradient_gap", of.gradient_gap)
    if of.clip_norm != math.inf or of.relation != "replace_agent" or of.release:
        raise ValueError(
            f"gradient_gap is {of.gradient_gap} with clip norm {of.clip_norm}, relation "
            f"{of.relation!r} and release {of.release}; a gap is assumed of whole agents that are "
            "not clipped, in simulations"
        )


def _loss_text(of: "Guarantee") -> str:
    return f"mu {of.mu}" if of.other_loss is None else f"a {type(of.other_loss).__name__} loss"


def _loss(of: "Guarantee") -> None:
    """Refuse a loss that is stated twice, not at all, or of other rounds."""
    other = of.other_loss
    if other is None:
        if of.mu is None:
            raise ValueError("mu is None without other_loss; give one of the two")
        losses.Gaussian(of.mu)
        return
    if not isinstance(other, losses.Pld | losses.Concentrated | losses.Pure):
        raise ValueError(
            f"other_loss is {_validate.shown(other)}; give a loss of dpjax.accounting.losses, and "
            "a Gaussian one by its mu"
        )
    contradictions = {
        "mu": of.mu is not None,
        "participation": of.participation is not None,
        "per_agent_epsilon": of.per_agent_epsilon is not None,
        "curve": of.curve is not None,
        "white": of.white is not True,
        "relation": of.relation is None,
    }
    wrong = [name for name, is_wrong in contradictions.items() if is_wrong]
    if wrong:
        raise ValueError(
            f"{wrong[0]} is {getattr(of, wrong[0])!r} with a {type(other).__name__} loss; it is "
            "for Gaussian ones, leave it as it is by default"
        )
    if other.rounds != of.rounds:
        raise ValueError(f"rounds is {of.rounds}, the loss covers {other.rounds}; give the same")
    if not isinstance(other, losses.Pld):
        return
    if (of.relation, of.attacker) != ("zero_out_record", "outsider"):
        raise ValueError(
            f"relation is {of.relation!r} and attacker {of.attacker!r} with a Pld loss; sampling "
            "amplifies for zero_out_record and an outsider alone"
        )


def _added(of: "Guarantee") -> None:
    if not 0 <= of.added_epsilon < math.inf:
        raise ValueError(f"added_epsilon is {of.added_epsilon}; give a number >= 0")
    if not 0 <= of.sum_rounding < math.inf:
        raise ValueError(f"sum_rounding is {of.sum_rounding}; give a number >= 0")
    if not (of.added_delta == 0 or 0 < of.added_delta < of.delta):
        raise ValueError(
            f"added_delta is {of.added_delta} with delta {of.delta}, which includes it; "
            "give a number from 0 to below delta"
        )


def _curve(of: "Guarantee") -> None:
    if of.curve is None:
        return
    if of.relation is None or of.rounds not in of.curve.marks:
        raise ValueError(
            f"curve has marks {of.curve.marks} for {of.rounds} rounds; make it with "
            "Guarantee.stopping_at"
        )
    assert of.mu is not None
    if not of.curve.holds(of.mu, of.rounds, of.delta - of.added_delta):
        raise ValueError(
            f"curve.delta is {of.curve.delta} with delta {of.delta}, of which "
            f"{of.added_delta} is used, which is too much to hold at all its marks; make it "
            "with Guarantee.stopping_at"
        )


def _release(of: "Guarantee") -> None:
    """Refuse a release accounted for a view of which rounded messages are no function."""
    _validate.one_of("gradients", of.gradients, ("any", "view"))
    if not of.release:
        return
    if of.attacker == "aggregator" or of.gradients == "view":
        raise ValueError(
            f"attacker is {of.attacker!r} with gradients {of.gradients!r} in a release, "
            "which rounds every message: sums of rounded messages can show what sums of exact "
            "ones hide. State the loss of all messages: attacker 'outsider', or gradients "
            "'any' for nodes"
        )


def _participation(of: "Guarantee") -> None:
    if of.participation is None:
        return
    remedy = "give (epochs, separation) that fit the rounds, or None"
    if not isinstance(of.participation, tuple) or len(of.participation) != 2:
        raise ValueError(f"participation is {of.participation!r}; {remedy}")
    epochs = _validate.integer("participation[0]", of.participation[0], least=0)
    separation = _validate.integer("participation[1]", of.participation[1])
    if epochs > of.rounds:
        raise ValueError(f"participation is {of.participation} in {of.rounds} rounds; {remedy}")
    assert of.relation is not None
    if budget.unit(of.relation) == "agent":
        raise ValueError(
            f"participation is {of.participation} under relation {of.relation!r}; an agent "
            "takes part in every round, leave it None"
        )
    object.__setattr__(of, "participation", (epochs, separation))
