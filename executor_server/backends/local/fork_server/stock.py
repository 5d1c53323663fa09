"""Sandboxes that a fork server makes ahead of the sessions that will have them: walled, checked, with their
interpreter.

A session that wants such a sandbox with another memory gets it too, since that can be set from outside; all else of a
sandbox's shape is as it was made. Each is given to one session, and never comes back.

The stock is filled after a session got its sandbox, so that many that come at once find what there is and are made for
the rest; and it empties by itself when none comes for a while. It is of shapes that were asked for more than once: for
each such session at least one more is made, in the place of the oldest if need be.

This module does not know how a sandbox is made, nor what a shape is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from executor_server.backends.local.fork_server.packets import now
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.core import SandboxFailure

# Sandboxes of a fork server that wait at one time, and shapes that are known to have been asked for.
_MAX_KEPT, _MAX_SHAPES = 3, 16
# Seconds after a session got its sandbox until others are made: its own beginning and first execution go first.
_PAUSE_S = 0.05
# Seconds that one waits for a session, if its supervisor does not end it before, after its orphan time.
_KEPT_S = 60.0

Make = Callable[[], Awaitable[LocalSandbox]]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Kept:
    shape: str
    sandbox: LocalSandbox
    until_s: float

    @property
    def is_good(self) -> bool:
        return self.sandbox.process is not None and not self.sandbox.process.has_ended()


class Stock:
    """Owns its sandboxes until they are taken."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()  # the oldest first
        self._asked: tuple[str, Make] | None = None  # since the stock was last filled
        self._shapes: deque[str] = deque(maxlen=_MAX_SHAPES)  # shapes that sessions had
        self._changed = asyncio.Event()
        self._filling: asyncio.Task[None] | None = None
        self._ends: set[asyncio.Task[None]] = set()
        self._dropped = False

    def take(self, shape: str) -> LocalSandbox | None:
        """Returns one of this shape that lives; it is the caller's then."""
        for kept in [each for each in self._kept if each.shape == shape]:
            self._kept.remove(kept)
            if kept.is_good:
                return kept.sandbox
            self._end(kept)
        return None

    def fill(self, shape: str, make: Make) -> None:
        """Has others of this shape made soon, if a session gets one again. `make` raises SandboxFailure."""
        if shape not in self._shapes:
            self._shapes.append(shape)
            return
        if self._dropped:
            return
        self._asked = shape, make
        self._changed.set()
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self._keep())

    def empty(self) -> None:
        """Ends all that wait: what they have is needed elsewhere."""
        while self._kept:
            self._end(self._kept.popleft())
        self._changed.set()

    def drop(self) -> None:
        """Ends all, and makes no more; what is just being made is ended, too. Idempotent."""
        self._dropped, self._asked = True, None
        self.empty()

    async def ended(self) -> None:
        """Waits until nothing is being made or ended any more; after `drop`."""
        if self._filling is not None:
            await asyncio.wait([self._filling])
        await asyncio.gather(*self._ends, return_exceptions=True)

    async def _keep(self) -> None:
        """Fills the stock when it is asked to, and ends what waits too long; until there is nothing left."""
        while self._asked is not None or self._kept:
            if self._asked is not None:
                await asyncio.sleep(_PAUSE_S)
                asked, self._asked = self._asked, None
                if asked is not None:
                    await self._fill(*asked)
            self._changed.clear()
            while self._kept and self._kept[0].until_s <= now():
                self._end(self._kept.popleft())
            if self._kept and self._asked is None:
                try:
                    async with asyncio.timeout_at(self._kept[0].until_s):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    async def _fill(self, shape: str, make: Make) -> None:
        while True:
            try:
                sandbox = await make()
            except SandboxFailure as failure:  # something is scarce, or the fork server has ended
                _log.debug("nothing_made_ahead", reason=str(failure))
                self.empty()
                return
            self._kept.append(_Kept(shape, sandbox, now() + _KEPT_S))
            if self._dropped:
                self.empty()
                return
            if len(self._kept) > _MAX_KEPT:
                self._end(self._kept.popleft())
            if len(self._kept) == _MAX_KEPT:
                return

    def _end(self, kept: _Kept) -> None:
        ending = asyncio.create_task(_destroy(kept.sandbox))
        self._ends.add(ending)
        ending.add_done_callback(self._ends.discard)


async def _destroy(sandbox: LocalSandbox) -> None:
    try:
        await sandbox.destroy()
    except SandboxFailure as failure:
        _log.error("sandbox_not_destroyed", sandbox_id=sandbox.sandbox_id, error=str(failure))
