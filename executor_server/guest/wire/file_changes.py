"""The messages of the guest channel about file watches; messages.py explains what all messages share."""

from __future__ import annotations

from executor_api.limits import PATH_BYTES_MAX

from .frames import Kind
from .schema import Message, Record, Request, boolean, integer, one_of, text

MAX_CHANGES = 1000
"""Changes in one message."""
MAX_CHANGES_CHARS = 256 * 1024
"""Characters of all paths in one message."""


class ChangedFile(Record):
    """A change in the body of FILES_CHANGED."""

    path: str = text(PATH_BYTES_MAX)
    kind: str = one_of("created", "changed", "deleted")
    directory: bool = boolean()


class WatchFiles(Request, kind=Kind.WATCH_FILES):
    """Watches a directory, by an absolute path or one relative to the workspace; `op` names the watch.

    FILES_CHANGED without changes says that it has begun, and one more may follow. DONE, always not ok, ends it: it was
    refused, or the directory is gone.
    """

    path: str = text(PATH_BYTES_MAX)
    recursive: bool = boolean()


class NextChanges(Request, kind=Kind.NEXT_CHANGES):
    """Allows one more FILES_CHANGED. Until then changes are gathered."""


class UnwatchFiles(Request, kind=Kind.UNWATCH_FILES):
    """Ends a watch. There is no answer."""


class FilesChanged(Message, kind=Kind.FILES_CHANGED):
    """Body: a list of ChangedFile. `overflowed`: changes were missed before these."""

    op: int = integer()
    overflowed: bool = boolean(default=False)
