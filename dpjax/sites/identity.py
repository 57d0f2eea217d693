"""Who a site is: its name, its certificate and key, the roster of all sites, and renewed keys.

A site is the name in its certificate. The plan pins every site's public key in a roster, so that
the authority that issues certificates is trusted only until the operators compared the roster's
digest. All keys are ECDSA P-256, as gRPC's TLS has them. A site signs, with SHA-256,

    label | purpose | name | data        each part with its length before it, in 8 bytes

These bytes begin with seven zeros. What TLS 1.3 signs begins with spaces, and a certificate or a
request with 0x30. TLS 1.2 signs random numbers of both ends first. So no signature of one use is
one of another, nor is that of one purpose or name.
"""

import base64
import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dpjax import _files, _validate
from dpjax._files import PathLike
from dpjax.encoding.stream import library

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

    Document = x509.Certificate | x509.CertificateSigningRequest

Parsed = TypeVar("Parsed")

__all__ = [
    "Authority",
    "Identity",
    "Refused",
    "Renewal",
    "Roster",
    "check_certificate",
    "renewal",
    "request",
]

_LABEL = b"dpjax site 1"
"""Changed with the bytes that are signed."""
_RENEWAL = "key renewal"
"""A purpose of this module alone: whoever signs others' data under it gives the name away."""
_KEY_BYTES = 91
"""Of a public key: `_KEY_HEAD`, and two coordinates of 32 bytes."""
_KEY_HEAD = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004")
"""How the DER bytes of every public key of ECDSA P-256 begin, its point uncompressed."""
# No IP address, which TLS compares with other entries of a certificate.
_WORD = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_NAME = re.compile(rf"(?=.{{1,63}}\Z)(?!\d+(\.\d+){{3}}\Z){_WORD}(\.{_WORD})*")
_MOST_BYTES = 1_000_000
"""Of a file of keys or certificates, which may be a device by mistake."""
_ROOT = "dpjax_authority"
"""No site can have this name: who has it issues certificates."""
_REMEDY = (
    "give PEM, a certificate of one DNS name, keys of ECDSA P-256; if a key is encrypted: openssl "
    "pkey -in KEY -out PLAIN"
)


class Refused(Exception):
    """Another site is refused: one line of printable ASCII, which may be sent to that site.

    Args:
        reason: Why. What could forge lines of a log is escaped.

    Example:
        >>> from dpjax.sites.identity import Refused
        >>> print(Refused("paris is not in the roster\\n"))
        paris is not in the roster
    """

    def __init__(self, reason: str) -> None:
        line = " ".join(reason.split())
        super().__init__(line.encode("unicode_escape").decode()[:300])


@dataclass(frozen=True)
class Roster(Mapping[str, bytes]):
    """Names of all sites and their public keys, in the plan's order, and renewals of keys.

    Guarantee: names and keys are each written in one way, so that comparing their bytes is enough,
    and no two names have one key. Rosters are equal if names, keys, order and renewals are.

    Args:
        sites: By name, in the plan's order, a public key: ECDSA P-256, as the DER bytes of a
            SubjectPublicKeyInfo. Names are labels of a-z, 0-9 and inner '-', with '.' between
            labels; at most 63 characters. At least two sites.

    Attributes:
        digest: SHA-256, hex, of names and pinned keys in their order. Renewals do not change it.
        renewals: Those that were accepted, in their order.

    Raises:
        ValueError: For fewer sites, other names and keys, and one key under two names.

    Example:
        >>> from dpjax.sites.identity import Roster
        >>> head = "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEaxfR8uEsQkf4vOblY6RA8ncDfYEt6zOg9KE5Rdi"
        >>> lyon = head + "YwpZP40Li/hp/m47n60p8D54WK84zV2sxXs7LtkBoN79R9Q=="
        >>> paris = head + "YwpawHL0cAeWAZXEYFLWD8GHp1DHMqZTOoTE0Sb+XyECuCg=="
        >>> roster = Roster.from_json({"lyon": lyon, "paris": paris})
        >>> list(roster), roster.verify("lyon", "hello", b"data", b"no signature")
        (['lyon', 'paris'], False)
    """

    sites: Mapping[str, bytes] = field(repr=False, hash=False)
    digest: str = field(init=False)
    renewals: tuple["Renewal", ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if not isinstance(self.sites, Mapping) or len(self.sites) < 2:
            raise _validate.refusal("roster", self.sites, "give the keys of two sites or more")
        keys = {}
        for name, key in self.sites.items():
            site_name("name in the roster", name)
            _public_key(name, key)
            keys[name] = bytes(key)
        if len(set(keys.values())) < len(keys):
            raise ValueError("roster has one key under two names; each site makes its own")
        names = [name.encode() for name in keys]
        digest = hashlib.sha256(_joined(b"dpjax roster 1", *names, *keys.values())).hexdigest()
        _validate.assign(self, sites=MappingProxyType(keys), digest=digest)

    def __getitem__(self, name: str) -> bytes:
        """The key that the plan pins for a name."""
        return self.sites[name]

    def __iter__(self) -> Iterator[str]:
        """The names, in the plan's order."""
        return iter(self.sites)

    def __len__(self) -> int:
        """How many sites there are."""
        return len(self.sites)

    def accepted(self, name: str) -> list[bytes]:
        """The keys of a name: the pinned one, then those that followed it; none if unknown."""
        pairs = [*self.items(), *((entry.name, entry.new) for entry in self.renewals)]
        return [key for holder, key in pairs if holder == name]

    def verify(self, name: str, purpose: str, data: bytes, signature: bytes) -> bool:
        """Return whether a site signed these data for this purpose, with a key of the roster.

        It never raises, and is False for whatever else others may send. Anybody can make a second
        valid signature of a first one, of the same data: compare data, never signatures.

        Args:
            name: The site's.
            purpose: What the data are.
            data: Bytes that were signed.
            signature: DER.
        """
        return any(_is_signed(key, name, purpose, data, signature) for key in self.accepted(name))

    def renewed(self, renewal: "Renewal") -> "Roster":
        """Return a roster that accepts a new key, beside those before it.

        A renewal withdraws no key: a site whose key was stolen leaves. Renewals are not known
        after a restart: apply them again, in their order.

        Args:
            renewal: Signed by the latest key of its name. One that is in ``renewals`` already is
                refused as a replay, so look there first.

        Raises:
            Refused: For an unknown name, a foreign signature, a key that is in use, and a renewal
                of any key but the latest.
        """
        name, new, signature = renewal
        is_free = not any(new in self.accepted(site) for site in self)
        # Without a key nothing is signed.
        latest = [b"", *self.accepted(name)][-1]
        is_signed = _is_signed(latest, name, _RENEWAL, latest + new, signature)
        if not (is_signed and is_free):
            raise Refused(f"renewal for {name} is not by its latest key, or its key is no new one")
        roster = Roster(self)
        _validate.assign(roster, renewals=(*self.renewals, renewal))
        return roster

    def to_json(self) -> dict[str, str]:
        """Return the pinned keys by name, in base64 as PEM files have them."""
        return {name: base64.b64encode(key).decode() for name, key in self.items()}

    @classmethod
    def from_json(cls, entries: Mapping[str, str]) -> "Roster":
        """Return the roster of what `to_json` returned.

        Args:
            entries: Of a name that stands twice in a text, json keeps the last alone.

        Raises:
            ValueError: For anything else.
        """
        _validate.refuse({"roster is no object of names; give one": type(entries) is not dict})
        # The text of what is no text is no key either.
        return cls({name: base64.b64decode(str(entries[name]), validate=True) for name in entries})

    @classmethod
    def of_certificates(cls, paths: Iterable[PathLike]) -> "Roster":
        """Return the roster of the sites whose certificates these are.

        Neither the authority's signature nor dates are checked: operators compare the digest.

        Args:
            paths: PEM files, in the plan's order.

        Raises:
            ValueError: For a certificate that no site can have, and two of one name.
        """
        holders = [certificate_of(path) for path in paths]
        roster = cls(dict(holders))
        remedy = "paths hold two certificates of one name; give one of each site"
        _validate.refuse({remedy: len(roster) < len(holders)})
        return roster


class Renewal(NamedTuple):
    """A new key of a site, signed by the one before it; `Roster.renewed` checks it.

    Attributes:
        name: The site's.
        new: Public key, DER.
        signature: Of the key before it and of this one, by the key before it.

    Example:
        >>> from dpjax.sites.identity import Renewal
        >>> Renewal.from_bytes(b"what another site sent")
        Traceback (most recent call last):
            ...
        ValueError: name of a renewal is ''; give 1 to 63 of a-z, 0-9, '-' and '.', no IP address
    """

    name: str
    new: bytes
    signature: bytes

    def to_bytes(self) -> bytes:
        """Return the bytes of it, for other sites and for a file."""
        return self.new + self.name.encode() + b"\0" + self.signature

    @classmethod
    def from_bytes(cls, data: bytes) -> "Renewal":
        """Return the renewal of what `to_bytes` returned; its signature is not checked.

        Raises:
            ValueError: For anything else.
        """
        new = data[:_KEY_BYTES]
        text, _, signature = data[_KEY_BYTES:].partition(b"\0")
        name = site_name("name of a renewal", text.decode("ascii"))
        _public_key(name, new)
        return cls(name, new, signature)


@dataclass(frozen=True, eq=False, repr=False)
class Identity:
    """This site: its name, certificate and private key; made by `load`.

    Guarantee: neither the repr nor an error shows the key, and objects are not pickled.

    Attributes:
        name: The site's.
        public_key: DER.
        certificate_chain: PEM, the site's own first.
        private_key_pem: PEM, for gRPC's credentials and nothing else.
        authority: PEM, the roots that this site trusts.

    Example:
        >>> from dpjax.sites.identity import Authority, Identity, Roster, request
        >>> authority = Authority("trial")
        >>> def identity(name):
        ...     key, demand = request(name, "site")
        ...     roots = authority.certificate
        ...     return Identity.load(name, certificate=authority.sign(demand), key=key,
        ...                          authority=roots)
        >>> lyon, paris = identity("lyon"), identity("paris")
        >>> roster = Roster({"lyon": lyon.public_key, "paris": paris.public_key})
        >>> signature = lyon.sign("hello", b"data")
        >>> lyon, roster.verify("lyon", "hello", b"data", signature)
        (Identity('lyon'), True)
    """

    name: str
    public_key: bytes
    certificate_chain: bytes
    authority: bytes
    _private: "ec.EllipticCurvePrivateKey"

    @classmethod
    def load(
        cls, name: str, *, certificate: PathLike, key: PathLike, authority: PathLike
    ) -> "Identity":
        """Return the identity in three PEM files, read once: call it again after a renewal.

        Args:
            name: The site's, as the certificate has it.
            certificate: The site's own, then those of intermediate authorities, if any.
            key: Private key, a file that no other user may read or write.
            authority: The roots that this site trusts.

        Raises:
            FileNotFoundError: Where a file is missing.
            ValueError: For a key that others may read, is encrypted or not the certificate's; a
                certificate of another name or of several, of another kind of key, of an authority,
                out of date, or not issued by the authority for both ends of TLS; and an authority's
                file with a certificate of anybody else.
        """
        private = _private_key(key)
        from cryptography import x509
        from cryptography.x509 import verification

        time = datetime.now(UTC)
        chain = _parsed(certificate, x509.load_pem_x509_certificates)
        roots = _parsed(authority, x509.load_pem_x509_certificates)
        for root in roots:
            # A few sites may do without an authority, and list each other's own certificates.
            if root.issuer != root.subject and not _is_authority(authority, root):
                raise ValueError(
                    f"authority is {authority}, in which {root.subject.rfc4514_string()} is no "
                    "authority; give roots alone"
                )
        holder, public = _holder(certificate, chain[0])
        is_own = private.public_key() == chain[0].public_key()
        _validate.refuse(
            {
                f"certificate is {certificate}, of {holder}; give that of {name!r}": holder != name,
                f"key is {key}, not that of {certificate}; give its own": not is_own,
            }
        )
        _check_dates(chain[0], name, time)
        policy = verification.PolicyBuilder().store(verification.Store(roots)).time(time)
        try:
            policy.build_client_verifier().verify(chain[0], chain[1:])
            policy.build_server_verifier(x509.DNSName(name)).verify(chain[0], chain[1:])
        except verification.VerificationError as error:
            raise ValueError(
                f"certificate is {certificate}, for which {authority} does not vouch "
                f"({_files.brief(error)}); give the roots of who issued it"
            ) from None
        # Written anew: gRPC gets what was checked, and nothing else that stood in the files.
        return cls(name, public, _pem(*chain), _pem(*roots), private)

    def __repr__(self) -> str:
        """Hide the key: logs show objects."""
        return f"Identity({self.name!r})"

    def __reduce__(self) -> str:
        """Refuse to be pickled or copied."""
        raise TypeError("Identity holds a private key, so it is not pickled; load it again")

    @property
    def private_key_pem(self) -> bytes:
        """PKCS8, for gRPC's credentials and nothing else."""
        return _private_pem(self._private)

    def sign(self, purpose: str, data: bytes) -> bytes:
        """Return this site's signature, DER, for `Roster.verify`.

        It is the same for the same data (RFC 6979), so that no copy of a machine's random numbers
        gives the key away.

        Args:
            purpose: What the data are, which the receiver must know alike; never a text of others.
            data: Any.

        Raises:
            ValueError: For other types.
        """
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        algorithm = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
        return self._private.sign(_signed_bytes(self.name, purpose, data), algorithm)


def renewal(identity: Identity, new: bytes) -> Renewal:
    """Return a renewal of a site's key, for all other sites.

    Args:
        identity: With the old key.
        new: The new public key, DER.

    Raises:
        ValueError: For another kind of key.

    Example:
        >>> from dpjax.sites.identity import Authority, Identity, renewal, request
        >>> key, demand = request("lyon", "site")
        >>> authority = Authority("trial")
        >>> certificate = authority.sign(demand)
        >>> roots = authority.certificate
        >>> lyon = Identity.load("lyon", certificate=certificate, key=key, authority=roots)
        >>> renewal(lyon, b"no key")
        Traceback (most recent call last):
            ...
        ValueError: key of lyon is not ECDSA P-256: give a public key, DER, uncompressed
    """
    _public_key(identity.name, new)
    signature = identity.sign(_RENEWAL, identity.public_key + new)
    return Renewal(identity.name, new, signature)


def renewed_key(identity: Identity, path: PathLike) -> bytes:
    """Return the new public key, DER, of a site's new certificate or signing request.

    Args:
        identity: With the old key.
        path: PEM.

    Raises:
        ValueError: For another name, the old key, and what no site can have.
    """
    from cryptography import x509

    def parse(content: bytes) -> "Document":
        if b"REQUEST" in content:
            return x509.load_pem_x509_csr(content)
        return x509.load_pem_x509_certificate(content)

    name, key = _holder(path, _parsed(path, parse))
    if name != identity.name or key == identity.public_key:
        remedy = f"give one of {identity.name} with a new key"
        raise _validate.refusal("new", f"{path} of {name}", remedy)
    return key


def certificate_of(path: PathLike) -> tuple[str, bytes]:
    """Return the name and the public key, DER, of a site's certificate.

    Args:
        path: PEM.

    Raises:
        ValueError: For one that no site can have.
    """
    from cryptography import x509

    return _holder(path, _parsed(path, x509.load_pem_x509_certificate))


def check_certificate(
    certificate: bytes,
    roster: Roster,
    departed: Collection[str] = frozenset(),
    now: datetime | None = None,
) -> str:
    """Return the name of the site that showed a certificate in TLS, which the roster must know.

    TLS has checked that the other end has the key, and who issued the certificate.

    Args:
        certificate: PEM.
        roster: Names and keys.
        departed: Names that are refused although the roster has them.
        now: In UTC, with its zone; None is this machine's clock.

    Raises:
        Refused: For no certificate, one that no site can have, an unknown or departed name, a key
            that the roster does not have for it, and one out of date.

    Example:
        >>> from dpjax.sites.identity import Authority, Roster, check_certificate, request
        >>> authority = Authority("trial")
        >>> names = ["lyon", "paris"]
        >>> certificates = [authority.sign(request(name, "site")[1]) for name in names]
        >>> roster = Roster.of_certificates(certificates)
        >>> check_certificate(certificates[0].read_bytes(), roster)
        'lyon'
    """
    from cryptography import x509

    try:
        parsed = x509.load_pem_x509_certificate(certificate)
        name, key = _holder("certificate", parsed)
        _validate.refuse(
            {
                f"{name} has left this run": name in departed,
                f"{name} is not in the roster here; where it joined, take the new plan": (
                    name not in roster
                ),
                f"{name} has another key in the roster": key not in roster.accepted(name),
            }
        )
        _check_dates(parsed, name, now or datetime.now(UTC))
    except Exception as error:  # Hostile certificates fail in every way.
        raise Refused(f"refused: {_files.brief(error)}") from None
    return name


def request(name: str, folder: PathLike) -> tuple[Path, Path]:
    """Make a site's private key and a signing request for its authority.

    The key is written once, mode 0600 from its first byte on, and never leaves the folder. Where
    the folder has one of that name, the request is to renew its certificate, and a line on standard
    error says so.

    Args:
        name: The site's.
        folder: Where to; made where there is none.

    Returns:
        The files of the key and of the request, PEM.

    Raises:
        ValueError: For other names, a folder that cannot be written, and a key in it that others
            may read.

    Example:
        >>> from dpjax.sites.identity import request
        >>> key, demand = request("lyon", "site")
        >>> key.name, oct(key.stat().st_mode), demand.name
        ('lyon.key', '0o100600', 'lyon.csr')
    """
    site_name("name", name)
    path = Path(folder, f"{name}.key")
    if path.exists():
        _files.say(f"{path} is there already: the request renews its certificate")
    with _files.writing("folder", folder):
        private = _lasting_key(path)
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        subject = x509.Name.from_rfc4514_string(f"CN={name}")
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        builder = x509.CertificateSigningRequestBuilder(subject).add_extension(
            names, critical=False
        )
        demand = path.with_suffix(".csr")
        _files.replace(demand, _pem(builder.sign(private, hashes.SHA256())))
    return path, demand


class Authority:
    """A small authority for trials: one a project, in a folder that is kept.

    It makes its key and root certificate once; a second object of the folder loads them. It gives a
    name to one key alone, and keeps that key beside the name's certificates. An organisation uses
    its own authority in its place.

    Args:
        folder: Of the authority alone; made where there is none.

    Attributes:
        certificate: PEM file of the root, for all sites.

    Raises:
        ValueError: For a folder that cannot be written, and a key in it that others may read.

    Example:
        >>> from dpjax.sites.identity import Authority, request
        >>> key, demand = request("lyon", "site")
        >>> Authority("trial").sign(demand, days=30).name
        'lyon.pem'
    """

    def __init__(self, folder: PathLike) -> None:
        self._folder = Path(folder)
        # No name of a site has an underscore, so no certificate takes the place of these files.
        self.certificate = self._folder / "authority_root.pem"
        with _files.writing("folder", folder):
            self._key = _lasting_key(self._folder / "authority_key.pem")
            root = _issued(_ROOT, self._key.public_key(), self._key, 3650)
            with contextlib.suppress(FileExistsError):
                _files.create(self.certificate, _pem(root))

    def sign(self, request: PathLike, days: int = 365) -> Path:
        """Return the file of a certificate, PEM, for both ends of TLS.

        Of the request only name and key are taken.

        Args:
            request: PEM file of a signing request.
            days: How long it is valid, from now.

        Raises:
            FileNotFoundError: Where there is no request.
            ValueError: For a request that is not signed by its key, other names and keys, and a
                name that was given to another key.
        """
        from cryptography import x509

        _validate.integer("days", days, maximum=3650)
        demand = _parsed(request, x509.load_pem_x509_csr)
        name, key = _holder(request, demand)
        if not demand.is_signature_valid:
            raise ValueError(f"request is {request}, not signed by its key; make another")
        with _files.writing("folder", self._folder):
            # Whose a name is stands there before the certificate does, and is never replaced.
            owner = self._folder / f"{name}.owner"
            with contextlib.suppress(FileExistsError):
                _files.create(owner, key)
            if owner.read_bytes() != key:
                raise ValueError(
                    f"request is {request}, for {name}, a name that was given to another key; "
                    "renew with that key, or choose another name"
                )
            path = self._folder / f"{name}.pem"
            _files.replace(path, _pem(_issued(name, demand.public_key(), self._key, days)))
        return path


def site_name(argument: str, value: object) -> str:
    """Return a site's name, else raise ValueError.

    Args:
        argument: What to call it in the message.
        value: Compared exactly with others: nothing is folded, stripped or decoded.
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        remedy = "give 1 to 63 of a-z, 0-9, '-' and '.', no IP address"
        raise _validate.refusal(argument, value, remedy)
    return value


def _joined(*parts: bytes) -> bytes:
    """The parts, each with its length before it: no two lists of parts are one string."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _signed_bytes(name: str, purpose: str, data: bytes) -> bytes:
    """What a signature is of, else raise ValueError for other types."""
    if type(purpose) is not str or type(data) is not bytes:
        raise ValueError("purpose or data has another type; give a text and bytes")
    return _joined(_LABEL, purpose.encode(), name.encode(), data)


def _is_signed(key: bytes, name: str, purpose: str, data: bytes, signature: bytes) -> bool:
    """Whether a key signed these; False for hostile bytes, too."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        message = _signed_bytes(name, purpose, data)
        _public_key(name, key).verify(signature, message, ec.ECDSA(hashes.SHA256()))
    except Exception:  # Hostile bytes fail in every way, and none of it is a signature.
        return False
    return True


def _public_key(name: str, key: bytes) -> "ec.EllipticCurvePublicKey":
    """A site's public key, else raise ValueError."""
    curves = library("cryptography.hazmat.primitives.asymmetric.ec")
    try:
        # Of the ways to write a point down one is valid, or two names could have one key.
        if key[: len(_KEY_HEAD)] != _KEY_HEAD:
            raise ValueError("another way, or another kind of key")
        # One byte of the head says that the point is uncompressed.
        point = bytes(key[len(_KEY_HEAD) - 1 :])
        public: ec.EllipticCurvePublicKey
        public = curves.EllipticCurvePublicKey.from_encoded_point(curves.SECP256R1(), point)
    except Exception:  # Hostile bytes fail in every way.
        remedy = "give a public key, DER, uncompressed"
        raise ValueError(f"key of {name} is not ECDSA P-256: {remedy}") from None
    return public


def _holder(path: PathLike, document: "Document") -> tuple[str, bytes]:
    """The name and key of a site's certificate or request, else raise ValueError."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    names = []
    with _files.reading(path, _REMEDY):
        for extension in document.extensions:
            value = extension.value
            if isinstance(value, x509.SubjectAlternativeName):
                names = value.get_values_for_type(x509.DNSName)
        if _is_authority(path, document):
            raise ValueError("it is of an authority")
        if len(names) != 1:
            raise ValueError(f"it has {len(names)} DNS names")
        name = site_name("its name", names[0])
        form = PublicFormat.SubjectPublicKeyInfo
        key = document.public_key().public_bytes(Encoding.DER, form)
        _public_key(name, key)
    return name, key


def _is_authority(path: PathLike, document: "Document") -> bool:
    """Whether a certificate may issue others, else raise ValueError where nobody can tell."""
    from cryptography import x509

    with _files.reading(path, _REMEDY):
        values = [extension.value for extension in document.extensions]
    return any(isinstance(value, x509.BasicConstraints) and value.ca for value in values)


def _check_dates(certificate: "x509.Certificate", name: str, time: datetime) -> None:
    """Refuse a site's certificate that is not valid at a time."""
    first = certificate.not_valid_before_utc
    last = certificate.not_valid_after_utc
    if not first <= time <= last:
        raise ValueError(
            f"certificate of {name} is valid from {first:%F %T} to {last:%F %T}, and the checking "
            f"machine's clock says {time:%F %T} UTC; compare them"
        )


def _parsed(path: PathLike, parse: Callable[[bytes], Parsed], is_secret: bool = False) -> Parsed:
    """What a small file holds, else raise ValueError; a secret one must be this user's alone."""
    with _files.reading(path, _REMEDY):
        # A pipe must not wait for its other end.
        file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
        with file:
            # Of the open file: behind a link, and whatever takes its place now.
            status = os.fstat(file.fileno())
            mode = status.st_mode & 0o777
            if is_secret and (mode & 0o077 or status.st_uid != os.geteuid()):
                raise ValueError(
                    f"key is {path}, which others may use (user {status.st_uid}, mode {mode:o}); "
                    "chmod 600 as its owner, or make another"
                )
            return parse(file.read(_MOST_BYTES))


def _private_key(path: PathLike) -> "ec.EllipticCurvePrivateKey":
    """The key of a PEM file, else raise ValueError, which does not show it."""
    serialization = library("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric import ec

    def parse(content: bytes) -> ec.EllipticCurvePrivateKey:
        key = serialization.load_pem_private_key(content, None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp256r1":
            raise ValueError("its key is not ECDSA P-256")
        return key

    return _parsed(path, parse, is_secret=True)


def _lasting_key(path: Path) -> "ec.EllipticCurvePrivateKey":
    """The key of a file: made where there is none, and never replaced."""
    curves = library("cryptography.hazmat.primitives.asymmetric.ec")
    with contextlib.suppress(FileExistsError):
        key = curves.generate_private_key(curves.SECP256R1())
        _files.create(path, _private_pem(key), mode=0o600)
    return _private_key(path)


def _private_pem(key: "ec.EllipticCurvePrivateKey") -> bytes:
    """A private key as PKCS8 PEM."""
    from cryptography.hazmat.primitives import serialization

    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, plain)


def _pem(*documents: "Document") -> bytes:
    """Certificates, or a request, as PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return b"".join(document.public_bytes(Encoding.PEM) for document in documents)


def _issued(
    name: str, public: "CertificatePublicKeyTypes", issuer: "ec.EllipticCurvePrivateKey", days: int
) -> "x509.Certificate":
    """A certificate from now on: the authority's root under its own name, else a site's."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    is_root = name == _ROOT
    # Digital signature, or certificates and lists of withdrawn ones; nothing else.
    no = False
    uses = x509.KeyUsage(not is_root, no, no, no, no, is_root, is_root, no, no)
    ends = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())
    time = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder(x509.Name.from_rfc4514_string(f"CN={_ROOT}"))
        .subject_name(x509.Name.from_rfc4514_string(f"CN={name}"))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        # A site's clock may be behind that of the authority.
        .not_valid_before(time - timedelta(minutes=5))
        .not_valid_after(time + timedelta(days))
        .add_extension(x509.BasicConstraints(is_root, 0 if is_root else None), critical=True)
        .add_extension(uses, critical=True)
        .add_extension(x509.ExtendedKeyUsage(ends), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(key_id, critical=False)
    )
    return builder.sign(issuer, hashes.SHA256())
