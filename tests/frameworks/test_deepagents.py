"""LangChain's deepagents: its conformance suite of sandboxes, and scripted agents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon

pytest.importorskip("deepagents")

from deepagents import create_deep_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_tests.integration_tests import SandboxIntegrationTests

from executor_client import SessionGone
from executor_client.integrations.deepagents import RemoteSandbox, with_artifacts


@pytest.fixture
def sandbox(daemon: Daemon) -> Iterator[RemoteSandbox]:
    with RemoteSandbox() as made:
        made.execute("true")
        yield made


class TestSuite(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self, daemon: Daemon) -> Iterator[RemoteSandbox]:
        with RemoteSandbox(env={"PATH": "/usr/local/bin:/usr/bin:/bin:/workspace/bin"}) as made:
            # The suite runs `python`, and Debian calls it python3.
            made.execute("mkdir bin; ln -s $(command -v python3) bin/python")
            yield made


class Scripted(BaseChatModel):
    """Makes these tool calls one after the other, then answers with the last result."""

    calls: list[tuple[str, dict[str, Any]]]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Scripted:
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        results = [each for each in messages if isinstance(each, ToolMessage)]
        if len(results) < len(self.calls):
            name, arguments = self.calls[len(results)]
            made = AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call-{len(results)}"}])
        else:
            made = AIMessage(str(results[-1].content))
        return ChatResult(generations=[ChatGeneration(message=made)])


def ask(sandbox: RemoteSandbox, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    """Returns the results of the calls."""
    agent = create_deep_agent(Scripted(calls=list(calls)), backend=with_artifacts(sandbox))
    state = asyncio.run(agent.ainvoke({"messages": [("user", "go")]}))
    return [str(each.content) for each in state["messages"] if isinstance(each, ToolMessage)]


def test_agent_writes_edits_and_runs_in_its_session(sandbox: RemoteSandbox) -> None:
    results = ask(
        sandbox,
        ("write_file", {"file_path": "/workspace/sum.py", "content": "print(20 + 1)\n"}),
        ("edit_file", {"file_path": "/workspace/sum.py", "old_string": "20 + 1", "new_string": "20 + 22"}),
        ("execute", {"command": "python3 sum.py; echo said >&2; exit 3"}),
        ("execute", {"command": "sleep 100", "timeout": 1}),
    )
    assert results[2].startswith("42\nsaid\n")
    assert "3" in results[2].removeprefix("42")
    assert "killed after 1 s" in results[3]


def test_large_result_is_kept_in_the_workspace(sandbox: RemoteSandbox) -> None:
    ask(sandbox, ("execute", {"command": "seq 100000"}))
    assert "call-0" in sandbox.execute("ls /workspace/.deepagents/large_tool_results").output


async def test_cancelled_call_ends_its_command(sandbox: RemoteSandbox) -> None:
    running = asyncio.create_task(sandbox.aexecute("touch begun; exec sleep 1234"))
    while (await sandbox.aexecute("test -e begun")).exit_code:
        pass
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    while (await sandbox.aexecute("cat /proc/[0-9]*/cmdline | grep -q '^sleep.1234'")).exit_code == 0:
        pass


def test_another_process_continues_by_the_name_and_a_lost_session_ends_the_run(sandbox: RemoteSandbox) -> None:
    other = RemoteSandbox(sandbox.id)
    sandbox.upload_files([("/workspace/note", b"kept")])
    assert other.download_files(["/workspace/note"])[0].content == b"kept"
    other.close()
    for tool, arguments in (("execute", {"command": "true"}), ("glob", {"pattern": "*"})):
        with pytest.raises(SessionGone):
            ask(sandbox, (tool, arguments))
    for call in (
        sandbox.execute,
        lambda _: sandbox.upload_files([("/a", b"")]),
        lambda _: sandbox.download_files(["/a"]),
    ):
        with pytest.raises(SessionGone):
            call("true")


@pytest.mark.usefixtures("replayed")
def test_example(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import_module("deepagents_agent").main()
    assert capsys.readouterr().out.splitlines()[-1] == "execute: 5050"
