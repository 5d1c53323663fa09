"""Recognizes errors of a full disk."""

from __future__ import annotations

import errno


def is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
