"""A shell and files as tools: what a model gets of them, in the session of its agent."""

from __future__ import annotations

from typing import Any

import pytest

from executor_client import ExecutorClient
from executor_client.smolagents import FileTools, RemoteExecutor, SessionSource, ShellTool
from tests.support.daemon import Daemon


@pytest.fixture
def tools(executor: RemoteExecutor) -> dict[str, Any]:
    return {tool.name: tool for tool in (ShellTool(executor=executor), *FileTools(executor=executor))}


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
    assert tools["edit_file"].forward("a.py", "one\ntwo\n", "1\n2\n") == "a.py was changed at line 1."
    assert tools["shell"].forward("cat a.py") == "[exit code 0]\n1\n2\nthree\ntwo again"
    for old, why in (("e", "2 times"), ("", "empty"), ("three  \n", "first line is at line 3"), ("nothing", "not in")):
        with pytest.raises(ValueError, match=why):
            tools["edit_file"].forward("a.py", old, "x")
    with pytest.raises(ValueError, match="no file"):
        tools["read_file"].forward("missing")
    tools["shell"].forward("head -c 100 /dev/zero > zeros")
    with pytest.raises(ValueError, match="no text"):
        tools["read_file"].forward("zeros")
    with pytest.raises(ValueError, match="can't be written"):
        tools["write_file"].forward("../outside", "x")


def test_a_search_gives_paths_and_lines(tools: dict[str, Any]) -> None:
    tools["write_file"].forward("a/b.py", "import os\nvalue = 1\n")
    tools["write_file"].forward("c.txt", "value\n")
    assert tools["search_files"].forward("val(ue)?") == "c.txt:1: value\na/b.py:2: value = 1"
    assert tools["search_files"].forward("value", pattern="*.py") == "a/b.py:2: value = 1"
    assert tools["search_files"].forward("nowhere") == "[no matches]"
    with pytest.raises(ValueError, match="no regular expression"):
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
