"""`ExecutorClient.local()`: a daemon that begins and ends with the process that wants it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from executor_client import AsyncExecutorClient, ConfigurationError, ExecutorClient
from tests.support.backends import require
from tests.support.polling import eventually

PROGRAM = """\
import os, sys
from executor_client import ExecutorClient
client = ExecutorClient.local()
session = client.create_session()
print(session.execute("6 * 7").output, client.address.removeprefix("unix:"), flush=True)
"""


@pytest.fixture(autouse=True)
def _needs_the_local_backend() -> None:
    require("local")


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_client_has_a_daemon_of_its_own_that_ends_with_it() -> None:
    before = _children()
    with ExecutorClient.local() as client, client.create_session() as session:
        assert session.execute("6 * 7").output == 42
        assert (socket := Path(client.address.removeprefix("unix:"))).exists()
    client.close()
    assert not socket.parent.exists()
    assert _children() <= before


async def test_the_asyncio_client_has_one_too() -> None:
    async with await AsyncExecutorClient.local() as client, await client.create_session() as session:
        assert (await session.execute("6 * 7")).output == 42
        socket = Path(client.address.removeprefix("unix:"))
    assert not socket.parent.exists()


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"], ids=["at its end", "killed"])
def test_it_ends_with_the_process_that_forgot_it(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM + end], capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGKILL if end else 0), done.stderr
    answer, socket = done.stdout.split()
    assert answer == "42"
    assert eventually(lambda: not Path(socket).parent.exists())
    assert eventually(lambda: not any(socket in " ".join(each.info["cmdline"] or ()) for each in _processes()))


def _processes() -> list[psutil.Process]:
    return list(psutil.process_iter(["cmdline"]))


def test_a_fork_does_not_end_the_daemon_of_its_parent() -> None:
    with ExecutorClient.local() as client:
        pid = os.fork()
        if pid == 0:
            client._daemon.close()  # type: ignore[union-attr]
            os._exit(0)
        os.waitpid(pid, 0)
        assert client.get_policy()


def test_a_daemon_that_does_not_start_says_why(tmp_path: Path) -> None:
    wrong = tmp_path / "executor.toml"
    wrong.write_text("[server]\nnonsense = 1\n")
    with pytest.raises(ConfigurationError, match=r"server\.nonsense"):
        ExecutorClient.local(config=wrong)
    with pytest.raises(ConfigurationError, match=r"nosuch\.toml"):
        ExecutorClient.local(policy="nosuch.toml")


def test_without_the_extra_it_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child finds no structlog, as after `pip install remote-executor`."""
    tmp_path.joinpath("structlog.py").write_text("raise ModuleNotFoundError(\"No module named 'structlog'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"structlog.*remote-executor\[server\]"):
        ExecutorClient.local()
