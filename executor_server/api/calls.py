"""Holds tenants to their quotas of open calls and of calls per second.

As soon as the caller is known, before anything of a request is read, a call above `quotas.calls` is refused. A call
above `quotas.calls_per_second` waits for its time as an open call, and is refused when too many wait already or its
wait would be too long. So the calls of one tenant cost the daemon no more than its quotas allow, and other tenants
always find free places among the calls that the daemon serves at one time.

Those places are shared, too: if there are several tenants, a tenant without `quotas.calls` must leave as many free as
it has (`quotas.Capacity`), so that neither one tenant nor any two of them can use them up.

Quotas are not meant to limit the renewal of leases, and a session whose lease is not renewed ends. So when a tenant has
reached its quota of open calls, as followed streams may do, a few more are admitted for renewing leases, at a rate of
their own: a tenant can't lose its sessions by reaching its quota.

A refusal has a cost, too, and a careless client asks again at once, thousands of times a second. So a refusal is sent
after a pause in which the caller can do nothing with that stream. The number of refusals that are held like this is
limited over all tenants; beyond it, a refusal is sent at once.

A call counts until its task ends: grpc.aio runs all of a call in one task, which also ends when the caller leaves in
the middle of its request. Its place among the calls of the server is released then, since no task ends without having
sent a status (auth.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from executor_server.api.handlers import EXECUTOR_METHODS
from executor_server.core import Reason, ResourceExhausted
from executor_server.policy.quotas import Quotas

# A tenant may make the unused calls of this many seconds at once.
BURST_S = 1.0
# Seconds that a call waits for its time, and calls of one tenant that wait; beyond these, a retry is cheaper.
MAX_WAIT_S = 5.0
MAX_WAITING_CALLS = 128
REFUSAL_PAUSE_S = 1.0
# Calls beyond a tenant's quota that renew leases, open and per second. Each takes a fraction of a millisecond.
LEASE_CALLS = 8
LEASE_CALLS_PER_SECOND = 100
# Fraction of the server's calls that may be held refusals.
HELD_PART = 0.25

_LEASE_METHODS = frozenset(f"{EXECUTOR_METHODS}{name}" for name in ("RenewLease", "EndLease"))


@dataclass
class _Pace:
    """The rate of one tenant's calls."""

    next_s: float = 0.0  # when the next call is due if calls came evenly
    waiting: int = 0


def held_calls(max_concurrent_calls: int) -> int:
    """Returns the number of refusals that a server with this many concurrent calls may hold."""
    return int(max_concurrent_calls * HELD_PART)


class CallLimits:
    """Holds tenants to their quotas of calls."""

    def __init__(self, quotas: Quotas, max_held: int) -> None:
        self._quotas = quotas
        self._paces: dict[str, _Pace] = {}
        self._held_refusals = 0
        self._max_held = max_held

    async def admit(self, tenant: str, method: str) -> None:
        """Returns when the call may go on; must be awaited in the call's task. Raises ResourceExhausted."""
        try:
            await self._admit(tenant, renews_lease=method in _LEASE_METHODS)
        except ResourceExhausted:
            if self._held_refusals < self._max_held:
                self._held_refusals += 1
                try:
                    await asyncio.sleep(REFUSAL_PAUSE_S)
                finally:
                    self._held_refusals -= 1
            raise

    async def _admit(self, tenant: str, *, renews_lease: bool) -> None:
        release = self._quotas.reserve_call(tenant, beyond=LEASE_CALLS if renews_lease else 0)
        rate = self._quotas.calls_per_second(tenant)
        try:
            if rate is not None and renews_lease:
                await self._wait_for_time(f"leases of {tenant}", max(rate, LEASE_CALLS_PER_SECOND))
            elif rate is not None:
                await self._wait_for_time(tenant, rate)
        except BaseException:
            release()
            raise
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _task: release())

    async def _wait_for_time(self, who: str, rate: int) -> None:
        now_s = asyncio.get_running_loop().time()
        pace = self._pace_of(who, now_s)
        due_s = max(pace.next_s, now_s - max(0.0, BURST_S - 1 / rate))
        wait_s = due_s - now_s
        if wait_s > 0 and (wait_s > MAX_WAIT_S or pace.waiting >= MAX_WAITING_CALLS):
            message = f"quota calls_per_second: {rate}, and {pace.waiting} calls are waiting already"
            raise ResourceExhausted(Reason.QUOTA_EXCEEDED, message, retry_after_s=wait_s)
        pace.next_s = due_s + 1 / rate
        if wait_s > 0:
            pace.waiting += 1
            try:
                await asyncio.sleep(wait_s)
            finally:
                pace.waiting -= 1

    def _pace_of(self, who: str, now_s: float) -> _Pace:
        pace = self._paces.get(who)
        if pace is None:
            # Forget tenants whose pace no longer matters.
            for name in [name for name, each in self._paces.items() if each.next_s < now_s - BURST_S]:
                del self._paces[name]
            pace = self._paces[who] = _Pace()
        return pace
