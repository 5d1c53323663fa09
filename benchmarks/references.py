"""The references that are processes: a bare sandboxed Python, a plain one that runs a program, a bare container."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_PROCESS_TIMEOUT_S = 120.0
_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc")

DOCKER_IMAGE = "remote-executor/base"
"""The default image of the Docker backend; bare containers are made of it too."""


class Unmeasurable(Exception):
    """This host lacks something that the measurement needs; the message says what."""


# A fresh interpreter that compiles and runs a program as its module, and says how long that took.
_RUN_AND_TIME = """
import sys, time
source = sys.stdin.read()
start = time.perf_counter()
exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
print(time.perf_counter() - start)
"""


def bare_bwrap_command() -> list[str]:
    """bubblewrap with the namespaces of a sandbox, the system's files, and a Python that does nothing."""
    # Not at import: rows that need no bubblewrap can be measured of a commit whose daemon looks for it elsewhere.
    from executor_server.backends.local.bubblewrap import find_bwrap

    namespaces = ["--unshare-all", "--unshare-user", "--as-pid-1", "--new-session", "--hostname", "sandbox"]
    # Not the root directory: bubblewrap would walk all mounts below it, and fail when a container just ends.
    folders = [folder for folder in (*_SYSTEM_FOLDERS, sys.base_prefix) if Path(folder).exists()]
    mounts = [word for folder in folders for word in ("--ro-bind", folder, folder)]
    mounts += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    python = [sys._base_executable, "-I", "-S", "-c", "pass"]  # type: ignore[attr-defined]  # not the venv's own link
    return [str(find_bwrap().path), *namespaces, *mounts, "--", *python]


def docker_run_command(*options: str, program: str = "1", image: str = DOCKER_IMAGE) -> list[str]:
    """A container of our image without network and without any confinement of ours, by Docker's command line."""
    return ["docker", "run", "--network", "none", *options, image, "python3", "-c", program]


def require_docker_image(image: str) -> None:
    """Raises Unmeasurable where there is no Engine, or it has no such image."""
    try:
        run(["docker", "image", "inspect", image])
    except FileNotFoundError as error:
        raise Unmeasurable("there is no docker command") from error
    except subprocess.CalledProcessError as error:
        reason = str(error.stderr, "utf-8", "replace").strip()
        raise Unmeasurable(f"the Engine has no image {image}: {reason}") from error


def run(command: Sequence[str]) -> bytes:
    """Runs a command, and returns its output. Raises CalledProcessError, TimeoutExpired, FileNotFoundError."""
    return subprocess.run(
        command,
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_PROCESS_TIMEOUT_S,
    ).stdout


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
