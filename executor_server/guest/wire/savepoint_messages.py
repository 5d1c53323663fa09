"""The messages of the guest channel about savepoints; messages.py says what holds for all of them."""

from __future__ import annotations

from executor_api.limits import SAVEPOINT_NUMBER_MAX, SAVEPOINTS_MAX

from .frames import Kind
from .schema import Message, Record, integer, number, records, texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

MAX_LEFT_OUT = 8
MAX_LEFT_OUT_CHARS = 200


class TakeSavepoint(Message, kind=Kind.TAKE_SAVEPOINT):
    """Keeps the interpreter as it is. At most `kept` savepoints stay; older ones are dropped.

    DONE answers it, with SavepointList. Files of the workspace are kept up to `file_bytes`.
    """

    op: int = integer()
    kept: int = integer(1, SAVEPOINTS_MAX)
    file_bytes: int = integer()


class RollBack(Message, kind=Kind.ROLL_BACK):
    """Goes on from a savepoint in a new interpreter, and drops the later ones. DONE answers it, with SavepointList."""

    op: int = integer()
    savepoint: int = integer(1, SAVEPOINT_NUMBER_MAX)


class ListSavepoints(Message, kind=Kind.LIST_SAVEPOINTS):
    """DONE answers it, with SavepointList."""

    op: int = integer()


class ListedSavepoint(Record):
    """A savepoint that is there. `left_out` says in words what a rollback does not restore."""

    savepoint: int = integer(1, SAVEPOINT_NUMBER_MAX)
    made: float = number(0.0, 253_402_300_799.0)
    files: int = integer()
    file_bytes: int = integer()
    left_out: list[str] = texts(MAX_LEFT_OUT, MAX_LEFT_OUT_CHARS)


class SavepointList(Record):
    """The body of DONE: all savepoints, and how many were dropped for this request."""

    savepoints: list[ListedSavepoint] = records(ListedSavepoint, SAVEPOINTS_MAX)
    dropped: int = integer()
    generation: int = integer(1, 2**31)
    taken: Optional[int] = integer(1, SAVEPOINT_NUMBER_MAX, default=None)
    left_out: list[str] = texts(MAX_LEFT_OUT, MAX_LEFT_OUT_CHARS)
