"""A real CodeAgent on a real daemon: all methods to choose the executor, tools, managed agents."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import smolagents
from smolagents import ActionStep, FinalAnswerTool, LogLevel, Tool, tool
from smolagents.memory import TaskStep
from smolagents.monitoring import Timing

from examples.scripted import Reply
from executor_client.smolagents import RemoteExecutor, register, unregister
from tests.support.agents import agent_on, scripted, takes_executor
from tests.support.daemon import Daemon


@pytest.fixture
def registered() -> Iterator[None]:
    register()
    register()
    yield
    unregister()
    unregister()


# ---------------------------------------------------------------------------------------------------------------------
# Choosing an executor

TWO_RUNS = ("x = 20", "final_answer(x + 1)", Reply("", "final_answer(x + 2)"))


def run_twice(agent: smolagents.CodeAgent) -> tuple[Any, Any]:
    with agent:
        return agent.run("first", max_steps=2), agent.run("second", reset=False, max_steps=1)


def test_our_class_runs_twice_with_its_state_kept(daemon: Daemon) -> None:
    agent = agent_on(daemon, *TWO_RUNS)
    assert isinstance(agent.python_executor, RemoteExecutor) and agent.executor_type == "remote"
    assert run_twice(agent) == (21, 22)


@pytest.mark.usefixtures("registered")
def test_the_plain_class_runs_twice_once_registered(daemon: Daemon) -> None:
    agent = smolagents.CodeAgent(
        tools=[],
        model=scripted(*TWO_RUNS),
        executor_type="remote",
        executor_kwargs=daemon.access,
        verbosity_level=LogLevel.OFF,
    )
    assert isinstance(agent.python_executor, RemoteExecutor) and agent.executor_type == "remote"
    assert run_twice(agent) == (21, 22)


@takes_executor
def test_the_plain_class_runs_twice_with_an_executor_of_ours(daemon: Daemon) -> None:
    executor = RemoteExecutor(**daemon.access)
    agent = smolagents.CodeAgent(tools=[], model=scripted(*TWO_RUNS), executor=executor, verbosity_level=LogLevel.OFF)
    assert agent.python_executor is executor
    assert run_twice(agent) == (21, 22)


def test_without_registration_the_plain_class_refuses_the_type(daemon: Daemon) -> None:
    with pytest.raises(ValueError, match="Unsupported executor type: remote"):
        smolagents.CodeAgent(tools=[], model=scripted("1"), executor_type="remote", executor_kwargs=daemon.access)


@pytest.mark.usefixtures("registered")
def test_registration_leaves_other_types_alone() -> None:
    agent = smolagents.CodeAgent(tools=[], model=scripted("final_answer(1)"), verbosity_level=LogLevel.OFF)
    assert isinstance(agent.python_executor, smolagents.LocalPythonExecutor)
    assert agent.run("go") == 1


def test_a_placement_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="of 'go' is 'cellar'; supported is: host, sandbox"):
        RemoteExecutor(tool_placement={"go": "cellar"})


@takes_executor
def test_one_executor_serves_one_agent_after_another(daemon: Daemon, executor: RemoteExecutor) -> None:
    for script in (["y = 5", "final_answer(y)"], ["final_answer(y + 1)"]):
        agent = smolagents.CodeAgent(tools=[], model=scripted(*script), executor=executor, verbosity_level=LogLevel.OFF)
        answer = agent.run("go")
    assert answer == 6


def test_an_agent_can_be_stepped_by_hand(daemon: Daemon) -> None:
    with agent_on(daemon, "x = 1", "final_answer(x + 1)") as agent:
        agent.python_executor.send_tools({**agent.tools})
        agent.memory.steps.append(TaskStep(task="go", task_images=[]))
        answer = None
        for number in (1, 2):
            step = ActionStep(step_number=number, timing=Timing(start_time=0.0))
            answer = agent.step(step)
            agent.memory.steps.append(step)
    assert getattr(answer, "output", answer) == 2


def test_cleanup_can_be_repeated_and_comes_before_use(daemon: Daemon) -> None:
    executor = RemoteExecutor(**daemon.access)
    executor.cleanup()
    assert executor("1 + 1").output == 2
    executor.cleanup()
    executor.cleanup()
    with daemon.client() as client:
        assert client.list_sessions() == []


# ---------------------------------------------------------------------------------------------------------------------
# Tools and managed agents


class Vault(Tool):
    """A tool that needs an argument of its constructor, so executors that ship source code cannot run it."""

    name = "vault"
    description = "Opens with a number."
    inputs = {"number": {"type": "integer", "description": "any"}}  # noqa: RUF012
    output_type = "integer"

    def __init__(self, secret: int) -> None:
        super().__init__()
        self._secret = secret

    def forward(self, number: int) -> int:
        return self._secret + number


def test_tools_hold_their_constructors_arguments_and_do_not_change(daemon: Daemon) -> None:
    vault, answer = Vault(secret=40), FinalAnswerTool()
    before = [(type(each), dict(vars(each)), vars(type(each)).copy()) for each in (vault, answer)]
    saved = answer.to_dict()
    with agent_on(daemon, "final_answer(vault(number=2))", tools=[vault, answer]) as agent:
        assert agent.run("go") == 42
    assert answer.to_dict() == saved
    vault.is_initialized = False  # smolagents records the first call there
    answer.is_initialized = False
    assert [(type(each), dict(vars(each)), vars(type(each)).copy()) for each in (vault, answer)] == before


def test_a_tools_error_reaches_the_code_by_its_type(executor: RemoteExecutor) -> None:
    def fail(reason: str) -> None:
        raise LookupError(reason)

    executor.send_tools({"fail": fail})
    assert executor("try:\n    fail('why')\nexcept LookupError as e:\n    caught = str(e)\ncaught").output == "why"


def test_managed_agents_work_and_get_dataframes(daemon: Daemon) -> None:
    helper = agent_on(daemon, "final_answer(int(table['n'].sum()))", name="helper", description="Adds up.")
    code = """
import pandas as pd
report = helper("add up", additional_args={"table": pd.DataFrame({"n": [1, 2, 3]})})
final_answer(report)
"""
    with helper, agent_on(daemon, code, managed_agents=[helper], additional_authorized_imports=["pandas"]) as boss:
        assert "6" in boss.run("go")


def test_a_custom_final_answer_tool_decides_what_is_the_answer(daemon: Daemon) -> None:
    class Receipt(Tool):
        name = "final_answer"
        description = "Ends the run."
        inputs = {"answer": {"type": "any", "description": "the answer"}}  # noqa: RUF012
        output_type = "any"

        def forward(self, answer: Any) -> Any:
            return {"answer": answer, "lock": lock}

    lock = threading.Lock()  # it cannot be encoded: the answer never leaves this process
    with agent_on(daemon, "final_answer('x')", tools=[Receipt()]) as agent:
        assert agent.run("go") == {"answer": "x", "lock": lock}


def test_a_bare_except_cannot_swallow_the_final_answer(executor: RemoteExecutor) -> None:
    executor.send_tools({"final_answer": FinalAnswerTool()})
    output = executor(
        "for _ in range(3):\n    try:\n        final_answer('kept')\n    except:\n        pass\nprint('on')"
    )
    assert (output.output, output.is_final_answer, "on" in output.logs) == ("kept", True, False)


def test_a_tool_can_take_its_arguments_as_one_dict_or_leave_some_out(executor: RemoteExecutor) -> None:
    @tool
    def scale(value: float, factor: float = 2.0) -> float:
        """Scales.

        Args:
            value: what
            factor: by how much
        """
        return value * factor

    executor.send_tools({"scale": scale})
    assert executor("scale(3), scale(value=3, factor=3), scale({'value': 1, 'factor': 5})").output == (6, 9, 5)
