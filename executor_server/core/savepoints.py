"""Savepoints of a session, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Savepoint:
    """A point of a session to go back to. `left_out` says in words what a rollback does not restore."""

    number: int
    made_time_s: float  # Unix time
    files: int
    file_bytes: int
    left_out: tuple[str, ...] = ()
    is_branch: bool = False  # the final state of a branch; the session was never in it


@dataclass(frozen=True)
class Changes:
    """Names, sorted; if `truncated`, there are more. `unknown` ones may have changed: they could not be examined."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    truncated: bool = False


@dataclass(frozen=True)
class BranchEnd:
    """The end of an execution that ran in a branch. `number` is 0 when the branch is not kept.

    If `refused` is set, it says why there was no branch, and nothing has run. The changes are None if the branch died.
    """

    number: int = 0
    refused: str = ""
    why_not_kept: str = ""
    variables: Changes | None = None
    files: Changes | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Savepoints:
    """The savepoints of a session, the oldest first, as the answer to a request about them."""

    savepoints: tuple[Savepoint, ...]
    dropped: int  # savepoints that this request dropped, or that ended since the last one
    generation: int
    taken: int = 0  # the number of the requested savepoint; 0: none was requested
    left_out: tuple[str, ...] = ()  # things that a rollback did not restore, in words
