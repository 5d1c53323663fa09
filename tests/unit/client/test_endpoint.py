"""Where the client looks for its daemon, and where it does not take the token."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_client import ConfigurationError, TlsConfig
from executor_client._core.endpoint import is_local, resolve


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EXECUTOR_STATE_DIR", str(tmp_path))
    (tmp_path / "token").write_text("from-the-file\n")
    (tmp_path / "token").chmod(0o600)
    return tmp_path


def test_users_own_daemon_is_the_default(state_dir: Path) -> None:
    endpoint = resolve(None, None, None)
    assert (endpoint.address, endpoint.token) == (f"unix:{state_dir}/executor.sock", "from-the-file")
    assert "from-the-file" not in repr(endpoint)


def test_state_directory_follows_the_desktop_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert resolve(None, "t", None).address == "unix:/state/remote-executor/executor.sock"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert resolve(None, "t", None).address == "unix:/home/me/.local/state/remote-executor/executor.sock"


def test_arguments_come_before_the_environment_and_it_before_files(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXECUTOR_ADDRESS", "localhost:1")
    monkeypatch.setenv("EXECUTOR_TOKEN", "from-the-environment")
    assert (resolve(None, None, None).address, resolve(None, None, None).token) == (
        "localhost:1",
        "from-the-environment",
    )
    given = resolve("127.0.0.1:2", "given", None)
    assert (given.address, given.token) == ("127.0.0.1:2", "given")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/run/x.sock", True),
        ("unix-abstract:x", True),
        ("localhost:1", True),
        ("127.0.0.1:1", True),
        ("127.8.9.1:1", True),
        ("[::1]:1", True),
        ("::1", True),
        ("ipv4:127.0.0.1:1", True),
        ("ipv6:[::1]:1", True),
        ("dns:///localhost:1", True),
        ("dns:///127.0.0.1.evil.example:1", False),
        ("10.0.0.1:1", False),
        ("example.com:1", False),
        ("localhost.evil.example:1", False),
        ("[2001:db8::1]:1", False),
        ("dns://127.0.0.1/example.com:1", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False),
        ("", False),
    ],
)
def test_only_addresses_of_this_machine_are_local(address: str, local: bool) -> None:
    assert is_local(address) is local


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1", "has no port: write 127.0.0.1:PORT, most often 127.0.0.1:50051"),
        ("localhost:", "has no port: write localhost:PORT"),
        ("localhost:http", "has no port"),
        ("localhost:99999", "has no port"),
        ("::1", r"has no port: write \[::1\]:PORT"),
        ("[::1]", r"has no port: write \[::1\]:PORT"),
        ("executor.sock", "or unix:PATH for a socket"),
        ("http://127.0.0.1:5000", "is a URL; a daemon's address has no scheme: write 127.0.0.1:5000$"),
        ("http://example.com/x", "is a URL; a daemon's address has no scheme: write example.com:50051$"),
        ("https://example.com", r"write example.com:443 with tls=True \(--tls\)"),
        ("grpc://localhost:1", "is a URL"),
    ],
)
def test_an_address_of_a_wrong_form_is_refused_with_the_right_one(address: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        resolve(address, "t", None)


@pytest.mark.parametrize(
    "address",
    ["dns:localhost:1", "dns:///localhost:1", "ipv6:[::1]:1", "[::1]:1", "unix:x", "unix:///x", "localhost:1"],
)
def test_targets_of_grpc_are_addresses(address: str) -> None:
    assert resolve(address, "t", None).address == address


def test_token_does_not_travel_unprotected() -> None:
    with pytest.raises(ConfigurationError, match="unprotected"):
        resolve("example.com:1", "t", None)
    assert resolve("example.com:1", "t", True).tls == TlsConfig()


def test_local_daemons_token_is_not_sent_elsewhere(state_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match="no token for example"):
        resolve("example.com:1", None, True)


def test_proxy_of_the_environment_is_not_used_without_tls() -> None:
    assert ("grpc.enable_http_proxy", 0) in resolve("127.0.0.1:1", "t", None).options


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_token_file_that_others_can_use_is_refused(state_dir: Path, mode: int) -> None:
    (state_dir / "token").chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        resolve(None, None, None)


@pytest.mark.parametrize("content", ["", "\n", "a b", "ü", "x" * 5_000])
def test_token_that_is_none_is_refused(state_dir: Path, content: str) -> None:
    (state_dir / "token").write_text(content)
    with pytest.raises(ConfigurationError, match="token"):
        resolve(None, None, None)


def test_missing_token_file_says_what_makes_it(state_dir: Path) -> None:
    (state_dir / "token").unlink()
    with pytest.raises(ConfigurationError, match="executor-server serve"):
        resolve(None, None, None)
    (state_dir / "token").mkdir()
    with pytest.raises(ConfigurationError, match="token file"):
        resolve(None, None, None)


def test_socket_that_was_named_may_do_without_a_token(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (state_dir / "token").unlink()
    assert resolve("unix:/run/peer.sock", None, None).token is None
    monkeypatch.setenv("EXECUTOR_ADDRESS", "unix:/run/peer.sock")
    assert resolve(None, None, None).token is None
    with pytest.raises(ConfigurationError, match="no token"):
        resolve("127.0.0.1:1", None, None)


def test_own_daemons_token_is_not_shown_to_another_users_socket(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that listens there could use it against its daemon."""
    socket = state_dir / "peer.sock"
    socket.touch()
    assert resolve(f"unix:{socket}", None, None).token == "from-the-file"
    owner = socket.stat().st_uid
    monkeypatch.setattr("executor_client._core.endpoint.os.geteuid", lambda: owner + 1)
    assert resolve(f"unix:{socket}", None, None).token is None
    assert resolve(f"unix:{socket}", "given", None).token == "given"
    assert resolve("unix-abstract:peer", None, None).token is None


def test_certificate_stands_for_a_token(state_dir: Path) -> None:
    tls = TlsConfig(cert="c.pem", key="k.pem")
    for address in ("example.com:1", "127.0.0.1:1"):
        assert resolve(address, None, tls).token is None
    assert resolve("example.com:1", "given", tls).token == "given"
