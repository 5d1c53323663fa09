"""The parts that all containers of one daemon share, found and built once; and containers made for a trial."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from executor_server.backends.channel import SocketEndpoint
from executor_server.backends.directory import SOCKET_NAME, new_sandbox_id
from executor_server.backends.docker.engine import Engine, EngineFacts
from executor_server.backends.docker.options import Bind, ContainerRequest, container_config
from executor_server.backends.docker.sandbox import DockerSandbox
from executor_server.backends.guest_archive import GuestArchive, pack_guest
from executor_server.backends.settings import HOSTS
from executor_server.backends.users import UNIQUE_USERS, UNNAMED_USERS, HostUsers
from executor_server.guest.wire.paths import GUEST_PATH

DAEMON_LABEL = "executor.daemon"
SANDBOX_LABEL = "executor.sandbox"
FINGERPRINT_LABEL = "executor.fingerprint"
USER_LABEL = "executor.user"


@dataclass(frozen=True)
class Resources:
    engine: Engine
    facts: EngineFacts
    daemon_id: str
    directory: Path  # holds the sandboxes' directories
    guest: GuestArchive
    hosts_file: Path
    runtime: str | None
    users: HostUsers
    build_uid: int  # the user of the build sandboxes that write: one for all daemons, or an ordinary user's own
    trials: set[str] = field(default_factory=set)  # ids of the sandboxes of trials that are under way

    @classmethod
    def build(
        cls, engine: Engine, facts: EngineFacts, *, daemon_id: str, directory: Path, runtime: str | None
    ) -> Resources:
        """Writes the files that containers mount next to `directory`. Blocks for a moment if they are missing."""
        mounted = directory.parent / "runtime"
        for path in (directory.parent, directory, mounted):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The second user is that of the local backend's build sandboxes: both work in the same directory.
        uids = UNNAMED_USERS if facts.few_ids else UNIQUE_USERS
        build_uid = uids[1] if os.geteuid() == 0 else os.geteuid()
        guest, hosts_file, users = pack_guest(mounted), _write_hosts(mounted), HostUsers(uids[2:])
        return cls(engine, facts, daemon_id, directory, guest, hosts_file, runtime, users, build_uid)

    @property
    def binds(self) -> tuple[Bind, ...]:
        """Files of the daemon that every sandbox sees."""
        return (
            Bind(self.guest.path, GUEST_PATH, read_only=True),
            Bind(self.hosts_file, "/etc/hosts", read_only=True),
        )

    def new_sandbox(
        self,
        sandbox_id: str,
        fingerprint: str,
        user: int,
        token: bytes,
        forget: Callable[[DockerSandbox], None],
    ) -> DockerSandbox:
        """A sandbox whose container does not exist yet, or one that is being adopted."""
        directory = self.directory / sandbox_id
        return DockerSandbox(
            sandbox_id=sandbox_id,
            directory=directory,
            endpoint=SocketEndpoint(directory / SOCKET_NAME, token),
            fingerprint=fingerprint,
            user=user,
            engine=self.engine,
            # The name is known before the id: a container whose creation was not answered is found by it.
            container=f"executor-{self.daemon_id}-{sandbox_id}",
            forget=forget,
        )

    @asynccontextmanager
    async def trial(self) -> AsyncIterator[DockerSandbox]:
        """Provides a sandbox for a moment and destroys it at the end."""
        user = self.users.take()
        sandbox = self.new_sandbox(new_sandbox_id(), "", user, b"", lambda _: self.users.release(user))
        self.trials.add(sandbox.sandbox_id)
        try:
            yield sandbox
        finally:
            self.trials.discard(sandbox.sandbox_id)  # now a sweep may remove it too
            await sandbox.destroy()

    def config(self, request: ContainerRequest) -> Mapping[str, object]:
        labels = {**request.labels, DAEMON_LABEL: self.daemon_id}
        return container_config(replace(request, labels=labels, runtime=self.runtime), self.facts.abilities)


def _write_hosts(directory: Path) -> Path:
    """Writes the sandboxes' /etc/hosts, all of it or nothing: containers may have it mounted."""
    path = directory / "hosts"
    if not path.exists():
        fd, scratch = tempfile.mkstemp(prefix=".hosts-", dir=directory)
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o644)
            file.write(HOSTS)
        Path(scratch).rename(path)
    return path
