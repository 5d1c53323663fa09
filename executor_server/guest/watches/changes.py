"""Changes that wait to be reported: one for each path, however often it changes."""

from __future__ import annotations

from ..wire.file_changes import ChangedFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

MAX_WAITING = 4096
"""Paths with waiting changes. Beyond that all are dropped, and the next report says so."""

# By the waiting change and the new one. None: nothing is left to report.
_MERGED: dict[tuple[str, str], Optional[str]] = {
    ("created", "changed"): "created",
    ("created", "deleted"): None,
    ("deleted", "created"): "changed",
    ("deleted", "changed"): "changed",
}


class Changes:
    """The changes since the last report."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[str, bool]] = {}
        self._overflowed = False

    def __bool__(self) -> bool:
        return bool(self._waiting) or self._overflowed

    def note(self, path: str, kind: str, *, directory: bool) -> None:
        """Notes that a path was created, changed or deleted."""
        before = self._waiting.pop(path, None)
        merged = kind if before is None else _MERGED.get((before[0], kind), kind)
        if merged is None:
            return
        self._waiting[path] = merged, directory
        if len(self._waiting) > MAX_WAITING:
            self.overflow()

    def overflow(self) -> None:
        """Notes that changes were missed, and drops the waiting ones, which are incomplete."""
        self._waiting.clear()
        self._overflowed = True

    def take(self, most: int, most_chars: int) -> tuple[list[ChangedFile], bool]:
        """Removes and returns the oldest changes, and true if changes were missed before them."""
        overflowed, self._overflowed = self._overflowed, False
        taken: list[ChangedFile] = []
        for path, (kind, directory) in tuple(self._waiting.items())[:most]:
            most_chars -= len(path)
            if most_chars < 0 and taken:
                break
            taken.append(ChangedFile(path=path, kind=kind, directory=directory))
            del self._waiting[path]
        return taken, overflowed
