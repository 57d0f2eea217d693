"""The paper's quadratics against their formula and numerical derivatives."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from dpjax.learning.quadratics import _objectives, quadratics


class Quadratics(NamedTuple):
    matrices: np.ndarray
    centers: np.ndarray
    minimiser: np.ndarray
    minimum: float


def objectives(n: int) -> Quadratics:
    return Quadratics(*_objectives(n))


def average(result: Quadratics, x: np.ndarray) -> float:
    return float(np.mean(value(result.matrices, result.centers, x)))


def value(matrix: np.ndarray, center: np.ndarray, x: np.ndarray) -> Any:
    offset = x - center
    return np.einsum("...i,...ij,...j->...", offset, matrix, offset)


def gradient(matrix: np.ndarray, center: np.ndarray, x: np.ndarray) -> np.ndarray:
    return 2 * np.einsum("...ij,...j->...i", matrix, x - center)


@pytest.mark.parametrize("n", [2, 5, 20])
def test_first_half_is_formula(n: int) -> None:
    outcome = objectives(n)
    x = np.array([0.7, -1.3])
    for i in range(1, n // 2 + 1):
        want = 15 * (x[0] + i) ** 2 + x[1] ** 2
        result = value(outcome.matrices[i - 1], outcome.centers[i - 1], x)
        np.testing.assert_allclose(result, want, rtol=1e-13)


def test_second_half_is_formula_turned_about_its_minimiser() -> None:
    outcome = objectives(6)
    angle = np.pi / 12
    for i in range(4, 7):
        center = np.array([i, 0.0])
        np.testing.assert_array_equal(outcome.centers[i - 1], center)
        # Along the steep axis, turned by 15 degrees, a unit step costs 15; across it, 1.
        steep = np.array([np.cos(angle), np.sin(angle)])
        flat = np.array([-np.sin(angle), np.cos(angle)])
        for direction, cost in ((steep, 15.0), (flat, 1.0)):
            result = value(outcome.matrices[i - 1], center, center + direction)
            np.testing.assert_allclose(result, cost, rtol=1e-13)


def test_gradient_is_numerical_one() -> None:
    result = objectives(20)
    x = np.array([1.7, -0.4])
    h = 1e-5
    exact = gradient(result.matrices, result.centers, x)
    for axis in range(2):
        step = h * np.eye(2)[axis]
        ahead = value(result.matrices, result.centers, x + step)
        behind = value(result.matrices, result.centers, x - step)
        np.testing.assert_allclose(exact[:, axis], (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 7, 20])
def test_minimum_is_average_s(n: int) -> None:
    result = objectives(n)
    np.testing.assert_allclose(
        average(result, result.minimiser), result.minimum, rtol=1e-12, atol=1e-12
    )
    slope = gradient(result.matrices, result.centers, result.minimiser).mean(axis=0)
    np.testing.assert_allclose(slope, 0, atol=1e-11)
    rng = np.random.default_rng(0)
    for step in rng.normal(size=(50, 2)):
        assert average(result, result.minimiser + step) > result.minimum


def test_no_agents_are_refused() -> None:
    with pytest.raises(ValueError, match="agents is 0"):
        quadratics(0)
