"""The messages on the links between the supervisor and its children: one class for each, and for each object in a body.

This is the schema of both ends of a link (link.py), as messages.py is that of the channel to the daemon. Both ends are
forked from one process, so they never differ in version; tests/unit/guest/wire/test_messages.py compares the
schema with its snapshot, so that a field is renamed or bounded differently on purpose only.

A message of the interpreter may be agent code's, and one of the checker that of a source which has broken its parser.
Each is read whole and checked before any of its fields is used. A check that needs more than one field, the body, or
the state of the receiver is made by the receiver.
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
    """The head of a message; `kind` is its word on the link."""

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
    """Returns the message in a packet's head, which is read once. Raises FrameError."""
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
    """A tool of TOOLS or SHIP. One that is shipped has `modules`; one that is not there for a reason, `why_not`."""

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
    """The interpreter's answer: what the copy holds of the workspace."""

    files: int = integer()
    file_bytes: int = integer()
    left_out: list[str] = texts(MAX_LEFT_OUT, MAX_LEFT_OUT_CHARS)


class BranchChanges(Record):
    """The changes that a program has made in a branch."""

    variables: Changes = record(Changes)
    files: Changes = record(Changes)


def placed_tools(body: bytes) -> list[PlacedTool]:
    """Reads the list of tools in a body. Raises FrameError."""
    return read_listed(PlacedTool, body, TOOLS_MAX, "tools")


# ---------------------------------------------------------------------------------------------------------------------
# Supervisor to checker, and its answer


class Check(LinkMessage, kind="check"):
    """Body: CodeRules, of this length, then the source."""

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
    """Body: a list of PlacedTool; none is made in the interpreter."""


class ToolPart(LinkMessage, kind="part"):
    """Payload: a part of a tool of the next SHIP."""

    tool: str = text(MAX_NAME_CHARS)
    part: str = one_of(*TOOL_PARTS)


class ShipTools(LinkMessage, kind="ship"):
    """Body: a list of PlacedTool. With `again`, they were made in an earlier interpreter. ANSWERED answers it."""

    again: bool = boolean()


class DropTools(LinkMessage, kind="drop"):
    """Body: a list of names; a call of one raises an error with this reason."""

    why_not: str = text(MAX_REASON_CHARS)


class RunProgram(LinkMessage, kind="run"):
    """Body: the source, of this length, then the checker's code. The pipes of the run come as descriptors.

    `operations_mark` and `session_mark`: operations at which NEAR_LIMIT is due, of the run and of the session.
    """

    filename: str = text(_FILENAME_CHARS)
    source: int = integer(0, MAX_SOURCE_BYTES)
    operations: int = integer()
    operations_mark: Optional[int] = integer(default=None)
    session_mark: Optional[int] = integer(default=None)
    session_operations: Optional[int] = integer(default=None)  # when these leave less than the run asked for
    whole_output: bool = boolean(default=False)


class Variable(LinkMessage, kind="variable"):
    """Payload: the packed value. To the interpreter, one to set at COMMIT; from it, a part of the answer to GET."""

    name: str = text(MAX_NAME_CHARS)


class CommitVariables(LinkMessage, kind="commit"):
    """Sets the variables that came before. ANSWERED answers it."""


class ForgetVariables(LinkMessage, kind="forget"):
    """Drops the variables that came before."""


class GetVariables(LinkMessage, kind="get"):
    """Body: a list of names; empty for all. VARIABLE for each that there is and ANSWERED with the others answer it."""


class FindModules(LinkMessage, kind="find"):
    """Body: a list of names. ANSWERED with those that the image lacks answers it."""


class ExportState(LinkMessage, kind="export"):
    """STATE and ANSWERED, whose body is its manifest, answer it."""

    max_bytes: int = integer()


class RestoreState(LinkMessage, kind="restore"):
    """Payload: the state, a memory file. ANSWERED, whose body is its manifest, answers it."""


class TakeSavepoint(LinkMessage, kind="savepoint"):
    """The link of the copy to be made comes as a descriptor. ANSWERED, whose body is SavepointMade, answers it.

    With `whole`, it is refused when it can't hold the files of the workspace.
    """

    file_bytes: int = integer()
    whole: bool = boolean(default=False)


class MakeSuccessor(LinkMessage, kind="make_successor"):
    """To a savepoint's process: it forks another one, whose link comes as a descriptor."""


class Resume(LinkMessage, kind="resume"):
    """To a copy: it goes on as the interpreter, and its link becomes the interpreter's.

    With `branch`, it goes on beside the interpreter, in a workspace that is as it was.
    """

    branch: bool = boolean(default=False)


class BeginBranch(LinkMessage, kind="begin_branch"):
    """To a branch, before its program: it notes its variables. ANSWERED answers it."""


class EndBranch(LinkMessage, kind="end_branch"):
    """To a branch, after its program. ANSWERED, whose body is BranchChanges, answers it."""


class RestoreFiles(LinkMessage, kind="restore_files"):
    """To the interpreter, after a branch: it makes the workspace as it was. ANSWERED answers it, with what failed."""


class ToolReply(LinkMessage, kind="reply"):
    """Payload: the message of an exception of this type, and its packed arguments; when `ok`, the packed value."""

    call: str = text(_CALL_CHARS)
    ok: bool = boolean()
    type: str = text(256, default="")
    arguments: int = integer(0, TOOL_ERROR_ARGUMENTS_BYTES_MAX, default=0)  # bytes of them
    final: bool = boolean(default=False)


class ImageReply(LinkMessage, kind="image_reply"):
    """The image was taken, or left out for this reason."""

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
    """The interpreter serves."""


class CopyWaits(LinkMessage, kind="copy_waits"):
    """A savepoint's process is there, and waits for RESUME."""

    pid: int = integer(2, _MAX_PID)


class Resumed(LinkMessage, kind="resumed"):
    """A copy goes on as the interpreter; `left_out` says what is not as it was."""

    left_out: list[str] = texts(MAX_LEFT_OUT, MAX_LEFT_OUT_CHARS)


class Unfit(LinkMessage, kind="unfit"):
    """The interpreter's own code failed: it ends."""

    why: str = text(MAX_REASON_CHARS)


class Output(LinkMessage, kind="output"):
    """Payload: the packed value of the program, when it is too large for DONE."""


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
    """The program has spent its operations or was refused something: nothing that it does from now on counts."""

    outcome: str = one_of(*STOPS)


class ProgramEnded(LinkMessage, kind="done"):
    """Body: ErrorDetail, of this length, then the packed value. With `unfit`, no other program can run."""

    filename: str = text(_FILENAME_CHARS)
    outcome: str = one_of(*PROGRAM_OUTCOMES)
    operations: int = integer()
    error: int = integer(0, MAX_BODY_BYTES)
    unfit: str = text(MAX_REASON_CHARS, default="")


class ExportedState(LinkMessage, kind="state"):
    """Payload: the state, a memory file."""


class Answered(LinkMessage, kind="op_done"):
    """The end of a request. Body: the list of names, or the manifest, that the request asks for."""

    ok: bool = boolean()
    message: str = text(MAX_ANSWER_CHARS, default="")
