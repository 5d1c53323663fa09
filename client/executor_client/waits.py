"""The reports that `on_wait` gets while a call waits."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from executor_client._core.short_repr import ShortRepr


class WaitKind(enum.Enum):
    """The object of a wait."""

    DAEMON = "daemon"
    """The daemon cannot be reached, or stopped answering."""
    ROOM = "room"
    """The daemon is busy, or a quota is full, and it named a time to retry."""
    IMAGE = "image"
    """The daemon is fetching the image, or making the environment of the packages, or will."""
    SANDBOX = "sandbox"
    """The daemon is making the session."""
    SESSION = "session"
    """The session answers after the executions ahead of this call."""
    TURN = "turn"
    """Executions ahead of this one."""
    TOOL = "tool"
    """A host tool is running in this process."""


@dataclass(frozen=True)
class Progress(ShortRepr):
    """The progress of something that the daemon makes.

    `step` and `unit` are texts for people that a daemon sent: "installing", "packages". `done` of `total` are complete;
    0 for a total that is not known.
    """

    step: str
    done: int = 0
    total: int = 0
    unit: str = ""

    def __str__(self) -> str:
        """Returns "installing, 17 of 23 packages"."""
        return f"{self.step}, {self.done:,} of {self.total:,} {self.unit}".rstrip() if self.total else self.step


@dataclass(frozen=True)
class Wait(ShortRepr):
    """A wait that is not over yet, as far as the client knows.

    `what` and `reason` are texts for people. They may contain text of a daemon or a program, control characters
    included. `reason` is "" if there is none.
    """

    kind: WaitKind
    what: str
    reason: str
    waited_s: float
    gives_up_after_s: float | None
    """Seconds from the start of the wait to its timeout; None if the client has none for it."""
    progress: Progress | None = None
    """The progress of what is waited for, as far as the daemon says; each change of it is reported at once."""

    def __str__(self) -> str:
        """One line: "waiting for the daemon at host:port: not reachable, 12 s, gives up after 60 s"."""
        why = f": {self.reason}" if self.reason else ""
        end = f", gives up after {self.gives_up_after_s:.0f} s" if self.gives_up_after_s is not None else ""
        return " ".join(f"waiting for {self.what}{why}, {self.waited_s:.0f} s{end}".splitlines())


OnWait = Callable[[Wait], None]
