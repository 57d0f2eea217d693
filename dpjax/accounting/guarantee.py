"""The record of what a run guarantees; every run stores one and every figure prints it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dpjax import _validate
from dpjax.accounting import budget, consistency, losses, parties, spending, stopping, stored
from dpjax.accounting import wording as wording_

__all__ = ["Guarantee"]

Attacker = Literal["outsider", "node", "coalition", "aggregator", "nodes"]
"""Words of `wording.ATTACKERS`; "nodes" is what older records call a coalition."""


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(epsilon, delta)-DP of a run, and under which assumptions.

    Guarantee: a record cannot be made that states less than its loss says, which for Gaussian
    noise is the exact one at its mu, unless it says so (``unsound=True``, for the paper's rule
    where it is false; it then prints both).

    Attributes:
        epsilon: Stated epsilon, the largest over agents; infinity when non-private.
        delta: Delta.
        mu: Gaussian-DP parameter of the whole run, the largest over agents; None where
            ``other_loss`` is given.
        relation: Neighbouring relation; None when non-private, no default.
        attacker: Whom it defends against, a key of `wording.ATTACKERS`.
        rounds: Rounds T that it covers.
        clip_norm: Clip norm C; infinity where nothing is clipped.
        accountant: How epsilon follows from mu, one of `budget.ACCOUNTANTS`; the loss's own kind
            where that is not Gaussian ("pld", "zcdp", "pure"); None when non-private.
        release: True where the noise key was drawn from the operating system and kept secret;
            False for a simulation, whose seed gives the noise away.
        unit: "agent", "record" or "client", from the relation; may be given, and must then agree.
        per_agent_epsilon: One epsilon an agent, where budgets differ.
        white: True when the noise is independent between rounds, and what the attacker sees of a
            round too; `after` then spends by rounds.
        unsound: True where the paper's epsilon is below the exact one.
        participation: (epochs, separation) where every record takes part in at most ``epochs``
            rounds, ``separation`` apart within a run, by a fixed order; None where it may in all.
        added_epsilon: What finite-precision noise costs of epsilon, which includes it, see
            `dpjax.accounting.finite`; 0 where noise is taken to be exact, as in simulations.
        added_delta: The part of delta that finite-precision noise uses.
        gradients: "any", or "view" where it holds only for gradients that do not depend on what
            the attacker cannot see, see `dpjax.accounting.attacker.View.loss`.
        curve: The marks at which the run may have stopped by what was released, with what makes
            the numbers of all of them hold at once; None where the rounds were fixed beforehand.
        nodes: The agents of a coalition, which colludes; None for other attackers.
        private_stop: True where the round at which the run ended was chosen by a callback that
            could read metrics of private data: what that choice gives away is not covered.
        other_loss: The loss where it is not Gaussian; None where mu says all.
        norm: In which norm gradients are clipped, or assumed to be close.
        gradient_gap: Where nothing is clipped, how far the gradients of neighbouring agents'
            objectives, of whatever batch is drawn, are assumed to be apart at most, at every
            model; every text of this record says that it is an assumption.
        smoothness: Beside such a gap, how far gradients of one objective are assumed to be apart
            over the distance of the models, where the method needs it; else None.
        dropouts: Agents that may be missing from a sum that is opened, at most; with more it does
            not hold.
        colluders: Agents that may show the aggregator their messages and noise, at most.
        lost_noise: (round, share) where a run found its noise finer than the numbers that it was
            added to: from that round on up to that share of a message's entries went out without
            noise, which the loss does not cover; None where it did not.
        sum_rounding: Share of the clip norm by which a run lowered it for every record, so that
            sums of records keep it in spite of rounding; 0 where no records are added up.
        sealed: True where noise is in shares, so that it holds for sums alone: an outsider reads
            single messages under the masks of a secure sum, or not at all.
        secrets: Who draws the noise from which secret, a key of `parties.SECRETS`, by which
            `protection` tells who else is protected; None where that is not known.
        over_rounds: Why ``white`` is False: "correlated" noise, a scale by "schedule", or "phases"
            of several runs; None where it is True, and in older records.
        phases: The phases so far of which this record states a total that was fixed before the
            first one, see `within`; empty for a run of its own.
        unused: Rounds of ``rounds`` that were not run, since the run ended early.
        phase: Number of the run among several in a row, from whose seed and number a simulation
            draws its noise; of several the largest.
        custom: Names of the classes of the user's own that it relies on; every text names them.
    """

    epsilon: float
    delta: float
    mu: float | None
    relation: budget.Relation | None
    attacker: Attacker | None
    rounds: int
    clip_norm: float
    accountant: Literal["gdp", "rdp", "paper", "pld", "zcdp", "pure"] | None
    release: bool
    unit: str | None = None
    per_agent_epsilon: tuple[float, ...] | None = None
    white: bool = True
    unsound: bool = False
    participation: tuple[int, int] | None = None
    added_epsilon: float = 0.0
    added_delta: float = 0.0
    gradients: Literal["any", "view"] = "any"
    curve: stopping.Curve | None = None
    private_stop: bool = False
    nodes: tuple[int, ...] | None = None
    other_loss: losses.Pld | losses.Concentrated | losses.Pure | None = None
    norm: Literal["l2", "l1"] = "l2"
    gradient_gap: float | None = None
    smoothness: float | None = None
    dropouts: int = 0
    colluders: int = 0
    sealed: bool = False
    secrets: parties.Secrets | None = None
    over_rounds: Literal["correlated", "schedule", "phases"] | None = None
    phases: "tuple[Guarantee, ...]" = ()
    lost_noise: tuple[int, float] | None = None
    sum_rounding: float = 0.0
    unused: int = 0
    phase: int = 0
    custom: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a record that contradicts itself."""
        consistency.check(self)

    @classmethod
    def none(cls, rounds: int) -> "Guarantee":
        """The record of a non-private run: epsilon is infinite.

        Args:
            rounds: Rounds T.

        Returns:
            The record.
        """
        return cls(
            epsilon=math.inf,
            delta=0.0,
            mu=math.inf,
            relation=None,
            attacker=None,
            rounds=rounds,
            clip_norm=math.inf,
            accountant=None,
            release=False,
        )

    @property
    def loss(self) -> losses.AnyLoss:
        """What the run costs, before it is stated at a delta."""
        if self.other_loss is not None:
            return self.other_loss
        assert self.mu is not None
        return losses.Gaussian(self.mu, self.rounds, self.white, self.participation)

    @property
    def spent(self) -> losses.AnyLoss:
        """What the phases under a total have spent together; without them the loss itself."""
        return spending.spent(self)

    @property
    def exact_epsilon(self) -> float:
        """Epsilon of the loss at this delta (a curve's), whatever the accountant states."""
        return spending.exact(self, self.loss)

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
            return spending.part(self, rounds, loss.share(rounds))
        return spending.restated(replace(self, unused=0), loss.after(rounds))

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
        return spending.with_curve(self, marks, shares)

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
            return replace(self, unused=self.rounds - rounds)
        if rounds not in self.curve.marks or self.rounds != self.curve.marks[-1]:
            raise ValueError(
                f"rounds is {rounds} of {self.rounds}, the curve's marks are {self.curve.marks}; "
                "ask the whole run's guarantee for one of them"
            )
        return spending.part(self, rounds, self.curve.shares[self.curve.marks.index(rounds)])

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
        return spending.composed(self, later, planned)

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
        return spending.within(self, total)

    def statement(self) -> str:
        """What is guaranteed against the stated attacker, and what other parties can learn."""
        return wording_.statement(self)

    def caption(self, digits: int = 4) -> str:
        """The guarantee in a few words, for a figure.

        Args:
            digits: Of its numbers, which are rounded up.
        """
        return wording_.caption(self, digits)

    def to_dict(self) -> dict[str, Any]:
        """The record as a dict for strict JSON: infinities are the string "inf"."""

        return stored.to_dict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Guarantee":
        """The inverse of `to_dict`; the record is checked again.

        Args:
            record: What `to_dict` returned, perhaps through JSON.

        Returns:
            The guarantee.

        Raises:
            ValueError: For missing or unknown fields, or a record that contradicts itself.
        """
        return cls(**stored.fields(cls, record))
