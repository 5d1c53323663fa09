"""A tenant with a valid token and every message at hand, against the daemon and its other sessions."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import psutil
import pytest

from executor_api import values
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc as services
from executor_api.v1 import types_pb2 as types
from tests.security.conftest import FEW_SESSIONS
from tests.support.daemon import Daemon
from tests.support.polling import eventually

MIB = 1024 * 1024
TIMEOUT_S = 60.0


class Wire:
    """The service without the client library's care."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        self._stub: Any = services.ExecutorServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {token}"),)

    def __call__(self, method: str, request: Any) -> Any:
        return getattr(self._stub, method)(request, metadata=self._metadata, timeout=TIMEOUT_S)

    def session(self, **limits: Any) -> str:
        """A new session's id. Waits for the room that a session which is being deleted leaves."""
        request = pb.CreateSessionRequest(
            request_id=uuid.uuid4().hex, authorized_imports=["*"], limits=types.Limits(**limits)
        )
        return str(self("CreateSession", request).session.session_id)

    def execute(self, session_id: str, code: str, **more: Any) -> list[types.Event]:
        return [response.event for response in self.begin(session_id, code, **more)]

    def begin(self, session_id: str, code: str, **more: Any) -> Any:
        request = {"session_id": session_id, "execution_id": uuid.uuid4().hex, "code": code, **more}
        return self("Execute", pb.ExecuteRequest(**request))


@pytest.fixture
def wire(daemon: Daemon) -> Iterator[Wire]:
    with grpc.insecure_channel(daemon.address) as channel:
        ready = Wire(channel, daemon.token)
        yield ready
        for session in ready("ListSessions", pb.ListSessionsRequest()).sessions:
            ready("DeleteSession", pb.DeleteSessionRequest(session_id=session.session_id))


def refusal(call: Any) -> str:
    """The name of the status with which a call is refused."""
    with pytest.raises(grpc.RpcError) as refused:
        result = call()
        list(result) if hasattr(result, "__next__") else result
    return str(refused.value.code().name)


def value(of: object) -> types.Value:
    return types.Value(packed=types.Payload(inline=values.encode(of)))


def cancel(wire: Wire, session_id: str, execution_id: str) -> bool:
    """True when the execution was there: its call may still be on its way."""
    try:
        wire("CancelExecution", pb.CancelExecutionRequest(session_id=session_id, execution_id=execution_id))
    except grpc.RpcError as refused:
        assert refused.code() == grpc.StatusCode.NOT_FOUND
        return False
    return True


def attach(wire: Wire, session_id: str, execution_id: str) -> list[int]:
    """The outcome in each event of an execution; nothing when it is not there yet."""
    try:
        reader = wire("AttachExecution", pb.AttachExecutionRequest(session_id=session_id, execution_id=execution_id))
        return [response.event.result.outcome for response in reader]
    except grpc.RpcError as refused:
        assert refused.code() == grpc.StatusCode.NOT_FOUND
        return []


def answer(wire: Wire, session_id: str) -> Any:
    """The value of 40 + 2 in the session: it works."""
    return values.decode(wire.execute(session_id, "40 + 2")[-1].result.output.packed.inline)


def test_a_flood_of_sessions_ends_at_the_limit(wire: Wire, daemon: Daemon) -> None:
    # Where tests before this one have made other tenants, a tenant leaves as many sessions free for them as it has.
    are_others = (daemon.state_dir / "tokens.json").exists()
    with ThreadPoolExecutor(FEW_SESSIONS * 4) as threads:
        asked = [threads.submit(wire.session) for _ in range(FEW_SESSIONS * 4)]
        codes = [call.exception() for call in asked]
    refused = [error for error in codes if error is not None]
    assert len(codes) - len(refused) == (FEW_SESSIONS // 2 if are_others else FEW_SESSIONS)
    assert {error.code().name for error in refused} == {"RESOURCE_EXHAUSTED"}  # type: ignore[attr-defined]


def test_what_belongs_to_one_session_does_not_exist_in_another(wire: Wire) -> None:
    first, second = wire.session(), wire.session()
    events = wire.execute(first, "1", execution_id="mine")
    assert events[-1].HasField("result")
    blob = wire("UploadBlob", iter([header(first, 3), pb.UploadBlobRequest(data=b"abc")])).blob_id
    by_reference = types.Value(packed=types.Payload(blob=types.BlobRef(blob_id=blob, size_bytes=3)))
    foreign = {
        "AttachExecution": pb.AttachExecutionRequest(session_id=second, execution_id="mine"),
        "CancelExecution": pb.CancelExecutionRequest(session_id=second, execution_id="mine"),
        "SubmitToolResult": pb.SubmitToolResultRequest(
            session_id=second, execution_id="mine", call_id="c1", value=value(1)
        ),
        "SetVariables": pb.SetVariablesRequest(
            session_id=second, variables=[types.NamedValue(name="x", value=by_reference)]
        ),
    }
    assert {
        method: refusal(lambda m=method, r=request: wire(m, r)) for method, request in foreign.items()
    } == dict.fromkeys(foreign, "NOT_FOUND")


def header(session_id: str, size_bytes: int) -> pb.UploadBlobRequest:
    return pb.UploadBlobRequest(header=pb.UploadBlobHeader(session_id=session_id, size_bytes=size_bytes))


NAMES = [f"{'名' * 200}{number}" for number in range(1024)]
LARGE = {
    "names to get": ("GetVariables", lambda s: pb.GetVariablesRequest(session_id=s, names=NAMES), None),
    "names to set": (
        "SetVariables",
        lambda s: pb.SetVariablesRequest(
            session_id=s, variables=[types.NamedValue(name=name, value=value(1)) for name in NAMES]
        ),
        None,
    ),
    "inline values": (
        "SetVariables",
        lambda s: pb.SetVariablesRequest(
            session_id=s, variables=[types.NamedValue(name=f"x{n}", value=value(b"x" * 250_000)) for n in range(16)]
        ),
        None,
    ),
    "descriptions of tools": (
        "RegisterTools",
        lambda s: pb.RegisterToolsRequest(
            session_id=s, tools=[types.ToolSpec(name=f"t{n}", description="d" * 16_000) for n in range(250)]
        ),
        None,
    ),
    "descriptions that grow on the way": (
        "RegisterTools",
        lambda s: pb.RegisterToolsRequest(
            session_id=s, tools=[types.ToolSpec(name=f"t{n}", description="\x01" * 16_000) for n in range(250)]
        ),
        "RESOURCE_EXHAUSTED",
    ),
    "sources of tools": ("RegisterTools", lambda s: sources(s, 3, "#" * 1_000_000), None),
    "sources that grow on the way": ("RegisterTools", lambda s: sources(s, 3, "#" + "\x01" * 1_000_000), None),
    "modules of tools": (
        "RegisterTools",
        lambda s: sources(s, 20, "", modules=[f"{'ä' * 120}{n}" for n in range(256)]),
        "INVALID_ARGUMENT",
    ),
}  # fmt: skip


def sources(session_id: str, count: int, text: str, **more: Any) -> pb.RegisterToolsRequest:
    source = types.ToolSource(text=f"{text}\ntool = print", entry="tool")
    shipped = types.ShippedTool(source=source, **more)
    tools = [types.ToolSpec(name=f"t{number}", shipped=shipped) for number in range(count)]
    return pb.RegisterToolsRequest(session_id=session_id, tools=tools)


@pytest.mark.parametrize("what", LARGE)
def test_all_that_fits_into_a_message_has_an_answer(wire: Wire, what: str) -> None:
    """A request larger than a frame to the guest, or than its head, was an internal error."""
    session_id = wire.session()
    method, request, status = LARGE[what]
    if status is None:
        response = wire(method, request(session_id))
        list(response) if hasattr(response, "__next__") else response
    else:
        assert refusal(lambda: wire(method, request(session_id))) == status
    assert answer(wire, session_id) == 42


def test_many_long_import_patterns_make_a_session(wire: Wire) -> None:
    patterns = [f"{'é' * 190}{number}" for number in range(250)]
    request = pb.CreateSessionRequest(request_id=uuid.uuid4().hex, authorized_imports=patterns)
    session = wire("CreateSession", request).session
    assert set(patterns) <= set(session.authorized_imports)
    assert answer(wire, session.session_id) == 42


@pytest.mark.parametrize(
    "limits",
    [{"wall_time_s": 1e-6}, {"cpu_time_s": 1e-9}, {"output_bytes": 1}, {"wall_time_s": float("nan")}, {"wall_time_s": -1.0},
     {"operations": 0}, {"wall_time_s": float("inf")}, {"cpu_time_s": 1e300}, {"operations": 2**64 - 1}],
    ids=str,
)  # fmt: skip
def test_limits_that_nothing_could_run_under_are_refused(wire: Wire, limits: dict[str, Any]) -> None:
    """Some of them passed the policy and were then refused by the guest, for which an execution waited for ever."""
    session_id = wire.session()
    means_something = limits in ({"cpu_time_s": 1e300}, {"operations": 2**64 - 1})  # and is too much
    code = "PERMISSION_DENIED" if means_something else "INVALID_ARGUMENT"
    assert refusal(lambda: wire.begin(session_id, "1", limits=types.Limits(**limits))) == code
    assert refusal(lambda: wire.session(**limits)) == code
    assert answer(wire, session_id) == 42


@pytest.mark.parametrize("message", ["m" * 250_000, "\U0001f40d" * 20_000])
def test_a_tools_long_error_reaches_the_program(wire: Wire, message: str) -> None:
    session_id = wire.session(wall_time_s=20.0)
    wire("RegisterTools", pb.RegisterToolsRequest(session_id=session_id, tools=[types.ToolSpec(name="tool")]))
    events = wire.begin(
        session_id, "try:\n    tool()\nexcept ValueError as e:\n    print(len(str(e)))", execution_id="e"
    )
    logs = ""
    for event in (response.event for response in events):
        if event.HasField("tool_call"):
            error = pb.ToolError(type="ValueError", message=message)
            wire("SubmitToolResult", pb.SubmitToolResultRequest(
                session_id=session_id, execution_id="e", call_id=event.tool_call.call_id, error=error
            ))  # fmt: skip
        logs += event.log.text
    assert logs == f"{len(message)}\n"


def test_a_flood_of_requests_to_a_busy_session_is_refused_in_part_and_leaves_it_whole(wire: Wire) -> None:
    session_id = wire.session(wall_time_s=20.0)
    slow = wire.begin(session_id, "import time\ntime.sleep(1)")
    request = pb.SetVariablesRequest(session_id=session_id, variables=[types.NamedValue(name="x", value=value(1))])
    with ThreadPoolExecutor(100) as threads:
        outcomes = [threads.submit(wire, "SetVariables", request) for _ in range(100)]
        errors = {call.exception().code().name for call in outcomes if call.exception() is not None}  # type: ignore[union-attr]
    assert errors <= {"RESOURCE_EXHAUSTED"}
    assert [response.event for response in slow][-1].result.outcome == types.OUTCOME_SUCCEEDED
    assert answer(wire, session_id) == 42


def test_streams_that_nobody_reads_hold_the_program_and_not_the_daemons_memory(daemon: Daemon, wire: Wire) -> None:
    session_id = wire.session(output_bytes=16 * MIB, wall_time_s=60.0)
    wire.execute(session_id, "with open('big', 'wb') as file:\n    file.truncate(900 * 2**20)")
    process = psutil.Process(daemon.process.pid)
    before = process.memory_info().rss
    with ExitStack() as stack:
        for _ in range(4):
            stack.callback(wire("GetFile", pb.GetFileRequest(session_id=session_id, path="big")).cancel)
        talker = wire.session(output_bytes=16 * MIB, wall_time_s=60.0)
        stack.callback(wire.begin(talker, "while True:\n    print('x' * 1000)", execution_id="talk").cancel)
        # The program is at its end when what is kept of its output is full, read or not.
        assert eventually(lambda: attach(wire, talker, "talk"), timeout_s=60.0)[-1] == types.OUTCOME_OUTPUT_LIMIT
        assert process.memory_info().rss < before + 160 * MIB
    assert eventually(lambda: answer(wire, session_id) == 42)


def test_a_reader_that_stands_still_keeps_no_other_session_waiting(wire: Wire) -> None:
    stuck, other = wire.session(), wire.session()
    wire.execute(stuck, "open('big', 'wb').truncate(500 * 2**20)")
    held = wire("GetFile", pb.GetFileRequest(session_id=stuck, path="big"))
    assert next(held).file.size_bytes == 500 * MIB
    assert answer(wire, other) == 42
    held.cancel()
    assert answer(wire, stuck) == 42


PIECE_BYTES = 256 * 1024
# More than gRPC keeps for a handler that does not read: when so much is gone, the daemon has taken the header.
UNDER_WAY_BYTES = 8 * MIB


@pytest.mark.parametrize("method", ["UploadBlob", "PutFile"])
def test_a_session_can_be_deleted_under_an_upload_and_under_an_execution(wire: Wire, method: str) -> None:
    session_id = wire.session()
    running = wire.begin(session_id, "import time\ntime.sleep(1e6)")
    begun, gone = threading.Event(), threading.Event()

    def upload() -> Iterator[Any]:
        size_bytes = 2 * UNDER_WAY_BYTES
        if method == "UploadBlob":
            yield header(session_id, size_bytes)
            message: Any = pb.UploadBlobRequest
        else:
            yield pb.PutFileRequest(header=pb.PutFileHeader(session_id=session_id, path="f", size_bytes=size_bytes))
            message = pb.PutFileRequest
        for _ in range(UNDER_WAY_BYTES // PIECE_BYTES):
            yield message(data=bytes(PIECE_BYTES))
        begun.set()
        gone.wait(TIMEOUT_S)

    with ThreadPoolExecutor(1) as threads:
        uploading = threads.submit(wire, method, upload())
        assert begun.wait(TIMEOUT_S)
        wire("DeleteSession", pb.DeleteSessionRequest(session_id=session_id))
        assert [response.event for response in running][-1].result.outcome == types.OUTCOME_CANCELLED
        gone.set()
        assert uploading.exception() is not None
        assert uploading.exception().code().name in ("FAILED_PRECONDITION", "INVALID_ARGUMENT")  # type: ignore[union-attr]
    assert refusal(lambda: wire.begin(session_id, "1")) == "NOT_FOUND"


def test_only_one_of_many_answers_to_one_call_counts(wire: Wire) -> None:
    session_id = wire.session()
    wire("RegisterTools", pb.RegisterToolsRequest(session_id=session_id, tools=[types.ToolSpec(name="tool")]))
    stream = wire.begin(session_id, "tool()", execution_id="e")
    call = next(response.event.tool_call for response in stream if response.event.HasField("tool_call"))

    def submit(number: int) -> str:
        request = pb.SubmitToolResultRequest(
            session_id=session_id, execution_id="e", call_id=call.call_id, value=value(number)
        )
        try:
            wire("SubmitToolResult", request)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "taken"

    with ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(submit, range(8)))
    assert sorted(statuses) == ["FAILED_PRECONDITION"] * 7 + ["taken"]
    result = [response.event for response in stream][-1].result
    assert values.decode(result.output.packed.inline) == statuses.index("taken")


def test_a_cancellation_at_any_moment_leaves_a_session_that_works(wire: Wire) -> None:
    session_id = wire.session()
    for number in range(10):
        stream = wire.begin(session_id, "import time\ntime.sleep(1e6)", execution_id=f"e{number}")
        for _ in range(1 + number % 3):
            assert eventually(lambda: cancel(wire, session_id, f"e{number}"))  # noqa: B023 - called at once
        assert [response.event for response in stream][-1].result.outcome == types.OUTCOME_CANCELLED
    assert answer(wire, session_id) == 42


def test_the_largest_source_runs_and_a_byte_more_is_refused(wire: Wire) -> None:
    session_id = wire.session()
    code = "40 + 2  #" + "x" * (MIB - 9)
    assert values.decode(wire.execute(session_id, code)[-1].result.output.packed.inline) == 42
    assert refusal(lambda: wire.begin(session_id, code + "x")) == "INVALID_ARGUMENT"
