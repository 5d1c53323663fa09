"""Descriptions of savepoints, branches and rollbacks of a session."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from executor_api.limits import SAVEPOINT_NUMBER_MAX
from executor_client._core.short_repr import ShortRepr
from executor_client.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class Savepoint(ShortRepr):
    """A point of a session to go back to.

    `number` rises by one in a session. `files` and `file_bytes` count its files of the workspace. `left_out` describes
    what a rollback does not restore: child processes, sockets, a workspace that is too large. `is_branch` marks the end
    of a kept branch; the session itself was not in this state.
    """

    number: int
    made_time: datetime
    files: int
    file_bytes: int
    left_out: tuple[str, ...] = ()
    is_branch: bool = False


@dataclass(frozen=True, kw_only=True)
class Changes(ShortRepr):
    """Sorted names, at most 256 of each kind; `truncated` if there are more.

    `unknown`: names that may have changed. They were not compared, since that would take too long or too much memory.
    """

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class Branch(ShortRepr):
    """The changes that a program run by `try_` made in its branch. The session is unchanged.

    `variables` and `files` (of the workspace) are None if the program ended its interpreter. `number` is 0 if the
    branch is not kept, for the reason in `why_not_kept`: only branches of successful programs are kept. `left_out`
    describes what the branch lacked or what could not be restored. With `refused`, no branch was made and nothing ran.
    """

    number: int = 0
    variables: Changes | None = None
    files: Changes | None = None
    why_not_kept: str = ""
    left_out: tuple[str, ...] = ()
    refused: str = ""

    @property
    def is_kept(self) -> bool:
        """True if `keep` can continue from it. The oldest branches are dropped later."""
        return self.number > 0


@dataclass(frozen=True, kw_only=True)
class Rollback(ShortRepr):
    """The session went to `savepoint`, or to a branch. `dropped` counts the later savepoints that were dropped.

    `left_out` describes what could not be restored, in addition to the savepoint's own `left_out`. `undone` has the
    first lines of the steps that `RemoteExecutor.undo` undid, oldest first.
    """

    savepoint: Savepoint
    generation: int
    dropped: int
    left_out: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()


def chosen(savepoint: Savepoint | int) -> int:
    """Returns the number of a savepoint. Raises InvalidRequest for other values."""
    number = savepoint.number if isinstance(savepoint, Savepoint) else savepoint
    if isinstance(number, bool) or not 0 < number <= SAVEPOINT_NUMBER_MAX:
        raise InvalidRequest(f"{number!r} is not a savepoint; pass a result of Session.savepoint, or its number")
    return number


def chosen_branch(tried: object) -> int:
    """Returns the number of a branch, or of a result's branch. Raises InvalidRequest if it is not kept."""
    branch = tried if isinstance(tried, Branch) else getattr(tried, "branch", None)
    if not isinstance(branch, Branch):
        raise InvalidRequest(f"a {type(tried).__name__} is not a branch; pass a result of Session.try_")
    if not branch.is_kept:
        raise InvalidRequest(f"this branch was not kept: {branch.why_not_kept or 'the daemon gave no reason'}")
    return branch.number


def newest(savepoints: list[Savepoint], steps: int) -> Savepoint:
    """Returns a savepoint by its distance from now, 1 for the newest. Raises InvalidRequest if there are fewer."""
    if isinstance(steps, bool) or steps < 1:
        raise InvalidRequest(f"steps is {steps!r}; it must be a number from 1")
    if steps > len(savepoints):
        raise InvalidRequest(f"can't go back by {steps}: the session has {len(savepoints)} savepoints")
    return savepoints[-steps]
