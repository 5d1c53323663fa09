"""Tools on their way into a sandbox: the frame that registers them, and what the audit log can say of what is shipped.

What is shipped passes through the daemon unread: nothing here decodes, compiles or runs any of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from executor_server.guest.tool_set import MAX_SHIPPED_BYTES
from executor_server.model import BlobRef, Payload, ShippedTool, ToolSource, ToolSpec

__all__ = ["MAX_SHIPPED_BYTES", "BlobDigests", "packed_tools"]

# Of one session: more than can be staged at a time.
_MAX_DIGESTS = 128


class BlobDigests:
    """The digests of the last blobs of a session that are small enough to be a tool."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def note(self, blob_id: str, sha256: str) -> None:
        self._digests[blob_id] = sha256
        if len(self._digests) > _MAX_DIGESTS:
            del self._digests[next(iter(self._digests))]

    def added_to(self, tools: Sequence[ToolSpec]) -> list[ToolSpec]:
        """The same tools, with the digests of their blobs. One that came to an earlier daemon has none here."""
        return [tool if tool.shipped is None else replace(tool, shipped=self._known(tool.shipped)) for tool in tools]

    def _known(self, shipped: ShippedTool) -> ShippedTool:
        code = shipped.code
        if isinstance(code, ToolSource):
            bindings = None if code.bindings is None else self._payload(code.bindings)
            return replace(shipped, code=replace(code, bindings=bindings))
        return replace(shipped, code=self._payload(code))

    def _payload(self, payload: Payload) -> Payload:
        if isinstance(payload, BlobRef):
            return replace(payload, sha256=self._digests.get(payload.blob_id))
        return payload


def packed_tools(tools: Sequence[ToolSpec]) -> tuple[dict[str, Any], bytes]:
    """Head and body of the frame: the list as JSON, then all that is inline, in the order of the list."""
    inline: list[bytes] = []
    listed = [_listed(tool, inline) for tool in tools]
    names = json.dumps(listed).encode()
    return {"listed": len(names)}, names + b"".join(inline)


def _listed(tool: ToolSpec, inline: list[bytes]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": list(tool.parameters),
        "final": tool.is_final_answer,
    }
    shipped = tool.shipped
    if shipped is None:
        return entry
    entry["modules"] = list(shipped.modules)
    code = shipped.code
    if isinstance(code, ToolSource):
        text = code.text.encode()
        entry["entry"] = code.entry
        entry["source"] = {"inline": len(text)}
        inline.append(text)
        if code.bindings is not None:
            entry["bindings"] = _place(code.bindings, inline)
    else:
        entry["value"] = _place(code, inline)
    return entry


def _place(payload: Payload, inline: list[bytes]) -> dict[str, Any]:
    if isinstance(payload, BlobRef):
        return {"blob": payload.blob_id}
    inline.append(payload)
    return {"inline": len(payload)}
