"""Tools in the sandbox and on the host: the same tools, wherever they run."""

from __future__ import annotations

import os
from typing import Any

import pytest
import smolagents
from smolagents import LogLevel, tool

from examples.scripted import Reply
from executor_client import ExecutorClient, InvalidRequest, Tool, ToolNotShippable
from executor_client.smolagents import CodeAgent, RemoteExecutor
from tests.support.agents import agent_on, scripted
from tests.support.daemon import Daemon
from tests.support.shipped import agent_tools, odd, plain, refused

IMPORTS = ["numpy.*", "pandas.*", "os"]


@pytest.fixture(scope="module")
def outputs(daemon: Daemon) -> dict[str, tuple[Any, Any]]:
    """The results of each tool of the corpus, in the sandbox and on the host."""
    tools = {name: each for name, (each, _) in agent_tools.CORPUS.items()}
    got: dict[str, list[Any]] = {name: [] for name in tools}
    # The sandbox first, so that changes of the tools by calls on the host are not shipped.
    for placement in ("sandbox", "host"):
        with RemoteExecutor(IMPORTS, tool_placement=placement, **daemon.access) as executor:
            executor.send_tools(tools)
            for name, (_, code) in agent_tools.CORPUS.items():
                got[name].append(executor(code).output)
    return {name: (in_sandbox, on_host) for name, (in_sandbox, on_host) in got.items()}


@pytest.mark.parametrize("name", agent_tools.CORPUS)
def test_a_tool_does_the_same_in_the_sandbox_as_on_the_host(name: str, outputs: dict[str, tuple[Any, Any]]) -> None:
    in_sandbox, on_host = outputs[name]
    assert (type(in_sandbox), repr(in_sandbox)) == (type(on_host), repr(on_host))


@pytest.mark.parametrize("name", agent_tools.REFUSED)
def test_a_tool_that_can_not_run_there_is_refused_by_name(name: str, client: ExecutorClient) -> None:
    refused_tool, problems = agent_tools.REFUSED[name]
    placed = RemoteExecutor(tool_placement={name: "sandbox"}, client=client)
    with placed, pytest.raises(ToolNotShippable) as raised:
        placed.send_tools({name: refused_tool})
    assert (raised.value.tool, list(raised.value.problems)) == (name, problems)


# ---------------------------------------------------------------------------------------------------------------------
# Which tools run where


@tool
def whereabouts() -> int:
    """Returns the number of the process in which it runs."""
    return os.getpid()


@tool
def also_whereabouts() -> int:
    """Returns the number of the process in which it runs."""
    return os.getpid()


def _helper() -> Any:
    model = scripted("final_answer('helped')", "final_answer('helped')")
    return smolagents.CodeAgent(
        tools=[], model=model, name="helper", description="Helps.", verbosity_level=LogLevel.OFF
    )


SEEN = """
import os
here = os.getpid()
final_answer([where == here for where in (whereabouts(), also_whereabouts())])
"""


@pytest.mark.parametrize(
    ("placement", "in_sandbox"),
    [
        ("host", [False, False]),
        ("sandbox", [True, True]),
        ({"whereabouts": "sandbox"}, [True, False]),
        ({"*": "sandbox", "whereabouts": "host"}, [False, True]),
    ],
)
def test_each_tool_runs_where_its_placement_says(daemon: Daemon, placement: Any, in_sandbox: list[bool]) -> None:
    with agent_on(
        daemon,
        SEEN,
        tools=[whereabouts, also_whereabouts],
        additional_authorized_imports=["os"],
        executor_kwargs={"tool_placement": placement},
    ) as agent:
        assert agent.run("go") == in_sandbox


def test_the_final_answer_and_managed_agents_stay_here_when_all_else_goes(daemon: Daemon) -> None:
    script = Reply("", "said = helper('help')\nfinal_answer(('helped' in said, convert(2)))")
    with agent_on(
        daemon,
        script,
        tools=[agent_tools.convert],
        managed_agents=[_helper()],
        executor_kwargs={"tool_placement": "sandbox"},
    ) as agent:
        assert agent.run("go") == (True, 4.0)


def test_a_tool_that_can_not_be_shipped_stops_the_run_before_the_model_is_asked(daemon: Daemon) -> None:
    with agent_on(daemon, "1", tools=[agent_tools.Guarded()], executor_kwargs={"tool_placement": "sandbox"}) as agent:
        with pytest.raises(ToolNotShippable, match=r"self\.lock"):
            agent.run("go")
        assert agent.model._given == 0


def test_a_name_that_no_tool_has_is_logged(client: ExecutorClient, caplog: pytest.LogCaptureFixture) -> None:
    placed = RemoteExecutor(tool_placement={"go_bakc": "sandbox"}, client=client)
    with placed:
        placed.send_tools({"convert": agent_tools.convert})
    assert "tool_placement names unknown tools: go_bakc" in caplog.text


def test_a_saved_agent_has_its_placement(daemon: Daemon) -> None:
    placement = {"imported": "sandbox", "*": "host"}
    with agent_on(
        daemon, "final_answer(1)", tools=[agent_tools.imported], executor_kwargs={"tool_placement": placement}
    ) as agent:
        saved = agent.to_dict()
    assert saved["executor_kwargs"]["tool_placement"] == placement
    made = RemoteExecutor(tool_placement=saved["executor_kwargs"]["tool_placement"], **daemon.access)
    assert made.saved_kwargs()["tool_placement"] == placement


def test_the_tools_of_a_loaded_agent_go_into_the_sandbox_again(daemon: Daemon) -> None:
    """smolagents creates them from text, which is in no file."""
    kwargs = {"tool_placement": "sandbox", **daemon.access}
    model = smolagents.InferenceClientModel("some/model", token="hf-secret")
    tools = [agent_tools.imported, agent_tools.Located()]
    saved = CodeAgent(tools, model, additional_authorized_imports=["os"], executor_kwargs=kwargs).to_dict()
    loaded = CodeAgent.from_dict(saved, executor_kwargs={"token": daemon.token}, verbosity_level=LogLevel.OFF)
    loaded.model = scripted("import os\nfinal_answer((imported(2), located(1)[0] == os.getpid(), located(1)[1]))")
    with loaded as agent:
        assert agent.run("go") == (["a", "b"], True, 104)


def test_a_tool_in_the_sandbox_may_call_one_on_the_host(daemon: Daemon) -> None:
    """The state of the tool on the host stays there."""
    secret = []

    @tool
    def rate(currency: str) -> float:
        """Looks a rate up.

        Args:
            currency: Which.
        """
        secret.append(currency)
        return 2.5

    @tool
    def price(amount: float) -> float:
        """Prices.

        Args:
            amount: How much.
        """
        factor: float = rate("eur")
        return amount * factor

    with agent_on(
        daemon, "final_answer(price(2))", tools=[rate, price], executor_kwargs={"tool_placement": {"price": "sandbox"}}
    ) as agent:
        assert (agent.run("go"), secret) == (5.0, ["eur"])


def test_a_new_interpreter_has_the_tools_again(daemon: Daemon) -> None:
    lost = "import os\nos._exit(3)"
    with agent_on(
        daemon,
        lost,
        "final_answer(words('Ab c'))",
        tools=[agent_tools.words],
        additional_authorized_imports=["os"],
        executor_kwargs={"tool_placement": "sandbox"},
    ) as agent:
        assert agent.run("go") == ["ab", "c", "and", "more"]


def test_each_run_begins_with_the_tool_as_it_is_here(daemon: Daemon) -> None:
    steps = ["recalled = [collected(1)]", "recalled.append(list(collected(2)))\nfinal_answer(recalled[-1])"]
    with agent_on(
        daemon, *steps, *steps, tools=[agent_tools.collected], executor_kwargs={"tool_placement": "sandbox"}
    ) as agent:
        here = agent_tools.collected.forward.__wrapped__.__defaults__[0]
        assert [agent.run("go"), agent.run("go", reset=False)] == [[*here, 1, 2]] * 2


def test_an_error_in_a_shipped_tool_shows_its_own_lines(daemon: Daemon) -> None:
    with agent_on(
        daemon,
        "raising('x')",
        Reply("", "final_answer(1)", expects=['raise ValueError(f"not {x}")', "ValueError: not x"]),
        tools=[agent_tools.Raising()],
        executor_kwargs={"tool_placement": "sandbox"},
    ) as agent:
        assert agent.run("go") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Without smolagents


def test_plain_callables_run_in_a_session(client: ExecutorClient) -> None:
    with client.create_session() as session:
        session.register_tools(
            {"adder": Tool(plain._make_adder(5), placement="sandbox"), "on_host": lambda x: (x, "host")}
        )
        assert session.execute("adder(1), adder(2), on_host(3)").output == (6, 8, (3, "host"))


def test_a_class_may_be_a_tool_and_be_used_by_one(client: ExecutorClient) -> None:
    """With a stub in place of the class, `isinstance` would fail."""
    with client.create_session() as session:
        session.register_tools(
            {
                "version": Tool(odd.Version, placement="sandbox"),
                "ordered": Tool(odd.with_ordering, placement="sandbox"),
            }
        )
        assert session.execute("version(2).n, ordered(5)").output == (2, odd.with_ordering(5))


def test_large_data_goes_with_a_tool(client: ExecutorClient) -> None:
    table = bytes(range(256)) * 20_000

    def sizes(start: int) -> tuple[int, int]:
        return len(table), table[start]

    with client.create_session() as session:
        session.register_tools({"sizes": Tool(sizes, placement="sandbox")})
        assert session.execute("sizes(258)").output == (5_120_000, 2)


def test_a_tool_without_source_runs_on_the_same_python(client: ExecutorClient) -> None:
    with client.create_session() as session:
        session.register_tools({"patched": Tool(refused.patched, placement="sandbox")})
        assert session.execute("patched(4)").output == 8


def test_modules_that_the_image_lacks_are_named_by_their_distributions(client: ExecutorClient) -> None:
    with client.create_session() as session:
        session.register_tools({"before": Tool(plain.with_global, placement="sandbox")})
        with pytest.raises(InvalidRequest) as raised:
            session.register_tools({"libraries": Tool(plain.with_libraries, placement="sandbox")})
        assert raised.value.reason == "MODULES_MISSING"
        assert "the image has no module cv2" in raised.value.message
        assert "opencv-python-headless, pillow, scikit-learn: use an image that has them" in raised.value.message
        assert "a session with them as its packages" in raised.value.message
        assert session.execute("before(3)").output == 21


async def _waits() -> None: ...


@pytest.mark.parametrize(
    ("made", "kind", "text"),
    [
        (Tool(print, placement="cellar"), InvalidRequest, "'cellar'; it must be 'host' or 'sandbox'"),  # type: ignore[arg-type]
        (Tool(print, placement="sandbox", is_final_answer=True), ToolNotShippable, "it gives the final answer"),
        (Tool(print, placement="sandbox", parameters=("x",)), InvalidRequest, "with its own parameters"),
        (Tool(refused.use_closure, placement="sandbox"), ToolNotShippable, "lock: a _thread.lock"),
        (Tool(_waits, placement="sandbox"), ToolNotShippable, "coroutine function"),
    ],
)
def test_what_makes_no_sense_is_refused(client: ExecutorClient, made: Tool, kind: type[Exception], text: str) -> None:
    with client.create_session() as session, pytest.raises(kind, match=text):
        session.register_tools({"made": made})
