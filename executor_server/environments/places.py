"""The directories below the one of all environments. All are on one file system: things move between them by rename."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# The names in uv's cache. uv unpacks a wheel into a directory that it renames when that is complete.
_UNPACKING = ".tmp"
_ARCHIVES = "archive-v"


def is_unpacking(name: str) -> bool:
    """True for a directory of the cache into which a wheel is being unpacked; a killed uv leaves it."""
    return name.startswith(_UNPACKING)


def has_archives(name: str) -> bool:
    """True for a directory of the cache with unpacked wheels, each a directory; uv has one for each form of these."""
    return name.startswith(_ARCHIVES)


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

    def unfinished(self) -> list[Path]:
        """Returns what is in the mount of workshops and is not the cache, and half-unpacked wheels. Raises OSError."""
        found = [path for path in self.work.iterdir() if path != self.cache]
        return found + [path for path in _listed(self.cache) if is_unpacking(path.name)]

    def archives(self) -> list[Path]:
        """Returns the unpacked wheels, those first that were unpacked first: uv does not touch them when it links.

        Raises OSError.
        """
        folders = (path for path in _listed(self.cache) if has_archives(path.name) and path.is_dir())
        return sorted((path for folder in folders for path in folder.iterdir()), key=lambda path: path.lstat().st_mtime)


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:  # nothing was made yet
        return []
