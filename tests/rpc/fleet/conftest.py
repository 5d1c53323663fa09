"""A front over nodes that do what the tests say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from executor_server.fleet.membership import issue_front
from tests.rpc.fleet.fake_node import FakeNode, serving
from tests.rpc.fleet.front import TestedFront, fronting


@dataclass
class Fleet:
    """Begins fronts and nodes, which end with the test."""

    directory: Path
    stack: AsyncExitStack

    async def node(self, name: str, **fields: Any) -> FakeNode:
        node = FakeNode(name, self.directory / "certificates", **fields)
        return await self.stack.enter_async_context(serving(node))

    async def front(self, *nodes: FakeNode, **fleet: Any) -> TestedFront:
        addresses = [node.link_address for node in nodes]
        front = await self.stack.enter_async_context(fronting(self.directory, addresses, **fleet))
        await front.until(**{node.name: _state_of(node) for node in nodes})
        return front


def _state_of(node: FakeNode) -> str:
    if not node.takes_control:
        return "waiting"
    return "draining" if node.draining else "serving"


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    issue_front(tmp_path / "certificates")
    async with AsyncExitStack() as stack:
        yield Fleet(tmp_path, stack)
