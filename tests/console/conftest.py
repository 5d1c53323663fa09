"""One daemon on the local backend and one console for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.backend_daemon import daemon_on
from tests.support.backends import require
from tests.support.console import Browser, Console, running_console
from tests.support.daemon import Daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    with daemon_on("local") as running:
        yield running


@pytest.fixture(scope="module")
def console(daemon: Daemon) -> Iterator[Console]:
    """With actions."""
    with running_console(daemon, "--actions") as running:
        yield running


@pytest.fixture
def browser(console: Console) -> Iterator[Browser]:
    with console.browser() as signed_in:
        yield signed_in
