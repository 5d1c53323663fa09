"""The directories below the one of all environments. All are on one file system: things move between them by rename."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class _Entry:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, places: Places, _: type[Places]) -> Path:
        return places.root / self._name


@dataclass(frozen=True)
class Places:
    """Only the daemon's user can enter the root, so no other user of the host reaches any of them by a path.

    Inside a sandbox one of them is a mount of its own, which the sandbox's user can enter by its own mode.
    """

    root: Path

    ready = _Entry("ready")
    """The environments, each complete, checked and never changed."""
    staging = _Entry("staging")
    """Directories that are being made or removed. A start of the daemon empties it."""
    damaged = _Entry("damaged")
    """Environments that did not fit their manifest while a sandbox had them; each is removed after the last one."""
    work = _Entry("work")
    """The writable directory of workshops: uv's cache, and packages being installed, so that both are in one mount."""
    programs = _Entry("programs")
    """The programs of workshops, read-only there."""
    holds = _Entry("holds")
    """A file for each sandbox that has an environment."""
    index = _Entry("index.db")
    """The requests with the locks that answer them, and the last uses."""

    @property
    def cache(self) -> Path:
        """The cache of uv, in the mount of workshops."""
        return self.work / "cache"
