"""One daemon on the local backend and one gateway for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.backend_daemon import daemon_on
from tests.support.backends import require
from tests.support.daemon import Daemon
from tests.support.gateway import Gateway, running_gateway


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    with daemon_on("local") as running:
        yield running


@pytest.fixture(scope="module")
def gateway(daemon: Daemon) -> Iterator[Gateway]:
    with running_gateway(daemon) as running:
        yield running


@pytest.fixture(scope="module")
def e2b(gateway: Gateway) -> Iterator[Gateway]:
    """The gateway, with the environment in which E2B's SDK uses it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in gateway.environment().items():
            patch.setenv(name, value)
        yield gateway
