"""`recorded_agent`: a test of an agent that is recorded once, and then runs without daemon, model and tools."""

from __future__ import annotations

import functools

import pytest

from tests.support.daemon import Daemon

pytest_plugins = ["pytester"]

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


def run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *options: str, **environment: str
) -> tuple[int, str]:
    """Runs the test in a run of pytest of its own; returns its exit code and its output."""
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        ran = pytester.runpytest_inprocess("-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", *options)
    return ran.ret, "\n".join([*ran.outlines, *ran.errlines])


def test_an_agent_is_recorded_once_and_then_runs_offline(
    daemon: Daemon, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_it = functools.partial(run, pytester, monkeypatch)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    pytester.makeconftest('pytest_plugins = ["executor_client.pytest_plugin"]')
    (pytester.path / "test_shop.py").write_text(TEST)
    code, out = run_it()
    assert code == pytest.ExitCode.TESTS_FAILED and "record it with --remote-executor-record=once" in out
    code, out = run_it("--remote-executor-record=once", ADDRESS=daemon.address, TOKEN=daemon.token)
    assert code == pytest.ExitCode.OK, out
    assert (pytester.path / "recordings/test_shop/test_price.rxr").stat().st_mode & 0o777 == 0o600
    code, out = run_it()
    assert code == pytest.ExitCode.OK, out
    code, out = run_it(CHANGED="prompt")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "call 1 of the model, message 2" in out and "a vase" in out and "a cup" in out
    code, out = run_it(CHANGED="tool")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "the tool price" in out and "Does something else." in out
