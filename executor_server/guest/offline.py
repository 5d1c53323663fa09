"""Tells a model that it is the sandbox which reaches nothing, where libraries only say which system call failed.

A sandbox has no network but its own loopback, whichever backend made it: the policy knows no other value yet.
"""

from __future__ import annotations

import errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

NOTE = (
    '[this sandbox has no network (policy: sandbox.network = "none"); '
    "data can reach it as files, variables or answers of tools]"
)
# getaddrinfo's NONAME, AGAIN, FAIL and NODATA. A name of the sandbox's own, as localhost, is found without a network.
_NO_ADDRESS = (-2, -3, -4, -5)
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
_MAX_EXCEPTIONS = 64
# As the C library, curl and git say it, in what a program or a child of it prints.
_SAID = (
    b"Name or service not known",
    b"Temporary failure in name resolution",
    b"No address associated with hostname",
    b"Network is unreachable",
    b"Could not resolve host",
)


def is_offline(error: BaseException) -> bool:
    """True when an attempt to reach something outside of the sandbox led to this exception, maybe through others."""
    pending: list[Optional[BaseException]] = [error]
    for _ in range(_MAX_EXCEPTIONS):
        one = pending.pop() if pending else None
        if one is None:
            if not pending:
                return False
            continue
        if _is_cause(one):
            return True
        pending += [one.__context__, one.__cause__]
        members: Any = getattr(one, "exceptions", ())
        if isinstance(members, tuple):
            pending += [member for member in members[:_MAX_EXCEPTIONS] if isinstance(member, BaseException)]
    return False


def _is_cause(error: BaseException) -> bool:
    if not isinstance(error, OSError):
        return False
    # socket.gaierror, without importing socket for it.
    numbers = _NO_ADDRESS if type(error).__name__ == "gaierror" else _NO_WAY
    return error.errno in numbers


def says_offline(output: bytes) -> bool:
    """True when the same is said in what was printed: by a program that caught the exception, or by another one."""
    return any(text in output for text in _SAID)
