"""Banded strategies: noise that a training loop makes from its last few rounds alone.

C^-1 z is computed by a recursion over the last `bands` - 1 outputs, so a run holds that many
noise arrays instead of T. With at most b bands no two rounds of a pattern overlap in C'C.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpjax import _validate
from dpjax.mechanism import workload
from dpjax.mechanism.epochs import normalized
from dpjax.mechanism.factorization import factor_of
from dpjax.mechanism.participation import Participation
from dpjax.mechanism.x64 import double_precision

__all__: list[str] = []

_STALL = 1e-9  # relative decrease ...
_PATIENCE = 10  # ... over this many steps, below which the search ends
_MOST = 2000


def banded(
    mixing: Float[np.ndarray, "*p n n"],
    participation: Participation,
    bands: int,
    *,
    equal: bool = False,
) -> Float[np.ndarray, "t t"]:
    """Return the best strategy for MAFALDA's objective with C_st = 0 where s - t >= bands.

    jax_privacy's convex search over C'C. Where T = k b (or k = 1) columns may differ in norm;
    for other participations, or where asked for, they are held equal.

    Args:
        mixing: [n, n] W, or a schedule (`workload.gram`); [[1.0]] is one trusted server.
        participation: when a record appears.
        bands: number of diagonals, 1 (a scaled identity) to the participation's separation.
        equal: whether all columns have one norm: the largest one counts where batches are sampled.

    Returns:
        [T, T] C, lower triangular with a positive diagonal, of sensitivity 1.

    Raises:
        ValueError: for more bands than the separation, or a bad mixing matrix.

    Reference:
        Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization".
    """
    from jax_privacy.matrix_factorization import dense

    rounds, k = participation.rounds, participation.epochs
    bands = _bands(participation, bands)
    root = _scaled_root(mixing, participation)
    whole = not equal and (k == 1 or rounds == k * participation.separation)
    with double_precision():
        optimum = dense.optimize(
            rounds,
            epochs=k if whole else 1,
            bands=bands,
            equal_norm=not whole,
            A=jnp.asarray(root),
            max_optimizer_steps=_MOST,
            callback=_stalled(),
        )
        strategy = np.array(optimum, dtype=np.float64)
    # Cholesky leaves rounding outside the bands, which would couple the rounds of a pattern.
    return normalized(np.tril(np.triu(strategy, 1 - bands)), participation)


def toeplitz(
    mixing: Float[np.ndarray, "*p n n"], participation: Participation, bands: int
) -> Float[np.ndarray, "t t"]:
    """Return the best banded Toeplitz strategy, its columns scaled to equal norms.

    `bands` numbers describe it; a search from the optimum for the maximal error of prefix sums.

    Args:
        mixing: [n, n] W, or a schedule (`workload.gram`); [[1.0]] is one trusted server.
        participation: when a record appears.
        bands: number of coefficients, 1 (a scaled identity) to the participation's separation.

    Returns:
        [T, T] C, lower triangular with a positive diagonal, of sensitivity 1.

    Raises:
        ValueError: for more bands than the separation, or a bad mixing matrix.

    Reference:
        McKenna 2024, "Scaling up the banded matrix factorization mechanism".
    """
    from jax_privacy.matrix_factorization import banded as banded_
    from jax_privacy.matrix_factorization import optimization
    from jax_privacy.matrix_factorization import toeplitz as toeplitz_

    rounds, bands = participation.rounds, _bands(participation, bands)
    root = _scaled_root(mixing, participation)

    def strategy(coefficients: Float[Array, " bands"]) -> Float[Array, "t t"]:
        whole = banded_.ColumnNormalizedBanded.from_banded_toeplitz(rounds, coefficients)
        return whole.materialize()

    with double_precision():
        workload_root = jnp.asarray(root)

        def loss(coefficients: Float[Array, " bands"]) -> Float[Array, ""]:
            transposed = strategy(coefficients).T
            solved = jax.scipy.linalg.solve_triangular(transposed, workload_root.T, lower=False)
            return jnp.sum(solved**2)

        start = jnp.asarray(toeplitz_.optimal_max_error_strategy_coefs(bands), jnp.float64)
        optimum = optimization.optimize(loss, start, max_optimizer_steps=_MOST, callback=_stalled())
        # The first column's sign is free in the search.
        result = np.array(strategy(optimum * jnp.sign(optimum[0])), dtype=np.float64)
    return normalized(result, participation)


def _bands(participation: Participation, bands: int) -> int:
    bands = _validate.integer("bands", bands)
    limit = participation.rounds if participation.epochs == 1 else participation.separation
    if bands > limit:
        raise ValueError(
            f"bands is {bands}; give at most {limit}, the rounds between two appearances"
        )
    return bands


def _scaled_root(
    mixing: Float[np.ndarray, "*p n n"], participation: Participation
) -> Float[np.ndarray, "t t"]:
    """Return F, F'F = H up to a factor: the search is tuned to losses near 1."""
    gram = workload.gram(mixing, participation.rounds)
    return factor_of(gram / np.trace(gram))


def _stalled() -> Callable[[Any], bool]:
    """Return a callback that ends a search whose loss no longer falls."""
    losses: list[float] = []

    def callback(step: Any) -> bool:
        losses.append(float(step.loss))
        if len(losses) <= _PATIENCE:
            return False
        return not losses[-1] < min(losses[:-_PATIENCE]) * (1.0 - _STALL)

    return callback
