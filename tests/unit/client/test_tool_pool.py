"""The threads of the blocking client's host tools."""

from __future__ import annotations

import threading

import pytest

from executor_client._sync.tool_calls import ToolPool
from tests.support.polling import eventually

TIMEOUT_S = 10.0


def pool_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "executor-tool"]


def ran_in(pool: ToolPool) -> threading.Thread:
    """Returns the thread that a call of this pool ran in."""
    ran: list[threading.Thread] = []
    done = threading.Event()

    def work() -> None:
        ran.append(threading.current_thread())
        done.set()

    pool.submit(work)
    assert done.wait(TIMEOUT_S)
    return ran[0]


def test_calls_one_after_the_other_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_client._sync.tool_calls.TOOL_THREAD_REST_S", TIMEOUT_S)
    pool = ToolPool(max_concurrent_tools=4)
    first = ran_in(pool)
    assert eventually(lambda: pool._resting == 1)
    assert ran_in(pool) is first
    pool.close()
    assert not pool_threads()


def test_calls_at_the_same_time_run_side_by_side_up_to_the_limit_also_after_a_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("executor_client._sync.tool_calls.TOOL_THREAD_REST_S", TIMEOUT_S)
    pool, meet, ran = ToolPool(max_concurrent_tools=2), threading.Barrier(2), threading.Semaphore(0)
    ran_in(pool)
    assert eventually(lambda: pool._resting == 1)

    def work() -> None:
        meet.wait(TIMEOUT_S)
        ran.release()

    for _ in range(4):
        pool.submit(work)
    assert all(ran.acquire(timeout=TIMEOUT_S) for _ in range(4))
    pool.close()
    assert not pool_threads()


def test_a_thread_that_has_rested_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_client._sync.tool_calls.TOOL_THREAD_REST_S", 0.001)
    pool = ToolPool(max_concurrent_tools=1)
    thread = ran_in(pool)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert ran_in(pool) is not thread
    pool.close()
