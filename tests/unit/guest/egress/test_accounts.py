"""Accounts of a session: bytes up to a maximum and up to a window, reports in batches, connections by the minute."""

from __future__ import annotations

from typing import Any

import pytest

from executor_server.guest.egress import reasons
from executor_server.guest.egress.accounts import Bucket, ByteAccount, MinuteCount
from executor_server.guest.egress.endpoint import CHUNK_BYTES
from executor_server.guest.egress.host_names import Target
from executor_server.guest.egress.host_rules import Rules
from executor_server.guest.egress.protocols import Limits, Used
from executor_server.guest.egress.refusals import Ended


class Reports:
    def __init__(self) -> None:
        self.moved_bytes: list[tuple[int, int]] = []

    def opened(self, session_id: str, connection: dict[str, Any]) -> None: ...

    def closed(self, session_id: str, connection: dict[str, Any]) -> None: ...

    async def denied(self, session_id: str, denial: dict[str, Any]) -> None: ...

    async def ask(self, session_id: str, target: Target) -> str:
        raise AssertionError("an account asks for nothing")

    def misused(self, session_id: str) -> None: ...

    def moved(self, session_id: str, sent_bytes: int, received_bytes: int) -> None:
        assert session_id == "s"
        self.moved_bytes.append((sent_bytes, received_bytes))


def _account(rules: Rules, used: Used = Used()) -> tuple[ByteAccount, Reports]:  # noqa: B008
    reports = Reports()
    return ByteAccount("s", reports, rules, used, Limits(report_s=3600)), reports


async def test_room_is_what_is_left_of_each_direction_and_at_most_a_chunk() -> None:
    account, _ = _account(Rules(max_sent_bytes=100, max_received_bytes=10 * CHUNK_BYTES), Used(40, 0))
    assert (account.send_room(), account.receive_room()) == (60, CHUNK_BYTES)
    account.count_sent(60)
    with pytest.raises(Ended) as ended:
        account.send_room()
    assert ended.value.reason == reasons.SENT_BYTES
    account.count_received(10 * CHUNK_BYTES)
    with pytest.raises(Ended) as ended:
        account.receive_room()
    assert ended.value.reason == reasons.RECEIVED_BYTES
    account.set_rules(Rules(max_sent_bytes=101, max_received_bytes=11 * CHUNK_BYTES))
    assert (account.send_room(), account.receive_room()) == (1, CHUNK_BYTES)


async def test_bytes_are_reported_once_there_are_many_without_a_wait() -> None:
    """A proxy that is killed takes with it what was not reported, and a fast connection moves much in a moment."""
    account, reports = _account(Rules())
    many = Limits().report_bytes
    account.count_sent(many - 10)
    assert reports.moved_bytes == []
    account.count_received(10)
    assert reports.moved_bytes == [(many - 10, 10)]
    account.count_received(many - 1)
    assert len(reports.moved_bytes) == 1
    account.report()
    assert reports.moved_bytes[1:] == [(0, many - 1)]


async def test_window_bounds_both_directions_together_and_opens_for_those_who_wait() -> None:
    account, reports = _account(Rules(), Used(100, 100))
    account.allow(1200)
    opened = []
    account.count_sent(400)
    account.count_received(600)
    assert (account.send_room(), account.receive_room()) == (0, 0)
    account.call_when_open(opened_once := lambda: opened.append("a"))
    account.call_when_open(opened_once)
    account.call_when_open(forgotten := lambda: opened.append("b"))
    account.forget(forgotten)
    account.allow(1200)
    assert opened == []
    account.allow(1210)
    assert opened == ["a"]
    assert account.send_room() == 10
    account.allow(None)
    assert account.send_room() == CHUNK_BYTES
    assert reports.moved_bytes == [(400, 600)]


async def test_half_of_the_window_and_its_end_are_reported_at_once() -> None:
    account, reports = _account(Rules())
    account.allow(1000)
    account.count_received(499)
    assert reports.moved_bytes == []
    account.count_received(1)
    assert reports.moved_bytes == [(0, 500)]
    account.count_received(499)
    assert len(reports.moved_bytes) == 1
    account.count_sent(1)
    assert reports.moved_bytes == [(0, 500), (1, 499)]
    account.allow(3000)
    account.count_sent(1000)
    assert reports.moved_bytes[2:] == [(1000, 0)]
    account.report()
    assert len(reports.moved_bytes) == 3, "nothing was left to report"


def test_no_minute_has_more_than_its_limit() -> None:
    minute = MinuteCount()
    assert [minute.take(float(now), 3) for now in (0, 10, 20, 30, 59.9)] == [True, True, True, False, False]
    assert [minute.take(float(now), 3) for now in (60, 65, 70, 80, 81)] == [True, False, True, True, False]


def test_accepting_is_paced_behind_a_burst_and_faster_for_those_who_may_connect_more() -> None:
    pace = Bucket(per_s=10, burst=2, now=0)

    def takes(now: float) -> bool:
        wait_s = pace.wait_s(now)
        if not wait_s:
            pace.take()
        return not wait_s

    assert [takes(0), takes(0), takes(0)] == [True, True, False]
    assert pace.wait_s(0) == pytest.approx(0.1)
    assert takes(0.1)
    pace.widen(6000)  # a minute: 100 a second, and twice that
    assert sum(takes(0.1) for _ in range(5000)) == 1998  # the largest burst there is, without the first two
    assert pace.wait_s(0.1) == pytest.approx(0.005)
