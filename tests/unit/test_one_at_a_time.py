"""Work in a thread that callers order and leave."""

from __future__ import annotations

import asyncio
import threading

from executor_server.api.one_at_a_time import OneAtATime


async def test_callers_that_leave_have_no_more_threads_than_others() -> None:
    turns, running, highest = OneAtATime(), 0, 0
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        begun.release()
        go_on.acquire()
        running -= 1

    first = asyncio.create_task(turns.run("a", work))
    await asyncio.to_thread(begun.acquire)
    others = [asyncio.create_task(turns.run("a", work)) for _ in range(4)]
    first.cancel()
    await asyncio.wait([first], timeout=0.05)
    assert running == 1
    go_on.release(5)
    await asyncio.gather(first, *others, return_exceptions=True)
    assert (running, highest) == (0, 1)
    assert first.cancelled()
