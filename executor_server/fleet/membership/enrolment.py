"""Certificates for nodes whose keys never leave them: a node asks, the authority signs, the node keeps the answer.

For nodes that are made by a machine and not by a person, who would copy a folder. The channel in between carries public
keys and certificates only; it must not be one that anybody can ask on, since who asks is not checked here.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from executor_server.core.config import private_files
from executor_server.fleet.membership.certificates import (
    AUTHORITY_NAME,
    CERTIFICATE_NAME,
    DAYS,
    KEY_NAME,
    CertificateError,
    Credentials,
    Member,
    held,
    issue_front,
    pem,
    private_pem,
    read_authority,
    read_credentials,
    read_key,
    signed,
)
from executor_server.fleet.membership.ids import is_node_name

MAX_REQUEST_BYTES = 16 * 1024
RENEW_BEFORE = datetime.timedelta(days=30)
"""The time before the end of a certificate from which on its member asks for another."""


@dataclass(frozen=True)
class SignedCertificate:
    """The answer to a request, in PEM form; nothing of it is secret."""

    authority: bytes
    certificate: bytes


def is_certified(folder: Path, node: str, authority: bytes) -> bool:
    """True when the node's folder has a certificate of its name, of this authority, that is good for a while yet."""
    try:
        credentials = read_credentials(folder, "node")
    except CertificateError:
        return False
    is_own = credentials.member.node == node and credentials.authority.strip() == authority.strip()
    return is_own and not _ends_soon(credentials)


def renew_front(directory: Path) -> bool:
    """Issues the front's certificate again when it ends soon; True when it did. Raises CertificateError."""
    try:
        if not _ends_soon(read_credentials(directory / "front", "front")):
            return False
    except CertificateError:  # it has ended, or its folder is not whole
        pass
    issue_front(directory)
    return True


def _ends_soon(credentials: Credentials) -> bool:
    return credentials.expire_time <= datetime.datetime.now(datetime.UTC) + RENEW_BEFORE


def request_certificate(folder: Path, node: str) -> bytes:
    """Returns the request of a node for its certificate, with the key in its folder, made on first use.

    Raises CertificateError.
    """
    with held(folder, make=True):
        try:
            key = read_key(folder / KEY_NAME)
        except FileNotFoundError:
            key = ec.generate_private_key(ec.SECP256R1())
            private_files.write_private(folder / KEY_NAME, private_pem(key))
    # The authority takes the name from elsewhere; the request only proves that the asker has the key.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, Member("node", node).name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return pem(request)


def sign_request(directory: Path, node: str, request: bytes, days: int = DAYS) -> SignedCertificate:
    """Signs a node's request with the authority in `directory`. Raises CertificateError."""
    if not is_node_name(node):
        raise CertificateError(f"A node can't be called {node!r}.")
    key = _key_in(request)
    with held(directory, make=False):
        authority, authority_key = read_authority(directory)
        certificate = signed(Member("node", node), key, authority, authority_key, days)
    return SignedCertificate(pem(authority), pem(certificate))


def accept_certificate(folder: Path, answer: SignedCertificate) -> None:
    """Writes the answer into the node's folder. Raises CertificateError where it does not fit the node's key."""
    with held(folder, make=False):
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
        raise CertificateError("This is no request for a certificate in PEM form.") from error
    if not is_signed or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateError("The request for a certificate is not signed with a key on the curve P-256.")
    return key
