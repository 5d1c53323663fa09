"""Divides the processors among tenants, and not among sandboxes.

A backend makes all sandboxes alike, so who computes in sixteen of them would get sixteen times what others get; and
an execution of one line, which waits for the processor at each step of its way, would wait for all of the sixteen. So
a sandbox in which something runs gets the share of its tenant divided by how many of the tenant's there are.

The one in which something begins gets its share at once. The others follow a moment later, all together, so that a
tenant with many does not make each of its executions cost as many writes to files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from executor_server.model import Result, SessionFacts
from executor_server.observer import Observer

EVEN_OUT_DELAY_S = 0.5


@dataclass
class _Busy:
    """A session in which something runs or waits."""

    facts: SessionFacts
    executions: int = 0
    share: float = 0.0


class CpuShares(Observer):
    """`set_share` is given a session, and the part of a whole share that its sandbox is to have."""

    def __init__(self, set_share: Callable[[SessionFacts, float], None]) -> None:
        self._set_share = set_share
        self._busy: dict[str, dict[str, _Busy]] = {}  # by tenant and session
        self._evening_out: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Leaves the shares as they are."""
        if self._evening_out is not None:
            self._evening_out.cancel()

    def session_created(self, session: SessionFacts, took_s: float) -> None:
        """Other things than executions are done in it, too."""
        self._set_share(session, 1 / (1 + len(self._busy.get(session.owner.tenant, ()))))

    def execution_started(self, session: SessionFacts, execution_id: str) -> None:
        self._begin(session)

    def execution_recovered(self, session: SessionFacts, execution_id: str) -> None:
        self._begin(session)

    def execution_ended(self, session: SessionFacts, execution_id: str, result: Result, took_s: float) -> None:
        busy = self._busy.get(session.owner.tenant, {}).get(session.session_id)
        if busy is not None:
            busy.executions -= 1
            if not busy.executions:
                self._forget(session)

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        self._forget(session)

    def even_out(self) -> None:
        """Gives all of them what they are to have by now."""
        self._evening_out = None
        for sessions in self._busy.values():
            for busy in sessions.values():
                self._weigh(busy, 1 / len(sessions))

    def _begin(self, session: SessionFacts) -> None:
        sessions = self._busy.setdefault(session.owner.tenant, {})
        busy = sessions.get(session.session_id)
        if busy is None:
            busy = sessions[session.session_id] = _Busy(session)
            self._even_out_soon()
        busy.executions += 1
        self._weigh(busy, 1 / len(sessions))

    def _weigh(self, busy: _Busy, share: float) -> None:
        if busy.share != share:
            busy.share = share
            self._set_share(busy.facts, share)

    def _forget(self, session: SessionFacts) -> None:
        sessions = self._busy.get(session.owner.tenant, {})
        if sessions.pop(session.session_id, None) is None:
            return
        if sessions:
            self._even_out_soon()
        else:
            del self._busy[session.owner.tenant]

    def _even_out_soon(self) -> None:
        if self._evening_out is None:
            self._evening_out = asyncio.get_running_loop().call_later(EVEN_OUT_DELAY_S, self.even_out)
