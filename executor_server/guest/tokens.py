"""One-time tokens: how a daemon shows a guest that it is the one.

The daemon holds a secret, the guest its hash taken `CHAIN_LENGTH` times. At each connection the daemon shows the hash
taken once less than the last time; the guest hashes it, compares, and keeps what it was shown for the next time
(Lamport, "Password Authentication with Insecure Communication", 1981). So what lies in the guest's memory, which every
forked child inherits, opens nothing: it has been used, and the one before it cannot be computed from it.
"""

from __future__ import annotations

CHAIN_LENGTH = 256
# How many connections the daemon may have begun without this guest's having seen them.
MAX_SKIPPED = 16


def chained(secret: bytes, times: int) -> bytes:
    """SHA-256, so many times over."""
    # Imported here: OpenSSL costs milliseconds, and a warm sandbox has time for it before anyone waits.
    import hashlib

    for _ in range(times):
        secret = hashlib.sha256(secret).digest()
    return secret


def is_next(shown: bytes, expected: bytes) -> bool:
    """Whether hashing what was shown leads to what is expected."""
    import hmac

    for _ in range(MAX_SKIPPED):
        shown = chained(shown, 1)
        if hmac.compare_digest(shown, expected):
            return True
    return False
