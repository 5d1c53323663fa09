"""The front's links: one task for each address finds the node there, links to it, and keeps the link.

A link ends when the connection does, when the node sends something wrong, or when it is silent for too long: packets
may be lost on the old connection only. The front then links again at once, and after that every half second. No node
can hold up another: each has its own task and connections, every wait has a limit, and early reports are not read
early.

The lease, not the link, decides whether a node is lost (membership/members.py).
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from executor_api.v1 import fleet_service_pb2 as fleet_pb
from executor_api.v1 import fleet_service_pb2_grpc as fleet_grpc
from executor_server.core import ExecutorError, Reason, TcpAddress
from executor_server.fleet.api import wire
from executor_server.fleet.api.dialing import Dialer, DialError
from executor_server.fleet.api.node_calls import RefusedByNode, refusal_of
from executor_server.fleet.membership import Control, FrontHello, NodeHello, NodeRefused, NodeReport, Renewal

if TYPE_CHECKING:
    from executor_server.fleet.api.front_fleet import FrontFleet

HELLO_TIME_S = 30.0
"""Seconds for a node to answer a hello. It first ends the sessions that were reported lost."""
RETRY_S = 0.5
"""Longest time between two attempts to link; the first one after a link is immediate."""
MAX_WRONG_RETRIES = 20
"""Limit of the growing wait after a wrong message, in first waits: reading such messages costs the front time."""
CONTROL_AGAIN_S = 10.0
"""Seconds after which a control is sent again if it is not in force yet."""
REFUSED_TEXT = "the configuration refuses it (fleet.refused_nodes)"

_log = structlog.get_logger(__name__)


class LinkBroken(Exception):
    """The link is over; the message says why, for an operator. `is_wrong`: the node sent what no node should send."""

    def __init__(self, problem: str, *, is_wrong: bool = False) -> None:
        super().__init__(problem)
        self.is_wrong = is_wrong


class FrontLink:
    """The link to the node at one address."""

    def __init__(
        self,
        address: TcpAddress,
        dialer: Callable[[], Dialer],
        fleet: FrontFleet,
        *,
        interval_s: float,
        lease_s: float,
        wrong_retry_s: float,
    ):
        self.address = address
        self.node = ""
        """The last node that answered there; empty if none has."""
        self.front_instance = ""
        """The front's start, as its last hello named it."""
        self.problem = ""
        """The reason why there is no link now."""
        self._dialer = dialer
        self._fleet = fleet
        self._interval_s = interval_s
        # Half a lease without a report leaves the other half for another connection.
        self._silence_s = max(lease_s / 2, 3 * interval_s)
        self._calls: grpc.aio.Channel | None = None  # while the link is up
        self._first_wrong_retry_s = self._wrong_retry_s = wrong_retry_s
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._control_sent: tuple[str, float] = ("", 0.0)
        self._up_since_s = math.inf

    @property
    def is_refused(self) -> bool:
        """True when a node answers there but the front does not accept it."""
        return bool(self.node and self.problem)

    @property
    def is_up(self) -> bool:
        return self._calls is not None

    @property
    def channel(self) -> Any:
        """The connection for calls. Requires that the link is up.

        The link has its own connection: calls could use up the limits of a shared one and delay its messages.
        """
        assert self._calls is not None
        return self._calls

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link {self.address}")

    async def restart(self) -> None:
        """Ends the link and its calls, and tries the node again at once."""
        await self._stop()
        if self._task is None and not self._is_closed:
            self.start()

    async def close(self) -> None:
        """Ends the link for good. Idempotent."""
        self._is_closed = True
        await self._stop()

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- the life of a link

    async def _run(self) -> None:
        while True:
            self._up_since_s = math.inf
            wait_s = RETRY_S
            try:
                await self._link()
            except (DialError, LinkBroken, NodeRefused) as error:
                self._report(str(error))
                if isinstance(error, LinkBroken) and error.is_wrong:
                    wait_s = self._wrong_wait_s()
            except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not end the link for good
                self._report("the front failed; its log says how")
                _log.exception("fleet_link_failed", address=str(self.address))
            if time.monotonic() - self._up_since_s < RETRY_S or wait_s > RETRY_S:
                # The links of one machine broke together, and need not come back together.
                await asyncio.sleep(random.uniform(wait_s / 2, wait_s))

    def _wrong_wait_s(self) -> float:
        """Returns the seconds to wait; starts again with the first wait if the link worked for longer than the last."""
        if time.monotonic() - self._up_since_s > self._wrong_retry_s:
            self._wrong_retry_s = self._first_wrong_retry_s
        wait_s = self._wrong_retry_s
        self._wrong_retry_s = min(2 * wait_s, MAX_WRONG_RETRIES * self._first_wrong_retry_s)
        return wait_s

    def _report(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            _log.warning("fleet_link_down", address=str(self.address), node=self.node, problem=problem)

    async def _link(self) -> None:
        """Links, and never returns: raises DialError, LinkBroken, NodeRefused when the link is over."""
        dialer = self._dialer()
        member = await dialer.member_at(self.address)
        self.node = member.node
        if self._fleet.is_refused(member.node):
            # Tried as rarely as a node that sends something wrong: the holder of its certificate may be hostile.
            raise LinkBroken(REFUSED_TEXT, is_wrong=True)
        other = self._fleet.link_of(member.node)
        if other is not None:
            raise LinkBroken(f"the node {member.node} is linked at {other.address} already")
        channel = dialer.link_channel(self.address, member)
        try:
            call: Any = fleet_grpc.FleetServiceStub(channel).Link()
            try:
                await self._follow(call, dialer.channel(self.address, member))
            except grpc.aio.AioRpcError as error:
                raise self._broken(error) from error
            finally:
                call.cancel()
        finally:
            await channel.close(None)

    def _broken(self, error: grpc.aio.AioRpcError) -> LinkBroken:
        refusal = refusal_of(self.node, error)
        if not isinstance(refusal, RefusedByNode):
            return LinkBroken(f"{error.code().name}: {error.details()}")
        if refusal.reason == Reason.FRONT_SUPERSEDED.value:
            self._fleet.superseded(self.node)
        return LinkBroken(f"it refuses the link: {refusal.message}")

    async def _follow(self, call: Any, calls: grpc.aio.Channel) -> None:
        """Exchanges hellos, then answers reports; `calls` connects at first use."""
        own_hello = self._fleet.hello_for(self.node)
        self.front_instance = own_hello.instance
        await self._send(call, own_hello)
        hello = await self._receive(call, HELLO_TIME_S)
        if not isinstance(hello, NodeHello):
            raise LinkBroken("it reported before its hello", is_wrong=True)
        self._fleet.linked(self, hello)
        self._calls, self.problem, self._control_sent = calls, "", ("", 0.0)
        self._up_since_s = time.monotonic()
        _log.info("fleet_link_up", address=str(self.address), node=self.node, epoch=hello.epoch)
        try:
            while True:
                report = await self._receive(call, self._silence_s)
                received_s = time.monotonic()
                if not isinstance(report, NodeReport):
                    raise LinkBroken("it sent a second hello", is_wrong=True)
                renewal = self._fleet.reported(self, report)
                if renewal is not None:
                    await self._send(call, renewal)
                await self._control(call, report)
                # Early reports wait in the connection, where they hold up their own node.
                await asyncio.sleep(max(0.0, received_s + self._interval_s / 4 - time.monotonic()))
        finally:
            self._calls = None
            self._fleet.unlinked(self)
            await calls.close(None)

    async def _control(self, call: Any, report: NodeReport) -> None:
        """Sends the fleet's control to a node that has another in force."""
        control, now_s = self._fleet.control, time.monotonic()
        sent, sent_s = self._control_sent
        if report.control_fingerprint == control.fingerprint:
            return
        if sent != control.fingerprint or now_s - sent_s > CONTROL_AGAIN_S:
            self._control_sent = (control.fingerprint, now_s)
            await self._send(call, control)

    async def _send(self, call: Any, message: FrontHello | Control | Renewal) -> None:
        await self._in_time(lambda: call.write(wire.request_to(message)), HELLO_TIME_S, "it takes no messages")

    async def _receive(self, call: Any, time_s: float) -> NodeHello | NodeReport:
        message: fleet_pb.LinkResponse = await self._in_time(call.read, time_s, f"nothing came for {time_s:g} s")
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise LinkBroken("it ended the link")
        try:
            return wire.response_from(message, self.node)
        except ExecutorError as error:
            raise LinkBroken(f"it sent what no node should send: {error.message}", is_wrong=True) from error

    async def _in_time(self, begin: Callable[[], Any], time_s: float, problem: str) -> Any:
        try:
            async with asyncio.timeout(time_s):
                return await begin()
        except TimeoutError as error:
            raise LinkBroken(problem) from error
        except asyncio.InvalidStateError as error:  # written to a call that is over
            raise LinkBroken("the connection is gone") from error
