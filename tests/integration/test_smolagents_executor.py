"""`RemoteExecutor` on a real daemon: values, prints, images, refusals, limits, loss."""

from __future__ import annotations

import io
import os
import secrets
import threading
from typing import Any

import numpy as np
import pandas as pd
import PIL.Image
import psutil
import pytest
from rich.console import Console
from smolagents import AgentLogger
from smolagents.local_python_executor import InterpreterError
from smolagents.utils import AgentError

from examples.scripted import Reply
from executor_client import EvaluationError, InvalidRequest, Outcome
from executor_client.smolagents import CodeExecutionError, DaemonLost, RemoteExecutor
from tests.support.agents import agent_on
from tests.support.daemon import Daemon
from tests.support.fork_server import server_pid
from tests.support.polling import eventually
from tests.support.reaper import children


class UnpicklableThere:
    """An object whose pickle calls a function that raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, ("no number",))


# ---------------------------------------------------------------------------------------------------------------------
# Values, logs and images


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("x = 3", 3),
        ("if True:\n    'inner'", "inner"),
        ("import math", None),
        ("sqrt(16), ceil(1.2), floor(1.8), sin(0), atan2(0, 1), degrees(0)", (4.0, 2, 1, 0.0, 0.0, 0.0)),
        ("{'a': {1, 2}, 'b': (1, None)}", {"a": {1, 2}, "b": (1, None)}),
    ],
)
def test_a_step_has_the_value_that_the_local_executor_gives(executor: RemoteExecutor, code: str, value: Any) -> None:
    assert executor(code).output == value


def test_prints_survive_the_failure_and_do_not_show_in_the_next_step(executor: RemoteExecutor) -> None:
    with pytest.raises(CodeExecutionError, match="due to: ZeroDivisionError: division by zero") as raised:
        executor("print('before')\n1 / 0")
    assert isinstance(raised.value, AgentError) and isinstance(raised.value, InterpreterError)
    assert str(raised.value).startswith("Code execution failed at line '1 / 0' due to: ZeroDivisionError:")
    assert "line 2" in str(raised.value) and "\x1b" not in str(raised.value)
    assert executor.state["_print_outputs"] == "before\n"
    with pytest.raises(CodeExecutionError, match="Code parsing failed on line 1 due to: SyntaxError"):
        executor("x = = 1")
    assert executor.state["_print_outputs"] == ""


def test_long_logs_keep_head_and_tail(daemon: Daemon) -> None:
    with RemoteExecutor(max_print_outputs_length=100, **daemon.access) as executor:
        logs = executor("print('head' + 'x' * 1000 + 'tail')").logs
    assert logs.startswith("head") and logs.endswith("tail\n")
    assert "_This content has been truncated to stay below 100 characters_" in logs


def test_logs_show_the_last_state_of_a_progress_bar(daemon: Daemon) -> None:
    code = "import sys\nfor n in range(1000): print(f'\\r{n}%', end='', flush=True, file=sys.stderr)\nprint('\\rdone', file=sys.stderr)"
    with RemoteExecutor(additional_authorized_imports=["sys"], **daemon.access) as executor:
        assert executor(code).logs == "done\n"


def test_prints_reach_the_agents_logger_while_the_code_runs(daemon: Daemon) -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=100)
    seen = threading.Event()

    class Logger(AgentLogger):
        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)
            if "[red]first" in shown.getvalue():
                seen.set()

    def probe() -> bool:
        return seen.wait(30)

    with RemoteExecutor(logger=Logger(console=console), **daemon.access) as executor:
        executor.send_tools({"probe": probe})
        assert executor("print('[red]first')\nprobe()").output is True


def test_state_variables_of_rich_types_arrive_and_come_back(executor: RemoteExecutor) -> None:
    table = pd.DataFrame({"when": pd.date_range("2025-01-01", periods=3), "n": [1, 2, 3]})
    picture = PIL.Image.new("RGB", (4, 3), (1, 2, 3))
    executor.send_variables(variables={"table": table, "picture": picture, "_print_outputs": "not a variable"})
    got = executor("(table.assign(n=table['n'] * 2), picture.rotate(90, expand=True), table['n'].to_numpy())").output
    pd.testing.assert_frame_equal(got[0], table.assign(n=table["n"] * 2))
    assert isinstance(got[1], PIL.Image.Image) and got[1].size == (3, 4) and got[1].getpixel((0, 0)) == (1, 2, 3)
    assert isinstance(got[2], np.ndarray)
    with pytest.raises(CodeExecutionError, match="NameError"):
        executor("_print_outputs")


def test_a_variable_that_code_could_not_name_is_refused(executor: RemoteExecutor) -> None:
    with pytest.raises(ValueError, match="'my file'"):
        executor.send_variables(variables={"my file": 1})


def test_a_variable_that_the_sandbox_refuses_does_no_harm_later(executor: RemoteExecutor) -> None:
    executor.send_variables(variables={"good": 1})
    with pytest.raises(InvalidRequest, match="bad"):
        executor.send_variables(variables={"bad": UnpicklableThere()})
    with pytest.raises(CodeExecutionError, match=r"variables given with the task \(good\)"):
        executor("import os\nos._exit(1)")
    assert executor("good").output == 1


def test_displayed_images_are_kept_until_the_next_step(executor: RemoteExecutor) -> None:
    executor("from PIL import Image\ndisplay(Image.new('L', (5, 6)))")
    assert [image.size for image in executor.last_images] == [(5, 6)]
    executor("1")
    assert executor.last_images == []


# ---------------------------------------------------------------------------------------------------------------------
# Refusals, limits, loss


def test_a_refused_import_can_be_corrected(daemon: Daemon) -> None:
    refused = "Import of os is not allowed. Authorized imports are: ["
    with agent_on(daemon, "import os", Reply("", "import math\nfinal_answer(math.pi)", [refused])) as agent:
        assert agent.run("go") == pytest.approx(3.14159, abs=1e-5)


def test_an_endless_loop_is_stopped_and_the_variables_are_kept(daemon: Daemon) -> None:
    loop = "kept = 1\nprint('in')\nimport time\nwhile True:\n    time.sleep(0.01)"
    expected = [
        "exceeded the maximum execution time: the execution took longer than wall_time_s = 0.5",
        "defined before the failure are kept",
        "in",
    ]
    limits = {"limits": {"wall_time_s": 0.5}}
    with agent_on(daemon, loop, Reply("", "final_answer(kept)", expected), executor_kwargs=limits) as agent:
        assert agent.run("go") == 1


def test_after_a_reset_tools_and_task_variables_are_back_and_the_model_is_notified(executor: RemoteExecutor) -> None:
    executor.send_variables(variables={"given": [1, 2]})
    executor.send_tools({"double": lambda x: 2 * x})
    executor("made = 1\ngiven.append(3)")
    with pytest.raises(CodeExecutionError, match=r"are lost and must be defined again.*\(given\)") as raised:
        executor("import os\nprint('last words')\nos._exit(3)")
    assert raised.value.outcome is Outcome.EXITED
    assert executor.state["_print_outputs"] == "last words\n"
    assert executor("double(sum(given)), sqrt(4), 'made' in globals()").output == (6, 2.0, False)


def test_a_session_that_ended_between_two_runs_is_replaced_and_the_model_is_notified(
    daemon: Daemon, executor: RemoteExecutor
) -> None:
    executor.send_variables(variables={"given": 1})
    executor("made = 2")
    with daemon.client() as client:
        for info in client.list_sessions():
            client.get_session(info.session_id).close()
    with pytest.raises(CodeExecutionError, match="session of the earlier steps is gone"):
        executor("made")
    assert executor("given").output == 1
    with daemon.client() as client:
        for info in client.list_sessions():
            client.get_session(info.session_id).close()
    executor.send_tools({})
    assert "session of the earlier steps is gone" in executor("print('x')").logs


def test_a_session_that_ended_after_an_evaluation_ended_its_interpreter_is_reported_as_gone(
    daemon: Daemon, executor: RemoteExecutor
) -> None:
    """Its files are gone as well, and the notice of a restarted interpreter would not say so."""
    executor.send_variables(variables={"given": 1})
    executor("import os")
    with pytest.raises(EvaluationError):
        executor.evaluate("os._exit(3)")
    with daemon.client() as client:
        for info in client.list_sessions():
            client.get_session(info.session_id).close()
    with pytest.raises(CodeExecutionError, match="session of the earlier steps is gone"):
        executor("given")
    assert executor("given").output == 1


def test_a_managed_agent_that_lost_its_daemon_stops_the_run_that_called_it(executor: RemoteExecutor) -> None:
    def lose() -> None:
        raise DaemonLost("the other daemon is gone")

    executor.send_tools({"lose": lose})
    with pytest.raises(DaemonLost, match="the other daemon"):
        executor("try:\n    lose()\nexcept BaseException:\n    pass")
    assert executor("1").output == 1


def test_a_sandbox_that_was_killed_is_replaced_and_the_model_is_notified(
    daemon: Daemon, executor: RemoteExecutor
) -> None:
    marker = ["sleep", str(secrets.randbelow(10**9) + 10**9)]  # another run's must not be found

    def above_marker() -> list[psutil.Process]:
        """Returns the sandbox's processes above the one that the code started, the oldest first.

        Their parent creates sandboxes: the daemon, the double of its cloud, which is our child, a node of its fleet,
        which is a child of the tests' fork server, or the Engine's shim.
        """
        creators = {daemon.process.pid, *children(os.getpid())}
        if (server := server_pid()) is not None:
            creators = {*creators, *children(server)} - {server}
        for process in psutil.process_iter(["cmdline"]):
            if process.info["cmdline"] == marker:
                above = process.parents()
                ours = [n for n, each in enumerate(above) if each.pid in creators or "containerd-shim" in each.name()]
                if ours:
                    return above[: ours[0]][::-1]
        return []

    def kill_sandbox() -> None:
        for process in eventually(above_marker):
            process.kill()

    executor.send_variables(variables={"given": 1})
    executor.send_tools({"kill_sandbox": kill_sandbox, "double": lambda x: 2 * x})
    with pytest.raises(CodeExecutionError, match="The sandbox had to be replaced") as raised:
        executor(f"import os\nmade = os.spawnlp(os.P_NOWAIT, 'sleep', *{marker})\nkill_sandbox()")
    assert raised.value.outcome is Outcome.LOST
    assert executor("double(given), 'made' in globals()").output == (2, False)
