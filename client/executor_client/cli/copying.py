"""`executor cp`: copies between this machine and a session's workspace, as cp(1) and `docker cp` do.

One side is SESSION:PATH. In a local path, a slash must precede a colon: ./a:b. If a directory's target does not exist,
it is created with the directory's contents. If it exists, the directory is copied into it, or only its contents if the
source is DIR/. or a single dot. A file is copied into a target that is a directory or ends with a slash; a missing
directory is created in the workspace.
"""

from __future__ import annotations

import os
from pathlib import Path

from executor_client.cli.naming import find_session, located
from executor_client.client import ExecutorClient
from executor_client.errors import FileError, InvalidRequest
from executor_client.session import Session


def copy(client: ExecutorClient, source: str, target: str) -> None:
    """Copies a file or a directory. Raises ExecutorClientError, OSError."""
    there_from, there_to = located(source), located(target)
    if there_from is not None and there_to is None:
        _get(find_session(client, there_from.session), there_from.path, target)
    elif there_to is not None and there_from is None:
        _put(find_session(client, there_to.session), source, there_to.path)
    else:
        raise InvalidRequest("one of SRC and DST must be SESSION:PATH, the other a local path")


def _put(session: Session, source: str, path: str) -> None:
    local = Path(source)
    into = _is_directory(session, path)
    name = "" if source.rsplit("/", 1)[-1] == "." else Path(os.path.abspath(source)).name  # noqa: PTH100 - links stay
    inside = "/".join(part for part in (path.rstrip("/"), name) if part)
    if local.is_dir():
        session.files.put_directory(local, inside if into else path)
    else:
        session.files.put(local, inside if into or path.endswith("/") else path)


def _get(session: Session, path: str, target: str) -> None:
    local = Path(target)
    name = path.rstrip("/").rsplit("/", 1)[-1]
    if _is_directory(session, path):
        session.files.get_directory(path, local / name if local.is_dir() else local)
    else:
        session.files.get(path, local / name if local.is_dir() or target.endswith("/") else local)


def _is_directory(session: Session, path: str) -> bool:
    try:
        return session.files.stat(path).is_directory
    except FileError:
        return False  # the next request reports why
