"""The environments on disk: each is published whole, verified before it is used, and removed whole.

Theory of operation. An environment is a directory in `ready`, named by its id: a manifest, and the `tree` that
sandboxes mount. It is built in `staging` and renamed when it is complete, so `ready` never has half of one; the daemon
empties `staging` at its start. The manifest has one digest of the whole tree. Files are not synced: after a crash of
the host a file may be empty, and the check before the first use finds this like any other damage. Removal is the
reverse: a rename, then the slow part.

Functions that walk a tree block and need a thread; the others are a few system calls.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from executor_server.core import SandboxFailure
from executor_server.packages.disk import Places, Walk, remove
from executor_server.packages.lock import Lock, as_text, as_texts

MAX_MANIFEST_BYTES = 16 * 2**20

TREE = "tree"
_MANIFEST = "manifest.json"
_VERSION = 2
_NAME_BYTES = 8
_CLOSED, _OPEN = 0o700, 0o755
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # not blocking: a named pipe may be in its place
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_log = structlog.get_logger(__name__)


class Damaged(Exception):
    """An environment differs from the published one. The message is for the log."""


@dataclass(frozen=True)
class Manifest:
    """The facts of a published environment. It is next to the tree, where no sandbox sees it."""

    lock: Lock
    modules: tuple[str, ...]
    pins: tuple[str, ...]
    size_bytes: int
    created_s: float  # seconds since the epoch
    tree_sha256: str  # of names, modes and contents

    @property
    def environment_id(self) -> str:
        return self.lock.environment_id

    def write(self, directory: Path) -> None:
        """Writes it with a checksum, so that it survives a crash of the host. Blocks. Raises OSError."""
        body = _canonical(asdict(self))
        written = {"version": _VERSION, "sha256": hashlib.sha256(body).hexdigest(), "environment": json.loads(body)}
        with os.fdopen(os.open(directory / _MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(json.dumps(written, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Blocks for a moment. Raises Damaged."""
        try:
            with os.fdopen(os.open(directory / _MANIFEST, _READ), "rb") as file:
                written = json.loads(file.read(MAX_MANIFEST_BYTES))
            values = written["environment"]
            if (written["version"], written["sha256"]) != (_VERSION, hashlib.sha256(_canonical(values)).hexdigest()):
                raise Damaged("its manifest has another version or another checksum")
            manifest = cls(
                lock=Lock.read(values["lock"]),
                modules=as_texts(values["modules"]),
                pins=as_texts(values["pins"]),
                size_bytes=int(values["size_bytes"]),
                created_s=float(values["created_s"]),
                tree_sha256=as_text(values["tree_sha256"]),
            )
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise Damaged(f"its manifest can't be read: {error}") from error
        if manifest.environment_id != directory.name:
            raise Damaged("its manifest is that of another environment")
        return manifest


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def digest_of(tree: Path, walk: Walk) -> str:
    """Returns the SHA-256 of the names, modes and contents below a directory. Blocks.

    Raises Damaged for an entry that is neither a file nor a directory, Stopped, OSError.
    """
    digest = hashlib.sha256()
    for path, entry in _entries(tree):
        walk.step()
        status = entry.stat(follow_symlinks=False)
        content = ""
        if stat.S_ISREG(status.st_mode):
            with os.fdopen(os.open(entry.path, _READ), "rb", buffering=0) as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        elif not stat.S_ISDIR(status.st_mode):
            raise Damaged(f"{path!r} is neither a file nor a directory")
        digest.update(_canonical({"path": path, "mode": status.st_mode, "content": content}))
    return digest.hexdigest()


def _entries(tree: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    waiting = [""]  # not recursive: a tree may be as deep as a path is long
    while waiting:
        directory = waiting.pop()
        with os.scandir(tree / directory) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
        for entry in entries:
            path = f"{directory}/{entry.name}" if directory else entry.name
            yield path, entry
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)


class Store:
    """Owns the directories, for one daemon at a time: it locks the root."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._manifests: dict[str, Manifest] = {}
        self._lock = -1

    def open(self) -> None:
        """Creates the directories, removes leftovers of a killed daemon, and reads the manifests. Blocks.

        Raises OSError, and SandboxFailure if another user could write there or another daemon uses them.
        """
        _make_closed(self.places.root)
        self._lock = _locked(self.places.root)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the lock. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _open(self) -> None:
        places = self.places
        for directory in (places.ready, places.staging, places.damaged, places.work, places.holds):
            _make_closed(directory)
        for directory in (places.programs, places.wheels):
            directory.mkdir(exist_ok=True)
            directory.chmod(_OPEN)  # despite the umask: the user of build sandboxes must enter it
        for leftover in (*places.staging.iterdir(), *places.work.iterdir()):
            remove(leftover)
        for directory in places.ready.iterdir():
            try:
                self._manifests[directory.name] = Manifest.read(directory)
            except Damaged as error:
                _log.error("environment_rejected", environment_id=directory.name, error=str(error))
                self.put_aside(directory.name)

    @property
    def manifests(self) -> Mapping[str, Manifest]:
        """The existing environments, by id."""
        return self._manifests

    def tree_of(self, environment_id: str) -> Path:
        """Returns the directory that sandboxes mount."""
        return self.places.ready / environment_id / TREE

    def is_there(self, environment_id: str) -> bool:
        """True if it was published, and not removed since, not even by hand."""
        return environment_id in self._manifests and self.tree_of(environment_id).is_dir()

    def stage(self) -> Path:
        """Creates a directory for a build; `TREE` in it is the part for sandboxes. Raises OSError."""
        staging = self.places.staging / f"new-{secrets.token_hex(_NAME_BYTES)}"
        staging.mkdir(mode=_CLOSED)
        (staging / TREE).mkdir()
        (staging / TREE).chmod(_OPEN)  # despite the umask: other users enter it, where it is mounted
        return staging

    def publish(self, staging: Path, manifest: Manifest) -> None:
        """Moves a built environment to `ready`. Raises OSError."""
        staging.rename(self.places.ready / manifest.environment_id)  # fails when there is one
        _sync(self.places.ready)
        self._manifests[manifest.environment_id] = manifest

    def check(self, environment_id: str, walk: Walk) -> None:
        """Reads and verifies each byte. Blocks. Raises Damaged, Stopped."""
        directory = self.places.ready / environment_id
        try:
            if digest_of(directory / TREE, walk) != Manifest.read(directory).tree_sha256:
                raise Damaged("a file has changed, is new or is missing")
        except OSError as error:
            raise Damaged(f"it can't be read: {error}") from error

    def take_out(self, environment_id: str) -> Path:
        """Ends an environment. Returns the directory to remove. Raises OSError."""
        return self._moved(environment_id, self.places.staging / f"old-{secrets.token_hex(_NAME_BYTES)}")

    def put_aside(self, environment_id: str) -> None:
        """Ends a damaged environment; sandboxes that have it mounted keep what they see. Raises OSError."""
        self._moved(environment_id, self.places.damaged / f"{environment_id}.{secrets.token_hex(_NAME_BYTES)}")

    def _moved(self, environment_id: str, where: Path) -> Path:
        self._manifests.pop(environment_id, None)
        with suppress(FileNotFoundError):  # removed by hand
            (self.places.ready / environment_id).rename(where)
        return where

    def damaged(self) -> list[tuple[str, Path]]:
        """Returns the ids and directories of damaged environments. Raises OSError."""
        return [(path.name.partition(".")[0], path) for path in self.places.damaged.iterdir()]


def _make_closed(directory: Path) -> None:
    """Creates a directory that only the daemon's user can enter. Raises OSError, SandboxFailure."""
    directory.mkdir(mode=_CLOSED, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise SandboxFailure(f"{directory} is not a directory of the daemon's own user")
    if stat.S_IMODE(status.st_mode) != _CLOSED:
        directory.chmod(_CLOSED)


def _locked(directory: Path) -> int:
    """Locks a directory until the descriptor is closed. Raises SandboxFailure, OSError."""
    lock = os.open(directory, _DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SandboxFailure(f"another daemon uses the environments in {directory}") from None
    return lock


def _sync(directory: Path) -> None:
    fd = os.open(directory, _DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
