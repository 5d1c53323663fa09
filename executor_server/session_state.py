"""The part of a session that writes its state down, and begins with one.

The variables are pickled by the interpreter and unpickled by the one of another session; the files of the workspace are
an archive that the supervisor makes and unpacks. Here all of it is bytes on their way (state_archive.py).

A session begins with a state before anything is executed in it. The guest sees to that, since it outlives the daemon,
and knows by its digest a state that it has restored already: so a client that lost the answer may ask again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any

from executor_server.gate import StateFacts
from executor_server.guest.frames import Frame, FrameError, Kind
from executor_server.guest_events import MAX_PAYLOAD_BYTES
from executor_server.model import FileInfo, StateManifest
from executor_server.operations import Operation, file_part
from executor_server.session_requests import GuestRequests
from executor_server.session_rules import check_state_export, check_state_restore
from executor_server.state_archive import (
    MAX_SAID_BYTES,
    Opened,
    Part,
    Spool,
    StateArchives,
    header_of,
    manifest_from,
    said_object,
)


class StateRequests(GuestRequests):
    """Needs nothing but the guest, the session's rules and who watches."""

    python_version = ""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._restoring = asyncio.Lock()

    async def export_state(self, archives: StateArchives) -> AsyncGenerator[bytes | StateManifest, None]:
        """The archive in pieces, then what is in it.

        Raises PolicyViolation, PreconditionFailed (the session is lost), ResourceExhausted (larger than allowed).
        """
        self._require_alive()
        check_state_export(self.spec)
        await self._gate.state_export(self.facts)
        with ExitStack() as place:
            spool, variables, written = await self._export_variables(archives, place)
            files, put = await self._export_files(spool)
            manifest = replace(written, files=put.files, file_bytes=put.file_bytes, omitted_files=put.omitted_files)
            header = header_of(
                self.facts.owner.tenant, self.facts.session_id, archives.key_id, (variables, files), manifest
            )
            digest, size_bytes = hashlib.sha256(), 0
            async for piece in archives.signed(header, spool):
                digest.update(piece)
                size_bytes += len(piece)
                yield piece
            told = StateFacts(digest.hexdigest(), size_bytes, len(manifest.variables), manifest.files)
            self._observer.state_exported(self.facts, replace(told, from_session=self.facts.session_id))
            yield manifest

    async def _export_variables(self, archives: StateArchives, place: ExitStack) -> tuple[Spool, Part, StateManifest]:
        """Takes a place among the states on their way only when the first part is there.

        Until then this waits for the executions ahead of it, which may take as long as they like, and a tenant's places
        are few.
        """
        operation = Operation[bytes | StateManifest](_variables_part, self._hold)
        max_bytes = self.spec.state.max_bytes
        manifest = None
        with self._asking(operation, Kind.EXPORT_STATE, {"max_bytes": min(max_bytes, MAX_PAYLOAD_BYTES)}):
            part = await operation.next()
            spool = place.enter_context(archives.spool(self.facts.owner.tenant, max_bytes))
            while part is not None:
                if isinstance(part, StateManifest):
                    manifest = part
                else:
                    await spool.write(part)
                part = await operation.next()
        assert manifest is not None, "an operation that has an answer ended without one"
        return spool, spool.end_part(), replace(manifest, python_version=self.python_version)

    async def _export_files(self, spool: Spool) -> tuple[Part, StateManifest]:
        operation = Operation[FileInfo | bytes | StateManifest](_files_part, self._hold)
        head = {"path": "", "max_bytes": spool.left_bytes, "tar": True}
        manifest = None
        with self._asking(operation, Kind.FILE_GET, head):
            while (part := await operation.next()) is not None:
                if isinstance(part, StateManifest):
                    manifest = part
                elif isinstance(part, bytes):
                    await spool.write(part)
        assert manifest is not None, "an operation that has an answer ended without one"
        return spool.end_part(), manifest

    async def restore_state(self, archives: StateArchives, chunks: AsyncIterator[bytes]) -> StateManifest:
        """Brings an archive into this session; what was restored of it, and what could not be.

        The same archive again: the same answer. Raises PolicyViolation, InvalidRequest (no archive, or not whole),
        Forbidden (another daemon's or tenant's), PreconditionFailed (the session has been used, or is lost),
        ResourceExhausted (larger than allowed).
        """
        self._require_alive()
        check_state_restore(self.spec)
        most = self.spec.state.max_bytes + archives.overhead_bytes
        with archives.spool(self.facts.owner.tenant, most) as spool:
            async for chunk in chunks:
                await spool.write(chunk)
            rules = self.spec.state
            opened = await archives.opened(spool, self.facts.owner.tenant, allow_foreign=rules.allow_foreign)
            async with self._restoring:
                return await self._restore(opened)

    async def _restore(self, archive: Opened) -> StateManifest:
        header = archive.header
        told = StateFacts(
            sha256=archive.sha256,
            size_bytes=archive.spool.size_bytes,
            variables=len(header.manifest.variables),
            files=header.manifest.files,
            is_foreign=archive.is_foreign,
            from_session=header.session_id,
        )
        await self._gate.state_restore(self.facts, told)
        restored = await self._ask_to_restore(archive, {})
        if restored is None:
            async with aclosing(_closable(archive.files())) as files:
                await self._put("", header.files.size_bytes, files, tar=True)
            blob_id = await self.upload_blob(header.variables.size_bytes, archive.variables())
            restored = await self._ask_to_restore(archive, {"blob": blob_id})
            self._observer.state_restored(self.facts, told)
        assert restored is not None, "a guest that was given a state has restored it, or has refused"
        manifest = header.manifest
        return replace(
            restored, files=manifest.files, file_bytes=manifest.file_bytes, python_version=self.python_version
        )

    async def _ask_to_restore(self, archive: Opened, head: dict[str, Any]) -> StateManifest | None:
        """What came of it; None where that is still to be done."""
        operation = Operation[StateManifest | bool](_restored_part, self._hold)
        with self._asking(operation, Kind.RESTORE_STATE, {"digest": archive.sha256, **head}):
            answer = await operation.next()
        return answer if isinstance(answer, StateManifest) else None


async def _closable(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for piece in pieces:
        yield piece


# ---------------------------------------------------------------------------------------------------------------------
# What the answers are read with


def _variables_part(frame: Frame) -> bytes | StateManifest:
    if frame.kind == Kind.BLOB_CHUNK:
        return frame.body
    values = _said(frame)
    return _manifest(variables=values.get("variables", []), omitted_variables=values.get("omitted", []))


def _files_part(frame: Frame) -> FileInfo | bytes | StateManifest | None:
    if frame.kind == Kind.FILE_CHUNK:
        return file_part(frame)
    values = _said(frame)
    return _manifest(files=values.get("files"), file_bytes=values.get("bytes"), omitted_files=values.get("omitted", []))


def _restored_part(frame: Frame) -> StateManifest | bool:
    if not frame.head.boolean("restored"):
        return False
    values = _said(frame)
    return _manifest(variables=values.get("variables", []), omitted_variables=values.get("omitted", []))


def _said(frame: Frame) -> dict[str, Any]:
    if frame.kind != Kind.DONE:
        raise FrameError(f"frame kind {frame.kind} does not belong to this operation")
    try:
        values = said_object(frame.body, MAX_SAID_BYTES)
    except (ValueError, RecursionError) as error:
        raise FrameError("a manifest of another form") from error
    if len(json.dumps(values)) > MAX_SAID_BYTES:
        raise FrameError("a manifest that is too long")
    return values


def _manifest(**said: Any) -> StateManifest:
    try:
        return manifest_from({**_NOTHING, **said})
    except (ValueError, KeyError, TypeError) as error:
        raise FrameError("a manifest of another form") from error


_NOTHING: dict[str, Any] = {
    "variables": [],
    "omitted_variables": [],
    "files": 0,
    "file_bytes": 0,
    "omitted_files": [],
    "python_version": "",
}
