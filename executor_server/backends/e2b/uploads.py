"""The time that an environment takes on its way into a machine, in addition to that of any request."""

from __future__ import annotations

_UPLOADED_BYTES_S = 2**20  # a second, at least
_UNPACKED_BYTES_S = 2 * 2**20
_UNPACKING_BEGINS_S = 30.0


def upload_s(size_bytes: int) -> float:
    """Returns the additional seconds that uploading this number of bytes may take."""
    return size_bytes / _UPLOADED_BYTES_S


def unpack_s(size_bytes: int) -> float:
    """Returns the additional seconds that unpacking an archive of this size may take."""
    return _UNPACKING_BEGINS_S + size_bytes / _UNPACKED_BYTES_S
