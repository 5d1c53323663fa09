"""The sandbox for Strands Agents, with Strands' own agents and tools, on a real daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("strands", reason="strands-agents is not installed")

from strands import Agent
from strands.sandbox import ExecutionResult, StreamChunk
from strands.sandbox.errors import SandboxPathNotFoundError, SandboxTimeoutError
from strands.types.exceptions import EventLoopException

from executor_client.integrations.strands import RemoteSandbox
from tests.frameworks.commands import running_commands
from tests.support.daemon import Daemon
from tests.support.polling import eventually_async

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def sandbox(daemon: Daemon) -> Iterator[RemoteSandbox]:
    with RemoteSandbox() as made:
        yield made


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("strands_agent")


@pytest.mark.usefixtures("replayed")
def test_scripted_agent_writes_runs_and_reads(daemon: Daemon, example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    printed = capsys.readouterr().out
    assert '{"output": "60\\n", "error": "", "exit_code": 0}' in printed
    assert "vase,48" in printed
    assert "cat: missing.csv: No such file or directory" in printed
    assert printed.endswith("The answer: All pots together are 60.\n\n")
    with daemon.client() as client:
        assert client.list_sessions() == []


def test_agent_whose_session_is_ended_from_elsewhere_fails_instead_of_answering(
    sandbox: RemoteSandbox, example: Any
) -> None:
    """Strands' tool catches the error. The model gets no turn in which it could answer for it."""
    asyncio.run(sandbox.execute("echo kept"))
    sandbox.close()
    model = example.ScriptedModel([("sandbox_shell", {"command": "echo never"}), "an answer that nobody may score"])
    agent = Agent(model=model, sandbox=sandbox, hooks=[sandbox], callback_handler=None)
    with pytest.raises(EventLoopException, match="session") as failed:
        agent("Go on.")
    assert isinstance(failed.value.original_exception, ConnectionError)


async def test_output_streams_as_it_is_printed_in_whole_characters(sandbox: RemoteSandbox) -> None:
    command = r"printf 'a\303'; read -t 0.3 _ <> <(:); printf '\251\377'; echo oops >&2; exit 3"
    chunks = [each async for each in sandbox.execute_streaming(command)]
    text = "".join(each.data for each in chunks if isinstance(each, StreamChunk) and each.stream_type == "stdout")
    assert text == "aé\N{REPLACEMENT CHARACTER}"
    assert chunks[-1] == ExecutionResult(3, text, "oops\n")


async def test_large_output_keeps_head_and_tail(sandbox: RemoteSandbox) -> None:
    result = await sandbox.execute("seq 1000000")
    assert result.stdout.startswith("1\n2\n") and result.stdout.endswith("\n1000000\n")
    assert "bytes left out" in result.stdout and len(result.stdout) < (1 << 20) + 100


async def test_timeout_kills_the_command_and_tells_what_it_printed(sandbox: RemoteSandbox) -> None:
    with pytest.raises(SandboxTimeoutError) as timeout:
        await sandbox.execute("echo begun; exec sleep 70", timeout=0.5)
    assert timeout.value.stdout == "begun\n"


async def test_cancelled_call_and_left_generator_kill_the_command(sandbox: RemoteSandbox, daemon: Daemon) -> None:
    async for _ in (left := sandbox.execute_streaming("echo begun; exec sleep 70")):
        break
    await left.aclose()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sandbox.execute("exec sleep 70"), 0.5)
    assert await eventually_async(lambda: running_commands(daemon) == [])


async def test_code_is_read_by_its_interpreter(sandbox: RemoteSandbox) -> None:
    code = "import os\nprint(os.environ['WHERE'], os.getcwd())"
    result = await sandbox.execute_code(code, "python3", env={"WHERE": "in"}, cwd="/tmp")
    assert result.stdout == "in /tmp\n"
    assert (await sandbox.execute_code("1", "no-such-interpreter")).exit_code == 127
    with pytest.raises(ValueError, match="invalid"):
        await sandbox.execute_code("1", "python3\nreboot")


async def test_files(sandbox: RemoteSandbox) -> None:
    await sandbox.write_file("deep/in/a.bin", b"\xff\x00")
    assert await sandbox.read_file("/workspace/deep/in/a.bin") == b"\xff\x00"
    (listed,) = await sandbox.list_files("deep/in")
    assert (listed.name, listed.is_dir, listed.size) == ("a.bin", False, 2)
    assert (await sandbox.list_files("deep"))[0].is_dir
    await sandbox.remove_file("deep/in/a.bin")
    for missing in (sandbox.read_file, sandbox.remove_file):
        with pytest.raises(FileNotFoundError):
            await missing("deep/in/a.bin")
    for path in ("nowhere", "/etc/passwd"):
        with pytest.raises(SandboxPathNotFoundError):
            await sandbox.list_files(path)
    with pytest.raises(OSError, match="/etc"):
        await sandbox.write_file("/etc/passwd", b"")


def test_one_session_serves_several_loops(sandbox: RemoteSandbox) -> None:
    asyncio.run(sandbox.write_text("kept.txt", "kept"))
    assert asyncio.run(sandbox.read_text("kept.txt")) == "kept"


def test_daemon_that_does_not_answer_is_no_output(tmp_path: Path) -> None:
    sandbox = RemoteSandbox(address=f"unix:{tmp_path}/none")
    with pytest.raises(ConnectionError):
        asyncio.run(sandbox.execute("true"))
