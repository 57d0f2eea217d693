"""A view, what one attacker sees less what it knows, and its Gaussian-DP loss."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, lcm
from typing import Literal, NamedTuple

import numpy as np

from dpjax import _validate
from dpjax.accounting import dense, kalman
from dpjax.accounting.arrays import Flags, Ints, Matrix, Numbers, Sides, Vector
from dpjax.accounting.kalman import Energies, Model, ModelMaker
from dpjax.mechanism.participation import Participation, check_participation

__all__ = ()

GradientDependence = Literal["view", "any"]

# Losses that are not flagged exceed those of exact arithmetic by no more; a guarantee adds it.
_ROUNDING = 1e-9


class ViewLoss(NamedTuple):
    """Gaussian-DP loss of every victim, and how exact it is.

    Attributes:
        mu: [n] at clip 1 and noise 1 for zeroing a record out; nan for attackers, who have their
            own data; infinite where gradients are seen without noise.
        upper_bound: [n] True where ``mu`` may exceed the exact value: it is then a sum of sizes
            of numbers of both signs, the loss of a strictly larger view, or one with a margin for
            rounding.
        gradients: "view" or "any", as asked for.
    """

    mu: Vector
    upper_bound: Flags
    gradients: str


Judged = tuple[Vector, Flags]
"""Losses mu, and where they are bounds; entries of attackers mean nothing."""
Judge = Callable[[Participation], Judged]


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
        attackers: Colluding nodes. Their entries of a loss are nan: they have their own data, and
            nothing hides these from them. ``np.nanmax`` is the largest loss of all others.
        agents: Number of agents n.
        rounds: Most rounds, where a strategy fixes them; else None.
    """

    agents: int
    attackers: Ints
    rounds: int | None
    _matrices: Callable[[int], Sides]
    _loss: Judge
    _all_messages: Judge | None

    def materialize(self, rounds: int) -> Sides:
        """The view as O = A G + B Z, rows and columns by round first.

        Columns of what the attacker knows are zero.

        Args:
            rounds: T.

        Returns:
            A [T m, T n] and B [T m, T q].

        Raises:
            ValueError: If it is too large.
        """
        rounds = _validate.integer("rounds", rounds)
        self._check_rounds(rounds)
        return self._matrices(rounds)

    def gdp(self, participation: Participation, *, gradients: GradientDependence = "any") -> Vector:
        """Gaussian-DP loss mu of every victim; see `loss`, whose ``mu`` it is.

        Args:
            participation: Which rounds a record takes part in.
            gradients: Which gradients it covers, "any" or "view".

        Returns:
            [n] mu at clip 1 and noise 1, zero-out; nan for attackers.
        """
        return self.loss(participation, gradients=gradients).mu

    def loss(
        self, participation: Participation, *, gradients: GradientDependence = "any"
    ) -> ViewLoss:
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
        _validate.one_of("gradients", gradients, ("view", "any"))
        self._check_rounds(check_participation(participation).rounds)
        judge = self._loss if gradients == "view" else self._all_messages
        if judge is None:
            raise ValueError(
                "gradients is 'any', but nothing says what determines the models. Give linear(..., "
                "models=) the rows that read them off the state, or ask for gradients='view' where "
                "gradients are fixed in advance or functions of what the attacker sees"
            )
        mu, upper = judge(participation)
        # Only an attacker's loss is no number; what overflows is infinite.
        upper = upper | np.isnan(mu)
        mu = np.where(np.isnan(mu), inf, mu)
        mu[list(self.attackers)] = np.nan
        upper[list(self.attackers)] = False
        return ViewLoss(mu, upper, gradients)

    def guaranteed(
        self, participation: Participation, *, gradients: GradientDependence = "any"
    ) -> Vector:
        """What may be stated: the least known bound, rounded up.

        The plain bound sums absolute values and can exceed the loss of a larger view; then that
        one is stated.

        Args:
            participation: Which rounds a record takes part in.
            gradients: As in `loss`.

        Returns:
            [n] mu; nan for attackers, who have their own data.
        """
        mu = self.gdp(participation, gradients=gradients)
        if gradients == "view" and self._all_messages is not None:
            mu = np.fmin(mu, self.gdp(participation, gradients="any"))
        return mu * (1 + _ROUNDING)

    def _check_rounds(self, rounds: int) -> None:
        if self.rounds is not None and rounds != self.rounds:
            raise ValueError(
                f"rounds is {rounds}, the strategy is made for {self.rounds}; make them equal"
            )


def of_model(
    model: ModelMaker,
    attackers: Ints,
    all_messages: Judge | None,
    *,
    rational: ModelMaker | None = None,
) -> Judge:
    """The loss of a state-space model, by the recursion.

    Args:
        model: Makes what the attacker does not know, and what it sees.
        attackers: Nodes whose losses nobody asks for.
        all_messages: Loss of the smallest view that determines every model; None if not known.
        rational: Makes the model in fractions, without any rounding; None where the matrices are
            a user's, taken as they are.
    """

    def loss(participation: Participation) -> Judged:
        system = model()

        def larger() -> Numbers:
            """Loss of views that hold this one: of the state as well, and of all messages."""
            wide = _round_by_round(system)
            estimate = kalman.whitened_energies(wide, participation)
            energies = dense.confirmed(wide, estimate, rational and (lambda: wide))
            mu = np.where(kalman.clear(energies), _losses(energies, participation)[0], inf)
            return mu if all_messages is None else np.fmin(mu, all_messages(participation)[0])

        energies = dense.confirmed(
            system, kalman.whitened_energies(system, participation), rational
        )
        return stated(energies, participation, attackers, larger, rational is None)

    return loss


def stated(
    energies: Energies,
    participation: Participation,
    attackers: Ints,
    larger: Callable[[], Vector],
    exactly: bool = False,
) -> Judged:
    """The loss of these energies; of a larger view where they leave it open.

    Args:
        energies: The energies.
        participation: The one they were made for.
        attackers: As in `of_model`.
        larger: Finds the loss mu of a view that holds this one.
        exactly: The matrices are a user's, taken as they are.
    """
    mu, blurred = _losses(energies, participation)
    open_ = ~kalman.clear(energies)
    open_[list(attackers)] = False
    if open_.any():
        bound = larger()
        mu = np.where(open_, bound, mu)
        # What shows far above rounding is infinite, unless noise of a trillionth may be meant.
        open_ &= np.isfinite(bound) | (energies.leak < kalman.LEAK) | exactly
    return mu, open_ | blurred


def _losses(energies: Energies, participation: Participation) -> Judged:
    """Losses mu [n] of the energies, rounding included, and where that is more than can be seen."""
    squares, blurred = kalman.squares(energies, participation)
    mu = np.sqrt(squares)
    infinite = (energies.leak >= kalman.LEAK) | np.isnan(mu)
    return np.where(infinite, inf, mu), blurred & ~infinite


def _round_by_round(model: Model) -> Model:
    """The model with the state seen before and after every round: no memory is left."""
    n = model.gradient.shape[-1]
    q = model.noise.shape[-1]
    rounds = [model.at(t) for t in range(lcm(*map(len, model)))]
    gradient = np.stack([np.concatenate([here.gradient_output, here.gradient]) for here in rounds])
    noise = np.stack([np.concatenate([here.noise_output, here.noise]) for here in rounds])
    # A state of one number that nothing enters and nobody sees.
    return Model(
        np.zeros((1, 1, 1)),
        np.zeros((1, 1, n)),
        np.zeros((1, 1, q)),
        np.zeros((1, gradient.shape[1], 1)),
        gradient,
        noise,
    )


def seeing(model: Model, rows: Matrix, *, output: str) -> Model:
    """The same model with more rows seen, without noise, in each round.

    Args:
        model: A model.
        rows: [r, .] what is read off the state before the round, or off its gradients.
        output: "state_output" or "gradient_output".

    Returns:
        A model that observes strictly more.
    """

    def below(name: str) -> Numbers:
        part = getattr(model, name)
        block = rows if name == output else np.zeros((len(rows), part.shape[-1]))
        return np.concatenate([part, np.broadcast_to(block, (len(part), *block.shape))], axis=1)

    return model._replace(
        state_output=below("state_output"),
        gradient_output=below("gradient_output"),
        noise_output=below("noise_output"),
    )
