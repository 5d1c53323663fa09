"""Tenants at a real daemon, with its command line and the client: tokens, certificates, users, and their rights."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from executor_client import (
    ConfigurationError,
    ExecutorClient,
    ExecutorClientError,
    TlsConfig,
)
from tests.support.backends import require
from tests.support.certificates import Authority, Pair
from tests.support.daemon import Daemon, running_daemon
from tests.support.fork_server import server
from tests.support.polling import eventually

POLICY = f"""
default = "everybody"
[profiles.everybody]
[profiles.narrow.imports]
allowed = []
[tenants.certified]
profile = "narrow"
certificates = ["agents.certified"]
[tenants.user]
uids = [{os.geteuid()}]
"""


@dataclass(frozen=True)
class Access:
    daemon: Daemon
    authority: Authority
    directory: Path
    port: int

    @property
    def peer_address(self) -> str:
        return f"unix:{self.directory / 'peer.sock'}"

    def token_command(self, *arguments: str) -> str:
        place = ["--config", str(self.directory / "config.toml"), "--state-dir", str(self.daemon.state_dir)]
        done = server("token", *arguments, *place)
        done.check_returncode()
        return done.stdout.strip()

    def token(self, tenant: str, *options: str) -> str:
        """Makes a token and returns it when the daemon knows it."""
        token = self.token_command("new", "--tenant", tenant, *options)
        assert eventually(lambda: self.answers(token))
        return token

    def answers(self, token: str) -> bool:
        try:
            with self.client(token) as client:
                client.get_policy()
        except ExecutorClientError:
            return False
        return True

    def client(self, token: str) -> ExecutorClient:
        return ExecutorClient(self.daemon.address, token=token)

    @contextmanager
    def over_tls(self, pair: Pair | None, token: str | None = None, **options: Any) -> Iterator[ExecutorClient]:
        tls = TlsConfig(ca=self.authority.cert, **({"cert": pair.cert, "key": pair.key} if pair is not None else {}))
        with ExecutorClient(f"localhost:{self.port}", token=token, tls=tls, **options) as client:
            yield client


@pytest.fixture(scope="module")
def access() -> Iterator[Access]:
    require("local")
    with tempfile.TemporaryDirectory(prefix="a-") as name, closing(socket.socket()) as probe:
        directory = Path(name)
        authority = Authority(directory / "tls")
        pair = authority.server()
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        (directory / "policy.toml").write_text(POLICY)
        (directory / "config.toml").write_text(
            f'[policy]\nfile = "{directory}/policy.toml"\n[pool]\nsize = 0\n[server]\n'
            f'tls_cert = "{pair.cert}"\ntls_key = "{pair.key}"\ntls_client_ca = "{authority.cert}"\n'
            f'peer_socket = "{directory}/peer.sock"\n'
        )
        options = ("--config", str(directory / "config.toml"), "--listen", f"127.0.0.1:{port}")
        with running_daemon(directory, *options) as daemon:
            yield Access(daemon, authority, directory, port)


def test_a_token_of_the_command_line_works_until_it_is_revoked(access: Access) -> None:
    token = access.token("acme", "--expires", "30d")
    with access.client(token) as client, client.create_session() as session:
        assert session.execute("1 + 1").output == 2
    access.token_command("revoke", token[4:16])
    assert eventually(lambda: not access.answers(token))


def test_the_single_users_token_is_the_tenant_local(access: Access) -> None:
    with access.daemon.client() as client, access.client(access.token("acme")) as other, client.create_session():
        assert len(client.list_sessions()) == 1
        assert other.list_sessions() == []


def test_a_certificate_needs_no_token_and_gets_its_tenants_profile(access: Access) -> None:
    with access.over_tls(access.authority.client("good", "agents.certified")) as client:
        assert client.get_policy().policy.profile == "narrow"
        with client.create_session() as session:
            assert session.execute("1 + 1").output == 2


def test_a_client_without_anything_to_show_is_told_what_it_lacks(access: Access) -> None:
    with pytest.raises(ConfigurationError, match="token"), access.over_tls(None) as client:
        client.get_policy()


def test_a_user_of_the_host_needs_no_token(access: Access, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXECUTOR_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("EXECUTOR_TOKEN", raising=False)
    with ExecutorClient(access.peer_address) as client, client.create_session() as session:
        assert session.execute("'x' * 3_000_000").output == "x" * 3_000_000
        with access.client(access.token("user")) as same:
            assert [found.session_id for found in same.list_sessions()] == [session.session_id]


def test_a_daemon_does_not_start_with_a_bad_file_of_tokens(tmp_path: Path) -> None:
    file, config = tmp_path / "tokens.json", tmp_path / "config.toml"
    file.write_text("[]")
    file.chmod(0o644)
    config.write_text(f'[server]\ntoken_file = "{file}"\nlisten = ["unix:{tmp_path}/s"]\n')
    ended = server("serve", "--config", str(config), "--state-dir", str(tmp_path / "state"))
    assert ended.returncode == 4
    assert ended.stderr.startswith("The token file ")
    assert "can be read or written by other users; run: chmod 600 " in ended.stderr
    assert ended.stderr.count("\n") == 1
