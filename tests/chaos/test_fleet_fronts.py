"""The front of a fleet is killed, stopped, started twice or cut off from half of its nodes: what runs goes on, no
session is in two places, and what the front has not lost is there.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_client import ExecutorClient, Session, SessionState
from tests.chaos.observe import executing
from tests.support.backends import require
from tests.support.machines import Fleet, Machine, fleet, new_id
from tests.support.polling import eventually
from tests.support.rounds import rounds

NODES = ("n1", "n2")
WAIT_S = 60.0
# Longer than a lease and its margin, and shorter than the time after which a node ends its sandboxes.
A_LONG_STOP_S = 6.0
GOES_ON = "import os, time\nprint('here', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\nkept + 1"


@pytest.fixture
def machines() -> Iterator[Fleet]:
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    with fleet(directory, *NODES) as made:
        yield made
    shutil.rmtree(directory)


def session_on(client: ExecutorClient, node: str) -> Session:
    return client.create_session(node_labels={"name": node}, authorized_imports=["time", "os.*"])


@contextmanager
def sessions_that_run(machines: Fleet) -> Iterator[dict[str, Session]]:
    """A session on each node in which an execution runs; at the end all have gone on, and are what they were."""
    with machines.client(reconnect_timeout_s=WAIT_S) as client, ExitStack() as stack:
        sessions = {node: session_on(client, node) for node in NODES}
        for session in sessions.values():
            session.execute("kept = 41")
        results = {node: stack.enter_context(executing(session, GOES_ON)) for node, session in sessions.items()}
        yield sessions
        for node, session in sessions.items():
            session.put_file("go", b"")
            assert results[node].result(WAIT_S).output == 42
            assert (session.refresh().generation, session.execute("kept").output) == (1, 41)
            session.close()


def test_what_runs_does_not_notice_that_the_front_is_killed_and_new_sessions_come_again(machines: Fleet) -> None:
    for _ in range(rounds(12, 2)):
        with sessions_that_run(machines), machines.client(reconnect_timeout_s=WAIT_S) as client:
            client.get_policy()  # a client whose front has never answered waits for it no longer than a moment
            machines.front.kill()
            machines.front.start()
            with client.create_session() as new:
                assert new.execute("6 * 7").output == 42
        machines.wait_serving(*NODES)


def test_a_request_whose_front_was_killed_finds_its_session_at_the_next_front(machines: Fleet) -> None:
    """Else a client that asks again would have two, one of them unknown to it."""
    for _ in range(rounds(10, 1)):
        request_id = new_id()
        made = machines.create(request_id)
        assert made is not None
        machines.front.kill()
        machines.front.start()
        again = eventually(partial(machines.create, request_id), timeout_s=WAIT_S)
        assert again is not None
        assert again.session_id == made.session_id
        with machines.client() as client:
            assert [each.session_id for each in client.list_sessions()] == [made.session_id]
            client.get_session(made.session_id).close()


def test_a_front_that_stood_still_has_lost_nothing(machines: Fleet) -> None:
    """When it goes on, each node seems to have been silent for long; their reports lie in its sockets."""
    with sessions_that_run(machines) as sessions:
        machines.front.send(signal.SIGSTOP)
        assert not eventually(machines.seen, timeout_s=A_LONG_STOP_S)
        machines.front.send(signal.SIGCONT)
        machines.wait_serving(*NODES)
        with machines.client() as client:
            there = {each.session_id for each in client.list_sessions() if each.state is not SessionState.LOST}
            assert there == {each.session_id for each in sessions.values()}


def test_a_front_whose_nodes_obey_its_copy_ends_so_that_its_clients_do_not_wait_for_it(machines: Fleet) -> None:
    with copied_front(machines, machines.directory / "copy") as copy:
        assert machines.front.process is not None
        assert machines.front.process.wait(WAIT_S) == 0, "it ended in order: systemd does not start it again"
        assert "front_superseded" in machines.front.log
        assert eventually(lambda: serving(machines, copy) == set(NODES), timeout_s=WAIT_S), copy.log


def serving(machines: Fleet, front: Machine) -> set[str]:
    """The nodes that this front says serve."""
    return {each.node for each in machines.seen(front) if each.state == admin_pb.NODE_STATE_SERVING}


@contextmanager
def copied_front(machines: Fleet, directory: Path) -> Iterator[Machine]:
    """A front that runs on a copy of the state directory of another one, which runs as well."""
    directory.mkdir()
    shutil.copytree(machines.front.state_dir, directory / "s", ignore=shutil.ignore_patterns("*.sock", "lock"))
    config = (machines.front.directory / "c.toml").read_text()
    (directory / "c.toml").write_text(config.replace(str(machines.front.state_dir), str(directory / "s")))
    copy = Machine("copy", directory, "front")
    copy.start()
    try:
        yield copy
    finally:
        copy.kill()
