"""Agents that run again, are loaded from a file, and run concurrently: right answers, and no leftovers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import smolagents
from smolagents import LogLevel, tool

from examples.scripted import Reply
from executor_client import ExecutorClient
from executor_client.smolagents import CodeAgent, RemoteExecutor
from tests.support.agents import agent_on, scripted
from tests.support.daemon import Daemon
from tests.support.polling import eventually

MEETING_S = 30.0
"""Seconds until all concurrent agents have arrived; an agent that runs alone fails after them."""


@pytest.fixture(autouse=True)
def no_session_left(daemon: Daemon) -> Iterator[None]:
    yield
    with daemon.client() as client:
        assert client.list_sessions() == []


def through(client: ExecutorClient) -> dict[str, Any]:
    """Returns the arguments by which an agent uses this client."""
    return {"executor_kwargs": {"client": client, "address": None, "token": None}}


def meeting_tool(meeting: threading.Barrier) -> Any:
    @tool
    def meet() -> None:
        """Waits until all the others have arrived here too."""
        meeting.wait(MEETING_S)

    return meet


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    """Runs functions concurrently; returns their results."""
    ended: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            ended[number] = work[number]()
        except BaseException as error:  # noqa: BLE001 - compared with what was expected
            ended[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ended[number] for number in range(len(work))]


# ---------------------------------------------------------------------------------------------------------------------
# One agent, again


def test_an_agent_that_ran_is_saved_and_runs_again_where_it_is_loaded(daemon: Daemon, tmp_path: Path) -> None:
    @tool
    def double(number: int) -> int:
        """Doubles.

        Args:
            number: what
        """
        return 2 * number

    script = ("kept = double(start)", Reply("", "final_answer(kept + 1)"))
    agent = agent_on(daemon, *script, tools=[double])
    with agent:
        assert agent.run("go", additional_args={"start": 4}) == 9
        agent.model = smolagents.InferenceClientModel("some/model", token="a-secret")
        agent.save(str(tmp_path))
        agent.model = scripted("final_answer(kept)")
        assert agent.run("go", reset=False) == 8, "saving changed nothing in it"
    loaded = CodeAgent.from_folder(tmp_path, executor_kwargs={"token": daemon.token}, verbosity_level=LogLevel.OFF)
    with loaded:
        for start, answer in ((5, 11), (6, 13)):
            loaded.model = scripted(*script)
            assert loaded.run("go", additional_args={"start": start}) == answer
    assert isinstance(loaded.python_executor, RemoteExecutor)


def test_many_runs_take_one_session_and_no_more_threads_or_descriptors_than_the_first_few(daemon: Daemon) -> None:
    def held() -> tuple[int, int]:
        return threading.active_count(), psutil.Process().num_fds()

    @tool
    def add(left: int, right: int) -> int:
        """Adds.

        Args:
            left: one
            right: the other
        """
        return left + right

    early = 0, 0
    with agent_on(daemon, tools=[add], max_steps=2) as agent:
        for number in range(20):
            agent.model = scripted(f"x = add({number}, 1)", "final_answer(x)")
            assert agent.run("go") == number + 1
            if number == 4:
                early = held()
        # A thread of a call that is over takes a moment to end.
        assert eventually(lambda: all(late <= before for late, before in zip(held(), early, strict=True))), held()
        with daemon.client() as client:
            assert len(client.list_sessions()) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Several concurrently


def test_agents_in_threads_share_a_client_and_nothing_else(daemon: Daemon) -> None:
    count, rounds = 3, 2
    meeting = threading.Barrier(count)

    def runs(client: ExecutorClient, number: int) -> list[Any]:
        @tool
        def whose() -> int:
            """Returns the number of its agent."""
            return number

        script = (f"mine = {number} * whose()\nmeet()\nprint('agent', mine)", Reply("", "meet()\nfinal_answer(mine)"))
        tools = [whose, meeting_tool(meeting)]
        answers = []
        with agent_on(daemon, *script, tools=tools, **through(client)) as agent:
            for _ in range(rounds):
                agent.model = scripted(*script)
                answers.append((agent.run("go"), agent.memory.steps[1].observations))
        return answers

    with daemon.client() as client:
        got = in_threads(*(lambda number=number: runs(client, number) for number in range(count)))
        assert client.list_sessions() == []
    for number, answers in enumerate(got):
        square = number * number
        seen = f"Execution logs:\nagent {square}\nLast output from code snippet:\nNone"
        assert answers == [(square, seen)] * rounds


def test_threads_that_share_an_executor_each_get_their_own_output(executor: RemoteExecutor) -> None:
    """Its executions run one after another, and each thread gets its own result."""
    executor("def work(n):\n    print('n', n)\n    return n * n")
    outputs = in_threads(*(lambda number=number: tuple(executor(f"work({number})")) for number in range(12)))
    assert outputs == [(number * number, f"n {number}\n", False) for number in range(12)]


def test_threads_that_use_an_executor_first_make_one_session(daemon: Daemon) -> None:
    with RemoteExecutor(**daemon.access) as executor:
        assert in_threads(*(lambda: executor("1 + 1").output for _ in range(6))) == [2] * 6
        with daemon.client() as client:
            assert len(client.list_sessions()) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Managers


@pytest.fixture
def workers(daemon: Daemon) -> Iterator[Callable[[], list[CodeAgent]]]:
    """Yields two workers with a shared client, whose code meets halfway: neither can end without the other."""
    with daemon.client() as client:
        meeting = threading.Barrier(2)
        made = [
            agent_on(
                daemon,
                *worker_script(name),
                tools=[meeting_tool(meeting)],
                name=name,
                description=f"Says {name}.",
                **through(client),
            )
            for name in ("left", "right")
        ]

        def ready() -> list[CodeAgent]:
            for each in made:
                each.model = scripted(*worker_script(each.name))
            return made

        yield ready
        for each in made:
            each.cleanup()
        assert client.list_sessions() == []


def worker_script(name: str) -> tuple[str, Reply]:
    return f"said = {name!r}\nmeet()", Reply("", "meet()\nfinal_answer(said.upper())")


def test_a_manager_with_tool_calls_runs_two_remote_workers_at_once_and_once_more(
    workers: Callable[[], list[CodeAgent]],
) -> None:
    """smolagents' ToolCallingAgent runs all calls of one reply in threads of its own."""
    arguments: Any = {"task": "speak", "additional_args": {}}  # the latter for smolagents 1.22, which insists on it
    script = (
        Reply("Both.", calls=[("left", arguments), ("right", arguments)]),
        Reply("", expects=["managed agent 'left':\nLEFT", "managed agent 'right':\nRIGHT"], calls=[("final_answer", {"answer": "both"})]),
    )  # fmt: skip
    for _ in range(2):
        manager = smolagents.ToolCallingAgent(
            tools=[], model=scripted(*script), managed_agents=workers(), verbosity_level=LogLevel.OFF
        )
        assert manager.run("go") == "both"


def test_a_remote_managers_code_runs_two_remote_workers_at_once_and_once_more(
    daemon: Daemon, workers: Callable[[], list[CodeAgent]]
) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
    reports = list(pool.map(lambda worker: worker("speak"), (left, right)))
"""
    script = (code, Reply("", "final_answer([report.split()[-1] for report in reports])"))
    imports = ["concurrent.futures"]
    with agent_on(daemon, *script, managed_agents=workers(), additional_authorized_imports=imports) as manager:
        for _ in range(2):
            manager.model = scripted(*script)
            workers()
            assert manager.run("go") == ["LEFT", "RIGHT"]


def test_a_worker_that_fails_in_a_thread_leaves_the_other_one_alone(daemon: Daemon) -> None:
    """The manager reads the worker's own message of the failure."""

    def fail() -> Any:
        raise LookupError("no such page")

    helper = agent_on(daemon, "final_answer('fine')", name="helper", description="Helps.")
    broken = agent_on(daemon, "1", name="broken", description="Breaks.", step_callbacks=[lambda _: fail()])
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
    good, bad = pool.submit(helper, "go"), pool.submit(broken, "go")
    final_answer((good.result().split()[-1], repr(bad.exception())))
"""
    boss = agent_on(daemon, code, managed_agents=[helper, broken], additional_authorized_imports=["concurrent.futures"])
    with helper, broken, boss:
        assert boss.run("go") == ("fine", "LookupError('no such page')")
