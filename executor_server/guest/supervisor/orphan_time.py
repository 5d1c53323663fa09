"""The time after which a sandbox without a daemon ends itself, and the pauses that do not count.

The race: a sandbox can be frozen as a whole (a suspended laptop, a paused container or cloud machine) while its clock
goes on. When it thaws, its last word from the daemon seems to be hours old, although the daemon could not reach it. So
a turn of the loop that took far longer than it could have is taken for a thaw, and the daemon gets its whole time
again.

The attack: a program that can hold the supervisor up (it uses all processors) could look like a freeze again and again,
and keep a sandbox alive that no daemon knows. So the time starts again only once until the daemon is heard.

The other race: this process can be late by less than that, with the daemon's word in its socket. So it reads what is
there before it ends.

A sandbox that was made ahead belongs to no session yet, and no later daemon wants it. So it ends at once when the
socket is closed over which the daemon that made it will say who has it.
"""

from __future__ import annotations

from ..wire.loop import READ, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from ..wire.guest_channel import Channel
    from ..wire.lean import socket

# Bytes of a number.
_WORD_BYTES = 32

# Seconds by which a turn of the loop is late when the sandbox was frozen; a loaded machine delays it by less.
FROZEN_TIME_S = 5.0


class OrphanTime:
    """Watches when the daemon was heard last; a living one sends a ping far more often than every `limit_s`."""

    def __init__(self, channel: Channel, loop: Loop, limit_s: float) -> None:
        self._channel = channel
        self._loop = loop
        self._thawed_at = 0.0
        self._dropped = False
        self.limit_s = limit_s

    def await_session(self, word: socket.socket, on_memory: Callable[[int], None]) -> None:
        """Waits for the bytes of memory that the session will have which takes this sandbox."""

        def on_word(_events: int) -> None:
            data = word.recv(_WORD_BYTES)
            if data:
                on_memory(int(data))
            self._dropped = not data
            self._loop.watch(word.fileno(), 0, None)
            word.close()

        self._loop.watch(word.fileno(), READ, on_word)

    @property
    def ends_at(self) -> float:
        return 0.0 if self._dropped else self._channel.last_heard + self.limit_s

    def is_over(self, now: float) -> bool:
        """True when the daemon was not heard for so long, what waits to be read included."""
        if now >= self.ends_at:
            self._loop.turn(0.0)
        return now >= self.ends_at

    def note_turn(self, due: float, now: float) -> None:
        """A turn of the loop has ended that was due to end at the time `due`."""
        if now - due > FROZEN_TIME_S and self._channel.last_heard > self._thawed_at:
            self._thawed_at = self._channel.last_heard = now
