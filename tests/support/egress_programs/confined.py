"""Confines itself as the proxy's process does, tries what a proxy that was taken over would, and prints the errors.

Arguments: a file that only root can read, and a process to kill and to trace.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from executor_server.backends import unlisted_uid
from executor_server.network.egress.system_calls import proxy_filter
from executor_server.network.proxy.confinement import Confinement, confine

_PTRACE_ATTACH = 16
_CLONE_NEWUSER = 0x10000000
_BPF = {"x86_64": 321, "aarch64": 280}


def main(private: str, process: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    memory = os.memfd_create("x")
    confine(Confinement(unlisted_uid(), proxy_filter()))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def call(function: str, *arguments: object) -> Callable[[], None]:
        def do() -> None:
            if getattr(libc, function)(*arguments) < 0:
                raise OSError(ctypes.get_errno(), function)

        return do

    def close_after(family: int, kind: int, protocol: int = 0) -> Callable[[], None]:
        return lambda: socket.socket(family, kind, protocol).close()

    attempts: dict[str, Callable[[], object]] = {
        "read": lambda: Path(private).read_bytes(),
        "setuid": lambda: os.setuid(0),
        "setgid": lambda: os.setgid(0),
        "kill": lambda: os.kill(process, 0),
        "ptrace": call("ptrace", _PTRACE_ATTACH, process, 0, 0),
        "mount": call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
        "unshare": call("unshare", _CLONE_NEWUSER),
        "bpf": call("syscall", _BPF[os.uname().machine], 0, 0, 0),
        "raw socket": close_after(socket.AF_INET, socket.SOCK_RAW, 1),
        "packet socket": close_after(socket.AF_PACKET, socket.SOCK_RAW),
        "write to a file": lambda: Path("/tmp/x").open("a").close(),
        "make a file": lambda: Path("/tmp/x-of-the-proxy").mkdir(),
        "remove a file": lambda: Path("/tmp/x-of-the-proxy").unlink(),
        "run a program": lambda: os.execv("/bin/true", ["true"]),
        "make a process": os.fork,
        "listen": lambda: socket.socket().listen(),
        "large file": lambda: os.pwrite(memory, b"x", 100_000),
        "more files": _raise_limit,
    }
    print(json.dumps({name: _error_of(attempt) for name, attempt in attempts.items()}))  # noqa: T201


def _raise_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard + 1))


def _error_of(attempt: Callable[[], object]) -> str:
    with contextlib.ExitStack():
        try:
            attempt()
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        except ValueError:  # setrlimit's words for EPERM
            return "EPERM"
    return "done"


main(sys.argv[1], int(sys.argv[2]))
