"""One real daemon for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from executor_client import ExecutorClient
from executor_client.smolagents import RemoteExecutor
from tests.support.backends import require
from tests.support.daemon import Daemon, daemon_of


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A daemon with the local backend, as `executor-server serve` starts it with an empty configuration."""
    require("local")
    with daemon_of("") as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[ExecutorClient]:
    with daemon.client() as connected:
        yield connected


@pytest.fixture
def executor(daemon: Daemon) -> Iterator[RemoteExecutor]:
    """An executor with the imports that the tests of values need."""
    with RemoteExecutor(["numpy.*", "pandas.*", "PIL.*", "os"], **daemon.access) as ready:
        yield ready
