"""Requests of E2B's protocol that are much work: others get their turn meanwhile. The sandbox only collects files."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import httpx

from executor_client.file_results import FileInfo, FileList
from executor_server.gateway.clients import Clients
from executor_server.gateway.e2b.envd_app import envd_app
from executor_server.gateway.routing import ENVD_PORT, Applications, Router
from executor_server.web import IdleConnections

MIB = 1 << 20
ENTRIES = 10_000
TRAFFIC = {"E2b-Sandbox-Id": "abc", "X-Access-Token": "token"}


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

    async def list(self, path: str, *, recursive: bool) -> FileList:
        assert not recursive
        now = datetime.now(UTC)
        return FileList(tuple(FileInfo(f"{path}/{number:05}", 1, False, now) for number in range(ENTRIES)))


@dataclass
class Turns:
    """The turns that another task got."""

    count: int = 0

    async def take(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def counted(sandbox: OneSandbox) -> AsyncIterator[tuple[httpx.AsyncClient, Turns]]:
    """A client of a gateway, next to a task that counts its turns."""
    envd = envd_app(cast("Any", sandbox))
    applications = Applications(envd, envd, {ENVD_PORT: envd}, envd)
    router = Router(applications, Clients(lambda _: cast("Any", None)), IdleConnections(1), None)
    transport = httpx.ASGITransport(cast("Any", router))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=TRAFFIC) as http:
        turns = Turns()
        taking = asyncio.create_task(turns.take())
        try:
            yield http, turns
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)


async def test_an_upload_that_becomes_large_is_parsed_in_turns() -> None:
    """1 KiB of gzip became 1 MiB without a turn for anybody else."""
    sandbox = OneSandbox()
    headers = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
    async with counted(sandbox) as (http, turns):
        answer = await http.post("/files?path=large", content=gzip.compress(bytes(MIB)), headers=headers)
    assert answer.status_code == 200, answer.text
    assert sandbox.written == {"/workspace/large": bytes(MIB)}
    assert turns.count > MIB // (64 << 10)


async def test_a_long_listing_is_made_in_turns() -> None:
    async with counted(OneSandbox()) as (http, turns):
        answer = await http.post("/filesystem.Filesystem/ListDir", json={"path": "/home/user"})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["entries"]) == ENTRIES
    assert turns.count > ENTRIES // 256
