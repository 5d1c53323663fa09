"""Sessions with a network on a real daemon: what programs reach and learn, what is counted, recorded and recovered."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from executor_client import (
    ExecutionResult,
    ExecutorClient,
    NetworkUsage,
    Outcome,
    PolicyViolationError,
    Session,
)
from executor_server.policy.audit.verification import verify
from tests.support.audit import records
from tests.support.backends import require
from tests.support.daemon import Daemon, running_daemon
from tests.support.fork_server import server
from tests.support.internet.world import Internet
from tests.support.network import proxies
from tests.support.polling import eventually

MIB = 2**20
_IMPORTS = '["urllib.*", "socket", "ssl", "threading", "time", "json", "os"]'
_FETCH = """
import time
import urllib.request
def fetch(url, pause_s=0.0):
    size = 0
    try:
        with urllib.request.urlopen(url, timeout=60) as page:
            while piece := page.read(1 << 16):
                size += len(piece)
                time.sleep(pause_s)
            return size
    except Exception as error:
        return str(error)
"""
# Seconds between two reads of a transfer that is to last until something dies.
_SLOWLY = 0.01


@dataclass
class World:
    """A daemon in the tests' internet, its policy, and names of sites there."""

    internet: Internet
    directory: Path
    www: str
    files: str
    other: str  # a site that no session may reach

    def policy(self, *, allowed: str = "", more: str = "") -> str:
        allowed = allowed or f'"{self.www}:443", "{self.files}:443"'
        return f"""
default = "open"
[profiles.open]
on_reload = "tighten"
[profiles.open.imports]
default = {_IMPORTS}
[profiles.open.network]
allowed = [{allowed}]
{more}
[profiles.small]
extends = "open"
[profiles.small.network]
allowed = [{allowed}]
max_received_bytes = {4 * MIB}
[profiles.quiet]
extends = "open"
[profiles.quiet.network]
allowed = [{allowed}]
audit = "denials"
[profiles.few]
extends = "open"
[profiles.few.network]
allowed = [{allowed}]
[profiles.few.quotas]
egress_bytes_per_hour = {2 * MIB}
[tenants.small]
profile = "small"
[tenants.quiet]
profile = "quiet"
[tenants.few]
profile = "few"
"""

    @contextmanager
    def daemon(self, policy: str | None = None, more: str = "") -> Iterator[Daemon]:
        file, config = self.directory / "policy.toml", self.directory / "config.toml"
        file.write_text(policy or self.policy())
        listed = f'[policy]\nfile = "{file}"\n[pool]\nsize = 0\n'
        config.write_text(listed + self.internet.config() + more)
        with running_daemon(self.directory, "--config", str(config)) as daemon:
            yield daemon

    @contextmanager
    def session(self, client: ExecutorClient, *hosts: str) -> Iterator[Session]:
        with client.create_session(network=[f"{host}:443" for host in hosts or (self.www, self.files)]) as session:
            assert session.execute(_FETCH).outcome is Outcome.SUCCEEDED
            yield session


@pytest.fixture(scope="module")
def world(internet: Internet) -> Iterator[World]:
    require("local")
    with tempfile.TemporaryDirectory(prefix="n-") as directory:
        yield World(internet, Path(directory), internet.name("www"), internet.name("files"), internet.name("www"))


@pytest.fixture(scope="module")
def daemon(world: World) -> Iterator[Daemon]:
    with world.daemon() as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[ExecutorClient]:
    with daemon.client() as client:
        yield client


def fetch(session: Session, host: str, path: str = "/") -> ExecutionResult:
    return session.execute(f"fetch('https://{host}{path}')")


def download(session: Session, host: str, **options: Any) -> ExecutionResult:
    """Reads without end."""
    return session.execute(f"fetch('https://{host}/endless', {_SLOWLY})", **options)


def admin(daemon: Daemon, *arguments: str) -> Any:
    """The answer to a command of an administrator."""
    done = server("admin", *arguments, "--json", "--state-dir", str(daemon.state_dir))
    done.check_returncode()
    return json.loads(done.stdout)


def of(daemon: Daemon, session: Session) -> list[dict[str, Any]]:
    """The records of a session's network."""
    found = [each for each in records(daemon.state_dir / "audit") if each.get("session") == session.session_id]
    return [each for each in found if each["kind"].startswith("connection")]


# -- what is reached, and what is refused


def test_a_host_that_is_allowed_is_reached_and_another_one_is_refused_with_the_reason(
    world: World, client: ExecutorClient
) -> None:
    with world.session(client) as session:
        reached = fetch(session, world.www)
        assert isinstance(reached.output, int), reached.output
        assert reached.logs == ""
        assert reached.usage.network.connections == 1
        assert reached.usage.network.received_bytes > reached.output
        refused = fetch(session, world.other)
        sentence = f"{world.other}:443 is not allowed for this session; allowed: "
        assert f"403 {sentence}" in refused.output
        assert refused.logs.startswith(f"network: {sentence}")
        assert refused.logs.count("\n") == 1
        assert refused.usage.network == NetworkUsage(denied=1)
        assert session.execute("1 + 1").usage.network == NetworkUsage()
        total = client.get_session(session.session_id).info.network_usage
        assert (total.connections, total.denied) == (1, 1)
        assert total.received_bytes == reached.usage.network.received_bytes


def test_what_no_policy_grants_is_refused_whole_and_without_any_there_is_no_way_out(
    world: World, client: ExecutorClient
) -> None:
    with pytest.raises(PolicyViolationError):
        client.create_session(network=[f"{world.www}:443", f"{world.other}:443"])
    with client.create_session() as session:
        session.execute(_FETCH)
        refused = fetch(session, world.www)
        assert isinstance(refused.output, str)
        assert refused.usage.network == NetworkUsage()


def test_a_refusal_is_noted_once_for_each_step(world: World, client: ExecutorClient) -> None:
    with world.session(client) as session:
        for _ in range(2):
            step = session.execute(
                f"print('before'); [fetch('https://{world.other}/') for _ in range(5)]; print('after')"
            )
            assert step.logs.count("is not allowed") == 1
            assert step.logs.startswith("before\nnetwork: ")
            assert step.logs.endswith("after\n")
            assert step.usage.network.denied == 5


def test_a_refusal_between_two_steps_is_noted_in_the_next(world: World, client: ExecutorClient) -> None:
    with world.session(client) as session:
        session.execute(
            f"import threading, time\n"
            f"thread = threading.Thread(target=lambda: (time.sleep(0.3), fetch('https://{world.other}/')))\n"
            f"thread.start()"
        )
        assert eventually(lambda: client.get_session(session.session_id).info.network_usage.denied == 1)
        following = session.execute("thread.join()")
        assert "is not allowed" in following.logs
        assert following.usage.network == NetworkUsage()


def test_the_prelude_may_use_the_network(world: World, client: ExecutorClient) -> None:
    prelude = f"{_FETCH}\nsize = fetch('https://{world.www}/')"
    with client.create_session(network=[f"{world.www}:443"], prelude=prelude) as session:
        assert isinstance(session.execute("size").output, int)


# -- limits


def test_a_session_that_has_received_its_bytes_is_cut_off_and_says_so(world: World, daemon: Daemon) -> None:
    with daemon.client_of("small") as client, world.session(client) as session:
        cut = fetch(session, world.files, f"/bytes/{50 * MIB}")
        assert "max_received_bytes" in cut.logs
        assert 4 * MIB <= cut.usage.network.received_bytes <= 4 * MIB + 512 * 1024
        again = fetch(session, world.www)
        assert "received_bytes" in again.output or "received" in again.output
        assert again.usage.network.denied == 1


def test_a_tenant_shares_its_quota_among_its_sessions_and_no_other_tenant_notices(
    world: World, daemon: Daemon, client: ExecutorClient
) -> None:
    with daemon.client_of("few") as few, world.session(few) as idle, world.session(few) as busy:
        cut = fetch(busy, world.files, f"/bytes/{50 * MIB}")
        assert "quota egress_bytes_per_hour is spent" in cut.logs
        received = cut.usage.network.received_bytes
        assert 2 * MIB - 64 * 1024 <= received + cut.usage.network.sent_bytes <= 2 * MIB + 512 * 1024
        refused = fetch(idle, world.www)
        assert isinstance(refused.output, str)
        assert "quota" in refused.logs
        (use,) = admin(daemon, "usage", "--tenant", "few")["tenants"]
        assert int(use["egress_bytes_in_last_hour"]) >= 2 * MIB
        assert admin(daemon, "egress", idle.session_id)["exhausted"]
        with world.session(few) as new:
            assert isinstance(fetch(new, world.www).output, str)
        with world.session(client) as other:
            assert isinstance(fetch(other, world.www).output, int)


# -- records


def test_each_connection_and_refusal_is_recorded_with_its_execution(
    world: World, daemon: Daemon, client: ExecutorClient
) -> None:
    with world.session(client) as session:
        session.execute(f"fetch('https://{world.www}/')", execution_id="one")
        session.execute(f"fetch('https://{world.other}/')", execution_id="two")
        shown = admin(daemon, "egress", session.session_id)
        assert shown["rules"]["allowed_hosts"] == [f"{host}:443" for host in sorted((world.www, world.files))]
        assert [denial["host"] for denial in shown["denials"]] == [world.other]
    opened, closed, denied = of(daemon, session)
    assert (opened["kind"], closed["kind"], denied["kind"]) == (
        *("connection_opened", "connection_closed"),
        "connection_denied",
    )
    assert (opened["host"], opened["port"], opened["address"]) == (world.www, 443, world.internet.address)
    assert (opened["execution"], denied["execution"]) == ("one", "two")
    assert closed["reason"] in ("ended", "broken")  # urllib closes without the last message of TLS
    assert denied["reason"] == "not_allowed"
    assert closed["received_bytes"] > 0
    assert verify(daemon.state_dir / "audit").whole


def test_a_profile_may_have_refusals_alone_recorded(world: World, daemon: Daemon) -> None:
    with daemon.client_of("quiet") as client, world.session(client) as session:
        fetch(session, world.www)
        fetch(session, world.other)
    assert [record["kind"] for record in of(daemon, session)] == ["connection_denied"]


# -- what dies


def test_a_daemon_has_a_proxy_once_a_policy_grants_a_network_and_not_before(internet: Internet) -> None:
    require("local")
    with tempfile.TemporaryDirectory(prefix="n-") as directory:
        world = World(internet, Path(directory), internet.name("www"), internet.name("files"), internet.name("www"))
        with world.daemon(policy='default = "open"\n[profiles.open]\n') as daemon, daemon.client() as client:
            with client.create_session() as session:
                assert session.execute("1 + 1").output == 2
            assert not proxies(daemon)
            assert not (daemon.state_dir / "egress").exists()
            (Path(directory) / "policy.toml").write_text(world.policy())
            os.kill(daemon.process.pid, signal.SIGHUP)
            assert eventually(lambda: len(proxies(daemon)) == 1)
            with world.session(client) as session:
                assert isinstance(fetch(session, world.www).output, int)


def test_a_secret_that_others_can_read_keeps_the_daemon_from_starting_and_from_reloading(internet: Internet) -> None:
    require("local")
    with tempfile.TemporaryDirectory(prefix="n-") as directory:
        world = World(internet, Path(directory), internet.name("www"), internet.name("files"), internet.name("www"))
        secret = Path(directory) / "secret"
        secret.write_text("t0ken")
        secret.chmod(0o644)
        config = Path(directory) / "bad.toml"
        config.write_text(f'[egress.secrets]\ntoken = "{secret}"\n')
        failed = server("serve", "--config", str(config), "--state-dir", f"{directory}/t")
        assert failed.returncode == 3
        assert str(secret) in failed.stderr
        assert "t0ken" not in failed.stderr
        secret.chmod(0o600)
        with world.daemon(more=f'secrets = {{ token = "{secret}" }}\n') as daemon:
            reload = ["admin", "reload", "--state-dir", str(daemon.state_dir)]
            assert server(*reload).returncode == 0
            secret.chmod(0o644)
            refused = server(*reload)
            assert refused.returncode == 1
            assert "secret" in refused.stderr


def test_a_policy_that_tightens_closes_what_it_does_not_allow_any_more(internet: Internet) -> None:
    require("local")
    with tempfile.TemporaryDirectory(prefix="n-") as directory:
        world = World(internet, Path(directory), internet.name("www"), internet.name("files"), internet.name("www"))
        with world.daemon() as daemon, daemon.client() as client, world.session(client) as session:
            policy = Path(directory) / "policy.toml"
            tight = world.policy(allowed=f'"{world.www}:443"')
            with ThreadPoolExecutor() as threads:
                running = threads.submit(download, session, world.files)
                assert eventually(
                    lambda: client.get_session(session.session_id).info.network_usage.received_bytes > MIB
                )
                policy.write_text(tight)
                os.kill(daemon.process.pid, signal.SIGHUP)
                closed = running.result(30)
            assert "does not allow it any more" in closed.logs
            assert isinstance(fetch(session, world.www).output, int)
            assert "is not allowed" in fetch(session, world.files).output
