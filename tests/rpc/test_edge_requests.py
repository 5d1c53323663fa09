"""Requests of a wrong form are refused with the field that is wrong, and go no further."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from executor_api.messages import LIST_MAX
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2
from executor_server.core.errors import ModulesMissing, Reason
from executor_server.core.model import (
    BlobChunk,
    BlobRef,
    ErrorDetail,
    Event,
    EventKind,
    FileInfo,
    Image,
    Log,
    Outcome,
    OutputCut,
    OutputMode,
    Queued,
    Result,
    ShippedTool,
    ToolCall,
    ToolSource,
    ToolSpec,
    VariablesState,
)
from executor_server.sessions import VariablesReply
from executor_server.sessions.journal.execution import ToolFailure
from tests.rpc.edge import AUTH, Edge, FakeExecution, refusal, refused

PIECE = 262_144
MANY = {f"m{n}": "" for n in range(LIST_MAX + 1)}
INVALID = ("INVALID_ARGUMENT", "INVALID_FIELD")


def value(data: bytes = b"v") -> types_pb2.Value:
    return types_pb2.Value(packed=types_pb2.Payload(inline=data))


def named(name: str, packed: types_pb2.Value | None = None) -> types_pb2.NamedValue:
    return types_pb2.NamedValue(name=name, value=packed or value())


def execute(**fields: Any) -> pb.ExecuteRequest:
    return pb.ExecuteRequest(**({"session_id": "s1", "execution_id": "e1", "code": "1"} | fields))


def set_variables(*variables: types_pb2.NamedValue) -> pb.SetVariablesRequest:
    return pb.SetVariablesRequest(session_id="s1", variables=variables)


def register(*tools: types_pb2.ToolSpec) -> pb.RegisterToolsRequest:
    return pb.RegisterToolsRequest(session_id="s1", tools=tools)


def submit(**fields: Any) -> pb.SubmitToolResultRequest:
    return pb.SubmitToolResultRequest(**({"session_id": "s1", "execution_id": "e1", "call_id": "c"} | fields))


BLOB = types_pb2.Value(packed=types_pb2.Payload(blob=types_pb2.BlobRef(blob_id="../x", size_bytes=1)))
TOOL = types_pb2.ToolSpec


def shipped(name: str = "t", **fields: Any) -> types_pb2.ToolSpec:
    """A tool that is shipped as source; `fields` are those of ShippedTool, or what the source has otherwise."""
    source: dict[str, Any] = {"text": "def t(): pass", "entry": "t"}
    source.update({name: fields.pop(name) for name in ("text", "entry", "bindings") if name in fields})
    if "value" not in fields:
        fields["source"] = types_pb2.ToolSource(**source)
    of_spec = {name: fields.pop(name) for name in ("parameters", "is_final_answer") if name in fields}
    return TOOL(name=name, shipped=types_pb2.ShippedTool(**fields), **of_spec)


def blob(size_bytes: int, blob_id: str = "b") -> types_pb2.Value:
    return types_pb2.Value(packed=types_pb2.Payload(blob=types_pb2.BlobRef(blob_id=blob_id, size_bytes=size_bytes)))


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("CreateSession", pb.CreateSessionRequest(), "request_id"),
        ("CreateSession", pb.CreateSessionRequest(request_id="a" * 65), "request_id"),
        ("CreateSession", pb.CreateSessionRequest(request_id="a\n"), "request_id"),
        ("CreateSession", pb.CreateSessionRequest(request_id="r", node_labels={"zone": "b"}), "node_labels"),
        (
            "CreateSession",
            pb.CreateSessionRequest(request_id="r", limits={"wall_time_s": math.nan}),
            "limits.wall_time_s",
        ),
        (
            "CreateSession",
            pb.CreateSessionRequest(request_id="r", limits={"cpu_time_s": -math.inf}),
            "limits.cpu_time_s",
        ),
        ("CreateSession", pb.CreateSessionRequest(request_id="r", limits={"processes": 0}), "limits.processes"),
        ("CreateSession", pb.CreateSessionRequest(request_id="r", authorized_imports=["a b"]), "authorized_imports[0]"),
        ("CreateSession", pb.CreateSessionRequest(request_id="r", prelude="\0"), "prelude"),
        ("GetSession", pb.GetSessionRequest(session_id="../../etc"), "session_id"),
        ("Execute", execute(execution_id=""), "execution_id"),
        ("Execute", execute(code="x" * (1024 * 1024 + 1)), "code"),
        ("Execute", execute(code="ä" * (600 * 1024)), "code"),
        ("Execute", execute(code="a\0b"), "code"),
        ("Execute", execute(output_mode=7), "output_mode"),
        ("Execute", execute(limits={"memory_bytes": 1 << 30}), "limits.memory_bytes"),
        ("AttachExecution", pb.AttachExecutionRequest(session_id="s1", execution_id="ä"), "execution_id"),
        ("SubmitToolResult", submit(value=value(), call_id=""), "call_id"),
        ("SubmitToolResult", submit(), "answer"),
        ("SubmitToolResult", submit(value=types_pb2.Value()), "value"),
        ("SubmitToolResult", submit(error={"message": "x" * (PIECE + 1)}), "error.message"),
        ("SetVariables", set_variables(named("a.b")), "variables[0].name"),
        ("SetVariables", set_variables(named("a"), named("class")), "variables[1].name"),
        ("SetVariables", set_variables(named("__builtins__")), "variables[0].name"),
        ("SetVariables", set_variables(named("\ufb01")), "variables[0].name"),
        ("SetVariables", set_variables(named("a"), named("a")), "variables"),
        ("SetVariables", set_variables(types_pb2.NamedValue(name="a")), "variables[0].value"),
        ("SetVariables", set_variables(named("a", value(b"x" * (PIECE + 1)))), "variables[0].value"),
        ("SetVariables", set_variables(named("a", BLOB)), "variables[0].value.blob_id"),
        ("SetVariables", set_variables(*(named(f"v{n}") for n in range(1025))), "variables"),
        ("GetVariables", pb.GetVariablesRequest(session_id="s1", names=["1x"]), "names[0]"),
        ("GetVariables", pb.GetVariablesRequest(session_id="s1", names=["x"] * (LIST_MAX + 1)), "names"),
        ("PrepareEnvironment", pb.PrepareEnvironmentRequest(packages=["x"] * (LIST_MAX + 1)), "packages"),
        ("CreateSession", pb.CreateSessionRequest(env=MANY), "env"),
        (
            "AuthorizeImports",
            pb.AuthorizeImportsRequest(session_id="s1", authorized_imports=MANY),
            "authorized_imports",
        ),
        ("RegisterTools", register(TOOL(name="a b")), "tools[0].name"),
        ("RegisterTools", register(TOOL(name="t"), TOOL(name="t")), "tools"),
        ("RegisterTools", register(TOOL(name="t", parameters=["x", "x"])), "tools[0].parameters"),
        ("RegisterTools", register(TOOL(name="t", parameters=["*x"])), "tools[0].parameters"),
        ("RegisterTools", register(TOOL(name="t", description="x" * 16_385)), "tools[0].description"),
        ("RegisterTools", register(*(TOOL(name=f"t{n}") for n in range(257))), "tools"),
        ("RegisterTools", register(TOOL(name="t", shipped=types_pb2.ShippedTool())), "tools[0].shipped"),
        ("RegisterTools", register(shipped(parameters=["x"])), "tools[0].parameters"),
        ("RegisterTools", register(TOOL(name="a"), shipped(is_final_answer=True)), "tools[1].is_final_answer"),
        ("RegisterTools", register(shipped(text="x" * 1_048_577)), "tools[0].shipped.source.text"),
        ("RegisterTools", register(shipped(text="x\0")), "tools[0].shipped.source.text"),
        ("RegisterTools", register(shipped(entry="")), "tools[0].shipped.source.entry"),
        ("RegisterTools", register(shipped(entry="t.x")), "tools[0].shipped.source.entry"),
        ("RegisterTools", register(shipped(entry="__builtins__")), "tools[0].shipped.source.entry"),
        ("RegisterTools", register(shipped(bindings=types_pb2.Value())), "tools[0].shipped.source.bindings"),
        ("RegisterTools", register(shipped(bindings=BLOB)), "tools[0].shipped.source.bindings.blob_id"),
        ("RegisterTools", register(shipped(bindings=value(b"x" * (PIECE + 1)))), "tools[0].shipped.source.bindings"),
        ("RegisterTools", register(shipped(value=types_pb2.Value())), "tools[0].shipped.value"),
        ("RegisterTools", register(shipped(value=value(b"x" * (PIECE + 1)))), "tools[0].shipped.value"),
        ("RegisterTools", register(shipped(modules=["a"] * 257)), "tools[0].shipped.modules"),
        ("RegisterTools", register(shipped(modules=["a", ""])), "tools[0].shipped.modules"),
        ("RegisterTools", register(shipped(modules=["a..b"])), "tools[0].shipped.modules"),
        ("RegisterTools", register(shipped(modules=["a b"])), "tools[0].shipped.modules"),
        ("RegisterTools", register(shipped(modules=[".a"])), "tools[0].shipped.modules"),
        ("RegisterTools", register(shipped(modules=["a" * 257])), "tools[0].shipped.modules"),
    ],
)
async def test_a_field_of_a_wrong_form_is_named(edge: Edge, method: str, request_: Any, field: str) -> None:
    session = await edge.session()
    session.executions["e1"] = FakeExecution()
    found = await refusal(getattr(edge.stub, method)(request_, metadata=AUTH))
    assert (found.code.name, found.reason) == INVALID
    assert list(found.fields) == [field]
    assert found.message.startswith(field)
    assert not session.asked
    assert not session.executions["e1"].asked


async def test_a_long_name_is_refused_before_it_is_normalized(edge: Edge) -> None:
    """Normalizing takes time by the square of the length: this name held the daemon up for over a minute."""
    await edge.session()
    slow = "a" + "\u0300\u0327" * 100_000
    assert await refused(edge.stub.SetVariables(set_variables(named(slow)), metadata=AUTH, timeout=20)) == INVALID


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 4097])
async def test_a_text_that_is_no_path_is_refused(edge: Edge, path: str) -> None:
    session = await edge.session()
    move = pb.MoveFile(target=path)
    for call in (
        edge.stub.GetFile(pb.GetFileRequest(session_id="s1", path=path), metadata=AUTH),
        edge.stub.ManageFile(pb.ManageFileRequest(session_id="s1", path="a", move=move), metadata=AUTH),
        edge.stub.ManageFile(pb.ManageFileRequest(session_id="s1", path=path, remove={}), metadata=AUTH),
    ):
        assert await refused(call) == ("INVALID_ARGUMENT", "PATH_REFUSED")
    assert not session.asked


async def test_what_is_done_with_a_file_arrives_with_its_options_and_is_described(edge: Edge) -> None:
    session = await edge.session()
    session.parts = [FileInfo("a", 2, False, 1.5, 0o640, True, "b")]
    stat = pb.ManageFileRequest(session_id="s1", path="a", stat=pb.StatFile(follow=True))
    answer = await edge.stub.ManageFile(stat, metadata=AUTH)
    assert (answer.file.mode, answer.file.is_link, answer.file.target) == (0o640, True, "b")
    remove = pb.ManageFileRequest(session_id="s1", path="/a", remove=pb.RemoveFile(recursive=True))
    await edge.stub.ManageFile(remove, metadata=AUTH)
    await edge.stub.ListFiles(pb.ListFilesRequest(session_id="s1", recursive=False), metadata=AUTH)
    assert session.asked == [
        ("stat", "a", {"follow": True}),
        ("remove", "/a", {"recursive": True}),
        ("list_files", "", "flat"),
    ]
    header = pb.PutFileHeader(session_id="s1", path="a", mode=0o1777)
    for bad in (
        edge.stub.ManageFile(pb.ManageFileRequest(session_id="s1", path="a"), metadata=AUTH),
        edge.stub.GetFile(pb.GetFileRequest(session_id="s1", path="a", offset=2**63), metadata=AUTH),
        edge.stub.GetFile(pb.GetFileRequest(session_id="s1", path="a", length=2**63), metadata=AUTH),
        edge.stub.PutFile(iter([pb.PutFileRequest(header=header)]), metadata=AUTH),
    ):
        assert (await refused(bad))[0] == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"\x0a\xff\xff\xff\xff\x0f",  # a length far past the end
        b"\x0a\x02\xff\xfe",  # text that is not UTF-8
        b"\x0b" * 200,  # groups in groups
        b"\x0a\x02s1\x9a\x06\x01x",  # field 99
        b"\x0a\x02s1\x10\x01",  # field 2
    ],
)
async def test_malformed_and_unknown_bytes_are_refused(edge: Edge, data: bytes) -> None:
    await edge.session()
    assert await refused(edge.raw("GetSession")(data, metadata=AUTH)) == INVALID
    assert await refused(edge.raw("DeleteSession")(data, metadata=AUTH)) == INVALID
    assert "s1" in edge.sessions.sessions


async def test_an_unknown_field_deep_in_a_message_is_refused(edge: Edge) -> None:
    limits = types_pb2.Limits(wall_time_s=1).SerializeToString() + b"\xd0\x06\x01"
    data = pb.CreateSessionRequest(request_id="r").SerializeToString() + b"\x22" + bytes([len(limits)]) + limits
    assert await refused(edge.raw("CreateSession")(data, metadata=AUTH)) == INVALID
    assert not edge.sessions.sessions


async def test_an_oversized_message_is_refused_and_the_connection_lives(edge: Edge) -> None:
    await edge.session()
    call = edge.stub.Execute(execute(code="x" * (5 << 20)), metadata=AUTH)
    assert (await refusal(call)).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await edge.stub.GetSession(pb.GetSessionRequest(session_id="s1"), metadata=AUTH)


async def test_a_compressed_message_is_refused(edge: Edge) -> None:
    request = pb.CreateSessionRequest(request_id="r", prelude=" " * 100_000)
    call = edge.stub.CreateSession(request, metadata=AUTH, compression=grpc.Compression.Gzip)
    assert (await refusal(call)).code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
    assert not edge.sessions.sessions


def blob_header(size_bytes: int, session_id: str = "s1") -> pb.UploadBlobRequest:
    return pb.UploadBlobRequest(header={"session_id": session_id, "size_bytes": size_bytes})


def blob_data(data: bytes) -> pb.UploadBlobRequest:
    return pb.UploadBlobRequest(data=data)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], INVALID),
        ([pb.UploadBlobRequest()], INVALID),
        ([blob_data(b"x")], INVALID),
        ([blob_header(2), blob_data(b"x")], INVALID),
        ([blob_header(2), blob_data(b"xyz")], INVALID),
        ([blob_header(2), blob_header(2), blob_data(b"xy")], INVALID),
        ([blob_header(2), blob_data(b""), blob_data(b"xy")], INVALID),
        ([blob_header(PIECE + 1), blob_data(b"x" * (PIECE + 1))], INVALID),
        ([blob_header(2**64 - 1), blob_data(b"x")], INVALID),
        ([blob_header(2, "s2"), blob_data(b"xy")], ("NOT_FOUND", "SESSION_NOT_FOUND")),
    ],
)
async def test_an_upload_that_is_not_what_it_declared_is_refused(
    edge: Edge, messages: list[pb.UploadBlobRequest], expected: tuple[str, str]
) -> None:
    session = await edge.session()
    assert await refused(edge.stub.UploadBlob(iter(messages), metadata=AUTH)) == expected
    assert not session.asked


async def test_an_upload_arrives_in_order(edge: Edge) -> None:
    session = await edge.session()
    messages = [blob_header(PIECE + 2), blob_data(b"a" * PIECE), blob_data(b"b"), blob_data(b"c")]
    answer = await edge.stub.UploadBlob(iter(messages), metadata=AUTH)
    assert answer.blob_id == "blob-1"
    assert session.asked == [("blob", b"a" * PIECE + b"bc")]


async def test_a_file_larger_than_the_disk_is_refused_before_its_data(edge: Edge) -> None:
    await edge.session()
    header = pb.PutFileRequest(header={"session_id": "s1", "path": "a", "size_bytes": 1 << 40})
    call = edge.stub.PutFile(iter([header]), metadata=AUTH)
    assert await refused(call) == ("RESOURCE_EXHAUSTED", Reason.TOO_LARGE.value)


async def test_an_upload_that_stands_still_is_cut_off(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_server.api.upload.PIECE_TIMEOUT_S", 0.01)
    await edge.session()
    call = edge.stub.UploadBlob(metadata=AUTH)
    await call.write(blob_header(2))
    found = await refusal(call)
    assert (found.code.name, found.reason) == INVALID
    assert "no data arrived" in found.message


async def test_what_was_asked_reaches_the_session_as_values(edge: Edge) -> None:
    session = await edge.session()
    session.executions["e1"] = execution = FakeExecution()
    blob = types_pb2.Value(packed=types_pb2.Payload(blob=types_pb2.BlobRef(blob_id="b", size_bytes=9)))
    await edge.stub.SetVariables(set_variables(named("a", value(b"1")), named("ä", blob)), metadata=AUTH)
    tool = TOOL(name="t", description="d", parameters=["x", "y"], is_final_answer=True)
    await edge.stub.RegisterTools(register(tool), metadata=AUTH)
    await edge.stub.KeepAlive(pb.KeepAliveRequest(session_id="s1"), metadata=AUTH)
    await edge.stub.SubmitToolResult(submit(error={"type": "E", "message": "m"}), metadata=AUTH)
    await edge.stub.SubmitToolResult(submit(value=value(b"r")), metadata=AUTH)
    await edge.stub.CancelExecution(pb.CancelExecutionRequest(session_id="s1", execution_id="e1"), metadata=AUTH)
    assert session.asked == [
        ("variables", [("a", b"1"), ("ä", BlobRef("b", 9))]),
        ("tools", [ToolSpec("t", "d", ("x", "y"), True)]),
        "touch",
    ]
    assert execution.asked == [("c", ToolFailure("E", "m")), ("c", b"r"), "cancel"]


async def test_what_is_shipped_of_tools_reaches_the_session_as_values(edge: Edge) -> None:
    session = await edge.session()
    tools = [
        shipped("a", text="x = 1", entry="x", bindings=value(b"b"), modules=["json", "os.path"]),
        shipped("b", value=blob(9)),
        shipped("c", value=value(b"v")),
        shipped("d", bindings=blob(8, "c")),
    ]
    await edge.stub.RegisterTools(register(*tools), metadata=AUTH)
    ((_, found),) = session.asked
    assert [tool.shipped for tool in found] == [
        ShippedTool(ToolSource("x = 1", "x", b"b"), ("json", "os.path")),
        ShippedTool(BlobRef("b", 9)),
        ShippedTool(b"v"),
        ShippedTool(ToolSource("def t(): pass", "t", BlobRef("c", 8))),
    ]
    assert {tool.placement for tool in found} == {"sandbox"}


@pytest.mark.parametrize(
    "tools",
    [
        [shipped(value=blob(33_554_432))],
        [shipped("a", bindings=blob(20_000_000)), shipped("b", value=blob(14_000_000))],
        [shipped(value=blob(2**64 - 1))],
    ],
)
async def test_no_more_is_shipped_than_there_is_room_for(edge: Edge, tools: list[types_pb2.ToolSpec]) -> None:
    await edge.session()
    found = await refused(edge.stub.RegisterTools(register(*tools), metadata=AUTH))
    assert found == ("RESOURCE_EXHAUSTED", Reason.TOO_LARGE.value)


async def test_modules_that_are_missing_are_listed_in_a_detail(edge: Edge) -> None:
    session = await edge.session()
    session.raises = ModulesMissing("t: the image has no module a, b.c", ("a", "b.c"))
    found = await refusal(edge.stub.RegisterTools(register(shipped()), metadata=AUTH))
    assert (found.code.name, found.reason) == ("INVALID_ARGUMENT", Reason.MODULES_MISSING.value)
    assert found.metadata == {"modules": "a,b.c"}
    session.raises = ModulesMissing("m" * 20_000, tuple(f"{'ä' * 200}{number}" for number in range(32)))
    found = await refusal(edge.stub.RegisterTools(register(shipped()), metadata=AUTH))
    assert found.metadata == {"modules": ",".join(f"{'ä' * 200}{number}" for number in range(3))}


def events() -> Iterator[Event]:
    kinds: list[EventKind] = [
        Queued(2),
        Log("stdout", "ä\ud800"),
        Log("stderr", "e"),
        OutputCut(7),
        BlobChunk("b", b"piece"),
        Image(BlobRef("b", 5), "image/png", "figure"),
        ToolCall("c", "t", b"args"),
        Result(Outcome.EXCEPTION, VariablesState.RESET, 3, error=ErrorDetail("E", "m\udcff"), output=b"out"),
    ]
    return (Event(number, kind) for number, kind in enumerate(kinds, 1))


async def test_every_event_leaves_as_it_is(edge: Edge) -> None:
    session = await edge.session()
    session.next_execution = FakeExecution(list(events()))
    request = execute(output_mode="OUTPUT_MODE_LAST_STATEMENT", limits={"wall_time_s": 5})
    got = [answer.event async for answer in edge.stub.Execute(request, metadata=AUTH)]
    assert [event.WhichOneof("kind") for event in got] == [
        "queued", "log", "log", "output_cut", "blob_chunk", "image", "tool_call", "result",
    ]  # fmt: skip
    assert [event.number for event in got] == list(range(1, 9))
    assert got[1].log.text == "ä\\ud800"
    assert got[5].image.data.blob.size_bytes == 5
    assert got[6].tool_call.arguments.packed.inline == b"args"
    result = got[7].result
    assert (result.outcome, result.variables_state) == (types_pb2.OUTCOME_EXCEPTION, types_pb2.VARIABLES_STATE_RESET)
    assert (result.output.packed.inline, result.error.message, result.generation) == (b"out", "m\\udcff", 3)
    _, _, code, mode, limits = session.asked[0]
    assert (code, mode, limits.wall_time_s) == ("1", OutputMode.LAST_STATEMENT, 5.0)

    attach = pb.AttachExecutionRequest(session_id="s1", execution_id="e1", after_event=6)
    again = [answer.event.number async for answer in edge.stub.AttachExecution(attach, metadata=AUTH)]
    assert again == [7, 8]


async def test_a_result_without_a_value_has_none(edge: Edge) -> None:
    session = await edge.session()
    session.next_execution = FakeExecution([Event(1, Result(Outcome.SUCCEEDED, VariablesState.KEPT, 1))])
    (answer,) = [answer async for answer in edge.stub.Execute(execute(), metadata=AUTH)]
    assert not answer.event.result.HasField("output")
    assert not answer.event.result.HasField("error")


async def test_variables_and_files_stream_out(edge: Edge) -> None:
    session = await edge.session()
    session.parts = [BlobChunk("b", b"123"), VariablesReply((("x", BlobRef("b", 3)), ("y", b"1")), ("z",))]
    got = [m async for m in edge.stub.GetVariables(pb.GetVariablesRequest(session_id="s1"), metadata=AUTH)]
    assert got[0].blob_chunk.data == b"123"
    assert [variable.name for variable in got[1].variables.variables] == ["x", "y"]
    assert list(got[1].variables.missing) == ["z"]

    session.parts = [FileInfo("a", 2, False, 1.5), b"a", b"b"]
    parts = [m async for m in edge.stub.GetFile(pb.GetFileRequest(session_id="s1", path="a"), metadata=AUTH)]
    assert parts[0].file.modify_time.nanos == 500_000_000
    assert b"".join(part.data for part in parts[1:]) == b"ab"

    session.parts = [FileInfo("a", 2, False, 1.5)]
    listed = await edge.stub.ListFiles(pb.ListFilesRequest(session_id="s1"), metadata=AUTH)
    assert [file.path for file in listed.files] == ["a"]
    assert listed.truncated


async def test_a_directory_travels_as_an_archive_and_its_path_may_be_empty(edge: Edge) -> None:
    session = await edge.session()
    tar = types_pb2.FILE_FORMAT_TAR
    header = pb.PutFileHeader(session_id="s1", path="", size_bytes=1, format=tar)
    answer = await edge.stub.PutFile(
        iter([pb.PutFileRequest(header=header), pb.PutFileRequest(data=b"x")]), metadata=AUTH
    )
    assert answer.file.is_directory
    request = pb.GetFileRequest(session_id="s1", format=tar)
    assert [m async for m in edge.stub.GetFile(request, metadata=AUTH)] == []
    assert session.asked == [("", b"x", "tar"), ("get_file", "", "tar")]
    for bad in (
        pb.GetFileRequest(session_id="s1"),
        pb.GetFileRequest(session_id="s1", path="a", format=9),  # type: ignore[arg-type]
    ):
        assert (await refused(edge.stub.GetFile(bad, metadata=AUTH)))[0] == "INVALID_ARGUMENT"


async def test_artifacts_leave_with_the_result(edge: Edge) -> None:
    session = await edge.session()
    made = (FileInfo("a\udcff", 2, False, 1.5),)
    result = Result(Outcome.SUCCEEDED, VariablesState.KEPT, 1, artifacts=made, artifacts_truncated=True)
    session.next_execution = FakeExecution([Event(1, result)])
    (answer,) = [answer async for answer in edge.stub.Execute(execute(), metadata=AUTH)]
    (artifact,) = answer.event.result.artifacts
    assert (artifact.path, artifact.size_bytes, artifact.modify_time.seconds) == ("a\\udcff", 2, 1)
    assert answer.event.result.artifacts_truncated


async def test_a_session_tells_its_effective_limits(edge: Edge) -> None:
    request = pb.CreateSessionRequest(request_id="r", limits={"wall_time_s": 2.5}, labels={"k": "v"})
    session = (await edge.stub.CreateSession(request, metadata=AUTH)).session
    assert (session.limits.wall_time_s, session.limits.operations) == (2.5, 100_000_000)
    assert (session.state, session.create_time.seconds, dict(session.labels)) == (1, 1_700_000_000, {"k": "v"})
    policy = (await edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=AUTH)).policy
    assert (list(policy.tool_placements), policy.network, policy.backend) == (["host", "sandbox"], "none", "local")
    assert list(policy.backends) == ["local"] and not policy.HasField("network_rules")
    assert not session.network
    assert len(policy.max_limits.ListFields()) == 12


async def test_modules_that_tools_need_are_names_and_bounded(edge: Edge) -> None:
    request = pb.CreateSessionRequest(request_id="r", modules=["cv2", "google.protobuf"])
    await edge.stub.CreateSession(request, metadata=AUTH)
    assert edge.sessions.requests[-1].modules == ("cv2", "google.protobuf")
    for wrong in (["a b"], [""], ["x"] * 257, ["../x"]):
        request = pb.CreateSessionRequest(request_id="wrong", modules=wrong)
        found = await refusal(edge.stub.CreateSession(request, metadata=AUTH))
        assert found.reason in ("INVALID_FIELD", "TOO_LARGE") and "modules" in found.message
    assert len(edge.sessions.requests) == 1
