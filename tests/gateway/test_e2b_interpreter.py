"""What E2B's SDK expects of the code interpreter, with the real SDK; and requests that no SDK sends."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import smolagents
from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import AsyncSandbox, Sandbox
from smolagents import LogLevel, tool

from tests.support.agents import mend_final_answer, scripted
from tests.support.daemon import Daemon, daemon_of
from tests.support.gateway import Gateway, running_gateway

PNG = b"\x89PNG\r\n\x1a\n"
WALL_TIME_S = 6  # more than the silence before a keepalive
POLICY = f"""
default = "users"
[profiles.users]
imports.denied = ["socket"]
limits.default.wall_time_s = {WALL_TIME_S}
[profiles.strict]
language.preset = "strict"
[tenants.other]
profile = "strict"
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with daemon_of("", "--backend", "local", policy=POLICY) as running:
        yield running


@pytest.fixture(scope="module")
def shared(e2b: Gateway) -> Iterator[Sandbox]:
    """A sandbox for tests that leave it as they found it, but for variables."""
    with Sandbox.create(envs={"OF_SANDBOX": "yes"}) as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(e2b: Gateway) -> Iterator[Sandbox]:
    with Sandbox.create() as sandbox:
        yield sandbox


# ---------------------------------------------------------------------------------------------------------------------
# Executions


def test_steps_share_variables_and_are_counted(sandbox: Sandbox) -> None:
    assert sandbox.run_code("x = 1").results == []
    run = sandbox.run_code("x += 1; x")
    assert (run.text, run.execution_count, run.error) == ("2", 2, None)
    assert run.results[0].is_main_result and run.results[0].formats() == ["text"]
    assert Sandbox.connect(sandbox.sandbox_id).run_code("x").text == "2"


def test_output_results_and_errors_arrive_by_callbacks_with_their_times(shared: Sandbox) -> None:
    seen: list[Any] = []
    code = "import sys\nprint('a')\nprint('b', file=sys.stderr)\ndisplay({'text/html': '<b>'}, raw=True)\n1 / 0"
    run = shared.run_code(code, on_stdout=seen.append, on_stderr=seen.append, on_result=seen.append)
    printed = [(each.line, each.error) for each in seen if hasattr(each, "line")]
    assert printed[0][0].startswith("a\n") and ("b\n", True) in printed
    assert all(each.timestamp.startswith("20") for each in seen if hasattr(each, "line"))
    assert [each.html for each in seen if hasattr(each, "html")] == ["<b>"]
    assert run.error is not None and (run.error.name, run.error.value) == ("ZeroDivisionError", "division by zero")
    assert "line 5" in run.error.traceback and "1 / 0" in run.error.traceback


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("'it\\'s'", "it's"),
        ("'\\u2028\\x85'", "\\u2028\\x85"),
        ("\n    y = 3\n    y", "3"),
        ("import asyncio\nawait asyncio.sleep(0, 4)", "4"),
        ("None", None),
    ],
)
def test_the_value_of_the_last_expression_is_text(shared: Sandbox, code: str, text: str | None) -> None:
    run = shared.run_code(code)
    assert (run.text, run.error) == (text, None)
    assert shared.run_code(f"print({text!r})").logs.stdout == [f"{text}\n"]  # lines are split at no other character


def test_results_have_the_forms_of_notebooks(shared: Sandbox) -> None:
    for slow in ("import pandas as pd", "import matplotlib.pyplot as plt"):  # together more than WALL_TIME_S under load
        assert shared.run_code(slow).error is None
    code = """
        from PIL import Image
        plt.plot([1, 2])
        plt.show()
        Image.new("RGB", (3, 2)).show()
        display({"text/latex": "x", "application/json": {"a": [1]}, "x/y": "z"}, raw=True)
        pd.DataFrame({"n": [1, 2], "at": [pd.Timestamp(0), None]})
    """
    run = shared.run_code(code)
    assert run.error is None, run.error
    figure, image, data, table = run.results
    for each in (figure, image):
        assert base64.b64decode(each.png).startswith(PNG) and each.text and not each.is_main_result
    assert (data.latex, data.json, data.extra) == ("x", {"a": [1]}, {"x/y": "z"})
    assert table.data == {"n": [1, 2], "at": ["1970-01-01T00:00:00", "NaT"]} and "<table" in table.html
    assert table.text.startswith("   n") and table.is_main_result
    assert shared.run_code("[1, {'a': None}]").results[0].json == [1, {"a": None}]
    assert base64.b64decode(shared.run_code("Image.new('L', (3, 2))").results[0].png).startswith(PNG)


@pytest.mark.parametrize(
    ("code", "name", "value"),
    [
        ("def f(:", "SyntaxError", "invalid syntax"),
        ("import socket", "ImportDenied", "socket"),
        ("import os; os._exit(3)", "SystemExit", "The interpreter was restarted; its variables are gone"),
        ("raise ValueError('x' * 1_000_000)", "ValueError", "x" * 1_000_000),
    ],
)
def test_an_execution_that_does_not_succeed_is_an_error_in_words(
    shared: Sandbox, code: str, name: str, value: str
) -> None:
    run = shared.run_code(code)
    assert run.error is not None and run.error.name == name and value in run.error.value, run.error
    assert run.error.traceback
    assert shared.run_code("1").text == "1"


def test_an_error_whose_whole_message_takes_long_is_not_lost(gateway: Gateway, shared: Sandbox) -> None:
    """The whole message is asked for after the step, and a keepalive is sent meanwhile."""
    code = """
        import time
        class Long(Exception):
            asked = 0
            def __str__(self):
                Long.asked += 1
                time.sleep(60 if Long.asked > 2 else 0)  # the step itself asks twice
                return "x" * 1_000_000
        raise Long
    """
    answer = execute(gateway, shared, {"code": code})
    types = [json.loads(line)["type"] for line in answer.text.splitlines()]
    assert types == ["number_of_executions", "keepalive", "error", "end_of_execution"]


def test_silence_is_kept_alive_and_a_time_limit_ends_the_step_in_order(gateway: Gateway, shared: Sandbox) -> None:
    answer = execute(gateway, shared, {"code": "import time\ntime.sleep(60)"})
    types = [json.loads(line)["type"] for line in answer.text.splitlines()]
    assert types == ["number_of_executions", "keepalive", "error", "end_of_execution"]
    assert f"{WALL_TIME_S}" in json.loads(answer.text.splitlines()[2])["value"]


def test_a_client_that_leaves_cancels_its_step_and_its_environment(shared: Sandbox) -> None:
    code = "import os, time\nkept = os.environ['A']\ntime.sleep(60)"
    with pytest.raises(TimeoutException):
        shared.run_code(code, timeout=1, envs={"A": "secret", "OF_SANDBOX": "no"})
    run = shared.run_code("(kept, os.environ.get('A'), os.environ['OF_SANDBOX'])", timeout=30)
    assert run.text == "('secret', None, 'yes')"


def test_variables_of_the_environment_are_those_of_the_call(shared: Sandbox) -> None:
    code = "import os; [os.environ.get(name) for name in ('OF_SANDBOX', 'A')]"
    assert shared.run_code(code, envs={"A": "1"}).results[0].json == ["yes", "1"]
    assert shared.run_code(code).results[0].json == ["yes", None]
    assert shared.run_code("1 / 0", envs={"A": "1"}).error is not None
    assert shared.run_code(code).results[0].json == ["yes", None]


def test_the_end_of_the_sandbox_breaks_the_stream(sandbox: Sandbox) -> None:
    started = threading.Event()
    killing = threading.Thread(target=lambda: (started.wait(30), sandbox.kill()))
    killing.start()
    with pytest.raises(TimeoutException, match="killed while the request was in progress"):
        sandbox.run_code("import time\nprint(1)\ntime.sleep(60)", on_stdout=lambda _: started.set())
    killing.join(30)
    with pytest.raises(TimeoutException):
        sandbox.run_code("1")


async def test_steps_of_one_sandbox_run_in_turns_from_the_first_on(e2b: Gateway) -> None:
    async with await AsyncSandbox.create() as sandbox:
        runs = await asyncio.gather(*(sandbox.run_code(f"x = {number}; x") for number in range(8)))
        assert [run.text for run in runs] == [str(number) for number in range(8)]
        assert sorted(run.execution_count or 0 for run in runs) == list(range(1, 9))


async def test_a_step_does_not_hold_up_other_sandboxes(e2b: Gateway) -> None:
    async with await AsyncSandbox.create() as one, await AsyncSandbox.create() as other:
        with pytest.raises(TimeoutException):
            await one.run_code("import time\ntime.sleep(60)", timeout=1)
        assert (await other.run_code("1 + 1")).text == "2"


# ---------------------------------------------------------------------------------------------------------------------
# Notebooks


def test_shell_commands_and_cells_run_in_the_sandbox(shared: Sandbox) -> None:
    assert "".join(shared.run_code("!pwd; echo $((1 + 1))").logs.stdout) == "/home/user\n2\n"
    assert shared.run_code("echo $A", language="bash", envs={"A": "b"}).logs.stdout == ["b\n"]
    assert shared.run_code("%matplotlib inline\n%env OF_SANDBOX").text == "yes"


@pytest.mark.parametrize("language", ["js", "cobol"])
def test_another_language_is_refused_in_words(shared: Sandbox, language: str) -> None:
    with pytest.raises(SandboxException, match=r"501.*language .* is not offered.* runs python"):
        shared.run_code("1", language=language)
    with pytest.raises(SandboxException, match="501"):
        shared.create_code_context(language=language)


def test_pip_reports_packages_that_are_there_and_why_others_can_not_be(shared: Sandbox) -> None:
    code = "x = '''\n!pip install kept\n'''\nif True:\n    !pip install -q numpy 'pandas>=1' PIL nothing-of-this-name 'pip>=999'\nimport numpy"
    run = shared.run_code(code)
    assert run.error is None, run.error
    lines = "".join(run.logs.stdout).splitlines()
    assert [line.split(":")[0] for line in lines] == ["Requirement already satisfied"] * 3 + ["ERROR"] * 2
    assert "nothing-of-this-name is not installed" in lines[3] and "policy" in lines[3] and "only version" in lines[4]
    assert shared.run_code("x").text == "\\n!pip install kept\\n"
    quotes = "#install\n" + '"""\\' * 200_000  # which is searched once, and not from each of them
    assert shared.run_code(quotes).error is not None


# ---------------------------------------------------------------------------------------------------------------------
# Contexts


def test_contexts_have_variables_and_a_directory_of_their_own(sandbox: Sandbox) -> None:
    sandbox.run_code("x = 1\ndef f(): return x")
    context = sandbox.create_code_context(cwd="/tmp")
    assert (context.language, context.cwd) == ("python", "/tmp")
    run = sandbox.run_code("x", context=context)
    assert run.error is not None and run.error.value == "name 'x' is not defined"
    assert run.execution_count == 1
    assert sandbox.run_code("import os\nx = 2\nos.getcwd()", context=context).text == "/tmp"
    assert sandbox.run_code("(f(), x)").text == "(1, 1)"
    assert sandbox.run_code("x", context=context).text == "2"

    listed = sandbox.list_code_contexts()
    assert [each.id for each in listed] == ["default", context.id]
    sandbox.restart_code_context(context)
    assert sandbox.run_code("x", context=context).error is not None
    sandbox.remove_code_context(context)
    assert [each.id for each in sandbox.list_code_contexts()] == ["default"]
    for change in (sandbox.remove_code_context, sandbox.restart_code_context):
        with pytest.raises(NotFoundException):
            change(context)
    with pytest.raises(NotFoundException):
        sandbox.run_code("x", context=context)
    other = sandbox.create_code_context()
    sandbox.run_code("import os; os._exit(1)", context=other)
    assert sandbox.run_code("x", context=other).error is not None
    assert "".join(sandbox.run_code("!pwd").logs.stdout) == "/home/user\n"
    sandbox.remove_code_context(other)
    sandbox.run_code("x = 1")
    assert sandbox.run_code("x", context=listed[0]).text == "1"
    with pytest.raises(SandboxException, match=r"400.*directory '/nowhere'"):
        sandbox.create_code_context(cwd="/nowhere")


def test_a_restart_of_the_only_context_is_a_new_interpreter_and_ends_its_step(sandbox: Sandbox) -> None:
    started = threading.Event()
    restarting = threading.Thread(target=lambda: (started.wait(30), sandbox.restart_code_context("default")))
    restarting.start()
    code = "import sys, time\nsys.marked = x = 1\nprint(1)\ntime.sleep(60)"
    run = sandbox.run_code(code, on_stdout=lambda _: started.set())
    restarting.join(30)
    assert run.error is not None and run.error.name == "KeyboardInterrupt"
    assert sandbox.run_code("import sys; ('x' in globals(), hasattr(sys, 'marked'))").text == "(False, False)"


def test_a_strict_policy_lets_steps_run_and_says_what_it_refuses(e2b: Gateway) -> None:
    with Sandbox.create(api_key=e2b.other_token) as sandbox:
        assert sandbox.run_code("x = 1; x").text == "1"
        with pytest.raises(SandboxException, match=r"501.*policy refuses.*language\.namespaces"):
            sandbox.create_code_context()
        run = sandbox.run_code("!ls")
        assert run.error is not None and "language.dangerous_functions" in run.error.value
        assert sandbox.run_code("x").text == "1"
        sandbox.restart_code_context("default")
        assert sandbox.run_code("x").error is not None


def test_contexts_outlive_the_gateway(daemon: Daemon, tmp_path: Path) -> None:
    own = ("--state-dir", str(tmp_path), "--daemon", daemon.address)
    with running_gateway(daemon, *own) as first:
        urls = {"api_url": first.url, "sandbox_url": first.url, "api_key": first.token}
        sandbox = Sandbox.create(**urls)
        context = sandbox.create_code_context(cwd="/tmp")
        sandbox.run_code("x = 1")
        sandbox.run_code("x = 2", context=context)
        first.process.kill()
        first.process.wait()
    with running_gateway(daemon, *own) as second:
        urls |= {"api_url": second.url, "sandbox_url": second.url}
        with Sandbox.connect(sandbox.sandbox_id, **urls) as again:
            assert again.run_code("x").text == "1"
            assert again.run_code("x", context=context).text == "2"
            assert [each.id for each in again.list_code_contexts()] == ["default", context.id]


# ---------------------------------------------------------------------------------------------------------------------
# Requests that no SDK sends


def headers_of(sandbox: Sandbox, **more: str) -> dict[str, str]:
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49999"}
    return {**headers, "X-Access-Token": sandbox._envd_access_token or "", **more}


def execute(gateway: Gateway, sandbox: Sandbox, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"{gateway.url}/execute"
    return httpx.post(url, content=content, headers=headers_of(sandbox, **headers), timeout=60)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "Invalid JSON"),
        (b"[" * 100_000, 400, "Invalid JSON"),
        (b"\xff", 400, "Invalid JSON"),
        (b'{"code": "\\ud800"}', 400, "Invalid JSON"),
        ([], 400, "should be an object"),
        ({}, 400, "code: "),
        ({"code": 1}, 400, "code: Input should be a valid string"),
        ({"code": "x" * (1 << 20) + "x"}, 413, "the code has more than"),
        (b" " * (5 << 20), 413, "the request has more than"),
        ({"code": "1", "language": "python", "context_id": "default"}, 400, "Only one of"),
        ({"code": "1", "context_id": "../default"}, 404, "not found"),
        ({"code": "1", "env_vars": []}, 400, "env_vars"),
        ({"code": "1", "env_vars": {"A": 1}}, 400, "env_vars"),
        ({"code": "1", "env_vars": {"A=": ""}}, 400, "env_vars"),
        ({"code": "1", "env_vars": {"A": "\0"}}, 400, "env_vars"),
    ],
)
def test_a_malformed_request_is_refused(
    gateway: Gateway, shared: Sandbox, body: object, status: int, message: str
) -> None:
    answer = execute(gateway, shared, body)
    assert answer.status_code == status and message in answer.json()["message"], answer.text[:500]


def test_only_the_token_of_the_sandbox_opens_its_interpreter(
    gateway: Gateway, shared: Sandbox, sandbox: Sandbox
) -> None:
    url = f"{gateway.url}/contexts"
    for token in ("", "x", sandbox._envd_access_token or "", shared.connection_config.api_key or ""):
        assert execute(gateway, shared, {"code": "1"}, **{"X-Access-Token": token}).status_code == 401
        headers = headers_of(shared) | {"X-Access-Token": token}
        for method, path in (("GET", ""), ("POST", ""), ("DELETE", "/default"), ("POST", "/default/restart")):
            assert httpx.request(method, url + path, headers=headers).status_code == 401


def test_the_traffic_token_of_a_private_sandbox_runs_no_code(e2b: Gateway) -> None:
    """The token is for programs in the sandbox. SDKs send only this one with requests about contexts."""
    with Sandbox.create(network={"allow_public_traffic": False}) as private:
        assert private.run_code("1 + 1").text == "2"
        assert [each.id for each in private.list_code_contexts()] == ["default"]
        traffic = {"X-Access-Token": "", "E2b-Traffic-Access-Token": private.traffic_access_token or ""}
        assert execute(e2b, private, {"code": "1"}, **traffic).status_code == 401


# ---------------------------------------------------------------------------------------------------------------------
# Agents


def test_an_agent_of_smolagents_runs_here_unchanged(e2b: Gateway) -> None:
    @tool
    def double(number: int) -> int:
        """Doubles a number.

        Args:
            number: The number.
        """
        return 2 * number

    agent = smolagents.CodeAgent(
        tools=[double],
        model=scripted("kept = double(4)\nprint('seen', kept)", "final_answer(['x' * 100_000, kept])"),
        executor_type="e2b",
        additional_authorized_imports=["numpy", "os"],
        max_steps=2,
        verbosity_level=LogLevel.OFF,
    )
    try:
        assert agent.run("go") == ["x" * 100_000, 8]
        assert "seen 8" in str(agent.memory.steps[1])
    finally:
        agent.cleanup()
        mend_final_answer()
