"""Ends the work for a request when its client leaves.

An ASGI server reports that only to an application that still reads. Most don't: they have read the request, and wait.
"""

from __future__ import annotations

import asyncio
from typing import cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class EndsWithClient:
    """Cancels the application's task when the client leaves before its answer is whole."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        task = cast("asyncio.Task[object]", asyncio.current_task())
        watch: asyncio.Task[None] | None = None
        answered = has_left = False

        async def wait_for_end() -> None:
            nonlocal has_left
            while (await receive())["type"] != "http.disconnect":
                pass
            if not answered:
                has_left = True
                task.cancel()

        async def watched_receive() -> Message:
            nonlocal watch
            if watch is not None:
                await asyncio.shield(watch)
                return {"type": "http.disconnect"}
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                watch = asyncio.create_task(wait_for_end())
            return message

        async def watched_send(message: Message) -> None:
            nonlocal answered
            # The server reports the end of an answer and the end of a connection in the same way.
            answered = answered or (message["type"] == "http.response.body" and not message.get("more_body", False))
            if answered and task.cancelling():
                # connectrpc ends the stream of a cancelled call as if it were whole. It has to look cut.
                raise asyncio.CancelledError
            await send(message)

        try:
            await self._app(scope, watched_receive, watched_send)
        except BaseException:
            if not has_left or task.uncancel():
                raise
        finally:
            if watch is not None:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
