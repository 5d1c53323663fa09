"""Connections to hosts of `ask`: they are held until they are approved, and end with whatever they wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from executor_server.guest.egress import reasons
from executor_server.guest.egress.host_names import Target
from tests.support.egress_engine import SESSION, SOON_S, Engine, echo, engine

REASON = b"X-Egress-Reason: "


@asynccontextmanager
async def asking(pattern: str = "*.ask.example") -> AsyncIterator[tuple[Engine, int]]:
    """An engine that asks before it connects to this pattern, at the port of a server that echoes."""
    async with engine(held_check_s=0.01) as running:
        port = await running.start_server(echo)
        running.rules = {"ask": [f"{pattern}:{port}"]}
        running.change(running.rules)
        yield running, port


async def begun(running: Engine, target: Target) -> asyncio.Task[bytes]:
    """Sends a CONNECT that the proxy has begun to hold."""
    answer = asyncio.create_task(running.ask(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode()))
    await running.recorder.until(lambda: target in running.recorder.rulings)
    return answer


async def test_connections_wait_for_one_approval_which_serves_them_and_no_later_one() -> None:
    async with asking() as (running, port):
        running.name("a.ask.example")
        target = Target("a.ask.example", port)
        waiting = [asyncio.create_task(running.tunnel(str(target))) for _ in range(3)]
        await running.recorder.until(lambda: target in running.recorder.rulings)
        # The others have arrived, too, once a later connection has its answer.
        await running.ask(b"CONNECT other.example:443 HTTP/1.1\r\nHost: other.example\r\n\r\n")
        assert not any(each.done() for each in waiting)
        running.recorder.rulings[target].set_result("")
        for reader, writer in await asyncio.gather(*waiting):
            writer.write(b"x")
            async with asyncio.timeout(SOON_S):
                assert await reader.readexactly(1) == b"x"
        assert [each["rule"] for each in running.recorder.opened_connections] == [f"*.ask.example:{port}"] * 3
        assert running.recorder.asked == [target]
        answer = await begun(running, target)
        assert running.recorder.asked == [target] * 2
        running.recorder.rulings[target].set_result("nobody may")
        assert b"403" in await answer


async def test_denial_tells_the_program_why() -> None:
    async with asking() as (running, port):
        target = Target("a.ask.example", port)
        answer = await begun(running, target)
        running.recorder.rulings[target].set_result("the approver refused it")
        head = (await answer).partition(b"\r\n\r\n")[0]
        assert head.startswith(f"HTTP/1.1 403 {target} is not reached: the approver refused it\r\n".encode())
        assert head.endswith(REASON + reasons.NOT_APPROVED.encode())
        assert [each["reason"] for each in running.recorder.denials] == [reasons.NOT_APPROVED]


@pytest.mark.parametrize("change", ["denied", "gone", "allowed"])
async def test_changed_rules_decide_what_waits(change: str) -> None:
    async with asking() as (running, port):
        running.name("a.ask.example")
        target = Target("a.ask.example", port)
        if change == "allowed":
            waiting = asyncio.create_task(running.tunnel(str(target)))
            await running.recorder.until(lambda: target in running.recorder.rulings)
            running.change({"allowed": [str(target)]})
            await waiting
        else:
            answer = await begun(running, target)
            running.change({**running.rules, "denied": ["ask.example"]} if change == "denied" else {})
            assert b"the policy was changed while it waited" in await answer
        await running.recorder.until(lambda: not running.recorder.rulings)


async def test_approval_is_withdrawn_with_the_last_client() -> None:
    async with asking() as (running, port):
        target = Target("a.ask.example", port)
        _, writer = await running.connect()
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\nmore".encode())
        await running.recorder.until(lambda: target in running.recorder.rulings)
        writer.close()
        await running.recorder.until(lambda: not running.recorder.rulings)
        assert not running.recorder.opened_connections


async def test_a_lost_session_refuses_what_waits() -> None:
    async with asking() as (running, port):
        answer = await begun(running, Target("a.ask.example", port))
        await running.proxy.end(SESSION)
        assert b"needs an approval, and the session has ended" in await answer
        await running.recorder.until(lambda: not running.recorder.rulings)


async def test_what_one_session_waits_for_is_bounded() -> None:
    async with asking() as (running, port):
        waiting = [await begun(running, Target(f"h{index}.ask.example", port)) for index in range(16)]
        for _ in range(3):
            refused = await running.ask(f"CONNECT more.ask.example:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert b"16 hosts of the session wait for one already" in refused
        connections = [asyncio.create_task(running.tunnel(f"h0.ask.example:{port}")) for _ in range(64)]
        done, held = await asyncio.wait(connections, return_when=asyncio.FIRST_COMPLETED, timeout=SOON_S)
        assert done and all("64 connections of the session wait" in str(each.exception()) for each in done)
        assert len(running.recorder.asked) == 16
        for each in (*waiting, *held):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError, AssertionError):
            await asyncio.gather(*waiting, *held, return_exceptions=True)


@pytest.mark.parametrize(
    "host", ["\x1b[2Ja.ask.example", "\u0430.ask.example", "a" * 4096 + ".ask.example", "-.ask.example"], ids=ascii
)
async def test_names_that_are_none_are_never_asked_for(host: str) -> None:
    async with asking() as (running, port):
        answer = await running.ask(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert not running.recorder.asked
