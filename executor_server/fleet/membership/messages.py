"""The messages between a front and its nodes, as values; fleet_service.proto says what each field means."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

PROTOCOL = 2
"""The version of the protocol between front and nodes."""

# Limits of a node's messages; wire.py refuses larger ones before it makes values of them.
MAX_NODE_SESSIONS = 32_768
"""Sessions of one node; in a report they include those that have ended since the last one."""
MAX_NODE_TENANTS = 8192
"""Tenants in a report, and in the renewal that answers it."""
MAX_BACKENDS = 16
MAX_IMAGES = 1024
MAX_WARM_KINDS = 1024
MAX_LABELS = 16
MAX_LOAD = 1e6
MAX_NUMBER = 2**62
MAX_LOCKS = 64
MAX_LOCKS_BYTES = 12 * 1024 * 1024
"""Bytes of all lock files of a policy: with the policy they must fit one message to a node."""
MAX_LABEL_CHARS = 64
MAX_VERSION_CHARS = 64
MAX_PROBLEM_CHARS = 2000


@dataclass(frozen=True)
class FrontHello:
    front_id: str
    term: int
    report_interval_s: float
    lease_s: float
    fence_s: float
    lost_epoch: int = 0
    instance: str = ""
    protocol: int = PROTOCOL
    program_version: str = ""


@dataclass(frozen=True)
class NodeHello:
    node: str
    epoch: int
    instance: str
    labels: Mapping[str, str] = field(default_factory=dict)
    protocol: int = PROTOCOL
    program_version: str = ""


@dataclass(frozen=True)
class NodeBackend:
    name: str
    ready: bool = True
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class WarmKind:
    """A kind of sandbox that a node keeps ready."""

    backend: str
    image: str
    network: bool = False


@dataclass(frozen=True)
class NodeSession:
    session_id: str  # empty while it is being created
    tenant: str
    request_id: str
    lost: bool = False


@dataclass(frozen=True)
class TenantUse:
    """The use of a tenant on one node: executions now, sums over the last hour."""

    executions: int = 0
    cpu_time_s: float = 0.0
    output_bytes: int = 0
    egress_bytes: int = 0
    creations: int = 0  # within the last minute


@dataclass(frozen=True)
class NodeReport:
    sequence: int
    epoch: int
    max_sessions: int
    draining: bool = False
    control_fingerprint: str = ""
    control_problem: str = ""
    load: float = 0.0
    backends: tuple[NodeBackend, ...] = ()
    warm: Mapping[WarmKind, int] = field(default_factory=dict)
    full: bool = False
    opened: tuple[NodeSession, ...] = ()
    closed: tuple[str, ...] = ()
    creating: tuple[NodeSession, ...] = ()
    tenants: Mapping[str, TenantUse] = field(default_factory=dict)


@dataclass(frozen=True)
class Renewal:
    """The answer to a report. `egress_bytes`: the total that each tenant with such a quota may use on this node."""

    sequence: int
    egress_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Control:
    """The policy of the fleet, as the contents of its files, and the key that signs states."""

    policy: bytes
    fingerprint: str  # from `fingerprint_of`
    state_key: bytes = field(default=b"", repr=False)
    locks: Mapping[str, bytes] = field(default_factory=dict)  # by their paths in the policy


def fingerprint_of(policy: bytes, state_key: bytes, locks: Mapping[str, bytes] | None = None) -> str:
    """Identifies a control. Hashes the digest of each part, so that the same bytes divided differently don't match."""
    parts = [policy, state_key]
    for path, content in sorted((locks or {}).items()):
        parts += [path.encode(), content]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
