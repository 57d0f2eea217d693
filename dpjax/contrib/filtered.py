"""Filter and noise over rounds chosen together, for gradients of a known autocorrelation.

Noise C^-1 z of a strategy C and a causal filter F are both fixed linear maps over rounds. Of a
gradient g with covariance S over rounds, independent of the noise, the filter makes
F (g + C^-1 z), and the weighted square error over all rounds is

    J(F, C) = tr(H (F - I) S (F - I)') + v sens(C)^2 tr(H F (C'C)^-1 F')

v the noise's variance at sensitivity 1, H the weight: I where every round's step shall be near its
gradient; where the models shall be, which are sums of steps, `temporal.workload_gram`, of one agent
or a network. For a fixed C the best causal F is the Wiener filter, two triangular solves; for a
fixed F the best C is the matrix factorization of the workload W F, W'W = H. In F and P = C'C
together J is convex (the last term is a matrix fraction), and so is what a sensitivity of 1 allows
P to be: a dual bound says how far the alternation came. Where noise is large, the optimum pools
early rounds or drops some, which a C with an inverse can approach only: there it stops up to some
tenths of a percent short in small cases, and the bound is loose.

Guarantee: strategies are those of `dpjax.mechanism.temporal`, of sensitivity 1 for the
participation given; a filter is post-processing. Where the covariance of gradients was measured
without privacy, it is data, and no guarantee covers the choice.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float, Int
from optax import GradientTransformation, Params, Updates

from dpjax import _validate
from dpjax.contrib.bands import toeplitz
from dpjax.mechanism import strategy as strategy_
from dpjax.mechanism import temporal
from dpjax.mechanism.participation import Participation
from dpjax.transforms import rounds

__all__ = ["JointSolution", "by_matrix", "covariance", "filtered_error", "solve", "wiener"]

_Square = Float[np.ndarray, "t t"]

# Of the factorization's map, a half-step: the bound holds for whatever comes out.
_EVALUATIONS = 50


class JointSolution(NamedTuple):
    """A filter and a strategy, with the certificate of how good they are together.

    Attributes:
        filter: [T, T] F, lower triangular.
        strategy: [T, T] C, lower triangular with a positive diagonal, of sensitivity 1.
        errors: J / T after every half-step, the filter's first; it never rises.
        lower_bound: No causal filter and no strategy of sensitivity 1 reach less, rounding aside.
    """

    filter: _Square
    strategy: _Square
    errors: tuple[float, ...]
    lower_bound: float

    @property
    def error(self) -> float:
        """Weighted mean square error a round and coordinate, J / T."""
        return self.errors[-1]

    @property
    def gap(self) -> float:
        """Relative gap, error / lower_bound - 1: at most what is lost."""
        return self.error / self.lower_bound - 1.0 if self.lower_bound > 0 else np.inf


def covariance(lags: Float[np.ndarray, " k"], rounds: int) -> _Square:
    """Return the covariance over rounds of a stationary gradient.

    Args:
        lags: Autocovariances r_0, r_1, ..; 0 beyond. ``p * rho ** np.arange(T)`` is AR(1).
        rounds: T.

    Returns:
        [T, T] Toeplitz matrix.

    Example:
        >>> from dpjax.contrib import filtered
        >>> filtered.covariance([1.0, 0.5], 3).tolist()
        [[1.0, 0.5, 0.0], [0.5, 1.0, 0.5], [0.0, 0.5, 1.0]]
    """
    values = np.asarray(lags, np.float64)
    missing = max(0, rounds - len(values))
    return scipy.linalg.toeplitz(np.pad(values[:rounds], (0, missing)))


def filtered_error(
    filter: _Square,
    strategy: _Square,
    signal: _Square,
    variance: float,
    participation: Participation,
    *,
    gram: _Square | None = None,
) -> float:
    """Return J / T of any filter and strategy, of whatever scale the strategy is.

    Args:
        filter: [T, T] F; the identity is none.
        strategy: [T, T] C; the identity is white noise.
        signal: [T, T] S, covariance of a coordinate's gradients over rounds.
        variance: v, variance of the noise in a coordinate at sensitivity 1, (sigma C / B)^2.
        participation: When a record appears, for sens(C).
        gram: [T, T] H; None is I.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import filtered
        >>> from dpjax.mechanism.participation import Participation
        >>> pattern = Participation(2, 1, 2)
        >>> round(filtered.filtered_error(np.eye(2), np.eye(2), np.eye(2), 0.5, pattern), 3)
        0.5
    """
    gram = np.eye(len(signal)) if gram is None else gram
    added = temporal.objective(strategy, filter.T @ gram @ filter, participation)
    missing = filter - np.eye(len(signal))
    lost = float(np.sum((gram @ missing @ signal) * missing))
    return (lost + variance * added) / len(signal)


def wiener(signal: _Square, noise: _Square, *, gram: _Square | None = None) -> _Square:
    """Return the causal filter of least J for gradients and noise of these covariances.

    F = W^-1 tril(W S K^-T) K^-1, where K K' = S + N and W is the lower triangular root of H: with
    K^-1 the filter's input becomes white, and of the best estimate from all rounds it keeps the
    part of those that are over. For an AR(1) signal in white noise and H = I it is the Kalman
    filter (`dpjax.transforms.lowpass`).

    Args:
        signal: [T, T] S.
        noise: [T, T] N, covariance of a coordinate's noise over rounds, ``v (C'C)^-1``.
        gram: [T, T] H, positive definite; None is I.

    Returns:
        [T, T] F, lower triangular.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import filtered
        >>> filtered.wiener(np.eye(2), np.eye(2)).round(3).tolist()
        [[0.5, 0.0], [0.0, 0.5]]
    """
    root = np.linalg.cholesky(signal + (noise + noise.T) / 2)
    weight = None if gram is None else _root(gram)
    weighted = signal if weight is None else weight @ signal
    projected = np.tril(_over(weighted, root))
    if weight is not None:
        projected = scipy.linalg.solve_triangular(weight, projected, lower=True)
    return np.tril(scipy.linalg.solve_triangular(root, projected.T, lower=True, trans="T").T)


def solve(
    signal: _Square,
    variance: float,
    participation: Participation,
    *,
    gram: _Square | None = None,
    bands: int | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 60,
) -> JointSolution:
    """Choose filter and strategy together.

    Alternates between `wiener` and `temporal.solve`, from white noise, until the bound is within
    the tolerance or the error falls no more. The first half-step is a filter alone, with white
    noise; `filtered_error` with the identity in place of the filter tells what a strategy alone
    reaches. With ``bands`` strategies are those of `dpjax.contrib.bands.toeplitz`, amplified by
    sampled batches; the bound is over all.

    Args:
        signal: [T, T] S, positive definite; `covariance` of a list of lags.
        variance: v, variance of the noise in a coordinate at sensitivity 1.
        participation: When a record appears; T = k b, or k = 1.
        gram: [T, T] H, positive definite; None is I.
        bands: Diagonals of a Toeplitz strategy; None is any strategy.
        tolerance: Relative gap at which to stop; a hundredth of it is the least fall of the error.
        max_iterations: Most rounds of the alternation.

    Returns:
        The pair of least error that was found, and its certificate.

    Example:
        >>> from dpjax.contrib import filtered
        >>> from dpjax.mechanism.participation import Participation
        >>> signal = filtered.covariance([1.0, 0.5], 4)
        >>> filtered.solve(signal, 1.0, Participation(4, 1, 4)).gap < 0.01
        True
    """
    rounds = len(signal)
    gram = np.eye(rounds) if gram is None else gram
    strategy = np.eye(rounds) / np.sqrt(participation.epochs)
    errors: list[float] = []
    bound = 0.0
    for _ in range(max_iterations):
        inverse = strategy_.inverse_of(strategy)
        matrix = wiener(signal, variance * inverse @ inverse.T, gram=gram)
        errors.append(filtered_error(matrix, strategy, signal, variance, participation, gram=gram))
        workload = matrix.T @ gram @ matrix
        bound = max(bound, _bound(matrix, strategy, signal, gram, variance, participation))
        if bands is None:
            candidate = temporal.solve(
                workload, participation, tolerance=tolerance / 100, max_iterations=_EVALUATIONS
            ).strategy
        else:
            candidate = toeplitz(np.eye(1), participation, bands, gram=workload)
        value = filtered_error(matrix, candidate, signal, variance, participation, gram=gram)
        bound = max(bound, _bound(matrix, candidate, signal, gram, variance, participation))
        if not value < errors[-1]:
            break
        before = errors[-1]
        strategy = candidate
        errors.append(value)
        if value <= bound * (1 + tolerance) or value > before * (1 - tolerance / 100):
            break
    return JointSolution(matrix, strategy, tuple(map(float, errors)), bound)


def _bound(
    filter: _Square,
    strategy: _Square,
    signal: _Square,
    gram: _Square,
    variance: float,
    participation: Participation,
) -> float:
    """A lower bound on J / T over all causal filters and all strategies of sensitivity 1.

    J is convex in F and P together, so that with Z = W F P^-1 of any pair and any diagonal D, which
    has one value for all rounds of a class (those in which one record takes part),

        tr(F'HF P^-1) >= 2 <Z D, W F> - tr(D Z'Z D P) >= 2 <Z D, W F> - sum_c d_c^2 l_c

    for every P of sensitivity 1, where l_c is the largest diagonal entry of Z'Z in the class and
    what Z'Z has between classes, nothing at an optimum, is bounded by its largest eigenvalue. With
    the lost signal the right-hand side is a parabola in F, whose least value over lower triangular
    F is a parabola in d. At the optimum the bound is J.
    """
    rounds = participation.rounds
    separation = participation.separation
    if participation.epochs == 1:
        separation = rounds
    weight = _root(gram)
    inverse = strategy_.inverse_of(strategy)
    z = weight @ filter @ inverse @ inverse.T
    multipliers = z.T @ z
    turn = np.arange(rounds) % separation
    between = np.where(turn[:, None] == turn, 0.0, multipliers)
    spill = max(float(np.linalg.eigvalsh(between)[-1]), 0.0)
    diagonal = multipliers.diagonal()
    largest = [diagonal[turn == c].max() for c in range(separation)]
    levels = np.array(largest) + spill
    # Each column of Z D L^-T, with L L' = S, is a sum over rounds; its part below is what counts.
    whitening = scipy.linalg.solve_triangular(
        np.linalg.cholesky(signal), np.eye(rounds), lower=True
    )
    gathered = np.zeros((separation, separation))
    for row in range(rounds):
        parts = whitening[: row + 1] * z[row]
        columns = [parts[:, turn == c].sum(axis=1) for c in range(separation)]
        summed = np.stack(columns, axis=1)
        gathered += summed.T @ summed
    products = np.sum(weight * z, axis=0)
    sums = np.array([products[turn == c].sum() for c in range(separation)])
    system = variance * gathered + np.diag(levels)
    return variance * float(sums @ np.linalg.solve(system, sums)) / rounds


def _over(matrix: _Square, root: _Square) -> _Square:
    """M K^-T for a lower triangular K."""
    return scipy.linalg.solve_triangular(root, matrix.T, lower=True).T


def _root(gram: _Square) -> _Square:
    """W with W'W = H, lower triangular, so that W F is causal where F is."""
    return temporal.strategy_of(gram)


class _MatrixState(NamedTuple):
    """The state of a matrix filter: a copy of the model for every round of its memory.

    Attributes:
        past: Leaves [width, ...] of inputs, that of round t at t mod width.
        rounds: Rounds done.
    """

    past: Updates
    rounds: Int[Array, ""]


def by_matrix(matrix: _Square) -> GradientTransformation:
    """Apply a causal filter over rounds that is given as a matrix, m_t = sum_{s<=t} F_ts y_s.

    `solve` gives such filters, which change by round. Memory is one copy
    of the model for each round that F reaches back: cut F to a band where that is too much, and
    compute the cost by `filtered_error`.

    Args:
        matrix: [T, T] F, lower triangular. Beyond T rounds the last row is used.

    Returns:
        The transformation.

    Raises:
        ValueError: For another matrix.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.contrib.filtered import by_matrix
        >>> link = by_matrix([[1.0, 0.0], [0.5, 0.5]])
        >>> first, state = link.update(jnp.array([4.0]), link.init(jnp.zeros(1)))
        >>> link.update(jnp.array([2.0]), state)[0].tolist()
        [3.0]
    """
    square = _validate.square("matrix", matrix)
    if not strategy_.is_triangular(square):
        raise ValueError("matrix is not lower triangular; a filter sees no round before it is over")
    # This is the recursion of noise over rounds, with inputs in place of normals.
    bands = strategy_.bands(square) if square.any() else np.zeros((len(square), 0))
    route = rounds.Route("moving", np.diag(square), bands)

    def init(params: Params) -> _MatrixState:
        past = jax.tree.map(lambda leaf: route.start(leaf.shape, leaf.dtype)[0], params)
        return _MatrixState(past, jnp.int32(0))

    def update(
        updates: Updates, state: _MatrixState, params: Params | None = None
    ) -> tuple[Updates, _MatrixState]:
        def step(value: Array, past: Array) -> tuple[Array, tuple[Array, ...]]:
            return route.step(lambda _: value, (past,), state.rounds)

        inputs, structure = jax.tree.flatten(updates)
        filtered = []
        past: list[Array] = []
        for value, old in zip(inputs, jax.tree.leaves(state.past), strict=True):
            output, buffers = step(value, old)
            filtered.append(output)
            past += buffers
        after = _MatrixState(jax.tree.unflatten(structure, past), state.rounds + 1)
        return jax.tree.unflatten(structure, filtered), after

    return GradientTransformation(init, update)
