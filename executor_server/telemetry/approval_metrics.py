"""Metrics of approvals: requests that wait for a person, and their ends."""

from __future__ import annotations

from collections.abc import Callable

from executor_server.policy.approvals import Approval, ApprovalObserver, Ruling
from executor_server.telemetry.instruments import Book


class ApprovalMetrics(ApprovalObserver):
    """Counts. Labels are our own constants: no tenant, and nothing that a program wrote."""

    def __init__(self, book: Book, now: Callable[[], float]) -> None:
        """`now` returns the seconds since the epoch."""
        self._now = now
        self._waiting = book.gauge("approvals_waiting", "Requests that wait for an approval.")
        self._decided = book.counter(
            "approvals",
            "Requests for an approval; `decision`: `once`, `session` or `denied` by a person; `undecided`: timed out or"
            " withdrawn; `refused` at once, because nobody who may approve is connected or too many wait.",
            "kind",
            "decision",
        )
        self._wait = book.histogram("approval_seconds", "Time from a request to the decision of a person.")

    def approval_requested(self, approval: Approval) -> None:
        self._waiting.inc()

    def approval_decided(self, approval: Approval, ruling: Ruling) -> None:
        self._waiting.dec()
        decision = "undecided" if ruling.by is None else ruling.decision.value
        self._decided.labels(approval.kind.value, decision).inc()
        if ruling.by is not None:
            self._wait.observe(max(0.0, self._now() - approval.create_time_s))

    def approval_refused(self, approval: Approval, ruling: Ruling) -> None:
        self._decided.labels(approval.kind.value, "refused").inc()
