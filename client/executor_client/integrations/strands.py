"""Strands Agents: `RemoteSandbox`, a session as the sandbox of an `Agent`.

    sandbox = RemoteSandbox(image="data")
    agent = Agent(model=model, sandbox=sandbox, hooks=[sandbox])

As a hook, it ends the run when its session or its daemon fails. Strands' tools turn each exception into an answer for
the model, and an answer about a lost session would be scored like a mistake of the model. Before the model's next turn,
the hook raises the error again, and Strands ends the run with an EventLoopException.
"""

from __future__ import annotations

import codecs
import contextlib
import posixpath
from collections.abc import AsyncGenerator
from typing import Any

from executor_client import ProcessOutput, ProcessResult
from executor_client._core.process import KeptOutput
from executor_client.aio_processes import OUTPUT_BYTES
from executor_client.integrations._common import Failures, NamedSession, SessionOptions, blocking, extra, not_lost, text

with extra("strands"):
    from strands.hooks import BeforeModelCallEvent, HookProvider, HookRegistry
    from strands.sandbox import LANGUAGE_PATTERN, ExecutionResult, FileInfo, Sandbox, StreamChunk
    from strands.sandbox.errors import SandboxPathNotFoundError, SandboxTimeoutError
    from strands.types.tools import AgentTool
    from strands.vended_tools.file_editor import make_file_editor
    from strands.vended_tools.shell import make_shell


class RemoteSandbox(Sandbox, HookProvider, contextlib.AbstractContextManager["RemoteSandbox"]):
    """A sandbox of Strands: one session, created at its first use, from any event loop.

    `options` are fields of `SessionOptions`. `close` ends the session; a forgotten one ends after its idle time. With a
    `name`, the sandbox uses the caller's session of this name and creates it if there is none.

    A command that fails is a result. A lost session or an unreachable daemon raises ConnectionError. Other errors of
    files are FileError, which is also FileNotFoundError and the like.
    """

    def __init__(self, *, name: str | None = None, **options: Any) -> None:
        self._session = NamedSession(SessionOptions(**options), name, framework="strands")
        self._failures = Failures(ConnectionError)

    @property
    def name(self) -> str:
        """The session's name."""
        return self._session.name

    def close(self) -> None:
        """Ends the session. Idempotent. Blocks for a moment; for code with and without an event loop."""
        blocking(self._session.end())

    def __exit__(self, *error: object) -> None:
        self.close()

    def execute_streaming(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[StreamChunk | ExecutionResult, None]:
        """Runs a command in a shell. A cancelled call, or a generator that is left early, kills it.

        The final result has the head and tail of large output. Raises SandboxTimeoutError after `timeout` seconds.
        """
        return self._stream(command, None, timeout, cwd, env)

    def execute_code_streaming(
        self,
        code: str,
        language: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[StreamChunk | ExecutionResult, None]:
        """Gives code to an interpreter on its standard input. Exit code 127 if the image has no such interpreter."""
        if not LANGUAGE_PATTERN.fullmatch(language):
            raise ValueError(f"language parameter contains invalid characters: {language!r}")
        return self._stream(language, code, timeout, cwd, env)

    async def _stream(
        self, command: str, code: str | None, timeout: float | None, cwd: str | None, env: dict[str, str] | None
    ) -> AsyncGenerator[StreamChunk | ExecutionResult, None]:
        kept = KeptOutput(OUTPUT_BYTES)
        decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}
        result = None
        with self._failures.recorded():
            processes = (await self._session.get()).processes
            events = processes.stream(command, input=code, timeout_s=timeout, cwd=cwd or "", env=env)
            async with contextlib.aclosing(events):
                async for event in events:
                    if isinstance(event, ProcessResult):
                        result = not_lost(event)
                        continue
                    kept.add(event)
                    if isinstance(event, ProcessOutput):
                        yield StreamChunk(decoders[event.stream].decode(event.data), event.stream)
        assert result is not None and result.exit_code is not None, "only a lost command has none"
        stdout, stderr = map(text, kept.finish())
        if result.outcome == "timeout":
            raise SandboxTimeoutError(timeout, stdout, stderr)
        yield ExecutionResult(exit_code=result.exit_code, stdout=stdout, stderr=stderr)

    async def read_file(self, path: str, **kwargs: Any) -> bytes:
        with self._failures.recorded():
            return await (await self._session.get()).files.read(path)

    async def write_file(self, path: str, content: bytes, **kwargs: Any) -> None:
        with self._failures.recorded():
            await (await self._session.get()).files.write(path, content)

    async def remove_file(self, path: str, **kwargs: Any) -> None:
        with self._failures.recorded():
            await (await self._session.get()).files.remove(path)

    async def list_files(self, path: str, **kwargs: Any) -> list[FileInfo]:
        """Lists a directory. Raises SandboxPathNotFoundError if there is none."""
        try:
            with self._failures.recorded():
                listed = await (await self._session.get()).files.list(path, recursive=False)
                if listed.truncated:
                    raise OSError(f"{path!r} has more entries than can be listed: {len(listed)}")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SandboxPathNotFoundError(path) from error
        # Strands expects None if it is unknown whether an entry is a directory, as for a link.
        return [
            FileInfo(posixpath.basename(each.path), None if each.is_link else each.is_directory, each.size_bytes)
            for each in listed
        ]

    def get_tools(self) -> list[AgentTool]:
        """Returns the tools that the agent gets with this sandbox: a shell and an editor."""
        return [
            make_shell(sandbox=self, name="sandbox_shell"),
            make_file_editor(sandbox=self, name="sandbox_file_editor"),
        ]

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeModelCallEvent, lambda event: self._failures.raise_last())
