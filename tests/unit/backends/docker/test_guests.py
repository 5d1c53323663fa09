"""A guest that does not start, and the second attempt that finds out why. The Engine is a fake."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from executor_server.backends.directory import SOCKET_NAME
from executor_server.backends.docker.engine import ContainerState, Engine, EngineFacts, EngineFailure
from executor_server.backends.docker.guests import Plan, start_guest
from executor_server.backends.docker.options import HostAbilities
from executor_server.backends.docker.probe import Confinement, PreparedImage
from executor_server.backends.docker.resources import Resources
from executor_server.core import SandboxFailure
from tests.support.fake_backend import SPEC

ABILITIES = HostAbilities("x86_64", 1, True, True, True)
FACTS = EngineFacts(
    "28", "amd64", ABILITIES, "6.8.0", "2", True, True, ("runc",), "runc", "1.2", "overlay2", True, False
)
IMAGE = PreparedImage(
    "sha256:abc", (), "/usr/bin/python3", (3, 11), Confinement(1000, False, ("lo",), True, False, False, True, "")
)


class FakeEngine:
    """Runs guests that bind the socket of their directory, after `failures` that say so."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self.containers_max = 2
        self._configs: dict[str, Any] = {}
        self._logs: dict[str, bytes] = {}
        self._sockets: list[socket.socket] = []

    async def create(self, config: Any, name: str) -> str:
        if len(self._configs) == self.containers_max:
            raise EngineFailure("no room for a container", 500)
        self._configs[name] = config
        return name

    async def start(self, container: str) -> None:
        mounts = {each["Target"]: each.get("Source") for each in self._configs[container]["HostConfig"]["Mounts"]}
        if self._failures:
            self._failures -= 1
            self._logs[container] = b"No space left on device\n"
        elif "/run/executor/socket" not in mounts:
            self._logs[container] = b"the guest cannot bind its socket: No such file or directory\n"
        else:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"{mounts['/run/executor/socket']}/{SOCKET_NAME}")
            self._sockets.append(listener)

    async def state(self, container: str) -> ContainerState:
        return ContainerState(container not in self._logs, int(container in self._logs), False, 0)

    async def log(self, container: str) -> bytes:
        assert self._configs[container]["HostConfig"]["LogConfig"]["Type"] != "none"
        return self._logs.get(container, b"")

    async def remove(self, container: str) -> None:
        self._configs.pop(container, None)

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        assert len(self._configs) == 1, "the second attempt has left its container"


@pytest.fixture
def resources_with(tmp_path: Path) -> Iterator[Callable[[int], Resources]]:
    made: list[FakeEngine] = []
    ids = itertools.count()

    def make(failures: int) -> Resources:
        made.append(FakeEngine(failures))
        directory = tmp_path / str(next(ids)) / "sandboxes"
        return Resources.build(cast("Engine", made[-1]), FACTS, daemon_id="d", directory=directory, runtime=None)

    yield make
    for engine in made:
        engine.close()


async def failure_of(resources: Resources) -> str:
    sandbox = resources.new_sandbox("one", "", resources.users.take(), bytes(32), lambda _: None)
    with pytest.raises(SandboxFailure) as failed:
        await start_guest(resources, sandbox, Plan(IMAGE, SPEC, (), None))
    return str(failed.value)


async def test_a_guest_that_never_starts_says_why(resources_with: Callable[[int], Resources]) -> None:
    assert (await failure_of(resources_with(2))).endswith("(exit code 1): No space left on device")


async def test_a_passing_failure_is_not_explained_by_another_one(resources_with: Callable[[int], Resources]) -> None:
    """The second attempt had no directory for its socket, and so it failed even where the guest could start now."""
    assert (await failure_of(resources_with(1))).endswith("(exit code 1): a second attempt did start")


async def test_a_second_attempt_that_fails_otherwise_keeps_the_exit_code(
    resources_with: Callable[[int], Resources],
) -> None:
    resources = resources_with(1)
    cast("FakeEngine", resources.engine).containers_max = 1
    said = "(exit code 1): a second attempt failed: no room for a container"
    assert (await failure_of(resources)).endswith(said)
