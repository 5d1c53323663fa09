"""What was refused, by which rule of which policy, and how often: the audit log's records, grouped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.console.audit import fields_of, read, search_of, time_of
from executor_server.console.console import Console
from executor_server.console.daemon import DaemonError
from executor_server.core.config import dotted

KINDS = (
    "request_refused",
    "requests_refused",
    "connection_denied",
    "connections_denied",
    "approval_decided",
    "execution_ended",
    "credentials_refused",
)
"""Kinds of audit records that may say that something was refused."""
EXAMPLES_MAX = 3
"""The latest refusals of a group that are shown one by one."""
GROUPS_MAX = 200
RECORDS_OF_PAGE = 1000

# Reasons of the egress proxy, and outcomes of code, that are decisions of the policy, with the key below the profile.
_KEY_OF = {
    "not_allowed": "network.allowed",
    "denied": "network.denied",
    "not_approved": "network.ask",
    "too_many_connections": "network.max_connections",
    "too_many_new_connections": "network.max_new_connections_per_minute",
    "sent_bytes": "network.max_sent_bytes",
    "received_bytes": "network.max_received_bytes",
    "tenant_quota": "quotas.egress_bytes_per_hour",
    "import_denied": "imports.allowed",
    "policy_denied": "language",
}
_KEYS = frozenset(_KEY_OF.values())


@dataclass(frozen=True)
class Refusal:
    """One refusal, or several that the daemon only counted. Texts are those of the audit log: printable ASCII."""

    rule: str
    """The deciding key: whole ("profiles.data.tools.allowed"), or without its profile where the record has none. Else
    the reason, as a word of a closed list."""
    policy: str
    """The fingerprint; empty where the record has none."""
    what: str
    why: str
    time: str
    tenant: str = ""
    session_id: str = ""
    execution_id: str = ""
    count: int = 1


@dataclass
class Group:
    """The refusals by one rule of one policy."""

    rule: str
    policy: str
    count: int = 0
    tenants: set[str] = field(default_factory=set)
    last: list[Refusal] = field(default_factory=list)
    """The latest first."""


class Groups:
    """Groups the refusals in records of the audit log, which are added oldest first."""

    def __init__(self, profiles: Mapping[str, str]) -> None:
        """`profiles`: of sessions, by id, as far as they are known."""
        self._profiles = profiles
        self._groups: dict[tuple[str, str], Group] = {}
        self.since = ""
        """The time of the oldest record."""

    def add(self, record: admin_pb.AuditRecord) -> None:
        fields = fields_of(record)
        self.since = self.since or time_of(fields)
        for refusal in refusals_in(fields):
            profile = self._profiles.get(refusal.session_id, "")
            has_profile = profile and refusal.rule in _KEYS
            rule = f"{dotted(('profiles', profile))}.{refusal.rule}" if has_profile else refusal.rule
            key = (rule, refusal.policy)
            group = self._groups.setdefault(key, Group(*key))
            group.count += refusal.count
            group.last = [refusal, *group.last[: EXAMPLES_MAX - 1]]
            if refusal.tenant:
                group.tenants.add(refusal.tenant)

    def listed(self) -> list[Group]:
        """The most frequent ones first."""
        return sorted(self._groups.values(), key=lambda group: -group.count)[:GROUPS_MAX]


def refusals_in(record: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yields the refusals that a record reports."""
    match record.get("kind"):
        case "request_refused" if isinstance(violations := record.get("violations"), list):
            for each in violations:
                if isinstance(each, dict):
                    what = f"{_text(each, 'field')}: {_text(each, 'requested')}"
                    yield _refusal(record, _text(each, "rule"), what, f"allowed is {_text(each, 'allowed')}")
        case "request_refused" | "requests_refused" | "credentials_refused":
            yield _refusal(record, _text(record, "reason"), _text(record, "method"), _text(record, "message"))
        case "connection_denied":
            reason, port = _text(record, "reason"), _text(record, "port")
            what = _text(record, "host") + (f":{port}" if port not in ("", "0") else "")
            yield _refusal(record, _KEY_OF.get(reason, reason), what, _text(record, "message"))
        case "connections_denied":
            reason = _text(record, "reason")
            yield _refusal(record, _KEY_OF.get(reason, reason), "connections", "too many to list")
        case "approval_decided" if record.get("decision") == "denied":
            what = f"{_text(record, 'approval_kind')} {_text(record, 'what')}"
            yield _refusal(record, _text(record, "rule"), what, _text(record, "why"))
        case "execution_ended" if (outcome := _text(record, "outcome").lower()) in ("import_denied", "policy_denied"):
            yield _refusal(record, _KEY_OF[outcome], "code", _text(record, "error"))


def _refusal(record: Mapping[str, Any], rule: str, what: str, why: str) -> Refusal:
    count = record.get("count", 1)
    return Refusal(
        rule=rule,
        policy=_text(record, "policy"),
        what=what,
        why=why,
        time=time_of(record),
        tenant=_text(record, "tenant"),
        session_id=_text(record, "session"),
        execution_id=_text(record, "execution"),
        count=count if isinstance(count, int) and count > 0 else 1,
    )


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def routes(console: Console) -> list[BaseRoute]:
    async def refusals(request: Request) -> Response:
        search = replace(search_of(request.query_params), kinds=" ".join(KINDS))
        asked = replace(search, kinds="")
        sessions = ((session_id, view.owned.session) for session_id, view in console.daemon.sessions.items())
        found = Groups({session_id: session.policy.profile for session_id, session in sessions})
        older = await read(console.daemon, search, RECORDS_OF_PAGE, found.add)
        groups = found.listed()
        policy = await _policy([group.rule for group in groups])
        return console.page(
            request,
            "refusals.html",
            search=asked,
            groups=groups,
            policy=policy,
            lines={} if policy is None else {line.rule: line for line in policy.lines},
            older=asked.link("/refusals", older) if older else "",
            newest=asked.link("/refusals") if search.before_seq else "",
            since=found.since,
        )

    async def _policy(rules: list[str]) -> admin_pb.ShowPolicyResponse | None:
        """Returns the policy with the lines of rules; None if this console's token may not read it."""
        try:
            found: admin_pb.ShowPolicyResponse = await console.daemon.admin.ShowPolicy(
                admin_pb.ShowPolicyRequest(rules=dict.fromkeys(rules))
            )
        except DaemonError:
            return None
        return found

    return [Route("/refusals", refusals)]
