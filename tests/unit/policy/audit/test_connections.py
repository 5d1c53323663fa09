"""Records of the network: what was reached and refused, bounded, and never a secret's value."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.core.model import Principal
from executor_server.core.network import EgressConnection, EgressDenial, NetworkRules, NetworkSecret
from executor_server.guest.egress import reasons
from executor_server.policy.audit.connection_trail import DENIALS_IN_FULL, ConnectionTrail
from executor_server.policy.audit.fields import of_request
from executor_server.policy.audit.log import AuditLog
from executor_server.policy.audit.refusal_window import WINDOW_S
from tests.support.audit import PRINCIPAL, audit_log, facts, records
from tests.support.clock import Clock
from tests.support.fake_backend import SPEC
from tests.support.specs import session_spec

OPENED = EgressConnection("c1", "api.example", 443, "192.0.2.1", "*.example")
CLOSED = replace(
    OPENED, sent_bytes=10, received_bytes=20, duration_s=1.5, reason=reasons.ENDED, secret_used="Authorization"
)
DENIAL = EgressDenial("x.example", 443, reasons.NOT_ALLOWED, "x.example:443 is not allowed for this session")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[AuditLog]:
    async with audit_log(tmp_path / "audit", sync_interval_s=60.0) as log:
        yield log


@pytest.fixture
def trail(log: AuditLog, clock: Clock) -> ConnectionTrail:
    return ConnectionTrail(log, clock)


def written(tmp_path: Path) -> list[dict[str, Any]]:
    """The records, without the fields that all of them have."""
    common = ("seq", "time", "prev", "hash", "tenant", "principal", "session", "policy")
    return [
        {key: value for key, value in record.items() if key not in common} for record in records(tmp_path / "audit")
    ]


async def test_a_connection_is_recorded_when_it_is_made_and_when_it_has_ended(
    trail: ConnectionTrail, tmp_path: Path
) -> None:
    trail.connection_opened(facts(), "e", OPENED)
    trail.connection_closed(facts(), "e", CLOSED)
    where = {"connection": "c1", "host": "api.example", "port": 443, "address": "192.0.2.1", "rule": "*.example"}
    assert written(tmp_path) == [
        {"kind": "connection_opened", "execution": "e", **where},
        {
            "kind": "connection_closed",
            "execution": "e",
            **where,
            "sent_bytes": 10,
            "received_bytes": 20,
            "duration_s": 1.5,
            "reason": "ended",
            "secret_used": "Authorization",
        },
    ]


async def test_a_refusal_says_what_was_refused_and_why(trail: ConnectionTrail, tmp_path: Path) -> None:
    trail.connection_denied(facts(), "", replace(DENIAL, address="10.0.0.1", reason=reasons.REFUSED_ADDRESS))
    (record,) = written(tmp_path)
    assert record == {
        "kind": "connection_denied",
        "host": "x.example",
        "port": 443,
        "address": "10.0.0.1",
        "reason": "refused_address",
        "message": "x.example:443 is not allowed for this session",
    }


async def test_a_profile_may_have_refusals_alone_recorded(trail: ConnectionTrail, tmp_path: Path) -> None:
    quiet = replace(facts(), audits_connections=False)
    trail.connection_opened(quiet, "e", OPENED)
    trail.connection_closed(quiet, "e", CLOSED)
    trail.connection_denied(quiet, "e", DENIAL)
    assert [record["kind"] for record in written(tmp_path)] == ["connection_denied"]


async def test_a_flood_of_refusals_is_counted_by_reason_and_hides_none_of_another_tenant(
    trail: ConnectionTrail, tmp_path: Path, clock: Clock
) -> None:
    for _ in range(10_000):
        trail.connection_denied(facts(), "e", DENIAL)
    trail.denials_uncounted(facts(), "e", 77)
    other = replace(facts(), owner=Principal("umbrella", "ci"))
    trail.connection_denied(other, "e", DENIAL)
    assert len(written(tmp_path)) == DENIALS_IN_FULL + 1
    clock.now_s += WINDOW_S
    trail.connection_denied(other, "e", DENIAL)
    counted = [record for record in written(tmp_path) if record["kind"] == "connections_denied"]
    assert counted == [
        {"kind": "connections_denied", "reason": "not_allowed", "count": 10_000 - DENIALS_IN_FULL},
        {"kind": "connections_denied", "reason": "too_fast", "count": 77},
    ]
    assert [record["tenant"] for record in records(tmp_path / "audit") if record["kind"] == "connections_denied"] == [
        PRINCIPAL.tenant
    ] * 2


async def test_what_was_counted_is_recorded_before_the_log_is_closed(tmp_path: Path, clock: Clock) -> None:
    async with audit_log(tmp_path / "audit", sync_interval_s=60.0) as log:
        trail = ConnectionTrail(log, clock)
        trail.denials_uncounted(facts(), "", 3)
        clock.now_s += WINDOW_S
    assert [(record["kind"], record["count"]) for record in written(tmp_path)] == [("connections_denied", 3)]


async def test_texts_of_programs_are_bounded(trail: ConnectionTrail, tmp_path: Path) -> None:
    long = "x" * 100_000
    trail.connection_opened(facts(), long, replace(OPENED, connection_id=long, host=long, rule=long))
    trail.connection_denied(facts(), long, replace(DENIAL, host=long, message=long, address=long))
    assert max(len(str(record)) for record in written(tmp_path)) < 2000


def test_what_a_session_may_reach_is_recorded_without_the_values_of_its_secrets() -> None:
    secret = NetworkSecret("api.example", "Authorization", "Bearer ${github-bot}")
    rules = NetworkRules(("api.example:443",), ("b.example",), (secret,))
    fields = of_request(PRINCIPAL, "r", session_spec(SPEC, network=rules))
    assert fields["network"] == ("api.example:443",)
    assert fields["denied_network"] == ("b.example",)
    assert fields["network_secrets"] == ["api.example Authorization"]
    assert "Bearer" not in str(fields)
    assert "network" not in of_request(PRINCIPAL, "r", session_spec(SPEC))
