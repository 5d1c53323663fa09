"""The supervisor's event loop: one epoll, one handler for each descriptor."""

from __future__ import annotations

import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

    Handler = Callable[[int], None]
    """Takes the events of the descriptor."""

READ = select.EPOLLIN
WRITE = select.EPOLLOUT


class Loop:
    """Waits for descriptors and calls their handlers."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._handlers: dict[int, tuple[int, Handler]] = {}
        self.first = -1  # the descriptor whose events are handled before simultaneous events of others
        self._last: set[int] = set()  # descriptors whose events are handled after all others

    def watch(self, fd: int, events: int, handler: Optional[Handler], *, last: bool = False) -> None:
        """Calls the handler for these events; without a handler, forgets the descriptor.

        `last`: after the handlers of simultaneous events, which may forget this one.
        """
        known = self._handlers.get(fd)
        if handler is None:
            if known is not None:
                del self._handlers[fd]
                self._last.discard(fd)
                self._poll.unregister(fd)
            return
        self._handlers[fd] = (events, handler)
        if last:
            self._last.add(fd)
        if known is None:
            self._poll.register(fd, events)
        elif known[0] != events:
            self._poll.modify(fd, events)

    def turn(self, timeout_s: float) -> bool:
        """Waits for events, at most `timeout_s`, and handles them; returns true if there were any."""
        ready = self._poll.poll(timeout_s)
        if len(ready) > 1:
            ready.sort(key=self._place)
        for fd, events in ready:
            # An earlier handler of this turn may have forgotten it.
            entry = self._handlers.get(fd)
            if entry is not None:
                entry[1](events)
        return bool(ready)

    def _place(self, event: tuple[int, int]) -> int:
        return 0 if event[0] == self.first else 2 if event[0] in self._last else 1

    def close(self) -> None:
        self._poll.close()
