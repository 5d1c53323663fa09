"""Processes that misbehave, and callers that ask for too many: each costs itself, and nothing beside it."""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing

import pytest

from executor_server.core import (
    NotFound,
    ProcessOutcome,
    ProcessRequest,
    ProcessRules,
    Reason,
    ResourceExhausted,
    SignalTarget,
    TerminalSize,
)
from executor_server.sessions import Session
from tests.contract.harness import Harness
from tests.contract.marks import promise
from tests.contract.test_processes import WAIT_S, read, run, shell, until
from tests.support.polling import eventually_awaited
from tests.support.rounds import rounds

pytestmark = promise("processes")

STARTS = rounds(10_000, 240)
AT_A_TIME = 48


async def test_ten_thousand_starts_run_as_many_as_the_policy_allows_and_leave_few_known(harness: Harness) -> None:
    """All are asked for by callers that do not wait for the earlier ones; those beyond the limit are refused."""
    session = await harness.session()
    most = ProcessRules().max
    refused = 0

    async def start(number: int) -> None:
        nonlocal refused
        try:
            assert (await run(session, shell(f"p{number}", f"echo {number}"))).stdout == b"%d\n" % number
        except ResourceExhausted as error:
            assert error.reason is Reason.TOO_MANY_PROCESSES
            refused += 1

    for first in range(0, STARTS, AT_A_TIME):
        await asyncio.gather(*(start(number) for number in range(first, first + AT_A_TIME)))
    assert refused >= AT_A_TIME - most
    assert len(await harness.process_ids(session)) <= 2 * AT_A_TIME + most
    assert (await harness.run(session, "1 + 1")).output == 2


async def test_output_without_end_waits_for_its_reader_and_holds_nothing_else_up(harness: Harness) -> None:
    session = await harness.session()
    log = await session.processes.start(ProcessRequest("p", ("yes",)))
    async with aclosing(log.events_with_gap(0)) as events:
        await until(events, b"y\n")  # and reads no further
        for number in range(20):
            assert (await harness.run(session, f"print({number})")).stdout == f"{number}\n"
        assert (await run(session, shell("q", "echo beside"))).stdout == b"beside\n"
        await session.processes.signal("p", signal.SIGKILL, SignalTarget.TREE)
    assert (await read(log)).ended.signal == signal.SIGKILL


@promise("processes-terminal")
async def test_a_full_terminal_that_no_client_reads_takes_keys_all_the_same(harness: Harness) -> None:
    """A program that fills its terminal stands still in its write; the interrupt key must still reach it."""
    session = await harness.session()
    script = (
        "trap 'exit 5' INT; while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done"
    )
    log = await session.processes.start(shell("p", script, pty=TerminalSize(80, 24)))
    async with aclosing(log.events_with_gap(0)) as events:
        await until(events, b"xx\r\n")
        assert (await harness.run(session, "1 + 1")).output == 2
        await session.processes.resize("p", TerminalSize(40, 10))
        await session.processes.write("p", 0, b"\x03", eof=False)
    assert (await read(log)).ended.exit_code == 5


async def test_a_daemon_that_left_its_kernel_session_keeps_nothing_from_ending(harness: Harness) -> None:
    """It forks twice and has a session of its own, so a kill of the tree does not find it; the sandbox's end does."""
    session = await harness.session()
    script = (
        "import os, sys, time\n"
        "if os.fork(): os._exit(3)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "print('daemon', flush=True)\n"
        "open('away', 'w').close()\n"
        "time.sleep(1000)\n"
    )
    log = await session.processes.start(ProcessRequest("p", ("python3", "-c", script)))
    assert (await read(log)).ended.exit_code == 3
    await session.processes.signal("p", signal.SIGKILL, SignalTarget.TREE)

    async def is_away() -> bool:
        return bool((await harness.run(session, "import os; os.path.exists('away')")).output)

    assert await eventually_awaited(is_away)
    assert (await run(session, shell("q", "echo next"))).stdout == b"next\n"


async def test_a_process_that_closes_its_pipes_has_not_ended_by_that(harness: Harness) -> None:
    session = await harness.session()
    script = "echo last; exec <&- >&- 2>&-; while [ ! -e go ]; do sleep 0.02; done; exit 6"
    log = await session.processes.start(shell("p", script, stdin=True))
    async with aclosing(log.events_with_gap(0)) as events:
        await until(events, b"last\n")
    await harness.run(session, "open('go', 'w').close()")
    assert (await read(log)).ended.exit_code == 6


async def test_a_process_of_another_session_is_unknown(harness: Harness) -> None:
    mine, theirs = await harness.session(), await harness.session()
    log = await theirs.processes.start(ProcessRequest("p", ("cat",), stdin=True))
    for number, target in ((signal.SIGKILL, SignalTarget.TREE), (signal.SIGTERM, SignalTarget.PROCESS)):
        with pytest.raises(NotFound):
            await mine.processes.signal("p", number, target)
    with pytest.raises(NotFound):
        await mine.processes.write("p", 0, b"x", eof=True)
    await theirs.processes.write("p", 0, b"own", eof=True)
    said = await read(log)
    assert (said.stdout, said.ended.outcome) == (b"own", ProcessOutcome.EXITED)


async def test_a_shell_that_forks_without_end_ends_with_a_kill_of_its_tree(harness: Harness) -> None:
    session = await harness.session()
    log = await session.processes.start(shell("p", "echo bomb; f() { f | f & }; f 2>/dev/null; wait"))
    async with aclosing(log.events_with_gap(0)) as events:
        await until(events, b"bomb\n")
    async with asyncio.timeout(WAIT_S):
        await session.processes.signal("p", signal.SIGKILL, SignalTarget.TREE)
    await read(log)

    async def has_room() -> bool:
        return await _says_next(session, harness)

    assert await eventually_awaited(has_room)


async def _says_next(session: Session, harness: Harness) -> bool:
    ran = await harness.run(session, "import subprocess; subprocess.run(['echo', 'next'], capture_output=True).stdout")
    return bool(ran.output == b"next\n")
