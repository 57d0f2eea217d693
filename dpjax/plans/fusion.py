"""Sensor fusion as a learning problem: quadratic objectives, one an agent, exactly known."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from dpjax import _validate
from dpjax.data.fusion import Fusion
from dpjax.data.partition import Partition
from dpjax.plans.problem import Problem

__all__ = ["problem"]


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
        ValueError: For float64 without the flag.

    Reference:
        The differentially private gradient tracking paper, section 6.1.

    Example:
        >>> from dpjax.data import fusion as data
        >>> from dpjax.plans import fusion
        >>> fusion.problem(data.make(agents=6, seed=0)).agents
        6
    """
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
    each = jnp.sum(jnp.square(params - evaluation), axis=-1)
    mean = jnp.sum(jnp.square(jnp.mean(params, axis=0) - evaluation))
    return {
        "residual": jnp.sum(each), "residual_per_agent": jnp.mean(each), "mean_residual": mean,
    }  # fmt: skip
