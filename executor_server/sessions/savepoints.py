"""The savepoints of a session: the guest keeps them, and they end with its sandbox.

A rollback restores variables and files of the workspace. It does not restore budgets, the policy or the audit log: the
guest keeps the current rules.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from executor_server.backends.channel import listed_savepoints
from executor_server.core import NotFound, Reason, Result, Savepoint, Savepoints
from executor_server.guest.wire.savepoint_messages import ListSavepoints, RollBack, TakeSavepoint
from executor_server.guest.wire.schema import Message
from executor_server.policy import check_savepoint
from executor_server.sessions.guest_requests import GuestRequests, answered
from executor_server.sessions.shared import SessionHooks

if TYPE_CHECKING:
    from executor_server.sessions.session import Session


class SessionSavepoints:
    """Takes savepoints of one session, and rolls back to them. Each call waits for the executions before it."""

    def __init__(self, session: Session, requests: GuestRequests, hooks: SessionHooks) -> None:
        self._session = session
        self._requests = requests
        self._admission = hooks.admission
        self.known: tuple[Savepoint, ...] = ()
        """The existing ones that this daemon was notified of; the guest's own answers have all details."""

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

    def note_result(self, result: Result) -> None:
        """Notes the savepoint that an execution took and the branch that it left. The oldest make room for them."""
        rules = self._session.spec.state
        branch = result.branch.number if result.branch is not None else 0
        for number, is_branch, kept in ((result.savepoint, False, rules.savepoints), (branch, True, rules.branches)):
            if number:
                same = [each.number for each in self.known if each.is_branch is is_branch]
                dropped = same[: max(len(same) + 1 - kept, 0)]
                added = Savepoint(number, time.time(), 0, 0, is_branch=is_branch)
                self.known = (*(each for each in self.known if each.number not in dropped), added)

    async def _ask(self, message: Callable[[int], Message]) -> Savepoints:
        answer = answered(await self._requests.ask(listed_savepoints, message))
        self.known = answer.savepoints
        return answer
