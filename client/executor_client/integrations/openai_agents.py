"""OpenAI Agents SDK: `RemoteSandboxClient`, which gives a `SandboxAgent` a session as its sandbox.

    sandbox = SandboxRunConfig(client=RemoteSandboxClient(image="data"))
    result = await Runner.run(agent, "…", run_config=RunConfig(sandbox=sandbox))

Shell, apply-patch, terminals, exposed ports, manifests, snapshots and resume work as with the SDK's own clients. A
state names its session and holds no token. Import this module before you deserialize one: that registers its class.

The sandbox has one user, so `run_as`, `user=` and accounts in a manifest are refused. Cloud mounts are not offered.
"""

from __future__ import annotations

import asyncio
import codecs
import io
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from executor_client import (
    AsyncPortForward,
    AsyncProcess,
    ExecutorClientError,
    InvalidRequest,
    PreconditionError,
    ProcessResult,
    SessionGone,
    TerminalSize,
)
from executor_client._aio import shielded
from executor_client.integrations._common import (
    NamedSession,
    PerLoop,
    SessionOptions,
    extra,
    in_background,
    infrastructure_errors,
    not_lost,
)

with extra("openai-agents"):
    from agents.sandbox import Manifest
    from agents.sandbox.errors import (
        ConfigurationError,
        ErrorCode,
        ExecTimeoutError,
        ExecTransportError,
        ExposedPortUnavailableError,
        WorkspaceArchiveReadError,
        WorkspaceArchiveWriteError,
        WorkspaceReadNotFoundError,
        WorkspaceStartError,
    )
    from agents.sandbox.session import (
        BaseSandboxClient,
        BaseSandboxClientOptions,
        BaseSandboxSession,
        Dependencies,
        Instrumentation,
        SandboxSession,
        SandboxSessionState,
    )
    from agents.sandbox.session.pty_types import (
        PtyExecUpdate,
        allocate_pty_process_id,
        clamp_pty_yield_time_ms,
        resolve_pty_write_yield_time_ms,
        truncate_text_by_tokens,
    )
    from agents.sandbox.session.workspace_payloads import coerce_write_payload
    from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
    from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User

TYPE = "remote-executor"
TERMINALS_MAX = 16
"""Commands of one sandbox that stay open for the model. By default the policy allows 32 processes."""
SNAPSHOT_BYTES_MAX = 1 << 30
"""Bytes of a workspace's tar, which is held in memory."""
ArchiveErrors = type[WorkspaceArchiveReadError] | type[WorkspaceArchiveWriteError]
FRAMEWORK, WORKSPACE = "openai-agents", Path("/workspace")


class RemoteSandboxClientOptions(BaseSandboxClientOptions):
    """Options of one sandbox: the ports that `resolve_exposed_port` may open. The client has all other options."""

    type: Literal["remote-executor"] = "remote-executor"
    exposed_ports: tuple[int, ...] = ()


class RemoteSandboxSessionState(SandboxSessionState):
    """The state of a sandbox: the name of its session. Any process whose client reaches the daemon can resume it."""

    type: Literal["remote-executor"] = "remote-executor"
    session_name: str


class _Terminal:
    """A command that may still run. Any event loop may read and write it, one after the other."""

    def __init__(self, session: NamedSession, process: AsyncProcess, tty: bool) -> None:
        self.tty = tty
        self._session, self._process = session, process
        self._loop = asyncio.get_running_loop()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # A process has one reader at a time, and a model may call tools in parallel.
        self._reading, self._attaching = PerLoop(asyncio.Lock), PerLoop(asyncio.Lock)

    async def _attached(self) -> AsyncProcess:
        loop = asyncio.get_running_loop()
        async with self._attaching.get():
            if self._loop is not loop:
                processes, known = (await self._session.get()).processes, self._process
                self._process = await processes.attach(known.process_id, after_event=known.last_event)
                self._loop = loop
        return self._process

    async def write(self, chars: str) -> None:
        with suppress(PreconditionError):  # it has ended; the next read returns its result
            await (await self._attached()).write(chars)

    async def read(self, timeout_s: float) -> tuple[str, ProcessResult | None]:
        """Returns the output of the next `timeout_s` seconds, and the result if the command has ended."""
        async with self._reading.get():
            process = await self._attached()
            data = await process.read_bytes(timeout_s)
            result = process.result
            return self._decoder.decode(data, final=result is not None), result and not_lost(result)

    async def kill(self) -> None:
        await (await self._attached()).kill()


class RemoteSandboxSession(BaseSandboxSession):
    """A sandbox of the Agents SDK, for any event loop."""

    state: RemoteSandboxSessionState

    def __init__(self, state: RemoteSandboxSessionState, session: NamedSession) -> None:
        self.state = state
        self._session = session
        self._terminals: dict[int, _Terminal] = {}
        self._forwards: dict[int, AsyncPortForward] = {}

    # -----------------------------------------------------------------------------------------------------------------
    # Life

    async def running(self) -> bool:
        """False if the session ended or is lost. Raises ExecTransportError if the daemon does not answer."""
        with _exec_errors("running"):
            return await self._session.is_alive()

    async def _prepare_backend_workspace(self) -> None:
        with infrastructure_errors(_start_error):
            await (await self._session.get()).files.mkdir(str(self._workspace_root_path()))

    async def _shutdown_backend(self) -> None:
        while self._forwards:
            await in_background(self._forwards.popitem()[1].close())
        with _exec_errors("shutdown"):
            await shielded(self._session.end)

    # -----------------------------------------------------------------------------------------------------------------
    # Commands

    def _prepare_exec_command(
        self, *command: str | Path, shell: bool | list[str], user: str | User | None
    ) -> list[str]:
        _refuse(user)  # the SDK would run `sudo`
        argv: list[str] = super()._prepare_exec_command(*command, shell=shell, user=None)
        return argv

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        argv = [str(part) for part in command]
        options = await self._process_options()
        with _exec_errors(*argv):
            processes = (await self._session.get()).processes
            try:
                completed = not_lost(await processes.run(argv, timeout_s=timeout, not_runnable="result", **options))
            except InvalidRequest as error:  # the model's mistake: a NUL in the command, or too many bytes
                return ExecResult(stdout=b"", stderr=f"{error}\n".encode(), exit_code=127)
        if completed.timed_out:
            raise ExecTimeoutError(command=argv, timeout_s=timeout)
        assert completed.exit_code is not None, "only a lost command has none"
        return ExecResult(stdout=completed.stdout_bytes, stderr=completed.stderr_bytes, exit_code=completed.exit_code)

    async def _process_options(self) -> dict[str, Any]:
        return {"cwd": self.state.manifest.root, "env": await self.state.manifest.environment.resolve()}

    # -----------------------------------------------------------------------------------------------------------------
    # Terminals: commands that the model may write to and read again, the least recently used one first

    def supports_pty(self) -> bool:
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        argv = self._prepare_exec_command(*command, shell=shell, user=user)
        options = await self._process_options()
        if len(self._terminals) >= TERMINALS_MAX:
            await self._kill(next(iter(self._terminals)))
        with _exec_errors(*argv):
            processes = (await self._session.get()).processes
            pty = TerminalSize() if tty else None
            try:
                process = await processes.start(argv, pty=pty, timeout_s=timeout, **options)
            except InvalidRequest as error:  # the model's mistake: a shell that the image lacks, a NUL in the command
                return PtyExecUpdate(None, f"{error}\n".encode(), 127, None)
        number = allocate_pty_process_id(set(self._terminals))
        terminal = self._terminals[number] = _Terminal(self._session, process, tty)
        wait_ms = clamp_pty_yield_time_ms(int(1000 * (10 if yield_time_s is None else yield_time_s)))
        try:
            return await self._update(number, terminal, wait_ms, max_output_tokens)
        except BaseException:
            await shielded(lambda: self._kill(number))  # the model doesn't know its number
            raise

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        terminal = self._resolve_pty_session_entry(pty_processes=self._terminals, session_id=session_id)
        if chars and not terminal.tty:
            raise RuntimeError("stdin is not available for this process")  # the SDK compares this text
        if chars:
            with _exec_errors("write_stdin"):
                await terminal.write(chars)
        wait_ms = int(1000 * (0.25 if yield_time_s is None else yield_time_s))
        wait_ms = resolve_pty_write_yield_time_ms(yield_time_ms=wait_ms, input_empty=not chars)
        return await self._update(session_id, terminal, wait_ms, max_output_tokens)

    async def pty_terminate_all(self) -> None:
        for number in list(self._terminals):
            await self._kill(number)

    async def _update(
        self, number: int, terminal: _Terminal, wait_ms: int, max_output_tokens: int | None
    ) -> PtyExecUpdate:
        """Returns the output of the next moments. A command that has ended is forgotten."""
        if self._terminals.pop(number, None) is not None:
            self._terminals[number] = terminal  # now the most recently used
        with _exec_errors("read_output"):
            text, result = await terminal.read(wait_ms / 1000)
        if result is not None:
            self._terminals.pop(number, None)
        output, token_count = truncate_text_by_tokens(text, max_output_tokens)
        return PtyExecUpdate(
            process_id=number if result is None else None,
            output=output.encode(),
            exit_code=None if result is None else result.exit_code,
            original_token_count=token_count,
        )

    async def _kill(self, number: int) -> None:
        terminal = self._terminals.pop(number, None)
        if terminal is not None:
            with _exec_errors("kill"), suppress(SessionGone):
                await terminal.kill()

    # -----------------------------------------------------------------------------------------------------------------
    # Ports

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        try:
            host, local_port = await in_background(self._forwarded(port))
        except (ExecutorClientError, OSError) as error:
            raise ExposedPortUnavailableError(
                port=port, exposed_ports=self.state.exposed_ports, reason="backend_unavailable", cause=error
            ) from error
        return ExposedPortEndpoint(host=host, port=local_port)

    async def _forwarded(self, port: int) -> tuple[str, int]:
        """Forwards a local port to the sandbox's, until the sandbox is shut down; returns its address."""
        if port not in self._forwards:
            forward = await (await self._session.get()).ports.forward(port)
            if self._forwards.setdefault(port, forward) is not forward:
                await forward.close()  # another task was faster
        return self._forwards[port].address

    # -----------------------------------------------------------------------------------------------------------------
    # Files

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        """Refuses a path that leads out of the workspace and the granted directories, even through a link."""
        policy = self._workspace_path_policy()
        target = policy.normalize_sandbox_path(path, for_write=for_write)
        with _file_errors(WorkspaceArchiveWriteError if for_write else WorkspaceArchiveReadError, Path(path)):
            real = await (await self._session.get()).files.realpath(str(target))
        policy.normalize_sandbox_path(real, for_write=for_write)
        return Path(target)

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        return io.BytesIO(await self._read(path, None, user))

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        return await self._read(path, max_bytes, None)

    async def _read(self, path: Path, max_bytes: int | None, user: str | User | None) -> bytes:
        _refuse(user)
        target = await self._validate_path_access(path)
        with _file_errors(WorkspaceArchiveReadError, path):
            return await (await self._session.get()).files.read(str(target), max_bytes=max_bytes)

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        _refuse(user)
        target = await self._validate_path_access(path, for_write=True)
        content = coerce_write_payload(path=path, data=data).stream.read()
        with _file_errors(WorkspaceArchiveWriteError, path):
            await (await self._session.get()).files.write(str(target), content)

    async def mkdir(self, path: Path | str, *, parents: bool = False, user: str | User | None = None) -> None:
        _refuse(user)
        target = await self._validate_path_access(path, for_write=True)
        with _file_errors(WorkspaceArchiveWriteError, target):
            await (await self._session.get()).files.mkdir(str(target), parents=parents, exist_ok=parents)

    async def persist_workspace(self) -> io.IOBase:
        """Returns the workspace as a plain tar, made by the image's `tar`: with links and modes."""
        exclude = [f"--exclude=./{each}" for each in self._persist_workspace_skip_relpaths()]
        return io.BytesIO(await self._tar(WorkspaceArchiveReadError, "-cf", "-", *exclude, "."))

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        content = coerce_write_payload(path=self._workspace_root_path(), data=data).stream.read()
        await self._tar(WorkspaceArchiveWriteError, "-xf", "-", input=content)

    async def _tar(self, error: ArchiveErrors, *arguments: str, input: bytes = b"") -> bytes:
        root = self._workspace_root_path()
        with _file_errors(error, root):
            processes = (await self._session.get()).processes
            limits: dict[str, Any] = {"max_output_bytes": SNAPSHOT_BYTES_MAX, "overflow": "error"}
            done = not_lost(await processes.run(["tar", "-C", str(root), *arguments], input=input, **limits))
            return done.check().stdout_bytes


class RemoteSandboxClient(BaseSandboxClient[RemoteSandboxClientOptions | None]):
    """Creates, resumes and ends sandboxes on a daemon. `session` are fields of `SessionOptions`, for each sandbox.

    A sandbox outlives this process until `delete`, `shutdown` or its idle time.
    """

    backend_id = TYPE
    supports_default_options = True

    def __init__(
        self,
        *,
        instrumentation: Instrumentation | None = None,
        dependencies: Dependencies | None = None,
        **session: Any,
    ) -> None:
        self._options = SessionOptions(**session)
        self._instrumentation = instrumentation
        self._dependencies = dependencies

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: RemoteSandboxClientOptions | None = None,
    ) -> SandboxSession:
        manifest = self._validate_manifest_for_create(manifest or Manifest())
        _refuse(manifest.users or manifest.groups)
        session_id = uuid.uuid4()
        resolved = resolve_snapshot(snapshot, str(session_id))  # may fail, so it comes before the session
        session = await self._new()
        state = RemoteSandboxSessionState(
            session_id=session_id,
            snapshot=resolved,
            manifest=manifest,
            exposed_ports=options.exposed_ports if options else (),
            session_name=session.name,
        )
        return self._wrapped(state, session)

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """Returns the sandbox of this state. If its session has ended or is lost, returns a new one, which begins with
        the snapshot, or else with the manifest."""
        if not isinstance(state, RemoteSandboxSessionState):
            raise TypeError(f"not a state of a {TYPE} sandbox: {type(state).__name__}")
        state.assert_path_grants_rebound()
        session = NamedSession(self._options, state.session_name, must_exist=True)
        with infrastructure_errors(_start_error):
            preserved = await session.is_alive()
            if not preserved:
                await session.end()  # a lost session keeps its name and its place
                session = await self._new()
                state.session_name, state.workspace_root_ready = session.name, False
        resumed = self._wrapped(state, session)
        resumed._inner._set_start_state_preserved(preserved)
        return resumed

    async def delete(self, session: SandboxSession) -> SandboxSession:
        await session._inner.shutdown()
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, RemoteSandboxSessionState)

    async def _new(self) -> NamedSession:
        session = NamedSession(self._options, framework=FRAMEWORK)
        with infrastructure_errors(_start_error):
            await session.get()
        return session

    def _wrapped(self, state: RemoteSandboxSessionState, session: NamedSession) -> SandboxSession:
        return self._wrap_session(RemoteSandboxSession(state, session), instrumentation=self._instrumentation)


def _refuse(accounts: object) -> None:
    if accounts:
        message = "a remote sandbox has one user: leave out run_as, user and accounts in the manifest"
        raise ConfigurationError(message=message, error_code=ErrorCode.SANDBOX_CONFIG_INVALID, op="exec", context={})


# The SDK's errors for a lost session or an unreachable daemon.


def _start_error(text: str) -> Any:
    return WorkspaceStartError(path=WORKSPACE, message=text)


def _exec_errors(*command: str) -> AbstractContextManager[None]:
    return infrastructure_errors(lambda text: ExecTransportError(command=command, message=text), ExecutorClientError)


@contextmanager
def _file_errors(make: ArchiveErrors, path: Path) -> Iterator[None]:
    """Raises the SDK's error for each of ours. It has one for a missing file, and one for all other failures."""
    try:
        yield
    except FileNotFoundError as error:
        raise WorkspaceReadNotFoundError(path=path, cause=error) from error
    except ExecutorClientError as error:
        raise make(path=path, context={"reason": str(error)}, cause=error) from error
