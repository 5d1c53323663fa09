# Made of aio_undo.py by tools/unasync.py: change that, and run `make unasync`.
"""The calls about savepoints, of the blocking client."""

from __future__ import annotations

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core.waiting import Awaited
from executor_client._sync import SessionTransport
from executor_client.savepoint import Rollback, Savepoint, chosen, newest, rollback_from, savepoints_from


def take_savepoint(transport: SessionTransport, session_id: str, turn: Awaited) -> Savepoint:
    response = transport.call(transport.stub.TakeSavepoint, pb.TakeSavepointRequest(session_id=session_id), turn)
    return newest(savepoints_from(list(response.savepoints)), 1)


def list_savepoints(transport: SessionTransport, session_id: str, turn: Awaited) -> list[Savepoint]:
    response = transport.call(transport.stub.ListSavepoints, pb.ListSavepointsRequest(session_id=session_id), turn)
    return savepoints_from(list(response.savepoints))


def roll_back(
    transport: SessionTransport, session_id: str, turn: Awaited, savepoint: Savepoint | int | None, steps: int
) -> Rollback:
    """Without a savepoint, goes back by so many."""
    if savepoint is None:
        savepoint = newest(list_savepoints(transport, session_id, turn), steps)
    response = transport.call(transport.stub.Rollback, chosen(savepoint, session_id), turn)
    return rollback_from(response)
