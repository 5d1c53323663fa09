"""Metrics of a front: its nodes, the sessions that it places on them, and those that were lost with a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from executor_server.telemetry.instruments import Book

NODE_STATES = ("connecting", "serving", "draining", "waiting", "silent", "lost", "refused")


class FleetMetrics:
    """Counts. Labels are our own constants, never nodes or tenants."""

    def __init__(self, book: Book) -> None:
        self._nodes = book.gauge(
            "fleet_nodes",
            "Nodes; `state`: `connecting`, `serving`, `draining`, `waiting` for the policy, `silent`, `lost`, `refused`"
            " (it obeys another front).",
            "state",
        )
        self._parked = book.gauge("fleet_parked", "Session requests waiting for a node with room.")
        self._placements = book.counter(
            "fleet_placements",
            "Session requests; `result`: `placed`, `refused` by all nodes or finally by one, or `withdrawn`.",
            "result",
        )
        self._placement = book.histogram("fleet_placement_seconds", "Duration of placing a session, waiting included.")
        self._attempts = book.counter(
            "fleet_attempts",
            "Calls for a session to nodes; `result`: `made`, `refused`, or `unanswered` when the connection broke.",
            "result",
        )
        self._links = book.counter("fleet_links", "Links to nodes; `change`: `up` or `down`.", "change")
        self._lost_nodes = book.counter("fleet_nodes_lost", "Lost nodes.")
        self._lost_sessions = book.counter("fleet_sessions_lost", "Sessions lost with their node.")
        self._moved = book.counter(
            "fleet_sessions_moved", "Sessions of drained nodes; `result`: `moved` or `left`.", "result"
        )

    def fleet_seen(self, states: Iterable[str], parked: int) -> None:
        """Sets the numbers of nodes in each state, and of requests that wait."""
        counts: Mapping[str, int] = Counter(states)
        for state in NODE_STATES:
            self._nodes.labels(state).set(counts.get(state, 0))
        self._parked.set(parked)

    def session_placed(self, took_s: float) -> None:
        self._placements.labels("placed").inc()
        self._placement.observe(took_s)

    def session_refused(self, *, withdrawn: bool) -> None:
        self._placements.labels("withdrawn" if withdrawn else "refused").inc()

    def node_asked(self, result: str) -> None:
        """`result` is one of the labels that `fleet_attempts` lists."""
        self._attempts.labels(result).inc()

    def link_changed(self, *, up: bool) -> None:
        self._links.labels("up" if up else "down").inc()

    def node_lost(self, sessions: int) -> None:
        self._lost_nodes.inc()
        self._lost_sessions.inc(sessions)

    def session_moved(self, *, moved: bool) -> None:
        self._moved.labels("moved" if moved else "left").inc()
