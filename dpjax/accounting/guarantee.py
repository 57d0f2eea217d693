"""The record of what a run guarantees; every run stores one and every figure prints it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeAlias

import numpy as np

from dpjax import _html, _validate
from dpjax.accounting import budget, finite, parties, stopping, wording
from dpjax.accounting.arrays import Fields, Numbers
from dpjax.accounting.loss import Loss
from dpjax.accounting.losses import Concentrated, Gaussian
from dpjax.accounting.records import Record, agents_mus, precision_cost, together

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
        >>> round(stated.after(25).epsilon, 3), stated.unit
        (0.906, 'record')
    """

    def __post_init__(self) -> None:
        """Refuse a record that contradicts itself, its phases or the total that it states."""
        super().__post_init__()
        if not self.phases:
            return
        for phase in self.phases:
            if not isinstance(phase, Guarantee) or phase.phases or phase.relation is None:
                raise ValueError(f"phases has {phase!r}; give the guarantees of single phases")
        if self.gradients == "view" or self.nodes is not None:
            raise ValueError(
                f"nodes is {self.nodes} and gradients is {self.gradients!r} under a total. Agents "
                "are numbered anew where some have left, and later messages tell of earlier "
                "gradients. Plan for gradients='any' and attacker 'outsider' or 'node', or fix all "
                "phases of a coalition beforehand (planned=True), without a total"
            )
        epsilons = [phase.per_agent_epsilon for phase in (self, *self.phases)]
        counts = {len(agents) for agents in epsilons if agents}
        if self.per_agent_epsilon and len(counts) > 1:
            raise ValueError(
                f"phases and the total have epsilons of {sorted(counts)} agents; state them for "
                "the agents that stay, by survivors(departed)"
            )
        joined_fields = _joined_all(self.phases).fields()
        count = _validate.counted(len(self.phases), "phase")
        for name, value in self.fields().items():
            other = joined_fields[name]
            if name not in _OF_TOTAL and value != other:
                raise ValueError(f"{name} is {value!r}, and {other!r} of its {count}")
        # One number stands for all agents where none has a budget of its own.
        limits = budget.limits(vars(self), self.delta)
        used, limit = np.broadcast_arrays(self.agents_spent, limits)
        if (used > limit).any():
            agent = int(np.argmax(used - limit))
            where = f" at agent {agent}" if len(used) > 1 else ""
            raise ValueError(
                f"{self.spent.symbol} of {count} is {used[agent]:.6g} together{where}, more than "
                f"the total's {limit[agent]:.6g} (epsilon {parties.epsilon_text(self)} at delta "
                f"{self.delta:g}); plan the next one for what budget.remaining(total, spent) leaves"
            )
        added = {name: joined_fields[name] for name in ("added_epsilon", "added_delta")}
        added["added_delta"] += self.spent.failure
        for name, value in added.items():
            if value > getattr(self, name):
                raise ValueError(
                    f"{name} of {count} is {value:.3g}, more than the "
                    f"{getattr(self, name):.3g} that the total keeps for noise of finite "
                    "precision; give Budget(..., reserve=...), fewer rounds or a smaller model"
                )

    def _repr_html_(self) -> str:
        """The caption, who is protected from whom, and the statement, for notebooks."""
        caption = _html.escape(self.caption())
        sentences = _html.escape(self.statement())
        table = parties.table(self)._repr_html_()
        sentences = f"<details><summary>In full</summary><p>{sentences}</p></details>"
        return f"<p><b>{caption}</b></p><div class='wide'>{table}</div>{sentences}"

    def for_records(self, records: int) -> float:
        """Epsilon, at the same delta, of several records that change together: of one person, say.

        Guarantee: for any k records, at one agent or at several, against the same attacker.

        Args:
            records: k, at least 1.

        Returns:
            An upper bound; infinity where none follows.

        Raises:
            ValueError: For another unit than a record, or after a curve over rounds.

        Example:
            >>> from dpjax.accounting.guarantee import Guarantee
            >>> stated = Guarantee.of(
            ...     epsilon=2.0, delta=1e-5, mu=0.49, relation="replace_record",
            ...     attacker="outsider", rounds=100, clip_norm=1.0, accountant="gdp", release=False,
            ... )
            >>> round(stated.for_records(2), 2)
            4.28
        """
        if self.unit != "record" or self.curve is not None:
            fault = f"unit is {self.unit!r}" if self.curve is None else "the guarantee has a curve"
            raise ValueError(f"{fault}, for which no cost of records follows; give a plan's own")
        return parties.group_epsilon(self, _validate.integer("records", records))

    def dp_event(self) -> Any:
        """Return the run as an event of dp_accounting, so that another accountant can check it.

        Compose it with ``PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)``, whose relation is
        zeroing out. The event is of the agent that loses most, of the whole loss, and of noise in
        exact arithmetic: ``added_epsilon`` and ``added_delta`` are not in it.

        Returns:
            A ``dp_accounting.DpEvent``: Gaussians for Gaussian noise, Poisson-sampled ones for
            coin flips, zCDP for discrete noise.

        Raises:
            ValueError: For a loss of which dp_accounting has no event, and for a total of phases.
            ImportError: Where dp_accounting is missing.

        Example:
            >>> from dpjax.accounting.guarantee import Guarantee
            >>> stated = Guarantee.of(
            ...     epsilon=2.0, delta=1e-5, mu=0.49, relation="replace_record",
            ...     attacker="outsider", rounds=100, clip_norm=1.0, accountant="gdp", release=False,
            ... )
            >>> event = stated.dp_event()
            >>> event.count, round(event.event.noise_multiplier, 3)
            (100, 20.408)
        """
        if self.phases:
            raise ValueError(
                f"phases are {len(self.phases)} under a total, which is no event; ask that of one "
                "phase"
            )
        try:
            from dp_accounting import dp_event
        except ImportError:
            raise ImportError("dp_accounting is missing; pip install dp-accounting") from None
        return self.loss.dp_event(dp_event, self._delta)

    @classmethod
    def none(cls, rounds: int) -> "Guarantee":
        """The record of a non-private run: epsilon is infinite.

        Args:
            rounds: Rounds T.

        Returns:
            The record.
        """
        fields: Any = dict.fromkeys(("relation", "attacker", "accountant"))
        fields |= dict.fromkeys(("epsilon", "mu", "clip_norm"), inf)
        return cls.of(**fields, delta=0.0, rounds=rounds, release=False)

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
        # A curve holds at its marks and nowhere between.
        if self.curve is not None:
            raise ValueError(f"curve has marks {self.curve.marks}; use stopped(rounds)")
        if self.phases:
            raise ValueError(f"phases are {len(self.phases)} under a total; ask that of one phase")
        loss = self.loss.after(rounds)
        if self.relation is None:
            return Guarantee.none(rounds)
        if isinstance(self.loss, Gaussian):
            return self._reserved()._part(rounds, self.loss.share(rounds))
        return self._restated(loss, unused=0)

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
            fault = f"curve is {self.curve} and phases are {len(self.phases)} already"
            raise ValueError(f"{fault}; use the plan's own guarantee")
        loss = self.loss
        if not isinstance(loss, Gaussian):
            raise ValueError(
                f"loss is {type(loss).__name__}; curves are known for Gaussian losses alone: state "
                "the plan's own guarantee, which holds wherever the run stops"
            )
        if shares is None:
            shares = [loss.share(_validate.integer("marks", mark)) for mark in marks]
        free = stopping.Curve(marks=tuple(marks), shares=tuple(shares), delta=self.delta)
        if free.marks[-1] != self.rounds:
            raise ValueError(f"marks end at {free.marks[-1]}; end them at the {self.rounds} rounds")
        reserved = self._reserved()
        if reserved is not self:
            return reserved.stopping_at(marks, shares=shares)
        # What finite precision costs grows with epsilon, which grows with the cost.
        mus = agents_mus(self)

        def curved(added: float) -> tuple[Guarantee, float]:
            remaining = self.delta - added
            inner = min(stopping.inner_delta(mu * free.roots, remaining) for mu in np.unique(mus))
            curve = replace(free, delta=inner)
            record = self._restated(loss, mus, added_delta=added, curve=curve)
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
            # That the run ended there may tell of the data, so all planned rounds count.
            return replace(self, unused=self.rounds - rounds)
        marks = self.curve.marks
        if rounds not in marks or self.rounds != marks[-1]:
            raise ValueError(f"rounds is {rounds}; marks are {marks} of the whole run's guarantee")
        return self._part(rounds, self.curve.shares[marks.index(rounds)])

    def followed_by(self, later: "Guarantee", *, planned: bool) -> "Guarantee":
        """What two runs in a row spend on the same agents: mu^2 adds up, other losses compose.

        Guarantee: adaptive composition of Gaussian DP. The later run's data, models and gradients
        may depend on what the earlier one released; that there is one, its length and its noise
        must have been fixed before the earlier one began. A phase added because of what the first
        one released makes delta up to 1.87 times the one stated (two equal phases). Both must have
        noise of their own. An earlier run that was stopped on the way states all that it had
        planned, and that is what composes. Phases of a coalition compose where its ``nodes`` are
        the same numbers of the same agents in both: its loss under gradients "any" holds after all
        messages of the earlier phase, whatever its members know of that. Where budgets are by
        agent, agent i of both is the same.

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
                delta, release, sites, gradients, or in how far apart a record takes part, or have
                losses that do not compose; if what finite precision adds uses up delta.

        Reference:
            Dong, Roth and Su (2022), Corollary 3.3.
        """
        _validate.flag("planned", planned)
        if self.phases:
            return _under(vars(self), (*self.phases, *(later.phases or (later,))))
        # Two totals of the same agents would count phases twice.
        if later.phases:
            raise ValueError(
                f"phases of the later record are {len(later.phases)} under a total, which the "
                "earlier one does not state; state it by within(total)"
            )
        if not planned:
            raise ValueError(
                "planned is False, and no sum covers a phase that was chosen after the first one. "
                "State a total that was fixed beforehand by within(total), or plan both phases"
            )
        for record in (self, later):
            if record.curve is not None:
                raise ValueError(
                    f"curve has marks {record.curve.marks}; their plans' own guarantees cover "
                    "phases in a row: compose those, or state a total by within(total)"
                )
        # A run without noise has no guarantee, whatever the other one states.
        if self.relation is None or later.relation is None:
            return Guarantee.none(self.rounds + later.rounds)
        runs = self._reserved(), later._reserved()
        base = _joined(*runs)
        patterns = [getattr(record.loss, "participation", None) for record in (self, later)]
        separations = [pattern and pattern[1] for pattern in patterns]
        if separations[0] != separations[1]:
            raise ValueError(
                f"participation is {patterns[0]}, then {patterns[1]}; only equal separations "
                "compose"
            )
        return base._restated(self.loss.then(later.loss), together(runs))

    def protection(self, unprotected: str = "no noise is added") -> parties.Protection:
        """Who is protected from whom: a row for each party, printed as a table.

        Guarantee: a row's epsilon is an upper bound at ``delta`` against that party, for the same
        relation, rounds and assumptions as this record's; None promises nothing. Rows are about a
        deployment whose agents keep their secrets.

        Args:
            unprotected: Why nobody is protected, where there is no guarantee.

        Returns:
            Rows (party, epsilon, delta, why).
        """
        return parties.table(self, unprotected)

    def statement(self, *, process: bool = True) -> str:
        """The guarantee in one sentence; then what it does not cover, and what others can learn.

        Args:
            process: Whether one process holds all agents, as in every run of this package; False
                in the file of a loop of one's own.
        """
        return wording.statement(self, process=process)

    def caption(self, digits: int = 4) -> str:
        """The guarantee in a few words, for a figure.

        Args:
            digits: Of its numbers, rounded up.
        """
        return wording.caption(self, digits)

    def within(self, total: Any) -> "Guarantee":
        """What a first phase states under a total that was fixed before it: that total.

        That it was fixed before is the user's word, and statements say so.

        A privacy filter: whatever phases follow, as long as the squares of their mu add up to at
        most that of the total, all of them together are mu-GDP with the total's mu.

        Guarantee: if the total was fixed before the first phase, and every phase has noise of its
        own, then all phases in a row (`followed_by`) keep what is returned, also where it was
        chosen by anything released whether there is another phase, of which agents, rounds and
        noise. Not where it was chosen by data that were not released: a site that leaves because
        of what its own data show tells that. Agents that have left spend nothing more. Where the
        total or budgets of phases are by agent, agent i is to be the same one in all phases, see
        `survivors`; phases with one epsilon count the same for all agents, and phases of different
        numbers of agents by the agent with their largest loss. See
        `dpjax.accounting.budget.remaining`.

        Args:
            total: The total, a `dpjax.plans.protect.Budget` with accountant "gdp" for Gaussian
                noise, of one epsilon or of one an agent; or "zcdp" or "pure", of one epsilon.

        Returns:
            The guarantee that states the total, with this phase in ``phases``; this one itself
            where it states that total already.

        Raises:
            ValueError: For a phase that passes the total or has another delta; a total of other
                agents; losses of secret batches, for which adding up is not known to
                hold; coalitions, whose numbers a departure changes; gradients="view", whose phases
                do not compose; another total than stated.

        Reference:
            Smith and Thakurta (2022), arXiv 2210.17520; Koskela, Tobaben and Honkela (2023),
            arXiv 2209.15596; the page 'Proofs' of the manual for phases that are interactive.
        """
        if self.relation is None:
            raise ValueError("relation is None: this phase is not private, and no total covers it")
        fields = budget.total_fields(total, release=self.release)
        if self.delta != total.delta:
            raise ValueError(f"delta is {self.delta}, and the total's {total.delta}; plan at that")
        if not self.phases:
            return _under(fields, (self,))
        stated = self.per_agent_epsilon or self.epsilon
        if (stated, self.accountant) != (total.epsilon, total.accountant):
            raise ValueError(
                f"epsilon is {stated} of a total by {self.accountant!r} that is stated "
                "already; a total is fixed once, before the first phase"
            )
        return self

    def survivors(self, departed: Sequence[int]) -> "Guarantee":
        """What it states of the agents that stay, numbered as by `mixing.survivors`.

        A total that is given by agent, or phases whose budgets are, count the agents of a later
        phase by their numbers.

        Guarantee: what this record states still holds for the departed, who spend nothing more.

        Args:
            departed: The agents who leave.

        Returns:
            The record; the same one where all agents have one epsilon, whoever they are.

        Raises:
            ValueError: For a number that is no agent's, or where nobody stays.

        Example:
            >>> from dpjax.accounting.guarantee import Guarantee
            >>> stated = Guarantee.of(
            ...     epsilon=2.0, per_agent_epsilon=(1.0, 2.0, 1.5), delta=1e-5, mu=0.49,
            ...     relation="replace_record", attacker="outsider", rounds=100, clip_norm=1.0,
            ...     accountant="gdp", release=False,
            ... )
            >>> np.round(stated.survivors([1]).per_agent_epsilon, 3).tolist()
            [1.0, 1.5]
        """
        phases = tuple(phase.survivors(departed) for phase in self.phases)
        if self.per_agent_epsilon is None:
            return replace(self, phases=phases)
        gone = _validate.agents("departed", departed, maximum=len(self.per_agent_epsilon) - 1)
        stay = np.delete(self.per_agent_epsilon, gone).tolist()
        if not stay:
            raise ValueError(f"departed is {gone}, everyone; leave at least one agent")
        changes: Fields = {"epsilon": max(stay), "per_agent_epsilon": tuple(stay)}
        if phases:
            mu = np.delete(budget.limits(vars(self), self.delta), gone).max()
            return self.replace(phases=phases, mu=float(mu), **changes)
        mus = np.delete(agents_mus(self), gone)
        if self.unsound:
            return self._restated(self.loss, mus)
        return self.replace(mu=float(mus.max()), per_agent_mu=tuple(mus.tolist()), **changes)

    def _open(self, **changes: Any) -> "Guarantee":
        """The record with changes, its epsilon still to be stated."""
        # Nothing understates an infinite epsilon, so every loss fits beside it.
        bare = dict[str, Any](epsilon=inf, accountant="gdp", unsound=False)
        bare |= dict.fromkeys(("per_agent_epsilon", "per_agent_mu"))
        return replace(self, **bare | changes)

    def _reserved(self) -> "Guarantee":
        """A release plan's record with the most that its run may add; else the record itself."""
        # A plan does not know its run's cost, only what the budget reserves for it.
        epsilon, delta = precision_cost(self)
        if delta == self.added_delta:
            return self
        mus = agents_mus(self)
        return self._restated(self.loss, mus, added_epsilon=epsilon, added_delta=delta)

    def _restated(
        self, loss: Any, mus: Numbers | None = None, limits: Any = None, **changes: Any
    ) -> "Guarantee":
        """The record with another loss, its epsilon at the same delta.

        Args:
            loss: The loss.
            mus: [n] bounds on each agent's, where they differ.
            limits: What agents' epsilons cannot be above.
            changes: Other fields.
        """
        if mus is not None:
            loss = replace(loss, mu=min(loss.mu, float(mus.max())))
        bare = self._open(accountant=loss.kind, loss=loss, **changes)
        if mus is None or len(mus) == 1:
            return replace(bare, epsilon=bare.exact_epsilon)
        agent_mus = np.minimum(mus, loss.mu).tolist()
        epsilons = [bare.exact(Gaussian(mu)) for mu in agent_mus]
        if limits is not None:
            epsilons = list(map(min, epsilons, limits))
        return replace(
            bare,
            epsilon=max(epsilons),
            per_agent_epsilon=tuple(epsilons),
            per_agent_mu=tuple(agent_mus),
        )

    def _part(self, rounds: int, share: float) -> "Guarantee":
        """The first rounds, which have spent a share of the mu^2 of a Gaussian loss."""
        assert isinstance(self.loss, Gaussian)
        spent = self.loss.part(rounds, share)
        mus = agents_mus(self) * spent.scale(share)
        # Their mus are upper bounds, up to rounding.
        limits = None if self.unsound else self.per_agent_epsilon
        return self._restated(spent, mus, limits, unused=0)


# Fields of a total that are not its phases'.
_Pair: TypeAlias = tuple[Any, Any]
_OF_TOTAL = (
    *("epsilon", "per_agent_epsilon", "accountant", "phases", "added_epsilon", "added_delta"),
    *("mu", "white", "over_rounds", "other_loss"),
)


def _under(fields: Fields, phases: tuple[Guarantee, ...]) -> Guarantee:
    """The record that states a total over phases; its constructor refuses those that pass it."""
    rounds = sum(phase.rounds for phase in phases)
    loss = replace(fields["loss"], rounds=rounds)
    names = ("epsilon", "per_agent_epsilon", "added_epsilon", "added_delta")
    changes = {name: fields[name] for name in names}
    # Fields of the phases stand in the joined record.
    return _joined_all(phases)._open(**changes, loss=loss, accountant=loss.kind, phases=phases)


def _joined_all(phases: Sequence[Guarantee]) -> Guarantee:
    """What phases under a total state beside their losses, and what finite precision adds."""
    loss = _no_loss(phases[0])
    first = phases[0]._open(curve=None, loss=loss, accountant=loss.kind)
    return functools.reduce(_joined, phases[1:], first)


def _no_loss(*runs: Guarantee) -> Loss:
    """A loss of so many rounds that states nothing: whoever joins runs states theirs."""
    rounds = sum(run.rounds for run in runs)
    if any(run.sums_of_sites for run in runs):
        # Sums among sites are of whole numbers.
        return Concentrated(inf, rounds)
    return Gaussian(inf, rounds)


def _least(values: _Pair) -> Any:
    """The loss is known of neighbours that keep what both assume."""
    return min((value for value in values if value is not None), default=None)


def _weaker(secrets: _Pair) -> Any:
    """Who knows the secrets of two phases; None where neither says it of both."""
    first, later = secrets
    if first == later:
        # Who is in which group is not recorded, and may have changed.
        return None if first == "group" else first
    if "own" not in secrets:
        return None
    other = later if first == "own" else first
    return None if other == "alone" else other


# What two runs in a row state of fields in which they may differ.
_MERGED: dict[str, Callable[[_Pair], Any]] = {
    **dict.fromkeys(("added_epsilon", "added_delta", "unused"), sum),
    **dict.fromkeys(("clip_norm", "sum_rounding", "phase"), max),
    **dict.fromkeys(("private_stop", "sum_only", "private_partition", "insecure"), any),
    **dict.fromkeys(("gradient_gap", "smoothness"), _least),
    "secrets": _weaker,
    "custom": lambda names: tuple(dict.fromkeys(names[0] + names[1])),
}


def _joined(earlier: Guarantee, later: Guarantee) -> Guarantee:
    """What two runs in a row state beside their loss; refused where one record cannot state both.

    Args:
        earlier: The record of the earlier run.
        later: That of the later one.
    """
    # Later models depend on gradients that the attacker could not see.
    if "view" in (earlier.gradients, later.gradients):
        raise ValueError(
            f"gradients is {earlier.gradients!r}, then {later.gradients!r}; a later phase tells of "
            "an earlier one's gradients: make one plan for all rounds, or state gradients='any'"
        )
    for name in ("relation", "delta", "release", "sites", "nodes", "norm"):
        first = getattr(earlier, name)
        second = getattr(later, name)
        if first != second:
            raise ValueError(f"{name} is {first!r}, then {second!r}; only equal ones compose")
    if (earlier.gradient_gap is None) != (later.gradient_gap is None):
        values = f"{earlier.gradient_gap}, then {later.gradient_gap}"
        raise ValueError(f"gradient_gap is {values}; a clip and an assumption do not compose")
    fields = {}
    for name, merge in _MERGED.items():
        pair = (getattr(earlier, name), getattr(later, name))
        fields[name] = merge(pair)
    for name in ("dropouts", "colluders"):
        fields[name] = _fewest(name, (earlier, later))
    if fields["added_delta"] >= earlier.delta > 0:
        raise ValueError(
            f"added_delta is {fields['added_delta']}, which uses up delta; state the runs apart"
        )
    fields["attacker"] = _attacker(earlier, later)
    fields["lost_noise"] = _lost(earlier, later)
    loss = _no_loss(earlier, later)
    return earlier._open(**fields, loss=loss, accountant=loss.kind, curve=None)


def _attacker(earlier: Guarantee, later: Guarantee) -> str | None:
    """The attacker of whom both runs say something: the union of its views is what it sees."""
    if earlier.attacker == later.attacker:
        return earlier.attacker
    # Noise in shares is stated for whoever sees sums.
    nodes = () if earlier.sum_only or later.sum_only else ("node",)
    runs = (earlier, later)
    attackers = (*nodes, "outsider", "aggregator")
    if any(run.sums_of_sites for run in runs):
        # One of the sites adds up.
        attackers = ("aggregator",)
    for attacker in attackers:
        if all(_covers(run, attacker) for run in runs):
            return attacker
    raise ValueError(
        f"attacker is {earlier.attacker!r}, then {later.attacker!r}, and neither phase covers the "
        "other one's; plan both for one attacker: an outsider's loss covers an aggregator, and "
        "single nodes too where every agent's noise is its own"
    )


def _covers(run: Guarantee, attacker: str) -> bool:
    """Whether a run is stated for an attacker, or says the same of it."""
    # Sites whose noise is their own are protected from all others together.
    is_own = run.sites and run.secrets == "own"
    return attacker == run.attacker or is_own or parties.covers(run, attacker)


def _fewest(name: str, runs: _Pair) -> int:
    """How many may be missing, or collude: of sites that gossip without groups, any number."""
    if runs[0].sites and runs[0].sum_only != runs[1].sum_only:
        sums, gossip = sorted(runs, key=lambda run: not run.sum_only)
        if gossip.secrets != "own":
            raise ValueError(
                f"secrets is {gossip.secrets!r} of a phase without sums, whose noise several sites "
                "know, and sums are stated against sites that collude; plan noise of each site's "
                "own, noise.Independent() say"
            )
        return int(getattr(sums, name))
    return int(min(getattr(run, name) for run in runs))


def _lost(earlier: Guarantee, later: Guarantee) -> tuple[int, float] | None:
    """From which round of both runs on noise was lost."""
    if later.lost_noise is None:
        return earlier.lost_noise
    first, share = later.lost_noise
    if earlier.lost_noise is None:
        return first + earlier.rounds, share
    return earlier.lost_noise[0], max(earlier.lost_noise[1], share)
