"""All that a client can ask, asked of a daemon with its default configuration; both clients say the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor_client import (
    AuthenticationError,
    ExecutorClient,
    ExecutorClientError,
    FileError,
    InvalidRequest,
    LimitWarningEvent,
    LogEvent,
    NotFoundError,
    Outcome,
    PolicyViolationError,
    ResourceExhaustedError,
    ToolCallEvent,
    VariablesState,
)
from tests.support import rounds
from tests.support.blocking import WAIT_S, client_of
from tests.support.daemon import Daemon


@pytest.fixture(params=["sync", "async"] if rounds.ALL else ["sync"])  # tests/rpc/client has the other
def client(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Any]:
    with client_of(request.param, daemon) as client:
        yield client


def test_the_designs_example_works_as_it_stands(client: Any) -> None:
    data = b"a,b\n1,2\n"
    with client.create_session(image="base", authorized_imports=["numpy"], limits={"wall_time_s": 30}) as session:
        session.set_variables({"x": 1})
        session.register_tools({"search": lambda query: f"found {query}"})
        result = session.execute("x + 1", on_event=None)
        assert (result.outcome, result.output, result.logs, result.images) == (Outcome.SUCCEEDED, 2, "", [])
        assert (result.error, result.is_final_answer) == (None, False)
        assert result.usage.operations >= 0 and result.usage.wall_time_s > 0
        assert (result.state, result.generation) == (VariablesState.KEPT, 1)
        assert session.execute("search('it')").output == "found it"
        assert session.get_variables(["x"]) == {"x": 1}
        session.put_file("a.csv", data)
        assert session.get_file("a.csv") == data
        assert [(file.path, file.size_bytes) for file in session.list_files()] == [("a.csv", len(data))]
    with pytest.raises(NotFoundError) as gone:
        session.execute("1")
    assert gone.value.reason == "SESSION_CLOSED"


def test_files_and_directories_go_back_and_forth_and_artifacts_are_told(client: Any, tmp_path: Path) -> None:
    data = os.urandom(20_000_000)
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/deep/data").write_bytes(data)
    (tmp_path / "in/empty").touch()
    with client.create_session(authorized_imports=["os"], limits={"disk_bytes": 100_000_000}) as session:
        assert session.files.put_directory(tmp_path / "in", "given").path == "given"
        assert session.files.put(tmp_path / "in/deep/data", "alone").size_bytes == len(data)
        code = "import os\nos.makedirs('out')\nos.symlink('/etc', 'out/link')\nos.rename('alone', 'out/moved')\n"
        code += "open('out/made', 'w').write('by the program')"
        result = session.execute(code)
        assert [(each.path, each.size_bytes) for each in result.artifacts] == [
            ("out/made", 14),
            ("out/moved", len(data)),
        ]
        assert session.execute("1").artifacts == ()
        session.files.get("given/deep/data", tmp_path / "got")
        session.files.get_directory("out", tmp_path / "out")
        session.files.get_directory("", tmp_path / "all")
    assert (tmp_path / "got").read_bytes() == data
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["made", "moved"]
    assert (tmp_path / "all/given/deep/data").read_bytes() == (tmp_path / "all/out/moved").read_bytes() == data
    assert (tmp_path / "all/given/empty").read_bytes() == b""


def test_files_anywhere_in_the_sandbox_are_written_described_moved_archived_and_removed(client: Any) -> None:
    with client.create_session() as session:
        files = session.files
        assert files.write("/tmp/a/log", b"12", mode=0o640).path == "/tmp/a/log"
        described = files.write("/tmp/a/log", b"345", append=True)
        assert (described.size_bytes, described.mode, described.is_link) == (5, 0o640, False)
        assert files.read("/tmp/a/log", offset=1, max_bytes=3) == b"234"
        assert files.read("/tmp/a/log", offset=9) == b""
        session.processes.run("ln -s /tmp/a/log link").check()
        link = files.stat("link", follow=False)
        assert (link.is_link, link.target, files.stat("link").size_bytes) == (True, "/tmp/a/log", 5)
        files.write("link", b"through")
        assert (files.read("/tmp/a/log"), files.realpath("x/../link")) == (b"through", "/tmp/a/log")
        files.mkdir("/tmp/a/.git/deep")
        assert [each.path for each in files.list("/tmp/a", recursive=False)] == ["/tmp/a/.git", "/tmp/a/log"]
        assert files.unpack(files.archive("/tmp/a", exclude=[".git"]), "copy").is_directory
        assert files.move("copy/log", "moved").path == "moved"
        files.remove("/tmp/a", recursive=True)
        files.remove("/tmp/a", missing_ok=True)
        assert [files.exists(path) for path in ("/tmp/a", "link", "moved", "moved/x", "copy")] == [
            *(False, False, True, False, True)
        ]


def test_events_come_in_order_and_while_the_program_runs(client: Any) -> None:
    events: list[Any] = []
    seen: list[int] = []
    code = "print('before', flush=True)\nlook()\nprint('after', file=sys.stderr)"
    with client.create_session(authorized_imports=["sys"]) as session:
        session.register_tools({"look": lambda: seen.append(len(events))})
        result = session.execute(f"import sys\n{code}", on_event=events.append)
    assert (result.logs, result.stdout, result.stderr) == ("before\nafter\n", "before\n", "after\n")
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    kinds = [event.text if isinstance(event, LogEvent) else type(event) for event in events]
    assert kinds == ["before\n", ToolCallEvent, "after\n"]
    assert seen[0] >= 1, "the first line was there when the tool was called"


def test_large_values_travel_both_ways_and_through_tools(client: Any) -> None:
    array = np.arange(1_500_000, dtype=np.float64)
    with client.create_session(authorized_imports=["numpy.*"]) as session:
        session.set_variables({"array": array, "text": "é" * 1_000_000})
        session.register_tools({"twice": lambda values: values * 2})
        session.execute("doubled = twice(array)").raise_for_outcome()
        doubled, last = session.evaluate("(doubled, text[-1])")
        np.testing.assert_array_equal(doubled, array * 2)
        assert last == "é"
        np.testing.assert_array_equal(session.get_variables(["doubled"])["doubled"], array * 2)


def test_limits_of_one_execution_hold_for_it_alone(client: Any) -> None:
    with client.create_session() as session:
        spent = session.execute("for i in range(10**6): pass", limits={"operations": 1000})
        assert (spent.outcome, spent.state) == (Outcome.OPERATION_LIMIT, VariablesState.KEPT)
        assert session.execute("import time\ntime.sleep(1e6)", limits={"wall_time_s": 0.2}).outcome is Outcome.TIMEOUT
        assert session.execute("for i in range(10**4): pass\ni").output == 9999
        with pytest.raises(PolicyViolationError) as refused:
            session.execute("1", limits={"wall_time_s": session.limits.wall_time_s + 1})
        assert [(each.field, each.kind) for each in refused.value.violations] == [
            ("limits.wall_time_s", "ABOVE_CEILING")
        ]
        assert session.execute("1").output == 1


def test_a_session_is_described_found_again_and_kept_alive(client: Any) -> None:
    labels = {"job": "nightly"}
    with client.create_session(limits={"idle_time_s": 100, "memory_bytes": 2**28}, labels=labels) as session:
        session.execute("x = 7")
        (info,) = [each for each in client.list_sessions() if each.session_id == session.session_id]
        assert (info.labels, info.limits.memory_bytes, info.state.value) == (labels, 2**28, "idle")
        assert client.get_session(session.session_id).execute("x").output == 7
        before = session.refresh().expire_time
        assert session.keep_alive().expire_time >= before


def test_the_policy_says_what_can_be_asked_for(client: Any) -> None:
    policy = client.get_policy()
    assert policy.images == ("base",) and policy.backend == "local" and policy.tool_placements == ("host", "sandbox")
    with pytest.raises(PolicyViolationError) as refusal:
        client.create_session(
            limits={
                "wall_time_s": policy.max_limits.wall_time_s * 2,
                "memory_bytes": policy.max_limits.memory_bytes * 2,
            }
        )
    assert len(refusal.value.violations) == 2, "every violation is listed"
    assert refusal.value.reason == "POLICY_VIOLATION"
    with pytest.raises(PolicyViolationError) as refusal:
        client.create_session(backend="docker", network=["example.com"], packages=["pandas"])
    assert [each.field for each in refusal.value.violations] == ["backend", "network", "packages"]


def test_the_policy_is_named_by_sessions_and_results(client: Any) -> None:
    policy = client.get_policy().policy
    assert policy.fingerprint and policy.profile == "default"
    with client.create_session() as session:
        assert session.policy == policy
        assert session.execute("1").policy_fingerprint == policy.fingerprint


def test_the_near_end_of_the_operations_is_told(client: Any) -> None:
    events: list[Any] = []
    with client.create_session(limits={"operations": 1000}) as session:
        session.execute("for i in range(900): pass", on_event=events.append)
    (warning,) = [each for each in events if isinstance(each, LimitWarningEvent)]
    assert (warning.limit, warning.budget) == ("operations", 1000)
    assert 800 <= warning.used <= 1000


@pytest.mark.parametrize(
    ("ask", "error", "reason"),
    [
        (lambda c, s: c.create_session(image="nonsense"), InvalidRequest, "UNKNOWN_IMAGE"),
        (lambda c, s: c.create_session(limits={"wall_time_s": -1}), InvalidRequest, "INVALID_FIELD"),
        (lambda c, s: c.create_session(limits={"wall_time_s": float("nan")}), InvalidRequest, "INVALID_FIELD"),
        (lambda c, s: c.create_session(authorized_imports=["os path"]), InvalidRequest, "INVALID_FIELD"),
        (lambda c, s: c.create_session(prelude="1 / 0"), InvalidRequest, "INVALID_FIELD"),
        (lambda c, s: c.get_session("nonsense"), NotFoundError, "SESSION_NOT_FOUND"),
        (lambda c, s: s.execute("x\0"), InvalidRequest, "INVALID_FIELD"),
        (lambda c, s: s.execute("1", execution_id="a b"), InvalidRequest, "INVALID_FIELD"),
        (lambda c, s: s.execute("2", execution_id="used"), InvalidRequest, "EXECUTION_ID_REUSED"),
        (lambda c, s: s.cancel("nonsense"), NotFoundError, "EXECUTION_NOT_FOUND"),
        (lambda c, s: s.set_variables({"class": 1}), InvalidRequest, "INVALID_FIELD"),
        (lambda c, s: s.register_tools({"a-b": print}), InvalidRequest, "INVALID_FIELD"),
        (lambda c, s: s.put_file("../up", b""), PermissionError, "FILE_PERMISSION_DENIED"),
        (lambda c, s: s.get_file("/proc/self/mem"), FileError, "PATH_REFUSED"),
        (lambda c, s: s.get_file("missing"), FileNotFoundError, "FILE_NOT_FOUND"),
        (lambda c, s: s.files.read("."), IsADirectoryError, "FILE_IS_DIRECTORY"),
        (lambda c, s: s.files.list("/etc/hostname/x"), NotADirectoryError, "FILE_NOT_DIRECTORY"),
        (lambda c, s: s.files.mkdir("/tmp", exist_ok=False), FileExistsError, "FILE_EXISTS"),
        (lambda c, s: s.put_file("f", bytes(3_000_000)), ResourceExhaustedError, "TOO_LARGE"),
        (lambda c, s: s.files.get_directory("missing", "/nowhere"), NotFoundError, "FILE_NOT_FOUND"),
        (
            lambda c, s: s.files.put_directory(Path(__file__).parents[1] / "support/typed_user", "/proc"),
            FileError,
            "PATH_REFUSED",
        ),
    ],
)
def test_each_refusal_is_its_error_and_the_session_goes_on(
    client: Any, ask: Any, error: type[ExecutorClientError], reason: str
) -> None:
    with client.create_session(limits={"disk_bytes": 2_000_000}) as session:
        session.execute("1", execution_id="used")
        with pytest.raises(error) as refusal:
            ask(client, session)
        # Empty where the client itself refuses, before anything is sent.
        assert refusal.value.reason in (reason, "")
        assert session.execute("6 * 7").output == 42


def test_an_upload_that_is_refused_while_it_is_sent_always_says_why(client: Any) -> None:
    """grpc.aio loses the daemon's answer now and then, and says INTERNAL of its own."""
    with client.create_session(limits={"disk_bytes": 2_000_000}) as session:
        for _ in range(30):
            with pytest.raises(ResourceExhaustedError, match="over the limit"):
                session.put_file("f", bytes(3_000_000))


def test_a_wrong_token_is_refused(daemon: Daemon) -> None:
    with ExecutorClient(daemon.address, token="x" * 43) as client, pytest.raises(AuthenticationError):
        client.list_sessions()


def test_threads_that_share_a_session_take_turns(client: Any) -> None:
    with client.create_session() as session, ThreadPoolExecutor(4) as threads:
        session.execute("order = []")
        code = "order.append(1)\norder.append(2)\nlen(order)"
        lengths = list(threads.map(lambda _: session.execute(code).output, range(8)))
        assert sorted(lengths) == list(range(2, 17, 2))
        assert session.execute("order").output == [1, 2] * 8


def test_a_running_execution_is_cancelled_from_elsewhere(client: Any) -> None:
    printed = threading.Event()
    with client.create_session() as session, ThreadPoolExecutor(1) as threads:
        session.execute("x = 1")
        on_event = lambda event: printed.set() if isinstance(event, LogEvent) else None  # noqa: E731
        running = threads.submit(
            session.execute, "import time\nprint(1, flush=True)\ntime.sleep(1e6)", on_event=on_event
        )
        assert printed.wait(WAIT_S)
        session.cancel()
        assert running.result().outcome is Outcome.CANCELLED
        assert session.execute("x").output == 1
