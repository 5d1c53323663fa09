"""Host tools: called from the sandbox, answered by the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from executor_api.values import decode, encode
from executor_server.core.errors import NotFound, PreconditionFailed
from executor_server.core.model import Principal, ToolCall, ToolSpec
from executor_server.policy.approvals import Decision
from executor_server.sessions.journal.execution import ToolFailure
from tests.contract.harness import PRINCIPAL, Harness, Transcript, follow
from tests.contract.marks import promise


@promise("tools-host")
async def test_a_tool_call_carries_arguments_and_answer(harness: Harness) -> None:
    session = await harness.session()
    code = "print('before')\nr = tool(1, [2], key={'a': (3,)})\nprint('after')\nr"
    run = await harness.run_with_tools(session, code, {"tool": lambda *args, **kwargs: (args, kwargs)})
    assert run.output == ((1, [2]), {"key": {"a": (3,)}})
    assert [type(event.kind).__name__ for event in run.events] == ["Log", "ToolCall", "Log", "Result"]


@promise("tools-host")
async def test_a_large_answer_and_large_arguments_travel_whole(harness: Harness) -> None:
    session = await harness.session()
    await session.register_tools([ToolSpec("double", "", (), False)])
    execution = await harness.begin(session, "len(double(bytes(700_000)))")

    async def answer(call: ToolCall, transcript: Any) -> None:
        (data,), _ = decode(transcript.bytes_of(call.arguments))
        packed = encode(data * 2)
        from executor_server.core.model import BlobRef
        from tests.contract.harness import pieces

        blob = BlobRef(await session.upload_blob(len(packed), pieces(packed)), len(packed))
        await session.submit_tool_result(execution.execution_id, call.call_id, blob)

    assert (await follow(execution, answer)).output == 1_400_000


@promise("tools-host")
async def test_a_tools_exception_arrives_by_type_and_message(harness: Harness) -> None:
    session = await harness.session()

    def fail() -> None:
        raise KeyError("no such thing")

    code = "try:\n    fail()\nexcept KeyError as e:\n    caught = str(e)\ncaught"
    assert (await harness.run_with_tools(session, code, {"fail": fail})).output == "'no such thing'"
    uncaught = await harness.run_with_tools(session, "fail()", {"fail": fail})
    assert uncaught.ended.error is not None and uncaught.ended.error.type == "KeyError"


@promise("tools-threads")
async def test_threads_call_tools_at_the_same_time(harness: Harness) -> None:
    session = await harness.session()
    await session.register_tools([ToolSpec("tool", "", (), False)])
    execution = await harness.begin(
        session,
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as pool:\n    r = list(pool.map(tool, range(8)))\nr",
    )
    calls: list[tuple[str, int]] = []

    async def answer(call: ToolCall, transcript: Any) -> None:
        (number,), _ = decode(transcript.bytes_of(call.arguments))
        calls.append((call.call_id, number))
        if len(calls) == 8:  # all of them wait at once; answered in another order than asked
            for call_id, asked in sorted(calls, key=lambda c: -c[1]):
                await session.submit_tool_result(execution.execution_id, call_id, encode(asked * asked))

    assert (await follow(execution, answer)).output == [n * n for n in range(8)]


@promise("tools-final")
async def test_a_final_answer_ends_the_execution(harness: Harness) -> None:
    session = await harness.session()
    for code in (
        "final_answer(42)",
        "try:\n    final_answer(42)\nexcept:\n    pass\nprint('not reached')",
        "try:\n    final_answer(42)\nexcept BaseException:\n    print('not reached')",
        "def f():\n    try:\n        final_answer(42)\n    finally:\n        pass\nf()\nprint('not reached')",
    ):
        run = await harness.run_with_tools(session, code, {"final_answer": lambda x: x}, final="final_answer")
        assert run.outcome == "succeeded", code
        assert run.ended.final_answer_call_id == "c1"
        assert run.stdout == ""


@promise("tools-final")
async def test_a_final_answer_that_is_swallowed_by_other_means_still_counts(harness: Harness) -> None:
    session = await harness.session()
    code = "import contextlib\nwith contextlib.suppress(BaseException):\n    final_answer(42)\n1/0"
    run = await harness.run_with_tools(session, code, {"final_answer": lambda x: x}, final="final_answer")
    assert run.ended.final_answer_call_id == "c1"


@promise("tools-time")
async def test_the_wall_clock_stands_still_while_a_tool_is_called(harness: Harness) -> None:
    session = await harness.session()
    await session.register_tools([ToolSpec("slow", "", (), False)])
    execution = await harness.begin(session, "slow()", wall_time_s=0.3)

    async def answer(call: ToolCall, _: Any) -> None:
        await asyncio.sleep(0.6)  # longer than the wall time of the execution, which is the subject of this test
        await session.submit_tool_result(execution.execution_id, call.call_id, encode("done"))

    run = await follow(execution, answer)
    assert run.output == "done"
    assert run.ended.usage.wall_time_s < 0.3


@promise("tools-time-threads")
async def test_the_wall_clock_goes_on_while_other_threads_run(harness: Harness) -> None:
    """It stood still for all of them while one waited for a tool: six that looped ran on without end."""
    session = await harness.session(operations=10**12)
    await session.register_tools([ToolSpec("tool", "", (), False)])
    loops = """
import threading
def loop():
    while True:
        pass
for _ in range(6):
    threading.Thread(target=loop, daemon=True).start()
tool()
"""
    reported = await follow(await harness.begin(session, loops, wall_time_s=1.0))
    assert reported.outcome == "timeout", reported.ended


@promise("tools-time")
async def test_an_answer_counts_once_and_only_when_asked_for(harness: Harness) -> None:
    session = await harness.session()
    await session.register_tools([ToolSpec("tool", "", (), False)])
    execution = await harness.begin(session, "tool()")

    async def answer(call: ToolCall, _: Any) -> None:
        with pytest.raises(NotFound):
            await session.submit_tool_result(execution.execution_id, "nobody-asked", encode(1))
        await session.submit_tool_result(execution.execution_id, call.call_id, encode(1))
        with pytest.raises(PreconditionFailed):
            await session.submit_tool_result(execution.execution_id, call.call_id, encode(2))

    assert (await follow(execution, answer)).output == 1


@promise("tools-threads")
async def test_a_tool_belongs_to_the_sessions_own_process(harness: Harness) -> None:
    session = await harness.session()
    code = """
import os, sys
pid = os.fork()
if pid == 0:
    try:
        tool()
    except RuntimeError as error:
        os.write(1, str(error).encode())
    os._exit(0)
os.waitpid(pid, 0)[1]
"""
    run = await harness.run_with_tools(session, code, {"tool": lambda: 1})
    assert run.output == 0 and "own process" in run.stdout


@promise("tools-threads")
async def test_a_call_after_the_end_of_its_execution_is_refused(harness: Harness) -> None:
    session = await harness.session()
    code = """
import threading, time
said = []
def later():
    go.wait()
    try:
        tool()
    except RuntimeError as error:
        said.append(str(error))
    open("said", "w").close()
go = threading.Event()
thread = threading.Thread(target=later)
thread.start()
threading.Timer(0.1, go.set).start()
"""
    await harness.run_with_tools(session, code, {"tool": lambda: 1})
    while not (await session.list_files(""))[0]:  # bounded by the test's own time limit
        pass
    run = await harness.run(session, "thread.join(); said")
    assert run.output == ["no execution is running that could call a tool"]


@promise("tools-threads")
async def test_a_call_that_is_open_at_the_end_of_its_execution_fails(harness: Harness) -> None:
    """Otherwise the thread that made it would wait for ever, and so would a thread that joins it."""
    session = await harness.session()
    await session.register_tools([ToolSpec("never", "", (), False), ToolSpec("seen", "", (), False)])
    code = """
import threading
said = []
def call():
    try:
        never()
    except RuntimeError as error:
        said.append(str(error))
thread = threading.Thread(target=call)
thread.start()
seen()
"""
    calls: dict[str, str] = {}

    async def answer(call: ToolCall, _: Any) -> None:
        calls[call.name] = call.call_id
        if len(calls) == 2:
            await session.submit_tool_result(execution.execution_id, calls["seen"], encode(None))

    execution = await harness.begin(session, code)
    await follow(execution, answer)
    with pytest.raises(PreconditionFailed):
        await session.submit_tool_result(execution.execution_id, calls["never"], encode(1))
    run = await harness.run(session, "thread.join(); said")
    assert run.output == ["the execution ended before the tool had answered"]


@promise("tools-host")
async def test_a_cancelled_tool_call_does_not_confuse_the_next(harness: Harness) -> None:
    session = await harness.session()
    await session.register_tools([ToolSpec("tool", "", (), False)])
    execution = await harness.begin(session, "tool('first')")
    events = execution.events()
    call = (await anext(events)).kind
    assert isinstance(call, ToolCall)
    execution.cancel()
    assert (await follow(execution)).outcome == "cancelled"
    with pytest.raises(PreconditionFailed):
        await session.submit_tool_result(execution.execution_id, call.call_id, encode("late"))
    run = await harness.run_with_tools(session, "tool('second')", {"tool": lambda text: text})
    assert run.output == "second"


@promise("tools-lasting")
async def test_tools_are_in_place_again_after_a_reset(harness: Harness) -> None:
    session = await harness.session()
    await harness.run_with_tools(session, "tool()", {"tool": lambda: 1})
    assert (await harness.run(session, "import os\nos._exit(0)")).state == "reset"
    execution = await harness.begin(session, "tool()")

    async def answer(call: ToolCall, _: Any) -> None:
        await session.submit_tool_result(execution.execution_id, call.call_id, ToolFailure("ValueError", "asked again"))

    run = await follow(execution, answer)
    assert run.message == "asked again"


@promise("tools-lasting")
async def test_registering_replaces_tools_and_frees_their_names(harness: Harness) -> None:
    session = await harness.session()
    await harness.run_with_tools(session, "old = 1", {"one": lambda: 1})
    await harness.run(session, "two = 'hides the tool to come'")
    run = await harness.run_with_tools(session, "two()", {"two": lambda: 2})
    assert run.output == 2
    gone = await harness.run(session, "one()")
    assert gone.ended.error is not None and gone.ended.error.type == "NameError"


@promise("tools-host")
async def test_code_given_to_a_tool_is_refused_with_a_reason_at_the_call(harness: Harness) -> None:
    session = await harness.session()
    called: list[Any] = []
    for arguments, said in (
        ("lambda x: x", "argument 1 is or holds the function <lambda>"),
        ("1, key=[len]", "key is or holds the function len"),
        ("{'a': (int,)}", "argument 1 is or holds the class int"),
        ("tool", "argument 1 is or holds the function tool"),
        ("(n for n in range(3))", "argument 1 is or holds the generator"),
    ):
        code = f"said = ''\ntry:\n    tool({arguments})\nexcept TypeError as error:\n    said = str(error)\nsaid"
        tools = {"tool": lambda *args, **kwargs: called.append((args, kwargs))}
        run = await harness.run_with_tools(session, code, tools)
        assert said in run.output and "can't leave the sandbox" in run.output
        assert not called


ASKS = "tools.ask = ['delete*']\napprovals.wait_s = 1.0"
TRIES = """\
try:
    answer = delete_file(1)
except PermissionError as error:
    answer = str(error)
answer"""


@promise("tools-host")
async def test_a_call_that_nobody_can_approve_is_denied_at_once(harness: Harness) -> None:
    session = await harness.session_under(ASKS)
    tools: dict[str, Callable[..., Any]] = {"delete_file": lambda number: number, "read_file": lambda: "read"}
    run = await harness.run_with_tools(session, f"{TRIES}\nanswer, read_file()", tools)
    refusal, read = run.output
    assert "the tool 'delete_file' was not called: it needs an approval, and nobody who may approve" in refusal
    assert read == "read"
    assert [event.kind.name for event in run.events if isinstance(event.kind, ToolCall)] == ["read_file"]


@promise("tools-host")
async def test_a_call_that_needs_an_approval_waits_with_its_clock(harness: Harness) -> None:
    session = await harness.session_under(ASKS)
    called: list[int] = []

    def delete_file(number: int) -> str:
        called.append(number)
        return "deleted"

    tools = {"delete_file": delete_file}
    anna = Principal(PRINCIPAL.tenant, "anna", roles=("approver",))
    async with aclosing(harness.approvals.watch(anna)) as lists:
        assert await anext(lists) == ()
        late = await harness.run_with_tools(session, TRIES, tools, wall_time_s=0.5)
        assert late.outcome == "succeeded", "it waited longer than it may run"
        assert "nobody decided within 1 s" in late.output and not called

        async def decide(decision: Decision) -> Transcript:
            run = asyncio.create_task(harness.run_with_tools(session, TRIES, tools))
            async for waiting in lists:
                if waiting:
                    assert (waiting[0].what, waiting[0].session_id) == ("delete_file", session.session_id)
                    assert not called
                    harness.approvals.decide(anna, waiting[0].approval_id, decision)
                    break
            return await run

        assert "the approver refused it" in (await decide(Decision.DENIED)).output and not called
        run = await decide(Decision.SESSION)
        assert (run.output, called) == ("deleted", [1])
        assert [type(event.kind).__name__ for event in run.events] == ["ToolCall", "Result"]
    again = await harness.run_with_tools(session, TRIES, tools)
    assert (again.output, called) == ("deleted", [1, 1]), "nobody is asked, or connected, any more"
