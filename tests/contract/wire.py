"""The contract over the wire: sessions behind the front of two nodes, with the shape of those in this process.

The front and the nodes are processes, on the local backend. Sessions are made, found and ended by the asyncio client.
All other calls go through its transport as the messages of the protocol, since the client
hides what the contract is about: numbers of events, blobs, sizes that are announced, ids that are used again.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import grpc
import psutil

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from executor_api.v1 import types_pb2 as pb
from executor_client import AsyncExecutorClient
from executor_client.aio_session import AsyncSession
from executor_client.errors import UnavailableError
from executor_server.core.config.backend_config import LocalImage
from executor_server.core.errors import NotFound, OutOfRange
from executor_server.core.model import BlobChunk, Event, FileInfo, OutputMode, Payload, StateManifest, ToolSpec
from executor_server.core.packages import PackagesSpec
from executor_server.policy.requested import RequestedLimits
from executor_server.sessions import Session, VariablesReply
from executor_server.sessions.journal.execution import ToolFailure
from tests.contract import wire_values as values
from tests.contract.harness import LIMITS, Harness, Running, Transcript, harness_on
from tests.contract.probes import NodesProbe
from tests.contract.wire_policies import WirePolicies
from tests.contract.wire_ports import WirePorts
from tests.contract.wire_processes import WireProcesses
from tests.contract.wire_savepoints import WireSavepoints
from tests.contract.wire_watches import WireWatches
from tests.support.backends import require
from tests.support.environments import PACKAGES, offer
from tests.support.fleet_daemon import NODES
from tests.support.internet.world import Internet
from tests.support.interpreters import require_python
from tests.support.machines import QUIET, Fleet, fleet
from tests.support.polling import eventually_async, eventually_awaited

ALLOW_PACKAGES = f"packages.allowed = {list(PACKAGES.requirements)}"
"""The profile of sessions that ask for PACKAGES."""
NEVER = 2**40
"""The number of an event that no execution has."""
# The daemon may refuse an upload while it is sent, and gRPC then lose the refusal; the client sends it again.
UPLOADS = 10
# With so many sessions each node has had some, since the front takes the one with the most room.
BOTH_SERVE_AFTER = 8


@dataclass(frozen=True)
class Front:
    """A front over two nodes, and its policy."""

    fleet: Fleet
    policies: WirePolicies
    internet: Internet

    @property
    def address(self) -> str:
        return self.fleet.front.address


@contextmanager
def front_of_two(images: Mapping[str, LocalImage], internet: Internet) -> Iterator[Front]:
    """A front over two nodes that live in this internet, whose policy grants what the contract needs.

    All have these images besides their own, and make environments from an index with PACKAGES.
    """
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    policies = WirePolicies(directory / "policy.toml")
    index = internet.package_index()
    offer(index)
    config = "".join(
        f'[local.images."{name}"]\npython = "{image.python}"\npreload = {list(image.preload)}\n'
        for name, image in images.items()
    )
    config += (
        f'[environments]\nindex_url = "{index.url}"\n'
        f'index_hosts = ["{index.host}:443", "{index.files_host}:443"]\n{internet.config()}'
    )
    front_config = f'[policy]\nfile = "{policies.path}"\n{config}'
    with fleet(directory, *NODES, front_config=front_config, node_config=QUIET + config, has_cables=False) as made:
        yield Front(made, policies, internet)
    shutil.rmtree(directory)


@asynccontextmanager
async def open_wire_harness(front: Front) -> AsyncIterator[WireHarness]:
    async with WireHarness(front) as made:
        yield made
    if made.nodes.total() >= BOTH_SERVE_AFTER:
        assert set(made.nodes) == set(NODES), made.nodes


@asynccontextmanager
async def harness_of(version: str, front: Front | None, *, image: str = "base") -> AsyncIterator[Harness]:
    """A harness whose sessions have this Python, or that of the tests; behind `front` where there is one.

    Skips the test where this machine has none. `image` is one of the front's, for sessions that name none.
    """
    if front is None:
        async with harness_on(require_python(version) if version else Path(sys.executable)) as harness:
            yield harness
        return
    if version:
        require_python(version)
    async with open_wire_harness(front) as wire:
        wire.image = f"py{version}" if version else image
        yield cast("Harness", wire)
        await wire.end_sessions()


@dataclass
class Tenant:
    """A tenant of the front, as its client and in calls of gRPC."""

    name: str
    client: AsyncExecutorClient
    metadata: tuple[tuple[str, str], ...]


class WireHarness(Running):
    """Sessions behind a front. What of `Harness` is the inside of a daemon is not there: `inside.py` lists the tests."""

    def __init__(self, front: Front) -> None:
        super().__init__()
        self.image = "base"
        """The image of sessions that ask for none."""
        self.nodes: Counter[str] = Counter()
        """The sessions that each node has had."""
        nodes = front.fleet.nodes.values()
        self.probe = NodesProbe({node.name: node.state_dir for node in nodes})
        self._front = front
        self._tenants: dict[str, Tenant] = {}
        self._sessions: list[WireSession] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        channel = self._stack.enter_context(grpc.insecure_channel(self._front.address))
        self._stub = service_grpc.ExecutorServiceStub(channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._stack:
            assert await self.session_ids() == []

    async def session(
        self,
        *,
        imports: tuple[str, ...] = ("*",),
        prelude: str = "",
        image: str = "",
        packages: PackagesSpec | None = None,
        **limits: Any,
    ) -> WireSession:
        if packages is not None:
            tenant = await self._tenant(*await self._front.policies.tenant_under(self._front.fleet, ALLOW_PACKAGES))
        else:
            tenant = await self._tenant("local", self._front.fleet.token)
        asked = packages.requirements if packages is not None else ()
        return await self._session(tenant, imports, prelude, image, limits, packages=asked)

    async def session_under(
        self,
        profile: str,
        *,
        imports: tuple[str, ...] = ("*",),
        prelude: str = "",
        network: tuple[str, ...] = (),
        **limits: Any,
    ) -> WireSession:
        tenant = await self._tenant(*await self._front.policies.tenant_under(self._front.fleet, profile))
        return await self._session(tenant, imports, prelude, "", limits, network=network)

    async def change_policy(self, session: WireSession, profile: str) -> None:
        await self._front.policies.change(self._front.fleet, session.tenant, profile)

    async def authorize(self, session: WireSession, imports: tuple[str, ...]) -> bool:
        """False: a policy that is distributed takes longer than another session."""
        return False

    async def _tenant(self, name: str, token: str) -> Tenant:
        if name not in self._tenants:
            client = await self._stack.enter_async_context(AsyncExecutorClient(self._front.address, token=token))
            self._tenants[name] = Tenant(name, client, (("authorization", f"Bearer {token}"),))
        return self._tenants[name]

    async def _session(
        self,
        tenant: Tenant,
        imports: tuple[str, ...],
        prelude: str,
        image: str,
        limits: dict[str, Any],
        **more: Any,
    ) -> WireSession:
        asked = {name: value for name, value in {**vars(LIMITS), **limits}.items() if value is not None}
        with values.refusals():
            made = await tenant.client.create_session(
                image=image or self.image, authorized_imports=imports, limits=asked, prelude=prelude, **more
            )
        self.nodes[made.info.node] += 1
        session = WireSession(made, tenant.name, partial(self._described, tenant))
        self._sessions.append(session)
        return session

    async def session_ids(self) -> list[str]:
        listed = [await tenant.client.list_sessions() for tenant in self._tenants.values()]
        return [each.session_id for sessions in listed for each in sessions]

    async def process_ids(self, session: WireSession) -> list[str]:
        return await session.processes.ids()

    async def runs(self, session: WireSession, process_id: str) -> bool:
        return process_id in await session.processes.running()

    async def end_session(self, session: WireSession) -> None:
        await session.end()

    async def kill_sandbox(self, session: WireSession) -> None:
        await self.probe.kill(session.session_id)

    def daemons(self) -> list[psutil.Process]:
        fleet = self._front.fleet
        running = [machine.process for machine in (fleet.front, *fleet.nodes.values())]
        return [psutil.Process(each.pid) for each in running if each is not None]

    def processes(self, session: WireSession) -> list[psutil.Process]:
        return self.probe.supervisor(cast("Session", session)).children()

    async def spent_cpu_s(self, session: WireSession, run: Transcript) -> float:
        """Waits until the front has heard of the execution; its node reports what lies between executions with it."""

        def spent() -> float:
            return self._front.fleet.usage(session.tenant).cpu_time_s_in_last_hour

        assert await eventually_async(lambda: spent() >= run.ended.usage.cpu_time_s)
        return spent()

    def _described(self, tenant: Tenant, session_id: str) -> pb.Session:
        """A session as the front describes it now."""
        request = service_pb.GetSessionRequest(session_id=session_id)
        described: pb.Session = self._stub.GetSession(request, timeout=30.0, metadata=tenant.metadata).session
        return described

    async def end_sessions(self) -> None:
        """Ends all sessions of the test; returns when the nodes have ended their sandboxes."""
        for session in self._sessions:
            await session.end()
        self._sessions.clear()


class WireSession:
    """A session, with the calls of `executor_server.sessions.Session`."""

    def __init__(self, session: AsyncSession, tenant: str, described: Callable[[str], pb.Session]) -> None:
        self.tenant = tenant
        self._session = session
        self._transport = session._transport
        self._described = described
        self._executions: dict[str, WireExecution] = {}
        self.session_id = session.session_id
        self.processes = WireProcesses(self)
        self.ports = WirePorts(self)
        self.watches = WireWatches(self)
        self.savepoints = WireSavepoints(self)

    @property
    def client_session(self) -> AsyncSession:
        return self._session

    @property
    def state(self) -> str:
        return pb.SessionState.Name(self._described(self.session_id).state).removeprefix("SESSION_STATE_").lower()

    @property
    def lost_reason(self) -> str:
        return self._described(self.session_id).lost_reason

    @property
    def generation(self) -> int:
        return int(self._described(self.session_id).generation)

    @property
    def python_version(self) -> str:
        return self._session.info.python_version

    @property
    def missing_modules(self) -> tuple[str, ...]:
        return self._session.info.missing_modules

    async def execute(
        self,
        execution_id: str,
        code: str,
        mode: OutputMode,
        limits: RequestedLimits,
        *,
        savepoint: bool = False,
        branch: bool = False,
    ) -> WireExecution:
        """Returns when the daemon has the execution. Raises its refusal."""
        request = service_pb.ExecuteRequest(
            session_id=self.session_id,
            execution_id=execution_id,
            code=code,
            output_mode=values.mode_to(mode),
            whole_output=mode is OutputMode.WHOLE_EXPRESSION,
            limits=values.limits_to(vars(limits)),
            savepoint=savepoint,
            branch=branch,
        )
        execution = WireExecution(self, execution_id, request)
        repeated = execution_id in self._executions
        await execution.begin(is_known=not repeated)
        self._executions[f"{execution_id} again" if repeated else execution_id] = execution
        return execution

    async def submit_tool_result(self, execution_id: str, call_id: str, answer: Payload | ToolFailure) -> None:
        request = service_pb.SubmitToolResultRequest(
            session_id=self.session_id, execution_id=execution_id, call_id=call_id
        )
        if isinstance(answer, ToolFailure):
            request.error.CopyFrom(service_pb.ToolError(type=answer.type, message=answer.message))
        else:
            request.value.CopyFrom(values.value_to(answer))
        await self.once(request)

    async def register_tools(self, tools: Sequence[ToolSpec]) -> None:
        wire = map(values.tool_to, tools)
        await self.once(service_pb.RegisterToolsRequest(session_id=self.session_id, tools=wire))

    async def set_variables(self, variables: Sequence[tuple[str, Payload]]) -> None:
        named = [pb.NamedValue(name=name, value=values.value_to(payload)) for name, payload in variables]
        await self.once(service_pb.SetVariablesRequest(session_id=self.session_id, variables=named))

    async def get_variables(self, names: Sequence[str]) -> AsyncIterator[BlobChunk | VariablesReply]:
        async for part in self.read(service_pb.GetVariablesRequest(session_id=self.session_id, names=names)):
            if part.WhichOneof("part") == "blob_chunk":
                yield values.blob_chunk_from(part.blob_chunk)
            else:
                named = tuple(map(values.named_from, part.variables.variables))
                yield VariablesReply(named, tuple(part.variables.missing))

    async def upload_blob(self, size_bytes: int, pieces: AsyncIterator[bytes]) -> str:
        header = service_pb.UploadBlobHeader(session_id=self.session_id, size_bytes=size_bytes)
        answer = await self._upload("UploadBlob", service_pb.UploadBlobRequest, {"header": header}, pieces)
        return str(answer.blob_id)

    async def put_file(
        self, path: str, size_bytes: int, pieces: AsyncIterator[bytes], *, tar: bool = False, **more: Any
    ) -> FileInfo:
        header = service_pb.PutFileHeader(
            session_id=self.session_id, path=path, size_bytes=size_bytes, format=_format_of(tar), **more
        )
        answer = await self._upload("PutFile", service_pb.PutFileRequest, {"header": header}, pieces)
        return values.file_from(answer.file)

    async def get_file(self, path: str, *, tar: bool = False, **more: Any) -> AsyncIterator[FileInfo | bytes]:
        request = service_pb.GetFileRequest(session_id=self.session_id, path=path, format=_format_of(tar), **more)
        async for part in self.read(request):
            yield values.file_from(part.file) if part.WhichOneof("part") == "file" else part.data

    async def list_files(self, path: str, *, recursive: bool = True) -> tuple[list[FileInfo], bool]:
        request = service_pb.ListFilesRequest(session_id=self.session_id, path=path, recursive=recursive)
        answer = await self.once(request)
        return list(map(values.file_from, answer.files)), answer.truncated

    async def manage_file(self, action: str, path: str, **options: Any) -> FileInfo | None:
        asked: dict[str, Any] = {action: options}
        answer = await self.once(service_pb.ManageFileRequest(session_id=self.session_id, path=path, **asked))
        return values.file_from(answer.file) if answer.HasField("file") else None

    async def export_state(self, _: object) -> AsyncIterator[bytes | StateManifest]:
        """The archives are the node's, and not those of the test."""
        async for part in self.read(service_pb.ExportStateRequest(session_id=self.session_id)):
            yield part.data if part.WhichOneof("part") == "data" else values.manifest_from(part.manifest)

    async def restore_state(self, _: object, pieces: AsyncIterator[bytes]) -> StateManifest:
        first = {"session_id": self.session_id}
        answer = await self._upload("RestoreState", service_pb.RestoreStateRequest, first, pieces)
        return values.manifest_from(answer.manifest)

    async def end(self) -> None:
        for execution in self._executions.values():
            await execution.leave()
        await self._session.close()

    async def once(self, request: Any) -> Any:
        with values.refusals():
            return await self._transport.once(request)

    async def read(self, request: Any) -> AsyncGenerator[Any, None]:
        with values.refusals():
            async for message in self._transport.read(request):
                yield message

    async def _upload(self, method: str, make: Any, first: dict[str, Any], pieces: AsyncIterator[bytes]) -> Any:
        requests = [make(**first), *[make(data=piece) async for piece in pieces]]
        for left in reversed(range(UPLOADS)):
            try:
                with values.refusals():
                    return await self._transport.upload(getattr(self._transport.channel.stub, method), _each(requests))
            except UnavailableError:
                if not left:
                    raise
        raise AssertionError("no attempt")


class WireExecution:
    """An execution, which its first reader reads from the stream that began it, and others from streams of their own."""

    def __init__(self, session: WireSession, execution_id: str, request: service_pb.ExecuteRequest) -> None:
        self.execution_id = execution_id
        self._session = session
        self._began = session.read(request)
        self._is_read = False
        self._first: asyncio.Future[Any] = asyncio.ensure_future(anext(self._began))
        self._cancelled: list[asyncio.Task[Any]] = []

    async def begin(self, *, is_known: bool) -> None:
        """Waits for the first event, or else until the daemon knows the id when `is_known` says that this suffices."""

        async def began() -> bool:
            return self._first.done() or (is_known and await self._is_known())

        assert await eventually_awaited(began)
        if self._first.done():
            self._first.result()

    async def events(self, after: int = 0) -> AsyncIterator[Event]:
        if not self._is_read and not after:
            self._is_read = True
            yield values.event_from((await self._first).event)
            async for message in self._began:
                yield values.event_from(message.event)
            return
        async for message in self._session.read(self._attach(after)):
            yield values.event_from(message.event)

    def cancel(self) -> None:
        request = service_pb.CancelExecutionRequest(session_id=self._session.session_id, execution_id=self.execution_id)
        self._cancelled.append(asyncio.ensure_future(self._session.once(request)))

    async def leave(self) -> None:
        """Ends the streams that were not read to their ends; the execution goes on."""
        await asyncio.gather(*self._cancelled)
        self._first.cancel()
        await asyncio.wait([self._first])
        await self._began.aclose()

    def _attach(self, after: int) -> service_pb.AttachExecutionRequest:
        return service_pb.AttachExecutionRequest(
            session_id=self._session.session_id, execution_id=self.execution_id, after_event=after
        )

    async def _is_known(self) -> bool:
        """An event that no execution has is out of the range of this one, once the daemon has it."""
        try:
            async for _ in self._session.read(self._attach(NEVER)):
                break
        except NotFound:
            return False
        except OutOfRange:
            return True
        raise AssertionError("an event that is not there")


async def _each(requests: Sequence[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request


def _format_of(tar: bool) -> pb.FileFormat:
    return pb.FILE_FORMAT_TAR if tar else pb.FILE_FORMAT_PLAIN
