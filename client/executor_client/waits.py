"""What `on_wait` is told while a call waits, and for what it can wait."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class WaitKind(enum.Enum):
    """What a call waits for."""

    DAEMON = "daemon"
    """It cannot be reached, or went away."""
    ROOM = "room"
    """The daemon is busy, or a quota is full, and it said when to ask again."""
    IMAGE = "image"
    """The daemon fetches the image, or will."""
    SANDBOX = "sandbox"
    """A session is being made."""
    SESSION = "session"
    """The session's answer to something that waits for the executions ahead of it."""
    TURN = "turn"
    """Executions that were there before ours."""
    TOOL = "tool"
    """A host tool, which runs in this process."""


@dataclass(frozen=True)
class Wait:
    """A wait that is not over yet, as far as it is known on this side of the wire.

    `what` and `reason` are texts for people: they may hold what a daemon or a program said, control characters
    included. `reason` is "" where there is none.
    """

    kind: WaitKind
    what: str
    reason: str
    waited_s: float
    gives_up_after_s: float | None
    """Counted as `waited_s` is; None for a wait that this side does not end."""

    def __str__(self) -> str:
        """One line: "waiting for the daemon at host:port: not reachable, 12 s, gives up after 60 s"."""
        why = f": {self.reason}" if self.reason else ""
        end = f", gives up after {self.gives_up_after_s:.0f} s" if self.gives_up_after_s is not None else ""
        return " ".join(f"waiting for {self.what}{why}, {self.waited_s:.0f} s{end}".splitlines())


OnWait = Callable[[Wait], None]
