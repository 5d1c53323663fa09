"""The session's tools, kept for each new interpreter.

A shipped tool stays as it was received: bytes, or a sealed memory file. Nothing here decodes, compiles or unpickles it.
"""

from __future__ import annotations

import os

from ..wire.frames import FrameError
from ..wire.lean import dumps
from ..wire.link_messages import PlacedTool, PlaceTools, ShipTools, ToolPart
from ..wire.messages import RegisterTools
from ..wire.tools import MAX_INLINE_BYTES, MAX_SHIPPED_BYTES, is_named, listed_tools, places

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional, Union

    Post = Callable[..., None]


class PartMissing(Exception):
    """The bytes of a tool are missing; the message names the tool."""


class TooMuchShipped(Exception):
    """The tools have more bytes than a session may ship; the message names the limit."""


class ToolSet:
    """The tools of one registration. Owns their memory files."""

    def __init__(self) -> None:
        self._listed: list[PlacedTool] = []
        self._parts: list[tuple[int, str, Union[bytes, int]]] = []

    @classmethod
    def read(cls, request: RegisterTools, body: bytes, take_blob: Callable[[str], Optional[int]]) -> ToolSet:
        """Reads the tools of a frame. Raises FrameError, PartMissing, TooMuchShipped."""
        tools = cls()
        try:
            tools._read(request, body, take_blob)
        except BaseException:
            tools.close()
            raise
        return tools

    def _read(self, request: RegisterTools, body: bytes, take_blob: Callable[[str], Optional[int]]) -> None:
        position = request.listed
        shipped_bytes = 0
        for index, tool in enumerate(listed_tools(request, body)):
            placed = PlacedTool(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                final=tool.final,
                modules=tool.modules,
                entry=tool.entry or "",
            )
            self._listed.append(placed)
            for part, place in places(tool):
                if place.blob is not None:
                    data: Union[bytes, int, None] = take_blob(place.blob)
                    if data is None:
                        raise PartMissing(f"the bytes of tool {tool.name} did not arrive")
                else:
                    size, most = place.inline, min(len(body) - position, MAX_INLINE_BYTES[part])
                    if size is None or size > most:
                        raise FrameError(f"field inline is not an integer from 0 to {most}")
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
        """Names of the tools whose calls the client answers."""
        return frozenset(tool.name for tool in self._listed if tool.modules is None)

    @property
    def final(self) -> frozenset[str]:
        """Names of the tools whose answer is the final one."""
        return frozenset(tool.name for tool in self._listed if tool.final)

    def forbid(self, patterns: list[str], why_not: str) -> list[str]:
        """Drops the shipped tools that no pattern matches; returns the names of those dropped now."""
        forbidden = []
        for index, tool in enumerate(self._listed):
            is_allowed = any(is_named(pattern, tool.name) for pattern in patterns)
            if tool.modules is not None and not is_allowed and tool.why_not != why_not:
                self._listed[index] = tool.but(why_not=why_not)
                forbidden.append(tool.name)
                self._close([part for part in self._parts if part[0] == index])
        return forbidden

    def post_called(self, post: Post, why_not: str) -> None:
        """Gives an interpreter the tools that the client answers; calls of the others raise an error with `why_not`."""
        listed = [
            tool if tool.modules is None or tool.why_not is not None else tool.but(why_not=why_not)
            for tool in self._listed
        ]
        post(PlaceTools(), _packed(listed))

    def post_all(self, post: Post, *, again: bool) -> None:
        """Gives an interpreter all tools; it answers when it has made the shipped ones.

        `again`: they were made before in another interpreter. Then those that can be made are kept even if one fails.
        """
        for index, part, data in self._parts:
            message = ToolPart(tool=self._listed[index].name, part=part)
            if isinstance(data, bytes):
                post(message, data)
            else:
                post(message, memfd=os.dup(data))
        post(ShipTools(again=again), _packed(self._listed))

    def close(self) -> None:
        """Closes the memory files. Idempotent."""
        self._close(self._parts)

    def _close(self, parts: list[tuple[int, str, Union[bytes, int]]]) -> None:
        for _, _, data in parts:
            if isinstance(data, int):
                os.close(data)
        self._parts = [part for part in self._parts if part not in parts]


def _packed(tools: list[PlacedTool]) -> bytes:
    return dumps([tool.head() for tool in tools])
