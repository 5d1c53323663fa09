"""Detects silent guests, and holds back the reading from a guest.

A quiet guest is pinged. If it does not answer in time, it counts as dead, or over an unreliable network its connection
counts as broken. While a buffer for its frames is full (a journal, an answer to a request), reading stops. Silence
proves nothing then, since the answer would be unread in the socket. Pings are still sent, because a guest without a
message for its orphan time ends its sandbox.
"""

from __future__ import annotations

import time

from executor_server.backends.channel import GuestChannel
from executor_server.sessions.connection import GuestConnection


class GuestLiveness:
    """Pings the guest of one session, and holds back the reading from it."""

    def __init__(
        self, channel: GuestChannel, connection: GuestConnection, ping_interval_s: float, silence_s: float
    ) -> None:
        self._channel = channel
        self._connection = connection
        self._ping_interval_s = ping_interval_s
        self._silence_s = silence_s
        self._pinged_s = 0.0
        self._holders: set[object] = set()

    @property
    def reading_held(self) -> bool:
        return bool(self._holders)

    def hold_reading(self, holder: object, held: bool) -> None:
        """Stops reading while any holder is full, and resumes when none is."""
        if held:
            self._holders.add(holder)
            self._channel.reading.pause()
        else:
            self._holders.discard(holder)
            if not self._holders:
                self._pinged_s = 0.0  # answers to earlier pings have not been read
                self._channel.reading.resume()

    @property
    def due_s(self) -> float:
        """The monotonic time of the next `check`, while reading is not held."""
        heard_s = self._channel.last_heard_s
        if self._pinged_s <= heard_s:
            return heard_s + self._ping_interval_s
        silence_s = self._connection.silence_max_s(self._ping_interval_s, self._silence_s)
        return self._pinged_s + min(self._ping_interval_s, silence_s)

    def check(self) -> str | None:
        """Pings the guest when a ping is due. Returns the reason why a silent guest is lost, else None."""
        now = time.monotonic()
        heard_s = self._channel.last_heard_s
        if self._holders:
            if now - self._pinged_s > self._ping_interval_s:
                self._pinged_s = now
                self._channel.ping()
            return None
        silence_s = self._connection.silence_max_s(self._ping_interval_s, self._silence_s)
        if self._pinged_s > heard_s and now - self._pinged_s > silence_s:
            reason = f"the guest has not answered for {silence_s:g} s"
            return None if self._connection.renew_if_it_can_break(reason) else reason
        if now - max(heard_s, self._pinged_s) > self._ping_interval_s:
            if self._pinged_s <= heard_s:  # silence counts from the first unanswered ping
                self._pinged_s = now
            self._channel.ping()
        return None
