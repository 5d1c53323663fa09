"""The official SDK, version 1 or 2, behind one interface. All differences between the two are in this file.

Version 1 is needed because mcpadapt, which smolagents uses for MCP tools, requires it, and must work in the same
environment as `executor mcp`.

Both versions have the types in `mcp.types`, but with different field names (`isError`, `is_error`). So the values are
created here by their wire names, which both versions accept.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import urllib.parse
import warnings
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal

from mcp.server.transport_security import TransportSecuritySettings
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
from starlette.applications import Starlette

MAJOR = 1 if importlib.util.find_spec("mcp.server.mcpserver") is None else 2
"""The major version that is installed."""

if TYPE_CHECKING or MAJOR == 1:
    from mcp.server.fastmcp import Context, FastMCP
    from mcp.server.fastmcp.exceptions import ResourceError, ToolError
    from mcp.server.lowlevel.helper_types import ReadResourceContents
else:
    from mcp.server.mcpserver import Context, MCPServer
    from mcp.server.mcpserver.exceptions import ResourceError, ToolError
    from mcp.shared.exceptions import MCPDeprecationWarning

if TYPE_CHECKING:
    # The development environment has version 1.
    MCPServer: Any
    MCPDeprecationWarning: type[Warning]
    Ctx = Context[Any, Any, Any]
else:
    # Unparametrized, since the versions have different parameters. The SDK finds the argument by the class.
    Ctx = Context

__all__ = [
    "MAJOR",
    "CallToolResult",
    "ContentBlock",
    "Ctx",
    "ResourceError",
    "TextContent",
    "Tool",
    "ToolAnnotations",
    "ToolError",
    "file_block",
    "http_app",
    "image_block",
    "make_server",
    "send_log",
    "text_block",
    "tool_hints",
    "tool_result",
]

ReadFile = Callable[[Any, str, str], Awaitable[bytes]]
Tool = Callable[..., Awaitable[Any]]

# At lower levels the SDK logs failures of tool calls, whose text may be code or come out of a sandbox.
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
    """Returns hints for the host: a tool only reads, or it may change a sandbox."""
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
    """Returns a server with these tools, with descriptions and hints, that serves files as resources.

    A ToolError becomes a result with its text, marked as an error. `read_file` takes the context, a session's name and
    a path, and may raise ResourceError.
    """
    server: Any
    if MAJOR == 1:
        with warnings.catch_warnings():
            # The newest pydantic-settings warns about the SDK's settings before 1.30; hide that from the host.
            warnings.filterwarnings("ignore", module="pydantic_settings")
            server = _Server1(read_file, name, instructions=instructions, lifespan=lifespan, log_level=_LOG_LEVEL)
        server._mcp_server.version = version  # there is no public API; the default is the SDK's version
    else:
        server = MCPServer(
            name, title=title, instructions=instructions, version=version, lifespan=lifespan, log_level=_LOG_LEVEL
        )
        _add_file_resource(server, read_file)
    for tool, description, hints in tools:
        function = _with_plain_errors(tool) if MAJOR == 1 else tool
        server.add_tool(function, description=description, annotations=hints, structured_output=False)
    return server


def http_app(server: Any, *, path: str, hosts: list[str], origins: list[str], body_bytes_max: int) -> Starlette:
    """Returns the ASGI application of the stateless HTTP transport: each request is a connection of its own.

    It refuses requests with other Host and Origin headers than these, unless there is no Origin.
    """
    security = TransportSecuritySettings(allowed_hosts=hosts, allowed_origins=origins)
    options = {"streamable_http_path": path, "stateless_http": True, "transport_security": security}
    body_limit = {"max_request_body_size": body_bytes_max}  # the oldest versions have no limit
    app: Starlette
    if MAJOR == 2:
        known = inspect.signature(server.streamable_http_app).parameters
        app = server.streamable_http_app(**options, **{key: body_limit[key] for key in body_limit if key in known})
        return app
    for key, value in (options | body_limit).items():
        if key in type(server.settings).model_fields:
            setattr(server.settings, key, value)
    app = server.streamable_http_app()
    return app


def _with_plain_errors(tool: Tool) -> Tool:
    """Returns ToolErrors of a tool as results, because version 1 adds a prefix to the message of a ToolError."""

    @functools.wraps(tool)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return await tool(*args, **kwargs)
        except ToolError as error:
            return tool_result([text_block(str(error))], is_error=True)

    return call


def _add_file_resource(server: Any, read_file: ReadFile) -> None:
    # `Context` is unparametrized, because version 2.0 loses the request if a template's function has a parameter.
    async def file_resource(ctx: Ctx, session: str, path: str) -> bytes:
        """A file in a sandbox's working directory, as an MCP resource."""
        return await read_file(ctx, session, path)

    server.resource(_FILE_TEMPLATE, name="file", description=_FILE_DESCRIPTION, mime_type=_FILE_TYPE)(file_resource)


if MAJOR == 1:

    class _Server1(FastMCP[Any]):
        """Serves files itself, because parameters in templates of version 1 cannot contain a slash."""

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
            # Deprecated without a successor: the newest protocol sends it only to hosts that ask for it.
            warnings.simplefilter("ignore", MCPDeprecationWarning)
        sending = ctx.session.send_log_message(level, text, logger=logger, related_request_id=ctx.request_id)
    await sending
