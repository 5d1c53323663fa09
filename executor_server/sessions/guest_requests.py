"""Requests to a session's guest other than executions: rules, tools, variables, blobs, files.

The guest answers each request with any number of frames and then DONE. A slow caller stops the reading from the guest
(backpressure); when a caller leaves, the rest of its answer is dropped.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from executor_server.backends.channel import (
    MAX_PAYLOAD_BYTES,
    MAX_SHIPPED_BYTES,
    BlobDigests,
    GuestChannel,
    Request,
    VariablesReply,
    described_file,
    file_part,
    listing,
    missing_modules,
    nothing,
    packed_tools,
    variables_part,
)
from executor_server.core import (
    BlobChunk,
    BlobRef,
    ExecutorError,
    FileInfo,
    InvalidRequest,
    Payload,
    Reason,
    ResourceExhausted,
    SessionSpec,
    ToolSpec,
)
from executor_server.guest.wire.frames import MAX_BODY_BYTES, Frame
from executor_server.guest.wire.messages import (
    BlobBegin,
    BlobData,
    BlobDrop,
    Configure,
    FileData,
    FileGet,
    FileList,
    FilePut,
    FindModules,
    GetVariables,
    ManageFile,
    RegisterTools,
    Restrict,
    SetVariable,
    SetVariables,
)
from executor_server.guest.wire.schema import Message
from executor_server.guest.wire.session_rules import LISTED_HOSTS_MAX, ExecutionMax, SessionRules
from executor_server.policy import check_file_get, check_file_put, check_tools
from executor_server.sessions.shared import SessionHooks, SessionSettings

if TYPE_CHECKING:
    from executor_server.sessions.session import Session

T = TypeVar("T")

# Open requests of one session; together with the executions that may wait, fewer than the jobs that the guest queues.
_MAX_OPEN = 32


class OpenRequest(Protocol):
    """A request that waits for frames of the guest: an answer, or a connection."""

    def take(self, frame: Frame) -> None:
        """Takes a frame. Raises FrameError."""
        ...

    def fail(self, error: ExecutorError) -> None:
        """Ends it with an error."""
        ...


class GuestRequests:
    """Sends requests to the guest of one session, and gives each answer to its caller."""

    def __init__(
        self,
        session: Session,
        channel: GuestChannel,
        settings: SessionSettings,
        hooks: SessionHooks,
        *,
        puts: int,
        gets: int,
    ) -> None:
        """`puts`, `gets`: how many files were put and got under earlier daemons."""
        self.tool_names: tuple[str, ...] = ()  # as last registered with this daemon
        self.puts = puts
        self.gets = gets
        self._session = session
        self._channel = channel
        self._settings = settings
        self._admission = hooks.admission
        self._observer = hooks.observer
        self._open: dict[int, OpenRequest] = {}
        self._next_op = 0
        self._digests = BlobDigests()

    def number_from_here(self) -> None:
        """Begins with numbers that no earlier daemon used, since the guest may still answer that daemon's requests."""
        self._next_op = self._channel.connections << 32

    @property
    def waiting(self) -> bool:
        """True while a request is not fully answered."""
        return bool(self._open)

    def take(self, op: int, frame: Frame) -> None:
        """Gives a frame to the request of this number; drops it if the caller has left."""
        request = self._open.get(op)
        if request is not None:
            request.take(frame)

    def fail_all(self, error: ExecutorError) -> None:
        """Ends every open request with an error."""
        for request in self._open.values():
            request.fail(error)

    async def configure(self, env: Mapping[str, str], meanwhile: Callable[[], None]) -> None:
        """Sends the session's rules, environment variables and prelude; the first request.

        Calls `meanwhile` while the guest works.
        """
        rules = _rules(self._session.spec)
        request: Request[None] = Request(nothing, self._session.hold_reading)
        variables = json.dumps(dict(env)).encode() if env else b""
        body = rules + variables + self._session.spec.prelude.encode()
        with self.asking(request, lambda op: Configure(op=op, settings=len(rules), env=len(variables)), body):
            await asyncio.sleep(0)  # lets the frame leave first
            meanwhile()
            await request.next()

    async def find_missing(self, modules: Sequence[str]) -> Sequence[str]:
        """Returns the top-level modules that the image lacks. Must be called before any code has run."""
        try:
            found = await self.ask(missing_modules, lambda op: FindModules(op=op), json.dumps(list(modules)).encode())
        except InvalidRequest:
            return ()  # a finder of the image killed or hung the interpreter; each import fails with its own reason
        return answered(found)

    def restrict(self, spec: SessionSpec, *, must_go: bool) -> Coroutine[Any, Any, None]:
        """Sends the rules of another spec now; they apply from the next execution.

        The returned coroutine must be awaited: it waits for the guest's answer, after the running execution. `must_go`
        as for `asking`: a client with many open requests must not keep a new policy from the guest.
        """
        request: Request[None] = Request(nothing, self._session.hold_reading)
        asking = ExitStack()
        asking.enter_context(self.asking(request, lambda op: Restrict(op=op), _rules(spec), must_go=must_go))

        async def done() -> None:
            with asking:
                await request.next()

        return done()

    async def register_tools(self, tools: Sequence[ToolSpec]) -> None:
        """Replaces the tools, all or none. Waits until the interpreter has built the shipped ones."""
        self._session.require_alive()
        tools = self._digests.added_to(tools)
        await self._admission.tools(self._session.facts, tools)
        # Checked after the await, when another policy may be in force. Calls of shipped tools never leave the sandbox,
        # so no later check sees them.
        check_tools(self._session.spec, tools)
        listed_bytes, body = packed_tools(tools)
        await self.ask(nothing, lambda op: RegisterTools(op=op, listed=listed_bytes), body)
        self.tool_names = tuple(tool.name for tool in tools)

    async def set_variables(self, variables: Sequence[tuple[str, Payload]]) -> None:
        """Sets variables, all or none."""
        self._session.require_alive()
        await self._admission.variables(self._session.facts, [name for name, _ in variables], write=True)
        listed: list[SetVariable] = []
        inline: list[bytes] = []
        for name, payload in variables:
            if isinstance(payload, BlobRef):
                listed.append(SetVariable(name=name, blob=payload.blob_id))
            else:
                listed.append(SetVariable(name=name, inline=len(payload)))
                inline.append(payload)
        names = json.dumps([variable.head() for variable in listed]).encode()
        body = names + b"".join(inline)
        await self.ask(nothing, lambda op: SetVariables(op=op, listed=len(names)), body)
        # Only now: if the request was refused before the guest began it, a blob may be named again as a tool's.
        self._digests.drop(variable.blob for variable in listed if variable.blob is not None)

    async def get_variables(self, names: Sequence[str]) -> AsyncGenerator[BlobChunk | VariablesReply, None]:
        """Yields blob chunks, then the variables that refer to them."""
        self._session.require_alive()
        await self._admission.variables(self._session.facts, names, write=False)
        request = Request[BlobChunk | VariablesReply](variables_part, self._session.hold_reading)
        with self.asking(request, lambda op: GetVariables(op=op), json.dumps(list(names)).encode()):
            while (part := await request.next()) is not None:
                yield part

    async def upload_blob(self, size_bytes: int, chunks: AsyncIterator[bytes]) -> str:
        """Stages bytes in the guest for one later message that refers to them."""
        limit = min(self._settings.staging_bytes, MAX_PAYLOAD_BYTES)
        if size_bytes > limit:
            raise ResourceExhausted(Reason.TOO_LARGE, f"at most {limit} bytes can be staged")
        blob_id = secrets.token_hex(16)
        await self.ask(nothing, lambda op: BlobBegin(op=op, blob=blob_id, size=size_bytes))
        received = 0
        may_be_tool, held = size_bytes <= MAX_SHIPPED_BYTES, list[bytes]()
        try:
            async for chunk in chunks:
                received += len(chunk)
                if received > size_bytes:
                    break
                if may_be_tool:
                    held.append(chunk)
                await self._channel.drain()
                self._channel.send(BlobData(blob=blob_id), chunk)
        finally:
            if received != size_bytes:
                self._channel.send(BlobDrop(blob=blob_id))
        if received != size_bytes:
            raise InvalidRequest(Reason.INVALID_FIELD, f"size_bytes: announced {size_bytes}, sent {received}")
        # The journal has messages that name the blob, which a later daemon would send again, but not the blob's bytes.
        # So a blob counts as staged only when the guest has acknowledged all of it.
        await self._channel.delivered()
        self._session.require_alive()
        if may_be_tool:
            self._digests.hold(blob_id, held)
            self._session.spawn(self._digests.settle(blob_id))
        return blob_id

    async def put_file(
        self,
        path: str,
        size_bytes: int,
        chunks: AsyncIterator[bytes],
        *,
        tar: bool = False,
        append: bool = False,
        mode: int | None = None,
    ) -> FileInfo:
        """Writes a file, or appends to it; with `tar`, unpacks an archive into a directory."""
        if size_bytes > self._settings.max_file_bytes:
            raise ResourceExhausted(Reason.TOO_LARGE, f"a file has at most {self._settings.max_file_bytes} bytes")
        self._session.require_alive()
        check_file_put(self._session.spec, size_bytes, self.puts)
        self.puts += 1  # before the first await, or two callers could both take the last permitted put
        in_part = False
        try:
            await self._admission.file_put(self._session.facts, path, size_bytes, tar=tar)
            in_part = tar or append  # if it breaks off, its first part stays in the sandbox, so it counts
            return await self.write_file(path, size_bytes, chunks, tar=tar, append=append, mode=mode)
        except ExecutorError:
            self.puts -= not in_part
            raise

    async def write_file(
        self,
        path: str,
        size_bytes: int,
        chunks: AsyncIterator[bytes],
        *,
        tar: bool,
        append: bool = False,
        mode: int | None = None,
    ) -> FileInfo:
        """Sends a file. Does not check the policy; the caller must have done so."""
        request = Request(described_file, self._session.hold_reading)
        data = _whole(chunks, size_bytes)
        if not size_bytes:  # the guest writes an empty file at once, so a longer upload must be refused first
            async for _ in data:
                pass

        def message(op: int) -> FilePut:
            return FilePut(op=op, path=path, size=size_bytes, tar=tar, append=append, mode=mode)

        with self.asking(request, message) as op:
            left = size_bytes
            try:
                async for chunk in data:
                    await self._channel.drain()
                    if request.ended:
                        break
                    self._channel.send(FileData(op=op), chunk)
                    left -= len(chunk)
                return answered(await request.next())
            finally:
                if left:
                    self._channel.send(FileData(op=op, abandon=True))

    async def get_file(
        self, path: str, *, tar: bool = False, offset: int = 0, length: int | None = None, excluded: Sequence[str] = ()
    ) -> AsyncGenerator[FileInfo | bytes, None]:
        """Yields the description of a file, then its bytes from `offset` on, at most `length`.

        With `tar`, yields an archive of a directory without the `excluded` names and paths below it.
        """
        self._session.require_alive()
        check_file_get(self._session.spec, 0, self.gets)
        self.gets += 1
        given = False
        try:
            await self._admission.file_get(self._session.facts, path, tar=tar)
            async with aclosing(self._get(path, tar, offset, length, excluded)) as parts:
                async for part in parts:
                    given = True
                    if isinstance(part, FileInfo):
                        self._observer.file_got(self._session.facts, part)
                    yield part
        except ExecutorError:
            self.gets -= not given
            raise

    async def _get(
        self, path: str, tar: bool, offset: int, length: int | None, excluded: Sequence[str]
    ) -> AsyncGenerator[FileInfo | bytes, None]:
        most = min(self._settings.max_file_bytes, self._session.spec.files.max_get_bytes)
        request = Request[FileInfo | bytes](file_part, self._session.hold_reading)
        body = json.dumps(list(excluded)).encode() if excluded else b""

        def message(op: int) -> FileGet:
            return FileGet(op=op, path=path, max_bytes=most, tar=tar, offset=offset, length=length)

        with self.asking(request, message, body) as op:
            try:
                while (part := await request.next()) is not None:
                    if part:
                        yield part
            finally:
                if not request.ended:
                    self._channel.send(FileData(op=op, abandon=True))

    async def list_files(self, path: str, *, recursive: bool = True) -> tuple[list[FileInfo], bool]:
        """Returns files, directories and links in a directory, and True if the list is cut."""
        return answered(await self.ask(listing, lambda op: FileList(op=op, path=path, recursive=recursive)))

    async def manage_file(self, action: str, path: str, **options: Any) -> FileInfo | None:
        """Does an action of ManageFile with its `options`. Returns the file's description; None for a removal."""
        self._session.require_alive()
        if action in ("mkdir", "move", "remove"):
            facts = {"action": action, "path": path, "target": options.get("target", "")}
            await self._admission.action(self._session.facts, "file_changed", facts)
        read: Callable[[Frame], FileInfo | None] = nothing if action == "remove" else described_file
        return await self.ask(read, lambda op: ManageFile(op=op, action=action, path=path, **options))

    async def ask(
        self,
        read: Callable[[Frame], T | None],
        message: Callable[[int], Message],
        body: bytes = b"",
        *,
        counts: bool = True,
    ) -> T | None:
        """Returns the content of the single answering frame. Raises the guest's refusal, and as `asking`."""
        request = Request(read, self._session.hold_reading)
        with self.asking(request, message, body, counts=counts):
            return await request.next()

    @contextmanager
    def asking(
        self,
        request: OpenRequest,
        message: Callable[[int], Message],
        body: bytes = b"",
        *,
        counts: bool = True,
        must_go: bool = False,
    ) -> Iterator[int]:
        """Sends the message under a new number, and yields the number. Frames after the block are dropped.

        Raises PreconditionFailed and ResourceExhausted. `counts`: as one of the open requests that a session may have.
        `must_go`: neither counted nor refused.
        """
        self._session.require_alive()
        # A caller that leaves closes its request, but the channel keeps the frame until the guest has acknowledged it.
        if self._channel.crowded and not must_go:
            raise ResourceExhausted(
                Reason.QUEUE_FULL,
                "the sandbox has not taken the earlier requests of this session yet: read the files and variables that "
                "were requested, and try again",
                retry_after_s=1.0,
            )
        if counts and not must_go and len(self._open) >= _MAX_OPEN:
            raise ResourceExhausted(
                Reason.QUEUE_FULL,
                f"this session has {_MAX_OPEN} open requests, the most that it may have; wait for one to end",
                retry_after_s=1.0,
            )
        if len(body) > MAX_BODY_BYTES:
            raise ResourceExhausted(
                Reason.TOO_LARGE, f"the request has {len(body):,} bytes; the limit is {MAX_BODY_BYTES:,}"
            )
        self._next_op += 1
        op = self._next_op
        self._open[op] = request
        try:
            self._channel.send(message(op), body)
            yield op
        finally:
            del self._open[op]
            self._session.hold_reading(request, False)


async def _whole(chunks: AsyncIterator[bytes], size_bytes: int) -> AsyncIterator[bytes]:
    """Yields the chunks; the last one only after the stream has ended. Raises InvalidRequest for another total size.

    The guest replaces the file when it has the last byte, so an upload that is longer than announced must not send it.
    """
    received, held = 0, b""
    async for chunk in chunks:
        received += len(chunk)
        if received > size_bytes:
            break
        if held:
            yield held
        held = chunk
    if received != size_bytes:
        raise InvalidRequest(Reason.INVALID_FIELD, f"size_bytes: announced {size_bytes}, sent {received}")
    if held:
        yield held


def _rules(spec: SessionSpec) -> bytes:
    """Encodes the rules that the guest enforces on executions, with the budget of the whole session."""
    most = spec.execution_max
    rules = SessionRules(
        authorized=list(spec.authorized_imports),
        denied=list(spec.denied_imports),
        refused=list(spec.refused_language),
        workspace=spec.workspace_imports,
        session_operations=spec.limits.session_operations,
        execution_max=ExecutionMax(
            wall_time_s=most.wall_time_s,
            cpu_time_s=most.cpu_time_s,
            operations=most.operations,
            output_bytes=most.output_bytes,
        ),
        shipped_tools=list(spec.tools.allowed) if "sandbox" in spec.tools.placements else [],
        network=_listed_hosts((*spec.network.allowed, *(f"{host} (after an approval)" for host in spec.network.ask))),
    )
    return json.dumps(rules.head()).encode()


def _listed_hosts(allowed: Sequence[str]) -> list[str]:
    """Returns the hosts that the guest lists in messages: the first ones, and the number of the others."""
    listed, rest = list(allowed[:LISTED_HOSTS_MAX]), len(allowed) - LISTED_HOSTS_MAX
    return [*listed, f"and {rest} more"] if rest > 0 else listed


def answered(answer: T | None) -> T:
    """Returns the answer of a request that always has one."""
    assert answer is not None, "a request that has an answer ended without one"
    return answer
