"""A shell and files as tools: what a model gets of them, in the session of its agent."""

from __future__ import annotations

import re
from typing import Any

import pytest
import smolagents
from smolagents import LogLevel

from examples.scripted import Reply
from executor_client import ExecutorClient
from executor_client.smolagents import (
    CodeAgent,
    FileTools,
    RemoteExecutor,
    SandboxUnavailable,
    SessionSource,
    ShellTool,
    ShellTools,
)
from tests.support.agents import scripted, takes_executor
from tests.support.daemon import Daemon


@pytest.fixture
def tools(executor: RemoteExecutor) -> dict[str, Any]:
    return {tool.name: tool for tool in (*ShellTools(executor=executor), *FileTools(executor=executor))}


def test_they_work_in_the_session_of_the_agents_code(executor: RemoteExecutor, tools: dict[str, Any]) -> None:
    executor("open('made.txt', 'w').write('by code')")
    assert tools["shell"].forward("cat made.txt") == "[exit code 0]\nby code"
    tools["write_file"].forward("deep/other.txt", "by a tool\n")
    assert executor("open('deep/other.txt').read()").output == "by a tool\n"
    assert tools["list_files"].forward() == "deep/other.txt  10 B\nmade.txt  7 B"
    assert tools["list_files"].forward(pattern="made*") == "made.txt  7 B"


def test_the_shell_says_how_a_command_ended(tools: dict[str, Any]) -> None:
    shell = tools["shell"].forward
    assert shell("echo out; echo err >&2; exit 3") == "[exit code 3]\nout\n[stderr]\nerr"
    assert shell("sleep 100", timeout=1).startswith("[ended after its timeout of 1 seconds]")
    long = shell("head -c 100000 /dev/zero | tr '\\0' x")
    assert len(long) < 40_000 and "bytes left out" in long


def test_a_file_is_read_with_numbers_and_edited_in_one_place(tools: dict[str, Any]) -> None:
    tools["write_file"].forward("a.py", "one\ntwo\nthree\ntwo again\n")
    assert tools["read_file"].forward("a.py") == "1  one\n2  two\n3  three\n4  two again"
    assert tools["read_file"].forward("a.py", 2, 3) == "2  two\n3  three\n[lines 4 to 4 are not shown]"
    assert tools["edit_file"].forward("a.py", "one\ntwo\n", "1\n2\n") == "Changed a.py at line 1."
    assert tools["shell"].forward("cat a.py") == "[exit code 0]\n1\n2\nthree\ntwo again"
    for old, why in (("e", "2 times"), ("", "empty"), ("three  \n", "first line is at line 3"), ("nothing", "not in")):
        with pytest.raises(ValueError, match=why):
            tools["edit_file"].forward("a.py", old, "x")
    with pytest.raises(ValueError, match="no file"):
        tools["read_file"].forward("missing")
    tools["shell"].forward("head -c 100 /dev/zero > zeros")
    with pytest.raises(ValueError, match="is a binary file"):
        tools["read_file"].forward("zeros")
    with pytest.raises(ValueError, match="can't be written"):
        tools["write_file"].forward("../outside", "x")


def test_a_search_gives_paths_and_lines(tools: dict[str, Any]) -> None:
    tools["write_file"].forward("a/b.py", "import os\nvalue = 1\n")
    tools["write_file"].forward("c.txt", "value\n")
    assert tools["search_files"].forward("val(ue)?") == "c.txt:1: value\na/b.py:2: value = 1"
    assert tools["search_files"].forward("value", pattern="*.py") == "a/b.py:2: value = 1"
    assert tools["search_files"].forward("nowhere") == "[no matches]"
    with pytest.raises(ValueError, match="not a regular expression"):
        tools["search_files"].forward("(")


def test_without_a_session_they_share_one_that_ends_with_them(daemon: Daemon, client: ExecutorClient) -> None:
    source = SessionSource(**daemon.access)
    shell, files = ShellTool(source), FileTools(source)
    shell.forward("echo kept > file")
    assert files[0].forward("file") == "1  kept"
    assert len(client.list_sessions()) == 1
    shell.cleanup()
    assert client.list_sessions() == []
    with pytest.raises(ValueError, match="one session"), client.create_session() as session:
        ShellTool(session=session, executor=RemoteExecutor(**daemon.access))


def test_a_process_in_the_background_is_looked_at_fed_and_ended(tools: dict[str, Any]) -> None:
    started = tools["shell"].forward("echo up; while read line; do echo got $line; done; echo over", background=True)
    (process,) = re.findall(r"Process (\S+) has been started", started)
    look = tools["shell_output"].forward
    said = started + look(process, text="one\n")
    while "got one" not in said:
        said += look(process)
    assert said.count("up") == said.count("got one") == 1, "each piece is shown once"
    assert look(process, wait=0.1) == f"[{process} runs]"
    assert tools["shell_kill"].forward(process) == f"[{process}: ended by signal 9]"
    with pytest.raises(ValueError, match="can't be read"):
        look(process, text="more\n")
    with pytest.raises(ValueError, match=r"no process 'p-none'. Running: none"):
        look("p-none")
    with pytest.raises(ValueError, match="0 to 300 seconds"):
        look(process, wait=10**9)
    ended = tools["shell"].forward("exit 7", background=True)
    assert "exit code 7" in ended + look(re.findall(r"Process (\S+) has", ended)[0], wait=20)


def test_what_is_flooded_in_the_background_is_cut(tools: dict[str, Any]) -> None:
    started = tools["shell"].forward("head -c 3000000 /dev/zero | tr '\\0' x; sleep 1000", background=True)
    (process,) = re.findall(r"Process (\S+) has been started", started)
    assert len(started) < 40_000 and "bytes left out" in started
    assert tools["shell_kill"].forward(process).startswith(f"[{process}: ended by signal 9]")


def test_a_session_that_is_gone_is_no_wrong_argument(client: ExecutorClient) -> None:
    session = client.create_session()
    tools = [*ShellTools(session=session), *FileTools(session=session)]
    session.close()
    for tool, arguments in ((tools[0], ["true"]), (tools[1], ["p-1"]), (tools[3], ["file"]), (tools[6], [])):
        with pytest.raises(SandboxUnavailable, match="session"):
            tool.forward(*arguments)


@takes_executor
def test_a_code_agent_uses_them_beside_its_code(executor: RemoteExecutor) -> None:
    script = (
        "open('made.txt', 'w').write('by code')\nprint(shell('cat made.txt'), write_file('other.txt', 'by a tool'))",
        Reply("", "final_answer(open('other.txt').read())", expects=["[exit code 0]\nby code"]),
    )
    tools = [*ShellTools(executor=executor), *FileTools(executor=executor)]
    agent = CodeAgent(tools, scripted(*script), executor=executor, verbosity_level=LogLevel.OFF, max_steps=3)
    assert agent.run("go") == "by a tool"


def test_an_agent_of_tool_calls_starts_a_server_and_asks_it(executor: RemoteExecutor) -> None:
    # The server may need a moment before it answers.
    ask = "until python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/page').read())\" 2> /dev/null; do sleep 0.1; done"
    serve: dict[str, Any] = {"command": "exec python3 -u -m http.server -b 127.0.0.1 8000", "background": True}
    script = (
        Reply("A page.", calls=[("write_file", {"path": "page", "content": "served"})]),
        Reply("Serve it.", calls=[("shell", serve)], expects=["page now has 1 lines"]),
        Reply(
            "Wait.",
            calls=[("shell_output", {"process": "<<id>>", "wait": 0.2})],
            reads={"id": r"Process (p-\w+) has been started"},
        ),
        Reply("Ask.", calls=[("shell", {"command": ask})], expects=["runs]"]),
        Reply("", calls=[("final_answer", {"answer": "served"})], expects=["b'served'"]),
    )
    tools = [*ShellTools(executor=executor), *FileTools(executor=executor)]
    model = scripted(*script)
    agent = smolagents.ToolCallingAgent(tools=tools, model=model, verbosity_level=LogLevel.OFF, max_steps=6)
    assert agent.run("go") == "served"
    assert model.finished
