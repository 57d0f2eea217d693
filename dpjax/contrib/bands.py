"""Banded Toeplitz strategies for thousands of rounds, and how far any strategy is from the best.

Guarantee: strategies have sensitivity 1 for the given participation, as in
`dpjax.mechanism.banded`; a plan audits whatever strategy it is given.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float

from dpjax._numerics import double_precision
from dpjax.mechanism import workload
from dpjax.mechanism.banded import MAX_STEPS, check_bands, stalled
from dpjax.mechanism.factorization import Device
from dpjax.mechanism.participation import Participation
from dpjax.mechanism.strategy import Strategy
from dpjax.mechanism.temporal import TemporalSolution, normalized, objective, solve
from dpjax.mechanism.workload import Gram
from dpjax.topology.mixing import DenseMixing

__all__ = ["certified", "toeplitz"]


def toeplitz(
    mixing: DenseMixing,
    participation: Participation,
    bands: int,
    *,
    gram: Gram | None = None,
    device: Device = None,
) -> Strategy:
    """Return the best banded Toeplitz strategy, its columns scaled to equal norms.

    `bands` numbers describe it; a search from the optimum for the maximal error of prefix sums. A
    step of it takes T^2 operations: 5,000 rounds take 20 seconds. `certified` has its gap.

    Args:
        mixing: [n, n] W, or a schedule (`workload.gram`); [[1.0]] is one trusted server.
        participation: when a record appears.
        bands: number of coefficients, 1 (a scaled identity) to the participation's separation.
        gram: [T, T] H of another workload than the mixing matrix's.
        device: as for `temporal.solve`.

    Returns:
        [T, T] C, lower triangular with a positive diagonal, of sensitivity 1.

    Raises:
        ValueError: for more bands than the separation, or a bad mixing matrix.

    Reference:
        McKenna 2024, "Scaling up the banded matrix factorization mechanism".

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import bands
        >>> from dpjax.mechanism.participation import Participation
        >>> bands.toeplitz(np.ones((1, 1)), Participation(8, 2, 4), bands=2).shape
        (8, 8)
    """
    from jax_privacy.matrix_factorization import optimization
    from jax_privacy.matrix_factorization import toeplitz as toeplitz_

    rounds = participation.rounds
    bands = check_bands(participation, bands)
    gram = workload.gram(mixing, rounds) if gram is None else gram
    gram = gram / np.trace(gram)  # the search is tuned to losses near 1
    with double_precision():
        # tr(H R R') = r' Q r for R the Toeplitz matrix of r: Q sums H along its diagonals' ends.
        sums = jax.device_put(workload.summed(gram[None, ::-1, ::-1]), device)
        late = jax.device_put(gram[rounds - bands + 1 :], device)
        lags = np.arange(rounds - bands + 1, rounds)[:, None] - np.arange(rounds)

        def loss(coefficients: Float[Array, " bands"]) -> Float[Array, ""]:
            # C^-1 = D R, D the norms of the columns, which are shorter in the last rounds.
            inverse = toeplitz_.inverse_coef(coefficients, rounds)
            squares = jnp.cumsum(coefficients**2)
            shortening = 1.0 - jnp.sqrt(squares[:-1][::-1] / squares[-1])
            rows = jnp.where(lags >= 0, inverse[lags], 0.0)
            spectrum = jnp.fft.rfft(rows, 2 * rounds) * jnp.fft.rfft(inverse, 2 * rounds)
            products = late * jnp.fft.irfft(spectrum, 2 * rounds)[:, :rounds]
            corner = shortening @ products[:, rounds - bands + 1 :] @ shortening
            total = inverse @ sums @ inverse - 2.0 * jnp.sum(shortening @ products) + corner
            return total * squares[-1]

        start = jnp.asarray(toeplitz_.optimal_max_error_strategy_coefs(bands), jnp.float64)
        start = jax.device_put(start, device)
        optimum = optimization.optimize(
            loss, start, max_optimizer_steps=MAX_STEPS, callback=stalled()
        )
        # The first column's sign is free in the search.
        optimum = np.asarray(optimum * jnp.sign(optimum[0]))
    column = np.concatenate([optimum, np.zeros(rounds - bands)])
    strategy = scipy.linalg.toeplitz(column, np.zeros(rounds))
    return normalized(strategy / np.linalg.norm(strategy, axis=0), participation)


def certified(
    strategy: Strategy,
    gram: Gram,
    participation: Participation,
    *,
    tolerance: float | None = None,
    device: Device = None,
) -> TemporalSolution:
    """Return any strategy, scaled to sensitivity 1, with the gap to the optimum over all.

    Lower bound, iterations and convergence are those of `temporal.solve`, which runs in every call:
    of several strategies, compare `temporal.objective` with one solution's ``lower_bound``.

    Args:
        strategy: [T, T] C, lower triangular, such as a banded or Toeplitz one.
        gram: [T, T] H.
        participation: when a record appears; T = k b, or k = 1.
        tolerance: as for `temporal.solve`, of the optimum.
        device: as for `temporal.solve`.

    Raises:
        ValueError: as `temporal.solve` and `temporal.objective`.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import bands
        >>> from dpjax.mechanism import temporal
        >>> from dpjax.mechanism.participation import Participation
        >>> participation = Participation(8, 2, 4)
        >>> banded = bands.toeplitz(np.ones((1, 1)), participation, bands=2)
        >>> gram = temporal.workload_gram(np.ones((1, 1)), 8)
        >>> round(bands.certified(banded, gram, participation).gap, 2)
        0.31
    """
    value = objective(strategy, gram, participation)
    best = solve(gram, participation, tolerance=tolerance, device=device)
    scaled = normalized(np.asarray(strategy, dtype=np.float64), participation)
    return best._replace(strategy=scaled, value=value)
