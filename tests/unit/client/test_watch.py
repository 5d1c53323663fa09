"""When a wait is told: by a clock that the tests hold, and by the bells of both clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from executor_client import Wait, WaitKind
from executor_client._limits import WAIT_REASON_CHARS_MAX, WAIT_TOLD_AFTER_S, WAIT_TOLD_EVERY_S
from executor_client._watch import NO_WATCH, Awaited, Bell, LoopBell, ThreadBell, Watch
from tests.support.polling import eventually, eventually_async

DAEMON = Awaited(WaitKind.DAEMON, "the daemon")
IMAGE = Awaited(WaitKind.IMAGE, "the image")
TOOLS = [Awaited(WaitKind.TOOL, f"the tool {n}") for n in range(3)]


class HandBell(Bell):
    """Rings when the test lets time pass."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.told: list[Wait] = []
        self._watch: Watch | None = None

    def schedule(self, watch: Watch) -> None:
        self._watch = watch

    def close(self) -> None:
        self._watch = None

    def pass_time(self, seconds: float, step_s: float = 0.25) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            if self._watch is not None and self._watch.due_s is not None and self._watch.due_s <= self.now_s:
                self._watch.tell(self.told.append)


@pytest.fixture
def bell(monkeypatch: pytest.MonkeyPatch) -> HandBell:
    made = HandBell()
    monkeypatch.setattr("executor_client._watch.time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


def test_wait_is_told_after_a_moment_then_less_and_less_often_but_for_ever(bell: HandBell) -> None:
    with Watch(bell) as watch:
        watch.begin("a", DAEMON, reason="away", gives_up_after_s=60)
        bell.pass_time(WAIT_TOLD_AFTER_S - 0.25)
        assert bell.told == []
        bell.pass_time(80)
    assert [wait.waited_s for wait in bell.told] == [1, 3, 7, 15, 30, 45, 60, 75]
    assert bell.told[0] == Wait(WaitKind.DAEMON, "the daemon", "away", 1, 60)
    assert WAIT_TOLD_EVERY_S == 15


def test_nothing_is_told_of_a_wait_that_is_over(bell: HandBell) -> None:
    with Watch(bell) as watch:
        watch.begin("a", DAEMON)
        watch.begin("b", IMAGE)
        watch.over("a", "never begun")
        bell.pass_time(1.5)
        assert [wait.kind for wait in bell.told] == [WaitKind.IMAGE]
    bell.pass_time(60)
    assert len(bell.told) == 1 and watch.due_s is None


def test_wait_that_is_begun_again_goes_on_with_what_is_new(bell: HandBell) -> None:
    with Watch(bell) as watch:
        for percent in range(0, 50, 10):
            watch.begin("a", IMAGE, reason=f"{percent} %")
            bell.pass_time(1)
    assert [(wait.waited_s, wait.reason) for wait in bell.told] == [(1, "0 %"), (3, "20 %")]


def test_wait_of_another_kind_begins_anew(bell: HandBell) -> None:
    with Watch(bell) as watch:
        watch.begin("trouble", DAEMON)
        bell.pass_time(2)
        watch.begin("trouble", IMAGE)
        bell.pass_time(1)
    assert [(wait.kind, wait.waited_s) for wait in bell.told] == [(WaitKind.DAEMON, 1), (WaitKind.IMAGE, 1)]


def test_wait_that_may_be_over_is_not_told_until_it_is_known(bell: HandBell) -> None:
    with Watch(bell) as watch:
        watch.begin("a", DAEMON)
        watch.hold("a")
        bell.pass_time(10)
        assert bell.told == []
        watch.begin("a", DAEMON)
        bell.pass_time(0.25)
    assert [wait.waited_s for wait in bell.told] == [10.25]


def test_of_many_waits_of_a_kind_the_oldest_is_told(bell: HandBell) -> None:
    with Watch(bell) as watch:
        for number, tool in enumerate(TOOLS):
            watch.begin(f"tool {number}", tool)
        bell.pass_time(2)
        watch.over("tool 0")
        bell.pass_time(2)
    assert [wait.what for wait in bell.told] == ["the tool 0", "the tool 1"]


def test_reason_without_end_is_cut(bell: HandBell) -> None:
    with Watch(bell) as watch:
        watch.begin("a", DAEMON, reason="x" * 10_000)
        bell.pass_time(1)
    assert len(bell.told[0].reason) == WAIT_REASON_CHARS_MAX


def test_nobody_who_wants_to_be_told_costs_nothing() -> None:
    with NO_WATCH as watch:
        watch.begin("a", DAEMON)
        watch.hold("a")
        watch.over("a")
        assert watch.due_s is None


# ---------------------------------------------------------------------------------------------------------------------
# The bells


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_client._watch.WAIT_TOLD_AFTER_S", 0.01)


@pytest.mark.usefixtures("impatient")
def test_end_of_a_wait_waits_for_the_hook() -> None:
    """Else a line about the wait could come after what it was waited for."""
    called, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def on_wait(wait: Wait) -> None:
        called.set()
        assert go_on.wait(10)

    bell = ThreadBell(on_wait)
    watch = Watch(bell)
    watch.begin("a", DAEMON)
    assert called.wait(10)

    def end() -> None:
        watch.over("a")
        ended.set()

    ender = threading.Thread(target=end)
    ender.start()
    assert not ended.is_set()
    go_on.set()
    ender.join()
    bell.close()


@pytest.mark.usefixtures("impatient")
def test_hook_may_close_the_bell() -> None:
    closed = threading.Event()

    def on_wait(wait: Wait) -> None:
        ringing.close()
        closed.set()

    ringing = ThreadBell(on_wait)
    with Watch(ringing) as watch:
        watch.begin("a", DAEMON)
        assert closed.wait(10)
        watch.begin("b", IMAGE)
    assert eventually(lambda: not any(thread.name == "executor-waits" for thread in threading.enumerate()))


def test_call_goes_on_where_no_thread_is_to_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told: list[Wait] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    bell = ThreadBell(told.append)
    with Watch(bell) as watch:
        watch.begin("a", DAEMON)
    bell.close()
    assert told == [] and "no thread can be started" in caplog.text


@pytest.mark.usefixtures("impatient")
async def test_loop_rings_until_it_is_closed() -> None:
    told: list[Wait] = []
    bell = LoopBell(told.append)
    with Watch(bell) as watch:
        watch.begin("a", DAEMON)
        assert await eventually_async(lambda: told)
        bell.close()
        watch.begin("b", IMAGE)
        await asyncio.sleep(0)
    assert {wait.kind for wait in told} == {WaitKind.DAEMON}


@pytest.mark.parametrize("make", [ThreadBell, LoopBell])
async def test_watches_of_many_calls_are_told_apart(make: Callable[..., Bell], impatient: None) -> None:
    told: list[Wait] = []
    bell = make(told.append)
    watches = [Watch(bell) for _ in TOOLS]
    for watch, tool in zip(watches, TOOLS, strict=True):
        watch.begin("a", tool)
    assert await eventually_async(lambda: {wait.what for wait in told} == {tool.what for tool in TOOLS})
    for watch in watches:
        watch.over("a")
    bell.close()
