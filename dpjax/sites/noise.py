"""The noise of a site: normals from a secret that the site holds, each at an address of its own.

A secret is 32 bytes, of one site alone or of a group of sites that draw the same noise. Every draw
has an address, and a key that follows from the secret and the address:

    key  = HKDF-SHA256(secret, salt = run,
                       info = label | purpose | holder | phase | round | group | rows | entries)
    word = ChaCha20(key), 32 bits each, two for a normal

Each part of ``info`` has its length before it, so that no two addresses are one string. A process
that was killed draws the same numbers again, wherever it stopped, and no counter of a key repeats.
The normals are those of a release (`dpjax.transforms.variates`): 64 bits each, refined by 64 more
in the far tail, in float64. Only the generator differs: a secret of 256 bits, which may serve
between organisations, in place of threefry's 64.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from dpjax import _validate
from dpjax._numerics import WordPair, Words, double_precision
from dpjax.accounting import finite
from dpjax.encoding.stream import Stream
from dpjax.secagg.primitives import KEY_BYTES, agreed, derived
from dpjax.transforms import variates

__all__ = ["SiteNoise"]

_LABEL = b"dpjax site 1"
"""Changed with the derivation: rounds whose noise returns later must be drawn alike."""
_PAIR_LABEL = b"dpjax site pair 1"
_LARGEST = 2**31 - 2
"""Of phases, rounds and groups, which an int32 counts."""


class SiteNoise:
    """Normals of one secret in one run and phase, by round and group of parameters.

    Guarantee: normals of different secrets, runs, holders, phases, rounds, groups, shapes, rows and
    entries are independent for whoever does not hold the secret, if ChaCha20 is pseudorandom, and
    HMAC-SHA256 too, keyed by the secret or by the run. What 64 bits and float64 cost is bounded as
    for a release (`dpjax.accounting.finite`). The noise of a site's message, a sum over addresses
    that its strategy fixes, must be added to one payload alone: a site stores a message before it
    sends it. Whoever gets the secret later subtracts the noise of all rounds. The repr does not
    show the secret, and objects are not pickled.

    Args:
        secret: 32 bytes, of ``secrets.token_bytes(32)``, drawn for this run.
        run: 32 bytes that no other run has, such as a digest of the plan and of nonces of all
            sites. Under the same run, a second start would add the same noise to other payloads.
        holder: Name of the site, or of the group that holds the secret: two that were given one
            secret by mistake have different noise.
        phase: Number of the plan among those of a project, from 0.

    Raises:
        ValueError: For other arguments, and a secret of zeros, which is a file that was lost; from
            `normals`, without the extra ``secure``.

    Example:
        >>> from dpjax.sites.noise import SiteNoise
        >>> noise = SiteNoise(bytes(range(32)), run=bytes(32), holder="Lyon")
        >>> noise.normals(round=0, group=0, rows=1, entries=3).shape
        (1, 3)
    """

    def __init__(self, secret: bytes, *, run: bytes, holder: str, phase: int = 0) -> None:
        self._phase = _validate.integer("phase", phase, minimum=0, maximum=_LARGEST)
        if not isinstance(holder, str) or not holder:
            raise _validate.refusal("holder", holder, "give the name of a site, or of a group")
        # The message shows neither of them.
        for name, value in (("run", run), ("secret", secret)):
            if not isinstance(value, bytes) or len(value) != KEY_BYTES:
                raise ValueError(f"{name} is no {KEY_BYTES} bytes; give bytes of that length")
        self._holder = holder.encode()
        self._run = run
        self._secret = secret
        if not any(secret):
            raise ValueError("secret is all zeros, as of a file that was lost; draw another")

    def __repr__(self) -> str:
        """Hide the secret: logs show objects."""
        return "SiteNoise(...)"

    def __reduce__(self) -> str:
        """Refuse to be pickled."""
        raise TypeError("SiteNoise holds a secret, so it is not pickled; keep the secret's file")

    def normals(self, *, round: int, group: int, rows: int, entries: int) -> np.ndarray:
        """Return the normals of a round's group of parameters.

        The bits are always the same. The numbers are so on one machine with one version of JAX;
        elsewhere they agree within the error that `dpjax.accounting.finite` accounts for.

        Args:
            round: Rounds done before.
            group: Number of the group of parameters that share a draw.
            rows: Sites of the secret's group; one for a secret of the site's own.
            entries: Parameters of the group.

        Returns:
            [rows, entries] float64, row i that of the group's site i.

        Raises:
            ValueError: For numbers out of range.
        """
        address = (
            self._phase,
            _validate.integer("round", round, minimum=0, maximum=_LARGEST),
            _validate.integer("group", group, minimum=0, maximum=_LARGEST),
            _validate.integer("rows", rows),
            _validate.integer("entries", entries),
        )
        # On a processor whose float64 is tested, and where the words of a secret stay.
        processor = jax.local_devices(backend="cpu")[0]
        with double_precision(), jax.default_device(processor):
            words = self._words("normals", address)
            values, is_rare = _drawn(*words)
            if bool(is_rare.any()):
                finer = self._words("finer normals", address)
                refined = variates.quantile(variates.signed_probabilities(*words, finer))
                values = jnp.where(is_rare, refined, values)
            return np.asarray(values)

    def stream(self, purpose: str, *, round: int) -> Stream:
        """Return words of a purpose in a round, each stream's its own.

        Args:
            purpose: What they are for: roundings apart from noise.
            round: Rounds done before.
        """
        number = _validate.integer("round", round, minimum=0, maximum=_LARGEST)
        return Stream(self._key(purpose, (self._phase, number)))

    def _key(self, purpose: str, address: tuple[int, ...]) -> bytes:
        numbers = [number.to_bytes(8, "big") for number in address]
        return derived(self._secret, purpose, self._run, self._holder, *numbers, label=_LABEL)

    def _words(self, purpose: str, address: tuple[int, ...]) -> WordPair:
        """The 64 bits of every number at an address, whose last parts are rows and entries."""
        rows, entries = address[-2:]
        words = Stream(self._key(purpose, address)).words(2 * rows * entries)
        pairs = words.reshape(rows, entries, 2)
        return jnp.asarray(pairs[..., 0]), jnp.asarray(pairs[..., 1])


def of_pair(
    private: bytes, ends: Mapping[str, bytes], other: str, *, run: bytes, phase: int = 0
) -> SiteNoise:
    """Return the noise of a link, which its two ends draw alike and nobody else.

    Guarantee: that of `SiteNoise`, against whoever holds neither end's private key, if the gap
    Diffie-Hellman problem on Curve25519 is hard and HKDF is a random oracle. Names, keys, run and
    phase are in the derivation: the noise of two links has nothing in common, whatever keys the
    other ends show.

    Args:
        private: This end's X25519 private key, drawn for this run.
        ends: Names of the two sites, and their public keys.
        other: The name of the other end.
        run: As in `SiteNoise`.
        phase: As in `SiteNoise`.

    Raises:
        ValueError: For a public key of low order.
    """
    shared = agreed(private, ends[other])
    parts = [phase.to_bytes(8, "big")]
    for name in sorted(ends):
        parts += [name.encode(), ends[name]]
    secret = derived(shared, "pair", run, *parts, label=_PAIR_LABEL)
    return SiteNoise(secret, run=run, holder=",".join(sorted(ends)), phase=phase)


@jax.jit
def _drawn(high: Words, low: Words) -> tuple[Float[Array, "..."], Bool[Array, "..."]]:
    """The normals of words, and which of them are to be refined."""
    signed = variates.signed_probabilities(high, low)
    return variates.quantile(signed), abs(signed) < finite.SAMPLER.finer
