"""Noise over agents by a diagonal and a polynomial of W: designs for networks of many agents.

    V = S g(W) Z,    R = S g(W)^2 S,    S = diag(s),  W symmetric,  Z white

No array [n, n] is needed, neither here nor in a run, where Z is gossiped deg(g) times.

The loss asks for the diagonal of R^-1 = S^-1 g(W)^-2 S^-1. Let p be a polynomial, p g^2 >= c > 0 on
an interval that holds the spectrum of W. Then p(W) / c - g(W)^-2 is positive semidefinite, and none
of its diagonal entries is negative:

    [R^-1]_ii  <=  [p(W)]_ii / (c s_i^2).

The diagonal of p(W) is computed exactly from powers of the sparse W, half its degree high: p
parametrises the precision. Nothing is sampled. The inequality in one variable is proved on a grid,
by a bound on second derivatives. So s_i^2 = [p(W)]_ii / (c b_i) keeps any bound b_i.

On the spectrum, with phi(W) = M the objective, the energy is about mean(p) mean(phi g^2), least at
p = g^-2 = sqrt(phi), which for one step is |x|. Polynomials of it are found by Newton's method: the
set p >= g^-2, g > 0 is convex.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float
from numpy.polynomial import Chebyshev, Polynomial, chebyshev
from scipy.sparse import csr_array, diags_array
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from dpjax import _validate
from dpjax._validate import fixed
from dpjax.mechanism import certificate, spatial, workload
from dpjax.mechanism.certificate import EPS, Factor, Vector
from dpjax.topology import mixing as mixing_
from dpjax.topology.mixing import HashableMatrix, Mixing, SquareMatrix

__all__ = ["PolynomialNoise", "design_polynomial"]

_Coefficients: TypeAlias = Float[np.ndarray, " m"]
_Precision: TypeAlias = Float[np.ndarray, " q"]
_Interval: TypeAlias = tuple[float, float]
_Map: TypeAlias = Callable[[np.ndarray], np.ndarray]
_DENSE = 512
"""Up to so many agents energies and bounds come from dense matrices."""
_ONE = np.ones(1, np.float32)
"""The polynomial 1."""
_PROBES = 32
_DRAWN = 2**20
_STEPS = 32
"""Least random vectors, their numbers together where there are more agents, and the steps of
Lanczos' iteration from each."""
_WORK = 2e9
"""Most multiplications for a power of W; hubs and dense matrices leave it at lower powers."""
_ROWS = 2**24
"""Numbers in a block of rows of a power of W, where it is dense."""
_CANCELLING = 2.0**12
"""Largest sum of |coefficients| over the least g: times 2^-24 it is what float32 loses of noise."""
_SHARES = (1e-3, 1e-2, 1e-1)
"""How much of the objective is spread over the interval, where W may have no eigenvalues."""


@dataclass(frozen=True, eq=False)
class PolynomialNoise:
    """Noise S g(W) Z over agents with its certificate.

    Guarantee: with W rounded to float32, no [R^-1]_ii of R = S g(W)^2 S exceeds the bound it was
    made for; `diagonal_bounds` proves it again from these arrays.

    Attributes:
        coefficients: [m + 1] float32 g in Chebyshev's basis, sum_k coefficients[k] T_k(W).
        scales: [n] float32 s.
        precision: [q + 1] p in powers of x, for the proof alone.
        value: tr(M R), the noise energy. Beyond 512 agents the mean over random vectors, plus
            four standard errors.
        lower_bound: No covariance under the same bound has less energy; beyond 512 agents up to
            four standard errors of such a mean.

    Example:
        >>> from dpjax.mechanism import polynomial
        >>> from dpjax.topology import graphs, mixing
        >>> W = mixing.metropolis_hastings(graphs.ring(100), sparse=True)
        >>> design = polynomial.design_polynomial(W, 1.0, degree=4)
        >>> design.degree, round(design.gap, 2)
        (4, 0.05)
    """

    coefficients: _Coefficients
    scales: Vector
    precision: _Precision
    value: float
    lower_bound: float

    def __post_init__(self) -> None:
        """Keep copies that nobody can change."""
        names = ("coefficients", "scales", "precision")
        _validate.assign(self, **{name: fixed(getattr(self, name)) for name in names})

    @property
    def degree(self) -> int:
        """Products with W in a round."""
        return len(self.coefficients) - 1

    @property
    def gap(self) -> float:
        """Relative excess over ``lower_bound``."""
        return certificate.relative_gap(self.value, self.lower_bound)


def design_polynomial(
    mixing: Mixing,
    precision_bound: spatial.Bound,
    degree: int = 6,
    *,
    step_sizes: workload.StepSizes = None,
) -> PolynomialNoise:
    """Return noise S g(W) Z of little energy tr(M S g(W)^2 S) with [R^-1]_ii <= b_i.

    M = W^2, or with step sizes eta_1 .. eta_T that of all models of T rounds,
    M = sum_{s<=t} eta_s^2 (W^(t-s+1))^2.

    Args:
        mixing: [n, n] W, dense or sparse, symmetric and doubly stochastic.
        precision_bound: b or [n] b_i, largest allowed [R^-1]_ii.
        degree: of g, at most: it is lowered until float32 noise is right to four digits.
        step_sizes: [T] eta_t; ones count all rounds alike. None is one step.

    Returns:
        The noise with its certificate.

    Raises:
        ValueError: for a schedule, a matrix that is not symmetric, or numbers out of range.

    Example:
        >>> from dpjax.mechanism import polynomial
        >>> from dpjax.topology import graphs, mixing
        >>> W = mixing.metropolis_hastings(graphs.ring(100), sparse=True)
        >>> [round(polynomial.design_polynomial(W, 1.0, degree=m).value, 1) for m in (1, 4, 8)]
        [24.9, 24.1, 23.4]
    """
    degree = _validate.integer("degree", degree, maximum=32)
    matrix = rounded(mixing_.check_mixing(mixing, stochastic=None))
    w = matrix.matrix
    n = w.shape[0]
    limits = spatial.bounds(precision_bound, n)
    steps = np.ones(1) if step_sizes is None else _validate.finite_array("step_sizes", step_sizes)
    # M = sum_k terms[-k] W^2k, whose values at u = x^2 are those of a polynomial.
    terms = np.cumsum(np.square(steps))

    energy = functools.partial(np.polyval, np.r_[terms, 0.0])
    # Few agents need more probes for the same error of the traces.
    count = _PROBES if n <= _DENSE else max(_PROBES, _DRAWN // n)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (n, count))
    nodes, weights = _quadrature(w.dot, signs, max(_STEPS, degree + 2))
    spectrum = (nodes.ravel(), weights.ravel(), energy, interval(w), _half(matrix))
    # A degree whose coefficients cancel in float32 leaves the constant alone: try the next one.
    for lowered in range(degree, 0, -1):
        coefficients, precision = _polynomials(*spectrum, lowered)
        if len(coefficients) > 1:
            break
    bounds = diagonal_bounds(matrix, coefficients, precision, np.ones(n))
    # Rounding to nearest takes less than half of the last factor.
    scales = np.sqrt(bounds / limits) * (1 + 2.0**-23)
    _validate.spread("noise", scales.min())
    _validate.spread("noise", scales.max())
    scales = scales.astype(np.float32)
    if n <= _DENSE:
        # Exact figures, where a dense matrix fits.
        root = workload.factor(mixing_.dense(mixing), step_sizes=step_sizes)
        value = float(np.square(root @ noise_map(matrix, coefficients, scales)).sum())
        scaled = root / np.sqrt(limits)
        lower, _ = certificate.lower_bound(np.square(scaled).sum(axis=0), factor=scaled)
    else:
        value, lower = _estimates(matrix, coefficients, scales, limits, terms, signs, energy)
    return PolynomialNoise(coefficients, scales, precision, value, lower)


def rounded(mixing: Mixing) -> HashableMatrix:
    """Return W with entries of float32, as a run has them, in a sparse matrix of float64.

    Raises:
        ValueError: unless it is one matrix, symmetric to the last bit, and doubly stochastic.
    """
    if mixing.ndim != 2:
        raise ValueError(
            f"mixing has shape {mixing.shape}; noise of polynomials needs one matrix [n, n]: give "
            "one, or noise.Whisper()"
        )
    matrix = csr_array(mixing, dtype=np.float32).astype(np.float64)
    matrix.sum_duplicates()
    unit = np.abs(matrix.sum(axis=1) - 1).max() < 1e-6
    if (matrix != matrix.T).nnz or matrix.data.min() < 0 or not unit:
        raise ValueError(
            "mixing is not symmetric and doubly stochastic, as noise of polynomials needs; give "
            "metropolis_hastings(graph), (W + W.T) / 2 of a doubly stochastic W, or noise.Whisper()"
        )
    # Its digest stands for it, so that nobody may change it.
    for part in (matrix.data, matrix.indices, matrix.indptr):
        part.flags.writeable = False
    return HashableMatrix(matrix)


def diagonal_bounds(
    matrix: HashableMatrix,
    coefficients: _Coefficients,
    precision: _Precision,
    scales: Vector,
) -> Vector:
    """Return upper bounds on [R^-1]_ii of R = S g(W)^2 S, all rounding here included.

    Args:
        matrix: W from `rounded`.
        coefficients: g.
        precision: p.
        scales: s.

    Returns:
        [n] bounds; infinite where p and g prove nothing.
    """
    certain = least_product(coefficients, precision, interval(matrix.matrix))
    # p g^2 may be below 0 somewhere, and then p bounds no inverse.
    if not certain > 0:
        return np.full(len(scales), np.inf)
    moments = _moments(matrix, max(1, len(precision) // 2))[:, : len(precision)]
    n = len(scales)
    # Moments are sums of products of numbers that are not negative: at most q (n + 4) roundings.
    off = (len(precision) + 1) * (n + 8) * EPS * (moments @ np.abs(precision))
    diagonal = moments @ precision + off
    return diagonal / (certain * np.square(scales, dtype=np.float64)) * (1 + 8 * EPS)


def interval(matrix: csr_array) -> _Interval:
    """Return an interval that holds the spectrum of a symmetric W >= 0, by Gershgorin's discs.

    It begins at -1/2 or below: on a short one, coefficients for [-1, 1] are large and cancel.
    """
    sums = matrix.sum(axis=1)
    largest = float(sums.max())
    margin = 4 * len(sums) * EPS * largest
    # The disc of row i has its centre at W_ii and the sum of its other entries as its radius.
    low = float((2 * matrix.diagonal() - sums).min())
    return min(low, -0.5) - margin, largest + margin


def least_product(
    coefficients: _Coefficients,
    precision: _Precision,
    interval: _Interval,
) -> float:
    """Return a lower bound on p g^2 over an interval; 0 where float32 runs lose too much of g.

    As a function of the angle, r = p g^2 is a trigonometric polynomial of degree d. Where r is
    least its slope is 0, and some node of N is at most pi / (2 N) away, from where r has fallen by
    at most half of that squared times |r''| <= d^2 |r - c|, for any constant c.

    Reference:
        Bernstein's inequality; Ehlich and Zeller (1964) for |r - c| by its values at the nodes.
    """
    d = len(precision) - 1 + 2 * (len(coefficients) - 1)
    count = 1024 * (d + 1)
    low, high = interval
    # Chebyshev's nodes, even in the angle.
    angles = (np.arange(count) + 0.5) * (math.pi / count)
    x = (low + high) / 2 + (high - low) / 2 * np.cos(angles)
    wide = coefficients.astype(np.float64)
    # Beyond [-1, 1] Chebyshev polynomials grow, and rounding with them.
    if max(-low, high) > 1 + 1e-6:
        return 0.0
    g = np.abs(chebyshev.chebval(x, wide))
    total = np.abs(wide).sum()
    # The coefficients cancel: float32 sums would lose the digits of g.
    if total > _CANCELLING * g.min():
        return 0.0
    # Clenshaw's and Horner's rules round by less, at |x| that exceeds 1 by rounding alone.
    g = g - 8 * (d + 2) ** 2 * EPS * total
    p = np.polyval(precision[::-1], x)
    p = p - 4 * (d + 2) * EPS * np.abs(precision).sum()
    values = np.maximum(p, 0.0) * np.square(np.maximum(g, 0.0)) * (1 - 4 * EPS)
    # |r - c| for the best c, everywhere by its values at the nodes.
    spread = (values.max() - values.min()) / 2 / math.cos(d * math.pi / (2 * count)) * 1.01
    return float(values.min() - (math.pi / (2 * count) * d) ** 2 / 2 * 1.01 * spread)


def noise_map(matrix: HashableMatrix, coefficients: _Coefficients, scales: Vector) -> SquareMatrix:
    """Return the map S g(W) of normals to noise."""
    return operator(matrix, coefficients, scales) @ np.eye(len(scales))


def operator(matrix: HashableMatrix, coefficients: _Coefficients, scales: Vector) -> LinearOperator:
    """Return S g(W) as what multiplies columns, without an array [n, n]."""
    gossiped = functools.partial(_applied, matrix.matrix, coefficients)
    # g(W) is symmetric.
    products = dict.fromkeys(("matvec", "rmatvec", "matmat", "rmatmat"), gossiped)
    spread = LinearOperator(matrix.matrix.shape, dtype=np.float64, **products)
    scaled = diags_array(scales.astype(np.float64))
    return aslinearoperator(scaled) @ spread


def _applied(matrix: csr_array, coefficients: _Coefficients, values: Factor) -> Factor:
    """g(W) X by Clenshaw's rule."""
    current = coefficients[-1] * values
    previous = 0 * values
    for k in range(len(coefficients) - 2, -1, -1):
        # T_1 follows from T_0 by one product, all others by twice a product less the one before.
        product = (1 + (k > 0)) * (matrix @ current)
        following = coefficients[k] * values + product - previous
        previous = current
        current = following
    return current


def _half(matrix: HashableMatrix) -> int:
    """The highest power of W, 3 at most, that takes no more than `_WORK` multiplications."""
    links = matrix.matrix.astype(bool).astype(np.float64)
    paths = links.sum(axis=1)
    for half in (1, 2):
        paths = links @ paths
        if min(paths.sum(), links.shape[0] * links.nnz) > _WORK:
            return half
    return 3


@functools.lru_cache(maxsize=4)
def _moments(matrix: HashableMatrix, half: int) -> SquareMatrix:
    """[W^k]_ii for k = 0 .. 2 half, from the rows of the first powers, some rows at a time."""
    w = matrix.matrix
    n = w.shape[0]
    moments = np.ones((n, 2 * half + 1))
    moments[:, 1] = w.diagonal()
    # Some rows at a time: the square of a sparse matrix is a dense one.
    size = max(1, _ROWS // n)
    for start in range(0, n, size):
        rows = slice(start, start + size)
        powers = [w[rows]]
        while len(powers) < half:
            powers.append(powers[-1] @ w)
        for k in range(2, 2 * half + 1):
            # [W^k]_ii = sum_j [W^a]_ij [W^b]_ij for a + b = k, as W is symmetric.
            left = powers[k // 2 - 1]
            right = powers[(k + 1) // 2 - 1]
            moments[rows, k] = left.multiply(right).sum(axis=1)
    return moments


def _polynomials(
    nodes: Vector,
    weights: Vector,
    energy: _Map,
    interval: _Interval,
    half: int,
    degree: int,
) -> tuple[_Coefficients, _Precision]:
    """The best float32 g and p >= g^-2 for several shares; constants are among them."""
    low, high = interval
    # Chebyshev points, where a polynomial of this degree cannot hide a peak.
    grid = np.cos(np.linspace(0, math.pi, 16 * (degree + 2 * half) + 1))
    grid_g = chebyshev.chebvander(grid, degree)
    grid_p = chebyshev.chebvander(grid, 2 * half)
    weights = weights / weights.sum()
    places = (2 * nodes - low - high) / (high - low)
    of_g = chebyshev.chebvander(places, degree)
    energies = weights * energy(nodes**2)
    energies = energies / energies.sum()
    # On the spectrum, mean(phi g^2) is g' Q g, and mean(p) is c' p.
    quadratic = (of_g.T * energies) @ of_g
    linear = weights @ chebyshev.chebvander(places, 2 * half)
    best = math.inf
    solution: tuple[_Coefficients, _Precision] = (_ONE, _ONE)
    for share in (math.inf, *_SHARES):
        # The share of all weight is independent noise, constant polynomials.
        if math.isinf(share):
            g = np.eye(degree + 1)[0]
            p = np.eye(2 * half + 1)[0]
        else:
            # The same means over the whole interval.
            even_quadratic = grid_g.T @ grid_g / len(grid)
            even_linear = grid_p.mean(axis=0)
            g, p = _newton(
                grid_g, grid_p, quadratic + share * even_quadratic, linear + share * even_linear
            )
        cosines = Chebyshev(g, interval).convert(domain=[-1, 1], kind=Chebyshev).coef
        cosines = cosines.astype(np.float32)
        monomials = Chebyshev(p, interval).convert(domain=[-1, 1], kind=Polynomial)
        powers = np.asarray(monomials.coef, np.float64)
        certain = least_product(cosines, powers, interval)
        # Energy at the scale that the certificate asks for.
        if certain <= 0:
            continue
        cost = (g @ quadratic @ g) * (linear @ p) / certain
        if cost < best:
            best = cost
            solution = (cosines, powers / certain)
    return solution


def _newton(
    of_g: Factor,
    of_p: Factor,
    quadratic: SquareMatrix,
    linear: _Precision,
) -> tuple[_Coefficients, _Precision]:
    """Minimise g' Q g + c' p subject to p >= g^-2 and g > 0 on a grid, by a logarithmic barrier."""
    m = of_g.shape[1]
    x = np.zeros(m + of_p.shape[1])
    ratio = math.sqrt(quadratic[0, 0] / linear[0])
    # A feasible start: constant g, and p a little above its g^-2.
    x[0] = ratio**-0.5
    x[m] = 1.3 * ratio
    hessian = np.zeros((len(x), len(x)))
    hessian[:m, :m] = 2 * quadratic

    def cost(x: np.ndarray) -> float:
        return x[:m] @ quadratic @ x[:m] + linear @ x[m:]

    def barrier(x: np.ndarray, rate: float) -> float:
        g = of_g @ x[:m]
        p = of_p @ x[m:]
        if not (g.min() > 0 and (p * g**2).min() > 1):
            return math.inf
        return rate * cost(x) - np.log(p - g**-2.0).sum()

    rate = 10 / cost(x)
    # Between the points of the grid nothing is asked, so that a cost below 0 is no optimum.
    while len(of_g) / rate > 1e-3 * cost(x) > 0:
        for _ in range(40):
            g = of_g @ x[:m]
            slack = of_p @ x[m:] - g**-2.0
            slopes = np.hstack([2 * g[:, None] ** -3.0 * of_g, of_p]) / slack[:, None]
            # Of the barrier, rate cost - sum log(p - g^-2).
            gradient = rate * np.r_[2 * quadratic @ x[:m], linear] - slopes.sum(axis=0)
            curved = rate * hessian + slopes.T @ slopes
            # g^-2 is convex: its curvature adds to that of the barrier.
            curvature = 6 * g**-4.0 / slack
            curved[:m, :m] += of_g.T @ (of_g * curvature[:, None])
            sizes = np.sqrt(np.diag(curved))
            # Scaled to a unit diagonal, which the ridge then bounds from below.
            scaled = curved / np.outer(sizes, sizes) + 1e-14 * np.eye(len(x))
            step = -np.linalg.solve(scaled, gradient / sizes) / sizes
            fall = -gradient @ step
            length = 1.0
            # Backtracking: the barrier is infinite outside the feasible set.
            current = barrier(x, rate)
            while barrier(x + length * step, rate) > current - 0.1 * length * fall:
                length /= 2
                if length < 1e-9:
                    break
            if fall < 1e-3 or length < 1e-9:
                break
            x = x + length * step
        rate *= 8
    return x[:m], x[m:]


def _estimates(
    matrix: HashableMatrix,
    coefficients: _Coefficients,
    scales: Vector,
    limits: Vector,
    terms: Vector,
    signs: SquareMatrix,
    energy: _Map,
) -> tuple[float, float]:
    """Value and lower bound by random signs z: means of z'Az are traces of A.

    Gauss and Radau's rules with a node at an end of the spectrum of W^2 bound z'Az from the safe
    side: from above for sums of powers, from below for square roots. The bound is
    tr(S)^2 / sum_i l_i, S^2 = A^1/2 M A^1/2, at a_i = l_i / b_i and l_i = M_ii / b_i. Its M has the
    first three powers of W^2 alone; the others would only raise it.
    """
    w = matrix.matrix
    squares = _moments(matrix, _half(matrix))[:, 2::2]
    few = terms[-squares.shape[1] :]
    # tr(M R) is the mean of z' R^1/2 M R^1/2 z, and S g(W) a root of R.
    drawn = operator(matrix, coefficients, scales) @ signs
    # A node above the spectrum makes Radau's rule an upper bound.
    top = interval(w)[1] ** 2 * (1 + 1e-9)
    steps = min(_STEPS, len(terms) + 1)
    nodes, weights = _quadrature(lambda v: w @ (w @ v), drawn, steps, node=top)
    values = (weights * energy(nodes)).sum(axis=1)
    multipliers = squares[:, : len(few)] @ few[::-1] / limits
    roots = np.sqrt(multipliers / limits)[:, None]

    # A^1/2 M A^1/2 v by Horner's rule in W^2.
    def apply(v: SquareMatrix) -> SquareMatrix:
        total = 0.0 * v
        for term in few:
            total = w @ (w @ (total + term * (roots * v)))
        return roots * total

    nodes, weights = _quadrature(apply, signs, _STEPS, node=-1e-12 * multipliers.max())
    traces = (weights * np.sqrt(np.maximum(nodes, 0.0))).sum(axis=1)
    lowest = max(0.0, float(traces.mean() - _error(traces)))
    lower = lowest**2 / float(multipliers.sum())
    return float(values.mean() + _error(values)), lower


def _error(sample: Vector) -> float:
    """Four standard errors of a mean."""
    return 4 * sample.std(ddof=1) / math.sqrt(len(sample))


def _quadrature(
    apply: _Map,
    start: SquareMatrix,
    steps: int,
    node: float | None = None,
) -> tuple[SquareMatrix, SquareMatrix]:
    """Nodes and weights with v' f(A) v = sum_k weights_k f(nodes_k) nearly, for each column v.

    Reference:
        Golub and Meurant (2010), Matrices, moments and quadrature, chapters 4 and 6.
    """
    sizes = np.linalg.norm(start, axis=0)
    columns = start.shape[1]
    tridiagonal = np.zeros((columns, steps, steps))
    previous = 0.0 * start
    current = start / sizes
    link = np.zeros(columns)
    for j in range(steps):
        after = apply(current) - link * previous
        tridiagonal[:, j, j] = (current * after).sum(axis=0)
        if j + 1 < steps:
            after -= tridiagonal[:, j, j] * current
            link = np.linalg.norm(after, axis=0)
            # A link of rounding alone ends the recursion: the space is used up.
            nonzero = link > 1e-10 * np.abs(tridiagonal[:, 0, 0])
            link = np.where(nonzero, link, 0.0)
            tridiagonal[:, j, j + 1] = link
            tridiagonal[:, j + 1, j] = link
            previous = current
            current = np.where(nonzero, after / np.where(nonzero, link, 1.0), 0.0)
    if node is not None:
        last = np.zeros((columns, steps - 1, 1))
        last[:, -1, 0] = 1.0
        inner = tridiagonal[:, :-1, :-1] - node * np.eye(steps - 1)
        # The last diagonal entry that makes `node` an eigenvalue.
        delta = np.linalg.solve(inner, last)[:, -1, 0]
        tridiagonal[:, -1, -1] = node + link**2 * delta
    nodes, vectors = np.linalg.eigh(tridiagonal)
    # Weights are squares of the eigenvectors' first entries.
    weights = np.square(vectors[:, 0, :]) * sizes[:, None] ** 2
    return nodes, weights
