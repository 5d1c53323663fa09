"""A wait is reported: by a clock that the tests hold, and by the timers of both clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from executor_client import Progress, Wait, WaitKind
from executor_client._aio.timer import AsyncTimer
from executor_client._core.limits import WAIT_REASON_CHARS_MAX, WAIT_REPORTED_AFTER_S, WAIT_REPORTED_EVERY_S
from executor_client._core.waiting import NO_WAITS, Awaited, Waits, WaitTimer
from executor_client._sync.timer import Timer
from tests.support.polling import eventually, eventually_async

DAEMON = Awaited(WaitKind.DAEMON, "the daemon")
IMAGE = Awaited(WaitKind.IMAGE, "the image")
TOOLS = [Awaited(WaitKind.TOOL, f"the tool {n}") for n in range(3)]


class HandTimer(WaitTimer):
    """Reports when the test lets time pass."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.reported: list[Wait] = []
        self._watch: Waits | None = None

    def schedule(self, watch: Waits) -> None:
        self._watch = watch

    def close(self) -> None:
        self._watch = None

    def pass_time(self, seconds: float, step_s: float = 0.25) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            if self._watch is not None and self._watch.due_s is not None and self._watch.due_s <= self.now_s:
                self._watch.report(self.reported.append)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> HandTimer:
    made = HandTimer()
    monkeypatch.setattr("executor_client._core.waiting.time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


def test_wait_is_told_after_a_moment_then_less_and_less_often_but_for_ever(timer: HandTimer) -> None:
    with Waits(timer) as watch:
        watch.begin("a", DAEMON, reason="away", gives_up_after_s=60)
        timer.pass_time(WAIT_REPORTED_AFTER_S - 0.25)
        assert timer.reported == []
        timer.pass_time(80)
    assert [wait.waited_s for wait in timer.reported] == [1, 3, 7, 15, 30, 45, 60, 75]
    assert timer.reported[0] == Wait(WaitKind.DAEMON, "the daemon", "away", 1, 60)
    assert WAIT_REPORTED_EVERY_S == 15


def test_nothing_is_told_of_a_wait_that_is_over(timer: HandTimer) -> None:
    with Waits(timer) as watch:
        watch.begin("a", DAEMON)
        watch.begin("b", IMAGE)
        watch.over("a", "never begun")
        timer.pass_time(1.5)
        assert [wait.kind for wait in timer.reported] == [WaitKind.IMAGE]
    timer.pass_time(60)
    assert len(timer.reported) == 1 and watch.due_s is None


def test_wait_that_is_begun_again_goes_on_with_what_is_new(timer: HandTimer) -> None:
    with Waits(timer) as watch:
        for percent in range(0, 50, 10):
            watch.begin("a", IMAGE, reason=f"{percent} %")
            timer.pass_time(1)
    assert [(wait.waited_s, wait.reason) for wait in timer.reported] == [(1, "0 %"), (3, "20 %")]


def test_each_change_of_progress_is_told_at_once_after_the_first_moment(timer: HandTimer) -> None:
    steps = [Progress("installing", done, 23, "packages") for done in (0, 0, 5, 17)]
    with Waits(timer) as watch:
        for progress in steps:
            watch.begin("a", Awaited(WaitKind.IMAGE, "the environment", progress), reason=str(progress))
            timer.pass_time(0.5)
    assert [(wait.waited_s, wait.progress) for wait in timer.reported] == [
        (1.0, steps[1]),
        (1.25, steps[2]),
        (1.75, steps[3]),
    ]
    assert str(timer.reported[-1]) == "waiting for the environment: installing, 17 of 23 packages (2 s)"


def test_wait_of_another_kind_begins_anew(timer: HandTimer) -> None:
    with Waits(timer) as watch:
        watch.begin("trouble", DAEMON)
        timer.pass_time(2)
        watch.begin("trouble", IMAGE)
        timer.pass_time(1)
    assert [(wait.kind, wait.waited_s) for wait in timer.reported] == [(WaitKind.DAEMON, 1), (WaitKind.IMAGE, 1)]


def test_wait_that_may_be_over_is_not_told_until_it_is_known(timer: HandTimer) -> None:
    with Waits(timer) as watch:
        watch.begin("a", DAEMON)
        watch.hold("a")
        timer.pass_time(10)
        assert timer.reported == []
        watch.begin("a", DAEMON)
        timer.pass_time(0.25)
    assert [wait.waited_s for wait in timer.reported] == [10.25]


def test_of_many_waits_of_a_kind_the_oldest_is_told(timer: HandTimer) -> None:
    with Waits(timer) as watch:
        for number, tool in enumerate(TOOLS):
            watch.begin(f"tool {number}", tool)
        timer.pass_time(2)
        watch.over("tool 0")
        timer.pass_time(2)
    assert [wait.what for wait in timer.reported] == ["the tool 0", "the tool 1"]


def test_reason_without_end_is_cut(timer: HandTimer) -> None:
    with Waits(timer) as watch:
        watch.begin("a", DAEMON, reason="x" * 10_000)
        timer.pass_time(1)
    assert len(timer.reported[0].reason) == WAIT_REASON_CHARS_MAX


def test_nobody_who_wants_to_be_told_costs_nothing() -> None:
    with NO_WAITS as watch:
        watch.begin("a", DAEMON)
        watch.hold("a")
        watch.over("a")
        assert watch.due_s is None


# ---------------------------------------------------------------------------------------------------------------------
# The timers


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_client._core.waiting.WAIT_REPORTED_AFTER_S", 0.01)


@pytest.mark.usefixtures("impatient")
def test_end_of_a_wait_waits_for_the_hook() -> None:
    """Else a line about the wait could come after what it was waited for."""
    called, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def on_wait(wait: Wait) -> None:
        called.set()
        assert go_on.wait(10)

    timer = Timer(on_wait)
    watch = Waits(timer)
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
    timer.close()


@pytest.mark.usefixtures("impatient")
def test_hook_may_close_the_timer() -> None:
    closed = threading.Event()

    def on_wait(wait: Wait) -> None:
        reporting.close()
        closed.set()

    reporting = Timer(on_wait)
    with Waits(reporting) as watch:
        watch.begin("a", DAEMON)
        assert closed.wait(10)
        watch.begin("b", IMAGE)
    assert eventually(lambda: not any(thread.name == "executor-waits" for thread in threading.enumerate()))


def test_call_goes_on_where_no_thread_is_to_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reported: list[Wait] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    timer = Timer(reported.append)
    with Waits(timer) as watch:
        watch.begin("a", DAEMON)
    timer.close()
    assert reported == [] and "no thread can be started" in caplog.text


@pytest.mark.usefixtures("impatient")
async def test_loop_reports_until_it_is_closed() -> None:
    reported: list[Wait] = []
    timer = AsyncTimer(reported.append)
    with Waits(timer) as watch:
        watch.begin("a", DAEMON)
        assert await eventually_async(lambda: reported)
        timer.close()
        watch.begin("b", IMAGE)
        await asyncio.sleep(0)
    assert {wait.kind for wait in reported} == {WaitKind.DAEMON}


@pytest.mark.parametrize("make", [Timer, AsyncTimer])
async def test_watches_of_many_calls_are_told_apart(make: Callable[..., WaitTimer], impatient: None) -> None:
    reported: list[Wait] = []
    timer = make(reported.append)
    watches = [Waits(timer) for _ in TOOLS]
    for watch, tool in zip(watches, TOOLS, strict=True):
        watch.begin("a", tool)
    assert await eventually_async(lambda: {wait.what for wait in reported} == {tool.what for tool in TOOLS})
    for watch in watches:
        watch.over("a")
    timer.close()
