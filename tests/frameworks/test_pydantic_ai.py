"""Pydantic AI: its conformance suite of workspaces, and scripted agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from pathlib import Path

import anyio
import pytest

from executor_client import ExecutorClient, UnavailableError
from tests.support.daemon import Daemon

pytest.importorskip("pydantic_ai")

from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.workspaces import WorkspaceRef, WorkspaceUnavailableError
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from executor_client.integrations.pydantic_ai import RemoteWorkspace, RemoteWorkspaceBackend

EXAMPLES = Path(__file__).parents[2] / "examples"
Make = Callable[[], RemoteWorkspaceBackend]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def make(daemon: Daemon) -> AsyncIterator[Make]:
    made: list[RemoteWorkspaceBackend] = []

    def make() -> RemoteWorkspaceBackend:
        made.append(RemoteWorkspaceBackend())
        return made[-1]

    yield make
    for each in made:
        await each.destroy()


@pytest.fixture
def backend(make: Make) -> RemoteWorkspaceBackend:
    return make()


class TestSuite(WorkspaceBackendSuite):
    @pytest.fixture
    def backend(self, make: Make) -> RemoteWorkspaceBackend:
        return make()

    @pytest.fixture
    def fresh_backend(self, make: Make) -> Make:
        return make

    @pytest.fixture
    def attach_backend(self) -> Callable[[WorkspaceRef], RemoteWorkspaceBackend]:
        return RemoteWorkspaceBackend

    @pytest.fixture
    def destroy_environment(self) -> Callable[[RemoteWorkspaceBackend], Awaitable[None]]:
        return RemoteWorkspaceBackend.destroy


def model(*commands: str) -> FunctionModel:
    """Runs these commands one after the other by the tool `shell`, and answers with the last one's output."""

    def step(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        asked = sum(isinstance(part, ToolCallPart) for message in messages[start(messages) :] for part in message.parts)
        if asked < len(commands):
            return ModelResponse([ToolCallPart("shell", {"command": commands[asked]})])
        return ModelResponse([TextPart(str(messages[-1].parts[0].content))])

    def start(messages: list[ModelMessage]) -> int:
        return max(i for i, message in enumerate(messages) if message.parts[0].part_kind == "user-prompt")

    return FunctionModel(step)


def test_agent_continues_in_its_session_from_the_message_history_on_another_loop(daemon: Daemon) -> None:
    agent = Agent(capabilities=[RemoteWorkspace(labels={"run": "7"})])

    @agent.tool
    async def shell(context: RunContext[None], command: str) -> str:
        return str((await context.workspace.run(command, shell=True)).stdout)

    first = agent.run_sync("write", model=model("echo kept > note", "cat note"))
    asyncio.set_event_loop(asyncio.new_event_loop())
    second = agent.run_sync("read", model=model("cat note; pwd"), message_history=first.all_messages())
    assert (first.output, second.output) == ("kept\n", "kept\n/workspace\n")
    with daemon.client() as client:
        (info,) = [each for each in client.list_sessions() if each.labels.get("run") == "7"]
        assert (info.labels["framework"], info.detached) == ("pydantic-ai", True)
        client.get_session(info.session_id).close()


@pytest.mark.anyio
async def test_ended_session_is_unavailable_to_each_call(backend: RemoteWorkspaceBackend) -> None:
    await backend.working_dir()
    await backend.destroy()
    assert backend.ref is not None
    for backend_of_ref in (backend, RemoteWorkspaceBackend(backend.ref)):
        for call in (
            backend_of_ref.run(["true"]),
            backend_of_ref.read_bytes("/workspace/a"),
            backend_of_ref.write_bytes("/workspace/a", b""),
            backend_of_ref.stat("/workspace"),
            backend_of_ref.list_dir("/workspace"),
            backend_of_ref.make_dir("/workspace/a"),
            backend_of_ref.remove("/workspace/a"),
            backend_of_ref.exists("/workspace"),
            backend_of_ref.realpath("/workspace"),
        ):
            with pytest.raises(WorkspaceUnavailableError):
                await call


@pytest.mark.anyio
async def test_unreachable_daemon_is_neither_an_answer_nor_a_dead_workspace(backend: RemoteWorkspaceBackend) -> None:
    absent = RemoteWorkspaceBackend(address="unix:/nowhere/executor.sock")
    with pytest.raises(UnavailableError):
        await absent.run(["true"])
    assert absent.ref is None


@pytest.mark.anyio
async def test_cancelled_first_use_leaves_no_session(daemon: Daemon, backend: RemoteWorkspaceBackend) -> None:
    with anyio.move_on_after(0.001) as scope:
        await backend.working_dir()
    assert scope.cancelled_caught
    assert await backend.working_dir() == "/workspace"
    with ExecutorClient() as client:
        assert backend.ref is not None
        assert [each.name for each in client.list_sessions()] == [backend.ref.id]


@pytest.mark.usefixtures("replayed")
def test_example(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import_module("pydantic_ai_agent").main()
    assert capsys.readouterr().out.splitlines() == ["squares: 1 4 9 16", "their sum, in the same sandbox: 30"]
    with daemon.client() as client:
        for each in client.list_sessions():  # as in life, they would end after their idle time
            client.get_session(each.session_id).close()
