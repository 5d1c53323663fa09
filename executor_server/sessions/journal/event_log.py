"""A bounded log of numbered events, which any number of readers can read from any position.

Executions and processes share it: numbers start at 1, readers wait for the next event, and the memory is counted for
the tenant (memory.py). Subclasses decide in `trim` which events may be dropped, and who must wait when none may.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from itertools import islice
from typing import Generic, Protocol, TypeVar

from executor_server.core import OutOfRange, Reason
from executor_server.sessions.journal.memory import TenantMemory, unlimited

EVENT_OVERHEAD_BYTES = 256


class NumberedEvent(Protocol):
    """An event with its number."""

    @property
    def number(self) -> int: ...


E = TypeVar("E", bound=NumberedEvent)


class Reader:
    """One reader: the number of its last event, and the cost of all events up to it."""

    def __init__(self, position: int, taken_bytes: int) -> None:
        self.position = position
        self.taken_bytes = taken_bytes
        self.wakeup: asyncio.Future[None] | None = None


class EventLog(Generic[E]):
    """Events of one execution or process. Everything happens in the event loop."""

    def __init__(self, memory: TenantMemory | None) -> None:
        self.done = False
        self.last_number = 0
        self.journal_size = 0
        self._memory = memory or unlimited()
        self._journal: deque[E] = deque()
        self._costs: deque[int] = deque()  # parallel to `_journal`
        self._total_bytes = 0  # cost of all events, dropped ones included
        self._readers: set[Reader] = set()
        self._finished = asyncio.Event()

    def trim(self) -> None:
        """Drops events that need not be kept; decides whether the guest must wait."""
        raise NotImplementedError

    # -- writing -------------------------------------------------------------------------------------------------

    def _append(self, event: E, size_bytes: int) -> None:
        """Adds the event with the next number, and wakes the readers."""
        self.last_number = event.number
        self._journal.append(event)
        self._costs.append(0)
        self._add_cost(EVENT_OVERHEAD_BYTES + size_bytes)
        for reader in self._readers:
            if reader.wakeup is not None and not reader.wakeup.done():
                reader.wakeup.set_result(None)

    def _finish(self) -> None:
        """Notes that the last event is the terminal one."""
        self.done = True
        self._finished.set()

    def _add_cost(self, size_bytes: int) -> None:
        """Adds to the cost of the last event."""
        self._costs[-1] += size_bytes
        self.journal_size += size_bytes
        self._total_bytes += size_bytes
        self._memory.charge(size_bytes)

    def _drop_first(self) -> None:
        self._journal.popleft()
        cost = self._costs.popleft()
        self.journal_size -= cost
        self._memory.charge(-cost)

    @property
    def _taken(self) -> int:
        """Number of the last event that all readers have; 0 without readers."""
        return min((reader.position for reader in self._readers), default=0)

    def drop_read(self) -> None:
        """Drops all events but the last, unless a reader follows them."""
        while len(self._journal) > 1 and not self._readers:
            self._drop_first()

    def leave(self) -> None:
        """Stops charging the tenant for this log, which is dropped; remaining readers are not charged either."""
        self._memory.leave(self, self.journal_size)
        self._memory = unlimited()

    # -- reading -------------------------------------------------------------------------------------------------

    async def events(self, after: int = 0, gap: E | None = None) -> AsyncGenerator[E]:
        """Yields the events after a number, up to the terminal one. Raises OutOfRange if they are not kept.

        A reader has taken an event when it asks for the next one. `gap` comes first, and stands for dropped events:
        while it is sent, the reader counts, so the events after it are kept.
        """
        self._require_held(after)
        lacking = self.last_number - after
        reader = Reader(after, self._total_bytes - sum(islice(reversed(self._costs), lacking)))
        self._readers.add(reader)
        self.trim()  # the journal may be full of events that this reader has
        try:
            if gap is not None:
                yield gap
            while not (self.done and reader.position == self.last_number):
                if reader.position == self.last_number:
                    reader.wakeup = asyncio.get_running_loop().create_future()
                    await reader.wakeup
                event = self._journal[reader.position + 1 - self.first_number]
                yield event
                reader.taken_bytes += self._costs[event.number - self.first_number]
                reader.position = event.number
                self.trim()
            self._memory.note_read(self)
        finally:
            self._readers.discard(reader)
            self._on_reader_left()

    def part_after(self, after: int, max_events: int, max_bytes: int) -> tuple[int, list[E]]:
        """Returns how many events after a number were dropped, and the next ones; the last may pass `max_bytes`.

        The caller doesn't count as a reader: nothing is kept or held back for it. Raises OutOfRange if there is no
        event `after` yet.
        """
        if after > self.last_number:
            raise self._out_of_range()
        start = max(after + 1, self.first_number) - self.first_number
        events: list[E] = []
        size_bytes = 0
        while start + len(events) < len(self._journal) and len(events) < max_events and size_bytes < max_bytes:
            size_bytes += self._costs[start + len(events)]
            events.append(self._journal[start + len(events)])
        return start + self.first_number - after - 1, events

    def _require_held(self, after: int) -> None:
        if after > self.last_number or (after < self.last_number and after + 1 < self.first_number):
            raise self._out_of_range()

    def _out_of_range(self) -> OutOfRange:
        held = f"the journal holds events {self.first_number} to {self.last_number}"
        return OutOfRange(Reason.EVENT_OUT_OF_RANGE, held)

    def _on_reader_left(self) -> None:
        """Called when a reader has stopped reading."""

    @property
    def first_number(self) -> int:
        """Number of the first event that is kept; of the next event if none is."""
        return self._journal[0].number if self._journal else self.last_number + 1

    async def wait(self) -> None:
        """Waits for the terminal event."""
        await self._finished.wait()

    @property
    def followed(self) -> bool:
        """True while a client reads its events."""
        return bool(self._readers)
