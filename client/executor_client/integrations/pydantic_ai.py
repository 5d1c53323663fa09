"""Workspaces of Pydantic AI: an agent's commands and files are those of a session.

    from pydantic_ai import Agent
    from executor_client.integrations.pydantic_ai import RemoteWorkspace

    agent = Agent(model, capabilities=[RemoteWorkspace(image="data")])

Pydantic AI never ends an environment, since a later run may continue in it by its reference. So each session is
detached, and ends after its idle time or by `destroy`. The reference is the session's name, without address or token.
"""

from __future__ import annotations

import asyncio
import math
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from executor_client import FileInfo, OutputLimitExceeded, SessionGone
from executor_client.integrations._common import NamedSession, SessionOptions, calls_raise, extra, not_lost, text

with extra("pydantic-ai"):
    from pydantic_ai import RunContext, workspaces
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.workspaces import CommandResult, FileEntry, WorkspaceCommand, WorkspaceRef

PROVIDER = "remote-executor"
OUTPUT_BYTES_MAX = 10 << 20
"""Bytes of each output stream; a command that prints more is killed."""
_STATS_AT_ONCE = 16


@calls_raise(workspaces.WorkspaceUnavailableError, SessionGone)
class RemoteWorkspaceBackend:
    """A session as a workspace. The first operation creates it, or finds the one that `ref` names.

    `options` are those of `SessionOptions`. Raises WorkspaceUnavailableError if the session has ended or is lost. If
    the daemon can't be reached, the client's UnavailableError passes, so that durable engines repeat the operation.
    """

    def __init__(self, ref: WorkspaceRef | None = None, **options: Any) -> None:
        if ref is not None and ref.provider != PROVIDER:
            raise ValueError(f"the workspace {ref.id!r} belongs to the provider {ref.provider!r}, not to {PROVIDER!r}")
        name, must_exist = (None, False) if ref is None else (ref.id, True)
        self._session = NamedSession(SessionOptions(**options), name, framework="pydantic-ai", must_exist=must_exist)
        self._working_dir = ""

    @property
    def ref(self) -> WorkspaceRef | None:
        return WorkspaceRef(provider=PROVIDER, id=self._session.name) if self._session.exists else None

    async def destroy(self) -> None:
        """Ends the session with its files. Idempotent."""
        await self._session.end()

    async def working_dir(self) -> str:
        if not self._working_dir:
            self._working_dir = await (await self._session.get()).files.realpath("")
        return self._working_dir

    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        if isinstance(command, str) is not shell:
            raise TypeError("pass a string with shell=True, or a sequence of arguments without it")
        if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
            raise ValueError("timeout must be a positive finite number or None")
        argv = command if isinstance(command, str) else list(command)
        limits: dict[str, Any] = {"timeout_s": timeout, "max_output_bytes": OUTPUT_BYTES_MAX, "overflow": "error"}
        processes = (await self._session.get()).processes
        try:
            done = not_lost(await processes.run(argv, env=env, not_runnable="result", **limits))
        except OutputLimitExceeded as error:
            output = {"stdout": text(error.stdout_bytes), "stderr": text(error.stderr_bytes)}
            message = f"{error}; write the output to a file and read a part of it"
            raise workspaces.WorkspaceOutputLimitError(message, limit=OUTPUT_BYTES_MAX, **output) from error
        if done.timed_out:
            message = f"the command was killed after {timeout} s"
            raise workspaces.WorkspaceTimeoutError(message, stdout=done.stdout, stderr=done.stderr)
        assert done.exit_code is not None, "only a lost command has none"
        return CommandResult(exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr)

    async def read_bytes(self, path: str) -> bytes:
        return await (await self._session.get()).files.read(path)

    async def write_bytes(self, path: str, data: bytes) -> None:
        await (await self._session.get()).files.write(path, data)

    async def stat(self, path: str) -> FileEntry:
        return _entry(path, await (await self._session.get()).files.stat(path))

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        files = (await self._session.get()).files
        listed = await files.list(path, recursive=False)
        if listed.truncated:
            raise OSError(f"{path!r} has more entries than can be listed: {len(listed)}")
        at_once = asyncio.Semaphore(_STATS_AT_ONCE)

        async def entry(info: FileInfo) -> FileEntry:
            child = posixpath.join(path, posixpath.basename(info.path))
            if not info.is_link:
                return _entry(child, info)
            try:
                async with at_once:
                    return _entry(child, await files.stat(child))
            except OSError:  # a link to nothing, or to itself
                return FileEntry(name=posixpath.basename(child), path=child, is_dir=False, size=None)

        return await asyncio.gather(*map(entry, listed))

    async def make_dir(self, path: str) -> None:
        await (await self._session.get()).files.mkdir(path)

    async def remove(self, path: str) -> None:
        files, root = (await self._session.get()).files, await self.working_dir()
        real = await files.realpath(path)
        if posixpath.commonpath([real, root]) == real and not (await files.stat(path, follow=False)).is_link:
            raise ValueError(f"{path!r} is the working directory or contains it; remove what is in it instead")
        await files.remove(path, recursive=True)

    async def exists(self, path: str) -> bool:
        return await (await self._session.get()).files.exists(path)

    async def realpath(self, path: str) -> str:
        return await (await self._session.get()).files.realpath(path)


def _entry(path: str, info: FileInfo) -> FileEntry:
    size = None if info.is_directory else info.size_bytes
    return FileEntry(name=posixpath.basename(path), path=path, is_dir=info.is_directory, size=size)


class RemoteWorkspace(AbstractCapability[Any]):
    """Gives each run a session as its workspace, or the session that a reference in the message history names."""

    def __init__(self, **options: Any) -> None:
        """`options` are those of `SessionOptions`."""
        SessionOptions(**options)  # an unknown option fails here, not in a run
        self._options = options

    def get_workspace(self, ctx: RunContext[Any], *, ref: WorkspaceRef | None) -> RemoteWorkspaceBackend | None:
        is_ours = ref is None or ref.provider == PROVIDER
        return RemoteWorkspaceBackend(ref, **self._options) if is_ours else None
