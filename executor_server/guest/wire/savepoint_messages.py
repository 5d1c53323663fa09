"""The messages of the guest channel about savepoints; messages.py explains what all messages share."""

from __future__ import annotations

from executor_api.limits import SAVEPOINT_NUMBER_MAX, SAVEPOINTS_MAX

from .frames import Kind
from .schema import Record, Request, boolean, integer, number, record, records, text, texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Optional

MAX_LEFT_OUT = 8
MAX_LEFT_OUT_CHARS = 200
MAX_REASON_CHARS = 400
MAX_CHANGED = 256
"""Names in each list of a branch's changes."""
MAX_CHANGED_CHARS = 1024
MAX_LISTED_CHARS = 32 * 1024
"""Characters of all names in one list. JSON takes up to 12 bytes for each, so the eight lists take at most 3 MiB."""


class TakeSavepoint(Request, kind=Kind.TAKE_SAVEPOINT):
    """Takes a savepoint. At most `kept` savepoints stay; older ones are dropped.

    DONE has SavepointList. Files of the workspace are kept up to `file_bytes`.
    """

    kept: int = integer(1, SAVEPOINTS_MAX)
    file_bytes: int = integer()


class RollBack(Request, kind=Kind.ROLL_BACK):
    """Continues from a savepoint or a branch in a new interpreter. DONE has SavepointList.

    Later savepoints are dropped; after a rollback to a savepoint, later branches, too.
    """

    savepoint: int = integer(1, SAVEPOINT_NUMBER_MAX)


class ListSavepoints(Request, kind=Kind.LIST_SAVEPOINTS):
    """DONE has SavepointList."""


class ListedSavepoint(Record):
    """A savepoint. `left_out` describes in words what a rollback does not restore."""

    savepoint: int = integer(1, SAVEPOINT_NUMBER_MAX)
    made: float = number(0.0, 253_402_300_799.0)
    files: int = integer()
    file_bytes: int = integer()
    left_out: list[str] = texts(MAX_LEFT_OUT, MAX_LEFT_OUT_CHARS)
    branch: bool = boolean(default=False)


class SavepointList(Record):
    """The body of DONE: all savepoints, and how many were dropped since the last one."""

    savepoints: list[ListedSavepoint] = records(ListedSavepoint, 2 * SAVEPOINTS_MAX)
    dropped: int = integer()
    generation: int = integer(1, 2**31)
    taken: Optional[int] = integer(1, SAVEPOINT_NUMBER_MAX, default=None)
    left_out: list[str] = texts(MAX_LEFT_OUT, MAX_LEFT_OUT_CHARS)


class Changes(Record):
    """Changed names in bounded lists; `truncated`: there are more."""

    added: list[str] = texts(MAX_CHANGED, MAX_CHANGED_CHARS)
    changed: list[str] = texts(MAX_CHANGED, MAX_CHANGED_CHARS)
    removed: list[str] = texts(MAX_CHANGED, MAX_CHANGED_CHARS)
    unknown: list[str] = texts(MAX_CHANGED, MAX_CHANGED_CHARS)
    truncated: bool = boolean(default=False)

    @classmethod
    def of(
        cls,
        added: Iterable[str],
        changed: Iterable[str],
        removed: Iterable[str],
        unknown: Iterable[str],
        *,
        truncated: bool = False,
    ) -> Changes:
        """Returns the names, cut to the limits of an answer."""
        lists = []
        for names in (added, changed, removed, unknown):
            fitting: list[str] = []
            left = MAX_LISTED_CHARS
            for name in sorted(names):
                left -= len(name)
                if len(fitting) == MAX_CHANGED or left < 0 or len(name) > MAX_CHANGED_CHARS:
                    truncated = True
                    break
                fitting.append(name.encode("utf-8", "replace").decode())
            lists.append(fitting)
        return cls(added=lists[0], changed=lists[1], removed=lists[2], unknown=lists[3], truncated=truncated)

    def cut(self) -> Changes:
        """Returns a copy cut to the limits of an answer: agent code may have sent more."""
        return Changes.of(self.added, self.changed, self.removed, self.unknown, truncated=self.truncated)


class BranchEnded(Record):
    """The end of a branch. `number` is the number of its kept copy; `why_not_kept` says why there is none.

    `refused`: why no branch could be made; then nothing has run. If `variables` is missing, the branch had died.
    """

    number: Optional[int] = integer(1, SAVEPOINT_NUMBER_MAX, default=None)
    refused: str = text(MAX_REASON_CHARS, default="")
    why_not_kept: str = text(MAX_REASON_CHARS, default="")
    variables: Optional[Changes] = record(Changes, default=None)
    files: Optional[Changes] = record(Changes, default=None)
    left_out: list[str] = texts(MAX_LEFT_OUT, MAX_LEFT_OUT_CHARS)
