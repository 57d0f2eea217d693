"""Who a site is: every refusal, signatures derived by hand, hostile bytes, and TLS with gRPC."""

import contextlib
import copy
import datetime
import hashlib
import os
import pickle
import random
import stat
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509 import verification
from hypothesis import given
from hypothesis import strategies as st

from dpjax.sites import identity
from dpjax.sites.identity import (
    Authority,
    Identity,
    Refused,
    Renewal,
    Roster,
    check_certificate,
    renewal,
    renewed_key,
    request,
)

NAMES = ("lyon", "paris", "hopital-9.example")
DAY = datetime.timedelta(days=1)
NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
Key = ec.EllipticCurvePrivateKey


class Project(NamedTuple):
    """Three sites of one authority."""

    folder: Path
    authority: Authority
    roster: Roster
    identities: dict[str, Identity]

    def paths(self, name: str) -> dict[str, Path]:
        """What `Identity.load` reads."""
        return {
            "certificate": self.authority.certificate.with_name(f"{name}.pem"),
            "key": self.folder / f"{name}.key",
            "authority": self.authority.certificate,
        }


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("project")
    authority = Authority(folder / "authority")
    paths = [authority.sign(request(name, folder)[1]) for name in NAMES]
    project = Project(folder, authority, Roster.of_certificates(paths), {})
    for name in NAMES:
        project.identities[name] = Identity.load(name, **project.paths(name))
    return project


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def der(key: Key) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.DER, form)


def pem(key: Key, password: bytes | None = None) -> bytes:
    hiding = serialization.NoEncryption()
    if password:
        hiding = serialization.BestAvailableEncryption(password)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hiding)


def secret_file(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def issued(
    issuer: Key,
    key: Key,
    *,
    names: tuple[x509.GeneralName, ...] = (x509.DNSName("lyon"),),
    issuer_name: str = "dpjax_authority",
    subject: str = "lyon",
    first: datetime.datetime = NOW - DAY,
    last: datetime.datetime = NOW + DAY,
    is_authority: bool = False,
    uses: tuple[x509.ObjectIdentifier, ...] = (
        x509.ExtendedKeyUsageOID.SERVER_AUTH,
        x509.ExtendedKeyUsageOID.CLIENT_AUTH,
    ),
) -> x509.Certificate:
    """A certificate by hand, as an authority could issue it that is careless or hostile."""
    constraints = x509.BasicConstraints(is_authority, None)
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer_name)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(first)
        .not_valid_after(last)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if uses:
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    return builder.sign(issuer, hashes.SHA256())


def text_of(*certificates: x509.Certificate) -> bytes:
    return b"".join(entry.public_bytes(serialization.Encoding.PEM) for entry in certificates)


def authority_key(project: Project) -> Key:
    path = project.authority.certificate.with_name("authority_key.pem")
    return serialization.load_pem_private_key(path.read_bytes(), None)


def site_key(project: Project, name: str = "lyon") -> Key:
    return serialization.load_pem_private_key(project.identities[name].private_key_pem, None)


def unsafe_dns_name(text: str) -> x509.DNSName:
    """A name that the library would not write, but reads."""
    entry = x509.DNSName("x")
    entry._value = text
    return entry


# Rosters.


def test_roster_is_in_order_and_frozen(project):
    roster = project.roster
    assert list(roster) == list(NAMES) and len(roster) == 3
    assert all(roster[name] == project.identities[name].public_key for name in NAMES)
    with pytest.raises(TypeError):
        roster.sites["lyon"] = b""
    with pytest.raises(AttributeError):
        roster.digest = ""
    source = {name: bytearray(key) for name, key in roster.items()}
    other = Roster(source)
    source["lyon"].clear()
    assert other == roster and hash(other) == hash(roster)


def test_digest_is_of_names_keys_and_order(project):
    roster = project.roster
    parts = [b"dpjax roster 1", *(name.encode() for name in roster), *roster.values()]
    data = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    assert roster.digest == hashlib.sha256(data).hexdigest()
    turned = Roster({name: roster[name] for name in reversed(NAMES)})
    assert turned.digest != roster.digest and turned != roster
    swapped = Roster(dict(zip(NAMES, reversed(list(roster.values())), strict=True)))
    assert swapped.digest != roster.digest


def test_roster_returns_from_json(project):
    entries = project.roster.to_json()
    assert type(entries) is dict and Roster.from_json(entries) == project.roster
    assert all(type(text) is str for text in entries.values())


BAD_NAMES = (
    *(
        "",
        "Lyon",
        "lyon.",
        ".lyon",
        "a..b",
        "-a",
        "a-",
        "a.-b",
        "*.lyon",
        "*",
        "a_b",
        "a b",
        "lyon\n",
    ),
    *("l\u0443on", "ly\u043en", "lyon\u200b", "\uff4cyon", "l\u00f6wen", "lyon\0", "a" * 64),
    *(
        "10.0.0.1",
        "255.255.255.255",
        "..",
        "../lyon",
        "a/b",
        "::1",
        "dpjax_authority",
        7,
        None,
        b"lyon",
    ),
)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_name_is_refused_everywhere(name, project, tmp_path):
    keys = {name: der(new_key()), "paris": der(new_key())}
    with pytest.raises(ValueError, match="name in the roster is"):
        Roster(keys)
    with pytest.raises(ValueError, match="name is"):
        request(name, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError):
        Identity.load(name, **project.paths("lyon"))
    assert not project.roster.verify(name, "hello", b"", b"")


@pytest.mark.parametrize(
    "name", ["a", "7", "a" * 63, "a-b.c--d.e", "xn--lwen-5qa", "1.2.3", "1.2.3.4.5"]
)
def test_good_name_is_taken(name):
    assert name in Roster({name: der(new_key()), "paris": der(new_key())})


def test_few_sites_and_shared_keys_are_refused():
    key = der(new_key())
    for sites in ({}, {"lyon": key}, [("lyon", key)], None):
        with pytest.raises(ValueError, match="two sites or more"):
            Roster(sites)
    with pytest.raises(ValueError, match="one key under two names"):
        Roster({"lyon": key, "paris": key})


def bad_keys() -> dict[str, object]:
    encoding = serialization.Encoding
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    key = der(new_key())
    point = ec.EllipticCurvePublicNumbers(1, 1, ec.SECP256R1())
    return {
        "other curve": der(ec.generate_private_key(ec.SECP384R1())),
        "look-alike curve": der(ec.generate_private_key(ec.SECP256K1())),
        "RSA": rsa.generate_private_key(65537, 2048).public_key().public_bytes(encoding.DER, form),
        "PEM": new_key().public_key().public_bytes(encoding.PEM, form),
        "off the curve": key[:-64] + point.x.to_bytes(32) + point.y.to_bytes(32),
        "trailing byte": key + b"\0",
        "truncated": key[:-1],
        "compressed": key[:26].replace(b"\x30\x59", b"\x30\x39").replace(b"\x42\0", b"\x22\0")
        + bytes([2 + key[-1] % 2])
        + key[27:59],
        "empty": b"",
        "text": "key",
        "nothing": None,
    }


@pytest.mark.parametrize("kind", bad_keys())
def test_other_kinds_of_key_are_refused(kind, project):
    key = bad_keys()[kind]
    with pytest.raises(ValueError, match="key of lyon is"):
        Roster({"lyon": key, "paris": der(new_key())})
    with pytest.raises(ValueError, match="key of lyon is"):
        renewal(project.identities["lyon"], key)


def test_compressed_key_is_the_same_key_to_the_library():
    # So the refusal above is of a second way to write a key, not of garbage.
    key = bad_keys()["compressed"]
    assert serialization.load_der_public_key(key).curve.name == "secp256r1"


def test_certificates_of_one_name_are_refused(project):
    path = project.paths("lyon")["certificate"]
    with pytest.raises(ValueError, match="two certificates of one name"):
        Roster.of_certificates([path, path, project.paths("paris")["certificate"]])


@pytest.mark.parametrize("entries", [None, [], "lyon", 7, {"lyon": 7}, {"lyon": "\u00e9"}, {7: ""}])
def test_other_json_is_refused(entries):
    with pytest.raises(ValueError):
        Roster.from_json(entries)


# Signatures.


def message(purpose: str, name: str, data: bytes) -> bytes:
    """What is signed, by hand."""
    parts = (b"dpjax site 1", purpose.encode(), name.encode(), data)
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def test_signature_is_of_the_stated_bytes(project):
    signature = project.identities["lyon"].sign("hello", b"data")
    public = site_key(project).public_key()
    public.verify(signature, message("hello", "lyon", b"data"), ec.ECDSA(hashes.SHA256()))
    foreign = site_key(project).sign(message("hello", "lyon", b"x"), ec.ECDSA(hashes.SHA256()))
    assert project.roster.verify("lyon", "hello", b"x", foreign)


def test_signature_needs_no_random_numbers(project):
    lyon = project.identities["lyon"]
    assert lyon.sign("hello", b"data") == lyon.sign("hello", b"data")


def test_signature_is_for_one_purpose_name_and_data(project):
    roster = project.roster
    signature = project.identities["lyon"].sign("hello", b"data")
    assert roster.verify("lyon", "hello", b"data", signature)
    others = (
        ("paris", "hello", b"data"),
        ("unknown", "hello", b"data"),
        ("lyon", "hell", b"odata"),
        ("lyon", "hello2", b"data"),
        ("lyon", "", b"hellodata"),
        ("lyon", "hello", b"datb"),
        ("lyon", "hello", b""),
    )
    assert not any(roster.verify(*other, signature) for other in others)
    # Also where two names have swapped keys, and the name alone differs.
    swapped = Roster({"lyon": roster["paris"], "paris": roster["lyon"]})
    assert not swapped.verify("paris", "hello", b"data", signature)


def test_plain_signature_of_data_is_none(project):
    signature = site_key(project).sign(b"data", ec.ECDSA(hashes.SHA256()))
    assert not project.roster.verify("lyon", "hello", b"data", signature)
    # Nor is that of a request or a certificate, which the same key signs.
    demand = x509.load_pem_x509_csr((project.folder / "lyon.csr").read_bytes())
    data = demand.tbs_certrequest_bytes
    assert not project.roster.verify("lyon", "hello", data, demand.signature)
    assert message("", "", b"")[0] not in (0x20, 0x30)


@pytest.mark.parametrize("arguments", [(7, b""), ("hello", "data"), (b"hello", b""), ("hello", 5)])
def test_other_types_are_not_signed(arguments, project):
    with pytest.raises(ValueError, match="give a text and bytes"):
        project.identities["lyon"].sign(*arguments)


HOSTILE = (
    None,
    0,
    7,
    -1,
    1.5,
    True,
    "",
    "\ud800",
    "lyon",
    b"",
    b"\x30",
    [],
    {},
    (),
    object(),
    bytes,
)


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: type(value).__name__)
def test_hostile_arguments_are_no_signature(value, project):
    lyon = project.identities["lyon"]
    arguments = ["lyon", "hello", b"data", lyon.sign("hello", b"data")]
    assert project.roster.verify(*arguments)
    for position in range(4):
        changed = [*arguments]
        changed[position] = value
        if changed != arguments:
            assert project.roster.verify(*changed) is False


def mutated(data: bytes, source: random.Random) -> bytes:
    """One of the ways that bytes go wrong: flipped, cut, doubled, inserted, deleted."""
    position = source.randrange(len(data))
    byte = bytes([source.randrange(256)])
    ways = (
        data[:position] + bytes([data[position] ^ 1 << source.randrange(8)]) + data[position + 1 :],
        data[:position],
        data[:position] + byte + data[position:],
        data[:position] + data[position + 1 :],
        data[:position] + source.randbytes(8) + data[position + 8 :],
        data + data[position:],
    )
    return ways[source.randrange(len(ways))]


def test_mutated_bytes_never_raise_otherwise(project):
    source = random.Random(1)
    lyon = project.identities["lyon"]
    roster = project.roster
    signature = lyon.sign("hello", b"data")
    entry = renewal(lyon, der(new_key())).to_bytes()
    text = lyon.certificate_chain
    for _ in range(500):
        assert not roster.verify("lyon", "hello", b"data", mutated(signature, source))
        with contextlib.suppress(ValueError, Refused):
            roster.renewed(Renewal.from_bytes(mutated(entry, source)))
            raise AssertionError("a changed renewal was taken")
        with contextlib.suppress(Refused):
            assert check_certificate(mutated(text, source), roster) == "lyon"
        entries = roster.to_json()
        entries["lyon"] = mutated(entries["lyon"].encode(), source).decode("latin1")
        with contextlib.suppress(ValueError):
            assert Roster.from_json(entries) != roster


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(ValueError):
        Renewal.from_bytes(data)
    keys = {"lyon": der(KEYS[0]), "paris": der(KEYS[1])}
    roster = Roster(keys)
    assert not roster.verify("lyon", "hello", b"data", data)
    with pytest.raises(Refused):
        check_certificate(data, roster)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
KEYS = (new_key(), new_key())


@given(json_values)
def test_arbitrary_json_is_refused(entries):
    with pytest.raises(ValueError):
        Roster.from_json(entries)


# Identities.


def test_identity_is_what_its_files_hold(project):
    lyon = project.identities["lyon"]
    paths = project.paths("lyon")
    assert lyon.name == "lyon" and lyon.public_key == der(site_key(project))
    assert lyon.certificate_chain == paths["certificate"].read_bytes()
    assert lyon.authority == paths["authority"].read_bytes()
    assert lyon.private_key_pem == paths["key"].read_bytes()


def test_no_secret_is_shown_or_pickled(project):
    lyon = project.identities["lyon"]
    lines = lyon.private_key_pem.splitlines()[1:-1]
    number = site_key(project).private_numbers().private_value
    shown = f"{lyon!r}{lyon}{project!r}{vars(lyon)}{lyon.__dict__}"
    assert not any(line.decode() in shown for line in lines)
    assert str(number) not in shown and f"{number:x}" not in shown
    assert repr(lyon) == "Identity('lyon')"
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            attempt(lyon)
    with pytest.raises(TypeError):
        pickle.dumps(project.authority)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o660, 0o777])
def test_key_that_others_may_use_is_refused(mode, project, tmp_path):
    paths = project.paths("lyon")
    paths["key"] = secret_file(tmp_path / "key", paths["key"].read_bytes(), mode)
    with pytest.raises(ValueError, match=f"others may use .*mode {mode:o}.*chmod 600"):
        Identity.load("lyon", **paths)
    paths["key"].chmod(0o400)
    assert Identity.load("lyon", **paths).name == "lyon"


def test_key_of_another_user_is_refused(project, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ValueError, match="others may use"):
        Identity.load("lyon", **project.paths("lyon"))


def test_linked_key_is_checked_behind_the_link(project, tmp_path):
    paths = project.paths("lyon")
    file = secret_file(tmp_path / "file", paths["key"].read_bytes(), 0o644)
    paths["key"] = tmp_path / "link"
    paths["key"].symlink_to(file)
    with pytest.raises(ValueError, match="others may use"):
        Identity.load("lyon", **paths)
    file.chmod(0o600)
    assert Identity.load("lyon", **paths).name == "lyon"
    file.unlink()
    with pytest.raises(FileNotFoundError, match="link does not exist"):
        Identity.load("lyon", **paths)


def test_encrypted_key_is_refused_with_remedy(project, tmp_path):
    paths = project.paths("lyon")
    paths["key"] = secret_file(tmp_path / "key", pem(site_key(project), b"password"))
    with pytest.raises(ValueError, match="is encrypted.*openssl pkey"):
        Identity.load("lyon", **paths)


def test_foreign_key_is_refused(project):
    paths = project.paths("lyon") | {"key": project.paths("paris")["key"]}
    with pytest.raises(ValueError, match="paris.key, not that of .*lyon.pem"):
        Identity.load("lyon", **paths)


def test_other_curve_of_key_is_refused(project, tmp_path):
    paths = project.paths("lyon")
    key = ec.generate_private_key(ec.SECP384R1())
    paths["key"] = secret_file(tmp_path / "key", pem(key))
    with pytest.raises(ValueError, match="not ECDSA P-256"):
        Identity.load("lyon", **paths)


def test_damaged_key_is_refused_without_showing_it(project, tmp_path):
    paths = project.paths("lyon")
    content = paths["key"].read_bytes()
    source = random.Random(2)
    pieces = [content[start : start + 12].decode() for start in range(30, len(content) - 40)]
    for _ in range(100):
        paths["key"] = secret_file(tmp_path / "key", mutated(content, source))
        try:
            Identity.load("lyon", **paths)
        except ValueError as error:
            text = "".join(traceback.format_exception(error))
            assert not any(piece in text for piece in pieces)


@pytest.mark.parametrize("kind", ["folder", "pipe", "empty", "device"])
@pytest.mark.parametrize("argument", ["key", "certificate", "authority"])
def test_no_file_is_refused_at_once(kind, argument, project, tmp_path):
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir(0o700)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "empty":
        secret_file(path, b"")
    else:
        path = Path("/dev/zero")
    with pytest.raises(ValueError, match="file|zero"):
        Identity.load("lyon", **project.paths("lyon") | {argument: path})


@pytest.mark.parametrize("argument", ["key", "certificate", "authority"])
def test_missing_file_is_named(argument, project, tmp_path):
    with pytest.raises(FileNotFoundError, match="gone does not exist"):
        Identity.load("lyon", **project.paths("lyon") | {argument: tmp_path / "gone"})


def test_certificate_of_another_name_is_refused(project):
    with pytest.raises(ValueError, match="lyon.pem, of lyon; give that of 'paris'"):
        Identity.load("paris", **project.paths("lyon"))
    with pytest.raises(ValueError, match="give that of 'LYON'"):
        Identity.load("LYON", **project.paths("lyon"))


def loaded(project: Project, folder: Path, *certificates: x509.Certificate) -> Identity:
    """Lyon's identity with other certificates."""
    path = folder / "changed.pem"
    path.write_bytes(text_of(*certificates))
    return Identity.load("lyon", **project.paths("lyon") | {"certificate": path})


def test_certificate_by_hand_is_taken(project, tmp_path):
    # So the refusals below are of what each changes.
    certificate = issued(authority_key(project), site_key(project))
    assert loaded(project, tmp_path, certificate).name == "lyon"
    assert check_certificate(text_of(certificate), project.roster) == "lyon"
    other_subject = issued(authority_key(project), site_key(project), subject="paris")
    assert loaded(project, tmp_path, other_subject).name == "lyon"


def entries(*names: str) -> tuple[x509.GeneralName, ...]:
    return tuple(map(unsafe_dns_name, names))


BAD_CERTIFICATES: dict[str, tuple[dict[str, object], str]] = {
    "several names": ({"names": entries("lyon", "paris")}, "has 2 DNS names"),
    "a name twice": ({"names": entries("lyon", "lyon")}, "has 2 DNS names"),
    "no names": ({"names": ()}, "has 0 DNS names"),
    "a mail address": ({"names": (x509.RFC822Name("lyon"),)}, "has 0 DNS names"),
    "an identifier": ({"names": (x509.UniformResourceIdentifier("lyon"),)}, "has 0 DNS names"),
    "wildcard": ({"names": entries("*.lyon")}, "its name is"),
    "any": ({"names": entries("*")}, "its name is"),
    "trailing dot": ({"names": entries("lyon.")}, "its name is"),
    "capitals": ({"names": entries("LYON")}, "its name is"),
    "zero byte": ({"names": entries("lyon\0.example")}, "its name is"),
    "empty": ({"names": entries("")}, "its name is"),
    "an authority": ({"is_authority": True}, "is of an authority"),
    "expired": (
        {"first": NOW - 3 * DAY, "last": NOW - DAY},
        f"valid from {NOW - 3 * DAY:%F %T} to {NOW - DAY:%F %T}.*clock says {NOW:%F}",
    ),
    "not yet valid": (
        {"first": NOW + DAY, "last": NOW + 2 * DAY},
        f"valid from {NOW + DAY:%F %T}.*clock says {NOW:%F}",
    ),
}


@pytest.mark.parametrize("kind", BAD_CERTIFICATES)
def test_bad_certificate_is_refused_at_both_ends(kind, project, tmp_path):
    changes, reason = BAD_CERTIFICATES[kind]
    certificate = issued(authority_key(project), site_key(project), **changes)
    with pytest.raises(ValueError, match=reason):
        loaded(project, tmp_path, certificate)
    with pytest.raises(Refused, match=reason) as error:
        check_certificate(text_of(certificate), project.roster)
    line = str(error.value)
    assert line.isascii() and line.isprintable() and len(line) <= 300


def test_certificate_of_another_curve_is_refused(project, tmp_path):
    certificate = issued(authority_key(project), ec.generate_private_key(ec.SECP384R1()))
    with pytest.raises(ValueError, match="not ECDSA P-256"):
        loaded(project, tmp_path, certificate)
    with pytest.raises(Refused, match="not ECDSA P-256"):
        check_certificate(text_of(certificate), project.roster)


def test_certificate_of_another_authority_is_refused(project, tmp_path):
    foreign = Authority(tmp_path / "foreign")
    own = project.paths("lyon") | {"authority": foreign.certificate}
    with pytest.raises(ValueError, match="does not vouch"):
        Identity.load("lyon", **own)
    # The same name of the authority, and another key.
    with pytest.raises(ValueError, match="does not vouch"):
        loaded(project, tmp_path, issued(new_key(), site_key(project)))
    with pytest.raises(ValueError, match="does not vouch"):
        itself = issued(site_key(project), site_key(project), issuer_name="lyon")
        loaded(project, tmp_path, itself)


def test_self_signed_certificate_vouches_for_itself_alone(project, tmp_path):
    # So a few sites may do without an authority: each lists the others' certificates.
    key = site_key(project)
    itself = issued(key, key, issuer_name="lyon")
    roots = tmp_path / "root.pem"
    roots.write_bytes(text_of(itself))
    paths = project.paths("lyon") | {"certificate": roots, "authority": roots}
    assert Identity.load("lyon", **paths).name == "lyon"
    names = (x509.DNSName("paris"),)
    path = tmp_path / "paris.pem"
    path.write_bytes(
        text_of(issued(key, site_key(project, "paris"), names=names, issuer_name="lyon"))
    )
    paths = project.paths("paris") | {"certificate": path, "authority": roots}
    with pytest.raises(ValueError, match="does not vouch"):
        Identity.load("paris", **paths)


def test_site_is_no_authority(project, tmp_path):
    roots = tmp_path / "roots.pem"
    site = project.paths("paris")["certificate"].read_bytes()
    roots.write_bytes(project.authority.certificate.read_bytes() + site)
    paths = project.paths("lyon") | {"authority": roots}
    with pytest.raises(ValueError, match="roots.pem, in which CN=paris is no authority"):
        Identity.load("lyon", **paths)


def test_new_key_is_of_same_site_and_new(project, tmp_path):
    old = project.identities["lyon"]
    key, demand = request("lyon", tmp_path)
    new = renewed_key(old, demand)
    assert new == der(identity._private_key(key))
    certificate = Authority(tmp_path / "authority").sign(demand)
    assert renewed_key(old, certificate) == new
    for path in (project.folder / "lyon.csr", project.paths("lyon")["certificate"]):
        with pytest.raises(ValueError, match="of lyon'; give one of lyon with a new key"):
            renewed_key(old, path)
    with pytest.raises(ValueError, match="of paris'; give one of lyon"):
        renewed_key(old, project.folder / "paris.csr")
    with pytest.raises(ValueError, match="lyon.key"):
        renewed_key(old, key)


def test_site_cannot_issue_certificates(project, tmp_path):
    paris = x509.load_pem_x509_certificate(project.identities["paris"].certificate_chain)
    forged = issued(site_key(project, "paris"), site_key(project), issuer_name="paris")
    with pytest.raises(ValueError, match="does not vouch"):
        loaded(project, tmp_path, forged, paris)


def test_intermediate_authority_is_followed(project, tmp_path):
    # The root of trials issues for no authority, so this one is another.
    root_key = new_key()
    middle_key = new_key()
    root = issued(root_key, root_key, subject="r", issuer_name="r", is_authority=True)
    middle = issued(root_key, middle_key, subject="m", issuer_name="r", is_authority=True)
    leaf = issued(middle_key, site_key(project), issuer_name="m")
    path = tmp_path / "chain.pem"
    path.write_bytes(text_of(leaf, middle))
    roots = tmp_path / "root.pem"
    roots.write_bytes(text_of(root))
    paths = project.paths("lyon") | {"certificate": path, "authority": roots}
    assert Identity.load("lyon", **paths).certificate_chain == path.read_bytes()
    path.write_bytes(text_of(leaf))
    with pytest.raises(ValueError, match="does not vouch"):
        Identity.load("lyon", **paths)


@pytest.mark.parametrize("use", [0, 1])
def test_certificate_for_one_end_is_refused(use, project, tmp_path):
    uses = (x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH)
    certificate = issued(authority_key(project), site_key(project), uses=(uses[use],))
    with pytest.raises(ValueError, match="does not vouch"):
        loaded(project, tmp_path, certificate)


# What the other end shows.


def test_peer_is_named_by_its_certificate(project):
    for name in NAMES:
        chain = project.identities[name].certificate_chain
        assert check_certificate(chain, project.roster) == name


@pytest.mark.parametrize("certificate", [None, b""])
def test_peer_without_certificate_is_refused(certificate, project):
    with pytest.raises(Refused, match="refused"):
        check_certificate(certificate, project.roster)


def test_unknown_departed_and_foreign_peers_are_refused(project):
    roster = project.roster
    chain = project.identities["lyon"].certificate_chain
    small = Roster({name: roster[name] for name in NAMES[1:]})
    with pytest.raises(Refused, match="lyon is not in the roster"):
        check_certificate(chain, small)
    with pytest.raises(Refused, match="lyon has left"):
        check_certificate(chain, roster, frozenset({"lyon"}))
    assert check_certificate(chain, roster, frozenset({"paris"})) == "lyon"
    # An authority that turned hostile issues the name to another key.
    forged = text_of(issued(authority_key(project), new_key()))
    with pytest.raises(Refused, match="lyon has another key"):
        check_certificate(forged, roster)
    other = text_of(issued(authority_key(project), site_key(project, "paris")))
    with pytest.raises(Refused, match="lyon has another key"):
        check_certificate(other, roster)


def test_peer_is_checked_at_a_time(project):
    chain = project.identities["lyon"].certificate_chain
    assert check_certificate(chain, project.roster, now=NOW + 300 * DAY) == "lyon"
    for time in (NOW - DAY, NOW + 366 * DAY):
        with pytest.raises(Refused, match=f"certificate of lyon is valid .*says {time:%F}"):
            check_certificate(chain, project.roster, now=time)


def test_reason_is_one_safe_line():
    line = str(Refused("a\nb\r\x1b[31m \u202e \u043e" + 500 * "x"))
    assert line.startswith("a b \\x1b[31m \\u202e \\u043exx")
    assert line.isascii() and line.isprintable() and len(line) == 300
    assert not isinstance(Refused(""), ValueError)


# Renewed keys.


def identity_of(project: Project, name: str, key: Key, folder: Path) -> Identity:
    """An identity with a new key, which an authority certified."""
    certificate = issued(authority_key(project), key, names=(x509.DNSName(name),), subject=name)
    folder.mkdir(exist_ok=True)
    path = folder / "renewed.pem"
    path.write_bytes(text_of(certificate))
    file = secret_file(folder / "renewed.key", pem(key))
    return Identity.load(name, certificate=path, key=file, authority=project.authority.certificate)


def test_renewal_with_the_same_key_needs_nothing(project, tmp_path):
    before = project.paths("lyon")["certificate"].read_bytes()
    path = project.authority.sign(project.folder / "lyon.csr", days=2)
    assert path.read_bytes() != before
    assert check_certificate(path.read_bytes(), project.roster) == "lyon"
    path.write_bytes(before)


def test_renewed_keys_form_a_chain(project, tmp_path):
    roster = project.roster
    identities = [project.identities["lyon"]]
    for step in range(3):
        key = new_key()
        entry = renewal(identities[-1], der(key))
        assert Renewal.from_bytes(entry.to_bytes()) == entry
        follower = identity_of(project, "lyon", key, tmp_path / str(step))
        with pytest.raises(Refused, match="lyon has another key"):
            check_certificate(follower.certificate_chain, roster)
        assert not roster.verify("lyon", "hello", b"data", follower.sign("hello", b"data"))
        roster = roster.renewed(Renewal.from_bytes(entry.to_bytes()))
        identities.append(follower)
        for member in identities:
            assert roster.verify("lyon", "hello", b"data", member.sign("hello", b"data"))
            assert check_certificate(member.certificate_chain, roster) == "lyon"
    assert roster.digest == project.roster.digest and roster != project.roster
    assert dict(roster) == dict(project.roster) and roster.to_json() == project.roster.to_json()
    assert len(roster.renewals) == 3 and not project.roster.renewals
    assert not roster.verify("paris", "hello", b"data", identities[-1].sign("hello", b"data"))


def test_replayed_and_foreign_renewals_are_refused(project, tmp_path):
    roster = project.roster
    lyon, paris = project.identities["lyon"], project.identities["paris"]
    first_key = new_key()
    first = renewal(lyon, der(first_key))
    second = renewal(identity_of(project, "lyon", first_key, tmp_path), der(new_key()))
    once = roster.renewed(first)
    twice = once.renewed(second)
    fork = renewal(lyon, der(new_key()))
    of_paris = renewal(paris, der(new_key()))
    refused = [
        (once, first),
        (once, fork),
        (twice, first),
        (twice, second),
        (roster, second),
        (roster, first._replace(name="paris")),
        (roster, first._replace(name="unknown")),
        (roster, first._replace(signature=of_paris.signature)),
        (roster, first._replace(signature=b"")),
        (roster, first._replace(new=of_paris.new)),
        (roster, first._replace(signature=lyon.sign("hello", roster["lyon"] + first.new))),
        (roster, of_paris._replace(name="lyon")),
        # To a key that another site has, or that the site had before.
        (roster, renewal(lyon, roster["paris"])),
        (roster, renewal(lyon, roster["lyon"])),
        (once, renewal(paris, der(first_key))),
        (once, renewal(identity_of(project, "lyon", first_key, tmp_path), roster["lyon"])),
    ]
    for case, (base, entry) in enumerate(refused):
        with pytest.raises(Refused, match="renewal for"):
            base.renewed(entry)
            pytest.fail(f"case {case} was taken")


# Requests and the authority.


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_request_is_of_the_name_and_key(tmp_path):
    key, demand = request("lyon", tmp_path / "new" / "folder")
    parsed = x509.load_pem_x509_csr(demand.read_bytes())
    assert parsed.is_signature_valid
    assert parsed.subject.rfc4514_string() == "CN=lyon"
    names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["lyon"]
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    assert private.public_key() == parsed.public_key() and private.curve.name == "secp256r1"
    assert mode_of(key) == 0o600 and b"BEGIN PRIVATE KEY" in key.read_bytes()
    assert b"PRIVATE" not in demand.read_bytes()


def test_key_is_secret_from_its_first_byte(tmp_path, monkeypatch):
    modes = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(handle).st_mode))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    mask = os.umask(0)
    try:
        request("lyon", tmp_path)
        Authority(tmp_path / "authority")
    finally:
        os.umask(mask)
    assert modes[0] == 0o600
    assert mode_of(tmp_path / "lyon.key") == 0o600
    assert mode_of(tmp_path / "authority" / "authority_key.pem") == 0o600


def test_key_is_kept_and_said_so(tmp_path, capsys):
    key, demand = request("lyon", tmp_path)
    assert capsys.readouterr().err == ""
    content = key.read_bytes()
    demand.unlink()
    assert request("lyon", tmp_path) == (key, demand)
    assert key.read_bytes() == content and demand.exists()
    assert "is there already: the request renews its certificate" in capsys.readouterr().err
    key.chmod(0o644)
    with pytest.raises(ValueError, match="others may use"):
        request("lyon", tmp_path)
    key.unlink()
    key.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError):
        request("lyon", tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_folder_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="folder is"):
        request("lyon", file)
    with pytest.raises(ValueError, match="folder is"):
        Authority(file)


def test_authority_is_made_once(tmp_path):
    first = Authority(tmp_path)
    root = first.certificate.read_bytes()
    key = (tmp_path / "authority_key.pem").read_bytes()
    second = Authority(tmp_path)
    assert second.certificate.read_bytes() == root
    assert (tmp_path / "authority_key.pem").read_bytes() == key
    parsed = x509.load_pem_x509_certificate(root)
    constraints = parsed.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical and constraints.value == x509.BasicConstraints(True, 0)
    assert repr(key.splitlines()[1]) not in repr(vars(second))
    # A site may have made its request at another time, and any object of the folder signs it.
    path = second.sign(request("lyon", tmp_path / "site")[1])
    store = verification.Store([parsed])
    verifier = verification.PolicyBuilder().store(store).build_client_verifier()
    assert verifier.verify(x509.load_pem_x509_certificate(path.read_bytes()), [])


def test_authority_whose_key_others_may_read_is_refused(tmp_path):
    Authority(tmp_path)
    (tmp_path / "authority_key.pem").chmod(0o640)
    with pytest.raises(ValueError, match="others may use"):
        Authority(tmp_path)


def test_certificate_is_for_both_ends_and_nothing_else(tmp_path):
    authority = Authority(tmp_path)
    demand = request("lyon", tmp_path / "site")[1]
    first = x509.load_pem_x509_certificate(authority.sign(demand).read_bytes())
    second = x509.load_pem_x509_certificate(authority.sign(demand, days=30).read_bytes())
    assert first.serial_number != second.serial_number
    assert first.serial_number.bit_length() > 64
    values = {type(entry.value): entry.value for entry in first.extensions}
    assert values[x509.BasicConstraints] == x509.BasicConstraints(False, None)
    usage = values[x509.KeyUsage]
    assert usage.digital_signature and not (usage.key_cert_sign or usage.crl_sign)
    assert not (usage.key_encipherment or usage.key_agreement or usage.content_commitment)
    uses = x509.ExtendedKeyUsageOID
    assert set(values[x509.ExtendedKeyUsage]) == {uses.SERVER_AUTH, uses.CLIENT_AUTH}
    assert list(values[x509.SubjectAlternativeName]) == [x509.DNSName("lyon")]
    age = datetime.datetime.now(datetime.UTC) - first.not_valid_before_utc
    assert datetime.timedelta(minutes=5) <= age < datetime.timedelta(minutes=7)
    assert datetime.timedelta(363) < first.not_valid_after_utc - NOW < datetime.timedelta(366)
    assert datetime.timedelta(29) < second.not_valid_after_utc - NOW < datetime.timedelta(31)


def demand_of(
    key: Key,
    *values: x509.ExtensionType,
    signer: Key | None = None,
) -> bytes:
    """A request by hand."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lyon")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    for value in values:
        builder = builder.add_extension(value, critical=False)
    return builder.sign(signer or key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def names_of(*names: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName(entries(*names))


def test_bad_requests_are_refused(tmp_path):
    authority = Authority(tmp_path / "authority")
    key = new_key()
    good = demand_of(key, names_of("lyon"))
    raw = x509.load_pem_x509_csr(good)
    changed = raw.public_bytes(serialization.Encoding.DER).replace(b"lyon", b"lyin")
    forged = x509.load_der_x509_csr(changed).public_bytes(serialization.Encoding.PEM)
    cases = {
        "not signed by its key": forged,
        "has 2 DNS names": demand_of(key, names_of("lyon", "paris")),
        "has 0 DNS names": demand_of(key),
        "its name is": demand_of(key, names_of("*.lyon")),
        "its name is '../../lyon'": demand_of(key, names_of("../../lyon")),
        "is of an authority": demand_of(key, names_of("lyon"), x509.BasicConstraints(True, None)),
        "not ECDSA P-256": demand_of(ec.generate_private_key(ec.SECP384R1()), names_of("lyon")),
        "cannot be read": b"no request",
    }
    before = sorted(os.listdir(tmp_path / "authority"))
    path = tmp_path / "request"
    for reason, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            authority.sign(path)
    path.write_bytes(good)
    for days in (0, -1, 3651, 1.5, True):
        with pytest.raises(ValueError, match="days is"):
            authority.sign(path, days=days)
    assert sorted(os.listdir(tmp_path / "authority")) == before
    with pytest.raises(FileNotFoundError):
        authority.sign(tmp_path / "gone")
    assert authority.sign(path).exists()


def test_name_is_given_to_one_key(tmp_path):
    authority = Authority(tmp_path / "authority")
    path = authority.sign(request("lyon", tmp_path / "one")[1])
    content = path.read_bytes()
    demand = request("lyon", tmp_path / "two")[1]
    for signer in (authority, Authority(tmp_path / "authority")):
        with pytest.raises(ValueError, match="lyon, a name that was given to another key"):
            signer.sign(demand)
    assert path.read_bytes() == content
    # Also where the certificate was moved to the site.
    path.unlink()
    with pytest.raises(ValueError, match="given to another key"):
        authority.sign(demand)
    assert authority.sign(tmp_path / "one" / "lyon.csr") == path


def test_name_is_given_once_to_many_at_once(tmp_path):
    authority = Authority(tmp_path / "authority")
    demands = [request("lyon", tmp_path / str(number))[1] for number in range(8)]
    barrier = threading.Barrier(8)

    def attempt(demand: Path) -> int:
        barrier.wait()
        with contextlib.suppress(ValueError):
            authority.sign(demand)
            return 1
        return 0

    with futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, demands)) == 1


@pytest.mark.parametrize("name", ["authority", "authority-root", "lyon.pem", "lyon.key"])
def test_no_name_takes_the_place_of_another_file(name, tmp_path):
    authority = Authority(tmp_path)
    root = authority.certificate.read_bytes()
    authority.sign(request("lyon", tmp_path)[1])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    authority.sign(request(name, tmp_path)[1])
    assert all(path.read_bytes() == content for path, content in before.items())
    assert authority.certificate.read_bytes() == root


def test_missing_library_is_named(monkeypatch, tmp_path):
    def missing(module: str) -> None:
        raise ValueError(f"cryptography is not installed: pip install cryptography ({module})")

    monkeypatch.setattr(identity, "library", missing)
    starts: list[Callable[[], object]] = [
        lambda: Roster({"lyon": b"", "paris": b""}),
        lambda: request("lyon", tmp_path),
        lambda: Authority(tmp_path),
        lambda: Identity.load("lyon", certificate="c", key="k", authority="a"),
    ]
    for start in starts:
        with pytest.raises(ValueError, match="pip install cryptography"):
            start()


# gRPC's TLS.


def echo(data: bytes, context: object) -> bytes:
    """What the server knows of the client, by its certificate."""
    shown = context.auth_context()["x509_pem_cert"][0]
    return data + shown


@contextlib.contextmanager
def listening(server: Identity) -> Iterator[int]:
    """A server on loopback that asks for certificates; its port."""
    grpc = pytest.importorskip("grpc")
    credentials = grpc.ssl_server_credentials(
        [(server.private_key_pem, server.certificate_chain)],
        root_certificates=server.authority,
        require_client_auth=True,
    )
    handler = grpc.unary_unary_rpc_method_handler(echo)
    listener = grpc.server(futures.ThreadPoolExecutor(2))
    generic = grpc.method_handlers_generic_handler("site", {"echo": handler})
    listener.add_generic_rpc_handlers((generic,))
    port = listener.add_secure_port("127.0.0.1:0", credentials)
    listener.start()
    try:
        yield port
    finally:
        listener.stop(None).wait()


def called(client: Identity, port: int, name: str) -> bytes | None:
    """What a client hears from the server of this name; None where TLS fails."""
    import grpc

    credentials = grpc.ssl_channel_credentials(
        client.authority, client.private_key_pem, client.certificate_chain
    )
    options = [("grpc.ssl_target_name_override", name), ("grpc.enable_retries", 0)]
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        try:
            return channel.unary_unary("/site/echo")(b"data", timeout=10)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE, error
            return None


def test_grpc_takes_these_certificates_at_both_ends(project):
    for name in NAMES:
        with listening(project.identities[name]) as port:
            answer = called(project.identities["paris"], port, name)
            assert answer is not None and answer.startswith(b"data")
            shown = answer.removeprefix(b"data")
            assert check_certificate(shown, project.roster) == "paris"
            assert called(project.identities["paris"], port, "other") is None


def test_grpc_refuses_other_roots_and_dates(project, tmp_path):
    lyon = project.identities["lyon"]
    foreign = Authority(tmp_path / "foreign")
    key, demand = request("lyon", tmp_path)
    stranger = Identity.load(
        "lyon", certificate=foreign.sign(demand), key=key, authority=foreign.certificate
    )
    # An attacker trusts whom it likes, and loads what it likes.
    roots = project.identities["lyon"].authority
    trusting = Identity("lyon", b"", stranger.certificate_chain, roots, stranger._private)
    old = issued(authority_key(project), site_key(project), last=NOW - DAY / 2)
    expired = Identity("lyon", b"", text_of(old), roots, lyon._private)
    # Paris signs with a site's key, as if it were an authority.
    issuer = project.identities["paris"]
    leaf = issued(site_key(project, "paris"), site_key(project), issuer_name="paris")
    forged = Identity("lyon", b"", text_of(leaf) + issuer.certificate_chain, roots, lyon._private)
    with listening(lyon) as port:
        assert called(lyon, port, "lyon")
        assert called(stranger, port, "lyon") is None
        for other in (trusting, expired, forged):
            assert called(other, port, "lyon") is None
    for other in (trusting, expired, forged):
        with listening(other) as port:
            assert called(lyon, port, "lyon") is None
