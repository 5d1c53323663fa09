"""Inspect: its self-check of sandboxes, and evaluations with its mock model."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from executor_client import AsyncExecutorClient, ExecutorClient
from tests.support.daemon import Daemon, daemon_of, running_daemon
from tests.support.fleet_daemon import fleet_daemon, wanted
from tests.support.leftovers import DAEMON_PREFIX

pytest.importorskip("inspect_ai")

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, EvalSample
from inspect_ai.model import ChatMessage, ChatMessageTool, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import Tool, bash, bash_session, python, text_editor, tool
from inspect_ai.util import SandboxEnvironmentSpec, SandboxUserUnsupportedError, sandbox
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - the way that it is meant to be used

from executor_client.integrations.inspect_ai import RemoteSandboxConfig, RemoteSandboxEnvironment

UNFORKED = 'default = "default"\n[profiles.default]\nsandbox.fork_server = "off"\n'


@pytest.fixture
async def sandbox_env(daemon: Daemon) -> AsyncIterator[RemoteSandboxEnvironment]:
    made = await RemoteSandboxEnvironment.sample_init("test", None, {})
    yield made["default"].as_type(RemoteSandboxEnvironment)
    await RemoteSandboxEnvironment.sample_cleanup("test", None, made, False)


def scripted(*calls: tuple[str, dict[str, Any]]) -> Any:
    """A model that makes these tool calls one after the other, then answers with the last result."""

    def step(messages: list[ChatMessage], *_: object) -> ModelOutput:
        results = [each for each in messages if isinstance(each, ChatMessageTool)]
        if len(results) < len(calls):
            name, arguments = calls[len(results)]
            output = ModelOutput.for_tool_call("mockllm/model", name, arguments)
        else:
            output = ModelOutput.from_content("mockllm/model", results[-1].text)
        output.usage = ModelUsage()  # to count tokens, it would download tables
        return output

    return get_model("mockllm/model", custom_outputs=step, memoize=False)


def run(tmp_path: Path, task: Task, model: Any, **options: Any) -> EvalLog:
    (log,) = evaluate(task, model=model, display="none", log_dir=str(tmp_path), log_level="warning", **options)
    return log


@solver
def remote_command() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        result = await sandbox().exec_remote(["sh", "-c", "echo started; cat /etc/os-release | wc -l"], stream=False)
        assert result.success, result.stderr
        state.metadata["exec_remote"] = result.stdout
        return state

    return solve


def results(sample: EvalSample) -> list[str]:
    """The results of its tool calls, after a look at its score."""
    assert sample.error is None
    assert sample.scores is not None
    assert sample.scores["includes"].value == "C", [
        (each.text, getattr(each, "error", None)) for each in sample.messages
    ]
    return [each.text for each in sample.messages if isinstance(each, ChatMessageTool)]


@pytest.fixture
def unforked(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A daemon whose sandboxes are not forked: in those of a root's daemon `/` belongs to an unknown user, and
    `text_editor` distrusts it."""
    if os.environ.get("EXECUTOR_TEST_BACKEND", "local") != "local":
        yield
        return
    with fleet_daemon(policy=UNFORKED) if wanted() else daemon_of("", policy=UNFORKED) as running:
        monkeypatch.setenv("EXECUTOR_ADDRESS", running.address)
        monkeypatch.setenv("EXECUTOR_TOKEN", running.token)
        yield


@pytest.mark.usefixtures("unforked")
def test_tools_of_inspect_work(tmp_path: Path) -> None:
    model = scripted(
        ("bash", {"command": "echo 21 > n"}),
        ("python", {"code": "print(2 * int(open('n').read()))"}),
        ("text_editor", {"command": "create", "path": "/workspace/made.txt", "file_text": "edited\n"}),
        ("bash_session", {"action": "type_submit", "input": "cat /workspace/made.txt n"}),
        ("bash", {"command": "cat made.txt n"}),
    )
    task = Task(
        dataset=[Sample(input="go", target="edited\n21")],
        solver=[
            remote_command(),
            use_tools(bash(), python(), text_editor(), bash_session(wait_for_output=3)),
            generate(),
        ],
        scorer=includes(),
        sandbox="remote",
    )
    log = run(tmp_path, task, model)
    assert log.status == "success", log.error and log.error.traceback
    assert log.samples is not None
    texts = results(log.samples[0])
    assert texts[1].strip() == "42"
    assert "edited" in texts[3]
    assert log.samples[0].metadata["exec_remote"].startswith("started\n")


def test_ten_samples_at_once_have_a_session_each_and_leave_none(daemon: Daemon, tmp_path: Path) -> None:
    config = RemoteSandboxConfig(labels={"run": "ten"}, limits={"wall_time_s": 30}, env={"GIVEN": "set"})
    task = Task(
        dataset=[Sample(input="go", target=f"set {i}", files={"n": f"{i}"}) for i in range(10)],
        solver=[use_tools(bash()), generate()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("remote", config),
    )
    log = run(tmp_path, task, scripted(("bash", {"command": "echo $GIVEN $(cat n)"})), max_samples=10)
    assert log.status == "success", log.error and log.error.traceback
    assert log.samples is not None
    assert sorted(text for sample in log.samples for text in results(sample)) == [f"set {i}\n" for i in range(10)]
    with daemon.client() as client:
        assert client.list_sessions() == []


async def test_its_session_tells_who_made_it(daemon: Daemon, sandbox_env: RemoteSandboxEnvironment) -> None:
    async with AsyncExecutorClient() as client:
        assert [each.labels for each in await client.list_sessions()] == [{"framework": "inspect-ai"}]


async def test_other_users_are_refused_in_words(sandbox_env: RemoteSandboxEnvironment) -> None:
    with pytest.raises(SandboxUserUnsupportedError, match="a sandbox has one user, who is not root; omit `user`"):
        await sandbox_env.exec(["whoami"], user="root")


@tool
def end_of(what: Callable[[], None]) -> Tool:
    async def execute() -> str:
        """Ends it."""
        what()
        return "ended"

    return execute


def ending_task(ending: Callable[[], None]) -> tuple[Task, Any]:
    model = scripted(("bash", {"command": "echo 7 > n"}), ("end_of", {}), ("bash", {"command": "cat n"}))
    return Task(
        dataset=[Sample(input="go", target="7")],
        solver=[use_tools(bash(), end_of(ending)), generate()],
        scorer=includes(),
        sandbox="remote",
    ), model


def test_sample_whose_session_is_lost_is_an_error_and_not_scored(daemon: Daemon, tmp_path: Path) -> None:
    def end() -> None:
        with ExecutorClient() as client:
            for each in client.list_sessions():
                client.get_session(each.session_id).close()

    log = run(tmp_path, *ending_task(end))
    assert log.status == "error"
    assert log.samples is not None
    (sample,) = log.samples
    assert not sample.scores
    assert sample.error is not None
    assert "SessionGone" in sample.error.traceback


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A daemon of the test's own. The function kills it once, and starts another, which knows no sessions."""
    directory = Path(tempfile.mkdtemp(prefix=DAEMON_PREFIX))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        first = stack.enter_context(running_daemon(directory))
        monkeypatch.setenv("EXECUTOR_ADDRESS", first.address)
        monkeypatch.setenv("EXECUTOR_TOKEN", first.token)

        def kill_once() -> None:
            if first.process.poll() is None:
                first.kill()
                (first.state_dir / "registry.db").unlink()
                stack.enter_context(running_daemon(directory))

        yield kill_once


def test_sample_whose_daemon_is_killed_is_repeated(mortal: Callable[[], None], tmp_path: Path) -> None:
    log = run(tmp_path, *ending_task(mortal), retry_on_error=1)
    assert log.status == "success", log.error and log.error.traceback
    assert log.samples is not None
    (sample,) = log.samples
    assert sample.scores is not None
    assert sample.scores["includes"].value == "C"
    assert sample.error_retries is not None
    assert "SessionGone" in sample.error_retries[0].traceback


@pytest.mark.usefixtures("replayed")
def test_example(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import_module("inspect_eval").main()
    assert capsys.readouterr().out.splitlines() == ["sample 1: C", "sample 2: C"]
