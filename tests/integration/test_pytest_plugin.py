"""`recorded_agent`: a test of an agent that is recorded once, and then runs without daemon, model and tools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import Daemon

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100.0
TEST = '''
import os

from smolagents import LogLevel, tool

from examples.scripted import Reply, ScriptedModel
from executor_client.smolagents import CodeAgent

LIVE = "ADDRESS" in os.environ


@tool
def price(item: str) -> int:
    """Looks up a price.

    Args:
        item: What to look up.
    """
    assert LIVE, "the tool ran"
    return len(item)


def absent(*args, **kwargs):
    raise AssertionError("the model was called")


def test_price(recorded_agent):
    if os.environ.get("CHANGED") == "tool":
        price.description = "Does something else."
    program = ["x = price('vase')\\nprint(x, sqrt(4), object())", "final_answer({'price': x})"]
    model = ScriptedModel([Reply("", code) for code in program]) if LIVE else absent
    access = {"address": os.environ.get("ADDRESS", "unix:/nowhere"), "token": os.environ.get("TOKEN", "none")}
    agent = CodeAgent(tools=[price], model=model, executor_kwargs=access, verbosity_level=LogLevel.OFF)
    task = "a cup" if os.environ.get("CHANGED") == "prompt" else "a vase"
    assert recorded_agent(agent).run(f"What is the price of {task}?") == {"price": 4}
'''


def run(directory: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Runs the test in a process of its own; returns its exit code and its output."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *arguments, str(directory)]
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    ended = subprocess.run(command, cwd=directory, env=given, capture_output=True, text=True, timeout=TIMEOUT_S)
    return ended.returncode, ended.stdout + ended.stderr


def test_an_agent_is_recorded_once_and_then_runs_offline(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["executor_client.pytest_plugin"]\n')
    (tmp_path / "test_shop.py").write_text(TEST)
    code, out = run(tmp_path)
    assert code == pytest.ExitCode.TESTS_FAILED and "record it with --remote-executor-record=once" in out
    code, out = run(tmp_path, "--remote-executor-record=once", ADDRESS=daemon.address, TOKEN=daemon.token)
    assert code == pytest.ExitCode.OK, out
    assert (tmp_path / "recordings/test_shop/test_price.rxr").stat().st_mode & 0o777 == 0o600
    code, out = run(tmp_path)
    assert code == pytest.ExitCode.OK, out
    code, out = run(tmp_path, CHANGED="prompt")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "call 1 of the model, message 2" in out and "a vase" in out and "a cup" in out
    code, out = run(tmp_path, CHANGED="tool")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "the tool price" in out and "Does something else." in out
