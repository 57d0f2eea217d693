"""A view, what one attacker sees less what it knows, and its Gaussian-DP loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from dpjax import _validate
from dpjax.accounting import dense, exact, kalman
from dpjax.accounting.kalman import Model
from dpjax.mechanism.participation import Participation, checked

__all__: list[str] = []

Gradients = Literal["view", "any"]

# Losses that are not flagged exceed those of exact arithmetic by no more; a guarantee adds it.
_ROUNDING = 1e-9


class ViewLoss(NamedTuple):
    """Gaussian-DP loss of every victim, and how it was found.

    Attributes:
        mu: [n] at clip 1 and noise 1 for zeroing a record out; nan for attackers, infinite where
            gradients are seen without noise.
        upper_bound: [n] True where rounding left the exact value open: ``mu`` is then the loss of
            a strictly larger view, or one with room for the rounding.
        route: "recursion", "dense" or "closed form".
        gradients: "view" or "any", as asked for.
    """

    mu: Float[np.ndarray, " n"]
    upper_bound: Bool[np.ndarray, " n"]
    route: str
    gradients: str


@dataclass(frozen=True, eq=False)
class View:
    """What one attacker sees, less what it knows.

    Guarantee: with gradients clipped to norm C and noise multiplier sigma, agent u's records are
    mu_u / sigma-Gaussian-DP against this attacker when a record is zeroed out, twice that when it
    is replaced. ``gradients="view"`` covers gradients that are fixed in advance or functions of
    what the attacker sees and knows; in a training run other agents' gradients depend on models
    that it does not see, and only ``gradients="any"`` covers them. The values are no lower than
    the truth: what rounding leaves open is the loss of a strictly larger view.

    Attributes:
        attackers: Colluding nodes; their entries of a loss are nan.
        agents: Number of agents n.
        rounds: Most rounds, where a strategy fixes them; else None.
    """

    agents: int
    attackers: tuple[int, ...]
    rounds: int | None
    _model: Callable[[], Model] | None
    _matrices: Callable[[int, bool], tuple[np.ndarray, np.ndarray]]
    _all_messages: Callable[[Participation], ViewLoss] | None
    _sees_all: bool = False
    _as_given: bool = False
    _rational: Callable[[], Model] | None = None

    def materialize(
        self, rounds: int, *, check: bool = True
    ) -> tuple[Float[np.ndarray, "a b"], Float[np.ndarray, "a c"]]:
        """The view as O = A G + B Z, rows and columns by round first.

        Columns of what the attacker knows are zero.

        Args:
            rounds: T.
            check: Refuse a view with no C such that A = B C.

        Returns:
            A [T m, T n] and B [T m, T q].

        Raises:
            ValueError: If it is too large, or the check fails.
        """
        rounds = self._check_rounds(_validate.integer("rounds", rounds))
        a, b = self._matrices(rounds, False)
        if check:
            dense.check_factors(a, b)
        return a, b

    def gdp(
        self, participation: Participation, *, gradients: Gradients = "any"
    ) -> Float[np.ndarray, " n"]:
        """Gaussian-DP loss mu of every victim; see `loss`, whose ``mu`` it is.

        Args:
            participation: Which rounds a record takes part in.
            gradients: Which gradients it covers, "any" or "view".

        Returns:
            [n] mu at clip 1 and noise 1, zero-out; nan for attackers.
        """
        return self.loss(participation, gradients=gradients).mu

    def loss(self, participation: Participation, *, gradients: Gradients = "any") -> ViewLoss:
        """Gaussian-DP loss of every victim, with what is known of its exactness.

        The bound of the paper's (8), squared as it must be: mu_u^2 is the largest sum over a
        pattern of |(C' B^+ B C)_st|; exact where those entries are non-negative.

        Args:
            participation: Which rounds a record takes part in.
            gradients: "any" for the loss of the smallest view that determines every model, which
                holds in training; "view" for gradients fixed in advance or functions of the view.

        Returns:
            The loss.

        Raises:
            ValueError: For rounds beyond the strategy's, or a view too large for this machine.
        """
        closed = self._closed_form(participation, gradients)
        if closed is not None:
            return closed
        if self._model is not None:
            energies, route = kalman.energies(self._model(), participation), "recursion"
        else:
            energies, route = self._dense(participation), "dense"
        return self._finished(energies, route, participation, gradients)

    def _dense(self, participation: Participation) -> kalman.Energies:
        """Energies by the dense route, without rows that repeat what the attacker knows."""
        return dense.energies(*self._matrices(participation.rounds, True), participation)

    def guaranteed(
        self, participation: Participation, *, gradients: Gradients = "any"
    ) -> Float[np.ndarray, " n"]:
        """What may be stated: the least known bound, rounded up.

        The plain bound sums absolute values and can exceed the loss of a larger view; then that
        one is stated.

        Args:
            participation: Which rounds a record takes part in.
            gradients: As in `loss`.

        Returns:
            [n] mu.
        """
        mu = self.loss(participation, gradients=gradients).mu
        if gradients == "view" and self._all_messages is not None:
            mu = np.fmin(mu, self.loss(participation, gradients="any").mu)
        return mu * (1 + _ROUNDING)

    def _closed_form(self, participation: Participation, gradients: Gradients) -> ViewLoss | None:
        """The loss where all messages decide it, None where the view itself does."""
        _validate.one_of("gradients", gradients, ("view", "any"))
        self._check_rounds(checked(participation).rounds)
        if gradients == "any" and self._all_messages is None:
            raise ValueError(
                "gradients is 'any', but nothing says what determines the models; give linear(..., "
                "models=) the rows that read them off the state, or ask for gradients='view' where "
                "gradients are fixed in advance or functions of what the attacker sees"
            )
        if self._all_messages is None or (gradients == "view" and not self._sees_all):
            return None
        return self._hide(self._all_messages(participation)._replace(gradients=gradients))

    def _finished(
        self,
        energies: kalman.Energies,
        route: str,
        participation: Participation,
        gradients: Gradients,
    ) -> ViewLoss:
        """The loss of these energies; of a larger view where they leave it open."""
        if self._model is not None:
            rational = self._rational or self._model
            energies = self._settled(self._model, rational, energies, participation)
        mu, blurred = _losses(energies, participation)
        open_ = ~kalman.clear(energies)
        open_[list(self.attackers)] = False
        if open_.any():
            larger = self._larger(participation)
            mu = np.where(open_, larger, mu)
            # What shows far above rounding is infinite, unless noise of a trillionth may be meant.
            open_ &= np.isfinite(larger) | (energies.leak < kalman.LEAK) | self._as_given
        return self._hide(ViewLoss(mu, open_ | blurred, route, gradients))

    def _larger(self, participation: Participation) -> Float[np.ndarray, " n"]:
        """Loss of a view that holds this one: the state as well, or all messages."""
        every = np.full(self.agents, np.inf)
        if self._all_messages is not None:
            every = self._all_messages(participation).mu
        if self._model is None:
            return every
        wide = _round_by_round(self._model())
        energies = kalman.energies(wide, participation)
        energies = self._settled(lambda: wide, lambda: wide, energies, participation)
        mu = np.where(kalman.clear(energies), _losses(energies, participation)[0], np.inf)
        return np.fmin(mu, every)

    def _settled(
        self,
        model: Callable[[], Model],
        rational: Callable[[], Model],
        energies: kalman.Energies,
        participation: Participation,
    ) -> kalman.Energies:
        """The energies with what exact arithmetic can decide of them in little time."""
        victims = np.ones(self.agents, bool)
        victims[list(self.attackers)] = False
        ranks = kalman.clear(energies)[victims].all()
        if ranks and not _losses(energies, participation)[1][victims].any():
            return energies
        # Matrices that the package made are rounded themselves: only their ranks are asked for.
        exactly = exact.energies(model(), participation) if self._as_given else None
        if exactly is not None:
            return exactly
        return exact.confirmed(model(), energies, rational) if energies.hidden else energies

    def _hide(self, loss: ViewLoss) -> ViewLoss:
        # Only an attacker's loss is no number; what overflows is infinite.
        upper = loss.upper_bound | np.isnan(loss.mu)
        mu = np.where(np.isnan(loss.mu), np.inf, loss.mu)
        mu[list(self.attackers)] = np.nan
        upper[list(self.attackers)] = False
        return loss._replace(mu=mu, upper_bound=upper)

    def _check_rounds(self, rounds: int) -> int:
        if self.rounds is not None and rounds != self.rounds:
            raise ValueError(
                f"rounds is {rounds}, the strategy is made for {self.rounds}; make them equal"
            )
        return rounds


def losses(
    views: Sequence[View], participation: Participation, *, gradients: Gradients = "any"
) -> list[ViewLoss]:
    """Losses of many views, say of every single attacker, vmapped over those of equal shapes.

    Args:
        views: Of one algorithm or of several.
        participation: Which rounds a record takes part in.
        gradients: As in `View.loss`.

    Returns:
        What `View.loss` gives for each.

    Raises:
        ValueError: As `View.loss`.
    """
    by_index: dict[int, ViewLoss] = {}
    open_: dict[int, Model] = {}
    for index, view in enumerate(views):
        closed = view._closed_form(participation, gradients)
        if closed is not None:
            by_index[index] = closed
        elif view._model is None:
            by_index[index] = view.loss(participation, gradients=gradients)
        else:
            open_[index] = view._model()
    every = kalman.energies_of_each(list(open_.values()), participation)
    for index, energies in zip(open_, every, strict=True):
        by_index[index] = views[index]._finished(energies, "recursion", participation, gradients)
    return [by_index[index] for index in range(len(views))]


def _losses(
    energies: kalman.Energies, participation: Participation
) -> tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Losses mu [n] of the energies, rounding included, and where that is more than can be seen."""
    squares, blurred = kalman.squares(energies, participation)
    mu = np.sqrt(squares)
    infinite = (energies.leak >= kalman.LEAK) | np.isnan(mu)
    return np.where(infinite, np.inf, mu), blurred & ~infinite


def _round_by_round(model: Model) -> Model:
    """The model with the state seen before and after every round: no memory is left."""
    n, q = model.gradient.shape[-1], model.noise.shape[-1]
    period = math.lcm(*(len(part) for part in model))
    rounds = [model.at(t) for t in range(period)]
    gradient = np.stack([np.concatenate([here.gradient_seen, here.gradient]) for here in rounds])
    noise = np.stack([np.concatenate([here.noise_seen, here.noise]) for here in rounds])
    nothing = np.zeros((1, gradient.shape[1], 1))
    return Model(
        np.zeros((1, 1, 1)), np.zeros((1, 1, n)), np.zeros((1, 1, q)), nothing, gradient, noise
    )


def of_model(
    model: Model,
    attackers: tuple[int, ...],
    all_messages: Callable[[Participation], ViewLoss] | None,
    *,
    as_given: bool = False,
) -> View:
    """A view that is a state-space model for any number of rounds.

    Args:
        model: What the attacker does not know, and what it sees.
        attackers: Nodes whose entries of a loss are nan.
        all_messages: Loss of the smallest view that determines every model; None if not known.
        as_given: The matrices are a user's, without rounding: what float64 leaves open is found
            exactly where that is quick.

    Returns:
        The view.
    """

    def matrices(rounds: int, reduced: bool) -> tuple[np.ndarray, np.ndarray]:
        return dense.materialize(model, rounds)

    n = model.gradient.shape[-1]
    return View(n, attackers, None, lambda: model, matrices, all_messages, _as_given=as_given)


def seeing(model: Model, rows: Float[np.ndarray, "r c"], *, of: str) -> Model:
    """The same model with more rows seen, without noise, in each round.

    Args:
        model: A model.
        rows: [r, .] what is read off the state before the round, or off its gradients.
        of: "state_seen" or "gradient_seen".

    Returns:
        A model that observes strictly more.
    """

    def below(name: str) -> np.ndarray:
        part = getattr(model, name)
        block = rows if name == of else np.zeros((len(rows), part.shape[-1]))
        return np.concatenate([part, np.broadcast_to(block, (len(part), *block.shape))], axis=1)

    seen = ("state_seen", "gradient_seen", "noise_seen")
    return model._replace(**{name: below(name) for name in seen})
