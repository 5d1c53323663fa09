"""The asyncio client's transports to the front and the nodes of a fleet, and the transport of one session.

A daemon that belongs to no fleet is the front of its sessions and has them too; then nothing here costs anything.

The front of a fleet names the address of the node that has a session. The calls of the session go there, by the rule of
`redirects`. Only the front knows that a session is lost with its node: the client asks it while the node does not
answer, and goes on waiting for the node as long as the front says nothing else.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._aio.channel import AsyncEventStream
from executor_client._aio.runtime import sleep
from executor_client._aio.transport import AsyncTransport
from executor_client._core import convert
from executor_client._core.channel import EventsRequest, closed
from executor_client._core.endpoint import Endpoint
from executor_client._core.execution import Execution
from executor_client._core.limits import FRONT_ASK_EVERY_S, FRONT_ASK_TIMEOUT_S, NODES_MAX, REDIRECTS_MAX
from executor_client._core.process import FollowedProcess
from executor_client._core.redirects import redirected
from executor_client._core.session_base import Held, SessionLost
from executor_client._core.status import SessionElsewhere
from executor_client._core.stubs import CurrentStub
from executor_client._core.tracing import Metadata
from executor_client._core.transport_base import Timeouts
from executor_client._core.waiting import Awaited, Waits
from executor_client.errors import (
    ExecutorClientError,
    NotFoundError,
    ProtocolError,
    UnavailableError,
)
from executor_client.results import SessionInfo, SessionState
from executor_client.waits import OnWait

T = TypeVar("T")


class AsyncTransports:
    """Owns the client's transport to its daemon, `front`, and one to each address that the daemon has named."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts, on_wait: OnWait | None = None) -> None:
        self.front = AsyncTransport(endpoint, timeouts, on_wait)
        self._nodes: dict[str, AsyncTransport] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def at(self, address: str) -> AsyncTransport:
        """Returns the transport to an address that the daemon has named; to the daemon itself for an empty one.

        Raises ConfigurationError for an address that the token may not be sent to.
        """
        if not address:
            return self.front
        with self._lock:
            if self._is_closed:
                raise closed()
            if address not in self._nodes:
                endpoint = redirected(self.front.endpoint, address)
                if endpoint is self.front.endpoint:
                    return self.front
                if len(self._nodes) >= NODES_MAX:
                    raise ProtocolError(f"the daemon has named more than {NODES_MAX} nodes")
                self._nodes[address] = self.front.beside(endpoint)
            return self._nodes[address]

    async def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for transport in (self.front, *self._nodes.values()):
            await transport.close()


class AsyncSessionTransport:
    """The transport of one session: at its node, which may change, with the front beside it."""

    def __init__(self, transports: AsyncTransports, info: SessionInfo) -> None:
        """Raises ConfigurationError for a node that the token may not be sent to."""
        self._transports = transports
        self._session_id = info.session_id
        self._address = info.address
        self._is_of_fleet = bool(info.node)
        self._asked_s = -math.inf
        self._unreached_s = math.inf
        self._loss: SessionLost | None = None
        self._is_closed = False
        self.current = transports.at(info.address)
        """The transport that calls use now."""
        self.held: Held | None = None
        """The session's entry in the lease of the client, which moves with it; None for a detached session."""

    @property
    def front(self) -> AsyncTransport:
        return self._transports.front

    @property
    def stub(self) -> CurrentStub:
        return CurrentStub(lambda: self.current.stub)

    @property
    def timeouts(self) -> Timeouts:
        return self.current.timeouts

    # Calls

    async def once(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """Makes one attempt of a call with one answer."""
        return await self.current.once(method, request, timeout_s)

    async def upload(self, method: Callable[..., Any], requests: Any, timeout_s: float | None = None) -> Any:
        """Makes one attempt of a call with a stream of requests."""
        return await self.current.upload(method, requests, timeout_s)

    def read(
        self, method: Callable[..., Any], request: Any, timeout_s: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """Makes one attempt of a call with a stream of answers. A reader that stops early cancels the call."""
        return self.current.read(method, request, timeout_s)

    async def call(self, method: Callable[..., Any], request: Any, awaited: Awaited | None = None) -> Any:
        """Makes a call with one answer, repeated where that may help. `awaited` names the wait in reports."""
        awaited = awaited or self.current.answer
        return await self.repeat(lambda: self.once(method, request), awaited=awaited)

    async def repeat(
        self, attempt: Callable[[], Awaitable[T]], *, within_s: float = math.inf, awaited: Awaited | None = None
    ) -> T:
        """Repeats an attempt as `AsyncTransport.repeat` does, and where another node has the session.

        Raises SessionLost when the front says so.
        """
        redirects = 0
        while True:
            self.check()
            try:
                return await self.current.repeat(attempt, within_s=within_s, awaited=awaited, pause=self.pause)
            except SessionElsewhere as elsewhere:
                redirects += 1
                self.follow(elsewhere, redirects)
            except NotFoundError as error:
                raise await self.loss(error) or error from None

    async def call_front(self, method: str, request: Any) -> Any:
        """Makes a call with one answer at the front, which also knows the sessions of nodes that are gone."""
        self._require_open()
        return await self.front.call(getattr(self.front.stub, method), request)

    # Executions

    def waits(self) -> Waits:
        return self.current.waits()

    def execution(self, request: pb.ExecuteRequest, trace: Metadata, waits: Waits) -> Execution:
        """Returns the client's state of an execution. Raises SessionLost when the session is known to be lost."""
        self.check()
        return self.current.execution(request, trace, waits)

    def process(
        self, request: pb.StartProcessRequest | None, process_id: str, trace: Metadata, waits: Waits
    ) -> FollowedProcess:
        """Returns the client's state of a process. Raises SessionLost when the session is known to be lost."""
        self.check()
        return self.current.process(self._session_id, process_id, request, trace, waits)

    def open(self, request: EventsRequest, trace: Metadata, timeout_s: float | None = None) -> AsyncEventStream:
        """Starts a stream of the events of an execution or a process, which all belong to the trace of the first."""
        return self.current.open(request, trace, timeout_s)

    # The node

    async def pause(self, delay_s: float, *, is_away: bool) -> None:
        """Waits before the next attempt. Asks the front meanwhile, if the node is away. Raises SessionLost."""
        if not is_away or self.current is self.front:
            await sleep(delay_s)
            return
        until_s = time.monotonic() + delay_s
        node = self.current
        while node is self.current:
            await self._ask()
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            await sleep(min(left_s, FRONT_ASK_EVERY_S))

    async def _ask(self) -> None:
        """Asks the front for the session, unless that was done a moment ago. A front that is away says nothing."""
        now_s = time.monotonic()
        if now_s < self._asked_s + FRONT_ASK_EVERY_S:
            return
        self._asked_s = now_s
        request = pb.GetSessionRequest(session_id=self._session_id)
        try:
            response = await self.front.once(self.front.stub.GetSession, request, FRONT_ASK_TIMEOUT_S)
            info = convert.session_from_wire(response.session)
        except ExecutorClientError:
            return  # not even the front's NOT_FOUND is the end: one that has just begun does not know all nodes yet
        if info.state is SessionState.LOST:
            self._lose(info)
        self.described(info)
        self.check()
        if not self.current.answered:
            await self._never_reached(now_s)

    async def _never_reached(self, now_s: float) -> None:
        """Raises UnavailableError for a node that answers the front, and that can't be reached from here at all."""
        self._unreached_s = min(self._unreached_s, now_s)
        if now_s - self._unreached_s < self.current.connect_timeout_s:
            return
        cause = await self.current.diagnosis()
        if cause is not None:
            raise UnavailableError(
                f"no daemon answers at {self.current.endpoint.address}: {cause}. The daemon at "
                f"{self.front.endpoint.address} says that the session is there; it can pass the calls on (fleet.proxy)"
            )
        self.current.answered = True

    def described(self, info: SessionInfo) -> None:
        """Takes in what the front has said of the session. Raises ConfigurationError as the constructor does."""
        if info.state is SessionState.LOST and self._address and not info.address:
            self._lose(info)  # no node has it any more
        elif info.address and info.address != self._address:
            self._move(info.address)

    def follow(self, elsewhere: SessionElsewhere, redirects: int) -> None:
        """Goes on at the address that a daemon has named instead of an answer, the call's number `redirects`.

        Raises ConfigurationError as the constructor does, and the error itself when one has led to another.
        """
        if redirects > REDIRECTS_MAX:
            raise elsewhere
        self._move(elsewhere.address)

    async def loss(self, error: ExecutorClientError) -> SessionLost | None:
        """Returns the loss of the session with its node, when that is behind an error; None for any other.

        A node that was cut off has ended its sandboxes. It knows that an earlier epoch had the session, or nothing of
        it; the front knows the reason.
        """
        if isinstance(error, SessionLost):
            return error
        if not self._is_of_fleet or error.reason not in ("SESSION_LOST", "SESSION_NOT_FOUND"):
            return None
        self._asked_s = -math.inf
        try:
            if self.current is not self.front:
                await self._ask()
        except SessionLost as lost:
            return lost
        return SessionLost(error.message) if error.reason == "SESSION_LOST" else None

    def closed(self) -> None:
        """Lets no call begin from here on: the session was deleted by this client."""
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise NotFoundError(
                "this session was closed, by its close() or at the end of its `with` block; make another one "
                "(create_session)",
                reason="SESSION_CLOSED",
            )

    def check(self) -> None:
        """Raises SessionLost when the front has said that the session is lost, and NotFoundError when it was
        closed here."""
        self._require_open()
        if self._loss is not None:
            raise self._loss

    def _move(self, address: str) -> None:
        self.current, self._address = self._transports.at(address), address
        self._unreached_s = math.inf
        if self.held is not None:
            self.held.moved(self.current.endpoint)

    def _lose(self, info: SessionInfo) -> None:
        self._loss = SessionLost(info.lost_reason)
        if self.held is not None:
            self.held.closed()

    async def delete(self, request: pb.DeleteSessionRequest, within_s: float, awaited: Awaited) -> None:
        """Deletes the session; at the front, which remembers it, when it was lost with its node."""
        try:
            await self.repeat(lambda: self.once(self.stub.DeleteSession, request), within_s=within_s, awaited=awaited)
        except SessionLost:
            front = self.front
            await front.repeat(
                lambda: front.once(front.stub.DeleteSession, request), within_s=within_s, awaited=awaited
            )
        if self.held is not None:
            self.held.closed()
