"""Both clients report waits that last to `on_wait`, which changes nothing."""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2 as types
from executor_client import (
    EnvironmentFailed,
    ExecutorClient,
    PreconditionError,
    Progress,
    UnavailableError,
    Wait,
    WaitKind,
)
from tests.support.fake_daemon import (
    SESSION,
    TOKEN,
    Answered,
    Cancelled,
    Cut,
    FakeDaemon,
    Refusal,
    building,
    busy,
    log,
    result,
    start,
    tool_call,
)
from tests.support.polling import eventually

AWAY = Refusal(grpc.StatusCode.UNAVAILABLE)
DRAINING = Refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING", "it shuts down")
QUEUED = types.Event(queued=types.QueuedEvent(ahead=2))


class Watcher:
    """The hook. Remembers the reports, and does something about the first wait of a kind.

    On a slow machine other waits of the same call may last long enough to be reported, too.
    """

    def __init__(self) -> None:
        self.reported: list[Wait] = []
        self._kind: WaitKind | None = None
        self._react: Callable[[], object] = lambda: None

    def expect(self, kind: WaitKind, react: Callable[[], object]) -> None:
        self._kind, self._react = kind, react

    def __call__(self, wait: Wait) -> None:
        self.reported.append(wait)
        if wait.kind is self._kind:
            self._react()

    def first(self) -> Wait:
        """The first wait of the kind that was expected."""
        return next(wait for wait in self.reported if wait.kind is self._kind)


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def client_options(watcher: Watcher) -> dict[str, Any]:
    return {"on_wait": watcher, "connect_timeout_s": 20.0, "reconnect_timeout_s": 20.0}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait is reported after an instant."""
    monkeypatch.setattr("executor_client._core.waiting.WAIT_REPORTED_AFTER_S", 0.02)


def refuse_until_reported(daemon: FakeDaemon, watcher: Watcher, call: str, refusal: Refusal, kind: WaitKind) -> None:
    daemon.refusals[call].extend([refusal] * 500)
    watcher.expect(kind, daemon.refusals[call].clear)


def test_what_ends_quickly_is_not_told(client: Any, daemon: FakeDaemon, watcher: Watcher) -> None:
    daemon.journal = [QUEUED, tool_call("tool"), Answered(), result()]
    daemon.refusals["CreateSession"].extend([AWAY, busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS")])
    session = client.create_session()
    session.register_tools({"tool": lambda: None})
    session.execute("code")
    session.close()
    assert watcher.reported == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("refusal", "kind", "what", "reason", "gives_up_after_s"),
    [
        (AWAY, WaitKind.DAEMON, "the daemon at ADDRESS", "not reachable", 20.0),
        (DRAINING, WaitKind.DAEMON, "the daemon at ADDRESS", "it shuts down", 20.0),
        (
            busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS"),
            WaitKind.ROOM,
            "capacity of the daemon at ADDRESS",
            "refused",
            30.0,
        ),
        (busy(grpc.StatusCode.UNAVAILABLE, "IMAGE_NOT_READY"), WaitKind.IMAGE, "the image", "refused", 600.0),
        (
            building("installing", 17, 23),
            WaitKind.IMAGE,
            "the environment",
            "installing, 17 of 23 packages",
            600.0,
        ),
    ],
    ids=["away", "draining", "full", "image", "environment"],
)
def test_wait_before_a_call_is_made_again_is_told(
    client: Any,
    daemon: FakeDaemon,
    watcher: Watcher,
    refusal: Refusal,
    kind: WaitKind,
    what: str,
    reason: str,
    gives_up_after_s: float,
) -> None:
    refuse_until_reported(daemon, watcher, "CreateSession", refusal, kind)
    client.create_session()
    wait = watcher.first()
    assert (wait.kind, wait.reason, wait.gives_up_after_s) == (kind, reason, gives_up_after_s)
    assert wait.what == what.replace("ADDRESS", daemon.address) and 0.02 <= wait.waited_s < 20


@pytest.mark.usefixtures("impatient")
def test_progress_of_an_environment_is_told(client: Any, daemon: FakeDaemon, watcher: Watcher) -> None:
    refuse_until_reported(daemon, watcher, "CreateSession", building("installing", 17, 23), WaitKind.IMAGE)
    client.create_session(packages=["polars"])
    assert watcher.first().progress == Progress("installing", 17, 23, "packages")
    asked = [request for name, request in daemon.requests if name == "CreateSession"]
    assert list(asked[-1].packages) == ["polars"] and len({request.request_id for request in asked}) == 1


def test_environment_that_cannot_be_made_is_an_error_of_its_own(client: Any, daemon: FakeDaemon) -> None:
    words = "because a and b contradict each other, no version of a can be used"
    daemon.refusals["CreateSession"].append(Refusal(grpc.StatusCode.FAILED_PRECONDITION, "ENVIRONMENT_FAILED", words))
    with pytest.raises(EnvironmentFailed, match=words) as caught:
        client.create_session(packages=["a", "b"])
    assert caught.value.reason == "ENVIRONMENT_FAILED" and isinstance(caught.value, PreconditionError)


@pytest.mark.usefixtures("impatient")
def test_daemon_that_is_not_there_yet_is_told_of() -> None:
    daemon, watcher = FakeDaemon(), Watcher()
    with tempfile.TemporaryDirectory(prefix="fake") as directory, ThreadPoolExecutor(2) as threads:
        daemon.address = f"unix:{Path(directory) / 'd.sock'}"
        servers: list[grpc.Server] = []

        def serve_now() -> None:
            # A connection that takes its time is reported before, as a daemon that does not answer.
            if not servers and "not reachable" in str(watcher.reported[-1]):
                servers.append(start(daemon, threads))

        watcher.expect(WaitKind.DAEMON, serve_now)
        with ExecutorClient(daemon.address, token=TOKEN, connect_timeout_s=20, on_wait=watcher) as client:
            assert client.get_policy().backend == "local"
        servers[0].stop(grace=0).wait()
    expected = f"waiting for the daemon at {daemon.address}: not reachable (0 s, timeout 20 s)"
    assert expected in map(str, watcher.reported)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("call", "method", "arguments", "kind", "what"),
    [
        ("CreateSession", "create_session", ["data"], WaitKind.SANDBOX, "a sandbox of image 'data'"),
        ("CreateSession", "create_session", [], WaitKind.SANDBOX, "a sandbox"),
        ("ListSessions", "list_sessions", [], WaitKind.DAEMON, "an answer from the daemon at ADDRESS"),
        ("RegisterTools", "register_tools", [{}], WaitKind.SESSION, f"session {SESSION} to register tools"),
        ("SetVariables", "set_variables", [{"x": 1}], WaitKind.SESSION, f"session {SESSION} to set variables"),
        ("GetVariables", "get_variables", [], WaitKind.SESSION, f"session {SESSION} to read variables"),
        ("DeleteSession", "close", [], WaitKind.SESSION, f"session {SESSION} to end"),
    ],
)
def test_wait_for_an_answer_is_told_while_it_lasts(
    client: Any, daemon: FakeDaemon, watcher: Watcher, call: str, method: str, arguments: Any, kind: WaitKind, what: str
) -> None:
    whose = client if hasattr(client, method) and method != "close" else client.create_session()
    daemon.variables = [pb.GetVariablesResponse(variables=pb.Variables())]
    daemon.barriers[call] = threading.Event()
    watcher.expect(kind, daemon.barriers[call].set)
    getattr(whose, method)(*arguments)
    wait = watcher.first()
    assert (wait.kind, wait.what) == (kind, what.replace("ADDRESS", daemon.address))
    assert wait.gives_up_after_s == 120.0 and wait.reason == ""


# ---------------------------------------------------------------------------------------------------------------------
# In an execution


@pytest.mark.usefixtures("impatient")
def test_wait_behind_other_executions_is_told_until_the_program_shows(
    client: Any, daemon: FakeDaemon, watcher: Watcher
) -> None:
    session = client.create_session()
    daemon.journal = [QUEUED, Cancelled(), log("x"), result()]
    watcher.expect(WaitKind.TURN, daemon.cancelled.set)
    session.execute("code")
    wait = watcher.first()
    assert (wait.kind, wait.gives_up_after_s) == (WaitKind.TURN, None)
    assert wait.what == "an execution queued behind 2 others of its session"


@pytest.mark.usefixtures("impatient")
def test_wait_for_a_host_tool_is_told_while_it_runs(client: Any, daemon: FakeDaemon, watcher: Watcher) -> None:
    reported = threading.Event()
    watcher.expect(WaitKind.TOOL, reported.set)
    session = client.create_session()
    session.register_tools({"slow": lambda: reported.wait(20)})
    daemon.journal = [tool_call("slow"), Answered(), result()]
    session.execute("code")
    assert str(watcher.first()) == "waiting for the tool 'slow' (0 s)"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, None])
def test_daemon_that_went_away_in_an_execution_is_waited_for_aloud(
    client: Any, daemon: FakeDaemon, watcher: Watcher, code: Any
) -> None:
    session = client.create_session()
    daemon.journal = [log("one"), result(1)]
    daemon.cuts = deque([Cut(1, code), *[Cut(0, code)] * 500])
    watcher.expect(WaitKind.DAEMON, daemon.cuts.clear)
    assert session.execute("code").output == 1
    wait = watcher.first()
    assert (wait.kind, wait.reason, wait.gives_up_after_s) == (WaitKind.DAEMON, "not reachable", 20.0)


@pytest.mark.usefixtures("impatient")
def test_full_session_is_waited_for_aloud(client: Any, daemon: FakeDaemon, watcher: Watcher) -> None:
    session = client.create_session()
    full = busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    refuse_until_reported(daemon, watcher, "Execute", full, WaitKind.ROOM)
    session.execute("code")
    assert watcher.first().reason == "refused"


# ---------------------------------------------------------------------------------------------------------------------
# The hook


@pytest.mark.usefixtures("impatient")
def test_hook_that_raises_breaks_no_call(
    client: Any, daemon: FakeDaemon, watcher: Watcher, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.barriers["CreateSession"] = threading.Event()

    def fail() -> None:
        daemon.barriers["CreateSession"].set()
        raise ZeroDivisionError("hook")

    watcher.expect(WaitKind.SANDBOX, fail)
    assert client.create_session().session_id == SESSION
    assert "on_wait failed" in caplog.text and "ZeroDivisionError: hook" in caplog.text


@pytest.mark.usefixtures("impatient")
def test_hook_may_use_the_client(daemon: FakeDaemon) -> None:
    watcher = Watcher()
    daemon.barriers["CreateSession"] = threading.Event()
    with ExecutorClient(daemon.address, token=TOKEN, on_wait=watcher) as client:

        def look() -> None:
            client.list_sessions()
            daemon.barriers["CreateSession"].set()

        watcher.expect(WaitKind.SANDBOX, look)
        client.create_session()
    assert daemon.names().count("ListSessions") >= 1


def test_nothing_is_left_of_a_client_that_told_of_waits(daemon: FakeDaemon, watcher: Watcher) -> None:
    with ExecutorClient(daemon.address, token=TOKEN, on_wait=watcher) as client:
        client.list_sessions()
        assert _threads()
    assert eventually(lambda: not _threads())


@pytest.mark.usefixtures("impatient")
def test_thread_ends_when_nothing_is_waited_for(daemon: FakeDaemon, watcher: Watcher) -> None:
    with ExecutorClient(daemon.address, token=TOKEN, on_wait=watcher) as client:
        client.list_sessions()
        assert eventually(lambda: not _threads())
        client.list_sessions()


@pytest.mark.usefixtures("impatient")
def test_image_is_not_waited_for_where_the_caller_does_not_want_it(daemon: FakeDaemon, watcher: Watcher) -> None:
    daemon.refusals["CreateSession"].append(busy(grpc.StatusCode.UNAVAILABLE, "IMAGE_NOT_READY"))
    with (
        ExecutorClient(daemon.address, token=TOKEN, image_timeout_s=0, on_wait=watcher) as client,
        pytest.raises(UnavailableError, match="refused"),
    ):
        client.create_session()
    assert WaitKind.IMAGE not in [wait.kind for wait in watcher.reported]


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "executor-waits"]
