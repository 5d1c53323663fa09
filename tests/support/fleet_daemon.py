"""A front over two static nodes, for tests that want a daemon and need not know that it is a fleet.

EXECUTOR_TEST_FLEET=1 asks for one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.backends import require
from tests.support.daemon import Daemon
from tests.support.machines import fleet

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
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    front_config = ""
    if policy:
        (directory / "policy.toml").write_text(policy)
        front_config = f'[policy]\nfile = "{directory / "policy.toml"}"\n{config}'
    with fleet(directory, *NODES, front_config=front_config, node_config=config, has_cables=False) as made:
        assert made.front.process is not None
        yield Daemon(made.front.process, made.front.state_dir, made.front.directory / "log")
    shutil.rmtree(directory)
