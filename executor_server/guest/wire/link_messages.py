"""The messages on the links between the supervisor and its children: one class for each, and for each object in a body.

Both ends of a link (link.py) use this schema; messages.py has the schema of the channel to the daemon. Both ends are
forked from one process, so they never differ in version. tests/unit/guest/wire/test_messages.py compares the schema
with its snapshot, so that no field changes by accident.

Messages of the interpreter may come from agent code, and messages of the checker from a source that broke its parser.
Each is read whole and checked before any of its fields is used. The receiver makes the checks that need several fields,
the body, or its own state.
"""

from __future__ import annotations

from executor_api.limits import TOOL_ERROR_ARGUMENTS_BYTES_MAX, TOOL_MODULES_MAX, TOOL_PARAMETERS_MAX, TOOLS_MAX

from .frames import MAX_BODY_BYTES, FrameError
from .messages import IMAGE_SOURCES, IMAGE_TYPES, MAX_IMPORT_CHARS, MAX_IMPORTS, MAX_NAME_CHARS, ErrorDetail
from .savepoint_messages import MAX_LEFT_OUT, MAX_LEFT_OUT_CHARS, Changes
from .schema import Record, boolean, integer, one_of, read_listed, record, text, texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

    from .link import Packet

MAX_REASON_CHARS = 300  # a child's reason for not going on
MAX_ANSWER_CHARS = 4000  # the message of the interpreter's answer to a request
MAX_SOURCE_BYTES = 4 * MAX_BODY_BYTES
# Outcomes that the interpreter may report; the supervisor and the daemon find all others themselves.
PROGRAM_OUTCOMES = (
    *("succeeded", "exception", "import_denied", "policy_denied", "operation_limit", "out_of_memory", "exited"),
)
STOPS = ("import_denied", "policy_denied", "operation_limit")
"""Outcomes of a program that the interpreter itself stops."""
LIMITS_WITH_WARNINGS = ("operations", "session_operations")
TOOL_PARTS = ("source", "bindings", "value")
DRAWING_TIME_S = 10.0  # Seconds for drawing figures in one execution, in addition to its limits.
_CALL_CHARS = 64
_MAX_PID = 2**31 - 1
_FILENAME_CHARS = 64
_MODULE_CHARS = 4096
_DESCRIPTION_CHARS = 16 * 1024


class LinkMessage(Record):
    """The head of a message; `kind` is its name on the link."""

    kind = ""
    by_kind: dict[str, type[LinkMessage]] = {}  # noqa: RUF012 - filled once, by the classes themselves

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        assert kind not in LinkMessage.by_kind, f"two messages of kind {kind}"
        assert not {"t", "memfd"} & cls.fields.keys(), "names that the link itself writes"
        cls.kind = kind
        LinkMessage.by_kind[kind] = cls

    def head(self) -> dict[str, Any]:
        return {"t": self.kind, **(self.__dict__ if self._is_flat else Record.head(self))}


def message_of(packet: Packet) -> LinkMessage:
    """Returns the message in a packet's head. Reads it once only. Raises FrameError."""
    if packet.message is None:
        kind = packet.head.values.get("t")
        cls = LinkMessage.by_kind.get(kind) if type(kind) is str else None
        if cls is None:
            raise FrameError(f"an unknown message {str(kind)[:32]!r}")
        packet.message = cls.read(packet.head)
    return packet.message


# ---------------------------------------------------------------------------------------------------------------------
# Objects within bodies


class PlacedTool(Record):
    """A tool of TOOLS or SHIP. A shipped one has `modules`; an unavailable one has `why_not`."""

    name: str = text(MAX_NAME_CHARS)
    description: str = text(_DESCRIPTION_CHARS)
    parameters: list[str] = texts(TOOL_PARAMETERS_MAX, MAX_NAME_CHARS)
    final: bool = boolean()
    modules: Optional[list[str]] = texts(TOOL_MODULES_MAX, MAX_NAME_CHARS, default=None)
    entry: str = text(MAX_NAME_CHARS, default="")
    why_not: Optional[str] = text(MAX_REASON_CHARS, default=None)


class RefusedSource(Record):
    """The checker's reason to refuse a source."""

    outcome: str = one_of("exception", "import_denied", "policy_denied")
    error: ErrorDetail = record(ErrorDetail)


class SavepointMade(Record):
    """The interpreter's answer: the files of the workspace in the copy."""

    files: int = integer()
    file_bytes: int = integer()
    left_out: list[str] = texts(MAX_LEFT_OUT, MAX_LEFT_OUT_CHARS)


class BranchChanges(Record):
    """The changes of a program in a branch."""

    variables: Changes = record(Changes)
    files: Changes = record(Changes)


def placed_tools(body: bytes) -> list[PlacedTool]:
    """Reads the list of tools in a body. Raises FrameError."""
    return read_listed(PlacedTool, body, TOOLS_MAX, "tools")


# ---------------------------------------------------------------------------------------------------------------------
# Supervisor to checker, and its answer


class Check(LinkMessage, kind="check"):
    """Body: CodeRules, `rules` bytes; the source."""

    filename: str = text(_FILENAME_CHARS)
    mode: str = text(32)
    rules: int = integer(0, MAX_SOURCE_BYTES)


class Verdict(LinkMessage, kind="verdict"):
    """Body: the code that the interpreter runs or, unless `ok`, RefusedSource."""

    ok: bool = boolean()
    imports: list[str] = texts(MAX_IMPORTS, MAX_IMPORT_CHARS)


# ---------------------------------------------------------------------------------------------------------------------
# Supervisor to interpreter


class SetRules(LinkMessage, kind="settings"):
    """Body: CodeRules."""


class PlaceTools(LinkMessage, kind="tools"):
    """Body: a list of PlacedTool; the interpreter makes none of them."""


class ToolPart(LinkMessage, kind="part"):
    """Payload: a part of a tool in the next SHIP."""

    tool: str = text(MAX_NAME_CHARS)
    part: str = one_of(*TOOL_PARTS)


class ShipTools(LinkMessage, kind="ship"):
    """Body: a list of PlacedTool. `again`: an earlier interpreter had made them. ANSWERED answers it."""

    again: bool = boolean()


class DropTools(LinkMessage, kind="drop"):
    """Body: a list of names. Calls of these tools raise an error with this reason."""

    why_not: str = text(MAX_REASON_CHARS)


class RunProgram(LinkMessage, kind="run"):
    """Body: the source, `source` bytes; the checker's code. The run's pipes come as descriptors.

    `operations_mark` and `session_mark`: operations of the run at which NEAR_LIMIT is due, for either budget.
    """

    filename: str = text(_FILENAME_CHARS)
    source: int = integer(0, MAX_SOURCE_BYTES)
    operations: int = integer()
    operations_mark: Optional[int] = integer(default=None)
    session_mark: Optional[int] = integer(default=None)
    session_operations: Optional[int] = integer(default=None)  # if they leave less than the run requested
    whole_output: bool = boolean(default=False)


class Variable(LinkMessage, kind="variable"):
    """Payload: the packed value. To the interpreter: set it at COMMIT; from it: part of the answer to GET."""

    name: str = text(MAX_NAME_CHARS)


class CommitVariables(LinkMessage, kind="commit"):
    """Sets the variables sent before. ANSWERED answers it."""


class ForgetVariables(LinkMessage, kind="forget"):
    """Drops the variables sent before."""


class GetVariables(LinkMessage, kind="get"):
    """Body: a list of names; empty for all. The answer: VARIABLE for each, then ANSWERED with the missing ones."""


class FindModules(LinkMessage, kind="find"):
    """Body: a list of names. ANSWERED has those that the image lacks."""


class ExportState(LinkMessage, kind="export"):
    """The answer: STATE, then ANSWERED with its manifest."""

    max_bytes: int = integer()


class RestoreState(LinkMessage, kind="restore"):
    """Payload: the state, a memory file. ANSWERED has its manifest."""


class TakeSavepoint(LinkMessage, kind="savepoint"):
    """The link of the new copy comes as a descriptor. ANSWERED has SavepointMade.

    `whole`: the request fails if the copy can't have all files of the workspace.
    """

    file_bytes: int = integer()
    whole: bool = boolean(default=False)


class MakeSuccessor(LinkMessage, kind="make_successor"):
    """To a savepoint's process: forks another one, whose link comes as a descriptor."""


class Resume(LinkMessage, kind="resume"):
    """To a copy: continues as the interpreter, with its link.

    `branch`: the interpreter stays, and the workspace is unchanged.
    """

    branch: bool = boolean(default=False)


class BeginBranch(LinkMessage, kind="begin_branch"):
    """To a branch, before its program: records its variables. ANSWERED answers it."""


class EndBranch(LinkMessage, kind="end_branch"):
    """To a branch, after its program. ANSWERED has BranchChanges."""


class RestoreFiles(LinkMessage, kind="restore_files"):
    """To the interpreter, after a branch: restores the workspace. ANSWERED says what failed."""


class ToolReply(LinkMessage, kind="reply"):
    """Payload: the message of an exception of this type, and its packed arguments; if `ok`, the packed value."""

    call: str = text(_CALL_CHARS)
    ok: bool = boolean()
    type: str = text(256, default="")
    arguments: int = integer(0, TOOL_ERROR_ARGUMENTS_BYTES_MAX, default=0)  # bytes of them
    final: bool = boolean(default=False)


class ImageReply(LinkMessage, kind="image_reply"):
    """The image was accepted, or left out for this reason."""

    call: str = text(_CALL_CHARS)
    left_out: str = text(256, default="")


# ---------------------------------------------------------------------------------------------------------------------
# Interpreter to supervisor


class Importing(LinkMessage, kind="importing"):
    """A warm interpreter imports this module next."""

    name: str = text(_MODULE_CHARS)


class NotImported(LinkMessage, kind="not_imported"):
    """The import of this module failed; `why` is the type of the exception."""

    name: str = text(_MODULE_CHARS)
    why: str = text(64)


class Booted(LinkMessage, kind="booted"):
    """The interpreter is ready."""


class CopyWaits(LinkMessage, kind="copy_waits"):
    """A savepoint's process exists, and waits for RESUME."""

    pid: int = integer(2, _MAX_PID)


class Resumed(LinkMessage, kind="resumed"):
    """A copy continues as the interpreter; `left_out` lists what could not be restored."""

    left_out: list[str] = texts(MAX_LEFT_OUT, MAX_LEFT_OUT_CHARS)


class Unfit(LinkMessage, kind="unfit"):
    """The interpreter's own code failed, and it ends."""

    why: str = text(MAX_REASON_CHARS)


class Output(LinkMessage, kind="output"):
    """Payload: the packed value of the program, if it is too large for DONE."""


class ShownImage(LinkMessage, kind="image"):
    """Payload: the image, or display data."""

    call: str = text(_CALL_CHARS)
    mime: str = one_of(*IMAGE_TYPES)
    source: str = one_of(*IMAGE_SOURCES)


class Drawing(LinkMessage, kind="drawing"):
    """A copy of the process begins to draw a figure, or has ended."""

    begins: bool = boolean()


class CalledTool(LinkMessage, kind="tool_call"):
    """Payload: the packed arguments. The reply has the same `call`, which the interpreter chose."""

    call: str = text(_CALL_CHARS)
    name: str = text(MAX_NAME_CHARS)


class NearLimit(LinkMessage, kind="limit"):
    """The program has spent nearly all of this budget."""

    limit: str = one_of(*LIMITS_WITH_WARNINGS)


class ProgramStopped(LinkMessage, kind="stopped"):
    """The program has spent its operations or broken a rule: nothing that it does from now on counts."""

    outcome: str = one_of(*STOPS)


class ProgramEnded(LinkMessage, kind="done"):
    """Body: ErrorDetail, `error` bytes; the packed value. `unfit`: why no other program can run."""

    filename: str = text(_FILENAME_CHARS)
    outcome: str = one_of(*PROGRAM_OUTCOMES)
    operations: int = integer()
    error: int = integer(0, MAX_BODY_BYTES)
    unfit: str = text(MAX_REASON_CHARS, default="")


class ExportedState(LinkMessage, kind="state"):
    """Payload: the state, a memory file."""


class Answered(LinkMessage, kind="op_done"):
    """The end of a request. Body: the list of names or the manifest that it asked for."""

    ok: bool = boolean()
    message: str = text(MAX_ANSWER_CHARS, default="")
