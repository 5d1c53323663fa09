"""The daemon is killed while processes print: each byte arrives once, and the processes go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from executor_client import Process, ProcessOutput, ProcessOutputCut, Session, TerminalSize
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import WAIT_S
from tests.support.backends import DOCKER_IMAGE, require
from tests.support.daemon import Daemon
from tests.support.rounds import rounds

KILLS = rounds(10, 2)
LINES = 3000
# As fast as it can, with a pause now and then, so that some of it falls into the time without a daemon.
PRINT = f"i=0; while [ $i -lt {LINES} ]; do echo line $i; i=$((i+1)); [ $((i % 100)) = 0 ] && sleep 0.02; done"
ALL_LINES = "".join(f"line {number}\n" for number in range(LINES)).encode()


@pytest.fixture(params=("local", "docker"))
def restart(request: pytest.FixtureRequest, start: StartDaemon) -> Callable[..., Daemon]:
    """Starts a daemon of the backend, the next time on what the last one left."""
    require(request.param)
    base = f'pool.size = 0\nserver.backend = "{request.param}"\ndocker.images.base = "{DOCKER_IMAGE}"\n'
    return lambda config="": start(base + config)


def follow(threads: ThreadPoolExecutor, process: Process) -> Future[bytes]:
    """Reads a process to its end in a thread; goes on when it has said something."""
    spoke = threading.Event()

    def read() -> bytes:
        said = bytearray()
        for event in process:
            assert not isinstance(event, ProcessOutputCut), "output was dropped"
            assert isinstance(event, ProcessOutput)
            said += event.data
            spoke.set()
        assert process.result is not None and process.result.succeeded, process.result
        return bytes(said)

    future = threads.submit(read)
    assert spoke.wait(WAIT_S)
    return future


@pytest.mark.timeout(240)
def test_what_eight_processes_print_arrives_once_whatever_is_killed(restart: Callable[..., Daemon]) -> None:
    daemon = restart()
    with daemon.client() as client, ThreadPoolExecutor(8) as threads:
        sessions: list[Session] = [client.create_session() for _ in range(2)]
        for _ in range(KILLS):
            started = [session.processes.start(PRINT) for session in sessions for _ in range(3)]
            started += [session.processes.start(PRINT, pty=TerminalSize(80, 24)) for session in sessions]
            read = [follow(threads, process) for process in started]
            daemon.kill()
            daemon = restart()
            said = [each.result(WAIT_S) for each in read]
            assert said[:6] == [ALL_LINES] * 6
            assert [each.replace(b"\r\n", b"\n") for each in said[6:]] == [ALL_LINES] * 2
        assert all(session.execute("1 + 1").output == 2 for session in sessions)


def test_input_that_was_given_before_the_kill_is_given_once(restart: Callable[..., Daemon]) -> None:
    daemon = restart()
    with daemon.client() as client:
        session = client.create_session()
        process = session.processes.start(["cat"], stdin=True)
        process.write("before ")
        daemon.kill()
        daemon = restart()
        process.write("after")
        process.close_stdin()
        said = b"".join(event.data for event in process if isinstance(event, ProcessOutput))
        assert said == b"before after"
        found = session.processes.list()
        assert [(info.argv, info.running) for info in found] == [(("cat",), False)]
