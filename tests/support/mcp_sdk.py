"""The client of the official SDK as a host uses it, of version 1 or 2, whichever is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import mcp.shared.exceptions
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.types import CallToolResult
from pydantic import BaseModel

from executor_client.mcp.sdk import MAJOR

McpError: type[Exception] = getattr(mcp.shared.exceptions, "MCPError" if MAJOR == 2 else "McpError")


def wire(model: BaseModel) -> dict[str, Any]:
    """Return what is sent of a model: names of fields differ between the versions, those on the wire do not."""
    return model.model_dump(by_alias=True, exclude_none=True, mode="json")


def is_error(result: CallToolResult) -> bool:
    return bool(wire(result).get("isError"))


def client_of(transport: Any, mode: str, on_log: Callable[..., Any]) -> AbstractAsyncContextManager[Any]:
    """A connected client. Version 1 has one protocol, the older, and no `mode`."""
    if MAJOR == 1:
        return _client_1(transport, on_log)
    client: AbstractAsyncContextManager[Any] = getattr(mcp, "Client")(  # noqa: B009 - version 1 has none
        transport, mode=mode, logging_callback=on_log, log_level="info"
    )
    return client


@asynccontextmanager
async def http_transport(url: str, token: str) -> AsyncIterator[tuple[Any, Any]]:
    """A transport for `client_of` over HTTP, with a bearer token."""
    http_client: Any = create_mcp_http_client(headers={"Authorization": f"Bearer {token}"})
    async with http_client, streamable_http_client(url, http_client=http_client) as streams:
        yield streams[0], streams[1]  # version 1 adds a third


@asynccontextmanager
async def _client_1(transport: Any, on_log: Callable[..., Any]) -> AsyncIterator[Any]:
    async with transport as (read, write), ClientSession(read, write, logging_callback=on_log) as session:
        initialized: Any = await session.initialize()
        yield _Client1(session, initialized.instructions)


class _Client1:
    def __init__(self, session: Any, instructions: str | None) -> None:
        self._session = session
        self.instructions = instructions

    async def call_tool(self, name: str, arguments: dict[str, Any], progress_callback: Any = None) -> Any:
        """Cancelled, it notifies the server, which the SDK leaves to its users in version 1."""
        request_id = self._session._request_id
        try:
            return await self._session.call_tool(name, arguments, progress_callback=progress_callback)
        except anyio.get_cancelled_exc_class():
            from mcp import types

            params = {"method": "notifications/cancelled", "params": {"requestId": request_id}}
            with anyio.CancelScope(shield=True):
                notification: Any = types.CancelledNotification.model_validate(params)
                await self._session.send_notification(types.ClientNotification(notification))
            raise

    async def list_tools(self) -> Any:
        return await self._session.list_tools()

    async def read_resource(self, uri: Any) -> Any:
        return await self._session.read_resource(uri)
