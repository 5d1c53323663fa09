"""The network of a session as values: what it may reach, what it reached, what was refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

MIB = 2**20

_SECRET_NAME = re.compile(r"\$\{([A-Za-z0-9][A-Za-z0-9._-]{0,63})\}")


@dataclass(frozen=True)
class NetworkSecret:
    """A header that the egress proxy sets in requests to one host. The value names secrets, and holds none."""

    host: str  # as in NetworkRules.allowed; without a port it stands for all but 80
    header: str
    value: str  # "Bearer ${github-bot}"
    methods: tuple[str, ...] = ()  # empty: every method
    paths: tuple[str, ...] = ()  # patterns; empty: every path


@dataclass(frozen=True)
class NetworkRules:
    """The hosts that a session may reach, and limits of its traffic. Without hosts it has no network at all."""

    allowed: tuple[str, ...] = ()  # patterns in canonical form (guest/egress/host_names.py): the granted hosts
    denied: tuple[str, ...] = ()  # goes before `allowed` and `ask`
    secrets: tuple[NetworkSecret, ...] = ()
    max_connections: int = 32  # at one time
    max_new_connections_per_minute: int = 600
    max_sent_bytes: int = 100 * MIB  # in the session's life
    max_received_bytes: int = 1024 * MIB
    max_connection_s: float = 3600.0
    audit: str = "connections"  # or "denials"
    ask: tuple[str, ...] = ()  # hosts that are reached after an approval; `allowed` goes before it

    @property
    def any(self) -> bool:
        """True when the session has a way out, perhaps only after an approval."""
        return bool(self.allowed or self.ask)


@dataclass(frozen=True)
class EgressConnection:
    """One connection out of a sandbox that the egress proxy made, as it stands or as it ended."""

    connection_id: str  # unique in its session
    host: str
    port: int
    address: str  # the address that it leads to
    rule: str  # the pattern that allowed it
    sent_bytes: int | None = 0  # by the sandbox; None: unknown, since the proxy died before it reported
    received_bytes: int | None = 0
    duration_s: float = 0.0
    reason: str = ""  # the reason of its end, one of guest/egress/reasons.py; empty while it lasts
    secret_used: str = ""  # the header that was set, never its value


@dataclass(frozen=True)
class EgressDenial:
    """A connection or request that the egress proxy refused."""

    host: str  # canonical where it is a name; otherwise the text of the sandbox, shortened and made printable
    port: int  # 0 when there was none
    reason: str  # one of guest/egress/reasons.py
    message: str  # the sentence that the program received
    address: str = ""  # the refused address, if the address is the reason

    @property
    def sentence(self) -> str:
        """The message for readers other than the program: it names the host."""
        if not self.host or self.host in self.message:
            return self.message
        return f"{self.host}:{self.port}: {self.message}" if self.port else f"{self.host}: {self.message}"


@dataclass(frozen=True)
class NetworkUsage:
    """Totals of a session."""

    connections: int = 0
    denied: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


NO_NETWORK = NetworkRules()
NO_NETWORK_USE = NetworkUsage()


def secret_names(value: str) -> tuple[str, ...]:
    """Returns the names of secrets in the value of a NetworkSecret, each once."""
    return tuple(dict.fromkeys(_SECRET_NAME.findall(value)))
