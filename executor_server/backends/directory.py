"""A backend's part of the state directory, which one daemon holds at a time and which has an id of its own.

`<state_dir>/<kind>` holds a directory for each sandbox of the backend and the file `.lock`, which has two purposes. The
daemon that has locked it owns everything below: two daemons with one state directory would sweep each other's sandboxes
away. And it keeps the daemon's id, drawn once for this state directory. Whatever a sandbox has on the host outside of
the directory, a control group or a container, carries this id, so that the next daemon finds it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from executor_server.core import SandboxFailure

SOCKET_NAME = "guest.sock"
"""The socket of a sandbox's guest, in the sandbox's directory."""

_LOCK_NAME = ".lock"
_SANDBOX_ID_BYTES = 8
_DAEMON_ID_BYTES = 4
_DAEMON_ID = re.compile(rf"[0-9a-f]{{{2 * _DAEMON_ID_BYTES}}}")
_SANDBOX_ID = re.compile(rf"[0-9a-f]{{{2 * _SANDBOX_ID_BYTES}}}")
_SOCKET_PATH_BYTES = 107  # sockaddr_un, less the final zero


@dataclass(frozen=True)
class BackendDirectory:
    """The directory, held from `take` until `release`."""

    path: Path
    daemon_id: str
    _lock: int

    @classmethod
    def take(cls, state_dir: Path, kind: str) -> BackendDirectory:
        """Makes it if necessary and locks it. Raises SandboxFailure when another daemon has it or it can't be used."""
        path = state_dir.absolute() / kind
        longest = path / ("0" * 2 * _SANDBOX_ID_BYTES) / SOCKET_NAME
        if len(os.fsencode(longest)) > _SOCKET_PATH_BYTES:
            raise SandboxFailure(f"the state directory {state_dir} has a path too long for a socket in it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.mkdir(exist_ok=True, mode=0o700)
            lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SandboxFailure(f"the state directory {state_dir} can't be used: {error}") from error
        try:
            return cls(path, _locked_id(lock, state_dir), lock)
        except BaseException:
            os.close(lock)
            raise

    def release(self) -> None:
        os.close(self._lock)

    def sandbox_ids(self) -> list[str]:
        """Ids of the sandboxes that have a directory here, those of earlier daemons included."""
        return [name for name in os.listdir(self.path) if is_sandbox_id(name)]  # noqa: PTH208 - names only

    def of(self, sandbox_id: str) -> Path:
        return self.path / sandbox_id


def new_sandbox_id() -> str:
    return secrets.token_hex(_SANDBOX_ID_BYTES)


def is_sandbox_id(text: str) -> bool:
    """True when the text has the form of an id, and so can neither lead out of a directory nor be an option."""
    return _SANDBOX_ID.fullmatch(text) is not None


def remove_sandbox_directory(directory: Path) -> None:
    """Removes the directory of a destroyed sandbox, or of one whose creation failed before there was a directory."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise SandboxFailure(f"the directory of sandbox {directory.name} can't be removed: {error}") from error


def _locked_id(lock: int, state_dir: Path) -> str:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SandboxFailure(f"another daemon uses the state directory {state_dir}") from error
    written = os.pread(lock, 2 * _DAEMON_ID_BYTES + 1, 0).decode("ascii", "replace")
    if _DAEMON_ID.fullmatch(written):
        return written
    # New, or its daemon was killed between making the file and writing the id, and so before it made anything else.
    daemon_id = secrets.token_hex(_DAEMON_ID_BYTES)
    os.ftruncate(lock, 0)
    os.pwrite(lock, daemon_id.encode(), 0)
    return daemon_id
