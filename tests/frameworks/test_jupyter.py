"""Jupyter: notebooks, interrupts, restarts and losses, with ipykernel in the sandbox and with the forwarding kernel.

Docker's test image has no ipykernel: there only the forwarding kernel is tried.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from executor_client.cli import main
from tests.support.daemon import Daemon, daemon_of, running_daemon
from tests.support.polling import eventually

pytest.importorskip("ipykernel")
pytest.importorskip("nbclient")

from jupyter_client import AsyncKernelManager, KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat.v4 import new_code_cell, new_notebook

TIMEOUT_S = 60.0
HAS_IPYKERNEL = os.environ.get("EXECUTOR_TEST_BACKEND", "local") == "local"
KERNELS = [pytest.param("sandbox", marks=pytest.mark.skipif(not HAS_IPYKERNEL, reason="no ipykernel")), "forwarding"]
BOTH = pytest.mark.parametrize("kernel", KERNELS)
ASKING = """
default = "p"
[profiles.p.imports]
allowed = ["csv", "*"]
ask = ["subprocess"]
"""
WAITING = "print('begun', flush=True)\nimport time\ntime.sleep(60)"


@pytest.fixture(autouse=True, scope="module")
def kernelspecs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Both kernelspecs, in a directory of Jupyter's of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", str(tmp_path_factory.mktemp("jupyter")))
        assert main(["jupyter", "install"]) == 0
        assert main(["jupyter", "install", "--name", "forwarding", "--forwarding"]) == 0
        yield


@asynccontextmanager
async def started(kernel: str) -> AsyncIterator[tuple[AsyncKernelManager, Any]]:
    manager = AsyncKernelManager(kernel_name=kernel)
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(TIMEOUT_S)
        yield manager, client
    finally:
        client.stop_channels()
        await manager.shutdown_kernel()


async def outcome(client: Any, code: str, begun: asyncio.Event | None = None) -> tuple[str, str]:
    """Runs a cell; returns its status and what it printed or raised. `begun` is set when it prints."""
    said: list[str] = []

    def note(message: dict[str, Any]) -> None:
        content = message["content"]
        said.append(content.get("text") or content.get("ename") or content.get("data", {}).get("text/plain", ""))
        if begun is not None and message["msg_type"] == "stream":
            begun.set()

    reply = await client.execute_interactive(code, output_hook=note, timeout=TIMEOUT_S)
    return reply["content"]["status"], "".join(said)


def notebook(*cells: str) -> Any:
    return new_notebook(cells=[new_code_cell(each) for each in cells])


def daemon_sessions(daemon: Daemon) -> list[Any]:
    with daemon.client() as client:
        return [each for each in client.list_sessions() if each.labels.get("framework") == "jupyter"]


@BOTH
def test_notebook_runs_with_a_plot_rich_output_and_an_error(daemon: Daemon, kernel: str) -> None:
    plot = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
    ran = notebook("import os\nprint('hello')\nos.getcwd()", plot, "!echo shell", "1/0")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        NotebookClient(ran, kernel_name=kernel, timeout=60).execute()
    first, second, third, fourth = (cell.outputs for cell in ran.cells)
    assert (first[0].text, first[1].data["text/plain"]) == ("hello\n", "'/workspace'")
    assert [each.data["image/png"][:4] for each in second] == ["iVBO"]
    assert (third[0].text.strip(), fourth[0].ename) == ("shell", "ZeroDivisionError")
    assert daemon_sessions(daemon) == []


@BOTH
async def test_interrupt_keeps_variables_and_a_restart_drops_them(daemon: Daemon, kernel: str) -> None:
    async with started(kernel) as (manager, client):
        assert await outcome(client, "x = 1") == ("ok", "")
        begun = asyncio.Event()
        waiting = asyncio.create_task(outcome(client, WAITING, begun))
        await begun.wait()
        await manager.interrupt_kernel()
        status, said = await waiting
        assert (status, "KeyboardInterrupt" in said) == ("error", True)
        assert await outcome(client, "x") == ("ok", "1")
        await manager.restart_kernel()
        await client.wait_for_ready(TIMEOUT_S)
        status, said = await outcome(client, "x")
        assert (status, "NameError" in said) == ("error", True)
        assert len(daemon_sessions(daemon)) == 1
    assert daemon_sessions(daemon) == []


@pytest.fixture
def own_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon that the test may kill."""
    with running_daemon(tmp_path) as running:
        monkeypatch.setenv("EXECUTOR_ADDRESS", running.address)
        monkeypatch.setenv("EXECUTOR_TOKEN", running.token)
        yield running


class Watched(NotebookClient):
    """Runs a notebook in a thread of its own, and says when a cell prints."""

    def __init__(self, kernel: str, *cells: str) -> None:
        super().__init__(notebook(*cells), kernel_name=kernel, timeout=60)
        self.begun = threading.Event()

    def output(self, outs: Any, message: Any, display_id: Any, cell_index: Any) -> Any:
        if message["msg_type"] == "stream":
            self.begun.set()
        return super().output(outs, message, display_id, cell_index)

    def outputs(self) -> str:
        return "".join(each.get("text", each.output_type) for cell in self.nb.cells for each in cell.outputs)


@BOTH
async def test_a_session_that_ends_during_a_cell_is_a_dead_kernel_and_no_output(daemon: Daemon, kernel: str) -> None:
    client = Watched(kernel, WAITING, "print('never')")
    running = asyncio.create_task(asyncio.to_thread(client.execute))
    await asyncio.to_thread(client.begun.wait, TIMEOUT_S)
    (info,) = daemon_sessions(daemon)
    with daemon.client() as other:
        other.get_session(info.session_id).close()
    with pytest.raises(DeadKernelError):
        await running
    assert client.outputs() == "begun\n"


@BOTH
async def test_a_restart_of_the_daemon_during_a_cell_loses_no_output_silently(
    own_daemon: Daemon, tmp_path: Path, kernel: str
) -> None:
    """The forwarding kernel delivers all of it. The real one counts as dead, since connections aren't resumed."""
    code = "import time\nfor i in range(40):\n    print(i, flush=True)\n    time.sleep(0.1)"
    client = Watched(kernel, code)
    running = asyncio.create_task(asyncio.to_thread(client.execute))
    await asyncio.to_thread(client.begun.wait, TIMEOUT_S)
    own_daemon.kill()
    with running_daemon(tmp_path):
        if kernel == "sandbox":
            with pytest.raises(DeadKernelError):
                await running
        else:
            await running
            assert client.outputs() == "".join(f"{i}\n" for i in range(40))


@pytest.mark.skipif(not HAS_IPYKERNEL, reason="no ipykernel")
def test_blocking_manager_restarts_a_kernel_that_ended_in_the_same_session(daemon: Daemon) -> None:
    """Its event loop runs only during its calls, while the kernel's ports must always be served."""
    manager = KernelManager(kernel_name="sandbox")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(TIMEOUT_S)
        client.execute("open('kept', 'w').write('x'); import os; os._exit(3)")
        assert eventually(lambda: not manager.is_alive())
        manager.restart_kernel()
        client.wait_for_ready(TIMEOUT_S)
        reply = client.execute_interactive("assert open('kept').read() == 'x'", timeout=TIMEOUT_S)
        assert reply["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    assert daemon_sessions(daemon) == []


@pytest.mark.skipif(not HAS_IPYKERNEL, reason="no ipykernel")
async def test_a_command_that_ends_at_once_says_why_and_leaves_no_session(daemon: Daemon) -> None:
    manager = AsyncKernelManager(kernel_name="sandbox")
    manager.kernel_spec.argv = ["python3", "-m", "no_such_kernel"]
    with pytest.raises(RuntimeError, match="No module named no_such_kernel"):
        await manager.start_kernel()
    assert daemon_sessions(daemon) == []


async def test_forwarding_kernel_completes_inspects_and_knows_what_is_complete(daemon: Daemon) -> None:
    async with started("forwarding") as (_, client):
        await outcome(client, "def greet(name):\n    'Says hello.'\nvalue = 'a'")

        async def ask(request: Any, *arguments: Any) -> dict[str, Any]:
            reply = await request(*arguments, reply=True, timeout=TIMEOUT_S)
            content: dict[str, Any] = reply["content"]
            return content

        completed = await ask(client.complete, "1 + value.upp")
        assert (completed["matches"], completed["cursor_start"]) == (["upper"], 10)
        assert "greet" in (await ask(client.complete, "gre"))["matches"]
        assert (await ask(client.complete, "greet('x').val"))["matches"] == [], (
            "nothing is called, and no other name fits"
        )
        assert "Says hello." in (await ask(client.inspect, "greet(", 5))["data"]["text/plain"]
        assert (await ask(client.inspect, "no_such_name"))["found"] is False
        assert (await ask(client.is_complete, "for i in x:"))["status"] == "incomplete"


async def test_forwarding_kernel_requests_no_imports_that_need_an_approval(monkeypatch: pytest.MonkeyPatch) -> None:
    """It requested "*", which was refused or waited for an approver, and then died at its first cell."""
    with daemon_of("", policy=ASKING) as asking:
        monkeypatch.setenv("EXECUTOR_ADDRESS", asking.address)
        monkeypatch.setenv("EXECUTOR_TOKEN", asking.token)
        async with started("forwarding") as (_, client):
            assert await outcome(client, "import csv, math\nmath.sqrt(4)") == ("ok", "2.0")
            assert (await outcome(client, "import subprocess"))[0] == "error"


def test_without_jupyter_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jupyter_client.kernelspec", None)
    monkeypatch.delitem(sys.modules, "executor_client.integrations.jupyter_kernelspec")
    assert main(["jupyter", "install"]) == 2
    assert "pip install 'remote-executor[jupyter]'" in capsys.readouterr().err


@pytest.mark.skipif(not HAS_IPYKERNEL, reason="no ipykernel")
@pytest.mark.replayed(lacks=["connections to ports", "values of environment variables"])
@pytest.mark.usefixtures("replayed")
def test_the_example_runs_a_notebook_in_both_kernels(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    monkeypatch.setenv("JUPYTER_DATA_DIR", "restored at the end")
    monkeypatch.setattr(sys, "argv", ["jupyter_notebook.py", str(tmp_path)])
    import_module("jupyter_notebook").main()
    for kernel in ("sandbox", "forwarding"):
        cells = json.loads((tmp_path / f"{kernel}.ipynb").read_text())["cells"]
        assert [each["output_type"] for cell in cells for each in cell["outputs"]] == [
            "stream",
            "display_data",
            "execute_result",
        ]
