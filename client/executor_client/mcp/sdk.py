"""The official SDK, version 1 or 2, as one: all that differs between the two is here.

The newest is not always what an environment can have: mcpadapt, by which smolagents gets its MCP tools, runs with
version 1 only, and is to live beside `executor mcp`.

The types are `mcp.types` in both. Their fields have other names (`isError`, `is_error`), so they are made here, by the
names of the wire, which both versions take.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import urllib.parse
import warnings
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal

from mcp.types import (
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceTemplate,
    TextContent,
    ToolAnnotations,
)
from pydantic import AnyUrl

MAJOR = 1 if importlib.util.find_spec("mcp.server.mcpserver") is None else 2
"""The version that is installed."""

if TYPE_CHECKING or MAJOR == 1:
    from mcp.server.fastmcp import Context, FastMCP
    from mcp.server.fastmcp.exceptions import ResourceError, ToolError
    from mcp.server.lowlevel.helper_types import ReadResourceContents
else:
    from mcp.server.mcpserver import Context, MCPServer
    from mcp.server.mcpserver.exceptions import ResourceError, ToolError
    from mcp.shared.exceptions import MCPDeprecationWarning

if TYPE_CHECKING:
    # The environment of development has version 1.
    MCPServer: Any
    MCPDeprecationWarning: type[Warning]
    Ctx = Context[Any, Any, Any]
else:
    # Without its parameters, of which the versions have different ones. What the SDK finds it by is the class.
    Ctx = Context

__all__ = [
    "MAJOR",
    "BlobResourceContents",
    "CallToolResult",
    "ContentBlock",
    "Ctx",
    "EmbeddedResource",
    "ImageContent",
    "ResourceError",
    "TextContent",
    "Tool",
    "ToolAnnotations",
    "ToolError",
    "file_block",
    "image_block",
    "make_server",
    "send_log",
    "text_block",
    "tool_hints",
    "tool_result",
]

ReadFile = Callable[[Any, str, str], Awaitable[bytes]]
Tool = Callable[..., Awaitable[Any]]

# Below, the SDK logs what went wrong in a tool call, which may be code or what came out of a sandbox.
_LOG_LEVEL: Literal["ERROR"] = "ERROR"

_FILE_TEMPLATE = "sandbox://{session}/{+path}"
_FILE_URI = re.compile(r"sandbox://(?P<session>[^/]+)/(?P<path>.+)", re.DOTALL)
_FILE_DESCRIPTION = "A file in a sandbox's working directory."
_FILE_TYPE = "application/octet-stream"


# ---------------------------------------------------------------------------------------------------------------------
# Values


def text_block(text: str) -> TextContent:
    return TextContent(type="text", text=text)


def image_block(data_base64: str, mime_type: str) -> ImageContent:
    return ImageContent.model_validate({"type": "image", "data": data_base64, "mimeType": mime_type})


def file_block(uri: str, data_base64: str, mime_type: str) -> EmbeddedResource:
    resource = BlobResourceContents.model_validate({"uri": uri, "blob": data_base64, "mimeType": mime_type})
    return EmbeddedResource(type="resource", resource=resource)


def tool_result(content: Sequence[ContentBlock], *, is_error: bool = False) -> CallToolResult:
    return CallToolResult.model_validate({"content": list(content), "isError": is_error})


def tool_hints(*, read_only: bool) -> ToolAnnotations:
    """Hints for the host: a tool looks only, or it may change or destroy what is in a sandbox."""
    hint = {"readOnlyHint": True} if read_only else {"destructiveHint": True}
    return ToolAnnotations.model_validate({**hint, "openWorldHint": False})


# ---------------------------------------------------------------------------------------------------------------------
# The server


def make_server(
    *,
    name: str,
    title: str,
    version: str,
    instructions: str,
    tools: Iterable[tuple[Tool, str, ToolAnnotations]],
    read_file: ReadFile,
    lifespan: Callable[[Any], AbstractAsyncContextManager[Any]],
) -> Any:
    """A server with these tools, each with its description and hints, that serves files as resources.

    A tool that raises ToolError gives a result that is marked as an error and says just that. `read_file` takes the
    context, a session's name and a path, and may raise ResourceError.
    """
    server: Any
    if MAJOR == 1:
        with warnings.catch_warnings():
            # Before 1.30 its own settings displease the newest pydantic-settings, which is nothing for a host's eyes.
            warnings.filterwarnings("ignore", module="pydantic_settings")
            server = _Server1(read_file, name, instructions=instructions, lifespan=lifespan, log_level=_LOG_LEVEL)
        server._mcp_server.version = version  # else it gives its own as ours; there is no other way to say it
    else:
        server = MCPServer(
            name, title=title, instructions=instructions, version=version, lifespan=lifespan, log_level=_LOG_LEVEL
        )
        _add_file_resource(server, read_file)
    for tool, description, hints in tools:
        function = _with_plain_errors(tool) if MAJOR == 1 else tool
        server.add_tool(function, description=description, annotations=hints, structured_output=False)
    return server


def _with_plain_errors(tool: Tool) -> Tool:
    """Version 1 puts words of its own before the message of a ToolError; not so before a result."""

    @functools.wraps(tool)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return await tool(*args, **kwargs)
        except ToolError as error:
            return tool_result([text_block(str(error))], is_error=True)

    return call


def _add_file_resource(server: Any, read_file: ReadFile) -> None:
    # Without parameters of its Context: the SDK's 2.0 loses the request where it meets one in a template's function.
    async def file_resource(ctx: Ctx, session: str, path: str) -> bytes:
        """A file in a sandbox's working directory, as an MCP resource."""
        return await read_file(ctx, session, path)

    server.resource(_FILE_TEMPLATE, name="file", description=_FILE_DESCRIPTION, mime_type=_FILE_TYPE)(file_resource)


if MAJOR == 1:

    class _Server1(FastMCP[Any]):
        """Serves files itself: in the templates of version 1, no parameter can hold a slash."""

        def __init__(self, read_file: ReadFile, *args: Any, **kwargs: Any) -> None:
            self._read_file = read_file
            super().__init__(*args, **kwargs)

        async def list_resource_templates(self) -> list[ResourceTemplate]:
            template = {"uriTemplate": _FILE_TEMPLATE, "name": "file", "mimeType": _FILE_TYPE}
            return [ResourceTemplate.model_validate({**template, "description": _FILE_DESCRIPTION})]

        async def read_resource(self, uri: AnyUrl | str) -> Iterable[ReadResourceContents]:
            found = _FILE_URI.fullmatch(str(uri))
            if found is None:
                raise ResourceError(f"Unknown resource: {uri}")
            session, path = (urllib.parse.unquote(part) for part in found.groups())
            content = await self._read_file(self.get_context(), session, path)
            return [ReadResourceContents(content=content, mime_type=_FILE_TYPE)]


# ---------------------------------------------------------------------------------------------------------------------


async def send_log(ctx: Any, level: Literal["info", "warning"], text: str, *, logger: str) -> None:
    """Sends the host a log message about a request."""
    with warnings.catch_warnings():
        if MAJOR == 2:
            # Deprecated in the newest protocol, where it is sent to hosts that ask for it only; there is no successor.
            warnings.simplefilter("ignore", MCPDeprecationWarning)
        sending = ctx.session.send_log_message(level, text, logger=logger, related_request_id=ctx.request_id)
    await sending
