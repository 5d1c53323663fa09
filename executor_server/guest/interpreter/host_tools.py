"""Host tools inside the interpreter, whose calls the client answers; and images, which take the same path."""

from __future__ import annotations

import functools
import types
from _thread import allocate_lock

from ..checks.control import FinalAnswerGiven
from ..wire import link
from ..wire.link_messages import CalledTool, ImageReply, LinkMessage, ShownImage, ToolReply, message_of
from .encoding import decode_value, encode_value

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any, Callable

    from .inbox import Inbox
    from .own_process import OwnProcess


class ToolError(Exception):
    """The tool raised on the host; the message describes the exception."""

    __module__ = "builtins"  # so that a traceback shows its plain name


class ToolBox:
    """Makes the stubs of host tools and carries their calls."""

    def __init__(self, sock: socket.socket, inbox: Inbox, process: OwnProcess) -> None:
        self._sock = sock
        self._inbox = inbox
        self._process = process
        self._calls = 0
        self._lock = allocate_lock()

    def stub(self, name: str, description: str, parameters: list[str], final: bool = False) -> Callable[..., Any]:
        """Returns a function of this name whose calls the client answers."""

        def tool(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, args, kwargs, final=final)

        tool.__name__ = tool.__qualname__ = name
        tool.__module__ = "builtins"  # where agent code finds it; help() and pickle name the module
        tool.__doc__ = description
        if parameters:
            # Where inspect.signature and help() look. The daemon has checked that all are identifiers.
            tool.__wrapped__ = eval(f"lambda {', '.join(parameters)}: None")  # type: ignore[attr-defined]
        return tool

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, final: bool) -> Any:
        packed = packed_arguments(name, args, kwargs, final=final)
        call_id = self._next_call_id(f"{name}()")
        return self._answer(name, self._ask(call_id, CalledTool(call=call_id, name=name), packed))

    def show(self, mime: str, source: str, data: bytes) -> str:
        """Sends an image, and waits until it is received, so that later prints come after it.

        Returns the reason when it is left out.
        """
        call_id = self._next_call_id("display()")
        reply = message_of(self._ask(call_id, ShownImage(call=call_id, mime=mime, source=source), data))
        assert isinstance(reply, ImageReply)
        return reply.left_out

    def _next_call_id(self, what: str) -> str:
        if not self._process.is_here():
            raise RuntimeError(f"{what} needs the client, so it works only in the session's own process and in no fork")
        with self._lock:
            self._calls += 1
            return f"c{self._calls}"

    def _ask(self, call_id: str, message: LinkMessage, body: bytes) -> link.Packet:
        return self._inbox.ask(call_id, lambda: link.send(self._sock, message, body))

    def _answer(self, name: str, packet: link.Packet) -> Any:
        reply, body = message_of(packet), link.read_body(packet)
        assert isinstance(reply, ToolReply)
        if reply.final:
            raise FinalAnswerGiven
        if reply.ok:
            return decode_value(body)
        end = len(body) - reply.arguments
        raise _tool_exception(reply.type, body[:end].decode("utf-8", "replace"), body[end:])


def _tool_exception(type_name: str, message: str, packed: bytes) -> Exception:
    """Returns the host's exception with the nearest builtin type, so that agent code can catch it."""
    import builtins

    known = getattr(builtins, type_name, None)
    if not (isinstance(known, type) and issubclass(known, Exception)):
        return ToolError(f"{type_name}: {message}" if type_name else message)
    arguments = (message,)
    if packed:
        arguments = decode_value(packed)
    elif known is KeyError and len(message) > 1 and message[0] == message[-1] in "'\"":
        arguments = (message[1:-1],)  # the text of a KeyError is the repr of its key
    attempts: list[tuple[type[Exception], Any]] = [(known, arguments)]
    attempts += [(base, (message,)) for base in known.__mro__]
    for kind, given in attempts:
        if kind is Exception and known is not Exception:
            break
        try:
            error = kind(*given)
            return error if str(error) == message or not packed else _renamed(kind, message)(*given)
        except (TypeError, ValueError):
            continue  # a type that takes more than a message, such as UnicodeDecodeError
    return ToolError(f"{type_name}: {message}")


def _renamed(kind: type[Exception], message: str) -> type[Exception]:
    """Returns a subclass whose text is the message, which names the original class."""

    def as_base(self: Exception) -> tuple[Any, ...]:
        return kind, self.args

    names = {"__module__": "builtins", "__str__": lambda self: message, "__reduce__": as_base}
    return type(kind.__name__, (kind,), names)


def packed_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, final: bool) -> bytes:
    """Returns the encoded arguments of a call. Raises TypeError for code, which the tool would get as a text.

    A final answer may hold code: its reader sees the type and the repr.
    """
    try:
        return encode_value((args, kwargs), None if final else _refuse_code, saves=final)
    except _CodeGiven as given:
        what = given.what
    given_by = dict([*((f"argument {number}", each) for number, each in enumerate(args, 1)), *kwargs.items()])
    argument = next((each for each, value in given_by.items() if _holds_code(value)), "an argument")
    raise TypeError(
        f"{name}(): {argument} is or holds {what}, which can't leave the sandbox. The tool runs outside of it: "
        "call it here and pass the result"
    )


def _holds_code(value: object) -> bool:
    try:
        encode_value(value, _refuse_code)
    except _CodeGiven:
        return True
    return False


class _CodeGiven(Exception):
    """A value holds code, which can't be sent. Agent code never sees this exception."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def _refuse_code(value: object) -> None:
    """Raises _CodeGiven for code. The codec calls this for each value without an exact form."""
    for kinds, what in _CODE:
        if isinstance(value, kinds):
            raise _CodeGiven(f"{what} {str(getattr(value, '__name__', ''))[:_MAX_SHOWN_NAME_CHARS]}".rstrip())


_MAX_SHOWN_NAME_CHARS = 100
_CODE: tuple[tuple[tuple[type, ...], str], ...] = (
    ((types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial), "the function"),
    ((type,), "the class"),
    ((types.ModuleType,), "the module"),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), "the generator or coroutine"),
)
