"""Savepoints and branches of a session: what they hold, and what going to one has restored."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from executor_api.limits import SAVEPOINT_NUMBER_MAX
from executor_client._core.short_repr import ShortRepr
from executor_client.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class Savepoint(ShortRepr):
    """A point of a session to go back to.

    `number` rises by one in a session. `files` and `file_bytes` are what it holds of the workspace. `left_out` says in
    words what going back does not restore: child processes, sockets, a workspace that is too large. `is_branch`: it is
    the end of a branch that is kept, and the session was not in this state.
    """

    number: int
    made_time: datetime
    files: int
    file_bytes: int
    left_out: tuple[str, ...] = ()
    is_branch: bool = False


@dataclass(frozen=True, kw_only=True)
class Changes(ShortRepr):
    """Names, sorted, at most 256 of each kind; with `truncated` there are more.

    `unknown` may have changed: it would have taken too long, or too much memory, to look.
    """

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class Branch(ShortRepr):
    """The changes of a program that was tried, in a session that is as it was.

    `variables` and `files` (of the workspace) are None when the program has ended its interpreter. `number` is 0 when
    the branch is not kept, and `why_not_kept` says why: only those are whose program has succeeded. `left_out` says in
    words what the branch did not have, or what could not be put back. `refused`: no branch was made, and nothing ran.
    """

    number: int = 0
    variables: Changes | None = None
    files: Changes | None = None
    why_not_kept: str = ""
    left_out: tuple[str, ...] = ()
    refused: str = ""

    @property
    def is_kept(self) -> bool:
        """True when the session could go on from it; the oldest are dropped later."""
        return self.number > 0


@dataclass(frozen=True, kw_only=True)
class Rollback(ShortRepr):
    """The session went to `savepoint`, or to a branch. `dropped` counts the later savepoints, which are gone.

    `left_out` says in words what could not be restored, beside what the savepoint itself has not. `undone` has the
    first lines of the steps that `RemoteExecutor.undo` has undone, the oldest first.
    """

    savepoint: Savepoint
    generation: int
    dropped: int
    left_out: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()


def chosen(savepoint: Savepoint | int) -> int:
    """Returns the number of a savepoint. Raises InvalidRequest for what is none."""
    number = savepoint.number if isinstance(savepoint, Savepoint) else savepoint
    if isinstance(number, bool) or not 0 < number <= SAVEPOINT_NUMBER_MAX:
        raise InvalidRequest(f"a savepoint is one that Session.savepoint gave, or its number, not {number!r}")
    return number


def chosen_branch(tried: object) -> int:
    """Returns the number of a branch, or of the branch of a result. Raises InvalidRequest for one that is not kept."""
    branch = tried if isinstance(tried, Branch) else getattr(tried, "branch", None)
    if not isinstance(branch, Branch):
        raise InvalidRequest(f"a branch is a result that Session.try_ gave, not of type {type(tried).__name__}")
    if not branch.is_kept:
        raise InvalidRequest(f"this branch was not kept: {branch.why_not_kept or 'the daemon gave no reason'}")
    return branch.number


def newest(savepoints: list[Savepoint], steps: int) -> Savepoint:
    """Returns the savepoint so many before now, 1 for the newest. Raises InvalidRequest when there are fewer."""
    if isinstance(steps, bool) or steps < 1:
        raise InvalidRequest(f"steps is a number from 1 on, not {steps!r}")
    if steps > len(savepoints):
        raise InvalidRequest(f"the session has {len(savepoints)} savepoints, so it can't go back by {steps}")
    return savepoints[-steps]
