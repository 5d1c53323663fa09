"""Paths as E2B's clients write them: absolute, below "~", or relative to the home directory.

The home directory is the workspace. Paths below it reach the daemon as paths below
/workspace, since an image may lack the link.
"""

from __future__ import annotations

import posixpath
from pathlib import PurePosixPath

from executor_api.limits import PATH_BYTES_MAX
from executor_server.gateway.errors import Refusal

HOME = "/home/user"
"""E2B's home directory: another name of the workspace."""
_WORKSPACE = "/workspace"


def absolute(path: str) -> str:
    """Returns the absolute path that a client means. Raises Refusal (400)."""
    if len(path) > PATH_BYTES_MAX:  # before it is split into parts
        raise Refusal(400, f"the path has {len(path):,} characters, the limit is {PATH_BYTES_MAX:,}")
    if path.startswith("~"):
        if path[1:2] not in ("", "/"):
            raise Refusal(400, f"cannot expand {path!r}: the only home directory is ~, which is {HOME}")
        return posixpath.normpath(HOME + path[1:])
    return path if path.startswith("/") else posixpath.normpath(f"{HOME}/{path}")


def inside(path: str) -> str:
    """Returns the path in our sandboxes for an absolute path."""
    return _moved(path, HOME, _WORKSPACE)


def shown(path: str) -> str:
    """Returns the path that clients see for an absolute path in our sandboxes."""
    return _moved(path, _WORKSPACE, HOME)


def name_of(path: str) -> str:
    """Returns the last part of a path."""
    return PurePosixPath(path).name or path


def _moved(path: str, source: str, target: str) -> str:
    found = PurePosixPath("/", path.lstrip("/"))
    return str(PurePosixPath(target, found.relative_to(source)) if found.is_relative_to(source) else found)
