"""The session's tools as the supervisor keeps them, so that each new interpreter can be given them again.

What was shipped is kept as it came: bytes, or a sealed memory file. Nothing here decodes, compiles or unpickles it.
"""

from __future__ import annotations

import os

from .frames import CHUNK_BYTES, Fields, FrameError
from .lean import dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional, Union

    Post = Callable[..., None]

MAX_TOOLS = 256
# Of all tools of a registration.
MAX_SHIPPED_BYTES = 32 * 1024 * 1024
# What a tool may be made of; for the text of a source there is no other way than inline.
_PARTS = ("source", "bindings", "value")
_MAX_INLINE_BYTES = {"source": 4 * CHUNK_BYTES, "bindings": CHUNK_BYTES, "value": CHUNK_BYTES}


class PartMissing(Exception):
    """The bytes of a tool are not there (any more); the message says of which."""


class TooMuchShipped(Exception):
    """More is shipped than a session may have; the message says how much that is."""


class ToolSet:
    """The tools of one registration. Owns the memory files that they lie in."""

    def __init__(self) -> None:
        self._listed: list[dict[str, Any]] = []
        self._parts: list[tuple[int, str, Union[bytes, int]]] = []

    @classmethod
    def read(cls, head: Fields, body: bytes, take_blob: Callable[[str], Optional[int]]) -> ToolSet:
        """The tools of a frame. Raises FrameError, PartMissing, TooMuchShipped."""
        tools = cls()
        try:
            tools._read(head, body, take_blob)
        except BaseException:
            tools.close()
            raise
        return tools

    def _read(self, head: Fields, body: bytes, take_blob: Callable[[str], Optional[int]]) -> None:
        position = head.integer("listed", 0, len(body))
        shipped_bytes = 0
        for index, tool in enumerate(listed_tools(head, body)):
            entry = {
                "name": tool.text("name", 256),
                "description": tool.text("description", 16 * 1024),
                "parameters": tool.texts("parameters", 256, 256),
                "final": tool.boolean("final"),
            }
            if "modules" in tool:
                entry["modules"] = tool.texts("modules", 256, 256)
                entry["entry"] = tool.text("entry", 256, default="")
            self._listed.append(entry)
            for part, place in places(tool):
                if "blob" in place:
                    data: Union[bytes, int, None] = take_blob(place.text("blob", 64))
                    if data is None:
                        raise PartMissing(f"the bytes of tool {entry['name']} are not there")
                else:
                    size = place.integer("inline", 0, min(len(body) - position, _MAX_INLINE_BYTES[part]))
                    data = body[position : position + size]
                    position += size
                self._parts.append((index, part, data))
                shipped_bytes += len(data) if isinstance(data, bytes) else os.fstat(data).st_size
                if shipped_bytes > MAX_SHIPPED_BYTES:
                    raise TooMuchShipped(f"more than {MAX_SHIPPED_BYTES} bytes of tools are shipped")

    @property
    def has_shipped(self) -> bool:
        return bool(self._parts)

    @property
    def called(self) -> frozenset[str]:
        """Names of those whose calls the client answers."""
        return frozenset(tool["name"] for tool in self._listed if "modules" not in tool)

    @property
    def final(self) -> frozenset[str]:
        """Names of those whose answer is the final one."""
        return frozenset(tool["name"] for tool in self._listed if tool["final"])

    def forbid(self, patterns: list[str], why_not: str) -> dict[str, str]:
        """Lets go of those that were shipped and are of no such name; why each of these is not there any more."""
        forbidden = {}
        for index, tool in enumerate(self._listed):
            is_allowed = any(is_named(pattern, tool["name"]) for pattern in patterns)
            if "modules" in tool and not is_allowed and tool.get("why_not") != why_not:
                tool["why_not"] = forbidden[tool["name"]] = why_not
                self._close([part for part in self._parts if part[0] == index])
        return forbidden

    def post_called(self, post: Post, why_not: str) -> None:
        """Gives an interpreter those that the client answers; in the place of the others, what says `why_not`."""
        listed = [{"why_not": why_not, **tool} if "modules" in tool else tool for tool in self._listed]
        post({"t": "tools"}, dumps(listed))

    def post_all(self, post: Post, *, again: bool) -> None:
        """Gives an interpreter all of them; it answers when it has made those that run in it.

        `again`: they were made before, in another interpreter; then each that can be made is in place afterwards.
        """
        for index, part, data in self._parts:
            head = {"t": "part", "tool": self._listed[index]["name"], "part": part}
            if isinstance(data, bytes):
                post(head, data)
            else:
                post(head, memfd=os.dup(data))
        post({"t": "ship", "again": again}, dumps(self._listed))

    def close(self) -> None:
        """Lets go of what was shipped. Idempotent."""
        self._close(self._parts)

    def _close(self, parts: list[tuple[int, str, Union[bytes, int]]]) -> None:
        for _, _, data in parts:
            if isinstance(data, int):
                os.close(data)
        self._parts = [part for part in self._parts if part not in parts]


def is_named(pattern: str, name: str) -> bool:
    """Whether a pattern of a policy means a tool of this name."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def listed_tools(head: Fields, body: bytes) -> list[Fields]:
    """The list of tools in a frame. Raises FrameError."""
    try:
        listed = loads(body[: head.integer("listed", 0, len(body))])
    except (ValueError, RecursionError) as error:
        raise FrameError("tools that are not JSON") from error
    return Fields({"tools": listed}).objects("tools", MAX_TOOLS)


def places(tool: Fields) -> list[tuple[str, Fields]]:
    """Where the parts of a tool are: (part, inline or blob). None of one that is not shipped."""
    found = ((part, tool.object(part)) for part in _PARTS)
    return [(part, place) for part, place in found if place is not None]
