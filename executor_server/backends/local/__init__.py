"""Sandboxes made of Linux namespaces on this host; `backend.py` is the way in."""

from executor_server.backends.local.backend import LocalBackend

__all__ = ["LocalBackend"]
