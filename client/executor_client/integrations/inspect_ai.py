"""The sandbox "remote" of Inspect: each sample has a session of its own, from its start to its end.

    from inspect_ai import Task
    from executor_client.integrations.inspect_ai import RemoteSandboxConfig

    Task(..., sandbox="remote")                                                        # the policy's image
    Task(..., sandbox=SandboxEnvironmentSpec("remote", RemoteSandboxConfig(image="data")))

Inspect finds the name by the entry point `inspect_ai`. A lost session or an unreachable daemon raises the client's own
error. Inspect fails the sample for it, and repeats it if `retry_on_error` is set. It would show its own
SandboxUnavailableError to the model and score the model's reaction, so that error is never raised here.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from typing import Annotated, Any

from executor_client import AsyncSession, ExecutorClientError, InvalidRequest, OutputLimitExceeded
from executor_client.integrations._common import SessionOptions, attached_session, extra, not_lost, text

with extra("inspect-ai"):
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxEnvironment,
        SandboxEnvironmentConfigType,
        SandboxUserUnsupportedError,
        sandboxenv,
    )
    from inspect_ai.util import SandboxEnvironmentLimits as Limits
    from pydantic import BaseModel, BeforeValidator, ConfigDict

logger = logging.getLogger(__name__)
POLLING_INTERVAL_S = 0.2

# Inspect hashes configurations, so a mapping is kept as pairs.
_as_pairs = BeforeValidator(lambda given: tuple(given.items()) if isinstance(given, Mapping) else given)
_Pairs = Annotated[Mapping[str, Any] | tuple[tuple[str, Any], ...], _as_pairs]


class RemoteSandboxConfig(BaseModel):
    """The options of `SessionOptions`, for Inspect's logs and command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    address: str | None = None
    tls: bool | None = None
    image: str | None = None
    limits: _Pairs = ()
    idle_time_s: float | None = None
    network: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    labels: _Pairs = ()
    env: _Pairs = ()


@sandboxenv(name="remote")
class RemoteSandboxEnvironment(SandboxEnvironment):
    """A session as a sandbox of Inspect. It ends with its sample, and soon after Inspect itself was killed."""

    def __init__(self, session: AsyncSession) -> None:
        super().__init__()
        self._session = session

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return RemoteSandboxConfig(**config)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        return {"default": cls(await attached_session(_options(config), framework="inspect-ai"))}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for each in environments.values():
            try:
                await each.as_type(cls)._session.close()
            except ExecutorClientError as error:
                # The sample has its result; the daemon ends the session by itself once this process no longer holds it.
                logger.warning("could not end session %s: %s", each.as_type(cls)._session.session_id, error)

    def default_polling_interval(self) -> float:
        return POLLING_INTERVAL_S

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Runs a command. It is never repeated: a timeout here is the command's own, not the connection's."""
        if user is not None:
            raise SandboxUserUnsupportedError(
                f"can't run a command as {user!r}: a sandbox has one user, who is not root; omit `user`"
            )
        limits: dict[str, Any] = {"timeout_s": timeout, "max_output_bytes": Limits.MAX_EXEC_OUTPUT_SIZE}
        run = self._session.processes.run(cmd, input=input, cwd=cwd or "", env=env, overflow="error", **limits)
        try:
            done = not_lost(await run)
        except OutputLimitExceeded as error:
            raise OutputLimitExceededError(
                Limits.MAX_EXEC_OUTPUT_SIZE_STR, text(error.stdout_bytes + error.stderr_bytes)
            ) from error
        except InvalidRequest as error:
            if error.reason == "COMMAND_NOT_EXECUTABLE":
                raise PermissionError(errno.EACCES, str(error), cmd[0]) from error
            if error.reason == "COMMAND_NOT_FOUND":
                return ExecResult(False, 127, "", f"{error}\n")
            raise
        if done.timed_out:
            timed_out = TimeoutError(f"the command was killed after {timeout} s")
            timed_out.truncated_output = done.stdout + done.stderr  # type: ignore[attr-defined]  # Inspect reads it
            raise timed_out
        assert done.exit_code is not None, "only a lost command has none"
        return ExecResult(done.succeeded, done.exit_code, done.stdout, done.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        await self._session.files.write(file, contents.encode() if isinstance(contents, str) else contents)

    async def read_file(self, file: str, text: bool = True) -> Any:
        limit = Limits.MAX_READ_FILE_SIZE
        content = await self._session.files.read(file, max_bytes=limit + 1)  # a file of exactly the limit may be read
        if len(content) > limit:
            raise OutputLimitExceededError(Limits.MAX_READ_FILE_SIZE_STR, None)
        return content.decode() if text else content


def _options(config: SandboxEnvironmentConfigType | None) -> SessionOptions:
    if isinstance(config, str):
        raise ValueError(f'the sandbox "remote" takes a RemoteSandboxConfig, not the file {config!r}')
    values = {} if config is None else config.model_dump()
    values |= {name: dict(values[name]) for name in ("limits", "labels", "env") if name in values}
    return SessionOptions(**values)
