"""Refuses hellos and reports of a node that lies: a node costs itself its link, and never the front its memory.

Each number, text and list has a bound, which is in messages.py. What a node says of itself can still be wrong within
them: a load that is too low attracts sessions, which then wait for this node and are lost with it, as with a machine
that is broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized

from executor_server.fleet.membership.ids import MAX_EPOCH, epoch_of, is_node_name, node_of
from executor_server.fleet.membership.messages import (
    MAX_BACKENDS,
    MAX_IMAGES,
    MAX_LABELS,
    MAX_LOAD,
    MAX_NAME_CHARS,
    MAX_NODE_SESSIONS,
    MAX_NODE_TENANTS,
    MAX_NUMBER,
    MAX_PROBLEM_CHARS,
    MAX_WARM_KINDS,
    PROTOCOL,
    NodeHello,
    NodeReport,
    NodeSession,
    TenantUse,
)
from executor_server.fleet.membership.timing import NodeRefused


def check_hello(hello: NodeHello) -> None:
    """Raises NodeRefused."""
    if hello.protocol != PROTOCOL:
        raise NodeRefused(f"the node speaks version {hello.protocol} of the fleet's protocol, the front {PROTOCOL}")
    if not is_node_name(hello.node):
        raise NodeRefused("the node's name must be 1 to 24 of a-z, 0-9 and inner hyphens")
    _check_number("epoch", hello.epoch, 1, MAX_EPOCH - 1)
    _check_text("instance", hello.instance, least=1)
    _check_text("program_version", hello.program_version)
    _check_count("labels", hello.labels, MAX_LABELS)
    for key, value in hello.labels.items():
        _check_text("labels", key, least=1)
        _check_text("labels", value)


def check_report(report: NodeReport, node: str) -> None:
    """Raises NodeRefused. The lists may still contradict those of earlier reports."""
    _check_number("sequence", report.sequence, 1, MAX_NUMBER)
    _check_number("renewed", report.renewed, 0, MAX_NUMBER)
    _check_number("max_sessions", report.max_sessions, 0, MAX_NODE_SESSIONS)
    _check_number("load", report.load, 0, MAX_LOAD)
    _check_text("control_fingerprint", report.control_fingerprint)
    _check_text("control_problem", report.control_problem, most=MAX_PROBLEM_CHARS)
    _check_count("backends", report.backends, MAX_BACKENDS)
    for backend in report.backends:
        _check_text("backends", backend.name, least=1)
        _check_count("images", backend.images, MAX_IMAGES)
        for image in backend.images:
            _check_text("images", image)
    _check_count("warm", report.warm, MAX_WARM_KINDS)
    for kind, ready in report.warm.items():
        for text in (kind.backend, kind.image, kind.environment_id):
            _check_text("warm", text)
        _check_number("warm", ready, 0, MAX_NODE_SESSIONS)
    _check_sessions(report, node)
    _check_count("tenants", report.tenants, MAX_NODE_TENANTS)
    for tenant, use in report.tenants.items():
        _check_text("tenants", tenant, least=1)
        _check_use(use)


def _check_sessions(report: NodeReport, node: str) -> None:
    _check_count("opened", report.opened, MAX_NODE_SESSIONS)
    _check_count("closed", report.closed, MAX_NODE_SESSIONS)
    _check_count("creating", report.creating, MAX_NODE_SESSIONS)
    for session in report.opened:
        _check_session(session)
        if node_of(session.session_id) != node or epoch_of(session.session_id) != report.epoch:
            raise NodeRefused("opened: the id of a session must name this node, and the epoch of the report")
    for session in report.creating:
        _check_session(session)
    for session_id in report.closed:
        if node_of(session_id) != node:
            raise NodeRefused("closed: the id of a session must name this node")
    _check_unique("opened", (session.session_id for session in report.opened), len(report.opened))


def _check_session(session: NodeSession) -> None:
    _check_text("tenant", session.tenant, least=1)
    _check_text("request_id", session.request_id)


def _check_use(use: TenantUse) -> None:
    _check_number("executions", use.executions, 0, MAX_NUMBER)
    _check_number("cpu_time_s", use.cpu_time_s, 0, MAX_NUMBER)
    _check_number("output_bytes", use.output_bytes, 0, MAX_NUMBER)
    _check_number("egress_bytes", use.egress_bytes, 0, MAX_NUMBER)


def _check_number(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # NaN is in no range
        raise NodeRefused(f"{field} is out of range: it must be from {least:g} to {most:g}")


def _check_text(field: str, text: str, *, least: int = 0, most: int = MAX_NAME_CHARS) -> None:
    if not least <= len(text) <= most:
        raise NodeRefused(f"{field} has a text of {len(text)} characters; {least} to {most} are allowed")


def _check_count(field: str, values: Sized, most: int) -> None:
    if len(values) > most:
        raise NodeRefused(f"{field} has {len(values)} entries; at most {most} are allowed")


def _check_unique(field: str, values: Iterable[str], count: int) -> None:
    if len(set(values)) != count:
        raise NodeRefused(f"{field} names a session twice")
