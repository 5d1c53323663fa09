"""The time of uploads, which a large one takes in addition to that of any request."""

from __future__ import annotations

_BYTES_S = 2**20  # a second, at least


def upload_s(size_bytes: int) -> float:
    """Returns the additional seconds that it may take."""
    return size_bytes / _BYTES_S
