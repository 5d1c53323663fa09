"""One-time tokens: how a daemon shows a guest that it is the one.

The daemon holds a secret, the guest its hash taken as many times as there may be connections. At each of them the
daemon shows the hash taken once less than the last time; the guest hashes it, compares, and keeps what it was shown for
the next one (Lamport, "Password Authentication with Insecure Communication", 1981). So what lies in the guest's memory,
which every forked child inherits, opens nothing: it has been used, and the one before it cannot be computed from it.
"""

from __future__ import annotations

from _operator import _compare_digest as compare_digest

# Python's own: OpenSSL, which hashlib brings, costs a sandbox some milliseconds and 4 MB.
try:
    from _sha2 import sha256  # type: ignore[import-not-found]  # CPython 3.12 and later
except ImportError:
    try:
        from _sha256 import sha256  # type: ignore[import-not-found]
    except ImportError:  # a Python that was built without its own
        from hashlib import sha256

CHAIN_LENGTH = 256
"""Connections to a guest on the daemon's own host: they do not break by themselves."""
LONG_CHAIN_LENGTH = 4096
"""Connections to a guest over a network: for a day, one every twenty seconds."""
# Tokens that may be skipped: the daemon may have begun connections that never reached this guest.
MAX_SKIPPED = 64


def chained(secret: bytes, times: int) -> bytes:
    """SHA-256, so many times over."""
    for _ in range(times):
        secret = sha256(secret).digest()
    return secret


def is_next(shown: bytes, expected: bytes) -> bool:
    """Returns True when hashing the shown token leads to the expected hash."""
    for _ in range(MAX_SKIPPED):
        shown = chained(shown, 1)
        if compare_digest(shown, expected):
            return True
    return False
