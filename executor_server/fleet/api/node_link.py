"""FleetService: a node's end of the link to its front.

The front opens the link and sends its hello. The node first ends the sessions that the front reported lost, and then
answers. After that it reports at the interval of the hello, and each answer is a heartbeat. A link lasts until the
connection breaks, one end sends something wrong, or another link replaces it: a front may come back before this end
notices that the connection broke.

Each report is sent before the next one is built, so a slow front gets fewer reports and none wait in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol, cast

import structlog

from executor_api.v1 import fleet_service_pb2 as pb
from executor_api.v1 import fleet_service_pb2_grpc as fleet_grpc
from executor_server.api import checks
from executor_server.api.handlers import Context
from executor_server.core import InvalidRequest, PreconditionFailed, Reason
from executor_server.fleet.api import wire
from executor_server.fleet.membership import Control, FrontHello, NodeHello, NodeReport, Renewal

HELLO_TIME_S = 10.0
"""Seconds for a front to say hello after it has opened a link."""
LAST_REPORT_TIME_S = 1.0
"""Seconds for the last report of a node that stops."""

_log = structlog.get_logger(__name__)


class LinkedNode(Protocol):
    """The node behind the link: its heartbeat, its reports, its policy."""

    async def hello(self, hello: FrontHello) -> NodeHello:
        """Begins a link; returns when the node has ended the sessions that the front reported lost.

        Raises PreconditionFailed when the node refuses the front.
        """
        ...

    def report(self, *, full: bool) -> NodeReport:
        """Returns a report that is sent now."""
        ...

    def renewed(self, renewal: Renewal) -> None: ...

    async def take_control(self, control: Control) -> None:
        """Puts the policy in force; a later report says whether that worked."""
        ...


class FleetService(fleet_grpc.FleetServiceServicer):
    """Serves executor_api.v1.FleetService: one link at a time."""

    def __init__(self, node: LinkedNode) -> None:
        self._node = node
        self._link: asyncio.Task[Any] | None = None
        self._displaced: set[asyncio.Task[Any]] = set()
        self._report_soon = asyncio.Event()
        self._reported = asyncio.Event()

    async def last_report(self) -> None:
        """Sends one more report before the node stops, if there is a link."""
        if self._link is None:
            return
        self._reported.clear()
        self.report_soon()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_REPORT_TIME_S):
                await self._reported.wait()

    def report_soon(self) -> None:
        """Has the next report sent at once."""
        self._report_soon.set()

    async def Link(self, requests: AsyncIterator[pb.LinkRequest], context: Context) -> None:
        hello = await _first(requests)
        answer = await self._node.hello(hello)
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        before, self._link = self._link, task
        if before is not None:
            self._displaced.add(before)
            before.cancel()
        _log.info("fleet_linked", front_id=hello.front_id, term=hello.term, epoch=answer.epoch)
        try:
            await context.write(wire.response_to(answer))
            await self._exchange(requests, context, hello.report_interval_s)
        except asyncio.CancelledError:
            if task not in self._displaced:
                raise
            task.uncancel()
            raise PreconditionFailed(Reason.NODE_REFUSED, "the front has opened another link") from None
        finally:
            self._displaced.discard(task)
            if self._link is task:
                self._link = None
                _log.info("fleet_unlinked", front_id=hello.front_id)

    async def _exchange(self, requests: AsyncIterator[pb.LinkRequest], context: Context, interval_s: float) -> None:
        """Reads and reports until one of the tasks ends; then ends the others, and raises the error of the first."""
        controls: asyncio.Queue[Control] = asyncio.Queue(maxsize=1)
        tasks = [
            asyncio.create_task(self._read(requests, controls)),
            asyncio.create_task(self._report_forever(context, interval_s)),
            asyncio.create_task(self._take_controls(controls)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _read(self, requests: AsyncIterator[pb.LinkRequest], controls: asyncio.Queue[Control]) -> None:
        async for request in requests:
            match wire.request_from(request):
                case Renewal() as renewal:
                    self._node.renewed(renewal)
                case Control() as control:
                    if controls.full():  # one that was not begun yet is out of date
                        controls.get_nowait()
                    controls.put_nowait(control)
                case FrontHello():
                    raise checks.invalid("hello", "can't come twice")

    async def _take_controls(self, controls: asyncio.Queue[Control]) -> None:
        while True:
            await self._node.take_control(await controls.get())
            self.report_soon()

    async def _report_forever(self, context: Context, interval_s: float) -> None:
        full = True
        while True:
            self._report_soon.clear()
            await context.write(wire.response_to(self._node.report(full=full)))
            full = False
            self._reported.set()
            try:
                async with asyncio.timeout(interval_s):
                    await self._report_soon.wait()
            except TimeoutError:
                continue
            # The front ends a link whose reports come faster than they should.
            await asyncio.sleep(interval_s / 4)


async def _first(requests: AsyncIterator[pb.LinkRequest]) -> FrontHello:
    """Raises InvalidRequest."""
    try:
        async with asyncio.timeout(HELLO_TIME_S):
            async for request in requests:
                message = wire.request_from(request)
                if isinstance(message, FrontHello):
                    return message
                break
    except TimeoutError:
        pass
    raise InvalidRequest(Reason.INVALID_FIELD, "a link begins with a hello", "hello")
