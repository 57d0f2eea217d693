"""The record of what a run guarantees; every run stores one and every figure prints it."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpjax import _validate
from dpjax.accounting import budget, finite, gdp, losses, parties, stopping, wording
from dpjax.accounting.records import Caveats, Record, Secrets, Threat

__all__ = ["Guarantee"]


@dataclass(frozen=True, kw_only=True)
class Guarantee(Record):
    """(epsilon, delta)-DP of a run, and under which assumptions.

    Guarantee: a record cannot be made that states less than its loss says, which for Gaussian
    noise is the exact one at its mu, unless it says so (``unsound=True``, for the paper's rule
    where it is false; it then prints both).

    Attributes:
        phases: The phases so far of which this record states a total, see `within`.

    Example:
        >>> from dpjax.accounting.guarantee import Guarantee
        >>> stated = Guarantee.of(
        ...     epsilon=2.0, delta=1e-5, mu=0.49, relation="replace_record", attacker="outsider",
        ...     rounds=100, clip_norm=1.0, accountant="gdp", release=False,
        ... )
        >>> round(stated.after(25).epsilon, 3), stated.threat.unit
        (0.906, 'record')
    """

    def __post_init__(self) -> None:
        """Refuse a record that contradicts itself."""
        super().__post_init__()
        if self.phases:
            self._check_phases()

    def _check_phases(self) -> None:
        """Refuse phases that pass the total that the record states, or are about something else."""
        for one in self.phases:
            if not isinstance(one, Guarantee) or one.phases or one.relation is None:
                raise ValueError(
                    f"phases has {_validate.shown(one)}; give the guarantees of single phases"
                )
        if self.gradients == "view" or self.nodes is not None:
            what = f"gradients is {self.gradients!r}"
            if self.nodes is not None:
                what = f"nodes is {self.nodes}"
            raise ValueError(
                f"{what} under a total; messages of later phases tell of earlier gradients, and "
                "agents are numbered anew where some have left: plan every phase for "
                "gradients='any' and attacker 'outsider' or 'node'"
            )
        every = _joined_all(self.phases)
        mine, theirs = self.fields(), every.fields()
        of_total = ("epsilon", "accountant", "phases", "added_epsilon", "added_delta")
        of_loss = ("mu", "white", "over_rounds", "other_loss")
        for name in mine:
            if name not in of_total + of_loss and mine[name] != theirs[name]:
                raise ValueError(
                    f"{name} is {mine[name]!r}, and {theirs[name]!r} of its phases; make it with "
                    "Guarantee.within"
                )
        spent, whole = self.spent, self.loss
        name = {"gdp": "mu", "zcdp": "rho", "pure": "epsilon"}[spent.kind]
        if budget.size(spent) > budget.size(whole):
            raise ValueError(
                f"{name} of {len(self.phases)} phases is {budget.size(spent):.6g} together, more "
                f"than the total's {budget.size(whole):.6g} (epsilon {self.epsilon:.6g} at delta "
                f"{self.delta:g}); plan the next phase for what budget.remaining(total, spent) "
                "leaves"
            )
        added = every.caveats
        if added.added_epsilon > self.added_epsilon or added.added_delta > self.added_delta:
            raise ValueError(
                f"added_epsilon is {added.added_epsilon:.3g} and added_delta "
                f"{added.added_delta:.3g} of {len(self.phases)} phases together, more than the "
                f"{self.added_epsilon:.3g} and {self.added_delta:.3g} that the total keeps for "
                "noise of finite precision; fix a total of a larger Budget(..., reserve=...), run "
                "fewer rounds or train a smaller model"
            )

    @classmethod
    def none(cls, rounds: int) -> "Guarantee":
        """The record of a non-private run: epsilon is infinite.

        Args:
            rounds: Rounds T.

        Returns:
            The record.
        """
        threat = Threat(relation=None, attacker=None, clip_norm=math.inf)
        loss = losses.Gaussian(math.inf, rounds)
        return cls(epsilon=math.inf, delta=0.0, accountant=None, threat=threat, loss=loss)

    def after(self, rounds: int) -> "Guarantee":
        """What the first rounds of the run spend, their number fixed before it began.

        For Gaussian noise that is white over rounds mu_t = mu sqrt(t / T), or
        mu sqrt(ceil(t / b) / k) where a record takes part k times, b rounds apart, and epsilon is
        exact at the same delta; for correlated noise the whole run's loss stands from its first
        round on. Other losses say it themselves.

        Guarantee: holds where ``rounds`` was fixed before the first one. Not where the decision to
        stop there was taken from anything seen on the way, released or not: with 20 places to
        stop the true delta is 7 times the one stated. Such a run states this guarantee itself, or
        the one that `stopping_at` gave before it began.

        Args:
            rounds: Rounds t, 0 to T.

        Returns:
            The guarantee of the first t rounds.

        Raises:
            ValueError: For more rounds than are covered, or a guarantee with a curve or a total.
        """
        if self.curve is not None:
            raise ValueError(
                f"curve has marks {self.curve.marks}; use stopped(rounds), whose numbers hold for "
                "a round chosen on the way, or the plan's own guarantee"
            )
        if self.phases:
            raise ValueError(
                f"phases are {len(self.phases)} under a total, which is stated however many rounds "
                "are done; ask the guarantee of one phase"
            )
        rounds = _validate.integer("rounds", rounds, least=0)
        if rounds > self.rounds:
            raise ValueError(
                f"rounds is {rounds}, the guarantee covers {self.rounds}; plan the longer run "
                "from its start, noise for a shorter one does not cover it"
            )
        if self.relation is None:
            return Guarantee.none(rounds)
        if isinstance(loss := self.loss, losses.Gaussian):
            return self._part(rounds, loss.share(rounds))
        early = dataclasses.replace(self.caveats, unused=0)
        return dataclasses.replace(self, caveats=early)._restated(loss.after(rounds))

    def stopping_at(
        self, marks: Sequence[int], *, shares: Sequence[float] | None = None
    ) -> "Guarantee":
        """What a run states that may stop at any of its marks by what was released.

        Guarantee: if the marks were fixed before the run, then `stopped` of what this returns
        holds at whichever mark the run stopped, by any rule that looks at messages alone: see
        `dpjax.accounting.stopping` for what that means and why. In exchange the whole run costs
        more than without stops: with mu 1, delta 1e-5 and 20 marks epsilon is 0.93 at the first
        mark and 4.84 at the last, where this guarantee is 4.38.

        Args:
            marks: Rounds t at which the run may stop, rising; the last is T.
            shares: [marks] what the rounds up to each mark have spent at most, as shares of mu^2,
                over all participation patterns; by default t / T, or ceil(t / b) / k, where noise
                is white over rounds, and 1 at every mark where it is not.

        Returns:
            The guarantee of the whole run, with the curve.

        Raises:
            ValueError: For marks that do not rise to T, shares that do not rise to 1, or a loss
                that is not Gaussian.
        """
        if self.relation is None:
            return self
        if self.curve is not None or self.phases:
            what = "curve is given" if self.curve is not None else f"phases are {len(self.phases)}"
            raise ValueError(f"{what} already; use the plan's own guarantee")
        loss = self.loss
        if not isinstance(loss, losses.Gaussian):
            raise ValueError(
                f"loss is {type(loss).__name__}; curves over marks are known for Gaussian losses "
                "alone: state the plan's own guarantee, which holds wherever the run stops"
            )
        if shares is None:
            shares = [loss.share(_validate.integer("marks", mark)) for mark in marks]
        free = stopping.Curve(marks=tuple(marks), shares=tuple(shares), delta=self.delta)
        if free.marks[-1] != self.rounds:
            raise ValueError(f"marks end at {free.marks[-1]}; end them at the {self.rounds} rounds")
        mus = set(self._agents_mus())

        def curved(added: float) -> tuple[Guarantee, float]:
            inner = min(free.inner_delta(mu, self.delta - added) for mu in mus)
            record = self._curved(dataclasses.replace(free, delta=inner), added)
            return record, record.epsilon

        record = finite.grown(curved, self.added_delta, self.delta, self.epsilon)
        if record is None:
            raise ValueError(
                f"added_delta is {self.added_delta} with delta {self.delta}, which leaves nothing "
                "for a curve; state the plan's guarantee, or use a larger delta"
            )
        return record

    def stopped(self, rounds: int) -> "Guarantee":
        """What a run states that ended after some rounds because of what was released.

        Guarantee: a curve's numbers hold at the mark where the run ended, see `stopping_at`.
        Without one the whole run's guarantee stands, whenever it ended; it says how far it came.

        Args:
            rounds: Rounds done; with a curve, one of its marks.

        Returns:
            The guarantee.

        Raises:
            ValueError: For rounds that are no mark of the curve, or beyond those covered.
        """
        rounds = _validate.integer("rounds", rounds)
        if self.curve is None:
            if rounds > self.rounds:
                raise ValueError(f"rounds is {rounds}, the guarantee covers {self.rounds}")
            early = dataclasses.replace(self.caveats, unused=self.rounds - rounds)
            return dataclasses.replace(self, caveats=early)
        if rounds not in self.curve.marks or self.rounds != self.curve.marks[-1]:
            raise ValueError(
                f"rounds is {rounds} of {self.rounds}, the curve's marks are {self.curve.marks}; "
                "ask the whole run's guarantee for one of them"
            )
        return self._part(rounds, self.curve.shares[self.curve.marks.index(rounds)])

    def followed_by(self, later: "Guarantee", *, planned: bool) -> "Guarantee":
        """What two runs in a row spend on the same agents: mu^2 adds up, other losses compose.

        Guarantee: adaptive composition of Gaussian DP. The later run's data, models and gradients
        may depend on what the earlier one released; that there is one, its length and its noise
        must have been fixed before the earlier one began. A phase added because of what the first
        one released makes delta up to 1.87 times the one stated (two equal phases). Both must have
        noise of their own. An earlier run that was stopped on the way states all that it had
        planned, and that is what composes.

        Where this record states a total (`within`), what it returns states the same total over one
        phase more, which may have been chosen by anything released.

        Args:
            later: The guarantee of the run that carried on.
            planned: True: both phases were fixed before the first one began. False: they were not,
                and this record states a total.

        Returns:
            The guarantee of both, with the exact epsilon at the same delta; or of the total.

        Raises:
            ValueError: If ``planned`` is not True and no total is stated, or the later phase passes
                it; for guarantees with a curve, whose numbers were chosen on the way, where no
                total is stated; if the two have no attacker whom both cover, differ in relation,
                delta, release, gradients, or in how far apart a record takes part, or have losses
                that do not compose; if what finite precision adds uses up delta.

        Reference:
            Dong, Roth and Su (2022), Corollary 3.3.
        """
        _validate.flag("planned", planned)
        if self.phases:
            whole = budget.Whole(self.loss, self.epsilon, self.added_epsilon, self.added_delta)
            return _under(whole, (*self.phases, *(later.phases or (later,))))
        if later.phases:
            raise ValueError(
                f"phases of the later record are {len(later.phases)} under a total, which the "
                "earlier one does not state; a total is fixed before the first phase, state that "
                "one by within(total)"
            )
        if not planned:
            raise ValueError(
                "planned is False; a phase that was decided on after seeing the first one is not "
                "covered by any sum of the two. If a total was fixed before the first one began, "
                "state that one by within(total). Else fix the largest later phase before the "
                "first one begins, and state both with planned=True whether or not it is run"
            )
        for record in (self, later):
            if record.curve is not None:
                raise ValueError(
                    f"curve has marks {record.curve.marks}; phases in a row are covered by their "
                    "plans' own guarantees, compose those, or state a total by within(total)"
                )
        if self.relation is None or later.relation is None:
            return Guarantee.none(self.rounds + later.rounds)
        base = _joined(self, later)
        patterns = [getattr(record.loss, "participation", None) for record in (self, later)]
        apart = [pattern and pattern[1] for pattern in patterns]
        if apart[0] != apart[1]:
            raise ValueError(
                f"participation is {patterns[0]}, then {patterns[1]}; only equal separations "
                "compose"
            )
        return base._restated(self.loss.then(later.loss))

    def protection(self) -> parties.Protection:
        """Who is protected from whom: a row for each party, printed as a table.

        Guarantee: a row's epsilon is an upper bound at ``delta`` against that party, for the same
        relation, rounds and assumptions as this record's; None promises nothing. Rows are about
        a deployment whose agents keep their secrets: whoever runs this process, knows the seed of
        a simulation or the key of a release is not protected from.

        Returns:
            Rows (party, epsilon, delta, why): an outsider, other participants, a stated coalition,
            an aggregator or server, whoever runs this process, whoever holds the seed.
        """
        return parties.table(self)

    def within(self, total: budget.Total) -> "Guarantee":
        """What a first phase states under a total that was fixed before it: that total.

        That it was fixed before is the user's word, and statements say so.

        A privacy filter: whatever phases follow, as long as the squares of their mu add up to at
        most that of the total, all of them together are mu-GDP with the total's mu.

        Guarantee: if the total was fixed before the first phase, and every phase has noise of its
        own, then all phases in a row (`followed_by`) keep what is returned, also where it was
        chosen by anything released whether there is another phase, of which agents, rounds and
        noise. Not where it was chosen by data that were not released: a site that leaves because
        of what its own data show tells that. Agents that have left spend nothing more; agents are
        not told apart, each phase counts by its worst one. See `dpjax.accounting.budget.remaining`.

        Args:
            total: The total, a `dpjax.plans.protect.Budget` of one epsilon, with accountant "gdp"
                for Gaussian noise, "zcdp" or "pure".

        Returns:
            The guarantee that states the total, with this phase in ``phases``; this one itself
            where it states that total already.

        Raises:
            ValueError: For a phase that passes the total or has another delta; losses of batches
                drawn by Poisson sampling, for which adding up does not hold; coalitions and
                gradients="view", whose phases do not compose; another total than stated.

        Reference:
            Smith and Thakurta (2022), arXiv 2210.17520; Koskela, Tobaben and Honkela (2023),
            arXiv 2209.15596; docs/accounting.md for phases that are interactive.
        """
        if self.relation is None:
            raise ValueError("relation is None: this phase is not private, and no total covers it")
        whole = budget.whole(total, release=self.release)
        if self.delta != total.delta:
            raise ValueError(
                f"delta is {self.delta}, and the total's {total.delta}; plan every phase at the "
                "total's"
            )
        if not self.phases:
            return _under(whole, (self,))
        if (self.epsilon, self.accountant) != (whole.epsilon, total.accountant):
            raise ValueError(
                f"epsilon is {self.epsilon} of a total that is stated already "
                f"({self.accountant}); a total is fixed once, before the first phase"
            )
        return self

    def statement(self) -> str:
        """What is guaranteed against the stated attacker, and what other parties can learn."""
        return wording.statement(self)

    def caption(self, digits: int = 4) -> str:
        """The guarantee in a few words, for a figure.

        Args:
            digits: Of its numbers, which are rounded up.
        """
        return wording.caption(self, digits)

    def _open(self, **changes: Any) -> "Guarantee":
        """The record with changes, its epsilon still to be stated."""
        return dataclasses.replace(
            self,
            **{
                "epsilon": math.inf,
                "accountant": "gdp",
                "per_agent_epsilon": None,
                "caveats": dataclasses.replace(self.caveats, unsound=False),
                **changes,
            },
        )

    def _of_mu(self, mu: float) -> float:
        return self.exact(losses.Gaussian(mu))

    def _part(self, rounds: int, share: float) -> "Guarantee":
        """The first rounds, which have spent a share of the mu^2 of a Gaussian loss."""
        assert isinstance(self.loss, losses.Gaussian)
        spent, each = self.loss.part(rounds, share), None
        epsilon, mu = self._of_mu(spent.mu), spent.mu
        if self.per_agent_epsilon is not None:
            mus = [value * losses.root(share) for value in self._agents_mus()]
            each = tuple(self._of_mu(min(one, mu)) for one in mus)
            if not self.unsound:  # Their mus are upper bounds, up to rounding.
                each = tuple(map(min, each, self.per_agent_epsilon))
            epsilon, mu = max(each), min(mu, max(mus))
        return dataclasses.replace(
            self,
            epsilon=epsilon,
            accountant="gdp",
            per_agent_epsilon=each,
            loss=dataclasses.replace(spent, mu=mu),
            caveats=dataclasses.replace(self.caveats, unsound=False, unused=0),
        )

    def _restated(self, loss: losses.AnyLoss) -> "Guarantee":
        """The record with another loss, its epsilon at the same delta."""
        epsilon = self.exact(loss)
        return self._open(epsilon=epsilon, accountant=loss.kind, loss=loss)

    def _curved(self, curve: stopping.Curve, added_delta: float) -> "Guarantee":
        """The record of the whole run at the curve's delta."""
        caveats = dataclasses.replace(self.caveats, unsound=False, added_delta=added_delta)
        bare, each = self._open(caveats=caveats, curve=curve), None
        if self.per_agent_epsilon is not None:
            each = tuple(bare._of_mu(mu) for mu in self._agents_mus())
        epsilon = bare.exact_epsilon if each is None else max(each)
        return dataclasses.replace(bare, epsilon=epsilon, per_agent_epsilon=each)

    def _agents_mus(self) -> list[float]:
        """Upper bounds on each agent's mu; one number where all agents have the same."""
        assert self.mu is not None
        most = self.mu
        if self.per_agent_epsilon is None:
            return [most]
        # Each agent's mu is at most what its accountant allowed for its epsilon.
        return [min(self._mu_of(value), most) for value in self.per_agent_epsilon]

    def _mu_of(self, epsilon: float) -> float:
        """An upper bound on the mu for which this record's accountant states epsilon."""
        rule: Any = self.accountant
        if rule == "gdp":  # What the other rules state need not include it.
            epsilon = max(0.0, epsilon - self.added_epsilon)
        delta = self.delta if self.curve is None else self.curve.delta
        if epsilon == 0:
            return float(gdp.mu(0.0, delta)) * (1 + 1e-9)
        mu = budget.allowed_mu(epsilon, delta, accountant=rule, allow_unsound=True)
        return float(mu) * (1 + 1e-9)


def _under(whole: budget.Whole, phases: tuple[Guarantee, ...]) -> Guarantee:
    """The record that states a total over phases; its constructor refuses those that pass it."""
    loss: Any = whole.loss
    loss = dataclasses.replace(loss, rounds=sum(one.rounds for one in phases))
    if isinstance(loss, losses.Gaussian):
        loss = dataclasses.replace(loss, over_rounds="phases")
    base = _joined_all(phases)
    caveats = dataclasses.replace(
        base.caveats, added_epsilon=whole.added_epsilon, added_delta=whole.added_delta
    )
    return base._open(
        epsilon=whole.epsilon, accountant=loss.kind, loss=loss, caveats=caveats, phases=phases
    )


def _joined_all(phases: Sequence[Guarantee]) -> Guarantee:
    """What phases under a total state beside their losses, and what finite precision adds."""
    first = phases[0]._open(curve=None, loss=losses.Gaussian(math.inf, phases[0].rounds))
    return functools.reduce(_joined, phases[1:], first)


def _joined(of: Guarantee, later: Guarantee) -> Guarantee:
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
    if (of.gradient_gap is None) != (later.gradient_gap is None):
        raise ValueError(
            f"gradient_gap is {of.gradient_gap}, then {later.gradient_gap}; a clip and an "
            "assumption do not compose: state the two runs apart"
        )

    def least(name: str) -> Any:
        values = [getattr(one, name) for one in (of, later)]
        return min((value for value in values if value is not None), default=None)

    threat = dataclasses.replace(
        of.threat,
        attacker=_attacker(of, later),
        clip_norm=max(of.clip_norm, later.clip_norm),
        # The loss is known of neighbours that keep what both assume.
        gradient_gap=least("gradient_gap"),
        smoothness=least("smoothness"),
    )
    added_delta = of.added_delta + later.added_delta
    if added_delta >= of.delta > 0:
        raise ValueError(
            f"added_delta is {of.added_delta}, then {later.added_delta}, which uses up delta "
            f"{of.delta}; state the two runs apart"
        )
    caveats = Caveats(
        release=of.release,
        added_epsilon=of.added_epsilon + later.added_epsilon,
        added_delta=added_delta,
        sum_rounding=max(of.sum_rounding, later.sum_rounding),
        private_stop=of.private_stop or later.private_stop,
        lost_noise=_lost(of, later),
        unused=of.unused + later.unused,
        dropouts=min(of.dropouts, later.dropouts),
        colluders=min(of.colluders, later.colluders),
        sealed=of.sealed or later.sealed,
        secrets=_weaker(of.secrets, later.secrets),
        phase=max(of.phase, later.phase),
        custom=tuple(dict.fromkeys(of.custom + later.custom)),
    )
    rounds = losses.Gaussian(math.inf, of.rounds + later.rounds)  # Of no loss yet.
    return of._open(threat=threat, caveats=caveats, loss=rounds, curve=None)


def _attacker(of: Guarantee, later: Guarantee) -> Any:
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


def _weaker(first: Secrets | None, later: Secrets | None) -> Secrets | None:
    """Who knows the secrets of two phases; None where neither says it of both."""
    if first == later:  # Who is in which group is not recorded, and may have changed.
        return None if first == "group" else first
    other = later if first == "own" else first
    return other if "own" in (first, later) and other != "alone" else None


def _lost(of: Guarantee, later: Guarantee) -> tuple[int, float] | None:
    """From which round of both runs on noise was lost."""
    if later.lost_noise is None or of.lost_noise is None:
        first, offset = (of, 0) if later.lost_noise is None else (later, of.rounds)
        return first.lost_noise and (first.lost_noise[0] + offset, first.lost_noise[1])
    return of.lost_noise[0], max(of.lost_noise[1], later.lost_noise[1])
