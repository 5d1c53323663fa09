"""The daemon is killed or stopped: no client waits for ever, nothing stays, the next one works."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import pytest

from executor_api.v1 import executor_service_pb2_grpc
from executor_client import ConnectionLost, Outcome, PreconditionError, Session, UnavailableError
from executor_client._core import requests
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import executing, sandbox_directories, sandboxes
from tests.support.daemon import STOP_TIMEOUT_S, Daemon
from tests.support.leftovers import CGROUP_PREFIX, CGROUP_ROOT
from tests.support.polling import eventually

FOREVER = "import time\nprint('here', flush=True)\ntime.sleep(1e6)"
NO_POOL = "pool.size = 0"
QUICK_ORPHANS = "sessions.orphan_time_s = 1.5"


def cgroups_of(state_dir: Path) -> list[Path]:
    daemon_id = (state_dir / "sandboxes" / ".lock").read_text()
    return list(CGROUP_ROOT.glob(f"**/{CGROUP_PREFIX}*{daemon_id}*"))


def test_killed_daemon_is_a_lost_connection_after_the_clients_bound(start: StartDaemon) -> None:
    daemon = start(NO_POOL)
    with daemon.client(reconnect_timeout_s=0.5) as client:
        session = client.create_session()
        with executing(session, FOREVER, execution_id="mine") as result:
            daemon.kill()
        error = result.exception()
        assert isinstance(error, ConnectionLost)
        assert error.execution_id == "mine"
        with pytest.raises(UnavailableError):
            client.list_sessions()


def test_next_daemon_sweeps_what_belongs_to_nobody_and_works(start: StartDaemon) -> None:
    """Sandboxes of the pool; and that of a session which the registry does not name."""
    first = start("pool.size = 2")
    with first.client() as client:
        session = client.create_session()
        assert eventually(lambda: len(sandboxes(first)) == 3)
        with executing(session, FOREVER) as result:
            orphans = sandboxes(first)
            first.kill()
            assert not any(orphan.is_gone() for orphan in orphans)
            (first.state_dir / "registry.db").unlink()
            second = start(NO_POOL)
            assert all(orphan.is_gone() for orphan in orphans)
            assert sandbox_directories(second) == set()
            assert cgroups_of(second.state_dir) == []
            assert list((second.state_dir / "journals").iterdir()) == []
        error = result.exception()
        assert isinstance(error, PreconditionError)
        assert (error.reason, "has no row of it" in str(error)) == ("SESSION_LOST", True)
        assert client.list_sessions() == []
        with client.create_session() as another:
            assert another.execute("6 * 7").output == 42


def test_quiet_sandbox_is_no_orphan_while_its_daemon_lives(start: StartDaemon, tmp_path: Path) -> None:
    """One of the pool, one of an idle session, one that is not read because its journal is full."""
    policy = tmp_path / "policy.toml"  # without a fork server, whose sandboxes would replace that of the pool
    policy.write_text('default = "p"\nprofiles.p.sandbox.fork_server = "off"\n')
    daemon = start(f'policy.file = "{policy}"\npool.size = 1\nsessions.journal_bytes = 100_000\n{QUICK_ORPHANS}')
    assert eventually(lambda: len(sandboxes(daemon)) == 1)
    with daemon.client() as client:
        idle, full = client.create_session(), client.create_session(authorized_imports=["os.*", "time"])
        idle.execute("x = 1")
        # The reader leaves before the journal fills: a full one would give up what this reader had.
        large = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nb'x' * 4_000_000"
        leave_after_the_first_event(daemon, full, large)
        full.put_file("go", b"")
        assert eventually(lambda: len(sandboxes(daemon)) == 3)
        before = sandboxes(daemon)
        more_than_twice_an_orphans_time_s = 4
        assert not eventually(
            lambda: any(sandbox.is_gone() for sandbox in before), timeout_s=more_than_twice_an_orphans_time_s
        )
        assert idle.execute("x").output == 1
        assert full.execute(f"print(1)\n{large}", execution_id="full").output == b"x" * 4_000_000
        idle.close()
        full.close()


def leave_after_the_first_event(daemon: Daemon, session: Session, code: str) -> None:
    """Begins an execution and follows it no longer, as a client whose connection is lost.

    Without the probe, gRPC reads at most 64 KiB ahead: on a busy machine it could else have all before it leaves.
    """
    request = requests.execute(session.session_id, f"print(1)\n{code}", "full", "trailing_expression", None)
    with grpc.insecure_channel(daemon.address, options=(("grpc.http2.bdp_probe", 0),)) as channel:
        stub = executor_service_pb2_grpc.ExecutorServiceStub(channel)
        stream = stub.Execute(request, metadata=(("authorization", f"Bearer {daemon.token}"),))
        next(iter(stream))
        stream.cancel()


def test_asked_to_stop_it_finishes_what_runs_and_refuses_what_is_new(start: StartDaemon) -> None:
    daemon = start(NO_POOL)
    with daemon.client(reconnect_timeout_s=0.1) as client:
        session = client.create_session(authorized_imports=["os.*"])
        code = "import os, time\nprint('here', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\n'done'"
        with executing(session, code) as result:
            daemon.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: "daemon_draining" in daemon.log.read_text())
            for refused in (lambda: session.execute("1"), client.create_session):
                with pytest.raises(UnavailableError) as refusal:
                    refused()
                assert refusal.value.reason == "DRAINING"
            session.put_file("go", b"")
        assert result.result().output == "done"
    assert daemon.process.wait(STOP_TIMEOUT_S) == 0
    assert sandbox_directories(daemon) == set()


def test_what_does_not_end_within_the_drain_time_is_cancelled(start: StartDaemon) -> None:
    daemon = start(f"{NO_POOL}\nsessions.drain_s = 0.2")
    with daemon.client(reconnect_timeout_s=0.1) as client:
        with executing(client.create_session(), FOREVER) as result:
            daemon.process.send_signal(signal.SIGTERM)
        assert result.result().outcome is Outcome.CANCELLED
        assert result.result().error.message == "the daemon stopped"  # type: ignore[union-attr]
    assert daemon.process.wait(STOP_TIMEOUT_S) == 0
