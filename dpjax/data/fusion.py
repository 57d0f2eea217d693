"""Sensor fusion: agents measure one unknown vector, each through a matrix of its own.

    f_i(x) = |v_i - M_i x|^2 + omega |x|^2,   gradient H_i x - b_i,   H_i = 2 (M_i' M_i + omega I),
                                                                      b_i = 2 M_i' v_i

What protects an agent's measurements v_i protects b_i: two of them move its gradient by b_i - b_i'
at every point.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax import _validate

__all__ = ["Fusion", "make", "of"]


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
        >>> from dpjax.data import fusion
        >>> made = fusion.make(agents=100, seed=0)
        >>> made.matrices.shape, made.hessians.shape, made.minimiser.shape
        ((100, 3, 2), (100, 2, 2), (2,))
    """
    n = _validate.integer("agents", agents)
    m, p = (
        _validate.integer("measurements", measurements),
        _validate.integer("dimension", dimension),
    )
    noise, omega = _validate.number("noise", noise), _validate.number("omega", omega)
    low, high = _validate.number("low", low), _validate.number("high", high)
    if min(noise, omega) < 0:
        raise ValueError(f"noise is {noise:g}, omega {omega:g}; give numbers >= 0")
    if low >= high:
        raise ValueError(f"low is {low:g} and high {high:g}; give low < high")
    generator = np.random.default_rng(_validate.integer("seed", seed, least=0))
    drawn = generator.standard_normal(p)
    hidden = drawn if truth is None else _validate.finite_array("truth", truth, ndim=1)
    if hidden.shape != (p,):
        raise ValueError(f"truth has shape {hidden.shape}; give [{p}], one entry a dimension")
    matrices = generator.uniform(low, high, (n, m, p))
    values = matrices @ hidden + noise * generator.standard_normal((n, m))
    return of(matrices, values, omega, hidden)


def of(matrices: Any, values: Any, omega: float, truth: Any) -> Fusion:
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
        >>> from dpjax.data import fusion
        >>> fusion.of(np.ones((2, 1, 1)), np.array([[1.0], [3.0]]), 0.0, [2.0]).minimiser
        array([2.])
    """
    for name, array in (("matrices", matrices), ("values", values)):
        _validate.unmasked(name, array)
    hessians = 2 * (np.swapaxes(matrices, 1, 2) @ matrices + omega * np.eye(matrices.shape[2]))
    linear = 2 * np.einsum("nmp,nm->np", matrices, values)
    total = hessians.sum(axis=0)
    if np.linalg.cond(total) > 1e12:
        raise ValueError(
            f"omega is {omega:g}: the sum of the costs has no unique minimiser; give more agents "
            "or measurements, or a larger omega"
        )
    minimiser = np.linalg.solve(total, linear.sum(axis=0))
    missed = values - matrices @ minimiser
    minimum = float((missed**2).sum() / len(values) + omega * minimiser @ minimiser)
    return Fusion(matrices, values, omega, truth, hessians, linear, minimiser, minimum)
