"""Our replacement of smolagents' interpreter tool: a `ToolCallingAgent` whose code runs in a sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from smolagents import InferenceClientModel, LogLevel, PythonInterpreterTool, Tool, ToolCallingAgent
from smolagents.default_tools import TOOL_MAPPING

from examples.scripted import Reply
from executor_client import ToolNotShippable
from executor_client.smolagents import (
    CodeExecutionError,
    DaemonLost,
    RemoteExecutor,
    RemotePythonInterpreterTool,
    register,
    unregister,
)
from tests.support.agents import scripted
from tests.support.daemon import Daemon


@pytest.fixture
def interpreter(daemon: Daemon) -> Iterator[RemotePythonInterpreterTool]:
    with RemotePythonInterpreterTool(**daemon.access) as tool:
        yield tool


def test_model_sees_what_it_sees_of_smolagents_own(interpreter: RemotePythonInterpreterTool) -> None:
    own = PythonInterpreterTool()
    assert (interpreter.name, interpreter.output_type) == (own.name, own.output_type)
    assert {name: about["type"] for name, about in interpreter.inputs.items()} == {
        name: about["type"] for name, about in own.inputs.items()
    }
    for code in ("print('hi')\n6 * 7", "x = 'text'", "print(1); print(2)"):
        assert interpreter(code) == own(code)


def test_variables_are_kept_by_each_tool_for_itself(daemon: Daemon, interpreter: RemotePythonInterpreterTool) -> None:
    with RemotePythonInterpreterTool(**daemon.access) as other:
        interpreter("x = 1")
        other("x = 2")
        assert interpreter("x").endswith("Output: 1")
        assert other("x").endswith("Output: 2")


def test_a_failure_shows_what_was_printed_before(interpreter: RemotePythonInterpreterTool) -> None:
    with pytest.raises(CodeExecutionError, match=r"(?s)ZeroDivisionError.*Stdout before the failure:\nhere$"):
        interpreter("print('here')\n1 / 0")
    with pytest.raises(CodeExecutionError, match=r"are kept\.$"):
        interpreter("1 / 0")


def test_long_prints_and_values_are_cut(daemon: Daemon) -> None:
    with RemotePythonInterpreterTool(max_print_outputs_length=1_000, **daemon.access) as tool:
        assert 20_000 < len(tool("'x' * 1_000_000")) < 21_000
        assert 1_000 < len(tool("print('x' * 1_000_000)")) < 2_000


def test_imports_and_time_are_limited_as_asked(daemon: Daemon) -> None:
    with RemotePythonInterpreterTool(authorized_imports=["numpy"], **daemon.access) as tool:
        assert "'numpy'" in tool.inputs["code"]["description"]
        assert tool("import numpy\nint(numpy.int64(3))").endswith("Output: 3")
        with pytest.raises(CodeExecutionError, match="Import of pandas is not allowed"):
            tool("import pandas")
    hurried = RemotePythonInterpreterTool(timeout_seconds=0.5, **daemon.access)
    with hurried, pytest.raises(CodeExecutionError, match="exceeded the maximum execution time"):
        hurried("while True: pass")
    with pytest.raises(ValueError, match="pass one of them"):
        RemotePythonInterpreterTool(timeout_seconds=1, limits={"wall_time_s": 2})


def agent_with(tool: RemotePythonInterpreterTool, *replies: Reply) -> ToolCallingAgent:
    return ToolCallingAgent([tool], scripted(*replies), max_steps=len(replies), verbosity_level=LogLevel.OFF)


def test_agent_mends_its_code_and_calls_in_parallel(interpreter: RemotePythonInterpreterTool) -> None:
    def run(code: str) -> tuple[str, dict[str, str]]:
        return ("python_interpreter", {"code": code})

    agent = agent_with(
        interpreter,
        Reply("typo", calls=[run("total = sum(rnage(5))")]),
        Reply("mended", expects=["NameError", "rnage"], calls=[run("total = sum(range(5))")]),
        Reply("several at once", calls=[run(f"print({n} * total)") for n in range(2, 6)]),
        Reply(
            "that is all",
            expects=["20", "30", "40"],
            reads={"last": r"Stdout:\n(50)\n"},
            calls=[("final_answer", {"answer": "<<last>>"})],
        ),
    )
    assert agent.run("go") == "50"


def test_code_of_an_agent_can_call_it_wherever_tools_are_placed(
    daemon: Daemon, interpreter: RemotePythonInterpreterTool
) -> None:
    with RemoteExecutor(tool_placement="sandbox", **daemon.access) as executor:
        executor.send_tools({"python_interpreter": interpreter})
        assert executor("python_interpreter('6 * 7')").output.endswith("Output: 42")
    with (
        RemoteExecutor(tool_placement={"python_interpreter": "sandbox"}, **daemon.access) as executor,
        pytest.raises(ToolNotShippable, match="a sandbox of its own"),
    ):
        executor.send_tools({"python_interpreter": interpreter})


def test_base_tools_hold_it_once_that_is_registered(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in TOOL_MAPPING.keys() - {"python_interpreter"}:  # the other base tools need packages of their own
        monkeypatch.delitem(TOOL_MAPPING, other)
    monkeypatch.setenv("EXECUTOR_STATE_DIR", str(daemon.state_dir))

    def interpreter_of_an_agent() -> Tool:
        return ToolCallingAgent([], scripted(), add_base_tools=True).tools["python_interpreter"]

    register()
    assert isinstance(interpreter_of_an_agent(), PythonInterpreterTool)
    register(base_tools=True)
    try:
        with interpreter_of_an_agent() as tool:
            assert isinstance(tool, RemotePythonInterpreterTool)
            assert tool("6 * 7").endswith("Output: 42")
    finally:
        unregister()
    assert isinstance(interpreter_of_an_agent(), PythonInterpreterTool)


def test_a_daemon_that_refuses_ends_the_run(daemon: Daemon) -> None:
    with RemotePythonInterpreterTool(address=daemon.address, token="wrong") as tool:
        agent = agent_with(tool, Reply("", calls=[("python_interpreter", {"code": "1"})]))
        with pytest.raises(DaemonLost):
            agent.run("go")


def test_a_saved_agent_gets_its_interpreter_back_in_a_sandbox(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = RemotePythonInterpreterTool(authorized_imports=["numpy.*"], timeout_seconds=5, **daemon.access)
    model = InferenceClientModel("some/model", token="hf-secret")
    ToolCallingAgent([tool], model, verbosity_level=LogLevel.OFF).save(str(tmp_path))
    assert daemon.token not in "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    monkeypatch.setenv("EXECUTOR_TOKEN", daemon.token)
    with ToolCallingAgent.from_folder(tmp_path).tools["python_interpreter"] as loaded:
        assert isinstance(loaded, RemotePythonInterpreterTool)
        assert loaded.to_dict() == tool.to_dict()
        assert loaded("import numpy.random\nint(numpy.sum([1, 2]))").endswith("Output: 3")
        with pytest.raises(CodeExecutionError, match="Import of os is not allowed"):
            loaded("import os")


def test_cleanup_ends_the_session_and_can_be_repeated(daemon: Daemon) -> None:
    tool = RemotePythonInterpreterTool(**daemon.access)
    tool.cleanup()
    with daemon.client() as client:
        tool("x = 1")
        assert len(client.list_sessions()) == 1
        tool.cleanup()
        tool.cleanup()
        assert client.list_sessions() == []
