"""A session whose daemon is the front of a fleet: its calls go to the node, and the front says when it is lost."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import types_pb2 as types
from executor_client import (
    CallTimeoutError,
    ConfigurationError,
    NotFoundError,
    Outcome,
    PreconditionError,
    SessionState,
    UnavailableError,
    VariablesState,
)
from tests.support.fake_daemon import (
    SESSION,
    TOKEN,
    Answered,
    Cut,
    FakeDaemon,
    Refusal,
    busy,
    log,
    result,
    serve,
    tool_call,
)
from tests.support.polling import eventually

REASON = "node n1 has not answered for 4 s"


class Node:
    """A node that serves sessions, and can be ended."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="node")))
        self._serving = ExitStack()
        self.daemon = self._serving.enter_context(serve(self.directory))

    def end(self) -> None:
        self._serving.close()

    def close(self) -> None:
        self.end()
        self._stack.close()


@pytest.fixture
def node(daemon: FakeDaemon) -> Iterator[Node]:
    """A node that has the sessions; the fixture `daemon` is its front."""
    made = Node()
    daemon.session.node, daemon.session.address = "n1", made.daemon.address
    yield made
    made.close()


def lose(front: FakeDaemon) -> None:
    """Has the front answer as it does when it has given up a node."""
    front.session.state, front.session.lost_reason = types.SESSION_STATE_LOST, REASON
    front.session.address = ""


def elsewhere(address: str) -> Refusal:
    return Refusal(grpc.StatusCode.FAILED_PRECONDITION, "NODE_ELSEWHERE", progress={"address": address, "node": "n2"})


FENCED = busy(grpc.StatusCode.UNAVAILABLE, "NODE_FENCED")


def test_calls_of_a_session_go_to_its_node(client: Any, daemon: FakeDaemon, node: Node) -> None:
    session = client.create_session()
    assert (session.info.node, session.info.address) == ("n1", node.daemon.address)
    assert session.execute("1 + 1").succeeded
    session.set_variables({"x": 1})
    session.list_files()
    session.put_file("a", b"1")
    session.keep_alive()
    session.register_tools({"f": lambda: 1})
    session.close()
    assert node.daemon.names() == [
        "Execute",
        "SetVariables",
        "ListFiles",
        "PutFile",
        "KeepAlive",
        "RegisterTools",
        "DeleteSession",
    ]
    assert {entry["authorization"] for entry in node.daemon.metadata} == {f"Bearer {TOKEN}"}
    assert daemon.names() == ["CreateSession"]


def test_tool_calls_are_answered_at_the_node(client: Any, daemon: FakeDaemon, node: Node) -> None:
    session = client.create_session()
    session.register_tools({"f": lambda x: x + 1})
    node.daemon.journal = [tool_call("f", 1), Answered(), result(2)]
    assert session.execute("f(1)").output == 2
    assert node.daemon.names() == ["RegisterTools", "Execute", "SubmitToolResult"]
    assert daemon.names() == ["CreateSession"]


def test_sessions_are_found_listed_and_described_at_the_front(client: Any, daemon: FakeDaemon, node: Node) -> None:
    session = client.get_session(SESSION)
    client.list_sessions()
    session.refresh()
    session.execute("1")
    assert daemon.names() == ["GetSession", "ListSessions", "GetSession"]
    assert node.daemon.names() == ["Execute"]


def test_sessions_of_one_node_share_a_connection(client: Any, daemon: FakeDaemon, node: Node) -> None:
    first, second = client.create_session(), client.create_session()
    assert first._transport.current is second._transport.current is not client._transport


def test_a_daemon_that_names_no_address_has_the_session_itself(client: Any, daemon: FakeDaemon) -> None:
    session = client.create_session()
    assert session.execute("1 + 1").succeeded and (session.info.node, session.info.address) == ("", "")
    assert daemon.names() == ["CreateSession", "Execute"]
    assert session._transport.current is client._transport


def test_a_session_at_a_foreign_host_is_ended_and_gets_no_token(client: Any, daemon: FakeDaemon) -> None:
    daemon.session.address = "node.example.com:443"
    with pytest.raises(ConfigurationError, match=r"the session is at 'node\.example\.com:443', where the token is not"):
        client.create_session()
    assert daemon.names() == ["CreateSession", "DeleteSession"]
    create, delete = (request for _, request in daemon.requests)
    assert delete.request_id == create.request_id
    with pytest.raises(ConfigurationError, match="example"):
        client.get_session(SESSION)


def test_the_lease_is_renewed_and_ended_where_the_sessions_are(client: Any, daemon: FakeDaemon, node: Node) -> None:
    daemon.leased = True
    session = client.create_session()
    assert eventually(lambda: "RenewLease" in node.daemon.names())
    client.close()
    assert node.daemon.names()[-1] == "EndLease" and daemon.names() == ["CreateSession"]
    leases = {request.lease_id for name, request in node.daemon.requests if name.endswith("Lease")}
    assert leases == {daemon.requests[0][1].lease_id}
    assert session.session_id == SESSION


def test_a_creation_without_an_answer_is_taken_back_at_the_front(client: Any, daemon: FakeDaemon, node: Node) -> None:
    client.get_policy()
    daemon.refusals["CreateSession"].append(Refusal(grpc.StatusCode.DEADLINE_EXCEEDED))
    with pytest.raises(CallTimeoutError):
        client.create_session()
    assert daemon.names() == ["GetPolicy", "CreateSession", "DeleteSession"]
    assert node.daemon.names() == []


def test_a_fleet_without_a_node_is_waited_for(client: Any, daemon: FakeDaemon, node: Node) -> None:
    daemon.refusals["CreateSession"].append(busy(grpc.StatusCode.UNAVAILABLE, "NO_NODE"))
    assert client.create_session().execute("1").succeeded
    assert daemon.names() == ["CreateSession", "CreateSession"]


# ---------------------------------------------------------------------------------------------------------------------
# A node that is away


def test_an_execution_that_is_lost_with_its_node_ends_as_lost_with_the_fronts_reason(
    client: Any, daemon: FakeDaemon, node: Node
) -> None:
    session = client.create_session()
    node.daemon.journal = [log("so far\n"), result()]
    node.daemon.cuts.append(Cut(1))
    lose(daemon)
    ended = session.execute("work()", on_event=lambda _: node.end())
    assert (ended.outcome, ended.state) == (Outcome.LOST, VariablesState.LOST)
    assert (ended.logs, ended.generation) == ("so far\n", 1)
    assert ended.error is not None and (ended.error.type, ended.error.message) == ("SandboxLost", REASON)


@pytest.fixture
def client_options() -> dict[str, Any]:
    """Time enough to wait for what comes, and a connection to a node is given up soon."""
    return {"reconnect_timeout_s": 20.0, "connect_timeout_s": 1.0}


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.set_variables({"x": 1}),
        lambda session: session.get_variables(["x"]),
        lambda session: session.put_file("a", b""),
        lambda session: session.get_file("a"),
        lambda session: session.list_files(),
        lambda session: session.keep_alive(),
        lambda session: session.register_tools({}),
        lambda session: session.export_state(),
        lambda session: session.authorize_imports(["os"]),
    ],
)
def test_calls_of_a_session_that_is_lost_with_its_node_raise_what_they_raise_of_a_lost_sandbox(
    client: Any, daemon: FakeDaemon, node: Node, call: Callable[[Any], object]
) -> None:
    session = client.create_session()
    node.end()
    lose(daemon)
    with pytest.raises(PreconditionError, match=f"the session's sandbox is gone: {REASON}") as lost:
        call(session)
    assert lost.value.reason == "SESSION_LOST"


def test_what_is_lost_stays_lost_and_is_asked_for_once(client: Any, daemon: FakeDaemon, node: Node) -> None:
    daemon.leased = True
    session = client.create_session()
    node.end()
    lose(daemon)
    assert session.execute("1").outcome is Outcome.LOST
    daemon.session.state, daemon.session.address = types.SESSION_STATE_IDLE, node.daemon.address
    daemon.requests.clear()
    for _ in range(2):
        with pytest.raises(PreconditionError, match="gone"):
            session.execute("1")
    assert daemon.names() == []
    session.close()
    session.close()
    assert daemon.names() == ["DeleteSession"]


def test_a_session_that_is_described_as_lost_with_its_node_is_lost(client: Any, daemon: FakeDaemon, node: Node) -> None:
    session = client.create_session()
    lose(daemon)
    assert session.refresh().state is SessionState.LOST
    with pytest.raises(PreconditionError, match=REASON):
        session.execute("1")
    assert node.daemon.names() == []


@pytest.mark.parametrize("code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION])
def test_a_node_that_has_ended_its_sandboxes_is_not_the_one_to_say_why(
    client: Any, daemon: FakeDaemon, node: Node, code: grpc.StatusCode
) -> None:
    session = client.create_session()
    node.daemon.journal = [log("so far\n"), result()]
    node.daemon.cuts.append(Cut(1))
    reason = "SESSION_NOT_FOUND" if code is grpc.StatusCode.NOT_FOUND else "SESSION_LOST"
    node.daemon.refusals["AttachExecution"].append(Refusal(code, reason))
    node.daemon.barriers["AttachExecution"] = threading.Event()

    def lose_and_go_on(_: object) -> None:
        lose(daemon)
        node.daemon.barriers["AttachExecution"].set()

    ended = session.execute("work()", on_event=lose_and_go_on)
    assert (ended.outcome, ended.logs, ended.error.message) == (Outcome.LOST, "so far\n", REASON)


def test_an_execution_that_a_node_does_not_begin_is_refused(client: Any, daemon: FakeDaemon, node: Node) -> None:
    session = client.create_session()
    for method in ("Execute", "KeepAlive"):
        node.daemon.refusals[method].append(Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND"))
    lose(daemon)
    with pytest.raises(PreconditionError, match=REASON):
        session.execute("1")


def test_a_session_that_has_ended_on_its_node_is_not_found(client: Any, daemon: FakeDaemon, node: Node) -> None:
    session = client.create_session()
    for method in ("Execute", "KeepAlive"):
        node.daemon.refusals[method].append(Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND"))
    daemon.refusals["GetSession"].extend([Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")] * 2)
    for call in (session.keep_alive, lambda: session.execute("1")):
        with pytest.raises(NotFoundError):
            call()


def test_the_sandbox_that_a_node_has_lost_is_the_nodes_to_describe(client: Any, daemon: FakeDaemon, node: Node) -> None:
    session = client.create_session()
    daemon.session.state, daemon.session.lost_reason = types.SESSION_STATE_LOST, "killed"
    assert session.refresh().state is SessionState.LOST
    assert session.execute("1").succeeded, "the journal is read at the node"


def test_a_node_that_is_away_is_waited_for_while_the_front_says_nothing_else(
    client: Any, daemon: FakeDaemon, node: Node
) -> None:
    session = client.create_session()
    session.keep_alive()
    node.end()
    come_back = threading.Timer(0.7, lambda: _serve_again(node))
    come_back.start()
    try:
        assert session.execute("1").succeeded
    finally:
        come_back.join()
    assert "GetSession" in daemon.names()


def _serve_again(node: Node) -> None:
    node.daemon = node._serving.enter_context(serve(node.directory))


def test_a_front_that_is_away_too_is_waited_for_like_the_node(client: Any, daemon: FakeDaemon, node: Node) -> None:
    session = client.create_session()
    session.keep_alive()
    daemon.refusals["GetSession"].extend([Refusal(grpc.StatusCode.UNAVAILABLE)] * 2)
    daemon.refusals["GetSession"].append(Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND"))
    node.end()
    lose(daemon)
    assert session.execute("1").outcome is Outcome.LOST
    assert daemon.names().count("GetSession") == 4


def test_a_node_without_a_lease_is_waited_for(client: Any, daemon: FakeDaemon, node: Node) -> None:
    session = client.create_session()
    for method in ("Execute", "KeepAlive"):
        node.daemon.refusals[method].extend([FENCED] * 3)
    assert session.execute("1").succeeded
    session.keep_alive()
    assert node.daemon.names() == ["Execute"] * 4 + ["KeepAlive"] * 4
    assert "GetSession" in daemon.names()


def test_a_stream_that_a_node_cuts_without_a_lease_goes_on(client: Any, daemon: FakeDaemon, node: Node) -> None:
    session = client.create_session()
    node.daemon.journal = [log("a"), log("b"), result(3)]
    node.daemon.cuts.append(Cut(1))
    node.daemon.refusals["AttachExecution"].append(FENCED)
    ended = session.execute("1")
    assert (ended.output, ended.logs) == (3, "ab")
    assert node.daemon.names() == ["Execute", "AttachExecution", "AttachExecution"]


def test_a_node_that_only_the_front_reaches_is_named_with_the_remedy(
    client: Any, daemon: FakeDaemon, node: Node
) -> None:
    session = client.create_session()
    node.end()
    with pytest.raises(UnavailableError, match=r"no daemon answers at unix:.*no daemon is running there.*fleet\.proxy"):
        session.set_variables({"x": 1})
    with pytest.raises(UnavailableError, match=r"fleet\.proxy"):
        session.execute("1")


# ---------------------------------------------------------------------------------------------------------------------
# Another address


def test_a_session_is_followed_to_another_address_of_its_node(client: Any, daemon: FakeDaemon, node: Node) -> None:
    daemon.leased = True
    session = client.create_session()
    session.keep_alive()
    other = Node()
    try:
        node.end()
        daemon.session.address = other.daemon.address
        assert session.execute("1").succeeded
        session.keep_alive()
        assert [name for name in other.daemon.names() if name != "RenewLease"] == ["Execute", "KeepAlive"]
        assert eventually(lambda: "RenewLease" in other.daemon.names())
        client.close()
        assert other.daemon.names()[-1] == "EndLease"
    finally:
        other.close()


def test_a_daemon_that_passes_no_calls_on_says_where_the_session_is(
    client: Any, daemon: FakeDaemon, node: Node
) -> None:
    daemon.session.address = ""
    session = client.create_session()
    daemon.refusals["KeepAlive"].append(elsewhere(node.daemon.address))
    session.keep_alive()
    assert session.execute("1").succeeded
    assert daemon.names() == ["CreateSession", "KeepAlive"]
    assert node.daemon.names() == ["KeepAlive", "Execute"]


def test_an_execution_is_followed_to_another_address(client: Any, daemon: FakeDaemon, node: Node) -> None:
    daemon.session.address = ""
    session = client.create_session()
    daemon.refusals["Execute"].append(elsewhere(node.daemon.address))
    assert session.execute("1").succeeded
    (_, execute), (_, again) = daemon.requests[1], node.daemon.requests[0]
    assert execute.execution_id == again.execution_id


def test_a_session_that_is_always_elsewhere_is_not_followed_for_ever(
    client: Any, daemon: FakeDaemon, node: Node
) -> None:
    session = client.create_session()
    for method in ("Execute", "KeepAlive"):
        node.daemon.refusals[method].extend([elsewhere(node.daemon.address)] * 20)
    for call in (session.keep_alive, lambda: session.execute("1")):
        with pytest.raises(PreconditionError) as refused:
            call()
        assert refused.value.reason == "NODE_ELSEWHERE"
    assert node.daemon.names() == ["KeepAlive"] * 2 + ["Execute"] * 2


def test_another_address_is_followed_by_the_same_rule(client: Any, daemon: FakeDaemon, node: Node) -> None:
    session = client.create_session()
    for method in ("Execute", "KeepAlive"):
        node.daemon.refusals[method].append(elsewhere("10.0.0.1:50051"))
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1:50051"):
        session.keep_alive()
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1:50051"):
        session.execute("1")
