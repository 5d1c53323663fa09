"""Makes requests from callers' arguments, and refuses arguments that a message can't hold."""

from __future__ import annotations

import ast
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from executor_api import messages
from executor_api.limits import (
    BLOB_BYTES_MAX,
    CODE_BYTES_MAX,
    PIECE_BYTES,
    SESSION_NAME_CHARS_MAX,
    VARIABLES_NAMED_MAX,
)
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2
from executor_api.values import EncodeError
from executor_client._core import convert
from executor_client._core.limits import EVALUATION_TIMEOUT_S, INLINE_BYTES_PER_MESSAGE_MAX, STATE_BYTES_MAX
from executor_client._core.local import Content
from executor_client._core.tools import Tool
from executor_client._core.values import pack
from executor_client._core.waiting import Awaited
from executor_client.errors import (
    CallTimeoutError,
    EvaluationError,
    ExecutorClientError,
    InvalidRequest,
    PolicyViolationError,
    ResourceExhaustedError,
    UnavailableError,
)
from executor_client.results import ExecutionResult, Limits, Policy, SessionInfo
from executor_client.waits import WaitKind

M = TypeVar("M", bound=Message)

ENV_FORM = "env is a mapping of texts to texts"

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{SESSION_NAME_CHARS_MAX - 1}}}")

LimitsLike = Limits | Mapping[str, float | int | str] | None
"""Bytes may be written as "8GB" or "512MiB"."""


def made(kind: type[M], *, reason: str = "", what: str = "the request", **fields: Any) -> M:
    """Makes a request; None leaves a field out. Raises InvalidRequest for a value that the message can't hold."""
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{what} cannot be sent: {error}", reason=reason) from error


def new_request_id() -> str:
    """Returns an id that a caller chooses, so that its request can be repeated."""
    return uuid.uuid4().hex


def asks_for_packages(refusal: PolicyViolationError) -> bool:
    """True if the policy would grant the request after an approval of packages."""
    return all(each.rule.endswith(".packages.ask") for each in refusal.violations)


def freely_allowed(policy: Policy) -> list[str]:
    """Returns the allowed imports that need no approval: not "*" if it includes some that do."""
    return [name for name in policy.allowed_imports if name != "*" or not policy.ask_imports]


def create_session(
    *, limits: LimitsLike, name: str | None, env: Mapping[str, str] | None, **fields: Any
) -> pb.CreateSessionRequest:
    """Makes a request with an id of its own, so that it can be repeated. `fields` are those of the message."""
    return made(
        pb.CreateSessionRequest,
        request_id=new_request_id(),
        name=None if name is None else checked_name(name),
        env=environment(env),
        limits=convert.limits_to_wire(limits),
        **fields,
    )


def environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """Returns environment variables to send. Raises InvalidRequest, without a value in its text."""
    variables = dict(env or {})
    if not all(_is_text(each) for pair in variables.items() for each in pair):
        raise InvalidRequest(ENV_FORM)
    return variables


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # this error holds the value, so it must not be the cause of another error
        return False


def get_session(session_id: str | None, name: str | None, lease_id: str) -> pb.GetSessionRequest:
    if (session_id is None) == (name is None):
        raise InvalidRequest("give either session_id or name")
    name = None if name is None else checked_name(name)
    return made(pb.GetSessionRequest, session_id=session_id, name=name, lease_id=lease_id)


def checked_name(name: str) -> str:
    """Returns the name of a session. Raises InvalidRequest for one that none can have."""
    if not _NAME.fullmatch(str(name)):
        raise InvalidRequest(
            f"the name of a session has 1 to {SESSION_NAME_CHARS_MAX} of A-Z a-z 0-9 . _ -, the first a letter or digit"
        )
    return name


def may_be_made(error: BaseException, *, heard: bool) -> bool:
    """True if a session may exist, now or soon, although its creation raised this error.

    A refused session does not exist. After an interrupt or a lost connection the daemon's answer is unknown.
    """
    if isinstance(error, (UnavailableError, CallTimeoutError)):
        return heard and not error.reason  # a daemon that has never answered has no session of ours
    return not isinstance(error, ExecutorClientError)


def sandbox(request: pb.CreateSessionRequest) -> Awaited:
    """Describes the wait for a new session."""
    return Awaited(WaitKind.SANDBOX, f"a sandbox of image {request.image!r}" if request.image else "a sandbox")


def execute(
    session_id: str,
    code: str,
    execution_id: str | None,
    output_mode: str,
    limits: LimitsLike,
    *,
    savepoint: bool = False,
    branch: bool = False,
) -> pb.ExecuteRequest:
    if output_mode not in convert.OUTPUT_MODES:
        raise InvalidRequest(f"output_mode is one of {', '.join(convert.OUTPUT_MODES)}, not {output_mode!r}")
    try:
        code_bytes = len(code.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the code is not UTF-8 text: {error.reason} at {error.start}") from error
    if code_bytes > CODE_BYTES_MAX:
        # The daemon would refuse it too, or could not even receive it.
        raise InvalidRequest(f"the code has {code_bytes} bytes; the limit is {CODE_BYTES_MAX}")
    return made(
        pb.ExecuteRequest,
        session_id=session_id,
        execution_id=os.urandom(16).hex() if execution_id is None else execution_id,
        code=code,
        output_mode=convert.OUTPUT_MODES[output_mode],
        limits=convert.limits_to_wire(limits),
        savepoint=bool(savepoint),
        branch=branch,
    )


def evaluate(session: SessionInfo, expression: str, timeout_s: float | None, *, busy: bool) -> pb.ExecuteRequest:
    """Makes the request of an evaluation. Raises EvaluationError when the session is busy."""
    try:
        ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise InvalidRequest(f"not an expression: {error}") from error
    if busy:
        # The evaluation would wait for the end of that execution.
        raise EvaluationError("the session is running an execution; only an idle session evaluates expressions")
    if timeout_s is None:
        timeout_s = min(EVALUATION_TIMEOUT_S, session.limits.wall_time_s or EVALUATION_TIMEOUT_S)
    # The parentheses allow for any indentation and line breaks, the newline for a comment at the end.
    code = f"({expression}\n)"
    request = execute(session.session_id, code, None, "trailing_expression", {"wall_time_s": timeout_s})
    request.whole_output = True
    return request


def value_of(result: ExecutionResult) -> Any:
    """Returns the value of an evaluation. Raises EvaluationError when it has none."""
    if result.succeeded:
        return result.output
    why = f": {result.error.type}: {result.error.message}" if result.error is not None else ""
    raise EvaluationError(f"the evaluation ended as {result.outcome.name}{why}", result=result)


def register_tools(session_id: str, tools: Mapping[str, Tool]) -> pb.RegisterToolsRequest:
    specs = []
    for name, tool in tools.items():
        try:
            specs.append(messages.write(types_pb2.ToolSpec, tool, name=name, shipped=None))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the tool {name!r} can't be registered: {error}") from error
    return pb.RegisterToolsRequest(session_id=session_id, tools=specs)


def pack_variables(variables: Mapping[str, object]) -> dict[str, bytes]:
    """Packs all variables. Raises InvalidRequest with the name of one that cannot be sent, ResourceExhaustedError."""
    if len(variables) > VARIABLES_NAMED_MAX:
        raise InvalidRequest(
            f"{len(variables):,} variables are too many for one call, which sets at most {VARIABLES_NAMED_MAX:,}; "
            "set them in several calls"
        )
    packed = {}
    left_bytes = BLOB_BYTES_MAX
    for name, value in variables.items():
        if not str(name).isidentifier():
            raise InvalidRequest(f"{name!r} is not a valid variable name")
        try:
            packed[name] = pack(value)
        except EncodeError as error:
            raise InvalidRequest(f"the variable {name!r} cannot be sent: {error}", reason="VALUE_REFUSED") from error
        left_bytes -= len(packed[name])
        if left_bytes < 0:  # before the first upload: the sandbox would hold what came before the last
            raise ResourceExhaustedError(
                f"the variables have more than {BLOB_BYTES_MAX:,} bytes, the most that one call sets; "
                "set them in several calls",
                reason="TOO_LARGE",
            )
    return packed


def variable_names(names: Iterable[str] | None) -> list[str] | None:
    if names is None:
        return None
    asked = list(names)
    for name in asked:
        if not str(name).isidentifier():
            raise InvalidRequest(f"{name!r} is not a valid variable name")
    return asked


class InlineBudget:
    """Decides which values of a message go inline and which as blobs, so that the message stays small."""

    def __init__(self) -> None:
        self._left_bytes = INLINE_BYTES_PER_MESSAGE_MAX

    def takes(self, packed: bytes) -> bool:
        if len(packed) > min(PIECE_BYTES, self._left_bytes):
            return False
        self._left_bytes -= len(packed)
        return True


def by_blob(blob_id: str, packed: bytes) -> types_pb2.Payload:
    return types_pb2.Payload(blob=types_pb2.BlobRef(blob_id=blob_id, size_bytes=len(packed)))


def blob_upload(session_id: str, data: bytes) -> Iterator[pb.UploadBlobRequest]:
    yield pb.UploadBlobRequest(header=pb.UploadBlobHeader(session_id=session_id, size_bytes=len(data)))
    for piece in _pieces(data):
        yield pb.UploadBlobRequest(data=piece)


def state_of(state: bytes | None) -> bytes | None:
    """Returns the bytes of a state to restore. Raises InvalidRequest for a size that no state has."""
    if state is None:
        return None
    data = bytes(state)
    if not 0 < len(data) <= STATE_BYTES_MAX:
        raise InvalidRequest(f"the state has {len(data)} bytes; a state has 1 to {STATE_BYTES_MAX}")
    return data


def restore_state(session_id: str, state: bytes) -> Iterator[pb.RestoreStateRequest]:
    yield pb.RestoreStateRequest(session_id=session_id)
    for piece in _pieces(state):
        yield pb.RestoreStateRequest(data=piece)


def with_path(kind: type[M], session_id: str, path: str, *, tar: bool = False, **fields: Any) -> M:
    """Makes a request about a path of the workspace, `tar` for a directory. Raises InvalidRequest."""
    if "format" in kind.DESCRIPTOR.fields_by_name:
        fields["format"] = types_pb2.FILE_FORMAT_TAR if tar else types_pb2.FILE_FORMAT_PLAIN
    what = f"the request for the path {path!r}"
    return made(kind, reason="PATH_REFUSED", what=what, session_id=session_id, path=path, **fields)


class Upload:
    """The messages of one PutFile.

    gRPC takes them in its own thread and drops exceptions there. So a local problem ends the stream early, the daemon
    refuses it, and the problem is raised where the refusal arrives.
    """

    def __init__(self, header: pb.PutFileHeader, content: Content) -> None:
        self._header = header
        self._content = content
        self._problem: OSError | InvalidRequest | None = None
        self.has_begun = False
        """True once the header has left, so that data may have arrived."""

    def messages(self) -> Iterator[pb.PutFileRequest]:
        yield pb.PutFileRequest(header=self._header)
        self.has_begun = True
        try:
            for piece in self._content.pieces():
                yield pb.PutFileRequest(data=piece)
        except (OSError, InvalidRequest) as problem:
            self._problem = problem

    def raise_problem(self) -> None:
        """Raises the problem that ended the stream early, if there was one."""
        if self._problem is not None:
            raise self._problem


def _pieces(data: bytes) -> Iterator[bytes]:
    view = memoryview(data)
    for start in range(0, len(view), PIECE_BYTES):
        yield bytes(view[start : start + PIECE_BYTES])
