"""Claims about the addresses at which a front looks for its nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from executor_server.core import AddressError
from executor_server.core.config import FleetSection
from executor_server.fleet.membership import discovery
from executor_server.fleet.membership.discovery import Discovery, node_address
from tests.support.polling import eventually_async


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "FILE_INTERVAL_S", 0.01)
    monkeypatch.setattr(discovery, "DNS_INTERVAL_S", 0.01)


@dataclass
class Last:
    """Returns what was reported last."""

    seen: list[frozenset[str]]
    discovery: Discovery

    def __call__(self) -> frozenset[str]:
        return self.seen[-1]


@asynccontextmanager
async def discovering(resolve: Any = None, **section: Any) -> AsyncIterator[Last]:
    seen: list[frozenset[str]] = []
    found = Discovery(FleetSection(role="front", certificates=Path("/c"), **section), seen.append, resolve)
    await found.start()
    try:
        yield Last(seen, found)
    finally:
        await found.close()


async def test_static_nodes_are_known_at_once() -> None:
    async with discovering(nodes=("a:1", "127.0.0.1:2", "[::1]:3")) as last:
        assert last() == {"a:1", "127.0.0.1:2", "[::1]:3"}


async def test_the_addresses_of_a_name_go_and_come() -> None:
    answers = iter([["10.0.0.1"], ["10.0.0.1", "10.0.0.2"], ["10.0.0.2"]])
    current: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("nodes.example", 7000)
        current[:] = next(answers, current)
        return current

    async with discovering(resolve, dns="nodes.example:7000") as last:
        assert await eventually_async(lambda: last() == {"10.0.0.2:7000"})


async def test_a_name_that_can_not_be_resolved_keeps_its_addresses() -> None:
    asked = asyncio.Event()

    async def resolve(host: str, port: int) -> list[str]:
        if asked.is_set():
            failed.set()
            raise OSError("no answer")
        asked.set()
        return ["10.0.0.1"]

    failed = asyncio.Event()
    async with discovering(resolve, dns="nodes.example:7000") as last:
        await failed.wait()
        assert last() == {"10.0.0.1:7000"}


async def test_the_systems_resolver_is_asked() -> None:
    async with discovering(dns="localhost:7000") as last:
        assert await eventually_async(lambda: "127.0.0.1:7000" in last())


async def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("# the nodes\na:1\n\n  b:2  \n")
    async with discovering(nodes_file=path) as last:
        assert last() == {"a:1", "b:2"}
        path.write_text("b:2\nc:3\n")
        assert await eventually_async(lambda: last() == {"b:2", "c:3"})


@pytest.mark.parametrize("content", [b"a:1\nnot an address\n", b"\xff\xfe", b"unix:/a\n", b"a:0\n", b"x:1\n" * 5000])
async def test_a_file_that_is_not_right_changes_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "nodes"
    path.write_text("a:1\n")
    other = tmp_path / "other"
    async with discovering(nodes_file=path, nodes=("s:1",)) as last:
        other.write_bytes(content)
        other.replace(path)
        assert await eventually_async(lambda: "nodes_file" in last.discovery.problems)
        assert last() == {"a:1", "s:1"}
        other.write_text("b:2\n")
        other.replace(path)
        assert await eventually_async(lambda: last() == {"b:2", "s:1"})


async def test_a_file_that_is_missing_is_waited_for(tmp_path: Path) -> None:
    async with discovering(nodes_file=tmp_path / "nodes") as last:
        assert last() == frozenset()
        (tmp_path / "nodes").write_text("a:1\n")
        assert await eventually_async(lambda: last() == {"a:1"})


@pytest.mark.parametrize("text", ["", "a", "a:0", "unix:/a", "a:99999", "a b:1", "http://a:1"])
def test_what_is_no_address_of_a_node_is_refused(text: str) -> None:
    with pytest.raises(AddressError):
        node_address(text)
