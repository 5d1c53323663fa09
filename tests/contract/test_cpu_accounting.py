"""CPU time of every process is charged, also when no process waits for its end."""

from __future__ import annotations

import pytest

from executor_server.core.lifecycle.observer import Observer
from executor_server.core.model import SessionFacts
from tests.contract.harness import Harness
from tests.contract.marks import promise
from tests.support.polling import eventually_async, eventually_awaited

# The CPU time of children whose end their parent ignores is added to no process.
_UNWAITED = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(40):
    if os.fork() == 0:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
"""


@promise("end-cpu-children")
@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])
async def test_a_child_that_ended_shortly_before_its_execution_is_charged_once(harness: Harness, handler: str) -> None:
    """It was charged with its own time at the last look, and again with that of its parent, which had waited for it."""
    session = await harness.session(operations=10**12)
    code = _UNWAITED.replace("SIG_IGN", handler).replace("40", "1").replace("0.3", "0.8")
    run = await harness.run(session, code)
    assert run.outcome == "succeeded"
    # Without a parent that waits, what it has spent after the last look is not known.
    assert 0.55 <= run.ended.usage.cpu_time_s < 1.2


@promise("end-cpu-children")
async def test_children_that_are_not_waited_for_are_charged(harness: Harness) -> None:
    """12 s of CPU time passed a limit of 1, and were reported as 0.2."""
    session = await harness.session(operations=10**12, wall_time_s=60.0)
    run = await harness.run(session, _UNWAITED, cpu_time_s=1.0, wall_time_s=60.0)
    assert run.outcome == "cpu_limit", run.ended.usage
    assert run.ended.usage.cpu_time_s >= 1.0


@promise("end-cpu-children")
async def test_children_that_are_waited_for_are_charged_once(harness: Harness) -> None:
    session = await harness.session(operations=10**12)
    run = await harness.run(session, _UNWAITED.replace("signal.SIG_IGN", "signal.SIG_DFL").replace("40", "4"))
    assert run.outcome == "succeeded"
    # Each of four burns 0.3 s by its own clock, which is some milliseconds ahead of the kernel's account of the group.
    assert 1.15 <= run.ended.usage.cpu_time_s < 1.9


class _Charges(Observer):
    def __init__(self) -> None:
        self.cpu_time_s = 0.0

    def background_used(self, session: SessionFacts, cpu_time_s: float) -> None:
        self.cpu_time_s += cpu_time_s


_BURN_A_WHILE = "import time\nend = time.process_time() + 0.8\nwhile time.process_time() < end: pass"
_BURNS = """
import os, time
if os.fork() == 0:
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    open("burnt", "w").close()
    time.sleep(1e6)
"""


@promise("charge-background")
async def test_processes_that_run_between_executions_are_charged_meanwhile(harness: Harness) -> None:
    """It was not charged: a session that only started something was free."""
    session = await harness.session()
    session._observer = charges = _Charges()
    assert (await harness.run(session, "1")).outcome == "succeeded"
    run = await harness.run(
        session,
        """
import os
if os.fork() == 0:
    import time
    end = time.process_time() + 1.0
    while time.process_time() < end:
        pass
    time.sleep(1e6)
""",
    )
    assert run.outcome == "succeeded"
    assert await eventually_async(lambda: charges.cpu_time_s + run.ended.usage.cpu_time_s > 0.9)
    assert charges.cpu_time_s < 1.5


@promise("charge-background")
async def test_a_prelude_is_charged_though_it_has_no_result(harness: Harness) -> None:
    """A prelude could burn its 60 s in each new session for nothing."""
    session = await harness.session(prelude=_BURN_A_WHILE)
    run = await harness.run(session, "1")
    assert await harness.spent_cpu_s(session, run) > 0.75


@promise("charge-background")
async def test_a_session_is_charged_for_what_runs_up_to_its_end(harness: Harness) -> None:
    """Short sessions were charged for nothing between their last report, every few seconds, and their end."""
    session = await harness.session()
    session._liveness._ping_interval_s = 1_000.0
    session._observer = charges = _Charges()
    assert (await harness.run(session, _BURNS)).outcome == "succeeded"

    async def burnt() -> bool:
        return "burnt" in [file.path for file in (await session.list_files(""))[0]]

    assert await eventually_awaited(burnt)
    await harness.end_session(session)
    assert charges.cpu_time_s > 0.25
