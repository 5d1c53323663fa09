"""Runs `executor-server` with a fork server for each kind of sandbox, from the first one on."""

from __future__ import annotations

import sys

from executor_server.backends.local.fork_server.fork_servers import ForkServers
from executor_server.daemon.cli import main

EAGER_SERVER = (sys.executable, __file__)

if __name__ == "__main__":
    ForkServers.keeps = lambda *_: True  # type: ignore[method-assign]
    main()
