"""Daemons that a test may hurt, and what is known of them from outside."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.backends import require
from tests.support.daemon import Daemon, running_daemon

StartDaemon = Callable[..., Daemon]


@pytest.fixture
def directory() -> Iterator[Path]:
    """With a short name: the path of a Unix socket has at most 107 bytes."""
    require("local")
    with tempfile.TemporaryDirectory(prefix="d-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture
def start(directory: Path) -> Iterator[StartDaemon]:
    """Starts a daemon with a configuration in TOML; a test that kills it may start another on the same directory."""
    with contextlib.ExitStack() as stack:

        def start(config: str = "") -> Daemon:
            path = directory / "config.toml"
            path.write_text(config)
            return stack.enter_context(running_daemon(directory, "--config", str(path)))

        yield start


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
