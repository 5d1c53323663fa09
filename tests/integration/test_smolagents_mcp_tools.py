"""Tools of an MCP server that smolagents gives to an agent, called by code in a sandbox.

smolagents needs the package mcpadapt for them, which works with version 1 of `mcp` only; `executor mcp` works with both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from executor_client import ToolNotShippable
from tests.support.agents import agent_on
from tests.support.daemon import Daemon

SERVER = """
from mcp.server.fastmcp import FastMCP

server = FastMCP("shop")
stock = {"apples": 3}

@server.tool()
def buy(what: str, number: int) -> str:
    '''Buys something.'''
    if stock[what] < number:
        raise ValueError(f"only {stock[what]} {what} are left")
    stock[what] -= number
    return f"{stock[what]} left"

server.run()
"""


@pytest.fixture
def server(tmp_path: Path) -> list[str]:
    pytest.importorskip("mcpadapt", reason="smolagents' MCP tools need mcpadapt, which can't do with mcp 2")
    (tmp_path / "server.py").write_text(SERVER)
    return [str(tmp_path / "server.py")]


@contextmanager
def tools_of(server: list[str]) -> Iterator[list[Any]]:
    from mcp import StdioServerParameters
    from smolagents import ToolCollection

    parameters = StdioServerParameters(command=sys.executable, args=server)
    with ToolCollection.from_mcp(parameters, trust_remote_code=True, structured_output=False) as collection:
        yield [*collection.tools]


def test_code_calls_the_tools_of_an_mcp_server(daemon: Daemon, server: list[str]) -> None:
    """The second call sees the effect of the first: there is one server with one connection, not a copy in the sandbox."""
    code = "first = buy(what='apples', number=1)\nfinal_answer([first, buy(what='apples', number=2)])"
    with tools_of(server) as tools, agent_on(daemon, code, tools=tools) as agent:
        assert agent.run("go") == ["2 left", "0 left"]


def test_an_mcp_tool_cannot_be_placed_in_the_sandbox(daemon: Daemon, server: list[str]) -> None:
    settings = {"tool_placement": {"buy": "sandbox"}}
    with (
        tools_of(server) as tools,
        agent_on(daemon, "buy('apples', 1)", tools=tools, executor_kwargs=settings) as agent,
        pytest.raises(ToolNotShippable, match="it calls an MCP server"),
    ):
        agent.run("go")
