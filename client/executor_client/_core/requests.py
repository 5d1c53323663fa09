"""Makes requests from the callers' arguments. An argument that the wire cannot carry is refused here, by name."""

from __future__ import annotations

import ast
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from executor_api.limits import CODE_BYTES_MAX, PIECE_BYTES, SESSION_NAME_CHARS_MAX
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
    UnavailableError,
)
from executor_client.results import ExecutionResult, Limits, SessionInfo
from executor_client.waits import WaitKind

T = TypeVar("T")

ENV_FORM = "env is a mapping of texts to texts"

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{SESSION_NAME_CHARS_MAX - 1}}}")

_FORMATS = {False: types_pb2.FILE_FORMAT_PLAIN, True: types_pb2.FILE_FORMAT_TAR}
LimitsLike = Limits | Mapping[str, float | int | str] | None
"""Bytes may be written as "8GB" or "512MiB"."""


def create_session(
    *,
    image: str | None,
    authorized_imports: Iterable[str],
    limits: LimitsLike,
    labels: Mapping[str, str] | None,
    prelude: str,
    backend: str | None,
    network: Iterable[str],
    packages: Iterable[str],
    modules: Iterable[str],
    node_labels: Mapping[str, str] | None,
    name: str | None,
    env: Mapping[str, str] | None,
    lease_id: str,
) -> pb.CreateSessionRequest:
    """Makes a request with an id of its own, so that it can be repeated."""
    variables = environment(env)
    try:
        return pb.CreateSessionRequest(
            request_id=uuid.uuid4().hex,
            name="" if name is None else checked_name(name),
            env=variables,
            image=image or "",
            backend=backend or "",
            authorized_imports=list(authorized_imports),
            network=list(network),
            packages=list(packages),
            modules=list(modules),
            limits=convert.limits_to_wire(limits),
            labels=dict(labels or {}),
            prelude=prelude,
            lease_id=lease_id,
            node_labels=dict(node_labels or {}),
        )
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the session cannot be asked for like this: {error}") from error


def environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """Returns environment variables to send. Raises InvalidRequest, without a value in its text."""
    variables = dict(env or {})
    if not all(_is_text(each) for pair in variables.items() for each in pair):
        raise InvalidRequest(ENV_FORM)
    return variables


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # it holds the value, so it must not be the cause of any other error
        return False


def get_session(session_id: str | None, name: str | None, lease_id: str) -> pb.GetSessionRequest:
    if (session_id is None) == (name is None):
        raise InvalidRequest("a session is found by its id or by its name: give one of session_id and name")
    try:
        if name is None:
            return pb.GetSessionRequest(session_id=session_id, lease_id=lease_id)
        return pb.GetSessionRequest(name=checked_name(name), lease_id=lease_id)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the session cannot be asked for like this: {error}") from error


def rename(session_id: str, name: str) -> pb.RenameSessionRequest:
    return pb.RenameSessionRequest(session_id=session_id, name=name and checked_name(name))


def checked_name(name: str) -> str:
    """Returns the name of a session. Raises InvalidRequest for one that none can have."""
    if not _NAME.fullmatch(str(name)):
        raise InvalidRequest(
            f"the name of a session has 1 to {SESSION_NAME_CHARS_MAX} of A-Z a-z 0-9 . _ -, the first a letter or digit"
        )
    return name


def prepare_environment(
    packages: Iterable[str], image: str | None, backend: str | None
) -> pb.PrepareEnvironmentRequest:
    try:
        return pb.PrepareEnvironmentRequest(packages=list(packages), image=image or "", backend=backend or "")
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the environment cannot be asked for like this: {error}") from error


def authorize_imports(session_id: str, imports: Iterable[str]) -> pb.AuthorizeImportsRequest:
    try:
        return pb.AuthorizeImportsRequest(session_id=session_id, authorized_imports=list(imports))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"these imports cannot be asked for: {error}") from error


def may_be_made(error: BaseException, *, heard: bool) -> bool:
    """True when a session may exist, now or soon, although its creation ended with this error.

    A refused one does not exist. After an interrupt or a lost connection the daemon's answer is unknown.
    """
    if isinstance(error, (UnavailableError, CallTimeoutError)):
        return heard and not error.reason  # a daemon that has never answered has no session of ours
    return not isinstance(error, ExecutorClientError)


def sandbox(request: pb.CreateSessionRequest) -> Awaited:
    """Returns the object of the wait for a new session. The wire does not say whether a sandbox stood ready."""
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
        raise InvalidRequest(f"the code has {code_bytes} bytes, allowed are {CODE_BYTES_MAX}")
    return pb.ExecuteRequest(
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
        # It would wait until that execution has ended.
        raise EvaluationError("the session is running an execution: only an idle one can evaluate an expression")
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
    request = pb.RegisterToolsRequest(session_id=session_id)
    for name, tool in tools.items():
        try:
            request.tools.add(
                name=name,
                description=tool.description,
                parameters=tool.parameters,
                is_final_answer=tool.is_final_answer,
            )
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the tool {name!r} cannot be registered: {error}") from error
    return request


def pack_variables(variables: Mapping[str, object]) -> dict[str, bytes]:
    """Packs all variables. Raises InvalidRequest with the name of one that cannot be sent."""
    packed = {}
    for name, value in variables.items():
        if not str(name).isidentifier():
            raise InvalidRequest(f"{name!r} is not a valid variable name")
        try:
            packed[name] = pack(value)
        except EncodeError as error:
            raise InvalidRequest(f"the variable {name!r} cannot be sent: {error}", reason="VALUE_REFUSED") from error
    return packed


def variable_names(names: Iterable[str] | None) -> list[str] | None:
    if names is None:
        return None
    asked = list(names)
    for name in asked:
        if not str(name).isidentifier():
            raise InvalidRequest(f"{name!r} is no name of a variable")
    return asked


class InlineBudget:
    """Decides which of one message's values go inline and which by blob, so that the message stays small."""

    def __init__(self) -> None:
        self._left_bytes = INLINE_BYTES_PER_MESSAGE_MAX

    def takes(self, packed: bytes) -> bool:
        if len(packed) > min(PIECE_BYTES, self._left_bytes):
            return False
        self._left_bytes -= len(packed)
        return True


def inline(packed: bytes) -> types_pb2.Payload:
    return types_pb2.Payload(inline=packed)


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
        raise InvalidRequest(f"a state has 1 to {STATE_BYTES_MAX} bytes, not {len(data)}")
    return data


def restore_state(session_id: str, state: bytes) -> Iterator[pb.RestoreStateRequest]:
    yield pb.RestoreStateRequest(session_id=session_id)
    for piece in _pieces(state):
        yield pb.RestoreStateRequest(data=piece)


def put_file_header(session_id: str, path: str, size_bytes: int, *, tar: bool) -> pb.PutFileHeader:
    return _with_path(pb.PutFileHeader, session_id, path, size_bytes=size_bytes, format=_FORMATS[tar])


def get_file(session_id: str, path: str, *, tar: bool) -> pb.GetFileRequest:
    return _with_path(pb.GetFileRequest, session_id, path, format=_FORMATS[tar])


def list_files(session_id: str, path: str) -> pb.ListFilesRequest:
    return _with_path(pb.ListFilesRequest, session_id, path)


def _with_path(make: Callable[..., T], session_id: str, path: str, **fields: object) -> T:
    try:
        return make(session_id=session_id, path=path, **fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the path {path!r} cannot be sent: {error}", reason="PATH_REFUSED") from error


class Upload:
    """The messages of one PutFile.

    gRPC takes them in a thread of its own and drops what is raised there. So a local problem ends the stream early,
    which the daemon refuses, and the problem is raised where the refusal arrives.
    """

    def __init__(self, header: pb.PutFileHeader, content: Content) -> None:
        self._header = header
        self._content = content
        self._problem: OSError | InvalidRequest | None = None

    def messages(self) -> Iterator[pb.PutFileRequest]:
        yield pb.PutFileRequest(header=self._header)
        try:
            for piece in self._content.pieces():
                yield pb.PutFileRequest(data=piece)
        except (OSError, InvalidRequest) as problem:
            self._problem = problem

    def raise_problem(self) -> None:
        """Raises what ended the stream early, if anything did."""
        if self._problem is not None:
            raise self._problem


def _pieces(data: bytes) -> Iterator[bytes]:
    view = memoryview(data)
    for start in range(0, len(view), PIECE_BYTES):
        yield bytes(view[start : start + PIECE_BYTES])
