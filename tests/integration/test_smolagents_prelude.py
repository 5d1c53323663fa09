"""The prelude of an executor's sessions, and evaluations in them from outside."""

from __future__ import annotations

import ast
import contextlib
import io
from collections.abc import Callable

import PIL.Image
import psutil
import pytest

from executor_client import EvaluationError, InvalidRequest, OpaqueValue, Outcome
from executor_client.smolagents import CodeExecutionError, DaemonLost, RemoteExecutor
from executor_client.smolagents.page import URL_CHARS_MAX, read_page
from tests.support.agents import agent_on
from tests.support.daemon import Daemon, running_daemon
from tests.support.polling import eventually

PRELUDE = """
import statistics

def middle(*numbers):
    return statistics.median(numbers) + sqrt(0)

begun = [1]
"""
SELF_DESTRUCTION = "import os\nos._exit(3)"
# A loop in C: Python handles an interrupt only at its end, in some hours.
DEAF = "sum(range(10**13))"


@pytest.fixture
def executor_with(daemon: Daemon) -> Callable[[str], RemoteExecutor]:
    return lambda prelude: RemoteExecutor(["os"], prelude=prelude, **daemon.access)


def end_all_sessions(daemon: Daemon) -> None:
    with daemon.client() as client:
        for info in client.list_sessions():
            client.get_session(info.session_id).close()


# ---------------------------------------------------------------------------------------------------------------------
# The prelude


def test_what_the_prelude_defines_is_there_from_the_first_step_on(
    executor_with: Callable[[str], RemoteExecutor],
) -> None:
    with executor_with(PRELUDE) as executor:
        assert executor("middle(1, 5, 3), begun").output == (3, [1])


def test_the_prelude_runs_again_in_each_new_interpreter_and_the_model_is_notified(
    executor_with: Callable[[str], RemoteExecutor],
) -> None:
    with executor_with(PRELUDE) as executor:
        executor("begun.append(2)\nown = 1")
        with pytest.raises(CodeExecutionError, match="The code that prepares the session has run again") as raised:
            executor(SELF_DESTRUCTION)
        assert raised.value.outcome is Outcome.EXITED
        assert executor("begun, middle(1, 2, 9), 'own' in globals()").output == ([1], 2, False)


def test_the_prelude_runs_in_the_session_that_replaces_a_lost_one(
    daemon: Daemon, executor_with: Callable[[str], RemoteExecutor]
) -> None:
    with executor_with(PRELUDE) as executor:
        executor("1")
        end_all_sessions(daemon)
        with pytest.raises(CodeExecutionError, match="has run again"):
            executor("begun")
        assert executor("begun").output == [1]


def test_the_prelude_is_held_to_the_sessions_imports(executor_with: Callable[[str], RemoteExecutor]) -> None:
    with (
        executor_with("import subprocess") as executor,
        pytest.raises(InvalidRequest, match=r"the prelude ended as import_denied.*Import of subprocess is not allowed"),
    ):
        executor.send_tools({})


@pytest.mark.parametrize(
    ("prelude", "message"),
    [
        ("a = 1\n{}['missing']", r"ended as exception at '\{\}\['missing'\]': KeyError: 'missing'"),
        ("x = = 1", "ended as exception at 'x = = 1': SyntaxError"),
        ("raise SystemExit(2)", "ended as exited"),
    ],
)
def test_a_prelude_that_fails_is_reported_before_the_model_is_asked(daemon: Daemon, prelude: str, message: str) -> None:
    with agent_on(daemon, executor_kwargs={"prelude": prelude}) as agent, pytest.raises(InvalidRequest, match=message):
        agent.run("go")


def test_an_agent_is_saved_with_its_prelude(daemon: Daemon) -> None:
    with agent_on(daemon, executor_kwargs={"prelude": PRELUDE}) as agent:
        assert agent.to_dict()["executor_kwargs"]["prelude"] == PRELUDE


# ---------------------------------------------------------------------------------------------------------------------
# Evaluations from outside


def test_an_evaluation_leaves_the_step_as_it_was(executor: RemoteExecutor) -> None:
    executor.send_tools({"double": lambda x: 2 * x})
    executor("from PIL import Image\nprint('said')\ndisplay(Image.new('L', (5, 6)))\nvalue = (1, None)")
    assert executor.evaluate("(print('hidden'), display(Image.new('L', (7, 7))), value)[2]") == (1, None)
    assert executor.state["_print_outputs"] == "said\n[image 1]\n"
    assert [image.size for image in executor.last_images] == [(5, 6)]
    assert executor("double(4)").logs == ""


def test_an_evaluation_gives_values_by_type(executor: RemoteExecutor) -> None:
    executor("import numpy as np\nfrom PIL import Image")
    array, image = executor.evaluate("(np.arange(3), Image.new('RGB', (4, 2), 'red'))")
    assert array.dtype == "int64" and image.size == (4, 2)
    assert isinstance(executor.evaluate("(x for x in ())"), OpaqueValue)


def test_a_failed_evaluation_is_one_exception_that_names_the_outcome(executor: RemoteExecutor) -> None:
    executor("1")
    with pytest.raises(EvaluationError, match="NameError") as raised:
        executor.evaluate("nobody")
    assert raised.value.outcome is Outcome.EXCEPTION
    with pytest.raises(InvalidRequest, match="not an expression"):
        executor.evaluate("x = 1")


def test_without_a_session_nothing_is_begun(daemon: Daemon, executor: RemoteExecutor) -> None:
    with daemon.client() as client:
        before = len(client.list_sessions())
        with pytest.raises(EvaluationError, match="there is no session"):
            executor.evaluate("1")
        assert len(client.list_sessions()) == before


def test_a_session_that_is_gone_is_reported_by_an_evaluation_and_by_the_next_step(
    daemon: Daemon, executor: RemoteExecutor
) -> None:
    executor("made = 1")
    end_all_sessions(daemon)
    with pytest.raises(EvaluationError, match="the session can't evaluate it"):
        executor.evaluate("made")
    with daemon.client() as client:
        assert list(client.list_sessions()) == []
    with pytest.raises(CodeExecutionError, match="session of the earlier steps is gone"):
        executor("made")


def test_an_evaluation_that_costs_the_interpreter_is_reported_in_the_next_step(executor: RemoteExecutor) -> None:
    executor.send_variables(variables={"given": 1})
    executor("made = 1")
    with pytest.raises(EvaluationError) as raised:
        executor.evaluate(DEAF, timeout_s=0.1)
    assert raised.value.outcome is Outcome.TIMEOUT
    result = executor("given, 'made' in globals()")
    assert result.output == (1, False)
    assert result.logs.startswith("Note: The interpreter had to be restarted: all variables")
    assert executor("given").logs == ""


def test_an_interpreter_that_died_between_two_steps_is_reported_though_an_evaluation_saw_it_first(
    executor: RemoteExecutor,
) -> None:
    def interpreter() -> psutil.Process | None:
        for process in psutil.process_iter(["cmdline"]):
            if process.info["cmdline"] == ["sleep", "98766"]:
                return process.parent()
        return None

    executor("import os\nmade = os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '98766')")
    found = eventually(interpreter)
    assert found is not None
    found.kill()
    with contextlib.suppress(EvaluationError):
        # Refused or not, depending on how fast the death is noticed.
        executor.evaluate("1")
    result = executor("'made' in globals()")
    assert result.output is False and result.logs.startswith("Note: The interpreter had to be restarted")


def test_when_the_daemon_is_gone_an_evaluation_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_daemon(tmp_path_factory.mktemp("k")) as own:
        client = own.client(reconnect_timeout_s=0.2, connect_timeout_s=0.2)
        with client, RemoteExecutor(client=client) as executor:
            executor("1")
            own.kill()
            with pytest.raises(EvaluationError, match="the session can't evaluate it"):
                executor.evaluate("1")
            with pytest.raises(DaemonLost):
                executor("1")


def test_a_tool_that_looks_into_the_session_that_waits_for_it_is_refused(executor: RemoteExecutor) -> None:
    executor.send_tools({"look": lambda: executor.evaluate("1")})
    with pytest.raises(CodeExecutionError, match="EvaluationError"):
        executor("look()")


def test_a_screenshot_without_a_browser_is_an_error_that_says_why(executor: RemoteExecutor) -> None:
    executor("1")
    with pytest.raises(EvaluationError, match="helium"):
        executor.screenshot()


@pytest.mark.parametrize(
    ("forged", "message"),
    [
        ("b'no picture', 'url'", "screenshot is invalid: it is no PNG"),
        ("7", "returned a int instead of a screenshot"),
        ("(b'', 7)", "returned a tuple instead of a screenshot"),
    ],
)
def test_a_forged_page_is_refused(forged: str, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        read_page(ast.literal_eval(forged))


def test_an_address_of_megabytes_is_cut() -> None:
    drawn = io.BytesIO()
    PIL.Image.new("RGB", (2, 2)).save(drawn, format="PNG")
    page = read_page((drawn.getvalue(), "data:text/html,\nlong" + "x" * 3_000_000))
    assert page is not None and page.image.size == (2, 2)
    assert page.url.startswith("data:text/html, longx") and len(page.url) == URL_CHARS_MAX + 3
