"""The caller is identified by a token, by a certificate, or as the user at the other end of a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_client import AuthenticationError, ConfigurationError, ExecutorClient, TlsConfig, cli
from tests.support.certificates import Authority, self_signed
from tests.support.fake_daemon import TOKEN, FakeDaemon, serve


@pytest.fixture(autouse=True)
def no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXECUTOR_STATE_DIR", str(tmp_path / "none"))
    monkeypatch.delenv("EXECUTOR_TOKEN", raising=False)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@pytest.fixture
def tls_daemon(authority: Authority, tmp_path: Path) -> Iterator[FakeDaemon]:
    """It wants a certificate of the authority, and no token."""
    server, ca = authority.server(), authority.cert.read_bytes()
    credentials = grpc.ssl_server_credentials(
        [(server.key.read_bytes(), server.cert.read_bytes())], ca, require_client_auth=True
    )
    with serve(tmp_path, credentials) as daemon:
        daemon.token = None
        yield daemon


def test_certificate_is_enough(authority: Authority, tls_daemon: FakeDaemon) -> None:
    pair = authority.client("client", "agents")
    with ExecutorClient(tls_daemon.address, tls=TlsConfig(authority.cert, pair.cert, pair.key)) as client:
        assert client.get_policy().images == ("base",)
    assert "authorization" not in tls_daemon.metadata[0]


def test_command_line_takes_certificates(
    authority: Authority, tls_daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = authority.client("client", "agents")
    files = ["--tls-ca", str(authority.cert), "--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    assert cli.main(["--address", tls_daemon.address, *files, "ps"]) == 0
    assert cli.main(["--address", tls_daemon.address, "--tls", "--tls-cert", str(pair.cert), "ps"]) == 2
    assert "a certificate needs its key" in capsys.readouterr().err


def spoil(path: Path) -> None:
    path.write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")


def enlarge(path: Path) -> None:
    path.write_bytes(b"x" * ((1 << 20) + 1))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (lambda path: path.write_bytes(b""), "PEM"),
        (spoil, "PEM"),
        (enlarge, "more than 1,048,576 bytes"),
    ],
    ids=["missing", "empty", "garbage", "large"],
)
@pytest.mark.parametrize("field", ["ca", "cert", "key"])
def test_tls_file_that_cannot_serve_is_named(
    authority: Authority, field: str, damage: Callable[[Path], Any], said: str
) -> None:
    pair = authority.client("client", "agents")
    files = {"ca": authority.cert, "cert": pair.cert, "key": pair.key}
    damage(files[field])
    with pytest.raises(ConfigurationError, match=said) as refused:
        ExecutorClient("localhost:1", tls=TlsConfig(**files))
    assert files[field].name in str(refused.value)


def test_key_of_another_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.client("client", "agents"), self_signed(tmp_path, "other")
    with pytest.raises(ConfigurationError, match="not a certificate and its key"):
        ExecutorClient("localhost:1", tls=TlsConfig(authority.cert, pair.cert, other.key))


def test_socket_of_a_daemon_that_knows_its_users_needs_no_token(daemon: FakeDaemon) -> None:
    daemon.token = None
    with ExecutorClient(daemon.address) as client:
        client.get_policy()
    assert "authorization" not in daemon.metadata[0]


def test_daemon_that_wanted_a_token_leads_to_one(daemon: FakeDaemon) -> None:
    with (
        ExecutorClient(daemon.address) as client,
        pytest.raises(AuthenticationError, match="EXECUTOR_TOKEN is not set"),
    ):
        client.get_policy()
    with ExecutorClient(daemon.address, token=TOKEN) as client:
        client.get_policy()
