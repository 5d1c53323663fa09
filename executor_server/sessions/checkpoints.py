"""Exports a session's state, and restores one into a new session.

The interpreter pickles the variables, and another session's interpreter unpickles them; the supervisor packs and
unpacks the files of the workspace. The daemon never reads the bytes of either (state_archive.py).

A state can be restored only before anything was executed. The guest enforces that, since it outlives the daemon. It
recognizes a restored state by its digest, so a client that lost the answer may send the same archive again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from executor_server.backends.channel import MAX_PAYLOAD_BYTES, Request, file_part
from executor_server.core import FileInfo, StateManifest
from executor_server.core.lifecycle import StateFacts
from executor_server.guest.wire.frames import Frame, FrameError
from executor_server.guest.wire.messages import BlobChunk, Done, ExportState, FileChunk, FileGet, RestoreState
from executor_server.guest.wire.schema import message_of
from executor_server.policy import check_state_export, check_state_restore
from executor_server.sessions.guest_requests import GuestRequests, answered
from executor_server.sessions.shared import SessionHooks
from executor_server.sessions.state_archive import (
    MAX_MANIFEST_BYTES,
    Opened,
    Part,
    Spool,
    StateArchives,
    bounded_object,
    header_of,
    manifest_from,
)

if TYPE_CHECKING:
    from executor_server.sessions.journal import SessionRecord
    from executor_server.sessions.session import Session

# The frames that an export sends to the guest: for the variables, and for the files.
_EXPORT_FRAMES = 2


class Checkpoints:
    """Exports and restores the state of one session."""

    def __init__(self, session: Session, requests: GuestRequests, hooks: SessionHooks, python_version: str) -> None:
        self._session = session
        self._requests = requests
        self._admission = hooks.admission
        self._observer = hooks.observer
        self._python_version = python_version
        self._restoring = asyncio.Lock()
        self.exported_at: tuple[int, SessionRecord] | None = None
        """The session's position after its last complete export, if nothing but the export was sent meanwhile."""

    async def export_state(self, archives: StateArchives) -> AsyncGenerator[bytes | StateManifest, None]:
        """Yields the archive in pieces, then its manifest.

        Raises PolicyViolation, PreconditionFailed (the session is lost), ResourceExhausted (larger than allowed).
        """
        self._session.require_alive()
        check_state_export(self._session.spec)
        await self._admission.state_export(self._session.facts)
        with ExitStack() as spools:
            self.exported_at = None
            # Executions that run now end before the guest exports the variables. Processes go on.
            was_quiet = not self._session.processes.any_running
            sent_seq, record = self._session.position
            spool, variables, written = await self._export_variables(archives, spools)
            files, put = await self._export_files(spool)
            manifest = replace(written, files=put.files, file_bytes=put.file_bytes, omitted_files=put.omitted_files)
            header = header_of(
                self._session.facts.owner.tenant,
                self._session.facts.session_id,
                archives.key_id,
                (variables, files),
                manifest,
            )
            digest, size_bytes = hashlib.sha256(), 0
            async for piece in archives.signed(header, spool):
                digest.update(piece)
                size_bytes += len(piece)
                yield piece
            if was_quiet:
                self.exported_at = sent_seq + _EXPORT_FRAMES, record
            exported = StateFacts(
                digest.hexdigest(),
                size_bytes,
                len(manifest.variables),
                manifest.files,
                from_session=self._session.facts.session_id,
            )
            self._observer.state_exported(self._session.facts, exported)
            yield manifest

    async def _export_variables(self, archives: StateArchives, spools: ExitStack) -> tuple[Spool, Part, StateManifest]:
        """Opens a spool when the first part has come, and fills it with the variables.

        The spool is not opened earlier because the request first waits in the guest behind running executions, and a
        tenant may have only a few spools at one time.
        """
        request = Request[bytes | StateManifest](_variables_part, self._session.hold_reading)
        max_bytes = self._session.spec.state.max_bytes
        payload_bytes = min(max_bytes, MAX_PAYLOAD_BYTES)
        manifest = None
        with self._requests.asking(request, lambda op: ExportState(op=op, max_bytes=payload_bytes)):
            part = await request.next()
            spool = spools.enter_context(archives.spool(self._session.facts.owner.tenant, max_bytes))
            while part is not None:
                if isinstance(part, StateManifest):
                    manifest = part
                else:
                    await spool.write(part)
                part = await request.next()
        return spool, spool.end_part(), replace(answered(manifest), python_version=self._python_version)

    async def _export_files(self, spool: Spool) -> tuple[Part, StateManifest]:
        request = Request[FileInfo | bytes | StateManifest](_files_part, self._session.hold_reading)
        max_bytes = spool.left_bytes
        manifest = None
        with self._requests.asking(request, lambda op: FileGet(op=op, path="", max_bytes=max_bytes, tar=True)):
            while (part := await request.next()) is not None:
                if isinstance(part, StateManifest):
                    manifest = part
                elif isinstance(part, bytes):
                    await spool.write(part)
        return spool.end_part(), answered(manifest)

    async def restore_state(self, archives: StateArchives, chunks: AsyncIterator[bytes]) -> StateManifest:
        """Restores an archive into this session. Returns what was restored, and what could not be.

        The same archive again gets the same answer. Raises PolicyViolation, InvalidRequest (not an archive, or an
        incomplete one), Forbidden (another daemon's or tenant's archive), PreconditionFailed (the session has been
        used, or is lost), ResourceExhausted (larger than allowed).
        """
        self._session.require_alive()
        check_state_restore(self._session.spec)
        most = self._session.spec.state.max_bytes + archives.overhead_bytes
        with archives.spool(self._session.facts.owner.tenant, most) as spool:
            async for chunk in chunks:
                await spool.write(chunk)
            rules = self._session.spec.state
            opened = await archives.opened(spool, self._session.facts.owner.tenant, allow_foreign=rules.allow_foreign)
            async with self._restoring:
                return await self._restore(opened)

    async def _restore(self, archive: Opened) -> StateManifest:
        header = archive.header
        facts = StateFacts(
            sha256=archive.sha256,
            size_bytes=archive.spool.size_bytes,
            variables=len(header.manifest.variables),
            files=header.manifest.files,
            is_foreign=archive.is_foreign,
            from_session=header.session_id,
        )
        await self._admission.state_restore(self._session.facts, facts)
        restored = await self._ask_to_restore(archive)
        if restored is None:
            async with aclosing(_closable(archive.files())) as files:
                await self._requests.write_file("", header.files.size_bytes, files, tar=True)
            blob_id = await self._requests.upload_blob(header.variables.size_bytes, archive.variables())
            restored = await self._ask_to_restore(archive, blob_id)
            self._observer.state_restored(self._session.facts, facts)
        assert restored is not None, "a guest that has the whole state restores it or refuses"
        manifest = header.manifest
        return replace(
            restored, files=manifest.files, file_bytes=manifest.file_bytes, python_version=self._python_version
        )

    async def _ask_to_restore(self, archive: Opened, blob_id: str | None = None) -> StateManifest | None:
        """Returns what was restored; None when the guest does not have this state yet."""
        answer = await self._requests.ask(
            _restored_part, lambda op: RestoreState(op=op, digest=archive.sha256, blob=blob_id)
        )
        return answer if isinstance(answer, StateManifest) else None


async def _closable(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for piece in pieces:
        yield piece


# ---------------------------------------------------------------------------------------------------------------------
# Reading the answers. A guest is hostile: the size is checked before parsing, the form afterwards.


def _variables_part(frame: Frame) -> bytes | StateManifest:
    if isinstance(message_of(frame), BlobChunk):
        return frame.body
    values = _answer_object(frame)
    return _manifest(variables=values.get("variables", []), omitted_variables=values.get("omitted", []))


def _files_part(frame: Frame) -> FileInfo | bytes | StateManifest | None:
    if isinstance(message_of(frame), FileChunk):
        return file_part(frame)
    values = _answer_object(frame)
    return _manifest(files=values.get("files"), file_bytes=values.get("bytes"), omitted_files=values.get("omitted", []))


def _restored_part(frame: Frame) -> StateManifest | bool:
    done = message_of(frame)
    if not isinstance(done, Done) or done.restored is None:
        raise FrameError("an answer that does not say whether a state was restored")
    if not done.restored:
        return False
    values = _answer_object(frame)
    return _manifest(variables=values.get("variables", []), omitted_variables=values.get("omitted", []))


def _answer_object(frame: Frame) -> dict[str, Any]:
    if not isinstance(message_of(frame), Done):
        raise FrameError(f"frame kind {frame.kind} does not belong to this request")
    try:
        values = bounded_object(frame.body, MAX_MANIFEST_BYTES)
    except (ValueError, RecursionError) as error:
        raise FrameError("a manifest of another form") from error
    if len(json.dumps(values)) > MAX_MANIFEST_BYTES:
        raise FrameError("a manifest that is too long")
    return values


def _manifest(**values: Any) -> StateManifest:
    try:
        return manifest_from({**_EMPTY, **values})
    except (ValueError, KeyError, TypeError) as error:
        raise FrameError("a manifest of another form") from error


_EMPTY: dict[str, Any] = {
    "variables": [],
    "omitted_variables": [],
    "files": 0,
    "file_bytes": 0,
    "omitted_files": [],
    "python_version": "",
}
