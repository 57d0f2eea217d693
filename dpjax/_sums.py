"""What all parties of a secure sum agree on: the grid, the rotation, the bound, the modulus.

A vector x of k reals, |x| <= C, becomes K whole numbers:

    y = H D x / grid        D public signs, H the Hadamard matrix over sqrt(K): |y| <= C / grid, and
                            no coordinate holds much of it; K is k, padded to a power of two
    z = y, each coordinate rounded up with the probability of its fraction, and all drawn anew
        until |z|^2 <= limit

Whole numbers alone are tested against the limit, so that grid sqrt(limit) bounds what is sent,
whatever floating point has done before.

Reference:
    Kairouz, Liu and Steinke (2021), The distributed discrete Gaussian mechanism for federated
    learning with secure aggregation, section 4.
"""

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Float

from dpjax import _lattice, _validate

__all__ = ["LARGEST", "TRIES", "SumCode", "limit", "wrap_bits"]

LARGEST = 2**22
"""Of the norm of whole numbers: their float32 has a fraction beside them."""
TRIES = 128
"""Roundings drawn before all are towards zero: at the default, once in 2^92 vectors or less."""


def limit(norm: float, size: int, beta: float) -> int:
    """Return the square that no rounded vector's norm exceeds.

        min( (n + sqrt(k))^2, n^2 + k/4 + sqrt(2 log(1/beta)) (n + sqrt(k)/2) )

    The first holds for every rounding, the second for all but a share beta of them at most: |z|^2
    is a sum of k independent numbers of mean y^2 + f (1 - f), each within 2 |y| + 1 (Hoeffding).

    Args:
        norm: n, of the vector, in grid units.
        size: k.
        beta: 0 leaves the first.
    """
    always = (norm + math.sqrt(size)) ** 2
    if beta == 0:
        return math.floor(always)
    spread = math.sqrt(-2 * math.log(beta)) * (norm + math.sqrt(size) / 2)
    return math.floor(min(always, norm**2 + size / 4 + spread))


def wrap_bits(
    clients: int, norm: float, square: int, size: int, variance: Any, rotated: bool, failure: float
) -> int:
    """Return how many bits a coordinate of the noisy sum has.

    A sum of rotated vectors has coordinates of proxy variance (clients norm)^2 / size, since signs
    are fair coins that know nothing of the vectors; rounding moves each by less than the number of
    clients; n discrete Gaussians together have proxy variance n sigma^2.

    Args:
        clients: How many at most.
        norm: Of a vector before rounding, grid units.
        square: Of a vector's norm after rounding, at most.
        size: K.
        variance: Of one client's noise, squared grid units.
        rotated: Whether coordinates are those of a rotation.
        failure: Probability, over signs and noise, that some coordinate has more.

    Reference:
        Canonne, Kamath and Steinke (2020), Corollary 17, for the noise.
    """
    half = math.sqrt(2 * math.log(4 * size / failure))
    reach = clients * math.sqrt(square)
    if rotated:
        reach = min(reach, clients * norm / math.sqrt(size) * half + clients)
    reach += math.sqrt(clients * float(variance)) * half
    # -2^(b-1) <= sum < 2^(b-1), and a float's last digits.
    return math.floor(reach * (1 + 1e-5) + 1).bit_length() + 1


@dataclass(frozen=True)
class SumCode:
    """Vectors of reals as whole numbers modulo 2^b, whose sum is opened.

    Guarantee: what one client sends, before its noise, has a norm of at most `sensitivity`, by an
    integer test; a vector that fails it is not sent. Sums of up to ``clients`` vectors and their
    noise wrap around with a probability below 2^-40, over public signs that were drawn after the
    vectors: a wrap costs accuracy, never privacy.

    Attributes:
        size: k, coordinates of a vector.
        bound: C, the largest norm of one.
        grid: The unit of whole numbers.
        clients: Most vectors of a sum.
        variance: Of each client's noise, in squared grid units; 0 without noise.
        weighted: True where each vector has a weight w from 0 to 1, sent in the mask beside it:
            [w x, w C]. What is sent then has a norm of sqrt(2) C before rounding.
        rotated: False for no rotation: coordinates may then hold all of C, and more bits are used.
        beta: Share of roundings that are drawn anew at most; 0 takes the first whatever it is.

    Raises:
        ValueError: For what has no whole numbers, or takes more than 32 bits.

    Example:
        >>> from dpjax.secagg.fixed import SumCode
        >>> code = SumCode(size=4096, bound=1.0, grid=0.02, clients=100, variance=4)
        >>> code.bits, round(code.sensitivity, 3), round(code.unconditional, 3)
        (11, 1.201, 2.28)
    """

    size: int
    bound: float
    grid: float
    clients: int
    variance: int | Fraction = 0
    weighted: bool = False
    rotated: bool = True
    beta: float = math.exp(-0.5)

    def __post_init__(self) -> None:
        """Refuse what has no whole numbers."""
        _validate.integer("size", self.size, most=2**24)
        _validate.positive("bound", self.bound)
        _validate.positive("grid", self.grid)
        _validate.integer("clients", self.clients, most=2**24)
        _validate.flag("weighted", self.weighted)
        _validate.flag("rotated", self.rotated)
        if self.variance != 0:
            _lattice.proposal(self.variance)
        if not 0 <= _validate.number("beta", self.beta) <= 0.75:
            raise ValueError(f"beta is {self.beta}; give a number from 0 to 0.75")
        if not self.norm + math.sqrt(self.padded) < LARGEST:
            raise ValueError(
                f"bound is {self.norm:.6g} grid units, and at most {LARGEST} less sqrt(K) have "
                "float32 fractions; take a coarser grid"
            )
        if self.bits > 32:
            raise ValueError(
                f"clients is {self.clients}: their sum takes {self.bits} bits, of 32; take a "
                "coarser grid"
            )

    @property
    def padded(self) -> int:
        """K: whole numbers of a vector."""
        length = self.size + self.weighted
        return 1 << (length - 1).bit_length() if self.rotated else length

    @property
    def norm(self) -> float:
        """The largest norm before rounding, in grid units."""
        return self.bound * (math.sqrt(2.0) if self.weighted else 1.0) / self.grid

    @property
    def limit(self) -> int:
        """The largest |z|^2 of what is sent."""
        return limit(self.norm, self.padded, self.beta)

    @property
    def sensitivity(self) -> float:
        """The largest norm after rounding, in the unit of the vectors: zero-out, one client."""
        return self.grid * math.sqrt(self.limit) * (1 + 1e-15)

    @property
    def unconditional(self) -> float:
        """C + grid sqrt(K): the same where roundings are not drawn anew."""
        return self.grid * math.sqrt(limit(self.norm, self.padded, 0.0)) * (1 + 1e-15)

    @property
    def bits(self) -> int:
        """b: sums are opened modulo 2^b."""
        return wrap_bits(
            *(self.clients, self.norm, self.limit, self.padded, self.variance, self.rotated),
            failure=2.0**-40,
        )

    @property
    def largest(self) -> int:
        """The largest entry of a noisy vector, since no sampler draws beyond its farthest."""
        noise = 0
        if self.variance:
            law = _lattice.proposal(self.variance)
            noise = law.centre + law.farthest
        return math.isqrt(self.limit) + noise

    @property
    def factor(self) -> np.float32:
        """What coordinates are multiplied by, before sums and differences alone."""
        over = math.sqrt(self.padded) if self.rotated else 1.0
        return np.float32(1 / (self.grid * over))

    def signs(self, seed: bytes) -> Float[np.ndarray, " K"]:
        """Return the public signs, +-1 in float32.

        Args:
            seed: Of the round, drawn when the vectors were fixed; no secret.

        Raises:
            ValueError: For what are no bytes.
        """
        if not isinstance(seed, bytes) or not seed:
            raise ValueError(f"seed is {_validate.shown(seed)}; give bytes")
        if not self.rotated:
            return np.ones(self.padded, np.float32)
        digest = hashlib.shake_256(b"signs of a secure sum" + seed).digest(-(-self.padded // 8))
        bits = np.unpackbits(np.frombuffer(digest, np.uint8))[: self.padded]
        return 1 - 2 * bits.astype(np.float32)
