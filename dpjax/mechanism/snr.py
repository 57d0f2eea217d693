"""How much of a gradient a filter keeps over the noise that it lets through, and the best filters.

For the autocorrelation c_0 = 1/2, c_1, .. of gradients and the impulse response kappa of a filter,
the normalised signal-to-noise ratio of T rounds is

    SNR = sum_t sum_{k<=t} c_k kappa_k / sum_t sum_{k<=t} kappa_k^2          1/2 without a filter

It says nothing of how far a longer filter lets the model run behind: it grows with the number of
taps without bound, so that an optimum exists at a fixed order only. Everything is float64.

Reference:
    Zhang et al., DOPPLER: Differentially Private Optimizers with Low-pass Filter for Privacy Noise
    Reduction, (4) to (7), Theorems 2 and 3.
"""

import numpy as np

from dpjax import _validate
from dpjax.mechanism.filters import Coefficients, Filter, checked, impulse_response

__all__ = [
    "convergence_bound",
    "convergence_rate",
    "normalised",
    "optimal_fir",
    "optimal_recursive",
    "proportional_fir",
]

_ROUNDING = 1e-12


def _autocorrelation(value: Coefficients) -> np.ndarray:
    """Check c_0, c_1, .. as numbers with c_0 above 0."""
    c = _validate.finite_array("autocorrelation", np.asarray(value, float), ndim=1)
    if c.size == 0 or c[0] <= 0:
        raise ValueError(
            f"autocorrelation is {_validate.shown(value)}; give c_0 = 1/2 and then c_1, c_2, ..."
        )
    return c


def _padded(c: np.ndarray, rounds: int) -> np.ndarray:
    """The first rounds of an autocorrelation, 0 beyond what is given."""
    return np.pad(c[:rounds], (0, max(0, rounds - len(c))))


def normalised(
    b: Coefficients,
    a: Coefficients,
    autocorrelation: Coefficients,
    rounds: int | None = None,
) -> float:
    """Return the normalised signal-to-noise ratio of a filter.

    Args:
        b: b_0 .. b_q.
        a: a_1 .. a_p, without the leading 1.
        autocorrelation: c_0 (1/2), c_1, ..; 0 beyond those given.
        rounds: T; None is the limit of many rounds.

    Returns:
        SNR; the noise of the bound on convergence is 1/(2 SNR) times that without a filter.

    Raises:
        ValueError: For an autocorrelation that does not begin above 0, or a filter that
            `dpjax.mechanism.filters.checked` refuses.
    """
    c = _autocorrelation(autocorrelation)
    made = checked(b, a)
    if rounds is None:
        kappa = impulse_response(*made, max(len(c), 100_000 if made.a else len(made.b)))
        weights = np.ones(len(kappa))
    else:
        kappa = impulse_response(*made, rounds)
        weights = np.arange(rounds, 0, -1.0)
    signal_kept = float(weights @ (_padded(c, len(kappa)) * kappa))
    return signal_kept / float(weights @ kappa**2)


def proportional_fir(autocorrelation: Coefficients) -> Filter:
    """Return the paper's taps, b_k = c_k / sum c, said to maximise (7), which they do not.

    Args:
        autocorrelation: c_0 .. c_q, one for each tap.

    Raises:
        ValueError: Where they sum to 0 or less, or make a filter that `checked` refuses.
    """
    c = _autocorrelation(autocorrelation)
    if c.sum() <= 0:
        raise ValueError(f"autocorrelation sums to {c.sum():.3g}; give one that sums to above 0")
    return checked(tuple(c / c.sum()))


def optimal_fir(autocorrelation: Coefficients) -> Filter:
    """Return the taps that maximise the limit of the ratio under sum b = 1.

    b = (c + rms(c)) / (sum c + n rms(c)) over n taps, at ratio (sum c + sqrt(n sum c^2)) / 2: with
    the constraint written into it the ratio is (c'b)(1'b) / b'b, a Rayleigh quotient of rank two.

    Args:
        autocorrelation: c_0 .. c_q, one for each tap.

    Raises:
        ValueError: For an autocorrelation that does not begin above 0.
    """
    c = _autocorrelation(autocorrelation)
    rms = float(np.sqrt(np.mean(c**2)))
    raised = c + rms
    return checked(tuple(raised / raised.sum()))


def optimal_recursive(
    autocorrelation: Coefficients, q: int, p: int, *, radius: float = 0.99
) -> Filter:
    """Search for the recursion of fixed order with the largest limit of the ratio.

    For given poles the best b has a closed form, as `optimal_fir`; the poles are searched through
    reflection coefficients. Where the autocorrelation is positive the best poles lie on the circle
    that they may not leave: the ratio asks for ever longer averages.

    Args:
        autocorrelation: c_0, c_1, ..; 0 beyond those given.
        q: Highest lag of b.
        p: Highest lag of a, 1 or 2.
        radius: Largest modulus of a pole, below 1: about 1 / (1 - radius) rounds are averaged.

    Returns:
        The best found, of several starts; never below the best finite response of q + 1 taps.

    Raises:
        ValueError: For an autocorrelation that does not begin above 0, other orders, or a radius
            outside (0, 1).
    """
    from scipy import optimize

    radius = _validate.probability("radius", radius)
    c = _autocorrelation(autocorrelation)
    q = _validate.integer("q", q, least=0, most=20)
    p = _validate.integer("p", p, most=2)
    rounds = max(len(c), 4_000)
    c = _padded(c, rounds)

    def at(reflections: np.ndarray) -> tuple[float, Filter]:
        a = _recursion(np.tanh(reflections)) * radius ** np.arange(1, p + 1)
        return _best_numerator(c, a, q)

    best = optimal_fir(c[: q + 1])
    value = normalised(*best, c)
    for first in (0.0, -0.5, -1.5, 1.0):
        start = np.array([first, 0.3][:p])
        found = optimize.minimize(lambda r: -at(r)[0], start, method="Nelder-Mead")
        reached, made = at(found.x)
        if reached > value:
            try:
                best, value = checked(*made), reached
            except ValueError:  # a response to ones that passes through 0
                continue
    return best


def _recursion(reflections: np.ndarray) -> np.ndarray:
    """a_1 .. a_p from reflection coefficients (the step-up recursion)."""
    a = np.zeros(0)
    for reflection in reflections:
        a = np.append(a + reflection * a[::-1], reflection)
    return a


def _best_numerator(c: np.ndarray, a: np.ndarray, q: int) -> tuple[float, Filter]:
    """The best b for given poles, and the ratio that it reaches."""
    from scipy import signal

    free = signal.lfilter([1.0], np.concatenate([[1.0], a]), np.eye(1, len(c))[0])
    shifts = np.stack([np.concatenate([np.zeros(k), free[: len(c) - k]]) for k in range(q + 1)])
    gram, kept = shifts @ shifts.T, shifts @ c
    solved = np.linalg.solve(gram, np.stack([kept, np.ones(q + 1)], axis=1))
    norms = np.sqrt([kept @ solved[:, 0], solved[:, 1].sum()])
    direction = solved[:, 0] / norms[0] + solved[:, 1] / norms[1]
    total = 1 + a.sum()
    b = direction / direction.sum() * total
    value = float(kept @ b / (b @ gram @ b))
    return value, Filter(tuple(map(float, b)), tuple(map(float, a)))


def convergence_bound(
    b: Coefficients,
    a: Coefficients,
    autocorrelation: Coefficients,
    *,
    rounds: int,
    step_size: float,
    smoothness: float,
    gap: float,
    noise: float,
    backward: float = 0.5,
) -> float:
    """Return the paper's bound on the mean squared gradient norm (Theorem 2).

    (F(x_0) - F*) / (eta S_T) + eta L noise / (2 SNR), S_T = sum_t sum_{k<=t} c_k kappa_k, for
    gradients of norm at most the clip norm.

    Args:
        b: b_0 .. b_q.
        a: a_1 .. a_p, without the leading 1.
        autocorrelation: c_0 (1/2), c_1, ..; 0 beyond those given.
        rounds: T.
        step_size: eta, at most 2 backward / (L kappa_k) for every k.
        smoothness: L.
        gap: F(x_0) - F*.
        noise: d s^2 + sigma_SGD^2 / B, the squared norm of what is added to a mean gradient.
        backward: The least c_{-k} of the paper's assumption A4.

    Raises:
        ValueError: For a filter with a negative kappa, or kappa that sum to more than 1, which the
            proof does not cover; a step beyond the condition; or S_T of 0 or less.
    """
    for name, value in (("step_size", step_size), ("smoothness", smoothness), ("gap", gap)):
        _validate.positive(name, value)
    kappa = impulse_response(*checked(b, a), rounds)
    if kappa.min() < -_ROUNDING or kappa.sum() > 1 + _ROUNDING * rounds:
        raise ValueError(
            f"the impulse response of b, a falls to {kappa.min():.3g} and sums to "
            f"{kappa.sum():.6g}; the bound holds for responses of at least 0 that sum to at most 1"
        )
    largest = 2 * backward / (smoothness * kappa.max())
    if step_size > largest * (1 + _ROUNDING):
        raise ValueError(
            f"step_size is {step_size:g}; the bound holds up to 2 backward / (L max kappa) = "
            f"{largest:.6g}"
        )
    weights = np.arange(rounds, 0, -1.0)
    kept = float(weights @ (_padded(_autocorrelation(autocorrelation), rounds) * kappa))
    if kept <= 0:
        raise ValueError(
            f"S_T is {kept:.3g}; the bound needs an autocorrelation that the filter keeps above 0"
        )
    ratio = kept / float(weights @ kappa**2)
    return gap / (step_size * kept) + step_size * smoothness * noise / (2 * ratio)


def convergence_rate(
    ratio: float,
    *,
    records: int,
    parameters: int,
    epsilon: float,
    delta: float,
    clip_norm: float,
    smoothness: float,
    gap: float,
) -> float:
    """Return the paper's trade-off between privacy and utility (Theorem 3), a rate only.

    C sqrt(d L (F(x_0) - F*) log(1/delta)) / (sqrt(SNR) N epsilon), up to a constant that the paper
    does not give: ratios of two of these mean something, no value alone does.

    Args:
        ratio: The normalised signal-to-noise ratio.
        records: N.
        parameters: d.
        epsilon: Of the whole run.
        delta: Of the whole run.
        clip_norm: C.
        smoothness: L.
        gap: F(x_0) - F*.
    """
    delta = _validate.probability("delta", delta)
    for name, value in (("ratio", ratio), ("epsilon", epsilon), ("clip_norm", clip_norm)):
        _validate.positive(name, value)
    spread = np.sqrt(parameters * smoothness * gap * np.log(1 / delta))
    return float(clip_norm * spread / (np.sqrt(ratio) * records * epsilon))
