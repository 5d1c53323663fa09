"""Quotas: the sessions, executions, calls, CPU time and output that a tenant may have over all its sessions.

Sessions, executions and calls at one time are counted as they are observed. A request reserves its place before it is
carried out, so that simultaneous requests can't pass a limit together; the reservation is released when the session or
execution has been observed, or has failed.

Use is summed over sliding windows: creations over a minute in seconds, all others over an hour in minutes. A
part of a window counts until all of it is older than the window, so a quota holds in every minute and every hour.

CPU time and output are known when an execution has ended, and an execution keeps its granted limits even if less of a
quota is left. So an hour's use can pass its quota by what the executions that run at one time may use, at most
`quotas.executions` times their limits. An execution without a measured use, because its session was deleted or lost, is
charged the most CPU time that it can have used, and the output that had arrived. CPU time outside executions, such as
that of processes and preludes, is charged when the guest reports it, with each ping. Whatever starts code of the tenant
in a sandbox is refused while one of these quotas is spent.

Bytes of the network are charged as the egress proxy reports them. Their quota refuses no execution: when it is spent,
the tenant's sessions have no network until there is room again (egress_windows.py).

The calls and sessions that the daemon has for all tenants are shared: a tenant without a quota of its own may hold as
many as it leaves free. So one such tenant gets half at most, two get a third each, and the next one always finds some,
without any configuration.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from executor_server.core import (
    ExecutionLimits,
    ProcessResult,
    Result,
    SessionFacts,
    TooManySessions,
    Usage,
)
from executor_server.core.lifecycle import Observer, RunningQueue
from executor_server.policy import QuotasTable
from executor_server.policy.quotas.egress_windows import EgressWindows
from executor_server.policy.quotas.quota_checks import check_capacity, check_number, check_window
from executor_server.policy.quotas.usage_store import MinuteUse, UsageStore
from executor_server.policy.quotas.window import Window

# Seconds after which a refused caller may retry; it is not known when a place becomes free.
SESSION_RETRY_S = 2.0
EXECUTION_RETRY_S = 1.0
CALL_RETRY_S = 0.5
# Seconds of use that a killed daemon may leave unwritten.
WRITE_INTERVAL_S = 1.0
SHARED_CALLS_PER_SECOND = 500
"""Calls of a tenant where there are several and its quota is not set: a fraction of what the daemon serves."""
# Seconds between two searches for tenants that use nothing.
_FORGET_INTERVAL_S = 60.0
# The most that one execution can be charged: the sums stay finite, and integers fit their column.
_MAX_CPU_TIME_S = 1e9
_MAX_BYTES = 2**50


@dataclass(frozen=True)
class TenantUse:
    """The current and the past use of a tenant."""

    sessions: int = 0
    executions: int = 0
    creations_in_last_minute: int = 0
    cpu_time_s_in_last_hour: float = 0.0
    output_bytes_in_last_hour: int = 0
    calls: int = 0
    egress_bytes_in_last_hour: int = 0

    @property
    def is_nothing(self) -> bool:
        return self == TenantUse()


@dataclass(frozen=True)
class Capacity:
    """The calls and sessions that the daemon has for all tenants; `is_shared` is true when there are several."""

    calls: int
    sessions: int
    is_shared: Callable[[], bool]


@dataclass
class _Unfinished:
    """An execution that runs or waits: the CPU time that it may use, and when it began to run."""

    may_use_s: float
    began_s: float | None = None


@dataclass
class _Tenant:
    """The counts of one tenant."""

    executions: RunningQueue[_Unfinished]
    sessions: set[str] = field(default_factory=set)
    reserved_sessions: int = 0
    reserved_executions: dict[tuple[str, str], float] = field(default_factory=dict)  # CPU seconds that each may use
    calls: int = 0
    creations: Window = field(default_factory=lambda: Window(60, 1.0))
    cpu_time_s: Window = field(default_factory=lambda: Window(60, 60.0))
    output_bytes: Window = field(default_factory=lambda: Window(60, 60.0))
    egress_bytes: Window = field(default_factory=lambda: Window(60, 60.0))

    def use(self, now_s: float) -> TenantUse:
        return TenantUse(
            sessions=len(self.sessions) + self.reserved_sessions,
            executions=len(self.executions) + len(self.reserved_executions),
            creations_in_last_minute=int(self.creations.total(now_s)),
            cpu_time_s_in_last_hour=self.cpu_time_s.total(now_s),
            output_bytes_in_last_hour=int(self.output_bytes.total(now_s)),
            calls=self.calls,
            egress_bytes_in_last_hour=int(self.egress_bytes.total(now_s)),
        )


class Quotas(Observer):
    """Counts for each tenant, and refuses what exceeds a quota. For use in one event loop."""

    def __init__(
        self,
        quotas_of: Callable[[str], QuotasTable],
        store: UsageStore | None = None,
        clock: Callable[[], float] | None = None,
        processors: int | None = os.cpu_count(),
        capacity: Capacity | None = None,
    ) -> None:
        """`quotas_of` is called for each check, so that a new policy holds at once; `clock` returns Unix time.

        Without a capacity, tenants without quotas have no bounds here. The caller closes the store, after `close`.
        """
        self._quotas_of = quotas_of
        self._store = store
        self._clock = clock = clock or _steady_clock()
        self._processors = processors or 1
        self._capacity = capacity
        self._calls = 0  # all tenants together
        self._windows = EgressWindows()
        self._tenants: dict[str, _Tenant] = {}
        self._forgot_s = clock()
        self._egress_allowed: Mapping[str, int] = {}  # on this node of a fleet
        self._unwritten: dict[tuple[str, int], MinuteUse] = {}
        self._writing: asyncio.TimerHandle | None = None
        if store is not None:
            for used in store.load(_minute(clock()) - 60):
                self._add_use(used, min(used.minute * 60.0, clock()))

    def close(self) -> None:
        """Writes the use that is not stored yet."""
        self._windows.close()
        if self._writing is not None:
            self._writing.cancel()
        if self._unwritten:
            self._write()

    # -- reserving -----------------------------------------------------------------------------------------------

    def reserve_session(self, tenant: str) -> Callable[[], None]:
        """Reserves one session and returns the function that releases it. Raises ResourceExhausted."""
        quotas, counted, now_s = self._quotas_of(tenant), self._tenant(tenant), self._clock()
        there = len(counted.sessions) + counted.reserved_sessions
        check_number("sessions", there, quotas.sessions, SESSION_RETRY_S, TooManySessions)
        if (capacity := self._capacity) is not None and quotas.sessions is None:
            all_there = sum(len(each.sessions) + each.reserved_sessions for each in self._tenants.values())
            shared, refusal = capacity.is_shared, TooManySessions
            check_capacity("sessions", there, all_there, capacity.sessions, shared, SESSION_RETRY_S, refusal)
        check_window("creations_per_minute", counted.creations, quotas.creations_per_minute, now_s)
        counted.creations.add(1, now_s)
        counted.reserved_sessions += 1

        def release() -> None:
            counted.reserved_sessions -= 1

        return _once(release)

    def reserve_execution(
        self, session: SessionFacts, execution_id: str, limits: ExecutionLimits
    ) -> Callable[[], None]:
        """Reserves one execution and returns the function that releases it. Raises ResourceExhausted."""
        tenant = session.owner.tenant
        quotas, counted = self._quotas_of(tenant), self._tenant(tenant)
        there = len(counted.executions) + len(counted.reserved_executions)
        check_number("executions", there, quotas.executions, EXECUTION_RETRY_S)
        self.check_use(tenant)
        key = (session.session_id, execution_id)
        counted.reserved_executions[key] = limits.cpu_time_s

        def release() -> None:
            counted.reserved_executions.pop(key, None)

        return release

    def check_use(self, tenant: str) -> None:
        """Raises ResourceExhausted if the tenant has used the CPU time or output of its hour: no code may start."""
        quotas, counted, now_s = self._quotas_of(tenant), self._tenant(tenant), self._clock()
        check_window("cpu_time_s_per_hour", counted.cpu_time_s, quotas.cpu_time_s_per_hour, now_s)
        check_window("output_bytes_per_hour", counted.output_bytes, quotas.output_bytes_per_hour, now_s)

    def reserve_call(self, tenant: str, *, beyond: int = 0) -> Callable[[], None]:
        """Counts an open call, up to `beyond` above the quota; returns what releases it. Raises ResourceExhausted."""
        counted, most = self._tenant(tenant), self._quotas_of(tenant).calls
        check_number("calls", counted.calls - beyond, most, CALL_RETRY_S)
        if (capacity := self._capacity) is not None and most is None:
            there = counted.calls - beyond
            check_capacity("calls", there, self._calls, capacity.calls, capacity.is_shared, CALL_RETRY_S)
        counted.calls += 1
        self._calls += 1

        def release() -> None:
            counted.calls -= 1
            self._calls -= 1

        return _once(release)

    def network_window(self, tenant: str) -> int | None:
        """Returns the bytes that a session may move until it asks again (egress_windows.py); None without a quota."""
        quota = self._egress_bound(tenant)
        if quota is None:
            self._windows.forget(tenant)
            return None
        counted, now_s = self._tenant(tenant), self._clock()
        left_bytes, wait_s = quota - counted.egress_bytes.total(now_s), counted.egress_bytes.wait_s(quota, now_s)
        return self._windows.grant(tenant, left_bytes, len(counted.sessions) + counted.reserved_sessions, wait_s)

    def _egress_bound(self, tenant: str) -> int | None:
        quota, allowed = self._quotas_of(tenant).egress_bytes_per_hour, self._egress_allowed.get(tenant)
        return quota if quota is None or allowed is None else min(quota, allowed)

    def limit_egress(self, allowed: Mapping[str, int]) -> None:
        """Sets the bytes that each tenant may use on this node of a fleet; its quota is for all nodes together."""
        before, self._egress_allowed = self._egress_allowed, allowed
        for tenant in before.keys() | allowed.keys():
            if before.get(tenant) != allowed.get(tenant):
                bound, counted = self._egress_bound(tenant), self._tenants.get(tenant)
                used = counted.egress_bytes.total(self._clock()) if counted is not None else 0.0
                self._windows.note_bound(tenant, math.inf if bound is None else bound - used)

    def on_window_change(self, ask_again: Callable[[str], None]) -> None:
        """Sets the callback that makes a tenant's sessions renew their windows."""
        self._windows.ask_again = ask_again

    def calls_per_second(self, tenant: str) -> int | None:
        """Returns the quota; where it is not set, the default if there are several tenants."""
        rate, capacity = self._quotas_of(tenant).calls_per_second, self._capacity
        return SHARED_CALLS_PER_SECOND if rate is None and capacity is not None and capacity.is_shared() else rate

    # -- reporting -----------------------------------------------------------------------------------------------

    def use_of(self, tenant: str) -> TenantUse:
        """Returns the use of a tenant."""
        counted = self._tenants.get(tenant)
        return counted.use(self._clock()) if counted is not None else TenantUse()

    def tenants(self) -> list[str]:
        """Returns the tenants with current or recent use, sorted."""
        self._forget_idle(self._clock())
        return sorted(self._tenants)

    # -- observing -----------------------------------------------------------------------------------------------

    def session_created(self, session: SessionFacts, took_s: float) -> None:
        self._tenant(session.owner.tenant).sessions.add(session.session_id)

    def session_recovered(self, session: SessionFacts) -> None:
        self._tenant(session.owner.tenant).sessions.add(session.session_id)

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        counted = self._tenant(session.owner.tenant)
        counted.sessions.discard(session.session_id)
        counted.executions.forget(session.session_id)

    def execution_started(self, session: SessionFacts, execution_id: str) -> None:
        self._begin(session, execution_id)

    def execution_recovered(self, session: SessionFacts, execution_id: str) -> None:
        self._begin(session, execution_id)

    def execution_ended(self, session: SessionFacts, execution_id: str, result: Result, took_s: float) -> None:
        possible_s = self._end(session, execution_id)
        is_unmeasured = result.usage == Usage(output_bytes=result.usage.output_bytes)
        cpu_time_s = possible_s if is_unmeasured else result.usage.cpu_time_s
        self._charge(session.owner.tenant, cpu_time_s=cpu_time_s, output_bytes=result.usage.output_bytes)

    def background_used(self, session: SessionFacts, cpu_time_s: float) -> None:
        self._charge(session.owner.tenant, cpu_time_s=cpu_time_s)

    def network_moved(self, session: SessionFacts, sent_bytes: int, received_bytes: int) -> None:
        tenant = session.owner.tenant
        self._charge(tenant, egress_bytes=sent_bytes + received_bytes)
        if (quota := self._egress_bound(tenant)) is not None:
            self._windows.note_used(tenant, quota - self._tenant(tenant).egress_bytes.total(self._clock()))

    def _begin(self, session: SessionFacts, execution_id: str) -> None:
        counted, session_id = self._tenant(session.owner.tenant), session.session_id
        if session_id in counted.sessions:
            may_use_s = counted.reserved_executions.pop((session_id, execution_id), math.inf)
            counted.executions.add(session_id, execution_id, _Unfinished(may_use_s))

    def _on_begin(self, execution: _Unfinished) -> None:
        execution.began_s = self._clock()

    def _end(self, session: SessionFacts, execution_id: str) -> float:
        """Ends the count of an execution; returns the CPU seconds that it can have used at most."""
        ended = self._tenant(session.owner.tenant).executions.end(session.session_id, execution_id)
        if ended is None or ended.began_s is None:
            return 0.0
        return min(ended.may_use_s, max(0.0, self._clock() - ended.began_s) * self._processors)

    # -- counting ------------------------------------------------------------------------------------------------

    def process_ended(self, session: SessionFacts, process_id: str, result: ProcessResult) -> None:
        """Charges its output. Its CPU time is a part of what the sandbox uses between executions (background_used)."""
        self._charge(session.owner.tenant, output_bytes=result.output_bytes)

    def _charge(self, tenant: str, *, cpu_time_s: float = 0.0, output_bytes: int = 0, egress_bytes: int = 0) -> None:
        bounded = (min(cpu_time_s, _MAX_CPU_TIME_S), min(output_bytes, _MAX_BYTES), min(egress_bytes, _MAX_BYTES))
        used = self._add_use(MinuteUse(tenant, 0, *bounded), self._clock())
        if self._store is None:
            return
        self._unwritten[tenant, used.minute] = used
        if self._writing is None:
            self._writing = asyncio.get_running_loop().call_later(WRITE_INTERVAL_S, self._write)

    def _add_use(self, used: MinuteUse, now_s: float) -> MinuteUse:
        """Adds to the current minute. Returns the sums of that."""
        counted = self._tenant(used.tenant)
        minute, cpu_sum_s = counted.cpu_time_s.add(used.cpu_time_s, now_s)
        _, output_sum = counted.output_bytes.add(used.output_bytes, now_s)
        _, egress_sum = counted.egress_bytes.add(used.egress_bytes, now_s)
        return MinuteUse(used.tenant, minute, cpu_sum_s, int(output_sum), int(egress_sum))

    def _write(self) -> None:
        """Stores the use. If that fails, the next write tries again, as long as the use still counts."""
        self._writing = None
        oldest = _minute(self._clock()) - 60
        for key in [key for key in self._unwritten if key[1] < oldest]:
            del self._unwritten[key]
        if self._store is not None and self._store.write(list(self._unwritten.values()), oldest):
            self._unwritten.clear()

    def _tenant(self, name: str) -> _Tenant:
        counted = self._tenants.get(name)
        if counted is None:
            self._forget_idle_now_and_then()
            counted = self._tenants[name] = _Tenant(RunningQueue(self._on_begin))
        return counted

    def _forget_idle_now_and_then(self) -> None:
        now_s = self._clock()
        if not 0 <= now_s - self._forgot_s < _FORGET_INTERVAL_S:
            self._forget_idle(now_s)

    def _forget_idle(self, now_s: float) -> None:
        self._forgot_s = now_s
        for name in [name for name, counted in self._tenants.items() if counted.use(now_s).is_nothing]:
            del self._tenants[name]
            self._windows.forget(name)


def _once(release: Callable[[], None]) -> Callable[[], None]:
    """Makes releasing idempotent."""
    left: Iterator[Callable[[], None]] = iter((release,))

    def release_once() -> None:
        for each in left:
            each()

    return release_once


def _steady_clock() -> Callable[[], float]:
    """Returns a Unix clock that ignores changes of the host's clock; they would forgive use or lock out tenants."""
    ahead_s = time.time() - time.monotonic()
    return lambda: ahead_s + time.monotonic()


def _minute(now_s: float) -> int:
    return int(now_s // 60)
