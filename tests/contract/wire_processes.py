"""Processes of a session behind a front, with the calls of `executor_server.sessions.Processes`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.core import (
    ProcessEvent,
    ProcessEventKind,
    ProcessOutcome,
    ProcessOutput,
    ProcessOutputCut,
    ProcessRequest,
    ProcessResult,
    ProcessStarted,
    SignalTarget,
    TerminalSize,
)

if TYPE_CHECKING:
    from tests.contract.wire import WireSession


class WireProcesses:
    def __init__(self, session: WireSession) -> None:
        self._session = session
        self._logs: dict[str, WireProcessLog] = {}

    async def start(self, request: ProcessRequest) -> WireProcessLog:
        """Returns when it runs. Raises its refusal."""
        wire = service_pb.StartProcessRequest(
            session_id=self._session.session_id,
            process_id=request.process_id,
            argv=request.argv,
            cwd=request.cwd,
            env=request.env,
            pty=_size_to(request.pty) if request.pty is not None else None,
            stdin=request.stdin,
            timeout_s=request.timeout_s,
            prefers_bash=request.prefers_bash,
            merge_stderr=request.merge_stderr,
        )
        async with aclosing(self._session.read(wire)) as answers:
            first = await anext(answers)
        assert first.event.WhichOneof("kind") == "started"
        made = WireProcessLog(self._session, request.process_id, first.event.started.pid)
        # The same id is the same process, so a test gets the same object, as in one process.
        known = self._logs.setdefault(request.process_id, made)
        assert known.pid == made.pid
        return known

    async def ids(self) -> list[str]:
        return [each.process_id for each in await self._listed()]

    async def running(self) -> list[str]:
        return [each.process_id for each in await self._listed() if not each.HasField("result")]

    async def _listed(self) -> Sequence[pb.ProcessInfo]:
        request = service_pb.ListProcessesRequest(session_id=self._session.session_id)
        return list((await self._session.once(request)).processes)

    async def write(self, process_id: str, offset: int, data: bytes, *, eof: bool) -> int:
        request = service_pb.WriteProcessRequest(
            session_id=self._session.session_id, process_id=process_id, offset=offset, data=data, eof=eof
        )
        return int((await self._session.once(request)).written_bytes)

    async def resize(self, process_id: str, size: TerminalSize) -> None:
        request = service_pb.ResizeProcessRequest(
            session_id=self._session.session_id, process_id=process_id, size=_size_to(size)
        )
        await self._session.once(request)

    async def signal(self, process_id: str, signal: int, target: SignalTarget) -> None:
        request = service_pb.SignalProcessRequest(
            session_id=self._session.session_id,
            process_id=process_id,
            signal=signal,
            target=f"SIGNAL_TARGET_{target.name}",
        )
        await self._session.once(request)


class WireProcessLog:
    """A process, whose events each reader reads from a stream of its own."""

    def __init__(self, session: WireSession, process_id: str, pid: int) -> None:
        self._session = session
        self.process_id = process_id
        self.pid = pid

    async def events_with_gap(self, after: int) -> AsyncGenerator[ProcessEvent, None]:
        request = service_pb.AttachProcessRequest(
            session_id=self._session.session_id, process_id=self.process_id, after_event=after
        )
        async with aclosing(self._session.read(request)) as answers:
            async for answer in answers:
                yield ProcessEvent(answer.event.number, _kind_from(answer.event))


def _size_to(size: TerminalSize) -> pb.TerminalSize:
    return pb.TerminalSize(columns=size.columns, rows=size.rows)


def _kind_from(event: pb.ProcessEvent) -> ProcessEventKind:
    match event.WhichOneof("kind"):
        case "started":
            return ProcessStarted(event.started.pid)
        case "output":
            stream = pb.OutputStream.Name(event.output.stream).removeprefix("OUTPUT_STREAM_").lower()
            return ProcessOutput(stream, event.output.data)
        case "output_cut":
            return ProcessOutputCut(event.output_cut.omitted_bytes)
    return _result_from(event.result)


def _result_from(result: pb.ProcessResult) -> ProcessResult:
    outcome = pb.ProcessOutcome.Name(result.outcome).removeprefix("PROCESS_OUTCOME_").lower()
    return ProcessResult(
        ProcessOutcome(outcome),
        result.exit_code if result.HasField("exit_code") else None,
        result.signal,
        result.wall_time_s,
        result.cpu_time_s,
        result.peak_memory_bytes,
        result.output_bytes,
        result.lost_reason,
    )
