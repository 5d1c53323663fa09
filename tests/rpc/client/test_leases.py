"""A client says who owns its sessions."""

from __future__ import annotations

import gc
import threading
from typing import Any

import grpc
import pytest

from tests.support.fake_daemon import SESSION, FakeDaemon, Refusal
from tests.support.polling import eventually


@pytest.fixture
def leasing(daemon: FakeDaemon) -> FakeDaemon:
    """A daemon that wants to hear of a lease as often as the client allows."""
    daemon.leased = True
    return daemon


def test_a_session_names_the_clients_lease_and_the_client_renews_it(client: Any, leasing: FakeDaemon) -> None:
    session, other = client.create_session(), client.create_session()
    first, second = (request for name, request in leasing.requests if name == "CreateSession")
    assert len(first.lease_id) == 32 and first.lease_id == second.lease_id
    assert not session.info.detached
    assert eventually(lambda: leasing.names().count("RenewLease") >= 3)
    assert {request.lease_id for name, request in leasing.requests if name == "RenewLease"} == {first.lease_id}
    client.close()
    assert leasing.names()[-1] == "EndLease"
    del session, other


def test_a_detached_session_names_none_and_is_left_alone(client: Any, daemon: FakeDaemon) -> None:
    session = client.create_session(detached=True)
    assert session.info.detached and daemon.requests[0][1].lease_id == ""
    del session
    gc.collect()
    client.close()
    assert daemon.names() == ["CreateSession"]


def test_a_session_that_was_closed_costs_no_more_calls(client: Any, leasing: FakeDaemon) -> None:
    client.create_session().close()
    client.close()
    assert leasing.names() == ["CreateSession", "DeleteSession"]


def test_a_daemon_that_has_forgotten_the_lease_is_told_no_more(client: Any, leasing: FakeDaemon) -> None:
    leasing.renewed_sessions = 0
    session = client.create_session()
    assert eventually(lambda: "RenewLease" in leasing.names())
    client.close()
    assert leasing.names() == ["CreateSession", "RenewLease"]
    del session


def test_a_renewal_that_fails_is_tried_again(client: Any, leasing: FakeDaemon) -> None:
    for code, reason in ((grpc.StatusCode.UNAVAILABLE, ""), (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")):
        leasing.refusals["RenewLease"].append(Refusal(code, reason))
    session = client.create_session()
    assert eventually(lambda: leasing.names().count("RenewLease") >= 4)
    del session


def test_what_was_collected_while_the_daemon_was_away_is_ended_later(client: Any, leasing: FakeDaemon) -> None:
    kept, dropped = client.create_session(), client.get_session(SESSION)
    leasing.refusals["DeleteSession"].append(Refusal(grpc.StatusCode.UNAVAILABLE, ""))
    del kept, dropped
    gc.collect()
    assert eventually(lambda: "DeleteSession" in leasing.names())
    client.close()
    assert leasing.names()[-1] == "EndLease"


def test_a_client_that_is_collected_while_a_call_hangs_is_not_waited_for(client: Any, leasing: FakeDaemon) -> None:
    """A finalizer does nothing but to leave a job to the thread, whatever that is in the middle of."""
    barrier = leasing.barriers["RenewLease"] = threading.Event()
    session = client.create_session()
    assert eventually(lambda: "RenewLease" in leasing.names())
    del session
    gc.collect()
    assert "DeleteSession" not in leasing.names()
    barrier.set()
    assert eventually(lambda: "DeleteSession" in leasing.names())
