"""One agent's side of the encrypted exchange: what it knows, and what it answers to ciphertexts."""

import importlib
import secrets
from typing import Any

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax.secagg.encoding import FixedPoint, row

__all__ = ["Agent"]

LEAST_BITS = 1024
MOST_BITS = 16384


def libraries() -> tuple[Any, Any]:
    """Return phe's cipher and its arithmetic.

    Raises:
        ValueError: Without phe or gmpy2.
    """
    try:
        # Without gmpy2 phe would compute as well, and many times slower.
        importlib.import_module("gmpy2")
        return importlib.import_module("phe.paillier"), importlib.import_module("phe.util")
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, and Paillier encryption needs it; in dpjax's folder: "
            "pip install '.[secure]' (phe is under the GPL, version 3)"
        ) from None


def check_key_size(key_size: Any, code: FixedPoint, allow_weak: bool) -> int:
    """Return a key size that the cipher and the code can work with.

    Args:
        key_size: Bits of a modulus n.
        code: What is encrypted.
        allow_weak: Whether keys that are broken in practice may pass.

    Raises:
        ValueError: For a code that is none, and a key that is weak, odd, or too short for a
            product.
    """
    if not isinstance(code, FixedPoint):
        raise ValueError(f"code is {_validate.shown(code)}; give secagg.encoding.FixedPoint(...)")
    least = 128 if _validate.flag("allow_weak", allow_weak) else LEAST_BITS
    remedy = f"give an even number of bits from {least} to {MOST_BITS}; 2048 is the default"
    size = _validate.integer("key_size", key_size, least=least, most=MOST_BITS, remedy=remedy)
    if size % 2:
        raise ValueError(f"key_size is {size}; {remedy}")
    # n has its upper half for what is negative, and is at least 2^(size-1).
    if code.product_bits > size - 2:
        raise ValueError(
            f"key_size is {size}, and a weight times a difference takes {code.product_bits} bits; "
            "give fewer value_bits or weight_bits, or a longer key"
        )
    return size


class Obfuscators:
    """Random n-th residues r^n mod n^2, computed ahead and given out once each.

    Who knows the primes of n draws them modulo p^2 and q^2, by two powers of half the length each:
    x^p mod p^2 for uniform x is a uniform n-th residue mod p^2, since q has no factor in common
    with p - 1. The law is the same, in less than a third of the time.

    Args:
        modulus: n.
        primes: p and q, where n is one's own.

    Attributes:
        late: How many were computed only when they were asked for.
    """

    def __init__(self, modulus: int, primes: tuple[int, int] | None = None):
        self._arithmetic = libraries()[1]
        self._modulus = modulus
        self._square = modulus**2
        self._primes = primes
        self._ready: list[int] = []
        self.late = 0
        if primes is not None:
            self._inverse = self._arithmetic.invert(primes[0] ** 2, primes[1] ** 2)

    def __len__(self) -> int:
        """How many are ready."""
        return len(self._ready)

    def fill(self, count: int) -> None:
        """Compute until so many are ready.

        Args:
            count: How many.
        """
        while len(self._ready) < count:
            self._ready.append(self._fresh())

    def take(self) -> int:
        """Return one that nobody was given; where none is ready a new one is computed."""
        if self._ready:
            return self._ready.pop()
        self.late += 1
        return self._fresh()

    def _fresh(self) -> int:
        power = self._arithmetic.powmod
        if self._primes is None:
            return power(1 + secrets.randbelow(self._modulus - 1), self._modulus, self._square)
        p, q = self._primes
        by_p, by_q = (power(1 + secrets.randbelow(each - 1), each, each**2) for each in (p, q))
        return by_p + p**2 * ((by_q - by_p) * self._inverse % q**2)


def _shown_modulus(modulus: Any, own: int) -> str:
    if type(modulus) is not int:
        return _validate.shown(modulus)
    return "one's own" if modulus == own else f"even, of {modulus.bit_length()} bits"


def _grains(number: int, grains: Any, count: int) -> Float[np.ndarray, " d"]:
    """Grains of an agent's values, refusing what would leave a value without its blur."""
    every = row(f"grains of agent {number}", grains)
    if len(every) != count:
        raise ValueError(
            f"grains of agent {number} has {len(every)} entries; give one for each of {count} "
            "values, or None"
        )
    wrong = ~(np.isfinite(every) & (every >= 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"grains of agent {number} holds {every[at]} at entry {at}; give distances of "
            "neighbouring values, finite and 0 or above"
        )
    return every


class Agent:
    """One end of every link of an agent: its key, its model, its weights.

    Only whole numbers cross: a modulus once, then lists of ciphertexts. Values, weights, the
    private key and obfuscators stay in the object.

    Guarantee: none of differential privacy. A neighbour that follows the protocol learns
    b (x - y) to half a grain of x, for a b that it does not know, and nothing else: the answer's
    own randomness is uniform, and the blur e hides the whole number b (x - y) of fixed point, whose
    divisors would tell b. Whoever has no private key sees ciphertexts of Paillier.

    Args:
        number: Which agent it is.
        key_size: Bits of its modulus.
        code: Fixed-point numbers of all agents.
        allow_weak: Whether a key shorter than 1,024 bits passes, for tests.
    """

    def __init__(
        self, number: int, key_size: int, code: FixedPoint, *, allow_weak: bool = False
    ) -> None:
        self._cipher, self._arithmetic = libraries()
        self._size = check_key_size(key_size, code, allow_weak)
        self.number = number
        self._code = code
        public, self._private = self._cipher.generate_paillier_keypair(n_length=self._size)
        self._own = Obfuscators(public.n, (self._private.p, self._private.q))
        self._public = public
        self._others: dict[int, tuple[Any, Obfuscators]] = {}
        self._values: list[int] | None = None
        self._answered: set[int] = set()

    @property
    def modulus(self) -> int:
        """The public key n, which neighbours are told."""
        return int(self._public.n)

    @property
    def neighbours(self) -> list[int]:
        """Whom it has met."""
        return sorted(self._others)

    @property
    def late(self) -> int:
        """How many obfuscators were computed only when they were needed."""
        return self._own.late + sum(pool.late for _, pool in self._others.values())

    def meet(self, other: int, modulus: int) -> None:
        """Keep a neighbour's public key.

        Args:
            other: The neighbour.
            modulus: Its n.

        Raises:
            ValueError: For oneself as the neighbour, and a modulus that is even, one's own, or of
                fewer bits than that.
        """
        if other == self.number:
            raise ValueError(f"other is {other}, the agent itself; give a neighbour's number")
        if type(modulus) is not int or modulus % 2 == 0 or modulus == self.modulus:
            raise ValueError(
                f"modulus of agent {other} is {_shown_modulus(modulus, self.modulus)}; let it make "
                "a key of its own, and give its `modulus`, an odd whole number"
            )
        if modulus.bit_length() < self._size:
            raise ValueError(
                f"modulus of agent {other} has {modulus.bit_length()} bits; let it make a key of "
                f"{self._size}"
            )
        self._others[other] = self._cipher.PaillierPublicKey(modulus), Obfuscators(modulus)

    def prepare(self, numbers: int) -> None:
        """Compute obfuscators ahead, for so many numbers of this agent and of every neighbour.

        Args:
            numbers: Coordinates times rounds.
        """
        self._own.fill(numbers)
        for _, pool in self._others.values():
            pool.fill(numbers)

    def begin(
        self,
        values: Float[np.ndarray, " d"],
        weights: Float[np.ndarray, " n"],
        grains: Float[np.ndarray, " d"] | None = None,
    ) -> None:
        """Take the model and the weights of a round.

        Args:
            values: [d] the model.
            weights: [n] b of every neighbour, 0 elsewhere.
            grains: [d] distance of neighbouring values, where they come from a coarser grid than
                that of fixed point, as those of 32 bits may; 0 if None.

        Raises:
            ValueError: For what fixed-point numbers do not hold, weights without a link, and
                weights or grains that are not one an agent or a value.
        """
        weights = row(f"weights of agent {self.number}", weights)
        least = 1 + max([self.number, *self._others])
        if len(weights) < least:
            raise ValueError(
                f"weights of agent {self.number} has {len(weights)} entries; give one for every "
                f"agent, {least} at least"
            )
        stray = [int(at) for at in np.flatnonzero(weights) if int(at) not in self._others]
        if stray:
            raise ValueError(
                f"weights of agent {self.number} hold {float(weights[stray[0]])} for agent "
                f"{stray[0]}, to which it has no link; put 0 there, or name the link"
            )
        whole = self._code.weights(f"weights of agent {self.number}", weights)
        known = self._code.values(f"model of agent {self.number}", values)
        every = np.zeros(len(known)) if grains is None else _grains(self.number, grains, len(known))
        self._values = known
        self._exponents = {other: whole[other] for other in self._others}
        self._factors = {other: float(weights[other]) for other in self._others}
        self._answered = set()
        self._spans = [self._code.span(float(each)) << self._code.weight_bits for each in every]
        self._sum = np.zeros(len(self._values))

    def request(self) -> list[int]:
        """Return E(-x), a fresh ciphertext a coordinate, under its own key."""
        return [self._encrypted(self._public, -x, self._own.take()) for x in self._known()]

    def answer(self, asker: int, ciphertexts: list[int]) -> list[int]:
        """Return (E(x) E(-y))^b E(e) for a neighbour's E(-y), under its key, randomised anew.

        The obfuscator goes in after the power. Modulo n an obfuscated ciphertext is its obfuscator
        alone, so a power without one shows b as a discrete logarithm of few bits, to anybody; and
        one that goes in before the power leaves a b-th power, which the owner of n's primes can
        tell from others: for an even b it is always a square.

        Without e the asker would read b (x - y) as a whole number: over the coordinates b is the
        greatest common divisor. So e is uniform over as many whole numbers as b may take, times the
        units of fixed point in a grain of x: wherever x may lie between two grains, the answer may
        be the same. An asker is answered once a round: many answers would average e away.

        Args:
            asker: Whose ciphertexts they are.
            ciphertexts: A coordinate each.

        Raises:
            ValueError: For a stranger, a second request in a round, other numbers of coordinates,
                and what is no ciphertext.
        """
        values = self._known()
        public, pool = self._checked("asker", asker, ciphertexts)
        if asker in self._answered:
            raise ValueError(
                f"asker is {asker}, which agent {self.number} has answered in this round; begin "
                "the next one"
            )
        self._answered.add(asker)
        exponent = self._exponents[asker]
        multiplied, power = self._arithmetic.mulmod, self._arithmetic.powmod
        answers = []
        for x, span, ciphertext in zip(values, self._spans, ciphertexts, strict=True):
            difference = multiplied(self._encrypted(public, x, 1), ciphertext, public.nsquare)
            blur = secrets.randbelow(span) - span // 2
            veil = self._encrypted(public, blur, pool.take())
            weighed = power(difference, exponent, public.nsquare)
            answers.append(multiplied(weighed, veil, public.nsquare))
        return answers

    def receive(self, answerer: int, ciphertexts: list[int]) -> None:
        """Decrypt a neighbour's answers, weigh them and add them up.

        Args:
            answerer: Whose they are.
            ciphertexts: A coordinate each.

        Raises:
            ValueError: For a stranger, other numbers of coordinates, and what decrypts to more
                than a weight times a difference.
        """
        self._known()
        self._checked("answerer", answerer, ciphertexts, own=True)
        decoded = [self._decrypted(each) for each in ciphertexts]
        beyond = [each for each in decoded if abs(each) >= 2 ** (self._code.product_bits - 1)]
        if beyond:
            raise ValueError(
                f"answerer is {answerer}, whose answer decrypts to {_validate.shown(beyond[0])}, "
                f"of more than {self._code.product_bits} bits; it was changed on its way, or made "
                "under another key or code: let all agents have the same code"
            )
        pulls = np.array([self._code.product(each) for each in decoded])
        self._sum += self._factors[answerer] * pulls

    def pulled(self) -> Float[np.ndarray, " d"]:
        """Return the sum over the answers received in this round, [d]."""
        self._known()
        return self._sum.copy()

    def _known(self) -> list[int]:
        if self._values is None:
            raise ValueError(f"agent {self.number} has no model yet; call begin with one")
        return self._values

    def _checked(
        self, name: str, other: int, ciphertexts: list[int], own: bool = False
    ) -> tuple[Any, Obfuscators]:
        if other not in self._others:
            raise ValueError(f"{name} is {other}, a stranger to agent {self.number}; meet it first")
        if len(ciphertexts) != len(self._known()):
            raise ValueError(
                f"ciphertexts of agent {other} are {len(ciphertexts)}, and the model has "
                f"{len(self._known())} coordinates; send one for each"
            )
        public, pool = self._others[other]
        square = self._public.nsquare if own else public.nsquare
        if any(type(each) is not int or not 0 < each < square for each in ciphertexts):
            raise ValueError(
                f"ciphertexts of agent {other} hold what is no whole number from 1 to n^2 - 1; "
                "send ciphertexts under the asker's key"
            )
        return public, pool

    @staticmethod
    def _encrypted(public: Any, whole: int, obfuscator: int) -> int:
        """The ciphertext of a whole number, negative ones in the upper half of Z_n."""
        nude = 1 + public.n * (whole % public.n)
        return int(nude * obfuscator % public.nsquare)

    def _decrypted(self, ciphertext: int) -> int:
        whole = int(self._private.raw_decrypt(ciphertext))
        return whole - self.modulus if whole > self.modulus // 2 else whole
