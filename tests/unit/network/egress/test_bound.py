"""A bound session: totals for the next process, and an end for every connection that was opened."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from executor_server.core import NetworkRules, NetworkSecret, NetworkUsage
from executor_server.guest.egress import reasons
from executor_server.network.egress.bound import BoundSession
from executor_server.network.egress.reports import BadReport
from tests.support.egress_service import RecordingSink
from tests.unit.network.egress.test_reports import CONNECTION

RULES = NetworkRules(
    allowed=("a.example", "*.b.example:443"),
    denied=("c.b.example",),
    secrets=(NetworkSecret("a.example", "Authorization", "Bearer ${bot}", ("GET",), ("/x/*",)),),
    max_connections=2,
)


@pytest.fixture
async def bound() -> AsyncIterator[tuple[BoundSession, RecordingSink]]:
    sink = RecordingSink()
    session = BoundSession("s", RULES, socket.socket(), sink, NetworkUsage(3, 4, 10, 20), 1000)
    yield session, sink
    session.close()


def _opened(connection_id: str) -> dict[str, Any]:
    return {"type": "opened", "connection": {**CONNECTION, "connection_id": connection_id, "reason": ""}}


def _closed(connection_id: str) -> dict[str, Any]:
    return {"type": "closed", "connection": {**CONNECTION, "connection_id": connection_id}}


def test_bind_says_all_that_a_new_process_needs(bound: tuple[BoundSession, RecordingSink]) -> None:
    session, sink = bound
    session.take({"type": "moved", "sent_bytes": 5, "received_bytes": 6})
    message = session.bind_message()
    assert message["used"] == {"sent_bytes": 15, "received_bytes": 26}
    assert message["total_bytes"] == 1000
    assert (sink.sent_bytes, sink.received_bytes) == (5, 6)


def test_connections_that_a_process_leaves_behind_are_ended_once(bound: tuple[BoundSession, RecordingSink]) -> None:
    session, sink = bound
    for number in ("1", "2", "3"):
        session.take(_opened(number))
    session.take(_closed("2"))
    session.abandon()
    session.abandon()
    assert [(each.connection_id, each.reason) for each in sink.closed] == [
        ("2", reasons.ENDED),
        ("1", reasons.PROXY_ENDED),
        ("3", reasons.PROXY_ENDED),
    ]


def test_end_of_a_connection_that_was_not_open_is_refused(bound: tuple[BoundSession, RecordingSink]) -> None:
    session, sink = bound
    session.take(_opened("1"))
    session.take(_closed("1"))
    for message in (_closed("1"), _closed("9")):
        with pytest.raises(BadReport):
            session.take(message)
    assert len(sink.closed) == 1


def test_connection_can_not_be_opened_twice(bound: tuple[BoundSession, RecordingSink]) -> None:
    session, sink = bound
    session.take(_opened("1"))
    with pytest.raises(BadReport):
        session.take(_opened("1"))
    assert len(sink.opened) == 1


def test_no_more_connections_are_remembered_than_rules_may_allow(bound: tuple[BoundSession, RecordingSink]) -> None:
    session, sink = bound
    with pytest.raises(BadReport, match="more connections"):
        for number in range(10_000):
            session.take(_opened(str(number)))
    assert len(sink.opened) < 100


@pytest.mark.parametrize(
    "message",
    [
        {"type": "moved", "sent_bytes": -1, "received_bytes": 0},
        {"type": "moved", "sent_bytes": 1},
        {"type": "uncounted", "count": "many"},
        {"type": "denied"},
        {"type": "something"},
    ],
    ids=repr,
)
def test_report_that_is_wrong_changes_nothing(
    bound: tuple[BoundSession, RecordingSink], message: dict[str, Any]
) -> None:
    session, sink = bound
    with pytest.raises(BadReport):
        session.take(message)
    assert sink.reports == []
    assert session.bind_message()["used"] == {"sent_bytes": 10, "received_bytes": 20}


def test_later_binding_keeps_the_connections_of_the_earlier_one(bound: tuple[BoundSession, RecordingSink]) -> None:
    session, sink = bound
    session.take(_opened("1"))
    later_sink = RecordingSink()
    later = BoundSession("s", RULES, socket.socket(), later_sink, NetworkUsage(), None)
    later.follow(session)
    assert sink.closed == []
    later.take(_closed("1"))
    assert later_sink.closed[0].connection_id == "1"
    later.close()
