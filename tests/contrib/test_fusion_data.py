"""Fusion costs against their formula, numerical derivatives and least squares."""

import numpy as np
import pytest

from dpjax.contrib import fusion


def cost(result: fusion.Fusion, i: int, x: np.ndarray) -> float:
    missed = result.values[i] - result.matrices[i] @ x
    return float(missed @ missed + result.omega * x @ x)


def test_gradient_is_numerical_one():
    result = fusion.make(4, seed=1, measurements=5, dimension=3)
    x = np.array([0.3, -1.2, 0.8], dtype=np.float64)
    h = 1e-5
    for i in range(4):
        numerical = [
            (cost(result, i, x + h * e) - cost(result, i, x - h * e)) / (2 * h) for e in np.eye(3)
        ]
        np.testing.assert_allclose(result.hessians[i] @ x - result.linear[i], numerical, rtol=1e-6)


def test_minimiser_is_that_of_stacked_least_squares():
    result = fusion.make(50, seed=3, omega=0.2)
    rows = np.concatenate([result.matrices.reshape(-1, 2), np.sqrt(50 * 0.2) * np.eye(2)])
    solution = np.linalg.lstsq(
        rows, np.concatenate([result.values.ravel(), np.zeros(2)]), rcond=None
    )
    np.testing.assert_allclose(result.minimiser, solution[0], rtol=1e-10)
    average = np.mean([cost(result, i, result.minimiser) for i in range(50)])
    assert result.minimum == pytest.approx(average, rel=1e-12)


def test_law_is_stated_one():
    result = fusion.make(5000, seed=0, low=-2.0, high=6.0, noise=0.5)
    assert result.matrices.min() >= -2 and result.matrices.max() <= 6
    assert result.matrices.mean() == pytest.approx(2.0, abs=0.05)
    missed = result.values - result.matrices @ result.truth
    assert missed.std() == pytest.approx(0.5, rel=0.03)
    assert all(array.dtype == np.float64 for array in result if isinstance(array, np.ndarray))


def test_seed_makes_same_data_and_another_one_other():
    first = fusion.make(7, 5)
    again = fusion.make(7, 5)
    other = fusion.make(7, 6)
    np.testing.assert_array_equal(first.values, again.values)
    assert not np.array_equal(first.values, other.values)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("agents", {"agents": 0}),
        ("omega", {"omega": -1.0}),
        ("low", {"low": 3.0, "high": 3.0}),
        ("omega", {"agents": 1, "measurements": 1, "omega": 0.0}),
    ],
)
def test_bad_input_is_named(name, arguments):
    with pytest.raises(ValueError, match=name):
        fusion.make(**{"agents": 3, "seed": 0, **arguments})
