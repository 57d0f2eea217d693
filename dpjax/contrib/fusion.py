"""Sensor fusion: agents measure one unknown vector, each through a matrix of its own.

    f_i(x) = |v_i - M_i x|^2 + omega |x|^2,   gradient H_i x - b_i,   H_i = 2 (M_i' M_i + omega I),
                                                                      b_i = 2 M_i' v_i

What protects an agent's measurements v_i protects b_i: two of them move its gradient by b_i - b_i'
at every point.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from dpjax import _validate
from dpjax.algorithms.tracking import Tracking
from dpjax.contrib import schedules
from dpjax.data.partition import Partition
from dpjax.learning.problem import Problem
from dpjax.plans.optimizers import Sgd
from dpjax.plans.scheduled import ScheduledLaplace

__all__ = ["Fusion", "Parts", "make", "costs_of", "optimal_parts", "problem"]


class Fusion(NamedTuple):
    """Measurements of n agents and the minimum of their average cost; all arrays are float64.

    Attributes:
        matrices: [n, m, p] M_i.
        values: [n, m] v_i.
        omega: Weight of |x|^2.
        truth: [p] what was measured.
        hessians: [n, p, p] H_i, symmetric positive definite.
        linear: [n, p] b_i.
        minimiser: [p] x*, the minimiser of f = (1/n) sum_i f_i.
        minimum: f(x*).
    """

    matrices: Float[np.ndarray, "n m p"]
    values: Float[np.ndarray, "n m"]
    omega: float
    truth: Float[np.ndarray, " p"]
    hessians: Float[np.ndarray, "n p p"]
    linear: Float[np.ndarray, "n p"]
    minimiser: Float[np.ndarray, " p"]
    minimum: float


def make(
    agents: int,
    seed: int,
    measurements: int = 3,
    dimension: int = 2,
    noise: float = 1.0,
    omega: float = 0.01,
    low: float = 0.0,
    high: float = 10.0,
    truth: Any = None,
) -> Fusion:
    """Return measurements of a hidden vector: M_i ~ U[low, high], v_i = M_i x + noise N(0, I).

    The law of the data is not in the paper; with this one its printed parameters converge. How far
    depends on the hidden x: all entries of M_i are positive, so that what is left after few rounds
    is the part of x* across the vector of ones.

    Args:
        agents: Agents n.
        seed: Of numpy's default generator.
        measurements: Measurements m of each agent.
        dimension: Entries p of x.
        noise: Standard deviation of a measurement's error.
        omega: Weight of |x|^2, above 0 (or 0 where the matrices determine x).
        low: Least entry of a matrix.
        high: Largest.
        truth: [p] the hidden x; drawn from N(0, I) if None.

    Returns:
        Data and minimiser.

    Raises:
        ValueError: For numbers out of range, or costs whose sum has no unique minimiser.

    Reference:
        Xie, Liu and Chai, (42).

    Example:
        >>> from dpjax.contrib import fusion
        >>> costs = fusion.make(agents=100, seed=0)
        >>> costs.matrices.shape, costs.hessians.shape, costs.minimiser.shape
        ((100, 3, 2), (100, 2, 2), (2,))
    """
    n = _validate.integer("agents", agents)
    m = _validate.integer("measurements", measurements)
    p = _validate.integer("dimension", dimension)
    noise = _validate.number("noise", noise)
    omega = _validate.number("omega", omega)
    low = _validate.number("low", low)
    high = _validate.number("high", high)
    if min(noise, omega) < 0:
        raise ValueError(f"noise is {noise:g}, omega {omega:g}; give numbers >= 0")
    if low >= high:
        raise ValueError(f"low is {low:g} and high {high:g}; give low < high")
    generator = np.random.default_rng(_validate.integer("seed", seed, minimum=0))
    drawn = generator.standard_normal(p)
    hidden = drawn if truth is None else _validate.finite_array("truth", truth, ndim=1)
    if hidden.shape != (p,):
        raise ValueError(f"truth has shape {hidden.shape}; give [{p}], one entry a dimension")
    matrices = generator.uniform(low, high, (n, m, p))
    values = matrices @ hidden + noise * generator.standard_normal((n, m))
    return costs_of(matrices, values, omega, hidden)


def costs_of(matrices: Any, values: Any, omega: float, truth: Any) -> Fusion:
    """Return the costs of given measurements.

    Args:
        matrices: [n, m, p] M_i.
        values: [n, m] v_i.
        omega: Weight of |x|^2.
        truth: [p] what was measured; it enters nothing.

    Returns:
        Data and minimiser.

    Raises:
        ValueError: For masked entries, and for costs whose sum has no unique minimiser.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import fusion
        >>> fusion.costs_of(np.ones((2, 1, 1)), np.array([[1.0], [3.0]]), 0.0, [2.0]).minimiser
        array([2.])
    """
    for name, array in (("matrices", matrices), ("values", values)):
        _validate.unmasked(name, array)
    squares = np.swapaxes(matrices, 1, 2) @ matrices
    ridge = omega * np.eye(matrices.shape[2])
    hessians = 2 * (squares + ridge)
    linear = 2 * np.einsum("nmp,nm->np", matrices, values)
    total = hessians.sum(axis=0)
    if np.linalg.cond(total) > 1e12:
        raise ValueError(
            f"omega is {omega:g}: the sum of the costs has no unique minimiser; give more agents "
            "or measurements, or a larger omega"
        )
    minimiser = np.linalg.solve(total, linear.sum(axis=0))
    missed = values - matrices @ minimiser
    loss = (missed**2).sum() / len(values)
    minimum = float(loss + omega * minimiser @ minimiser)
    return Fusion(matrices, values, omega, truth, hessians, linear, minimiser, minimum)


class Parts(NamedTuple):
    """Parts of a config whose steps and noise were chosen together.

    Attributes:
        method: Tracking, with its gain.
        optimizer: The steps.
        noise: The scales over their largest.
        predicted: Exact error of the models after the run, bias and noise apart.
    """

    method: Tracking
    optimizer: Sgd
    noise: ScheduledLaplace
    predicted: schedules.Error


def optimal_parts(
    costs: Fusion,
    mixing: Float[np.ndarray, "n n"],
    *,
    epsilon: float,
    gradient_gap: float,
    rounds: int,
    shape: Literal["any", "smooth", "pulses"] = "any",
    init_per_agent: bool = True,
    **options: Any,
) -> Parts:
    """Tracking whose steps and Laplace noise make the error of the last models small.

    Guarantee: a plan of these parts spends epsilon as any does, whatever they are. The parts
        themselves are made from Hessians and linear terms, and tell of them: use them on public or
        simulated costs.

    Args:
        costs: Measurements, from `make`.
        mixing: [n, n] symmetric mixing matrix.
        epsilon: Budget of the run.
        gradient_gap: How far gradients of neighbours are assumed to be apart in L1.
        rounds: Rounds T.
        shape: Steps that go down smoothly, a few long ones with averaging between, or the better.
        init_per_agent: As in `problem`, which the error is of.
        options: More of `dpjax.contrib.schedules.optimal`.

    Returns:
        The parts.

    Raises:
        ValueError: For other costs, and as `dpjax.contrib.schedules.optimal`.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import fusion
        >>> costs, few = fusion.make(4, seed=0), dict(iterations=10, pulses=(2,))
        >>> parts = fusion.optimal_parts(
        ...     costs, np.full((4, 4), 0.25), epsilon=1.0, gradient_gap=1.0, rounds=20, **few
        ... )
        >>> parts.predicted.bias < parts.predicted.total
        True
    """
    _check(costs)
    best = schedules.optimal(
        mixing, costs.hessians, costs.linear, epsilon, gradient_gap, rounds, shape=shape,
        start_variance=float(init_per_agent), **options,
    )  # fmt: skip
    steps = best.schedule.step_sizes
    scales = best.schedule.scales
    decay = tuple(map(float, steps / steps.max()))
    optimizer = Sgd(float(steps.max()), decay=decay)
    noise = ScheduledLaplace(tuple(map(float, scales / scales.max())))
    return Parts(Tracking(best.beta), optimizer, noise, best.error)


def problem(
    costs: Fusion,
    *,
    init_per_agent: bool = True,
    dtype: Literal["float32", "float64"] = "float32",
) -> Problem:
    """Agents' costs f_i(x) = |v_i - M_i x|^2 + omega |x|^2, each agent's its one record.

    The metrics are ``residual``, the sum over agents of |x_i - x*|^2, ``residual_per_agent``, its
    mean, and ``mean_residual``, |average model - x*|^2.

    Args:
        costs: Of measurements, from `make`.
        init_per_agent: True where every agent starts from a draw of N(0, I) of its own; False
            from zero.
        dtype: Of data and models; "float64" where JAX's x64 flag is on.

    Returns:
        The problem; a model is a vector [p].

    Raises:
        ValueError: For other costs, or float64 without the flag.

    Reference:
        Xie, Liu and Chai (2025), section 6.1.

    Example:
        >>> from dpjax.contrib import fusion
        >>> fusion.problem(fusion.make(agents=6, seed=0)).agents
        6
    """
    _check(costs)
    _validate.one_of("dtype", dtype, ("float32", "float64"))
    if dtype == "float64" and jnp.result_type(float) != np.float64:
        raise ValueError(
            "dtype is 'float64' where JAX computes in float32; set JAX_ENABLE_X64=1, or give "
            "'float32'"
        )
    agents, measurements, dimension = costs.matrices.shape
    flat = costs.matrices.reshape(agents, measurements * dimension)
    rows = np.arange(agents, dtype=np.int32)
    start = _starts(dimension, dtype, _validate.flag("init_per_agent", init_per_agent))
    # Each agent has one record: its matrix and its values, side by side.
    records = np.concatenate([flat, costs.values], axis=1).astype(dtype)
    labels = np.zeros(agents, dtype)
    counts = np.ones(agents, np.int32)
    minimiser = np.asarray(costs.minimiser, dtype)
    return Problem(
        start,
        Cost(measurements, dimension, float(costs.omega)),
        _residuals,
        records,
        labels,
        Partition(rows[:, None], counts),
        minimiser,
        "sensor fusion",
        evaluation_data="public",
        init_per_agent=init_per_agent,
    )


def _check(costs: Any) -> None:
    if not isinstance(costs, Fusion):
        raise ValueError(f"costs is {type(costs).__name__}; give those of fusion.make")


@functools.lru_cache(maxsize=64)
def _starts(dimension: int, dtype: str, drawn: bool) -> Callable[[PRNGKeyArray], Any]:
    if drawn:
        return lambda key: jax.random.normal(key, (dimension,), dtype)
    return lambda key: jnp.zeros(dimension, dtype)


@dataclass(frozen=True)
class Cost:
    """The cost of one agent's measurements.

    Attributes:
        measurements: m.
        dimension: p.
        omega: Weight of |x|^2.
    """

    measurements: int
    dimension: int
    omega: float

    def __call__(self, params: Any, x: Any, y: Any) -> Any:
        """|v - M x|^2 + omega |x|^2 of a record (M flattened, v)."""
        del y
        matrix = x[: -self.measurements].reshape(self.measurements, self.dimension)
        # A GPU's default products would round the residual to ten bits.
        predicted = jnp.matmul(matrix, params, precision=jax.lax.Precision.HIGHEST)
        missed = x[-self.measurements :] - predicted
        return missed @ missed + self.omega * (params @ params)


def _residuals(params: Any, evaluation: Any) -> dict[str, Any]:
    squares = jnp.sum(jnp.square(params - evaluation[None]), axis=-1)
    mean = jnp.sum(jnp.square(jnp.mean(params, axis=0) - evaluation))
    return {
        "residual": jnp.sum(squares),
        "residual_per_agent": jnp.mean(squares),
        "mean_residual": mean,
    }
