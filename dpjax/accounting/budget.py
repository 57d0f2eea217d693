"""From a privacy budget to a bound on the noise's precision, and back.

Over T rounds every agent sends its clipped gradient plus Gaussian noise of covariance R over
agents, fresh in every round. To an outsider who sees all messages of all agents, a change of
agent i's gradients by at most s in every round is a mean shift, and the loss is exactly

    mu_i = s sqrt(T [R^-1]_ii)        (Gaussian DP),

adaptive composition included. A budget therefore is a bound b on [R^-1]_ii, b = mu^2 / (s^2 T).
Noise R^1/2 (C^-1 Z)_t, correlated over rounds by a strategy C, puts sens(C)^2 in T's place: C's
squared sensitivity over the rounds in which the change takes part, which for fresh noise (C = I)
is their number. Accountants differ only in the mu they allow for (epsilon, delta), with
L = log(1 / delta):

    gdp     the exact one                                          (the default)
    rdp     sqrt(2) (sqrt(L + epsilon) - sqrt(L))                  (always safe, looser)
    paper   epsilon / (2 sqrt(L))                                  (false for large epsilon)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from dpjax import _validate
from dpjax.accounting import discrete, finite, gdp, losses, precision
from dpjax.accounting.arrays import Fields, Floats, Matrix, Numbers, Vector
from dpjax.accounting.loss import Loss
from dpjax.accounting.rounding import MARGIN

__all__ = [
    "Accountant",
    "AgentLoss",
    "Relation",
    "Remaining",
    "loss",
    "precision_bound",
    "remaining",
]

Relation = Literal[
    "replace_agent", "replace_record", "zero_out_record", "replace_client", "zero_out_client"
]
Accountant = Literal["gdp", "rdp", "paper"]

RELATIONS = get_args(Relation)
"""Neighbouring relations: all data of one agent replaced; one record, or all records of one client,
replaced or zeroed out. Clients fill an agent's cohort slot in turn, with one record a turn."""

ACCOUNTANTS = get_args(Accountant)
"""How (epsilon, delta) and mu are joined; see the module."""


def clipped_sensitivity(relation: Relation, clip_norm: float) -> float:
    """How far one agent's released sum can move in a round, in L2 norm.

    2 C when data are replaced, C when they are zeroed out.

    Guarantee: holds when what is clipped to ``clip_norm`` matches the relation: the agent's
    gradient under "replace_agent", a client's, of all its records in a round together, under the
    relations of clients, every record's gradient (summed, not averaged, before the noise, each
    record at most once a round) under the others.

    Args:
        relation: Neighbouring relation; one of `RELATIONS`, no default.
        clip_norm: Clip norm C.

    Returns:
        The sensitivity, in the gradient's units.

    Raises:
        ValueError: For another relation, or a clip norm that is not finite and positive.
    """
    _validate.one_of("relation", relation, RELATIONS)
    clip_norm = _validate.positive("clip_norm", clip_norm)
    return clip_norm if relation.startswith("zero_out") else 2 * clip_norm


def unit(relation: Relation) -> Literal["agent", "record", "client"]:
    """What a relation protects: "agent", "record" or "client".

    Args:
        relation: One of `RELATIONS`.

    Returns:
        The last word of its name.

    Raises:
        ValueError: For another relation.
    """
    _validate.one_of("relation", relation, RELATIONS)
    return relation.rpartition("_")[2]  # type: ignore[return-value]


def clips(relation: Relation) -> Literal["agent", "record"]:
    """Of what the gradient is clipped under a relation.

    A client fills an agent's cohort slot in a round, and its gradient is then the agent's.

    Args:
        relation: One of `RELATIONS`.

    Returns:
        "agent" or "record".

    Raises:
        ValueError: For another relation.
    """
    return "record" if unit(relation) == "record" else "agent"


def allowed_mu(
    epsilon: ArrayLike,
    delta: float,
    *,
    accountant: Accountant = "gdp",
    allow_unsound: bool = False,
) -> gdp.GdpValue:
    """The Gaussian-DP mu that an accountant allows for a budget, rounded down.

    Guarantee: a mu-GDP mechanism of the returned mu is (epsilon, delta)-DP. With
    ``accountant="paper"`` and ``allow_unsound=True`` it need not be.

    Args:
        epsilon: Epsilon > 0, finite, of any shape.
        delta: Delta, in (0, 1).
        accountant: One of `ACCOUNTANTS`.
        allow_unsound: Return the paper's mu even where its claim is false, to reproduce figures.

    Returns:
        Mu, a float for scalars.

    Raises:
        ValueError: For invalid numbers, or where the paper's rule is false for the budget.
    """
    _validate.one_of("accountant", accountant, ACCOUNTANTS)
    delta = _validate.probability("delta", delta)
    values = _validate.finite_array("epsilon", epsilon)
    if (values <= 0).any():
        raise ValueError(f"epsilon is {values.min()}; give numbers above 0")
    log = -np.log(delta)
    if accountant == "gdp":
        mu = np.asarray(gdp.mu(values, delta))
    elif accountant == "rdp":
        # The root of mu^2 / 2 + mu sqrt(2 log(1 / delta)) = epsilon, without a difference.
        roots = np.sqrt(log + values) + np.sqrt(log)
        mu = np.sqrt(2) * values / roots * (1 - 1e-14)
    else:
        mu = values / (2 * np.sqrt(log)) * (1 - 1e-14)
        if not allow_unsound:
            _refuse_false_claim(mu, delta, values)
    return gdp.result(mu)


def claimed_epsilon(
    mu: ArrayLike,
    delta: float,
    *,
    accountant: Accountant = "gdp",
    allow_unsound: bool = False,
) -> gdp.GdpValue:
    """The epsilon that an accountant states for a mu-GDP mechanism, rounded up.

    Guarantee: at least the exact epsilon, but for ``accountant="paper"`` with
    ``allow_unsound=True``.

    Args:
        mu: Gaussian-DP parameter, >= 0, of any shape.
        delta: Delta, in (0, 1).
        accountant: One of `ACCOUNTANTS`.
        allow_unsound: State the paper's epsilon even where it is below the exact one.

    Returns:
        Epsilon, a float for scalars.

    Raises:
        ValueError: For invalid numbers, or where the paper's epsilon would be false.
    """
    _validate.one_of("accountant", accountant, ACCOUNTANTS)
    delta = _validate.probability("delta", delta)
    if accountant == "gdp":
        return gdp.epsilon(mu, delta)
    rho = np.asarray(gdp.zcdp(mu))
    log = -np.log(delta)
    if accountant == "rdp":
        value = (rho + 2 * np.sqrt(rho * log)) * (1 + 1e-14)
    else:
        value = 2 * np.sqrt(2 * rho * log) * (1 + 1e-14)
        if not allow_unsound:
            _refuse_false_claim(np.asarray(mu, float), delta, value)
    return gdp.result(value)


def _refuse_false_claim(mu: Numbers, delta: float, claimed: Numbers) -> None:
    exact = np.asarray(gdp.epsilon(mu, delta))
    # At mu near 0 both are 0 up to rounding.
    if (exact > claimed).any():
        worst = int(np.argmax(exact - claimed))
        raise ValueError(
            f"accountant is 'paper' at epsilon {claimed.flat[worst]:.6g}, delta {delta:.3g}, where "
            f"its rule is false: what it runs has the exact epsilon {exact.flat[worst]:.6g}; use "
            "'gdp' or 'rdp', or pass allow_unsound=True to reproduce the paper's figures"
        )


def precision_bound(
    epsilon: ArrayLike,
    delta: float,
    *,
    rounds: int | None = None,
    clip_norm: float,
    relation: Relation,
    accountant: Accountant = "gdp",
    allow_unsound: bool = False,
    sensitivity_squared: float | None = None,
) -> gdp.GdpValue:
    """The bound b on [R^-1]_ii that keeps T rounds within a budget.

    b = mu^2 / (s^2 T), with s = `clipped_sensitivity` and mu = `allowed_mu`; or with sens(C)^2
    for T.

    Guarantee: noise over agents with [R^-1]_ii <= b, fresh in every round and coordinate, makes
    the T messages (epsilon, delta)-DP for ``relation`` against an outsider who sees all of them.
    With ``sensitivity_squared`` the noise is R^1/2 (C^-1 Z)_t and that number at least sens(C)^2
    for the rounds in which what the relation changes takes part.

    Args:
        epsilon: Epsilon > 0; a number, or one an agent.
        delta: Delta, in (0, 1).
        rounds: Rounds T, each of which may change; None when ``sensitivity_squared`` is given.
        clip_norm: Clip norm C.
        relation: Neighbouring relation, no default.
        accountant: One of `ACCOUNTANTS`.
        allow_unsound: Reproduce the paper's rule where it is false.
        sensitivity_squared: Squared sensitivity over rounds, in place of their number; see
            `dpjax.mechanism.temporal.sensitivity`, which is not squared.

    Returns:
        b in 1 / (gradient units)^2, of epsilon's shape, a float for a scalar.

    Raises:
        ValueError: For invalid numbers, or where the paper's rule is false for the budget.

    Reference:
        Rodio et al., Whisper D-SGD, Theorem 2 and (10b).

    Example:
        >>> from dpjax.accounting import budget
        >>> bound = budget.precision_bound(
        ...     10.0, 1e-5, rounds=100, clip_norm=1.0, relation="replace_record"
        ... )
        >>> round(bound, 6)
        0.010004
    """
    over_rounds = _over_rounds(rounds, sensitivity_squared)
    mu = allowed_mu(epsilon, delta, accountant=accountant, allow_unsound=allow_unsound)
    bound = bound_of(np.asarray(mu), clipped_sensitivity(relation, clip_norm), over_rounds)
    return gdp.result(bound)


def bound_of(mu: Numbers, shift: float, over_rounds: float) -> Numbers:
    """Return b = mu^2 / (s^2 T), rounded down; sens(C)^2 is T for noise over rounds.

    Args:
        mu: Gaussian-DP parameter to keep.
        shift: s, how far what is clipped moves in a round.
        over_rounds: Squared sensitivity over rounds.
    """
    return (mu / shift) ** 2 / over_rounds * (1 - 1e-15)


def mu_of(diagonal: Vector, shift: float, over_rounds: float) -> Vector:
    """Return mu = s sqrt(T [R^-1]_ii), rounded up; `bound_of` bounds the diagonal by it.

    Args:
        diagonal: [n] [R^-1]_ii.
        shift: s, how far what is clipped moves in a round.
        over_rounds: Squared sensitivity over rounds.
    """
    return shift * np.sqrt(over_rounds * diagonal) * MARGIN


def _over_rounds(rounds: int | None, sensitivity_squared: float | None) -> float:
    if (rounds is None) == (sensitivity_squared is None):
        raise ValueError(
            f"rounds is {rounds} and sensitivity_squared {sensitivity_squared}; give exactly one"
        )
    if sensitivity_squared is not None:
        return _validate.positive("sensitivity_squared", sensitivity_squared)
    return _validate.integer("rounds", rounds)


@dataclass(frozen=True, eq=False)
class AgentLoss:
    """What a run costs each agent.

    Attributes:
        kind: Of which loss ``size`` is, by its name in `dpjax.accounting.losses`: "gdp" with mu;
            "zcdp" with rho, under discrete noise, say; "pure" with epsilon, whatever delta.
        size: [n] the loss, an upper bound that includes rounding.
        epsilon: [n] by the accountant asked for, at the budget's delta.
        exact_epsilon: [n] of the same mechanism: the exact one, or the smallest known to hold.
        failure: What a "zcdp" loss takes of delta, see `dpjax.accounting.losses.Concentrated`.

    Example:
        >>> import numpy as np
        >>> from dpjax.accounting.budget import AgentLoss
        >>> AgentLoss.of_mu(np.array([1.0]), 1e-5).epsilon.round(3).tolist()
        [4.377]
    """

    kind: Literal["gdp", "zcdp", "pure"]
    size: Numbers
    epsilon: Numbers
    exact_epsilon: Numbers
    failure: float = 0.0

    @classmethod
    def of_mu(cls, mu: Vector, delta: float, **rule: Any) -> "AgentLoss":
        """The loss of agents whose Gaussian-DP parameters are known.

        Args:
            mu: [n] Gaussian-DP parameters, upper bounds.
            delta: Delta, in (0, 1).
            rule: ``accountant`` and ``allow_unsound``, as of `claimed_epsilon`.

        Raises:
            ValueError: As `claimed_epsilon`.
        """
        # Agents of one loss have one epsilon, which takes long to find for each of many.
        different, agent = np.unique(mu, return_inverse=True)
        claimed = np.asarray(claimed_epsilon(different, delta, **rule))[agent]
        return cls("gdp", mu, claimed, np.asarray(gdp.epsilon(different, delta))[agent])


def loss(
    covariance: Matrix | None,
    delta: float,
    *,
    rounds: int | None = None,
    clip_norm: float,
    relation: Relation,
    accountant: Accountant = "gdp",
    factor: Matrix | None = None,
    allow_unsound: bool = False,
    sensitivity_squared: float | None = None,
) -> AgentLoss:
    """The privacy loss of any noise covariance over agents (Theorem 2 as a function of R).

    mu_i = s sqrt(T [R^-1]_ii), and epsilon_i by the accountant; or with sens(C)^2 for T.

    Guarantee: as `precision_bound`, with agent i's data changed, for whichever R is really used.
    The computed [R^-1]_ii carries a proven bound on its rounding, added to it.

    Args:
        covariance: [n, n] noise covariance R over agents, symmetric positive definite; None when
            ``factor`` is given.
        delta: Delta, in (0, 1).
        rounds: Rounds T; None when ``sensitivity_squared`` is given.
        clip_norm: Clip norm C.
        relation: Neighbouring relation, no default.
        accountant: One of `ACCOUNTANTS`.
        factor: [n, n] F with R = F F', in place of R: keeps twice the digits.
        allow_unsound: State the paper's epsilon where it is false.
        sensitivity_squared: As in `precision_bound`.

    Returns:
        The loss of every agent.

    Raises:
        ValueError: For a singular, nearly singular or indefinite covariance, which leaves some
            combination of the messages without noise, and for invalid numbers.

    Reference:
        Rodio et al., Whisper D-SGD, Theorem 2; with the exact conversion.

    Example:
        >>> import numpy as np
        >>> from dpjax.accounting import budget
        >>> options = dict(rounds=4, clip_norm=1.0, relation="zero_out_record")
        >>> budget.loss(4 * np.eye(3), 1e-5, **options).size.round(6).tolist()  # sqrt(4 / 4)
        [1.0, 1.0, 1.0]
    """
    over_rounds = _over_rounds(rounds, sensitivity_squared)
    shift = clipped_sensitivity(relation, clip_norm)
    mu = mu_of(precision.inverse_diagonal(covariance, factor=factor), shift, over_rounds)
    return AgentLoss.of_mu(mu, delta, accountant=accountant, allow_unsound=allow_unsound)


class Remaining(NamedTuple):
    """What a total leaves for later phases.

    Attributes:
        epsilon: Budget of a next phase that takes all of it, 0 where nothing is left; one an agent
            where the total or budgets of phases were given so.
        delta: The total's.
        mu: Its Gaussian-DP parameter, likewise; None for totals of other kinds.

    Example:
        >>> from dpjax.accounting.budget import Remaining
        >>> Remaining(epsilon=2.0, delta=1e-5, mu=0.5).epsilon
        2.0
    """

    epsilon: float | Floats
    delta: float
    mu: float | Floats | None


_FILTERS = ("gdp", "zcdp", "pure")
"""Accountants of which a total may be: losses that add up whatever later phases were chosen by."""

_ROOM = 1 - 4e-9


def total_fields(total: Any, *, release: bool) -> Fields:
    """Return what a total states, as fields of a guarantee, its loss rounded down.

    Args:
        total: The total, as of `remaining`.
        release: Whether its phases are releases, of which finite precision takes a part.

    Returns:
        The loss that all phases may have together, of no rounds yet and of the agent with the
        largest; epsilon, and each agent's; and the parts of epsilon and delta for noise of finite
        precision.

    Raises:
        ValueError: For an accountant that no filter is known for, or epsilons by agent of another
            than "gdp".
    """
    accountant = total.accountant
    if accountant not in _FILTERS:
        raise ValueError(
            f"accountant is {accountant!r} of a total; choose one of {', '.join(_FILTERS)}: "
            "Gaussian noise adds up under 'gdp', whatever the accountant of its phases"
        )
    if total.each is not None and accountant != "gdp":
        raise ValueError(
            f"epsilon is {total.epsilon!r} of a total by {accountant!r}; give one number for "
            "all agents"
        )
    epsilon = total.largest
    delta = total.delta
    # What finite precision adds is one number for all agents: the smallest total has to hold it.
    added_epsilon = 0.0
    added_delta = 0.0
    if release and accountant != "pure":
        added_epsilon = float(total.reserve * np.min(total.epsilon))
        added_delta = finite.LIMIT * delta
    fields = {"epsilon": epsilon, "per_agent_epsilon": total.each}
    fields |= {"added_epsilon": added_epsilon, "added_delta": added_delta}
    loss: Loss = losses.Pure(epsilon, 0)
    if accountant == "gdp":
        mu = limits(fields | {"per_agent_epsilon": (epsilon,)}, delta)
        loss = losses.Gaussian(mu.item(), 0, False, None, "phases")
    elif accountant == "zcdp":
        free = (epsilon - added_epsilon) * (1 - 1e-15)
        loss = losses.Concentrated(discrete.largest_rho(free, delta - added_delta), 0)
    return fields | {"loss": loss}


def limits(fields: Mapping[str, Any], delta: float) -> Vector:
    """Return the loss that all phases may have together at each agent, rounded down.

    Args:
        fields: Of a total, from `total_fields`.
        delta: The total's.

    Returns:
        [n] Gaussian-DP parameters; [1] the one number where all agents have the same.
    """
    epsilons = fields["per_agent_epsilon"]
    if epsilons is None:
        return np.array([getattr(fields["loss"], "size", 0.0)])
    added = fields["added_epsilon"]
    free = np.asarray(epsilons) - added
    # A difference is rounded. Without one, a phase may take all of an agent's epsilon.
    free = free * (1 - 1e-15) if added else free
    return np.asarray(gdp.mu(free, delta - fields["added_delta"]))


def remaining(total: Any, spent: Sequence[Any]) -> Remaining:
    """What later phases may cost together, under a total fixed before the first one.

    A filter: for Gaussian noise mu'^2 = mu^2 - sum of mu_i^2, with mu the total's and mu_i phase
    i's; rho and pure epsilons are subtracted themselves.

    Guarantee: phases that stay within what remains, each with noise of its own and chosen by
    anything that was released before it (whether there is one, its agents, rounds, noise and
    share of what remains), make all of them together (epsilon, delta)-DP with the total's
    numbers, whichever were run: `dpjax.accounting.guarantee.Guarantee.within` states it. Holds for
    a total fixed before the first phase. A phase counts all that its guarantee covers, also where
    it was stopped on the way, unless it had a curve.

    Args:
        total: The total, a `dpjax.plans.protect.Budget` of one epsilon or of one an agent, and of
            the delta of every phase. Its accountant "gdp" adds up mu^2 of Gaussian noise, "zcdp"
            rho, "pure" epsilons; releases keep its reserve for noise of finite precision.
        spent: Guarantees of the phases so far, in order; of a run that states the total already,
            its guarantee alone.

    Returns:
        The budget that a next phase may have, rounded down: ``Budget(left.epsilon, left.delta)``;
        one epsilon an agent where the total or the budgets of phases are, agent i being the same
        one in all of them: `dpjax.accounting.guarantee.Guarantee.survivors`.

    Raises:
        ValueError: For phases that pass the total or do not compose, and losses without a filter.

    Reference:
        Smith and Thakurta (2022), arXiv 2210.17520, for mu; Feldman and Zrnic (2021), arXiv
        2008.11193, at every order, for rho; Rogers, Roth, Ullman and Vadhan (2016), arXiv
        1605.08294, for pure epsilons.

    Example:
        >>> from dpjax.accounting import budget, losses
        >>> from dpjax.accounting.guarantee import Guarantee
        >>> from dpjax.plans.protect import Budget
        >>> total = Budget(epsilon=3.0, delta=1e-5)
        >>> first = Guarantee.of(
        ...     epsilon=2.0, delta=1e-5, mu=0.49, relation="replace_record", attacker="outsider",
        ...     rounds=100, clip_norm=1.0, accountant="gdp", release=False,
        ... )
        >>> rest = budget.remaining(total, [first])
        >>> round(rest.epsilon, 3), round(rest.mu, 3)
        (2.111, 0.526)
    """
    # Whether there will be releases is not known yet: what they take is left out.
    fields = total_fields(total, release=True)
    delta = total.delta
    used = np.zeros(1)
    if not isinstance(spent, list | tuple):
        raise ValueError(f"spent is a {type(spent).__name__}; give a list of guarantees")
    if spent:
        stated = spent[0].within(total)
        for later in spent[1:]:
            stated = stated.followed_by(later, planned=False)
        fields = vars(stated)
        used = stated.agents_spent
    limit = limits(fields, delta)
    # To add up what was used and a rest, however small, rounds by the size of the total.
    left = np.maximum(limit * (1 - 4e-15) - used, 0)
    # Plans round a loss to the safe side once more than this does.
    if total.accountant != "gdp":
        rest = type(fields["loss"])(left.item() * _ROOM)
        return Remaining(rest.epsilon(delta) * _ROOM, delta, None)
    mu = np.sqrt(left * (limit + used)) * _ROOM
    epsilon = np.asarray(gdp.epsilon(mu, delta))
    if len(mu) == 1:
        return Remaining(epsilon.item(), delta, mu.item())
    return Remaining(tuple(epsilon.tolist()), delta, tuple(mu.tolist()))
