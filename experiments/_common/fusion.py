"""Sensor fusion as a learning problem: quadratic objectives, one an agent, exactly known."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from _common import schedules
from dpjax import _validate
from dpjax.algorithms.tracking import Tracking
from dpjax.data.fusion import Fusion
from dpjax.data.partition import Partition
from dpjax.plans.optimizers import Sgd
from dpjax.plans.problem import Problem
from dpjax.plans.scheduled import Laplace

__all__ = ["Parts", "optimal", "problem"]


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
    noise: Laplace
    predicted: schedules.Error


def optimal(
    costs: Fusion,
    mixing: Float[np.ndarray, "n n"],
    *,
    epsilon: float,
    gradient_gap: float,
    rounds: int,
    shape: Literal["any", "smooth", "pulses"] = "any",
    apart: bool = True,
    **options: Any,
) -> Parts:
    """Tracking whose steps and Laplace noise make the error of the last models small.

    Guarantee: a plan of these parts spends epsilon as any does, whatever they are. The parts
        themselves are made from Hessians and linear terms, and tell of them: use them on public or
        simulated costs.

    Args:
        costs: Measurements, `dpjax.data.fusion.make`.
        mixing: [n, n] symmetric mixing matrix.
        epsilon: Budget of the run.
        gradient_gap: How far gradients of neighbours are assumed to be apart in L1.
        rounds: Rounds T.
        shape: Steps that go down smoothly, a few long ones with averaging between, or the better.
        apart: As in `problem`, which the error is of.
        options: More of `_common.schedules.optimal`.

    Returns:
        The parts.

    Raises:
        ValueError: For other costs, and as `_common.schedules.optimal`.

    Example:
        >>> import numpy as np
        >>> from dpjax.data import fusion as data
        >>> from _common import fusion
        >>> costs, few = data.make(4, seed=0), dict(iterations=10, pulses=(2,))
        >>> parts = fusion.optimal(
        ...     costs, np.full((4, 4), 0.25), epsilon=1.0, gradient_gap=1.0, rounds=20, **few
        ... )
        >>> parts.predicted.bias < parts.predicted.total
        True
    """
    _check(costs)
    best = schedules.optimal(
        mixing, costs.hessians, costs.linear, epsilon, gradient_gap, rounds, shape=shape,
        start_variance=float(apart), **options,
    )  # fmt: skip
    steps, scales = best.schedule.step_sizes, best.schedule.scales
    return Parts(
        Tracking(best.beta),
        Sgd(float(steps.max()), decay=tuple(map(float, steps / steps.max()))),
        Laplace(tuple(map(float, scales / scales.max()))),
        best.error,
    )


def problem(
    costs: Fusion,
    *,
    apart: bool = True,
    dtype: Literal["float32", "float64"] = "float32",
) -> Problem:
    """Agents' costs f_i(x) = |v_i - M_i x|^2 + omega |x|^2, each agent's its one record.

    The metrics are ``residual``, the sum over agents of |x_i - x*|^2, ``residual_per_agent``, its
    mean, and ``mean_residual``, |average model - x*|^2.

    Args:
        costs: Of measurements, `dpjax.data.fusion.make`.
        apart: True where every agent starts from a draw of N(0, I) of its own; False from zero.
        dtype: Of data and models; "float64" where JAX's x64 flag is on.

    Returns:
        The problem; a model is a vector [p].

    Raises:
        ValueError: For other costs, or float64 without the flag.

    Reference:
        Xie, Liu and Chai (2025), section 6.1.

    Example:
        >>> from dpjax.data import fusion as data
        >>> from _common import fusion
        >>> fusion.problem(data.make(agents=6, seed=0)).agents
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
    start = _starts(dimension, dtype, _validate.flag("apart", apart))
    return Problem(
        start,
        Cost(measurements, dimension, float(costs.omega)),
        _residuals,
        np.concatenate([flat, costs.values], axis=1).astype(dtype),
        np.zeros(agents, dtype),
        Partition(rows[:, None], np.ones(agents, np.int32)),
        np.asarray(costs.minimiser, dtype),
        "sensor fusion",
        evaluation_data="public",
        apart=apart,
    )


def _check(costs: Any) -> None:
    if not isinstance(costs, Fusion):
        raise ValueError(f"costs is {type(costs).__name__}; give those of data.fusion.make")


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
        missed = x[-self.measurements :] - jnp.matmul(
            matrix, params, precision=jax.lax.Precision.HIGHEST
        )
        return missed @ missed + self.omega * (params @ params)


def _residuals(params: Any, evaluation: Any) -> dict[str, Any]:
    each = jnp.sum(jnp.square(params - evaluation[None]), axis=-1)
    mean = jnp.sum(jnp.square(jnp.mean(params, axis=0) - evaluation))
    return {
        "residual": jnp.sum(each), "residual_per_agent": jnp.mean(each), "mean_residual": mean,
    }  # fmt: skip
