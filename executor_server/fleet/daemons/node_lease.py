"""Holds a daemon to its lease: the sessions of a node live only while its front knows that they do.

`membership.NodeLease` decides; here its decisions have effects. A look every `LOOK_INTERVAL_S` finds that the lease has
lapsed, and cuts the calls that wait for something, or that the sandboxes must end. Nothing depends on its punctuality:
each call and each message looks at the lease by itself (fleet/api/lease_guard.py).

While a node does not serve, no client can renew its own lease. So those count as renewed until the node serves again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from executor_server.core.lifecycle import SessionEnd
from executor_server.fleet.membership import FrontHello, NodeLease, NodeState, Renewal
from executor_server.sessions import SessionManager

LOOK_INTERVAL_S = 0.1
AFTER_FAILURE_S = 1.0
"""Seconds before sandboxes that could not be ended are tried again, or a record that could not be written."""

_log = structlog.get_logger(__name__)


class Fencing:
    """Owns the task that looks at the lease, and the one that ends all sessions."""

    def __init__(
        self,
        lease: NodeLease,
        clock: Callable[[], float],
        sessions: SessionManager,
        cut: Callable[[], None],
        destroy_s: float,
    ) -> None:
        """`cut` ends the calls that are running. `destroy_s`: seconds after which every sandbox has ended by itself."""
        self._lease = lease
        self._clock = clock
        self._sessions = sessions
        self._cut = cut
        self._destroy_s = destroy_s
        self._state = NodeState.UNLINKED
        self._linking = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int:
        return self._lease.epoch

    @property
    def instance(self) -> str:
        return self._lease.record.instance

    @property
    def renewed_sequence(self) -> int:
        """The last report whose answer has renewed the lease; 0 when none has."""
        return self._lease.renewed_sequence

    async def start(self) -> None:
        """Begins to look at the lease."""
        self._looking = asyncio.create_task(self._look_forever())

    async def close(self) -> None:
        """Ends both tasks. Idempotent."""
        for task in (self._looking, self._ending):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    # -- links -------------------------------------------------------------------------------------------------------

    async def begin_link(self, hello: FrontHello) -> None:
        """Returns when this front's reports count, and what it has reported lost has ended. Raises NodeRefused."""
        async with self._linking:
            while not self._lease.hello(hello, self._clock()):
                await self._fence()

    def report_sent(self) -> int:
        """Returns the sequence of the report that is built and sent now."""
        return self._lease.report_sent(self._clock())

    def renewed(self, renewal: Renewal) -> bool:
        """Returns False for an answer that renews nothing."""
        renewed = self._lease.renewed(renewal, self._clock())
        self._note_state()
        return renewed

    # -- its end -----------------------------------------------------------------------------------------------------

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                await self._look()
            except Exception:  # noqa: BLE001 - a background owner: the next look tries again
                _log.exception("fleet_lease_broke")
                await asyncio.sleep(AFTER_FAILURE_S)

    async def _look(self) -> None:
        self._note_state()
        if self._state is not NodeState.SERVING:
            self._sessions.restart_leases()
        if self._lease.must_end:
            await self._fence()

    def _note_state(self) -> None:
        before, self._state = self._state, self._lease.state(self._clock())
        if self._state is before:
            return
        _log.info("fleet_lease", state=self._state.value, before=before.value, epoch=self._lease.epoch)
        if before is NodeState.SERVING:
            self._cut()

    async def _fence(self) -> None:
        """Ends all sessions and begins the next epoch. Callers share one task, which ends though they leave."""
        if self._ending is None or self._ending.done():
            self._ending = asyncio.create_task(self._end_epoch())
        await asyncio.shield(self._ending)

    async def _end_epoch(self) -> None:
        ended, epoch = len(self._sessions.list_all()), self._lease.epoch
        _log.warning("fleet_fencing", epoch=epoch, sessions=ended)
        self._cut()
        await self._sessions.end_all(SessionEnd.LEASE_LOST, self._destroy_s)
        self._lease.ended(self._clock())
        self._note_state()
        _log.warning("fleet_fenced", epoch=epoch, sessions=ended, next_epoch=self._lease.epoch)
