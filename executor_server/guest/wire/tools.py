"""The frame that registers tools: its limits, and how it is read. Both ends of the channel use it."""

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
    """Returns True when the pattern of a policy covers a tool of this name."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def listed_tools(request: RegisterTools, body: bytes) -> list[ListedTool]:
    """Returns the list of tools in a frame. Raises FrameError."""
    if request.listed > len(body):
        raise FrameError(f"a list of {request.listed} bytes in a body of {len(body)}")
    return read_listed(ListedTool, body[: request.listed], TOOLS_MAX, "tools")


def places(tool: ListedTool) -> list[tuple[str, Place]]:
    """Returns the places of a tool's parts as (part, place); nothing for a tool that is not shipped."""
    found = ((part, getattr(tool, part)) for part in _PARTS)
    return [(part, place) for part, place in found if place is not None]
