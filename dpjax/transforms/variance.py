"""The variance of a run's noise, for optimizers that take it off what they measure."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dpjax import _validate

__all__ = ["LAGS", "SHARES", "TOLD", "NoiseVariance"]

Variance = float | Float[Array, ""] | Callable[..., Any]

LAGS = 64
"""Lags at which noise that is correlated over rounds is known to an optimizer."""


SHARES = "share_variance"
"""Name, among a plan's arrays, of the variances [n] of agents' shares in a sum."""


class NoiseVariance(NamedTuple):
    """Variance of the noise in a coordinate of what an optimizer is given.

    A public number: it follows from the plan. Links of `dpjax.transforms.adam`, `galore` and
    `lowpass` take it as their ``noise``.

    Attributes:
        scale: Variance of noise that is fresh in every round, or what ``profile`` multiplies.
        profile: [T, LAGS] covariance of rounds t and t - lag for noise correlated over rounds, of
            scale 1; None where it is fresh in every round.

    Example:
        >>> from dpjax.transforms.variance import NoiseVariance
        >>> variance = NoiseVariance(0.25)
        >>> float(variance(3)), float(variance(3, lag=1))
        (0.25, 0.0)
    """

    scale: float | Float[Array, ""]
    profile: Float[Array, "t lags"] | None = None

    def __call__(self, round: int | Int[Array, ""], lag: int = 0) -> float | Float[Array, ""]:
        """Covariance of a coordinate's noise in a round with that ``lag`` rounds before.

        Args:
            round: From 0.
            lag: 0 for the variance.

        Raises:
            ValueError: For a lag outside 0 .. `LAGS` - 1.
        """
        lag = _validate.integer("lag", lag, least=0, most=LAGS - 1)
        if self.profile is not None:
            return self.scale * jnp.asarray(self.profile)[round, lag]
        return self.scale if lag == 0 else self.scale * 0.0


class _Told:
    """Stands for a variance that every update comes with."""

    def __call__(self, round: Any, lag: int = 0) -> Any:
        """Refuse: it is no function of the round."""
        del round, lag
        raise ValueError(
            "noise is told with every update, by coordinate, and this link asks for one number a "
            "round; give one that reads update(..., noise_variance=), as transforms.adam does"
        )


TOLD = _Told()
"""The ``noise`` of a link that is told its variance with every update, ``noise_variance=``.

What a server's mean has depends on who was there, and behind a sketch on the coordinate.
"""


def per_round(noise: Variance) -> Any:
    """Return what gives the variance in a round, of a number or of what gives it already.

    Args:
        noise: A variance, fresh in every round; or a function of the round, and of the lag for
            those who ask for one. Functions and arrays are taken as they are.

    Raises:
        ValueError: For another value, or one below 0.
    """
    if callable(noise):
        return noise
    if not isinstance(noise, jax.Array) and _validate.number("noise", noise) < 0:
        raise ValueError(f"noise is {noise!r}; give a variance of at least 0")
    return NoiseVariance(noise)
