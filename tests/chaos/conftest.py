"""Daemons that a test may hurt, and what is known of them from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.backends import DOCKER_IMAGE, require
from tests.support.daemon import Daemon, running_daemon
from tests.support.e2b import WHY_NOT, ThreadedDouble

StartDaemon = Callable[..., Daemon]


@pytest.fixture
def directory() -> Iterator[Path]:
    """With a short name: the path of a Unix socket has at most 107 bytes."""
    require("local")
    with tempfile.TemporaryDirectory(prefix="d-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture
def passable_directory() -> Iterator[Path]:
    """One that a sandbox's user can enter, for backends in the process of the test. At the end it can be removed."""
    require("local")
    made = Path(tempfile.mkdtemp(prefix="n-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def start(directory: Path) -> Iterator[StartDaemon]:
    """Starts a daemon with a configuration in TOML; a test that kills it may start another on the same directory.

    `policy`: the text of its policy. `program`: another one than `executor-server`.
    """
    with contextlib.ExitStack() as stack:

        def start(config: str = "", *, policy: str | None = None, program: Sequence[str] = ()) -> Daemon:
            path = directory / "config.toml"
            if policy is not None:
                (directory / "policy.toml").write_text(policy)
                config = f'policy.file = "{directory / "policy.toml"}"\n{config}'
            path.write_text(config)
            return stack.enter_context(running_daemon(directory, "--config", str(path), program=program))

        yield start


@pytest.fixture
def cloud() -> Iterator[ThreadedDouble]:
    """A double of E2B's cloud."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    require("e2b")
    with ThreadedDouble() as double:
        yield double


@pytest.fixture(params=("local", "docker", "e2b"))
def restart_on_each(request: pytest.FixtureRequest) -> Callable[[], Daemon]:
    """Starts a daemon of each backend, the next time on what the last one left."""
    require(request.param)
    config = f'pool.size = 0\nserver.backend = "{request.param}"\ndocker.images.base = "{DOCKER_IMAGE}"\n'
    if request.param == "e2b":
        cloud = request.getfixturevalue("cloud")  # before the daemon, which ends its machines
        config += "".join(f'e2b.{key} = "{cloud.url}"\n' for key in ("api_url", "sandbox_url"))
        config += f'e2b.api_key_file = "{cloud.api_key_file}"\n'
    start = request.getfixturevalue("start")
    return lambda: start(config)


@pytest.fixture
def disk(directory: Path) -> Iterator[Path]:
    """A small file system, which is soon full."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    place = directory / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "none", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)
