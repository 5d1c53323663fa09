"""Limits and reading of the frame that registers tools, for both ends of the channel."""

from __future__ import annotations

from executor_api.limits import TOOLS_MAX, TOOLS_SHIPPED_BYTES_MAX

from .frames import CHUNK_BYTES, FrameError
from .messages import ListedTool, Place, RegisterTools
from .schema import read_listed

MAX_SHIPPED_BYTES = TOOLS_SHIPPED_BYTES_MAX
# The parts of a shipped tool; the text of a source is always inline.
_PARTS = ("source", "bindings", "value")
MAX_INLINE_BYTES = {"source": 4 * CHUNK_BYTES, "bindings": CHUNK_BYTES, "value": CHUNK_BYTES}


def is_named(pattern: str, name: str) -> bool:
    """Returns true if a policy's pattern matches the name of a tool."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def listed_tools(request: RegisterTools, body: bytes) -> list[ListedTool]:
    """Returns the list of tools in a frame. Raises FrameError."""
    if request.listed > len(body):
        raise FrameError(f"a list of {request.listed} bytes in a body of {len(body)}")
    return read_listed(ListedTool, body[: request.listed], TOOLS_MAX, "tools")


def places(tool: ListedTool) -> list[tuple[str, Place]]:
    """Returns the places of a shipped tool's parts as (part, place); nothing for other tools."""
    found = ((part, getattr(tool, part)) for part in _PARTS)
    return [(part, place) for part, place in found if place is not None]
