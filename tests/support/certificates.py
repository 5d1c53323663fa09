"""Authorities and the certificates that they sign, made for each test that needs them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOUR = timedelta(hours=1)
_SIGNS_CERTIFICATES = x509.KeyUsage(
    digital_signature=True,
    key_cert_sign=True,
    crl_sign=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path
    fingerprint: str


@dataclass
class Authority:
    """Signs certificates; its own is in `cert`."""

    directory: Path
    name: str = "Test authority"
    cert: Path = field(init=False)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _named(self.name)
        own = _builder(self._subject, self._subject, self._key, timedelta())
        own = _identified(own, self._key, self._key)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        own = own.add_extension(_SIGNS_CERTIFICATES, critical=True)
        self.cert = self.directory / "ca.pem"
        self.cert.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def server(self) -> Pair:
        """Makes a certificate for a server on this machine."""
        names = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        return self._sign("server", "localhost", names, timedelta())

    def site(self, file: str, *names: str, expired_since: timedelta | None = None) -> Pair:
        """Makes a certificate for servers of these names; `expired_since` ago it expired."""
        shift = HOUR + expired_since if expired_since is not None else timedelta()
        return self._sign(file, names[0], [x509.DNSName(name) for name in names], shift)

    def client(
        self,
        file: str,
        common_name: str,
        *,
        dns: Sequence[str] = (),
        uris: Sequence[str] = (),
        emails: Sequence[str] = (),
        expired_since: timedelta | None = None,
    ) -> Pair:
        """Makes a certificate for a client of these names; `expired_since` ago it expired."""
        names = (
            *(x509.DNSName(text) for text in dns),
            *(x509.UniformResourceIdentifier(text) for text in uris),
            *(x509.RFC822Name(text) for text in emails),
        )
        return self._sign(file, common_name, names, HOUR + expired_since if expired_since is not None else timedelta())

    def _sign(self, file: str, common_name: str, names: Sequence[x509.GeneralName], shift: timedelta) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _identified(_builder(_named(common_name), self._subject, key, shift), key, self._key)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        return _written(self.directory / file, signed, key)


def self_signed(directory: Path, common_name: str, *, dns: Sequence[str] = ()) -> Pair:
    """Makes a certificate that no authority signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named(common_name)
    builder = _builder(name, name, key, timedelta())
    if dns:
        names = x509.SubjectAlternativeName([x509.DNSName(each) for each in dns])
        builder = builder.add_extension(names, critical=False)
    return _written(directory / "self", builder.sign(key, hashes.SHA256()), key)


def _identified(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, issuer: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    """Adds the identifiers of both keys: from CPython 3.13 on, `ssl` refuses a chain without them."""
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issuers = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())
    return builder.add_extension(own, critical=False).add_extension(issuers, critical=False)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, shift: timedelta
) -> x509.CertificateBuilder:
    """Returns a builder of certificates that are valid from an hour before to an hour after now, less `shift`."""
    now = datetime.now(UTC) - shift
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - HOUR)
        .not_valid_after(now + HOUR)
    )


def _written(stem: Path, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    pair = Pair(stem.with_suffix(".pem"), stem.with_suffix(".key"), cert.fingerprint(hashes.SHA256()).hex())
    pair.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    return pair


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
