"""Over many sessions, and over many that are killed, the daemon keeps nothing.

With a fork server it keeps one fork server, from before the first look to the last: its template process, its first process and that
one's parent, and their descriptors. So one more of any of them is a leak.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import psutil
import pytest

from executor_client import ExecutorClient, Outcome, PreconditionError, Session
from executor_server.guest.wire.fork_server_messages import TEMPLATE_NAME
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import Sandbox, memory_bytes, open_files, sandbox_directories, sandboxes
from tests.support.daemon import Daemon
from tests.support.eager_daemon import EAGER_SERVER
from tests.support.polling import eventually
from tests.support.rounds import rounds, usual

CYCLES = rounds(50, 4)
# Sessions before the first look: the first one opens the client's connection and the event loop's spare descriptor.
WARM_UP = rounds(10, 1)
ROUNDS = rounds(3, 1)
SESSIONS = 8
ATTEMPTS = 4
# The daemon's memory may grow by this: allocators keep a little; a session that stayed would be far more.
GROWTH_BYTES = 12 * 2**20
# The template process of such sessions has no libraries, and is there at once.
SMALL = {"memory_bytes": 2**28}
POLICY = 'default = "default"\n[profiles.default]\nsandbox.fork_server = "{}"\n'


@dataclass(frozen=True)
class Holdings:
    """Resources that a daemon without sessions holds."""

    files: int
    threads: int
    processes: int
    directories: int


def holdings(daemon: Daemon) -> Holdings:
    process = psutil.Process(daemon.process.pid)
    children = len(process.children(recursive=True))
    return Holdings(open_files(daemon), process.num_threads(), children, len(sandbox_directories(daemon)))


def adds_nothing(daemon: Daemon, times: int, work: Callable[[], None]) -> bool:
    """True when the daemon holds after the work what it held before. It may hold more threads, but nothing else.

    A pool of threads grows, up to its size, when more comes at once than before: so one of several attempts adds none,
    and with a leak no attempt does.
    """
    assert eventually(lambda: is_at_rest(daemon))
    before, memory_before = holdings(daemon), memory_bytes(daemon)
    for _ in range(times):
        work()
    is_same = eventually(lambda: holdings(daemon) == before)
    assert replace(holdings(daemon), threads=before.threads) == before
    assert memory_bytes(daemon) - memory_before < GROWTH_BYTES
    return is_same


def is_at_rest(daemon: Daemon) -> bool:
    """True when no sandbox is there, and the template process makes none: its forks have its name at first."""
    try:
        names = [process.name() for process in psutil.Process(daemon.process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:  # one is just ending
        return False
    return not sandbox_directories(daemon) and names.count(TEMPLATE_NAME) <= 1


@pytest.fixture(params=usual(["off", "shared"], but=("off",)))
def start_one(start: StartDaemon, request: pytest.FixtureRequest) -> Callable[[str], Daemon]:
    """Starts a daemon all of whose sandboxes are made by bubblewrap; or all by a fork server, from now on."""

    def start_one(config: str) -> Daemon:
        if request.param == "off":
            return start(config, policy=POLICY.format("off"))
        daemon = start(config, policy=POLICY.format("shared"), program=EAGER_SERVER)
        with daemon.client() as client:
            assert eventually(lambda: forks(daemon, client)), daemon.log.read_text()
        return daemon

    return start_one


def forks(daemon: Daemon, client: ExecutorClient) -> bool:
    with client.create_session(limits=SMALL):
        return all(sandbox.monitor is None for sandbox in sandboxes(daemon))


def use(client: ExecutorClient) -> None:
    with client.create_session(limits=SMALL) as session:
        session.set_variables({"x": b"x" * 1_000_000})
        session.put_file("f", b"y" * 100_000)
        result = session.execute("print('z' * 100_000)\nlen(x)")
        assert (result.outcome, result.output) == (Outcome.SUCCEEDED, 1_000_000)


def test_files_processes_and_memory_stay_constant_over_many_sessions(
    start_one: Callable[[str], Daemon],
) -> None:
    daemon = start_one("pool.size = 0")
    with daemon.client() as client:
        for _ in range(WARM_UP):
            use(client)
        assert any(adds_nothing(daemon, CYCLES, lambda: use(client)) for _ in range(ATTEMPTS))


def test_clients_that_are_closed_leave_no_connection(start: StartDaemon) -> None:
    """gRPC keeps the connection of a stream whose end was not read, and the memory of each such stream."""
    daemon = start("pool.size = 0", policy=POLICY.format("off"))
    use_once(daemon)
    before = open_files(daemon)
    for _ in range(5):
        use_once(daemon)
    assert eventually(lambda: open_files(daemon) <= before)


def use_once(daemon: Daemon) -> None:
    with daemon.client() as client:
        use(client)


def test_nothing_is_left_of_many_sessions_that_are_killed_at_random(start_one: Callable[[str], Daemon]) -> None:
    """In each round some sandboxes lose a process in the middle of an execution, and some sessions are deleted."""
    daemon = start_one("pool.size = 0")
    chance = random.Random(11)
    with daemon.client() as client:
        survive_a_round(daemon, client, chance)
        assert any(
            adds_nothing(daemon, ROUNDS, lambda: survive_a_round(daemon, client, chance)) for _ in range(ATTEMPTS)
        )


def survive_a_round(daemon: Daemon, client: ExecutorClient, chance: random.Random) -> None:
    with ThreadPoolExecutor(SESSIONS) as threads:
        sessions = list(threads.map(lambda _: client.create_session(limits=SMALL), range(SESSIONS)))
        running = [threads.submit(session.execute, "import time\ntime.sleep(1e6)") for session in sessions]
        assert eventually(lambda: {info.state.value for info in client.list_sessions()} == {"busy"})
        for sandbox in chance.sample(sandboxes(daemon), SESSIONS // 2):
            kill_something(sandbox, chance)
        for session in chance.sample(sessions, SESSIONS // 4):
            session.close()
        for session in sessions:
            end(session)
        ends = {future.result().outcome for future in running}
    assert ends <= {Outcome.CANCELLED, Outcome.CRASHED, Outcome.LOST}


def kill_something(sandbox: Sandbox, chance: random.Random) -> None:
    monitors = [] if sandbox.monitor is None else [sandbox.monitor]
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        chance.choice([*monitors, sandbox.supervisor, *sandbox.child_processes]).kill()


def end(session: Session) -> None:
    try:
        session.cancel()
    except PreconditionError as error:  # its sandbox was killed
        assert error.reason == "SESSION_LOST"
    session.close()
