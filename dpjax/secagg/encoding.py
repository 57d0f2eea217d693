"""Fixed-point numbers: reals as the whole numbers that a cipher computes with."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from dpjax import _validate

__all__ = ["FixedPoint"]


def reals(name: str, values: Any) -> np.ndarray:
    """Return real numbers as float64, what is not finite among them.

    Args:
        name: What messages call them.
        values: An array of them.

    Raises:
        ValueError: For text, complex numbers and ragged lists.
    """
    try:
        array = np.asarray(values)
        if array.dtype.kind in "fiub" or array.dtype.name == "bfloat16":
            return array.astype(np.float64)
    except (TypeError, ValueError):
        pass
    given = " ".join(_validate.shown(values).split())
    raise ValueError(f"{name} is {given}; give an array of real numbers")


def row(name: str, values: Any) -> np.ndarray:
    """Return real numbers [d] as `reals` does.

    Args:
        name: What messages call them.
        values: [d].

    Raises:
        ValueError: As `reals`, and for another number of dimensions.
    """
    array = reals(name, values)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; give one dimension")
    return array


@dataclass(frozen=True)
class FixedPoint:
    """How values and weights become whole numbers, and products of them reals again.

        X = round(2^f x),  -2^(v-1) <= X < 2^(v-1)          v value bits, f of them behind the point
        B = round(2^w b),  0 <= b <= 1                      w weight bits
        x = A / 2^(f+w)                                     A = B (X - Y) + e, e a blur

    Nothing saturates and nothing wraps around: what is out of range is refused.

    Attributes:
        value_bits: v, the sign among them.
        fraction_bits: f; values are known to half of 2^-f.
        weight_bits: w; weights are known to half of 2^-w.

    Example:
        >>> from dpjax.secagg.encoding import FixedPoint
        >>> FixedPoint(value_bits=16, fraction_bits=8).largest
        127.99609375
    """

    value_bits: int = 64
    fraction_bits: int = 40
    weight_bits: int = 32

    def __post_init__(self) -> None:
        """Refuse what no float64 becomes."""
        limits = {"value_bits": (2, 512), "fraction_bits": (0, 511), "weight_bits": (1, 64)}
        for name, (least, most) in limits.items():
            checked = _validate.integer(name, getattr(self, name), least=least, most=most)
            object.__setattr__(self, name, checked)
        if self.fraction_bits >= self.value_bits:
            raise ValueError(
                f"fraction_bits is {self.fraction_bits} of value_bits {self.value_bits}; one bit "
                "is the sign's: give fewer"
            )

    @property
    def largest(self) -> float:
        """The largest value: (2^(v-1) - 1) / 2^f."""
        return (2 ** (self.value_bits - 1) - 1) / 2**self.fraction_bits

    @property
    def product_bits(self) -> int:
        """Bits, the sign among them, of a weight times a difference of values, blurred."""
        return self.value_bits + self.weight_bits + 2

    def error(self, difference: float = 0.0, grain: float = 0.0) -> float:
        """Return how far a link's b (x - y) may be off, roundings of float64 apart.

            2^-f + 2^-(f+1) span(grain) + 2^-(w+1) (|x - y| + 2^-f)

        Both values are rounded, the product is blurred, and the weight is rounded.

        Args:
            difference: Bound on |x - y|.
            grain: Distance of neighbouring x.

        Returns:
            The bound, in the unit of the values.

        Raises:
            ValueError: For numbers that are not finite, and a grain below 0.
        """
        difference = _validate.number("difference", difference)
        unit = 2.0**-self.fraction_bits
        weighing = 2.0 ** -(self.weight_bits + 1) * (abs(difference) + unit)
        return unit + unit / 2 * self.span(grain) + weighing

    def span(self, grain: float) -> int:
        """Return how many units 2^-f cover a grain of values; at least one.

        Args:
            grain: Distance of neighbouring values.

        Raises:
            ValueError: For a grain that is not finite, or below 0.
        """
        if (grain := _validate.number("grain", grain)) < 0:
            raise ValueError(f"grain is {grain:g}; give a distance, 0 or above")
        return max(1, math.ceil(math.ldexp(grain, self.fraction_bits)))

    def values(self, name: str, values: Float[np.ndarray, " d"]) -> list[int]:
        """Return X of every value.

        Args:
            name: What messages call the values.
            values: [d] reals.

        Raises:
            ValueError: For what is no row of real numbers, and a value that is not finite or out of
                range.
        """
        floats = row(name, values)
        if not np.isfinite(floats).all():
            at = int(np.argmin(np.isfinite(floats)))
            raise ValueError(
                f"{name} holds {floats[at]} at entry {at}, which has no fixed-point number; take a "
                "smaller step size if the run diverges"
            )
        # Beyond float64's range is beyond any here; ldexp is exact within, and round ties to even.
        with np.errstate(over="ignore"):
            scaled = np.ldexp(floats, self.fraction_bits)
        half = 2.0 ** (self.value_bits - 1)
        out = (np.rint(scaled) < -half) | (np.rint(scaled) >= half)
        if out.any():
            at = int(np.argmax(out))
            raise ValueError(
                f"{name} holds {floats[at]} at entry {at}, beyond {self.largest:.6g}, the largest "
                f"of value_bits {self.value_bits} with fraction_bits {self.fraction_bits}; give "
                "more value_bits or fewer fraction_bits"
            )
        return [round(each) for each in scaled.tolist()]

    def weights(self, name: str, weights: Float[np.ndarray, " n"]) -> list[int]:
        """Return B of every weight.

        Args:
            name: What messages call the weights.
            weights: [n] from 0 to 1.

        Raises:
            ValueError: For what is no row of real numbers, and a weight outside of 0 to 1.
        """
        floats = row(name, weights)
        wrong = ~((floats >= 0) & (floats <= 1))
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(
                f"{name} holds {floats[at]} at entry {at}; draw weights from 0 to 1, and scale "
                "what is larger by the step"
            )
        return [round(each) for each in np.ldexp(floats, self.weight_bits).tolist()]

    def product(self, whole: int) -> float:
        """Return the real of A: A / 2^(f+w), rounded once.

        Args:
            whole: A weight times a difference of values.
        """
        return whole / 2 ** (self.fraction_bits + self.weight_bits)
