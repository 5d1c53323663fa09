"""The sandbox client for the OpenAI Agents SDK, with the SDK's own runner and tools, on a real daemon."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents.sandbox", reason="openai-agents is not installed")

from agents import RunConfig, Runner
from agents.run_config import SandboxRunConfig
from agents.sandbox import LocalSnapshotSpec, Manifest, SandboxAgent
from agents.sandbox.entries import Dir, File
from agents.sandbox.errors import (
    ConfigurationError,
    ExecTimeoutError,
    ExposedPortUnavailableError,
    InvalidManifestPathError,
    PtySessionNotFoundError,
    SandboxError,
    WorkspaceArchiveReadError,
    WorkspaceReadNotFoundError,
    WorkspaceStartError,
)
from agents.sandbox.session import SandboxSession
from agents.testing import ModelStep, ScriptedModel, assistant_message, function_call
from openai.types.responses import ResponseCustomToolCall

from executor_client.integrations.openai_agents import RemoteSandboxClient, RemoteSandboxClientOptions
from tests.frameworks.commands import running_commands
from tests.support.daemon import Daemon
from tests.support.polling import eventually_async

EXAMPLES = Path(__file__).parents[2] / "examples"
MANIFEST = Manifest(entries={"src": Dir(children={"a.txt": File(content=b"from the manifest\n")})})
PATCH = "*** Begin Patch\n*** Add File: new.txt\n+new\n*** End Patch\n"


@pytest.fixture
async def session(daemon: Daemon) -> AsyncIterator[SandboxSession]:
    client = RemoteSandboxClient()
    made = await client.create(manifest=MANIFEST)
    await made.start()
    yield made
    await client.delete(made)


async def text_of(path: str, session: SandboxSession) -> Any:
    return (await session.read(Path(path))).read().decode()


# The framework archives the files with their times, and prints a hash of them.
@pytest.mark.replayed(
    lacks=["connections to ports", "output of command"],
    ignore=["workspace-fingerprint", "tar -C"],
)
@pytest.mark.usefixtures("replayed")
def test_scripted_agent_has_a_shell_patches_a_terminal_a_port_a_snapshot_and_resumes(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import_module("openai_agent").main()
    assert capsys.readouterr().out.splitlines() == [
        "Approve: publish",
        "before: 4.5",
        "patch: Updated prices.py",
        "after: 3.0",
        "terminal-1: Who are you?",
        "terminal-2: Hello, Ada!",
        "publish: published: the mean is fixed",
        "resumed: 3.0",
        "The answer: The mean is fixed.",
        "The page: Hello from the sandbox",
    ]
    with daemon.client() as client:
        assert client.list_sessions() == []


@pytest.mark.parametrize(
    "call",
    [
        function_call("exec_command", {"cmd": "echo never"}, call_id="call"),
        ResponseCustomToolCall(type="custom_tool_call", name="apply_patch", call_id="call", input=PATCH),
    ],
    ids=["shell", "patch"],
)
async def test_agent_whose_session_is_ended_from_elsewhere_fails_instead_of_answering(
    daemon: Daemon, call: Any
) -> None:
    def end_the_session(_: Any) -> list[Any]:
        with daemon.client() as client:
            (info,) = client.list_sessions()
            client.get_session(info.session_id).close()
        return [call]

    steps = [[function_call("exec_command", {"cmd": "true"}, call_id="first")], ModelStep.respond(end_the_session)]
    model = ScriptedModel([*steps, [assistant_message("an answer that nobody may score")]])
    config = RunConfig(sandbox=SandboxRunConfig(client=RemoteSandboxClient()), tracing_disabled=True)
    with pytest.raises(Exception, match="session") as failed:
        await Runner.run(SandboxAgent(name="Coder", model=model), "Go.", run_config=config)
    assert isinstance(failed.value, SandboxError) or isinstance(failed.value.__cause__, SandboxError)
    assert model.remaining_steps == 1


async def test_state_has_no_token_and_finds_the_sandbox_again(daemon: Daemon, session: SandboxSession) -> None:
    client = RemoteSandboxClient()
    stored = json.dumps(client.serialize_session_state(session.state))
    assert daemon.token not in stored
    await session.exec("echo kept > kept.txt")

    resumed = await client.resume(client.deserialize_session_state(json.loads(stored)))
    await resumed.start()
    assert await text_of("kept.txt", resumed) == "kept\n"
    assert resumed.state.session_name == session.state.session_name


async def test_resume_after_the_end_begins_with_the_snapshot_in_another_sandbox(daemon: Daemon, tmp_path: Path) -> None:
    client = RemoteSandboxClient()
    first = await client.create(manifest=MANIFEST, snapshot=LocalSnapshotSpec(base_path=tmp_path))
    async with first:
        await first.exec("echo changed > src/a.txt; ln -s src/a.txt link; chmod 750 src; mkdir empty")
    state = client.deserialize_session_state(client.serialize_session_state(first.state))
    second = await client.resume(state)
    async with second:
        listed = await second.exec("readlink link; cat link; stat -c %a src; ls")
        assert listed.stdout.decode().split() == ["src/a.txt", "changed", "750", "empty", "link", "src"]
    assert first.state.session_name != second.state.session_name
    with daemon.client() as blocking:
        assert blocking.list_sessions() == []


async def test_resume_without_snapshot_begins_with_the_manifest(session: SandboxSession) -> None:
    client = RemoteSandboxClient()
    await session.exec("echo changed > src/a.txt")
    await client.delete(session)
    resumed = await client.resume(session.state.model_copy())
    async with resumed:
        assert await text_of("src/a.txt", resumed) == "from the manifest\n"


async def test_commands(session: SandboxSession) -> None:
    done = await session.exec(r"printf '\377\0'; echo oops >&2; exit 3")
    assert (done.stdout, done.stderr, done.exit_code) == (b"\xff\0", b"oops\n", 3)
    assert (await session.exec("no-such-program", shell=False)).exit_code == 127
    assert (await session.exec("echo a\0b")).exit_code == 127
    large = (await session.exec("seq 1000000")).stdout
    assert large.startswith(b"1\n2\n") and large.endswith(b"\n1000000\n") and len(large) < (1 << 20) + 100
    with pytest.raises(ExecTimeoutError):
        await session.exec("sleep 70", timeout=0.5)
    with pytest.raises(ConfigurationError, match="one user"):
        await session.exec("true", user="root")


@pytest.mark.parametrize("start", ["exec", "pty_exec_start"])
async def test_cancelled_call_kills_its_command(daemon: Daemon, session: SandboxSession, start: str) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(getattr(session, start)("exec sleep 70"), 0.5)
    assert await eventually_async(lambda: running_commands(daemon) == [])


async def test_terminals(daemon: Daemon, session: SandboxSession) -> None:
    begun = await session.pty_exec_start("read -p '? ' x; echo got $x; exec sleep 70", tty=True, yield_time_s=0.3)
    number = begun.process_id
    assert number is not None and begun.output == b"? " and begun.exit_code is None
    written = await session.pty_write_stdin(session_id=number, chars="é\n")
    assert "got é" in written.output.decode()
    ended = await session.pty_write_stdin(session_id=number, chars="\x03", yield_time_s=5)
    assert (ended.process_id, ended.exit_code) == (None, 130)
    with pytest.raises(PtySessionNotFoundError):
        await session.pty_write_stdin(session_id=number, chars="more")
    plain = await session.pty_exec_start("echo plain; sleep 70", yield_time_s=0.3)
    assert plain.process_id is not None
    with pytest.raises(RuntimeError, match="stdin is not available for this process"):
        await session.pty_write_stdin(session_id=plain.process_id, chars="x")
    lacking = await session.pty_exec_start("true", shell=["no-such-shell", "-c"])
    assert lacking.exit_code == 127 and b"no-such-shell" in lacking.output
    await session.pty_terminate_all()
    assert await eventually_async(lambda: running_commands(daemon) == [])


def test_sandbox_with_a_terminal_and_a_port_serves_several_loops(daemon: Daemon) -> None:
    """`Runner.run_sync` may give each turn a loop of its own."""
    client = RemoteSandboxClient()

    async def begin() -> tuple[SandboxSession, int | None, Any]:
        made = await client.create(options=RemoteSandboxClientOptions(exposed_ports=(8000,)))
        await made.start()
        begun = await made.pty_exec_start("read x; echo got $x; sleep 70", tty=True, yield_time_s=0.3)
        return made, begun.process_id, await made.resolve_exposed_port(8000)

    async def go_on(sandbox: SandboxSession, number: int | None, port: Any) -> None:
        assert number is not None
        written = await sandbox.pty_write_stdin(session_id=number, chars="on\n", yield_time_s=1)
        assert b"got on" in written.output
        assert await sandbox.resolve_exposed_port(8000) == port
        _, writer = await asyncio.open_connection(port.host, port.port)
        writer.close()

    sandbox, number, port = asyncio.run(begin())
    asyncio.run(go_on(sandbox, number, port))
    asyncio.run(client.delete(sandbox))
    with daemon.client() as blocking:
        assert blocking.list_sessions() == []


async def test_files_stay_in_the_workspace(session: SandboxSession) -> None:
    await session.write(Path("deep/in/b.bin"), io.BytesIO(b"\xff\0"))
    assert (await session.read(Path("/workspace/deep/in/b.bin"))).read() == b"\xff\0"
    assert await session.read_bounded(Path("src/a.txt"), max_bytes=4) == b"from"
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("missing"))
    await session.exec("ln -s /etc/passwd out; ln -s loop loop; ln -s src/a.txt in")
    assert await text_of("in", session) == "from the manifest\n"
    with pytest.raises(WorkspaceArchiveReadError):
        await session.read(Path("loop"))
    for path in ("../etc/passwd", "/etc/passwd", "out"):
        with pytest.raises(InvalidManifestPathError):
            await session.read(Path(path))
        with pytest.raises(InvalidManifestPathError):
            await session.write(Path(path), io.BytesIO(b"x"))


async def test_only_configured_ports_are_exposed(session: SandboxSession) -> None:
    with pytest.raises(ExposedPortUnavailableError, match="not configured"):
        await session.resolve_exposed_port(8000)


async def test_daemon_that_does_not_answer_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceStartError, match="none"):
        await RemoteSandboxClient(address=f"unix:{tmp_path}/none").create()
