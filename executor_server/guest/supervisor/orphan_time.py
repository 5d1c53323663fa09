"""Ends a sandbox that has had no daemon for a time. Pauses of the whole sandbox do not count.

The race: a sandbox can be frozen as a whole (a suspended laptop, a paused container or cloud machine) while its clock
goes on. After the thaw the daemon's last message seems to be hours old, although the daemon could not reach the
sandbox. So a turn of the loop that ended far later than it should have counts as a thaw, and the daemon gets the whole
time again.

The attack: a program that uses all processors can delay the supervisor, which looks like a freeze, and so keep alive a
sandbox that no daemon knows. So the time starts again only once until the next message from the daemon.

The other race: this process can be late by less than FROZEN_TIME_S while a message from the daemon waits in the socket.
So it reads the socket before it ends the sandbox.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..wire.guest_channel import Channel
    from ..wire.loop import Loop

# Seconds by which a turn of the loop must be late to count as a thaw. A loaded machine delays it by less.
FROZEN_TIME_S = 5.0


class OrphanTime:
    """Watches the time of the daemon's last message. A live daemon sends pings far more often than every `limit_s`."""

    def __init__(self, channel: Channel, loop: Loop, limit_s: float) -> None:
        self._channel = channel
        self._loop = loop
        self._thawed_at = 0.0
        self.limit_s = limit_s

    @property
    def ends_at(self) -> float:
        return self._channel.last_heard + self.limit_s

    def is_over(self, now: float) -> bool:
        """True if nothing arrived from the daemon within the limit, counting unread data."""
        if now >= self.ends_at:
            self._loop.turn(0.0)
        return now >= self.ends_at

    def note_turn(self, due: float, now: float) -> None:
        """Notes that a turn of the loop ended at `now`; it should have ended at `due`."""
        if now - due > FROZEN_TIME_S and self._channel.last_heard > self._thawed_at:
            self._thawed_at = self._channel.last_heard = now
