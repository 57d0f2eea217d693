"""The accelerated fixed point over the multipliers, alone or in blocks, in float64.

Of ``max tr((V^1/2 M V^1/2)^1/2)^2 / sum_c l_c`` over V >= 0 that is block diagonal, the block of
class c with the multiplier l_c along its diagonal: see `mechanism.temporal`. Classes of one column
(k = 1) are the problem with diag(P) <= 1 of `mechanism.factorization`, where l <- l P_ii.
"""

import contextlib
from typing import NamedTuple

import numpy as np
import scipy.linalg
from jaxtyping import Float

__all__ = ["LARGEST_SVD"]

Blocks = Float[np.ndarray, "b k k"]

LARGEST_SVD = 512
"""Columns up to which single agents' designs take singular values."""
_EPS = float(np.finfo(np.float64).eps)
_WINDOW = 8
_JUMP = 6.0  # an accelerated step longer than this in any logarithm is not trusted
_FALL = 1e-12  # a relative fall of the dual below this is rounding
_PATIENCE = 60  # iterations without progress, after which rounding has the last word
_FLOOR = 1e-13  # least eigenvalue of V kept, relative to the largest
_LEAST_LEVEL = 1e-8  # of a class's multiplier, relative to the largest


class Point(NamedTuple):
    """The map at one V = exp(X): its blocks, the next X without acceleration, and the bounds."""

    half: Blocks
    logarithm: Blocks
    plain: Blocks
    precision: Float[np.ndarray, "n n"]
    dual: float
    gap: float


def climb(
    factor: Float[np.ndarray, "m n"],
    k: int,
    tolerance: float,
    most: int,
    fine: bool = False,
    start: Blocks | None = None,
) -> tuple[Point, int]:
    """Return the point of least gap (infinite where none was feasible) and the evaluations spent.

    Anderson's acceleration in log V; a step that lowers the dual is taken back.

    Args:
        factor: [m, n] F, m at most n, columns class by class.
        k: Columns of a class.
        tolerance: Relative gap at which to stop; 0 spends exactly ``most`` evaluations.
        most: Most evaluations.
        fine: Take singular values, which resolve twice the digits of eigenvalues at three times
            the cost: weak directions matter on small dense graphs, time on large ones.
        start: log V; by default from the norms of the columns.
    """
    norms = np.sqrt((factor**2).sum(axis=0).reshape(-1, k).sum(axis=1))
    levels = np.log(np.maximum(norms, 1e-8 * norms.max()) / norms.max())
    point = levels[:, None, None] * np.eye(k) if start is None else start
    last = best = None
    changes: list[tuple[np.ndarray, np.ndarray]] = []
    since = count = 0
    highest, gap = 0.0, np.inf
    while count < most and (tolerance <= 0 or (since < _PATIENCE and gap > tolerance)):
        here = _evaluate(factor, point, fine)
        count += 1
        if last is not None and not here.dual >= last.dual * (1.0 - _FALL) and changes:
            point, changes, last = last.plain, [], None
            since += 1
            continue
        since += 1
        # The dual may climb for long while the gap, of a P that is not feasible yet, does not.
        if here.dual > highest * (1.0 + tolerance):
            highest, since = here.dual, 0
        if best is None or here.gap < best.gap or not np.isfinite(best.gap):
            best, gap, since = here, here.gap, 0
        step = here.plain - here.logarithm
        if last is not None:
            moved = here.logarithm - last.logarithm
            changes = [*changes[1 - _WINDOW :], (moved, step - (last.plain - last.logarithm))]
        last, point = here, here.plain
        if changes:
            turned = np.stack([change.ravel() for _, change in changes])
            weights = np.linalg.lstsq(turned.T, step.ravel(), rcond=1e-12)[0]
            correction = sum(w * (x + f) for w, (x, f) in zip(weights, changes, strict=True))
            accelerated = here.plain - correction
            if np.abs(accelerated - here.logarithm).max() <= _JUMP:
                point = (accelerated + np.swapaxes(accelerated, 1, 2)) / 2.0
            else:
                changes = []
    assert best is not None  # the first evaluation always is
    return best, count


def _evaluate(factor: Float[np.ndarray, "m n"], point: Blocks, fine: bool) -> Point:
    (m, n), (b, k, _) = factor.shape, point.shape
    blocks = _constant_diagonal(_apply(np.exp, point))
    levels = blocks[:, 0, 0]
    half = _apply(np.sqrt, blocks)
    weighted = np.matmul(factor.reshape(m, b, k).transpose(1, 0, 2), half)
    weighted = weighted.transpose(1, 0, 2).reshape(m, n)
    if fine:
        left, roots, _ = np.linalg.svd(weighted, full_matrices=False)
        roots = np.maximum(roots, n * _EPS * roots[0])
    else:
        values, left = np.linalg.eigh(weighted @ weighted.T)
        roots = np.sqrt(np.maximum(values, n * _EPS * values[-1]))
    # P = F' U e^-1 U' F for F V^1/2 = U e ..., so that P V P = F'F.
    rotated = (left.T @ factor) / np.sqrt(roots)[:, None]
    precision = rotated.T @ rotated
    # Columns of zeros keep a multiplier, too.
    largest = precision.diagonal().max()
    np.fill_diagonal(precision, np.maximum(precision.diagonal(), 1e-30 * largest))
    grid = precision.reshape(b, k, b, k)
    own = grid[range(b), :, range(b), :].copy()
    diagonal = np.einsum("cii->ci", own)
    sums = diagonal.sum(axis=1)
    dual = float(roots.sum() ** 2 / levels.sum())

    # The next V: V^1/2 P V^1/2 in the scale where P has a unit diagonal, its diagonal made even.
    scale = np.sqrt(diagonal)
    outer = scale[:, :, None] * scale[:, None, :]
    middle = _apply(np.sqrt, blocks * outer)
    moved = _constant_diagonal(middle @ (own / outer) @ middle / outer)
    target = levels * sums
    target = np.maximum(target, _LEAST_LEVEL * target.max())
    moved *= (target * levels.sum() / (target.sum() * moved[:, 0, 0]))[:, None, None]

    # Feasible: nothing between the columns of a class, and sum 1 along its diagonal.
    for c in range(b):
        grid[c, :, c, :] = np.diag(diagonal[c])
    shrink = np.repeat(1.0 / np.sqrt(sums), k)
    precision *= shrink[:, None] * shrink
    gap = np.inf
    if k == 1:  # P may be singular. What is at the floor was raised, and costs nothing.
        slack = (levels <= 1.2 * _LEAST_LEVEL * levels.max()) & (sums < 1.0)
        weights = np.where(slack, 0.0, levels)
        gap = float(sums.max() * weights.sum() / (weights @ sums)) - 1.0
    else:
        with contextlib.suppress(np.linalg.LinAlgError):
            lower = np.linalg.cholesky(precision)
            whitened = scipy.linalg.solve_triangular(lower, factor.T, lower=True)
            gap = float(np.sum(whitened**2)) / dual - 1.0
    return Point(half, _apply(np.log, blocks), _apply(np.log, moved), precision, dual, gap)


def _apply(function: np.ufunc, blocks: Blocks) -> Blocks:
    """Return the matrix function of each symmetric block; roots and logarithms are floored."""
    values, vectors = np.linalg.eigh((blocks + np.swapaxes(blocks, 1, 2)) / 2.0)
    if function is not np.exp:
        values = np.maximum(values, _FLOOR * values[:, -1:])
    return (vectors * function(values)[:, None, :]) @ np.swapaxes(vectors, 1, 2)


def _constant_diagonal(blocks: Blocks) -> Blocks:
    """Return D^-1/2 V D^-1/2 times the mean of D, D the diagonal of each block."""
    diagonal = np.einsum("cii->ci", blocks)
    scale = np.sqrt(diagonal.mean(axis=1, keepdims=True) / diagonal)
    return blocks * scale[:, :, None] * scale[:, None, :]
