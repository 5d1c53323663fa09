"""Runs `executor-server` with a fork server that does not wait: the first sandbox of a kind starts its fork server, and
those that are made ahead end soon.
"""

from __future__ import annotations

import sys

from executor_server.backends.local.fork_server import demand, stock
from executor_server.daemon.cli import main

EAGER_SERVER = (sys.executable, __file__)

if __name__ == "__main__":
    demand._WANTED, demand._AFTER_S, stock._KEPT_S = 1, 0.0, 0.2
    main()
