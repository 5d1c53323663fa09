"""One real daemon for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from executor_client import ExecutorClient
from executor_client.smolagents import RemoteExecutor
from tests.support.backend_daemon import daemon_on
from tests.support.backends import require
from tests.support.daemon import Daemon
from tests.support.watched import Watched, watched_daemon


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A daemon as `executor-server serve` starts it with an empty configuration; EXECUTOR_TEST_BACKEND names another
    backend than the local one."""
    with daemon_on(os.environ.get("EXECUTOR_TEST_BACKEND", "local")) as running:
        yield running


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """A daemon whose metrics and traces are collected."""
    require("local")
    with watched_daemon() as running:
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
