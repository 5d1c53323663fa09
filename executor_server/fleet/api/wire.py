"""The messages between a front and a node, from the wire and to it.

Each side takes the other for hostile: a node may run on a machine that an attacker controls by now, and its report
must neither fill the front's memory nor name sessions of another node. So the number of entries and the form of every
field are checked before a value is made of them. A wrong field raises InvalidRequest, which names it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

from executor_api.v1 import fleet_service_pb2 as pb
from executor_server.api import checks
from executor_server.core import Principal
from executor_server.core.config import is_name
from executor_server.fleet.membership import (
    MAX_BACKENDS,
    MAX_EPOCH,
    MAX_IMAGES,
    MAX_LABEL_CHARS,
    MAX_LABELS,
    MAX_LOAD,
    MAX_LOCKS,
    MAX_LOCKS_BYTES,
    MAX_NODE_SESSIONS,
    MAX_NODE_TENANTS,
    MAX_NUMBER,
    MAX_PROBLEM_CHARS,
    MAX_VERSION_CHARS,
    MAX_WARM_KINDS,
    Control,
    FrontHello,
    NodeBackend,
    NodeHello,
    NodeReport,
    NodeSession,
    Renewal,
    TenantUse,
    WarmKind,
    fingerprint_of,
    is_node_name,
)

T = TypeVar("T")
K = TypeVar("K")

PRINCIPAL_KEY = "x-executor-principal-bin"
"""The metadata of a client's call: a JSON object of tenant, name, is_admin, roles (unless there are none), and `front`,
the front's start."""
MAX_PRINCIPAL_BYTES = 4096
MAX_NAME_CHARS = 256

MAX_CONTROL_BYTES = 32 * 1024 * 1024
"""Bytes of a message of the front; the largest are clients' values, and a policy with all its lock files."""
MAX_REPORT_BYTES = 4 * 1024 * 1024
"""Bytes of a message of a node. A larger one full of empty entries would take the front seconds to parse, while all
other nodes wait."""
MAX_POLICY_BYTES = 1024 * 1024
MAX_STATE_KEY_BYTES = 512
MAX_PATH_CHARS = 4096

MIN_INTERVAL_S = 0.01
MIN_LEASE_S, MAX_LEASE_S = 0.1, 600.0
MAX_FENCE_S = 3600.0

_SESSION_TAIL = re.compile(r"[0-9a-f]{32}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_IMAGE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")


# ---------------------------------------------------------------------------------------------------------------------
# To the wire


def request_to(message: FrontHello | Control | Renewal) -> pb.LinkRequest:
    match message:
        case FrontHello():
            return pb.LinkRequest(hello=pb.FrontHello(**vars(message)))
        case Control():
            locks = [pb.LockFile(path=path, content=content) for path, content in message.locks.items()]
            return pb.LinkRequest(control=pb.Control(**{**vars(message), "locks": locks}))
        case Renewal():
            return pb.LinkRequest(renewal=pb.Renewal(**vars(message)))


def response_to(message: NodeHello | NodeReport) -> pb.LinkResponse:
    if isinstance(message, NodeHello):
        return pb.LinkResponse(hello=pb.NodeHello(**vars(message)))
    rest = {
        **vars(message),
        "backends": [pb.NodeBackend(**vars(each)) for each in message.backends],
        "warm": [pb.WarmKind(**vars(kind), ready=ready) for kind, ready in message.warm.items()],
        "opened": map(_session_to, message.opened),
        "creating": map(_session_to, message.creating),
        "tenants": [pb.NodeTenant(tenant=tenant, **vars(use)) for tenant, use in message.tenants.items()],
    }
    return pb.LinkResponse(report=pb.NodeReport(**rest))


def _session_to(session: NodeSession) -> pb.NodeSession:
    return pb.NodeSession(**vars(session))


# ---------------------------------------------------------------------------------------------------------------------
# From a front


def request_from(message: pb.LinkRequest) -> FrontHello | Control | Renewal:
    """Reads a message of the front. Raises InvalidRequest."""
    match message.WhichOneof("message"):
        case "hello":
            return _front_hello_from(message.hello)
        case "control":
            return _control_from(message.control)
        case "renewal":
            return _renewal_from(message.renewal)
    raise checks.invalid("message", "is missing; it is a hello, a control or a renewal")


def _front_hello_from(message: pb.FrontHello) -> FrontHello:
    lease_s = _number(message.lease_s, MIN_LEASE_S, MAX_LEASE_S, "hello.lease_s")
    return FrontHello(
        front_id=checks.identifier(message.front_id, "hello.front_id"),
        term=_count(message.term, "hello.term", least=1),
        report_interval_s=_number(message.report_interval_s, MIN_INTERVAL_S, lease_s / 2, "hello.report_interval_s"),
        lease_s=lease_s,
        fence_s=_number(message.fence_s, MIN_LEASE_S, MAX_FENCE_S, "hello.fence_s"),
        lost_epoch=_count(message.lost_epoch, "hello.lost_epoch"),
        instance=checks.identifier(message.instance, "hello.instance"),
        protocol=message.protocol,
        program_version=_text(message.program_version, MAX_VERSION_CHARS, "hello.program_version"),
    )


def _control_from(message: pb.Control) -> Control:
    checks.size(len(message.policy), MAX_POLICY_BYTES, "the policy")
    checks.size(len(message.state_key), MAX_STATE_KEY_BYTES, "the state key")
    checks.count(len(message.locks), MAX_LOCKS, "control.locks")
    checks.size(sum(len(each.content) for each in message.locks), MAX_LOCKS_BYTES, "the lock files")
    locks = _distinct(((_path(each.path), each.content) for each in message.locks), "control.locks")
    if message.fingerprint != fingerprint_of(message.policy, message.state_key, locks):
        raise checks.invalid("control.fingerprint", "is not that of the control")
    return Control(message.policy, message.fingerprint, message.state_key, locks)


def _path(text: str) -> str:
    if not text.startswith("/") or not text.isprintable() or len(text) > MAX_PATH_CHARS:
        raise checks.invalid("control.locks.path", f"must be an absolute path of at most {MAX_PATH_CHARS:,} characters")
    return text


def _renewal_from(message: pb.Renewal) -> Renewal:
    field = "renewal.egress_bytes"
    checks.count(len(message.egress_bytes), MAX_NODE_TENANTS, field)
    allowed = {_tenant(tenant, field): _count(most, field) for tenant, most in message.egress_bytes.items()}
    return Renewal(_count(message.sequence, "renewal.sequence", least=1), allowed)


# ---------------------------------------------------------------------------------------------------------------------
# From a node


def response_from(message: pb.LinkResponse, node: str) -> NodeHello | NodeReport:
    """Reads a message of the node whose certificate has this name. Raises InvalidRequest."""
    match message.WhichOneof("message"):
        case "hello":
            return _node_hello_from(message.hello, node)
        case "report":
            return _report_from(message.report, node)
    raise checks.invalid("message", "is missing; it is a hello or a report")


def _node_hello_from(message: pb.NodeHello, node: str) -> NodeHello:
    if message.node != node or not is_node_name(node):
        raise checks.invalid("hello.node", f"must be {node}, the name in the node's certificate")
    return NodeHello(
        node=node,
        epoch=_count(message.epoch, "hello.epoch", least=1, most=MAX_EPOCH - 1),
        instance=checks.identifier(message.instance, "hello.instance"),
        labels=labels_from(message.labels.items(), "hello.labels"),
        protocol=message.protocol,
        program_version=_text(message.program_version, MAX_VERSION_CHARS, "hello.program_version"),
    )


def labels_from(labels: Collection[tuple[str, str]], field: str) -> dict[str, str]:
    """Checks the labels of a node, or of a request for one. Raises InvalidRequest."""
    checks.count(len(labels), MAX_LABELS, field)
    for key, value in labels:
        if not _LABEL_KEY.fullmatch(key):
            raise checks.invalid(field, f"must have keys of 1 to {MAX_LABEL_CHARS} of A-Z a-z 0-9 . _ / -")
        _text(value, MAX_LABEL_CHARS, field)
    return dict(labels)


def _report_from(message: pb.NodeReport, node: str) -> NodeReport:
    # The numbers of entries are checked first: the rest takes memory for each.
    checks.count(len(message.opened) + len(message.creating), MAX_NODE_SESSIONS, "report.opened")
    checks.count(len(message.closed), MAX_NODE_SESSIONS, "report.closed")
    checks.count(len(message.tenants), MAX_NODE_TENANTS, "report.tenants")
    checks.count(len(message.backends), MAX_BACKENDS, "report.backends")
    checks.count(len(message.warm), MAX_WARM_KINDS, "report.warm")
    fingerprint = message.control_fingerprint
    if fingerprint and not _FINGERPRINT.fullmatch(fingerprint):
        raise checks.invalid("report.control_fingerprint", "must be 64 of 0-9 a-f")
    opened = tuple(_session_from(each, node, "report.opened") for each in message.opened)
    closed = tuple(_session_id(each, node, "report.closed") for each in message.closed)
    _distinct(((each.session_id, each) for each in opened), "report.opened")
    backends = tuple(map(_backend_from, message.backends))
    _distinct(((each.name, each) for each in backends), "report.backends")
    tenants = _distinct(((each.tenant, each) for each in message.tenants), "report.tenants")
    return NodeReport(
        sequence=_count(message.sequence, "report.sequence", least=1),
        epoch=_count(message.epoch, "report.epoch", least=1),
        max_sessions=_count(message.max_sessions, "report.max_sessions", most=MAX_NODE_SESSIONS),
        draining=message.draining,
        control_fingerprint=fingerprint,
        control_problem=_text(message.control_problem, MAX_PROBLEM_CHARS, "report.control_problem"),
        load=_number(message.load, 0, MAX_LOAD, "report.load"),
        backends=backends,
        warm=_distinct(map(_warm_from, message.warm), "report.warm"),
        full=message.full,
        opened=opened,
        closed=closed,
        creating=tuple(map(_creation_from, message.creating)),
        tenants={_tenant(tenant, "report"): _use_from(each) for tenant, each in tenants.items()},
    )


def _session_from(message: pb.NodeSession, node: str, field: str) -> NodeSession:
    return NodeSession(
        session_id=_session_id(message.session_id, node, field),
        tenant=_tenant(message.tenant, field),
        request_id=checks.identifier(message.request_id, f"{field}.request_id"),
        lost=message.lost,
    )


def _creation_from(message: pb.NodeSession) -> NodeSession:
    field = "report.creating"
    if message.session_id or message.lost:
        raise checks.invalid(field, "must have no session_id, and can't be lost")
    request_id = checks.identifier(message.request_id, f"{field}.request_id")
    return NodeSession("", _tenant(message.tenant, field), request_id)


def _session_id(text: str, node: str, field: str) -> str:
    """Checks that an id is of this node: a node must not be able to end or to take over another one's sessions."""
    prefix, _, tail = text.rpartition("-")
    if prefix != node or not _SESSION_TAIL.fullmatch(tail):
        raise checks.invalid(field, f"must have ids of the form {node}-, 32 of 0-9 a-f")
    return text


def _backend_from(message: pb.NodeBackend) -> NodeBackend:
    checks.count(len(message.images), MAX_IMAGES, "report.backends.images")
    images = tuple(_form(_IMAGE, each, "report.backends.images") for each in message.images)
    return NodeBackend(checks.identifier(message.name, "report.backends.name"), message.ready, images)


def _warm_from(message: pb.WarmKind) -> tuple[WarmKind, int]:
    field = "report.warm"
    kind = WarmKind(
        backend=checks.identifier(message.backend, f"{field}.backend"),
        image=_form(_IMAGE, message.image, f"{field}.image"),
        network=message.network,
    )
    return kind, _count(message.ready, f"{field}.ready", most=MAX_NODE_SESSIONS)


def _use_from(message: pb.NodeTenant) -> TenantUse:
    field = "report.tenants"
    return TenantUse(
        executions=message.executions,
        cpu_time_s=_number(message.cpu_time_s, 0, MAX_NUMBER, f"{field}.cpu_time_s"),
        output_bytes=_count(message.output_bytes, f"{field}.output_bytes"),
        egress_bytes=_count(message.egress_bytes, f"{field}.egress_bytes"),
        creations=message.creations,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Single fields


def _count(number: int, field: str, *, least: int = 0, most: int = MAX_NUMBER) -> int:
    if not least <= number <= most:
        raise checks.invalid(field, f"is {number}, and must be {least} to {most}")
    return number


def _number(number: float, least: float, most: float, field: str) -> float:
    if not math.isfinite(number) or not least <= number <= most:
        raise checks.invalid(field, f"is {number:g}, and must be {least:g} to {most:g}")
    return number


def _text(text: str, max_chars: int, field: str) -> str:
    """Checks a text for people: it is shown on their terminals."""
    if len(text) > max_chars or not text.isprintable():
        raise checks.invalid(field, f"must be at most {max_chars:,} printable characters")
    return text


def _form(form: re.Pattern[str], text: str, field: str) -> str:
    if not form.fullmatch(text):
        raise checks.invalid(field, f"must be of the form {form.pattern}")
    return text


def _tenant(name: str, field: str) -> str:
    if not is_name(name):
        raise checks.invalid(f"{field}.tenant", "is no name that a tenant can have")
    return name


def _distinct(pairs: Iterable[tuple[K, T]], field: str) -> dict[K, T]:
    """Returns the pairs as a mapping. Raises InvalidRequest when a key is there twice."""
    found: dict[K, T] = {}
    for key, value in pairs:
        if key in found:
            raise checks.invalid(field, "names one thing twice")
        found[key] = value
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The caller of a call


@dataclass(frozen=True)
class Caller:
    """The caller that a front names, and the front's start; None: the front itself, for its link."""

    principal: Principal
    front: str | None


def principal_bytes(principal: Principal, front: str) -> bytes:
    """Returns the metadata for a call on behalf of this principal; `front` is the front's start."""
    name = "".join(char for char in principal.name if char.isprintable())[:MAX_NAME_CHARS]
    named = {"tenant": principal.tenant, "name": name, "is_admin": principal.is_admin, "front": front}
    roles = {"roles": principal.roles} if principal.roles else {}  # older nodes don't know them
    return json.dumps({**named, **roles}).encode()


def caller_from(data: str | bytes) -> Caller | None:
    """Reads the metadata of a call; None for any form that `principal_bytes` does not write."""
    if not isinstance(data, bytes) or len(data) > MAX_PRINCIPAL_BYTES:
        return None
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or values.keys() - {"roles"} != {"tenant", "name", "is_admin", "front"}:
        return None
    tenant, name, is_admin, front = values["tenant"], values["name"], values["is_admin"], values["front"]
    roles = values.get("roles", [])
    if not isinstance(roles, list) or not isinstance(is_admin, bool):
        return None
    if not all(isinstance(text, str) for text in (tenant, name, front, *roles)):
        return None
    if not is_name(tenant) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        return None
    return Caller(Principal(tenant, name, is_admin, tuple(roles)), front)
