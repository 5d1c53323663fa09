"""Divides the processors among tenants, and not among sandboxes.

A backend makes all sandboxes alike, so who computes in sixteen of them would get sixteen times what others get; and
an execution of one line, which waits for the processor at each step of its way, would wait for all of the sixteen. So
a sandbox in which something runs gets the share of its tenant divided by how many of the tenant's there are. One in
which nothing runs may still compute, for files and variables: it gets the tenant's share divided by all its sandboxes.

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
class _Sandbox:
    """Of a session: how much runs or waits in it, and what it was given."""

    facts: SessionFacts
    executions: int = 0
    share: float = 0.0


class CpuShares(Observer):
    """`set_share` is given a session, and the part of a whole share that its sandbox is to have."""

    def __init__(self, set_share: Callable[[SessionFacts, float], None]) -> None:
        self._set_share = set_share
        self._tenants: dict[str, dict[str, _Sandbox]] = {}  # by session
        self._evening_out: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Leaves the shares as they are."""
        if self._evening_out is not None:
            self._evening_out.cancel()

    def session_created(self, session: SessionFacts, took_s: float) -> None:
        self._add(session)

    def session_recovered(self, session: SessionFacts) -> None:
        self._add(session)

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        sandboxes = self._tenants.get(session.owner.tenant, {})
        sandboxes.pop(session.session_id, None)
        if not sandboxes:
            self._tenants.pop(session.owner.tenant, None)
        self._even_out_soon()

    def execution_started(self, session: SessionFacts, execution_id: str) -> None:
        self._begin(session)

    def execution_recovered(self, session: SessionFacts, execution_id: str) -> None:
        self._begin(session)

    def execution_ended(self, session: SessionFacts, execution_id: str, result: Result, took_s: float) -> None:
        sandbox = self._tenants.get(session.owner.tenant, {}).get(session.session_id)
        if sandbox is not None and sandbox.executions:
            sandbox.executions -= 1
            self._even_out_soon()

    def even_out(self) -> None:
        """Gives all of them what they are to have by now."""
        self._evening_out = None
        for sandboxes in self._tenants.values():
            share, idle_share = 1 / max(1, _busy(sandboxes)), 1 / len(sandboxes)
            for sandbox in sandboxes.values():
                self._weigh(sandbox, share if sandbox.executions else idle_share)

    def _add(self, session: SessionFacts) -> None:
        sandboxes = self._tenants.setdefault(session.owner.tenant, {})
        sandbox = sandboxes[session.session_id] = _Sandbox(session)
        self._weigh(sandbox, 1 / len(sandboxes))
        self._even_out_soon()

    def _begin(self, session: SessionFacts) -> None:
        sandboxes = self._tenants.get(session.owner.tenant, {})
        sandbox = sandboxes.get(session.session_id)
        if sandbox is None:
            return
        sandbox.executions += 1
        self._weigh(sandbox, 1 / _busy(sandboxes))
        self._even_out_soon()

    def _weigh(self, sandbox: _Sandbox, share: float) -> None:
        if sandbox.share != share:
            sandbox.share = share
            self._set_share(sandbox.facts, share)

    def _even_out_soon(self) -> None:
        if self._evening_out is None:
            self._evening_out = asyncio.get_running_loop().call_later(EVEN_OUT_DELAY_S, self.even_out)


def _busy(sandboxes: dict[str, _Sandbox]) -> int:
    """In how many something runs or waits."""
    return sum(1 for sandbox in sandboxes.values() if sandbox.executions)
