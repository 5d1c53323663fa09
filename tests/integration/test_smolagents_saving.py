"""Saved agents: an agent that ran in a sandbox is loaded into one again, or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import smolagents

from executor_client.smolagents import CodeAgent, RemoteExecutor, RemotePythonInterpreterTool, register, unregister
from tests.support.agents import takes_executor
from tests.support.daemon import Daemon

SETTINGS: dict[str, Any] = {"limits": {"wall_time_s": 5}}


def saveable(daemon: Daemon, folder: Path, make: Any) -> dict[str, Any]:
    """Saves an agent created by `make(model)` and returns what was written."""
    make(smolagents.InferenceClientModel("some/model", token="hf-secret")).save(str(folder))
    assert daemon.token not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    written: dict[str, Any] = json.loads((folder / "agent.json").read_text())
    return written


def test_our_class_comes_back_remote(daemon: Daemon, tmp_path: Path) -> None:
    def make(some_model: Any) -> CodeAgent:
        helper = CodeAgent([], some_model, name="helper", description="helps", executor_kwargs=daemon.access)
        kwargs = {**daemon.access, **SETTINGS}
        return CodeAgent(
            [], some_model, additional_authorized_imports=["pandas"], managed_agents=[helper], executor_kwargs=kwargs
        )

    written = saveable(daemon, tmp_path / "agent", make)
    assert written["executor_type"] == "remote"
    assert written["executor_kwargs"] == {"address": daemon.address, **SETTINGS}
    loaded = CodeAgent.from_folder(tmp_path / "agent", executor_kwargs={"token": daemon.token})
    for agent in (loaded, loaded.managed_agents["helper"]):
        assert isinstance(agent, CodeAgent) and isinstance(agent.python_executor, RemoteExecutor)
        with agent:
            assert agent.python_executor("6 * 7").output == 42
    assert loaded.executor_kwargs["limits"] == SETTINGS["limits"]
    assert "pandas" in loaded.python_executor.additional_authorized_imports


def test_app_that_is_saved_beside_an_agent_runs_its_code_in_a_sandbox(daemon: Daemon, tmp_path: Path) -> None:
    def make(model: Any) -> CodeAgent:
        tool = RemotePythonInterpreterTool(**daemon.access)
        helper = smolagents.ToolCallingAgent([tool], model, name="helper", description="helps")
        kwargs = {**daemon.access, **SETTINGS}
        return CodeAgent(
            [], model, additional_authorized_imports=["numpy"], managed_agents=[helper], executor_kwargs=kwargs
        )

    saveable(daemon, tmp_path, make)
    program = """
from app import agent
with agent, agent.managed_agents["helper"].tools["python_interpreter"] as interpreter:
    print(agent.python_executor("import numpy; int(numpy.int64(42))").output, agent.executor_kwargs["limits"])
    print(type(agent.python_executor).__name__, type(interpreter.executor).__name__, interpreter("6 * 7"))
"""
    environment = {**os.environ, "EXECUTOR_TOKEN": daemon.token}
    command = [sys.executable, "-c", program]
    said = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True, timeout=60)
    assert said == "42 {'wall_time_s': 5}\nRemoteExecutor RemoteExecutor Stdout:\n\nOutput: 42\n"


@takes_executor
def test_the_plain_class_with_our_executor_never_comes_back_local(daemon: Daemon, tmp_path: Path) -> None:
    def make(some_model: Any) -> smolagents.CodeAgent:
        return smolagents.CodeAgent([], some_model, executor=RemoteExecutor(["pandas"], **daemon.access, **SETTINGS))

    written = saveable(daemon, tmp_path / "agent", make)
    assert (written["executor_type"], written["executor_kwargs"]) == ("remote", {"address": daemon.address, **SETTINGS})
    with pytest.raises(ValueError, match="Unsupported executor type: remote"):
        smolagents.CodeAgent.from_folder(tmp_path / "agent")
    register()
    try:
        loaded = smolagents.CodeAgent.from_folder(tmp_path / "agent")
    finally:
        unregister()
    assert isinstance(loaded.python_executor, RemoteExecutor)
    assert "pandas" in loaded.python_executor.additional_authorized_imports


def test_a_token_for_the_loaded_agents_leaves_their_saved_settings_as_they_are(daemon: Daemon) -> None:
    model = smolagents.InferenceClientModel("some/model", token="hf-secret")
    kwargs = {**daemon.access, **SETTINGS}
    helper = CodeAgent([], model, name="helper", description="helps", executor_kwargs=kwargs)
    local = smolagents.CodeAgent([], model, name="local", description="runs here")
    chosen = CodeAgent([], model, name="chosen", description="runs here by choice", executor_type="local")
    saved = CodeAgent([], model, managed_agents=[helper, local, chosen], executor_kwargs=kwargs).to_dict()
    loaded = CodeAgent.from_dict(saved, executor_kwargs={"token": daemon.token})
    for name in ("local", "chosen"):
        assert isinstance(loaded.managed_agents[name].python_executor, smolagents.LocalPythonExecutor)
    for agent in (loaded, loaded.managed_agents["helper"]):
        with agent:
            assert agent.executor_kwargs == {"address": daemon.address, "token": daemon.token, **SETTINGS}
            assert agent.python_executor("6 * 7").output == 42


@takes_executor
def test_a_local_manager_does_not_make_its_agents_local(daemon: Daemon) -> None:
    """smolagents passes the manager's executor type and imports to the agents that it manages."""
    model = smolagents.InferenceClientModel("some/model", token="hf-secret")
    ours = CodeAgent([], model, name="ours", description="helps", executor_kwargs={**daemon.access, **SETTINGS})
    executor = RemoteExecutor(["pandas"], **daemon.access, **SETTINGS)
    plain = smolagents.CodeAgent([], model, name="plain", description="helps", executor=executor)
    saved = smolagents.CodeAgent([], model, managed_agents=[ours, plain]).to_dict()
    loaded = smolagents.CodeAgent.from_dict(saved)
    assert isinstance(loaded.python_executor, smolagents.LocalPythonExecutor)
    for agent in loaded.managed_agents.values():
        assert isinstance(agent.python_executor, RemoteExecutor)
        assert agent.python_executor.saved_kwargs() == {"address": daemon.address, **SETTINGS}
    assert "pandas" in loaded.managed_agents["plain"].python_executor.additional_authorized_imports
    assert "pandas" not in loaded.managed_agents["ours"].python_executor.additional_authorized_imports


def test_smolagents_coming_entry_point_is_the_class_itself() -> None:
    (entry,) = metadata.entry_points(group="smolagents.executors", name="remote")
    executor = entry.load()(["pandas"], None, limits={"wall_time_s": 5})
    assert isinstance(executor, RemoteExecutor) and executor.additional_authorized_imports == ["pandas"]


def test_an_agent_with_the_local_executor_is_saved_as_before(tmp_path: Path) -> None:
    agent = smolagents.CodeAgent([], smolagents.InferenceClientModel("some/model", token="hf-secret"))
    assert agent.to_dict()["executor_type"] == "local"
