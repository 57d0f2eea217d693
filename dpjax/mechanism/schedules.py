"""Schedules of steps and noise that are best for quadratics, at a given budget.

The error of gradient tracking is a bias plus sum_k w_k var_k (`dpjax.mechanism.quadratic`), and
message k costs gap alpha_{k-1} / nu_k. For given steps the best noise has a closed form, by
Lagrange:

    Laplace, epsilon    nu_k ~ (alpha_{k-1} / w_k)^(1/3)     noise = 2 (gap / epsilon)^2 S^3,
                                                             S = sum_k alpha_{k-1}^(2/3) w_k^(1/3)
    Gaussian, mu        sigma_k^2 ~ alpha_{k-1} / w_k^(1/2)  noise = (gap / mu)^2 S^2,
                                                             S = sum_k alpha_{k-1} w_k^(1/2)

A message after a round without a step costs nothing and needs no noise: averaging is free. What is
left depends on the steps and beta alone, and `optimal` descends in their logarithms, bias and noise
together, from two shapes: smooth steps, and pulses, a few long steps with noiseless averaging
between, which contract the average of the costs like a polynomial of its Hessian.

The problem's Hessians and linear terms enter: a schedule made from private data is itself not
private, so that it is to be made from public or simulated data of the same kind.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax.mechanism import costs, descent, quadratic
from dpjax.mechanism.laplace import Schedule

__all__ = ["Law", "Optimum", "best_scales", "optimal"]

Law = Literal["laplace", "gaussian"]

_NOISES = ("laplace", "gaussian")
_SHAPES = ("any", "smooth", "pulses")
# Sums of a thousand terms are off by less than this: the budget is kept.
_UP = 1 + 1e-12
# Between these a product of two is a normal number, and sums lose nothing that counts.
_LEAST, _MOST = 1e-300, 1e300
# Losses are summed as numbers of float64, mus as squares of them.
_LEAST_BUDGET = 1e-140


class Optimum(NamedTuple):
    """The best schedule of a descent.

    Attributes:
        schedule: Steps and scales; a scale is 0 where the message costs nothing, as the first.
        beta: Gain of the tracking variable.
        error: Its exact error: bias and noise apart, and the weights of every message's noise.
        shape: "smooth", or "2 pulses" and the like.
        met: Exact error of the best of every shape, by its name.
        evaluations: Evaluations of the error and its gradient.
    """

    schedule: Schedule
    beta: float
    error: quadratic.Error
    shape: str
    met: dict[str, quadratic.Error]
    evaluations: int


def best_scales(
    step_sizes: Any, weights: Any, budget: float, gradient_gap: float, noise: Law = "laplace"
) -> Float[np.ndarray, " T"]:
    """Return the scales of least sum_k w_k var_k that spend a budget on given steps.

    Guarantee: `dpjax.accounting.pure.epsilon` (or ``mu``) of these steps and scales is at most the
        budget, by closed form and rounded up; relation, attacker and sensitivity are stated there.
        A message whose step before is 0 has no noise.

    Args:
        step_sizes: [T] alpha_k, above 0 (0 is no step).
        weights: [T] w_k of `dpjax.mechanism.quadratic.weights`.
        budget: Epsilon for Laplace noise, mu for Gaussian; 1e-140 at least.
        gradient_gap: In L1 norm, or in L2 for Gaussian noise.
        noise: Which noise.

    Returns:
        [T] Laplace scales, or standard deviations.

    Raises:
        ValueError: For shapes that do not fit, numbers out of range, a message whose noise has no
            weight although it carries a step, or scales that float64 does not hold.

    Example:
        >>> from dpjax.mechanism import schedules
        >>> schedules.best_scales([1.0, 1.0, 1.0], [1.0, 1.0, 8.0], 1.0, 1.0).round(6).tolist()
        [0.0, 3.0, 1.5]
    """
    steps = _validate.finite_array("step_sizes", step_sizes, ndim=1)
    w = _validate.finite_array("weights", weights, ndim=1)
    budget = _budget(budget)
    gap = _validate.positive("gradient_gap", gradient_gap)
    gaussian = _validate.one_of("noise", noise, _NOISES) == "gaussian"
    if len(w) != len(steps) or min(w.min(), steps.min()) < 0:
        raise ValueError(
            f"weights has {len(w)} entries from {w.min():g} for {len(steps)} steps from "
            f"{steps.min():g}; give one number >= 0 a message"
        )
    carried, scales = steps[:-1], np.zeros(len(steps))
    shown = carried > 0
    if (w[1:][shown] <= 0).any():
        k = 2 + int(np.argmax(shown & (w[1:] <= 0)))
        raise ValueError(
            f"weights holds 0 at message {k}, which carries a step: its noise costs nothing and "
            "has no best scale; give fewer rounds or weights above 0"
        )
    a, w = carried[shown], w[1:][shown]
    found, held = _found(a, w, gap / budget, gaussian)
    if not held:
        raise ValueError(
            f"gradient_gap is {gap:g}, budget {budget:g}, step_sizes from {a.min():g} to "
            f"{a.max():g} and weights from {w.min():g} to {w.max():g}, whose best scales are "
            "beyond what float64 holds; give them in units in which all are nearer to 1"
        )
    scales[1:][shown] = found
    return scales


def _budget(value: Any) -> float:
    budget = _validate.positive("budget", value)
    if budget < _LEAST_BUDGET:
        raise ValueError(f"budget is {budget:g}; give at least {_LEAST_BUDGET:g}")
    return budget


def _found(a: np.ndarray, w: np.ndarray, ratio: float, gaussian: bool) -> tuple[np.ndarray, bool]:
    """Return the scales of messages that carry steps a, and whether float64 holds them."""
    if not len(a):
        return a, True
    with np.errstate(all="ignore"):
        # Roots of each: quotients and products of steps and weights themselves may overflow.
        roots = np.sqrt(a) / np.sqrt(np.sqrt(w)) if gaussian else np.cbrt(a) / np.cbrt(w)
        parts = a / roots
        most = parts.max()
        total = most * np.linalg.norm(parts / most) if gaussian else parts.sum()
        found = ratio * total * roots * _UP
    met = np.concatenate([[ratio, total, ratio * total], roots, found])
    return found, bool(((met >= _LEAST) & (met <= _MOST)).all())


def largest_curvature(hessians: np.ndarray) -> float:
    """Return the largest curvature of any agent, where their average is convex.

    Args:
        hessians: [n, p, p].

    Raises:
        ValueError: For an average that is not convex: its cost has no minimum.
    """
    least = float(np.linalg.eigvalsh(hessians.mean(axis=0)).min())
    if least <= 0:
        raise ValueError(
            f"hessians has an average of least curvature {least:g}; give costs whose average is "
            "convex, above 0"
        )
    return float(np.linalg.eigvalsh(hessians).max())


def optimal(
    mixing: Any,
    hessians: Any,
    linear: Any,
    budget: float,
    gradient_gap: float,
    rounds: int,
    *,
    noise: Law = "laplace",
    shape: Literal["any", "smooth", "pulses"] = "any",
    gamma: float | None = None,
    beta: float | None = None,
    q1: float | None = None,
    start: Any = 0.0,
    start_variance: float = 1.0,
    knots: int | None = None,
    pulses: Sequence[int] | None = None,
    probes: int | None = 16,
    seed: int = 0,
    iterations: int = 100,
) -> Optimum:
    """Return steps, gain and noise that make E|x(T) - x*|^2 small at a budget, for quadratics.

    Smooth: the logarithm of the steps is piecewise linear between knots. Pulses: so many steps,
    evenly spaced, from the inverse Chebyshev nodes of the average Hessian, the longest first, and
    none between. Both, and log beta, descend by L-BFGS with the best noise for each at hand in
    closed form. The error has local minima: what is returned is the best of those met, no worse
    than the geometric steps of (gamma, beta, q1).

    Pulses are longer than a single agent's cost allows (alpha H_i well above 2): it is the average
    that they contract, after the agents have averaged. They suit quadratics, whose Hessians stay.

    Guarantee: as `best_scales`, whatever the descent ended at. Not private with respect to the
        given Hessians and linear terms.

    Args:
        mixing: [n, n] symmetric W.
        hessians: [n, p, p] H_i.
        linear: [n, p] b_i.
        budget: Epsilon for Laplace noise, mu for Gaussian, of the T messages.
        gradient_gap: In L1 norm, or in L2 for Gaussian noise.
        rounds: Rounds T, 2 and above.
        noise: Which noise.
        shape: One shape only, or the best of both.
        gamma: First step of the smooth start; 1 over the largest curvature of any agent if None.
        beta: Gain to start from; 1 / (2 gamma) if None.
        q1: Decay of the smooth start; exp(-5 / T) if None.
        start: [n, p] mean of x(0).
        start_variance: Variance of an entry of x(0).
        knots: Knots of log alpha, 2 to T; 16 if None, or T where that is less.
        pulses: Numbers of pulses to try, each below T; 1 to 4 if None, as far as they are below T.
        probes: Rows of `dpjax.mechanism.quadratic.sketch` while descending; None for exact errors.
        seed: Of the sketch.
        iterations: Most L-BFGS iterations of each descent; 0 takes the starts as they are.

    Returns:
        The best schedule met, with exact errors.

    Raises:
        ValueError: For shapes that do not fit, numbers out of range, a W that is not symmetric, an
            average cost that is not convex, or a start that diverges.

    Example:
        >>> import numpy as np
        >>> from dpjax.data import fusion
        >>> from dpjax.mechanism import schedules
        >>> data, mixing = fusion.make(4, seed=0), np.full((4, 4), 0.25)
        >>> problem = mixing, data.hessians, data.linear
        >>> best = schedules.optimal(*problem, 1.0, 1.0, rounds=30, iterations=20, pulses=(2,))
        >>> best.shape, best.error.total < best.met["geometric steps"].total
        ('2 pulses', True)
    """
    rounds = _validate.integer("rounds", rounds, least=2)
    most = min(16, rounds) if knots is None else knots
    knots = _validate.integer("knots", most, least=2, most=rounds)
    tried: Any = range(1, min(5, rounds)) if pulses is None else pulses
    if not isinstance(tried, list | tuple | range):
        raise ValueError(f"pulses is {_validate.shown(pulses)}; give a sequence such as (1, 2)")
    counts = [_validate.integer("pulses", count, most=rounds - 1) for count in tried]
    iterations = _validate.integer("iterations", iterations, least=0)
    _validate.one_of("shape", shape, _SHAPES)
    problem = costs.checked(mixing, hessians, linear, np.ones(rounds), 1.0)
    if (apart := float(np.abs(problem.mixing - problem.mixing.T).max())) > 1e-9:
        raise ValueError(
            f"mixing is not symmetric, by {apart:g}; give weights that are the same both ways, as "
            "of topology.mixing.metropolis_hastings"
        )
    setting = _Setting(
        problem,
        start,
        costs.variance(start_variance),
        _budget(budget),
        _validate.positive("gradient_gap", gradient_gap),
        "gaussian" if _validate.one_of("noise", noise, _NOISES) == "gaussian" else "laplace",
    )
    largest = largest_curvature(problem.hessians)
    first = 1 / largest if gamma is None else _validate.positive("gamma", gamma)
    gain = 0.5 / first if beta is None else _validate.positive("beta", beta)
    decay = float(np.exp(-5 / rounds)) if q1 is None else _validate.probability("q1", q1)
    width = max([knots, *counts])
    starts = {}
    if shape != "pulses":
        starts["smooth"] = descent.smooth(rounds, knots, first, decay, gain, width)
    if shape != "smooth":
        mean = problem.hessians.mean(axis=0)
        for count in counts:
            name = f"{count} pulse{'s' if count > 1 else ''}"
            starts[name] = descent.pulses(rounds, count, mean, gain, width)
    n, p = problem.linear.shape
    rows = quadratic.sketch(n, p, probes, seed) if probes is not None else None
    plain = first * decay ** np.arange(rounds, dtype=np.float64)
    return _best(setting, starts, rows, plain, gain, iterations)


class _Setting(NamedTuple):
    """A problem and a budget: what gives steps their noise and their error."""

    problem: costs.Problem
    start: Any
    start_variance: float
    budget: float
    gap: float
    noise: Law

    def measured(self, steps: np.ndarray, beta: float) -> tuple[Schedule, quadratic.Error]:
        """Return steps with their best noise, and the exact error."""
        weights = quadratic.weights(self.problem.mixing, self.problem.hessians, steps, beta)
        carried, w = steps[:-1] > 0, weights[1:]
        scales = np.full(len(steps), np.inf)
        if np.isfinite(weights).all() and (w[carried] > 0).all():
            ratio, gaussian = self.gap / self.budget, self.noise == "gaussian"
            found, held = _found(steps[:-1][carried], w[carried], ratio, gaussian)
            if held:
                scales[0], scales[1:] = 0.0, 0.0
                scales[1:][carried] = found
        schedule = Schedule(steps, scales, self.noise, self.budget, self.budget, self.gap)
        with np.errstate(over="ignore", invalid="ignore"):
            run = self.problem._replace(step_sizes=steps, beta=beta)
            mean = costs.mean_error(run, self.start)[-1]
            bias = float((mean**2).sum() + self.start_variance * weights[0])
            lost = float(weights @ quadratic.variances(schedule))
        if not np.isfinite([bias, lost]).all():
            bias = lost = np.inf
        return schedule, quadratic.Error(bias, lost, weights)


def _best(
    setting: _Setting,
    starts: dict[str, descent.Start],
    rows: np.ndarray | None,
    plain: np.ndarray,
    gain: float,
    iterations: int,
) -> Optimum:
    """Descend from every start and return the best, the plain steps among them."""
    factor = (2.0 if setting.noise == "laplace" else 1.0) * (setting.gap / setting.budget) ** 2
    gaussian = setting.noise == "gaussian"
    errors = costs.first_errors(setting.problem, setting.start)
    found = {"geometric steps": (setting.measured(plain, gain), gain)}
    evaluations = 1
    for name, start in starts.items():
        steps, beta, count = descent.descend(
            start,
            setting.problem.mixing,
            setting.problem.hessians,
            errors,
            rows,
            setting.start_variance,
            factor,
            gaussian,
            iterations,
        )
        evaluations += count
        before = start.steps()
        options = [(setting.measured(*pair), pair[1]) for pair in (before, (steps, beta))]
        found[name] = min(options, key=lambda option: option[0][1].total)
    name = min(found, key=lambda name: found[name][0][1].total)
    (schedule, error), beta = found[name]
    if not np.isfinite(error.total):
        raise ValueError(
            f"gamma is {plain[0]:g} and beta {gain:g}, at which the recursion diverges, as it does "
            "from every other start; give smaller ones to start from"
        )
    met = {shape: option[0][1] for shape, option in found.items()}
    return Optimum(schedule, beta, error, name, met, evaluations)
