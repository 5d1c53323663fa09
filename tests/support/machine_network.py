"""A network of namespaces: each machine of a test has one of its own, with a cable to a switch that can be cut.

The switch is a bridge of the kernel, and the test is on it too. A cable that is cut at the switch is the hardest cut
there is: both ends keep their carrier, nothing that is sent arrives, and no connection ends. Making it needs root.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

_TIMEOUT_S = 30.0
# For benchmarks of network devices (RFC 2544): no other network of a host has these addresses.
_NETWORKS = ipaddress.ip_network("198.18.0.0/15")


class NoNetwork(Exception):
    """This host gives no namespaces of networks; the message says why."""


@dataclass(frozen=True)
class Place:
    """A machine's namespace, its address, and its end of the cable at the switch."""

    namespace: str
    host: str
    port: str
    switch: str

    @property
    def command(self) -> tuple[str, ...]:
        """Begins a command that runs in the machine's network, and else where the test does."""
        return ("nsenter", f"--net=/run/netns/{self.namespace}", "--")

    def unplug(self) -> None:
        _ip("link", "set", "dev", self.port, "nomaster")

    def plug_in(self) -> None:
        _ip("link", "set", "dev", self.port, "master", self.switch)


class Network:
    """The switch, and the places at it."""

    def __init__(self, stack: ExitStack) -> None:
        """Raises NoNetwork."""
        self._stack = stack
        self._id = secrets.token_hex(3)
        self._hosts = _any_network().hosts()
        self._numbers = itertools.count(1)
        self.switch = f"xs{self._id}"
        _ip("link", "add", self.switch, "type", "bridge")
        stack.callback(_ip, "link", "delete", self.switch)
        self.host = str(next(self._hosts))
        """The test's own address."""
        _ip("address", "add", f"{self.host}/24", "dev", self.switch)
        _ip("link", "set", self.switch, "up")

    def place(self) -> Place:
        """Makes another machine's place. Raises NoNetwork."""
        number = next(self._numbers)
        namespace, port, inside = f"x{self._id}-{number}", f"xp{self._id}{number}", f"xi{self._id}{number}"
        _ip("netns", "add", namespace)
        self._stack.callback(_ip, "netns", "delete", namespace)
        _ip("link", "add", port, "type", "veth", "peer", "name", inside, "netns", namespace)
        host = str(next(self._hosts))
        _ip("-netns", namespace, "address", "add", f"{host}/24", "dev", inside)
        for device in ("lo", inside):
            _ip("-netns", namespace, "link", "set", device, "up")
        _ip("link", "set", port, "master", self.switch, "up")
        return Place(namespace, host, port, self.switch)


@contextmanager
def network() -> Iterator[Network]:
    """A network that is gone at the end; skips the test where none can be made."""
    with ExitStack() as stack:
        try:
            made = Network(stack)
            made.place()  # a host may allow bridges and refuse namespaces
        except NoNetwork as error:
            pytest.skip(f"needs namespaces of networks: {error}")
        yield made


def _any_network() -> ipaddress.IPv4Network:
    """Returns one of the networks by chance: tests may run beside each other."""
    found = secrets.choice(list(_NETWORKS.subnets(new_prefix=24)))
    assert isinstance(found, ipaddress.IPv4Network)
    return found


def _ip(*arguments: str) -> None:
    """Raises NoNetwork."""
    if os.geteuid() != 0:
        raise NoNetwork("only root can make them")
    for tool in ("ip", "nsenter"):
        if shutil.which(tool) is None:
            raise NoNetwork(f"there is no program {tool}")
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise NoNetwork(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
