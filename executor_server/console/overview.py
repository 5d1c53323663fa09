"""The first page: what needs attention, load, an hour of samples, the newest sessions, pool, backends and quotas."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.console import formats
from executor_server.console.console import Console
from executor_server.console.daemon import DaemonError, Sample
from executor_server.console.sessions import STATES, latest, state_of

NEWEST = 10
"""Sessions on the page."""
TENANTS_MAX = 50
"""Tenants on the page, those nearest to a quota first."""
NEAR = 0.9
"""A tenant that has used this share of a quota needs attention."""
POINTS = 120
"""Points of a sparkline, an hour wide."""
HEIGHT = 32

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Notice:
    """Something that needs attention."""

    text: str
    path: str = ""
    """The page with more about it."""


@dataclass(frozen=True)
class Sparkline:
    """The last hour of a number. `points` are those of an SVG polyline, POINTS wide and HEIGHT high."""

    name: str
    points: str
    now: str
    most: str


@dataclass(frozen=True)
class Quota:
    """A quota of a tenant."""

    name: str
    used: float
    most: float
    shown: str
    shown_most: str

    @property
    def part(self) -> float:
        return self.used / self.most if self.most else 1.0


@dataclass(frozen=True)
class Tenant:
    """A tenant with its quotas, the one nearest to its end first."""

    name: str
    profile: str
    sessions: int
    quotas: Sequence[Quota]

    @property
    def part(self) -> float:
        return max((quota.part for quota in self.quotas), default=0.0)


_Format = Callable[[float], str]
_QUOTAS: tuple[tuple[str, str, str, _Format], ...] = (
    ("sessions", "sessions", "sessions", formats.number),
    ("executions", "executions", "running executions", formats.number),
    ("creations_per_minute", "creations_in_last_minute", "creations in the last minute", formats.number),
    ("cpu_time_s_per_hour", "cpu_time_s_in_last_hour", "CPU time in the last hour", formats.seconds),
    ("output_bytes_per_hour", "output_bytes_in_last_hour", "output in the last hour", formats.size),
    ("egress_bytes_per_hour", "egress_bytes_in_last_hour", "network in the last hour", formats.size),
    ("calls", "calls", "open calls", formats.number),
)
"""A quota, the field of its use, its name, its format."""


def routes(console: Console) -> list[BaseRoute]:
    async def overview(request: Request) -> Response:
        return console.page(
            request,
            "overview.html",
            events="/events/overview",
            state=console.fragment("overview_state.html", **await _state(console)),
            newest=newest_part(console.daemon.sessions_changes.count),
        )

    @lru_cache(1)
    def newest_part(_change: int) -> Markup:
        """Renders the newest sessions once for all viewers."""
        return console.fragment("overview_newest.html", **_newest(console))

    async def events(request: Request) -> Response:
        return console.events(request, states(), newest())

    async def states() -> AsyncIterator[tuple[str, str]]:
        seen = console.daemon.samples_changes.count
        while True:
            seen = await console.daemon.samples_changes.after(seen)
            yield "state", console.fragment("overview_state.html", **await _state(console))

    async def newest() -> AsyncIterator[tuple[str, str]]:
        shown, seen = "", -1
        while True:
            seen = await console.daemon.sessions_changes.after(seen)
            if (html := newest_part(seen)) != shown:
                shown = html
                yield "newest", html

    return [Route("/", overview), Route("/events/overview", events)]


def _newest(console: Console) -> dict[str, Any]:
    daemon = console.daemon
    newest = latest(console)
    states = Counter(state_of(view) for view in newest)
    return {
        "error": daemon.errors.get("sessions"),
        "counts": [(state, states[state]) for state in STATES],
        "rows": [(state_of(view), view, view.owned.session) for view in newest[:NEWEST]],
    }


async def _state(console: Console) -> dict[str, Any]:
    daemon = console.daemon
    try:
        tenants = _tenants(await daemon.usage(), _running(console))
        usage_error = None
    except DaemonError as error:
        tenants, usage_error = [], error
    status = daemon.status
    return {
        "status": status,
        "status_error": daemon.errors.get("status"),
        "usage_error": usage_error,
        "notices": list(_notices(console, status, tenants)),
        "sparklines": _sparklines(daemon.samples),
        "tenants": tenants[:TENANTS_MAX],
        "tenants_known": len(tenants),
        "points": POINTS,
        "height": HEIGHT,
    }


def _notices(
    console: Console, status: admin_pb.GetStatusResponse | None, tenants: Sequence[Tenant]
) -> Iterator[Notice]:
    if waiting := console.daemon.waiting:
        yield Notice(f"{waiting} waiting for an approval", "/approvals")
    for tenant in tenants:
        for quota in tenant.quotas:
            if quota.part >= NEAR:
                yield Notice(f"Tenant {tenant.name}: {quota.shown} of {quota.shown_most} {quota.name}")
    if status is None:
        return
    if status.draining:
        yield Notice("The daemon drains: it takes no new sessions")
    if status.max_sessions and status.sessions >= NEAR * status.max_sessions:
        yield Notice(f"{status.sessions} of {status.max_sessions} sessions", "/sessions?state=running")
    for backend in status.backends:
        if backend.state != "up":
            yield Notice(f"The backend {backend.backend} is {backend.state}")
    if status.audit.is_failing:
        yield Notice("The audit log can't be written; calls that need a record are refused")
    if status.audit.lost_records:
        yield Notice(f"The audit log has lost {formats.number(status.audit.lost_records)} records")


def _running(console: Console) -> Counter[str]:
    """Counts the sessions of each tenant. This is newer than the usage, which is requested less often."""
    return Counter(view.owned.tenant for view in console.daemon.sessions.values() if not view.HasField("end_time"))


def _tenants(usage: Sequence[admin_pb.TenantUsage], running: Counter[str]) -> list[Tenant]:
    tenants = [
        Tenant(
            name=each.tenant,
            profile=each.profile,
            sessions=running[each.tenant],
            quotas=sorted(_quotas(each, running[each.tenant]), key=lambda quota: quota.part, reverse=True),
        )
        for each in usage
    ]
    return sorted(tenants, key=lambda tenant: (-tenant.part, -tenant.sessions, tenant.name))


def _quotas(usage: admin_pb.TenantUsage, sessions: int) -> Iterator[Quota]:
    for quota, field, name, shown in _QUOTAS:
        if usage.quotas.HasField(quota):
            used = float(sessions if quota == "sessions" else getattr(usage, field))
            most = float(getattr(usage.quotas, quota))
            yield Quota(name, used, most, shown(used), shown(most))


def _sparklines(samples: Sequence[Sample]) -> list[Sparkline]:
    lines: tuple[tuple[str, Callable[[admin_pb.GetStatusResponse], float], _Format], ...] = (
        ("Sessions", lambda status: status.sessions, formats.number),
        ("Busy sessions", lambda status: status.busy, formats.number),
        ("Load", lambda status: status.load, formats.number),
        ("Memory in use", lambda status: status.memory_bytes - status.available_memory_bytes, formats.size),
    )
    return [_sparkline(name, samples, value, shown) for name, value, shown in lines if samples]


def _sparkline(
    name: str, samples: Sequence[Sample], value: Callable[[admin_pb.GetStatusResponse], float], shown: _Format
) -> Sparkline:
    """Each point is the highest of the samples in its half minute: a short peak must not vanish."""
    end = samples[-1].time
    highest: dict[int, float] = {}
    for sample in samples:
        x = POINTS - 1 - int((end - sample.time) / _HOUR_S * POINTS)
        if x >= 0:
            highest[x] = max(highest.get(x, 0.0), value(sample.status))
    most = max(highest.values())
    if len(highest) == 1:
        highest[POINTS - 2] = highest[POINTS - 1]  # else there is no line
    points = " ".join(
        f"{x},{HEIGHT - 1 - (HEIGHT - 2) * number / most if most else HEIGHT - 1:.1f}"
        for x, number in sorted(highest.items())
    )
    return Sparkline(name, points, shown(value(samples[-1].status)), shown(most))
