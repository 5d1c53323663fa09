"""The frame that registers tools in a sandbox, and the digests of shipped tools for the audit log.

Shipped code passes through the daemon unread: nothing here decodes, compiles or runs any of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from executor_api.limits import VARIABLES_NAMED_MAX
from executor_server.core import BlobRef, Payload, ShippedTool, ToolSource, ToolSpec
from executor_server.guest.wire.messages import ListedTool, Place

# Digests that are kept per session: more than the blobs that can be staged at a time.
_MAX_DIGESTS = 2 * VARIABLES_NAMED_MAX
HOLD_S = 0.25
"""Seconds that the bytes of a staged blob are held for the message that names it."""
# Blobs that are held at one time in a session; each is at most as large as all tools together may be.
_MAX_HELD = 2


class BlobDigests:
    """The digests of a session's last blobs that are small enough to be a tool.

    Nearly every blob is a variable, whose record has no digest, and SHA-256 would be a third of the cost of passing it
    on. So a blob's bytes are held until the next message names it: only a tool's digest is computed. Blobs that are
    named later are digested in a thread after HOLD_S.
    """

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._held: dict[str, Sequence[bytes]] = {}

    def hold(self, blob_id: str, pieces: Sequence[bytes]) -> None:
        """Notes a blob that was staged; `settle` must follow, as a task of the session."""
        self._held[blob_id] = pieces
        if len(self._held) > _MAX_HELD:
            self._digest(next(iter(self._held)))

    async def settle(self, blob_id: str) -> None:
        """Makes the digest of a blob that no message names within HOLD_S."""
        await asyncio.sleep(HOLD_S)
        pieces = self._held.get(blob_id)
        if pieces is not None:
            sha256 = await asyncio.to_thread(_sha256, pieces)
            if self._held.pop(blob_id, None) is not None:  # else it was named meanwhile
                self._note(blob_id, sha256)

    def drop(self, blob_ids: Iterable[str]) -> None:
        """Forgets blobs that are no tools: each was named by another message, and can't be named again."""
        for blob_id in blob_ids:
            self._held.pop(blob_id, None)

    def _digest(self, blob_id: str) -> None:
        self._note(blob_id, _sha256(self._held.pop(blob_id)))

    def _note(self, blob_id: str, sha256: str) -> None:
        self._digests[blob_id] = sha256
        if len(self._digests) > _MAX_DIGESTS:
            del self._digests[next(iter(self._digests))]

    def added_to(self, tools: Sequence[ToolSpec]) -> list[ToolSpec]:
        """Returns the tools with the digests of their blobs; a blob that an earlier daemon received has none."""
        return [tool if tool.shipped is None else replace(tool, shipped=self._known(tool.shipped)) for tool in tools]

    def _known(self, shipped: ShippedTool) -> ShippedTool:
        code = shipped.code
        if isinstance(code, ToolSource):
            bindings = None if code.bindings is None else self._payload(code.bindings)
            return replace(shipped, code=replace(code, bindings=bindings))
        return replace(shipped, code=self._payload(code))

    def _payload(self, payload: Payload) -> Payload:
        if not isinstance(payload, BlobRef):
            return payload
        if payload.blob_id in self._held:
            self._digest(payload.blob_id)
        return replace(payload, sha256=self._digests.get(payload.blob_id))


def _sha256(pieces: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def packed_tools(tools: Sequence[ToolSpec]) -> tuple[int, bytes]:
    """Returns the body of the frame and the length of its JSON list, which the inline parts follow in order."""
    inline: list[bytes] = []
    listed = [_listed(tool, inline) for tool in tools]
    names = json.dumps([tool.head() for tool in listed]).encode()
    return len(names), names + b"".join(inline)


def _listed(tool: ToolSpec, inline: list[bytes]) -> ListedTool:
    listed = ListedTool(
        name=tool.name,
        description=tool.description,
        parameters=list(tool.parameters),
        final=tool.is_final_answer,
    )
    shipped = tool.shipped
    if shipped is None:
        return listed
    listed = listed.but(modules=list(shipped.modules))
    code = shipped.code
    if isinstance(code, ToolSource):
        source = _place(code.text.encode(), inline)
        bindings = None if code.bindings is None else _place(code.bindings, inline)
        return listed.but(entry=code.entry, source=source, bindings=bindings)
    return listed.but(value=_place(code, inline))


def _place(payload: Payload, inline: list[bytes]) -> Place:
    if isinstance(payload, BlobRef):
        return Place(blob=payload.blob_id)
    inline.append(payload)
    return Place(inline=len(payload))
