"""Uploads over E2B's protocol, to a sandbox that only collects files."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from types import SimpleNamespace
from typing import Any, cast

import httpx
from starlette.applications import Starlette

from executor_server.gateway.clients import Clients
from executor_server.gateway.e2b.file_urls import files_route
from executor_server.gateway.routing import Applications, Router
from executor_server.web import IdleConnections

MIB = 1 << 20


class OneSandbox:
    """A sandbox for any token. It is its own files, session and record."""

    users = ()
    token = ""

    def __init__(self) -> None:
        self.info = SimpleNamespace(limits=SimpleNamespace(disk_bytes=None))
        self.files = self.session = self.record = self
        self.written: dict[str, bytes] = {}

    async def find(self, _sandbox_id: str, _token: str) -> Any:
        return self

    async def write(self, path: str, data: bytearray) -> None:
        self.written[path] = bytes(data)


async def test_others_get_their_turn_while_a_small_upload_becomes_large() -> None:
    """1 KiB of gzip became 1 MiB, and a form was parsed, without a turn for anybody else."""
    sandbox = OneSandbox()
    envd = Starlette(routes=[files_route(cast("Any", sandbox))])
    router = Router(
        Applications(envd, envd, {49983: envd}, envd), Clients(lambda _: cast("Any", None)), IdleConnections(1), None
    )
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(cast("Any", router)), base_url="http://gateway") as http:
        counting = asyncio.create_task(count_turns())
        answer = await http.post(
            "/files?path=large",
            content=gzip.compress(bytes(MIB)),
            headers={
                "E2b-Sandbox-Id": "abc",
                "X-Access-Token": "token",
                "Content-Type": "application/octet-stream",
                "Content-Encoding": "gzip",
            },
        )
        counting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await counting
    assert answer.status_code == 200, answer.text
    assert sandbox.written == {"/workspace/large": bytes(MIB)}
    assert turns > 16  # one for each 64 KiB, decompressed
