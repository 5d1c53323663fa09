"""Sandboxes made of Linux namespaces on this host. It exports the backend; the rest is private."""

from executor_server.backends.local.backend import LocalBackend
from executor_server.backends.local.fork_server.fork_servers import ForkServerStats
