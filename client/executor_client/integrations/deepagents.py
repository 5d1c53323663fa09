"""Sandboxes of LangChain's deepagents: an agent's commands and files are those of a session.

    from deepagents import create_deep_agent
    from executor_client.integrations.deepagents import RemoteSandbox, with_artifacts

    with RemoteSandbox(image="data") as sandbox:
        agent = create_deep_agent(model, backend=with_artifacts(sandbox))

deepagents stores old messages and large results below `/`, which is read-only in a sandbox. `with_artifacts` moves them
into the workspace; without it they are lost, with a warning in the log.

deepagents has no error for a failed sandbox: a lost session or an unreachable daemon ends the agent's run with the
client's own error. deepagents' tool `glob` turns each exception into an answer for the model, so the backend of
`with_artifacts` raises it again before the model's next turn.
"""

from __future__ import annotations

import contextlib
from typing import Any

from executor_client import FileError, InvalidRequest, PolicyViolationError
from executor_client.integrations._common import Failures, NamedSession, SessionOptions, blocking, extra, not_lost

with extra("deepagents"):
    from deepagents.backends import CompositeBackend
    from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
    from deepagents.backends.sandbox import BaseSandbox

ARTIFACTS_ROOT = "/workspace/.deepagents"
OUTPUT_BYTES_MAX = 8 << 20
"""Bytes that are kept of a command's output."""
_OF_THE_FILE = (FileError, InvalidRequest, PolicyViolationError)
_CODES: dict[type[Exception], str] = {
    FileNotFoundError: "file_not_found",
    IsADirectoryError: "is_directory",
    PermissionError: "permission_denied",
    FileError: "invalid_path",
    InvalidRequest: "invalid_path",
}


# Untyped where deepagents is not installed.
class RemoteSandbox(BaseSandbox, contextlib.AbstractContextManager["RemoteSandbox"]):  # type: ignore[misc]
    """A session as a sandbox. The first call creates it, or finds the caller's session of this `name`.

    `options` are those of `SessionOptions`. The session is detached: it lives until `close` or `aclose`, or its idle
    time, so that a later process can continue a thread with it. As a context manager, ends the session.
    """

    def __init__(self, name: str | None = None, **options: Any) -> None:
        self._session = NamedSession(SessionOptions(**options), name, framework="deepagents")

    @property
    def id(self) -> str:
        """The session's name."""
        return self._session.name

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Runs a command with bash, or with sh if there is no bash, and returns the output of both streams."""
        return blocking(self.aexecute(command, timeout=timeout))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """The same on an event loop. A cancelled call kills the command."""
        processes = (await self._session.get()).processes
        limits: dict[str, Any] = {"timeout_s": timeout or None, "max_output_bytes": OUTPUT_BYTES_MAX}  # 0: no limit
        done = not_lost(await processes.run(command, merge_stderr=True, **limits))
        output, exit_code = done.stdout, done.exit_code
        if done.timed_out:
            output += f"\nthe command was killed after {done.usage.wall_time_s:.0f} s, its timeout\n"
            exit_code = 124  # like coreutils' timeout
        return ExecuteResponse(output=output, exit_code=exit_code, truncated=done.omitted_bytes > 0)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return blocking(self.aupload_files(files))

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        to = (await self._session.get()).files
        responses = []
        for path, data in files:
            try:
                await to.write(_absolute(path), data)
                responses.append(FileUploadResponse(path=path))
            except _OF_THE_FILE as error:
                responses.append(FileUploadResponse(path=path, error=_code(error)))
        return responses

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return blocking(self.adownload_files(paths))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        source = (await self._session.get()).files
        responses = []
        for path in paths:
            try:
                responses.append(FileDownloadResponse(path=path, content=await source.read(_absolute(path))))
            except _OF_THE_FILE as error:
                responses.append(FileDownloadResponse(path=path, error=_code(error)))
        return responses

    def close(self) -> None:
        """Ends the session with its files. Idempotent."""
        blocking(self._session.end())

    async def aclose(self) -> None:
        await self._session.end()

    def __exit__(self, *error: object) -> None:
        self.close()


class _Backend(CompositeBackend):  # type: ignore[misc]
    """Ends the run if `glob` failed: deepagents reads `default` before each turn of the model."""

    def __init__(self, sandbox: RemoteSandbox) -> None:
        self._sandbox, self._failures = sandbox, Failures()
        super().__init__(default=sandbox, routes={}, artifacts_root=ARTIFACTS_ROOT)

    @property
    def default(self) -> RemoteSandbox:
        self._failures.raise_last()
        return self._sandbox

    @default.setter
    def default(self, sandbox: RemoteSandbox) -> None:
        self._sandbox = sandbox

    def glob(self, *args: Any, **kwargs: Any) -> Any:
        with self._failures.recorded():
            return super().glob(*args, **kwargs)

    async def aglob(self, *args: Any, **kwargs: Any) -> Any:
        with self._failures.recorded():
            return await super().aglob(*args, **kwargs)


def with_artifacts(sandbox: RemoteSandbox) -> CompositeBackend:
    """Returns a backend for `create_deep_agent` that stores deepagents' own files in the workspace."""
    return _Backend(sandbox)


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise InvalidRequest("deepagents' paths are absolute")
    return path


def _code(error: Exception) -> str:
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), str(error))
