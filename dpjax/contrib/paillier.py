"""Differences of models under Paillier's encryption, as the transport of a run.

For every link i-j and coordinate, in one round:

    i -> j    E_i(-x_i)
    j -> i    (E_i(x_j) E_i(-x_i))^b_ji E_i(e) = E_i(b_ji (x_j - x_i) + e)
    i         b_ij b_ji (x_j - x_i), added up over its neighbours

E_i is Paillier's cipher under i's key, b_ij is what i drew for the link and shows to nobody, and e
is a blur below half a grain of x_j's floating point. The arithmetic is phe's, by gmpy2: both come
with the extra ``contrib``. phe is under the GPL, version 3; dpjax is not, and imports it where it
is used and nowhere else.

Reference:
    Paillier (1999), Public-key cryptosystems based on composite degree residuosity classes; Zhang
    and Wang (2019), Enabling privacy-preservation in decentralized optimization.
"""

import importlib
import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from dpjax import _validate

__all__ = ["Agent", "Ciphertexts", "Crossed", "FixedPoint", "PaillierExchange"]

_LEAST_BITS = 1024
_MOST_BITS = 16384


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
    """

    value_bits: int = 64
    fraction_bits: int = 40
    weight_bits: int = 32

    def __post_init__(self) -> None:
        """Refuse what no float64 becomes."""
        limits = {"value_bits": (2, 512), "fraction_bits": (0, 511), "weight_bits": (1, 64)}
        for name, (lowest, highest) in limits.items():
            checked = _validate.integer(name, getattr(self, name), minimum=lowest, maximum=highest)
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
        """
        unit = 2.0**-self.fraction_bits
        weighing = 2.0 ** -(self.weight_bits + 1) * (abs(difference) + unit)
        return unit + unit / 2 * self.span(grain) + weighing

    def span(self, grain: float) -> int:
        """Return how many units 2^-f cover a grain of values; at least one.

        Args:
            grain: Distance of neighbouring values.
        """
        return max(1, math.ceil(math.ldexp(grain, self.fraction_bits)))

    def values(self, name: str, values: Float[np.ndarray, " d"]) -> list[int]:
        """Return X of every value.

        Args:
            name: What messages call the values.
            values: [d] reals.

        Raises:
            ValueError: For a value that is not finite or out of range.
        """
        floats = np.asarray(values, np.float64)
        if not np.isfinite(floats).all():
            position = int(np.argmin(np.isfinite(floats)))
            raise ValueError(
                f"{name} holds {floats[position]} at entry {position}, which has no fixed-point "
                "number; take a smaller step size if the run diverges"
            )
        # Beyond float64's range is beyond any here; ldexp is exact within, and round ties to even.
        with np.errstate(over="ignore"):
            scaled = np.ldexp(floats, self.fraction_bits)
        half = 2.0 ** (self.value_bits - 1)
        out = (np.rint(scaled) < -half) | (np.rint(scaled) >= half)
        if out.any():
            position = int(np.argmax(out))
            raise ValueError(
                f"{name} holds {floats[position]} at entry {position}, beyond {self.largest:.6g}, "
                f"the largest of value_bits {self.value_bits} with fraction_bits "
                f"{self.fraction_bits}; give more value_bits or fewer fraction_bits"
            )
        return [round(number) for number in scaled.tolist()]

    def weights(self, name: str, weights: Float[np.ndarray, " n"]) -> list[int]:
        """Return B of every weight.

        Args:
            name: What messages call the weights.
            weights: [n] from 0 to 1.

        Raises:
            ValueError: For a weight outside of 0 to 1.
        """
        floats = np.asarray(weights, np.float64)
        outside = ~((floats >= 0) & (floats <= 1))
        if outside.any():
            position = int(np.argmax(outside))
            raise ValueError(
                f"{name} holds {floats[position]} at entry {position}; draw weights from 0 to 1, "
                "and scale what is larger by the step"
            )
        return [round(number) for number in np.ldexp(floats, self.weight_bits).tolist()]

    def product(self, number: int) -> float:
        """Return the real of A: A / 2^(f+w), rounded once.

        Args:
            number: A weight times a difference of values.
        """
        return number / 2 ** (self.fraction_bits + self.weight_bits)


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
            "pip install '.[contrib]' (phe is under the GPL, version 3)"
        ) from None


def check_key_size(key_size: Any, code: FixedPoint, allow_weak: bool) -> int:
    """Return a key size that the cipher and the code can work with.

    Args:
        key_size: Bits of a modulus n.
        code: What is encrypted.
        allow_weak: Whether keys that are broken in practice may pass.

    Raises:
        ValueError: For a key that is weak, odd, or too short for a product.
    """
    minimum = 128 if allow_weak else _LEAST_BITS
    remedy = f"give an even number of bits from {minimum} to {_MOST_BITS}; 2048 is the default"
    size = _validate.integer(
        "key_size", key_size, minimum=minimum, maximum=_MOST_BITS, remedy=remedy
    )
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
        by_p = power(1 + secrets.randbelow(p - 1), p, p**2)
        by_q = power(1 + secrets.randbelow(q - 1), q, q**2)
        return by_p + p**2 * ((by_q - by_p) * self._inverse % q**2)


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
            ValueError: For a modulus that is even, one's own, or of fewer bits than that.
        """
        short = modulus.bit_length() < self._size
        if short or modulus % 2 == 0 or modulus == self.modulus:
            raise ValueError(
                f"modulus of agent {other} is even, one's own, or of fewer than {self._size} bits; "
                "let it make a key of its own, and give its `modulus`"
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
            ValueError: For what fixed-point numbers do not hold.
        """
        exponents = self._code.weights(f"weights of agent {self.number}", weights)
        entries = self._code.values(f"model of agent {self.number}", values)
        spreads = np.zeros(len(entries)) if grains is None else grains
        self._values = entries
        self._exponents = {other: exponents[other] for other in self._others}
        self._factors = {other: float(weights[other]) for other in self._others}
        self._answered = set()
        self._spans = [self._code.span(float(grain)) << self._code.weight_bits for grain in spreads]
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
        multiplied = self._arithmetic.mulmod
        power = self._arithmetic.powmod
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
        self._checked("answerer", answerer, ciphertexts, to_itself=True)
        decoded = [self._decrypted(number) for number in ciphertexts]
        beyond = [number for number in decoded if abs(number) >= 2 ** (self._code.product_bits - 1)]
        if beyond:
            raise ValueError(
                f"answerer is {answerer}, whose answer decrypts to {_validate.shown(beyond[0])}, "
                f"of more than {self._code.product_bits} bits; it was changed on its way, or made "
                "under another key or code: let all agents have the same code"
            )
        pulls = np.array([self._code.product(number) for number in decoded])
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
        self, name: str, other: int, ciphertexts: list[int], to_itself: bool = False
    ) -> tuple[Any, Obfuscators]:
        if other not in self._others:
            raise ValueError(f"{name} is {other}, a stranger to agent {self.number}; meet it first")
        if len(ciphertexts) != len(self._known()):
            raise ValueError(
                f"ciphertexts of agent {other} are {len(ciphertexts)}, and the model has "
                f"{len(self._known())} coordinates; send one for each"
            )
        public, pool = self._others[other]
        square = self._public.nsquare if to_itself else public.nsquare
        if any(
            type(ciphertext) is not int or not 0 < ciphertext < square for ciphertext in ciphertexts
        ):
            raise ValueError(
                f"ciphertexts of agent {other} hold what is no whole number from 1 to n^2 - 1; "
                "send ciphertexts under the asker's key"
            )
        return public, pool

    @staticmethod
    def _encrypted(public: Any, number: int, obfuscator: int) -> int:
        """The ciphertext of a whole number, negative ones in the upper half of Z_n."""
        nude = 1 + public.n * (number % public.n)
        return int(nude * obfuscator % public.nsquare)

    def _decrypted(self, ciphertext: int) -> int:
        number = int(self._private.raw_decrypt(ciphertext))
        return number - self.modulus if number > self.modulus // 2 else number


class Crossed(NamedTuple):
    """What crossed all links in one round.

    Attributes:
        round: Which, from 0.
        numbers: Ciphertexts.
        bytes: Their bytes: each is a number below n^2, sent at full length.
    """

    round: int
    numbers: int
    bytes: int


class Ciphertexts(NamedTuple):
    """One message, as whoever reads the link sees it.

    Attributes:
        sender: Agent.
        receiver: Agent.
        kind: A request, E_i(-x_i), or the answer to one.
        ciphertexts: A coordinate each.
    """

    sender: int
    receiver: int
    kind: Literal["request", "answer"]
    ciphertexts: tuple[int, ...]


class PaillierExchange:
    """sum_j b_ij b_ji (x_j - x_i) for all agents, no model and no weight of which crosses a link.

    ``run(plan, problem, seeds=[0], transport=PaillierExchange(links, n))`` carries the messages of
    `dpjax.algorithms.random_weights.Encrypted`, or of any method that sends a pair of a model and
    weights. Every agent's secrets are in an `Agent` of its own, which takes and gives ciphertexts.

    Guarantee: none of differential privacy, and none against neighbours who collude. Outsiders see
    Paillier ciphertexts, safe under the decisional composite residuosity assumption, for keys of
    2,048 bits (112 bits of security); agents follow the protocol. A neighbour learns the direction
    of x_j - x_i, since one b weighs all coordinates of a round, and its length times b. Values of a
    grid coarser than their dtype's, whole numbers say, may tell b. Powers are not computed in
    constant time. In a run of one process all of it is a simulation: keys come from the operating
    system, but weights from the message.

    Args:
        links: [e, 2] pairs of agents, each undirected link once.
        agents: How many agents n.
        key_size: Bits of every agent's modulus, even.
        code: Range and precision of fixed-point numbers.
        allow_weak: Whether keys below 1,024 bits pass: for tests, they are broken in practice.
        watch: Whether `seen` keeps the messages of the newest round.

    Attributes:
        agents: The agents.
        links: The links, sorted.
        key_size: Bits of a modulus.
        code: Fixed-point numbers.
        traffic: What crossed the links, a row a round delivered.
        seen: The messages of the newest round, if watched.

    Raises:
        ValueError: Without the extra ``secure``; for keys that are weak or too short for the code.
    """

    def __init__(
        self,
        links: Iterable[tuple[int, int]],
        agents: int,
        *,
        key_size: int = 2048,
        code: FixedPoint | None = None,
        allow_weak: bool = False,
        watch: bool = False,
    ) -> None:
        self.code = FixedPoint() if code is None else code
        self.links = sorted({(min(pair), max(pair)) for pair in links})
        self.key_size = check_key_size(key_size, self.code, allow_weak)
        self._watch = watch
        self.agents = [
            Agent(i, self.key_size, self.code, allow_weak=allow_weak) for i in range(agents)
        ]
        for i, j in self.links:
            self.agents[i].meet(j, self.agents[j].modulus)
            self.agents[j].meet(i, self.agents[i].modulus)
        self.traffic: list[Crossed] = []
        self.seen: list[Ciphertexts] = []

    @property
    def late(self) -> int:
        """How many obfuscators were computed during rounds, not ahead."""
        return sum(agent.late for agent in self.agents)

    def prepare(self, numbers: int) -> None:
        """Compute obfuscators ahead: each is used once, and what lacks is computed in the round.

        Args:
            numbers: Coordinates of a model times rounds.
        """
        for agent in self.agents:
            agent.prepare(numbers)

    def __call__(self, message: Any, round: int) -> Any:
        """Carry the messages of one round.

        Args:
            message: A pair: the model, a tree of arrays [n, ...], and weights [n, n] with b_ij in
                row i, 0 where no link is.
            round: Which round, from 0.

        Returns:
            A tree like the model: sum_j b_ij b_ji (x_j - x_i), [n, ...] in the model's dtypes.

        Raises:
            ValueError: For numbers that fixed point does not hold; nothing was sent then.
        """
        model, weights = message
        leaves, structure = jax.tree.flatten(model)
        leaves = [np.asarray(leaf) for leaf in leaves]
        n = len(self.agents)
        rows = [leaf.astype(np.float64).reshape(n, -1) for leaf in leaves]
        flat = np.concatenate(rows, axis=1)
        grains = np.concatenate([_leaf_grains(leaf) for leaf in leaves], axis=1)
        weights = np.asarray(weights)
        # Every model is checked before anything is sent.
        for agent in self.agents:
            i = agent.number
            agent.begin(flat[i], weights[i], grains[i])
        numbers = 0
        self.seen = []
        for agent in self.agents:
            if not agent.neighbours:
                continue
            request = agent.request()
            for other in agent.neighbours:
                answer = self.agents[other].answer(agent.number, request)
                agent.receive(other, answer)
                numbers += len(request) + len(answer)
                if self._watch:
                    place = agent.number, other
                    self.seen.append(Ciphertexts(*place, "request", tuple(request)))
                    self.seen.append(Ciphertexts(*place[::-1], "answer", tuple(answer)))
        # A ciphertext is a number modulo n^2, of twice the key's bits.
        size = 2 * self.key_size // 8
        self.traffic.append(Crossed(round, numbers, numbers * size))
        pulled = np.stack([agent.pulled() for agent in self.agents])
        ends = np.cumsum([leaf[0].size for leaf in leaves])[:-1]
        sums = []
        for part, leaf in zip(np.split(pulled, ends, axis=1), leaves, strict=True):
            sums.append(part.reshape(leaf.shape).astype(leaf.dtype))
        return jax.tree.unflatten(structure, sums)


def _leaf_grains(leaf: np.ndarray) -> Float[np.ndarray, "n d"]:
    """Distance of neighbouring floats at the largest entry of each agent's leaf.

    Smaller entries have smaller grains of their own, but where they are left of larger ones, as
    after a subtraction, they keep those of the larger ones.
    """
    flat = np.abs(leaf.astype(np.float64).reshape(len(leaf), -1))
    if not flat.size:
        return flat
    _, exponents = np.frexp(flat.max(axis=1, keepdims=True))
    grains = np.ldexp(float(jax.numpy.finfo(leaf.dtype).eps), exponents - 1)
    return np.broadcast_to(np.where(flat.max(axis=1, keepdims=True) > 0, grains, 0.0), flat.shape)
