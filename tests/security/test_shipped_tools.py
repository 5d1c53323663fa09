"""Tools that are shipped to do harm: they can spoil their own sandbox, which is their client's, and nothing else."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from executor_api.values import encode
from executor_server.core import LANGUAGE_RULES
from executor_server.core.errors import ExecutorError, InvalidRequest, PreconditionFailed
from executor_server.core.model import ShippedTool, ToolSource, ToolSpec
from executor_server.sessions import SessionRequest
from tests.contract.harness import PRINCIPAL, Harness, supervisor_of
from tests.support.attacks import LINK, WAIT
from tests.support.polling import eventually_async

pytestmark = pytest.mark.parametrize("shared_harness", ["local"], indirect=True)


def tool(text: str, name: str = "tool") -> ToolSpec:
    return ToolSpec(name, "", (), is_final_answer=False, shipped=ShippedTool(ToolSource(text, "tool")))


DIED = "the interpreter died or hung while these tools were made"
GOOD = tool("def tool():\n    return 'good'\n", "good")

# Attacks of a tool while it is made. Only its own registration and its own interpreter suffer.
ENDS = {
    "a kill": "import os\nos.kill(os.getpid(), 9)",
    "a kill of its group": "import os\nos.killpg(0, 9)",
    "builtins that are no more": "import builtins\nbuiltins.len = builtins.isinstance = None\ndef tool(): pass",
    "an exit": "import os\nos._exit(0)",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "garbage": LINK + 'link.send(b"garbage" * 100)' + WAIT,
    "an answer of no form": LINK + 'say({"t": "op_done", "ok": "yes"})' + WAIT,
    "an answer with a list that is none": LINK + 'say({"t": "op_done", "ok": False, "message": ""}, b"{}")' + WAIT,
    "an answer with a list of anything": LINK + 'say({"t": "op_done", "ok": False, "message": ""}, b"[1]")' + WAIT,
    "an answer of brackets": LINK + 'say({"t": "op_done", "ok": False, "message": ""}, b"[" * 60_000)' + WAIT,
    "a long message": LINK + 'say({"t": "op_done", "ok": False, "message": "x" * 5000})' + WAIT,
    "silence": LINK + "link.shutdown(socket.SHUT_RDWR)" + WAIT,
}


async def test_a_tool_that_ends_its_interpreter_is_refused_and_the_session_goes_on(harness: Harness) -> None:
    session = await harness.session()
    await session.register_tools([GOOD])
    supervisor = supervisor_of(session)
    await harness.run(session, "good()")  # from here on it has pipes for the output between executions
    await session.list_files("")  # answered once the run's pipes are closed, and those of the next one made
    descriptors = supervisor.num_fds()
    said = {}
    for name, text in ENDS.items():
        with pytest.raises(InvalidRequest) as refusal:
            await session.register_tools([tool(text), GOOD])
        said[name] = refusal.value.message
    assert {name: text for name, text in said.items() if text != DIED} == {}
    run = await harness.run(session, "good()")
    assert (run.output, run.state, run.ended.generation) == ("good", "reset", 1 + len(ENDS))
    await session.list_files("")
    assert await eventually_async(lambda: supervisor.num_fds() <= descriptors)


async def test_a_forged_answer_registers_what_only_its_own_code_believes(harness: Harness) -> None:
    """The control: a well-formed lie is accepted. The real answer behind it then costs the interpreter."""
    session = await harness.session()
    forged = LINK + 'say({"t": "op_done", "ok": True})\ntool = print'
    await session.register_tools([tool(forged)])
    assert (await harness.run(session, "40 + 2")).outcome in ("succeeded", "crashed")
    # Made again in the next interpreter, it repeats the attack, until other tools are there and its last answer came.
    for _ in range(5):
        with suppress(InvalidRequest):
            await session.register_tools([GOOD])
        run = await harness.run(session, "good()")
        if run.output == "good":
            break
    last = await harness.run(session, "good()")
    assert (last.output, last.state, last.ended.generation) == ("good", "kept", run.ended.generation)


async def test_names_of_missing_modules_that_no_frame_has_room_for(harness: Harness) -> None:
    session = await harness.session()
    names = "json.dumps([chr(0x10000) * 256] * 1000).encode()"
    lie = f'import json\n{LINK}say({{"t": "op_done", "ok": False, "message": chr(0x10000) * 4000}}, {names})' + WAIT
    with pytest.raises(ExecutorError):
        await session.register_tools([tool(lie)])
    # It is no name of a module, so the daemon distrusts this guest from then on; no other session is affected.
    other = await harness.session()
    assert (await harness.run(other, "40 + 2")).output == 42


async def test_a_tool_that_never_returns_holds_up_its_own_session_only(harness: Harness) -> None:
    session, other = await harness.session(), await harness.session()
    await other.register_tools([GOOD])
    registering = asyncio.create_task(session.register_tools([tool("while True:\n    pass")]))
    waiting = await harness.begin(session, "40 + 2")
    assert (await harness.run(other, "good()")).output == "good"
    assert not registering.done()
    assert (await session.list_files("")) == ([], False), "files are served meanwhile"
    await harness.manager.delete(PRINCIPAL, session.session_id)
    with pytest.raises(PreconditionFailed):
        await registering
    assert [event.kind async for event in waiting.events()]


async def test_a_tool_that_takes_all_memory_is_refused(harness: Harness) -> None:
    session = await harness.session(memory_bytes=128 * 1024 * 1024)
    await session.register_tools([GOOD])
    with pytest.raises(InvalidRequest):
        await session.register_tools([tool("kept = []\nwhile True:\n    kept.append(bytes(2**20))")])
    assert (await harness.run(session, "good()")).output == "good"


async def test_values_that_refer_to_themselves_or_were_made_by_another_client(harness: Harness) -> None:
    session = await harness.session()
    cycle: list[object] = []
    cycle.append(cycle)
    source = ToolSource("def tool():\n    return loop is loop[0]\n", "tool", encode({"loop": cycle}))
    await session.register_tools([ToolSpec("tool", "", (), is_final_answer=False, shipped=ShippedTool(source))])
    assert (await harness.run(session, "tool()")).output is True
    for packed in (b"\x80\x04N.", encode({}, fallback=None)[:-1], b"[" * 100_000, encode(cycle)):
        with pytest.raises(InvalidRequest):
            await session.register_tools([ToolSpec("tool", "", (), is_final_answer=False, shipped=ShippedTool(packed))])
    assert (await harness.run(session, "tool()")).output is True


async def test_what_a_tool_makes_of_its_interpreter_stays_there(harness: Harness) -> None:
    session, other = await harness.session(imports=("math",)), await harness.session()
    text = """
import builtins, importlib.util, json, linecache, os
builtins.divmod = builtins.input = json.dumps = os.write = importlib.util.find_spec = None
linecache.cache = {}

def tool():
    return 1
"""
    await session.register_tools([tool(text)])
    assert (await harness.run(session, "tool()")).output == 1
    assert (await harness.run(session, "divmod(5, 2)")).output == (2, 1), "agent code has builtins of its own"
    assert (await harness.run(session, "import os")).outcome == "import_denied"
    with pytest.raises(InvalidRequest, match="ValueError"):
        await session.register_tools([tool("raise ValueError")])
    await session.register_tools([GOOD])
    assert (await harness.run(session, "good()")).output == "good"
    assert (await harness.run(other, "divmod(5, 2)")).output == (2, 1)


async def test_a_call_that_is_forged_for_a_shipped_tool_reaches_no_client(harness: Harness) -> None:
    """The client answers no tool of its name, however the interpreter asks."""
    session = await harness.session()
    await session.register_tools([GOOD])
    code = LINK + 'say({"t": "tool_call", "call": "c1", "name": "good"}, b"")\nimport time\ntime.sleep(0.1)\ndone()'
    run = await harness.run(session, code)
    assert {type(event.kind).__name__ for event in run.events} <= {"Result", "Log"}


STRICT = """
import os

def tool(what):
    if what == "module":
        return os
    if what == "function":
        return os.system
    if what == "process":
        return os.system("true")
    if what == "write":
        return open("written", "w").close()
    if what == "read":
        return open("/dev/null").read()
    return eval("40 + 2")
"""


async def test_the_rules_of_the_language_hold_behind_a_tool_as_behind_a_library(harness: Harness) -> None:
    spec = replace(harness.spec(imports=("math",)), refused_language=LANGUAGE_RULES)
    session = await harness.manager.create(PRINCIPAL, SessionRequest("request", spec))
    await session.register_tools([tool(STRICT)])
    outcomes = {
        code: (await harness.run(session, code)).outcome
        for code in (
            "tool.__globals__",
            "getattr(tool, '__' + 'globals__')",
            "tool('module').path",
            "tool('function')('true')",
            "tool('process')",
            "tool('write')",
            "tool('read')",
            "tool('eval')",
        )
    }
    assert [code for code, outcome in outcomes.items() if outcome == "succeeded"] == ["tool('read')", "tool('eval')"]
    assert set(outcomes.values()) == {"policy_denied", "succeeded"}
