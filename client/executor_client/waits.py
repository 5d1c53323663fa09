"""The reports that `on_wait` receives while a call waits."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from executor_client._core.short_repr import ShortRepr


class WaitKind(enum.Enum):
    """What a call waits for."""

    DAEMON = "daemon"
    """The daemon can't be reached, or stopped answering."""
    ROOM = "room"
    """The daemon is busy or a quota is used up, and the daemon named a time to retry."""
    IMAGE = "image"
    """The daemon is fetching the image or building the package environment."""
    APPROVAL = "approval"
    """A person decides whether the session may have a package or an import (docs/approvals.md)."""
    SANDBOX = "sandbox"
    """The daemon is creating the session."""
    SESSION = "session"
    """The session first finishes earlier executions."""
    TURN = "turn"
    """The execution waits for earlier ones."""
    TOOL = "tool"
    """A host tool is running in this process."""


@dataclass(frozen=True)
class Progress(ShortRepr):
    """The progress of an image or environment in the daemon.

    `step` and `unit` are the daemon's texts for people: "installing", "packages". `done` of `total` are complete;
    `total` is 0 if it is unknown.
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
    """A wait that has not ended yet, as far as the client knows. `waited_s` is its duration so far in seconds.

    `what` and `reason` are texts for people. They may contain text from a daemon or a program, including control
    characters. `reason` may be empty.
    """

    kind: WaitKind
    what: str
    reason: str
    waited_s: float
    gives_up_after_s: float | None
    """Seconds from the start of the wait to its timeout; None without a timeout."""
    progress: Progress | None = None
    """The progress, if the daemon reports it; each change is reported at once."""

    def __str__(self) -> str:
        """One line: "waiting for the daemon at host:port: not reachable (12 s, timeout 60 s)"."""
        why = f": {self.reason}" if self.reason else ""
        end = f", timeout {self.gives_up_after_s:.0f} s" if self.gives_up_after_s is not None else ""
        return " ".join(f"waiting for {self.what}{why} ({self.waited_s:.0f} s{end})".splitlines())


OnWait = Callable[[Wait], None]
