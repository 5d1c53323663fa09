"""Requests that take part in the gateway's limits, with applications that answer when the test says so."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from executor_server.gateway import ports
from executor_server.gateway.clients import Clients
from executor_server.gateway.routing import DRAINS_MAX, REQUESTS_MAX, Applications, Router
from executor_server.web import IdleConnections


def router_of(application: ASGIApp) -> Router:
    applications = Applications(application, application, {}, application)
    return Router(applications, Clients(lambda token: cast("Any", token)), IdleConnections(1), None)


class Call:
    """A request in progress. Its client withholds the body."""

    def __init__(self, router: Router, headers: dict[str, str] | None = None) -> None:
        self.answered = asyncio.Event()
        self.status = 0
        self.body = b""
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/run",
            "raw_path": b"/v1/run",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
        }
        self.task = asyncio.ensure_future(router(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not message.get("more_body", False):
            self.body = message["body"]
            self.answered.set()


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("no token", 401)(scope, receive, send)


async def test_refused_requests_that_withhold_their_bodies_take_no_place_of_others() -> None:
    """Each was counted as served for ten seconds: five connections of strangers closed the gateway."""
    router = router_of(_refuse)
    calls = [Call(router) for _ in range(REQUESTS_MAX + 1)]
    for call in calls:
        await call.answered.wait()
    assert {call.status for call in calls} == {401}
    await router.stop(0)


async def test_few_refused_requests_are_read_to_their_ends_at_a_time() -> None:
    router = router_of(_refuse)
    calls = [Call(router) for _ in range(DRAINS_MAX + 2)]
    await asyncio.gather(*(call.task for call in calls[DRAINS_MAX:]))
    assert not [call for call in calls[:DRAINS_MAX] if call.task.done()]
    await router.stop(0)


async def test_requests_above_the_limit_are_refused_and_take_no_place() -> None:
    may_answer = asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await may_answer.wait()
        await _refuse(scope, receive, send)

    router = router_of(wait)
    served = [Call(router) for _ in range(REQUESTS_MAX)]
    above = [Call(router) for _ in range(REQUESTS_MAX)]
    for call in above:
        await call.answered.wait()
    assert {call.status for call in above} == {503}
    may_answer.set()
    for call in (*served, last := Call(router)):
        await call.answered.wait()
    assert last.status == 401
    await router.stop(0)


async def test_a_request_to_a_port_whose_body_does_not_begin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for ever, before it had a connection to the port."""
    monkeypatch.setattr(ports, "FIRST_PIECE_S", 0.01)

    class Sandboxes:
        async def find_port(self, _sandbox_id: str, _traffic_token: str | None) -> Any:
            return SimpleNamespace(session=None)

    router = router_of(ports.ports_app(cast("Any", Sandboxes())))
    call = Call(router, {"e2b-sandbox-id": "abc", "e2b-sandbox-port": "8000"})
    await call.answered.wait()
    assert (call.status, "nothing of its body" in json.loads(call.body)["message"]) == (408, True)
    await router.stop(0)
