"""Features of smolagents' local executor that work here: `state`, `additional_functions`, catching a timeout."""

from __future__ import annotations

import io
from typing import Any

import pytest
import smolagents
from rich.console import Console
from smolagents import AgentLogger, local_python_executor

from examples.scripted import Reply
from executor_client import EvaluationError, ExecutorClient, OpaqueValue
from executor_client.smolagents import CodeExecutionError, CodeTimeoutError, RemoteExecutor
from tests.support.agents import agent_on
from tests.support.daemon import Daemon

# ---------------------------------------------------------------------------------------------------------------------
# state


def test_state_gives_the_variables_of_the_code_as_they_are_now(executor: RemoteExecutor) -> None:
    executor("x = {'a': (1, 2)}\ndef f(): pass\n_hidden = 5")
    assert executor.state["x"] == {"a": (1, 2)}
    assert executor.state["_hidden"] == 5
    assert isinstance(executor.state["f"], OpaqueValue)
    executor("x['b'] = 3\nprint('said')")
    assert executor.state["x"] == {"a": (1, 2), "b": 3}
    assert ("x" in executor.state, "y" in executor.state, "5 x" in executor.state) == (True, False, False)
    assert (
        dict(executor.state.items()) == dict(executor.state) == {"x": executor.state["x"], "_print_outputs": "said\n"}
    )
    assert executor.state.get("y", "none") == "none"
    with pytest.raises(KeyError, match="y"):
        executor.state["y"]


def test_state_can_be_set_and_lasts_as_what_is_sent_does(executor: RemoteExecutor) -> None:
    executor("x = 1")
    executor.state["x"] = 2
    executor.state.update(y=[3])
    assert executor("x, y").output == (2, [3])
    with pytest.raises(CodeExecutionError, match="exit code 1"):
        executor("import os\nos._exit(1)")
    assert executor("x, y").output == (2, [3])
    with pytest.raises(TypeError, match="only code in the session can delete variables"):
        del executor.state["x"]


def test_state_begins_no_session_and_says_when_there_is_none_to_ask(
    daemon: Daemon, client: ExecutorClient, executor: RemoteExecutor
) -> None:
    assert list(executor.state) == ["_print_outputs"]
    assert "x" not in executor.state
    assert client.list_sessions() == []
    executor("x = 1")
    for info in client.list_sessions():
        client.get_session(info.session_id).close()
    with pytest.raises(EvaluationError, match="the session's variables can't be read"):
        executor.state["x"]


# ---------------------------------------------------------------------------------------------------------------------
# additional_functions


def test_additional_functions_run_in_this_process(daemon: Daemon) -> None:
    called: list[int] = []

    def double(n: int) -> int:
        called.append(n)
        return 2 * n

    with agent_on(
        daemon, "final_answer(double(21))", executor_kwargs={"additional_functions": {"double": double}}
    ) as agent:
        assert agent.run("go") == 42
    assert called == [21]
    with RemoteExecutor(additional_functions={"double": double}, **daemon.access) as executor:
        assert executor("double(4)").output == 8  # also without an agent that sends tools
        executor.cleanup()
        assert executor("double(5)").output == 10


def test_an_additional_function_can_be_placed_in_the_sandbox(daemon: Daemon) -> None:
    def where() -> str:
        with open("/proc/self/ns/pid", "rb"):  # noqa: PTH123 - the sandbox's own
            pass
        import os

        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115

    import os

    settings: dict[str, Any] = {"additional_functions": {"where": where}, "tool_placement": {"where": "sandbox"}}
    with RemoteExecutor(**settings, **daemon.access) as executor:
        assert executor("where()").output != os.readlink("/proc/self/ns/pid")  # noqa: PTH115


# ---------------------------------------------------------------------------------------------------------------------
# Timeouts


def test_a_timeout_is_what_smolagents_users_catch(daemon: Daemon) -> None:
    upstream = getattr(local_python_executor, "ExecutionTimeoutError", CodeTimeoutError)
    with RemoteExecutor(limits={"wall_time_s": 0.3}, **daemon.access) as executor:
        with pytest.raises(upstream) as raised:
            executor("while True: pass")
        assert isinstance(raised.value, CodeExecutionError)
        assert isinstance(raised.value, smolagents.local_python_executor.InterpreterError)
        assert "exceeded the maximum execution time" in str(raised.value)
        with pytest.raises(CodeExecutionError) as other:
            executor("1 / 0")
        assert not isinstance(other.value, upstream)


# ---------------------------------------------------------------------------------------------------------------------
# The console


def console_of(daemon: Daemon, *script: str | Reply, **options: Any) -> tuple[str, Any]:
    """Returns the console's text of a run, and the agent's steps."""
    shown = io.StringIO()
    logger = AgentLogger(console=Console(file=shown, width=200))
    with agent_on(daemon, *script, logger=logger, verbosity_level=1, **options) as agent:
        agent.run("go")
    return shown.getvalue(), agent.memory.steps


def test_prints_are_shown_once_and_sent_to_the_model_whole(daemon: Daemon) -> None:
    script = [
        "print('al' + 'pha')",
        "print('be' + 'ta')\n1 / 0",
        "print('gam' + 'ma')\nopen('f', 'w').close()\nfinal_answer(3)",
    ]
    shown, steps = console_of(daemon, *script)
    assert [shown.count(word) for word in ("| alpha", "alpha", "beta", "gamma")] == [1, 1, 1, 1]
    assert shown.count("(shown above, as they came)") == 3
    assert "files: f, 0 bytes" in shown
    assert [step.observations.splitlines()[1] for step in steps[1:]] == ["alpha", "beta", "gamma"]
    assert steps[3].observations.splitlines()[2] == "files: f, 0 bytes"


def test_prints_that_were_not_shown_whole_are_shown_at_the_end(daemon: Daemon) -> None:
    shown, _ = console_of(daemon, "print('x' * 3_000 + 'e' + 'nd')\nfinal_answer(1)")
    assert "(shown above" not in shown
    assert shown.replace("\n", "").count("xend") == 1
