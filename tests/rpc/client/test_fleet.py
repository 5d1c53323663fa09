"""A session whose daemon is the front of a fleet, which says when the session is lost with its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from executor_client import CallTimeoutError, NotFoundError, Outcome, PreconditionError, VariablesState
from tests.support.fake_daemon import Cut, FakeDaemon, Refusal, busy, log, result

REASON = "node n1 has not answered for 4 s"
FENCED = busy(grpc.StatusCode.UNAVAILABLE, "NODE_FENCED")
LOST = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "SESSION_LOST", f"the session is lost: {REASON}")
NOT_FOUND = Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")


@pytest.fixture
def front(daemon: FakeDaemon) -> FakeDaemon:
    daemon.session.node = "n1"
    return daemon


def test_a_creation_without_an_answer_is_taken_back(client: Any, front: FakeDaemon) -> None:
    client.get_policy()
    front.refusals["CreateSession"].append(Refusal(grpc.StatusCode.DEADLINE_EXCEEDED))
    with pytest.raises(CallTimeoutError):
        client.create_session()
    assert front.names() == ["GetPolicy", "CreateSession", "DeleteSession"]


def test_a_fleet_without_a_node_is_waited_for(client: Any, front: FakeDaemon) -> None:
    front.refusals["CreateSession"].append(busy(grpc.StatusCode.UNAVAILABLE, "NO_NODE"))
    session = client.create_session()
    assert session.execute("1").succeeded and session.info.node == "n1"
    assert front.names() == ["CreateSession", "CreateSession", "Execute"]


def test_an_execution_that_is_lost_with_its_node_ends_as_lost_with_the_fronts_reason(
    client: Any, front: FakeDaemon
) -> None:
    session = client.create_session()
    front.journal = [log("so far\n"), result()]
    front.cuts.append(Cut(1))
    front.refusals["AttachExecution"].extend([FENCED, LOST])
    ended = session.execute("work()")
    assert (ended.outcome, ended.state) == (Outcome.LOST, VariablesState.LOST)
    assert (ended.logs, ended.generation) == ("so far\n", 1)
    assert ended.error is not None and ended.error.type == "SandboxLost" and REASON in ended.error.message


def test_an_execution_that_a_node_may_have_begun_is_lost_with_it(client: Any, front: FakeDaemon) -> None:
    session = client.create_session()
    front.refusals["Execute"].extend([Refusal(grpc.StatusCode.UNAVAILABLE), LOST])
    assert session.execute("1").outcome is Outcome.LOST


def test_an_execution_that_no_node_has_begun_is_refused(client: Any, front: FakeDaemon) -> None:
    session = client.create_session()
    front.refusals["Execute"].append(LOST)
    with pytest.raises(PreconditionError, match=REASON) as lost:
        session.execute("1")
    assert lost.value.reason == "SESSION_LOST"


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("SetVariables", lambda session: session.set_variables({"x": 1})),
        ("GetVariables", lambda session: session.get_variables(["x"])),
        ("PutFile", lambda session: session.put_file("a", b"")),
        ("GetFile", lambda session: session.get_file("a")),
        ("KeepAlive", lambda session: session.keep_alive()),
    ],
)
def test_calls_of_a_session_that_is_lost_with_its_node_raise_the_reason(
    client: Any, front: FakeDaemon, method: str, call: Callable[[Any], object]
) -> None:
    session = client.create_session()
    front.refusals[method].append(LOST)
    with pytest.raises(PreconditionError, match=REASON) as lost:
        call(session)
    assert lost.value.reason == "SESSION_LOST"


def test_a_session_that_has_ended_is_not_found(client: Any, front: FakeDaemon) -> None:
    session = client.create_session()
    for method in ("Execute", "KeepAlive"):
        front.refusals[method].append(NOT_FOUND)
    for call in (session.keep_alive, lambda: session.execute("1")):
        with pytest.raises(NotFoundError):
            call()


def test_a_node_without_a_lease_is_waited_for(client: Any, front: FakeDaemon) -> None:
    session = client.create_session()
    for method in ("Execute", "KeepAlive"):
        front.refusals[method].extend([FENCED] * 3)
    assert session.execute("1").succeeded
    session.keep_alive()
    assert front.names() == ["CreateSession", *["Execute"] * 4, *["KeepAlive"] * 4]


def test_a_stream_that_ends_without_a_lease_goes_on(client: Any, front: FakeDaemon) -> None:
    session = client.create_session()
    front.journal = [log("a"), log("b"), result(3)]
    front.cuts.append(Cut(1))
    front.refusals["AttachExecution"].append(FENCED)
    ended = session.execute("1")
    assert (ended.output, ended.logs) == (3, "ab")
    assert front.names() == ["CreateSession", "Execute", "AttachExecution", "AttachExecution"]
