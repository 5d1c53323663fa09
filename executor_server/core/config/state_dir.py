"""The daemon's state directory: private to its user, and to one daemon at a time.

It contains `lock` (held by the daemon as long as it lives), `token` (the bearer token that local clients find by
themselves), `tokens.json` (the tokens of tenants), `executor.sock` and `peers.sock` (the local sockets), `registry.db`
and `journals/` (from which a later daemon recovers the sessions), `usage.db` (the tenants' usage in the last hour),
`ended.db` (sessions that ended), `state.key` (which signs the states of sessions), `states/` (states that are being
exported or restored), `recordings/` (of sessions), `node/` (the memory of a fleet node, and files from its
front), and `sandboxes/` (the backend's).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TOKEN_BYTES = 32
MAX_TOKEN_FILE_BYTES = 512

_TOKEN_FORM = re.compile(r"[A-Za-z0-9_-]{32,256}")


class StateDirError(Exception):
    """The state directory can't be used; the message is a sentence that says why and what to do."""


class AlreadyRunning(StateDirError):
    """Another daemon holds the state directory."""


def default_state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory where a user's clients look for the daemon unless they name another."""
    if chosen := environ.get("EXECUTOR_STATE_DIR"):
        return Path(chosen).absolute()
    state_home = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return (Path(state_home).expanduser() / "remote-executor").absolute()


class _Entry:
    """The path of a name in the state directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, state_dir: StateDir, _: type[StateDir]) -> Path:
        return state_dir.root / self._name


@dataclass(frozen=True)
class StateDir:
    """Paths in the state directory."""

    root: Path

    lock_path = _Entry("lock")
    token_path = _Entry("token")
    tokens_path = _Entry("tokens.json")
    socket_path = _Entry("executor.sock")
    inner_socket_path = _Entry("peers.sock")
    """gRPC's own socket behind the peer socket, which `server.peer_socket` names."""
    registry_path = _Entry("registry.db")
    journals_path = _Entry("journals")
    usage_path = _Entry("usage.db")
    ended_path = _Entry("ended.db")
    state_key_path = _Entry("state.key")
    states_path = _Entry("states")
    recordings_path = _Entry("recordings")
    egress_path = _Entry("egress")
    """The egress proxy's authority and its file for sandboxes."""
    node_path = _Entry("node")
    """The files of a node of a fleet."""
    node_locks_path = _Entry("node/locks")
    fleet_path = _Entry("fleet.db")
    """The memory of a front: its terms, the epochs of its nodes, the sessions that were lost."""


@contextmanager
def claim(root: Path) -> Iterator[StateDir]:
    """Creates the directory if need be, and holds its lock. Raises StateDirError."""
    state_dir = StateDir(root)
    _make_private(root)
    try:
        lock_fd = os.open(state_dir.lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _not_locked(root, error) from error
    try:
        # The kernel drops the lock with the last descriptor, so a killed daemon never leaves a stale one behind. The
        # file itself stays: removing it would let two daemons hold locks on two files of one name.
        _lock(lock_fd, root)
        yield state_dir
    finally:
        os.close(lock_fd)


def _random_token() -> str:
    return secrets.token_hex(TOKEN_BYTES)  # never begins with "-", which would be an option of a command line


def read_or_make_token(state_dir: StateDir) -> str:
    """Returns the token of this state directory, made on first use. Requires the lock. Raises StateDirError."""
    try:
        return read_token(state_dir.token_path)
    except FileNotFoundError:
        _make_token(state_dir.token_path)
        return read_token(state_dir.token_path)


def read_or_make_state_key(state_dir: StateDir, key_file: Path | None = None) -> bytes:
    """Returns the key that signs states of sessions: that of `key_file`, which must exist, or one made on first use.

    Requires the lock. Raises StateDirError.
    """
    if key_file is not None:
        try:
            return read_token(key_file, "key", remedy="write a new key with the mode 600 (state.key_file)").encode()
        except FileNotFoundError:
            raise StateDirError(f"The key file {key_file} does not exist (state.key_file).") from None
    try:
        return read_token(state_dir.state_key_path, "key").encode()
    except FileNotFoundError:
        _make_token(state_dir.state_key_path)
        return read_token(state_dir.state_key_path, "key").encode()


def _make_private(root: Path) -> None:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.lstat()
    except OSError as error:
        raise StateDirError(f"The state directory {root} can't be made: {error.strerror}.") from error
    if not stat.S_ISDIR(found.st_mode):
        raise StateDirError(f"The state directory {root} is not a directory (a link is not accepted).")
    if found.st_uid != os.geteuid():
        raise StateDirError(f"The state directory {root} belongs to user {found.st_uid}, not to this one.")
    if found.st_mode & 0o022:
        raise StateDirError(f"The state directory {root} can be written by other users; run: chmod 700 {root}")


def _lock(lock_fd: int, root: Path) -> None:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise AlreadyRunning(
                f"Another executor-server is running with the state directory {root}; stop it, or choose another "
                "directory with --state-dir."
            ) from error
        raise _not_locked(root, error) from error


def _not_locked(root: Path, error: OSError) -> StateDirError:
    return StateDirError(
        f"The lock of the state directory {root} can't be taken: {error.strerror}; choose another directory with "
        "--state-dir."
    )


def read_token(
    path: Path, what: str = "token", *, remedy: str = "remove it, and the daemon makes a new one when it starts"
) -> str:
    """Returns the secret in a file that no other user can read. Raises StateDirError, FileNotFoundError.

    `remedy` is for a file that can't be used; the default is for the daemon's own.
    """
    # O_NONBLOCK: a named pipe put there must not hang the start.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StateDirError(f"The {what} file {path} can't be read: {error.strerror}.") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise StateDirError(f"The {what} file {path} is not a regular file; {remedy}.")
        if found.st_uid != os.geteuid():
            raise StateDirError(f"The {what} file {path} belongs to user {found.st_uid}, not to this one.")
        if found.st_mode & 0o077:
            raise StateDirError(
                f"The {what} file {path} can be read by other users, so its {what} may be known to them; {remedy}."
            )
        text = os.read(fd, MAX_TOKEN_FILE_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
    if not _TOKEN_FORM.fullmatch(text):
        raise StateDirError(f"The {what} file {path} holds no {what} (32 to 256 of A-Z a-z 0-9 _ -); {remedy}.")
    return text


def _make_token(path: Path) -> None:
    # Written under another name and linked into place: a client that looks at the same moment finds the whole token or
    # none, and an existing file is never replaced.
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(_random_token() + "\n")
            path.hardlink_to(name)
        finally:
            Path(name).unlink()
    except OSError as error:
        raise StateDirError(f"The file {path} can't be made: {error.strerror}.") from error
