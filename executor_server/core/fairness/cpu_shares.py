"""Divides the processors among tenants instead of among sandboxes.

The kernel weighs all sandboxes alike, so a tenant that computes in sixteen of them would get sixteen times the share of
the others, and every step of another tenant's short execution would wait behind all sixteen. So each busy sandbox gets
its tenant's share divided by the number of that tenant's busy sandboxes. An idle one may still compute, for files and
variables: it gets the tenant's share divided by the number of all its sandboxes.

A sandbox in which an execution begins gets its share at once. The others, new ones too, follow together
EVEN_OUT_DELAY_S later, so that an execution does not cost a write to a control group for each sandbox of the tenant,
and a session that is used alone costs none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from executor_server.core import Result, SessionFacts
from executor_server.core.lifecycle import Observer

EVEN_OUT_DELAY_S = 0.5


@dataclass
class _Sandbox:
    """The sandbox of a session: its unfinished executions, and the share that it has, 0 when that is not known."""

    facts: SessionFacts
    share: float
    executions: int = 0


class CpuShares(Observer):
    """Calls `set_share` with a session and its part, up to 1, of a full share."""

    def __init__(self, set_share: Callable[[SessionFacts, float], None]) -> None:
        self._set_share = set_share
        self._tenants: dict[str, dict[str, _Sandbox]] = {}  # by session
        self._evening_out: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Leaves the shares as they are."""
        if self._evening_out is not None:
            self._evening_out.cancel()

    def session_created(self, session: SessionFacts, took_s: float) -> None:
        self._add(session, 1.0)  # the kernel's own weight for a group that was never weighed

    def session_recovered(self, session: SessionFacts) -> None:
        self._add(session, 0.0)

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
        """Sets the share of every sandbox whose share is out of date."""
        self._evening_out = None
        for sandboxes in self._tenants.values():
            share, idle_share = 1 / max(1, _busy(sandboxes)), 1 / len(sandboxes)
            for sandbox in sandboxes.values():
                self._weigh(sandbox, share if sandbox.executions else idle_share)

    def _add(self, session: SessionFacts, share: float) -> None:
        self._tenants.setdefault(session.owner.tenant, {})[session.session_id] = _Sandbox(session, share)
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
    """Returns the number of sandboxes with unfinished executions."""
    return sum(1 for sandbox in sandboxes.values() if sandbox.executions)
