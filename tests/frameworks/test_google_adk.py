"""The environment for Google ADK, with ADK's own agents and tools, on a real daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.adk", reason="google-adk is not installed")

from google.adk.errors.tool_execution_error import ToolExecutionError

from executor_client.integrations.google_adk import RemoteEnvironment
from tests.support.daemon import Daemon

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.filterwarnings("ignore:.*EXPERIMENTAL.*:UserWarning")


@pytest.fixture
async def environment(daemon: Daemon) -> AsyncIterator[RemoteEnvironment]:
    made = RemoteEnvironment()
    await made.initialize()
    yield made
    await made.close()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("adk_agent")


def test_scripted_agent_writes_runs_edits_and_reads(
    daemon: Daemon, example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main()
    assert capsys.readouterr().out.splitlines() == [
        "WriteFile: {'status': 'ok', 'message': 'Wrote words.txt'}",
        "Execute: {'status': 'ok', 'stdout': '      2 kiln\\n'}",
        "EditFile: {'status': 'ok', 'message': 'Edited words.txt'}",
        "ReadFile: {'status': 'ok', 'content': '     1\\tkiln clay kiln clay clay\\n'}",
        "Execute: {'status': 'error', 'stderr': 'cat: missing.txt: No such file or directory\\n', 'exit_code': 1}",
        "The answer: The most frequent word was kiln.",
    ]
    with daemon.client() as client:
        assert client.list_sessions() == []


def test_agent_whose_session_is_ended_from_elsewhere_fails_instead_of_answering(daemon: Daemon, example: Any) -> None:
    """ADK's tool catches the error. The model gets no turn in which it could answer for it."""

    def end_the_session() -> tuple[str, dict[str, str]]:
        with daemon.client() as client:
            (info,) = client.list_sessions()
            client.get_session(info.session_id).close()
        return "Execute", {"command": "echo never"}

    script = [("Execute", {"command": "echo kept"}), end_the_session, "an answer that nobody may score"]
    with pytest.raises(ToolExecutionError, match="session"):
        asyncio.run(example.run(script))
