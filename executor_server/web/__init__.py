"""The parts that the gateway and the console share as processes that serve HTTP.

`process.py` starts, serves and stops; `idle.py` closes connections without requests. It must not know what is served.
"""

from executor_server.web.idle import IdleConnections
from executor_server.web.process import (
    StartError,
    daemon_address,
    daemon_needs_tls,
    run,
    scheme,
    server,
    until_stopped,
)
