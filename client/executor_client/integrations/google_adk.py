"""Google ADK: `RemoteEnvironment`, a session as the environment of an `EnvironmentToolset`.

    toolset = EnvironmentToolset(environment=RemoteEnvironment(image="data"))
    agent = Agent(name="coder", model="gemini-3-pro", tools=[toolset])

ADK's tools turn each exception into an answer for the model. An answer about a lost session would be scored like a
mistake of the model, so the run ends before the model's next turn: `working_dir`, which the toolset reads then, raises
the error again.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import Any

from executor_client._aio import shielded
from executor_client.integrations._common import (
    Failures,
    NamedSession,
    SessionOptions,
    extra,
    infrastructure_errors,
    not_lost,
)

with extra("google-adk"):
    from google.adk.environment import BaseEnvironment, ExecutionResult
    from google.adk.errors.tool_execution_error import ToolErrorType, ToolExecutionError

WORKSPACE = Path("/workspace")


class RemoteEnvironment(BaseEnvironment):
    """An environment of Google ADK: one session. It begins with `initialize` and ends with `close`.

    `options` are fields of `SessionOptions`. With a `name`, the environment uses the caller's session of this name and
    creates it if there is none; any process can use it later, and `close` leaves it to its idle time.

    A command that fails is a result. A lost session or an unreachable daemon raises ToolExecutionError. File errors are
    FileError, which is also FileNotFoundError and the like.
    """

    def __init__(self, *, name: str | None = None, **options: Any) -> None:
        self._options = SessionOptions(**options)
        self._name = name
        self._session: NamedSession | None = None
        self._failures = Failures(_unavailable)

    @property
    def working_dir(self) -> Path:
        self._failures.raise_last()
        return WORKSPACE

    async def initialize(self) -> None:
        """Creates or finds the session. Idempotent."""
        if self._session is None:
            self._session = NamedSession(self._options, self._name, framework="google-adk")
        with infrastructure_errors(_unavailable):  # not recorded: this is not a tool call
            await self._session.get()
        self.is_initialized = True

    async def close(self) -> None:
        """Ends the session, unless it was given a name. Idempotent."""
        session, self._session = self._session, None
        self.is_initialized = False
        if session is not None and self._name is None:
            with infrastructure_errors(_unavailable):
                await shielded(session.end)

    async def execute(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        """Runs a command in a shell, in the workspace. A cancelled call kills it. Large output is cut to head and
        tail."""
        with self._failures.recorded():
            processes = (await self._opened().get()).processes
            completed = not_lost(await processes.run(command, timeout_s=timeout))
        assert completed.exit_code is not None, "only a lost command has none"
        return ExecutionResult(
            exit_code=completed.exit_code,
            stdout=completed.stdout,
            stderr=completed.stderr,
            timed_out=completed.timed_out,
        )

    async def read_file(self, path: str | PurePath) -> bytes:
        with self._failures.recorded():
            return await (await self._opened().get()).files.read(os.fspath(path))

    async def write_file(self, path: str | PurePath, content: str | bytes) -> None:
        data = content.encode() if isinstance(content, str) else content
        with self._failures.recorded():
            await (await self._opened().get()).files.write(os.fspath(path), data)

    def _opened(self) -> NamedSession:
        if self._session is None:
            raise RuntimeError("this environment is not initialized: call initialize()")
        return self._session


def _unavailable(text: str) -> ToolExecutionError:
    return ToolExecutionError(text, ToolErrorType.SERVICE_UNAVAILABLE)
