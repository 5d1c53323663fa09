"""Agent code that has taken the interpreter over and speaks to the supervisor in its place.

It can say what it likes of its own execution. It cannot make the supervisor believe what is the supervisor's to find,
end it, stop it, or fill it; and what it says is never worth more than its own interpreter.
"""

from __future__ import annotations

import json

import pytest

from executor_server.core.model import ToolCall, ToolSpec
from tests.contract.harness import MIB, Harness, follow, supervisor_of
from tests.support.attacks import LINK, WAIT

# Each costs the program its interpreter, and no more.
LIES = {
    "garbage": 'link.send(b"garbage" * 100)',
    "a head longer than the message": 'link.sendmsg([(2**31).to_bytes(4, "big"), b"{}"])',
    "a head of brackets": 'say(b"[" * 30_000)',
    "a head that is no object": 'say(b"[]")',
    "no type": "say({})",
    "an unknown type": 'say({"t": "shutdown"})',
    "the end of an operation nobody asked for": 'say({"t": "op_done", "ok": True})',
    "a negative count": 'done(operations=-1)',
    "an outcome that is none": 'done("nonsense")',
    "an end as lost": 'done("lost")',
    "an end as timeout": 'done("timeout")',
    "an end as cancelled": 'done("cancelled")',
    "the end of another execution": 'done(filename="<execution-99>")',
    "an error that is no object": 'done("exception", b"[1]")',
    "an error of brackets": 'done("exception", b"[" * 60_000)',
    "an error of wrong types": 'done("exception", b\'{"type": 1, "message": [], "line": -5}\')',
    "an exit code of many digits": 'done("exited", b\'{"type": "A", "message": "b", "exit_code": 1000000000}\')',
    "a huge error": 'say({"t": "done", "filename": "<execution-1>", "outcome": "exception", "operations": 0, "error": 3000000,'
    ' "memfd": True}, fds=[memory_file(b" " * 3_000_000)])',
    "a file that can still change": 'say({"t": "output", "memfd": True}, fds=[memory_file(b"x", sealed=False)])',
    "a FIFO": 'os.mkfifo("f"); say({"t": "output", "memfd": True}, fds=[os.open("f", os.O_RDWR)])',
    "a file that is not there": 'say({"t": "output", "memfd": True})',
    "too many descriptors": 'say({"t": "output", "memfd": True}, fds=[memory_file() for _ in range(100)])',
    "two values": 'say({"t": "output"}, b"1"); say({"t": "output"}, b"2")',
    "an image of another kind": 'say({"t": "image", "call": "c", "mime": "text/html", "source": "display"}, b"<script>")',
    "a call without a name": 'say({"t": "tool_call", "call": "c"})',
    "silence": "link.shutdown(socket.SHUT_RDWR)",
}  # fmt: skip


async def test_a_lie_costs_the_program_its_interpreter_and_nobody_anything(harness: Harness) -> None:
    session = await harness.session()
    for count, (name, lie) in enumerate(LIES.items(), 1):
        own = f"<execution-{2 * count - 1}>"
        result = await harness.run(session, LINK + lie.replace("<execution-1>", own) + WAIT)
        assert (result.outcome, result.state) == ("crashed", "reset"), (name, result.message)
        assert result.ended.generation == count + 1, name
        assert (await harness.run(session, "40 + 2")).output == 42, name


async def test_a_program_can_forge_its_own_end_and_no_later_one(harness: Harness) -> None:
    """The control: a well-formed lie is taken. The process that goes on behind it is not listened to again."""
    session = await harness.session(wall_time_s=1.0)
    error = json.dumps({"type": "Forged", "message": "by hand"}).encode()
    result = await harness.run(session, f"{LINK}done('exception', {error!r})\ntime.sleep(0.5)")
    assert (result.outcome, result.message) == ("exception", "by hand")
    assert (await harness.run(session, "'not run'")).outcome == "crashed"
    assert (await harness.run(session, "40 + 2")).output == 42


async def test_a_forged_end_lifts_no_deadline(harness: Harness) -> None:
    session = await harness.session(wall_time_s=0.5)
    assert (await harness.run(session, LINK + "done()" + WAIT)).outcome == "succeeded"
    assert (await harness.run(session, "1")).outcome == "timeout"


async def test_forged_text_of_an_error_arrives_as_text(harness: Harness) -> None:
    session = await harness.session()
    error = {"type": "\ud800", "message": "\x1b[2J\udfff", "traceback": "\ud800", "statement": "\ud800"}
    result = await harness.run(session, f"{LINK}done('exception', {json.dumps(error).encode()!r})")
    assert result.outcome == "exception"
    assert result.message.encode() == b"\x1b[2J?"


async def test_a_tool_that_is_not_there_is_not_called(harness: Harness) -> None:
    session = await harness.session(wall_time_s=0.5)
    await session.register_tools([ToolSpec("real", "", (), False)])
    result = await harness.run(session, LINK + 'say({"t": "tool_call", "call": "c", "name": "os.system"}, b"x")' + WAIT)
    assert result.outcome == "timeout"
    assert not any(isinstance(event.kind, ToolCall) for event in result.events)


async def test_the_id_of_a_call_is_never_the_programs_own(harness: Harness) -> None:
    """With an id that cannot be answered, the call would stay open, and the wall clock stand still, for ever."""
    session = await harness.session(wall_time_s=5.0)
    await session.register_tools([ToolSpec("real", "", (), False)])
    calls = 'for odd in ("\\ud800", "a b", "", "\\x00", "c1", "c1"):\n    say({"t": "tool_call", "call": odd, "name": "real"}, b"x")'
    execution = await harness.begin(session, LINK + calls + "\nfor _ in range(6):\n    link.recv(9)")
    seen: list[str] = []

    async def answer(call: ToolCall, _transcript: object) -> None:
        seen.append(call.call_id)
        await session.submit_tool_result(execution.execution_id, call.call_id, b"answer")

    await follow(execution, answer)
    assert seen == ["c1", "c2", "c3", "c4", "c5", "c6"]


FLOODS = {
    "calls whose refusals are never read": 'while True:\n    say({"t": "tool_call", "call": "c", "name": "none"})',
    "images whose receipts are never read": 'while True:\n    say({"t": "image", "call": "c", "mime": "image/png", "source": "figure"}, b"x" * 60_000)',
    "calls that stay open": 'while True:\n    say({"t": "tool_call", "call": "c", "name": "real"}, b"x" * 60_000)',
    "signs of life": 'while time.monotonic() < end:\n    say({"t": "booted"})',
}  # fmt: skip


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_fills_the_program_and_not_the_supervisor(harness: Harness, flood: str) -> None:
    session = await harness.session(wall_time_s=2.0, operations=10**12)
    await session.register_tools([ToolSpec("real", "", (), False)])
    supervisor = supervisor_of(session)
    before = supervisor.memory_info().rss
    execution = await harness.begin(session, f"{LINK}end = time.monotonic() + 0.5\n{FLOODS[flood]}")

    async def answer(call: ToolCall, _transcript: object) -> None:
        await session.submit_tool_result(execution.execution_id, call.call_id, b"")

    assert (await follow(execution, answer)).outcome in ("crashed", "timeout", "succeeded")
    assert supervisor.memory_info().rss < before + 64 * MIB
    assert (await harness.run(session, "40 + 2")).output == 42


async def test_descriptors_in_flight_do_not_take_the_supervisor_down(harness: Harness) -> None:
    """A user may have so many in flight, and the supervisor has to pass some to run anything: it may send more."""
    session = await harness.session()
    fill = """
pairs = []
try:
    while True:
        pairs.append(socket.socketpair())
        for _ in range(10):
            socket.send_fds(pairs[-1][0], [b"x"], [link.fileno()] * 20)
except OSError as error:
    print(error.errno)
"""
    assert (await harness.run(session, LINK + fill)).stdout == "109\n", "ETOOMANYREFS, or this tests nothing"
    result = await harness.run(session, "len(pairs) and 42")
    assert (result.output, result.state) == (42, "kept")


async def test_lies_in_one_session_do_not_reach_another(harness: Harness) -> None:
    liar, neighbour = await harness.session(), await harness.session()
    await harness.run(neighbour, "x = 40")
    for lie in ("garbage", "an end as lost", "an error of brackets"):
        await harness.run(liar, LINK + LIES[lie] + WAIT)
    result = await harness.run(neighbour, "x + 2")
    assert (result.output, result.state, result.ended.generation) == (42, "kept", 1)
