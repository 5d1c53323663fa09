"""Admission: questions before something happens in a session; the answer may be a refusal.

The session layer asks after the policy has approved a request and before the effect. This class agrees to everything.
The daemon's own (executor_server/policy/quotas) holds tenants to their quotas and writes the audit log. It refuses
with an ExecutorError, and never decides what a policy grants.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from executor_server.core import ExecutionLimits, Principal, ProcessFacts, SessionFacts, SessionSpec, ToolCall, ToolSpec


@dataclass(frozen=True)
class Answer:
    """The facts of a client's answer to a tool call, without its content."""

    call_id: str
    size_bytes: int
    failed: bool


@dataclass(frozen=True)
class StateFacts:
    """The facts of an exported state, without its content."""

    sha256: str  # digest of the archive
    size_bytes: int
    variables: int
    files: int
    is_foreign: bool = False  # True when another daemon or tenant made it
    from_session: str = ""


def nothing_reserved() -> None:
    """Does nothing: the release of an admission that reserved nothing."""


class AdmissionController:
    """Agrees to everything."""

    async def session(self, principal: Principal, request_id: str, spec: SessionSpec) -> Callable[[], None]:
        """Asked before a session is made. Returns a function that releases what was reserved.

        The function must be called once, after the observers know the session or after its creation failed.
        """
        return nothing_reserved

    @asynccontextmanager
    async def creation_turn(self, tenant: str) -> AsyncIterator[None]:
        """Waits until the tenant may create a sandbox."""
        yield

    async def execution(
        self, session: SessionFacts, execution_id: str, code: str, limits: ExecutionLimits
    ) -> Callable[[], None]:
        """Asked before an execution begins. Returns a function that releases what was reserved, as `session` does."""
        return nothing_reserved

    def network_window(self, session: SessionFacts) -> int | None:
        """Returns the bytes that a session may move until its next call of this; None: no limit."""
        return None

    def tool_call(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        """Called before a client must run a tool."""

    async def tool_answer(self, session: SessionFacts, execution_id: str, answer: Answer) -> None:
        """Asked before a tool's answer goes into the sandbox."""

    async def tools(self, session: SessionFacts, tools: Sequence[ToolSpec]) -> None:
        """Asked before a session gets tools."""

    async def imports(self, session: SessionFacts, patterns: Sequence[str]) -> None:
        """Asked before more modules are authorized in a session."""

    async def variables(self, session: SessionFacts, names: Sequence[str], *, write: bool) -> None:
        """Asked before variables are set or read."""

    async def state_export(self, session: SessionFacts) -> None:
        """Asked before a session's state is exported."""

    async def state_restore(self, session: SessionFacts, state: StateFacts) -> None:
        """Asked before a state is restored in a session."""

    async def savepoint(self, session: SessionFacts, back_to: int | None) -> None:
        """Asked before a savepoint is taken (None), or a session goes back to one."""

    async def file_put(self, session: SessionFacts, path: str, size_bytes: int, *, tar: bool) -> None:
        """Asked before a file goes into the workspace."""

    async def file_get(self, session: SessionFacts, path: str, *, tar: bool) -> None:
        """Asked before a file is read from the workspace."""

    async def process(self, session: SessionFacts, process: ProcessFacts) -> None:
        """Asked before a process is started."""

    async def port(self, session: SessionFacts, port: int) -> None:
        """Asked before a connection to a port of the sandbox is opened."""

    async def process_input(self, session: SessionFacts, process_id: str, offset: int, data: bytes) -> None:
        """Asked before bytes go to the input of a process."""

    async def action(self, session: SessionFacts, kind: str, facts: Mapping[str, str | int | bool]) -> None:
        """Asked before an action that has no rules of its own; its kind and facts are those of its record."""
