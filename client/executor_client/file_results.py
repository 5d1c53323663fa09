"""Values that describe files of the workspace. All are frozen, and none does I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from executor_client._core.short_repr import ShortRepr


@dataclass(frozen=True)
class FileInfo(ShortRepr):
    """A file, a directory or a link of a sandbox.

    `path` is as it was requested (absolute, or relative to the workspace) or, in a list, below that. `mode` has the
    permission bits, as for chmod. `target` is the text of a link. `user_id` and `group_id` are the owner's ids inside
    the sandbox.
    """

    path: str
    size_bytes: int
    is_directory: bool
    modify_time: datetime
    mode: int = 0
    is_link: bool = False
    target: str = ""
    user_id: int = 0
    group_id: int = 0


@dataclass(frozen=True)
class FileList(ShortRepr):
    """Entries of a directory, sorted by path.

    `truncated` if some are missing: too many, more than 32 directories deep, not UTF-8, or in unreadable directories.
    """

    files: tuple[FileInfo, ...]
    truncated: bool = False

    def __iter__(self) -> Iterator[FileInfo]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


@dataclass(frozen=True)
class FileChange(ShortRepr):
    """A change; `path` is relative to the workspace, or absolute as in the watch.

    A rename is a deletion and a creation.
    """

    path: str
    kind: Literal["created", "changed", "deleted"]
    is_directory: bool


@dataclass(frozen=True)
class FileChanges(ShortRepr):
    """Changes that arrived together, one for each path."""

    changes: tuple[FileChange, ...] = ()
    overflowed: bool = False
    """Earlier changes are lost: there were too many, or the daemon was away. List the files to see their state."""

    def __iter__(self) -> Iterator[FileChange]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)
