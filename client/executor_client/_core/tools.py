"""Host tools: their description for the sandbox, and the answer to a call.

The program in the sandbox is untrusted: it can only call registered tools, with any arguments. If a tool raises an
`Exception`, its type and message are the answer, so that the program can react. Any other exception of a tool (an
interrupt, or an error that stops the whole run) ends the execution.
"""

from __future__ import annotations

import builtins
import contextvars
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

from executor_api.limits import TOOL_ERROR_ARGUMENTS_BYTES_MAX
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.values import DecodeError, EncodeError, ValueLimits, decode, encode
from executor_api.values.objects import type_name_of
from executor_client._core.assembler import ToolRequest
from executor_client._core.limits import TOOL_ERROR_CHARS_MAX
from executor_client._core.shared_arguments import Arguments
from executor_client._core.short_repr import ShortRepr
from executor_client._core.terminal import sendable
from executor_client._core.values import pack
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

_PLAIN = (NoneType, bool, int, float, complex, str, bytes)

HOST = "host"
SANDBOX = "sandbox"

_DESCRIPTION_CHARS_MAX = 4_000
"""Below the protocol's 16 KiB for any characters."""


@dataclass(frozen=True)
class Tool(ShortRepr):
    """A callable that the program may call by name.

    `parameters` lists the parameters for the sandbox's stub; empty: the stub takes any arguments and the host checks
    them. A successful call of a tool with `is_final_answer` ends the execution, and its result is the output.

    `placement` selects where calls run. "host": in this process, which receives the arguments and sends the result.
    "sandbox": in the session's interpreter, where the tool is recreated from its source and everything that it uses, as
    of its registration; ToolNotShippable lists the parts that can't be recreated. Such a tool has its own parameters,
    and its result can't be a final answer.
    """

    function: Callable[..., Any] = field(repr=False)
    description: str = ""
    parameters: tuple[str, ...] = ()
    is_final_answer: bool = False
    placement: Literal["host", "sandbox"] = "host"
    dialect: Dialect | None = field(default=None, repr=False)
    """The dialect for tools of a library that the sandbox lacks."""


def as_tools(tools: Mapping[str, Callable[..., Any] | Tool]) -> dict[str, Tool]:
    """Returns the tools by name; callables are described from their docstring and signature."""
    made = {name: tool if isinstance(tool, Tool) else _described(tool, name) for name, tool in tools.items()}
    for name, tool in made.items():
        if not callable(tool.function):
            raise InvalidRequest(f"the tool {name!r} is not callable")
        if tool.placement == SANDBOX:
            _check_placed_in_sandbox(name, tool)
        elif tool.placement != HOST:
            raise InvalidRequest(
                f"the tool {name!r} has the placement {tool.placement!r}; it must be {HOST!r} or {SANDBOX!r}"
            )
    return made


def _check_placed_in_sandbox(name: str, tool: Tool) -> None:
    if inspect.iscoroutinefunction(tool.function):
        raise ToolNotShippable(name, ["it is a coroutine function, which the sandbox would not await"])
    if tool.is_final_answer:
        raise ToolNotShippable(name, ["it gives the final answer, which is recorded in this process"])
    if tool.parameters:
        raise InvalidRequest(f"the tool {name!r} runs in the sandbox with its own parameters; remove `parameters`")


def refuse_taken_names(tools: Mapping[str, object], *others: Mapping[str, object]) -> None:
    """Raises InvalidRequest if a tool of an MCP server and another tool have the same name."""
    for name in (name for other in others for name in other if name in tools):
        raise InvalidRequest(
            f"there are two tools {name!r}, and one is an MCP server's; give the server a prefix, or choose its tools: "
            '"prefix": "...", "tools": [...] in its description'
        )


def on_host(tools: Mapping[str, Tool]) -> dict[str, Tool]:
    """Returns the tools of this process. The daemon can't call other tools."""
    return {name: tool for name, tool in tools.items() if tool.placement == HOST}


def _described(function: Callable[..., Any], name: str) -> Tool:
    if not callable(function):
        raise InvalidRequest(f"the tool {name!r} is not callable")
    return Tool(function, (inspect.getdoc(function) or "")[:_DESCRIPTION_CHARS_MAX], _required_parameters(function))


def _required_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the parameters if all are required and positional; otherwise none.

    The protocol has no defaults: naming an optional parameter would make the sandbox require it.
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
    """The call can't be made; the program gets an error of this type."""

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(message)
        self.type_name = type_name


@dataclass(frozen=True)
class Answer:
    """The answer to a call: a packed value or an error. `value` is the host's object of a final answer."""

    packed: bytes | None = None
    value: object = None
    is_final: bool = False
    error: pb.ToolError | None = None


def find(tools: Mapping[str, Tool], name: str) -> Tool:
    if name not in tools:
        raise ToolRefusal("NameError", f"no tool {name!r} is registered with this client")
    return tools[name]


def arguments(request: ToolRequest) -> Arguments:
    """Unpacks the arguments of a call."""
    packed = request.take_arguments()
    try:
        unpacked = decode(packed)
    except DecodeError as error:
        raise ToolRefusal("ValueError", f"the arguments cannot be decoded: {error}") from error
    match unpacked:
        case (tuple() as args, dict() as kwargs) if all(isinstance(key, str) for key in kwargs):
            return Arguments.received(args, kwargs, packed)
    raise ToolRefusal("TypeError", "the arguments are not (positional, keywords)")


def settled(value: Any) -> Any:
    """Returns the value; awaits an awaitable in a new event loop of this thread."""
    if not inspect.isawaitable(value):
        return value
    import asyncio  # on first need: few blocking programs have such a tool

    async def result() -> Any:
        return await value

    return asyncio.run(result())


def succeeded(tool: Tool, value: object) -> Answer:
    """Returns the answer to a call that returned. A value that cannot be sent is an error of the call."""
    if isinstance(value, Answer):  # recorded: it is sent as it was
        return value
    if tool.is_final_answer:
        # The value stays here; the sandbox only learns that there is one.
        return Answer(pack(None), value, is_final=True)
    try:
        return Answer(pack(value))
    except EncodeError as error:
        return failed(ToolRefusal("TypeError", f"the tool's result cannot be sent to the sandbox: {error}"))


def failed(error: Exception) -> Answer:
    """Returns the answer to a call that raised: the nearest built-in class, its arguments, and the original name."""
    kind = type(error)
    base = next(each for each in kind.__mro__ if getattr(builtins, each.__name__, None) is each)
    type_name = error.type_name if isinstance(error, ToolRefusal) else base.__name__
    try:
        message = str(error)
        if isinstance(error, ExceptionGroup):  # its text only has the number of its errors
            message = "; ".join((message, *(f"{type(each).__name__}: {each}" for each in error.exceptions)))
    except Exception:  # noqa: BLE001 - a tool's own error class may fail at this too
        message = "(the error has no text)"
    if base is not kind and not isinstance(error, ToolRefusal):
        name = type_name_of(kind)
        # If the nearest class is Exception, the sandbox shows the original name with the message.
        type_name, message = (name, message) if base is Exception else (type_name, f"{name}: {message}")
    message = sendable(message[:TOOL_ERROR_CHARS_MAX])
    return Answer(error=pb.ToolError(type=type_name, message=message, arguments=_packed_arguments(error)))


def _packed_arguments(error: Exception) -> bytes:
    """Returns the arguments of the exception; empty if they are large or not plain values."""
    given = error.args
    if isinstance(error, OSError) and error.filename is not None and len(given) == 2:
        given = (*given, error.filename, None, error.filename2)
    elif isinstance(error, UnicodeError) and len(given) == 5 and isinstance(given[1], (bytes, str)):
        given = (given[0], given[1][: TOOL_ERROR_ARGUMENTS_BYTES_MAX // 8], *given[2:])
    given = tuple(os.fspath(each) if isinstance(each, os.PathLike) else each for each in given)
    flat = [part for each in given for part in (each if type(each) in (tuple, list) else (each,))]
    if isinstance(error, ToolRefusal) or not all(type(each) in _PLAIN for each in flat):
        return b""
    try:
        return encode(given, ValueLimits(total_bytes=TOOL_ERROR_ARGUMENTS_BYTES_MAX))
    except EncodeError:
        return b""


def instead_of(answer: Answer, refusal: ExecutorClientError) -> Answer | None:
    """Returns another answer after a refusal; None if none is needed. Otherwise raises the refusal."""
    is_of_call = isinstance(refusal, (PreconditionError, NotFoundError))
    if is_of_call and refusal.reason != "TOOL_CALL_NOT_FOUND":
        # The execution is over, or an earlier attempt arrived: the stream will end.
        return None
    if is_of_call or answer.error is not None or isinstance(refusal, UnavailableError):
        raise refusal
    # The daemon refused the value. Without another answer the program would wait until its timeout.
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
    """Marks this context, and its copies, as answering a tool call of the session."""
    call = _Pending(session_id)
    token = _pending.set((*_pending.get(), call))
    try:
        yield
    finally:
        # Recorded on the call too: tasks that the tool left behind have a copy of the context.
        call.over = True
        _pending.reset(token)


def refuse_reentrance(session_id: str, what: str) -> None:
    """Raises ReentrantExecution if `what` would wait for the tool call of this context."""
    calls = _pending.get()
    if calls and any(call.session_id == session_id and not call.over for call in calls):
        raise ReentrantExecution(
            f"{what}: a host tool cannot use the session that waits for its answer; give the tool a session of its own"
        )
