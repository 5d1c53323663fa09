"""Processes on the wire: requests become values of the daemon, and its values become messages."""

from __future__ import annotations

from typing import Any

from executor_api.limits import PATH_BYTES_MAX, WRITE_BYTES_MAX
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.core import (
    ARGUMENTS_BYTES_MAX,
    ARGUMENTS_MAX,
    TERMINAL_CHARS_MAX,
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
from executor_server.journal import ProcessLog
from executor_server.rpc import checks
from executor_server.rpc.to_wire import timestamp_to

_SIGNALS_MAX = 64
_TIME_S_MAX = 365 * 86_400.0
_STREAMS = {"stdout": pb.OUTPUT_STREAM_STDOUT, "stderr": pb.OUTPUT_STREAM_STDERR}
_OUTCOMES: dict[ProcessOutcome, Any] = {
    outcome: pb.ProcessOutcome.Value(f"PROCESS_OUTCOME_{outcome.name}") for outcome in ProcessOutcome
}
_TARGETS: dict[int, SignalTarget] = {
    pb.SIGNAL_TARGET_UNSPECIFIED: SignalTarget.GROUP,
    **{pb.SignalTarget.Value(f"SIGNAL_TARGET_{target.name}"): target for target in SignalTarget},
}


# ---------------------------------------------------------------------------------------------------------------------
# Requests


def process_request_from(request: service_pb.StartProcessRequest) -> ProcessRequest:
    return ProcessRequest(
        process_id=checks.identifier(request.process_id, "process_id"),
        argv=_argv(tuple(request.argv)),
        cwd=_cwd(request.cwd),
        env=checks.environment(request.env, "env"),
        pty=terminal_size_from(request.pty, "pty") if request.HasField("pty") else None,
        stdin=request.stdin,
        timeout_s=_timeout_s(request.timeout_s) if request.HasField("timeout_s") else None,
        prefers_bash=request.prefers_bash,
    )


def _argv(argv: tuple[str, ...]) -> tuple[str, ...]:
    if not argv or not argv[0]:
        raise checks.invalid("argv", "must begin with a program")
    checks.count(len(argv), ARGUMENTS_MAX, "argv")
    if any("\0" in each for each in argv):
        raise checks.invalid("argv", "holds a NUL character")
    if sum(len(each.encode()) + 1 for each in argv) > ARGUMENTS_BYTES_MAX:
        raise checks.invalid("argv", f"is larger than {ARGUMENTS_BYTES_MAX:,} bytes")
    return argv


def _cwd(path: str) -> str:
    if "\0" in path or len(path.encode()) > PATH_BYTES_MAX:
        raise checks.invalid("cwd", f"must have no NUL and at most {PATH_BYTES_MAX} bytes")
    return path


def _timeout_s(timeout_s: float) -> float:
    if not 0.001 <= timeout_s <= _TIME_S_MAX:  # nor is NaN
        raise checks.invalid("timeout_s", "must be from 0.001 seconds to a year")
    return timeout_s


def terminal_size_from(size: pb.TerminalSize, field: str) -> TerminalSize:
    if not (1 <= size.columns <= TERMINAL_CHARS_MAX and 1 <= size.rows <= TERMINAL_CHARS_MAX):
        raise checks.invalid(field, f"must have 1 to {TERMINAL_CHARS_MAX:,} columns and rows")
    return TerminalSize(size.columns, size.rows)


def written_data_from(request: service_pb.WriteProcessRequest) -> bytes:
    if len(request.data) > WRITE_BYTES_MAX:
        raise checks.invalid("data", f"must be at most {WRITE_BYTES_MAX:,} bytes in each message")
    if request.offset > 2**62:
        raise checks.invalid("offset", "is beyond all that a process can be given")
    return request.data


def signal_from(request: service_pb.SignalProcessRequest) -> tuple[int, SignalTarget]:
    if not 1 <= request.signal <= _SIGNALS_MAX:
        raise checks.invalid("signal", f"must be a number from 1 to {_SIGNALS_MAX}")
    if request.target not in _TARGETS:
        raise checks.invalid("target", "is none that this daemon knows")
    return request.signal, _TARGETS[request.target]


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def process_event_to(event: ProcessEvent) -> pb.ProcessEvent:
    match event.kind:
        case ProcessStarted(pid=pid):
            return pb.ProcessEvent(number=event.number, started=pb.ProcessStarted(pid=pid))
        case ProcessOutput(stream=stream, data=data):
            return pb.ProcessEvent(number=event.number, output=pb.ProcessOutput(stream=_STREAMS[stream], data=data))
        case ProcessOutputCut(omitted_bytes=omitted_bytes):
            cut = pb.ProcessOutputCut(omitted_bytes=omitted_bytes)
            return pb.ProcessEvent(number=event.number, output_cut=cut)
        case ProcessResult() as result:
            return pb.ProcessEvent(number=event.number, result=_result_to(result))


def _result_to(result: ProcessResult) -> pb.ProcessResult:
    return pb.ProcessResult(
        outcome=_OUTCOMES[result.outcome],
        exit_code=result.exit_code,
        signal=result.signal,
        wall_time_s=result.wall_time_s,
        cpu_time_s=result.cpu_time_s,
        peak_memory_bytes=result.peak_memory_bytes,
        output_bytes=result.output_bytes,
        lost_reason=result.lost_reason,
    )


def process_info_to(log: ProcessLog) -> pb.ProcessInfo:
    what = log.description
    return pb.ProcessInfo(
        process_id=what.process_id,
        argv=what.argv,
        cwd=what.cwd,
        pid=log.pid,
        has_pty=what.has_pty,
        has_stdin=what.has_stdin,
        start_time=timestamp_to(what.start_time_s),
        result=None if log.result is None else _result_to(log.result),
        first_event=log.first_number,
        last_event=log.last_number,
        written_bytes=log.written_bytes,
    )
