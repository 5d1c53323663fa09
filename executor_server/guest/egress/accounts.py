"""The accounts of a session: its bytes, its new connections in a minute, and its work in a turn of the loop."""

from __future__ import annotations

import asyncio
import time
import types
from collections import deque
from math import inf
from typing import Any, Callable, Coroutine, Deque, Generator, Optional, Set, TypeVar

from . import reasons
from .endpoint import CHUNK_BYTES
from .host_rules import Rules
from .protocols import Limits, Reporter, Used
from .refusals import Ended

_MINUTE_S = 60.0
_TURN_S = 0.002
# More than one process can make; it bounds the size of a minute's count.
_FASTEST_PER_S = 2000.0
_NO_BOUND = inf

T = TypeVar("T")


class ByteAccount:
    """Counts the bytes of a session, says how many more it may move, and reports them in batches.

    There are two bounds. At the maximum of its rules a session's connections end. At its window, they wait, and nothing
    is read. The window is a share of the tenant's bytes, and is raised while some are left.
    """

    def __init__(self, session_id: str, reporter: Reporter, rules: Rules, used: Used, limits: Limits) -> None:
        self._session_id = session_id
        self._reporter = reporter
        self._limits = limits
        self._sent, self._received = used
        self._unreported_sent = 0
        self._unreported_received = 0
        self._timer: Optional[asyncio.TimerHandle] = None
        self._bound = _NO_BOUND
        self._report_at = _NO_BOUND  # the total at which a report does not wait for the timer
        self._waiting: Set[Callable[[], None]] = set()
        self.set_rules(rules)

    def set_rules(self, rules: Rules) -> None:
        self._max_sent = rules.max_sent_bytes
        self._max_received = rules.max_received_bytes

    def set_used(self, used: Used) -> None:
        self._sent, self._received = used
        self._plan_report()

    def allow(self, total_bytes: Optional[int]) -> None:
        """Sets the window, a bound for the sum of both directions. None: no bound."""
        self._bound = _NO_BOUND if total_bytes is None else total_bytes
        self._plan_report()
        if self._window() > 0:
            waiting, self._waiting = self._waiting, set()
            for callback in waiting:
                callback()

    def _plan_report(self) -> None:
        """Plans a report at half of the window, so that it can be raised in time, and at its end."""
        self._report_at = _NO_BOUND
        if self._bound != _NO_BOUND:
            self._report_at = self._sent + self._received + max(1, self._window() / 2)

    def _window(self) -> float:
        return self._bound - self._sent - self._received

    def send_room(self) -> int:
        if self._sent >= self._max_sent:
            raise Ended(reasons.SENT_BYTES)
        return int(max(0, min(self._max_sent - self._sent, self._window(), CHUNK_BYTES)))

    def receive_room(self) -> int:
        if self._received >= self._max_received:
            raise Ended(reasons.RECEIVED_BYTES)
        return int(max(0, min(self._max_received - self._received, self._window(), CHUNK_BYTES)))

    def call_when_open(self, callback: Callable[[], None]) -> None:
        self._waiting.add(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        self._waiting.discard(callback)

    def count_sent(self, count: int) -> None:
        self._sent += count
        self._unreported_sent += count
        self._plan_or_report()

    def count_received(self, count: int) -> None:
        self._received += count
        self._unreported_received += count
        self._plan_or_report()

    def _plan_or_report(self) -> None:
        if self._sent + self._received >= self._report_at:
            self._report_at = self._bound if self._window() > 0 else _NO_BOUND
            self.report()
        elif self._unreported_sent + self._unreported_received >= self._limits.report_bytes:
            self.report()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.report_s, self.report)

    def report(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        sent, received = self._unreported_sent, self._unreported_received
        if sent or received:
            self._unreported_sent = self._unreported_received = 0
            self._reporter.moved(self._session_id, sent, received)


class WorkShare:
    """Bounds the time of one session's work in each turn of the loop.

    One session may have hundreds of coroutines with something to do in each turn: a chunk of one byte costs as much as
    one of 64 KiB, and so do a header and a tiny record. Once the session's work has taken _TURN_S, the rest waits for
    the loop's next turns, one coroutine after the other. Alone, the session loses no speed by that.
    A single piece of work that takes longer is followed by a pause of its length.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._spent_s = 0.0
        self._turn: Optional[asyncio.Handle] = None  # ends the pause
        self._waiting: "Deque[asyncio.Future[None]]" = deque()

    @property
    def is_spent(self) -> bool:
        return self._spent_s >= _TURN_S

    def charge(self, since: float) -> None:
        """Counts the time from `since` on, by `time.perf_counter`."""
        self._spent_s += time.perf_counter() - since
        if not self.is_spent:
            self._wake_next()
        elif self._turn is None:
            self._turn = self._loop.call_soon(self._end_turn)

    def create_task(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Runs a coroutine as the session's work, in a task. Tasks created by it call this themselves."""
        task = self._loop.create_task(self._whole(work))
        task.add_done_callback(lambda _: work.close())  # one that was cancelled before it began has not awaited it
        return task

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._run(work)

    @types.coroutine
    def _run(self, work: Coroutine[Any, Any, T]) -> Generator[Any, None, T]:
        step: Callable[[Any], Any] = work.send
        argument: Optional[BaseException] = None
        while True:
            if self.is_spent or self._waiting:
                turn = self._loop.create_future()
                self._waiting.append(turn)
                try:
                    yield from turn
                except BaseException as error:  # noqa: BLE001 - a cancellation, which is meant for the work
                    step, argument = work.throw, error
            since = time.perf_counter()
            try:
                awaited = step(argument)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            finally:
                self.charge(since)
            try:
                yield awaited
                step, argument = work.send, None
            except BaseException as error:  # noqa: BLE001 - as above
                step, argument = work.throw, error

    def _end_turn(self) -> None:
        over_s, self._spent_s = self._spent_s - 2 * _TURN_S, 0.0
        if over_s > 0:
            self._spent_s = _TURN_S
            self._turn = self._loop.call_later(over_s, self._end_turn)
            return
        self._turn = None
        self._wake_next()

    def _wake_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


class Room:
    """The room for connections of all sessions, which share the descriptors of the process.

    Half of the room goes to those that come first. The other half is divided equally, so that a greedy session leaves
    every other session its share. An eighth of the descriptors is kept for the rest of the process: it has to end if it
    lacks one to receive a listener.
    """

    def __init__(self, descriptors: int) -> None:
        self._descriptors = descriptors
        self.sessions = 0
        self.taken = 0

    def has_place(self, own: int) -> bool:
        """True when a session that has `own` connections may have one more."""
        half = max(0, self._descriptors * 7 // 8 - self.sessions) // 2 // 2  # two for each connection
        return self.taken < half or own < max(1, half // max(1, self.sessions))


class MinuteCount:
    """Counts events of the last sixty seconds, up to a limit."""

    def __init__(self) -> None:
        self._times: Deque[float] = deque()

    def take(self, now: float, limit: int) -> bool:
        """Counts an event. False, and counts nothing, if `limit` were counted in the last minute; it keeps no more."""
        while self._times and self._times[0] <= now - _MINUTE_S:
            self._times.popleft()
        if len(self._times) >= limit:
            return False
        self._times.append(now)
        return True


class Bucket:
    """A bucket of permits, which fills by itself: `per_s` each second, up to `burst`."""

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._permits = burst
        self._filled_at = now

    def widen(self, new_connections_per_minute: int) -> None:
        """Raises the pace to twice what the policy grants, so that many granted connections are not slowed down."""
        self._per_s = max(self._per_s, min(_FASTEST_PER_S, 2 * new_connections_per_minute / _MINUTE_S))
        more = max(0.0, min(_FASTEST_PER_S, new_connections_per_minute) - self._burst)
        self._burst += more
        self._permits += more

    def wait_s(self, now: float) -> float:
        """Returns the seconds to wait for the next permit; 0 if there is one."""
        self._permits = min(self._burst, self._permits + (now - self._filled_at) * self._per_s)
        self._filled_at = now
        return max(0.0, (1 - self._permits) / self._per_s)

    def take(self) -> None:
        self._permits -= 1
