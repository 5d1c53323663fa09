"""Transfers files between an agent's user and the workspace of its session.

Covers the initial files of a session (`start_files`), the file of a final answer (`AnswerFiles`), and the line of an
observation that lists the files of a step (`files_line`).

Names, sizes and the path of a final answer come from a sandbox, so they are untrusted: the local file gets a cleaned
name in a directory that the client chooses, and never replaces another file.
"""

from __future__ import annotations

import atexit
import errno
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from executor_client import (
    FileError,
    FileInfo,
    InvalidRequest,
    NotFoundError,
    PolicyViolationError,
    PreconditionError,
    ResourceExhaustedError,
    Session,
)
from executor_client._core.local import LocalPath

WORKSPACE = "/workspace"
"""The path of the workspace inside a sandbox, the same on each backend."""

ANSWER_BYTES_MAX = 256 << 20
"""Limit of the file of a final answer, which is fetched automatically. `files.get` fetches larger files."""
FILES_LISTED_MAX = 10
NAME_CHARS_MAX = 120
LOCAL_NAME_BYTES_MAX = 100
SAME_NAMES_MAX = 1_000

Source = LocalPath | bytes | bytearray | memoryview
Files = Mapping[str, Source] | Iterable[LocalPath] | None

_PLAIN_NAME = re.compile(r"[\w./+@=-]+", re.ASCII)
_UNFIT = re.compile(r"[^\w.+@=() -]")
_REFUSALS = (FileError, InvalidRequest, NotFoundError, PolicyViolationError, PreconditionError, ResourceExhaustedError)


# ---------------------------------------------------------------------------------------------------------------------
# Initial files of a session


@dataclass(frozen=True)
class StartFile:
    """A local file or directory, or bytes, and its target path in the workspace."""

    path: str
    source: Path | bytes

    def put(self, session: Session) -> None:
        if isinstance(self.source, Path) and self.source.is_dir():
            session.files.put_directory(self.source, self.path)
        else:
            session.files.put(self.source, self.path)


def start_files(files: Files) -> tuple[StartFile, ...]:
    """Returns the files of a mapping from workspace paths, or of a list of local paths, which keep their names.

    Raises InvalidRequest for a path outside the workspace, a local path that does not exist, and two equal names.
    """
    if files is None:
        return ()
    if isinstance(files, (str, bytes, os.PathLike)):
        raise InvalidRequest("files must be a list of local paths, or a mapping from workspace paths to local paths")
    if isinstance(files, Mapping):
        return tuple(_start_file(name, source) for name, source in files.items())
    by_name: dict[str, StartFile] = {}
    for each in files:
        if not isinstance(each, (str, os.PathLike)):
            raise InvalidRequest(f"files contains a {type(each).__name__}; bytes need a name: files={{'name': data}}")
        name = Path(os.path.abspath(each)).name  # noqa: PTH100 - a link keeps its own name
        if name in by_name:
            raise InvalidRequest(f"files contains the name {name!r} twice; choose paths: files={{'a/{name}': ...}}")
        by_name[name] = _start_file(name, each)
    return tuple(by_name.values())


def _start_file(name: object, source: object) -> StartFile:
    path = workspace_path(PurePath(name)) if isinstance(name, (str, PurePath)) else None
    if path is None:
        raise InvalidRequest(f"files: {name!r} is not a path in the workspace")
    if isinstance(source, (bytes, bytearray, memoryview)):
        return StartFile(path, bytes(source))
    if not isinstance(source, (str, os.PathLike)):
        raise InvalidRequest(f"files: {name!r} is a {type(source).__name__}; use a local path or bytes")
    local = Path(source)
    if not (local.is_file() or local.is_dir()):
        raise InvalidRequest(f"files: the file or directory {str(local)!r} does not exist")
    return StartFile(path, local.absolute())


def workspace_path(path: PurePath) -> str | None:
    """Returns the path relative to the workspace; None if it is outside."""
    parts = path.as_posix().split("/")
    if ".." in parts:
        return None
    text = "/".join(part for part in parts if part not in ("", "."))
    if path.as_posix().startswith("/"):
        root = WORKSPACE.lstrip("/") + "/"
        return text.removeprefix(root) if text.startswith(root) and text != root else None
    return text or None


# ---------------------------------------------------------------------------------------------------------------------
# The file of a final answer


class AnswerFiles:
    """Fetches the file of a final answer. Used by the threads of host tools.

    `session` returns the session of the code; `notify` receives a sentence about the file for the user.
    """

    def __init__(
        self, directory: LocalPath | None, session: Callable[[], Session | None], notify: Callable[[str], None]
    ) -> None:
        self._directory = None if directory is None else Path(directory).absolute()
        self._session = session
        self._notify = notify

    def fetch(self, answer: Any) -> Any:
        """If the answer is a path of the workspace, fetches the file and returns its local path.

        Raises FileNotFoundError or ValueError, in the code in the sandbox, if the path is not a regular file of the
        workspace or can't be fetched; the model can then give another answer.
        """
        session = self._session()
        if not isinstance(answer, PurePath) or session is None:
            return answer
        path = workspace_path(answer)
        if path is None:
            self._notify(f"the final answer {_name(str(answer))} is not a file of the workspace; it stays a path")
            return answer
        try:
            with ExitStack() as on_failure:
                local = _reserve(self._directory or scratch_directory(), local_name(path))
                on_failure.callback(local.unlink, missing_ok=True)
                info = session.files.get(path, local, max_bytes=ANSWER_BYTES_MAX)
                on_failure.pop_all()
        except _REFUSALS as refusal:
            kind = FileNotFoundError if isinstance(refusal, NotFoundError) else ValueError
            raise kind(
                f"the file of the final answer can't be fetched: {refusal.message}. Answer with the path of a regular "
                f"file of the workspace, or with str(path) if it is not a file"
            ) from refusal
        except OSError as problem:
            # The sandbox gets the reason without the client's path.
            self._notify(f"the file of the final answer could not be written: {problem}")
            raise ValueError(
                f"the file of the final answer could not be written on the client: {problem.strerror}"
            ) from problem
        until = "" if self._directory is not None else " until this process ends (download_dir= keeps it)"
        self._notify(f"the file of the final answer, {size_text(info.size_bytes)}, is {local}{until}")
        return local


def _reserve(directory: Path, name: str) -> Path:
    """Creates an empty file of this name, with a number added if the name is taken."""
    directory.mkdir(parents=True, exist_ok=True)
    stem, dot, suffix = name.rpartition(".")
    for number in range(1, SAME_NAMES_MAX):
        numbered = name if number == 1 else f"{stem}-{number}.{suffix}" if dot else f"{name}-{number}"
        path = directory / numbered
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            continue
        return path
    raise FileExistsError(
        errno.EEXIST, f"there are already {SAME_NAMES_MAX} files with this name", str(directory / name)
    )


def local_name(path: str) -> str:
    """Returns the last part of a workspace path as a safe local name: not hidden, not long, one line."""
    name = _UNFIT.sub("_", path.rsplit("/", 1)[-1]).strip(" ")
    if name.startswith("."):
        name = f"_{name[1:]}"
    if len(name.encode()) > LOCAL_NAME_BYTES_MAX:
        long = PurePath(name)
        room = LOCAL_NAME_BYTES_MAX // 2
        name = "".join(part.encode()[:room].decode(errors="ignore") for part in (long.stem, long.suffix))
    return name or "file"


_scratch: Path | None = None
_scratch_lock = threading.Lock()


def scratch_directory() -> Path:
    """Returns the temporary directory of this process, which is removed when it ends."""
    global _scratch
    with _scratch_lock:
        if _scratch is None or not _scratch.is_dir():
            _scratch = Path(tempfile.mkdtemp(prefix="executor-files-"))
            atexit.register(_remove, _scratch, os.getpid())
        return _scratch


def _remove(directory: Path, owner: int) -> None:
    """Removes the directory, except in a forked child, which inherits this exit handler."""
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# Files of a step


def files_line(artifacts: Sequence[FileInfo], *, truncated: bool) -> str:
    """Returns a line that lists the files that a step created or changed; empty without files."""
    if not artifacts:
        return ""
    listed = [f"{_name(each.path)}, {size_text(each.size_bytes)}" for each in artifacts[:FILES_LISTED_MAX]]
    more = len(artifacts) - len(listed)
    if more or truncated:
        listed.append(f"and {more} more" if not truncated else "and more")
    return f"files: {'; '.join(listed)}\n"


def size_text(size_bytes: int) -> str:
    """Returns a size for a person: 812 bytes, 12 kB, 3.4 MB."""
    if size_bytes < 1_000:
        return f"{size_bytes} bytes"
    size, units = size_bytes / 1_000, ["kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1_000
        del units[0]
    return f"{size:.1f} {units[0]}" if size < 9.95 else f"{size:.0f} {units[0]}"


def _name(path: str) -> str:
    """Returns a path on one line; quoted and escaped unless it is plain."""
    cut = path if len(path) <= NAME_CHARS_MAX else f"{path[:NAME_CHARS_MAX]}..."
    return cut if _PLAIN_NAME.fullmatch(cut) else repr(cut)
