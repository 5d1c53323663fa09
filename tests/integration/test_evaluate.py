"""`evaluate`: a look into a session, out of band."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from executor_client import (
    EvaluationError,
    InvalidRequest,
    OpaqueValue,
    Outcome,
    PolicyViolationError,
    ReentrantExecution,
)
from tests.support.blocking import client_of
from tests.support.daemon import Daemon

# A loop in C: Python sees an interrupt when it is over, in some hours.
DEAF = "sum(range(10**13))"


@pytest.fixture(params=["sync", "async"], scope="module")
def client(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Any]:
    with client_of(request.param, daemon) as client:
        yield client


@pytest.fixture(scope="module")
def shared(client: Any) -> Iterator[Any]:
    with client.create_session(authorized_imports=["time"]) as session:
        session.execute("import time")
        yield session


@pytest.fixture
def session(shared: Any) -> Iterator[Any]:
    yield shared
    shared.register_tools({})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 1", 2),
        ("  {'a': (1, None)}  # with a comment", {"a": (1, None)}),
        ("[n\nfor n in range(2)]", [0, 1]),
        ("(made := b'\\x00\\xff') * 2", b"\x00\xff\x00\xff"),
        ("None", None),
    ],
)
def test_the_value_comes_back_typed(session: Any, expression: str, value: Any) -> None:
    assert session.evaluate(expression) == value


def test_a_value_without_an_exact_form_has_a_repr(session: Any) -> None:
    value = session.evaluate("lambda: 1")
    assert isinstance(value, OpaqueValue) and "lambda" in str(value)


def test_it_sees_and_changes_the_variables_of_the_session(session: Any) -> None:
    session.execute("numbers = [1]")
    assert session.evaluate("numbers.append(2) or numbers") == [1, 2]
    assert session.execute("numbers").output == [1, 2]


@pytest.mark.parametrize(
    "text", ["x = 1", "1; 2", "1) + (2", "", "import os", "a b", "\0", "'\ud800'", "(" * 10_000, b"1", None]
)
def test_what_is_no_expression_is_refused_before_it_is_sent(session: Any, text: Any) -> None:
    with pytest.raises(InvalidRequest, match="expression"):
        session.evaluate(text)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_time_limit_that_makes_no_sense_is_refused(session: Any, timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match="wall_time_s"):
        session.evaluate("1", timeout_s=timeout_s)


def test_a_failure_is_raised_with_its_result(session: Any) -> None:
    with pytest.raises(EvaluationError, match="ended as EXCEPTION: ZeroDivisionError: division by zero") as raised:
        session.evaluate("1 / 0")
    assert raised.value.outcome is Outcome.EXCEPTION
    assert raised.value.result is not None and raised.value.result.error is not None


def test_its_own_time_limit_costs_the_session_nothing(session: Any) -> None:
    session.execute("kept = 1")
    with pytest.raises(EvaluationError, match=r"wall_time_s = 0\.3") as raised:
        session.evaluate("time.sleep(30)", timeout_s=0.3)
    assert raised.value.outcome is Outcome.TIMEOUT
    assert session.evaluate("kept") == 1


def test_one_that_cannot_be_interrupted_costs_the_variables_and_says_so(client: Any) -> None:
    with client.create_session() as session:
        session.execute("kept = 1")
        with pytest.raises(EvaluationError) as raised:
            session.evaluate(DEAF, timeout_s=0.1)
        assert raised.value.outcome is Outcome.TIMEOUT
        assert session.generation == 2
        with pytest.raises(EvaluationError, match="NameError"):
            session.evaluate("kept")


def test_more_time_than_the_policy_grants_is_refused(session: Any) -> None:
    with pytest.raises(PolicyViolationError, match="wall_time_s"):
        session.evaluate("1", timeout_s=1e6)


def test_the_sessions_own_limit_holds_when_it_is_shorter(client: Any) -> None:
    with client.create_session(limits={"wall_time_s": 2.0}) as session:
        assert session.evaluate("7") == 7


def test_a_host_tool_is_out_of_its_reach_and_in_place_afterwards(session: Any) -> None:
    called = []
    session.register_tools({"tool": lambda: called.append(1)})
    with pytest.raises(EvaluationError, match="tool"):
        session.evaluate("tool()")
    assert called == []
    session.execute("tool()")
    assert called == [1]


def test_it_is_refused_while_an_execution_runs(session: Any) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(60)

    session.register_tools({"wait": wait})
    running = threading.Thread(target=session.execute, args=("wait()",))
    running.start()
    try:
        assert begun.wait(60)
        with pytest.raises(EvaluationError, match="only an idle session"):
            session.evaluate("1")
    finally:
        go_on.set()
        running.join()
    assert session.evaluate("1") == 1


def test_a_host_tool_that_evaluates_is_refused(session: Any) -> None:
    session.register_tools({"look": lambda: session.evaluate("1")})
    result = session.execute("look()")
    assert result.outcome is Outcome.EXCEPTION and ReentrantExecution.__name__ in str(result.error)
