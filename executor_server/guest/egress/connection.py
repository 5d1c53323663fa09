"""One connection of a sandbox, from its head to its end: head, rule, addresses, and then the tunnel or the request."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from typing import TYPE_CHECKING, Any, Callable, Coroutine, Dict, Optional, TypeVar

from . import reasons
from .accounts import WorkShare
from .endpoint import DeadlinePassed, Endpoint
from .first_bytes import HTTPS_PORT, FirstBytes
from .forward import Exchange
from .head import HTTP_PORT, Head, HeadReader, TunnelHeadReader
from .host_names import Target
from .host_rules import Allowed
from .protocols import Dialled, Terminator
from .refusals import Ended, Refusal, failure, response_to
from .splice import Splice

if TYPE_CHECKING:
    from .session import Session

T = TypeVar("T")

_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


class Connection:
    """Owned by its session, which runs `run` in a task. It is the tunnel that a terminator is given (protocols.py).

    Room is requested directly before bytes are read, and they are counted directly after: connections of a session
    share its bounds, and nothing may come between. Bytes that are not read are not lost, they wait at their sender.
    """

    allowed: Allowed  # with the rule's secrets
    target: Target

    def __init__(self, session: Session, sock: socket.socket, number: int) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._client = Endpoint(sock)
        self._number = number
        self._task: Optional[asyncio.Task[None]] = None
        self._ended_by = ""
        self._answered = self._reported = self._closed = False
        self._method = b""
        self._upstream: Optional[Endpoint] = None
        self._made_at = self._opened_at = 0.0  # differ after `dial`
        self._time_limit: Optional[asyncio.TimerHandle] = None
        self._sent = self._received = 0
        self.decided = False  # it has a target and a rule
        self.has_place = False  # it counts towards the rules' max_connections
        self.session_id = session.session_id
        self.client = sock  # non-blocking
        self.buffered = b""  # sent by the client behind the head of its CONNECT; usually nothing
        self.address = ""
        self.secret_used = ""  # the header's name once a secret was sent

    # ------------------------------------------------------------------------------------------------------------------
    # Called by its session

    def start(self) -> asyncio.Task[None]:
        self._task = self.create_task(self.run())
        return self._task

    def end(self, reason: str) -> None:
        """Cuts the connection off; the task finishes in the loop's next iterations."""
        if not self._ended_by and self._task is not None:
            self._ended_by = reason
            self._task.cancel()

    def dismiss(self, refusal: Refusal) -> None:
        """Cuts off a held connection. Its client gets as much of the refusal as can be sent without waiting."""
        try:
            self._client.sock.send(response_to(refusal, with_body=self._method != b"HEAD"))
        except OSError:
            pass  # it is gone, or reads nothing
        self.end(refusal.reason)

    def limit_time(self, seconds: float) -> None:
        """Ends the connection this long after it was made."""
        if self._time_limit is not None:
            self._time_limit.cancel()
        if self._upstream is not None:
            left_s = max(0.0, self._made_at + seconds - time.monotonic())
            self._time_limit = self._loop.call_later(left_s, self.end, reasons.TIME_LIMIT)

    # ------------------------------------------------------------------------------------------------------------------
    # Its life

    async def run(self) -> None:
        reason = reasons.BROKEN
        try:
            try:
                await self._serve()
                reason = reasons.ENDED
            except Refusal as refusal:
                reason = refusal.reason
                await self._refuse(refusal)
            except (Ended, OSError, DeadlinePassed):
                raise
            except Exception as error:  # noqa: BLE001 - the program gets an answer to our bugs too
                reason = reasons.PROXY_FAILED
                await self._refuse(failure(error))
        except Ended as ended:
            reason = ended.reason
        except (OSError, DeadlinePassed):  # ssl.SSLError is an OSError
            return
        except asyncio.CancelledError:
            if not self._ended_by:
                reason = reasons.PROXY_ENDED
                raise
        finally:
            self.close(reason)

    async def _serve(self) -> None:
        limits = self._session.limits
        head = await self._read_head(HeadReader(limits.head_bytes, limits.head_lines))
        if head is None:
            return
        self.target = head.target
        self._check_scheme(head)
        await self._session.hold(self, head.target)
        self.allowed = self._session.admit(self, head.target)
        self.decided = True
        addresses = await self._session.dialer.find(head.target)
        self._session.take_place(self)
        dialled = await self._session.dialer.connect(head.target, addresses)
        self._open(dialled)
        if head.is_connect:
            self.buffered = head.take_rest()
            del head  # and with it 6 KB of h11, which an idle tunnel would keep
            await self._tunnel(dialled)
        else:
            await self._forward(head)

    async def _read_head(self, reader: HeadReader, buffered: bytes = b"") -> Optional[Head]:
        """Returns the head; None if the client sent nothing: browsers open connections that they may not need."""
        deadline = self._loop.time() + self._session.limits.head_s
        try:
            head = reader.feed(buffered) if buffered else None
            while head is None:
                data = await self._client.receive(reader.wanted, deadline)
                if not data and reader.is_empty:
                    return None
                head = reader.feed(data)
        except DeadlinePassed:
            if reader.is_empty:
                return None
            message = "the connection was closed: the head of its request was not complete in time"
            raise Refusal(reasons.HEAD_TIMEOUT, message) from None
        finally:
            self._method = reader.method
        return head

    def _check_scheme(self, head: Head) -> None:
        if not head.is_connect and head.target.port == HTTPS_PORT:
            message = f"{head.target} expects TLS: ask for it with https://, which makes a CONNECT"
            raise Refusal(reasons.BAD_REQUEST, message)

    def _open(self, dialled: Dialled) -> None:
        try:
            self._upstream = Endpoint(dialled.sock)
        except OSError:
            dialled.sock.close()
            raise
        self._report_opened(dialled.address)
        self._made_at = self._opened_at
        if self._ended_by:  # while it was dialled; a cancellation can be lost in asyncio.wait_for before CPython 3.12
            raise Ended(self._ended_by)
        self.limit_time(self._session.rules.max_connection_s)

    async def _tunnel(self, dialled: Dialled) -> None:
        await self._client.send(_ESTABLISHED, self._loop.time() + self._session.limits.head_s)
        self._answered = True
        terminator = self._terminator()
        if terminator is not None:
            await terminator.terminate(self)
            return
        if self.target.port == HTTP_PORT:
            await self._forward_from_tunnel()
            return
        limits = self._session.limits
        check = FirstBytes(self.target, limits.head_bytes)
        await Splice(self.client, dialled.sock, self, check, limits).run(self.buffered)

    def _terminator(self) -> Optional[Terminator]:
        """Rules with secrets need the plain text. Where there is no terminator, no rule has secrets."""
        return self._session.terminator if self.allowed.secrets else None

    async def _forward_from_tunnel(self) -> None:
        """Reads the request as if there were no tunnel: copying bytes would let requests for other hosts follow it."""
        limits = self._session.limits
        buffered, self.buffered = self.buffered, b""
        self._answered = False  # now a refusal answers the request in the tunnel
        head = await self._read_head(TunnelHeadReader(self.target, limits.head_bytes, limits.head_lines), buffered)
        if head is not None:
            await self._forward(head, in_tunnel=True)

    async def _forward(self, head: Head, *, in_tunnel: bool = False) -> None:
        assert self._upstream is not None
        exchange = Exchange(self._client, self._upstream, head, self, in_tunnel=in_tunnel)
        try:
            await exchange.run()
        finally:
            self._answered = exchange.answered
        if exchange.has_switched:
            await Splice(self.client, self._upstream.sock, self, None, self._session.limits).run(b"")
            return
        self._close_upstream(reasons.ENDED)
        self._session.leave(self)
        await self._client.linger(self._session.limits.linger_s)

    async def _refuse(self, refusal: Refusal) -> None:
        await self.deny(refusal)
        self._close_upstream(refusal.reason)
        self._session.leave(self)
        if not self._answered:
            deadline = self._loop.time() + self._session.limits.linger_s
            await self._client.send(response_to(refusal, with_body=self._method != b"HEAD"), deadline)
        elif refusal.parting:
            try:
                self.client.send(refusal.parting)
            except BlockingIOError:
                return
        else:
            return
        await self._client.linger(self._session.limits.linger_s)

    def check_client(self) -> None:
        """Raises Ended when the client of a held connection has gone. Bytes that it has sent stay unread."""
        poll = select.poll()
        poll.register(self._client.fd, select.POLLRDHUP)
        if poll.poll(0):
            raise Ended(reasons.BROKEN)

    def close(self, reason: str) -> None:
        """Closes the sockets and reports the end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._time_limit is not None:
            self._time_limit.cancel()
        self._client.close()
        self._session.finished(self)
        self._close_upstream(reason)

    def _close_upstream(self, reason: str) -> None:
        if self._upstream is None or self._reported:
            return
        self._reported = True
        self._upstream.close()
        self._report_closed(self._ended_by or reason)

    def _report_opened(self, address: str) -> None:
        self.address = address
        self._opened_at = time.monotonic()
        self._session.reporter.opened(self.session_id, self.record(""))

    def _report_closed(self, reason: str) -> None:
        self._session.account.report()
        self._session.reporter.closed(self.session_id, self.record(reason))

    def record(self, reason: str) -> Dict[str, Any]:
        """A core.network.EgressConnection as a dictionary."""
        return {
            "connection_id": self._session.connection_id(self._number),
            "host": self.target.host,
            "port": self.target.port,
            "address": self.address,
            "rule": self.allowed.rule,
            "sent_bytes": self._sent,
            "received_bytes": self._received,
            "duration_s": round(time.monotonic() - self._opened_at, 6),
            "reason": reason,
            "secret_used": self.secret_used,
        }

    # ------------------------------------------------------------------------------------------------------------------
    # For a splice, an exchange and a terminator

    @property
    def upstream(self) -> socket.socket:
        """Non-blocking, connected to a classified address of the target."""
        assert self._upstream is not None
        return self._upstream.sock

    @property
    def share(self) -> WorkShare:
        return self._session.share

    def create_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.share.create_task(work)

    def send_room(self) -> int:
        """Bytes of the client that may be read now; 0 while the session's window is shut. Raises Ended when the session
        has sent all that its rules allow."""
        return self._session.account.send_room()

    def receive_room(self) -> int:
        return self._session.account.receive_room()

    async def room_opened(self) -> None:
        """Returns once there may be room again, where there was none."""
        future = self._loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        self.call_when_open(wake)
        try:
            await future
        finally:
            self.forget(wake)

    def call_when_open(self, callback: Callable[[], None]) -> None:
        """Calls back once there may be room again. A callback that is added twice is called once."""
        self._session.account.call_when_open(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        self._session.account.forget(callback)

    def count_sent(self, count: int) -> None:
        self._sent += count
        self._session.account.count_sent(count)

    def count_received(self, count: int) -> None:
        self._received += count
        self._session.account.count_received(count)

    async def dial(self) -> Dialled:
        """Makes another connection to the target, which is resolved and classified again, in place of the last one.

        The program decides how often, so it counts as a new connection and has records of its own. Only the tunnel's
        place and its time limit stay. Raises Refusal, Ended.
        """
        self._session.count_new()
        dialer = self._session.dialer
        dialled = await dialer.connect(self.target, await dialer.find(self.target))
        if self._ended_by:  # see `_open`
            dialled.sock.close()
            raise Ended(self._ended_by)
        self._report_closed(reasons.ENDED)
        self._number = self._session.next_number()
        self._sent = self._received = 0
        self.secret_used = ""
        self._report_opened(dialled.address)
        return dialled

    async def deny(self, refusal: Refusal) -> None:
        """Reports a refusal, and gives the report a moment: the step's log has it before the program knows."""
        target: Optional[Target] = getattr(self, "target", None)
        denial = {
            "host": refusal.host or (target.host if target else ""),
            "port": refusal.port or (target.port if target else 0),
            "reason": refusal.reason,
            "message": refusal.message,
            "address": refusal.address,
        }
        try:
            await asyncio.wait_for(
                self._session.reporter.denied(self.session_id, denial), self._session.limits.notice_s
            )
        except asyncio.TimeoutError:
            pass
