"""The certificate authority of a state directory, and its certificates for hosts whose TLS is terminated.

Only the sandboxes of this daemon trust it. Its key is in the state directory, readable by the daemon's user only, and
in the memory of this process. The daemon reads only the certificate, for the bundle of sandboxes.
"""

from __future__ import annotations

import datetime
import fcntl
import ipaddress
import os
import ssl
import stat
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.bindings import _rust
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from executor_server.network.proxy.code_pages import CodePages
from executor_server.network.proxy.server_names import check_server_names

KEY_NAME = "authority.key"
CERTIFICATE_NAME = "authority.pem"
LEAF_KEPT_S = 24 * 3600.0
MAX_LEAVES = 256

_NAME = "remote-executor egress"
_LIFETIME = datetime.timedelta(days=3650)
# An authority must not expire during a session.
_REMAKE_BEFORE_END = datetime.timedelta(days=60)
# Longer than a leaf is kept and a connection lasts; the clock of a sandbox's host may be slightly behind.
_LEAF_LIFETIME = datetime.timedelta(days=4)
_CLOCK_ERROR = datetime.timedelta(hours=1)
_MAX_FILE_BYTES = 2**14


class AuthorityError(Exception):
    """The authority can't be read or created; the message is a sentence that says what to do."""


def ensure_authority(directory: Path) -> None:
    """Creates the authority if it is missing or about to expire. Raises AuthorityError."""
    _read_or_make(directory, renews=True)


class Authority:
    """Creates server-side TLS contexts, one for each host, each with a certificate for that host only."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._leaf_key_pem = _private_pem(self._leaf_key)
        self._code = CodePages(_rust.__file__)
        self._contexts: OrderedDict[str, tuple[float, ssl.SSLContext]] = OrderedDict()

    @classmethod
    def read(cls, directory: Path) -> Authority:
        """Reads the authority, or creates it at first use. Raises AuthorityError.

        Keeps one that is about to expire: sandboxes have its certificate, and would not trust another one's.
        """
        return cls(*_read_or_make(directory, renews=False))

    def context_for(self, host: str) -> ssl.SSLContext:
        """Returns the context for a canonical host: TLS 1.2 or later, HTTP/1.1 only. At most MAX_LEAVES are kept."""
        known = self._contexts.get(host)
        if known is not None and known[0] > time.monotonic():
            self._contexts.move_to_end(host)
            return known[1]
        context = _server_context(self.leaf(host) + self._leaf_key_pem)
        self._contexts[host] = (time.monotonic() + LEAF_KEPT_S, context)
        self._contexts.move_to_end(host)
        if len(self._contexts) > MAX_LEAVES:
            self._contexts.popitem(last=False)
        self._code.release()
        return context

    def leaf(self, host: str) -> bytes:
        """Creates a certificate for one host, in PEM form."""
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            # A common name has at most 64 characters, a host 253, so the host is in the alternative name only.
            .subject_name(x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, _NAME)]))
            .issuer_name(self._certificate.subject)
            .public_key(self._leaf_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_ERROR)
            .not_valid_after(min(now + _LEAF_LIFETIME, self._certificate.not_valid_after_utc))
            .add_extension(x509.SubjectAlternativeName([_alternative_name(host)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._leaf_key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _server_context(chain: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])
    check_server_names(context)
    # `ssl` loads certificates from files only; a memory file is never on a disk.
    fd = os.memfd_create("leaf", os.MFD_CLOEXEC)
    try:
        os.write(fd, chain)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def _read_or_make(directory: Path, *, renews: bool) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise AuthorityError(f"The directory {directory} can't be created: {error.strerror}.") from error
    try:
        # Two processes may start without an authority at the same time; the second finds that of the first.
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            key, certificate = _read(directory)
        except FileNotFoundError:
            return _make(directory)
        left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        return _make(directory) if renews and left < _REMAKE_BEFORE_END else (key, certificate)
    except OSError as error:
        raise AuthorityError(f"The authority in {directory} can't be read or written: {error.strerror}.") from error
    finally:
        os.close(lock)


def _read(directory: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Raises FileNotFoundError, AuthorityError."""
    key_path = directory / KEY_NAME
    remedy = f"remove {directory} to have another authority created"
    try:
        key = serialization.load_pem_private_key(_read_private(key_path), password=None)
        certificate = x509.load_pem_x509_certificate(_read_file(directory / CERTIFICATE_NAME))
    except ValueError as error:
        raise AuthorityError(f"The authority in {directory} is damaged; {remedy}.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise AuthorityError(f"The key in {key_path} does not match its certificate; {remedy}.")
    return key, certificate


def _read_private(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise AuthorityError(
                f"Another user may have read or written the key {path}; remove {path.parent} to have another "
                "authority created."
            )
        return os.read(fd, _MAX_FILE_BYTES)
    finally:
        os.close(fd)


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_FILE_BYTES)


def _make(directory: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_ERROR)
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    # An interruption must not leave a key next to another authority's certificate. Without a key there is no authority,
    # and a new one is created.
    (directory / KEY_NAME).unlink(missing_ok=True)
    _write(directory / CERTIFICATE_NAME, certificate.public_bytes(serialization.Encoding.PEM))
    _write(directory / KEY_NAME, _private_pem(key))
    return key, certificate


def _write(path: Path, data: bytes) -> None:
    """Writes a file that only this user can read, whole or not at all."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # with the rights 0600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).rename(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


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
