"""Operation budgets, of an execution and of a session: exact, warned of at four fifths, and never evaded by a crash."""

from __future__ import annotations

import time

import pytest

from executor_server.core.model import LimitWarning, Log
from tests.contract.harness import Harness, Transcript
from tests.contract.marks import promise

pytestmark = promise("limit-budgets")


def _loops(count: int) -> str:
    return f"for i in range({count}): pass"


def _warnings(run: Transcript) -> list[tuple[str, int, int]]:
    kinds = (event.kind for event in run.events)
    return [(kind.limit, kind.used, kind.budget) for kind in kinds if isinstance(kind, LimitWarning)]


async def test_four_fifths_of_a_budget_are_reported_once_where_they_are_reached(harness: Harness) -> None:
    session = await harness.session()
    code = "for i in range(100):\n    if i in (78, 80): print(i)"
    run = await harness.run(session, code, operations=100)
    assert run.outcome == "succeeded"
    assert _warnings(run) == [("operations", 80, 100)]
    reported = [
        getattr(event.kind, "text", "warning") for event in run.events if isinstance(event.kind, (Log, LimitWarning))
    ]
    assert "".join(reported) in ("78\nwarning80\n", "78\n80\nwarning")
    assert _warnings(await harness.run(session, _loops(79), operations=100)) == []
    assert _warnings(await harness.run(session, "while True: pass", operations=100)) == [("operations", 80, 100)]


async def test_a_session_s_budget_is_shared_by_its_executions(harness: Harness) -> None:
    session = await harness.session(session_operations=1000)
    first = await harness.run(session, _loops(700))
    assert (first.ended.usage.operations, _warnings(first)) == (700, [])
    second = await harness.run(session, _loops(150))
    assert (second.outcome, _warnings(second)) == ("succeeded", [("session_operations", 800, 1000)])
    third = await harness.run(session, _loops(500))
    assert (third.outcome, third.ended.usage.operations) == ("operation_limit", 150)
    assert _warnings(third) == [("session_operations", 850, 1000)]
    assert "session_operations = 1000, of which 150 were left" in third.message
    fourth = await harness.run(session, "1 + 1")
    assert (fourth.outcome, fourth.state, fourth.ended.usage.operations) == ("operation_limit", "kept", 0)
    assert "session_operations = 1000" in fourth.message


async def test_the_smaller_budget_ends_an_execution_and_is_named(harness: Harness) -> None:
    session = await harness.session(session_operations=1000)
    run = await harness.run(session, _loops(500), operations=100)
    assert (run.outcome, _warnings(run)) == ("operation_limit", [("operations", 80, 100)])
    assert "session" not in run.message
    assert (await harness.run(session, _loops(800))).outcome == "succeeded"


async def test_a_program_that_kills_the_interpreter_is_charged_with_all_that_it_can_have_spent(
    harness: Harness,
) -> None:
    session = await harness.session(session_operations=1000)
    assert (await harness.run(session, "import os\nos._exit(0)", operations=400)).outcome == "exited"
    run = await harness.run(session, _loops(700))
    assert (run.outcome, run.ended.usage.operations) == ("operation_limit", 600)


_SWALLOWED = {
    "a finalizer": "class Spender:\n    def __del__(self):\n        {spend}\ns = Spender()\ndel s\n'went on'",
    "a library": "import functools\ndef spend(_):\n    {spend}\ntry:\n    functools.reduce(lambda a, b: spend(b), [1, 2])\n"
    "finally:\n    raise ValueError",
    "a thread": "import threading\ndef spend():\n    {spend}\nt = threading.Thread(target=spend)\nt.start()\nt.join()\n1",
}


@promise("run-main")  # on backends where programs may have threads and modules of the system
@pytest.mark.parametrize("name", sorted(_SWALLOWED))
async def test_a_refusal_in_a_finalizer_or_thread_ends_the_execution(harness: Harness, name: str) -> None:
    session = await harness.session(imports=("threading", "functools"))
    run = await harness.run(session, _SWALLOWED[name].format(spend="__import__('o' + 's')"))
    assert (run.outcome, run.state) == ("import_denied", "kept")


async def test_the_prelude_is_charged_each_time_it_runs(harness: Harness) -> None:
    session = await harness.session(session_operations=1000, prelude=_loops(300))
    assert (await harness.run(session, "import os\nos._exit(0)", operations=100)).state == "reset"
    run = await harness.run(session, "while True: pass")
    assert run.ended.usage.operations == 300


async def test_spent_operations_stay_spent_under_other_limits(harness: Harness) -> None:
    session = await harness.session_under("", session_operations=1000)
    await harness.run(session, _loops(600))
    await harness.change_policy(session, _at_most(700))
    assert (await harness.run(session, "while True: pass")).ended.usage.operations == 100
    await harness.change_policy(session, _at_most(500))
    assert (await harness.run(session, "1")).outcome == "operation_limit"


def _at_most(session_operations: int) -> str:
    return "".join(f"limits.{key}.session_operations = {session_operations}\n" for key in ("default", "max"))


SWALLOWED = {
    "a finalizer": "class Loop:\n    def __del__(self):\n        while True: pass\nloop = Loop()\ndel loop",
    "a weak reference": """
import weakref
class Loop: pass
def spin(_):
    while True: pass
loop = Loop()
reference = weakref.ref(loop, spin)
del loop
""",
    "a generator": """
def spin():
    try:
        yield
    finally:
        while True: pass
generator = spin()
next(generator)
del generator
""",
    "a thread": """
import threading
def spin():
    while True: pass
thread = threading.Thread(target=spin)
thread.start()
thread.join()
""",
    "a comparison": """
class Loop:
    def __eq__(self, other):
        while True: pass
    def __hash__(self):
        return 1
import contextlib
with contextlib.suppress(BaseException):
    {Loop(): 1}[Loop()]
""",
}
STRAIGHT_LINES = "import hashlib\n" + "hashlib.pbkdf2_hmac('sha256', b'p', b's', 300_000)\n" * 500


@pytest.mark.parametrize(
    "code",
    [pytest.param(code, id=name, marks=promise("limit-budgets", "run-main")) for name, code in SWALLOWED.items()],
)
async def test_nothing_counts_after_a_spent_budget_that_was_swallowed(harness: Harness, code: str) -> None:
    session = await harness.session()
    given: list[object] = []
    tools = {"final_answer": lambda value: given.append(value)}
    answers = f"{code}\n{STRAIGHT_LINES}"
    began_s = time.monotonic()
    run = await harness.run_with_tools(
        session, f"{answers}\nfinal_answer('evaded')", tools, "final_answer", operations=1000, wall_time_s=15
    )
    assert (run.outcome, run.state) == ("operation_limit", "kept"), run.message
    assert "1000" in run.message and run.ended.final_answer_call_id == ""
    assert given == []
    assert time.monotonic() - began_s < 10, "straight-line code was ended"
