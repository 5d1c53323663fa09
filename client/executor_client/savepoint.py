"""Savepoints of a session, and what going back to one has restored."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from executor_api.limits import SAVEPOINT_NUMBER_MAX, SAVEPOINTS_MAX
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_client.errors import InvalidRequest, ProtocolError

_LEFT_OUT_MAX = 100


@dataclass(frozen=True, kw_only=True)
class Savepoint:
    """A point of a session to go back to.

    `number` rises by one in a session. `files` and `file_bytes` are what it holds of the workspace. `left_out` says in
    words what going back does not restore: child processes, sockets, a workspace that is too large.
    """

    number: int
    made_time: datetime
    files: int
    file_bytes: int
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """The session went back to `savepoint`. `dropped` counts the later savepoints, which are gone.

    `left_out` says in words what could not be restored, beside what the savepoint itself has not.
    """

    savepoint: Savepoint
    generation: int
    dropped: int
    left_out: tuple[str, ...] = ()


def savepoints_from(wire: list[service_pb.Savepoint]) -> list[Savepoint]:
    """Raises ProtocolError for more than a session can have."""
    if len(wire) > SAVEPOINTS_MAX:
        raise ProtocolError(f"the daemon listed {len(wire)} savepoints")
    return [
        Savepoint(
            number=each.number,
            made_time=datetime.fromtimestamp(each.made_time.ToNanoseconds() / 1e9, UTC),
            files=each.files,
            file_bytes=each.file_bytes,
            left_out=tuple(each.left_out[:_LEFT_OUT_MAX]),
        )
        for each in wire
    ]


def rollback_from(wire: service_pb.RollbackResponse) -> Rollback:
    """Raises ProtocolError for an answer that names no savepoint."""
    savepoints = savepoints_from(list(wire.savepoints))
    if not savepoints:
        raise ProtocolError("the daemon did not say which savepoint the session went back to")
    return Rollback(
        savepoint=savepoints[-1],
        generation=wire.generation,
        dropped=wire.dropped,
        left_out=tuple(wire.left_out[:_LEFT_OUT_MAX]),
    )


def chosen(savepoint: Savepoint | int, session_id: str) -> service_pb.RollbackRequest:
    """Raises InvalidRequest for what is no number of a savepoint."""
    number = savepoint.number if isinstance(savepoint, Savepoint) else savepoint
    if isinstance(number, bool) or not 0 < number <= SAVEPOINT_NUMBER_MAX:
        raise InvalidRequest(f"a savepoint is one that Session.savepoint gave, or its number, not {number!r}")
    return service_pb.RollbackRequest(session_id=session_id, savepoint=number)


def newest(savepoints: list[Savepoint], steps: int) -> Savepoint:
    """Returns the savepoint so many before now, 1 for the newest. Raises InvalidRequest when there are fewer."""
    if isinstance(steps, bool) or steps < 1:
        raise InvalidRequest(f"steps is a number from 1 on, not {steps!r}")
    if steps > len(savepoints):
        raise InvalidRequest(f"the session has {len(savepoints)} savepoints, so it can't go back by {steps}")
    return savepoints[-steps]
