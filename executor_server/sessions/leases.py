"""Leases: which clients hold which sessions, and which clients have been silent for too long.

A client chooses the id of its lease. A lease exists from the first session that names it until its last session has
ended, so there are never more leases than holders of sessions, and both are bounded. The key is tenant and id, so
another tenant may use the same id without effect. A session without a lease is detached, and not listed here.

A client renews its lease every `renew_after_s`. A session ends when each of its leases is overdue by the session's own
`owner_grace_s`; a client that was cut off for less loses nothing. The clock runs while the host sleeps. After the
daemon itself could not listen (it was stopped, or slept with its host), each lease starts anew, since no client could
renew it; `overdue` notices this.

The caller ends sessions, not this module. It knows neither gRPC nor files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from executor_server.core import Reason, ResourceExhausted
from executor_server.sessions.lifetime import steady_s

# Renewals within one grace period, and the bounds of the interval. A killed client's session outlives its grace by at
# most the upper bound; the lower bound limits the client's work.
RENEWALS_PER_GRACE = 10
MAX_RENEW_S = 10.0
MIN_RENEW_S = 0.2
# Limits on the holders of a session, of a tenant's sessions and of all sessions, in case a client keeps attaching under
# new ids.
# Creating a session is never refused here, since sessions have their own bound.
MAX_HOLDERS = 256
MAX_TENANT_HOLDS = 4096
MAX_HOLDS = 65_536
# Seconds between two calls of `overdue` after which the daemon counts as absent; the sweeper calls every half second.
STOOD_STILL_S = 5.0
# Seconds after which all leases are checked at the latest: a new policy may have shortened a session's grace.
_LOOK_S = 2.5
_ATTACH_RETRY_S = 5.0

SessionKey = tuple[str, str]
"""Tenant and session id."""


def renew_after_s(grace_s: float) -> float:
    """Returns the seconds between two renewals of a lease that holds a session of this grace."""
    return min(max(grace_s / RENEWALS_PER_GRACE, MIN_RENEW_S), MAX_RENEW_S)


@dataclass
class _Lease:
    renewed_s: float
    sessions: set[str] = field(default_factory=set)  # ids


@dataclass(frozen=True)
class Renewal:
    """The answer to a renewal: the number of sessions that the lease holds, and the seconds until the next renewal."""

    sessions: int
    renew_after_s: float


@dataclass(frozen=True)
class Released:
    """Sessions without a holder, which the caller must end and `forget`.

    Also the leases that were dropped from sessions that other leases still hold.
    """

    sessions: list[SessionKey] = field(default_factory=list)
    dropped: list[tuple[SessionKey, str]] = field(default_factory=list)


class Leases:
    """The leases and their sessions. For the event loop only; each call takes microseconds."""

    def __init__(self, grace_s: Callable[[SessionKey], float], clock: Callable[[], float] = steady_s) -> None:
        """`grace_s` returns a session's grace under its current policy."""
        self._grace_s = grace_s
        self._clock = clock
        self._leases: dict[tuple[str, str], _Lease] = {}  # by tenant and lease id
        self._holders: dict[SessionKey, set[str]] = {}
        self._holds: dict[str, int] = {}  # by tenant
        self._checked_s = clock()
        self._due_s = 0.0  # no lease is overdue before this time

    def hold(self, session: SessionKey, lease_id: str) -> None:
        """Notes that this lease holds a new or recovered session, and renews the lease."""
        tenant, session_id = session
        lease = self._leases.setdefault((tenant, lease_id), _Lease(0.0))
        lease.renewed_s = self._clock()
        self._due_s = 0.0
        if session_id not in lease.sessions:
            lease.sessions.add(session_id)
            self._holders.setdefault(session, set()).add(lease_id)
            self._holds[tenant] = self._holds.get(tenant, 0) + 1

    def attach(self, session: SessionKey, lease_id: str) -> bool:
        """Adds a holder to a session, and returns True if it is new. No effect on a detached session.

        Raises ResourceExhausted if there are too many.
        """
        if session not in self._holders:
            return False
        is_new = lease_id not in self._holders[session]
        if is_new:
            self._check_room(session)
        self.hold(session, lease_id)
        return is_new

    def holder(self, session: SessionKey) -> str:
        """Returns one of the leases that hold a session; empty when none does."""
        return min(self._holders.get(session, ()), default="")

    def _check_room(self, session: SessionKey) -> None:
        for there, most, what in (
            (len(self._holders[session]), MAX_HOLDERS, "clients hold this session"),
            (self._holds.get(session[0], 0), MAX_TENANT_HOLDS, "holds of your clients on sessions"),
            (sum(self._holds.values()), MAX_HOLDS, "holds of clients on sessions of this daemon"),
        ):
            if there >= most:
                raise ResourceExhausted(
                    Reason.TOO_MANY_SESSIONS,
                    f"{there} {what}, the most that are allowed; close clients that you don't need, or share one",
                    retry_after_s=_ATTACH_RETRY_S,
                )

    def renew(self, tenant: str, lease_id: str) -> Renewal:
        """Renews a client's lease. An unknown lease holds nothing."""
        lease = self._leases.get((tenant, lease_id))
        if lease is None:
            return Renewal(0, MAX_RENEW_S)
        lease.renewed_s = self._clock()
        shortest_s = min(self._grace_s((tenant, session_id)) for session_id in lease.sessions)
        return Renewal(len(lease.sessions), renew_after_s(shortest_s))

    def end(self, tenant: str, lease_id: str) -> Released:
        """Ends a client's lease. Sessions that it held alone stay known until `forget`."""
        lease = self._leases.get((tenant, lease_id))
        released = Released()
        for session_id in sorted(lease.sessions) if lease is not None else ():
            if len(self._holders[tenant, session_id]) == 1:
                released.sessions.append((tenant, session_id))
            else:
                released.dropped.append(((tenant, session_id), lease_id))
                self._drop((tenant, session_id), lease_id)
        return released

    def forget(self, session: SessionKey) -> None:
        """Forgets an ended session. Idempotent."""
        for lease_id in list(self._holders.get(session, ())):
            self._drop(session, lease_id)

    def _drop(self, session: SessionKey, lease_id: str) -> None:
        tenant, session_id = session
        holders, lease = self._holders[session], self._leases[tenant, lease_id]
        holders.discard(lease_id)
        lease.sessions.discard(session_id)
        self._holds[tenant] -= 1
        if not holders:
            del self._holders[session]
        if not lease.sessions:
            del self._leases[tenant, lease_id]
        if not self._holds[tenant]:
            del self._holds[tenant]

    def restart_all(self) -> None:
        """Renews all leases."""
        self._checked_s = self._clock()
        for lease in self._leases.values():
            lease.renewed_s = self._checked_s

    def overdue(self) -> Released:
        """Returns overdue sessions, which stay until `forget`; drops overdue leases of sessions with other holders."""
        now_s, before_s = self._clock(), self._checked_s
        self._checked_s = now_s
        if now_s - before_s > STOOD_STILL_S:
            self.restart_all()
            return Released()
        found = Released()
        if now_s < self._due_s:
            return found
        self._due_s = now_s + _LOOK_S
        for session, holders in self._holders.items():
            grace_s = self._grace_s(session)
            allowed_s = grace_s + renew_after_s(grace_s)
            renewed_s = {each: self._leases[session[0], each].renewed_s for each in holders}
            self._due_s = min(self._due_s, min(renewed_s.values()) + allowed_s)
            late = [each for each in holders if renewed_s[each] < now_s - allowed_s]
            if len(late) == len(holders):
                found.sessions.append(session)
            else:
                found.dropped.extend((session, each) for each in late)
        for session, lease_id in found.dropped:
            self._drop(session, lease_id)
        return found
