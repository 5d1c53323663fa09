"""The effect of one tenant's flood on another: the other's slowest calls, compared with those when it is alone.

Two tenants, each with its own token. `quiet` executes one line in a session, again and again, then makes sessions for
one line each. `flood` (benchmarks/flood.py) does one kind of thing as much as it can, then all kinds at once. It has
the limits that a team would set that runs such a daemon for many: quotas, and a limit on the processors of each
sandbox. With its quota of executions this leaves half of the host to others. The last figures show what the limits buy:
the same flood without them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.daemon import running_daemon
from benchmarks.figures import AtMostTimes, Figure, Reference, timed
from benchmarks.flood import KINDS, flooding
from benchmarks.references import DOCKER_IMAGE, require_docker_image
from executor_client import ExecutorClient, Session
from executor_client.errors import ResourceExhaustedError

QUOTAS = {
    "sessions": 8,
    "executions": 4,
    "creations_per_minute": 30,
    "calls": 64,
    "calls_per_second": 100,
}
"""The quotas of the tenant that floods."""
CPUS = (os.cpu_count() or 1) / 2 / QUOTAS["executions"]
"""The processors of each of its sandboxes."""
_POLICY = f"""
default = "open"
[profiles.open]
[profiles.limited.quotas]
{"".join(f"{name} = {value}{chr(10)}" for name, value in QUOTAS.items())}
[profiles.limited.limits]
cpus = {float(CPUS)}
[tenants.flood]
profile = "limited"
"""
_EXECUTIONS = 300
_LIVES = 240
# Time for a flood to make its sessions and use up what it may have at once.
_RISE_S = 5.0
# No session begins after this time: without quotas there may be no end.
_LIVES_S = 30.0
_AIM = AtMostTimes(2)
# Seconds before a life that is refused for want of room is tried again, and after which it counts without success.
_RETRY_S = 0.005
_LONGEST_LIFE_S = 10.0


@dataclass(frozen=True)
class _Tenants:
    """Clients and tokens of a daemon with that policy."""

    address: str
    quiet: ExecutorClient
    flood_token: str
    unlimited_token: str


@dataclass
class _Samples:
    """Milliseconds."""

    executions: list[float]
    lives: list[float]

    def add(self, other: _Samples) -> None:
        self.executions += other.executions
        self.lives += other.lives


def local(bench: Bench) -> Iterator[Figure]:
    """Every kind of flood, against sandboxes of namespaces; and what it would be without quotas."""
    yield from _figures("local", KINDS, without_quotas=True)


def docker(bench: Bench) -> Iterator[Figure]:
    """All of it at once, against containers."""
    require_docker_image(DOCKER_IMAGE)
    yield from _figures("docker", (), without_quotas=False)


def _figures(backend: str, alone_too: tuple[str, ...], *, without_quotas: bool) -> Iterator[Figure]:
    with _tenants(backend) as tenants:
        floods: list[tuple[str, str, tuple[str, ...]]] = []
        floods += [(f"{kind} flood", tenants.flood_token, (kind,)) for kind in alone_too]
        floods.append(("every flood at once", tenants.flood_token, KINDS))
        if without_quotas:
            floods.append(("every flood, no quotas", tenants.unlimited_token, KINDS))
        with tenants.quiet.create_session() as session:
            alone, flooded = _quiet(tenants.quiet, session), []
            for _, token, kinds in floods:
                with flooding(tenants.address, token, *kinds):
                    time.sleep(_RISE_S)
                    flooded.append(_quiet(tenants.quiet, session))
                alone.add(_quiet(tenants.quiet, session))
    for (name, token, _), samples in zip(floods, flooded, strict=True):
        aim = _AIM if token == tenants.flood_token else None
        for what, taken, reference in (
            ("execute", samples.executions, alone.executions),
            ("session + execute", samples.lives, alone.lives),
        ):
            yield Figure(
                f"{backend}: {what}, {name}", "ms", tuple(taken), Reference("alone", tuple(reference)), aim, by_p99=True
            )


def _quiet(client: ExecutorClient, session: Session) -> _Samples:
    session.execute("1+1")
    executions = [timed(lambda: session.execute("1+1")) for _ in range(_EXECUTIONS)]
    deadline_s = time.monotonic() + _LIVES_S
    lives: list[float] = []
    while len(lives) < _LIVES and time.monotonic() < deadline_s:
        lives.append(timed(lambda: _live(client)))
    return _Samples(executions, lives)


def _live(client: ExecutorClient) -> None:
    """If a flood without quotas leaves no room for a session, the wait for it is measured too."""
    deadline_s = time.monotonic() + _LONGEST_LIFE_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(ResourceExhaustedError), client.create_session() as session:
            session.execute("1+1")
            return
        time.sleep(_RETRY_S)


@contextmanager
def _tenants(backend: str) -> Iterator[_Tenants]:
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        policy, tokens = Path(directory) / "policy.toml", Path(directory) / "tokens.json"
        policy.write_text(_POLICY)
        settings = f"""
            [server]
            token_file = {json.dumps(str(tokens))}
            [policy]
            file = {json.dumps(str(policy))}
            """
        config = Path(directory) / "config.toml"
        config.write_text(settings)
        quiet, flood, unlimited = (_token(config, tenant) for tenant in ("quiet", "flood", "unlimited"))
        with running_daemon(backend, settings) as daemon, _client(daemon.unix_address, quiet) as client:
            yield _Tenants(daemon.unix_address, client, flood, unlimited)


def _client(address: str, token: str) -> ExecutorClient:
    """A client that does not wait when the daemon is busy."""
    return ExecutorClient(address, token=token, busy_timeout_s=0)


def _token(config: Path, tenant: str) -> str:
    command = [sys.executable, "-m", "executor_server", "token", "new", "--tenant", tenant, "--config", str(config)]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout.strip()
