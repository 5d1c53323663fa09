"""The certificate authority of a state directory: made once, kept private, and good for the hosts that it signs for."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from executor_server.network.egress import EgressError
from executor_server.network.egress.bundle import ensure_certificate
from executor_server.network.proxy import authority
from executor_server.network.proxy.authority import CERTIFICATE_NAME, KEY_NAME, Authority, AuthorityError
from executor_server.network.proxy.server_names import NamedServer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "egress"


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str, server_name: str | None) -> ssl.SSLObject:
    """Does a handshake in memory; raises ssl.SSLError. Returns the client's side."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    assert isinstance(ours, NamedServer)
    ours.expect(host, is_address=False)
    theirs = client.wrap_bio(to_client, to_server, server_hostname=server_name)
    for _ in range(5):
        for end in (theirs, ours):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return theirs


def _client(directory: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(directory / CERTIFICATE_NAME))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


def test_authority_is_made_once_and_read_from_then_on(directory: Path) -> None:
    Authority.read(directory)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    Authority.read(directory)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert set(before) == {KEY_NAME, CERTIFICATE_NAME}


def test_key_is_for_the_daemons_user_alone(directory: Path) -> None:
    Authority.read(directory)
    assert stat.S_IMODE((directory / KEY_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert b"PRIVATE" not in (directory / CERTIFICATE_NAME).read_bytes()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_key_that_others_could_use_is_refused(directory: Path, mode: int) -> None:
    Authority.read(directory)
    (directory / KEY_NAME).chmod(mode)
    with pytest.raises(AuthorityError, match=r"Another user may have read or written the key .*; remove"):
        Authority.read(directory)


def test_link_in_the_place_of_the_key_is_not_followed(directory: Path) -> None:
    Authority.read(directory)
    (directory / KEY_NAME).rename(directory / "elsewhere")
    (directory / KEY_NAME).symlink_to(directory / "elsewhere")
    with pytest.raises(AuthorityError):
        Authority.read(directory)


@pytest.mark.parametrize("name", [KEY_NAME, CERTIFICATE_NAME])
def test_damaged_authority_says_what_to_do(directory: Path, name: str) -> None:
    Authority.read(directory)
    (directory / name).write_bytes(b"-----BEGIN NOTHING-----\n")
    (directory / name).chmod(0o600)
    with pytest.raises(AuthorityError, match="is damaged; remove"):
        Authority.read(directory)


def test_key_of_another_authority_is_refused(directory: Path, tmp_path: Path) -> None:
    Authority.read(directory)
    Authority.read(tmp_path / "other")
    (tmp_path / "other" / KEY_NAME).replace(directory / KEY_NAME)
    with pytest.raises(AuthorityError, match="does not match its certificate"):
        Authority.read(directory)


@pytest.mark.parametrize("name", [KEY_NAME, CERTIFICATE_NAME])
def test_making_that_was_interrupted_is_done_again(directory: Path, name: str) -> None:
    Authority.read(directory)
    (directory / name).unlink()
    Authority.read(directory)
    assert {path.name for path in directory.iterdir()} == {KEY_NAME, CERTIFICATE_NAME}


def test_authority_near_its_end_is_replaced_by_the_daemon_and_never_by_the_proxy(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon reads the certificate first, for the sandboxes. A proxy that then made another one was not trusted."""
    monkeypatch.setattr(authority, "_LIFETIME", datetime.timedelta(days=59))
    Authority.read(directory)
    before = (directory / CERTIFICATE_NAME).read_bytes()
    monkeypatch.undo()
    Authority.read(directory)
    assert (directory / CERTIFICATE_NAME).read_bytes() == before
    after = ensure_certificate(directory)
    assert after != before
    Authority.read(directory)
    assert (directory / CERTIFICATE_NAME).read_bytes() == after


@pytest.mark.parametrize("name", [KEY_NAME, CERTIFICATE_NAME])
def test_daemon_has_an_interrupted_making_done_again_before_it_reads_the_certificate(
    directory: Path, name: str
) -> None:
    before = ensure_certificate(directory)
    (directory / name).unlink()
    after = ensure_certificate(directory)
    assert after != before
    Authority.read(directory)
    assert (directory / CERTIFICATE_NAME).read_bytes() == after


def test_daemon_says_what_to_do_with_a_damaged_authority(directory: Path) -> None:
    ensure_certificate(directory)
    (directory / CERTIFICATE_NAME).write_bytes(b"-----BEGIN NOTHING-----")
    with pytest.raises(EgressError, match="is damaged; remove"):
        ensure_certificate(directory)


def test_clients_accept_a_leaf_for_its_host_and_agree_on_http_1_1(directory: Path) -> None:
    own = Authority.read(directory)
    client = _handshake(own.context_for("api.example.com"), _client(directory), "api.example.com", "api.example.com")
    assert client.version() == "TLSv1.3"
    assert client.selected_alpn_protocol() == "http/1.1"


def test_leaf_of_one_host_is_not_accepted_for_another(directory: Path) -> None:
    own = Authority.read(directory)
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(own.context_for("a.example.com"), _client(directory), "b.example.com", "b.example.com")


def test_leaf_is_for_servers_and_ends_before_the_authority(directory: Path) -> None:
    own = Authority.read(directory)
    leaf = x509.load_pem_x509_certificate(own.leaf("x" * 60 + ".example.com"))
    assert list(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.SERVER_AUTH
    ]
    assert leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["x" * 60 + ".example.com"]
    signed_by = x509.load_pem_x509_certificate((directory / CERTIFICATE_NAME).read_bytes())
    assert leaf.not_valid_after_utc < signed_by.not_valid_after_utc
    leaf.verify_directly_issued_by(signed_by)


def test_leaf_for_an_address_names_it_as_one(directory: Path) -> None:
    leaf = x509.load_pem_x509_certificate(Authority.read(directory).leaf("10.1.2.3"))
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("10.1.2.3")]


def test_authority_signs_no_other_authority(directory: Path) -> None:
    Authority.read(directory)
    own = x509.load_pem_x509_certificate((directory / CERTIFICATE_NAME).read_bytes())
    assert own.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0


def test_certificates_are_kept_for_a_day_and_not_without_limit(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("executor_server.network.proxy.authority.time.monotonic", lambda: now[0])
    monkeypatch.setattr(authority, "MAX_LEAVES", 3)
    own = Authority.read(directory)
    first = own.context_for("h0.example.com")
    assert own.context_for("h0.example.com") is first
    now[0] += authority.LEAF_KEPT_S - 1
    assert own.context_for("h0.example.com") is first
    now[0] += 2
    second = own.context_for("h0.example.com")
    assert second is not first
    for number in range(1, 4):
        own.context_for(f"h{number}.example.com")
    assert own.context_for("h0.example.com") is not second


@pytest.mark.parametrize("server_name", ["other.example.com", None], ids=["another", "none"])
def test_handshake_without_the_hosts_name_is_refused(directory: Path, server_name: str | None) -> None:
    own = Authority.read(directory)
    client = _client(directory)
    client.check_hostname = False
    with pytest.raises(ssl.SSLError, match="CALLBACK_FAILED"):  # the server's side; the client gets its alert
        _handshake(own.context_for("a.example.com"), client, "a.example.com", server_name)


def test_key_of_another_kind_is_refused(directory: Path) -> None:
    """An authority that an administrator put there in place of ours must be one that works."""
    Authority.read(directory)
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=900))
        .sign(key, hashes.SHA256())
    )
    (directory / CERTIFICATE_NAME).write_bytes(made.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(AuthorityError):
        Authority.read(directory)
