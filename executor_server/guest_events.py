"""From frames of a guest to the daemon's values. Every field is checked; FrameError for whatever has another form."""

from __future__ import annotations

import json
import re

from executor_api.limits import ARTIFACTS_MAX, VARIABLES_MAX, VARIABLES_NAMED_MAX
from executor_server.guest.frames import CHUNK_BYTES, MAX_MISSING_MODULES, Fields, Frame, FrameError, Kind
from executor_server.model import (
    BlobChunk,
    BlobRef,
    ErrorDetail,
    EventKind,
    FileInfo,
    Image,
    LimitWarning,
    Log,
    Outcome,
    OutputCut,
    Payload,
    Result,
    ToolCall,
    Usage,
    VariablesState,
)

MAX_PAYLOAD_BYTES = 256 * 1024 * 1024
_MIME_TYPES = frozenset(("image/png", "image/jpeg"))
_SOURCES = frozenset(("figure", "display"))
_WARNED_LIMITS = frozenset(("operations", "session_operations"))
_STREAMS = frozenset(("stdout", "stderr"))
# An id goes to the client and comes back from it: of the form that requests are held to, so that it can.
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_MESSAGE_CHARS = 16_384
_MAX_TRACEBACK_CHARS = 32_768
_MAX_FILES = 10_000
_MAX_IMPORTS = 64
_MAX_IMPORT_CHARS = 200
_MAX_IMPORTS_BYTES = 4096
_MAX_MODULE_CHARS = 256
# The years 1 and 9999, which a timestamp on the wire can carry.
_MIN_TIME_S, _MAX_TIME_S = -62_135_596_800.0, 253_402_300_799.0


def read_event(frame: Frame) -> EventKind:
    """An event of an execution that is not its result."""
    head = frame.head
    if frame.kind == Kind.LOG:
        return Log(_one_of(head, "stream", _STREAMS), frame.body.decode("utf-8", "replace"))
    if frame.kind == Kind.OUTPUT_CUT:
        return OutputCut(head.integer("omitted"))
    if frame.kind == Kind.IMAGE:
        return Image(
            read_payload(head, frame.body), _one_of(head, "mime", _MIME_TYPES), _one_of(head, "source", _SOURCES)
        )
    if frame.kind == Kind.TOOL_CALL:
        return ToolCall(_id(head, "call"), head.text("name", 256), read_payload(head, frame.body))
    if frame.kind == Kind.LIMIT_WARNING:
        budget = head.integer("budget", 1)
        return LimitWarning(_one_of(head, "limit", _WARNED_LIMITS), head.integer("used", 0, budget), budget)
    if frame.kind == Kind.BLOB_CHUNK:
        return BlobChunk(_id(head, "blob"), _bounded(frame.body))
    raise FrameError(f"frame kind {frame.kind} is not an event")


def read_result(frame: Frame) -> Result:
    """The terminal event of an execution."""
    head = frame.head
    error_bytes = head.integer("error", 0, len(frame.body))
    artifacts_bytes = head.integer("artifacts", 0, len(frame.body) - error_bytes, default=0)
    rest = frame.body[error_bytes + artifacts_bytes :]
    output: Payload | None = None
    if "output" in head or "blob" in head:
        output = read_payload(head, rest)
    return Result(
        outcome=_outcome(head),
        variables_state=VariablesState.RESET if head.text("variables", 16) == "reset" else VariablesState.KEPT,
        generation=head.integer("generation", 1, 2**31),
        usage=Usage(
            operations=head.integer("operations"),
            wall_time_s=head.number("wall_time_s"),
            cpu_time_s=head.number("cpu_time_s"),
            peak_memory_bytes=head.integer("peak_memory_bytes"),
            output_bytes=head.integer("output_bytes"),
        ),
        output=output,
        error=_read_error(frame.body[:error_bytes]) if error_bytes else None,
        final_answer_call_id=_id(head, "final") if head.text("final") else "",
        artifacts=_read_artifacts(frame.body[error_bytes : error_bytes + artifacts_bytes]),
        artifacts_truncated=head.boolean("artifacts_truncated", default=False),
        imports=_read_imports(head) if "imports" in head else (),
    )


def _read_imports(head: Fields) -> tuple[str, ...]:
    names = sorted({_clean(name) for name in head.texts("imports", _MAX_IMPORTS, _MAX_IMPORT_CHARS)})
    if sum(len(name.encode()) for name in names) > _MAX_IMPORTS_BYTES:
        raise FrameError("too many imports")
    if any(character <= " " for name in names for character in name):
        raise FrameError("an import that is no name")
    return tuple(names)


def read_modules(done: Frame) -> tuple[str, ...]:
    """Modules that were looked for and are not there."""
    return _modules(done.body, MAX_MISSING_MODULES)


def _modules(body: bytes, at_most: int) -> tuple[str, ...]:
    try:
        listed = Fields({"modules": json.loads(body)})
    except (ValueError, RecursionError) as error:
        raise FrameError("modules that are not JSON") from error
    names = listed.texts("modules", at_most, _MAX_MODULE_CHARS)
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise FrameError("a module that is no name")
    return tuple(names)


def read_missing(done: Frame) -> tuple[str, ...]:
    """Which of the modules that were asked for are not there. Also the empty list: all of them are."""
    return _modules(done.body, VARIABLES_NAMED_MAX)


def _read_artifacts(data: bytes) -> tuple[FileInfo, ...]:
    return tuple(_read_files(data, ARTIFACTS_MAX)) if data else ()


def _outcome(head: Fields) -> Outcome:
    try:
        return Outcome(head.text("outcome", 32))
    except ValueError as error:
        raise FrameError("an unknown outcome") from error


def _read_error(data: bytes) -> ErrorDetail:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FrameError("an error detail that is not JSON") from error
    if not isinstance(values, dict):
        raise FrameError("an error detail that is not an object")
    fields = Fields(values)
    return ErrorDetail(
        type=_clean(fields.text("type", 256)),
        message=_clean(fields.text("message", _MAX_MESSAGE_CHARS)),
        traceback=_clean(fields.text("traceback", _MAX_TRACEBACK_CHARS, default="")),
        line=fields.integer("line", 0, 2**31 - 1, default=0),
        statement=_clean(fields.text("statement", _MAX_MESSAGE_CHARS, default="")),
        exit_code=fields.integer("exit_code", 0, 255) if "exit_code" in fields else None,
    )


def _clean(text: str) -> str:
    """The text with lone surrogates replaced, which no UTF-8 message can carry."""
    return text.encode("utf-8", "replace").decode()


def read_payload(head: Fields, body: bytes) -> Payload:
    """Inline bytes, or the reference to a blob that was sent before."""
    if "blob" in head:
        return BlobRef(_id(head, "blob"), head.integer("size", 0, MAX_PAYLOAD_BYTES))
    return _bounded(body)


def _bounded(body: bytes) -> bytes:
    if len(body) > CHUNK_BYTES:
        raise FrameError(f"{len(body)} bytes inline")
    return body


def read_variables(frame: Frame) -> tuple[tuple[tuple[str, Payload], ...], tuple[str, ...]]:
    """(variables, missing names) of the DONE frame that answers GET_VARIABLES."""
    size = frame.head.integer("names", 0, len(frame.body))
    try:
        values = json.loads(frame.body[:size])
    except (ValueError, RecursionError) as error:
        raise FrameError("a list of variables that is not JSON") from error
    if not isinstance(values, dict):
        raise FrameError("a list of variables that is not an object")
    fields = Fields(values)
    position = size
    variables: list[tuple[str, Payload]] = []
    for item in fields.objects("variables", VARIABLES_MAX):
        length = item.integer("inline", 0, CHUNK_BYTES, default=0)
        if position + length > len(frame.body):
            raise FrameError("a variable past the end of its frame")
        payload = read_payload(item, frame.body[position : position + length])
        variables.append((item.text("name", 256), payload))
        position += length
    return tuple(variables), tuple(fields.texts("missing", VARIABLES_NAMED_MAX, 256))


def read_file_info(fields: Fields | None) -> FileInfo:
    if fields is None:
        raise FrameError("a file without its description")
    return FileInfo(
        path=fields.text("path", 2048),
        size_bytes=fields.integer("size"),
        is_directory=fields.boolean("directory"),
        modify_time_s=fields.number("modified", _MIN_TIME_S, _MAX_TIME_S),
    )


def read_listing(frame: Frame) -> tuple[list[FileInfo], bool]:
    """(entries, truncated) of the DONE frame that answers FILE_LIST."""
    return _read_files(frame.body, _MAX_FILES), frame.head.boolean("truncated")


def _read_files(data: bytes, at_most: int) -> list[FileInfo]:
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FrameError("a listing that is not JSON") from error
    return [read_file_info(entry) for entry in Fields({"entries": entries}).objects("entries", at_most)]


def _one_of(head: Fields, name: str, allowed: frozenset[str]) -> str:
    value = head.text(name, 64)
    if value not in allowed:
        raise FrameError(f"field {name} is none of {sorted(allowed)}")
    return value


def _id(head: Fields, name: str) -> str:
    value = head.text(name, 64)
    if not _ID.fullmatch(value):
        raise FrameError(f"field {name} is not an id")
    return value
