"""One-time tokens that authenticate a daemon to a guest.

The daemon has a secret. The guest has a hash of it, applied once for each possible connection. For each connection the
daemon shows the hash applied once less than before; the guest hashes that, compares, and keeps it for the next
connection (Lamport, "Password Authentication with Insecure Communication", 1981). So the value in the guest's memory,
which every forked child inherits, opens nothing: it has been used, and the next one cannot be computed from it.
"""

from __future__ import annotations

from _operator import _compare_digest as compare_digest

# Python's built-in SHA-256: hashlib loads OpenSSL, which costs a sandbox some milliseconds and 4 MB.
try:
    from _sha2 import sha256  # type: ignore[import-not-found]  # CPython 3.12 and later
except ImportError:
    try:
        from _sha256 import sha256  # type: ignore[import-not-found]
    except ImportError:  # a Python that was built without it
        from hashlib import sha256

CHAIN_LENGTH = 256
"""The most connections to a guest on the daemon's own host, where connections do not break by themselves."""
LONG_CHAIN_LENGTH = 4096
"""The most connections to a guest over a network: one every twenty seconds for a day."""
# Tokens that may be skipped: the daemon may have begun connections that never reached this guest.
MAX_SKIPPED = 64


def chained(secret: bytes, times: int) -> bytes:
    """Returns SHA-256, applied `times` times."""
    for _ in range(times):
        secret = sha256(secret).digest()
    return secret


def is_next(shown: bytes, expected: bytes) -> bool:
    """Returns true if hashing the shown token, up to MAX_SKIPPED times, gives the expected hash."""
    for _ in range(MAX_SKIPPED):
        shown = chained(shown, 1)
        if compare_digest(shown, expected):
            return True
    return False
