"""The control protocol: lines in both directions, commands that are answered, and refusals at a bounded pace."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.guest.egress import control_protocol as control
from executor_server.guest.egress import reasons
from executor_server.guest.egress.control_protocol import (
    DENIALS_BURST,
    MAX_COMMAND_BYTES,
    ControlError,
    ControlServer,
    LineReader,
    Message,
    encode,
)
from executor_server.guest.egress.host_names import Target
from executor_server.guest.egress.host_rules import Rules
from executor_server.guest.egress.protocols import Used
from executor_server.guest.egress.proxy import Proxy

DENIAL = {"host": "x.example", "port": 443, "reason": reasons.NOT_ALLOWED, "message": "no", "address": ""}
RULES = {"allowed": ["a.example"]}
_CLOCK = "executor_server.guest.egress.control_protocol.time.monotonic"


# ----------------------------------------------------------------------------------------------------------------------
# Lines


@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text())), st.integers(1, 50))
def test_messages_are_the_same_however_the_bytes_are_cut(values: list[dict[str, Any]], piece: int) -> None:
    messages = [{**each, "type": "t"} for each in values]
    data = b"".join(encode(message) for message in messages)
    reader = LineReader(MAX_COMMAND_BYTES)
    found = [message for at in range(0, len(data), piece) for message in reader.feed(data[at : at + piece])]
    assert found == messages


@given(st.text())
def test_message_is_one_line_of_ascii_whatever_it_says(text: str) -> None:
    line = encode({"type": "t", "text": text})
    assert line.isascii()
    assert line.splitlines() == [line[:-1]]


@pytest.mark.parametrize(
    "line",
    [b"not json", b"[]", b'"type"', b"{}", b'{"type": 3}', b"\xff", b"1e999", b"[" * 5000, b'{"type": "t"'],
)
def test_line_that_is_no_message_is_refused_without_its_text(line: bytes) -> None:
    with pytest.raises(ControlError) as caught:
        list(LineReader(10_000).feed(line + b"\n"))
    assert line.decode("latin-1") not in str(caught.value)


def test_line_without_end_is_refused_as_soon_as_it_is_too_long() -> None:
    reader = LineReader(100)
    assert list(reader.feed(b"x" * 100)) == []
    with pytest.raises(ControlError, match="longer than 100 bytes"):
        list(reader.feed(b"x"))


def test_messages_before_one_that_is_wrong_are_read() -> None:
    found = []
    with pytest.raises(ControlError):
        for message in LineReader(100).feed(encode({"type": "a"}) + encode({"type": "b"}) + b"nonsense\n"):
            found.append(message["type"])
    assert found == ["a", "b"]


# ----------------------------------------------------------------------------------------------------------------------
# Commands


class NotedProxy:
    """Takes the server's calls. The real one is tried over sockets (tests/integration)."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ending = asyncio.Event()
        self.refuses: Exception | None = None

    def serve(self, session_id: str, listener: socket.socket, rules: Rules, *, used: Used) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.calls.append(("serve", session_id, [each.text for each in rules.allowed], used))
        listener.close()

    def change(self, session_id: str, rules: Rules) -> None:
        self.calls.append(("change", session_id, [each.text for each in rules.allowed]))

    def allow(self, session_id: str, total_bytes: int | None) -> None:
        self.calls.append(("allow", session_id, total_bytes))

    def set_exhausted(self, session_id: str, reason: str | None) -> None:
        self.calls.append(("set_exhausted", session_id, reason))

    def report(self, session_id: str) -> None:
        self.calls.append(("report", session_id))

    def end(self, session_id: str) -> Awaitable[object]:
        self.calls.append(("end", session_id))
        return self.ending.wait()


class Ends:
    """A server, its proxy, and what it has sent."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.backlog_bytes = 0
        self.proxy = NotedProxy()
        self.server = ControlServer(self.lines.append, lambda: self.backlog_bytes)
        self.server.drive(cast(Proxy, self.proxy))

    @property
    def sent(self) -> list[Message]:
        return [json.loads(line) for line in self.lines]

    def of_type(self, kind: str) -> list[Message]:
        return [message for message in self.sent if message["type"] == kind]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as sock:
        yield sock


def _bind(**more: Any) -> Message:
    used = {"sent_bytes": 1, "received_bytes": 2}
    return {"type": "bind", "number": 7, "session": "s", "rules": RULES, "used": used, "total_bytes": 9, **more}


async def test_bind_serves_the_listener_with_rules_use_and_bound(listener: socket.socket) -> None:
    ends = Ends()
    ends.server.handle(_bind(), listener)
    assert ends.proxy.calls == [("serve", "s", ["a.example"], Used(1, 2)), ("allow", "s", 9)]
    assert ends.sent == [{"type": "done", "number": 7}]


@pytest.mark.parametrize(
    "change",
    [{"rules": {"allowed": ["*"]}}, {"rules": {"unknown": 1}}, {"rules": None}, {"used": {}}, {"used": None}],
    ids=repr,
)
async def test_bind_that_can_not_be_served_fails_and_closes_its_listener(
    change: Message, listener: socket.socket
) -> None:
    ends = Ends()
    ends.server.handle(_bind(**change), listener)
    assert [message["type"] for message in ends.sent] == ["failed"]
    assert ends.sent[0]["number"] == 7
    assert listener.fileno() == -1
    assert ends.proxy.calls == []


async def test_listener_that_the_system_refuses_fails_its_bind(listener: socket.socket) -> None:
    ends = Ends()
    ends.proxy.refuses = OSError(9, "Bad file descriptor")
    ends.server.handle(_bind(), listener)
    assert "Bad file descriptor" in ends.sent[0]["message"]


async def test_commands_reach_the_proxy() -> None:
    ends = Ends()
    ends.server.handle({"type": "change", "session": "s", "rules": {"allowed": ["b.example"]}})
    ends.server.handle({"type": "allow", "session": "s", "total_bytes": None})
    ends.server.handle({"type": "exhaust", "session": "s", "reason": reasons.TENANT_QUOTA})
    assert ends.proxy.calls == [
        ("change", "s", ["b.example"]),
        ("allow", "s", None),
        ("set_exhausted", "s", reasons.TENANT_QUOTA),
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"type": "unknown"},
        {"type": "bind"},  # without a listener
        {"type": "change", "session": "s"},
        {"type": "change", "session": "s", "rules": {"allowed": 3}},
        {"type": "settle", "session": "s"},
        {"type": "end", "session": "s", "number": "x"},
    ],
    ids=repr,
)
async def test_command_that_is_wrong_breaks_the_protocol(message: Message) -> None:
    with pytest.raises(ControlError):
        Ends().server.handle(message)


async def test_descriptor_with_another_command_is_closed(listener: socket.socket) -> None:
    with pytest.raises(ControlError, match="takes none"):
        Ends().server.handle({"type": "allow", "session": "s", "total_bytes": 1}, listener)
    assert listener.fileno() == -1


async def test_settle_is_answered_after_the_reports_that_it_asks_for() -> None:
    ends = Ends()
    ends.server.handle({"type": "settle", "session": "s", "number": 4})
    assert ends.proxy.calls == [("report", "s")]
    ends.server.handle({"type": "settle", "session": "", "number": 5})
    assert ends.sent == [{"type": "done", "number": 4}, {"type": "done", "number": 5}]


async def test_end_is_answered_when_the_session_has_ended() -> None:
    ends = Ends()
    ends.server.handle({"type": "end", "session": "s", "number": 8})
    assert ends.proxy.calls == [("end", "s")]  # before any other command
    await asyncio.sleep(0)
    assert ends.sent == []
    ends.proxy.ending.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert ends.sent == [{"type": "done", "number": 8}]


async def test_close_forgets_ends_that_are_unfinished() -> None:
    ends = Ends()
    ends.server.handle({"type": "end", "session": "s", "number": 8})
    await asyncio.sleep(0)
    await ends.server.close()
    assert len(asyncio.all_tasks()) == 1


# ----------------------------------------------------------------------------------------------------------------------
# Refusals


async def test_refusal_waits_for_its_acknowledgement() -> None:
    ends = Ends()
    reporting = asyncio.ensure_future(ends.server.denied("s", DENIAL))
    await asyncio.sleep(0)
    (sent,) = ends.sent
    assert sent == {"type": "denied", "session": "s", "denial": DENIAL, "number": sent["number"]}
    assert not reporting.done()
    ends.server.handle({"type": "ack", "number": sent["number"] + 1})  # another one's, or one that came too late
    ends.server.handle({"type": "ack", "number": sent["number"]})
    await reporting


async def test_approval_is_asked_for_and_withdrawn_when_nobody_waits() -> None:
    ends = Ends()
    given, withdrawn = (asyncio.create_task(ends.server.ask("s", Target(f"{name}.example", 443))) for name in "ab")
    await asyncio.sleep(0)
    first, second = ends.of_type("asks")
    assert first == {"type": "asks", "session": "s", "number": first["number"], "host": "a.example", "port": 443}
    ends.server.handle({"type": "ruled", "number": first["number"], "why": "no"})
    assert await given == "no"
    withdrawn.cancel()
    await asyncio.wait([withdrawn])
    assert ends.of_type("withdrawn") == [{"type": "withdrawn", "session": "s", "number": second["number"]}]
    ends.server.handle({"type": "ruled", "number": second["number"], "why": ""})  # crossed the withdrawal


async def _deny(ends: Ends, session_id: str, times: int) -> None:
    """Refusals, each acknowledged at once."""
    for _ in range(times):
        before = len(ends.lines)
        reporting = asyncio.ensure_future(ends.server.denied(session_id, DENIAL))
        await asyncio.sleep(0)
        for message in ends.sent[before:]:
            ends.server.handle({"type": "ack", "number": message["number"]})
        await reporting


async def test_flood_of_refusals_is_counted_and_not_reported_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_CLOCK, lambda: 1000.0)
    ends = Ends()
    await _deny(ends, "s", int(DENIALS_BURST) + 30)
    assert len(ends.of_type("denied")) == DENIALS_BURST
    ends.server.handle({"type": "settle", "session": "s", "number": 1})
    assert [message["type"] for message in ends.sent[-2:]] == ["uncounted", "done"]
    assert ends.of_type("uncounted") == [{"type": "uncounted", "session": "s", "count": 30}]
    await ends.server.close()


async def test_flood_of_one_session_leaves_the_reports_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_CLOCK, lambda: 1000.0)
    ends = Ends()
    await _deny(ends, "flood", int(DENIALS_BURST) + 10)
    await _deny(ends, "quiet", 1)
    assert ends.of_type("denied")[-1]["session"] == "quiet"
    await ends.server.close()


async def test_reader_that_is_behind_gets_a_count_once_it_has_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_COUNT_S", 0.001)
    ends = Ends()
    ends.backlog_bytes = control.BEHIND_BYTES + 1
    await _deny(ends, "s", 3)
    assert ends.sent == []
    ends.backlog_bytes = 0
    async with asyncio.timeout(20):
        while not ends.sent:  # noqa: ASYNC110 - the end that sends is a plain list
            await asyncio.sleep(0.001)
    assert ends.sent == [{"type": "uncounted", "session": "s", "count": 3}]


async def test_end_of_a_session_reports_what_was_only_counted() -> None:
    ends = Ends()
    ends.backlog_bytes = control.BEHIND_BYTES + 1
    await _deny(ends, "s", 2)
    ends.proxy.ending.set()
    ends.server.handle({"type": "end", "session": "s", "number": 8})
    for _ in range(5):
        await asyncio.sleep(0)
    assert ends.sent == [{"type": "uncounted", "session": "s", "count": 2}, {"type": "done", "number": 8}]
    await ends.server.close()
