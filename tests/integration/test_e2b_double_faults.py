"""The faults of the double, as the real SDK sees them: each is the one that its name says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from e2b import AsyncSandbox, AuthenticationException, RateLimitException, SandboxException
from e2b.exceptions import TimeoutException
from e2b_code_interpreter import AsyncSandbox as AsyncInterpreter

from tests.support.e2b import WHY_NOT, Double, Kind

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

SHORT_S = 0.5
START = "/process.Process/Start"
SAID = "echo one; sleep 0.05; echo two; sleep 0.05; echo three"
WORDS = "one\ntwo\nthree\n"


@pytest.fixture
async def double() -> AsyncIterator[Double]:
    async with Double() as double:
        yield double


@pytest.fixture
async def sandbox(double: Double) -> AsyncSandbox:
    return await AsyncSandbox.create(**settings(double))


def settings(double: Double, retries: int = 0) -> dict[str, Any]:
    return {"api_key": double.api_key, "api_url": double.url, "sandbox_url": double.url, "retries": retries}


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_a_status_is_answered_instead(double: Double, status: int) -> None:
    double.fault(Kind.STATUS, "/v2/sandboxes", status=status)
    with pytest.raises(Exception, match=str(status)):
        await AsyncSandbox.create(**settings(double))
    assert double.created == 0
    await AsyncSandbox.create(**settings(double))
    assert [(one.status, one.fault) for one in double.requests] == [(status, Kind.STATUS), (201, None)]


async def test_refusals_have_their_own_errors(double: Double) -> None:
    double.fault(Kind.STATUS, status=401)
    double.fault(Kind.STATUS, status=429)
    with pytest.raises(AuthenticationException):
        await AsyncSandbox.create(**settings(double))
    with pytest.raises(RateLimitException):
        await AsyncSandbox.create(**settings(double))


async def test_a_retry_after_header_is_sent(double: Double) -> None:
    double.fault(Kind.STATUS, "/v2/sandboxes", status=429, retry_after_s=1, times=1)
    began = time.monotonic()
    await AsyncSandbox.create(**settings(double, retries=1))
    assert time.monotonic() - began >= 1.0


async def test_rules_pass_over_requests_and_wear_off(double: Double, sandbox: AsyncSandbox) -> None:
    rule = double.fault(Kind.STATUS, "/sandboxes/{id}*", skip=1, times=2)
    outcomes = []
    for _ in range(4):
        try:
            await sandbox.get_info()
            outcomes.append("good")
        except SandboxException:
            outcomes.append("bad")
    assert outcomes == ["good", "bad", "bad", "good"]
    assert rule.struck == 2


async def test_a_connection_can_be_cut_before_or_after_the_request_is_done(double: Double) -> None:
    double.fault(Kind.CUT_BEFORE, "/v2/sandboxes")
    double.fault(Kind.CUT_AFTER, "/v2/sandboxes")
    for created in (0, 1):
        with pytest.raises(Exception, match=r"(?i)connection|closed|reset|error"):
            await AsyncSandbox.create(**settings(double))
        assert double.created == created


async def test_a_request_can_be_done_and_answered_with_an_error(double: Double) -> None:
    double.fault(Kind.STATUS_AFTER, "/v2/sandboxes", status=503)
    with pytest.raises(Exception, match="503"):
        await AsyncSandbox.create(**settings(double))
    assert double.created == 1


@pytest.mark.parametrize("kind", [Kind.TRUNCATED, Kind.GARBAGE])
async def test_an_answer_can_be_half_or_nonsense(double: Double, sandbox: AsyncSandbox, kind: Kind) -> None:
    double.fault(kind, START)
    with pytest.raises(Exception, match=r".*"):
        await sandbox.commands.run(SAID)
    double.fault(kind, "/sandboxes/{id}")
    with pytest.raises(Exception, match=r".*"):
        await sandbox.get_info()
    assert (await sandbox.get_info()).sandbox_id == sandbox.sandbox_id


async def test_ids_can_be_wrong(double: Double, sandbox: AsyncSandbox) -> None:
    double.fault(Kind.WRONG_ID, "/sandboxes/{id}")
    assert (await sandbox.get_info()).sandbox_id != sandbox.sandbox_id
    double.fault(Kind.WRONG_ID, START)
    command = await sandbox.commands.run("true", background=True)
    assert command.pid > 100_000


async def test_an_answer_can_be_late(double: Double, sandbox: AsyncSandbox) -> None:
    double.fault(Kind.DELAY, "/sandboxes/{id}", seconds=3600.0)
    with pytest.raises(Exception, match=r"(?i)time"):
        await sandbox.get_info(request_timeout=SHORT_S)


async def test_a_sandbox_can_vanish(double: Double, sandbox: AsyncSandbox) -> None:
    double.fault(Kind.VANISH, START)
    with pytest.raises(Exception, match="was not found"):
        await sandbox.commands.run("true")
    assert double.sandboxes == {}


# ---------------------------------------------------------------------------------------------------------------------
# Streams


async def test_a_stream_can_be_cut_at_any_byte(double: Double, sandbox: AsyncSandbox) -> None:
    async with aiohttp.ClientSession(double.url, headers=_headers(double, sandbox)) as session:
        whole_bytes = len(await _read(session))
        for at_byte in range(0, whole_bytes, 7):
            double.fault(Kind.STREAM_CUT, START, at_byte=at_byte)
            assert len(await _read(session)) == at_byte


async def test_a_stream_that_is_cut_is_no_result(double: Double, sandbox: AsyncSandbox) -> None:
    double.fault(Kind.STREAM_CUT, START, at_byte=120)
    with pytest.raises(Exception, match=r"(?i)connection|stream|sandbox"):
        await sandbox.commands.run(SAID)


async def test_the_sdk_waits_past_its_own_timeout_for_a_stream_that_stalls(
    double: Double, sandbox: AsyncSandbox
) -> None:
    """The reason for the backend's own time limit: the SDK looks at its deadline only when bytes arrive."""
    double.fault(Kind.STREAM_STALL, START, at_byte=100)
    began = time.monotonic()
    with pytest.raises(TimeoutException):  # the SDK turns a cancellation into this
        async with asyncio.timeout(4 * SHORT_S):
            await sandbox.commands.run(SAID, timeout=SHORT_S)
    assert time.monotonic() - began >= 4 * SHORT_S


async def test_a_request_that_is_not_answered_ends_at_its_own_timeout(double: Double, sandbox: AsyncSandbox) -> None:
    command = await sandbox.commands.run("cat", background=True, stdin=True, timeout=0)
    double.fault(Kind.DELAY, "/process.Process/SendInput", seconds=3600.0)
    with pytest.raises(TimeoutException):
        await command.send_stdin("x", request_timeout=SHORT_S)


async def test_a_stream_can_lack_its_end(double: Double, sandbox: AsyncSandbox) -> None:
    double.fault(Kind.STREAM_NO_END, START)
    with pytest.raises(Exception, match=r"(?i)end event|ended"):
        await sandbox.commands.run(SAID)


async def test_events_can_come_twice_or_swapped(double: Double, sandbox: AsyncSandbox) -> None:
    double.fault(Kind.STREAM_DUPLICATED, START)
    assert (await sandbox.commands.run(SAID)).stdout == "one\none\ntwo\ntwo\nthree\nthree\n"
    double.fault(Kind.STREAM_REORDERED, START)
    # The last event, swapped with the end, comes too late for the SDK.
    assert (await sandbox.commands.run(SAID)).stdout == "two\none\n"


async def test_an_event_that_waits_for_another_does_not_wait_long(double: Double, sandbox: AsyncSandbox) -> None:
    double.fault(Kind.STREAM_REORDERED, START)
    came = asyncio.Event()
    command = await sandbox.commands.run(
        "echo one; cat", background=True, stdin=True, timeout=0, on_stdout=lambda _: came.set()
    )
    await asyncio.wait_for(came.wait(), 10)
    await command.kill()


async def test_strange_bytes_can_be_among_the_output(double: Double, sandbox: AsyncSandbox) -> None:
    double.fault(Kind.STREAM_BLANK_LINES, START)
    assert (await sandbox.commands.run("echo one")).stdout == "\n\none\n\n\n"
    double.fault(Kind.STREAM_LINE_SEPARATOR, START)
    assert (await sandbox.commands.run("echo one")).stdout == "\u2028one\n\u2028"


async def test_a_stream_can_become_nonsense(double: Double, sandbox: AsyncSandbox) -> None:
    double.fault(Kind.STREAM_GARBAGE, START)
    with pytest.raises(Exception, match=r".*"):
        await sandbox.commands.run(SAID)


async def test_a_line_can_have_no_end(double: Double, sandbox: AsyncSandbox) -> None:
    """Ten gigabytes, made as they are read: neither end waits for all of them or keeps them in memory."""
    double.fault(Kind.STREAM_ENDLESS_LINE, START, at_byte=10 * 2**30)
    seen = 0
    enough = asyncio.Event()

    def count(text: str) -> None:
        nonlocal seen
        assert "\n" not in text
        seen += len(text)
        if seen > 2**22:
            enough.set()

    command = await sandbox.commands.run("echo one", background=True, on_stdout=count, timeout=0, retain_output=False)
    waiting = asyncio.ensure_future(command.wait())
    await asyncio.wait_for(enough.wait(), 30)
    await command.disconnect()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_an_execution_without_an_end_looks_good_to_the_sdk(double: Double) -> None:
    """The reason why the backend does not use the SDK's executions."""
    sandbox = await AsyncInterpreter.create(**settings(double))
    double.fault(Kind.STREAM_NO_END, "/execute")
    done = await sandbox.run_code("print('half')")
    assert done.error is None
    assert done.logs.stdout == ["half\n"]


@pytest.mark.parametrize("kind", [Kind.STREAM_BLANK_LINES, Kind.STREAM_LINE_SEPARATOR, Kind.STREAM_GARBAGE])
async def test_an_execution_can_be_unreadable(double: Double, kind: Kind) -> None:
    sandbox = await AsyncInterpreter.create(**settings(double))
    double.fault(kind, "/execute")
    with pytest.raises(Exception, match=r".*"):
        await sandbox.run_code("print('half')")


# ---------------------------------------------------------------------------------------------------------------------
# All at once


async def test_a_network_that_is_down_cuts_everything_until_it_is_up(double: Double, sandbox: AsyncSandbox) -> None:
    command = await sandbox.commands.run("cat", background=True, stdin=True, timeout=0)
    double.go_down()
    with pytest.raises(Exception, match=r".*"):
        await command.wait()
    with pytest.raises(Exception, match=r".*"):
        await sandbox.get_info()
    double.go_down_for(SHORT_S)
    while not await _is_up(sandbox):
        pass
    assert [one.pid for one in await sandbox.commands.list()] == [command.pid]


async def test_a_storm_is_the_same_for_the_same_seed(double: Double, sandbox: AsyncSandbox) -> None:
    async def suffered(seed: int) -> list[Kind | None]:
        double.clear_faults()
        storm = double.storm(seed, rate=0.5, kinds=(Kind.STATUS, Kind.CUT_AFTER, Kind.GARBAGE), most=20)
        before = len(double.requests)
        for _ in range(30):
            await asyncio.gather(sandbox.get_info(), return_exceptions=True)
        assert storm.struck
        return [one.fault for one in double.requests[before:]]

    assert await suffered(7) == await suffered(7) != await suffered(8)


async def test_sandboxes_that_are_refused_or_cut_off_leave_nothing(double: Double) -> None:
    """The fixture that looks for leftovers checks it."""
    double.storm(1, rate=0.5, kinds=(Kind.CUT_AFTER, Kind.CUT_BEFORE, Kind.STATUS_AFTER, Kind.GARBAGE))
    await asyncio.gather(*(AsyncSandbox.create(**settings(double)) for _ in range(12)), return_exceptions=True)


async def _is_up(sandbox: AsyncSandbox) -> bool:
    (answer,) = await asyncio.gather(sandbox.is_running(), return_exceptions=True)
    return answer is True


def _headers(double: Double, sandbox: AsyncSandbox) -> dict[str, str]:
    return {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": double.sandboxes[sandbox.sandbox_id].access_token or "",
        "Content-Type": "application/connect+json",
    }


async def _read(session: aiohttp.ClientSession) -> bytes:
    """Reads a stream to its end."""
    body = b'{"process": {"cmd": "/bin/echo", "args": ["x"]}}'
    seen = bytearray()
    try:
        async with session.post(START, data=b"\0" + len(body).to_bytes(4, "big") + body) as answer:
            async for piece in answer.content.iter_any():
                seen += piece
    except aiohttp.ClientError:
        pass
    return bytes(seen)
