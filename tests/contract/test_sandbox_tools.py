"""Tools that are shipped into the sandbox: made there before they are registered, all or none, and run there."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest

from executor_api.values import encode
from executor_server.core.errors import InvalidRequest, ModulesMissing, NotFound, PolicyViolation, Reason
from executor_server.core.model import BlobRef, ShippedTool, ToolSource, ToolSpec
from executor_server.sessions import Session
from tests.contract.harness import Harness, Transcript, follow, pieces
from tests.contract.marks import promise

SHAPES = promise("tools-sandbox-shapes")
"""Marks tests in which the backend has no part."""

GOOD = "def tool(*args):\n    return 'good', *args\n"


def source(text: str, entry: str = "tool", modules: tuple[str, ...] = (), **bindings: Any) -> ShippedTool:
    return ShippedTool(ToolSource(text, entry, encode(bindings) if bindings else None), modules)


def pickled(value: Any, version: str = "{}.{}".format(*sys.version_info)) -> bytes:
    """Packs a value as a client does when only cloudpickle can carry it."""
    return encode(value, fallback=lambda each: f"cp{version}\0".encode() + cloudpickle.dumps(each))


async def register(session: Session, *host: str, **shipped: ShippedTool) -> None:
    tools = [ToolSpec(name, "", (), name == "final_answer") for name in host]
    tools += [ToolSpec(name, "", (), is_final_answer=False, shipped=tool) for name, tool in shipped.items()]
    await session.register_tools(tools)


async def refused(session: Session, *host: str, **shipped: ShippedTool) -> str:
    """Returns the error of tools that can't be registered."""
    with pytest.raises(InvalidRequest) as refusal:
        await register(session, *host, **shipped)
    assert refusal.value.reason is Reason.TOOL_REFUSED
    return refusal.value.message


async def run_answered(harness: Harness, session: Session, code: str, answers: dict[str, Any]) -> Transcript:
    """Runs code and answers the calls of its host tools."""
    execution = await harness.begin(session, code)

    async def answer(call: Any, _: Transcript) -> None:
        await session.submit_tool_result(execution.execution_id, call.call_id, encode(answers[call.name]))

    return await follow(execution, answer)


# ---------------------------------------------------------------------------------------------------------------------
# On every backend


@promise("tools-sandbox")
async def test_a_tool_runs_in_the_sandbox_with_its_bindings(harness: Harness) -> None:
    session = await harness.session(imports=("os",))
    text = (
        "import os, socket\n\ndef tool(a, b=2):\n    print('here', table)\n    return os.getpid(), a + b + table['c']\n"
    )
    await register(session, adder=source(text, table={"c": 100}))
    run = await harness.run(session, "import os\nr = adder(1)\n(r[0] == os.getpid(), r[1])")
    assert (run.output, run.stdout) == ((True, 103), "here {'c': 100}\n")
    assert [type(event.kind).__name__ for event in run.events] == ["Log", "Result"]
    assert (await harness.run(session, "adder")).outcome == "succeeded"


@promise("tools-sandbox")
async def test_large_bindings_and_values_travel_as_blobs(harness: Harness) -> None:
    session = await harness.session()
    packed = encode({"data": bytes(3_000_000)})
    text = "def tool():\n    return len(data)\n"
    blob = BlobRef(await session.upload_blob(len(packed), pieces(packed)), len(packed))
    await register(session, size=ShippedTool(ToolSource(text, "tool", blob)))
    assert (await harness.run(session, "size()")).output == 3_000_000
    assert (await harness.run(session, "import os\nos._exit(1)")).state == "reset"
    assert (await harness.run(session, "size()")).output == 3_000_000, "in the next interpreter"
    with pytest.raises(NotFound) as gone:
        await register(session, size=ShippedTool(blob))
    assert gone.value.reason is Reason.BLOB_NOT_FOUND
    assert (await harness.run(session, "size()")).output == 3_000_000, "the one before is still there"


@promise("tools-sandbox")
async def test_a_tool_that_hangs_is_interrupted_and_the_state_kept(harness: Harness) -> None:
    session = await harness.session()
    text = "import time\n\ndef tool():\n    print('begins')\n    while True:\n        time.sleep(0.01)\n"
    await register(session, hang=source(text))
    run = await harness.run(session, "x = 1\nhang()", wall_time_s=0.3)
    assert (run.outcome, run.state, run.stdout) == ("timeout", "kept", "begins\n")
    assert run.ended.error is not None and 'File "<tool-hang>", line 6, in tool' in run.ended.error.traceback
    assert (await harness.run(session, "x")).output == 1


@promise("tools-sandbox")
async def test_tools_that_cannot_be_made_leave_those_that_were_there(harness: Harness) -> None:
    session = await harness.session()
    await register(session, "asked", one=source(GOOD), two=source(GOOD))
    assert await refused(session, one=source(GOOD), two=source("x = 1\nraise ValueError('no')")) == (
        "two: ValueError: no (line 2 of its source)"
    )
    assert (await harness.run(session, "one(1)")).output == ("good", 1)
    assert (await harness.run(session, "two(2)")).output == ("good", 2)
    assert (await run_answered(harness, session, "asked()", {"asked": 3})).output == 3
    await register(session, two=source("def tool():\n    return 'new'\n"))
    assert (await harness.run(session, "two()")).output == "new"
    assert (await harness.run(session, "one()")).message == "name 'one' is not defined"


@promise("tools-sandbox")
async def test_making_a_tool_that_ends_the_interpreter_is_refused_with_the_reason(harness: Harness) -> None:
    session = await harness.session()
    await register(session, good=source(GOOD))
    await harness.run(session, "x = 1")
    message = await refused(session, bad=source("import os\nos._exit(3)"))
    assert message == "the interpreter died or hung while these tools were made"
    run = await harness.run(session, "good('x' in globals())")
    assert (run.output, run.state, run.ended.generation) == (("good", False), "reset", 2)


@promise("tools-sandbox")
async def test_tools_are_made_again_after_a_reset_and_after_the_prelude(harness: Harness) -> None:
    session = await harness.session(prelude="import os\nos.environ['SET'] = 'by the prelude'")
    text = "import os\nsaid = os.environ['SET']\n\ndef tool():\n    return said\n"
    await register(session, "asked", said=source(text))
    assert (await harness.run(session, "os._exit(0)", last_statement=True)).state == "reset"
    run = await run_answered(harness, session, "said(), asked()", {"asked": 1})
    assert (run.output, run.stderr) == (("by the prelude", 1), "")


# ---------------------------------------------------------------------------------------------------------------------
# Properties of a tool


@SHAPES
async def test_a_tool_is_an_object_of_its_module(harness: Harness) -> None:
    session = await harness.session(imports=("*",))
    text = '''
from __future__ import annotations
from dataclasses import dataclass
from typing import Optional

@dataclass
class Point:
    x: Optional[int] = None

class Counter:
    """Counts."""
    def __init__(self, start): self.count = start
    def __call__(self, *points):
        self.count += sum(p.x for p in points)
        return Point(self.count)

tool = Counter(start)
'''
    await register(session, counter=source(text, start=10))
    first = await harness.run(session, "p = counter(counter())\n(p.x, type(p).__module__, counter.count)")
    assert first.output == (20, "tool_counter", 20)
    again = await harness.run(session, "import pickle, copy\npickle.loads(pickle.dumps(p)) == copy.deepcopy(p) == p")
    assert again.output is True
    shown = await harness.run(session, "import inspect\ninspect.getsource(type(counter).__init__).strip()")
    assert shown.output == "def __init__(self, start): self.count = start"


@SHAPES
async def test_a_tool_that_only_cloudpickle_can_carry(harness: Harness) -> None:
    session = await harness.session()
    base = 40
    await register(session, add=ShippedTool(pickled(lambda n: n + base)))
    assert (await harness.run(session, "add(2)")).output == 42
    assert "pickled by cp2.7" in await refused(session, add=ShippedTool(pickled(len, version="2.7")))
    assert "not callable; its type is int" in await refused(session, add=ShippedTool(encode(5)))
    assert await refused(session, add=ShippedTool(b"no value at all"))
    assert (await harness.run(session, "add(2)")).output == 42


@SHAPES
async def test_a_tool_is_no_agent_code_and_agent_code_is_none_of_it(harness: Harness) -> None:
    session = await harness.session(imports=("math",), operations=2000)
    text = "import json\n\ndef tool(n):\n    total = 0\n    for i in range(n):\n        total += i\n    return json.dumps(total)\n"
    await register(session, busy=source(text))
    run = await harness.run(session, "busy(100_000)")
    assert (run.output, run.ended.usage.operations) == ("4999950000", 0)
    assert (await harness.run(session, "import json")).outcome == "import_denied"
    assert (await harness.run(session, "for i in range(10**6):\n    pass")).outcome == "operation_limit"


@SHAPES
async def test_a_tools_exception_shows_its_own_lines(harness: Harness) -> None:
    session = await harness.session()
    await register(session, fail=source("def tool(n):\n    table = {}\n    return table[n]\n"))
    run = await harness.run(session, "x = 1\nfail('key')")
    assert run.ended.error is not None
    assert (run.ended.error.type, run.message, run.ended.error.line) == ("KeyError", "'key'", 2)
    assert '  File "<tool-fail>", line 3, in tool\n    return table[n]' in run.ended.error.traceback
    assert "guest" not in run.ended.error.traceback
    assert (await harness.run(session, "try:\n    fail(1)\nexcept KeyError:\n    x = 2\nx")).output == 2


@SHAPES
async def test_a_tool_calls_other_tools(harness: Harness) -> None:
    session = await harness.session()
    outer = source("def tool(n):\n    return asked(n) + inner(n)\n")
    inner = source("def tool(n):\n    return n * 100\n")
    await register(session, "asked", outer=outer, inner=inner)
    assert (await run_answered(harness, session, "outer(2)", {"asked": 7})).output == 207
    assert (
        await harness.run(session, "import builtins\nimport random\nrandom.__builtins__.get('inner')")
    ).output is None
    await register(session, outer=outer)
    assert (await harness.run(session, "outer(2)")).message == "name 'asked' is not defined"


@SHAPES
async def test_a_final_answer_from_within_a_tool_ends_the_execution(harness: Harness) -> None:
    session = await harness.session()
    text = "def tool():\n    final_answer(1)\n    print('not reached')\n"
    await register(session, "final_answer", tool=source(text))
    run = await run_answered(harness, session, "tool()\nprint('not reached')", {"final_answer": None})
    assert (run.outcome, run.ended.final_answer_call_id, run.stdout) == ("succeeded", "c1", "")


@SHAPES
async def test_a_name_that_agent_code_reuses_hides_the_tool_until_it_is_registered_again(harness: Harness) -> None:
    session = await harness.session()
    await register(session, good=source(GOOD))
    assert (await harness.run(session, "good = 1\ngood")).output == 1
    await register(session, good=source(GOOD))
    assert (await harness.run(session, "good()")).output == ("good",)


@SHAPES
async def test_host_tools_alone_replace_tools_in_the_sandbox(harness: Harness) -> None:
    session = await harness.session()
    await register(session, good=source(GOOD))
    await register(session, "other")
    code = "import sys\n'good' in dir(__builtins__), 'tool_good' in sys.modules"
    assert (await harness.run(session, code)).output == (False, False)
    assert (await harness.run(session, "good()")).message == "name 'good' is not defined"
    assert (await harness.run(session, "import os\nos._exit(0)")).state == "reset"
    assert (await harness.run(session, "good()")).message == "name 'good' is not defined"


# ---------------------------------------------------------------------------------------------------------------------
# Tools that can't be made

REFUSALS = {
    "no Python": (source("def tool(:"), "SyntaxError"),
    "no such entry": (source("x = 1"), "NameError: its source does not define tool"),
    "nothing to call": (source("tool = 1"), "TypeError: it is not callable; its type is int"),
    "an exit": (source("raise SystemExit(3)"), "SystemExit: 3 (line 1 of its source)"),
    "an interrupt": (source("raise KeyboardInterrupt"), "KeyboardInterrupt"),
    "an error without a text": (source("class E(Exception):\n    def __str__(self): 1 / 0\nraise E"), "raised ZeroDiv"),
    "too deep": (source("(lambda f: f(f))(lambda f: f(f))"), "RecursionError"),
    "too large": (source("tool = bytes(10**12)"), "MemoryError"),
    "its import": (source("import nowhere\ndef tool(): pass"), "ModuleNotFoundError: No module named 'nowhere'"),
    "no bindings": (ShippedTool(ToolSource("def tool(): pass", "tool", encode([1]))), "its bindings are not a dict"),
    "bindings of no names": (
        ShippedTool(ToolSource("def tool(): pass", "tool", encode({1: 2}))),
        "not a dict with names",
    ),
    "what is no value": (ShippedTool(ToolSource("def tool(): pass", "tool", b"\x00")), "DecodeError"),
    "a value of nothing": (ShippedTool(b""), "DecodeError"),
    "a call of a tool": (source("asked()"), "no execution is running that could call a tool"),
}


@SHAPES
async def test_tools_that_cannot_be_made_are_refused_with_the_reason(harness: Harness) -> None:
    session = await harness.session()
    await register(session, "asked", good=source(GOOD))
    said = {name: await refused(session, "asked", bad=bad, good=source(GOOD)) for name, (bad, _) in REFUSALS.items()}
    assert {name: text for name, text in said.items() if REFUSALS[name][1] not in text} == {}
    assert all(text.startswith("bad: ") for text in said.values())
    code = "import sys\n('good' in dir(), 'tool_good' in sys.modules, 'tool_bad' in sys.modules, good(1))"
    run = await harness.run(session, code)
    assert (run.output, run.state, run.stderr) == ((False, True, False, ("good", 1)), "kept", "")


@SHAPES
async def test_all_modules_that_are_missing_are_named(harness: Harness) -> None:
    session = await harness.session(imports=("math",))
    one = source(GOOD, modules=("json", "xml.dom", "nowhere", "json.nothing"))
    two = source("raise ValueError('was run')", modules=("PIL_", "nowhere", "os"))
    with pytest.raises(ModulesMissing) as refusal:
        await register(session, one=one, two=two, three=source(GOOD))
    assert refusal.value.modules == ("nowhere", "json.nothing", "PIL_")
    assert refusal.value.message == (
        "one: the image has no module nowhere, json.nothing; two: the image has no module PIL_, nowhere"
    )
    await register(session, one=source(GOOD, modules=("json", "xml.dom", "__main__")))
    assert (await harness.run(session, "one()")).output == ("good",)


@SHAPES
async def test_output_while_a_tool_is_made_is_dropped(harness: Harness) -> None:
    session = await harness.session()
    text = "import sys\nprint('making')\nsys.stderr.write('of it')\ndef tool():\n    print('made')\n"
    await register(session, tool=source(text))
    run = await harness.run(session, "tool()")
    assert (run.stdout, run.stderr) == ("made\n", "")


@SHAPES
async def test_a_process_that_the_making_forks_is_not_the_session(harness: Harness) -> None:
    session = await harness.session()
    await register(
        session, tool=source("import os\nchild = os.fork()\ndef tool():\n    return os.waitpid(child, 0)[1]\n")
    )
    assert (await harness.run(session, "tool()")).output == 0


# ---------------------------------------------------------------------------------------------------------------------
# In another interpreter

ONCE = """
import os
if os.path.exists('made'):
    {then}
open('made', 'w').close()

def tool():
    return 'made'
"""


@SHAPES
async def test_a_tool_that_cannot_be_made_again_is_reported_and_raises(harness: Harness) -> None:
    session = await harness.session()
    await register(session, once=source(ONCE.format(then="raise ValueError('twice')")), good=source(GOOD))
    assert (await harness.run(session, "once(), good()")).output == ("made", ("good",))
    await harness.run(session, "import os\nos._exit(0)")
    run = await harness.run(session, "good()")
    assert run.output == ("good",)
    assert run.stderr == (
        "tools could not be made again in the new interpreter: once: ValueError: twice (line 4 of its source)\n"
    )
    assert (await harness.run(session, "once()")).message == (
        "the tool once is not available: it could not be made again: ValueError: twice (line 4 of its source)"
    )
    await register(session, once=source(GOOD))
    assert (await harness.run(session, "once()")).output == ("good",)


@SHAPES
async def test_a_tool_that_ends_each_new_interpreter_is_dropped(harness: Harness) -> None:
    session = await harness.session()
    await register(session, once=source(ONCE.format(then="os._exit(1)")), good=source(GOOD))
    await harness.run(session, "import os\nos._exit(0)")
    run = await harness.run(session, "40 + 2")
    assert (run.output, run.ended.generation) == (42, 3)
    assert run.stderr == "the interpreter died or hung while its tools were made again; they are no longer available\n"
    gone = await harness.run(session, "good()")
    assert (
        gone.message == "the tool good is not available: the interpreter died or hung while its tools were made again"
    )
    await register(session, good=source(GOOD))
    assert (await harness.run(session, "good()")).output == ("good",)


# ---------------------------------------------------------------------------------------------------------------------
# Under another policy


@SHAPES
async def test_tools_that_the_policy_does_not_allow_any_more_are_removed(harness: Harness) -> None:
    session = await harness.session_under("")
    caller = source("def tool():\n    return good()\n")
    await register(session, "asked", good=source(GOOD), web_a=source(GOOD), web_b=caller)
    await harness.run(session, "mine = 1\nweb_a = 'mine'")
    await harness.change_policy(session, 'tools.allowed = ["asked", "web_*"]')
    gone = "the tool good is not available: the policy no longer allows it in the sandbox"
    assert (await harness.run(session, "good()")).message == gone
    assert (await harness.run(session, "web_b()")).message == gone
    assert (await run_answered(harness, session, "web_a, mine, asked()", {"asked": 2})).output == ("mine", 1, 2)
    assert (await harness.run(session, "import os\nos._exit(0)")).state == "reset"
    assert (await harness.run(session, "web_a()")).output == ("good",)
    assert (await harness.run(session, "good()")).message == gone
    await harness.change_policy(session, 'tools.placements = ["host"]')
    assert (await harness.run(session, "web_a()")).message == gone.replace("good", "web_a", 1)
    with pytest.raises(PolicyViolation):
        await register(session, web_a=source(GOOD))
    assert (await run_answered(harness, session, "asked()", {"asked": 2})).output == 2
