"""An agent whose session is lost with the node of a fleet goes on in another one, and its model learns why."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from executor_api.v1 import types_pb2 as types
from executor_client import Outcome
from executor_client.smolagents import CodeExecutionError, RemoteExecutor
from tests.support.fake_daemon import SESSION, TOKEN, Cut, busy, log, result, serve

FENCED = busy(grpc.StatusCode.UNAVAILABLE, "NODE_FENCED")
REASON = "node n1 has not answered for 4 s"


class Fleet:
    """A front and two nodes, the first of which has the sessions until it is lost."""

    def __init__(self, stack: ExitStack) -> None:
        directories = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fake"))) for _ in range(3)]
        self.front, self.first, self.second = (stack.enter_context(serve(each)) for each in directories)
        self.front.session.address = self.first.address

    def lose_first(self) -> None:
        """The first node serves no more; the front says that its session is lost, and makes others on the second."""
        for method in ("Execute", "AttachExecution"):
            self.first.refusals[method].extend([FENCED] * 100)
        self.front.found = types.Session(
            session_id=SESSION, state=types.SESSION_STATE_LOST, generation=1, lost_reason=REASON
        )
        self.front.session.address = self.second.address


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack)


def test_a_step_that_is_lost_with_its_node_is_reported_and_the_next_runs_elsewhere(fleet: Fleet) -> None:
    with RemoteExecutor(address=fleet.front.address, token=TOKEN) as executor:
        executor.send_variables({"x": 1})
        fleet.first.journal = [log("so far\n"), result()]
        fleet.first.cuts.append(Cut(1))
        fleet.lose_first()
        fleet.first.refusals["Execute"].clear()
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
    assert fleet.second.names() == ["SetVariables", "Execute", "DeleteSession"]
    assert fleet.front.names()[-2:] == ["DeleteSession", "CreateSession"]


def test_a_session_that_was_lost_between_two_steps_is_reported_with_the_next(fleet: Fleet) -> None:
    with RemoteExecutor(address=fleet.front.address, token=TOKEN) as executor:
        executor("x = 1")
        fleet.lose_first()
        with pytest.raises(CodeExecutionError, match=REASON) as lost:
            executor("x")
        assert lost.value.outcome is Outcome.LOST
        executor("1")
    assert next(request.code for name, request in fleet.first.requests if name == "Execute") == "x = 1"
    assert [request.code for name, request in fleet.second.requests if name == "Execute"] == ["1"]
    assert fleet.second.names() == ["Execute", "DeleteSession"]
