"""What every container of one daemon is made with, found and built once; and trials of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from executor_server.backends.base import SocketEndpoint
from executor_server.backends.directory import SOCKET_NAME, new_sandbox_id
from executor_server.backends.docker.engine import Engine, EngineFacts
from executor_server.backends.docker.options import Bind, ContainerRequest, container_config
from executor_server.backends.docker.sandbox import DockerSandbox
from executor_server.backends.users import DEFAULT_UID_BASE, HostUsers
from executor_server.guest_archive import GUEST_PATH, GuestArchive, pack_guest

DAEMON_LABEL = "executor.daemon"
SANDBOX_LABEL = "executor.sandbox"
FINGERPRINT_LABEL = "executor.fingerprint"
USER_LABEL = "executor.user"

# Users of the Engine's host that nobody else has; in a user namespace those few that have no name in distributions.
_USERS = range(DEFAULT_UID_BASE, DEFAULT_UID_BASE + 100_000_000)
_USERS_OF_FEW = range(10_000, 65_534)

_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost\n"
_LAST_WORDS_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Kit:
    engine: Engine
    facts: EngineFacts
    daemon_id: str
    directory: Path  # of the sandboxes' directories
    guest: GuestArchive
    hosts_file: Path
    runtime: str | None
    users: HostUsers
    trials: set[str] = field(default_factory=set)  # ids of those that are under way

    @classmethod
    def build(cls, engine: Engine, facts: EngineFacts, *, daemon_id: str, directory: Path, runtime: str | None) -> Kit:
        """Writes what containers mount beside `directory`. Blocks for a moment when it is not there yet."""
        mounted = directory.parent / "runtime"
        for place in (directory.parent, directory, mounted):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        users = HostUsers(_USERS_OF_FEW if facts.few_ids else _USERS)
        return cls(engine, facts, daemon_id, directory, pack_guest(mounted), _write_hosts(mounted), runtime, users)

    @property
    def binds(self) -> tuple[Bind, ...]:
        """What every sandbox sees of ours."""
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
        """One that does not exist yet, or that is not yet known to."""
        directory = self.directory / sandbox_id
        return DockerSandbox(
            sandbox_id=sandbox_id,
            directory=directory,
            endpoint=SocketEndpoint(directory / SOCKET_NAME, token),
            fingerprint=fingerprint,
            user=user,
            engine=self.engine,
            # Known before the container is: one whose making was not answered can be found by it.
            container=f"executor-{self.daemon_id}-{sandbox_id}",
            forget=forget,
        )

    @asynccontextmanager
    async def trial(self) -> AsyncIterator[DockerSandbox]:
        """A sandbox for a moment, which is destroyed at the end."""
        user = self.users.take()
        sandbox = self.new_sandbox(new_sandbox_id(), "", user, b"", lambda _: self.users.release(user))
        self.trials.add(sandbox.sandbox_id)
        try:
            yield sandbox
        finally:
            self.trials.discard(sandbox.sandbox_id)  # from here on a sweep may remove it just as well
            await sandbox.destroy()

    def config(self, request: ContainerRequest) -> Mapping[str, object]:
        labels = {**request.labels, DAEMON_LABEL: self.daemon_id}
        return container_config(replace(request, labels=labels, runtime=self.runtime), self.facts.abilities)

    async def last_words(self, request: ContainerRequest) -> bytes:
        """What such a container says before it ends: sandboxes have no log, so another one is made that has.

        Raises EngineFailure.
        """
        async with self.trial() as sandbox:
            labels = {**request.labels, SANDBOX_LABEL: sandbox.sandbox_id}
            config = self.config(replace(request, labels=labels, keeps_log=True))
            sandbox.container = await self.engine.create(config, sandbox.container)
            await self.engine.start(sandbox.container)
            await self.engine.wait(sandbox.container, _LAST_WORDS_TIMEOUT_S)
            return await self.engine.log(sandbox.container)


def _write_hosts(directory: Path) -> Path:
    """The sandboxes' /etc/hosts. Written whole or not at all: it may be mounted somewhere."""
    path = directory / "hosts"
    if not path.exists():
        fd, scratch = tempfile.mkstemp(prefix=".hosts-", dir=directory)
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o644)
            file.write(_HOSTS)
        Path(scratch).rename(path)
    return path
