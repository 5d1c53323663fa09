"""One real daemon for all tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_client import ExecutorClient
from executor_client.smolagents import RemoteExecutor
from tests.support.backends import require
from tests.support.daemon import Daemon, running_daemon


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A daemon with the local backend, as `executor-server serve` starts it without configuration."""
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    with running_daemon(directory) as running:
        yield running
    shutil.rmtree(directory)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[ExecutorClient]:
    with daemon.client() as connected:
        yield connected


@pytest.fixture
def executor(daemon: Daemon) -> Iterator[RemoteExecutor]:
    """An executor with the imports that the tests of values need."""
    with RemoteExecutor(["numpy.*", "pandas.*", "PIL.*", "os"], **daemon.access) as ready:
        yield ready
