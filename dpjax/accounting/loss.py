"""What records and texts ask of a loss, and how a sampler's secret batches lower one."""

import abc
from collections.abc import Callable
from types import ModuleType
from typing import Any, Self

import numpy as np

from dpjax import _validate
from dpjax.accounting.arrays import Floats, Matrix, Pattern, Vector
from dpjax.accounting.rounding import MARGIN
from dpjax.protocols import SampledNoise, SampledTarget

__all__ = ["AmplifiedLoss", "Loss", "draw_ratios", "draw_sensitivity"]

KINDS: "dict[str, type[Loss]]" = {}
"""Losses by the name under which records store them; a class enters itself."""


class Loss(abc.ABC):
    """What a run costs, before it is stated at a delta: what losses of all kinds share.

    A class with a ``kind`` can be stored and read, from its import on. A loss of your own is a
    frozen dataclass of numbers and tuples of them, and defines `kind`, ``rounds``, `epsilon` and
    `first_rounds`. An `AmplifiedLoss` also defines what that class asks for. Python refuses to
    make a loss that lacks one of them, and names it. `plus` is refused by default.

    Attributes:
        rounds: Rounds T.
        failure: What it takes of every delta, see `dpjax.accounting.losses.Concentrated`.
        accounting: How epsilon follows, as a statement says it; "" where the accountant says it.
        caveat: What a statement adds to that.

    Raises:
        ValueError: When a class is defined whose ``kind`` is another class's.

    Example:
        >>> from dpjax.accounting.loss import KINDS
        >>> from dpjax.accounting.losses import Pure
        >>> KINDS["pure"] is Pure
        True
    """

    rounds: int
    failure: float = 0.0
    accounting = ""
    caveat = ""

    def __init_subclass__(cls) -> None:
        """Enter what records may store."""
        super().__init_subclass__()
        # Bases without a name of their own are no loss that a record holds.
        kind = vars(cls).get("kind")
        if not isinstance(kind, str):
            return
        holder = KINDS.setdefault(kind, cls)
        # A notebook's cell that runs again defines the same class anew.
        if repr(holder) != repr(cls):
            raise ValueError(
                f"kind is {kind!r} for {cls.__name__}, the kind of {holder.__name__}, as which "
                "records would be read; give another kind"
            )
        KINDS[kind] = cls

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """The name under which records store it, an attribute of the class."""

    @property
    def pattern(self) -> Pattern | None:
        """(epochs, separation) of what is protected; None where it may be in any round."""
        return None

    def pattern_text(self, unit: str) -> str:
        """The pattern in a statement, after the rounds.

        Args:
            unit: What is protected.
        """
        if self.pattern is None:
            return ""
        epochs, separation = self.pattern
        distance = f", {separation:,} apart" if epochs > 1 else ""
        return f", of which every {unit} takes part in at most {epochs:,}{distance},"

    def size_text(self) -> str:
        """What a statement adds to the accounting: the size, or rates of batches; "" by default."""
        return ""

    @abc.abstractmethod
    def epsilon(self, delta: float) -> float:
        """Epsilon at a delta, rounded up.

        Args:
            delta: From 0 to below 1.
        """

    def after(self, rounds: int) -> Self:
        """What the first rounds cost, their number fixed beforehand.

        Args:
            rounds: Rounds t, 0 to T.

        Raises:
            ValueError: For more rounds than are covered.
        """
        # A longer run has rounds of which nothing is known here.
        if _validate.integer("rounds", rounds, minimum=0) > self.rounds:
            raise ValueError(
                f"rounds is {rounds}, the loss covers {self.rounds}; account for the longer run"
            )
        return self.first_rounds(rounds)

    def then(self, later: "Loss") -> "Loss":
        """What this and a later run of the same agents cost together, both planned.

        Args:
            later: The later run's.

        Raises:
            ValueError: For two kinds that do not compose, or a total of other rounds than both.
        """
        first = self.in_form_of(later)
        second = later.in_form_of(self)
        if first.kind != second.kind:
            raise ValueError(
                f"loss is {type(self).__name__}, then {type(later).__name__}, which do not "
                "compose; state the two runs apart, or a pure one by its concentrated()"
            )
        total = first.plus(second)
        if total.rounds != self.rounds + later.rounds:
            raise ValueError(
                f"loss is {type(self).__name__}, whose plus gives {total.rounds} rounds for "
                f"{self.rounds} and {later.rounds}; return what all of them cost"
            )
        return total

    def dp_event(self, events: ModuleType, delta: float) -> Any:
        """The same loss as an event of dp_accounting, of the agent that loses most.

        Args:
            events: The module ``dp_accounting.dp_event``.
            delta: At which agents are compared.

        Raises:
            ValueError: By default: there is none of this kind.
        """
        del events, delta
        raise ValueError(
            f"loss is {type(self).__name__}, for which dp_accounting has no event; check its "
            "epsilon by another computation"
        )

    def in_form_of(self, other: "Loss") -> "Loss":
        """The same loss in a form that composes with another's; by default itself.

        Args:
            other: Another run's.
        """
        del other
        return self

    def concentrated(self) -> "Loss":
        """The same loss as zCDP: itself."""
        return self

    @abc.abstractmethod
    def first_rounds(self, rounds: int) -> Self:
        """The loss of the first rounds, or a larger one.

        Args:
            rounds: Their number, 0 to T, which is fixed beforehand.
        """

    def plus(self, later: Any) -> "Loss":
        """The loss of this and a later run, both planned.

        Args:
            later: The later run's, of the same kind.

        Raises:
            ValueError: By default: nothing is known of two runs.
        """
        name = type(self).__name__
        raise ValueError(f"loss is {name}, then {name}; state the two runs apart")


class AmplifiedLoss(Loss):
    """A loss of Gaussian noise that counts on secret batches.

    One of your own defines `draw_ratios`, `unamplified` and `scaled` beside what `Loss` asks for;
    ``examples/own_sampler.py`` has one. That its epsilon holds is your word, and guarantees name
    the class. Plans refuse one that contradicts itself or its noise, see `Amplification.loss`.

    Attributes:
        relation: The neighbouring relation that it is of.
        attacker: Whom it is against.
        no_total: Why no total of phases adds such losses up, and what to do.

    Example:
        >>> from dpjax.accounting.losses import Pld
        >>> Pld.of(rates=[0.1], ratios=[1.0], rounds=10).attacker
        'outsider'
    """

    relation = "zero_out_record"
    attacker = "outsider"
    accounting = "with batches that stay secret, accounted by their sampler"
    no_total = (
        "adding up such losses to a total is not known to hold for phases chosen on the way. Take "
        "samplers.Random or Cyclic"
    )

    @property
    @abc.abstractmethod
    def draw_ratios(self) -> Floats:
        """[n] how far one draw of a record moves the messages, in units of the noise."""

    @property
    @abc.abstractmethod
    def unamplified(self) -> float:
        """Gaussian-DP mu of the same noise if the batches were known, rounded up."""

    @abc.abstractmethod
    def scaled(self, factor: float) -> Self:
        """The loss with ratios larger by a factor: noise smaller by it.

        Args:
            factor: At least 0.
        """


def draw_sensitivity(target: SampledTarget, strategy: Matrix | None) -> float:
    """Return how far one draw of a record moves all rounds' messages, at noise 1.

    Args:
        target: What the noise is for.
        strategy: [T, T] C over rounds; None is fresh noise.

    Example:
        >>> import dpjax as dp
        >>> parts = dict(sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.1), rounds=9)
        >>> config = dp.Config(protect=dp.Protect("zero_out_record", clip_norm=2.0), **parts)
        >>> plan = dp.make_plan(config, dp.mixing.metropolis_hastings(dp.graphs.ring(3)))
        >>> draw_sensitivity(plan.target, None)
        2.0
    """
    return target.protect.sensitivity * target.single_draw_sensitivity(strategy)


def draw_ratios(target: SampledTarget, noise: SampledNoise) -> Vector:
    """Return the same of every agent in units of its noise, s sqrt([R^-1]_ii), rounded up.

    Args:
        target: What the noise is for.
        noise: The noise as it will run.

    Example:
        >>> import dpjax as dp
        >>> parts = dict(sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.1), rounds=9)
        >>> parts |= dict(noise=dp.noise.Independent(), budget=dp.Budget(8.0, delta=1e-5))
        >>> config = dp.Config(protect=dp.Protect("zero_out_record", clip_norm=2.0), **parts)
        >>> plan = dp.make_plan(config, dp.mixing.metropolis_hastings(dp.graphs.ring(3)))
        >>> (plan.factor.diagonal() * draw_ratios(plan.target, plan.noise)).round(4).tolist()
        [2.0, 2.0, 2.0]
    """
    moved = draw_sensitivity(target, noise.strategy)
    # mu_i = s sqrt([R^-1]_ii), rounded up.
    return moved * np.sqrt(noise.inverse_diagonal()) * MARGIN


def lowest(value: Callable[[float], float], grid: Vector) -> tuple[float, float, float]:
    """Where a function is least near its best number of a grid, and its values there and here.

    Args:
        value: The function.
        grid: Numbers, ascending.
    """
    from scipy import optimize

    values = [value(number) for number in grid]
    best = int(np.argmin(values))
    around = grid[max(best - 1, 0) : best + 2][[0, -1]]
    minimum = optimize.minimize_scalar(value, bounds=around, method="bounded")
    return float(minimum.x), float(minimum.fun), values[best]


def checked_delta(delta: float) -> float:
    """Return a delta from 0 to below 1, or raise ValueError.

    Args:
        delta: Delta.
    """
    if not 0 <= delta < 1:
        raise ValueError(f"delta is {delta}; give a number in [0, 1)")
    return float(delta)
