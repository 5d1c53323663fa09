"""Passes on what happens to a front's nodes and sessions: to its metrics and to its audit log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from executor_server.core import Principal
from executor_server.fleet.membership import Lost
from executor_server.policy.audit import FleetTrail
from executor_server.telemetry import Metrics


class FleetNews:
    """Notifies the audit log and the metrics, as far as they are switched on."""

    def __init__(self, trail: FleetTrail | None, metrics: Metrics | None, parked: Callable[[], int]) -> None:
        """`parked` returns the number of waiting requests."""
        self._trail = trail
        self._metrics = metrics.fleet if metrics is not None else None
        self._parked = parked

    def node_linked(self, node: str, address: str, epoch: int) -> None:
        if self._trail is not None:
            self._trail.node_linked(node, address, epoch)
        if self._metrics is not None:
            self._metrics.link_changed(up=True)

    def node_unlinked(self, node: str) -> None:
        if self._metrics is not None:
            self._metrics.link_changed(up=False)

    def node_lost(self, lost: Lost) -> None:
        if self._trail is not None:
            self._trail.node_lost(lost.node, lost.epoch, len(lost.tombstones))
            for each in lost.tombstones:
                self._trail.session_lost(each.tenant, each.session_id, each.reason)
        if self._metrics is not None:
            self._metrics.node_lost(len(lost.tombstones))

    def fleet_seen(self, states: Sequence[str]) -> None:
        if self._metrics is not None:
            self._metrics.fleet_seen(states, self._parked())

    def session_placed(self, principal: Principal, request_id: str, session_id: str, node: str, took_s: float) -> None:
        if self._trail is not None:
            self._trail.session_placed(principal, request_id, session_id, node)
        if self._metrics is not None:
            self._metrics.session_placed(took_s)

    def session_refused(self, *, withdrawn: bool) -> None:
        if self._metrics is not None:
            self._metrics.session_refused(withdrawn=withdrawn)

    def node_asked(self, result: str) -> None:
        """`result`: `made`, `refused` or `unanswered`."""
        if self._metrics is not None:
            self._metrics.node_asked(result)

    def session_moved(self, tenant: str, session_id: str, new_session_id: str, problem: str) -> None:
        """`new_session_id` is empty for a session that was not moved."""
        if self._trail is not None:
            self._trail.session_moved(tenant, session_id, new_session_id, problem)
        if self._metrics is not None:
            self._metrics.session_moved(moved=bool(new_session_id))
