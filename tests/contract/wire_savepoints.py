"""Savepoints of a session behind a front, with the calls of `executor_server.sessions.SessionSavepoints`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.core import Savepoint, Savepoints

if TYPE_CHECKING:
    from tests.contract.wire import WireSession


class WireSavepoints:
    def __init__(self, session: WireSession) -> None:
        self._session = session

    async def take(self) -> Savepoints:
        request = service_pb.TakeSavepointRequest(session_id=self._session.session_id)
        answer = await self._session.once(request)
        return Savepoints(_from(answer.savepoints), answer.dropped, 0, taken=answer.savepoints[-1].number)

    async def roll_back(self, number: int) -> Savepoints:
        request = service_pb.RollbackRequest(session_id=self._session.session_id, savepoint=number)
        answer = await self._session.once(request)
        return Savepoints(_from(answer.savepoints), answer.dropped, answer.generation, left_out=tuple(answer.left_out))

    async def listed(self) -> Savepoints:
        request = service_pb.ListSavepointsRequest(session_id=self._session.session_id)
        answer = await self._session.once(request)
        return Savepoints(_from(answer.savepoints), 0, 0)


def _from(wire: Iterable[service_pb.Savepoint]) -> tuple[Savepoint, ...]:
    return tuple(
        Savepoint(
            each.number,
            each.made_time.ToNanoseconds() / 1e9,
            each.files,
            each.file_bytes,
            tuple(each.left_out),
            each.is_branch,
        )
        for each in wire
    )
