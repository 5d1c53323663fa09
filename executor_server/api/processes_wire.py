"""Processes on the wire: requests become values of the daemon, and its values become messages."""

from __future__ import annotations

from executor_api.limits import PATH_BYTES_MAX, WRITE_BYTES_MAX
from executor_api.messages import write
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.api import checks
from executor_server.core import (
    ARGUMENTS_BYTES_MAX,
    ARGUMENTS_MAX,
    TERMINAL_CHARS_MAX,
    ProcessEvent,
    ProcessOutput,
    ProcessOutputCut,
    ProcessRequest,
    ProcessResult,
    ProcessStarted,
    SignalTarget,
    TerminalSize,
)
from executor_server.sessions.journal import ProcessLog

_SIGNALS_MAX = 64
_TIME_S_MAX = 365 * 86_400.0
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
        case ProcessStarted():
            return write(pb.ProcessEvent, event, started=event.kind)
        case ProcessOutput():
            return write(pb.ProcessEvent, event, output=event.kind)
        case ProcessOutputCut():
            return write(pb.ProcessEvent, event, output_cut=event.kind)
        case ProcessResult():
            return write(pb.ProcessEvent, event, result=event.kind)


def process_info_to(log: ProcessLog) -> pb.ProcessInfo:
    return write(
        pb.ProcessInfo,
        log,
        log.description,
        process_id=log.process_id,
        first_event=log.first_number,
        last_event=log.last_number,
    )
