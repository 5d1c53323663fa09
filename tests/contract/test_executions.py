"""A session runs code, keeps its variables, and streams what happens in order."""

from __future__ import annotations

import pytest

from executor_api.limits import OUTPUT_VALUE_BYTES_MAX
from executor_api.values import OpaqueValue
from executor_server.core.errors import InvalidRequest, ResourceExhausted
from executor_server.core.model import Image, Log, OutputMode, Queued
from executor_server.policy.requested import RequestedLimits
from tests.contract.harness import MIB, Harness, follow
from tests.contract.marks import promise


@promise("run-value")
async def test_the_value_of_a_trailing_expression_is_the_output(harness: Harness) -> None:
    session = await harness.session()
    assert (await harness.run(session, "x = 40\nx + 2")).output == 42
    assert (await harness.run(session, "x = 3")).output is None
    assert (await harness.run(session, "x = 3", last_statement=True)).output == 3


@promise("run-state")
async def test_variables_outlive_an_execution_that_raised(harness: Harness) -> None:
    session = await harness.session()
    failed = await harness.run(session, "x = 7\n1/0")
    assert (failed.outcome, failed.state) == ("exception", "kept")
    assert (await harness.run(session, "x")).output == 7


@promise("run-error")
async def test_an_error_shows_the_agents_own_lines(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "def f(n):\n    return 1 / n")
    failed = await harness.run(session, "y = 1\nz = f(0)\n")
    error = failed.ended.error
    assert error is not None
    assert (error.type, error.message, error.line, error.statement) == (
        "ZeroDivisionError",
        "division by zero",
        2,
        "z = f(0)",
    )
    assert '"<execution-1>", line 2, in f' in error.traceback and "return 1 / n" in error.traceback
    assert "guest" not in error.traceback


@promise("run-await")
async def test_code_awaits_at_the_top_level(harness: Harness) -> None:
    session = await harness.session()
    assert (await harness.run(session, "import asyncio\nawait asyncio.sleep(0, 5)")).output == 5


@promise("run-main")
async def test_classes_of_main_pickle(harness: Harness) -> None:
    session = await harness.session()
    code = "import pickle\nclass C:\n    pass\ntype(pickle.loads(pickle.dumps(C()))) is C"
    assert (await harness.run(session, code)).output is True


@promise("stream-children")
async def test_output_of_children_and_of_c_code_is_captured(harness: Harness) -> None:
    session = await harness.session()
    code = """
import ctypes, os, subprocess
print("python")
subprocess.run(["/bin/sh", "-c", "echo child; echo problem >&2"])
os.write(1, b"descriptor\\n")
ctypes.CDLL(None).puts(b"libc")
"""
    run = await harness.run(session, code)
    assert run.stdout == "python\nchild\ndescriptor\nlibc\n"
    assert run.stderr == "problem\n"


@promise("stream-images")
async def test_images_come_in_order_with_the_logs(harness: Harness) -> None:
    session = await harness.session()
    code = """
from PIL import Image
print("before")
display(Image.new("RGB", (3, 2), "red"))
print("after")
"""
    run = await harness.run(session, code)
    kinds = [type(event.kind) for event in run.events]
    assert kinds[:3] == [Log, Image, Log]
    assert run.images[0].startswith(b"\x89PNG")


@promise("stream-images")
async def test_figures_left_open_become_images(harness: Harness) -> None:
    session = await harness.session()
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.figure()\nplt.plot([2, 1])\nNone"
    run = await harness.run(session, code)
    assert len(run.images) == 2
    assert (await harness.run(session, "plt.get_fignums()")).output == []


@promise("stream-order")
async def test_numbers_of_events_rise_by_one_and_the_result_is_last(harness: Harness) -> None:
    session = await harness.session()
    run = await harness.run(
        session, "import sys\nfor i in range(50):\n    print(i, file=(sys.stdout, sys.stderr)[i % 2], flush=True)"
    )
    assert [event.number for event in run.events] == list(range(1, len(run.events) + 1))
    assert run.events[-1].kind is run.result
    assert run.stdout.split() == [str(i) for i in range(0, 50, 2)]


@promise("stream-cut")
async def test_output_past_its_limit_keeps_head_and_tail(harness: Harness) -> None:
    session = await harness.session()
    run = await harness.run(session, "for i in range(20_000):\n    print(i)", output_bytes=10_000)
    assert run.outcome == "succeeded"
    assert run.stdout.startswith("0\n1\n2\n") and run.stdout.endswith("19998\n19999\n")
    assert run.omitted_bytes == run.ended.usage.output_bytes - len(run.stdout)
    assert len(run.stdout) <= 10_000


@promise("stream-text")
async def test_a_character_may_be_cut_between_writes(harness: Harness) -> None:
    session = await harness.session()
    code = "import os, time\nfor b in 'grüße'.encode():\n    os.write(1, bytes([b]))\n    time.sleep(0.01)"
    assert (await harness.run(session, code)).stdout == "grüße"


@promise("run-operations")
async def test_operations_are_counted_and_deterministic(harness: Harness) -> None:
    session = await harness.session()
    code = "def f(n):\n    return [i for i in range(n)]\nfor _ in range(10):\n    f(10)"
    counts = {(await harness.run(session, code)).ended.usage.operations for _ in range(3)}
    assert counts == {10 + 10 + 100}


@promise("run-once")
async def test_an_id_names_one_execution(harness: Harness) -> None:
    session = await harness.session()
    first = await harness.begin(session, "count = globals().get('count', 0) + 1\ncount")
    asked = OutputMode.TRAILING_EXPRESSION, RequestedLimits()
    again = await session.execute(first.execution_id, "count = globals().get('count', 0) + 1\ncount", *asked)
    assert again.execution_id == first.execution_id
    assert (await follow(again)).output == 1
    assert (await follow(first)).events == (await follow(again)).events
    with pytest.raises(InvalidRequest, match="another execution"):
        await session.execute(first.execution_id, "other", *asked)


@promise("stream-again")
async def test_a_reader_that_comes_back_gets_the_rest(harness: Harness) -> None:
    session = await harness.session()
    execution = await harness.begin(session, "print('a')\nimport time\ntime.sleep(0.1)\nprint('b')")
    first = [event async for event in execution.events()]
    rest = [event async for event in execution.events(after=1)]
    assert rest == first[1:]


@promise("run-queue")
async def test_executions_of_one_session_wait_for_each_other(harness: Harness) -> None:
    session = await harness.session()
    slow = await harness.begin(session, "import time\ntime.sleep(0.2)\nx = 1")
    second = await harness.begin(session, "x")
    run = await follow(second)
    assert run.events[0].kind == Queued(1)
    assert (run.output, (await follow(slow)).outcome) == (1, "succeeded")


@promise("run-queue")
async def test_too_many_waiting_executions_are_refused(harness: Harness) -> None:
    session = await harness.session()
    with pytest.raises(ResourceExhausted, match="run or wait"):
        for _ in range(100):
            await harness.begin(session, "import time\ntime.sleep(0.2)")


@promise("run-prelude")
async def test_the_prelude_runs_first_and_in_every_interpreter(harness: Harness) -> None:
    session = await harness.session(prelude="from math import sqrt\nprint('not shown')")
    assert (await harness.run(session, "sqrt(9)")).output == 3.0
    assert (await harness.run(session, "import os\nos._exit(0)")).state == "reset"
    run = await harness.run(session, "sqrt(16)")
    assert (run.output, run.stdout) == (4.0, "")


@promise("run-prelude-deadly")
async def test_a_prelude_that_ends_each_new_interpreter_is_left_out_and_said(harness: Harness) -> None:
    """It used to end one interpreter after the other, and nothing else ran any more."""
    prelude = "import os\nif os.path.exists('ran'):\n    os._exit(1)\nopen('ran', 'w').close()\nx = 1"
    session = await harness.session(prelude=prelude)
    assert (await harness.run(session, "x\nos._exit(0)")).state == "reset"
    run = await harness.run(session, "'x' in globals()")
    assert (run.output, run.ended.generation) == (False, 3)
    assert run.stderr.startswith("the prelude ended as exited")


@promise("run-prelude")
async def test_a_prelude_that_fails_fails_the_session(harness: Harness) -> None:
    with pytest.raises(InvalidRequest, match="division by zero"):
        await harness.session(prelude="1/0")
    assert await harness.session_ids() == []


LARGE = {
    "bytes": "value = bytes(200_000_000)",
    "text": "value = 'é' * 20_000_000",
    "numbers": "value = list(range(2_000_000))",
    "dict": "value = dict.fromkeys(range(5_000_000))",
    "texts": "value = [str(number) * 30 for number in range(100_000)]",
}


@promise("run-value-large")
@pytest.mark.parametrize("code", LARGE.values(), ids=LARGE)
async def test_a_large_value_is_described_in_the_output_and_whole_for_whoever_asks(harness: Harness, code: str) -> None:
    session = await harness.session(memory_bytes=1024 * MIB)
    run = await harness.run(session, code, last_statement=True)
    assert run.outcome == "succeeded", run.message
    assert isinstance(run.output, OpaqueValue)
    assert str(OUTPUT_VALUE_BYTES_MAX) in run.output.repr and " of length " in run.output.repr
    assert len(run.bytes_of(run.ended.output or b"")) < 10_000
    whole = await harness.run(session, "value[:10] if type(value) is not dict else value[7]", whole=True)
    assert not isinstance(whole.output, OpaqueValue)


@promise("run-value-large")
async def test_an_evaluation_has_the_whole_value(harness: Harness) -> None:
    session = await harness.session()
    whole = await harness.run(session, "bytes(20_000_000)", whole=True)
    assert whole.output == bytes(20_000_000)
    too_large = await harness.run(session, "bytes(140_000_000)", whole=True)
    assert too_large.outcome == "exception" and "total_bytes" in too_large.message


HOSTILE = {
    "a repr that does not end": "def __repr__(self):\n        while True:\n            pass",
    "a large repr": "def __repr__(self):\n        return 'x' * 400_000_000",
    "a repr that exits": "def __repr__(self):\n        raise SystemExit",
    "no class": "__class__ = property(lambda self: 1 / 0)",
    "no attributes": "def __getattribute__(self, name):\n        raise MemoryError",
}


@promise("run-value-large")
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
async def test_the_code_of_a_value_fails_no_step(harness: Harness, body: str) -> None:
    session = await harness.session()
    run = await harness.run(session, f"class Odd:\n    {body}\nodd = Odd()", last_statement=True)
    assert (run.outcome, run.state) == ("succeeded", "kept"), run.message
    assert isinstance(run.output, OpaqueValue) and run.output.type_name == "__main__.Odd"
    if "while True" not in body:  # which takes all the time that a value has
        held = await harness.run(session, "[odd]")
        assert held.outcome == "succeeded", held.message


FORKED = {
    "spawn": "with multiprocessing.get_context('spawn').Pool(2) as pool:\n    got = pool.map(square, [1, 2])",
    "forkserver": "with multiprocessing.get_context('forkserver').Pool(2) as pool:\n    got = pool.map(square, [1, 2])",
    "of futures": """
from concurrent.futures import ProcessPoolExecutor
with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('spawn'), max_tasks_per_child=1) as pool:
    got = list(pool.map(square, [1, 2]))
""",
}


@promise("run-processes")
@pytest.mark.parametrize("code", FORKED.values(), ids=FORKED)
async def test_processes_of_each_start_method_have_the_functions_of_earlier_steps(harness: Harness, code: str) -> None:
    session = await harness.session()
    await harness.run(session, "import multiprocessing\ndef square(x):\n    return x * x")
    run = await harness.run(session, f"{code}\ngot", wall_time_s=10)
    assert run.output == [1, 4], run.message


@promise("run-main")
async def test_the_source_of_classes_is_found_in_the_steps_that_defined_them(harness: Harness) -> None:
    session = await harness.session()
    with_method = "class A:\n    def m(self):\n        return 1\n"
    plain = "import dataclasses\n@dataclasses.dataclass\nclass B:\n    y: int = 3\n"
    for code in (with_method, plain, "class Other:\n    pass"):
        assert (await harness.run(session, code)).outcome == "succeeded"
    run = await harness.run(session, "import inspect\n[inspect.getsource(A), inspect.getsource(B)]")
    assert run.output == [with_method, plain.partition("\n")[2]]
    again = await harness.run(session, "class B:\n    z = 4\ninspect.getsource(B)")
    assert again.output == "class B:\n    z = 4\n"
    no_source = await harness.run(session, "inspect.getsource(int)")
    assert no_source.outcome == "exception" and no_source.ended.error is not None
    assert no_source.ended.error.type == "TypeError"


@promise("run-await", "run-main")
async def test_functions_of_the_program_may_have_names_of_asyncio(harness: Harness) -> None:
    session = await harness.session()
    own = "import asyncio\nasync def work():\n    return 5\ndef gather():\n    return asyncio.run(work())\n"
    run = await harness.run(session, f"{own}gather()")
    assert run.output == 5, run.message
    later = await harness.run(session, "print('x')\ngather()")
    assert (later.output, later.stdout) == (5, "x\n"), later.message
    await harness.run(session, "from asyncio import create_task")
    assert (await harness.run(session, "task = create_task(work())")).outcome == "succeeded"
    assert (await harness.run(session, "await task")).output == 5


@promise("run-await", "run-main")
@pytest.mark.parametrize(
    "make", ["asyncio.create_task(work())", "asyncio.ensure_future(work())", "asyncio.gather(work())"]
)
async def test_a_step_without_await_can_make_a_task_for_a_later_one(harness: Harness, make: str) -> None:
    session = await harness.session()
    await harness.run(session, "import asyncio\nasync def work():\n    await asyncio.sleep(0)\n    return 5")
    made = await harness.run(session, f"task = {make}")
    assert made.outcome == "succeeded", made.message
    assert (await harness.run(session, "await task")).output in (5, [5])
    alone = await harness.run(session, "asyncio.run(asyncio.wait_for(work(), 1))")
    assert alone.output == 5, "a program that runs a loop itself is in no other one"
