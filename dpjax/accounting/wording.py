"""A guarantee in words: sentences for a report, a few words for a figure."""

import math

from dpjax import _validate
from dpjax.accounting import budget, parties
from dpjax.accounting.loss import AmplifiedLoss
from dpjax.accounting.parties import epsilon_text, range_text
from dpjax.accounting.records import Record, precision_cost
from dpjax.accounting.rounding import delta_text, up

__all__: list[str] = []

ATTACKERS: dict[str, str] = {
    "outsider": (
        "an outsider who sees every message on every link, the mixing matrix and the noise "
        "design, but not the noise seed"
    ),
    "aggregator": (
        "whoever receives the sum of the agents' messages of every round, but no single message "
        "and not the noise seed"
    ),
    "node": (
        "a node of the network who sees the messages it receives and knows its own gradients and "
        "noise, but not the other nodes' seeds"
    ),
    "coalition": (
        "nodes of the network who see the messages they receive and know their own gradients and "
        "noise, but not the other nodes' seeds"
    ),
}
"""Attackers by name, each with what it sees and does not know."""

_OF_SUMS = (
    "an outsider who sees the sum of the agents' messages of every round, and single messages "
    "under the masks of a secure sum alone, the mixing matrix and the noise design, but not the "
    "noise seed"
)

OVER_ROUNDS = {
    "correlated": "with noise correlated over rounds",
    "schedule": "with noise of a scale that changes by round",
    "phases": "in phases with noise of their own",
    None: "with noise correlated over rounds or of a scale that changes by round",
}
"""Why the whole loss stands from the first round on; None in records that do not say."""

_UNIT_TEXT = {
    "agent": "all data of one agent",
    "record": "one record of one agent",
    "client": "all records of one client",
}
_ACCOUNTANT_TEXT = {
    "gdp": "accounted exactly (Gaussian DP)",
    "rdp": "accounted through Renyi DP",
    "paper": "by the Whisper paper's rule",
}


def statement(of: Record, *, process: bool = True) -> str:
    """The guarantee in one sentence; then what it does not cover, and what others can learn.

    Args:
        of: The guarantee.
        process: Whether one process holds all agents, as in every run of this package; False in
            the file of a loop of one's own.
    """
    if of.relation is None:
        return f"Not private: {_rounds_text(of)} without a differential-privacy guarantee."
    assert of.attacker is not None and of.accountant is not None
    phases, rho = parties.phases(of), getattr(of.loss, "rho", None)
    how = "replacing" if of.relation.startswith("replace") else "zeroing out"
    attacker = _OF_SUMS if _of_sums(of) else ATTACKERS[of.attacker]
    rule = of.loss.accounting or _ACCOUNTANT_TEXT[of.accountant]
    # Exact where what is stated is the whole loss to the attacker.
    if phases or of.unused or of.attacker not in ("outsider", "aggregator"):
        rule = rule.replace("accounted exactly", "an upper bound")
    text = _joined(
        f"(epsilon = {epsilon_text(of)}, delta = {delta_text(of.delta)})-differentially private per"
        f" {of.unit} ({how} {_UNIT_TEXT[str(of.unit)]}; relation {of.relation}, {_bound_text(of)}) "
        f"over {_rounds_text(of)}{_participation_text(of)}{_over_rounds_text(of)} against "
        f"{attacker}{_nodes_text(of, ', agents ')}",
        of.attacker == "coalition" and ", for the data of all other agents",
        (of.attacker == "aggregator" or of.sum_only or bool(of.dropouts or of.colluders))
        and f", as long as at most {of.dropouts:,} {'is' if of.dropouts == 1 else 'are'} missing "
        f"from a sum that is opened and at most {of.colluders:,} "
        f"{'shows' if of.colluders == 1 else 'show'} it their messages and noise",
        of.gradients == "view"
        and ", only for gradients that do not depend on what the attacker cannot see",
        f"; {rule}",
        isinstance(of.loss, AmplifiedLoss) and of.loss.rates_text(),
        of.mu is not None and f", mu = {up(of.mu)}",
        rho is not None and f", rho = {up(rho)}",
        of.accountant in ("rdp", "paper") and f", exact epsilon = {up(of.exact_epsilon)}",
        parties.whose(of),
        of.loss.caveat,
        of.unsound and " (the stated epsilon is FALSE, the exact one holds)",
        of.release and _precision_text(of),
        bool(of.phases) and _total_text(of),
        phases > 1
        and bool(of.per_agent_epsilon or any(one.per_agent_epsilon for one in of.phases))
        and ". Agent i is the same one in all phases, as its user states",
        of.sum_rounding > 0
        and f". Rounding moves a sum of records by at most {up(of.sum_rounding, 2)} of the clip "
        "norm, so a run clips records to a norm that is smaller by this much",
        of.curve is not None
        and f". It holds at whichever of {_validate.counted(len(of.curve.marks), 'round')}, fixed "
        "beforehand, the run ended, also where what was released decided it",
        of.lost_noise is not None
        and f". NOT covered: from round {of.lost_noise[0]:,} on up to "
        f"{up(100 * of.lost_noise[1], 2)} % of a message's entries went out without noise, which "
        "is finer there than the numbers that it is added to",
        of.private_stop
        and f". NOT covered: the round at which {'a phase' if phases else 'it'} ended was left to "
        "a callback, which could read metrics of private data",
        of.private_partition
        and ". NOT covered: labels or other values of records decided which agent holds which "
        "record; this partition was taken as public",
        bool(of.custom) and f". It {parties.custom(of)}, which the package does not check",
        f".{records(of)} {parties.sentences(of, process)}",
    )
    if not process:
        return text
    if of.release:
        return (
            f"{text} Release: a run draws its noise key in secret, and the key must stay secret. "
            "It ends where a message is not finite, and no epsilon covers that end."
        )
    others = " about other participants" * (of.secrets != "alone")
    return (
        f"{text} Simulation: whoever knows the seed can subtract the noise. The promises{others} "
        f"hold for {parties.keepers(of)}."
    )


def caption(of: Record, digits: int = 4) -> str:
    """The guarantee in a few words, for a figure.

    Args:
        of: The guarantee.
        digits: Of its numbers, rounded up.
    """
    if of.relation is None:
        return f"not private, T = {of.rounds}"
    pattern = of.loss.pattern
    false = "FALSE: " if of.unsound else ""
    largest = "largest " * bool(parties.whose(of))
    return _joined(
        f"(epsilon = {epsilon_text(of, digits)}, delta = {delta_text(of.delta, digits)})-DP",
        (of.unsound or of.accountant in ("rdp", "paper"))
        and f" [{false}{largest}exact epsilon {up(of.exact_epsilon, digits)}]",
        f" per {of.unit} ({of.relation}",
        of.gradient_gap is not None and f", ASSUMED {of.norm} gap {of.gradient_gap:g}",
        of.smoothness is not None and f" and smoothness {of.smoothness:.4g}",
        f"), {of.attacker}",
        _of_sums(of) and " of a secure sum",
        _nodes_text(of, " of "),
        bool(of.dropouts or of.colluders)
        and f" ({of.dropouts:,} missing, {of.colluders:,} colluding)",
        of.gradients == "view" and " (gradients: view)",
        f", T = {of.rounds}",
        pattern is not None and f", k = {pattern[0]}, b = {pattern[1]}",
        of.lost_noise is not None and f", NOISE LOST from round {of.lost_noise[0]}",
        bool(of.phases) and f" in {_phases_text(of)}, total fixed beforehand",
        of.curve is not None and f", may stop at {_validate.counted(len(of.curve.marks), 'mark')}",
        of.private_stop and ", stopping round not covered",
        of.private_partition and ", partition by private values taken as public",
        f", {of.accountant} accountant, {'release' if of.release else 'simulation'}",
        bool(of.custom) and f", {parties.custom(of)}",
    )


def _joined(*parts: str | bool) -> str:
    """The parts that are said: no text stands for those that are not."""
    return "".join(part for part in parts if isinstance(part, str))


def _precision_text(of: Record) -> str:
    """What a release says of finite precision, whose cost only a run knows, not a plan."""
    reserve, _ = precision_cost(of)
    if of.added_epsilon:
        return (
            f"; {of.added_epsilon:.3g} of epsilon and {of.added_delta:.3g} of delta are for noise "
            "of finite precision"
        )
    if not reserve:
        return "; what noise of finite precision adds is not in it"
    return (
        f"; {reserve:.2g} of epsilon is for noise of finite precision, and a run that needs more "
        "is refused"
    )


def _bound_text(of: Record) -> str:
    """What keeps gradients close."""
    norm = " in L1" if of.norm == "l1" else ""
    if of.gradient_gap is None:
        clips = dict.fromkeys(f"{one.clip_norm:g}" for one in of.phases or (of,))
        most = "at most " if of.over_rounds == "phases" and not of.phases else ""
        return f"clip norm{'s' if len(clips) > 1 else ''} {most}{', '.join(clips)}{norm}"
    smooth = ""
    if of.smoothness is not None:
        smooth = f", and change by at most {of.smoothness:.4g} times the distance of two models"
    return (
        f"by one whose gradients, of whatever batch, differ by at most {of.gradient_gap:g}"
        f"{norm or ' in L2'} at every model{smooth}, which is ASSUMED and enforced by nothing"
    )


def _nodes_text(of: Record, before: str) -> str:
    return "" if of.nodes is None else before + ", ".join(map(str, of.nodes))


def _of_sums(of: Record) -> bool:
    """Whether an outsider is one who sees no single message."""
    return of.sum_only and of.attacker == "outsider"


def _rounds_text(of: Record) -> str:
    if not of.unused:
        return _validate.counted(of.rounds, "round")
    run = of.rounds - of.unused
    were = "was" if run == 1 else "were"
    return f"{_validate.counted(of.rounds, 'planned round')} (of which {run:,} {were} run)"


def _over_rounds_text(of: Record) -> str:
    # What part of a view the first rounds are is not known, whatever the noise.
    if of.white or of.gradients == "view":
        return ""
    return " in one phase" if len(of.phases) == 1 else f" {OVER_ROUNDS[of.over_rounds]}"


def records(of: Record, attacker: str = "the same attacker") -> str:
    """What several records of one person cost together; empty where no record is the unit.

    Args:
        of: The guarantee.
        attacker: Against whom.
    """
    if of.unit != "record":
        return ""
    if of.curve is not None:
        return " What several records of one person cost together is not stated with a curve."
    each = {k: parties.group_epsilon(of, k) for k in (2, 5)}
    numbers = ", ".join(
        f"{k} records cost at most epsilon = {up(cost)}"
        if cost < math.inf
        else f"for {k} records no finite epsilon follows"
        for k, cost in each.items()
    )
    if of.release and math.inf in each.values():
        numbers += ", as noise of finite precision may take all of delta there"
        # Only a run knows what its finite precision cost.
        numbers += "" if of.added_delta else "; the run's result may state one"
    vacuous = [k for k, cost in each.items() if parties.VACUOUS < cost < math.inf]
    if vacuous:
        which = "both are vacuous" if len(vacuous) == 2 else f"that of {vacuous[0]} is vacuous"
        numbers += f" ({which}: odds may change by more than e^{parties.VACUOUS:g})"
    return (
        " A person with several records is protected less, at the same delta and against "
        f"{attacker}{parties.whose(of)}: {numbers}."
    )


def _participation_text(of: Record) -> str:
    if isinstance(of.loss, AmplifiedLoss):
        return of.loss.pattern_text()
    if of.loss.pattern is None:
        return ""
    epochs, separation = of.loss.pattern
    far = f", {separation:,} apart" if epochs > 1 else ""
    who = "client" if of.unit == "client" else "record"
    return f", of which every {who} takes part in at most {epochs:,}{far},"


def _total_text(of: Record) -> str:
    """That a total was fixed, by what phases may have been chosen, and what they have spent."""
    symbol = of.spent.symbol
    total = range_text(budget.limits(vars(of), of.delta))
    return (
        f". A total of {symbol} = {total} (epsilon = {epsilon_text(of)} at delta = "
        f"{delta_text(of.delta)}) was fixed before the first phase, as its user states; later "
        "phases may have been chosen by anything released, and by nothing else that depends on the "
        f"data. Spent so far: {symbol} = {range_text(of.agents_spent)}, by {_phases_text(of)}"
    )


def _phases_text(of: Record) -> str:
    return _validate.counted(len(of.phases), "phase")
