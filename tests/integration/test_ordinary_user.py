"""The daemon as an ordinary user runs it: the same promises without root, and no other user gets in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor_client import ExecutorClient, Outcome, VariablesState
from tests.support.backends import require
from tests.support.daemon import START_TIMEOUT_S, STOP_TIMEOUT_S
from tests.support.polling import eventually

USER, OTHER_USER = 23_456, 23_457
TIMEOUT_S = 60.0
ROOT = Path(__file__).parents[2]
CODE_PATH = [ROOT, ROOT / "client", ROOT / "proto", *(path for path in sys.path if path.endswith("site-packages"))]


def as_user(uid: int) -> dict[str, Any]:
    return {"user": uid, "group": uid, "extra_groups": []}


def environment(home: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "PYTHONPATH": ":".join(map(str, CODE_PATH)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "EXECUTOR_STATE_DIR": str(home / "s"),
        "EXECUTOR_CONFIG": str(home / "c.toml"),
    }


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A home directory of the user; the tests' own temporary directory is root's."""
    require("local")
    if os.geteuid() != 0:
        pytest.skip("whoever runs this is an ordinary user already: all other tests show it")
    made = Path(tempfile.mkdtemp(prefix="rx-home-", dir="/tmp"))
    os.chown(made, USER, USER)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def python(home: Path) -> str:
    """A Python that the user may run, and that can run us."""
    name = "python{}.{}".format(*sys.version_info)
    for candidate in (sys.executable, f"/usr/bin/{name}", f"/usr/local/bin/{name}"):
        command = [candidate, "-c", "import executor_server.daemon.daemon, executor_client"]
        try:
            tried = subprocess.run(command, env=environment(home), cwd=home, capture_output=True, **as_user(USER))
        except OSError:  # it lies where only root may enter
            continue
        if tried.returncode == 0:
            return candidate
    pytest.skip("no Python of this version that an ordinary user may run can import us")


@pytest.fixture(scope="module")
def daemon(home: Path, python: str) -> Iterator[subprocess.Popen[bytes]]:
    (home / "c.toml").write_text(f'pool.size = 1\n[local.images]\nbase = "{python}"\n')
    socket, log = home / "s" / "executor.sock", home / "log"
    command = [python, "-m", "executor_server", "serve", "--listen", f"unix:{socket}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(home), cwd=home, stdout=output, stderr=subprocess.STDOUT, **as_user(USER)
        )
    try:
        assert eventually(
            lambda: "daemon_listening" in log.read_text() or process.poll() is not None, timeout_s=START_TIMEOUT_S
        )
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0, log.read_text()


@pytest.fixture
def client(home: Path, daemon: subprocess.Popen[bytes]) -> Iterator[ExecutorClient]:
    token = (home / "s" / "token").read_text().strip()
    with ExecutorClient(f"unix:{home / 's' / 'executor.sock'}", token=token) as connected:
        yield connected


def executor(uid: int, python: str, home: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "executor_client.cli", "run", "-"],
        input=code,
        env=environment(home),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        **as_user(uid),
    )


def test_a_client_of_the_same_user_finds_the_daemon(daemon: object, python: str, home: Path) -> None:
    ran = executor(USER, python, home, "print(6 * 7)")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "42\n", "")


def test_the_number_of_files_is_bounded_without_root(client: ExecutorClient) -> None:
    fill = "import os\nfor number in range(1000):\n    os.mkdir(str(number))"
    with client.create_session(authorized_imports=["os"], limits={"max_files": 100}) as session:
        result = session.execute(fill)
        assert result.error is not None and "No space left" in result.error.message
        assert session.execute("len(os.listdir())").output == 100


def test_another_user_gets_neither_token_nor_socket(client: ExecutorClient, python: str, home: Path) -> None:
    ran = executor(OTHER_USER, python, home, "print(6 * 7)")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "Traceback" not in ran.stderr


def test_code_is_not_the_users_own_inside_and_has_no_privileges(client: ExecutorClient) -> None:
    look = "import os\nstatus = dict(line.split(':\\t', 1) for line in open('/proc/self/status') if ':\\t' in line)\n"
    look += "(os.getuid(), os.getpid() < 20, status['CapEff'].strip(), status['NoNewPrivs'].strip())"
    with client.create_session(authorized_imports=["os"]) as session:
        uid, own_processes, capabilities, no_new_privileges = session.execute(look).output
    assert (uid, own_processes, int(capabilities, 16), no_new_privileges) == (1000, True, 0, "1")


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("while True: pass", Outcome.OPERATION_LIMIT),
        ("import time\ntime.sleep(1e6)", Outcome.TIMEOUT),
        ("hog = []\nwhile True: hog.append(b'x' * 10**6)", Outcome.OUT_OF_MEMORY),
        ("import os\nos._exit(3)", Outcome.EXITED),
        ("import ctypes\nctypes.string_at(0)", Outcome.CRASHED),
        ("import os\nwhile True: os.fork()", None),
    ],
)
def test_an_end_is_told_as_what_it_is_without_root(client: ExecutorClient, code: str, outcome: Outcome | None) -> None:
    limits = {"wall_time_s": 3, "operations": 10**6, "memory_bytes": 2**28, "processes": 32}
    with client.create_session(authorized_imports=["os", "ctypes"], limits=limits) as session:
        ended = session.execute(code)
        assert ended.outcome is outcome or outcome is None, ended.error
        assert ended.state is not VariablesState.LOST
        assert session.execute("6 * 7").output == 42


LEAVE_A_SANDBOX = """
async def main():
    backend = LocalBackend(STATE_DIR)
    await backend.start()
    await backend.adopt(())
    left = await backend.create(SPEC)
    print(json.dumps([left.sandbox_id, left.endpoint.token.hex(), left.process.init_pid]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
TAKE_IT_OVER = """
async def main():
    sandbox_id, token, pid = json.load(sys.stdin)
    backend = LocalBackend(STATE_DIR)
    await backend.start()
    adopted = await backend.adopt([KnownSandbox(sandbox_id, SPEC, bytes.fromhex(token), "local")])
    channel = GuestChannel(adopted[sandbox_id].endpoint)
    generation = (await channel.connect()).generation
    channel.close()
    await backend.close()
    print(json.dumps([generation, os.path.exists(f"/proc/{pid}"), os.listdir(STATE_DIR / "sandboxes")]))
"""


def test_a_sandbox_outlives_its_daemon_without_root(home: Path, python: str) -> None:
    killed = _with_backend(python, home, LEAVE_A_SANDBOX, "")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    adopted = _with_backend(python, home, TAKE_IT_OVER, killed.stdout)
    assert json.loads(adopted.stdout or "null") == [1, False, [".lock"]], adopted.stderr


def _with_backend(python: str, home: Path, code: str, stdin: str) -> subprocess.CompletedProcess[str]:
    whole = f"""
import asyncio, json, os, signal, sys
from pathlib import Path
import structlog
from executor_server.backends.base import KnownSandbox
from executor_server.backends.local import LocalBackend
from executor_server.backends.channel.daemon_channel import GuestChannel
from executor_server.core.model import SandboxSpec
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
STATE_DIR, SPEC = Path({str(home / "o")!r}), SandboxSpec("base", 2**28, 32, 2**24, 60.0)
{code}
asyncio.run(main())
"""
    return subprocess.run(
        [python, "-c", whole],
        input=stdin,
        env=environment(home),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        **as_user(USER),
    )
