"""Recognizes programs that failed to reach a host directly, or to install a package, and tells the model what works.

Libraries only name the system call that failed. A sandbox has only its own loopback. Everything else is reached through
the egress proxy, by programs that use it, or not at all.
"""

from __future__ import annotations

import errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional, Sequence

NO_NETWORK = (
    "[this sandbox has no network: the policy granted the session none (network.allowed); "
    "pass data in as files, variables or results of tools]"
)
NOT_INSTALLED = (
    '[the package was not installed: a session gets its packages when it is created; use packages=["NAME"] '
    "(executor run --with NAME), if the policy allows it]"
)
MISSING = (
    "[the image lacks the package, and a running session can't install any; create the session with "
    'packages=["{name}"] (executor run --with {name}), if the policy allows it]'
)
# getaddrinfo's NONAME, AGAIN, FAIL and NODATA. Local names such as localhost are found without a network.
_NO_ADDRESS = (-2, -3, -4, -5)
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
_MAX_EXCEPTIONS = 64
_MAX_WORDS = 64
_MAX_NAME_CHARS = 100
# "Use pip or conda to install openpyxl", "`pip install 'polars[excel]'`", "conda install -c conda-forge x".
_ADVICE = (
    r"\b(?:pip3?|conda|mamba|uv)\b[^.`'\"]{0,40}?\b(?:install|add) (?:the |-c \S+ |-\S+ )*"
    r"[`'\"]?([A-Za-z0-9][\w-]*(?:\[[\w,-]+\])?)"
)
_INSTALLERS = ("pip", "pip3", "uv")
# Messages of the C library, curl and git in the output of a program or its child processes.
_MESSAGES = (
    b"Name or service not known",
    b"Temporary failure in name resolution",
    b"No address associated with hostname",
    b"Network is unreachable",
    b"Could not resolve host",
)


# Messages of pip and uv that could not get a package, and of a sandbox that has neither.
_INSTALLERS_MESSAGES = (
    b"ERROR: No matching distribution found for ",
    b"ERROR: Could not find a version that satisfies the requirement ",
    b"error: externally-managed-environment",
    b"No solution found when resolving dependencies",
    b"error: Failed to fetch: ",
    b"No module named pip",
    b"No module named uv",
    b"pip: not found",
    b"pip: command not found",
    b"uv: not found",
    b"uv: command not found",
)


def note(network: Sequence[str]) -> str:
    """Returns the note for a session that may reach these hosts."""
    if not network:
        return NO_NETWORK
    return (
        "[this sandbox reaches other hosts only by name, and only through the proxy that http_proxy names; "
        f"allowed: {', '.join(network)}]"
    )


def is_offline(error: BaseException) -> bool:
    """True when an attempt to reach an address outside the sandbox caused this exception, perhaps through others."""
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
    numbers = _NO_ADDRESS if type(error).__name__ == "gaierror" else _NO_ROUTE
    return error.errno in numbers


def says_offline(output: bytes) -> bool:
    """True when output has such a message, from a program that caught the exception or from a child process."""
    return any(text in output for text in _MESSAGES)


def says_not_installed(output: bytes) -> bool:
    """True when output has a message of an installer that found no package, or of a missing installer."""
    return any(text in output for text in _INSTALLERS_MESSAGES)


def missing_package(error: BaseException) -> str:
    """Returns the package that an error of a library advises to install; empty for any other error."""
    if not isinstance(error, ImportError):
        return ""
    import re

    found = re.search(_ADVICE, str(error))
    return found.group(1)[:_MAX_NAME_CHARS] if found else ""


def is_install(error: BaseException) -> bool:
    """True when a child process failed to install a package. Its output may have been captured."""
    if type(error).__name__ != "CalledProcessError":
        return False
    command = getattr(error, "cmd", "")
    words = command.split() if isinstance(command, str) else [str(word) for word in command[:_MAX_WORDS]]
    programs = [word.rpartition("/")[2] for word in words]
    return "install" in programs and any(program in _INSTALLERS for program in programs)
