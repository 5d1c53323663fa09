"""Savepoints and branches of a session, of the asyncio client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal, overload

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._aio import AsyncTransport, OnEvent
from executor_client._core import convert, requests
from executor_client._core import tools as host_tools
from executor_client._core.arguments import checks_calls
from executor_client._core.requests import LimitsLike
from executor_client._core.session_base import SessionBase
from executor_client._core.tools import Tool
from executor_client.errors import PreconditionError
from executor_client.results import ExecutionResult
from executor_client.savepoint import (
    Branch,
    Rollback,
    Savepoint,
    chosen,
    chosen_branch,
    newest,
)


@checks_calls
class AsyncSessionUndo(SessionBase[AsyncTransport]):
    """The calls of a session for savepoints, rollbacks and branches."""

    _tools: dict[str, Tool]

    async def savepoint(self) -> Savepoint:
        """Takes a savepoint: a copy of the interpreter's memory and of the workspace's files.

        It takes milliseconds, stays in the sandbox, and ends with it. The oldest savepoints are dropped when there are
        more than the policy allows, or when memory is short. Raises PreconditionError (SAVEPOINT_REFUSED) while the
        program has threads, and PolicyViolationError if the policy allows none.
        """
        host_tools.refuse_reentrance(self.session_id, "savepoint")
        turn = self._turn("to take a savepoint")
        request = pb.TakeSavepointRequest(session_id=self.session_id)
        response = await self._open().call(request, turn)
        if self._record is not None:
            self._record.request("savepoint", request)
        return newest(convert.savepoints_from_wire(response.savepoints), 1)

    async def savepoints(self) -> list[Savepoint]:
        """Returns the existing savepoints, oldest first."""
        return [each for each in await self._kept() if not each.is_branch]

    async def rollback(self, savepoint: Savepoint | int | None = None, *, steps: int = 1) -> Rollback:
        """Goes back to a savepoint, or by a number of savepoints: `steps=1` is the newest.

        Restores variables, modules and files of the workspace. The savepoint stays; later ones are dropped. Everything
        that runs in the sandbox ends, except processes started by `processes`. Budgets, policy and tools stay as they
        are now. Raises NotFoundError (SAVEPOINT_NOT_FOUND: it was dropped, or there is none), PreconditionError
        (SAVEPOINT_LOST: the variables are then reset), and InvalidRequest if there are fewer savepoints.
        """
        host_tools.refuse_reentrance(self.session_id, "rollback")
        if savepoint is None and steps != 1:
            savepoint = newest(await self.savepoints(), steps)
        return await self._go_to(0 if savepoint is None else chosen(savepoint), "to go back to a savepoint")

    @overload
    async def try_(
        self,
        code: str,
        *,
        on_event: OnEvent | None = None,
        limits: LimitsLike = None,
        output_mode: Literal["trailing_expression", "last_statement"] = "trailing_expression",
        tools: bool = True,
    ) -> ExecutionResult: ...

    @overload
    async def try_(
        self,
        code: list[str] | tuple[str, ...],
        *,
        on_event: OnEvent | None = None,
        limits: LimitsLike = None,
        output_mode: Literal["trailing_expression", "last_statement"] = "trailing_expression",
        tools: bool = True,
    ) -> list[ExecutionResult]: ...

    async def try_(
        self,
        code: str | list[str] | tuple[str, ...],
        *,
        on_event: OnEvent | None = None,
        limits: LimitsLike = None,
        output_mode: Literal["trailing_expression", "last_statement"] = "trailing_expression",
        tools: bool = True,
    ) -> ExecutionResult | list[ExecutionResult]:
        """Runs code in a branch, a copy of the interpreter, and leaves the session unchanged.

        `ExecutionResult.branch` lists the variables and files that the program changed. `keep` continues from it. With
        several programs, each runs in a branch of the same state, one after another, and there is a result for each.

        A branch is an execution: the policy applies, it is audited, and it spends the session's budgets. It can call
        the session's tools, whose effects outside the sandbox stay; with `tools=False` such a call raises an exception
        in the program.

        Raises PreconditionError (SAVEPOINT_REFUSED) if no branch can be made, for example while the program has threads
        or if the workspace is too large; PolicyViolationError if the policy allows none; and the errors of `execute`.
        """
        host_tools.refuse_reentrance(self.session_id, "try_")
        given = self._tools if tools else {}
        if isinstance(code, str):
            return await self._tried(code, given, on_event, limits, output_mode)
        return [await self._tried(each, given, on_event, limits, output_mode) for each in code]

    async def _tried(
        self, code: str, tools: Mapping[str, Tool], on_event: OnEvent | None, limits: LimitsLike, output_mode: str
    ) -> ExecutionResult:
        request = requests.execute(self.session_id, code, None, output_mode, limits, branch=True)
        result = await self._execute(request, tools, on_event)
        if result.branch is not None and result.branch.refused:
            message = f"no branch could be made: {result.branch.refused}"
            raise PreconditionError(message, reason="SAVEPOINT_REFUSED")
        return result

    async def keep(self, branch: ExecutionResult | Branch) -> Rollback:
        """Continues from a branch, with the variables and files that its program left.

        All branches stay; savepoints taken after this branch are dropped. Otherwise as `rollback`. Raises
        InvalidRequest for a branch that was not kept, and NotFoundError for a branch that was dropped.
        """
        host_tools.refuse_reentrance(self.session_id, "keep")
        return await self._go_to(chosen_branch(branch), "to continue from a branch")

    async def _kept(self) -> list[Savepoint]:
        turn = self._turn("to list its savepoints")
        request = pb.ListSavepointsRequest(session_id=self.session_id)
        response = await self._open().call(request, turn)
        return convert.savepoints_from_wire(response.savepoints)

    async def _go_to(self, number: int, to_do: str) -> Rollback:
        request = pb.RollbackRequest(session_id=self.session_id, savepoint=number)
        response = await self._open().call(request, self._turn(to_do))
        done = convert.rollback_from_wire(response, number)
        self._generation = done.generation
        if self._record is not None:
            self._record.request("rollback", request)
        return done

    @abstractmethod
    async def _execute(
        self, request: pb.ExecuteRequest, tools: Mapping[str, Tool], on_event: OnEvent | None
    ) -> ExecutionResult:
        """Runs an execution to its result."""
