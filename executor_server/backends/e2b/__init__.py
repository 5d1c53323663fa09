"""Sandboxes that are rented: virtual machines in E2B's cloud; `backend.py` is the way in."""

from executor_server.backends.e2b.backend import E2BBackend

__all__ = ["E2BBackend"]
