"""How much of a gradient a filter keeps over the noise that it lets through.

For the autocorrelation c_0 = 1/2, c_1, .. of gradients and the impulse response kappa of a filter,
the normalised signal-to-noise ratio of T rounds is

    SNR = sum_t sum_{k<=t} c_k kappa_k / sum_t sum_{k<=t} kappa_k^2          1/2 without a filter

It says nothing of how far a longer filter lets the model run behind: it grows with the number of
taps without bound, so that an optimum exists at a fixed order only. Everything is float64.

Reference:
    Zhang et al., DOPPLER: Differentially Private Optimizers with Low-pass Filter for Privacy Noise
    Reduction, (4) to (7).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Complex, Float

from dpjax import _validate
from dpjax.mechanism.filters import Coefficients, Filter, check_filter, impulse_response

__all__ = ["Response", "frequency_response", "signal_to_noise", "optimal_fir", "proportional_fir"]


def signal_to_noise(
    b: Coefficients, a: Coefficients, autocorrelation: Coefficients, rounds: int | None = None
) -> float:
    """Return the normalised signal-to-noise ratio of a filter.

    The noise of the paper's bound on convergence is 1/(2 SNR) times that without a filter.

    Args:
        b: b_0 .. b_q.
        a: a_1 .. a_p, without the leading 1.
        autocorrelation: c_0 (1/2), c_1, ..; 0 beyond those given.
        rounds: T; None is the limit of many rounds.

    Example:
        >>> from dpjax.contrib import snr
        >>> round(snr.signal_to_noise((0.1,), (-0.9,), (1.0, 0.9, 0.81)), 3)
        4.686
    """
    c = np.asarray(autocorrelation, float)
    coefficients = check_filter(b, a)
    if rounds is None:
        # A recursive filter's response has no end; what comes later is below a rounding.
        length = 100_000 if coefficients.a else len(coefficients.b)
        kappa = impulse_response(*coefficients, max(len(c), length))
        weights = np.ones(len(kappa))
    else:
        kappa = impulse_response(*coefficients, rounds)
        weights = np.arange(rounds, 0, -1.0)
    # Correlations that are not given are 0.
    missing = max(0, len(kappa) - len(c))
    c = np.pad(c[: len(kappa)], (0, missing))
    gradient = float(weights @ (c * kappa))
    noise = float(weights @ kappa**2)
    return gradient / noise


def proportional_fir(autocorrelation: Coefficients) -> Filter:
    """Return the paper's taps, b_k = c_k / sum c, said to maximise (7), which they do not.

    Example:
        >>> from dpjax.contrib import snr
        >>> snr.proportional_fir((1.0, 0.5)).b
        (0.6666666666666666, 0.3333333333333333)
    """
    c = np.asarray(autocorrelation, float)
    return check_filter(tuple(c / c.sum()))


def optimal_fir(autocorrelation: Coefficients) -> Filter:
    """Return the taps that maximise the limit of the ratio under sum b = 1.

    b = (c + rms(c)) / (sum c + n rms(c)) over n taps, at ratio (sum c + sqrt(n sum c^2)) / 2: with
    the constraint written into it the ratio is (c'b)(1'b) / b'b, a Rayleigh quotient of rank two.

    Example:
        >>> from dpjax.contrib import snr
        >>> [round(float(b), 3) for b in snr.optimal_fir((1.0, 0.5)).b]
        [0.581, 0.419]
    """
    c = np.asarray(autocorrelation, float)
    raised = c + float(np.sqrt(np.mean(c**2)))
    return check_filter(tuple(raised / raised.sum()))


class Response(NamedTuple):
    """A frequency response.

    Attributes:
        frequencies: [points] cycles a round, from 0 to 1/2.
        response: [points] complex gains; 1 at frequency 0.
    """

    frequencies: Float[np.ndarray, " points"]
    response: Complex[np.ndarray, " points"]


def frequency_response(b: Coefficients, a: Coefficients = (), points: int = 512) -> Response:
    """Return the gain at every frequency.

    Args:
        b: b_0 .. b_q.
        a: a_1 .. a_p, without the leading 1.
        points: How many frequencies.

    Example:
        >>> from dpjax.contrib import snr
        >>> response = snr.frequency_response((0.5, 0.5), points=3)
        >>> [round(float(abs(gain)), 3) for gain in response.response]
        [1.0, 0.707, 0.0]
    """
    # SciPy's signal loads its optimizers, which takes a second.
    from scipy import signal

    frequencies = np.linspace(0, 0.5, _validate.integer("points", points, minimum=2))
    denominator = np.concatenate([[1.0], a])
    _, response = signal.freqz(b, denominator, worN=2 * np.pi * frequencies)
    return Response(frequencies, response)
