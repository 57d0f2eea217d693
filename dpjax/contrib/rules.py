"""Optimizers of the experiments: a filter, a base, and a step size over rounds.

Heavy-ball momentum repeats each gradient 1 / (1 - beta) times over, so that a step size tuned
without it is too long by that with it. Here a step size is the effective one: how far a gradient
moves the model over all rounds, as plain steps and `dpjax.transforms.lowpass` count it. A filter
behind momentum, or momentum behind a filter, is a filter of both, and another optimizer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from dpjax import _validate
from dpjax.contrib.optimizers import filter_of, scale_by_adam, scale_by_galore
from dpjax.contrib.wiener import adaptive, wiener
from dpjax.mechanism import filters
from dpjax.plans.optimizers import Chain
from dpjax.transforms.lowpass import LAGS, lowpass

__all__ = ["BASES", "UpdateRule", "momentum", "muon", "read_filter"]

BASES = ("sgd", "momentum", "nesterov", "adam", "galore", "muon")
"""Optimizers: plain steps, heavy-ball and Nesterov momentum, DP-AdamBC, DP-GaLore, optax's Muon."""

_LEARNED = ("adaptive", "wiener")
"""Filters that follow private gradients, by the variance of their noise."""

_Coefficients = tuple[tuple[float, ...], tuple[float, ...]]


def read_filter(text: str) -> Literal["adaptive", "wiener"] | _Coefficients | None:
    """Return the filter that a text names.

    Args:
        text: "none", a name of `dpjax.transforms.lowpass.FILTERS`, "adaptive", "wiener", or numbers
            "b_0,b_1,..;a_1,.." of a filter of one's own.

    Returns:
        None, the name of a filter that learns, or (b, a).

    Raises:
        ValueError: For another name, or coefficients that no link takes.

    Example:
        >>> from dpjax.contrib.rules import read_filter
        >>> read_filter("0.1;-0.9") == read_filter("momentum")
        True
    """
    if not isinstance(text, str):
        raise ValueError(f"filter is {_validate.shown(text)}; give a text, such as 'first v1'")
    if text == "none":
        return None
    if text in _LEARNED:
        return text  # type: ignore[return-value]
    if text in filters.PUBLISHED:
        return tuple(filters.PUBLISHED[text])  # type: ignore[return-value]
    numbers = text.split(";")
    try:
        b, a = ([float(word) for word in part.split(",") if word.strip()] for part in numbers)
    except ValueError:
        names = ", ".join(["none", *_LEARNED, *filters.PUBLISHED])
        raise ValueError(
            f"filter is {text!r}; give one of {names}, or coefficients as in '0.1;-0.9'"
        ) from None
    coefficients = filters.check_filter(b, a)
    return coefficients.b, coefficients.a


@dataclass(frozen=True)
class UpdateRule:
    """How noisy means become steps: a filter, then an optimizer, then a step size over rounds.

    Steps of momentum and Nesterov's are effective ones (`momentum`), so that one
    step size means the same with and without. A filter takes the place of Adam's and GaLore's first
    moment; in front of momentum, Nesterov's and Muon it filters what they filter again.

    Guarantee: none of its own and none lost: post-processing of privatised means.

    Attributes:
        base: One of `BASES`.
        filter: (b, a) of a low-pass filter, "adaptive" for `dpjax.contrib.wiener.adaptive`,
            "wiener" for `dpjax.contrib.wiener.wiener` of unit gain, or None.
        schedule: "constant", or "cosine": up from 0 in the first 5 % of the rounds, then down to 0
            by half a cosine.
        rounds: Rounds of the run, for the schedule.
        beta: Of momentum and Nesterov's.
        taps: Of the adaptive filter.
        rank: Of GaLore's projection; None is a quarter of each matrix's shorter side, so that
            small networks are projected, too.
        every: Rounds between changes of GaLore's space.
        floor: Least second moment of Adam and GaLore. Where noise rules, a second moment less the
            noise's variance is around 0, and the floor is what steps are divided by: tune it.

    Raises:
        ValueError: For another base or schedule, a schedule without rounds, other numbers than
            beta in (0, 1), 2 to `LAGS` taps, a rank and an interval of at least 1, a floor above 0,
            or a filter that the base cannot have; in a config, for a cosine over other rounds
            than the run's.

    Example:
        >>> from dpjax.contrib.rules import UpdateRule, read_filter
        >>> rule = UpdateRule("adam", read_filter("f1"))
        >>> rule.chain(0.001).first
        0.001
    """

    base: Literal["sgd", "momentum", "nesterov", "adam", "galore", "muon"] = "sgd"
    filter: Literal["adaptive", "wiener"] | _Coefficients | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    rounds: int | None = None
    beta: float = 0.9
    taps: int = 4
    rank: int | None = None
    every: int = 50
    floor: float = 1e-8

    def __post_init__(self) -> None:
        """Refuse what makes no optimizer."""
        _validate.one_of("base", self.base, BASES)
        _validate.one_of("schedule", self.schedule, ("constant", "cosine"))
        if self.schedule == "cosine" and self.rounds is None:
            raise ValueError("rounds is None with a cosine schedule, which ends; give the rounds")
        for name in ("rounds", "rank"):
            value = getattr(self, name)
            if value is not None:
                _validate.assign(self, **{name: _validate.integer(name, value)})
        every = _validate.integer("every", self.every)
        taps = _validate.integer("taps", self.taps, minimum=2, maximum=LAGS)
        floor = _validate.positive("floor", self.floor)
        _validate.assign(self, every=every, taps=taps, floor=floor)
        if not 0 < _validate.number("beta", self.beta) < 1:
            raise ValueError(f"beta is {self.beta!r}; give a number between 0 and 1")
        learned = isinstance(self.filter, str) and self.filter in _LEARNED
        if self.filter is not None and not learned:
            coefficients = filter_of(self.filter)
            _validate.assign(self, filter=(coefficients.b, coefficients.a))
        if learned and self.base in ("adam", "galore"):
            raise ValueError(
                f"filter is {self.filter!r} with {self.base}, whose first moment it cannot be; "
                "give coefficients, or another base"
            )

    def check_rounds(self, rounds: int) -> None:
        """Refuse a run of other length than the schedule's.

        Args:
            rounds: Rounds of the run.

        Raises:
            ValueError: For a cosine over other rounds.
        """
        if self.schedule == "cosine" and self.rounds != rounds:
            raise ValueError(
                f"rounds is {self.rounds} of a cosine schedule in a run of {rounds} rounds; give "
                f"rounds={rounds}"
            )

    def chain(self, step_size: float) -> Chain:
        """Return the optimizer of a config.

        Args:
            step_size: Step size, the largest of a schedule.
        """
        uses_noise = self.base in ("adam", "galore") or isinstance(self.filter, str)
        return Chain(self, step_size, uses_noise=uses_noise)

    def __call__(self, step_size: Any, noise: Any = 0.0) -> optax.GradientTransformation:
        """Return the optax chain of one model.

        Args:
            step_size: Step size, traced or not.
            noise: Variance of the noise in a coordinate, as `Chain` tells it.
        """
        steps = self._steps(step_size)
        options = dict[str, Any](floor=self.floor)
        options["filter"] = self.filter
        links = self._filters(noise)
        last = optax.scale_by_learning_rate(steps)
        if self.base == "adam":
            links = [scale_by_adam(noise, **options)]
        elif self.base == "galore":
            links = [scale_by_galore(noise, rank=self.rank, every=self.every, **options)]
        elif self.base == "muon":
            last = muon(steps)
        elif self.base != "sgd":
            last = momentum(steps, self.beta, nesterov=self.base == "nesterov")
        return optax.chain(*links, last)

    def _filters(self, noise: Any) -> list[optax.GradientTransformation]:
        """The filter in front of an optimizer, where it is no first moment."""
        if self.filter == "adaptive":
            return [adaptive(self.taps, noise)]
        if self.filter == "wiener":
            return [wiener(noise, unit=True)]
        return [] if self.filter is None else [lowpass(*self.filter)]

    def _steps(self, step_size: Any) -> Callable[[Any], Any]:
        if self.schedule == "constant":
            return lambda count: step_size
        assert self.rounds is not None
        # No round is without a step: the first has 1 / warm of it, the last more than none.
        warm = max(1, math.ceil(0.05 * self.rounds))
        rest = max(1, self.rounds - warm)

        def step_at(count: Any) -> Any:
            rising = (count + 1) / warm
            share = jnp.clip((count - warm) / rest, 0, 1)
            falling = 0.5 * (1 + jnp.cos(jnp.pi * share))
            return step_size * jnp.where(count < warm, rising, falling)

        return step_at


def momentum(
    step_size: Any, beta: float = 0.9, *, nesterov: bool = False
) -> optax.GradientTransformation:
    """Heavy-ball steps of an effective size: ``optax.sgd((1 - beta) step_size, beta)``.

    m_t = beta m_{t-1} + g_t, and x moves by -(1 - beta) eta m_t; Nesterov's by
    -(1 - beta) eta (beta m_t + g_t). Both move the model by eta in all for a gradient of 1, so that
    they compare with plain steps of eta. The first steps are short, (1 - beta^t) of a constant
    gradient's: ``lowpass(*FILTERS["momentum"])`` with plain steps is the same corrected for that.

    Args:
        step_size: Effective step eta: a number, traced or not, or an optax schedule.
        beta: How much of the last step is kept, in [0, 1).
        nesterov: Whether to look ahead.

    Returns:
        The optax transformation.

    Raises:
        ValueError: For a step that is no number, or a beta outside [0, 1).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.contrib.rules import momentum
        >>> link = momentum(0.5, beta=0.9)
        >>> update, _ = link.update(jnp.ones(1), link.init(jnp.zeros(1)))
        >>> round(float(update[0]), 3)
        -0.05
    """
    beta = _checked(step_size, beta)
    _validate.flag("nesterov", nesterov)
    short: Any = (1 - beta) * step_size if not callable(step_size) else _shorter(step_size, beta)
    return optax.sgd(short, momentum=beta, nesterov=nesterov)


def _checked(step_size: Any, beta: float) -> float:
    """Beta as a plain number; refused are steps that are no number, traced or not, or schedule."""
    if not callable(step_size) and not isinstance(step_size, jax.Array):
        _validate.number("step_size", step_size)
    beta = _validate.number("beta", beta)
    if not 0 <= beta < 1:
        raise ValueError(f"beta is {beta}; give a number from 0 to below 1")
    return beta


def _shorter(schedule: optax.Schedule, beta: float) -> optax.Schedule:
    return lambda count: (1 - beta) * schedule(count)


def muon(step_size: Any, beta: float = 0.95, **options: Any) -> optax.GradientTransformation:
    """Muon (``optax.contrib.muon``) with every kernel as a matrix, [all inputs, outputs].

    optax's own takes leaves of two axes for matrices alone; here convolution kernels are matrices
    of their patches too, and the rest (biases, scales) has Adam at the same step size. Its momentum
    is optax's, corrected for the zero start. The update of a matrix has singular values near 1,
    whatever the gradient's norm, so that a step size compares with no other optimizer's.

    Args:
        step_size: A number, traced or not, or an optax schedule.
        beta: How much of the momentum is kept, in [0, 1).
        options: Of ``optax.contrib.muon``.

    Returns:
        The optax transformation.

    Raises:
        ValueError: For a step that is no number, or a beta outside [0, 1).

    Reference:
        Jordan et al. 2024, Muon; Kim and Fan 2026, DP-Muon (arXiv 2605.12994), for the same behind
        clip and noise.

    Example:
        >>> from dpjax.contrib.rules import muon
        >>> from dpjax.plans.optimizers import Chain
        >>> Chain(muon, step_size=0.02).first
        0.02
    """
    beta = _checked(step_size, beta)
    arguments = {"muon_weight_dimension_numbers": _matrices} | options
    return optax.contrib.muon(step_size, beta=beta, **arguments)


def _matrices(params: Any) -> Any:
    """Which axes of a leaf are a matrix's, in flax's layout; None for biases and scales."""

    def of_leaf(leaf: Any) -> Any:
        last = leaf.ndim - 1
        if last < 1:
            return None
        return optax.contrib.MuonDimensionNumbers(tuple(range(last)), (last,))

    return jax.tree.map(of_leaf, params)
