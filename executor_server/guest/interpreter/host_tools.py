"""Host tools inside the interpreter, whose calls the client answers; and images, which take the same path.

Calls may come from any thread. There is no reader thread: one of the threads that wait reads for all (the leader) and
hands each message to the thread that waits for it. So a process that agent code forks inherits no helper thread, and no
lock that one held.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from _thread import allocate_lock, get_ident
from collections import deque

from executor_api.limits import BLOB_BYTES_MAX, OUTPUT_NODES_MAX, OUTPUT_PIXELS_MAX, OUTPUT_VALUE_BYTES_MAX

from ..checks.control import ControlException, ExecutionInterrupted, FinalAnswerGiven
from ..checks.failures import text_of
from ..wire import link
from ..wire.link_messages import CalledTool, ImageReply, LinkMessage, ShownImage, ToolReply, message_of
from .display import StandIns

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any, Callable, Optional, Union

    from executor_api.values.packing import Parts

    from .process import OwnProcess

MAX_VALUE_BYTES = BLOB_BYTES_MAX
# Seconds between two looks of the waiting main thread for an interrupt, while another thread reads.
_INTERRUPT_POLL_S = 0.05


class ToolError(Exception):
    """The tool raised on the host; the message has the exception."""

    __module__ = "builtins"  # so that a traceback shows its plain name


class Condition:
    """A lock, and the wait for a change under it, as threading.Condition; `threading` itself is left to programs.

    It is 0.2 MiB of a sandbox, in which most programs have no thread.
    """

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._waiting: list[Any] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_error: object) -> None:
        self.release()

    def wait(self, time_s: float = -1) -> None:
        """Waits for the next `notify_all`, without end when `time_s` is negative. The lock is held before and after."""
        waiter = allocate_lock()
        waiter.acquire()
        self._waiting.append(waiter)
        self.release()
        try:
            waiter.acquire(True, time_s)
        finally:
            self.acquire()
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def notify_all(self) -> None:
        for waiter in self._waiting:
            waiter.release()
        self._waiting.clear()


class Inbox:
    """Takes messages of the supervisor and gives each to the thread that waits for it.

    The race: an interrupt of the program is an exception in the main thread, at any bytecode. Between the read of a
    message and its delivery it would lose the message; inside of the lock, leave it locked. So the signal handler asks
    `defer_interrupt`, and while the main thread is `_careful` the exception is raised later, where it does no harm:
    when the thread waits for the next message, or leaves.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._changed = Condition()
        self._leading = False
        self._commands: deque[link.Packet] = deque()
        self._expected: set[str] = set()
        self._replies: dict[str, link.Packet] = {}
        self._main = get_ident()
        self._careful = False  # true while an exception in the main thread would do harm
        self._interrupted = False

    def defer_interrupt(self) -> bool:
        """Called by the signal handler. True when the interrupt is noted for later and must not be raised now."""
        if self._careful:
            self._interrupted = True
        return self._careful

    def command(self) -> link.Packet:
        """Returns the next message that is not the reply to a tool call."""
        mine = self._enter()
        try:
            return self._wait(lambda: self._commands.popleft() if self._commands else None, mine)
        finally:
            self._leave(mine)

    def forget(self) -> None:
        """Drops all that was read from a link which this process has no more."""
        for packet in (*self._commands, *self._replies.values()):
            packet.close()
        self._commands.clear()
        self._replies.clear()
        self._expected.clear()

    def ask(self, call_id: str, send: Callable[[], None]) -> link.Packet:
        """Sends a request and waits for its reply. A reply that an interrupted request left behind is dropped."""
        mine = self._enter()
        reply = None
        try:
            self._expected.add(call_id)
            send()
            reply = self._wait(lambda: self._replies.pop(call_id, None), mine)
        finally:
            with self._changed:
                self._expected.discard(call_id)
                self._drop(self._replies.pop(call_id, None))
            try:
                self._leave(mine)
            except ExecutionInterrupted:
                self._drop(reply)
                raise
        return reply

    def _enter(self) -> bool:
        """Returns true in the main thread, which is careful from here on."""
        mine = get_ident() == self._main
        if mine:
            self._careful = True
        return mine

    def _leave(self, mine: bool) -> None:
        if mine:
            self._careful = False
            self._raise_interrupt()

    def _raise_interrupt(self) -> None:
        if self._interrupted:
            self._interrupted = False
            raise ExecutionInterrupted

    def _wait(self, take: Callable[[], Optional[link.Packet]], mine: bool) -> link.Packet:
        with self._changed:
            while True:
                packet = take()
                if packet is not None:
                    return packet
                if self._leading:
                    # The main thread looks for an interrupt now and then: its handler can't notify a condition.
                    self._changed.wait(_INTERRUPT_POLL_S if mine else -1)
                else:
                    self._lead(mine)
                if mine:
                    self._raise_interrupt()

    def _lead(self, mine: bool) -> None:
        """Reads one message, without the lock, and stores it for the thread that waits for it."""
        self._leading = True
        self._changed.release()
        packet = None
        try:
            packet = self._receive(mine)
        finally:
            self._changed.acquire()
            self._leading = False
            if packet is not None:
                self._store(packet)
            self._changed.notify_all()

    def _receive(self, mine: bool) -> link.Packet:
        try:
            if mine:
                self._careful = False  # from here on an interrupt loses nothing, nor does one that came before
                self._raise_interrupt()
            size = link.await_size(self._sock)
        finally:
            if mine:
                self._careful = True
        return link.receive(self._sock, MAX_VALUE_BYTES, size)

    def _store(self, packet: link.Packet) -> None:
        message = message_of(packet)
        if not isinstance(message, (ToolReply, ImageReply)):
            self._commands.append(packet)
        elif message.call in self._expected:
            self._replies[message.call] = packet
        else:
            self._drop(packet)

    @staticmethod
    def _drop(packet: Optional[link.Packet]) -> None:
        if packet is not None and packet.memfd is not None:
            os.close(packet.memfd)


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
        """Sends an image, and waits until it is taken: what is printed after it then comes after it.

        Returns the reason when it is left out.
        """
        call_id = self._next_call_id("display()")
        reply = message_of(self._ask(call_id, ShownImage(call=call_id, mime=mime, source=source), data))
        assert isinstance(reply, ImageReply)
        return reply.left_out

    def _next_call_id(self, what: str) -> str:
        if not self._process.is_here():
            raise RuntimeError(f"{what} speaks to the client and can only be called in the session's own process")
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
    """Returns the host's exception, of the builtin type that is nearest to its own, so that agent code can catch it."""
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
            continue  # a type that takes more than a message, as UnicodeDecodeError does
    return ToolError(f"{type_name}: {message}")


def _renamed(kind: type[Exception], message: str) -> type[Exception]:
    """Returns a subclass whose text is the message, which names the class of the original."""

    def as_base(self: Exception) -> tuple[Any, ...]:
        return kind, self.args

    names = {"__module__": "builtins", "__str__": lambda self: message, "__reduce__": as_base}
    return type(kind.__name__, (kind,), names)


def packed_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, final: bool) -> bytes:
    """Returns the encoded arguments of a call. Raises TypeError for code, in whose place the tool would get a text.

    A final answer may hold code: its reader is shown the type and the repr.
    """
    try:
        return encode_value((args, kwargs), None if final else _refuse_code, saves=final)
    except _CodeGiven as given:
        what = given.what
    given_by = dict([*((f"argument {number}", each) for number, each in enumerate(args, 1)), *kwargs.items()])
    argument = next((each for each, value in given_by.items() if _holds_code(value)), "an argument")
    raise TypeError(
        f"{name}(): {argument} is or holds {what}, which cannot leave the sandbox, and the tool runs outside of it: "
        "call it here and pass what it gives"
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
    """Raises _CodeGiven for code. The codec calls this for each value that it has no exact form for."""
    for kinds, what in _CODE:
        if isinstance(value, kinds):
            raise _CodeGiven(f"{what} {str(getattr(value, '__name__', ''))[:_MAX_SHOWN_NAME_CHARS]}".rstrip())


_MAX_SHOWN_NAME_CHARS = 100
_MAX_REASON_CHARS = 1000
_CODE: tuple[tuple[tuple[type, ...], str], ...] = (
    ((types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial), "the function"),
    ((type,), "the class"),
    ((types.ModuleType,), "the module"),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), "the generator or coroutine"),
)


def encode_value(
    value: object, fallback: Optional[Callable[[object], Optional[bytes]]] = None, *, saves: bool = False
) -> bytes:
    """Encodes a value for the client. Of the exceptions in a value's own code, only control exceptions pass."""
    from executor_api.values import encode

    return encode(value, fallback=fallback, passing=(ControlException,), stand_in=StandIns(saves=saves))


def encode_in_parts(value: object) -> Parts:
    """As `encode_value`, without a copy of what is large, to be sent at once."""
    from executor_api.values import encode_in_parts as encoded

    return encoded(value, passing=(ControlException,), stand_in=StandIns())


def encode_output(value: object) -> Parts:
    """Encodes the value of a step. Raises EncodeError for a large one, before it is copied."""
    from executor_api.values import ValueLimits
    from executor_api.values import encode_in_parts as encoded

    sizes = {"nodes": OUTPUT_NODES_MAX, "total_bytes": OUTPUT_VALUE_BYTES_MAX, "image_pixels": OUTPUT_PIXELS_MAX}
    return encoded(value, ValueLimits(**sizes), passing=(ControlException,), stand_in=StandIns(saves=True))


def encode_description(value: object, why: BaseException, *, shown: bool) -> Parts:
    """Encodes what stands for a value that was not sent: its type and the reason; its size and text if `shown`."""
    from executor_api.values import EncodeError, OpaqueValue
    from executor_api.values.objects import bounded_repr, type_name_of

    name, text = type_name_of(type(value)), ""
    reason = f"it can't be sent: {type(why).__name__}: {text_of(why)}"[:_MAX_REASON_CHARS]
    if isinstance(why, EncodeError):
        reason = (
            f"larger than the {OUTPUT_VALUE_BYTES_MAX} bytes of a step's value, so only a part of its text is here: "
            "look at a part of it, or get all of it by evaluate() or get_variables()"
        )
    if shown:
        name = f"{name}{_size_of(value)}"
        text = "\n" + bounded_repr(value, _MAX_REASON_CHARS, passing=(ControlException,))
    return encode_in_parts(OpaqueValue(type_name_of(type(value)), f"<{name}: {reason}>{text}"))


def _size_of(value: Any) -> str:
    try:
        shape = getattr(value, "shape", None)
        return f" of shape {tuple(map(int, shape))}" if isinstance(shape, tuple) else f" of length {len(value)}"
    except Exception:  # noqa: BLE001 (the value's own code)
        return ""


def decode_value(packed: Union[bytes, memoryview]) -> Any:
    """Decodes a value of the client, which may hold objects that only cloudpickle can carry.

    Raises DecodeError also for a table where the image has no pandas: a text in its place would be noticed late.
    """
    from executor_api.values import decode

    return decode(packed, foreign=_unpickle, needs_libraries=True)


def _unpickle(data: memoryview) -> Any:
    """Loads an object that the client pickled, `cpMAJOR.MINOR NUL pickle`; unpickling is for sandboxes only."""
    import pickle

    version, separator, pickled = bytes(data).partition(b"\0")
    here = b"cp%d.%d" % sys.version_info[:2]
    if not separator or version != here:
        there = version[:16].decode("ascii", "replace")
        raise ValueError(f"an object pickled by {there} can't be loaded here, which is {here.decode()}")
    return pickle.loads(pickled)
