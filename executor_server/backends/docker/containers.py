"""Makes the container of a sandbox and waits until the process in it can be reached.

The daemon and a guest meet as follows. Each sandbox has a directory of its own on the host, mounted writable into its
container for one purpose: the guest binds its socket there, under another name first, so that the socket is ready when
it appears. A writable mount is a hole in the wall, to the host's disk at least. So as soon as the socket is there, and
before anything is sent to the guest, the daemon shuts the directory (mode 0700, owned by the daemon): from then on the
container's user can neither enter nor list it. Code that runs later can't reach the directory, while the daemon keeps
the socket. The daemon checks that it is a socket only after the directory is shut, when no process of the container can
replace it any more.
"""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import replace

from executor_server.backends.directory import SOCKET_NAME
from executor_server.backends.docker.engine import EngineFailure
from executor_server.backends.docker.options import Bind, ContainerRequest
from executor_server.backends.docker.resources import SANDBOX_LABEL, USER_LABEL, Resources
from executor_server.backends.docker.sandbox import KILLED, DockerSandbox
from executor_server.backends.settings import NO_COMMAND
from executor_server.core import SandboxFailure

SOCKET_DIRECTORY = "/run/executor/socket"
"""The path of a container's own directory inside the container."""
SOCKET_INSIDE = f"{SOCKET_DIRECTORY}/{SOCKET_NAME}"

_SOCKET_TIMEOUT_S = 20.0
_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.02
_ALIVE_INTERVAL_S = 0.5
# While the directory is open, any user who reaches it can create files there without seeing the others. Only the
# container reaches it, since the directories above are the daemon's.
_OPEN, _SHUT = 0o733, 0o700


class EndedEarly(SandboxFailure):
    """The container ended before there was a socket."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"its container ended at once (exit code {exit_code})")
        self.could_not_begin = exit_code in NO_COMMAND
        self.was_killed = exit_code == KILLED


class NoSocket(SandboxFailure):
    """The container runs, but made no socket in time, or something other than a socket."""


async def make_container(resources: Resources, sandbox: DockerSandbox, request: ContainerRequest) -> None:
    """Makes the container of `sandbox`; its command must bind SOCKET_INSIDE.

    Raises SandboxFailure; the caller then destroys the sandbox.
    """
    try:
        sandbox.directory.mkdir(mode=_SHUT)
        sandbox.directory.chmod(_OPEN)  # not by mkdir, which obeys the umask
    except OSError as error:  # the disk is full, or the state directory was removed
        raise SandboxFailure(f"cannot make a sandbox: {error}") from error
    labels = {**request.labels, SANDBOX_LABEL: sandbox.sandbox_id, USER_LABEL: str(sandbox.user)}
    binds = (*request.binds, Bind(sandbox.directory, SOCKET_DIRECTORY, read_only=False))
    config = resources.config(replace(request, labels=labels, binds=binds))
    sandbox.container = await resources.engine.create(config, sandbox.container)
    await _start(resources, sandbox)
    await _wait_for_socket(resources, sandbox)
    sandbox.directory.chmod(_SHUT)
    check_socket(sandbox)


async def last_words(resources: Resources, request: ContainerRequest) -> bytes:
    """Makes a container again that has ended early, with a log, which sandboxes don't have.

    Returns its standard error. Raises SandboxFailure.
    """
    async with resources.trial() as sandbox:
        try:
            await make_container(resources, sandbox, replace(request, keeps_log=True))
        except EndedEarly:
            return await resources.engine.log(sandbox.container)
    return b"a second attempt did start"


def check_socket(sandbox: DockerSandbox) -> None:
    """Checks that the directory is shut, and that it has a socket and no link to one. Raises SandboxFailure."""
    try:
        directory, socket = sandbox.directory.lstat(), sandbox.endpoint.socket_path.lstat()
    except OSError as error:
        raise SandboxFailure(f"the socket of sandbox {sandbox.sandbox_id} is gone: {error}") from error
    if not stat.S_ISDIR(directory.st_mode) or stat.S_IMODE(directory.st_mode) != _SHUT:
        raise SandboxFailure(f"the directory of sandbox {sandbox.sandbox_id} is not shut")
    if not stat.S_ISSOCK(socket.st_mode):
        raise NoSocket(f"sandbox {sandbox.sandbox_id} made something else than a socket")


async def _start(resources: Resources, sandbox: DockerSandbox) -> None:
    try:
        await resources.engine.start(sandbox.container)
    except EngineFailure as failure:
        if failure.status is None:
            raise
        # The refusal does not say whether the command is missing; the exit code in the state does.
        state = await resources.engine.state(sandbox.container)
        if state is not None and state.exit_code in NO_COMMAND:
            raise EndedEarly(state.exit_code) from failure
        raise


async def _wait_for_socket(resources: Resources, sandbox: DockerSandbox) -> None:
    """Polls for the socket: a guest makes it some 30 ms after the container has started."""
    loop = asyncio.get_running_loop()
    deadline, pause_s, ask_at = loop.time() + _SOCKET_TIMEOUT_S, _FIRST_POLL_S, loop.time() + _ALIVE_INTERVAL_S
    while not os.path.lexists(sandbox.endpoint.socket_path):
        now = loop.time()
        if now > deadline:
            raise NoSocket(f"its container makes no socket in {sandbox.directory} within {_SOCKET_TIMEOUT_S:g} s")
        if now > ask_at:
            state = await resources.engine.state(sandbox.container)
            if state is None:
                raise SandboxFailure("its container was removed while it started")
            if not state.running:
                raise EndedEarly(state.exit_code)
            ask_at = loop.time() + _ALIVE_INTERVAL_S
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_POLL_S)
