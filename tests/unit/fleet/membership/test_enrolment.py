"""Certificates for nodes whose keys never leave them."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from executor_server.fleet.membership import (
    CertificateError,
    SignedCertificate,
    accept_certificate,
    is_certified,
    issue_front,
    read_credentials,
    renew_front,
    request_certificate,
    sign_request,
)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    issue_front(tmp_path / "authority")
    return tmp_path / "authority"


def test_a_node_that_asks_gets_a_certificate_of_its_name_and_its_key_stays_with_it(
    authority: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "node"
    request = request_certificate(folder, "n1")
    key = (folder / "key.pem").read_bytes()
    answer = sign_request(authority, "n1", request)
    accept_certificate(folder, answer)
    credentials = read_credentials(folder, "node")
    assert (credentials.member.node, (folder / "key.pem").read_bytes()) == ("n1", key)
    assert b"PRIVATE" not in request + answer.authority + answer.certificate
    assert is_certified(folder, "n1", answer.authority)
    assert not list(authority.glob("nodes/*"))


def test_a_node_that_asks_again_keeps_its_key(tmp_path: Path) -> None:
    request_certificate(tmp_path / "node", "n1")
    key = (tmp_path / "node/key.pem").read_bytes()
    request_certificate(tmp_path / "node", "n1")
    assert (tmp_path / "node/key.pem").read_bytes() == key


def test_the_authority_takes_the_name_from_its_caller_and_not_from_the_request(authority: Path, tmp_path: Path) -> None:
    request = request_certificate(tmp_path / "node", "n2")
    answer = sign_request(authority, "n1", request)
    accept_certificate(tmp_path / "node", answer)
    assert read_credentials(tmp_path / "node", "node").member.node == "n1"
    assert not is_certified(tmp_path / "node", "n2", answer.authority)


def test_a_certificate_of_another_authority_is_none(authority: Path, tmp_path: Path) -> None:
    issue_front(tmp_path / "other")
    folder = tmp_path / "node"
    answer = sign_request(tmp_path / "other", "n1", request_certificate(folder, "n1"))
    accept_certificate(folder, answer)
    assert not is_certified(folder, "n1", (authority / "ca.pem").read_bytes())


def test_a_certificate_near_its_end_is_asked_for_again(authority: Path, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    answer = sign_request(authority, "n1", request_certificate(folder, "n1"), days=20)
    accept_certificate(folder, answer)
    assert not is_certified(folder, "n1", answer.authority)


def test_an_answer_for_another_key_is_refused(authority: Path, tmp_path: Path) -> None:
    answer = sign_request(authority, "n1", request_certificate(tmp_path / "one", "n1"))
    request_certificate(tmp_path / "two", "n1")
    with pytest.raises(CertificateError, match="another certificate"):
        accept_certificate(tmp_path / "two", answer)
    with pytest.raises(CertificateError):
        accept_certificate(tmp_path / "two", SignedCertificate(b"", b""))


def _request_of(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_requests_that_are_none_are_refused(authority: Path) -> None:
    good = _request_of(ec.generate_private_key(ec.SECP256R1()))
    broken = x509.load_pem_x509_csr(good).public_bytes(serialization.Encoding.DER)
    broken = b"-----BEGIN CERTIFICATE REQUEST-----\n" + broken.hex().encode() + b"\n-----END CERTIFICATE REQUEST-----\n"
    other_curve = _request_of(ec.generate_private_key(ec.SECP384R1()))
    for request in (b"", b"x" * 100_000, good[:-40], broken, other_curve):
        with pytest.raises(CertificateError):
            sign_request(authority, "n1", request)
    with pytest.raises(CertificateError, match="can't be called"):
        sign_request(authority, "../n1", good)


def test_the_fronts_certificate_is_issued_again_when_it_ends_soon_or_has_ended(authority: Path) -> None:
    assert not renew_front(authority)
    soon = issue_front(authority, days=20)
    assert renew_front(authority)
    assert read_credentials(authority / "front", "front").expire_time > soon.expire_time
    (authority / "front" / "cert.pem").unlink()
    assert renew_front(authority)
    assert not renew_front(authority)
