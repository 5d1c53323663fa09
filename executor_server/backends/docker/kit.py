"""What every container of one daemon is made with, found and built once; and short runs of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from executor_server.backends.directory import new_sandbox_id
from executor_server.backends.docker.engine import Engine, EngineFacts, EngineFailure
from executor_server.backends.docker.options import Bind, ContainerRequest, container_config
from executor_server.backends.local.users import DEFAULT_UID_BASE, HostUsers
from executor_server.guest_archive import GUEST_PATH, GuestArchive, pack_guest

DAEMON_LABEL = "executor.daemon"
SANDBOX_LABEL = "executor.sandbox"
FINGERPRINT_LABEL = "executor.fingerprint"
USER_LABEL = "executor.user"

# Users of the Engine's host that nobody else has; in a user namespace those few that have no name in distributions.
_USERS = range(DEFAULT_UID_BASE, DEFAULT_UID_BASE + 100_000_000)
_USERS_OF_FEW = range(10_000, 65_534)

_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost\n"
# A shell's and so the runtimes' way to say that a command can't be executed, or is not there.
_NO_COMMAND = (126, 127)


@dataclass(frozen=True)
class ShortRun:
    """What came of a container that had one thing to do."""

    exit_code: int | None  # None: it had not ended when its time was over
    stdout: bytes
    stderr: bytes

    @property
    def could_not_begin(self) -> bool:
        return self.exit_code in _NO_COMMAND


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
    short_lived: set[str] = field(default_factory=set)  # ids of what runs briefly at this moment

    @classmethod
    def build(cls, engine: Engine, facts: EngineFacts, *, daemon_id: str, directory: Path, runtime: str | None) -> Kit:
        """Writes what containers mount beside `directory`. Blocks for a moment when it is not there yet."""
        mounted = directory.parent / "runtime"
        mounted.mkdir(parents=True, exist_ok=True, mode=0o700)
        users = HostUsers(_USERS_OF_FEW if facts.few_ids else _USERS)
        return cls(engine, facts, daemon_id, directory, pack_guest(mounted), _write_hosts(mounted), runtime, users)

    @property
    def binds(self) -> tuple[Bind, ...]:
        """What every sandbox sees of ours."""
        return (
            Bind(self.guest.path, GUEST_PATH, read_only=True),
            Bind(self.hosts_file, "/etc/hosts", read_only=True),
        )

    def container_name(self, sandbox_id: str) -> str:
        """Known before the container is: one whose making was not answered can be found by it."""
        return f"executor-{self.daemon_id}-{sandbox_id}"

    def config(self, request: ContainerRequest) -> Mapping[str, object]:
        return container_config(request, self.facts.abilities)

    async def run_briefly(self, request: ContainerRequest, timeout_s: float) -> ShortRun:
        """Runs a container, and removes it. Raises EngineFailure."""
        sandbox_id = new_sandbox_id()
        name = self.container_name(sandbox_id)
        labels = {**request.labels, DAEMON_LABEL: self.daemon_id, SANDBOX_LABEL: sandbox_id}
        config = self.config(replace(request, labels=labels, runtime=self.runtime, keeps_log=True))
        self.short_lived.add(sandbox_id)
        try:
            await self.engine.create(config, name)
            try:
                await self.engine.start(name)
            except EngineFailure:
                # The Engine says no to a command that does not exist as it does to anything else; the state tells.
                state = await self.engine.state(name)
                if state is None or state.exit_code not in _NO_COMMAND:
                    raise
                return ShortRun(state.exit_code, b"", b"")
            exit_code = await self.engine.wait(name, timeout_s)
            stdout = await self.engine.log(name, stdout=True)
            return ShortRun(exit_code, stdout, await self.engine.log(name, stdout=False))
        finally:
            self.short_lived.discard(sandbox_id)  # from here on a sweep may remove it just as well
            await self.engine.remove(name)


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
