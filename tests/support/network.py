"""Daemons whose sessions may have a network, in the tests' own internet."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor_client import ExecutorClient, Session
from tests.support import fleet_daemon
from tests.support.backends import NETWORK_IMAGE, require, require_network_image
from tests.support.daemon import Daemon, daemon_of
from tests.support.internet.world import RAW_PORT, RAW_TLS_PORT, SUFFIX, Internet

EVERY_SITE = (f"*.{SUFFIX}", f"*.{SUFFIX}:{RAW_PORT}", f"*.{SUFFIX}:{RAW_TLS_PORT}")
"""Patterns of all hosts of the internet, and of all of their ports but the old server's."""
FETCH = """
import urllib.request, urllib.error
def fetch(url, method="GET", data=None, **headers):
    request = urllib.request.Request(url, method=method, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
"""
"""Code that defines fetch(url), which returns the status and the text of an answer, whatever the status is."""
LIMITS = {"wall_time_s": 60.0, "operations": 10**9}


def policy(*, allowed: Iterable[str] = EVERY_SITE, secrets: Iterable[Mapping[str, Any]] = (), **keys: Any) -> str:
    """A policy file whose default profile has these rules of the network; other keys are those of its table."""
    network = {"allowed": list(allowed), **keys}
    lines = ['default = "networked"', "[profiles.networked.network]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in network.items()]
    for secret in secrets:
        lines += ["[[profiles.networked.network.secrets]]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in secret.items()]
    return "\n".join([*lines, "[tenants.local]", "admin = true", ""])


def write_secret(path: Path, text: str) -> Path:
    """Writes a secret's file as the daemon wants it: for its owner alone."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return path


@contextmanager
def networked_daemon(internet: Internet, backend: str, rules: str, config: str = "", **egress: Any) -> Iterator[Daemon]:
    """A daemon on a backend with an image of network clients; `rules` is its policy file, `egress` are more keys of its
    section. Skips the test where the backend or the image is missing.

    It is the front of a fleet where the run of the tests asks for one (`fleet_daemon`).
    """
    config += f"\n[pool]\nsize = 0\n{internet.config(**egress)}"
    if fleet_daemon.wanted() and backend == "local":
        with fleet_daemon.fleet_daemon(config, policy=rules) as front:
            yield front
        return
    with ExitStack() as stack:
        if backend == "docker":
            require_network_image()
            config += f'\n[docker.images]\nbase = "{NETWORK_IMAGE}"\n'
        else:
            require(backend)
        if backend == "e2b":
            config += stack.enter_context(_cloud_of(internet))
        yield stack.enter_context(daemon_of(config, "--backend", backend, policy=rules))


@contextmanager
def _cloud_of(internet: Internet) -> Iterator[str]:
    """A double of the cloud, whose machines have this host's programs and reach this internet; the section for it."""
    from tests.support.e2b.threaded import ThreadedDouble  # takes E2B's SDK

    with ThreadedDouble(outside=internet.addresses) as double:
        keys = {"api_url": double.url, "sandbox_url": double.url, "api_key_file": str(double.api_key_file)}
        yield "\n[e2b]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())


def networked_session(client: ExecutorClient, *hosts: str, **options: Any) -> Session:
    """A session that may import what it likes and reach these hosts."""
    return client.create_session(network=hosts, **{"authorized_imports": ["*"], "limits": LIMITS, **options})


def proxies(daemon: Daemon) -> list[psutil.Process]:
    """The daemon's egress proxy; none where it has none at present."""
    children = psutil.Process(daemon.process.pid).children()
    return [child for child in children if "executor_server.network.proxy" in words_of(child)]


def words_of(process: psutil.Process) -> list[str]:
    """The words of its command; none of a process that ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@dataclass(frozen=True)
class Namespace:
    """A network namespace, seen from the host."""

    name: str  # "net:[4026532281]"

    @property
    def processes(self) -> list[psutil.Process]:
        """The processes in it."""
        return [process for process in psutil.process_iter() if _network_of(process.pid) == self.name]

    @property
    def traffic(self) -> dict[str, dict[str, int]]:
        """Bytes and packets of each interface, as the kernel counts them."""
        lines = Path(f"/proc/{self.processes[0].pid}/net/dev").read_text().splitlines()[2:]
        found = {}
        for line in lines:
            interface, _, numbers = line.partition(":")
            received_bytes, received_packets, *_ = (fields := list(map(int, numbers.split())))
            sent = {"sent_bytes": fields[8], "sent_packets": fields[9]}
            found[interface.strip()] = {
                "received_bytes": received_bytes,
                "received_packets": received_packets,
                **sent,
            }
        return found


def namespace_of(session: Session) -> Namespace:
    """The namespace of a session's sandbox, as the sandbox names it, found on the host."""
    output = session.execute("import os\nos.readlink('/proc/self/ns/net')").output
    assert isinstance(output, str)
    found = Namespace(output)
    assert found.processes, "the sandbox's processes are not to be seen"
    return found


def _network_of(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:  # it ended, or is another user's
        return ""


def skip_where_absent(output: object) -> None:
    """Skips a test whose program says, as its output, that the sandbox lacks what it is about."""
    if isinstance(output, str) and output.startswith("absent: "):
        pytest.skip(f"the sandbox has no {output.removeprefix('absent: ')}")
