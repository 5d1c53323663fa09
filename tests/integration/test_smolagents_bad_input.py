"""Agents whose tools, code, callbacks or model misbehave: the run goes on, or ends as the test's name says.

Each test uses a real daemon, and checks that the session still works, or that none is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from smolagents import ActionStep, CodeAgent, LogLevel, tool

from examples.scripted import Reply
from executor_client import ExecutionEvent, InvalidRequest, Outcome, ReentrantExecution, ToolCallEvent
from executor_client.smolagents import RemoteExecutor
from tests.support.agents import agent_on
from tests.support.daemon import Daemon
from tests.support.memory import growth_of
from tests.support.polling import eventually

GIB = 1 << 30
MIB = 1 << 20
# Bytes of memory that refusing a value of 1 GiB may cost the client and the daemon.
REFUSAL_BYTES = 64 * MIB


@tool
def echo(value: Any) -> Any:
    """Gives back what it is given.

    Args:
        value: anything
    """
    return value


@pytest.fixture
def release() -> Any:
    """An event that ends hanging tools; it is set at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def observed(agent: CodeAgent) -> list[str]:
    """Returns the observation of each step."""
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    return ["\n".join((step.observations or "", step.error.message if step.error else "")) for step in steps]


def sessions(daemon: Daemon) -> int:
    with daemon.client() as client:
        return len(client.list_sessions())


# ---------------------------------------------------------------------------------------------------------------------
# Tools


class OddError(Exception):
    """An error without a text, of a class that the sandbox does not know."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OddError(), ".OddError: (the error has no text)"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"), "due to: UnicodeDecodeError: 'utf-8' codec"),
        (ValueError("\ud800" * 20_000), "due to: ValueError: \\ud800"),
    ],
)
def test_a_tools_exception_is_reported_and_the_run_goes_on(daemon: Daemon, error: Exception, expected: str) -> None:
    @tool
    def fail() -> None:
        """Fails."""
        raise error

    with agent_on(daemon, "kept = 1\nfail()", Reply("", "final_answer(kept)", [expected]), tools=[fail]) as agent:
        assert agent.run("go") == 1
    assert sessions(daemon) == 0


@pytest.mark.parametrize("stop", [SystemExit(3), KeyboardInterrupt()])
def test_a_tool_that_wants_the_process_to_end_ends_the_run(daemon: Daemon, stop: BaseException) -> None:
    @tool
    def leave() -> None:
        """Leaves."""
        raise stop

    agent = agent_on(daemon, "kept = 1\ntry:\n    leave()\nexcept BaseException:\n    pass", tools=[leave])
    with agent, pytest.raises(type(stop)) as raised:
        agent.run("go")
        pytest.fail("the run went on")
    assert raised.value is stop
    assert sessions(daemon) == 0


def test_a_result_that_cannot_be_sent_is_an_error_of_the_call(daemon: Daemon) -> None:
    @tool
    def lock() -> Any:
        """A lock."""
        return [threading.Lock()]

    expected = (
        "TypeError: the tool's result cannot be sent to the sandbox: a lock cannot be sent: TypeError: cannot pickle"
    )
    with agent_on(daemon, "lock()", Reply("", "final_answer(2)", [expected]), tools=[lock]) as agent:
        assert agent.run("go") == 2


@tool
def give_much() -> bytes:
    """Gives a lot."""
    return bytes(GIB)


_SEND_A_PART = "send a part of it, or write it to a file"


@pytest.mark.parametrize(
    ("code", "expected", "advice"),
    [
        ("give_much()", "TypeError: the tool's result cannot be sent to the sandbox: the value takes ", _SEND_A_PART),
        ("echo(bytes(1 << 30))", "EncodeError: the value takes ", _SEND_A_PART),
        ("bytes(1 << 30)", "<bytes of length 1073741824: larger than ", "look at a part of it"),
        ("final_answer(bytes(1 << 30))", "EncodeError: the value takes ", _SEND_A_PART),
    ],
)
def test_a_gigabyte_is_refused_in_little_memory(daemon: Daemon, code: str, expected: str, advice: str) -> None:
    script = ("kept = echo(1)", code, Reply("", "final_answer(echo(kept))", [expected, advice]))
    with agent_on(daemon, *script, tools=[echo, give_much]) as agent:
        agent.python_executor("0")  # modules that are loaded at first use must not be counted
        grown = growth_of(os.getpid(), daemon.process.pid)
        assert agent.run("go") == 1
    assert max(grown()) < REFUSAL_BYTES


def test_a_variable_of_a_gigabyte_stops_the_run_before_the_model_is_asked(daemon: Daemon) -> None:
    with agent_on(daemon, "final_answer(1)") as agent:
        agent.state["much"] = bytes(GIB)
        with pytest.raises(InvalidRequest, match=r"the variable 'much' cannot be sent: .* or write it to a file"):
            agent.run("go")
        del agent.state["much"]
        assert agent.run("go") == 1, "it was the first reply of the script"


def test_a_tool_that_uses_its_own_executor_is_refused_and_the_run_goes_on(daemon: Daemon) -> None:
    errors: list[ReentrantExecution] = []

    @tool
    def again(what: str) -> Any:
        """Uses the executor that waits for it.

        Args:
            what: in which way
        """
        executor = agent.python_executor
        uses: dict[str, Callable[[], Any]] = {
            "execute": lambda: executor("1"),
            "variables": lambda: executor.send_variables({"kept": 2}),
            "tools": lambda: executor.send_tools({}),
            "evaluate": lambda: executor.evaluate("1"),
        }
        try:
            return uses[what]()
        except ReentrantExecution as error:
            errors.append(error)
            raise

    code = """
kept, said = 1, []
for what in ("execute", "variables", "tools", "evaluate"):
    try:
        again(what)
    except Exception as error:
        said.append("give the tool a session of its own" in str(error))
print(said)
"""
    reply = Reply("", "again('execute')", ["[True, True, True, True]"])
    last = Reply("", "final_answer(kept)", ["ReentrantExecution: execute: a host tool cannot use the session"])
    with agent_on(daemon, code, reply, last, tools=[again]) as agent:
        assert agent.run("go") == 1
    assert len(errors) == 4  # an evaluation fails by its own error, which says the same


def test_calls_that_wait_for_a_thread_end_with_their_execution(daemon: Daemon, release: threading.Event) -> None:
    made: list[str] = []

    def work(name: str) -> None:
        made.append(name)
        if name != "later":
            release.wait()

    code = """
import threading
threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "other")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    with daemon.client(max_concurrent_tools=1) as client, client.create_session(None, ["threading"]) as session:
        called: list[ToolCallEvent] = []

        def cancel_at_the_second(event: ExecutionEvent) -> None:
            if isinstance(event, ToolCallEvent):
                called.append(event)
                if len(called) == 2:
                    session.cancel()

        session.register_tools({"work": work})
        assert session.execute(code, on_event=cancel_at_the_second).outcome is Outcome.CANCELLED
        release.set()
        assert session.execute("work('later')").succeeded
    assert len(made) == 2 and made[1] == "later"


def test_fifty_threads_call_a_tool_at_once_and_each_gets_its_answer(daemon: Daemon) -> None:
    threads_max = 8  # the default of max_concurrent_tools
    running, most = 0, 0
    changed = threading.Condition()

    @tool
    def square(number: int) -> int:
        """Squares, as soon as as many run as may.

        Args:
            number: which
        """
        nonlocal running, most
        with changed:
            running += 1
            most = max(most, running)
            changed.notify_all()
            assert changed.wait_for(lambda: most >= threads_max, timeout=30)
            running -= 1
        return number * number

    code = """
import threading
answers, start = {}, threading.Barrier(50)
def call(number):
    start.wait()
    answers[number] = square(number)
threads = [threading.Thread(target=call, args=(number,)) for number in range(50)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
final_answer(answers)
"""
    with agent_on(daemon, code, tools=[square], additional_authorized_imports=["threading"]) as agent:
        assert agent.run("go") == {number: number * number for number in range(50)}
    assert most == threads_max


def test_a_tool_that_hangs_is_bounded_by_the_time_of_its_session(daemon: Daemon, release: threading.Event) -> None:
    """The wall clock stops while a tool runs, since a tool may take long for good reasons."""

    @tool
    def hang() -> None:
        """Hangs."""
        release.wait()

    limits = {"limits": {"wall_time_s": 0.2, "session_time_s": 2.0}}
    reply = Reply("", "final_answer(echo(2))", ["lost and must be defined again"])
    with agent_on(daemon, "hang()", reply, tools=[hang, echo], executor_kwargs=limits) as agent:
        assert agent.run("go") == 2


def test_a_cancelled_execution_ends_though_its_tool_hangs_and_the_late_answer_does_no_harm(
    daemon: Daemon, release: threading.Event
) -> None:
    returned = threading.Event()

    def hang() -> str:
        threading.Thread(target=session.cancel).start()
        release.wait()
        returned.set()
        return "late"

    with daemon.client() as client, client.create_session() as session:
        session.register_tools({"hang": hang})
        assert session.execute("kept = 1\nhang()").outcome is Outcome.CANCELLED
        release.set()
        assert returned.wait(10)
        session.register_tools({"now": lambda: "now"})
        assert session.execute("(kept, now())").output == (1, "now")


def test_a_thread_that_the_code_left_behind_can_call_no_tool_after_its_step(daemon: Daemon) -> None:
    code = """
import threading
called, said = threading.Event(), []
def call():
    try:
        while True:
            echo(1)
            called.set()
    except RuntimeError as error:
        said.append(str(error))
thread = threading.Thread(target=call)
thread.start()
called.wait()
"""
    ends = [
        "no execution is running that could call a tool",
        "the execution ended before the tool had answered",
        "the session has no such tool any more",  # it calls again in the next step
    ]
    with RemoteExecutor(["threading"], **daemon.access) as executor:
        executor.send_tools({"echo": echo})
        executor(code)
        executor.send_tools({})  # an answer that comes now is too late
        (said,) = executor("thread.join()\nsaid").output
    assert said in ends


# ---------------------------------------------------------------------------------------------------------------------
# Code


@pytest.mark.parametrize(
    "harm",
    [
        "echo = 5",
        "import builtins\ndel builtins.echo",
        "import builtins\nbuiltins.echo = lambda value: 5",
    ],
)
def test_a_tool_that_the_code_took_away_is_back_in_the_next_run(daemon: Daemon, harm: str) -> None:
    """Until then it is missing, or replaced by the code: no call reaches the real tool by mistake."""
    called: list[Any] = []

    def spy(value: Any) -> Any:
        called.append(value)
        return value

    script = (
        harm,
        "try:\n    r = echo(1)\nexcept (NameError, TypeError):\n    r = 5\nfinal_answer(r)",
        "final_answer(echo(2))",
    )
    with agent_on(daemon, *script, tools=[echo], additional_authorized_imports=["builtins"]) as agent:
        agent.tools["echo"] = spy_on(spy)
        assert (agent.run("go"), called) == (5, [])
        assert (agent.run("go"), called) == (2, [2])


def spy_on(function: Callable[[Any], Any]) -> Any:
    """A tool that calls it."""

    @tool
    def echo(value: Any) -> Any:
        """Gives back what it is given.

        Args:
            value: anything
        """
        return function(value)

    return echo


def test_a_final_answer_of_the_codes_own_ends_nothing(daemon: Daemon) -> None:
    script = ("def final_answer(answer):\n    return answer\nfinal_answer(1)", "del final_answer\nfinal_answer(2)")
    with agent_on(daemon, *script) as agent:
        assert agent.run("go") == 2
    assert len(observed(agent)) == 2


FORGERIES = {
    "an exception of smolagents' name": "class FinalAnswerException(BaseException): pass\n"
    "raise FinalAnswerException('safe:1')",
    "the exception of the sandbox itself": "import sys\n"
    "raise next(vars(m)['FinalAnswerGiven'] for m in list(sys.modules.values()) if 'FinalAnswerGiven' in vars(m))",
    "prints that look like messages": """print('{"t":"reply","call":"c1","ok":true,"final":true}')
print('\\x00\\x00\\x00\\x10{"t":"done","final":"c1"}', flush=True)""",
    "messages on whatever descriptors there are": """import os, socket
for fd in range(3, 64):
    for message in (b'{"t":"reply","call":"c1","ok":true,"final":true}',
                    (36).to_bytes(4, "big") + b'{"t":"reply","call":"c1","ok": true}'):
        try:
            os.write(fd, message)
        except OSError:
            pass
echo(1)""",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_answer_is_none(daemon: Daemon, forgery: str) -> None:
    called: list[Any] = []
    script = (FORGERIES[forgery], "final_answer(echo(2))")
    imports = ["os", "sys", "socket"]
    with agent_on(daemon, *script, tools=[spy_on(called.append)], additional_authorized_imports=imports) as agent:
        assert agent.run("go") is None  # the return value of the spy
    assert called[-1] == 2 and len(observed(agent)) == 2


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    final_answer(1)\nexcept BaseException:\n    pass\nfinal_answer(2)",
        "import threading\nt = threading.Thread(target=final_answer, args=(1,))\nt.start()\nt.join()\n1 / 0",
    ],
    ids=["twice", "from a thread, and then a failure"],
)
def test_the_first_final_answer_counts_wherever_it_was_given(daemon: Daemon, code: str) -> None:
    with agent_on(daemon, code, additional_authorized_imports=["threading"]) as agent:
        assert agent.run("go") == 1
    assert "Traceback" not in observed(agent)[0]


def test_of_final_answers_from_many_threads_one_counts(daemon: Daemon) -> None:
    code = """
import threading
threads = [threading.Thread(target=final_answer, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    script = (code, Reply("", "final_answer('next')"))
    with agent_on(daemon, *script, additional_authorized_imports=["threading"]) as agent:
        assert agent.run("go") in range(8)
        assert agent.run("go", reset=False) == "next"


# ---------------------------------------------------------------------------------------------------------------------
# Clients, callbacks, models


@pytest.fixture
def agent_in_its_tool(daemon: Daemon) -> Any:
    """A separate process whose agent's code waits for a tool that hangs."""
    command = [sys.executable, "-m", "tests.integration.hanging_agent", daemon.address, daemon.token]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and "in the tool" in process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_client_whose_tool_hangs_can_be_interrupted(daemon: Daemon, agent_in_its_tool: subprocess.Popen[str]) -> None:
    agent_in_its_tool.send_signal(signal.SIGINT)
    _, errors = agent_in_its_tool.communicate(timeout=20)
    assert agent_in_its_tool.returncode == -signal.SIGINT, errors
    assert eventually(lambda: sessions(daemon) == 0)


def test_a_callback_that_raises_ends_the_run_and_not_the_executor(daemon: Daemon) -> None:
    def fail(step: ActionStep) -> None:
        raise LookupError("callback")

    with agent_on(daemon, "kept = 1", step_callbacks=[fail]) as agent:
        with pytest.raises(LookupError, match="callback"):
            agent.run("go")
        assert agent.python_executor("kept").output == 1
    assert sessions(daemon) == 0


def test_a_logger_that_raises_cancels_the_execution_and_the_run_goes_on(daemon: Daemon) -> None:
    class Broken:
        """An agent's logger that raises."""

        level = LogLevel.OFF

        def log(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("the terminal is gone")

    executor = RemoteExecutor(["time"], Broken(), **daemon.access)
    with executor:
        executor("kept = 1")
        with pytest.raises(OSError, match="the terminal is gone"):
            executor("print('x')\nimport time\nwhile True:\n    time.sleep(0.01)")
        assert executor("kept").output == 1


def test_replies_without_code_or_with_broken_code_cost_a_step_each(daemon: Daemon) -> None:
    script = (
        Reply("I do not know what to do."),
        Reply("Let me say it in words: kept = 1", expects=["regex pattern"]),
        Reply("kept = 1  # without any fences", expects=["regex pattern"]),
        Reply("", "kept = = 1", expects=["Last output from code snippet:\n1"]),
        Reply("", "print('kept", expects=["Code parsing failed on line 1 due to: SyntaxError: invalid syntax"]),
        Reply("", "final_answer(kept)", expects=["SyntaxError: unterminated string literal"]),
    )
    with agent_on(daemon, *script) as agent:
        assert agent.run("go") == 1
        assert sessions(daemon) == 1
    assert len(observed(agent)) == len(script)
    assert sessions(daemon) == 0
