"""A front over two static nodes, for tests that want a daemon and need not know that it is a fleet.

EXECUTOR_TEST_FLEET=1 asks for one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.backends import require
from tests.support.daemon import Daemon
from tests.support.machines import fleet_without_cables

VARIABLE = "EXECUTOR_TEST_FLEET"
NODES = ("n1", "n-2")


def wanted() -> bool:
    """True when this run of the tests is for a fleet."""
    return bool(os.environ.get(VARIABLE))


@contextmanager
def fleet_daemon(config: str = "", *, policy: str = "") -> Iterator[Daemon]:
    """The front of two nodes with this configuration, on the local backend, as if it were a daemon of its own.

    `policy` is the content of its policy file.
    """
    require("local")
    front_config = config if policy else ""
    with fleet_without_cables(*NODES, front_config=front_config, node_config=config, policy=policy) as made:
        assert made.front.process is not None
        yield Daemon(made.front.process, made.front.state_dir, made.front.directory / "log")
