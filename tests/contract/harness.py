"""Sessions on one backend, and what an execution told, gathered."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from executor_api.values import decode, encode
from executor_server.backends.base import Backend
from executor_server.executions import Execution, ToolFailure
from executor_server.model import (
    BlobChunk,
    Event,
    Image,
    Limits,
    Log,
    OutputCut,
    OutputMode,
    Payload,
    Principal,
    Result,
    SandboxSpec,
    SessionSpec,
    ToolCall,
    ToolSpec,
)
from executor_server.pool import PoolSettings, WarmPool
from executor_server.registry import Registry
from executor_server.requested import RequestedLimits
from executor_server.sessions import Session, SessionManager, SessionRequest, SessionSettings, VariablesReply
from executor_server.state_dir import StateDir
from tests.contract.probes import Probe, probe_of, supervisor_of
from tests.support.specs import session_spec

__all__ = [
    "LIMITS",
    "MIB",
    "PRINCIPAL",
    "Harness",
    "Transcript",
    "follow",
    "get_variables",
    "open_harness",
    "pieces",
    "set_variables",
    "supervisor_of",
]

MIB = 1024 * 1024
PRINCIPAL = Principal("tenant", "test")
LIMITS = Limits(
    wall_time_s=20.0,
    cpu_time_s=20.0,
    operations=10**8,
    memory_bytes=512 * MIB,
    processes=64,
    output_bytes=256 * 1024,
    disk_bytes=32 * MIB,
    idle_time_s=600.0,
    session_time_s=3600.0,
    session_operations=10**12,
)


@dataclass
class Transcript:
    """All that an execution told."""

    result: Result | None = None
    events: list[Event] = field(default_factory=list)
    blobs: dict[str, bytearray] = field(default_factory=dict)

    @property
    def ended(self) -> Result:
        assert self.result is not None
        return self.result

    @property
    def outcome(self) -> str:
        return self.ended.outcome.value

    @property
    def state(self) -> str:
        return self.ended.variables_state.value

    @property
    def stdout(self) -> str:
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        return self._text("stderr")

    @property
    def output(self) -> Any:
        return None if self.ended.output is None else decode(self.bytes_of(self.ended.output))

    @property
    def message(self) -> str:
        return self.ended.error.message if self.ended.error is not None else ""

    @property
    def images(self) -> list[bytes]:
        return [self.bytes_of(event.kind.data) for event in self.events if isinstance(event.kind, Image)]

    @property
    def omitted_bytes(self) -> int:
        return sum(event.kind.omitted_bytes for event in self.events if isinstance(event.kind, OutputCut))

    def bytes_of(self, payload: Payload) -> bytes:
        if isinstance(payload, bytes):
            return payload
        data = bytes(self.blobs[payload.blob_id])
        assert len(data) == payload.size_bytes
        return data

    def _text(self, stream: str) -> str:
        logs = (event.kind for event in self.events if isinstance(event.kind, Log))
        return "".join(log.text for log in logs if log.stream == stream)


class Harness:
    """Owns a backend, an empty pool and a manager of sessions.

    `registry_dir`: where an earlier daemon kept its books; without one, there was none.
    """

    def __init__(self, backend: Backend, registry_dir: Path | None = None) -> None:
        self.backend = backend
        self._probe: Probe | None = None
        self.pool = WarmPool(backend, PoolSettings())
        self._state = tempfile.TemporaryDirectory(prefix="r-")
        self.registry = Registry(StateDir(registry_dir or Path(self._state.name)))
        settings = SessionSettings(sweep_interval_s=0.05, ping_interval_s=0.2)
        self.manager = SessionManager(backend, self.pool, self.registry, settings)
        self._names = itertools.count(1)
        self._stack = AsyncExitStack()

    @property
    def probe(self) -> Probe:
        """Where there is one: what can be seen and done from outside."""
        assert self._probe is not None
        return self._probe

    @probe.setter
    def probe(self, probe: Probe) -> None:
        self._probe = probe

    async def __aenter__(self) -> Harness:
        self._stack.callback(self._state.cleanup)
        self._stack.callback(self.registry.close)
        self._stack.push_async_callback(self.backend.close)
        await self.backend.start()
        await self.manager.recover()
        self._stack.push_async_callback(self.pool.close)
        self._stack.push_async_callback(self.manager.close)
        await self.manager.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def kill(self) -> None:
        """Everything of it stops at once, as by a SIGKILL, and nothing is told to anybody. Its backend lives on."""
        self._stack.pop_all()
        tasks: list[asyncio.Task[Any]] = [self.manager._sweeper] if self.manager._sweeper is not None else []
        for session in self.manager.list(PRINCIPAL):
            session._channel.close()
            tasks += session._tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.pool.close()
        self.registry.close()
        self._state.cleanup()

    def spec(
        self, *, imports: tuple[str, ...] = ("*",), prelude: str = "", orphan_time_s: float = 60.0, **limits: Any
    ) -> SessionSpec:
        """An approved session; the policy's part is played by the test."""
        bounds = replace(LIMITS, **limits)
        sandbox = SandboxSpec(
            "base",
            bounds.memory_bytes,
            bounds.processes,
            bounds.disk_bytes,
            orphan_time_s,
            max_files=bounds.max_files,
        )
        return session_spec(sandbox, bounds, imports, prelude)

    async def session(self, **options: Any) -> Session:
        request = SessionRequest(f"request-{next(self._names)}", self.spec(**options))
        return await self.manager.create(PRINCIPAL, request)

    async def begin(self, session: Session, code: str, *, last_statement: bool = False, **limits: Any) -> Execution:
        mode = OutputMode.LAST_STATEMENT if last_statement else OutputMode.TRAILING_EXPRESSION
        return await session.execute(f"execution-{next(self._names)}", code, mode, RequestedLimits(**limits))

    async def run(self, session: Session, code: str, **options: Any) -> Transcript:
        return await follow(await self.begin(session, code, **options))

    async def run_with_tools(
        self, session: Session, code: str, tools: dict[str, Callable[..., Any]], final: str = ""
    ) -> Transcript:
        """Runs code and answers its tool calls, as a client would."""
        specs = [ToolSpec(name, "", (), name == final) for name in tools]
        await session.register_tools(specs)
        execution = await self.begin(session, code)

        async def answer(call: ToolCall, transcript: Transcript) -> None:
            args, kwargs = decode(transcript.bytes_of(call.arguments))
            try:
                reply: bytes | ToolFailure = encode(tools[call.name](*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - as the client carries it over
                reply = ToolFailure(type(error).__name__, str(error))
            await session.submit_tool_result(execution.execution_id, call.call_id, reply)

        return await follow(execution, answer)


@asynccontextmanager
async def open_harness(backend: str) -> AsyncIterator[Harness]:
    """A harness on a place of its own for this backend."""
    directory = Path(tempfile.mkdtemp(prefix="c-"))
    directory.chmod(0o755)  # a sandbox's user has to pass
    try:
        async with probe_of(backend, directory) as probe, Harness(probe.backend()) as harness:
            harness.probe = probe
            yield harness
    finally:
        shutil.rmtree(directory)


async def follow(execution: Execution, answer: Any = None, after: int = 0) -> Transcript:
    """Reads an execution's events to the end."""
    transcript = Transcript()
    async for event in execution.events(after):
        transcript.events.append(event)
        if isinstance(event.kind, BlobChunk):
            transcript.blobs.setdefault(event.kind.blob_id, bytearray()).extend(event.kind.data)
        elif isinstance(event.kind, Result):
            transcript.result = event.kind
        elif isinstance(event.kind, ToolCall) and answer is not None:
            await answer(event.kind, transcript)
    return transcript


async def set_variables(session: Session, **values: Any) -> None:
    """Sets variables, the large ones by blob."""
    payloads: list[tuple[str, Payload]] = []
    for name, value in values.items():
        packed = encode(value)
        if len(packed) > 1000:
            from executor_server.model import BlobRef

            payloads.append((name, BlobRef(await session.upload_blob(len(packed), pieces(packed)), len(packed))))
        else:
            payloads.append((name, packed))
    await session.set_variables(payloads)


async def get_variables(session: Session, *names: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    blobs: dict[str, bytearray] = {}
    async for part in session.get_variables(names):
        if isinstance(part, BlobChunk):
            blobs.setdefault(part.blob_id, bytearray()).extend(part.data)
            continue
        assert isinstance(part, VariablesReply)
        read = {n: decode(p if isinstance(p, bytes) else bytes(blobs[p.blob_id])) for n, p in part.variables}
        return read, part.missing
    raise AssertionError("no reply")


async def pieces(data: bytes, size: int = 262_144) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]
