"""A guarantee in words: sentences for a report, a few words for a figure."""

import math

from dpjax._numerics import delta_text, up
from dpjax.accounting import parties
from dpjax.accounting.records import Record

__all__: list[str] = []

_NODES = (
    "nodes of the network who see the messages they receive and know their own gradients and "
    "noise, but not the other nodes' seeds"
)

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
    "coalition": _NODES,
    "nodes": _NODES,
}
"""Attackers by name, each with what it sees and does not know; "nodes" stands in older records."""

_SEALED = (
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

_RELATION_TEXT = {
    "replace_agent": "replacing all data of one agent",
    "replace_record": "replacing one record of one agent",
    "zero_out_record": "zeroing out one record of one agent",
    "replace_client": "replacing all records of one client",
    "zero_out_client": "zeroing out all records of one client",
}
_GRADIENTS_TEXT = {
    "any": "",
    "view": ", only for gradients that do not depend on what the attacker cannot see",
}
_ACCOUNTANT_TEXT = {
    "gdp": "accounted exactly (Gaussian DP)",
    "rdp": "accounted through Renyi DP",
    "paper": "by the Whisper paper's rule",
    "pld": (
        "with batches drawn anew in every round and kept secret, each record apart from all "
        "others, accounted numerically from above (privacy loss distributions)"
    ),
    "zcdp": "accounted by concentrated DP (zCDP)",
    "pure": "accounted by adding up epsilons",
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
    text = (
        f"({_epsilon_text(of)}, delta = {delta_text(of.delta)})-differentially private per "
        f"{of.unit} ({_RELATION_TEXT[of.relation]}; relation {of.relation}, {_bound_text(of)}) "
        f"over {_rounds_text(of)}{_participation_text(of)}"
        f"{_white_text(of)} against "
        f"{_attacker_text(of)}{_nodes_text(of, ', agents ')}{_others_text(of)}{_sum_text(of)}"
        f"{_GRADIENTS_TEXT[of.gradients]}; "
        f"{_accountant_text(of)}{_sampled_text(of)}"
    )
    if of.mu is not None:
        text += f", mu = {up(of.mu)}"
    if (rho := getattr(of.other_loss, "rho", None)) is not None:
        text += f", rho = {up(rho)}"
    if of.accountant in ("rdp", "paper"):
        text += f", exact epsilon = {up(of.exact_epsilon)}"
    if of.accountant == "pure":
        text += ", of noise in exact arithmetic"
    if of.unsound:
        text += " (the stated epsilon is FALSE, the exact one holds)"
    if of.release:
        text += (
            f"; {of.added_epsilon:.3g} of epsilon and {of.added_delta:.3g} of delta are for noise "
            "of finite precision"
            if of.added_epsilon
            else _reserve_text(of)
        )
    text += _total_text(of)
    if of.sum_rounding:
        text += (
            f". Sums of records round by at most {up(of.sum_rounding, 2)} of the clip norm; every "
            "record is clipped to that much less"
        )
    if of.curve is not None:
        text += (
            f". It holds at whichever of {len(of.curve.marks):,} rounds, fixed beforehand, the run "
            "ended, also where what was released decided it"
        )
    if of.lost_noise is not None:
        text += (
            f". NOT covered: from round {of.lost_noise[0]:,} on up to "
            f"{up(100 * of.lost_noise[1], 2)} % of a message's entries went out without noise, "
            "which is finer there than the numbers that it is added to"
        )
    if of.private_stop:
        ended = "a phase" if parties.phases(of) else "it"
        text += (
            f". NOT covered: the round at which {ended} ended was left to a callback, which could "
            "read metrics of private data"
        )
    if of.custom:
        text += f". It {parties.custom(of)}, which the package does not check"
    text += f".{records(of)} {parties.sentences(of, process)}"
    if not process:
        return text
    if of.release:
        return text + " Release: the noise key was drawn secretly and must stay secret."
    return (
        f"{text} Simulation: whoever knows the seed can subtract the noise. What is said of other "
        f"participants is about {parties.keepers(of)}."
    )


def caption(of: Record, digits: int = 4) -> str:
    """The guarantee in a few words, for a figure.

    Args:
        of: The guarantee.
        digits: Of its numbers, rounded up.
    """
    if of.relation is None:
        return f"not private, T = {of.rounds}"
    exact = ""
    if of.accountant in ("rdp", "paper"):
        exact = f" [exact epsilon {up(of.exact_epsilon, digits)}]"
    if of.unsound:
        exact = f" [FALSE: exact epsilon {up(of.exact_epsilon, digits)}]"
    custom = f", {parties.custom(of)}" if of.custom else ""
    gap = "" if of.gradient_gap is None else f", ASSUMED {of.norm} gap {of.gradient_gap:g}"
    if of.smoothness is not None:
        gap += f" and smoothness {of.smoothness:.4g}"
    return (
        f"({_epsilon_text(of, digits)}, delta = {delta_text(of.delta, digits)})-DP{exact} "
        f"per {of.unit} ({of.relation}{gap}), {of.attacker}{_under(of)}{_nodes_text(of)}{_few(of)}"
        f"{' (gradients: view)' if of.gradients == 'view' else ''}, "
        f"T = {of.rounds}{_pattern_text(of)}{_stop_text(of)}, "
        f"{of.accountant} accountant, "
        f"{'release' if of.release else 'simulation'}{custom}"
    )


def _reserve_text(of: Record) -> str:
    """What a release's plan says of finite precision, whose cost only a run knows."""
    left = of.epsilon - of.exact_epsilon
    if left <= 1e-6 * of.epsilon:
        return "; what noise of finite precision adds is not in it"
    return (
        f"; {left:.2g} of epsilon is for noise of finite precision, and a run that needs more is "
        "refused"
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


def _epsilon_text(of: Record, digits: int = 6) -> str:
    if of.per_agent_epsilon and min(of.per_agent_epsilon) < of.epsilon:
        least = up(min(of.per_agent_epsilon), digits)
        return f"epsilon = {least} to {up(of.epsilon, digits)} by agent"
    return f"epsilon = {up(of.epsilon, digits)}"


def _others_text(of: Record) -> str:
    """Whose data a coalition's number is about."""
    return ", for the data of all other agents" if of.attacker in ("coalition", "nodes") else ""


def _nodes_text(of: Record, before: str = " of ") -> str:
    return "" if of.nodes is None else before + ", ".join(map(str, of.nodes))


def _attacker_text(of: Record) -> str:
    """What the attacker sees: of noise in shares no single message."""
    assert of.attacker is not None
    return _SEALED if of.sealed and of.attacker == "outsider" else ATTACKERS[of.attacker]


def _under(of: Record) -> str:
    return " of a secure sum" if of.sealed and of.attacker == "outsider" else ""


def _sum_text(of: Record) -> str:
    """Who of a sum may be missing, and who may collude."""
    if of.attacker != "aggregator" and not (of.sealed or of.dropouts or of.colluders):
        return ""
    return (
        f", as long as at most {of.dropouts:,} are missing from a sum that is opened and at most "
        f"{of.colluders:,} show it their messages and noise"
    )


def _few(of: Record) -> str:
    if not (of.dropouts or of.colluders):
        return ""
    return f" ({of.dropouts:,} missing, {of.colluders:,} colluding)"


def _rounds_text(of: Record) -> str:
    if not of.unused:
        return f"{of.rounds:,} rounds"
    return f"{of.rounds:,} planned rounds (of which {of.rounds - of.unused:,} were run)"


def _accountant_text(of: Record) -> str:
    """How epsilon follows; exactly where what is stated is the whole loss to the attacker."""
    exact = of.attacker in ("outsider", "aggregator") and not (parties.phases(of) or of.unused)
    text = _ACCOUNTANT_TEXT[str(of.accountant)]
    return text if exact else text.replace("accounted exactly", "an upper bound")


def _white_text(of: Record) -> str:
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
    vacuous = [k for k, cost in each.items() if parties.VACUOUS < cost < math.inf]
    note = ""
    if vacuous:
        which = "both are vacuous" if len(vacuous) == 2 else f"that of {vacuous[0]} is vacuous"
        note = f" ({which}: odds may change by more than e^{parties.VACUOUS:g})"
    return (
        f" A person with several records is protected less, at the same delta and against "
        f"{attacker}: "
        f"{numbers}{note}."
    )


def _participation_text(of: Record) -> str:
    if (pattern := _flipped(of)) is not None:
        return (
            f" of noise correlated over rounds, in {pattern[0]:,} of which, {pattern[1]:,} apart, "
            "every record may be drawn,"
        )
    if (dealt := _dealt(of)) is None:
        return ""
    epochs, separation = dealt
    who = "client" if of.unit == "client" else "record"
    far = f", {separation:,} apart" if epochs > 1 else ""
    return f", of which every {who} takes part in at most {epochs:,}{far},"


def _dealt(of: Record) -> tuple[int, int] | None:
    """(epochs, separation) of what takes part by a fixed order."""
    return of.participation or getattr(of.other_loss, "participation", None)


def _sampled_text(of: Record) -> str:
    """What a report of DP-SGD tells: where every round and every agent has the same."""
    pairs = {
        (rate, ratio)
        for one in getattr(of.other_loss, "phases", ())
        for rate, ratio in zip(one.rates, one.ratios, strict=True)
        if one.rounds and not one.whole and one.separation == 1
    }
    if len(pairs) != 1 or _flipped(of) is not None:
        return ""
    ((rate, ratio),) = pairs
    multiplier = f", noise multiplier {1 / ratio:.4g}" if ratio else ""
    return f", sampling rate {rate:.4g}{multiplier}"


def _flipped(of: Record) -> tuple[int, int] | None:
    """(times, separation) where a record may be drawn in some rounds alone."""
    phases = getattr(of.other_loss, "phases", ())
    apart = max((one.separation for one in phases), default=1)
    return None if apart == 1 else (sum(one.times for one in phases), apart)


def _pattern_text(of: Record) -> str:
    pattern = _dealt(of) or _flipped(of)
    return "" if pattern is None else f", k = {pattern[0]}, b = {pattern[1]}"


def _total_text(of: Record) -> str:
    """That a total was fixed, by what phases may have been chosen, and what they have spent."""
    if not of.phases:
        return ""
    names = {"gdp": ("mu", "mu"), "zcdp": ("rho", "rho"), "pure": ("epsilon", "bound")}
    name, field = names[of.loss.kind]
    return (
        f". A total of {name} = {up(getattr(of.loss, field))} (epsilon = {up(of.epsilon)} at delta "
        f"= {delta_text(of.delta)}) was fixed before the first phase, as its user states; later "
        "phases may have been chosen by anything released, and by nothing else that depends on the "
        "data. Spent so far: "
        f"{name} = {up(getattr(of.spent, field))}, by {_phases_text(of)}"
    )


def _phases_text(of: Record) -> str:
    return f"{len(of.phases)} phase{'s' if len(of.phases) > 1 else ''}"


def _stop_text(of: Record) -> str:
    text = "" if of.lost_noise is None else f", NOISE LOST from round {of.lost_noise[0]}"
    if of.phases:
        text += f" in {_phases_text(of)}, total fixed beforehand"
    else:
        text += "" if of.curve is None else f", may stop at {len(of.curve.marks)} marks"
    return text + (", stopping round not covered" if of.private_stop else "")
