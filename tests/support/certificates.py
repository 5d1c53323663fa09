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
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.cert = self.directory / "ca.pem"
        self.cert.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def server(self) -> Pair:
        """Makes a certificate for a server on this machine."""
        names = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        return self._sign("server", "localhost", names, timedelta())

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
        builder = _builder(_named(common_name), self._subject, key, shift)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        return _written(self.directory / file, signed, key)


def self_signed(directory: Path, common_name: str) -> Pair:
    """Makes a certificate that no authority signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named(common_name)
    return _written(directory / "self", _builder(name, name, key, timedelta()).sign(key, hashes.SHA256()), key)


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
