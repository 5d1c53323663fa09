"""The protocol between a proxy and the owners of sessions, and the server that drives a proxy with it.

Theory of operation. Both directions carry lines of JSON objects with a `type`, over any stream of bytes that keeps its
order. Commands that are to be answered have a `number`; the answer is `done` or `failed` with the same one.

To the proxy:
    bind     number, session, rules, used, total_bytes    serve the listener that came with it; replaces an earlier one
    change   session, rules                                close connections that the rules no longer allow
    allow    session, total_bytes                          bound of sent and received bytes together; null: none
    exhaust  session, reason                               close all and refuse new ones, for this reason; null: go on
    settle   number, session                               answered when all reports so far were sent; "": of no session
    end      number, session                               answered when the connections are closed, and reported
    ack      number                                        the refusal was recorded: its answer may leave
    ruled    number, why                                   an approval was given (""), or was not, for this reason

From the proxy:
    done     number
    failed   number, message                               a clause for the administrator
    opened   session, connection                           fields of core.network.EgressConnection
    closed   session, connection
    denied   session, denial, number                       fields of core.network.EgressDenial; answered with ack
    uncounted  session, count                              refusals that came too fast to be reported one by one
    moved    session, sent_bytes, received_bytes           since the last such message
    asks     session, number, host, port                   connections wait for an approval; answered with ruled
    withdrawn  session, number                             none waits for it any more
    misused  session                                       its listener was made to block the proxy, and is closed

Order matters: everything that happened before the `done` of a settle or an end is reported before it, so a caller that
waits for the answer has all reports. A line has a maximum in each direction, which the reader enforces before it keeps
the bytes.

Refusals are the only reports that a sandbox can cause without limit. So each session, and all of them together, may
report a bounded number per second; the rest is counted. A reader that is behind gets none until it has caught up.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any, Awaitable, Callable, Dict, Iterator, Optional

from .accounts import Bucket
from .host_names import Target
from .host_rules import Rules
from .protocols import Used
from .proxy import Proxy

Message = Dict[str, Any]

MAX_COMMAND_BYTES = 2**22  # rules with secrets for many paths are large
MAX_REPORT_BYTES = 2**14
_MAX_MESSAGE_CHARS = 500

DENIALS_PER_S = 20.0
DENIALS_BURST = 100.0
ALL_DENIALS_PER_S = 500.0
ALL_DENIALS_BURST = 1000.0
# With more bytes than this on their way to the reader, refusals are only counted.
BEHIND_BYTES = 2**18
# Seconds until refusals that were only counted are reported.
_COUNT_S = 0.5


class ControlError(Exception):
    """The other end broke the protocol; the message is a clause, and holds none of its text."""


def encode(message: Message) -> bytes:
    """One line. ASCII, so that no character of a sandbox is a line break for some reader."""
    return json.dumps(message, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


class LineReader:
    """Makes messages from a stream of bytes. Keeps no more than one line's maximum beyond what it is fed."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yields the messages that are complete now. Raises ControlError for an invalid one; the stream is useless
        afterwards."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._check(line)
            yield _decode(line)
        self._check(self._rest)

    def _check(self, line: bytes) -> None:
        if len(line) > self._max_line_bytes:
            raise ControlError(f"a line is longer than {self._max_line_bytes} bytes")


def _decode(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ControlError("a line is not JSON") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ControlError("a line is no message")
    return message


class ControlServer:
    """Carries out commands on a proxy, whose Reporter it is. Every command comes from a trusted daemon.

    `send` takes one line and must not block; `backlog_bytes` returns how many sent bytes still wait for the reader.
    """

    def __init__(self, send: Callable[[bytes], None], backlog_bytes: Callable[[], int]) -> None:
        self._send = send
        self._backlog_bytes = backlog_bytes
        self._proxy: Optional[Proxy] = None
        self._tasks: Dict[int, "asyncio.Task[None]"] = {}
        self._unacknowledged: Dict[int, "asyncio.Future[None]"] = {}
        self._asked: Dict[int, "asyncio.Future[str]"] = {}
        self._numbers = 0
        self._all_denials = Bucket(ALL_DENIALS_PER_S, ALL_DENIALS_BURST, time.monotonic())
        self._denials: Dict[str, Bucket] = {}
        self._uncounted: Dict[str, int] = {}
        self._count_timer: Optional[asyncio.TimerHandle] = None

    def drive(self, proxy: Proxy) -> None:
        """Sets the proxy, which was made with this object as its reporter."""
        self._proxy = proxy

    def handle(self, message: Message, listener: Optional[socket.socket] = None) -> None:
        """Carries out one command; `listener` came with a bind, and is taken over. Raises ControlError."""
        kind = message["type"]
        if kind == "bind":
            self._bind(message, listener)
            return
        if listener is not None:
            listener.close()
            raise ControlError("a descriptor came with a message that takes none")
        handlers = {
            "change": self._change,
            "allow": self._allow,
            "exhaust": self._exhaust,
            "settle": self._settle,
            "end": self._end,
            "ack": self._acknowledge,
            "ruled": self._rule,
        }
        if kind not in handlers:
            raise ControlError("a command is unknown")
        try:
            handlers[kind](message)
        except (KeyError, TypeError, ValueError) as error:
            raise ControlError(f"a command of type {kind} is wrong: {type(error).__name__}") from error

    # Commands ---------------------------------------------------------------------------------------------------------

    def _bind(self, message: Message, listener: Optional[socket.socket]) -> None:
        if listener is None:
            raise ControlError("a bind lacks its listener")
        try:
            number, session_id, used = message["number"], message["session"], message["used"]
            rules = Rules.read(message["rules"])
            self._the_proxy.serve(session_id, listener, rules, used=Used(used["sent_bytes"], used["received_bytes"]))
            self._the_proxy.allow(session_id, message["total_bytes"])
        except (KeyError, TypeError, ValueError, OSError) as error:
            listener.close()
            self._fail(message.get("number", 0), f"the session can't be served: {error}")
            return
        self._done(number)

    def _change(self, message: Message) -> None:
        self._the_proxy.change(message["session"], Rules.read(message["rules"]))

    def _allow(self, message: Message) -> None:
        self._the_proxy.allow(message["session"], message["total_bytes"])

    def _exhaust(self, message: Message) -> None:
        self._the_proxy.set_exhausted(message["session"], message["reason"])

    def _settle(self, message: Message) -> None:
        if message["session"]:
            self._the_proxy.report(message["session"])
            self._report_uncounted(message["session"])
        self._done(message["number"])

    def _end(self, message: Message) -> None:
        number, session_id = int(message["number"]), message["session"]
        # Called here and not in the task: a bind of the same session may follow in the same chunk of bytes.
        ending = self._the_proxy.end(session_id)
        self._tasks[number] = asyncio.ensure_future(self._end_session(number, session_id, ending))

    async def _end_session(self, number: int, session_id: str, ending: Awaitable[None]) -> None:
        try:
            await ending
        finally:
            self._report_uncounted(session_id)
            self._denials.pop(session_id, None)
            del self._tasks[number]
            self._done(number)

    def _acknowledge(self, message: Message) -> None:
        waiting = self._unacknowledged.pop(message["number"], None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _rule(self, message: Message) -> None:
        waiting = self._asked.get(message["number"])
        if waiting is not None and not waiting.done():
            waiting.set_result(str(message["why"]))

    def _done(self, number: int) -> None:
        self._report({"type": "done", "number": number})

    def _fail(self, number: int, why: str) -> None:
        self._report({"type": "failed", "number": number, "message": why[:_MAX_MESSAGE_CHARS]})

    @property
    def _the_proxy(self) -> Proxy:
        if self._proxy is None:
            raise ControlError("there is no proxy yet")
        return self._proxy

    # The proxy's reporter ---------------------------------------------------------------------------------------------

    def opened(self, session_id: str, connection: Dict[str, Any]) -> None:
        self._report({"type": "opened", "session": session_id, "connection": connection})

    def closed(self, session_id: str, connection: Dict[str, Any]) -> None:
        self._report({"type": "closed", "session": session_id, "connection": connection})

    def misused(self, session_id: str) -> None:
        self._report({"type": "misused", "session": session_id})

    async def ask(self, session_id: str, target: Target) -> str:
        self._numbers += 1
        number = self._numbers
        ruling: "asyncio.Future[str]" = asyncio.get_running_loop().create_future()
        self._asked[number] = ruling
        self._report(
            {"type": "asks", "session": session_id, "number": number, "host": target.host, "port": target.port}
        )
        try:
            return await ruling
        finally:
            del self._asked[number]
            if ruling.cancelled():
                self._report({"type": "withdrawn", "session": session_id, "number": number})

    def moved(self, session_id: str, sent_bytes: int, received_bytes: int) -> None:
        self._report(
            {"type": "moved", "session": session_id, "sent_bytes": sent_bytes, "received_bytes": received_bytes}
        )

    async def denied(self, session_id: str, denial: Dict[str, Any]) -> None:
        now, own = time.monotonic(), self._denials.get(session_id)
        if own is None:
            own = self._denials[session_id] = Bucket(DENIALS_PER_S, DENIALS_BURST, now)
        if own.wait_s(now) or self._all_denials.wait_s(now) or self._backlog_bytes() > BEHIND_BYTES:
            self._uncounted[session_id] = self._uncounted.get(session_id, 0) + 1
            if self._count_timer is None:
                self._count_timer = asyncio.get_running_loop().call_later(_COUNT_S, self._report_all_uncounted)
            return
        own.take()
        self._all_denials.take()
        self._numbers += 1
        number = self._numbers
        self._unacknowledged[number] = asyncio.get_running_loop().create_future()
        self._report({"type": "denied", "session": session_id, "denial": denial, "number": number})
        try:
            await self._unacknowledged[number]
        finally:
            self._unacknowledged.pop(number, None)

    def _report_all_uncounted(self) -> None:
        self._count_timer = None
        if self._backlog_bytes() > BEHIND_BYTES:
            self._count_timer = asyncio.get_running_loop().call_later(_COUNT_S, self._report_all_uncounted)
            return
        for session_id in list(self._uncounted):
            self._report_uncounted(session_id)

    def _report_uncounted(self, session_id: str) -> None:
        count = self._uncounted.pop(session_id, 0)
        if count:
            self._report({"type": "uncounted", "session": session_id, "count": count})

    def _report(self, message: Message) -> None:
        self._send(encode(message))

    async def close(self) -> None:
        """Cancels unfinished commands. The caller closes the proxy."""
        if self._count_timer is not None:
            self._count_timer.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
