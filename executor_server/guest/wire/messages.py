"""The messages of the guest channel: one class for the head of each kind of frame, and for each JSON object in a body.

Both ends use this schema, and the rules of session_rules.py. Renaming, adding or removing a field, or changing its
bounds, changes the protocol: raise PROTOCOL_VERSION (frames.py) with it. tests/unit/guest/wire/test_messages.py
compares the schema with the version's snapshot. An adopted sandbox has the guest of the daemon that made it, so a later
daemon continues with it only if the version is the same (executor_server/sessions/recovery.py).

A class also documents the body. Bounds are those of a correct peer; the daemon treats every message as hostile. The
reader of a message makes the checks that need several fields, or the body.
"""

from __future__ import annotations

from executor_api.displays import DISPLAY_TYPE
from executor_api.limits import (
    BLOB_BYTES_MAX,
    IDENTIFIER_CHARS_MAX,
    PATH_BYTES_MAX,
    SAVEPOINTS_MAX,
    TOOL_ERROR_ARGUMENTS_BYTES_MAX,
    TOOL_MODULES_MAX,
    TOOL_PARAMETERS_MAX,
    VARIABLES_MAX,
    VARIABLES_NAMED_MAX,
)

from .frames import CHUNK_BYTES, MAX_BODY_BYTES, Kind
from .savepoint_messages import MAX_REASON_CHARS
from .schema import (
    Message,
    Record,
    Request,
    boolean,
    identifier,
    integer,
    number,
    one_of,
    record,
    records,
    scalars,
    text,
    texts,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

MAX_PAYLOAD_BYTES = BLOB_BYTES_MAX  # one value that travels as a blob
MAX_MESSAGE_CHARS, MAX_TRACEBACK_CHARS = 16_384, 32_768
MAX_IMPORTS, MAX_IMPORT_CHARS = 64, 200
MAX_NAME_CHARS = IDENTIFIER_CHARS_MAX
MAX_REFUSAL_CHARS = 8192
_ID_CHARS = 64
_MAX_GENERATION = 2**31
MIN_TIME_S, MAX_TIME_S = -62_135_596_800.0, 253_402_300_799.0  # years 1 and 9999, the bounds of a wire timestamp


IMAGE_TYPES = ("image/png", "image/jpeg", DISPLAY_TYPE)
IMAGE_SOURCES = ("figure", "display")


# ---------------------------------------------------------------------------------------------------------------------
# Objects within bodies and heads


class Place(Record):
    """Where some bytes are: the next `inline` bytes of the body, or a blob."""

    inline: Optional[int] = integer(0, MAX_BODY_BYTES, default=None)
    blob: Optional[str] = text(_ID_CHARS, default=None)


class ListedTool(Record):
    """A tool of REGISTER_TOOLS. A shipped one has `modules`, and the places of its parts."""

    name: str = text(MAX_NAME_CHARS)
    description: str = text(16 * 1024)
    parameters: list[str] = texts(TOOL_PARAMETERS_MAX, MAX_NAME_CHARS)
    final: bool = boolean()
    modules: Optional[list[str]] = texts(TOOL_MODULES_MAX, MAX_NAME_CHARS, default=None)
    entry: Optional[str] = text(MAX_NAME_CHARS, default=None)
    source: Optional[Place] = record(Place, default=None)
    bindings: Optional[Place] = record(Place, default=None)
    value: Optional[Place] = record(Place, default=None)


class SetVariable(Record):
    """A variable of SET_VARIABLES."""

    name: str = text(MAX_NAME_CHARS)
    blob: Optional[str] = text(_ID_CHARS, default=None)
    inline: Optional[int] = integer(0, CHUNK_BYTES, default=None)


class GotVariable(Record):
    """A variable of the answer to GET_VARIABLES."""

    name: str = text(MAX_NAME_CHARS)
    inline: Optional[int] = integer(0, CHUNK_BYTES, default=None)
    blob: Optional[str] = identifier(default=None)
    size: Optional[int] = integer(0, MAX_PAYLOAD_BYTES, default=None)


class GotVariables(Record):
    """The answer to GET_VARIABLES, without the values."""

    variables: list[GotVariable] = records(GotVariable, VARIABLES_MAX)
    missing: list[str] = texts(VARIABLES_NAMED_MAX, MAX_NAME_CHARS)


class FileEntry(Record):
    """The description of a file, a directory or a link, which has a `target`."""

    path: str = text(PATH_BYTES_MAX)
    size: int = integer()
    directory: bool = boolean()
    modified: float = number(MIN_TIME_S, MAX_TIME_S)
    mode: int = integer(0, 0o7777, default=0)
    target: Optional[str] = text(PATH_BYTES_MAX, default=None)
    uid: int = integer(0, 2**32 - 1, default=0)
    gid: int = integer(0, 2**32 - 1, default=0)


class ErrorDetail(Record):
    """The error of an execution."""

    type: str = text(256)
    message: str = text(MAX_MESSAGE_CHARS)
    traceback: str = text(MAX_TRACEBACK_CHARS, default="")
    line: int = integer(0, 2**31 - 1, default=0)
    statement: str = text(MAX_MESSAGE_CHARS, default="")
    exit_code: Optional[int] = integer(0, 255, default=None)


# ---------------------------------------------------------------------------------------------------------------------
# Daemon to guest.


class Hello(Message, kind=Kind.HELLO):
    token: str = text(256)
    protocol: int = integer()
    daemon: str = text(64)
    last_seq: int = integer()


class TakeListener(Message, kind=Kind.TAKE_LISTENER):
    """The only frame of its connection, in place of HELLO. LISTENER answers it."""

    token: str = text(256)
    protocol: int = integer()


class Configure(Request, kind=Kind.CONFIGURE):
    """Body: SessionRules, `settings` bytes; an object of environment variables, `env` bytes; the prelude."""

    settings: int = integer(0, MAX_BODY_BYTES)
    env: int = integer(0, MAX_BODY_BYTES)


class Restrict(Request, kind=Kind.RESTRICT):
    """Body: SessionRules."""


class Execute(Message, kind=Kind.EXECUTE):
    """Body: the source. `asked` and `policy` are for the daemon's journal; the guest does not use them.

    With `savepoints`, one is taken first, as by TAKE_SAVEPOINT; the session goes back to it if the interpreter ends.
    With `branches`, it runs in a copy of the interpreter; at most that many copies are kept.
    """

    id: str = text(_ID_CHARS)
    mode: str = text(32)
    asked: dict[str, Any] = scalars(32)
    wall_time_s: float = number(0.001)
    cpu_time_s: float = number(0.001)
    operations: int = integer(1)
    output_bytes: int = integer(2)
    policy: str = text(64)
    savepoints: Optional[int] = integer(1, SAVEPOINTS_MAX, default=None)
    savepoint_file_bytes: Optional[int] = integer(default=None)
    branches: Optional[int] = integer(1, SAVEPOINTS_MAX, default=None)


class Cancel(Message, kind=Kind.CANCEL):
    id: str = text(_ID_CHARS)


class Note(Message, kind=Kind.NOTE):
    """Body: a line for the log of the running execution, or of the next one; UTF-8."""


class Hold(Message, kind=Kind.HOLD):
    """`held`: a connection of the session waits for an approval, so the wall clock of executions stands still."""

    held: bool = boolean()


class ToolResult(Message, kind=Kind.TOOL_RESULT):
    """Body: the message of an exception of this type, and its arguments; if `ok`, the value, unless a blob has it."""

    id: str = text(_ID_CHARS)
    call: str = text(_ID_CHARS)
    ok: bool = boolean()
    type: Optional[str] = text(256, default=None)
    blob: Optional[str] = text(_ID_CHARS, default=None)
    arguments: Optional[int] = integer(0, TOOL_ERROR_ARGUMENTS_BYTES_MAX, default=None)  # bytes of them


class RegisterTools(Request, kind=Kind.REGISTER_TOOLS):
    """Body: a list of ListedTool, `listed` bytes, then all inline parts in order."""

    listed: int = integer(0, MAX_BODY_BYTES)


class SetVariables(Request, kind=Kind.SET_VARIABLES):
    """Body: a list of SetVariable, `listed` bytes, then all inline values in order."""

    listed: int = integer(0, MAX_BODY_BYTES)


class GetVariables(Request, kind=Kind.GET_VARIABLES):
    """Body: a list of names; empty for all."""


class FindModules(Request, kind=Kind.FIND_MODULES):
    """Body: a list of names."""


class ExportState(Request, kind=Kind.EXPORT_STATE):
    max_bytes: int = integer()


class RestoreState(Request, kind=Kind.RESTORE_STATE):
    """Restores a state. Without a blob, it only asks whether a state can still be restored, or whether this one was."""

    digest: str = text(64)
    blob: Optional[str] = text(_ID_CHARS, default=None)


class BlobBegin(Request, kind=Kind.BLOB_BEGIN):
    blob: str = text(_ID_CHARS)
    size: int = integer()


class BlobData(Message, kind=Kind.BLOB_DATA):
    """Body: the next piece."""

    blob: str = text(_ID_CHARS)


class BlobDrop(Message, kind=Kind.BLOB_DROP):
    blob: str = text(_ID_CHARS)


class FilePut(Request, kind=Kind.FILE_PUT):
    path: str = text(PATH_BYTES_MAX)
    size: int = integer()
    tar: bool = boolean(default=False)
    append: bool = boolean(default=False)
    mode: Optional[int] = integer(0, 0o777, default=None)


class FileData(Request, kind=Kind.FILE_DATA):
    """Body: the next piece of the file; with `abandon`, none follows."""

    abandon: Optional[bool] = boolean(default=None)


class FileGet(Request, kind=Kind.FILE_GET):
    """Body, of an archive: a list of names and paths that it leaves out; empty for none."""

    path: str = text(PATH_BYTES_MAX)
    max_bytes: int = integer()
    tar: bool = boolean(default=False)
    offset: int = integer(default=0)
    length: Optional[int] = integer(default=None)


class FileList(Request, kind=Kind.FILE_LIST):
    path: str = text(PATH_BYTES_MAX)
    recursive: bool = boolean(default=True)


class ManageFile(Request, kind=Kind.MANAGE_FILE):
    """Each action uses the fields that its message in the API has."""

    action: str = one_of("stat", "realpath", "mkdir", "move", "remove")
    path: str = text(PATH_BYTES_MAX)
    target: str = text(PATH_BYTES_MAX, default="")
    follow: bool = boolean(default=False)
    parents: bool = boolean(default=False)
    exist_ok: bool = boolean(default=False)
    recursive: bool = boolean(default=False)
    missing_ok: bool = boolean(default=False)


class Ack(Message, kind=Kind.ACK):
    pass


class Ping(Message, kind=Kind.PING):
    pass


class Shutdown(Message, kind=Kind.SHUTDOWN):
    pass


# ---------------------------------------------------------------------------------------------------------------------
# Guest to daemon. A payload is the body, or a blob sent before.


class Ready(Message, kind=Kind.READY):
    protocol: int = integer()
    python: str = text(64)
    generation: int = integer(1, _MAX_GENERATION)
    last_seq: int = integer()
    acked: int = integer()


class Listener(Message, kind=Kind.LISTENER):
    """Carries the descriptor of the egress proxy's listener."""


class Log(Message, kind=Kind.LOG):
    """Body: the output, UTF-8."""

    id: str = text(_ID_CHARS)
    stream: str = one_of("stdout", "stderr")


class OutputCut(Message, kind=Kind.OUTPUT_CUT):
    id: str = text(_ID_CHARS)
    omitted: int = integer()


class Image(Message, kind=Kind.IMAGE):
    """Payload: the image, or display data."""

    id: str = text(_ID_CHARS)
    mime: str = one_of(*IMAGE_TYPES)
    source: str = one_of(*IMAGE_SOURCES)
    blob: Optional[str] = identifier(default=None)
    size: Optional[int] = integer(0, MAX_PAYLOAD_BYTES, default=None)


class ToolCall(Message, kind=Kind.TOOL_CALL):
    """Payload: the packed arguments."""

    id: str = text(_ID_CHARS)
    call: str = identifier()
    name: str = text(MAX_NAME_CHARS)
    blob: Optional[str] = identifier(default=None)
    size: Optional[int] = integer(0, MAX_PAYLOAD_BYTES, default=None)


class BlobChunk(Message, kind=Kind.BLOB_CHUNK):
    """Body: the next piece. The blob belongs to an execution, or to the answer to a request."""

    id: Optional[str] = text(_ID_CHARS, default=None)
    op: Optional[int] = integer(default=None)
    blob: str = identifier()


class LimitWarning(Message, kind=Kind.LIMIT_WARNING):
    id: str = text(_ID_CHARS)
    limit: str = one_of("operations", "session_operations")
    used: int = integer()
    budget: int = integer(1)


class Result(Message, kind=Kind.RESULT):
    """Body: ErrorDetail, a list of FileEntry and BranchEnded, of the given lengths; the value, unless a blob has it."""

    id: str = text(_ID_CHARS)
    outcome: str = text(32)
    error: int = integer(0, MAX_BODY_BYTES)
    variables: str = text(16)
    generation: int = integer(1, _MAX_GENERATION)
    final: str = identifier(may_be_empty=True)
    operations: int = integer()
    wall_time_s: float = number()
    cpu_time_s: float = number()
    peak_memory_bytes: int = integer()
    output_bytes: int = integer()
    oom_suspect: bool = boolean(default=False)
    artifacts: Optional[int] = integer(0, MAX_BODY_BYTES, default=None)
    artifacts_truncated: Optional[bool] = boolean(default=None)
    imports: Optional[list[str]] = texts(MAX_IMPORTS, MAX_IMPORT_CHARS, default=None)
    savepoint: Optional[int] = integer(1, _MAX_GENERATION, default=None)
    savepoint_refused: Optional[str] = text(MAX_REASON_CHARS, default=None)
    branch: Optional[int] = integer(0, MAX_BODY_BYTES, default=None)
    blob: Optional[str] = identifier(default=None)
    size: Optional[int] = integer(0, MAX_PAYLOAD_BYTES, default=None)
    output: Optional[int] = integer(0, MAX_BODY_BYTES, default=None)


class Done(Message, kind=Kind.DONE):
    """The end of a request. Body: the answer; for variables, a list of `names` bytes before the values."""

    op: int = integer()
    ok: bool = boolean()
    reason: Optional[str] = text(64, default=None)
    message: Optional[str] = text(MAX_REFUSAL_CHARS, default=None)
    names: Optional[int] = integer(0, MAX_BODY_BYTES, default=None)
    truncated: Optional[bool] = boolean(default=None)
    file: Optional[FileEntry] = record(FileEntry, default=None)
    restored: Optional[bool] = boolean(default=None)
    written: Optional[int] = integer(default=None)


class FileChunk(Message, kind=Kind.FILE_CHUNK):
    """First the description of the file, without a body; then its bytes."""

    op: int = integer()
    file: Optional[FileEntry] = record(FileEntry, default=None)


class Pong(Message, kind=Kind.PONG):
    """CPU time since the session began, outside executions."""

    background_cpu_time_s: float = number(default=0.0)
