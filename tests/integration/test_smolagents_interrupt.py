"""`agent.interrupt()` ends the step that runs; and tools that are asynchronous are awaited."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import smolagents
from smolagents import Tool, tool
from smolagents.utils import AgentError

from executor_client import ExecutorClient
from executor_client.smolagents import RemoteExecutor
from tests.support.agents import agent_on, scripted, takes_executor
from tests.support.daemon import Daemon

SOON_S = 15.0


def interrupted_once(agent: Any, begun: threading.Event) -> list[BaseException]:
    """Runs the agent in a thread, and interrupts it when its step has begun; returns what `run` raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            agent.run("go")
        except BaseException as error:  # noqa: BLE001 - it is what the test looks at
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(SOON_S)
    began_s = time.monotonic()
    agent.interrupt()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert time.monotonic() - began_s < SOON_S
    return raised


def signalling(begun: threading.Event) -> Any:
    @tool
    def begin() -> None:
        """Says that the step has begun."""
        begun.set()

    return begin


CODE = "import time\nkept = 7\nbegin()\ntime.sleep(600)"


@pytest.mark.parametrize("kind", ["ours", pytest.param("given", marks=takes_executor)])
def test_an_interrupt_ends_the_running_step_and_keeps_the_variables(daemon: Daemon, kind: str) -> None:
    begun = threading.Event()
    tools = [signalling(begun)]
    if kind == "ours":
        agent = agent_on(daemon, CODE, "final_answer(kept)", tools=tools, additional_authorized_imports=["time"])
    else:
        executor = RemoteExecutor(["time"], **daemon.access)
        model = scripted(CODE, "final_answer(kept)")
        agent = smolagents.CodeAgent(tools=tools, model=model, executor=executor, verbosity_level=-1)
    with agent:
        (error,) = interrupted_once(agent, begun)
        assert isinstance(error, AgentError) and str(error) == "Agent interrupted."
        assert "cancelled" in str(agent.memory.steps[-1].error)
        assert agent.run("again", reset=False) == 7


def test_an_interrupt_while_the_model_thinks_lets_no_step_begin(daemon: Daemon) -> None:
    begun = threading.Event()
    agent = agent_on(daemon, "ran()", "1", tools=[])
    generate: Callable[..., Any] = agent.model.generate

    def slow(*args: Any, **kwargs: Any) -> Any:
        agent.interrupt()
        return generate(*args, **kwargs)

    agent.model.generate = slow
    begun.set()
    with agent, pytest.raises(AgentError, match=r"^Agent interrupted\.$"):
        agent.run("go")
    assert "interrupted before it began" in str(agent.memory.steps[-1].error)


def test_an_interrupt_reaches_a_managed_agent(daemon: Daemon) -> None:
    begun = threading.Event()
    options: dict[str, Any] = {"tools": [signalling(begun)], "additional_authorized_imports": ["time"]}
    managed = agent_on(daemon, CODE, "1", name="helper", description="It helps.", **options)
    with managed, agent_on(daemon, "helper('do it')", "1", managed_agents=[managed]) as manager:
        (error,) = interrupted_once(manager, begun)
        assert str(error) == "Agent interrupted."
        assert managed.interrupt_switch


class Search(Tool):
    name = "search"
    description = "Searches."
    inputs = {"word": {"type": "string", "description": "what"}}  # noqa: RUF012
    output_type = "string"

    async def forward(self, word: str) -> str:
        await asyncio.sleep(0)
        return word * 2


@pytest.mark.parametrize("placement", ["host", "sandbox"])
def test_an_asynchronous_tool_of_an_agent_is_awaited(daemon: Daemon, placement: str) -> None:
    kwargs = {"tool_placement": placement}
    with agent_on(daemon, "final_answer(search('a'))", tools=[Search()], executor_kwargs=kwargs) as agent:
        assert agent.run("go") == "aa"


async def doubled(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def failing() -> None:
    await asyncio.sleep(0)
    raise FileNotFoundError(2, "gone", "a.txt")


def test_an_asynchronous_tool_of_the_blocking_client_is_awaited(daemon: Daemon) -> None:
    with ExecutorClient(**daemon.access) as client, client.create_session() as session:
        session.register_tools({"doubled": doubled, "later": lambda number: doubled(number), "failing": failing})
        assert session.execute("(doubled(2), later(3))").output == (4, 6)
        code = "try:\n    failing()\nexcept FileNotFoundError as error:\n    name = error.filename\nname"
        assert session.execute(code).output == "a.txt"
