"""The environment for Google ADK, with ADK's own agents and tools, on a real daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.adk", reason="google-adk is not installed")

from google.adk.errors.tool_execution_error import ToolExecutionError

from executor_client.integrations.google_adk import RemoteEnvironment
from tests.frameworks.commands import running_commands
from tests.support.daemon import Daemon
from tests.support.polling import eventually_async

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.filterwarnings("ignore:.*EXPERIMENTAL.*:UserWarning")


@pytest.fixture
async def environment(daemon: Daemon) -> AsyncIterator[RemoteEnvironment]:
    made = RemoteEnvironment()
    await made.initialize()
    yield made
    await made.close()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("adk_agent")


@pytest.mark.usefixtures("replayed")
def test_scripted_agent_writes_runs_edits_and_reads(
    daemon: Daemon, example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main()
    assert capsys.readouterr().out.splitlines() == [
        "WriteFile: {'status': 'ok', 'message': 'Wrote words.txt'}",
        "Execute: {'status': 'ok', 'stdout': '      2 kiln\\n'}",
        "EditFile: {'status': 'ok', 'message': 'Edited words.txt'}",
        "ReadFile: {'status': 'ok', 'content': '     1\\tkiln clay kiln clay clay\\n'}",
        "Execute: {'status': 'error', 'stderr': 'cat: missing.txt: No such file or directory\\n', 'exit_code': 1}",
        "The answer: The most frequent word was kiln.",
    ]
    with daemon.client() as client:
        assert client.list_sessions() == []


def test_agent_whose_session_is_ended_from_elsewhere_fails_instead_of_answering(daemon: Daemon, example: Any) -> None:
    """ADK's tool catches the error. The model gets no turn in which it could answer for it."""

    def end_the_session() -> tuple[str, dict[str, str]]:
        with daemon.client() as client:
            (info,) = client.list_sessions()
            client.get_session(info.session_id).close()
        return "Execute", {"command": "echo never"}

    script = [("Execute", {"command": "echo kept"}), end_the_session, "an answer that nobody may score"]
    with pytest.raises(ToolExecutionError, match="session"):
        asyncio.run(example.run(script))


async def test_commands(daemon: Daemon, environment: RemoteEnvironment) -> None:
    done = await environment.execute(r"printf 'a\377'; echo oops >&2; exit 3")
    assert (done.stdout, done.stderr, done.exit_code) == ("a\N{REPLACEMENT CHARACTER}", "oops\n", 3)
    large = (await environment.execute("seq 1000000")).stdout
    assert large.startswith("1\n2\n") and large.endswith("\n1000000\n") and len(large) < (1 << 20) + 100
    late = await environment.execute("echo begun; exec sleep 70", timeout=0.5)
    assert (late.timed_out, late.stdout) == (True, "begun\n")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(environment.execute("exec sleep 70"), 0.5)
    assert await eventually_async(lambda: running_commands(daemon) == [])


async def test_files(environment: RemoteEnvironment) -> None:
    await environment.write_file(Path("deep/in/a.txt"), "é")
    assert await environment.read_file("/workspace/deep/in/a.txt") == "é".encode()
    with pytest.raises(FileNotFoundError):
        await environment.read_file("missing")
    with pytest.raises(IsADirectoryError):
        await environment.read_file("deep")
    with pytest.raises(OSError, match="/etc"):
        await environment.write_file("/etc/passwd", "")


def test_named_session_outlives_its_environments_and_loops(daemon: Daemon) -> None:
    async def use(command: str) -> Any:
        environment = RemoteEnvironment(name="shared")
        await environment.initialize()
        done = await environment.execute(command)
        await environment.close()
        return done.stdout

    asyncio.run(use("echo kept > kept.txt"))
    assert asyncio.run(use("cat kept.txt")) == "kept\n"
    with daemon.client() as client:
        client.get_session(name="shared").close()


async def test_daemon_that_does_not_answer_is_no_output(tmp_path: Path) -> None:
    environment = RemoteEnvironment(address=f"unix:{tmp_path}/none")
    with pytest.raises(ToolExecutionError) as failed:
        await environment.initialize()
    assert failed.value.error_type == "SERVICE_UNAVAILABLE"
    assert str(environment.working_dir) == "/workspace", "a later run, with a daemon, must not fail for this"
