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
    is_branch: bool = False  # the state of a branch after its program, not one that the session has been in


@dataclass(frozen=True)
class Changes:
    """Names, sorted; with `truncated` there are more. `unknown` may have changed: it was not possible to look."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    truncated: bool = False


@dataclass(frozen=True)
class BranchEnd:
    """The end of an execution that ran in a branch. `number` is 0 when the branch is not kept.

    `refused` says why there was no branch, and nothing has run. The changes are None when the branch has died.
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
    dropped: int  # number of those that were dropped for the request, or have ended since the last
    generation: int
    taken: int = 0  # the number of the one that was asked for; 0: none was
    left_out: tuple[str, ...] = ()  # things that a rollback did not restore, in words
