"""A front over two static nodes, for tests that want a daemon and need not know that it is a fleet.

EXECUTOR_TEST_FLEET asks for one: `redirect` is a fleet whose clients follow their sessions to the nodes, `proxy` one
whose front passes all calls on.
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


def wanted() -> str:
    """The kind of fleet that this run of the tests is for; empty for daemons of no fleet."""
    kind = os.environ.get(VARIABLE, "")
    assert kind in ("", "redirect", "proxy"), f"{VARIABLE} is redirect or proxy, not {kind!r}"
    return kind


@contextmanager
def fleet_daemon(config: str = "", *, proxy: bool, policy: str = "") -> Iterator[Daemon]:
    """The front of two nodes with this configuration, on the local backend, as if it were a daemon of its own.

    `policy` is the content of its policy file.
    """
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    front_config = f"proxy = {str(proxy).lower()}\n"
    if policy:
        (directory / "policy.toml").write_text(policy)
        front_config += f'[policy]\nfile = "{directory / "policy.toml"}"\n{config}'
    with fleet(directory, *NODES, front_config=front_config, node_config=config, has_cables=False) as made:
        assert made.front.process is not None
        yield Daemon(made.front.process, made.front.state_dir, made.front.directory / "log")
    shutil.rmtree(directory)
