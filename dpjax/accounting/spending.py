"""What a guarantee becomes: after some rounds, with marks to stop at, in phases, under a total."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpjax import _validate
from dpjax.accounting import budget, gdp, losses, parties, stopping

if TYPE_CHECKING:
    from dpjax.accounting.guarantee import Guarantee

__all__: list[str] = []


def exact(of: "Guarantee", loss: losses.AnyLoss) -> float:
    """Epsilon of a loss at a record's delta, what finite precision adds included.

    Args:
        of: The record.
        loss: Its own loss, or one of its agents'.
    """
    delta = of.delta - of.added_delta if of.curve is None else of.curve.delta
    return loss.epsilon(delta) + of.added_epsilon


def _open(of: "Guarantee", **changes: Any) -> "Guarantee":
    """The record with changes, its epsilon still to be stated."""
    return dataclasses.replace(
        of, epsilon=math.inf, per_agent_epsilon=None, unsound=False, **changes
    )


def _of_mu(of: "Guarantee", mu: float) -> float:
    return exact(of, losses.Gaussian(mu))


def part(of: "Guarantee", rounds: int, share: float) -> "Guarantee":
    """The record of the first rounds, which have spent a share of mu^2.

    Args:
        of: The record, of a Gaussian loss.
        rounds: Rounds t.
        share: At most 1.
    """
    loss = of.loss
    assert isinstance(loss, losses.Gaussian)
    spent = loss.part(rounds, share)
    each, mu = None, spent.mu
    epsilon = _of_mu(of, mu)
    if of.per_agent_epsilon is not None:
        mus = [value * losses.root(share) for value in _agents_mus(of)]
        each = tuple(_of_mu(of, min(one, mu)) for one in mus)
        if not of.unsound:  # Their mus are upper bounds, up to rounding.
            each = tuple(map(min, each, of.per_agent_epsilon))
        epsilon = max(each)
        mu = min(mu, max(mus))
    return dataclasses.replace(
        of,
        epsilon=epsilon,
        mu=mu,
        rounds=rounds,
        unused=0,
        accountant="gdp",
        per_agent_epsilon=each,
        unsound=False,
        participation=spent.participation,
    )


def restated(of: "Guarantee", loss: losses.AnyLoss) -> "Guarantee":
    """The record with another loss, its epsilon at the same delta.

    Args:
        of: The record.
        loss: What the rounds that it covers from now on cost.
    """
    fields = dict(
        rounds=loss.rounds, accountant=loss.kind, per_agent_epsilon=None, unsound=False,
        epsilon=exact(of, loss),
    )  # fmt: skip
    if isinstance(loss, losses.Gaussian):
        fields |= dict(
            over_rounds=None if loss.white else of.over_rounds,
            mu=loss.mu,
            white=loss.white,
            participation=loss.participation,
            other_loss=None,
        )
    else:
        fields |= dict(mu=None, white=True, over_rounds=None, participation=None, other_loss=loss)
    return dataclasses.replace(of, **fields)  # type: ignore[arg-type]


def with_curve(
    of: "Guarantee", marks: Sequence[int], shares: Sequence[float] | None
) -> "Guarantee":
    """See `Guarantee.stopping_at`.

    Args:
        of: The record.
        marks: Rounds at which the run may stop.
        shares: What has been spent up to each, or None.
    """
    if of.relation is None:
        return of
    if of.curve is not None or of.phases:
        said = "curve is given" if of.curve is not None else f"phases are {len(of.phases)}"
        raise ValueError(f"{said} already; use the plan's own guarantee")
    loss = of.loss
    if not isinstance(loss, losses.Gaussian):
        raise ValueError(
            f"loss is {type(loss).__name__}; curves over marks are known for Gaussian losses "
            "alone: state the plan's own guarantee, which holds wherever the run stops"
        )
    if shares is None:
        shares = [loss.share(_validate.integer("marks", mark)) for mark in marks]
    free = stopping.Curve(marks=tuple(marks), shares=tuple(shares), delta=of.delta)
    if free.marks[-1] != of.rounds:
        raise ValueError(f"marks end at {free.marks[-1]}; end them at the {of.rounds} rounds")
    mus = set(_agents_mus(of))
    added = of.added_delta
    while added < of.delta:
        inner = min(free.inner_delta(mu, of.delta - added) for mu in mus)
        record = _curved(of, dataclasses.replace(free, delta=inner), added)
        # What finite precision adds to delta grows like e^epsilon, and epsilon with the curve.
        growth = math.exp(min(max(0.0, record.epsilon - of.epsilon), 700.0))
        if added >= of.added_delta * growth:
            return record
        added = 1.01 * of.added_delta * growth
    raise ValueError(
        f"added_delta is {of.added_delta} with delta {of.delta}, which leaves nothing for "
        "a curve; state the plan's guarantee, or use a larger delta"
    )


def _curved(of: "Guarantee", curve: stopping.Curve, added_delta: float) -> "Guarantee":
    """The record of the whole run at the curve's delta."""
    bare = _open(of, accountant="gdp", added_delta=added_delta, curve=curve)
    each = None
    if of.per_agent_epsilon is not None:
        each = tuple(_of_mu(bare, mu) for mu in _agents_mus(of))
    epsilon = bare.exact_epsilon if each is None else max(each)
    return dataclasses.replace(bare, epsilon=epsilon, per_agent_epsilon=each)


def composed(of: "Guarantee", later: "Guarantee", planned: bool) -> "Guarantee":
    """See `Guarantee.followed_by`.

    Args:
        of: The record of the earlier run, or of the phases so far under a total.
        later: That of the run that carried on.
        planned: Whether both were fixed before the first one began.
    """
    _validate.flag("planned", planned)
    if of.phases:
        whole = budget.Whole(of.loss, of.epsilon, of.added_epsilon, of.added_delta)
        return _under(whole, (*of.phases, *(later.phases or (later,))))
    if later.phases:
        raise ValueError(
            f"phases of the later record are {len(later.phases)} under a total, which the earlier "
            "one does not state; a total is fixed before the first phase, state that one by "
            "within(total)"
        )
    if not planned:
        raise ValueError(
            "planned is False; a phase that was decided on after seeing the first one is not "
            "covered by any sum of the two. If a total was fixed before the first one began, state "
            "that one by within(total). Else fix the largest later phase before the first one "
            "begins, and state both with planned=True whether or not it is run"
        )
    for record in (of, later):
        if record.curve is not None:
            raise ValueError(
                f"curve has marks {record.curve.marks}; phases in a row are covered by their "
                "plans' own guarantees, compose those, or state a total by within(total)"
            )
    if of.relation is None or later.relation is None:
        return type(of).none(of.rounds + later.rounds)
    base = _joined(of, later)
    dealt = [getattr(record.loss, "participation", None) for record in (of, later)]
    apart = [pattern and pattern[1] for pattern in dealt]
    if apart[0] != apart[1]:
        raise ValueError(
            f"participation is {dealt[0]}, then {dealt[1]}; only equal separations compose"
        )
    both = restated(base, of.loss.then(later.loss))
    return both if both.white else dataclasses.replace(both, over_rounds="phases")


def _joined(of: "Guarantee", later: "Guarantee") -> "Guarantee":
    """What two runs in a row state beside their loss; refused where one record cannot state both.

    Args:
        of: The record of the earlier run.
        later: That of the later one.
    """
    if "view" in (of.gradients, later.gradients):
        raise ValueError(
            f"gradients is {of.gradients!r}, then {later.gradients!r}; messages of a later phase "
            "still tell of an earlier one's gradients, whose loss is that of one run: make one "
            "plan for all rounds, or state gradients='any'"
        )
    for name in ("relation", "delta", "release", "gradients", "nodes", "norm"):
        if getattr(of, name) != getattr(later, name):
            raise ValueError(
                f"{name} is {getattr(of, name)!r}, then {getattr(later, name)!r}; only equal "
                "ones compose"
            )
    attacker = _attacker(of, later)
    if (of.gradient_gap is None) != (later.gradient_gap is None):
        raise ValueError(
            f"gradient_gap is {of.gradient_gap}, then {later.gradient_gap}; a clip and an "
            "assumption do not compose: state the two runs apart"
        )
    gaps = [one.gradient_gap for one in (of, later) if one.gradient_gap is not None]
    smooth = [one.smoothness for one in (of, later) if one.smoothness is not None]
    added_epsilon = of.added_epsilon + later.added_epsilon
    added_delta = of.added_delta + later.added_delta
    if added_delta >= of.delta > 0:
        raise ValueError(
            f"added_delta is {of.added_delta}, then {later.added_delta}, which uses up delta "
            f"{of.delta}; state the two runs apart"
        )
    return _open(
        of,
        # Of no loss yet.
        mu=math.inf,
        other_loss=None,
        accountant="gdp",
        participation=None,
        curve=None,
        rounds=of.rounds + later.rounds,
        attacker=attacker,
        added_epsilon=added_epsilon,
        added_delta=added_delta,
        clip_norm=max(of.clip_norm, later.clip_norm),
        # The loss is known of neighbours that keep what both assume.
        gradient_gap=min(gaps, default=None),
        smoothness=min(smooth, default=None),
        dropouts=min(of.dropouts, later.dropouts),
        colluders=min(of.colluders, later.colluders),
        sealed=of.sealed or later.sealed,
        private_stop=of.private_stop or later.private_stop,
        secrets=_weaker(of.secrets, later.secrets),
        lost_noise=_lost(of, later),
        sum_rounding=max(of.sum_rounding, later.sum_rounding),
        unused=of.unused + later.unused,
        phase=max(of.phase, later.phase),
        custom=tuple(dict.fromkeys(of.custom + later.custom)),
    )


def _attacker(of: "Guarantee", later: "Guarantee") -> Any:
    """The attacker of whom both runs say something: the union of its views is what it sees."""
    if of.attacker == later.attacker:
        return of.attacker
    # Noise in shares is stated for whoever sees sums.
    nodes = () if of.sealed or later.sealed else ("node",)
    for one in (*nodes, "outsider", "aggregator"):
        if all(one == run.attacker or parties.covers(run, one) for run in (of, later)):
            return one
    raise ValueError(
        f"attacker is {of.attacker!r}, then {later.attacker!r}, and neither phase covers the other "
        "one's; plan both for one attacker: an outsider who sees every message covers an "
        "aggregator, and single nodes too where every agent's noise is its own"
    )


def _weaker(first: Any, later: Any) -> Any:
    """Who knows the secrets of two phases; None where neither says it of both."""
    if first == later:  # Who is in which group is not recorded, and may have changed.
        return None if first == "group" else first
    other = later if first == "own" else first
    return other if "own" in (first, later) and other != "alone" else None


def within(of: "Guarantee", total: budget.Total) -> "Guarantee":
    """See `Guarantee.within`.

    Args:
        of: The record of the first phase, or of phases that state this total already.
        total: The total.
    """
    if of.relation is None:
        raise ValueError("relation is None: this phase is not private, and no total covers it")
    whole = budget.whole(total, release=of.release)
    if of.delta != total.delta:
        raise ValueError(
            f"delta is {of.delta}, and the total's {total.delta}; plan every phase at the total's"
        )
    if of.phases:
        if (of.epsilon, of.accountant) != (whole.epsilon, total.accountant):
            raise ValueError(
                f"epsilon is {of.epsilon} of a total that is stated already ({of.accountant}); a "
                "total is fixed once, before the first phase"
            )
        return of
    return _under(whole, (of,))


def _under(whole: budget.Whole, phases: "tuple[Guarantee, ...]") -> "Guarantee":
    """The record that states a total over phases; its constructor refuses those that pass it.

    Args:
        whole: The total.
        phases: Records of the phases.
    """
    loss: Any = whole.loss
    loss = dataclasses.replace(loss, rounds=sum(one.rounds for one in phases))
    base = _open(
        joined(phases), accountant="gdp", mu=math.inf, other_loss=None, participation=None,
        white=False, over_rounds="phases", added_epsilon=whole.added_epsilon,
        added_delta=whole.added_delta,
    )  # fmt: skip
    return dataclasses.replace(restated(base, loss), epsilon=whole.epsilon, phases=phases)


def joined(phases: "Sequence[Guarantee]") -> "Guarantee":
    """What phases under a total state beside their losses, and what finite precision adds to all.

    Args:
        phases: Their records.
    """
    return functools.reduce(_joined, phases[1:], _open(phases[0], curve=None))


def spent(of: "Guarantee") -> Any:
    """What the phases under a total have spent together, in the total's own terms.

    Args:
        of: The record that states the total; another's loss is its own.
    """
    if not of.phases:
        return of.loss
    every = [_counted(one.loss, of.accountant) for one in of.phases]
    return functools.reduce(lambda first, later: first.then(later), every)


def _counted(loss: losses.AnyLoss, kind: Any) -> Any:
    """A phase's loss in the terms of a total, for which a filter is known."""
    if kind == "zcdp" and isinstance(loss, losses.Gaussian | losses.Pure):
        return loss.concentrated()
    if isinstance(loss, losses.Pld):
        raise ValueError(
            "loss is Pld, of batches drawn by Poisson sampling; adding up such losses to a total "
            "does not hold for phases chosen on the way (arXiv 2602.06756). Sample without "
            "amplification (samplers.Random or Cyclic), or fix all phases beforehand and compose "
            "them with planned=True"
        )
    if loss.kind != kind:
        raise ValueError(
            f"loss is {type(loss).__name__}, which no filter of a total by {kind!r} adds up; 'gdp' "
            "takes Gaussian noise, 'pure' Laplace noise, and 'zcdp' both and discrete noise: fix "
            "the total as Budget(..., accountant=...) for all phases"
        )
    return loss


def _lost(of: "Guarantee", later: "Guarantee") -> tuple[int, float] | None:
    """From which round of both runs on noise was lost."""
    if later.lost_noise is None or of.lost_noise is None:
        first, offset = (of, 0) if later.lost_noise is None else (later, of.rounds)
        return first.lost_noise and (first.lost_noise[0] + offset, first.lost_noise[1])
    return of.lost_noise[0], max(of.lost_noise[1], later.lost_noise[1])


def _agents_mus(of: "Guarantee") -> list[float]:
    """Upper bounds on each agent's mu; one number where all agents have the same."""
    assert of.mu is not None
    if of.per_agent_epsilon is None:
        return [of.mu]
    # Each agent's mu is at most what its accountant allowed for its epsilon.
    return [min(_mu_of(of, value), of.mu) for value in of.per_agent_epsilon]


def _mu_of(of: "Guarantee", epsilon: float) -> float:
    """An upper bound on the mu for which this record's accountant states epsilon."""
    accountant = _validate.one_of("accountant", of.accountant, budget.ACCOUNTANTS)
    if accountant == "gdp":  # What the other rules state need not include it.
        epsilon = max(0.0, epsilon - of.added_epsilon)
    delta = of.delta if of.curve is None else of.curve.delta
    if epsilon == 0:
        return float(gdp.mu(0.0, delta)) * (1 + 1e-9)
    rule: budget.Accountant = accountant  # type: ignore[assignment]
    mu = budget.allowed_mu(epsilon, delta, accountant=rule, allow_unsound=True)
    return float(mu) * (1 + 1e-9)
