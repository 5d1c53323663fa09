"""The environments on disk: each is published whole, checked before it is believed, and removed whole.

Theory of operation. An environment is a directory in `ready`, named by its id: a manifest, a list of its files, and the
`tree` that sandboxes mount. It is made in `staging` and renamed when it is complete, so a name in `ready` never stands
for half of one; a start removes what a killed daemon left in `staging`. The content of files is not forced to the disk:
after a crash of the host a file may be empty, and the check before the first use in a daemon's life finds that as it
finds any other damage. Removal is the reverse: a rename out of `ready`, and then the slow part.

Everything that walks a tree blocks and is for a thread; the rest is a few system calls.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from executor_server.core import SandboxFailure
from executor_server.environments.file_list import TreeError, Walk, check_tree
from executor_server.environments.manifest import (
    MAX_LIST_BYTES,
    Manifest,
    ManifestError,
    read_list,
    read_manifest,
    write_manifest,
)
from executor_server.environments.places import Places

_TREE = "tree"
_NAME_BYTES = 8
_CLOSED, _OPEN = 0o700, 0o755

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Staging:
    """A place in which one environment is made."""

    directory: Path

    @property
    def tree(self) -> Path:
        """The empty directory that becomes the environment."""
        return self.directory / _TREE


class Store:
    """Owns the directories. One daemon has them at a time, wherever they are: it holds a lock on the root."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._manifests: dict[str, Manifest] = {}
        self._lock = -1

    def open(self) -> None:
        """Makes the directories, removes what a killed daemon left, and reads the manifests. Blocks.

        Raises OSError, and SandboxFailure when another user could write there or another daemon has them.
        """
        places = self.places
        _make_closed(places.root)
        self._lock = _locked(places.root)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the directories to the next daemon. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _open(self) -> None:
        places = self.places
        for directory in (places.ready, places.staging, places.damaged, places.holds):
            _make_closed(directory)
        places.programs.mkdir(mode=_OPEN, exist_ok=True)
        places.programs.chmod(_OPEN)  # the umask may say less, and the user of workshops has to enter it
        places.work.mkdir(mode=_CLOSED, exist_ok=True)  # the backend gives it to the user of workshops
        for leftover in places.staging.iterdir():
            remove(leftover)
        for directory in places.ready.iterdir():
            try:
                self._manifests[directory.name] = read_manifest(directory)
            except ManifestError as error:
                _log.error("environment_not_believed", environment_id=directory.name, error=str(error))
                remove(self.take_out(directory.name))

    def tidy(self) -> None:
        """Removes from the directory of workshops what is not the cache. Blocks. Raises OSError.

        Before the first build: a workshop of a killed daemon may live until the backends have found it.
        """
        for leftover in self.places.unfinished():
            remove(leftover)

    @property
    def manifests(self) -> Mapping[str, Manifest]:
        """The environments that there are, by id."""
        return self._manifests

    def tree_of(self, environment_id: str) -> Path:
        """Returns the directory that sandboxes mount."""
        return self.places.ready / environment_id / _TREE

    def is_there(self, environment_id: str) -> bool:
        """True when it was published and not removed since, not even by hand."""
        return environment_id in self._manifests and self.tree_of(environment_id).is_dir()

    # -- making ------------------------------------------------------------------------------------------------------

    def stage(self) -> Staging:
        """Makes an empty place. Raises OSError."""
        staging = Staging(self.places.staging / f"new-{secrets.token_hex(_NAME_BYTES)}")
        staging.directory.mkdir(mode=_CLOSED)
        staging.tree.mkdir()
        staging.tree.chmod(_OPEN)  # despite the umask: other users enter it, where it is mounted
        return staging

    def write(self, staging: Staging, manifest: Manifest, listed: bytes) -> None:
        """Writes the manifest and the list of files of what was made. Blocks. Raises OSError, SandboxFailure."""
        if len(listed) > MAX_LIST_BYTES:
            raise SandboxFailure(f"the list of files of {manifest.environment_id} is too large")
        write_manifest(staging.directory, manifest, listed)
        _sync(staging.directory)

    def publish(self, staging: Staging, manifest: Manifest) -> None:
        """Makes the environment one that is there. Raises OSError."""
        directory = self.places.ready / manifest.environment_id
        staging.directory.rename(directory)  # fails when there is one: that would have been used
        _sync(self.places.ready)
        self._manifests[manifest.environment_id] = manifest

    # -- checking ----------------------------------------------------------------------------------------------------

    def check(self, environment_id: str, walk: Walk) -> None:
        """Compares every byte with the list of files. Blocks. Raises TreeError, Stopped."""
        directory = self.places.ready / environment_id
        try:
            manifest = read_manifest(directory)
            check_tree(directory / _TREE, read_list(directory, manifest), walk)
        except ManifestError as error:
            raise TreeError(str(error)) from error
        except OSError as error:
            raise TreeError(f"it can't be read: {error}") from error

    # -- removing ----------------------------------------------------------------------------------------------------

    def take_out(self, environment_id: str) -> Path:
        """Ends an environment: from here on it is not there. Returns what is to be removed. Raises OSError."""
        return self._moved(environment_id, self.places.staging / f"old-{secrets.token_hex(_NAME_BYTES)}")

    def put_aside(self, environment_id: str) -> Path:
        """Ends a damaged environment that sandboxes still have mounted; they keep what they see.

        Returns where it is now. Raises OSError.
        """
        return self._moved(environment_id, self.places.damaged / f"{environment_id}.{secrets.token_hex(_NAME_BYTES)}")

    def _moved(self, environment_id: str, where: Path) -> Path:
        self._manifests.pop(environment_id, None)
        with contextlib.suppress(FileNotFoundError):  # removed by hand
            (self.places.ready / environment_id).rename(where)
        return where

    def discard(self, path: Path) -> None:
        """Removes a part of the cache. Blocks. Raises OSError.

        It is renamed first: uv would take what is left of an archive, when the daemon was killed meanwhile, for whole.
        """
        removed = self.places.staging / f"old-{secrets.token_hex(_NAME_BYTES)}"
        with contextlib.suppress(FileNotFoundError):
            path.rename(removed)
            remove(removed)

    def damaged(self) -> list[tuple[str, Path]]:
        """Returns the ids and directories of those that were put aside. Raises OSError."""
        return [(path.name.partition(".")[0], path) for path in self.places.damaged.iterdir()]


def remove(path: Path) -> None:
    """Removes a directory with all that is in it, or a file. Blocks. What can't be removed is logged.

    A workshop may still write to it: `rmtree` follows no link that is put in its way.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    except (OSError, RecursionError) as error:
        _log.error("environment_files_left_over", path=str(path), error=str(error))
        return
    if path.exists():
        _log.error("environment_files_left_over", path=str(path), error="some files can't be removed")


def _make_closed(directory: Path) -> None:
    """Makes a directory that only the daemon's user can enter. Raises OSError, SandboxFailure."""
    directory.mkdir(mode=_CLOSED, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise SandboxFailure(f"{directory} is no directory of the daemon's own user")
    if stat.S_IMODE(status.st_mode) != _CLOSED:
        directory.chmod(_CLOSED)


def _locked(directory: Path) -> int:
    """Locks a directory until the descriptor is closed. Raises SandboxFailure, OSError."""
    lock = _open_directory(directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SandboxFailure(f"another daemon has the environments in {directory}") from None
    return lock


def _open_directory(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _sync(directory: Path) -> None:
    fd = _open_directory(directory)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
