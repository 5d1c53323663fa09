"""The cache of wheel files: kept for the next environment, and compared with their hash at each use.

Each file is in a directory named by its SHA-256, since an index may give one name to two files. Only the daemon writes
there; build sandboxes see it read-only. Downloaded files are copied, so no sandbox keeps a descriptor of one.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from executor_server.core import EnvironmentFailed
from executor_server.guest.wire.paths import PROGRAMS_PATH
from executor_server.packages.disk import Places, Walk, remove
from executor_server.packages.lock import Wheel

_CHUNK_BYTES = 2**20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_log = structlog.get_logger(__name__)


class Wheels:
    """The cache. Its methods block unless they say otherwise."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._in_use: Counter[str] = Counter()

    def has(self, sha256: str) -> bool:
        """True if the file exists; `missing` must verify it before use. Does not block."""
        return self._path(sha256).is_dir()

    def missing(self, hashes: Collection[str], walk: Walk) -> list[str]:
        """Verifies these wheels, and removes damaged ones. Returns the hashes of the missing ones.

        Raises Stopped, OSError.
        """
        return [sha256 for sha256 in hashes if not self._is_whole(sha256, walk)]

    def add(self, wheels: Collection[Wheel], directory: Path, walk: Walk) -> None:
        """Copies the files that a build sandbox downloaded, each named by its hash.

        Raises EnvironmentFailed if the content of one does not match its hash, Stopped, OSError.
        """
        for wheel in wheels:
            self._add(wheel, directory / wheel.sha256, walk)

    def _add(self, wheel: Wheel, downloaded: Path, walk: Walk) -> None:
        staging = self._places.staging / f"new-{secrets.token_hex(8)}"
        staging.mkdir(mode=0o755)
        try:
            staging.chmod(0o755)  # despite the umask: the user of build sandboxes must read it
            with os.fdopen(os.open(downloaded, _READ), "rb") as source, (staging / wheel.file_name).open("xb") as copy:
                digest = hashlib.sha256()
                while chunk := source.read(_CHUNK_BYTES):
                    walk.step()
                    digest.update(chunk)
                    copy.write(chunk)
                os.fchmod(copy.fileno(), 0o644)
            if digest.hexdigest() != wheel.sha256:
                raise EnvironmentFailed(
                    f"the packages can't be installed: Hash mismatch for {wheel}: the index sent another file than it "
                    "has listed"
                )
            try:
                staging.rename(self._path(wheel.sha256))
            except OSError:
                if not self.has(wheel.sha256):  # else another build was faster
                    raise
        finally:
            remove(staging)

    @contextmanager
    def in_use(self, hashes: Collection[str]) -> Iterator[None]:
        """Protects these wheels from eviction for the duration of the block. Does not block."""
        self._in_use.update(hashes)
        try:
            yield
        finally:
            self._in_use -= Counter(hashes)

    def unused(self) -> list[tuple[float, Path]]:
        """Returns unused wheels, each with its last use in seconds since the epoch. Raises OSError."""
        found = []
        for path in self._places.wheels.iterdir():
            with suppress(FileNotFoundError):  # a damaged one is removed in another thread
                found.append((path.stat().st_mtime, path))
        return [(used_s, path) for used_s, path in found if not self._in_use[path.name]]

    def is_in_use(self, path: Path) -> bool:
        """Does not block."""
        return self._in_use[path.name] > 0

    def take_out(self, path: Path) -> Path:
        """Removes a wheel from the cache, atomically. Returns the directory to remove. Raises OSError."""
        removed = self._places.staging / f"old-{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            path.rename(removed)
        return removed

    @staticmethod
    def mounted(sha256: str) -> str:
        """Returns the directory of a wheel inside build sandboxes. Does not block."""
        return f"{PROGRAMS_PATH}/wheels/{sha256}"

    def _path(self, sha256: str) -> Path:
        return self._places.wheels / sha256

    def _is_whole(self, sha256: str, walk: Walk) -> bool:
        path = self._path(sha256)
        try:
            (file,) = path.iterdir()
            digest = hashlib.sha256()
            with os.fdopen(os.open(file, _READ), "rb") as opened:
                while chunk := opened.read(_CHUNK_BYTES):
                    walk.step()
                    digest.update(chunk)
            if digest.hexdigest() == sha256:
                os.utime(path)
                return True
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            _log.error("wheel_unreadable", sha256=sha256, error=str(error))
        _log.error("wheel_damaged", sha256=sha256)
        remove(path)
        return False
