"""Tools that are shipped into the sandbox, and run there."""

from __future__ import annotations

from typing import Any

from executor_api.values import encode
from executor_server.model import ShippedTool, ToolSource, ToolSpec
from executor_server.sessions import Session
from tests.contract.harness import Harness


def source(text: str, entry: str = "tool", modules: tuple[str, ...] = (), **bindings: Any) -> ShippedTool:
    return ShippedTool(ToolSource(text, entry, encode(bindings) if bindings else None), modules)


def shipped(name: str, tool: ShippedTool, description: str = "") -> ToolSpec:
    return ToolSpec(name, description, (), is_final_answer=False, shipped=tool)


async def register(session: Session, **tools: ShippedTool) -> None:
    await session.register_tools([shipped(name, tool) for name, tool in tools.items()])


async def test_a_shipped_tool_runs_in_the_sandbox(harness: Harness) -> None:
    session = await harness.session()
    text = "import os\n\ndef tool(a, b=2):\n    print('here', len(table))\n    return os.getpid(), a + b + table['c']\n"
    await register(session, adder=source(text, table={"c": 100}))
    run = await harness.run(session, "import os\nr = adder(1)\nr[0] == os.getpid(), r[1]")
    assert (run.output, run.stdout) == ((True, 103), "here 1\n")
    assert [type(event.kind).__name__ for event in run.events] == ["Log", "Result"]
