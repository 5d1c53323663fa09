"""Rented sandboxes: virtual machines in E2B's cloud. It exports the backend; the rest is private."""

from executor_server.backends.e2b.backend import E2BBackend
