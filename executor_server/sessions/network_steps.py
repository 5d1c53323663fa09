"""The totals of a session's network, and the step that reports count for, with its notices."""

from __future__ import annotations

from dataclasses import dataclass, field

from executor_server.core import EgressConnection, EgressDenial, NetworkUsage
from executor_server.guest.egress import reasons

# Different notices of one step, and characters of each.
_MAX_NOTICES = 20
_NOTICE_CHARS = 1024
_MORE = "more was refused in this step, and is not listed"

# The reasons for which connections are closed that a program could not guess.
_ENDS = {
    reasons.SENT_BYTES: "the session has sent as much as max_sent_bytes allows",
    reasons.RECEIVED_BYTES: "the session has received as much as max_received_bytes allows",
    reasons.TENANT_QUOTA: "the tenant's quota egress_bytes_per_hour is spent",
    reasons.TIME_LIMIT: "it lasted as long as max_connection_s allows",
    reasons.RULE_GONE: "the policy has changed and does not allow it any more",
    reasons.PROXY_ENDED: "the egress proxy was restarted; connect again",
}


@dataclass
class Totals:
    """Sums that grow."""

    connections: int = 0
    denied: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def usage(self) -> NetworkUsage:
        return NetworkUsage(self.connections, self.denied, self.sent_bytes, self.received_bytes)

    @property
    def moved_bytes(self) -> int:
        return self.sent_bytes + self.received_bytes


def values_of(usage: NetworkUsage) -> tuple[int, ...]:
    """Returns its numbers, in the order of its fields."""
    return usage.connections, usage.denied, usage.sent_bytes, usage.received_bytes


@dataclass(frozen=True)
class Notice:
    """A line for the log of a step; of several with the same subject the first one is printed."""

    subject: tuple[str, int, str]
    text: str
    is_end: bool  # a connection has ended; otherwise something was refused


def notice_of_denial(denial: EgressDenial) -> Notice:
    return Notice((denial.host, denial.port, ""), denial.sentence, is_end=False)


def notice_of_end(connection: EgressConnection) -> Notice | None:
    """Returns None for an end that the program could guess."""
    why = _ENDS.get(connection.reason)
    if why is None:
        return None
    subject = (connection.host, connection.port, connection.reason)
    return Notice(subject, f"the connection to {connection.host}:{connection.port} was closed: {why}", is_end=True)


@dataclass
class Step:
    """The execution that reports count for, or the time between two."""

    execution_id: str  # empty when none runs
    before: NetworkUsage  # used by the session, at its beginning
    used: NetworkUsage  # used by the execution, under an earlier daemon
    _noticed: set[tuple[str, int, str]] = field(default_factory=set)

    def usage(self, now: NetworkUsage) -> NetworkUsage:
        """Returns what it has used, when the session has used so much."""
        before, used = values_of(self.before), values_of(self.used)
        return NetworkUsage(
            *(there + here - begin for there, here, begin in zip(used, values_of(now), before, strict=True))
        )

    def line_of(self, notice: Notice) -> str | None:
        """Returns the line to print; None when its subject had one, or the step has had enough."""
        if notice.subject in self._noticed or len(self._noticed) > _MAX_NOTICES:
            return None
        self._noticed.add(notice.subject)
        text = notice.text[:_NOTICE_CHARS] if len(self._noticed) <= _MAX_NOTICES else _MORE
        return f"network: {text}\n"
