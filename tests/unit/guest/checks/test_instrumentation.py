from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from smolagents.local_python_executor import LocalPythonExecutor

from executor_server.guest.checks.control import FinalAnswerGiven, find_control
from executor_server.guest.checks.instrumentation import LAST_STATEMENT
from executor_server.guest.checks.meter import OperationLimitExceeded
from tests.support.agent_program import Agent, run
from tests.support.corpus import programs
from tests.support.interpreters import TRIED, find_python
from tests.support.rounds import ALL, VARIABLE

REPOSITORY = Path(__file__).parents[4]

ENDLESS = programs("endless")  # Programs that would run for ever, or nearly.
UNWINDING = programs("unwinding")  # Programs that try to keep the control exception that final() raises.


@pytest.mark.parametrize("trick", ENDLESS)
def test_no_way_around_the_budget(trick: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # exceptions of finalizers go there
    ended = run(ENDLESS[trick], budget=3000)
    assert isinstance(ended.error, OperationLimitExceeded)
    assert (ended.operations, ended.exceeded) == (3000, True)


@pytest.mark.parametrize(
    ("source", "operations"),
    [
        ("1 + 1", 0),
        ("for i in range(7): pass", 7),
        ("n = 3\nwhile n: n -= 1", 3),
        ("[x for x in range(4) for y in range(2)]", 4 + 8),
        ("sum(x for x in range(5) if x % 2)", 5),
        ("def f(): pass\nf(); f()", 2),
        ("(lambda: 1)()", 1),
        ("def g():\n    yield 1\n    yield 2\nlist(g())", 1),
        ("def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\nfib(10)", 177),
        ("exec('for i in range(3): pass')", 1 + 3),
        ("class A:\n    x = 1\n    def __init__(self): pass\nA(); A()", 2),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass", 0),
    ],
)
def test_operations_are_loop_rounds_elements_and_calls(source: str, operations: int) -> None:
    assert [run(source).operations for _ in range(2)] == [operations, operations]


def test_function_of_an_earlier_execution_counts_against_the_current_one() -> None:
    agent = Agent()
    agent.run("def f():\n    for i in range(10): pass")
    assert agent.run("f()").operations == 11
    assert isinstance(agent.run("f()", budget=5).error, OperationLimitExceeded)
    assert agent.run("f()").error is None


@pytest.mark.parametrize("trick", UNWINDING)
def test_control_exception_passes_every_handler(trick: str, capsys: pytest.CaptureFixture[str]) -> None:
    agent, control = Agent(), FinalAnswerGiven()

    def final() -> None:
        raise control

    agent.namespace.update(final=final, control=control)
    assert agent.run(UNWINDING[trick]).error is control
    assert "kept" not in capsys.readouterr().out


def test_control_exception_is_found_deep_in_groups() -> None:
    control = FinalAnswerGiven()
    group: BaseExceptionGroup[BaseException] = BaseExceptionGroup("inner", [ValueError(), control])
    for _ in range(1000):
        group = BaseExceptionGroup("outer", [group])
    assert find_control(group) is control
    assert find_control(ExceptionGroup("plain", [ValueError()])) is None


def test_control_exception_is_found_in_a_group_that_hides_its_members() -> None:
    """A handler asked the group itself, which is the program's own."""

    class Hiding(BaseExceptionGroup[BaseException]):
        exceptions = ()

    control = FinalAnswerGiven()
    assert find_control(Hiding("", [control])) is control


def test_a_handler_runs_for_an_exception_that_cannot_say_its_class() -> None:
    """The guard of the handler asked the exception for its class, and raised in place of the handler."""
    hiding = "class E(Exception):\n    __class__ = property(lambda self: 1 / 0)\n"
    assert Agent().run(f"{hiding}try: raise E\nexcept E: pass").error is None


def test_cleanup_runs_while_a_control_exception_unwinds() -> None:
    agent = Agent()
    done: list[object] = []

    def final() -> None:
        raise FinalAnswerGiven

    agent.namespace.update(final=final, done=done)
    agent.run(
        "class C:\n    def __enter__(self): pass\n    def __exit__(self, *a):\n        for i in range(2): done.append(i)\n"
        "try:\n    with C(): final()\nfinally:\n    done.append('finally')"
    )
    assert done == [0, 1, "finally"]


def test_function_shipped_by_cloudpickle_works_without_a_meter() -> None:
    agent = Agent()
    agent.run(
        "def f(n):\n    try:\n        return [i for i in range(n)]\n    except ValueError:\n        pass", budget=0
    )
    shipped: Callable[[int], Any] = cloudpickle.loads(cloudpickle.dumps(agent.namespace["f"]))
    assert shipped(3) == [0, 1, 2]
    assert shipped(20_000)[-1] == 19_999


@pytest.mark.parametrize(
    "source",
    [
        "1 + 1",
        "x = 3",
        "x = y = [1]",
        "x: int = 4",
        "x: int",
        "x, y = 1, 2",
        "x = 1\nx += 2",
        "d = {'a': 1}\nd['a'] *= 5",
        "class C: pass\nc = C()\nc.v = 2\nc.v -= 1",
        "for i in range(3): i * 2",
        "for i in range(4):\n    x = i\n    if i == 2: break",
        "for i in range(4):\n    if i < 2: x = i\n    else: None",
        "for i in range(2):\n    for j in range(3):\n        i + j",
        "for i in []: 1",
        "if True: 5\nelse: 6",
        "if False: 5\nelif True:\n    x = 7\n    print(x)",
        "if True:\n    x = 1\n    None",
        "x = 0\nwhile x < 3: x += 1",
        "try:\n    x = 1\nexcept ValueError: 2",
        "try:\n    1 / 0\nexcept ZeroDivisionError: 2",
        "for i in range(2):\n    try: i\n    finally: i",
        "import math",
        "from math import sqrt\nsqrt(16)",
        "def f(): return 1\nf()",
        "x = 5\ndel x",
        "x = 1\npass",
        "assert True",
        "'text'",
        "1\n'text'",
        "None",
        "print('x')",
        "if 1:\n    for i in range(3):\n        if i: x = i\n        else: 'zero'",
        "5\nfor i in range(2): pass",
    ],
)
def test_last_statement_has_the_value_that_the_local_executor_gives(source: str) -> None:
    local = LocalPythonExecutor([])
    local.send_tools({})
    assert run(source, output_mode=LAST_STATEMENT).value == local(source).output


@pytest.mark.parametrize(
    ("source", "name"), [("def f(): pass", "f"), ("class C: pass", "C"), ("if 1:\n    async def g(): pass", "g")]
)
def test_last_definition_is_the_value(source: str, name: str) -> None:
    agent = Agent()
    value = agent.run(source, output_mode=LAST_STATEMENT).value
    assert value is agent.namespace[name]


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("x = 3", None),
        ("x = 3\nx", 3),
        ("for i in range(3): i", None),
        ("(y := 4)", 4),
        ("import asyncio\nawait asyncio.sleep(0, 'slept')", "slept"),
        ("1; 2", 2),
        ("", None),
    ],
)
def test_trailing_expression_is_the_value(source: str, value: object) -> None:
    assert run(source).value == value


@pytest.mark.parametrize("version", TRIED)
def test_instrumented_programs_do_what_plain_ones_do(version: str) -> None:
    report = _report("differential.py", version)
    assert report["differences"] == []
    assert report["ran"] >= 50


@pytest.mark.parametrize("version", TRIED)
def test_generated_programs_spend_what_counting_in_each_body_spends(version: str) -> None:
    """An iterator that counts must neither count an element more nor be asked at another moment."""
    report = _report("counting.py", version)
    assert report["differences"] == []
    assert report["ran"] >= 2.5 * report["programs"] and report["exceeded"] >= 1.25 * report["programs"]


def _report(script: str, version: str) -> dict[str, Any]:
    python = _interpreter(version)
    if python is None:
        pytest.skip(f"no CPython {version} here")
    path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "proto")))
    # Bytecode of other versions is kept for the next run, and apart.
    kept = str(Path(os.environ["XDG_CACHE_HOME"], "bytecode"))
    environment = {"PYTHONPATH": path, "PATH": os.defpath, "PYTHONPYCACHEPREFIX": kept}
    if ALL:
        environment[VARIABLE] = "all"
    command = [str(python), "-W", "error", str(REPOSITORY / "tests" / "support" / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _interpreter(version: str) -> Path | None:
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return Path(sys.executable)
    return find_python(version)
