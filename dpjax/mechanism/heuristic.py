"""The published way to choose parameters, by name: it chooses to do nothing."""

from typing import NamedTuple

import numpy as np

from dpjax import _validate
from dpjax.mechanism.accuracy import curvatures
from dpjax.mechanism.laplace import first_scale

__all__ = ["Heuristic", "remark_520"]


class Heuristic(NamedTuple):
    """What Remark 5.20 ends at.

    Attributes:
        gamma: First step.
        q1: Decay of the steps.
        q2: Decay of the noise.
        value: (25) there.
        history: Values after each sweep over the three.
    """

    gamma: float
    q1: float
    q2: float
    value: float
    history: tuple[float, ...]


def remark_520(
    epsilon: float,
    gradient_gap: float,
    *,
    agents: int,
    dimension: int,
    smoothness: float,
    convexity: float,
    constants: tuple[float, float],
    seed: int,
    largest: float = 1.0,
    sweeps: int = 20,
) -> Heuristic:
    """Minimise (25) over gamma, q1 and q2 in turn, from a random start: the paper's heuristic (41).

    It ends at gamma = 0, where nothing is learned: with c1 and c2 held fixed, the first term falls
    by mu c1 for a unit of sum alpha and the second rises by L^2 c2 / (n mu). By name, to show it.

    Args:
        epsilon: Budget.
        gradient_gap: L1 bound.
        agents: n.
        dimension: p.
        smoothness: L.
        convexity: mu.
        constants: c1 and c2, as at the start.
        seed: Of the random start.
        largest: Most that gamma may be; the least is 0.
        sweeps: How often the three are gone through.

    Returns:
        Where it ends; gamma is exactly 0 where no step is best.

    Raises:
        ValueError: For numbers out of range.

    Reference:
        Xie, Liu and Chai, Remark 5.20 and (41).
    """
    from scipy import optimize

    _validate.positive("epsilon", epsilon)
    _validate.positive("gradient_gap", gradient_gap)
    agents = _validate.integer("agents", agents)
    dimension = _validate.integer("dimension", dimension)
    given = _validate.numbers("constants", constants) or ()
    if len(given) != 2 or min(given) < 0:
        raise ValueError(
            f"constants is {_validate.shown(constants)}; give c1 and c2, two numbers >= 0"
        )
    most = _validate.positive("largest", largest)
    generator = np.random.default_rng(_validate.integer("seed", seed, least=0))
    lip, m = curvatures(smoothness, convexity)
    c1, c2 = given

    def accuracy(point: list[float]) -> float:
        gamma, q1, q2 = point
        if gamma <= 0:
            return c1
        scale = first_scale(epsilon, gradient_gap, gamma, q1, q2, printed=True)
        total, squares = gamma / (1 - q1), scale**2
        return float(
            np.exp(-m * total) * c1
            + lip**2 / (agents * m) * total * c2
            + 2 * dimension * squares / (1 - q2**2)
            + (4 * dimension * lip + 2 * dimension * lip**2 / m)
            * gamma
            * squares
            / (1 - q1 * q2**2)
        )

    q1, q2 = np.sort(generator.uniform(0.01, 0.99, 2))
    point, history = [most * float(generator.uniform()), float(q1), float(q2)], []
    for _ in range(_validate.integer("sweeps", sweeps)):
        for i in range(3):
            # The ends of q1 and q2 move with each other.
            low, high = ((0.0, most), (1e-6, point[2] - 1e-9), (point[1] + 1e-9, 1 - 1e-9))[i]

            def along(entry: float, i: int = i) -> float:
                return accuracy([*point[:i], entry, *point[i + 1 :]])

            inner = optimize.minimize_scalar(along, bounds=(low, high), method="bounded").x
            point[i] = min((float(inner), low, high, point[i]), key=along)
        history.append(accuracy(point))
        if point[0] == 0:
            break
    return Heuristic(point[0], point[1], point[2], history[-1], tuple(history))
