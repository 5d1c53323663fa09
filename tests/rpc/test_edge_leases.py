"""Leases on the wire: requests that name one, malformed ids, and ending a session by its request."""

from __future__ import annotations

from typing import Any

import pytest

from executor_api.v1 import executor_service_pb2 as pb
from tests.rpc.edge import AUTH, Edge, refusal, refused

INVALID = ("INVALID_ARGUMENT", "INVALID_FIELD")
LEASE = "0123456789abcdef" * 2

MALFORMED = {
    "short": "a" * 31,
    "upper case": "A" * 32,
    "a newline": "a" * 31 + "\n",
    "huge": "a" * 100_000,
}


async def test_a_lease_holds_what_was_made_or_found_with_it(edge: Edge) -> None:
    await edge.stub.CreateSession(pb.CreateSessionRequest(request_id="made", lease_id=LEASE), metadata=AUTH)
    await edge.stub.CreateSession(pb.CreateSessionRequest(request_id="found"), metadata=AUTH)
    renewed = await edge.stub.RenewLease(pb.RenewLeaseRequest(lease_id=LEASE), metadata=AUTH)
    assert (renewed.sessions, renewed.renew_after_s) == (1, 2.5)
    await edge.stub.GetSession(pb.GetSessionRequest(session_id="found", lease_id=LEASE), metadata=AUTH)
    assert (await edge.stub.EndLease(pb.EndLeaseRequest(lease_id=LEASE), metadata=AUTH)).sessions == 2


@pytest.mark.parametrize("lease_id", MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_lease_is_refused_wherever_it_is_named(edge: Edge, lease_id: str) -> None:
    await edge.stub.CreateSession(pb.CreateSessionRequest(request_id="s"), metadata=AUTH)
    calls: list[tuple[Any, Any]] = [
        (edge.stub.CreateSession, pb.CreateSessionRequest(request_id="r", lease_id=lease_id)),
        (edge.stub.GetSession, pb.GetSessionRequest(session_id="s", lease_id=lease_id)),
        (edge.stub.RenewLease, pb.RenewLeaseRequest(lease_id=lease_id)),
        (edge.stub.EndLease, pb.EndLeaseRequest(lease_id=lease_id)),
    ]
    for method, request in calls:
        found = await refusal(method(request, metadata=AUTH))
        assert (found.code.name, found.reason) == INVALID
        assert found.message == "lease_id must be 32 of 0-9 a-f, chosen at random"


@pytest.mark.parametrize("method", ["RenewLease", "EndLease"])
async def test_a_call_about_a_lease_names_one(edge: Edge, method: str) -> None:
    assert await refused(getattr(edge.stub, method)(getattr(pb, f"{method}Request")(), metadata=AUTH)) == INVALID


async def test_a_session_is_ended_by_its_id_or_by_its_request(edge: Edge) -> None:
    for name in ("one", "two"):
        await edge.stub.CreateSession(pb.CreateSessionRequest(request_id=name), metadata=AUTH)
    await edge.stub.DeleteSession(pb.DeleteSessionRequest(session_id="one"), metadata=AUTH)
    await edge.stub.DeleteSession(pb.DeleteSessionRequest(request_id="two"), metadata=AUTH)
    assert not edge.sessions.sessions


@pytest.mark.parametrize("fields", [{}, {"session_id": "s", "request_id": "r"}, {"request_id": "../x"}])
async def test_a_session_to_end_is_named_once_and_in_form(edge: Edge, fields: dict[str, str]) -> None:
    assert await refused(edge.stub.DeleteSession(pb.DeleteSessionRequest(**fields), metadata=AUTH)) == INVALID
