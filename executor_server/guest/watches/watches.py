"""The watches of one sandbox, in the supervisor's loop.

Changes are gathered for a moment, one for each path, and reported once the daemon has asked for more. So a client that
reads nothing delays neither the program nor the supervisor. A watch belongs to the daemon that began it. The next
daemon knows none of them, and all are ended.
"""

from __future__ import annotations

import errno
import math
import time

from ..files.paths import PathRefused
from ..wire.file_changes import MAX_CHANGES, MAX_CHANGES_CHARS, FilesChanged, NextChanges, UnwatchFiles, WatchFiles
from ..wire.lean import dumps
from ..wire.loop import READ
from .changes import Changes
from .tree import MAX_DIRECTORIES, TooManyDirectories, Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Union

    from ..wire.guest_channel import Channel
    from ..wire.loop import Loop

    WatchRequest = Union[WatchFiles, NextChanges, UnwatchFiles]

REQUESTS = (WatchFiles, NextChanges, UnwatchFiles)
MAX_WATCHES = 8
# Seconds in which changes are gathered: a program writes a file in several calls.
_GATHER_S = 0.05
_FULL = (errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Watches:
    """Owns the watches, by the `op` that began each."""

    def __init__(self, channel: Channel, loop: Loop, root: str) -> None:
        self._channel = channel
        self._loop = loop
        self._root = root
        self._open: dict[int, _Reporter] = {}

    @property
    def due(self) -> float:
        """The time of the next report."""
        return min((min(watch.due, watch.goes_on_at) for watch in self._open.values()), default=math.inf)

    def on_time(self, now: float) -> None:
        for op, watch in tuple(self._open.items()):
            if now >= watch.due:
                watch.report()
            if now >= watch.goes_on_at:
                self._on_events(op)

    def take(self, request: WatchRequest) -> None:
        """Handles a request of the daemon. One about an ended watch is ignored."""
        if isinstance(request, WatchFiles):
            self._begin(request)
            return
        watch = self._open.get(request.op)
        if watch is None:
            return
        if isinstance(request, NextChanges):
            watch.may_report = True
            watch.note_changes()
        else:
            self._drop(request.op)

    def _begin(self, request: WatchFiles) -> None:
        op = request.op
        if len(self._open) >= MAX_WATCHES:
            self._channel.fail(op, "queue_full", f"{MAX_WATCHES} watches of this session are open")
            return
        changes = Changes()
        try:
            tree = Tree(self._root, request.path, changes, recursive=request.recursive)
        except PathRefused as refused:
            self._channel.fail(op, refused.reason, str(refused))
        except TooManyDirectories:
            self._channel.fail(
                op, "too_large", f"a watch has at most {MAX_DIRECTORIES} directories: watch one below {request.path!r}"
            )
        except OSError as error:
            self._channel.fail(op, "queue_full" if error.errno in _FULL else "path_refused", _why(error))
        else:
            self._open[op] = _Reporter(op, tree, changes, self._channel)
            self._loop.watch(tree.fd, READ, lambda _events: self._on_events(op))
            self._channel.send(FilesChanged(op=op), b"[]")

    def _on_events(self, op: int) -> None:
        watch, began = self._open[op], time.monotonic()
        watch.tree.read()
        # Half of the time at most: a change costs more here than it costs agent code.
        watch.goes_on_at = 2 * time.monotonic() - began if watch.tree.busy else math.inf
        self._loop.watch(watch.tree.fd, 0 if watch.tree.busy else READ, lambda _events: self._on_events(op))
        if watch.tree.gone:
            self._drop(op)
            self._channel.fail(op, "file_not_found", "the directory was moved or deleted")
        else:
            watch.note_changes()

    def _drop(self, op: int) -> None:
        tree = self._open.pop(op).tree
        self._loop.watch(tree.fd, 0, None)
        tree.close()

    def end_all(self) -> None:
        """Ends all watches: another daemon has connected, which does not know them."""
        for op in tuple(self._open):
            self._drop(op)


class _Reporter:
    def __init__(self, op: int, tree: Tree, changes: Changes, channel: Channel) -> None:
        self.tree = tree
        self.due = math.inf
        self.goes_on_at = math.inf  # the next turn, if there is more to read than fits into one
        self.may_report = True
        self._op = op
        self._changes = changes
        self._channel = channel

    def note_changes(self) -> None:
        """Sets the time of the next report, if there are changes and the daemon waits for them."""
        if self._changes and self.may_report and self.due == math.inf:
            self.due = time.monotonic() + _GATHER_S

    def report(self) -> None:
        changed, overflowed = self._changes.take(MAX_CHANGES, MAX_CHANGES_CHARS)
        self.due = math.inf
        self.may_report = False
        body = b"[" + b",".join(dumps(each.head()) for each in changed) + b"]"
        self._channel.send(FilesChanged(op=self._op, overflowed=overflowed), body)


def _why(error: OSError) -> str:
    if error.errno in _FULL:
        return f"this host has no file watches left ({error.strerror}): raise its limits, fs.inotify in sysctl"
    return f"the directory can't be watched: {error.strerror}"
