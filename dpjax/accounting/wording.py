"""A guarantee in words: sentences for a report, a few words for a figure."""

import math

from dpjax import _validate
from dpjax.accounting import budget, parties
from dpjax.accounting.parties import epsilon_text, range_text
from dpjax.accounting.records import Record, precision_cost
from dpjax.accounting.rounding import delta_text, up

__all__ = ()

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

_OF_SITES: dict[str, str] = {
    "outsider": (
        "whoever sees every message on every link, the mixing matrix and the noise design, but "
        "does not hold the secret that the noise is drawn from"
    ),
    "node": (
        "any single site, which sees every message on every link and knows its own records, noise "
        "and secrets, but not the other sites' secrets"
    ),
    "coalition": (
        "sites that collude, see every message on every link and know their own records, noise "
        "and secrets, but not the other sites' secrets"
    ),
    "aggregator": (
        "sites that collude, the one that adds up among them, who see the sum of every round and "
        "know their own records, noise and secrets, but not the other sites' secrets"
    ),
}
"""The same where every agent is a site: neighbours read messages, and may send any."""

_OF_SUMS = (
    "an outsider who sees the sum of the agents' messages of every round, and single messages "
    "under the masks of a secure sum alone, the mixing matrix and the noise design, but not the "
    "noise seed"
)

# Why the whole loss stands from the first round on; None in records that do not say.
_OVER_ROUNDS = {
    "correlated": "with noise correlated over rounds",
    "schedule": "with noise of a scale that changes by round",
    "sampler": "in some of which alone each record takes part, perhaps the first,",
    "phases": "in phases with noise of their own",
    None: "with noise correlated over rounds or of a scale that changes by round",
}

_INSECURE = "links were NOT encrypted: started with --insecure-loopback"

_UNIT_TEXT = {
    "agent": "all data of one agent",
    "record": "one record of one agent",
    "client": "all records of one client",
}
_ACCOUNTANT_TEXT = {
    "gdp": "accounted exactly (Gaussian DP)",
    "bound": "an upper bound (Gaussian DP)",
    "rdp": "accounted through Renyi DP",
    "paper": "by the Whisper paper's rule",
}


def statement(record: Record, *, process: bool = True) -> str:
    """The guarantee in one sentence; then what it does not cover, and what others can learn.

    Args:
        record: The guarantee.
        process: Whether one process holds all agents, as in every run of this package but sites;
            False in the file of a loop of one's own.
    """
    if record.relation is None:
        return f"Not private: {_rounds_text(record)} without a differential-privacy guarantee."
    text = _promise(record) + _accounting(record) + _limits(record)
    text += f".{records(record)} {parties.sentences(record, process)}"
    if record.sites:
        return f"{text} {_sites_text(record)}"
    if not process:
        return text
    if record.release:
        return (
            f"{text} Release: a run draws its noise key in secret, and the key must stay secret. "
            "It ends where a message is not finite, and no epsilon covers that end."
        )
    others = "" if record.secrets == "alone" else " about other participants"
    return (
        f"{text} Simulation: whoever knows the seed can subtract the noise. The promises{others} "
        f"hold for {parties.keepers(record)}."
    )


def _promise(record: Record) -> str:
    """What is protected from whom, over which rounds."""
    verb = "replacing" if str(record.relation).startswith("replace") else "zeroing out"
    attackers = _OF_SITES if record.sites else ATTACKERS
    attacker = _OF_SUMS if _of_sums(record) else attackers[str(record.attacker)]
    text = (
        f"(epsilon = {epsilon_text(record)}, delta = {delta_text(record.delta)})-"
        f"differentially private per {record.unit} ({verb} {_UNIT_TEXT[str(record.unit)]}; "
        f"relation {record.relation}, {_bound_text(record)}) over {_rounds_text(record)}"
    )
    text += record.loss.pattern_text(str(record.unit))
    # What part of a view the first rounds are is not known, whatever the noise.
    if not record.white and record.gradients != "view":
        text += (
            " in one phase" if len(record.phases) == 1 else f" {_OVER_ROUNDS[record.over_rounds]}"
        )
    text += f" against {attacker}"
    text += _nodes_text(record, ", agents ")
    if record.attacker == "coalition":
        text += ", for the data of all other agents"
    if record.attacker == "aggregator" or record.sum_only or record.dropouts or record.colluders:
        are = "is" if record.dropouts == 1 else "are"
        show = "shows" if record.colluders == 1 else "show"
        text += (
            f", as long as at most {record.dropouts:,} {are} missing from a sum that is opened "
            f"and at most {record.colluders:,} {show} it their messages and noise"
        )
    if record.gradients == "view":
        text += ", only for gradients that do not depend on what the attacker cannot see"
    return text


def _accounting(record: Record) -> str:
    """How epsilon follows from the loss, and what finite precision adds."""
    loss = record.loss
    accountant = str(record.accountant)
    # Exact where what is stated is the whole loss to the attacker.
    exact = record.attacker in ("outsider", "aggregator")
    if accountant == "gdp" and (parties.phases(record) or record.unused or not exact):
        accountant = "bound"
    rule = loss.accounting or _ACCOUNTANT_TEXT[accountant]
    text = f"; {rule}{loss.size_text()}"
    if record.accountant in ("rdp", "paper"):
        text += f", exact epsilon = {up(record.exact_epsilon)}"
    text += parties.epsilon_owner(record) + loss.caveat
    if record.unsound:
        text += " (the stated epsilon is FALSE, the exact one holds)"
    if record.release:
        text += _precision_text(record)
    return text


def _limits(record: Record) -> str:
    """Under which conditions it holds, and what it does not cover."""
    text = ""
    phases = parties.phases(record)
    if record.phases:
        text += _total_text(record)
    # Budgets by agent compose by the agents' numbers.
    by_agent = record.per_agent_epsilon is not None
    by_agent |= any(phase.per_agent_epsilon is not None for phase in record.phases)
    if phases > 1 and by_agent:
        text += ". Agent i is the same one in all phases, as its user states"
    # The lower clip norm keeps the sensitivity in spite of rounding.
    if record.sum_rounding > 0:
        text += (
            f". Rounding moves a sum of records by at most {up(record.sum_rounding, 2)} of the "
            "clip norm, so a run clips records to a norm that is smaller by this much"
        )
    if record.curve is not None:
        # By any rule that reads messages alone.
        marks = _validate.counted(len(record.curve.marks), "round")
        text += (
            f". It holds at whichever of {marks}, fixed beforehand, the run ended, also where "
            "what was released decided it"
        )
    # A run that went on without noise states how far it is covered.
    if record.lost_noise is not None:
        first, share = record.lost_noise
        text += (
            f". NOT covered: from round {first:,} on up to {up(100 * share, 2)} % of a "
            "message's entries went out without noise, which is finer there than the numbers "
            "that it is added to"
        )
    if record.private_stop:
        text += (
            f". NOT covered: the round at which {'a phase' if phases else 'it'} ended was left "
            "to a callback, which "
            "could read metrics of private data"
        )
    if record.private_partition:
        text += (
            ". NOT covered: labels or other values of records decided which agent holds which "
            "record; this partition was taken as public"
        )
    if record.custom:
        text += f". It {parties.custom_text(record)}, which the package does not check"
    return text


def caption(record: Record, digits: int = 4) -> str:
    """The guarantee in a few words, for a figure.

    Args:
        record: The guarantee.
        digits: Of its numbers, rounded up.
    """
    if record.relation is None:
        return f"not private, T = {record.rounds}"
    epsilon = epsilon_text(record, digits)
    text = f"(epsilon = {epsilon}, delta = {delta_text(record.delta, digits)})-DP"
    # Rules that are not exact are followed by what is.
    if record.unsound or record.accountant in ("rdp", "paper"):
        false = "FALSE: " if record.unsound else ""
        largest = "largest " if parties.epsilon_owner(record) else ""
        text += f" [{false}{largest}exact epsilon {up(record.exact_epsilon, digits)}]"
    text += f" per {record.unit} ({record.relation}"
    if record.gradient_gap is not None:
        text += f", ASSUMED {record.norm} gap {record.gradient_gap:g}"
    if record.smoothness is not None:
        text += f" and smoothness {record.smoothness:.4g}"
    text += f"), {record.attacker}"
    if _of_sums(record):
        text += " of a secure sum"
    text += _nodes_text(record, " of ")
    if record.dropouts or record.colluders:
        text += f" ({record.dropouts:,} missing, {record.colluders:,} colluding)"
    if record.gradients == "view":
        text += " (gradients: view)"
    text += f", T = {record.rounds}"
    if record.loss.pattern is not None:
        epochs, separation = record.loss.pattern
        text += f", k = {epochs}, b = {separation}"
    if record.lost_noise is not None:
        text += f", NOISE LOST from round {record.lost_noise[0]}"
    if record.phases:
        text += f" in {_phases_text(record)}, total fixed beforehand"
    if record.curve is not None:
        text += f", may stop at {_validate.counted(len(record.curve.marks), 'mark')}"
    if record.private_stop:
        text += ", stopping round not covered"
    if record.private_partition:
        text += ", partition by private values taken as public"
    text += f", {record.accountant} accountant, {record.kind}"
    if record.insecure:
        text += f", {_INSECURE}"
    if record.custom:
        text += f", {parties.custom_text(record)}"
    return text


def _sites_text(record: Record) -> str:
    """What a guarantee of sites assumes of each party."""
    text = (
        "Sites: every site is a process of its own and draws its noise with ChaCha20, under keys "
        "of 256 bits that HKDF derives from secrets of the system's entropy. It is assumed of each "
        "site that it runs this package and its libraries unchanged, that no copy of its folder "
        "sends a round twice, and that it compared the roster by another way than the network. It "
        "holds whatever other sites send. No epsilon covers who sends when, and which site fails."
    )
    if record.sums_of_sites:
        text += (
            " Single vectors are under masks of X25519 and ChaCha20 whenever they leave a site. "
            "No site can check a sum: a false one costs accuracy."
        )
    return f"{text} The {_INSECURE}." if record.insecure else text


def _precision_text(record: Record) -> str:
    """What a release says of finite precision: a run its cost, a plan the most that it may be."""
    epsilon, delta = precision_cost(record)
    if record.sums_of_sites:
        return "; the noise is whole numbers, to which finite precision adds nothing"
    if not epsilon:
        return "; what noise of finite precision adds is not in it"
    text = f"; {epsilon:.3g} of epsilon and {delta:.3g} of delta are for noise of finite precision"
    # Only a run knows the size of its model.
    return text if record.added_epsilon else f"{text}, and a run that needs more is refused"


def _bound_text(record: Record) -> str:
    """What keeps gradients close."""
    norm = " in L1" if record.norm == "l1" else ""
    if record.gradient_gap is None:
        clips = dict.fromkeys(f"{phase.clip_norm:g}" for phase in record.phases or (record,))
        limit_text = "at most " if record.over_rounds == "phases" and not record.phases else ""
        return f"clip norm{'s' if len(clips) > 1 else ''} {limit_text}{', '.join(clips)}{norm}"
    smooth = ""
    if record.smoothness is not None:
        smooth = f", and change by at most {record.smoothness:.4g} times the distance of two models"
    return (
        f"by one whose gradients, of whatever batch, differ by at most {record.gradient_gap:g}"
        f"{norm or ' in L2'} at every model{smooth}, which is ASSUMED and enforced by nothing"
    )


def _nodes_text(record: Record, before: str) -> str:
    return "" if record.nodes is None else before + ", ".join(map(str, record.nodes))


def _of_sums(record: Record) -> bool:
    """Whether an outsider is one who sees no single message."""
    return record.sum_only and record.attacker == "outsider"


def _rounds_text(record: Record) -> str:
    if not record.unused:
        return _validate.counted(record.rounds, "round")
    run = record.rounds - record.unused
    were = "was" if run == 1 else "were"
    return f"{_validate.counted(record.rounds, 'planned round')} (of which {run:,} {were} run)"


def records(record: Record, attacker: str = "the same attacker") -> str:
    """What several records of one person cost together; empty where no record is the unit.

    Args:
        record: The guarantee.
        attacker: Against whom.
    """
    if record.unit != "record":
        return ""
    if record.curve is not None:
        return " What several records of one person cost together is not stated with a curve."
    costs = {k: parties.group_epsilon(record, k) for k in (2, 5)}
    clauses = []
    for count, cost in costs.items():
        if cost < math.inf:
            clauses.append(f"{count} records cost at most epsilon = {up(cost)}")
        else:
            clauses.append(f"for {count} records no finite epsilon follows")
    numbers = ", ".join(clauses)
    if record.release and math.inf in costs.values():
        numbers += ", as noise of finite precision may take all of delta there"
        # Only a run knows what its finite precision cost.
        numbers += "" if record.added_delta else "; the run's result may state one"
    # Odds that may change so much promise nothing.
    vacuous = [k for k, cost in costs.items() if parties.VACUOUS < cost < math.inf]
    if vacuous:
        which = "both are vacuous" if len(vacuous) == 2 else f"that of {vacuous[0]} is vacuous"
        numbers += f" ({which}: odds may change by more than e^{parties.VACUOUS:g})"
    return (
        " A person with several records is protected less, at the same delta and against "
        f"{attacker}{parties.epsilon_owner(record)}: {numbers}."
    )


def _total_text(record: Record) -> str:
    """That a total was fixed, by what phases may have been chosen, and what they have spent."""
    symbol = record.spent.symbol
    total = range_text(budget.limits(vars(record), record.delta))
    return (
        f". A total of {symbol} = {total} (epsilon = {epsilon_text(record)} at delta = "
        f"{delta_text(record.delta)}) was fixed before the first phase, as its user states; later "
        "phases may have been chosen by anything released, and by nothing else that depends on the "
        f"data. Spent so far: {symbol} = {range_text(record.agents_spent)}, by "
        f"{_phases_text(record)}"
    )


def _phases_text(record: Record) -> str:
    return _validate.counted(len(record.phases), "phase")
