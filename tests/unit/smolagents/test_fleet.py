"""An agent whose session is lost with the node of a fleet goes on in another one, and its model learns why."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from executor_client import Outcome
from executor_client.smolagents import CodeExecutionError, RemoteExecutor
from tests.support.fake_daemon import TOKEN, Cut, FakeDaemon, Refusal, log, result, serve

REASON = "node n1 has not answered for 4 s"
LOST = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "SESSION_LOST", f"the session is lost: {REASON}")


@pytest.fixture
def front() -> Iterator[FakeDaemon]:
    with tempfile.TemporaryDirectory(prefix="fake") as directory, serve(Path(directory)) as daemon:
        daemon.session.node = "n1"
        yield daemon


def test_a_step_that_is_lost_with_its_node_is_reported_and_the_next_runs_in_another_session(front: FakeDaemon) -> None:
    with RemoteExecutor(address=front.address, token=TOKEN) as executor:
        executor.send_variables({"x": 1})
        front.journal = [log("so far\n"), result()]
        front.cuts.append(Cut(1))
        front.refusals["AttachExecution"].append(LOST)
        with pytest.raises(CodeExecutionError) as lost:
            executor("work()")
        assert lost.value.outcome is Outcome.LOST
        for words in (
            REASON,
            "may have run in part",
            "sandbox had to be replaced",
            "variables given with the task (x)",
        ):
            assert words in str(lost.value)
        assert executor("1").output is None
    names = front.names()
    assert names[names.index("DeleteSession") :] == [
        "DeleteSession",
        "CreateSession",
        "SetVariables",
        "Execute",
        "DeleteSession",
    ]


def test_a_session_that_was_lost_between_two_steps_is_reported_with_the_next(front: FakeDaemon) -> None:
    with RemoteExecutor(address=front.address, token=TOKEN) as executor:
        executor("x = 1")
        front.refusals["Execute"].append(LOST)
        with pytest.raises(CodeExecutionError, match=REASON) as lost:
            executor("x")
        assert lost.value.outcome is Outcome.LOST
        executor("1")
    assert [request.code for name, request in front.requests if name == "Execute"] == ["x = 1", "x", "1"]
