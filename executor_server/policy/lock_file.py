"""The lock of a profile's packages, a pylock.toml of PEP 751: read with the policy, and identified by its digest.

The policy needs to know which distributions the lock has, and that each can be installed without running its code: from
wheels with SHA-256 hashes. They are fetched from the daemon's index, whatever source the lock names.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from packaging.pylock import Package, Pylock, PylockUnsupportedVersionError, PylockValidationError

from executor_server.core.config import MIB, ConfigError, parse_toml, read_trusted

MAX_LOCK_BYTES = 4 * MIB
MAX_LOCKED = 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHOSEN = re.compile(r"\b(?:extras?|dependency_groups)\b")
LOCK_FORM = "the path of a lock file of PEP 751, such as `uv export --format pylock.toml` writes"


@dataclass(frozen=True)
class Locked:
    """A distribution of a lock."""

    name: str  # by PEP 503
    version: str  # canonical

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class LockFile:
    """A lock file as it was when it was read."""

    path: Path  # as the policy names it
    file: Path  # the one that was read
    sha256: str  # digest of its content, in hex
    distributions: tuple[Locked, ...]  # sorted; one may be there in several versions, for different markers
    content: bytes = field(repr=False, compare=False)

    def versions_of(self, name: str) -> tuple[str, ...]:
        """The versions of a distribution; empty when the lock does not have it."""
        return tuple(each.version for each in self.distributions if each.name == name)


_copies: ContextVar[Path | None] = ContextVar("copies", default=None)


@contextmanager
def copies_in(folder: Path | None) -> Iterator[None]:
    """Lets the block read copies of lock files in a folder instead of the files that a policy names.

    The front of a fleet sends the copies with its policy, since a node may have other files at these paths. None: no
    copies.
    """
    token = _copies.set(folder)
    try:
        yield
    finally:
        _copies.reset(token)


_read: ContextVar[dict[Path, bool] | None] = ContextVar("read", default=None)


@contextmanager
def lock_files_read() -> Iterator[Mapping[Path, bool]]:
    """Yields the lock files that the block has tried to read so far; true for one that could be read."""
    files: dict[Path, bool] = {}
    token = _read.set(files)
    try:
        yield files
    finally:
        _read.reset(token)


def copy_of(path: str) -> str:
    """Returns the name of the copy of a lock file."""
    return f"{hashlib.sha256(path.encode()).hexdigest()}.toml"


def read_lock(path: Path) -> LockFile:
    """Reads a lock file that no other user could write. Raises ValueError with a clause."""
    if not path.is_absolute():
        raise ValueError("is not an absolute path")
    copies = _copies.get()
    file = path if copies is None else copies / copy_of(str(path))
    read = _read.get()
    if read is not None:
        read[file] = False
    try:
        data = read_trusted(file, "lock file", max_bytes=MAX_LOCK_BYTES)
        if read is not None:
            read[file] = True
        distributions = _distributions_in(data)
    except ConfigError as error:
        raise ValueError(f"can't be used: {error.problems[0]}") from error
    return LockFile(path, file, hashlib.sha256(data).hexdigest(), distributions, data)


@functools.lru_cache(maxsize=4)
def _distributions_in(data: bytes) -> tuple[Locked, ...]:
    """Profiles that inherit a lock read the same bytes, which take a second for each megabyte. Raises ValueError."""
    try:
        lock = Pylock.from_dict(parse_toml(data, "lock file"))
    except (PylockValidationError, PylockUnsupportedVersionError) as error:
        raise ValueError(f"is not a PEP 751 lock file: {error}") from error
    if len(lock.packages) > MAX_LOCKED:
        raise ValueError(f"has more than {MAX_LOCKED:,} packages")
    if not lock.packages:
        raise ValueError("has no packages")
    return tuple(sorted({_locked(package) for package in lock.packages}, key=str))


def _locked(package: Package) -> Locked:
    """Raises ValueError for a package that can't be installed from an index without running code of its own."""
    name = package.name
    if package.version is None:
        raise ValueError(f"has {name} without a version")
    if not package.wheels:
        raise ValueError(f"has no wheel of {name}; a source distribution would run its own code when built")
    if any(wheel.url is None for wheel in package.wheels):
        raise ValueError(f"has a wheel of {name} that is not from an index")
    if not all(_SHA256.fullmatch(str(wheel.hashes.get("sha256"))) for wheel in package.wheels):
        raise ValueError(f"has a wheel of {name} without a SHA-256 hash")
    if package.marker is not None and _CHOSEN.search(str(package.marker)) is not None:
        raise ValueError(f"has {name} for some extras or groups only; export the lock for one choice of them")
    return Locked(name, str(package.version))
