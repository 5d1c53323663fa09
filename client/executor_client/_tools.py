"""Host tools: what a sandbox is told of them, and how a call is answered.

The program in the sandbox is not trusted: it can call a registered tool with any arguments, and nothing else. Whatever
goes wrong in a call is the answer, by type and message, so that the program can react; only what a tool raises outside
`Exception` (an interrupt, an error made to stop the whole run) ends the execution.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.values import DecodeError, EncodeError
from executor_client._assembler import ToolRequest
from executor_client._limits import TOOL_ERROR_CHARS_MAX
from executor_client._shared_arguments import Arguments
from executor_client._values import pack, unpack
from executor_client.errors import (
    ExecutorClientError,
    InvalidRequest,
    NotFoundError,
    PreconditionError,
    ReentrantExecution,
    ToolNotShippable,
    UnavailableError,
)

if TYPE_CHECKING:
    from executor_client._shipping import Dialect

HOST = "host"
SANDBOX = "sandbox"

_DESCRIPTION_CHARS_MAX = 4_000
"""Below the wire's 16 KiB, whatever the characters."""


@dataclass(frozen=True)
class Tool:
    """A callable that the program may call by name.

    `parameters` names them in order for the sandbox's stub; empty means that it takes anything and the host judges. A
    successful call of a tool with `is_final_answer` ends the execution, and what the tool returned is its output.

    `placement` says where calls run. "host": in this process, which is sent the arguments and sends back the result.
    "sandbox": in the interpreter of the session itself, where the tool is made again from its source with all that it
    uses, as it is at the moment of registration; ToolNotShippable says what of a tool can't be. Such a tool has its own
    parameters, and its result is no final answer.
    """

    function: Callable[..., Any]
    description: str = ""
    parameters: tuple[str, ...] = ()
    is_final_answer: bool = False
    placement: Literal["host", "sandbox"] = "host"
    dialect: Dialect | None = field(default=None, repr=False)
    """How a library's tools are shipped to where the library is not."""


def as_tools(tools: Mapping[str, Callable[..., Any] | Tool], *, allow_coroutines: bool) -> dict[str, Tool]:
    """The tools by name, callables described from their docstring and signature."""
    made = {name: tool if isinstance(tool, Tool) else _described(tool, name) for name, tool in tools.items()}
    for name, tool in made.items():
        if not callable(tool.function):
            raise InvalidRequest(f"the tool {name!r} is not callable")
        if tool.placement == SANDBOX:
            _check_placed_in_sandbox(name, tool)
        elif tool.placement != HOST:
            raise InvalidRequest(
                f"the placement of the tool {name!r} is {HOST!r} or {SANDBOX!r}, not {tool.placement!r}"
            )
        elif inspect.iscoroutinefunction(tool.function) and not allow_coroutines:
            raise InvalidRequest(f"the tool {name!r} is a coroutine function: use AsyncExecutorClient")
    return made


def _check_placed_in_sandbox(name: str, tool: Tool) -> None:
    if inspect.iscoroutinefunction(tool.function):
        raise ToolNotShippable(name, ["it is a coroutine function: a call of it in the sandbox would not be awaited"])
    if tool.is_final_answer:
        raise ToolNotShippable(name, ["it gives the final answer, which is recorded in this process"])
    if tool.parameters:
        raise InvalidRequest(f"the tool {name!r} runs in the sandbox with its own parameters: give it no others")


def on_host(tools: Mapping[str, Tool]) -> dict[str, Tool]:
    """Those whose calls are answered here. A call of any other one is nothing that the daemon may ask of us."""
    return {name: tool for name, tool in tools.items() if tool.placement == HOST}


def _described(function: Callable[..., Any], name: str) -> Tool:
    if not callable(function):
        raise InvalidRequest(f"the tool {name!r} is not callable")
    return Tool(function, (inspect.getdoc(function) or "")[:_DESCRIPTION_CHARS_MAX], _required_parameters(function))


def _required_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters when every one of them must be given and can be given by position; else none.

    The wire has no defaults: naming an optional parameter would make the sandbox ask for it.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
    return tuple(p.name for p in parameters) if plain else ()


# ---------------------------------------------------------------------------------------------------------------------
# One call


class ToolRefusal(Exception):
    """The call cannot be made; said to the program as an error of this type."""

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(message)
        self.type_name = type_name


@dataclass(frozen=True)
class Answer:
    """What a call is answered with: a packed value, or an error. `value` is the host's own object, when it is final."""

    packed: bytes | None = None
    value: object = None
    is_final: bool = False
    error: pb.ToolError | None = None


def find(tools: Mapping[str, Tool], name: str) -> Tool:
    if name not in tools:
        raise ToolRefusal("NameError", f"no tool {name!r} is registered with this client")
    return tools[name]


def arguments(request: ToolRequest) -> Arguments:
    """Unpacks what the program called the tool with."""
    packed = request.take_arguments()
    try:
        unpacked = unpack(packed)
    except DecodeError as error:
        raise ToolRefusal("ValueError", f"the arguments cannot be decoded: {error}") from error
    match unpacked:
        case (tuple() as args, dict() as kwargs) if all(isinstance(key, str) for key in kwargs):
            return Arguments.received(args, kwargs, packed)
    raise ToolRefusal("TypeError", "the arguments are not (positional, keywords)")


def succeeded(tool: Tool, value: object) -> Answer:
    """The answer to a call that returned. A value that cannot be sent is an error of the call."""
    if tool.is_final_answer:
        # The answer stays here; the sandbox only needs to know that there is one.
        return Answer(pack(None), value, is_final=True)
    try:
        return Answer(pack(value))
    except EncodeError as error:
        return failed(ToolRefusal("TypeError", f"the tool's result cannot be sent to the sandbox: {error}"))


def failed(error: Exception) -> Answer:
    """The answer to a call that raised."""
    type_name = error.type_name if isinstance(error, ToolRefusal) else type(error).__name__
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a tool's own error class may fail at this too
        message = "(the error has no text)"
    # A message may have come from anywhere; the wire takes only what is UTF-8.
    sendable = message[:TOOL_ERROR_CHARS_MAX].encode("utf-8", "backslashreplace").decode()
    return Answer(error=pb.ToolError(type=type_name, message=sendable))


def instead_of(answer: Answer, refusal: ExecutorClientError) -> Answer | None:
    """What to answer instead of what the daemon refused; None: nothing more. Raises the refusal when neither helps."""
    is_of_call = isinstance(refusal, (PreconditionError, NotFoundError))
    if is_of_call and refusal.reason != "TOOL_CALL_NOT_FOUND":
        # The execution is over, or an earlier attempt arrived: the stream tells what became of it.
        return None
    if is_of_call or answer.error is not None or isinstance(refusal, UnavailableError):
        raise refusal
    # The daemon does not take the value. The program is told so, else it would wait until its time is up.
    return failed(ToolRefusal("RuntimeError", f"the tool's result was refused: {refusal}"))


# ---------------------------------------------------------------------------------------------------------------------
# Re-entrancy


@dataclass
class _Pending:
    session_id: str
    over: bool = False


_pending: contextvars.ContextVar[tuple[_Pending, ...]] = contextvars.ContextVar("executor_pending_tools", default=())


@contextmanager
def pending(session_id: str) -> Iterator[None]:
    """Marks this context, and what is started from it, as answering a tool call of the session."""
    call = _Pending(session_id)
    token = _pending.set((*_pending.get(), call))
    try:
        yield
    finally:
        # Said on the call itself too: tasks that the tool left behind have their own copy of the context.
        call.over = True
        _pending.reset(token)


def refuse_reentrance(session_id: str, what: str) -> None:
    """Raises ReentrantExecution where `what` would wait for the tool call that is being answered right here."""
    if any(call.session_id == session_id and not call.over for call in _pending.get()):
        raise ReentrantExecution(
            f"{what}: a host tool cannot use the session that waits for its answer; give the tool a session of its own"
        )
