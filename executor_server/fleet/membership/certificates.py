"""The CA of a fleet, and the certificates with which its front and nodes authenticate each other.

The authority signs nothing else, so each name in its certificates is that of a member: `front.fleet.internal` for the
front, `NAME.node.fleet.internal` for a node. A front's certificate is for TLS clients only and a node's for TLS servers
only, so neither can impersonate the other even where a name is not checked.

`issue_front` and `issue_node` write below the operator's directory. The authority's key stays there; each member gets a
folder with `ca.pem`, `cert.pem` and `key.pem`. Issuing again renews the certificate and keeps the member's key, so a
member that reads its folder meanwhile always finds a matching pair. An authority is never replaced.

Nodes that no person sets up make their keys themselves (`request_certificate`), and the authority signs their requests.
The channel in between carries public keys and certificates only. It must not be open to everybody, since the sender of
a request is not checked here.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from executor_server.core.config import private_files
from executor_server.fleet.membership.ids import is_node_name

FRONT_NAME = "front.fleet.internal"
NODE_DOMAIN = "node.fleet.internal"
AUTHORITY_NAME, CERTIFICATE_NAME, KEY_NAME = "ca.pem", "cert.pem", "key.pem"
"""The files of a member's folder."""
AUTHORITY_KEY_NAME = "ca.key"
DAYS = 365
MAX_DAYS = 3650
"""Days for which an authority is valid, and a member's certificate at most."""

MAX_REQUEST_BYTES = 16 * 1024
RENEW_BEFORE = datetime.timedelta(days=30)
"""A member asks for another certificate when its own has less time left."""

_ORGANIZATION = "remote-executor fleet"
_CLOCK_ERROR = datetime.timedelta(hours=1)
_MAX_FILE_BYTES = 2**16

Role = Literal["front", "node"]


class CertificateError(Exception):
    """A certificate or a key can't be read, made or used; the message says what to do."""


@dataclass(frozen=True)
class Member:
    """A member of the fleet, as its certificate names it; `node` is empty for the front."""

    role: Role
    node: str = ""

    @property
    def name(self) -> str:
        """The DNS name in its certificate."""
        return FRONT_NAME if self.role == "front" else f"{self.node}.{NODE_DOMAIN}"

    @property
    def text(self) -> str:
        return "the front" if self.role == "front" else f"the node {self.node}"


FRONT = Member("front")


@dataclass(frozen=True)
class Issued:
    """A certificate that was written, and the folder that its member gets."""

    member: Member
    folder: Path
    expire_time: datetime.datetime


@dataclass(frozen=True)
class Credentials:
    """The content of a member's folder, in PEM form."""

    member: Member
    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    expire_time: datetime.datetime


def member_of(names: Sequence[str]) -> Member | None:
    """Returns the member that the alternative names of a certificate of the authority identify; None for others."""
    if len(names) != 1:
        return None
    if names[0] == FRONT_NAME:
        return FRONT
    node = names[0].removesuffix(f".{NODE_DOMAIN}")
    return Member("node", node) if node != names[0] and is_node_name(node) else None


def member_in(certificate: x509.Certificate) -> Member | None:
    """Returns the member that a certificate names, if its extended key usage is that of the role; otherwise None."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (x509.ExtensionNotFound, ValueError):
        return None
    dns_names = [name.value for name in names if isinstance(name, x509.DNSName)]
    member = member_of(dns_names) if len(dns_names) == len(list(names)) else None
    return member if member is not None and list(usage) == [_usage_of(member)] else None


# ---------------------------------------------------------------------------------------------------------------------
# Issuing


def issue_front(directory: Path, days: int = DAYS) -> Issued:
    """Creates the CA if it is missing, and the front's certificate. Raises CertificateError."""
    with _held(directory, make=True):
        if not (directory / AUTHORITY_KEY_NAME).exists():
            _make_authority(directory)
        return _issue(directory, FRONT, directory / "front", days)


def issue_node(directory: Path, node: str, days: int = DAYS) -> Issued:
    """Makes the certificate of a node; the authority must be there. Raises CertificateError."""
    if not is_node_name(node):
        raise CertificateError(
            f"A node can't be called {node!r}: a name is 1 to 24 of a-z 0-9 -, with no - at its ends."
        )
    with _held(directory, make=False):
        return _issue(directory, Member("node", node), directory / "nodes" / node, days)


def authority_expire_time(directory: Path) -> datetime.datetime:
    """Returns the end of the authority, and so of every certificate. Raises CertificateError."""
    return _read_certificate(directory / AUTHORITY_NAME).not_valid_after_utc


def _make_authority(directory: Path) -> None:
    if (directory / AUTHORITY_NAME).exists():
        raise CertificateError(
            f"The directory {directory} has the certificate of an authority without its key {AUTHORITY_KEY_NAME}. "
            "Put the key back, or choose another directory: another authority would be another fleet."
        )
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    # Random, so that the authorities of two fleets have different names.
    name = _subject(f"authority {x509.random_serial_number():040x}"[:26])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_ERROR)
        .not_valid_after(now + datetime.timedelta(days=MAX_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    # The key is written last: after an interruption there is no authority that can sign. The certificate is removed.
    try:
        private_files.write_private(directory / AUTHORITY_NAME, _pem(certificate))
        private_files.write_private(directory / AUTHORITY_KEY_NAME, _private_pem(key))
    except BaseException:
        (directory / AUTHORITY_NAME).unlink(missing_ok=True)
        raise


def _issue(directory: Path, member: Member, folder: Path, days: int) -> Issued:
    if not 1 <= days <= MAX_DAYS:
        raise CertificateError(f"A certificate can be valid for 1 to {MAX_DAYS:,} days, not for {days:,}.")
    authority, authority_key = _read_authority(directory)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        key = _read_key(folder / KEY_NAME)
    except FileNotFoundError:
        key = ec.generate_private_key(ec.SECP256R1())
        (folder / CERTIFICATE_NAME).unlink(missing_ok=True)  # it belongs to another key
        private_files.write_private(folder / KEY_NAME, _private_pem(key))
    certificate = _signed(member, key.public_key(), authority, authority_key, days)
    private_files.write_private(folder / AUTHORITY_NAME, _pem(authority))
    private_files.write_private(folder / CERTIFICATE_NAME, _pem(certificate))
    return Issued(member, folder, certificate.not_valid_after_utc)


def _signed(
    member: Member,
    key: ec.EllipticCurvePublicKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(member.name))
        .issuer_name(authority.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_ERROR)
        .not_valid_after(min(now + datetime.timedelta(days=days), authority.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(member.name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([_usage_of(member)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _usage_of(member: Member) -> x509.ObjectIdentifier:
    return ExtendedKeyUsageOID.CLIENT_AUTH if member.role == "front" else ExtendedKeyUsageOID.SERVER_AUTH


def _subject(name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, _ORGANIZATION),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_credentials(folder: Path, role: Role) -> Credentials:
    """Reads a member's folder. Raises CertificateError if it is incomplete, of another role, or expired."""
    authority = _read_certificate(folder / AUTHORITY_NAME)
    certificate = _read_certificate(folder / CERTIFICATE_NAME)
    path = folder / CERTIFICATE_NAME
    try:
        key = _read_key(folder / KEY_NAME)
    except FileNotFoundError:
        raise CertificateError(f"The folder {folder} has no {KEY_NAME}.") from None
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise CertificateError(
            f"The certificate {path} is not signed by the CA in {AUTHORITY_NAME} next to it."
        ) from error
    if key.public_key() != certificate.public_key():
        raise CertificateError(f"The key {KEY_NAME} next to {path} belongs to another certificate.")
    member = member_in(certificate)
    if member is None or member.role != role:
        found = "no member of a fleet" if member is None else member.text
        raise CertificateError(f"The certificate {path} names {found}, and a certificate of a {role} is needed.")
    for what, each in (("certificate", certificate), ("authority", authority)):
        _check_time(what, path, each)
    expire_time = min(certificate.not_valid_after_utc, authority.not_valid_after_utc)
    return Credentials(member, _pem(authority), _pem(certificate), _private_pem(key), expire_time)


def _check_time(what: str, path: Path, certificate: x509.Certificate) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        remedy = "renew it with `executor-server fleet`" if what == "certificate" else "make another with `fleet init`"
        raise CertificateError(
            f"The {what} of {path} has expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; {remedy}."
        )
    if now < certificate.not_valid_before_utc:
        raise CertificateError(
            f"The {what} of {path} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; the "
            "clock of this machine or of the one that made it is wrong."
        )


def _read_authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    path = directory / AUTHORITY_NAME
    certificate = _read_certificate(path)
    try:
        key = _read_key(directory / AUTHORITY_KEY_NAME)
    except FileNotFoundError:
        raise CertificateError(f"The directory {directory} has no {AUTHORITY_KEY_NAME}.") from None
    if key.public_key() != certificate.public_key():
        raise CertificateError(f"The key {AUTHORITY_KEY_NAME} in {directory} is not that of {AUTHORITY_NAME}.")
    _check_time("authority", path, certificate)
    return certificate, key


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read_file(path, private=False))
    except FileNotFoundError:
        raise CertificateError(f"There is no certificate {path}; `executor-server fleet init` makes it.") from None
    except ValueError as error:
        raise CertificateError(f"The file {path} is not a certificate in PEM form.") from error


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Raises CertificateError, FileNotFoundError."""
    try:
        key = serialization.load_pem_private_key(_read_file(path, private=True), password=None)
    except (ValueError, TypeError) as error:  # TypeError: the key has a password
        raise CertificateError(f"The file {path} is not a private key in PEM form without a password.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"The key {path} is not of an elliptic curve, as those of a fleet are.")
    return key


def _read_file(path: Path, *, private: bool) -> bytes:
    """Raises CertificateError, FileNotFoundError. Follows links: Kubernetes mounts its secrets as such."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CertificateError(f"The file {path} can't be read: {error.strerror}.") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CertificateError(f"{path} is not a regular file.")
        # Containers get their secrets on read-only mounts, whose permissions the program can't change.
        if private and found.st_mode & 0o077 and not os.fstatvfs(fd).f_flag & os.ST_RDONLY:
            raise CertificateError(f"The key {path} can be read or written by other users; run: chmod 600 {path}")
        if private and found.st_uid not in (os.geteuid(), 0):
            raise CertificateError(f"The key {path} belongs to user {found.st_uid}, not to this one or to root.")
        return os.read(fd, _MAX_FILE_BYTES)
    finally:
        os.close(fd)


# ---------------------------------------------------------------------------------------------------------------------
# Requests of nodes whose keys never leave them


@dataclass(frozen=True)
class SignedCertificate:
    """The answer to a request, in PEM form; nothing in it is secret."""

    authority: bytes
    certificate: bytes


def is_certified(folder: Path, node: str, authority: bytes) -> bool:
    """True when the folder has a certificate for this node, signed by this authority, that does not expire soon."""
    try:
        credentials = read_credentials(folder, "node")
    except CertificateError:
        return False
    is_own = credentials.member.node == node and credentials.authority.strip() == authority.strip()
    return is_own and not _ends_soon(credentials)


def renew_front(directory: Path) -> bool:
    """Renews the front's certificate if it expires soon. Returns True if it did. Raises CertificateError."""
    try:
        if not _ends_soon(read_credentials(directory / "front", "front")):
            return False
    except CertificateError:  # it has expired, or its folder is incomplete
        pass
    issue_front(directory)
    return True


def _ends_soon(credentials: Credentials) -> bool:
    return credentials.expire_time <= datetime.datetime.now(datetime.UTC) + RENEW_BEFORE


def request_certificate(folder: Path, node: str) -> bytes:
    """Returns the request of a node for its certificate, with the key in its folder, made on first use.

    Raises CertificateError.
    """
    with _held(folder, make=True):
        try:
            key = _read_key(folder / KEY_NAME)
        except FileNotFoundError:
            key = ec.generate_private_key(ec.SECP256R1())
            private_files.write_private(folder / KEY_NAME, _private_pem(key))
    # The authority takes the name from elsewhere; the request only proves that the asker has the key.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, Member("node", node).name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return _pem(request)


def sign_request(directory: Path, node: str, request: bytes, days: int = DAYS) -> SignedCertificate:
    """Signs a node's request with the authority in `directory`. Raises CertificateError."""
    if not is_node_name(node):
        raise CertificateError(f"A node can't be called {node!r}.")
    key = _key_in(request)
    with _held(directory, make=False):
        authority, authority_key = _read_authority(directory)
        certificate = _signed(Member("node", node), key, authority, authority_key, days)
    return SignedCertificate(_pem(authority), _pem(certificate))


def accept_certificate(folder: Path, answer: SignedCertificate) -> None:
    """Writes the answer into the node's folder. Raises CertificateError where it does not fit the node's key."""
    with _held(folder, make=False):
        private_files.write_private(folder / AUTHORITY_NAME, answer.authority)
        private_files.write_private(folder / CERTIFICATE_NAME, answer.certificate)
    read_credentials(folder, "node")


def _key_in(request: bytes) -> ec.EllipticCurvePublicKey:
    if len(request) > MAX_REQUEST_BYTES:
        raise CertificateError(f"A request for a certificate has at most {MAX_REQUEST_BYTES:,} bytes.")
    try:
        parsed = x509.load_pem_x509_csr(request)
        key = parsed.public_key()
        is_signed = parsed.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise CertificateError("This is not a certificate request in PEM form.") from error
    if not is_signed or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateError("The request for a certificate is not signed with a key on the curve P-256.")
    return key


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@contextmanager
def _held(directory: Path, *, make: bool) -> Iterator[None]:
    """Locks the directory: two commands at the same time would make two authorities."""
    try:
        if make:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CertificateError(f"There is no directory {directory}; `executor-server fleet init` makes it.") from None
    except OSError as error:
        raise CertificateError(f"The directory {directory} can't be used: {error.strerror}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise CertificateError(f"The directory {directory} can't be written: {error.strerror}.") from error
    finally:
        os.close(lock)


def _pem(certificate: x509.Certificate | x509.CertificateSigningRequest) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
