"""Quotas of a tenant, with a real daemon and the client: what is refused, what comes free again, what a kill forgives."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from executor_client import ExecutorClient, ResourceExhaustedError, Session
from tests.support.backends import require
from tests.support.daemon import Daemon, running_daemon
from tests.support.polling import eventually

POLICY = """
default = "open"
[profiles.open]
[profiles.few.quotas]
sessions = 2
[profiles.computing]
processes.allowed = true
[profiles.computing.quotas]
cpu_time_s_per_hour = 0.5
[tenants.few]
profile = "few"
[tenants.computing]
profile = "computing"
[tenants.preparing]
profile = "computing"
"""
_BURN = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass"
_FOR_EVER = "import time\nwhile True: time.sleep(0.01)"
_SHARE_FILES = {"cpu.shares": 1024, "cpu.weight": 100}


@dataclass
class Tenants:
    """The daemon that is running, and a client of each tenant, who waits for nothing."""

    daemon: Daemon
    directory: Path

    def client(self, tenant: str) -> AbstractContextManager[ExecutorClient]:
        return self.daemon.client_of(tenant, busy_timeout_s=0)


@contextmanager
def serving(directory: Path) -> Iterator[Tenants]:
    policy = directory / "policy.toml"
    policy.write_text(POLICY)
    config = directory / "config.toml"
    config.write_text(f'[policy]\nfile = "{policy}"\n[pool]\nsize = 0\n')
    with running_daemon(directory, "--config", str(config)) as daemon:
        yield Tenants(daemon, directory)


@pytest.fixture(scope="module")
def tenants() -> Iterator[Tenants]:
    require("local")
    with tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as directory, serving(Path(directory)) as tenants:
        yield tenants


def refusal(call: Callable[[], object]) -> ResourceExhaustedError:
    with pytest.raises(ResourceExhaustedError) as refused:
        call()
    assert refused.value.reason == "QUOTA_EXCEEDED"
    assert refused.value.retry_after_s is not None
    return refused.value


def test_a_tenant_has_no_more_sessions_than_its_quota_however_many_ask_at_once(tenants: Tenants) -> None:
    with tenants.client("few") as client, ThreadPoolExecutor(8) as callers, ExitStack() as stack:

        def create() -> Session | None:
            try:
                return client.create_session()
            except ResourceExhaustedError as error:
                assert error.reason == "QUOTA_EXCEEDED"
                return None

        made = [session for session in callers.map(lambda _: create(), range(8)) if session is not None]
        for session in made:
            stack.enter_context(session)
        assert len(made) == 2
        made[0].close()
        stack.enter_context(client.create_session())


def test_the_client_waits_as_it_is_told_and_then_gets_its_session(tenants: Tenants) -> None:
    with tenants.client("few") as client, ThreadPoolExecutor(1) as others, ExitStack() as stack:
        held = [client.create_session() for _ in range(2)]
        patient = stack.enter_context(ExecutorClient(client.address, token=_token_of(tenants, "few")))
        waiting = others.submit(patient.create_session)
        assert not eventually(waiting.done, timeout_s=0.3)
        for session in held:
            session.close()
        stack.enter_context(waiting.result())


def _token_of(tenants: Tenants, tenant: str) -> str:
    with tenants.client(tenant) as client:
        return client._transport.endpoint.token or ""


def test_a_killed_daemon_forgives_nothing_that_is_a_second_old() -> None:
    require("local")
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as directory,
        serving(Path(directory)) as first,
        first.client("computing") as client,
    ):
        session = client.create_session()
        session.execute(_BURN)
        assert eventually(lambda: _is_written(first.daemon.state_dir))
        first.daemon.kill()
        with serving(Path(directory)) as second, second.client("computing") as again:
            recovered = again.get_session(session.session_id)
            assert "cpu_time_s_per_hour" in refusal(lambda: recovered.execute("1")).message
            recovered.close()


def test_no_code_starts_by_any_call_after_the_cpu_time_of_an_hour(tenants: Tenants) -> None:
    """Only executions were refused: processes and new sessions with a prelude went on without end."""
    with tenants.client("computing") as client, client.create_session() as session:
        session.execute(_BURN)
        starts: list[Callable[[], object]] = [
            lambda: session.execute("1"),
            lambda: session.processes.run(["true"]),
            lambda: client.create_session(prelude="1"),
            lambda: session.set_variables({"x": 1}),
            lambda: session.get_variables(["end"]),
        ]
        for start in starts:
            assert "cpu_time_s_per_hour" in refusal(start).message
        session.files.list()  # starts no code


def test_the_cpu_time_of_a_prelude_is_charged(tenants: Tenants) -> None:
    """It was not, though a prelude may use 60 s, and the same time of processes was then free, too."""
    with tenants.client("preparing") as client:
        client.create_session(prelude=_BURN).close()
        with client.create_session() as session:
            assert "cpu_time_s_per_hour" in refusal(lambda: session.execute("1")).message


def _is_written(state_dir: Path) -> bool:
    database = sqlite3.connect(state_dir / "usage.db")
    try:
        return bool(database.execute("SELECT 1 FROM usage WHERE cpu_time_s > 0.5").fetchone())
    finally:
        database.close()


def test_sandboxes_of_one_tenant_divide_one_share_of_the_processors(tenants: Tenants) -> None:
    with tenants.client("open") as client, ThreadPoolExecutor(4) as others, ExitStack() as stack:
        sessions = [stack.enter_context(client.create_session()) for _ in range(4)]
        file = next((name for name in _SHARE_FILES if _weights(tenants, name)), None)
        if file is None:
            pytest.skip("the sandboxes of this host have no weights")
        for session in sessions:
            stack.callback(others.submit(session.execute, _FOR_EVER).cancel)
        assert eventually(lambda: _weights(tenants, file) == [_SHARE_FILES[file] // 4] * 4)


def _weights(tenants: Tenants, file: str) -> list[int]:
    """Returns the weights of the control groups of the daemon's sandboxes."""
    sandboxes = {sandbox.name for sandbox in (tenants.daemon.state_dir / "sandboxes").iterdir()}
    # os.walk ignores directories that vanish meanwhile: other tests make and remove groups at the same time.
    groups = [Path(path) for path, _, files in os.walk("/sys/fs/cgroup") if file in files]
    return [int((group / file).read_text()) for group in groups if group.name.rpartition("-")[2] in sandboxes]
