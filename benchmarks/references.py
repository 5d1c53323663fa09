"""The references that are processes: a bare sandboxed Python, and a plain one that runs a program."""

from __future__ import annotations

import subprocess
import sys

from executor_server.backends.local.bubblewrap import find_bwrap

_PROCESS_TIMEOUT_S = 120.0

# A fresh interpreter that compiles and runs a program as its module, and says how long that took.
_RUN_AND_TIME = """
import sys, time
source = sys.stdin.read()
start = time.perf_counter()
exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
print(time.perf_counter() - start)
"""


def bare_bwrap_command() -> list[str]:
    """bubblewrap with the namespaces of a sandbox, the host's files as they are, and a Python that does nothing."""
    namespaces = ["--unshare-all", "--unshare-user", "--as-pid-1", "--new-session", "--hostname", "sandbox"]
    mounts = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    python = [sys._base_executable, "-I", "-S", "-c", "pass"]  # type: ignore[attr-defined]  # the venv's own link apart
    return [str(find_bwrap().path), *namespaces, *mounts, "--", *python]


def run(command: list[str]) -> None:
    """Runs a command to its end. Raises CalledProcessError, TimeoutExpired."""
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env={}, timeout=_PROCESS_TIMEOUT_S)


def plain_python_ms(source: str) -> float:
    """Milliseconds that a fresh, unconfined CPython takes to compile and run a program; its start is not counted."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", _RUN_AND_TIME],
        check=True,
        input=source,
        capture_output=True,
        text=True,
        timeout=_PROCESS_TIMEOUT_S,
    )
    return float(done.stdout.splitlines()[-1]) * 1000
