"""An agent that was saved and loaded, with tools that are placed in the sandbox."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import smolagents
from smolagents import Tool, tool

from executor_client.smolagents import CodeAgent
from tests.support.agents import scripted
from tests.support.daemon import Daemon


@tool
def own_process() -> int:
    """Returns the process in which it runs."""
    import os

    return os.getpid()


class Repeat(Tool):
    name = "repeat"
    description = "Repeats a text."
    inputs = {"text": {"type": "string", "description": "what to repeat"}}  # noqa: RUF012
    output_type = "string"

    def __init__(self) -> None:
        super().__init__()
        self.times = 2

    def forward(self, text: str) -> str:
        return self._joined([text] * self.times)

    def _joined(self, texts: list[str]) -> str:
        return "-".join(texts)


def loaded_again(daemon: Daemon, how: str, folder: Path) -> Any:
    kwargs = {**daemon.access, "tool_placement": {"own_process": "sandbox", "repeat": "sandbox"}}
    agent = CodeAgent(
        [own_process, Repeat()],
        smolagents.InferenceClientModel("some/model", token="hf-secret"),
        additional_authorized_imports=["os"],
        executor_kwargs=kwargs,
    )
    given = {"executor_kwargs": {"token": daemon.token}}
    if how == "dict":
        return CodeAgent.from_dict(agent.to_dict(), **given)
    agent.save(str(folder))
    return CodeAgent.from_folder(folder, **given)


@pytest.mark.parametrize("how", ["dict", "folder"])
def test_tools_of_a_loaded_agent_are_shipped_as_source(daemon: Daemon, tmp_path: Path, how: str) -> None:
    agent = loaded_again(daemon, how, tmp_path)
    agent.model = scripted("import os\nfinal_answer((own_process() == os.getpid(), repeat('ab')))")
    with agent:
        assert agent.run("go") == (True, "ab-ab")


def test_the_source_of_a_loaded_tool_can_be_looked_up(daemon: Daemon, tmp_path: Path) -> None:
    agent = loaded_again(daemon, "dict", tmp_path)
    assert "return os.getpid()" in inspect.getsource(type(agent.tools["own_process"]).forward)
    assert 'return "-".join(texts)' in inspect.getsource(type(agent.tools["repeat"])._joined)
