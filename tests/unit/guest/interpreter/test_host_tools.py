"""Calls of host tools from any thread over one link, with interrupts, late replies and forks."""

from __future__ import annotations

import builtins
import inspect
import os
import pickle
import pydoc
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from executor_api.values import decode, encode
from executor_server.guest.checks.control import ExecutionInterrupted, FinalAnswerGiven
from executor_server.guest.interpreter.execution import keep_final_answers_quiet
from executor_server.guest.interpreter.host_tools import ToolBox, ToolError
from executor_server.guest.interpreter.inbox import Condition, Inbox
from executor_server.guest.interpreter.own_process import OwnProcess
from executor_server.guest.wire import link
from executor_server.guest.wire.link_messages import (
    CalledTool,
    ImageReply,
    LinkMessage,
    PlaceTools,
    SetRules,
    ShownImage,
    ToolReply,
    message_of,
)
from tests.support.descriptors import none_left_open
from tests.support.polling import eventually

MAX_BYTES = 10**7
LARGE = b"x" * (link.INLINE_BYTES + 1)


class Request(NamedTuple):
    """A message of the interpreter that waits for its reply."""

    call: str
    message: CalledTool | ShownImage
    body: bytes


class Supervisor:
    """The supervisor's end of the link, and the inbox and tools at the interpreter's end."""

    def __init__(self) -> None:
        self.sock, theirs = link.make_pair()
        self.inbox = Inbox(theirs)
        self.tools = ToolBox(theirs, self.inbox, OwnProcess())
        self._theirs = theirs

    def close(self) -> None:
        self.sock.close()
        self._theirs.close()

    def request(self) -> Request:
        """Receives the next request."""
        packet = link.receive(self.sock, MAX_BYTES)
        message = message_of(packet)
        assert isinstance(message, (CalledTool, ShownImage))
        return Request(message.call, message, link.read_body(packet))

    def reply(self, call_id: str, body: bytes = b"", *, ok: bool = True, **more: Any) -> None:
        link.send(self.sock, ToolReply(call=call_id, ok=ok, **more), body)

    def serve(self, answer: Callable[[Request], None], count: int = 1) -> threading.Thread:
        def run() -> None:
            for _ in range(count):
                answer(self.request())

        thread = threading.Thread(target=run)
        thread.start()
        return thread


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    with none_left_open():
        supervisor = Supervisor()
        yield supervisor
        supervisor.close()


@contextmanager
def interruptible(inbox: Inbox) -> Iterator[None]:
    """Handles SIGINT as the interpreter does while agent code runs."""

    def on_interrupt(_signum: int, _frame: Any) -> None:
        if not inbox.defer_interrupt():
            raise ExecutionInterrupted

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_a_tool_is_described_as_a_builtin(supervisor: Supervisor) -> None:
    """`help(tool)`, and the error when a pool of processes pickles it, named a module of the guest."""
    tool = supervisor.tools.stub("slow", "Takes its time.", ["q"])
    text = pydoc.plain(pydoc.render_doc(tool))
    assert "function slow in module builtins" in text and "slow(q)" in text
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"slow.* builtins"):
        pickle.dumps(tool)


# -- each message to its thread


@pytest.mark.parametrize("size", [10, len(LARGE)])
def test_each_thread_gets_its_own_reply_in_whatever_order_they_come(supervisor: Supervisor, size: int) -> None:
    count = 12
    got: dict[int, Any] = {}
    tool = supervisor.tools.stub("tool", "", [])

    def call(number: int) -> None:
        got[number] = tool(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for caller in callers:
        caller.start()
    requests = [supervisor.request() for _ in range(count)]
    for request in reversed(requests):
        (number,), _ = decode(request.body)
        supervisor.reply(request.call, encode((number, b"x" * size)))
    for caller in callers:
        caller.join()
    assert got == {number: (number, b"x" * size) for number in range(count)}


def test_a_command_that_a_waiting_call_receives_is_kept_for_whom_it_is(supervisor: Supervisor) -> None:
    def answer(request: Request) -> None:
        link.send(supervisor.sock, PlaceTools(), b"1")
        link.send(supervisor.sock, SetRules(), b"2")
        supervisor.reply(request.call, encode(None))

    server = supervisor.serve(answer)
    assert supervisor.tools.stub("tool", "", [])() is None
    server.join()
    assert [supervisor.inbox.command().body for _ in range(2)] == [b"1", b"2"]


def test_a_thread_leads_on_when_the_leader_has_its_reply(supervisor: Supervisor) -> None:
    tool = supervisor.tools.stub("tool", "", [])
    got: list[Any] = []
    other = threading.Thread(target=lambda: got.append(tool("other")))
    other.start()
    first = supervisor.request()

    def answer(request: Request) -> None:
        supervisor.reply(first.call, encode(1))
        supervisor.reply(request.call, encode(2))

    server = supervisor.serve(answer)
    assert tool("mine") == 2
    other.join()
    server.join()
    assert got == [1]


def test_every_waiting_thread_learns_that_the_link_is_gone(supervisor: Supervisor) -> None:
    tool = supervisor.tools.stub("tool", "", [])
    ended: list[type[BaseException]] = []

    def call() -> None:
        try:
            tool()
        except link.LinkClosed as error:
            ended.append(type(error))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for _ in callers:
        supervisor.request()
    supervisor.sock.shutdown(socket.SHUT_RDWR)
    for caller in callers:
        caller.join()
    assert ended == [link.LinkClosed] * 3


# -- interrupts


def test_an_interrupted_call_ends_and_its_late_reply_is_dropped_and_closed(supervisor: Supervisor) -> None:
    late: list[str] = []

    def answer(request: Request) -> None:
        if not late:
            late.append(request.call)
            interrupt()
        else:
            supervisor.reply(late[0], LARGE)
            supervisor.reply(request.call, encode("right"))

    server = supervisor.serve(answer, count=2)
    tool = supervisor.tools.stub("tool", "", [])
    with interruptible(supervisor.inbox):
        with pytest.raises(ExecutionInterrupted):
            tool()
        with none_left_open():
            assert tool() == "right"
    server.join()
    assert not supervisor.inbox._expected
    assert not supervisor.inbox._replies


@pytest.mark.parametrize("kind", [ToolReply, SetRules])
def test_an_interrupt_while_a_message_is_taken_comes_after_it(
    supervisor: Supervisor, kind: type[LinkMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raising in between would lose a command, or the descriptor of a reply."""
    receive = link.receive
    taken: list[link.Packet] = []

    def receive_interrupted(sock: socket.socket, max_bytes: int, size: int) -> link.Packet:
        packet = receive(sock, max_bytes, size)
        if threading.current_thread() is threading.main_thread() and not taken:
            taken.append(packet)
            signal.raise_signal(signal.SIGINT)
        return packet

    def answer(request: Request) -> None:
        link.send(supervisor.sock, SetRules() if kind is SetRules else ToolReply(call=request.call, ok=True), LARGE)

    server = supervisor.serve(answer)
    monkeypatch.setattr(link, "receive", receive_interrupted)
    with interruptible(supervisor.inbox), pytest.raises(ExecutionInterrupted):
        supervisor.tools.stub("tool", "", [])()
    server.join()
    assert taken
    if kind is SetRules:
        command = supervisor.inbox.command()
        assert command is taken[0]
        assert command.memfd is not None
        os.close(command.memfd)


def test_an_interrupt_while_another_thread_leads_ends_the_waiting_call(supervisor: Supervisor) -> None:
    tool = supervisor.tools.stub("tool", "", [])
    got: list[Any] = []
    leader = threading.Thread(target=lambda: got.append(tool()))
    leader.start()
    first = supervisor.request()
    assert eventually(lambda: supervisor.inbox._leading)
    server = supervisor.serve(lambda _: interrupt())
    with interruptible(supervisor.inbox), pytest.raises(ExecutionInterrupted):
        tool()
    server.join()
    supervisor.reply(first.call, encode("led on"))
    leader.join()
    assert got == ["led on"]


# -- calls


def outcome(supervisor: Supervisor, body: bytes = b"", **reply: Any) -> Any:
    server = supervisor.serve(lambda request: supervisor.reply(request.call, body, **reply))
    try:
        return supervisor.tools.stub("tool", "", [])(1, a=2)
    finally:
        server.join()


def test_arguments_go_out_as_they_were_given(supervisor: Supervisor) -> None:
    seen: list[Request] = []

    def answer(request: Request) -> None:
        seen.append(request)
        supervisor.reply(request.call, encode(None))

    server = supervisor.serve(answer)
    supervisor.tools.stub("search", "Finds.", ["query"])(1, a=[2])
    server.join()
    assert decode(seen[0].body) == ((1,), {"a": [2]})
    assert seen[0].message == CalledTool(call=seen[0].call, name="search")


def test_a_final_answer_ends_the_program(supervisor: Supervisor) -> None:
    with pytest.raises(FinalAnswerGiven):
        outcome(supervisor, encode(1), final=True)


@pytest.mark.parametrize(
    ("type_name", "message", "expected"),
    [
        ("ValueError", "no", ValueError("no")),
        ("KeyError", "'key'", KeyError("key")),
        ("UnicodeDecodeError", "no", UnicodeError("no")),
        ("ExceptionGroup", "no", ToolError("ExceptionGroup: no")),
        ("HTTPError", "404", ToolError("HTTPError: 404")),
        ("KeyboardInterrupt", "no", ToolError("KeyboardInterrupt: no")),
        ("SystemExit", "0", ToolError("SystemExit: 0")),
        ("print", "no", ToolError("print: no")),
    ],
)
def test_an_exception_of_the_host_is_of_its_type_where_that_is_an_ordinary_builtin(
    supervisor: Supervisor, type_name: str, message: str, expected: Exception
) -> None:
    with pytest.raises(type(expected)) as raised:
        outcome(supervisor, message.encode(), ok=False, type=type_name)
    assert raised.value.args == expected.args


@pytest.mark.parametrize(
    ("type_name", "message", "arguments"),
    [
        ("FileNotFoundError", "[Errno 2] gone: 'a.txt'", (2, "gone", "a.txt")),
        ("OSError", "lib.Broken: [Errno 5] bad: 'a.txt'", (5, "bad", "a.txt")),
        ("KeyError", "lib.Missing: ('a', 1)", (("a", 1),)),
        ("UnicodeDecodeError", "'utf-8' codec can't decode byte 0xff", ("utf-8", b"\xff", 0, 1, "why")),
        ("ValueError", "json.decoder.JSONDecodeError: Expecting value", ("Expecting value",)),
    ],
)
def test_an_exception_of_the_host_has_its_arguments_and_its_text(
    supervisor: Supervisor, type_name: str, message: str, arguments: tuple[Any, ...]
) -> None:
    packed = encode(arguments)
    with pytest.raises(getattr(builtins, type_name)) as raised:
        outcome(supervisor, message.encode() + packed, ok=False, type=type_name, arguments=len(packed))
    error = raised.value
    assert (type(error).__name__, str(error)) == (type_name, message)
    if isinstance(error, OSError):
        assert (error.errno, error.strerror, error.filename) == arguments
    else:
        assert error.args == arguments
    assert type(pickle.loads(pickle.dumps(error))) is getattr(builtins, type_name)


def test_an_image_waits_until_it_is_taken(supervisor: Supervisor) -> None:
    seen: list[Request] = []

    def answer(request: Request) -> None:
        seen.append(request)
        link.send(supervisor.sock, ImageReply(call=request.call))

    server = supervisor.serve(answer)
    supervisor.tools.show("image/png", "figure", LARGE)
    server.join()
    ((call, message, body),) = seen
    assert (message, body) == (ShownImage(call=call, mime="image/png", source="figure"), LARGE)


def test_a_stub_looks_like_its_tool(supervisor: Supervisor) -> None:
    tool = supervisor.tools.stub("search", "Finds.", ["query", "limit"])
    assert (tool.__name__, tool.__doc__) == ("search", "Finds.")
    assert str(inspect.signature(tool)) == "(query, limit)"


def test_a_wait_that_nobody_ends_is_over_in_its_time_and_holds_the_lock() -> None:
    changed = Condition()
    with changed:
        changed.wait(0.001)
        assert not changed._lock.acquire(blocking=False)
        assert changed._waiting == []


def test_a_final_answer_is_no_failure_of_a_thread_where_threads_were_known_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a sandbox that was forked with libraries; in others `threading` is imported later."""
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))
    keep_final_answers_quiet()
    for error in (FinalAnswerGiven, ValueError):
        thread = threading.Thread(target=_raise, args=(error("x"),))
        thread.start()
        thread.join()
    assert reported == [ValueError]


def _raise(error: BaseException) -> None:
    raise error
