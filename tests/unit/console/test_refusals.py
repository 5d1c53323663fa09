"""The audit log's refusals, grouped by rule and policy, whatever else the log holds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.console.refusals import EXAMPLES_MAX, Group, Groups

RULE = "profiles.data.tools.allowed"


def record(kind: str, **fields: Any) -> admin_pb.AuditRecord:
    return admin_pb.AuditRecord(json=json.dumps({"kind": kind, "time": "t", "tenant": "acme", **fields}))


def grouped(records: Iterable[admin_pb.AuditRecord], profiles: dict[str, str]) -> list[Group]:
    groups = Groups(profiles)
    for each in records:
        groups.add(each)
    return groups.listed()


def refused(policy: str, requested: str) -> admin_pb.AuditRecord:
    violation = {"field": "tools", "kind": "NOT_ALLOWED", "requested": requested, "allowed": "search", "rule": RULE}
    return record("request_refused", policy=policy, violations=[violation])


def test_refusals_are_grouped_by_rule_and_policy_and_the_latest_are_kept() -> None:
    groups = grouped(
        [
            *(refused("f1", f"tool{number}") for number in range(5)),
            refused("f2", "other"),
            record("connection_denied", policy="f2", reason="not_allowed", host="a.example", port=443, message="no"),
            record("connections_denied", reason="not_allowed", count=40),
            record("approval_decided", decision="denied", approval_kind="tool", what="drop", rule="r.ask", why="no"),
            record("approval_decided", decision="once", approval_kind="tool", what="drop", rule="r.ask"),
            record("execution_ended", policy="f2", outcome="import_denied", error="ImportError", session="s1"),
            record("execution_ended", policy="f2", outcome="succeeded"),
            record("request_refused", reason="SESSION_NOT_FOUND", method="Execute", message="no session"),
        ],
        {"s1": "team.a", "s2": "other"},
    )
    assert [(each.rule, each.policy, each.count) for each in groups] == [
        ("network.allowed", "", 40),
        (RULE, "f1", 5),
        (RULE, "f2", 1),
        ("network.allowed", "f2", 1),
        ("r.ask", "", 1),
        ('profiles."team.a".imports.allowed', "f2", 1),
        ("SESSION_NOT_FOUND", "", 1),
    ]
    assert [each.what for each in groups[1].last] == ["tools: tool4", "tools: tool3", "tools: tool2"]
    assert len(groups[1].last) == EXAMPLES_MAX
    assert groups[1].tenants == {"acme"}


def test_damaged_records_refuse_nothing() -> None:
    texts = ["", "{", "[]", "null", "[" * 100_000, '{"kind": 3}', '{"kind": "request_refused", "violations": [7, {}]}']
    (only,) = grouped((admin_pb.AuditRecord(json=text) for text in texts), {})
    assert (only.rule, only.policy, only.count) == ("", "", 1)
