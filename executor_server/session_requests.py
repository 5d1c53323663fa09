"""What can be asked of a session's guest beside executions: tools, variables, blobs, files.

Each request is an operation: a frame that DONE answers, maybe after others. The session that this is a part of decides
whether the guest may be asked, and holds it back when a caller is behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from executor_server.errors import ExecutorError, InvalidRequest, Reason, ResourceExhausted
from executor_server.gate import Gate
from executor_server.guest.frames import MAX_BODY_BYTES, Frame, Kind
from executor_server.guest_channel import GuestChannel
from executor_server.guest_events import MAX_PAYLOAD_BYTES
from executor_server.model import BlobChunk, BlobRef, FileInfo, Payload, SessionFacts, SessionSpec, ToolSpec
from executor_server.observer import Observer
from executor_server.operations import (
    Operation,
    VariablesReply,
    file_part,
    listing,
    missing_modules,
    nothing,
    variables_part,
    written_file,
)
from executor_server.session_rules import check_file_get, check_file_put, check_tools
from executor_server.tool_packing import MAX_SHIPPED_BYTES, BlobDigests, packed_tools

T = TypeVar("T")

# At one time, in one session: with the executions that may wait, less than the jobs that the guest takes.
_MAX_OPERATIONS = 32


@dataclass(frozen=True)
class SessionSettings:
    """The daemon's own bounds on sessions."""

    max_sessions: int = 64
    max_queued_executions: int = 16
    max_finished_executions: int = 64
    journal_bytes: int = 64 * 1024 * 1024
    journal_total_bytes: int = 512 * 1024 * 1024
    staging_bytes: int = MAX_PAYLOAD_BYTES
    max_file_bytes: int = 1024 * 1024 * 1024
    sweep_interval_s: float = 0.5
    ping_interval_s: float = 10.0
    # A guest that has not said anything for so long, though it was asked, is taken for dead.
    silence_s: float = 60.0
    # For all guests that an earlier daemon left, at the start.
    recovery_s: float = 15.0


@dataclass(frozen=True)
class Watch:
    """Who is asked before something happens in a session, and who is told after it has."""

    gate: Gate = field(default_factory=Gate)
    observer: Observer = field(default_factory=Observer)


class GuestRequests(ABC):
    """The part of a session that asks its guest for something."""

    def __init__(
        self, facts: SessionFacts, spec: SessionSpec, channel: GuestChannel, settings: SessionSettings, watch: Watch
    ) -> None:
        self.facts = facts
        self.spec = spec
        self.puts = 0
        self.gets = 0
        self._channel = channel
        self._settings = settings
        self._gate = watch.gate
        self._observer = watch.observer
        self._operations: dict[int, Operation[Any]] = {}
        self._next_op = 0
        self._digests = BlobDigests()

    def _number_operations(self) -> None:
        """Begins with numbers that no earlier daemon has used, whose questions the guest may still answer."""
        self._next_op = self._channel.connections << 32

    @abstractmethod
    def _begin_tape(self) -> None:
        """Begins to write down what happens."""

    @abstractmethod
    def _require_alive(self) -> None:
        """Raises PreconditionFailed when the guest is gone."""

    @abstractmethod
    def _hold(self, holder: object, held: bool) -> None:
        """Stops or resumes taking frames while what an operation brought is full."""

    async def configure(self) -> None:
        """Gives the guest the session's rules and prelude; the first thing after creation."""
        settings = _settings(self.spec)
        operation: Operation[None] = Operation(nothing, self._hold)
        head = {"settings": len(settings)}
        with self._asking(operation, Kind.CONFIGURE, head, settings + self.spec.prelude.encode()):
            await asyncio.sleep(0)  # it leaves; what is done here takes its time from the guest's
            self._begin_tape()
            await operation.next()

    async def find_missing(self, modules: Sequence[str]) -> Sequence[str]:
        """Which of these top-level modules the image lacks. To be asked before any code has run."""
        try:
            found = await self._request(missing_modules, Kind.FIND_MODULES, {}, json.dumps(list(modules)).encode())
        except InvalidRequest:
            return ()  # the interpreter died or hung over it, in what the image has for finders: its imports will tell
        return _there(found)

    def restrict(self, spec: SessionSpec) -> Coroutine[Any, Any, None]:
        """Asks the guest now to hold the session to the rules of another spec, from its next execution on.

        What is returned waits until it does, which is when what runs has ended; to be awaited.
        """
        operation: Operation[None] = Operation(nothing, self._hold)
        asking = ExitStack()
        # However much its client asks for at a time, this gets through.
        asking.enter_context(self._asking(operation, Kind.RESTRICT, {}, _settings(spec), counts=False))

        async def done() -> None:
            with asking:
                await operation.next()

        return done()

    async def register_tools(self, tools: Sequence[ToolSpec]) -> None:
        """Replaces the tools, all or none. With tools that are shipped, waits until the interpreter has made them."""
        self._require_alive()
        tools = self._digests.added_to(tools)
        await self._gate.tools(self.facts, tools)
        check_tools(self.spec, tools)  # of now: another policy may have come, and these calls nobody will see
        head, body = packed_tools(tools)
        await self._request(nothing, Kind.REGISTER_TOOLS, head, body)

    async def set_variables(self, variables: Sequence[tuple[str, Payload]]) -> None:
        """Sets variables, all or none."""
        self._require_alive()
        await self._gate.variables(self.facts, [name for name, _ in variables], write=True)
        listed: list[dict[str, Any]] = []
        inline: list[bytes] = []
        for name, payload in variables:
            if isinstance(payload, BlobRef):
                listed.append({"name": name, "blob": payload.blob_id})
            else:
                listed.append({"name": name, "inline": len(payload)})
                inline.append(payload)
        names = json.dumps(listed).encode()
        await self._request(nothing, Kind.SET_VARIABLES, {"listed": len(names)}, names + b"".join(inline))

    async def get_variables(self, names: Sequence[str]) -> AsyncIterator[BlobChunk | VariablesReply]:
        """Blob chunks, then the variables that refer to them."""
        self._require_alive()
        await self._gate.variables(self.facts, names, write=False)
        operation = Operation[BlobChunk | VariablesReply](variables_part, self._hold)
        with self._asking(operation, Kind.GET_VARIABLES, {}, json.dumps(list(names)).encode()):
            while (part := await operation.next()) is not None:
                yield part

    async def upload_blob(self, size_bytes: int, chunks: AsyncIterator[bytes]) -> str:
        """Stages bytes in the guest for one later message that names them."""
        limit = min(self._settings.staging_bytes, MAX_PAYLOAD_BYTES)
        if size_bytes > limit:
            raise ResourceExhausted(Reason.TOO_LARGE, f"at most {limit} bytes can be staged")
        blob_id = secrets.token_hex(16)
        await self._request(nothing, Kind.BLOB_BEGIN, {"blob": blob_id, "size": size_bytes})
        received = 0
        digest = hashlib.sha256() if size_bytes <= MAX_SHIPPED_BYTES else None
        try:
            async for chunk in chunks:
                received += len(chunk)
                if received > size_bytes:
                    break
                if digest is not None:
                    digest.update(chunk)
                self._channel.send(Kind.BLOB_DATA, {"blob": blob_id}, chunk)
                await self._channel.drain()
        finally:
            if received != size_bytes:
                self._channel.send(Kind.BLOB_DROP, {"blob": blob_id})
        if received != size_bytes:
            raise InvalidRequest(Reason.INVALID_FIELD, f"size_bytes: announced {size_bytes}, sent {received}")
        # What is on its way dies with the daemon, and a message that names the blob may be remembered by the next one.
        await self._channel.delivered()
        self._require_alive()
        if digest is not None:
            self._digests.note(blob_id, digest.hexdigest())
        return blob_id

    async def put_file(
        self, path: str, size_bytes: int, chunks: AsyncIterator[bytes], *, tar: bool = False
    ) -> FileInfo:
        """Writes a file of the workspace, whole or not at all; or unpacks an archive into a directory."""
        if size_bytes > self._settings.max_file_bytes:
            raise ResourceExhausted(Reason.TOO_LARGE, f"a file has at most {self._settings.max_file_bytes} bytes")
        self._require_alive()
        check_file_put(self.spec, size_bytes, self.puts)
        self.puts += 1  # before anything is waited for: two can't be the last
        in_part = False
        try:
            await self._gate.file_put(self.facts, path, size_bytes, tar=tar)
            in_part = tar  # of an archive that breaks off, what came before is there
            return await self._put(path, size_bytes, chunks, tar=tar)
        except ExecutorError:
            self.puts -= not in_part
            raise

    async def _put(self, path: str, size_bytes: int, chunks: AsyncIterator[bytes], *, tar: bool) -> FileInfo:
        operation = Operation(written_file, self._hold)
        data = _whole(chunks, size_bytes)
        if not size_bytes:  # the guest has all of it as soon as it is asked
            async for _ in data:
                pass
        with self._asking(operation, Kind.FILE_PUT, {"path": path, "size": size_bytes, "tar": tar}) as op:
            left = size_bytes
            try:
                async for chunk in data:
                    if operation.ended:
                        break
                    self._channel.send(Kind.FILE_DATA, {"op": op}, chunk)
                    left -= len(chunk)
                    await self._channel.drain()
                return _there(await operation.next())
            finally:
                if left:
                    self._channel.send(Kind.FILE_DATA, {"op": op, "abandon": True})

    async def get_file(self, path: str, *, tar: bool = False) -> AsyncIterator[FileInfo | bytes]:
        """The description of a file, then its bytes; of a directory, those of an archive."""
        self._require_alive()
        check_file_get(self.spec, 0, self.gets)
        self.gets += 1
        given = False
        try:
            await self._gate.file_get(self.facts, path, tar=tar)
            async with aclosing(self._get(path, tar=tar)) as parts:
                async for part in parts:
                    given = True
                    if isinstance(part, FileInfo):
                        self._observer.file_got(self.facts, part)
                    yield part
        except ExecutorError:
            self.gets -= not given
            raise

    async def _get(self, path: str, *, tar: bool) -> AsyncGenerator[FileInfo | bytes, None]:
        most = min(self._settings.max_file_bytes, self.spec.files.max_get_bytes)
        head = {"path": path, "max_bytes": most, "tar": tar}
        operation = Operation[FileInfo | bytes](file_part, self._hold)
        with self._asking(operation, Kind.FILE_GET, head):
            while (part := await operation.next()) is not None:
                if part:
                    yield part

    async def list_files(self, path: str) -> tuple[list[FileInfo], bool]:
        """Files and directories below a directory, and whether there are more than are listed."""
        return _there(await self._request(listing, Kind.FILE_LIST, {"path": path}))

    async def _request(
        self, read: Callable[[Frame], T | None], kind: int, head: dict[str, Any], body: bytes = b""
    ) -> T | None:
        """What the one frame that answers says. Raises what the guest refuses with."""
        operation = Operation(read, self._hold)
        with self._asking(operation, kind, head, body):
            return await operation.next()

    @contextmanager
    def _asking(
        self, operation: Operation[Any], kind: int, head: dict[str, Any], body: bytes = b"", *, counts: bool = True
    ) -> Iterator[int]:
        """Asks the guest, and has what still comes dropped once the caller leaves."""
        self._require_alive()
        if counts and len(self._operations) >= _MAX_OPERATIONS:
            raise ResourceExhausted(
                Reason.QUEUE_FULL, f"{_MAX_OPERATIONS} operations of this session run or wait", retry_after_s=1.0
            )
        if len(body) > MAX_BODY_BYTES:
            raise ResourceExhausted(
                Reason.TOO_LARGE, f"this is {len(body):,} bytes to the sandbox, over {MAX_BODY_BYTES:,}"
            )
        self._next_op += 1
        op = self._next_op
        self._operations[op] = operation
        try:
            self._channel.send(kind, {"op": op, **head}, body)
            yield op
        finally:
            del self._operations[op]
            self._hold(operation, False)


async def _whole(chunks: AsyncIterator[bytes], size_bytes: int) -> AsyncIterator[bytes]:
    """The chunks, of which the last is given only when nothing has come after it.

    With the last byte of a file the guest puts it in its place, where another one may be. That must not happen for an
    upload which is refused because it goes on. Raises InvalidRequest where the chunks are not of that size together.
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


def _settings(spec: SessionSpec) -> bytes:
    """What the guest holds the session's executions to, all of them together included."""
    return json.dumps(
        {
            "authorized": spec.authorized_imports,
            "denied": spec.denied_imports,
            "refused": spec.refused_language,
            "session_operations": spec.limits.session_operations,
            "execution_max": vars(spec.execution_max),
            "shipped_tools": spec.tools.allowed if "sandbox" in spec.tools.placements else (),
        }
    ).encode()


def _there(answer: T | None) -> T:
    assert answer is not None, "an operation that has an answer ended without one"
    return answer
