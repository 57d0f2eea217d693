"""Steps and noise that make private gradient tracking exact on quadratics: errors, and the best.

With gradients H_i x - b_i, errors e = x - x* and u = y - y* (y*_i = b_i - H_i x*, what the tracking
variable settles at) and z = e + noise, a round of Algorithm 1 is

    u+ = u + beta (I - W) z,      e+ = W z - alpha (u+ + H z)

so that E|x(K) - x*|^2, summed over agents, is a bias, what the start leaves, plus sum_k w_k var_k,
var_k the variance of an entry of the noise of message k. `weights` finds all w_k in one pass
backwards in time.

For given steps the best noise has a closed form, by Lagrange:

    Laplace, epsilon    nu_k ~ (alpha_{k-1} / w_k)^(1/3)     noise = 2 (gap / epsilon)^2 S^3,
                                                             S = sum_k alpha_{k-1}^(2/3) w_k^(1/3)
    Gaussian, mu        sigma_k^2 ~ alpha_{k-1} / w_k^(1/2)  noise = (gap / mu)^2 S^2,
                                                             S = sum_k alpha_{k-1} w_k^(1/2)

A message after a round without a step costs nothing and needs no noise: averaging is free. What is
left depends on the steps and beta alone, and `optimal` descends in their logarithms, bias and noise
together, from two shapes: smooth steps, and pulses, a few long steps with noiseless averaging
between, which contract the average of the costs like a polynomial of its Hessian.

The problem's Hessians and linear terms enter: a schedule made from private data is itself not
private, so that it is to be made from public or simulated data of the same kind. Float64, numpy in
and out.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jaxtyping import Float

from dpjax import _validate
from dpjax._numerics import double_precision
from dpjax.mechanism import laplace
from dpjax.mechanism.laplace import Schedule

__all__ = [
    "Error",
    "Law",
    "Optimum",
    "best_scales",
    "error",
    "first_deviation",
    "geometric_gaussian",
    "optimal",
    "variances",
    "weights",
]

Law = Literal["laplace", "gaussian"]

# Sums of a thousand terms are off by less than this: the budget is kept.
_UP = 1 + 1e-12
# Products and quotients of a geometric schedule are off by less.
_UP_OF_PRODUCTS = 1 + 1e-14
# Between these a product of two is a normal number, and sums lose nothing that counts.
_LEAST = 1e-300
_MOST = 1e300
# Losses are summed as numbers of float64, mus as squares of them.
_LEAST_BUDGET = 1e-140
# Logarithms of steps and gain may move so far from where they began.
_REACH = 12.0


class Error(NamedTuple):
    """A predicted E|x(T) - x*|^2, the sum over agents and entries.

    Attributes:
        bias: What is left of the start without noise.
        noise: What the noise adds.
        weights: [T] of the variance of an entry of message k's noise.
    """

    bias: float
    noise: float
    weights: Float[np.ndarray, " T"]

    @property
    def total(self) -> float:
        """Both."""
        return self.bias + self.noise


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
    error: Error
    shape: str
    met: dict[str, Error]
    evaluations: int


class TrackedQuadratics(NamedTuple):
    """Checked arrays of a quadratic problem and a run on it."""

    mixing: np.ndarray
    hessians: np.ndarray
    linear: np.ndarray
    minimiser: np.ndarray
    step_sizes: np.ndarray
    beta: float

    def first_errors(self, start: Any) -> tuple[np.ndarray, np.ndarray]:
        """The means of e and u before the first message, [n, p] each."""
        x = np.broadcast_to(np.asarray(start, np.float64), self.linear.shape)
        return x - self.minimiser, self.hessians @ self.minimiser - self.linear

    def bias(self, start: Any, start_variance: float, first_weight: float) -> float:
        """E|x(T) - x*|^2 without noise, of a start of this mean and variance."""
        e, u = self.first_errors(start)
        with np.errstate(over="ignore", invalid="ignore"):
            for alpha in self.step_sizes:
                mixed = self.mixing @ e
                u = u + self.beta * (e - mixed)
                e = mixed - alpha * (u + (e[:, None] @ self.hessians)[:, 0])
            return float((e**2).sum() + start_variance * first_weight)

    def weights(self, rows: np.ndarray | None = None) -> np.ndarray:
        """As `weights`."""
        n, p = self.hessians.shape[:2]
        if rows is None:
            rows = np.eye(n * p).reshape(n * p, n, p)
        # [n, r, p]: mixing is then one matrix product.
        e = np.ascontiguousarray(np.moveaxis(rows, 0, 1))
        u = np.zeros_like(e)
        squares = np.zeros(len(self.step_sizes))
        with np.errstate(over="ignore", invalid="ignore"):
            for k in range(len(squares) - 1, -1, -1):
                alpha = self.step_sizes[k]
                gained = self.beta * (u - alpha * e)
                mixed = (self.mixing.T @ (e - gained).reshape(n, -1)).reshape(e.shape)
                u = u - alpha * e
                e = mixed + gained - alpha * (e @ self.hessians)
                squares[k] = np.vdot(e, e)
        return squares


def problem_of(
    mixing: Any, hessians: Any, linear: Any, step_sizes: Any, beta: float
) -> TrackedQuadratics:
    """Return a run on a problem as float64 arrays; no linear terms are zeros."""
    w = np.asarray(mixing, np.float64)
    h = np.asarray(hessians, np.float64)
    if linear is None:
        b = np.zeros(h.shape[:2])
    else:
        b = np.asarray(linear, np.float64)
    minimiser = np.linalg.solve(h.sum(axis=0), b.sum(axis=0))
    return TrackedQuadratics(w, h, b, minimiser, np.asarray(step_sizes, np.float64), float(beta))


def variances(schedule: Schedule) -> Float[np.ndarray, " T"]:
    """Return the variance of an entry of every message's noise: 2 nu^2, or sigma^2.

    Args:
        schedule: Scales, and of which noise.
    """
    factor = 2.0 if schedule.noise == "laplace" else 1.0
    return factor * np.asarray(schedule.scales, np.float64) ** 2


def error(
    mixing: Any,
    hessians: Any,
    linear: Any,
    step_sizes: Any,
    beta: float,
    variances: Any,
    *,
    start: Any = 0.0,
    start_variance: float = 1.0,
) -> Error:
    """Return the exact mean-square error of Algorithm 1 after T messages and steps.

    Args:
        mixing: [n, n] W, symmetric, rows and columns summing to 1.
        hessians: [n, p, p] H_i.
        linear: [n, p] b_i.
        step_sizes: [T] alpha_k.
        beta: Gain of the tracking variable.
        variances: [T] of an entry of each message's noise.
        start: [n, p] mean of x(0), or what broadcasts.
        start_variance: Variance of an entry of x(0).

    Returns:
        Bias, noise and weights; infinite where the recursion overflows.


    Reference:
        Xie, Liu and Chai, Algorithm 1 and (13).
    """
    problem = problem_of(mixing, hessians, linear, step_sizes, beta)
    return _error(problem, start, start_variance, problem.weights(), np.asarray(variances))


def weights(
    mixing: Any, hessians: Any, step_sizes: Any, beta: float, *, rows: Any = None
) -> Float[np.ndarray, " T"]:
    """Return w_k: what noise of variance 1 in every entry of message k adds to E|x(T) - x*|^2.

    w_k = |d x(T) / d z(k)|_F^2, from one pass backwards over the rounds.

    Args:
        mixing: [n, n] W.
        hessians: [n, p, p].
        step_sizes: [T].
        beta: Gain.
        rows: [r, n, p] directions in which the error counts; None for all of them, `sketch` for an
            unbiased estimate by few.

    Returns:
        [T] weights.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import schedules
        >>> from dpjax.topology import graphs, mixing
        >>> matrix = mixing.metropolis_hastings(graphs.ring(4))
        >>> schedules.weights(matrix, np.ones((4, 1, 1)), [0.1, 0.1], 0.5).shape
        (2,)
    """
    return problem_of(mixing, hessians, None, step_sizes, beta).weights(rows)


def sketch(agents: int, dimension: int, probes: int, seed: int) -> Float[np.ndarray, "r n p"]:
    """Return rows for `weights`: the agents' mean whole, what differs between them by random signs.

    The mean carries most of the error and is exact; probes + p rows replace n p.

    Args:
        agents: Agents n.
        dimension: Entries p.
        probes: Random rows, 1 and above.
        seed: Of numpy's default generator.

    Returns:
        [probes + p, n, p].
    """
    n = agents
    p = dimension
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), (probes, n, p))
    signs = (signs - signs.mean(axis=1, keepdims=True)) / np.sqrt(probes)
    # The mean of all agents, entry by entry, at the norm of an orthonormal row.
    unit = np.eye(p)[:, None]
    mean = np.broadcast_to(unit, (p, n, p)) / np.sqrt(n)
    return np.concatenate([mean, signs])


def first_deviation(
    mu: float, gradient_gap: float, gamma: float, q1: float, q2: float, rounds: int | None = None
) -> float:
    """Return sigma_1 of the geometric Gaussian schedule that spends mu.

    With steps and decays as in `dpjax.mechanism.laplace`, sigma_1 = gamma gap / (mu sqrt(q2^2 -
    q1^2)), times sqrt(1 - (q1/q2)^(2 (rounds - 1))) where rounds are given.

    Guarantee: with this deviation or a larger one, any number of messages (or ``rounds`` of them)
        of one agent is mu-GDP for a change of its cost function, against an outsider who sees all
        messages. Its gradients at the same point may differ by at most ``gradient_gap`` in L2 norm.

    Args:
        mu: Budget, above 0; `dpjax.accounting.gdp.mu` gives it for an epsilon and a delta.
        gradient_gap: L2 distance of an agent's gradients before and after the change.
        gamma: First step.
        q1: Decay of the steps.
        q2: Decay of the noise, between q1 and 1.
        rounds: Messages that are ever sent; None for any number.

    Returns:
        The standard deviation, rounded up.

    Raises:
        ValueError: For numbers out of range, q1 not below q2, or a deviation that is no normal
            number of float64.

    Example:
        >>> from dpjax.contrib import schedules
        >>> round(schedules.first_deviation(1.0, 1.0, gamma=0.1, q1=0.9, q2=0.95), 4)
        0.3288
    """
    named = {"mu": mu, "gradient_gap": gradient_gap, "gamma": gamma}
    mu, gap, gamma = (_validate.positive(name, value) for name, value in named.items())
    q1, q2 = laplace.decays(q1, q2)
    energy = laplace.horizon_share(rounds, 2, q1, q2) / ((q2 - q1) * (q2 + q1))
    deviation = laplace.ratio([gamma, gap, math.sqrt(energy)], [mu]) * _UP_OF_PRODUCTS
    if not np.finfo(np.float64).tiny <= deviation < math.inf:
        raise ValueError(
            f"mu is {mu:g}, gradient_gap {gap:g} and gamma {gamma:g}, whose first deviation is "
            "beyond the numbers of float64; give them in units in which they are nearer to 1"
        )
    return deviation


def geometric_gaussian(
    mu: float,
    gradient_gap: float,
    gamma: float,
    q1: float,
    q2: float,
    rounds: int,
    *,
    horizon: laplace.Horizon = "endless",
) -> Schedule:
    """Return steps and Gaussian deviations that spend mu sqrt(1 - (q1/q2)^(2 (K-1))) in K messages.

    Guarantee: as `first_deviation`; what T messages cost is in ``spent``, and
        `dpjax.accounting.pure.mu_of_steps` confirms it from the numbers.

    Args:
        mu: Budget, above 0.
        gradient_gap: L2 distance of an agent's gradients before and after the change.
        gamma: First step.
        q1: Decay of the steps.
        q2: Decay of the noise, between q1 and 1.
        rounds: Rounds T.
        horizon: As in `dpjax.mechanism.laplace.geometric`.

    Returns:
        The schedule, float64.

    Example:
        >>> from dpjax.contrib import schedules
        >>> schedule = schedules.geometric_gaussian(1.0, 1.0, gamma=0.1, q1=0.9, q2=0.95, rounds=3)
        >>> schedule.step_sizes.round(3).tolist()
        [0.1, 0.09, 0.081]
    """
    run = _validate.one_of("horizon", horizon, ("endless", "run")) == "run"
    first = first_deviation(mu, gradient_gap, gamma, q1, q2, rounds if run else None)
    gap = float(gradient_gap)
    tiny = float(np.finfo(np.float64).tiny)
    steps = np.arange(_validate.integer("rounds", rounds), dtype=np.float64)
    scales = first * np.float64(q2) ** steps
    if not tiny <= scales[-1]:
        raise ValueError(f"rounds is {rounds}, in which noise vanishes; give fewer")
    spread = math.sqrt((q2 - q1) * (q2 + q1))
    total = max(laplace.ratio([gap, gamma], [first, spread]) * _UP_OF_PRODUCTS, tiny)
    spent = total * math.sqrt(laplace.horizon_share(rounds, 2, q1, q2)) if rounds > 1 else 0.0
    budget = total if run else float(mu)
    return Schedule(gamma * np.float64(q1) ** steps, scales, "gaussian", budget, spent, gap)


def best_scales(
    step_sizes: Any, weights: Any, budget: float, gradient_gap: float, noise: Law = "laplace"
) -> Float[np.ndarray, " T"]:
    """Return the scales of least sum_k w_k var_k that spend a budget on given steps.

    Guarantee: `dpjax.accounting.pure.epsilon` (or `mu_of_steps`) of these steps and scales is at
        most the budget, by closed form and rounded up; relation, attacker and sensitivity are
        stated there.
        A message whose step before is 0 has no noise.

    Args:
        step_sizes: [T] alpha_k, above 0 (0 is no step).
        weights: [T] w_k of `weights`.
        budget: Epsilon for Laplace noise, mu for Gaussian; 1e-140 at least.
        gradient_gap: In L1 norm, or in L2 for Gaussian noise.
        noise: Which noise.

    Returns:
        [T] Laplace scales, or standard deviations.

    Example:
        >>> from dpjax.contrib import schedules
        >>> schedules.best_scales([0.1, 0.1, 0.0], [1.0, 1.0, 1.0], 1.0, 1.0).round(3).tolist()
        [0.0, 0.2, 0.2]
    """
    steps = np.asarray(step_sizes, np.float64)
    w = np.asarray(weights, np.float64)
    if ((steps[:-1] > 0) & (w[1:] <= 0)).any():
        raise ValueError(
            "weights holds 0 at a message that carries a step: its noise costs nothing and has no "
            "best scale; give fewer rounds or weights above 0"
        )
    scales = None
    if budget >= _LEAST_BUDGET:
        scales = _scales(steps, w, gradient_gap / budget, noise == "gaussian")
    if scales is None:
        raise ValueError(
            f"gradient_gap is {gradient_gap:g}, budget {budget:g}, with steps and weights whose "
            "best scales are beyond what float64 holds; give them in units nearer to 1"
        )
    return scales


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
        probes: Rows of `sketch` while descending; None for exact errors.
        seed: Of the sketch.
        iterations: Most L-BFGS iterations of each descent; 0 takes the starts as they are.

    Returns:
        The best schedule met, with exact errors.
    """
    knots = min(16, rounds) if knots is None else knots
    counts = list(range(1, min(5, rounds)) if pulses is None else pulses)
    problem = problem_of(mixing, hessians, linear, np.ones(rounds), 1.0)
    mean = problem.hessians.mean(axis=0)
    setting = _Setting(problem, start, start_variance, budget, gradient_gap, noise)
    first = 1 / float(np.linalg.eigvalsh(problem.hessians).max()) if gamma is None else gamma
    gain = 0.5 / first if beta is None else beta
    decay = float(np.exp(-5 / rounds)) if q1 is None else q1
    width = max([knots, *counts])
    starts = {}
    if shape != "pulses":
        starts["smooth"] = _smooth(rounds, knots, first, decay, gain, width)
    if shape != "smooth":
        for count in counts:
            name = f"{count} pulse{'s' if count > 1 else ''}"
            starts[name] = _pulses(rounds, count, mean, gain, width)
    n, p = problem.linear.shape
    if probes is None:
        rows = np.eye(n * p).reshape(-1, n, p)
    else:
        rows = sketch(n, p, probes, seed)
    geometric_steps = first * decay ** np.arange(rounds, dtype=np.float64)
    return setting.best(starts, rows, (geometric_steps, gain), iterations)


class _Start(NamedTuple):
    """Steps mask * exp(basis @ point[:-1]) and gain exp(point[-1]); basis [T, J], mask [T]."""

    basis: np.ndarray
    mask: np.ndarray
    point: np.ndarray

    def steps(self, point: np.ndarray) -> tuple[np.ndarray, float]:
        steps = self.mask * np.exp(self.basis @ point[:-1])
        gain = float(np.exp(point[-1]))
        return steps, gain


def _smooth(rounds: int, knots: int, gamma: float, q1: float, beta: float, width: int) -> _Start:
    """Geometric steps as a line through knots of their logarithm; further columns are empty."""
    places = np.linspace(0, rounds - 1, knots)
    basis = np.zeros((rounds, width))
    point = np.zeros(width + 1)
    for j, row in enumerate(np.eye(knots)):
        basis[:, j] = np.interp(np.arange(rounds), places, row)
    point[:knots] = np.log(gamma) + np.log(q1) * places
    point[-1] = np.log(beta)
    return _Start(basis, np.ones(rounds), point)


def _pulses(rounds: int, count: int, hessian: np.ndarray, beta: float, width: int) -> _Start:
    """Steps in a few evenly spaced rounds: inverse Chebyshev nodes, the longest first."""
    curvatures = np.linalg.eigvalsh(hessian)
    low = curvatures[0]
    high = curvatures[-1]
    odd = 2 * np.arange(count) + 1
    nodes = np.cos(odd * np.pi / (2 * count))
    nodes = (high + low) / 2 - (high - low) / 2 * nodes
    if count == len(curvatures):
        nodes = curvatures
    # The last step is followed by averaging too; all lie before the last round, distinct.
    where = np.arange(1, count + 1) * rounds // (count + 1)
    basis = np.zeros((rounds, width))
    mask = np.zeros(rounds)
    point = np.zeros(width + 1)
    basis[where, np.arange(count)] = 1.0
    mask[where] = 1.0
    point[:count] = -np.log(np.sort(nodes))
    point[-1] = np.log(beta)
    return _Start(basis, mask, point)


class _Setting(NamedTuple):
    """A problem and a budget: what gives steps their noise and their error."""

    problem: TrackedQuadratics
    start: Any
    start_variance: float
    budget: float
    gap: float
    noise: Law

    def measured(self, steps: np.ndarray, beta: float) -> tuple[Schedule, Error]:
        """Steps with their best noise, and the exact error."""
        run = self.problem._replace(step_sizes=steps, beta=beta)
        w = run.weights()
        scales = None
        if np.isfinite(w).all() and (w[1:][steps[:-1] > 0] > 0).all():
            scales = _scales(steps, w, self.gap / self.budget, self.noise == "gaussian")
        scales = np.full(len(steps), np.inf) if scales is None else scales
        schedule = Schedule(steps, scales, self.noise, self.budget, self.budget, self.gap)
        return schedule, _error(run, self.start, self.start_variance, w, variances(schedule))

    def best(
        self,
        starts: dict[str, _Start],
        rows: np.ndarray,
        plain: tuple[np.ndarray, float],
        iterations: int,
    ) -> Optimum:
        """The best of what a descent from every start ends at, and of the plain steps."""
        options = {"geometric steps": (self.measured(*plain), plain[1])}
        evaluations = 1
        for name, start in starts.items():
            point, count = self.descended(start, rows, iterations)
            evaluations += count
            pairs = (start.steps(start.point), start.steps(point))
            ends = [(self.measured(*pair), pair[1]) for pair in pairs]
            options[name] = min(ends, key=lambda option: option[0][1].total)
        name = min(options, key=lambda name: options[name][0][1].total)
        (schedule, error), beta = options[name]
        if not np.isfinite(error.total):
            raise ValueError(
                f"gamma is {plain[0][0]:g} and beta {plain[1]:g}, at which the recursion diverges, "
                "as it does from every other start; give smaller ones to start from"
            )
        met = {shape: option[0][1] for shape, option in options.items()}
        return Optimum(schedule, beta, error, name, met, evaluations)

    def descended(self, start: _Start, rows: np.ndarray, iterations: int) -> tuple[np.ndarray, int]:
        """The point where L-BFGS ends, and its evaluations."""
        from scipy import optimize

        gaussian = self.noise == "gaussian"
        factor = (1.0 if gaussian else 2.0) * (self.gap / self.budget) ** 2
        first_errors = self.problem.first_errors(self.start)
        directions = np.moveaxis(rows, 0, 1)
        arrays: list[Any] = [self.problem.mixing, self.problem.hessians, *first_errors]
        arrays += [start.basis, start.mask, directions, self.start_variance, factor]
        with double_precision():
            constants = tuple(jnp.asarray(array) for array in arrays)

            def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
                value, slope = _log_error(jnp.asarray(x), constants, gaussian)
                slope = np.asarray(slope, np.float64)
                if not np.isfinite(float(value)) or not np.isfinite(slope).all():
                    return 1e6, np.zeros_like(slope)  # The line search steps back.
                return float(value), slope

            bounds = [(entry - _REACH, entry + _REACH) for entry in start.point]
            options = {"maxiter": iterations}
            end = optimize.minimize(
                objective, start.point, jac=True, method="L-BFGS-B", bounds=bounds, options=options
            )
        return np.asarray(end.x, np.float64), int(end.nfev)


def log_error(point: jax.Array, constants: tuple[jax.Array, ...], gaussian: bool) -> jax.Array:
    """Return the logarithm of bias plus least noise.

    Args:
        point: [J + 1] of a start.
        constants: W, H, e and u before the first message, basis and mask of the steps, rows
            [n, r, p], the variance of x(0), and 2 (gap / epsilon)^2, or (gap / mu)^2.
        gaussian: Which noise.
    """
    w, h, e, u, basis, mask, rows, start_variance, factor = constants
    logs = basis @ point[:-1]
    beta = jnp.exp(point[-1])
    steps = mask * jnp.exp(logs)

    def forwards(state: Any, alpha: jax.Array) -> Any:
        e, u = state
        mixed = w @ e
        u = u + beta * (e - mixed)
        slope = jnp.einsum("nij,nj->ni", h, e)
        return (mixed - alpha * (u + slope), u), None

    def backwards(state: Any, alpha: jax.Array) -> Any:
        e, u = state
        gained = beta * (u - alpha * e)
        flat = (e - gained).reshape(len(w), -1)
        mixed = (w.T @ flat).reshape(e.shape)
        after = mixed + gained - alpha * jnp.einsum("nri,nij->nrj", e, h)
        return (after, u - alpha * e), (after**2).sum()

    (e, _), _ = jax.lax.scan(forwards, (e, u), steps)
    _, weights = jax.lax.scan(backwards, (rows, jnp.zeros_like(rows)), steps, reverse=True)
    # Powers of the logarithm: those of a step of 0 have no slope.
    sent = weights[1:]
    power = 1.0 if gaussian else 2 / 3
    sizes = mask[:-1] * jnp.exp(power * logs[:-1])
    if gaussian:
        noise = (sizes * jnp.sqrt(sent)).sum() ** 2
    else:
        noise = (sizes * jnp.cbrt(sent)).sum() ** 3
    bias = (e**2).sum() + start_variance * weights[0]
    return jnp.log(bias + factor * noise)


_log_error = jax.jit(jax.value_and_grad(log_error), static_argnums=2)


def _error(
    run: TrackedQuadratics,
    start: Any,
    start_variance: float,
    weights: np.ndarray,
    spread: np.ndarray,
) -> Error:
    bias = run.bias(start, start_variance, weights[0])
    with np.errstate(over="ignore", invalid="ignore"):
        noise = float(weights @ spread)
    if not np.isfinite([bias, noise]).all():
        bias = noise = np.inf
    return Error(bias, noise, weights)


def _scales(
    steps: np.ndarray, weights: np.ndarray, ratio: float, gaussian: bool
) -> np.ndarray | None:
    """The best scales, 0 after rounds without a step; None where float64 does not hold them."""
    scales = np.zeros(len(steps))
    sent = steps[:-1] > 0
    a = steps[:-1][sent]
    w = weights[1:][sent]
    if not len(a):
        return scales
    with np.errstate(all="ignore"):
        # Roots of each: quotients and products of steps and weights themselves may overflow.
        if gaussian:
            roots = np.sqrt(a) / np.sqrt(np.sqrt(w))
        else:
            roots = np.cbrt(a) / np.cbrt(w)
        parts = a / roots
        peak = parts.max()
        if gaussian:
            total = peak * np.linalg.norm(parts / peak)
        else:
            total = parts.sum()
        scales[1:][sent] = ratio * total * roots * _UP
    met = np.concatenate([[ratio, total, ratio * total], roots, scales[1:][sent]])
    return scales if ((met >= _LEAST) & (met <= _MOST)).all() else None
