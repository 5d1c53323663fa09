"""Converts a guest's messages about processes to the daemon's values; raises FrameError for every other form."""

from __future__ import annotations

from executor_server.core import (
    ProcessEventKind,
    ProcessOutcome,
    ProcessOutput,
    ProcessOutputCut,
    ProcessResult,
    ProcessStarted,
)
from executor_server.guest.wire import process_messages as wire
from executor_server.guest.wire.frames import CHUNK_BYTES, Frame, FrameError, Kind
from executor_server.guest.wire.schema import message_of

PROCESS_EVENTS = frozenset((Kind.PROCESS_STARTED, Kind.PROCESS_OUTPUT, Kind.PROCESS_OUTPUT_CUT, Kind.PROCESS_ENDED))
"""Kinds of the frames that `read_process_event` reads."""


def read_process_event(frame: Frame) -> tuple[str, ProcessEventKind]:
    """Returns the id of a process and its event."""
    match message_of(frame):
        case wire.ProcessStarted(id=process_id, pid=pid):
            return process_id, ProcessStarted(pid)
        case wire.ProcessOutput(id=process_id, stream=stream):
            if not 0 < len(frame.view) <= CHUNK_BYTES:
                raise FrameError(f"{len(frame.view)} bytes of output in one frame")
            return process_id, ProcessOutput(stream, frame.body)
        case wire.ProcessOutputCut(id=process_id, omitted=omitted):
            return process_id, ProcessOutputCut(omitted)
        case wire.ProcessEnded() as ended:
            return ended.id, ProcessResult(
                outcome=ProcessOutcome(ended.outcome),
                exit_code=ended.exit_code,
                signal=ended.signal,
                wall_time_s=ended.wall_time_s,
                cpu_time_s=ended.cpu_time_s,
                peak_memory_bytes=ended.peak_memory_bytes,
                output_bytes=ended.output_bytes,
            )
    raise FrameError(f"frame kind {frame.kind} is not an event of a process")
