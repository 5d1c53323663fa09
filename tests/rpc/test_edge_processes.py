"""Calls for processes, ports, watches and names: each field is checked at the edge, and what is right goes through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2
from executor_server.core import (
    FileChange,
    FileChanges,
    ProcessEvent,
    ProcessOutcome,
    ProcessOutput,
    ProcessOutputCut,
    ProcessRequest,
    ProcessResult,
    ProcessStarted,
    SignalTarget,
    TerminalSize,
)
from tests.rpc.edge import AUTH, Edge, FakeSession, refusal
from tests.support.fleet_daemon import wanted

EVENTS = [
    ProcessEvent(1, ProcessStarted(7)),
    ProcessEvent(2, ProcessOutput("stderr", b"\xff\x1b[0m")),
    ProcessEvent(3, ProcessOutputCut(9)),
    ProcessEvent(4, ProcessResult(ProcessOutcome.SIGNALLED, 137, 9, 1.0, 0.5, 4096, 12, "")),
]


class FakeProcesses:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def start(self, request: ProcessRequest) -> FakeProcesses:
        self.asked.append(request)
        return self

    def process(self, process_id: str) -> FakeProcesses:
        self.asked.append(process_id)
        return self

    async def events_with_gap(self, after: int) -> AsyncIterator[ProcessEvent]:
        for event in EVENTS[after:]:
            yield event

    def list(self) -> list[Any]:
        self.asked.append("list")
        return []

    async def write(self, *arguments: Any, eof: bool) -> int:
        self.asked.append((*arguments, eof))
        return 5

    async def resize(self, process_id: str, size: TerminalSize) -> None:
        self.asked.append((process_id, size))

    async def signal(self, *arguments: Any) -> None:
        self.asked.append(arguments)


class FakePorts:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    @asynccontextmanager
    async def open(self, port: int) -> AsyncIterator[Any]:
        self.asked.append(port)
        yield self

    async def read(self) -> bytes:
        """The program says nothing."""
        await asyncio.Event().wait()
        raise AssertionError

    async def write(self, data: bytes) -> None:
        self.asked.append(data)


class FakeWatches:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def changes(self, path: str, *, recursive: bool) -> AsyncIterator[FileChanges]:
        self.asked.append((path, recursive))
        yield FileChanges()
        yield FileChanges((FileChange("a/b", "deleted", is_directory=True),), overflowed=True)


async def session_of(edge: Edge) -> tuple[FakeProcesses, FakePorts, FakeWatches]:
    session: FakeSession = await edge.session()
    parts = FakeProcesses(), FakePorts(), FakeWatches()
    edge.sessions.rename = parts[0].asked.append  # type: ignore[attr-defined]
    session.processes, session.ports, session.watches = parts  # type: ignore[attr-defined]
    return parts


def start(**fields: Any) -> pb.StartProcessRequest:
    return pb.StartProcessRequest(**({"session_id": "s1", "process_id": "p", "argv": ["ls"]} | fields))


def size(columns: int, rows: int) -> types_pb2.TerminalSize:
    return types_pb2.TerminalSize(columns=columns, rows=rows)


UNKNOWN: Any = 99
OF_PROCESS: Any = {"session_id": "s1", "process_id": "p"}


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("StartProcess", start(process_id=""), "process_id"),
        ("StartProcess", start(process_id="a" * 65), "process_id"),
        ("StartProcess", start(process_id="../p"), "process_id"),
        ("StartProcess", start(argv=[]), "argv"),
        ("StartProcess", start(argv=[""]), "argv"),
        ("StartProcess", start(argv=["a\0b"]), "argv"),
        ("StartProcess", start(argv=["a"] * 100_000), "argv"),
        ("StartProcess", start(argv=["a", "b" * 2**18]), "argv"),
        ("StartProcess", start(cwd="a\0"), "cwd"),
        ("StartProcess", start(cwd="a" * 5000), "cwd"),
        ("StartProcess", start(env={"": "x"}), "env"),
        ("StartProcess", start(env={"A=B": "x"}), "env"),
        ("StartProcess", start(env={"A": "x\0"}), "env.A"),
        ("StartProcess", start(env={f"A{number}": "x" for number in range(100)}), "env"),
        ("StartProcess", start(env={"A": "x" * 70_000}), "env"),
        ("StartProcess", start(pty=size(0, 24)), "pty"),
        ("StartProcess", start(pty=size(80, 10**9)), "pty"),
        ("StartProcess", start(timeout_s=0.0), "timeout_s"),
        ("StartProcess", start(timeout_s=float("nan")), "timeout_s"),
        ("StartProcess", start(timeout_s=float("inf")), "timeout_s"),
        ("AttachProcess", pb.AttachProcessRequest(session_id="s1", process_id="a b"), "process_id"),
        ("WriteProcess", pb.WriteProcessRequest(**OF_PROCESS, data=b"x" * (2**18 + 1)), "data"),
        ("WriteProcess", pb.WriteProcessRequest(**OF_PROCESS, offset=2**63), "offset"),
        ("WriteProcess", pb.WriteProcessRequest(session_id="s1"), "process_id"),
        ("ResizeProcess", pb.ResizeProcessRequest(**OF_PROCESS), "size"),
        ("ResizeProcess", pb.ResizeProcessRequest(**OF_PROCESS, size=size(10**9, 1)), "size"),
        ("SignalProcess", pb.SignalProcessRequest(**OF_PROCESS), "signal"),
        ("SignalProcess", pb.SignalProcessRequest(**OF_PROCESS, signal=65), "signal"),
        ("SignalProcess", pb.SignalProcessRequest(**OF_PROCESS, signal=9, target=UNKNOWN), "target"),
        ("RenameSession", pb.RenameSessionRequest(session_id="s1", name="-x"), "name"),
        ("RenameSession", pb.RenameSessionRequest(session_id="s1", name="a" * 65), "name"),
    ],
)
async def test_a_field_of_a_wrong_form_is_named_and_nothing_is_done(
    edge: Edge, method: str, request_: Any, field: str
) -> None:
    processes, *_ = await session_of(edge)
    found = await refusal(getattr(edge.stub, method)(request_, metadata=AUTH))
    assert (found.code.name, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert [each.partition("[")[0] for each in found.fields] == [field]
    assert not processes.asked


async def test_every_field_of_a_start_arrives_and_every_kind_of_event_comes_back(edge: Edge) -> None:
    processes, *_ = await session_of(edge)
    request = start(argv=["ls", "-l"], cwd="a", env={"A": "x=y"}, pty=size(80, 24), stdin=True, timeout_s=2.5)
    answers = [each.event async for each in edge.stub.StartProcess(request, metadata=AUTH)]
    assert processes.asked == [ProcessRequest("p", ("ls", "-l"), "a", {"A": "x=y"}, TerminalSize(80, 24), True, 2.5)]
    assert [each.WhichOneof("kind") for each in answers] == ["started", "output", "output_cut", "result"]
    assert (answers[0].started.pid, answers[1].output.data, answers[2].output_cut.omitted_bytes) == (
        7,
        b"\xff\x1b[0m",
        9,
    )
    result = answers[3].result
    assert (result.outcome, result.exit_code, result.signal) == (types_pb2.PROCESS_OUTCOME_SIGNALLED, 137, 9)
    attach = pb.AttachProcessRequest(**OF_PROCESS, after_event=3)
    assert [each.event.number async for each in edge.stub.AttachProcess(attach, metadata=AUTH)] == [4]


async def test_writes_sizes_and_signals_arrive_as_they_were_sent(edge: Edge) -> None:
    processes, *_ = await session_of(edge)
    write = pb.WriteProcessRequest(**OF_PROCESS, offset=3, data=b"ab", eof=True)
    assert (await edge.stub.WriteProcess(write, metadata=AUTH)).written_bytes == 5
    await edge.stub.ResizeProcess(pb.ResizeProcessRequest(**OF_PROCESS, size=size(1, 1000)), metadata=AUTH)
    await edge.stub.SignalProcess(pb.SignalProcessRequest(**OF_PROCESS, signal=2), metadata=AUTH)
    tree = types_pb2.SIGNAL_TARGET_TREE
    await edge.stub.SignalProcess(pb.SignalProcessRequest(**OF_PROCESS, signal=9, target=tree), metadata=AUTH)
    assert not (await edge.stub.ListProcesses(pb.ListProcessesRequest(session_id="s1"), metadata=AUTH)).processes
    assert processes.asked == [
        ("p", 3, b"ab", True),
        ("p", TerminalSize(1, 1000)),
        ("p", 2, SignalTarget.GROUP),
        ("p", 9, SignalTarget.TREE),
        "list",
    ]


@pytest.mark.parametrize(
    ("first", "field"),
    [
        (pb.ForwardPortRequest(), "open"),
        (pb.ForwardPortRequest(data=b"x"), "open"),
        (pb.ForwardPortRequest(open=pb.OpenPort(session_id="s1")), "open.port"),
        (pb.ForwardPortRequest(open=pb.OpenPort(session_id="s1", port=65_536)), "open.port"),
        (pb.ForwardPortRequest(open=pb.OpenPort(session_id="s1", port=2**32 - 1)), "open.port"),
    ],
)
async def test_a_connection_begins_with_a_port(edge: Edge, first: pb.ForwardPortRequest, field: str) -> None:
    _, ports, _ = await session_of(edge)
    found = await refusal(edge.stub.ForwardPort(iter([first]), metadata=AUTH))
    # A front looks for the session first.
    assert list(found.fields) in ([field], ["session_id"]) if wanted() else list(found.fields) == [field]
    assert not ports.asked


@pytest.mark.parametrize("data", [b"", b"x" * (2**18 + 1)], ids=["empty", "large"])
async def test_a_wrong_message_ends_a_connection_whose_program_says_nothing(edge: Edge, data: bytes) -> None:
    _, ports, _ = await session_of(edge)
    messages = [pb.ForwardPortRequest(open=pb.OpenPort(session_id="s1", port=8000)), pb.ForwardPortRequest(data=data)]
    found = await refusal(edge.stub.ForwardPort(iter(messages), metadata=AUTH))
    assert (found.reason, list(found.fields)) == ("INVALID_FIELD", ["data"])
    assert ports.asked == [8000]


async def test_changes_of_files_are_passed_on(edge: Edge) -> None:
    *_, watches = await session_of(edge)
    request = pb.WatchFilesRequest(session_id="s1", path="a", recursive=True)
    began, changed = [each async for each in edge.stub.WatchFiles(request, metadata=AUTH)]
    assert watches.asked == [("a", True)]
    assert began == pb.WatchFilesResponse()
    (change,) = changed.changes
    assert (change.path, change.is_directory, changed.overflowed) == ("a/b", True, True)
    assert change.kind == types_pb2.FILE_CHANGE_KIND_DELETED
    found = await refusal(edge.stub.WatchFiles(pb.WatchFilesRequest(session_id="s1", path="a\0"), metadata=AUTH))
    assert found.reason == "PATH_REFUSED"
