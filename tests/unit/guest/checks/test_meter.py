from __future__ import annotations

import pickle
import sys
import threading
from itertools import islice
from operator import length_hint
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.guest.checks.meter import FIRST_CHUNK_OPERATIONS, Meter, OperationLimitExceeded


@given(st.integers(0, 8 * FIRST_CHUNK_OPERATIONS))
def test_budget_allows_exactly_its_number_of_ticks(budget: int) -> None:
    meter = Meter()
    meter.start(budget)
    assert sum(islice(meter.ticks, budget)) == meter.used() == budget
    assert not meter.exceeded
    with pytest.raises(OperationLimitExceeded, match=f"max number of operations of {budget}"):
        meter.tick()
    assert meter.exceeded
    assert meter.finish() == budget


def test_each_tick_after_the_limit_raises() -> None:
    meter = Meter()
    meter.start(1)
    meter.tick()
    for _ in range(5):
        with pytest.raises(OperationLimitExceeded):
            next(meter.ticks)
    assert meter.used() == 1


def test_ticks_between_executions_are_free() -> None:
    meter = Meter()
    assert all(islice(meter.ticks, 10))
    meter.start(3)
    assert meter.used() == 0
    meter.tick()
    meter.finish()
    assert all(islice(meter.ticks, 10))
    assert meter.used() == 1


def test_stopped_meter_raises_at_each_tick_and_keeps_its_count() -> None:
    meter = Meter()
    meter.start(100)
    meter.tick()
    meter.stop(lambda: KeyError("stopped"))
    for _ in range(3):
        with pytest.raises(KeyError, match="stopped"):
            meter.tick()
    assert meter.finish() == 1


@given(st.integers(1, 8 * FIRST_CHUNK_OPERATIONS), st.data())
def test_ticks_that_call_are_ticks_and_call_once(budget: int, data: st.DataObject) -> None:
    numbers = data.draw(st.sets(st.integers(1, budget), max_size=3))
    meter = Meter()
    called: list[int] = []
    meter.start(budget, dict.fromkeys(numbers, lambda: called.append(meter.used())))
    assert sum(islice(meter.ticks, budget)) == meter.used() == budget
    assert called == sorted(numbers)
    with pytest.raises(OperationLimitExceeded):
        meter.tick()


def test_an_exception_of_a_call_goes_to_the_program_and_costs_no_tick() -> None:
    meter = Meter()

    def fail() -> None:
        raise KeyError("told")

    meter.start(5, {3: fail})
    assert [meter.tick(), meter.tick()] == [True, True]
    with pytest.raises(KeyError, match="told"):
        meter.tick()
    assert meter.used() == 3
    assert [meter.tick(), meter.tick()] == [True, True]
    with pytest.raises(OperationLimitExceeded):
        meter.tick()


def test_a_call_that_was_not_reached_is_never_made() -> None:
    meter = Meter()
    called: list[object] = []
    meter.start(10, {2: lambda: called.append(1)})
    meter.tick()
    meter.finish()
    meter.start(10)
    assert [meter.tick() for _ in range(10)] == [True] * 10
    assert called == []


def test_threads_that_tick_during_a_call_lose_no_ticks() -> None:
    """A segment that ends itself in Python ends for two threads at once; the second end then hits the next one."""
    meter = Meter()
    inside, go_on = threading.Event(), threading.Event()

    def call() -> None:
        inside.set()
        go_on.wait(10)

    meter.start(100, {10: call})
    thread = threading.Thread(target=lambda: [meter.tick() for _ in range(10)])
    thread.start()
    assert inside.wait(10)
    assert [meter.tick() for _ in range(90)] == [True] * 90
    go_on.set()
    thread.join()
    assert meter.used() == 100
    with pytest.raises(OperationLimitExceeded):
        meter.tick()


def test_the_session_s_budget_is_named_when_it_ends_a_run() -> None:
    meter = Meter()
    meter.start(0, of_session=500)
    with pytest.raises(OperationLimitExceeded, match="the session, session_operations = 500, of which 0 were left"):
        meter.tick()


def test_largest_budget_is_accepted() -> None:
    meter = Meter()
    meter.start(2**64 - 1)
    meter.tick()
    assert meter.finish() == 1


def test_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="not negative"):
        Meter().start(-1)


def test_background_thread_cannot_end_the_counting() -> None:
    """`itertools.chain` drops its source for good when that raises once; then nothing would be counted any more."""
    meter = Meter()
    done = threading.Event()
    failures: list[BaseException] = []

    def tick_on() -> None:
        while not done.is_set():
            try:
                meter.tick()
            except OperationLimitExceeded:
                continue
            except BaseException as error:  # noqa: BLE001 (any exception fails the test)
                failures.append(error)
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=tick_on)
    thread.start()
    try:
        for _ in range(300):
            meter.start(50)
            meter.finish()
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert failures == []
    meter.start(5)
    with pytest.raises(OperationLimitExceeded):
        for _ in range(6):
            meter.tick()


def test_pickled_ticks_are_free_ticks() -> None:
    meter = Meter()
    meter.start(1)
    elsewhere = pickle.loads(pickle.dumps(meter.ticks))
    assert all(islice(elsewhere, 10))
    assert meter.finish() == 0


def test_a_recursion_limit_in_the_middle_of_a_tick_does_not_end_the_counting() -> None:
    """Getting the next chunk once called a function, which fails there; `chain` then gave StopIteration for ever."""
    meter = Meter()
    meter.start(100_000)

    def deep() -> None:
        try:
            deep()
        except RecursionError:
            for _ in range(3000):
                meter.tick()

    deep()
    assert meter.used() == 3000
    meter.start(5)
    assert [meter.tick() for _ in range(5)] == [True] * 5
    with pytest.raises(OperationLimitExceeded):
        meter.tick()


def test_a_thread_that_ticks_while_a_budget_ends_does_not_drain_all_of_it() -> None:
    """The thread would go from chunk to chunk as they end; draining 10**12 operations took minutes."""
    budget = 10**8
    meter = Meter()
    meter.start(budget)
    meter.tick()
    chunks = list(meter._chunks)

    def tick_at_each_line(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_name == "_enter":
            meter.tick()
        return tick_at_each_line

    sys.settrace(tick_at_each_line)
    try:
        meter.finish()
    finally:
        sys.settrace(None)
    assert sum(length_hint(chunk.left) for chunk in chunks) > budget // 2
    meter.start(3)
    assert sum(islice(meter.ticks, 3)) == meter.finish() == 3


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 8000), st.booleans()), max_size=8))
def test_executions_with_the_same_budget_each_have_all_of_it(executions: list[tuple[int, int, bool]]) -> None:
    budget = 8 * FIRST_CHUNK_OPERATIONS
    meter = Meter()
    for ticks, number, leaves in executions:
        called: list[int] = []
        meter.start(budget, {number: lambda called=called: called.append(meter.used())})  # type: ignore[misc]
        granted = sum(1 for _ in islice(meter.ticks, min(ticks, budget)))
        assert meter.used() == granted == min(ticks, budget)
        assert called == ([number] if number <= granted else [])
        if ticks > budget:
            with pytest.raises(OperationLimitExceeded):
                meter.tick()
        if leaves:
            assert meter.finish() == granted
