"""The savepoints of a session: the guest keeps them, and they end with its sandbox.

A rollback restores variables and files of the workspace. It does not restore budgets, the policy or the audit log: the
guest keeps the current rules.
"""

from __future__ import annotations

from collections.abc import Callable

from executor_server.backends.channel import Request, listed_savepoints
from executor_server.core import NotFound, Reason, Savepoints
from executor_server.guest.wire.savepoint_messages import ListSavepoints, RollBack, TakeSavepoint
from executor_server.guest.wire.schema import Message
from executor_server.policy import check_savepoint
from executor_server.sessions.guest_requests import GuestRequests
from executor_server.sessions.shared import SessionHooks, SessionServices


class SessionSavepoints:
    """Takes savepoints of one session, and rolls back to them. Each call waits for the executions before it."""

    def __init__(self, session: SessionServices, requests: GuestRequests, hooks: SessionHooks) -> None:
        self._session = session
        self._requests = requests
        self._admission = hooks.admission

    async def take(self) -> Savepoints:
        """Takes one; drops the oldest if there are too many.

        Raises PolicyViolation, PreconditionFailed (the interpreter can't be copied now, or the session is lost).
        """
        self._session.require_alive()
        check_savepoint(self._session.spec)
        await self._admission.savepoint(self._session.facts, None)
        rules = self._session.spec.state
        check_savepoint(self._session.spec)  # again: another policy may be in force after the await
        return await self._ask(
            lambda op: TakeSavepoint(op=op, kept=rules.savepoints, file_bytes=rules.savepoint_file_bytes)
        )

    async def roll_back(self, number: int) -> Savepoints:
        """Rolls back to a savepoint (0: the newest), and drops later ones. Raises NotFound, PreconditionFailed."""
        self._session.require_alive()
        if number == 0:
            numbers = [each.number for each in (await self.listed()).savepoints if not each.is_branch]
            if not numbers:
                raise NotFound(Reason.SAVEPOINT_NOT_FOUND, "the session has no savepoint")
            number = numbers[-1]
        await self._admission.savepoint(self._session.facts, number)
        return await self._ask(lambda op: RollBack(op=op, savepoint=number))

    async def listed(self) -> Savepoints:
        """Returns the existing savepoints."""
        self._session.require_alive()
        return await self._ask(lambda op: ListSavepoints(op=op))

    async def _ask(self, message: Callable[[int], Message]) -> Savepoints:
        request = Request(listed_savepoints, self._session.hold_reading)
        with self._requests.asking(request, message):
            answer = await request.next()
        assert answer is not None, "a request that has an answer ended without one"
        return answer
