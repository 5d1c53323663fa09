"""The daemon is killed more than once while the same processes print, and a process ends while there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from executor_client import ProcessOutput, ProcessOutputCut
from executor_client.process import Process
from tests.chaos.observe import WAIT_S
from tests.support.daemon import Daemon

PROCESSES = 8
KILLS = 2
LINES = 4000
# Numbered lines of two streams, some of them long, for about two seconds.
PRINTER = f"""
import sys, time
for number in range({LINES}):
    stream = sys.stderr if number % 7 == 0 else sys.stdout
    print(number, "x" * (number % 300), file=stream, flush=True)
    if number % 20 == 0:
        time.sleep(0.01)
sys.exit(3)
"""


def expected(stream: str) -> bytes:
    numbers = (number for number in range(LINES) if (number % 7 == 0) == (stream == "stderr"))
    return b"".join(b"%d %s\n" % (number, b"x" * (number % 300)) for number in numbers)


EXPECTED = {stream: expected(stream) for stream in ("stdout", "stderr")}


class Follower:
    """Reads a process's events in a thread, and checks their numbers."""

    def __init__(self, process: Process, begun: threading.Semaphore) -> None:
        self.process = process
        self.said = {"stdout": bytearray(), "stderr": bytearray()}
        self._begun = begun

    def read(self) -> None:
        last = 0
        for event in self.process:
            assert not isinstance(event, ProcessOutputCut), "nothing was left out"
            assert event.number > last, "no event comes twice"
            last = event.number
            assert isinstance(event, ProcessOutput)
            self.said[event.stream] += event.data
            self._begun.release()


@pytest.mark.timeout(180)
def test_each_byte_of_eight_processes_arrives_once_after_two_kills(restart_on_each: Callable[[], Daemon]) -> None:
    daemon = restart_on_each()
    begun = threading.Semaphore(0)
    with daemon.client() as client, client.create_session() as session, ThreadPoolExecutor(PROCESSES) as threads:
        command = ["python3", "-c", PRINTER]
        followers = [Follower(session.processes.start(command), begun) for _ in range(PROCESSES)]
        reads = [threads.submit(each.read) for each in followers]
        for _ in range(KILLS):
            for _ in range(PROCESSES * 20):
                assert begun.acquire(timeout=WAIT_S)
            assert any(each.process.result is None for each in followers), "the kill comes while they print"
            daemon.kill()
            daemon = restart_on_each()
        for read in reads:
            read.result(WAIT_S)
        for each in followers:
            assert {stream: bytes(said) for stream, said in each.said.items()} == EXPECTED
            result = each.process.result
            assert result is not None
            assert (result.outcome, result.exit_code) == ("exited", 3)


@pytest.mark.timeout(120)
def test_a_process_that_ended_while_no_daemon_ran_is_read_from_its_first_event(
    restart_on_each: Callable[[], Daemon],
) -> None:
    daemon = restart_on_each()
    with daemon.client() as client, client.create_session() as session:
        process = session.processes.start(["sh", "-c", "echo before; read line; echo after; exit 4"], stdin=True)
        first = next(iter(process))
        assert isinstance(first, ProcessOutput)
        assert first.data == b"before\n"
        process.write("go\n")
        daemon.kill()
        daemon = restart_on_each()
        again = session.processes.attach(process.process_id)
        assert b"".join(each.data for each in again if isinstance(each, ProcessOutput)) == b"before\nafter\n"
        assert again.result is not None
        assert again.result.exit_code == 4
        assert [info.process_id for info in session.processes.list()] == [process.process_id]
        process.close()
        again.close()
