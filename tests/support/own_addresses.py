"""Addresses for one world: IPv4 addresses of this host that no other program uses, each a /32 on the loopback interface.

An egress proxy never connects to 127.0.0.0/8, and to an address of the host itself only where `[egress] internal` lists
exactly that one. So a server of the tests needs an address that is neither, and several worlds have to stand side by
side, since tests run in several processes. The kernel refuses to add an address twice, which makes the adding itself
the reservation. The label of an address holds the number of the process that added it: an address whose process was
killed is taken away by the next world.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import ipaddress
import os
import random
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RANGE = ipaddress.ip_network("10.213.0.0/16")
LABEL_PREFIX = "lo:rx"
_ATTEMPTS = 200
_COMMAND_TIMEOUT_S = 20.0
# <net/if.h>: SIOCGIFCONF fills an array of struct ifreq, of 40 bytes each on 64-bit machines: a name and an address.
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_NAME_BYTES = 16
_MAX_INTERFACES = 4096


@functools.cache
def why_no_addresses() -> str:
    """The reason why this host cannot have a world; empty when it can."""
    if os.geteuid() != 0:
        return "an internet of the tests' own takes root: it adds addresses to the loopback interface"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2) here, which adds addresses to the loopback interface"
    try:
        with reserved_address():
            return ""
    except OSError as error:
        return str(error)


@contextmanager
def reserved_address() -> Iterator[str]:
    """An address that only the calling process uses; it is taken away at the end. Raises OSError."""
    _remove_stale()
    address = _add_any()
    try:
        yield address
    finally:
        _ip("del", f"{address}/32", "dev", "lo")


def addresses_of(pid: int) -> set[str]:
    """The addresses that worlds of that process have at present."""
    return {address for label, address in _listed() if label == f"{LABEL_PREFIX}{pid}"}


def _add_any() -> str:
    reason = ""
    for _ in range(_ATTEMPTS):
        # Not .0 and not .255, which some programs take for a network's own.
        address = str(RANGE[random.randrange(256) * 256 + random.randrange(1, 255)])
        reason = _ip("add", f"{address}/32", "dev", "lo", "label", f"{LABEL_PREFIX}{os.getpid()}")
        if not reason:
            return address
        if all(address != taken for _, taken in _listed()):
            break  # refused for another reason than that it is taken
    raise OSError(f"no address could be added to the loopback interface: {reason}")


def _remove_stale() -> None:
    for label, address in _listed():
        pid = label.removeprefix(LABEL_PREFIX)
        if label.startswith(LABEL_PREFIX) and pid.isdecimal() and not Path("/proc", pid).exists():
            _ip("del", f"{address}/32", "dev", "lo")  # another world may have been quicker


def _ip(*words: str) -> str:
    """Runs `ip addr …`; returns what it says against it, empty when it was done."""
    command = ["ip", "addr", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"`ip` ended with {done.returncode}")


def _listed() -> list[tuple[str, str]]:
    """Labels and IPv4 addresses of this host. One call of the kernel: it is asked after each test."""
    entries = ctypes.create_string_buffer(_MAX_INTERFACES * _IFREQ_BYTES)
    request = struct.pack("iL", len(entries), ctypes.addressof(entries))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        filled, _ = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, request))
    raw = ctypes.string_at(entries, filled)
    found = (raw[start : start + _IFREQ_BYTES] for start in range(0, filled, _IFREQ_BYTES))
    # After the name a struct sockaddr_in: family and port of 2 bytes each, then the address.
    return [
        (entry[:_NAME_BYTES].split(b"\0")[0].decode(), socket.inet_ntoa(entry[_NAME_BYTES + 4 : _NAME_BYTES + 8]))
        for entry in found
    ]
