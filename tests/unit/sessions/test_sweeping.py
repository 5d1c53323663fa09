"""Sweeping looks at a few sessions at a time, acts on what is still so at its end, and writes what has changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest

from executor_server.sessions.journal import SessionUse
from executor_server.sessions.sweeping import Sweeper, UseNotes
from tests.support.polling import eventually_async


class Network:
    def unwritten(self) -> None:
        return None


class Life:
    def __init__(self) -> None:
        self.look_at_s = 0.0


class FakeSession:
    """A session as the sweeper knows it."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.expired = False
        self.looks = 0
        self.use = SessionUse(session_id, 100.0, 1, 0, 0)
        self.network = Network()
        self.life = Life()

    def check_guest(self) -> None:
        self.looks += 1

    def look(self) -> bool:
        self.looks += 1
        return self.expired


class FakeRegistry:
    def __init__(self) -> None:
        self.noted: list[list[str]] = []
        self.works = True

    def note_use(self, used: Sequence[SessionUse]) -> bool:
        self.noted.append([use.session_id for use in used])
        return self.works


class Swept:
    """A sweeper of so many sessions."""

    def __init__(self, count: int) -> None:
        self.all = [FakeSession(f"s{number}") for number in range(count)]
        self.sessions = {("t", session.session_id): session for session in self.all}
        self.set_up = [FakeSession("new")]
        self.ended: list[list[str]] = []
        self.registry = FakeRegistry()
        self.notes = UseNotes(cast("Any", self.registry), interval_s=-1.0)
        self.sweeper = Sweeper(0.0, cast("Any", self.sessions), cast("Any", self.set_up), self.notes, self._end)

    def _end(self, expired: Sequence[Any]) -> None:
        self.ended.append([session.session_id for session in expired])


async def test_a_call_waits_for_a_few_sessions_and_not_for_all() -> None:
    swept = Swept(1000)
    looks: list[int] = []
    sweeping_all = asyncio.create_task(swept.sweeper.sweep())
    while not sweeping_all.done():
        looks.append(sum(session.looks for session in swept.all))
        await asyncio.sleep(0)
    assert max(after - before for before, after in pairwise(looks)) <= 20
    assert [session.looks for session in (*swept.all, *swept.set_up)] == [1] * 1001


async def test_nothing_is_done_for_a_session_at_rest() -> None:
    swept = Swept(3)
    at_rest, used, due = swept.all
    at_rest.life.look_at_s, due.life.look_at_s = time.monotonic() + 3600.0, time.monotonic() - 0.001
    await swept.sweeper.sweep()
    assert [session.looks for session in (at_rest, used, due)] == [0, 1, 1]


async def test_looks_are_spread_over_the_round() -> None:
    swept = Swept(16)
    began_s = time.monotonic()
    sweeping_all = asyncio.create_task(swept.sweeper.sweep(spread_s=0.16))
    await asyncio.sleep(0)
    assert sum(session.looks for session in swept.all) == 1
    await sweeping_all
    assert time.monotonic() - began_s >= 0.15
    assert [session.looks for session in swept.all] == [1] * 16


async def test_what_changes_while_others_are_looked_at_counts() -> None:
    swept = Swept(48)
    first, last, used, over = swept.all[0], swept.all[-1], swept.all[1], swept.all[2]
    first.expired = used.expired = over.expired = True
    round_of_all = asyncio.create_task(swept.sweeper.sweep())
    await asyncio.sleep(0)
    assert (first.looks, last.looks) == (1, 0)
    del swept.sessions["t", first.session_id], swept.sessions["t", last.session_id]
    used.expired = False
    await round_of_all
    assert (last.looks, swept.ended) == (0, [[over.session_id]])


async def test_a_round_that_breaks_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    swept = Swept(1)
    monkeypatch.setattr(swept.all[0], "look", lambda: 1 / 0)
    swept.sweeper.start()
    try:
        assert await eventually_async(lambda: swept.set_up[0].looks > 2)
    finally:
        await swept.sweeper.close()


def test_only_uses_that_have_changed_are_written_again() -> None:
    swept = Swept(3)
    everything: Any = swept.all
    first, second, third = swept.all

    def written() -> list[str]:
        for session in everything:
            swept.notes.note(session)
        swept.notes.write(everything)
        return swept.registry.noted[-1]

    assert written() == ["s0", "s1", "s2"]
    assert written() == []
    first.use = SessionUse("s0", 100.0 + 0.1, 1, 0, 0)  # the same moment by a clock that was slewed
    second.use = SessionUse("s1", 107.0, 1, 0, 0)
    third.use = SessionUse("s2", 100.0, 2, 0, 0)
    swept.registry.works = False
    assert written() == ["s1", "s2"]
    swept.registry.works = True
    assert written() == ["s1", "s2"]
    assert written() == []
    first.use = SessionUse("s0", 109.0, 1, 0, 0)
    swept.notes.note(everything[0])
    del everything[0]
    assert written() == [], "of a session that has ended nothing is written"
