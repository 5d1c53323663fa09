"""The calls about savepoints, of the asyncio client."""

from __future__ import annotations

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._aio import AsyncSessionTransport
from executor_client._core.waiting import Awaited
from executor_client.savepoint import Rollback, Savepoint, chosen, newest, rollback_from, savepoints_from


async def take_savepoint(transport: AsyncSessionTransport, session_id: str, turn: Awaited) -> Savepoint:
    response = await transport.call(transport.stub.TakeSavepoint, pb.TakeSavepointRequest(session_id=session_id), turn)
    return newest(savepoints_from(list(response.savepoints)), 1)


async def list_savepoints(transport: AsyncSessionTransport, session_id: str, turn: Awaited) -> list[Savepoint]:
    response = await transport.call(
        transport.stub.ListSavepoints, pb.ListSavepointsRequest(session_id=session_id), turn
    )
    return savepoints_from(list(response.savepoints))


async def roll_back(
    transport: AsyncSessionTransport, session_id: str, turn: Awaited, savepoint: Savepoint | int | None, steps: int
) -> Rollback:
    """Without a savepoint, goes back by so many."""
    if savepoint is None:
        savepoint = newest(await list_savepoints(transport, session_id, turn), steps)
    response = await transport.call(transport.stub.Rollback, chosen(savepoint, session_id), turn)
    return rollback_from(response)
