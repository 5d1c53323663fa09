"""Records of events that have happened are bounded, and hold no contents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from executor_server.core.errors import NotFound, PolicyViolation, Reason, Unauthenticated, Violation, ViolationKind
from executor_server.core.lifecycle.observer import SessionEnd
from executor_server.core.model import (
    ErrorDetail,
    FileInfo,
    LimitWarning,
    Outcome,
    Principal,
    Result,
    Usage,
    VariablesState,
)
from executor_server.policy.audit.log import AuditLog
from executor_server.policy.audit.refusal_window import WINDOW_S
from executor_server.policy.audit.trail import REFUSALS_IN_FULL, AuditTrail
from executor_server.policy.decide import Policy
from executor_server.policy.file import built_in_policy
from executor_server.policy.identity.tokens import TokenNews
from tests.support.audit import PRINCIPAL, audit_log, facts, records
from tests.support.clock import Clock

DENIED = Unauthenticated(Reason.UNAUTHENTICATED, "no")
UNKNOWN = NotFound(Reason.SESSION_NOT_FOUND, "there is no session 'x'")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[AuditLog]:
    async with audit_log(tmp_path / "audit", sync_interval_s=60.0) as log:
        yield log


@pytest.fixture
def trail(log: AuditLog, clock: Clock) -> AuditTrail:
    return AuditTrail(log, clock)


def said(tmp_path: Path) -> list[dict[str, Any]]:
    """The records, without the fields that all of them have."""
    return [
        {key: value for key, value in record.items() if key not in ("seq", "time", "prev", "hash")}
        for record in records(tmp_path / "audit")
    ]


async def test_the_life_of_a_session_is_written_down_with_its_ids(trail: AuditTrail, tmp_path: Path) -> None:
    session = facts()
    trail.session_created(session, 0.5)
    trail.session_recovered(session)
    trail.session_lost(session, "its sandbox is gone")
    trail.session_ended(session, SessionEnd.DELETED)
    known = {"tenant": "acme", "principal": "ci", "session": "5" * 32, "policy": "f" * 16}
    assert said(tmp_path) == [
        {
            "kind": "session_created",
            **known,
            "request": "r1",
            "backend": "local",
            "image": "base",
            "warm": True,
            "took_s": 0.5,
        },
        {"kind": "session_recovered", **known},
        {"kind": "session_lost", **known, "reason": "its sandbox is gone"},
        {"kind": "session_ended", **known, "reason": "the session was deleted"},
    ]


async def test_the_end_of_an_execution_says_how_and_what_it_used_and_imported(
    trail: AuditTrail, tmp_path: Path
) -> None:
    result = Result(
        Outcome.TIMEOUT,
        VariablesState.RESET,
        3,
        Usage(operations=7, wall_time_s=1.23456789),
        error=ErrorDetail("TimeoutError", "secret"),
        imports=("numpy", "os"),
    )
    trail.execution_ended(facts(), "e1", result, 1.5)
    (record,) = said(tmp_path)
    wanted = {"execution": "e1", "outcome": "timeout", "limit": "wall_time_s", "error": "TimeoutError"}
    assert wanted.items() <= record.items()
    assert (record["imports"], record["generation"], record["variables"]) == (["numpy", "os"], 3, "reset")
    assert record["usage"]["wall_time_s"] == 1.234568
    assert "secret" not in str(record)


async def test_a_result_that_a_sandbox_made_up_is_written_in_bounds(trail: AuditTrail, tmp_path: Path) -> None:
    result = Result(
        Outcome.EXCEPTION,
        VariablesState.KEPT,
        1,
        Usage(operations=10**100, cpu_time_s=float("nan")),
        error=ErrorDetail("E\n\x1b[2J" * 10**5, ""),
        imports=tuple(f"m{'x' * 5000}{number}" for number in range(5000)),
    )
    trail.execution_ended(facts(), "e" * 10**5, result, 0.0)
    (path,) = (tmp_path / "audit").glob("*.jsonl")
    assert path.read_bytes().count(b"\n") == 1
    assert path.stat().st_size <= 64 * 1024


async def test_limits_files_and_guests_that_misbehave_are_written_down(trail: AuditTrail, tmp_path: Path) -> None:
    trail.limit_warned(facts(), "e1", LimitWarning("operations", 80, 100))
    trail.file_got(facts(), FileInfo("out/a.csv", 12, False, 0.0))
    trail.guest_misbehaved(None, "a frame of no kind")
    warned, got, guest = said(tmp_path)
    assert {"limit": "operations", "used": 80, "budget": 100}.items() <= warned.items()
    assert {"path": "out/a.csv", "bytes": 12}.items() <= got.items()
    assert guest == {"kind": "guest_misbehaved", "what": "a frame of no kind"}


async def test_a_refusal_says_what_was_asked_and_which_rule_refused_it(trail: AuditTrail, tmp_path: Path) -> None:
    rule = "profiles.data.limits.max.memory_bytes"
    error = PolicyViolation((Violation("limits.memory_bytes", ViolationKind.ABOVE_CEILING, "9", "at most 5", rule),))
    trail.daemon_started(version="1", backend="local", policy="f", policy_version="7")
    trail.request_refused(PRINCIPAL, "CreateSession", error)
    _, record = said(tmp_path)
    assert record["policy"] == "f"
    assert record["violations"] == [
        {
            "field": "limits.memory_bytes",
            "kind": "ABOVE_CEILING",
            "requested": "9",
            "allowed": "at most 5",
            "rule": rule,
        }
    ]


async def test_a_flood_of_refusals_is_counted_and_not_written_one_by_one(
    trail: AuditTrail, tmp_path: Path, clock: Clock
) -> None:
    for _ in range(10_000):
        trail.request_refused(PRINCIPAL, "Execute", UNKNOWN)
    assert len(said(tmp_path)) == REFUSALS_IN_FULL
    clock.now_s += WINDOW_S
    trail.request_refused(PRINCIPAL, "Execute", UNKNOWN)
    *_, counted, _ = said(tmp_path)
    assert counted == {
        "kind": "requests_refused",
        "tenant": "acme",
        "method": "Execute",
        "reason": "SESSION_NOT_FOUND",
        "count": 10_000 - REFUSALS_IN_FULL,
    }


async def test_a_flood_of_one_tenant_hides_no_refusal_of_another(trail: AuditTrail, tmp_path: Path) -> None:
    for _ in range(100):
        trail.request_refused(PRINCIPAL, "Execute", UNKNOWN)
    trail.request_refused(Principal("other", "token"), "Execute", UNKNOWN)
    assert said(tmp_path)[-1]["tenant"] == "other"


async def test_a_flood_of_strangers_is_a_few_records_whatever_they_call(
    trail: AuditTrail, tmp_path: Path, clock: Clock
) -> None:
    for number in range(10_000):
        trail.request_refused(None, f"/no.Such/Method{number}" * 100, DENIED)
    assert len(said(tmp_path)) == 1
    clock.now_s += WINDOW_S
    trail.request_refused(None, "Execute", DENIED)
    found = [record for record in said(tmp_path) if record["kind"] == "credentials_refused"]
    assert len(found) < 100
    assert sum(record["count"] for record in found) == 10_001


async def test_what_was_counted_is_written_before_the_log_is_closed(tmp_path: Path, clock: Clock) -> None:
    async with audit_log(tmp_path / "audit") as log:
        trail = AuditTrail(log, clock)
        trail.request_refused(None, "Execute", DENIED)
        trail.request_refused(None, "Execute", DENIED)
        clock.now_s += WINDOW_S
    assert [record["count"] for record in said(tmp_path)] == [1, 1]


async def test_what_is_done_to_the_daemon_is_written_down(trail: AuditTrail, tmp_path: Path) -> None:
    trail.daemon_started(version="1", backend="local", policy="f", policy_version="7")
    policy = Policy(built_in_policy(), images=["base"], backend="local", orphan_time_s=600.0)
    trail.policy_changed(policy, policy)
    trail.policy_refused(policy, ["profiles: is missing"])
    trail.tokens_changed(TokenNews(added=("t1",)))
    trail.admin_called(PRINCIPAL, "KillSession", "5" * 32)
    trail.daemon_stopped()
    assert [record["kind"] for record in said(tmp_path)] == [
        "daemon_started",
        "policy_reloaded",
        "policy_refused",
        "tokens_reloaded",
        "admin_called",
        "daemon_stopped",
    ]
