"""The diagonal of the inverse: never below the truth, close to it, refused near singularity."""

import numpy as np
import pytest

from dpjax.accounting import precision

mpmath = pytest.importorskip("mpmath")


def exact(matrix: np.ndarray) -> np.ndarray:
    with mpmath.workdps(60):
        inverse = mpmath.matrix(matrix.tolist()) ** -1
        return [inverse[i, i] for i in range(len(matrix))]


def random_covariance(n: int, condition: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(n, n)))
    scale = 10.0 ** rng.uniform(-3, 3, size=n)  # budgets that differ a lot between agents
    factor = scale[:, None] * basis * np.geomspace(1, condition, n) ** 0.5
    covariance = factor @ factor.T
    return (covariance + covariance.T) / 2, factor


@pytest.mark.parametrize("condition", [1.0, 1e4, 1e8, 1e11])
@pytest.mark.parametrize("seed", range(3))
def test_covariance_bound_is_above_truth_and_close(condition, seed):
    covariance, _ = random_covariance(8, condition, seed)
    bound = precision.inverse_diagonal(covariance)
    truth = exact(covariance)
    for upper, value in zip(bound, truth, strict=True):
        assert upper >= value
        assert upper <= value * (1 + 1e-13 * condition + 1e-12)


@pytest.mark.parametrize("condition", [1.0, 1e8, 1e16])
@pytest.mark.parametrize("seed", range(3))
def test_factor_keeps_twice_digits(condition, seed):
    _, factor = random_covariance(8, condition, seed)
    with mpmath.workdps(80):
        inverse = mpmath.matrix(factor.tolist()) ** -1
        truth = [sum(inverse[k, i] ** 2 for k in range(8)) for i in range(8)]
    bound = precision.inverse_diagonal(factor=factor)
    for upper, value in zip(bound, truth, strict=True):
        assert upper >= value
        assert upper <= value * (1 + 1e-13 * condition**0.5 + 1e-11)


@pytest.mark.mutant
def test_plain_inverse_would_fall_on_wrong_side():
    below = 0
    for seed in range(5):
        covariance, _ = random_covariance(8, 1e8, seed)
        plain = np.diag(np.linalg.inv(covariance))
        below += sum(p < t for p, t in zip(plain, exact(covariance), strict=True))
    assert below > 0


def test_near_singular_indefinite_and_malformed_are_refused():
    ones = np.ones((5, 5))
    for matrix in (
        ones / 25,  # the trusted-server reference
        ones + 1e-15 * np.eye(5),
        np.eye(5) - 0.3 * ones,  # indefinite, with a positive inverse diagonal in places
        np.zeros((5, 5)),
        -np.eye(3),
        np.diag([1.0, 0.0]),
    ):
        with pytest.raises(ValueError, match="singular"):
            precision.inverse_diagonal(matrix)
    for factor in (ones, np.zeros((3, 3)), ones + 1e-15 * np.eye(5)):
        with pytest.raises(ValueError, match="singular"):
            precision.inverse_diagonal(factor=factor)
    with pytest.raises(ValueError, match="not symmetric"):
        precision.inverse_diagonal(np.array([[1.0, 0.1], [0.0, 1.0]]))
    with pytest.raises(ValueError, match="square"):
        precision.inverse_diagonal(np.ones((2, 3)))
    with pytest.raises(ValueError, match="nan"):
        precision.inverse_diagonal(np.full((2, 2), np.nan))
    with pytest.raises(ValueError, match="exactly one"):
        precision.inverse_diagonal()
    with pytest.raises(ValueError, match="exactly one"):
        precision.inverse_diagonal(np.eye(2), factor=np.eye(2))


def test_only_square_matrix_without_other_entries_is_diagonal():
    assert precision.diagonal_of(np.diag([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert precision.diagonal_of(np.array([1.0, 2.0])).tolist() == [1.0, 2.0]
    for other in (np.ones((2, 2)), np.eye(2, 3), np.eye(3, 2), np.zeros((1, 2, 2))):
        assert precision.diagonal_of(other) is None
