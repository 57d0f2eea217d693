"""Whole numbers of a secure sum and their noise: what every client and every sampler shares.

Discrete Gaussian variables are proposed, and kept or not, by whole numbers alone:

    sigma^2 = p / r,     q = sigma, rounded, at least 1,     s = r q
    u uniform in 0, ..., p - 1;   v with P(v) ~ e^-v;   a = floor((u + p v) / s);   a sign
    y = +-a is kept with probability exp(-(2 u + r (a - q)^2) / (2 p)), but for -0, which is not

(u + p v is kept with probability e^(-u/p) where its law shall be ~ exp(-x / p); then a is discrete
Laplace of scale p / s = sigma^2 / q, and exp(-a^2 / (2 sigma^2)) over its law is, up to a factor,
exp(-(a - q)^2 / (2 sigma^2)). The scale being sigma^2 over a whole number, all is rational with
small terms: p <= 2^20 lets everything be computed in words of 32 bits.)

A vector x of k reals, |x| <= C, becomes K whole numbers:

    y = H D x / grid        D public signs, H the Hadamard matrix over sqrt(K): |y| <= C / grid, and
                            no coordinate holds much of it; K is k, padded to a power of two
    z = y, each coordinate rounded up with the probability of its fraction, and all drawn anew
        until |z|^2 <= limit

Whole numbers alone are tested against the limit, so that grid sqrt(limit) bounds what is sent,
whatever floating point has done before.

Sums of B clipped records are far longer than a record moves them, and are rounded once, whatever
comes out. Let y and y' be those of two data sets, d = y - y' and |d| <= n = C / grid, or twice that
where a record is replaced. With the same random numbers u in [0, 1)

    z_i = ceil(y_i - u_i)    so that w_i = z_i - z'_i is floor(d_i) or floor(d_i) + 1, of mean d_i,

independent over i. So E |w|^2 = sum d_i^2 + f_i (1 - f_i) <= n^2 + K/4, w_i^2 has at most two
values, within 2 |d_i| + 1 of each other, and by Hoeffding's inequality

    |w|^2 <= `limit`(n, K, beta)    for all u but a share beta; for all u where beta is 0.

u knows nothing of the data: the bad u's share is at most beta whatever they and earlier rounds are.
On the others a round's Renyi divergence of order a is at most rho a. Over k rounds the measures of
what is sent while all u were good have divergence k rho a, and lack at most k beta of probability:
P(S) <= e^epsilon P'(S) + delta(k rho, epsilon) + k beta (`dpjax.accounting.losses.Concentrated`).

`moved` counts what float32 does, too, with u = 2^-24. Either rotated vector is off by at most
(1 + u)^(2 + log2 K) - 1 of its norm B C / grid: a cast, a product, and log2 K sums, each of which
rounds every entry by a share u. Of 24 bits, u_i rounds y_i up to a multiple of u, by less than
3 u / 2 with what the fraction's own rounding does. The factor's rounding stretches d by 1 + u.

Reference:
    Canonne, Kamath and Steinke (2020), The discrete Gaussian for differential privacy, algorithms
    1 to 3. Kairouz, Liu and Steinke (2021), The distributed discrete Gaussian mechanism for
    federated learning with secure aggregation, section 4.
"""

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax import _validate

__all__ = ["SumCode", "variance_above"]

LEAST = Fraction(1, 4)
"""The smallest variance: below, nearly every proposal would be turned down."""
MOST = 2**20
"""The largest variance, and the largest numerator of any."""
LONGEST = 2**22
"""The largest norm of whole numbers: their float32 has a fraction beside them."""
TRIES = 128
"""Roundings drawn before all are towards zero: at the default, once in 2^92 vectors or less."""
REDRAWN = math.exp(-0.5)
"""The default share of roundings that are drawn anew."""


class Proposal(NamedTuple):
    """The numbers p, r, q of a variance.

    Attributes:
        numerator: p.
        denominator: r.
        centre: q, where proposals are turned down least.
    """

    numerator: int
    denominator: int
    centre: int

    @property
    def step(self) -> int:
        """s: how many of u + p v fall onto one number."""
        return self.denominator * self.centre

    @property
    def farthest(self) -> int:
        """The largest |a - q| whose exponent is below 2^32 / (2 p): 63.9 sigma at least."""
        return math.isqrt((2**32 - 2 * self.numerator) // self.denominator)


_Variance = int | Fraction


def proposal(variance: _Variance) -> Proposal:
    """Return the numbers of a variance.

    Args:
        variance: sigma^2, a whole number or a Fraction, from 1/4 to 2^20.

    Raises:
        ValueError: For floats, variances out of range, and fractions of too many digits.
    """
    if isinstance(variance, bool) or not isinstance(variance, _Variance):
        raise _validate.refusal(
            "variance",
            variance,
            "give a whole number or a Fraction (dpjax.encoding.lattice.variance_above makes one "
            "of a float)",
        )
    value = Fraction(variance)
    if not LEAST <= value <= MOST:
        fault = "coarse" if value < LEAST else "fine"
        raise ValueError(
            f"variance is {_validate.shown(variance)} squared grid units; give one from "
            f"{LEAST} to {MOST}: the grid is too {fault} for this noise"
        )
    if value.numerator > MOST:
        raise ValueError(
            f"variance is {value}, of a numerator above 2^20; round it up to fewer digits, by "
            "dpjax.encoding.lattice.variance_above"
        )
    # The root of four times the variance, halved, is its root rounded to the nearest.
    doubled = math.isqrt(4 * value.numerator // value.denominator)
    centre = max(1, (doubled + 1) // 2)
    return Proposal(value.numerator, value.denominator, centre)


def variance_above(value: float | Fraction) -> Fraction:
    """Return the least variance that can be drawn, of 20 binary digits, not below a number.

    Args:
        value: Squared grid units, above 0, at most 2^20; below 1/4 the answer is 1/4.

    Raises:
        ValueError: For another one.

    Example:
        >>> from dpjax.encoding.lattice import variance_above
        >>> variance_above(4.0)
        Fraction(4, 1)
    """
    remedy = "give one above 0, to 2^20"
    number = _validate.number("variance", value, remedy=remedy, holds=lambda v: 0 < v <= MOST)
    # A float would round a fraction, perhaps down.
    exact = Fraction(value if isinstance(value, _Variance) else number)
    exact = max(exact, LEAST)
    # From 2^19 to below 2^20, so that the numerator is 2^20 at most after rounding up.
    denominator = 2 ** max(0, 19 - math.floor(math.log2(exact)))
    return Fraction(math.ceil(exact * denominator), denominator)


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
    root = math.sqrt(size)
    always = (norm + root) ** 2
    if beta == 0:
        return math.floor(always)
    deviation = math.sqrt(-2 * math.log(beta))
    spread = deviation * (norm + root / 2)
    return math.floor(min(always, norm**2 + size / 4 + spread))


def moved(norm: float, size: int, beta: float, relation: str, records: int = 1) -> float:
    """Return how far a unit moves the sum of whole numbers, in grid units.

    Guarantee: of one vector that is left out, or replaced by another, whatever these are; of one of
    several clipped records for all roundings but a share beta at most, by the module's proof.

    Args:
        norm: C / grid, of what is clipped.
        size: K.
        beta: Of the code.
        relation: "zero_out" or "replace".
        records: B, whose sum is rounded as one.
    """
    copies = 2 if relation == "replace" else 1
    if records == 1:
        return copies * math.sqrt(max(1, limit(norm, size, beta)))
    # Either neighbour is rounded 2 + log2 K times by 2^-24; two more are for higher orders.
    steps = size.bit_length() + 3
    error = 2.0**-23 * (copies * norm + steps * records * norm + math.sqrt(size))
    return math.sqrt(limit(copies * norm + error, size, beta)) * (1 + 1e-15)


def wrap_bits(
    clients: int, norm: float, square: int, size: int, variance: _Variance, failure: float
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
        failure: Probability, over signs and noise, that some coordinate has more.

    Reference:
        Canonne, Kamath and Steinke (2020), Corollary 17, for the noise.
    """
    half = math.sqrt(2 * math.log(4 * size / failure))
    rotated = clients * norm / math.sqrt(size) * half + clients
    reach = min(clients * math.sqrt(square), rotated)
    reach += math.sqrt(clients * float(variance)) * half
    # -2^(b-1) <= sum < 2^(b-1), and a float's last digits.
    return math.floor(reach * (1 + 1e-5) + 1).bit_length() + 1


@dataclass(frozen=True)
class SumCode:
    """Vectors of reals as whole numbers modulo 2^b, whose sum is opened.

    Guarantee: what one client sends, before its noise, has a norm of at most `sensitivity`, by an
    integer test; a vector that fails it is not sent. Of several ``records`` a vector is rounded
    once, whatever comes out, and one of them moves it by at most that, but for a share `beta` of
    all roundings. Sums of up to ``clients`` vectors and their
    noise wrap around with a probability below 2^-40, over public signs that were drawn after the
    vectors: a wrap costs accuracy, never privacy.

    Attributes:
        size: k, coordinates of a vector.
        bound: C, the largest norm of one, or of each of its records.
        grid: The unit of whole numbers.
        clients: Most vectors of a sum.
        variance: Of each client's noise, in squared grid units; 0 without noise.
        beta: Share of roundings that are drawn anew at most; 0 takes the first whatever it is. Of
            several records, share of roundings that one of them may move further: a loss adds it
            to delta, once a round.
        records: B, clipped records whose sum a vector is, at most.

    Raises:
        ValueError: For what has no whole numbers, or takes more than 32 bits.

    Example:
        >>> from dpjax.encoding.lattice import SumCode
        >>> code = SumCode(size=4096, bound=1.0, grid=0.02, clients=100, variance=4)
        >>> code.bits, round(code.sensitivity, 3)
        (11, 1.201)
    """

    size: int
    bound: float
    grid: float
    clients: int
    variance: _Variance = 0
    beta: float = REDRAWN
    records: int = 1

    def __post_init__(self) -> None:
        """Refuse what has no whole numbers."""
        _validate.fields(self, _validate.integer, "size", "clients", "records", maximum=2**24)
        _validate.positive("bound", self.bound)
        _validate.positive("grid", self.grid)
        if self.variance != 0:
            proposal(self.variance)
        remedy = "give a number from 0 to 0.75"
        _validate.number("beta", self.beta, remedy=remedy, holds=lambda x: 0 <= x <= 0.75)
        if not self.norm + math.sqrt(self.padded) < LONGEST:
            raise ValueError(
                f"bound is {self.norm:.6g} grid units of {self.records} records, and at most "
                f"{LONGEST} less sqrt(K) have float32 fractions; take a coarser grid, or fewer "
                "records"
            )
        if self.bits > 32:
            raise ValueError(
                f"clients is {self.clients}: their sum takes {self.bits} bits, of 32; take a "
                "coarser grid"
            )

    @property
    def padded(self) -> int:
        """K: whole numbers of a vector."""
        return 1 << (self.size - 1).bit_length()

    @property
    def norm(self) -> float:
        """The largest norm before rounding, in grid units."""
        return self.records * self.bound / self.grid

    @property
    def limit(self) -> int:
        """The largest |z|^2 of what is sent."""
        if self.records == 1:
            return limit(self.norm, self.padded, self.beta)
        # Nothing is drawn anew; a norm may be rounded, as `dpjax.encoding.integers` allows.
        return limit(self.norm * (1 + 1e-5), self.padded, 0)

    @property
    def sensitivity(self) -> float:
        """What one vector, or record, left out moves after rounding, in the vectors' unit."""
        # No float64 rounding may state less than the true norm.
        return self.grid * self.moved("zero_out") * (1 + 1e-15)

    def moved(self, relation: str) -> float:
        """Grid units by which a vector, or one of its records, moves a sum at most.

        Args:
            relation: "zero_out" or "replace".
        """
        norm = self.bound / self.grid
        return moved(norm, self.padded, self.beta, relation, self.records)

    @property
    def bits(self) -> int:
        """b: sums are opened modulo 2^b."""
        return wrap_bits(
            self.clients, self.norm, self.limit, self.padded, self.variance, failure=2.0**-40
        )

    @property
    def largest(self) -> int:
        """The largest entry of a noisy vector, since no sampler draws beyond its farthest."""
        noise = 0
        if self.variance:
            law = proposal(self.variance)
            noise = law.centre + law.farthest
        return math.isqrt(self.limit) + noise

    @property
    def factor(self) -> np.float32:
        """What coordinates are multiplied by, before sums and differences alone."""
        return np.float32(1 / (self.grid * math.sqrt(self.padded)))

    def signs(self, seed: bytes) -> Float[np.ndarray, " K"]:
        """Return the public signs, +-1 in float32.

        Args:
            seed: Of the round, drawn when the vectors were fixed; no secret.

        Raises:
            ValueError: For what are no bytes.
        """
        if not isinstance(seed, bytes) or not seed:
            raise _validate.refusal("seed", seed, "give bytes")
        hasher = hashlib.shake_256(b"signs of a secure sum" + seed)
        digest = hasher.digest(-(-self.padded // 8))
        bits = np.unpackbits(np.frombuffer(digest, np.uint8))[: self.padded]
        return 1 - 2 * bits.astype(np.float32)


def hadamard(values: Any, stack: Any = np.stack) -> Any:
    """Sums and differences in the order of Walsh and Hadamard: H values, H entries of +-1.

    Args:
        values: [..., K] of NumPy or JAX.
        stack: The function ``stack`` of that library.
    """
    width = 1
    shape = values.shape
    while width < shape[-1]:
        pairs = values.reshape(*shape[:-1], -1, 2, width)
        first = pairs[..., 0, :]
        second = pairs[..., 1, :]
        # The same order everywhere: a client's float32 sums must be the compiled ones to the bit.
        butterfly = [first + second, first - second]
        values = stack(butterfly, axis=-2).reshape(shape)
        width *= 2
    return values
