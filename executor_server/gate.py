"""What has to agree, and be written down, before something happens in a session.

The session layer asks a Gate after the request was approved and before the effect. This one agrees to everything; the
daemon's own (admission.py) holds tenants to their quotas and writes the audit log. A gate refuses with an
ExecutorError. It never decides what a policy grants: that has been done by then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from executor_server.model import ExecutionLimits, Principal, SessionFacts, SessionSpec, ToolCall, ToolSpec


@dataclass(frozen=True)
class Answer:
    """What a client answers a tool call with, in numbers."""

    call_id: str
    size_bytes: int
    failed: bool


@dataclass(frozen=True)
class StateFacts:
    """What is told of a session's state."""

    sha256: str  # of the archive
    size_bytes: int
    variables: int
    files: int
    is_foreign: bool = False  # another daemon's or tenant's
    from_session: str = ""


def nothing_reserved() -> None:
    """Gives back nothing."""


class Gate:
    """Agrees to everything."""

    async def session(self, principal: Principal, request_id: str, spec: SessionSpec) -> Callable[[], None]:
        """Before a session is made. What is returned gives back what was reserved; to be called once, when the session
        has been observed or could not be made."""
        return nothing_reserved

    @asynccontextmanager
    async def creation_turn(self, tenant: str) -> AsyncIterator[None]:
        """Waits for the tenant's turn to have a sandbox made."""
        yield

    async def execution(
        self, session: SessionFacts, execution_id: str, code: str, limits: ExecutionLimits
    ) -> Callable[[], None]:
        """Before an execution is begun. What is returned gives back what was reserved, as with `session`."""
        return nothing_reserved

    def tool_call(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        """Before a client is told to run a tool."""

    async def tool_answer(self, session: SessionFacts, execution_id: str, answer: Answer) -> None:
        """Before a tool's answer goes into the sandbox."""

    async def tools(self, session: SessionFacts, tools: Sequence[ToolSpec]) -> None:
        """Before a session gets tools."""

    async def imports(self, session: SessionFacts, patterns: Sequence[str]) -> None:
        """Before more modules are authorized in a session."""

    async def variables(self, session: SessionFacts, names: Sequence[str], *, write: bool) -> None:
        """Before variables are set or read."""

    async def state_export(self, session: SessionFacts) -> None:
        """Before a session's state is written down."""

    async def state_restore(self, session: SessionFacts, state: StateFacts) -> None:
        """Before a state goes into a session."""

    async def file_put(self, session: SessionFacts, path: str, size_bytes: int, *, tar: bool) -> None:
        """Before a file goes into the workspace."""

    async def file_get(self, session: SessionFacts, path: str, *, tar: bool) -> None:
        """Before a file is read from the workspace."""
