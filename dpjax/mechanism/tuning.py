"""The parameters of private gradient tracking that leave the least error: gamma, beta, q1 and q2.

The paper's bound is no guide (`dpjax.mechanism.heuristic.remark_520` ends at no step at all). What
is minimised here is the error itself: on quadratics the exact one of `dpjax.mechanism.quadratic`,
otherwise whatever a callable estimates, from simulated runs say. Trying parameters on private data
is not free: tune on public or simulated data of the same kind.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dpjax import _validate
from dpjax.mechanism import costs, laplace, quadratic
from dpjax.mechanism.schedules import Law, largest_curvature

__all__ = ["Objective", "Tuned", "on_quadratics", "tune", "tune_quadratics"]

Objective = Callable[[float, float, float, float], float]
"""(gamma, beta, q1, q2) -> error; infinite or nan where a run diverges."""


class Tuned(NamedTuple):
    """Parameters, and what they were chosen for.

    Attributes:
        gamma: First step.
        beta: Gain of the tracking variable.
        q1: Decay of the steps.
        q2: Decay of the noise.
        predicted: The objective there.
        measured: What ``measure`` says there; None where nothing was asked.
        start: The objective at the parameters that it began with.
        evaluations: Evaluations of the objective.
    """

    gamma: float
    beta: float
    q1: float
    q2: float
    predicted: float
    measured: float | None
    start: float
    evaluations: int


def tune(
    objective: Objective,
    start: tuple[float, float, float, float],
    *,
    evaluations: int = 200,
    measure: Objective | None = None,
) -> Tuned:
    """Return the parameters of least error that a Nelder-Mead search meets.

    It searches the logarithms of gamma, beta, 1 - q2 and (q2 - q1) / (1 - q2), so that every
    point is allowed. A local search: start it from several points where that matters.

    Args:
        objective: Error of (gamma, beta, q1, q2).
        start: Where to begin; the objective must be finite there.
        evaluations: Most evaluations.
        measure: Called once with what was found: an error of real runs, beside the predicted one.

    Returns:
        The best parameters met.

    Raises:
        ValueError: For a start out of range, or one where the objective is not finite.

    Example:
        >>> from dpjax.mechanism import tuning
        >>> import math
        >>> def objective(gamma, beta, q1, q2):
        ...     steps = (math.log(gamma) + 2) ** 2 + (math.log(beta) - 1) ** 2
        ...     return steps + (q1 - 0.5) ** 2 + (q2 - 0.8) ** 2
        >>> found = tuning.tune(objective, (0.1, 2.0, 0.6, 0.7), evaluations=800)
        >>> round(math.log(found.gamma), 2), round(found.q1, 2), round(found.q2, 2)
        (-2.0, 0.5, 0.8)
    """
    from scipy import optimize

    for name, given in (("objective", objective), ("measure", measure)):
        if not callable(given) and (name == "objective" or given is not None):
            raise ValueError(
                f"{name} is {_validate.shown(given)}; give a function of gamma, beta, q1 and q2"
            )
    gamma, beta, q1, q2 = _four("start", start)
    most = _validate.integer("evaluations", evaluations)
    first = float(objective(gamma, beta, q1, q2))
    if not np.isfinite(first):
        raise ValueError(f"start is {start}, where the objective is {first}; give smaller steps")
    seen = [(first, (gamma, beta, q1, q2))]

    def logarithm(x: np.ndarray) -> float:
        point = _parameters(x)
        if len(seen) >= most or not 0 < point[2] < point[3] < 1:
            return np.inf
        value = float(objective(*point))
        seen.append((value if np.isfinite(value) else np.inf, point))
        return float(np.log(value)) if 0 < value < np.inf else (-1e3 if value == 0 else 1e3)

    origin = np.array([np.log(gamma), np.log(beta), np.log(1 - q2), np.log((q2 - q1) / (1 - q2))])
    corners = np.concatenate([origin[None], origin + np.diag([0.4, 0.8, 0.5, 0.5])])
    optimize.minimize(
        logarithm,
        origin,
        method="Nelder-Mead",
        options={"initial_simplex": corners, "maxfev": most, "xatol": 1e-4, "fatol": 1e-6},
    )
    predicted, best = min(seen)
    measured = None if measure is None else float(measure(*best))
    return Tuned(*best, predicted, measured, first, len(seen))


def on_quadratics(
    mixing: Any,
    hessians: Any,
    linear: Any,
    budget: float,
    gradient_gap: float,
    rounds: int,
    *,
    noise: Law = "laplace",
    horizon: laplace.Horizon = "endless",
    start: Any = 0.0,
    start_variance: float = 1.0,
    probes: int | None = None,
    seed: int = 0,
) -> Objective:
    """Return the exact E|x(T) - x*|^2 at a budget as a function of (gamma, beta, q1, q2).

    Args:
        mixing: [n, n] symmetric W.
        hessians: [n, p, p] H_i.
        linear: [n, p] b_i.
        budget: Epsilon for Laplace noise, mu for Gaussian.
        gradient_gap: In L1 norm, or in L2 for Gaussian noise.
        rounds: Rounds T.
        noise: Which noise.
        horizon: As in `dpjax.mechanism.laplace.geometric`.
        start: [n, p] mean of x(0).
        start_variance: Variance of an entry of x(0).
        probes: Rows of `dpjax.mechanism.quadratic.sketch` in place of the exact error.
        seed: Of the sketch.

    Returns:
        The objective; infinite where it diverges.

    Raises:
        ValueError: For shapes that do not fit, or numbers out of range.

    Example:
        >>> import numpy as np
        >>> from dpjax.data import fusion
        >>> from dpjax.mechanism import tuning
        >>> data, mixing = fusion.make(4, seed=0), np.full((4, 4), 0.25)
        >>> error = tuning.on_quadratics(mixing, data.hessians, data.linear, 1.0, 1.0, rounds=100)
        >>> error(0.001, 500.0, 0.97, 0.99) < error(0.0001, 500.0, 0.97, 0.99)
        True
    """
    one = costs.checked(mixing, hessians, linear, [1.0], 1.0)
    make = laplace.geometric if _laplace(noise) else laplace.geometric_gaussian
    n, p = one.linear.shape
    rows = None if probes is None else quadratic.sketch(n, p, probes, seed)

    def objective(gamma: float, beta: float, q1: float, q2: float) -> float:
        schedule = make(budget, gradient_gap, gamma, q1, q2, rounds, horizon=horizon)
        return quadratic.error(
            one.mixing,
            one.hessians,
            one.linear,
            schedule.step_sizes,
            beta,
            quadratic.variances(schedule),
            start=start,
            start_variance=start_variance,
            rows=rows,
        ).total

    return objective


def tune_quadratics(
    mixing: Any,
    hessians: Any,
    linear: Any,
    budget: float,
    gradient_gap: float,
    rounds: int,
    *,
    parameters: tuple[float, float, float, float] | None = None,
    noise: Law = "laplace",
    horizon: laplace.Horizon = "endless",
    start: Any = 0.0,
    start_variance: float = 1.0,
    probes: int | None = 16,
    evaluations: int = 200,
    trials: int = 0,
    seed: int = 0,
) -> Tuned:
    """Return the parameters of least exact error on quadratics, and an error of simulated runs.

    The search looks at a sketch of the error; what is returned as predicted is exact.

    Args:
        mixing: As in `on_quadratics`, as what follows.
        hessians: [n, p, p].
        linear: [n, p].
        budget: Epsilon or mu.
        gradient_gap: In L1 or L2 norm.
        rounds: Rounds T.
        parameters: (gamma, beta, q1, q2) to begin with; from the largest curvature if None.
        noise: Which noise.
        horizon: Of the budget.
        start: Mean of x(0).
        start_variance: Variance of its entries.
        probes: Rows of the sketch; None for exact errors throughout.
        evaluations: Most evaluations.
        trials: Simulated runs for the measured error; 0 for none.
        seed: Of the sketch and the simulated runs.

    Returns:
        The best parameters met, with exact predicted errors.

    Raises:
        ValueError: As in `tune` and `on_quadratics`.

    Example:
        >>> import numpy as np
        >>> from dpjax.data import fusion
        >>> from dpjax.mechanism import tuning
        >>> data, mixing = fusion.make(4, seed=0), np.full((4, 4), 0.25)
        >>> problem = mixing, data.hessians, data.linear
        >>> found = tuning.tune_quadratics(*problem, 1.0, 1.0, rounds=60, evaluations=30)
        >>> found.predicted <= found.start
        True
    """
    problem = mixing, hessians, linear
    common: dict[str, Any] = {"start": start, "start_variance": start_variance}
    settings = {"noise": noise, "horizon": horizon, **common}
    exact = on_quadratics(*problem, budget, gradient_gap, rounds, **settings)
    sketched = exact
    if probes is not None:
        sketched = on_quadratics(
            *problem, budget, gradient_gap, rounds, probes=probes, seed=seed, **settings
        )
    if parameters is None:
        first = 1 / largest_curvature(np.asarray(hessians, np.float64))
        parameters = first, 0.5 / first, float(np.exp(-10 / rounds)), float(np.exp(-5 / rounds))
    parameters = _four("parameters", parameters)
    make = laplace.geometric if _laplace(noise) else laplace.geometric_gaussian

    def measure(gamma: float, beta: float, q1: float, q2: float) -> float:
        schedule = make(budget, gradient_gap, gamma, q1, q2, rounds, horizon=horizon)
        paths = quadratic.simulate(*problem, schedule, beta, trials=trials, seed=seed, **common)
        return float(paths[:, -1].mean())

    found = tune(sketched, parameters, evaluations=evaluations, measure=measure if trials else None)
    before, after = exact(*parameters), exact(*found[:4])
    if after > before:  # The sketch was wrong by more than was gained.
        gamma, beta, q1, q2 = parameters
        found, after = found._replace(gamma=gamma, beta=beta, q1=q1, q2=q2), before
    return found._replace(start=before, predicted=after)


def _parameters(x: np.ndarray) -> tuple[float, float, float, float]:
    """Return (gamma, beta, q1, q2) of their logarithms: q2 = 1 - s, q1 = q2 - s r."""
    gamma, beta, short, ratio = (float(value) for value in np.exp(np.clip(x, -700, 700)))
    return gamma, beta, 1 - short - short * ratio, 1 - short


def _four(name: str, given: Any) -> tuple[float, float, float, float]:
    """Return (gamma, beta, q1, q2) as floats in their ranges, else raise ValueError."""
    if len(_validate.numbers(name, given) or ()) != 4:
        raise ValueError(f"{name} is {_validate.shown(given)}; give (gamma, beta, q1, q2)")
    gamma, beta = (
        _validate.positive(name, value, remedy="give gamma and beta above 0") for value in given[:2]
    )
    return gamma, beta, *laplace.decays(*given[2:])


def _laplace(noise: str) -> bool:
    return _validate.one_of("noise", noise, ("laplace", "gaussian")) == "laplace"
