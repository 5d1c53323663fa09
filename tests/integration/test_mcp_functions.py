"""Tools of MCP servers as functions of a session's code, in both clients: signatures, values, errors, and bad servers."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from executor_client import InvalidRequest, mcp_servers
from tests.support.blocking import client_of
from tests.support.daemon import Daemon
from tests.support.fork_server import EXECUTOR, popen
from tests.support.polling import eventually

pytest.importorskip("mcp")

SERVER = """
import os, sys, time
from typing import Any
try:
    from mcp.server.fastmcp import FastMCP as Server, Image
    from mcp.server.fastmcp.exceptions import ToolError
except ImportError:
    from mcp.server.mcpserver import MCPServer as Server, Image
    from mcp.server.mcpserver.exceptions import ToolError

server = Server("tools")

@server.tool(name="get-weather")
def get_weather(city: str, days: int = 1) -> dict[str, Any]:
    '''The weather of a city.'''
    return {"city": city, "days": days}

@server.tool()
def add(a: int, b: int) -> int:
    return a + b

@server.tool(name="print", structured_output=False)
def text(size: int) -> str:
    return "x" * size

@server.tool()
def fail(why: str) -> str:
    raise ToolError(why)  # since 2.3 the SDK hides the messages of other errors

@server.tool()
def picture() -> Image:
    import io, PIL.Image
    PIL.Image.new("RGB", (3, 2)).save(data := io.BytesIO(), "png")
    return Image(data=data.getvalue(), format="png")

@server.tool()
def die() -> None:
    print("a last word", file=sys.stderr, flush=True)
    os._exit(3)

@server.tool()
def hang() -> None:
    time.sleep(1000)

server.run()
"""

LISTING = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in NAMES]}
        if asked["method"] == "initialize":
            version = asked["params"]["protocolVersion"]
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
MANY = LISTING.replace("NAMES", "map(str, range(1000))")
TWINS = LISTING.replace("NAMES", "['a-b', 'a.b']")


@pytest.fixture
def server(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "server.py").write_text(SERVER)
    return {"command": sys.executable, "args": [str(tmp_path / "server.py")]}


@pytest.fixture(params=["sync", "async"])
def session(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Any]:
    with client_of(request.param, daemon) as client, client.create_session() as session:
        yield session
    assert eventually(lambda: not [each for each in threading.enumerate() if each.name == "executor-mcp"])


def test_tools_of_an_mcp_server_are_functions_of_the_code(session: Any, server: dict[str, Any]) -> None:
    session.register_tools({"mine": len})
    added = session.register_mcp(server)
    assert list(added) == ["get_weather", "add", "print_", "fail", "picture", "die", "hang"]
    assert (
        "get_weather(city: str, days: int = ...) -> dict\n\nThe weather of a city." in added["get_weather"].description
    )
    assert session.execute("[get_weather('Rome', 3), add(2, b=3), print_(3), mine('ab')]").output == [
        {"city": "Rome", "days": 3},
        5,
        "xxx",
        2,
    ]
    assert session.execute("picture()").output.size == (3, 2)
    for code, error in {
        "fail('why')": "RuntimeError: .*why",
        "get_weather()": "TypeError: missing a required argument: 'city'",
        "add(1, {1})": "TypeError: .* must be JSON values",
    }.items():
        assert re.fullmatch(error + ".*", shown_error(session, code))
    with pytest.raises(InvalidRequest, match="two tools 'get_weather'"):
        session.register_mcp(server)
    with pytest.raises(InvalidRequest, match="two tools 'add'"):
        session.register_tools({"add": max})
    session.register_tools({"other": max})
    assert session.execute("[add(1, 2), other(1, 2)]").output == [3, 2]
    assert list(session.register_mcp({"mcpServers": {"b": {**server, "prefix": "b-", "tools": ["add"]}}})) == ["b_add"]
    assert session.execute("b_add(3, 4)").output == 7


def shown_error(session: Any, code: str) -> str:
    failed = session.execute(code).error
    return f"{failed.type}: {failed.message}"


def test_a_server_that_dies_hangs_or_sends_too_much_is_an_error_in_words(
    session: Any, server: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor() as pool:  # at once: each keeps the tools of the others
        list(pool.map(lambda prefix: session.register_mcp({**server, "prefix": prefix}), "abc"))
    assert "its process ended with exit code 3; its stderr ends:" in shown_error(session, "adie()")
    assert "can't be called: its process ended" in shown_error(session, "aadd(1, 2)")
    monkeypatch.setattr(mcp_servers, "CALL_TIMEOUT_S", 0.2)
    assert "did not answer within 0.2 s" in shown_error(session, "bhang()")
    monkeypatch.undo()
    assert "sent a message of more than 32 MiB" in shown_error(session, "cprint(40_000_000)")
    assert session.execute("1").output == 1


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({}, 'either "command", for a program, or "url"'),
        ({"command": "x", "args": "y"}, "'args' of the MCP server must be a list of texts"),
        ({"command": "x", "tools": 5}, "'tools' of the MCP server must be a list of texts"),
        ({"type": "sse", "url": "http://127.0.0.1:1"}, 'only "stdio" and "http"'),
        ({"command": "/no/such/program"}, "can't be started: .*No such file"),
        ({"url": "http://127.0.0.1:1/mcp"}, "could not be used: "),
        ("import sys; sys.exit('no key')", "ended with exit code 1; its stderr ends: no key"),
        ("print('Hello', flush=True); input(); input()", "within 0.5 s; its stdout has text .*'Hello'"),
        ("while True: print('x' * 1_000_000, end='')", "more than 32 MiB"),
        (MANY, "more than 256 tools, .*choose some"),
        (TWINS, "two tools of the MCP server 'python.*' would be the function 'a_b'"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_with_the_reason(
    daemon: Daemon, entry: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(entry, str):
        entry = {"command": sys.executable, "args": ["-c", entry]}
    if "Hello" in said:
        monkeypatch.setattr(mcp_servers, "START_TIMEOUT_S", 0.5)
    with daemon.client() as client, client.create_session() as session:
        with pytest.raises(InvalidRequest, match=said):
            session.register_mcp(entry)
        assert session.execute("1").output == 1


def test_executor_run_has_the_tools_of_a_hosts_configuration(
    daemon: Daemon, server: dict[str, Any], tmp_path: Path
) -> None:
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"tools": server}}))
    access = {"EXECUTOR_ADDRESS": daemon.access["address"], "EXECUTOR_TOKEN": daemon.access["token"]}

    def run(code: str) -> tuple[int, str, str]:
        command = [*EXECUTOR, "run", "--mcp-config", str(config), "-c", code]
        with popen(command, env={**os.environ, **access}, text=True, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
            out, errors = process.communicate("in\n", 60)
        return process.returncode, out, errors

    assert run("print(add(1, 2), input())")[:2] == (0, "3 in\n")
    config.write_text("[]")
    code, _, errors = run("1")
    assert (code, "must have an object" in errors) == (2, True)
