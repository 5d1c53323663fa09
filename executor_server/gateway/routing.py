"""Chooses the application for a request, by the port of a sandbox or by the path.

The host `PORT-ID.DOMAIN`, or the headers `E2b-Sandbox-Id` and `E2b-Sandbox-Port`, name a sandbox and its port. The
headers take precedence: clients that send them use one address for all sandboxes. Ports of E2B's own services have
applications here; any other port leads into the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from executor_server.gateway.clients import Clients
from executor_server.gateway.errors import Refusal
from executor_server.web import IdleConnections

REQUESTS_MAX = 1024
"""Requests at a time."""
DRAINS_MAX = 256
"""Answered requests at a time whose rest is still read. Others are reset, and their clients may miss the answer."""
DRAIN_BYTES_MAX = 64 * 1024 * 1024
DRAIN_TIME_S = 10.0
"""Limits on the rest of a refused request, which is read so that the client sees the refusal."""
ENVD_PORT = 49983
INTERPRETER_PORT = 49999

_SANDBOX_ID = re.compile(r"[a-z0-9]{1,40}")
_HOST_LABEL = re.compile(r"([0-9]{1,5})-([a-z0-9]{1,40})")
_REST = {"sandboxes", "v2", "v3", "templates", "snapshots", "volumes", "secrets", "teams"}
"""First parts of the paths of E2B's REST API."""
_TOO_MANY = Refusal(
    503, f"the gateway serves {REQUESTS_MAX} requests at a time; try again", retry_after_s=1.0
).response()

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Target:
    """A port of a sandbox, as the request names it. The sandbox may not exist, and the caller may be a stranger."""

    sandbox_id: str
    port: int


_target: ContextVar[Target] = ContextVar("target")


def current_target() -> Target:
    """Returns the sandbox and the port of the running request. Only applications for a port may call it."""
    return _target.get()


@dataclass(frozen=True)
class Applications:
    """The parts of the gateway."""

    connect: ASGIApp
    """Serves every other path."""
    rest: ASGIApp
    """E2B's REST API."""
    ports: Mapping[int, ASGIApp]
    """E2B's services in a sandbox, by port."""
    other_ports: ASGIApp


class StreamCut(Exception):
    """Ends an answer that has begun, so that the client sees a broken stream. Not logged: the cause lies outside."""


class Router:
    """The gateway as one application."""

    def __init__(self, applications: Applications, clients: Clients, idle: IdleConnections, domain: str | None) -> None:
        self._applications = applications
        self._clients = clients
        self._idle = idle
        self._suffix = None if domain is None else f".{domain.partition(':')[0]}"
        self._running: set[asyncio.Task[Any]] = set()
        self._served = 0
        self._drains = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request. Logs a failure and answers it without its reason; cuts a stream that has begun."""
        task = asyncio.current_task()
        assert task is not None
        exchange = _Exchange(receive, send)
        self._running.add(task)
        try:
            with self._idle.request(scope):
                await self._answer(scope, exchange)
                if scope["type"] == "http" and self._drains < DRAINS_MAX:
                    await self._drain(exchange)
        except StreamCut:
            raise
        except Exception:
            _log.exception("request_failed", path=scope["path"])
            if exchange.has_answered:
                raise
            await Refusal(500, "the gateway failed; its log has the reason").response()(scope, receive, send)
        finally:
            self._running.discard(task)

    async def _answer(self, scope: Scope, exchange: _Exchange) -> None:
        if self._served >= REQUESTS_MAX:
            await _TOO_MANY(scope, exchange.receive, exchange.send)
            return
        self._served += 1
        try:
            with self._clients.request():
                await self._application(scope)(scope, exchange.receive, exchange.send)
        finally:
            self._served -= 1

    async def _drain(self, exchange: _Exchange) -> None:
        # Not counted as served: strangers who are refused, and withhold the rest, would take all places.
        self._drains += 1
        try:
            await exchange.drain()
        finally:
            self._drains -= 1

    async def stop(self, grace_s: float) -> None:
        """Waits for running requests, and cuts those that run longer."""
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _application(self, scope: Scope) -> ASGIApp:
        headers = Headers(scope=scope)
        try:
            target = self._target_of(headers)
        except Refusal as error:
            return error.response()
        first = scope["path"].partition("/")[2].partition("/")[0]
        # envd has no such paths, but old SDKs of E2B (2.20) send its headers with a request to connect to a sandbox.
        if target is not None and not (target.port == ENVD_PORT and first in _REST):
            _target.set(target)
            return self._applications.ports.get(target.port, self._applications.other_ports)
        if scope["path"] == "/files":  # a signed URL without a sandbox's host: the signature identifies it
            _target.set(Target("", ENVD_PORT))
            return self._applications.ports[ENVD_PORT]
        return self._applications.rest if first in _REST else self._applications.connect

    def _target_of(self, headers: Headers) -> Target | None:
        """Returns None if the request names no sandbox. Raises Refusal (400) for a malformed name."""
        sandbox_id, port = headers.get("e2b-sandbox-id"), headers.get("e2b-sandbox-port", str(ENVD_PORT))
        if sandbox_id is None:
            host = headers.get("host", "").lower().partition(":")[0]
            if self._suffix is None or not host.endswith(self._suffix):
                return None
            label = _HOST_LABEL.fullmatch(host.removesuffix(self._suffix))
            if label is None:
                return None
            port, sandbox_id = label.groups()
        if _SANDBOX_ID.fullmatch(sandbox_id) is None or re.fullmatch("[0-9]{1,5}", port) is None:
            raise Refusal(400, "the headers E2b-Sandbox-Id and E2b-Sandbox-Port name no port of a sandbox")
        if not 1 <= int(port) <= 65_535:
            raise Refusal(400, f"port {port} is out of range: use 1 to 65535")
        return Target(sandbox_id, int(port))


class _Exchange:
    """One request and its answer."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._has_more = True
        self.has_answered = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._has_more = message["type"] == "http.request" and message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        self.has_answered = True
        await self._send(message)

    async def drain(self) -> None:
        """Reads the rest of a request that was refused early.

        The server would reset the connection, and most clients then report the reset and not the answer.
        """
        read = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIME_S):
                while self._has_more and read < DRAIN_BYTES_MAX:
                    read += len((await self.receive()).get("body", b""))
