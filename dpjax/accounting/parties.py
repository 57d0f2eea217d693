"""Who is protected from whom: one row a party, from what a guarantee records.

A guarantee's number is about one attacker. What other parties learn follows from who draws the
noise from which secret (`Secrets`): noise that an agent draws from a secret of its own hides its
data from other agents as it does from an outsider; noise of a seed that agents share does not.
"""

import textwrap
from functools import lru_cache
from math import exp, fsum, inf, log, sqrt
from typing import Any, NamedTuple

from dpjax import _html
from dpjax.accounting import finite, losses
from dpjax.accounting.arrays import Floats
from dpjax.accounting.loss import AmplifiedLoss, Loss
from dpjax.accounting.records import Record, Secrets, precision_cost
from dpjax.accounting.rounding import MARGIN, delta_text, up

__all__ = ["Party", "Protection"]

VACUOUS = 20.0
"""Epsilons of several records are called vacuous above this: odds may change by e^20."""

_COLUMNS = 100
# How close a group's epsilon is to its bound, and beyond which epsilon it is not looked for.
_CLOSE = 4e-3
_MOST_STEPS = 500
_ROUNDING = 1e-9
ANOTHER = "another participant"

_WHY: dict[Secrets | None, str] = {
    "own": "every agent draws its noise from a secret of its own; other agents, also together, "
    "know no more of it than an outsider",
    "group": "members of a group hold its {seed}, and can subtract the group's noise",
    "shared": "it holds the {seed} from which all agents draw their noise, and can subtract it",
    "links": "it knows the secrets of its links; a plan for attacker='node' covers it",
    "shares": "it knows its own share of the noise, and may be one of the {colluders:,} colluders "
    "that are accounted for (with none, give colluders=1)",
    None: "nothing is recorded of who knows the noise's secrets: a design of one's own, phases "
    "whose groups may differ, or an older record",
}
_OTHER_GROUP = "it lacks the group's {seed}, and knows no more than an outsider"
_DRAWN = "it may know which records were drawn, and this epsilon counts on secret batches"
_CORRELATED = "it can work out its own noise, and other agents' noise is correlated with that"
_RELEASED = "it knows no more than an outsider, also together with others"
_APART = ", if it neither runs this process nor reads its key, which draws all agents' noise"
_PROCESS = "whoever runs this process"
_LEFT = "a participant who has left"
_SINGLE = "; a neighbour reads single noisy messages, not averages"
_OPERATOR = (
    "the operator of a site",
    False,
    "it holds that site's records and secrets; for other sites' records it is a participant",
)
_THIEF = (
    "whoever gets a site's secret",
    False,
    "with it, from a backup say, all noise that it draws can be subtracted, past and to come",
)

# Whom a simulation's rows are about; in a simulation itself one seed draws all noise.
_KEEPERS: dict[str | None, str] = {
    "own": "agents who each keep a secret of their own",
    "group": "groups that each keep a seed of their own",
    "shared": "agents who keep their shared seed secret from everybody else",
    "links": "agents who keep the secrets of their links",
    "shares": "agents who each keep a secret of their own",
    "alone": "one agent who keeps its seed secret",
    "batches": "agents who keep noise and batches secret",
    None: "parties who do not know it",
}


class Party(NamedTuple):
    """What a plan promises against one party, for one protected unit.

    Attributes:
        party: Who.
        epsilon: An upper bound at ``delta``; None where nothing is promised.
        delta: Delta of the guarantee.
        why: The reason, as the end of a sentence.
        per_agent_epsilon: [n] the same for the data of each agent, where they differ.

    Example:
        >>> from dpjax.accounting.parties import Party
        >>> print(Party("participants", None, 1e-5, "they know the seed"))
        NOT protected from participants: they know the seed.
    """

    party: str
    epsilon: float | None
    delta: float
    why: str
    per_agent_epsilon: Floats | None = None

    def __str__(self) -> str:
        """The row as a sentence."""
        if self.epsilon is None:
            return f"NOT protected from {self.party}: {self.why}."
        cost = f"epsilon = {epsilon_text(self)}, delta = {delta_text(self.delta)}"
        return f"Protected from {self.party} ({cost}): {self.why}."


class Protection(tuple[Party, ...]):
    """Rows of `Party`; printed it is a table.

    Example:
        >>> from dpjax.accounting.parties import Party, Protection
        >>> print(Protection([Party("participants", None, 1e-5, "they know the seed")]))
        participants  NOT protected  they know the seed
    """

    def _costs(self) -> list[str]:
        return [
            "NOT protected" if party.epsilon is None else f"epsilon = {epsilon_text(party)}"
            for party in self
        ]

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        pairs = zip(self, self._costs(), strict=True)
        rows = [{"party": party.party, "promise": cost, "why": party.why} for party, cost in pairs]
        return _html.html_table(rows)

    def __str__(self) -> str:
        """The table: who, epsilon, why."""
        costs = self._costs()
        party_width = max(len(row.party) for row in self)
        cost_width = max(map(len, costs))
        indent = " " * (party_width + cost_width + 4)
        lines = list[str]()
        for row, cost in zip(self, costs, strict=True):
            first = f"{row.party:<{party_width}}  {cost:<{cost_width}}  "
            lines += textwrap.wrap(
                row.why, _COLUMNS, initial_indent=first, subsequent_indent=indent
            )
        return "\n".join(lines)


def table(record: Record, unprotected: str = "no noise is added") -> Protection:
    """Who is protected from whom: a row for each party, printed as a table.

    Guarantee: a row's epsilon is an upper bound at ``delta`` against that party, for the same
    relation, rounds and assumptions as this record's; None promises nothing. Rows are about a
    deployment whose agents keep their secrets: whoever runs this process, knows the seed of a
    simulation, the key of a release or the secret of a site is not protected from.

    Args:
        record: The guarantee.
        unprotected: Why nobody is protected, where there is no guarantee.

    Returns:
        Rows (party, epsilon, delta, why): an outsider, other participants, a stated coalition, an
        aggregator or server, whoever runs this process, whoever holds the seed; of sites in place
        of the last three, since nobody aggregates: the operator of a site, whoever gets its secret.
    """
    if record.relation is None:
        return Protection(Party(name, None, 0.0, unprotected) for name in _NAMES.values())
    # From the weakest view to the strongest.
    outsider = (_NAMES["outsider"], *_outsider(record))
    reasons = [outsider, *_participants(record)]
    if not record.sites or record.sum_only:
        reasons.append((_NAMES["aggregator"], *_aggregator(record)))
    # A message without noise tells everybody.
    if record.lost_noise is not None:
        why = f"from round {record.lost_noise[0]:,} on, entries of messages went out without noise"
        reasons = [(party, False, why) for party, *_ in reasons]
    reasons += _insiders(record)
    # The paper's rule may state less than what holds.
    epsilon = max(record.epsilon, record.exact_epsilon)
    assumptions = _assumed(record)
    epsilons = None if record.unsound else record.per_agent_epsilon
    rows = []
    for party, protected, why in reasons:
        if protected:
            rows.append(Party(party, epsilon, record.delta, why + assumptions, epsilons))
        else:
            rows.append(Party(party, None, record.delta, why))
    return Protection(rows)


def epsilon_text(record: Record | Party, digits: int = 6) -> str:
    """Epsilon, or the range of agents' epsilons, rounded up.

    Args:
        record: The guarantee, or a party that it protects from.
        digits: Of its numbers.
    """
    return range_text(record.per_agent_epsilon or (record.epsilon,), digits)


def range_text(values: Any, digits: int = 6) -> str:
    """A number, or the range of agents' numbers, rounded up.

    Args:
        values: [n] one an agent, or [1] one for all.
        digits: Of the numbers.
    """
    smallest = up(min(values), digits)
    largest = up(max(values), digits)
    return largest if min(values) == max(values) else f"{smallest} to {largest} by agent"


def epsilon_owner(record: Record) -> str:
    """Whose epsilon a single number is, where agents' differ."""
    unequal = min(record.per_agent_epsilon or (record.epsilon,)) < record.epsilon
    return ", at the agent with the largest epsilon" if unequal else ""


def _assumed(record: Record) -> str:
    """What every promise of a guarantee counts on, beside who knows which secret."""
    text = ""
    if record.gradients == "view":
        text += ", for gradients that do not depend on what it cannot see"
    if record.sum_only:
        text += (
            f", with at most {record.dropouts:,} missing from a sum"
            f" and {record.colluders:,} colluding"
        )
    if record.gradient_gap is not None:
        text += f"; the gradient gap {record.gradient_gap:g} is ASSUMED"
    return f"{text}; {custom_text(record)}" if record.custom else text


def custom_text(record: Record) -> str:
    """Which parts of the user's own a guarantee relies on, as a verb and its object.

    Args:
        record: The guarantee, of some.
    """
    return f"relies on your own {', '.join(f'`{name}`' for name in record.custom)}"


def covers(record: Record, attacker: str) -> bool:
    """Whether a guarantee covers an attacker who is not the stated one.

    Args:
        record: The guarantee.
        attacker: "outsider", "node" (any single one) or "aggregator".
    """
    return any(
        row.party == _NAMES.get(attacker) and row.epsilon is not None for row in table(record)
    )


def sentences(record: Record, process: bool) -> str:
    """The rows as sentences, but for the stated attacker and for whoever holds the seed.

    Args:
        record: The guarantee, whose statement says those two itself.
        process: Whether one process holds all agents, as in every run of this package but sites.
    """
    named = {_named(record)} if process else {_named(record), _PROCESS}
    # Who gets a site's secret is named nowhere else in a statement.
    end = None if record.sites else -1
    return " ".join(str(row) for row in table(record)[:end] if row.party not in named)


_Row = tuple[str, bool, str]
_NAMES = {"outsider": "an outsider", "node": ANOTHER, "aggregator": "an aggregator or server"}


def _named(record: Record) -> str:
    """What the stated attacker is called in the table."""
    if record.nodes is not None:
        return f"the coalition of agents {', '.join(map(str, record.nodes))}"
    return _NAMES.get(str(record.attacker), "the stated nodes together")


def phases(record: Record) -> int:
    """How many phases a record covers at least; 0 of a run of its own."""
    return len(record.phases) or 2 * (record.over_rounds == "phases")


def _of_others(record: Record) -> bool:
    """Whether the number leaves out what a coalition's own agents lose to anybody else."""
    return record.attacker == "coalition" and record.secrets != "own"


def _outsider(record: Record) -> tuple[bool, str]:
    if record.sum_only and record.attacker in ("outsider", "aggregator"):
        return True, "it sees sums, and single messages under the masks of a secure sum alone"
    if record.attacker == "outsider":
        return True, "it sees every message, but no secret of the noise"
    # An outsider sees the coalition's own messages, too.
    if _of_others(record):
        return False, f"this number does not cover the data of {_named(record)}"
    if (
        record.attacker != "aggregator"
        and record.gradients == "any"
        and record.secrets in ("own", "links")
    ):
        return True, "it sees every message, but none of the secrets that agents know"
    return False, "it sees messages that the stated attacker does not see"


def _participants(record: Record) -> list[_Row]:
    """Other agents: those of a release in one process are apart from it and its key."""
    rows = _others(record)
    if record.attacker == "coalition":
        rows.insert(
            0, (_named(record), True, "it is the stated attacker of all other agents' data")
        )
    protected = bool(rows) and record.lost_noise is None and all(row[1] for row in rows)
    if record.release:
        suffix = _SINGLE if record.sites else _APART
        suffix = "" if record.sums_of_sites else suffix
        rows = [(party, holds, f"{why}{suffix}" if holds else why) for party, holds, why in rows]
    if record.sites and rows:
        why = "it keeps what it knew as a participant: others must replace secrets that it held"
        if protected:
            why = "it knows its own secrets alone, and no site takes its messages any more"
        rows.append((_LEFT, protected, why))
    elif phases(record) and protected and not record.release:
        # In a release its row would repeat another participant's: each phase draws new keys.
        why = "it knows its secrets; every later phase must draw its noise from new ones"
        rows.append((_LEFT, True, why))
    return rows


def _others(record: Record) -> list[_Row]:
    """Other agents: one row, or two where they differ."""
    secrets = record.secrets
    # With one agent there is nobody else to protect from.
    if secrets == "alone":
        return []
    # The stated loss is that of the worst node.
    if record.attacker == "node" and secrets != "own":
        return [(ANOTHER, True, "any single agent is the stated attacker")]
    if not _outsider(record)[0]:
        return [(ANOTHER, False, "it may see more than the stated attacker does")]
    # Whoever serves or joins an agent may know its batches.
    if _secret_batches(record):
        return [(ANOTHER, False, _DRAWN)]
    # Who holds a simulation's seed; sites expand a secret.
    seed = "secret" if record.sites else "seed"
    why = _WHY[secrets].format(colluders=record.colluders, seed=seed)
    shared = secrets in ("shared", "group")
    # A release in one process has one key, which nobody else reads.
    if record.kind == "release" and (shared or secrets == "own"):
        why = _CORRELATED if shared else _RELEASED
    if shared and phases(record) > 1:
        why = f"in some phase {why}"
    if secrets == "group":
        own_group = (f"{ANOTHER} of its own group", False, why)
        return [own_group, (f"{ANOTHER} of another group", True, _OTHER_GROUP.format(seed=seed))]
    protected = secrets == "own" or (secrets == "shares" and record.colluders > 0)
    return [(ANOTHER, protected, why)]


def _aggregator(record: Record) -> tuple[bool, str]:
    covered, why = _outsider(record)
    if record.attacker == "aggregator":
        return True, "it sees the sums that are opened, and no single message"
    if _of_others(record):
        return False, why
    if not covered:
        return False, "the sum of all messages is not part of what the stated attacker sees"
    return True, "it sees no more than an outsider, unless it holds a secret of the noise"


def _insiders(record: Record) -> list[_Row]:
    """Who holds records and secrets, so that noise hides nothing from them."""
    if record.sites:
        return [_OPERATOR, _THIEF]
    why = "the key of this release gives all noise away; it must stay secret"
    if not record.release:
        batches = " and batches" if _secret_batches(record) else ""
        why = (
            f"the seed of a simulation gives all noise{batches} away, and records hold it; "
            f"the other rows are about {keepers(record)}"
        )
    process = (_PROCESS, False, "it holds all agents' data and keys")
    return [process, ("whoever holds the seed", False, why)]


def keepers(record: Record) -> str:
    """Whom the rows of a simulation are about.

    Args:
        record: Its guarantee.
    """
    of_agents = _secret_batches(record) and record.secrets != "alone"
    return _KEEPERS["batches" if of_agents else record.secrets]


def _secret_batches(record: Record) -> bool:
    """Whether a guarantee counts on batches that nobody knows.

    Args:
        record: The guarantee.
    """
    return isinstance(record.loss, AmplifiedLoss)


def group_epsilon(record: Record, records: int) -> float:
    """Epsilon, at the guarantee's delta, of several records that change together.

    Guarantee: for any k records, at one agent or at several, against the guarantee's attacker.
    Gaussian noise: k mu in the place of mu. Concentrated: k^2 rho, and k times what it takes of
    delta: of k steps with the same roundings each may fail. Pure: k epsilon. For sampled
    batches, where no such rule is known, k steps from one data set to the other: if one record
    costs e at delta d, k of them cost k e at d (1 + e^e + .. + e^((k - 1) e)). What finite
    precision adds grows as `dpjax.accounting.finite.of_group` says.

    Args:
        record: A guarantee per record, without a curve.
        records: k, at least 1.

    Returns:
        Epsilon, rounded up; infinity where none follows.

    Reference:
        Dong, Roth and Su (2022), Theorem 2.14; Bun and Steinke (2016), Proposition 1.9.
    """
    added = precision_cost(record)
    if records > 1 and any(added):
        loss: Any = record.loss
        amplified = isinstance(loss, AmplifiedLoss)
        mu = loss.unamplified if amplified else sqrt(2 * loss.concentrated().rho)
        cost = finite.of_group(records, mu, added, record.delta)
        added = cost.epsilon, cost.delta
    # Nothing is left of delta for the noise itself.
    if added[1] >= record.delta > 0:
        return inf
    bound = _of_group(record.loss, records, record.delta - added[1]) + added[0]
    if records > 1:
        return bound
    # All costs of one record are in its epsilon, but for the paper's rule where it is false.
    return min(bound, max(record.epsilon, record.exact_epsilon))


@lru_cache(maxsize=256)
def _of_group(loss: Loss, records: int, delta: float) -> float:
    """Epsilon of several records at delta, in exact arithmetic."""
    if not isinstance(loss, AmplifiedLoss):
        summed: Any = loss
        # rho is quadratic in how far data move, mu and epsilon are linear.
        power = 2 if loss.kind == "zcdp" else 1
        # What each step takes of delta is gone; a delta below 0 is no number to ask at.
        rest = delta - records * loss.failure * MARGIN
        size = records**power * summed.size * MARGIN
        return type(summed)(size).epsilon(rest) if rest >= 0 else inf
    # Sampling never makes a loss larger.
    best = losses.Gaussian(records * loss.unamplified * MARGIN).epsilon(delta)

    def excess(epsilon: float) -> float:
        steps = log(fsum(exp(j * epsilon) for j in range(records)))
        return loss.epsilon(exp(log(delta) - steps - _ROUNDING)) - epsilon

    # Any epsilon of one record that holds at the delta that it takes; the least by a root.
    low = loss.epsilon(delta)
    high = low
    while records * high <= _MOST_STEPS and excess(high) > 0:
        low = high
        high = 2 * high + _CLOSE
    if records * high > _MOST_STEPS or records * low >= best:
        return best
    if low < high:
        from scipy import optimize

        root = float(optimize.brentq(excess, low, high, xtol=1e-300, rtol=_CLOSE / 8))
        above = root * (1 + _CLOSE / 4)
        if above < high and excess(above) <= 0:
            high = above
    return min(best, records * high * MARGIN)
