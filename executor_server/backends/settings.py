"""Settings that every sandbox gets, on any backend: environment variables, limits, the guest's configuration.

None of the daemon's own environment variables is among them. PATH is missing: the image decides where programs are.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from executor_server.backends.channel import first_token
from executor_server.core import SandboxFailure, SandboxSpec
from executor_server.guest.wire.egress_listener import LISTENER_ADDRESS
from executor_server.guest.wire.tokens import chained

OLDEST_PYTHON = (3, 9)
"""The oldest CPython that the guest runs on."""

WORKSPACE = "/workspace"
VAR_TMP = "/var/tmp"
HOSTNAME = "sandbox"
HOSTS = f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost\n"
"""A sandbox's /etc/hosts."""

CA_BUNDLE = "/etc/remote-executor/ca.pem"
"""The certificate authorities in a sandbox with a network: the system's, and the egress proxy's own."""
# OpenSSL and Python, requests, curl, pip, git, Node (in addition to its own).
_CA_VARIABLES = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
)

TOKEN_BYTES = 32
BACKLOG = 8
"""Connections that wait for the guest. One daemon connects; the others are its retries."""

NO_COMMAND = (126, 127)
"""Exit codes of a shell, and so of container runtimes, for a command that can't be executed or does not exist."""

# With more threads than this, numerical libraries on shared machines only take time from each other.
_NUMERIC_THREADS = 8
_PROCESSES_PER_NUMERIC_THREAD = 4

AMPLE_PROCESSES = _NUMERIC_THREADS * _PROCESSES_PER_NUMERIC_THREAD
"""With this limit of processes or a higher one, a sandbox has the most numerical threads possible on this host."""


@cache
def _processors() -> int:
    return os.cpu_count() or 1  # reads a file


def numeric_threads(processes: int) -> int:
    """Returns the threads of numerical libraries in a sandbox with this limit of processes."""
    return max(1, min(_processors(), processes // _PROCESSES_PER_NUMERIC_THREAD, _NUMERIC_THREADS))


def sandbox_environment(processes: int) -> dict[str, str]:
    """Environment variables of a sandbox with this limit of processes.

    Caches go to /tmp: /workspace holds only files that the program itself wrote there.
    """
    threads = str(numeric_threads(processes))
    return {
        "HOME": WORKSPACE,
        "USER": "sandbox",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
        "XDG_CACHE_HOME": "/tmp/.cache",
        "XDG_CONFIG_HOME": "/tmp/.config",
        "MPLBACKEND": "module://executor_guest.interpreter.mpl_backend",
        "MPLCONFIGDIR": "/tmp/.matplotlib",
        "PLOTLY_RENDERER": "plotly_mimetype",
        "PYTHONDONTWRITEBYTECODE": "1",
        # A BLAS starts a thread for each processor of the host, and on a large one reaches the limit of processes.
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
    }


def egress_environment(ca_bundle: str | None = CA_BUNDLE) -> dict[str, str]:
    """Environment variables that point programs to the egress proxy and to the CAs of its certificates.

    `ca_bundle`: the path inside; None if the proxy makes no certificates, so that programs use the image's CAs.
    """
    proxy = f"http://{LISTENER_ADDRESS[0]}:{LISTENER_ADDRESS[1]}"
    own = "localhost,127.0.0.1,::1"
    # Some programs read one spelling only; curl reads http_proxy in lower case.
    spelled = {"http_proxy": proxy, "https_proxy": proxy, "all_proxy": proxy, "no_proxy": own}
    return {
        **spelled,
        **{name.upper(): value for name, value in spelled.items()},
        "NODE_USE_ENV_PROXY": "1",  # without it Node's own fetch ignores the others
        **({} if ca_bundle is None else dict.fromkeys(_CA_VARIABLES, ca_bundle)),
    }


async def ca_bundle_of(find: Callable[[], Path] | None) -> Path:
    """Returns the file of the egress proxy's authorities, for a sandbox with a network. Raises SandboxFailure.

    `find` makes the file if needed, so it runs in a thread. The path changes with the content.
    """
    if find is None:
        raise SandboxFailure("no egress proxy runs, which a sandbox with a network needs")
    return await asyncio.to_thread(find)


def shm_bytes(disk_bytes: int, memory_bytes: int) -> int:
    """Size of /dev/shm. It counts as memory, so it is at most half: a full /dev/shm leaves room for a program."""
    return min(disk_bytes, memory_bytes // 2)


def guest_config(
    spec: SandboxSpec,
    *,
    token: bytes,
    connections_max: int,
    memory_bytes: int,
    watch_memory: bool,
    preload: Sequence[str],
    has_environment: bool = False,
) -> dict[str, object]:
    """The part of the guest's configuration that does not depend on how the daemon reaches it.

    `connections_max` is the length of the chain of tokens, one for each connection. `watch_memory`: the kernel limits
    no memory here, so the supervisor checks at intervals and ends programs that take too much. `has_environment`: one
    is at ENVIRONMENT_PATH, for the interpreter to import from.
    """
    return {
        "token_hash": chained(first_token(token, connections_max), 1).hex(),
        "workspace": WORKSPACE,
        "orphan_time_s": spec.orphan_time_s,
        "memory_bytes": memory_bytes,
        "processes": spec.processes,
        "watch_memory": watch_memory,
        "preload": list(preload),
        "egress": spec.egress,
        "environment": has_environment,
    }
