"""Sessions on one backend, and the events of an execution, gathered."""

from __future__ import annotations

import asyncio
import functools
import itertools
import pickle
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor_api.values import decode, encode
from executor_server.backends.base import Backend
from executor_server.backends.docker import images
from executor_server.backends.docker.engine import EngineImage
from executor_server.backends.docker.probe import PreparedImage, UselessImage
from executor_server.backends.docker.probe import probe as ask_image
from executor_server.backends.docker.resources import Resources
from executor_server.backends.local import host
from executor_server.backends.local.images import Image as ProbedImage
from executor_server.backends.local.images import probe_image as probe_local_image
from executor_server.backends.local.resources import Resources as LocalResources
from executor_server.core.config.backend_config import LocalImage
from executor_server.core.config.state_dir import StateDir
from executor_server.core.model import (
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
from executor_server.core.network import NetworkRules
from executor_server.core.packages import PackagesSpec
from executor_server.policy.approvals import Approvals
from executor_server.policy.requested import RequestedLimits
from executor_server.sessions import (
    Session,
    SessionHooks,
    SessionManager,
    SessionRequest,
    SessionSettings,
    VariablesReply,
)
from executor_server.sessions.connection import ConnectionTimes
from executor_server.sessions.journal.execution import Execution, ToolFailure
from executor_server.sessions.journal.registry import Registry
from executor_server.sessions.pool.asked_kinds import AskedSettings
from executor_server.sessions.pool.pool import PoolSettings, WarmPool
from tests.contract.policies import policy_of
from tests.contract.probes import Probe, probe_of, supervisor_of
from tests.support.backends import require
from tests.support.environments import ServedEnvironments
from tests.support.fake_session import abandon
from tests.support.forked_backend import local_backend
from tests.support.specs import session_spec

__all__ = [
    "LIMITS",
    "MIB",
    "PRINCIPAL",
    "Harness",
    "Running",
    "Transcript",
    "follow",
    "get_variables",
    "harness_on",
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
    """All events of an execution."""

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


class Running:
    """Runs code in sessions, of this process or behind a front, and gathers what happens."""

    def __init__(self) -> None:
        self._names = itertools.count(1)

    async def begin(
        self,
        session: Session,
        code: str,
        *,
        last_statement: bool = False,
        whole: bool = False,
        savepoint: bool = False,
        branch: bool = False,
        **limits: Any,
    ) -> Execution:
        mode = OutputMode.LAST_STATEMENT if last_statement else OutputMode.TRAILING_EXPRESSION
        if whole:
            mode = OutputMode.WHOLE_EXPRESSION
        asked = RequestedLimits(**limits)
        execution_id = f"execution-{next(self._names)}"
        return await session.execute(execution_id, code, mode, asked, savepoint=savepoint, branch=branch)

    async def run(self, session: Session, code: str, **options: Any) -> Transcript:
        return await follow(await self.begin(session, code, **options))

    async def run_with_tools(
        self, session: Session, code: str, tools: dict[str, Callable[..., Any]], final: str = "", **options: Any
    ) -> Transcript:
        """Runs code and answers its tool calls, as a client would."""
        specs = [ToolSpec(name, "", (), name == final) for name in tools]
        await session.register_tools(specs)
        execution = await self.begin(session, code, **options)

        async def answer(call: ToolCall, transcript: Transcript) -> None:
            args, kwargs = decode(transcript.bytes_of(call.arguments))
            try:
                reply: bytes | ToolFailure = encode(tools[call.name](*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - as the client carries it over
                reply = ToolFailure(type(error).__name__, str(error))
            await session.submit_tool_result(execution.execution_id, call.call_id, reply)

        return await follow(execution, answer)


class Harness(Running):
    """Owns a backend, an empty pool and a manager of sessions.

    `registry_dir`: the registry of an earlier daemon; without one, there was none. `connection`: other time limits.
    """

    def __init__(
        self, backend: Backend, registry_dir: Path | None = None, *, connection: ConnectionTimes | None = None
    ) -> None:
        super().__init__()
        self.backend = backend
        self._probe: Probe | None = None
        self._held: list[asyncio.Task[None]] = []
        # Sandboxes with packages are made when a session asks for one, and none is kept ready for the next.
        self.pool = WarmPool(backend, PoolSettings(asked=AskedSettings(max_kinds=0)))
        self._state = tempfile.TemporaryDirectory(prefix="r-")
        self.registry = Registry(StateDir(registry_dir or Path(self._state.name)))
        settings = SessionSettings(
            sweep_interval_s=0.05, ping_interval_s=0.2, connection=connection or ConnectionTimes()
        )
        self.approvals = Approvals()
        hooks = SessionHooks(approvals=self.approvals)
        self.manager = SessionManager(backend, self.pool, self.registry, settings, hooks)
        self._stack = AsyncExitStack()

    @property
    def probe(self) -> Probe:
        """The probe of the backend, when there is one."""
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

    async def end_sessions(self) -> None:
        """Ends all sessions; returns when their sandboxes are gone."""
        for session in self.manager.list_all():
            await self.manager.kill(session.session_id)
        await asyncio.gather(*self._held, return_exceptions=True)
        self._held.clear()
        await self.manager._teardown.finish()

    async def kill(self) -> None:
        """Stops everything at once, as SIGKILL does, without a message to anything. Its backend lives on."""
        self._stack.pop_all()
        await abandon(self.manager)
        await self.pool.close()
        self.registry.close()
        self._state.cleanup()

    def spec(
        self,
        *,
        imports: tuple[str, ...] = ("*",),
        prelude: str = "",
        image: str = "base",
        orphan_time_s: float = 60.0,
        egress: bool = False,
        network: tuple[str, ...] = (),
        packages: PackagesSpec | None = None,
        **limits: Any,
    ) -> SessionSpec:
        """Creates a session with a spec that the test approves in place of the policy."""
        bounds = replace(LIMITS, **limits)
        sandbox = SandboxSpec(
            image,
            bounds.memory_bytes,
            bounds.processes,
            bounds.disk_bytes,
            orphan_time_s,
            max_files=bounds.max_files,
            egress=egress or bool(network),
            packages=packages,
        )
        return session_spec(sandbox, bounds, imports, prelude, network=NetworkRules(allowed=network))

    async def session(self, **options: Any) -> Session:
        return await self._created(self.spec(**options))

    async def session_under(self, profile: str, **options: Any) -> Session:
        """Creates a session that a policy with this profile, as its file would have it, approves."""
        return await self._created(self._held_to(profile, self.spec(**options)))

    async def change_policy(self, session: Session, profile: str) -> None:
        """Holds a session to another profile, from its next execution on."""
        # The guest answers when the execution that runs has ended.
        self._held.append(asyncio.ensure_future(session.hold_to(self._held_to(profile, session.spec))))

    async def authorize(self, session: Session, imports: tuple[str, ...]) -> bool:
        """Lets the next executions of a session import these modules and no others, as a policy that grants them does."""
        await session.hold_to(replace(session.spec, authorized_imports=imports))
        return True

    def _held_to(self, profile: str, spec: SessionSpec) -> SessionSpec:
        backend = self.backend.name
        policy = policy_of(PRINCIPAL.tenant, profile, images=(spec.sandbox.image,), backend=backend)
        held = policy.tightened(PRINCIPAL, spec, backend)
        assert isinstance(held, SessionSpec), held
        return held

    async def _created(self, spec: SessionSpec) -> Session:
        return await self.manager.create(PRINCIPAL, SessionRequest(f"request-{next(self._names)}", spec))

    async def process_ids(self, session: Session) -> list[str]:
        return [each.process_id for each in session.processes.list()]

    async def runs(self, session: Session, process_id: str) -> bool:
        """True while a process of the session runs."""
        return not session.processes.process(process_id).done

    async def end_session(self, session: Session) -> None:
        """Ends a session as its client does; returns when its sandbox is gone."""
        await self.manager.delete(session.owner, session.session_id)

    async def kill_sandbox(self, session: Session) -> None:
        """Ends its sandbox by the means of the host or the cloud; it has ended on return."""
        await self.probe.kill(session._sandbox.sandbox_id)

    def daemons(self) -> list[psutil.Process]:
        """Returns the processes that a session's output goes through."""
        return [psutil.Process()]

    def processes(self, session: Session) -> list[psutil.Process]:
        """Returns those that the session's supervisor has forked: interpreter, checker and warm interpreter."""
        return supervisor_of(session).children()

    async def spent_cpu_s(self, session: Session, run: Transcript) -> float:
        """Returns the CPU seconds that its tenant is charged for, after its first execution."""
        session._channel.ping()
        await self.run(session, "1")  # its answer has come by then
        return run.ended.usage.cpu_time_s + (session._background_cpu_s or 0.0)

    async def session_ids(self) -> list[str]:
        return [each.session_id for each in self.manager.list(PRINCIPAL)]


_examined: dict[str, PreparedImage] = {}
_tried: set[Path] = set()
_probe_local_image = functools.cache(probe_local_image)


@contextmanager
def images_examined_once() -> Iterator[None]:
    """Remembers what was found out about images, for all harnesses and backends of this process that use this.

    Each would start a container, or an interpreter and a sandbox, of its own to ask, which takes as long as most tests,
    and no image changes: one of the Engine is known by its id, a local one is looked at before each sandbox.
    The tests of that examination are in tests/integration, and those of the contract that take `probe` alone.
    """

    async def remembered(resources: Resources, image: EngineImage) -> PreparedImage | UselessImage:
        if (known := _examined.get(image.image_id)) is not None:
            return known
        found = await ask_image(resources, image)
        if isinstance(found, PreparedImage):
            _examined[image.image_id] = found
        return found

    async def tried_once(
        found: host.Examination, resources: LocalResources, image: ProbedImage, uid: int | None
    ) -> None:
        if image.python not in _tried:
            await try_sandbox(found, resources, image, uid)
            if found.suffices:
                _tried.add(image.python)

    try_sandbox = host._try_sandbox
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "probe", remembered)
        patch.setattr(host, "probe_image", _probe_local_image)
        patch.setattr(host, "_try_sandbox", tried_once)
        yield


@asynccontextmanager
async def harness_on(python: Path, image: str = "base", preload: tuple[str, ...] = ()) -> AsyncIterator[Harness]:
    """A harness on the local backend, with an image of this interpreter, and environments that are made by hand."""
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="c-"))
    directory.chmod(0o755)
    images, served = {image: LocalImage(python=python, preload=preload)}, ServedEnvironments(directory)
    async with Harness(local_backend(directory, images, environments=lambda: served)) as ready:
        yield ready
    shutil.rmtree(directory)


@asynccontextmanager
async def open_harness(backend: str) -> AsyncIterator[Harness]:
    """Provides a harness on a host of its own for this backend."""
    directory = Path(tempfile.mkdtemp(prefix="c-"))
    directory.chmod(0o755)  # a sandbox's user must be able to enter it
    try:
        with images_examined_once():
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
            from executor_server.core.model import BlobRef

            payloads.append((name, BlobRef(await session.upload_blob(len(packed), pieces(packed)), len(packed))))
        else:
            payloads.append((name, packed))
    await session.set_variables(payloads)


class _Library:
    """Unpickled in a sandbox, this loads a module with Python's own builtins."""

    def __init__(self, name: str, source: str) -> None:
        self._program = f"""\
import importlib._bootstrap, importlib.util
class Loader:
    def create_module(self, spec): pass
    def exec_module(self, module): exec(compile({source!r}, "/usr/lib/{name}.py", "exec"), vars(module))
importlib._bootstrap._load(importlib.util.spec_from_loader({name!r}, Loader()))
"""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._program, {})


async def load_library(session: Session, name: str, source: str) -> None:
    """Loads a module that counts as a library: code that a client pickles is not agent code."""
    version = ".".join(session.python_version.split(".")[:2])
    pickled = f"cp{version}\0".encode() + pickle.dumps(_Library(name, source), protocol=4)
    await session.set_variables([("_", encode(object(), fallback=lambda _: pickled))])


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
