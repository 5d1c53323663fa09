"""Converts messages of a guest to the daemon's values; malformed ones raise FrameError.

Each field was checked by the schema (guest/wire/messages.py). The checks here need more than one field, the body, or
the daemon's own enumerations.
"""

from __future__ import annotations

from executor_api.limits import ARTIFACTS_MAX, DIRECTORY_ENTRIES_MAX, VARIABLES_NAMED_MAX
from executor_server.core import (
    BlobChunk,
    BlobRef,
    BranchEnd,
    Changes,
    ErrorDetail,
    EventKind,
    FileInfo,
    Image,
    LimitWarning,
    Log,
    Outcome,
    OutputCut,
    Payload,
    ProcessEventKind,
    ProcessOutcome,
    ProcessOutput,
    ProcessOutputCut,
    ProcessResult,
    ProcessStarted,
    Result,
    ToolCall,
    Usage,
    VariablesState,
)
from executor_server.guest.wire import messages as wire
from executor_server.guest.wire import process_messages as processes
from executor_server.guest.wire.frames import CHUNK_BYTES, MAX_MISSING_MODULES, Frame, FrameError, Kind
from executor_server.guest.wire.savepoint_messages import BranchEnded
from executor_server.guest.wire.savepoint_messages import Changes as ChangedNames
from executor_server.guest.wire.schema import message_of, read_listed, read_object, read_texts

_MAX_IMPORTS_BYTES = 4096
_MAX_MODULE_CHARS = 256

PROCESS_EVENTS = frozenset((Kind.PROCESS_STARTED, Kind.PROCESS_OUTPUT, Kind.PROCESS_OUTPUT_CUT, Kind.PROCESS_ENDED))
"""Kinds of the frames that `read_process_event` reads."""


def read_event(frame: Frame) -> EventKind:
    """Reads an event of an execution, but not its result."""
    match message_of(frame):
        case wire.Log(stream=stream):
            return Log(stream, frame.body.decode("utf-8", "replace"))
        case wire.OutputCut(omitted=omitted):
            return OutputCut(omitted)
        case wire.Image() as image:
            return Image(payload_of(image, frame.body), image.mime, image.source)
        case wire.ToolCall() as call:
            return ToolCall(call.call, call.name, payload_of(call, frame.body))
        case wire.LimitWarning() as warning:
            if warning.used > warning.budget:
                raise FrameError(f"{warning.used} operations of {warning.budget}")
            return LimitWarning(warning.limit, warning.used, warning.budget)
        case wire.BlobChunk(blob=blob):
            return BlobChunk(blob, _bounded(frame.body))
    raise FrameError(f"frame kind {frame.kind} is not an event")


def read_process_event(frame: Frame) -> tuple[str, ProcessEventKind]:
    """Returns the id of a process and its event."""
    match message_of(frame):
        case processes.ProcessStarted(id=process_id, pid=pid):
            return process_id, ProcessStarted(pid)
        case processes.ProcessOutput(id=process_id, stream=stream):
            if not 0 < len(frame.view) <= CHUNK_BYTES:
                raise FrameError(f"{len(frame.view)} bytes of output in one frame")
            return process_id, ProcessOutput(stream, frame.body)
        case processes.ProcessOutputCut(id=process_id, omitted=omitted):
            return process_id, ProcessOutputCut(omitted)
        case processes.ProcessEnded() as ended:
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


def read_result(frame: Frame, policy_fingerprint: str = "") -> Result:
    """Reads the terminal event of an execution, which began under the policy of this fingerprint."""
    result, body = message_of(frame), frame.body
    if not isinstance(result, wire.Result):
        raise FrameError(f"frame kind {frame.kind} is not a result")
    branch_at = result.error + (result.artifacts or 0)
    output_at = branch_at + (result.branch or 0)
    if output_at > len(body):
        raise FrameError("an error, artifacts or a branch past the end of their frame")
    error, listed, branch = body[: result.error], body[result.error : branch_at], body[branch_at:output_at]
    output: Payload | None = None
    if result.output is not None or result.blob is not None:
        output = payload_of(result, body[output_at:])
    return Result(
        outcome=_outcome(result.outcome),
        variables_state=_VARIABLES_STATES.get(result.variables, VariablesState.KEPT),
        generation=result.generation,
        usage=Usage(
            operations=result.operations,
            wall_time_s=result.wall_time_s,
            cpu_time_s=result.cpu_time_s,
            peak_memory_bytes=result.peak_memory_bytes,
            output_bytes=result.output_bytes,
        ),
        output=output,
        error=_read_error(error) if error else None,
        final_answer_call_id=result.final,
        artifacts=tuple(_read_files(listed, ARTIFACTS_MAX)) if listed else (),
        artifacts_truncated=bool(result.artifacts_truncated),
        policy_fingerprint=policy_fingerprint,
        savepoint=result.savepoint or 0,
        savepoint_refused=clean(result.savepoint_refused or ""),
        branch=_read_branch(branch) if branch else None,
        imports=_imports(result.imports) if result.imports else (),
    )


_OUTCOMES = {each.value: each for each in Outcome}
_VARIABLES_STATES = {"reset": VariablesState.RESET, "rolled_back": VariablesState.ROLLED_BACK}


def _imports(listed: list[str]) -> tuple[str, ...]:
    names = sorted({clean(name) for name in listed})
    if sum(len(name.encode()) for name in names) > _MAX_IMPORTS_BYTES:
        raise FrameError("too many imports")
    if any(character <= " " for name in names for character in name):
        raise FrameError("an import that is no name")
    return tuple(names)


def read_modules(done: Frame) -> tuple[str, ...]:
    """Reads the names of modules that the image lacks."""
    return _modules(done.body, MAX_MISSING_MODULES)


def _modules(body: bytes, at_most: int) -> tuple[str, ...]:
    names = read_texts(body, at_most, _MAX_MODULE_CHARS, "modules")
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise FrameError("a module that is no name")
    return tuple(names)


def read_missing(done: Frame) -> tuple[str, ...]:
    """Reads the modules that a registration misses; an empty list means that none is missing."""
    return _modules(done.body, VARIABLES_NAMED_MAX)


def _outcome(name: str) -> Outcome:
    try:
        return _OUTCOMES[name]
    except KeyError as error:
        raise FrameError("an unknown outcome") from error


def _read_error(data: bytes) -> ErrorDetail:
    error = read_object(wire.ErrorDetail, data, "an error detail")
    return ErrorDetail(
        type=clean(error.type),
        message=clean(error.message),
        traceback=clean(error.traceback),
        line=error.line,
        statement=clean(error.statement),
        exit_code=error.exit_code,
    )


def _read_branch(data: bytes) -> BranchEnd:
    ended = read_object(BranchEnded, data, "the end of a branch")
    return BranchEnd(
        number=ended.number or 0,
        refused=clean(ended.refused),
        why_not_kept=clean(ended.why_not_kept),
        variables=_changes(ended.variables),
        files=_changes(ended.files),
        left_out=tuple(map(clean, ended.left_out)),
    )


def _changes(changes: ChangedNames | None) -> Changes | None:
    if changes is None:
        return None
    lists = (changes.added, changes.changed, changes.removed, changes.unknown)
    added, changed, removed, unknown = (tuple(map(clean, names)) for names in lists)
    return Changes(added, changed, removed, unknown, changes.truncated)


def clean(text: str) -> str:
    """Returns the text with lone surrogates replaced, which no UTF-8 message can carry."""
    return text.encode("utf-8", "replace").decode()


def payload_of(message: wire.Image | wire.ToolCall | wire.Result | wire.GotVariable, body: bytes) -> Payload:
    """Returns the inline bytes, or the reference to a blob that was sent before."""
    if message.blob is None:
        return _bounded(body)
    if message.size is None:
        raise FrameError("a blob without its size")
    return BlobRef(message.blob, message.size)


def _bounded(body: bytes) -> bytes:
    if len(body) > CHUNK_BYTES:
        raise FrameError(f"{len(body)} bytes inline")
    return body


def read_variables(done: wire.Done, body: bytes) -> tuple[tuple[tuple[str, Payload], ...], tuple[str, ...]]:
    """Reads (variables, missing names) of the DONE that answers GET_VARIABLES."""
    if done.names is None or done.names > len(body):
        raise FrameError("a list of variables past the end of its frame")
    answer = read_object(wire.GotVariables, body[: done.names], "a list of variables")
    position = done.names
    variables: list[tuple[str, Payload]] = []
    for item in answer.variables:
        length = item.inline or 0
        if position + length > len(body):
            raise FrameError("a variable past the end of its frame")
        variables.append((item.name, payload_of(item, body[position : position + length])))
        position += length
    return tuple(variables), tuple(answer.missing)


def read_file_info(entry: wire.FileEntry | None) -> FileInfo:
    """Converts the description of a file."""
    if entry is None:
        raise FrameError("a file without its description")
    return FileInfo(
        path=entry.path,
        size_bytes=entry.size,
        is_directory=entry.directory,
        modify_time_s=entry.modified,
        mode=entry.mode,
        is_link=entry.target is not None,
        target=entry.target or "",
        user_id=entry.uid,
        group_id=entry.gid,
    )


def read_listing(done: wire.Done, body: bytes) -> tuple[list[FileInfo], bool]:
    """Reads (entries, truncated) of the DONE that answers FILE_LIST."""
    if done.truncated is None:
        raise FrameError("a listing that does not say whether it is all")
    return _read_files(body, DIRECTORY_ENTRIES_MAX), done.truncated


def _read_files(data: bytes, at_most: int) -> list[FileInfo]:
    return [read_file_info(entry) for entry in read_listed(wire.FileEntry, data, at_most, "files")]
