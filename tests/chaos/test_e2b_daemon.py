"""A real daemon on E2B is killed, its network is cut, its cloud plays badly: clients get the reason."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from executor_client import (
    ExecutionResult,
    Outcome,
    PreconditionError,
    ResourceExhaustedError,
    Session,
    UnavailableError,
)
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import WAIT_S, executing
from tests.support.daemon import Daemon
from tests.support.e2b import WHY_NOT, Kind, ThreadedDouble
from tests.support.e2b.faults import HARMLESS
from tests.support.memory import growth_of
from tests.support.polling import eventually
from tests.support.rounds import rounds
from tests.support.tuned_daemon import tuned

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

MIB = 2**20
SILENCE_S = 1.0
CUT_S = 2 * SILENCE_S
"""Longer than a guest may be silent where its way can't break by itself."""
RECONNECT_S = 20.0
SHORT_RECONNECT_S = 1.0
KILLS = 3
STORM_SEEDS = (1, 2, 3)[: rounds(3, 1)]
STORM_RATE = 0.25
# A stream that stands still is waited for a minute while a sandbox is made: test_e2b_faults.py has that, shorter.
STORM_KINDS = tuple(kind for kind in HARMLESS if kind is not Kind.STREAM_STALL)
STORM_SESSIONS = 4
STORM_RUNS = rounds(4, 2)
ENDLESS_BYTES = 10 * 2**30
GROWTH_BYTES_MAX = 96 * MIB

LINES = 60
TICKS = f"""
import time
with open('runs', 'a') as file:
    file.write('x')
for number in range({LINES}):
    print('line', number, flush=True)
    time.sleep(0.02)
len(open('runs').read())
"""
"""Says how often it has been run."""
SAID = "".join(f"line {number}\n" for number in range(LINES))
FOREVER = "import time\nprint('here', flush=True)\ntime.sleep(1e6)"

Start = Callable[..., Daemon]


@pytest.fixture
def restart(cloud: ThreadedDouble, start: StartDaemon) -> Start:
    """Starts a daemon on the cloud, which outlives it; the next time on what the last one left."""
    config = f"""\
server.backend = "e2b"
pool.size = 0
e2b.api_url = "{cloud.url}"
e2b.sandbox_url = "{cloud.url}"
e2b.api_key_file = "{cloud.api_key_file}"
sessions.silence_s = {SILENCE_S}
"""

    program = tuned(E2B_REQUEST_TIMEOUT_S=3.0, HOST_SWEEP_INTERVAL_S=0.2)

    def restart(*, reconnect_s: float = RECONNECT_S, more: str = "") -> Daemon:
        return start(f"{config}e2b.reconnect_s = {reconnect_s}\n{more}", program=program)

    return restart


def whole(result: ExecutionResult, runs: int) -> None:
    assert (result.outcome, result.logs, result.output) == (Outcome.SUCCEEDED, SAID, runs), result.error


def test_a_network_that_is_cut_for_longer_than_a_silence_costs_nothing(restart: Start, cloud: ThreadedDouble) -> None:
    daemon = restart()
    with daemon.client() as client:
        session = client.create_session(authorized_imports=["time"])
        with executing(session, TICKS) as result:
            cloud.go_down_for(CUT_S)
            whole(result.result(WAIT_S), runs=1)
        assert session.execute("open('runs').read()").output == "x"


def test_a_network_that_stays_cut_is_told_as_such_and_leaves_no_sandbox(restart: Start, cloud: ThreadedDouble) -> None:
    daemon = restart(reconnect_s=SHORT_RECONNECT_S)
    with daemon.client() as client:
        session = client.create_session(authorized_imports=["time"])
        with executing(session, FOREVER) as result:
            cloud.go_down()
            lost = result.result(WAIT_S)
        assert lost.outcome is Outcome.LOST
        assert lost.error is not None
        assert "E2B does not answer" in lost.error.message
        assert lost.logs == "here\n"
        assert cloud.sandboxes  # still: no cloud was there to end it
        cloud.come_up()
        assert eventually(lambda: not cloud.sandboxes, timeout_s=WAIT_S)
        assert client.create_session().execute("1 + 1").output == 2


@pytest.mark.parametrize("seed", STORM_SEEDS)
def test_in_a_storm_of_faults_whatever_succeeds_is_true(restart: Start, cloud: ThreadedDouble, seed: int) -> None:
    daemon = restart()
    storm = cloud.storm(seed, rate=STORM_RATE, kinds=STORM_KINDS)
    with daemon.client() as client, ThreadPoolExecutor(STORM_SESSIONS) as threads:
        lives = [threads.submit(live, client.create_session) for _ in range(STORM_SESSIONS)]
        ends = [each.result(WAIT_S) for each in lives]
        print(f"seed {seed}: {len(storm.struck)} faults; {ends}")  # noqa: T201
        cloud.clear_faults()
        assert storm.struck, daemon.log.read_text()
        assert eventually(lambda: not cloud.sandboxes, timeout_s=WAIT_S)
        assert client.create_session().execute("1 + 1").output == 2


def live(create: Callable[..., Session]) -> str:
    """Some executions of a session; how it ended. Fails at a success that is none."""
    try:
        session = create(authorized_imports=["time"])
    except (UnavailableError, ResourceExhaustedError) as refusal:
        return f"refused: {refusal}"
    with session:
        for runs in range(1, STORM_RUNS + 1):
            try:
                result = session.execute(TICKS)
            except PreconditionError as lost:
                return f"lost: {lost}"
            if result.outcome is Outcome.LOST:
                assert result.error is not None
                assert SAID.startswith(result.logs)
                return f"lost: {result.error.message}"
            whole(result, runs)
    return "as usual"


def test_a_line_of_ten_gigabytes_does_not_fill_the_daemon(restart: Start, cloud: ThreadedDouble) -> None:
    daemon = restart()
    with daemon.client() as client:
        session = client.create_session(authorized_imports=["time"])
        session.execute("1")
        growth = growth_of(daemon.process.pid)
        line = cloud.fault(Kind.STREAM_ENDLESS_LINE, "/process.Process/Start", at_byte=ENDLESS_BYTES)
        cloud.cut_all()
        whole(session.execute(TICKS), runs=1)
        (grown,) = growth()
        assert line.struck
        print(f"the daemon grew by {grown / MIB:.1f} MiB")  # noqa: T201
        assert grown < GROWTH_BYTES_MAX
