"""Makes the container of a sandbox and waits until what runs in it can be reached.

How the daemon and a guest meet. Each sandbox has a directory of its own on the host, mounted writable into its
container for one purpose: the guest binds its socket there, under another name first, so that the socket is ready when
it is seen. A writable mount is a hole in the wall, to the host's disk at least. So as soon as the socket is there, and
before anything is sent to the guest, the daemon shuts the directory: it is the daemon's own, and from then on the
container's user can neither enter it nor list it. Code that runs later finds a closed door, while the daemon has its
socket on the other side. What that socket is, is looked at after the door was shut: nobody can exchange it any more.
"""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import replace

from executor_server.backends.directory import SOCKET_NAME
from executor_server.backends.docker.engine import EngineFailure
from executor_server.backends.docker.kit import SANDBOX_LABEL, USER_LABEL, Kit
from executor_server.backends.docker.options import Bind, ContainerRequest
from executor_server.backends.docker.sandbox import DockerSandbox
from executor_server.errors import SandboxFailure

SOCKET_DIRECTORY = "/run/executor/socket"
"""Where a container sees its own directory."""
SOCKET_INSIDE = f"{SOCKET_DIRECTORY}/{SOCKET_NAME}"

_SOCKET_TIMEOUT_S = 20.0
_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.02
_ALIVE_INTERVAL_S = 0.5
# Others may put something into the directory, and not see what is there; and of others only the container comes this
# far, since the directories above are the daemon's.
_OPEN, _SHUT = 0o733, 0o700
# A shell's and so the runtimes' way to say that a command can't be executed, or is not there.
_NO_COMMAND = (126, 127)
_KILLED = 128 + 9


class EndedEarly(SandboxFailure):
    """The container ended before there was a socket."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"its container ended at once (exit code {exit_code})")
        self.could_not_begin = exit_code in _NO_COMMAND
        self.was_killed = exit_code == _KILLED


class NoSocket(SandboxFailure):
    """The container runs, and nothing comes of it, or nothing that can be spoken to."""


async def make_container(kit: Kit, sandbox: DockerSandbox, request: ContainerRequest) -> None:
    """Makes the container of `sandbox`, whose command has to bind SOCKET_INSIDE.

    Raises SandboxFailure; the caller then destroys the sandbox.
    """
    try:
        sandbox.directory.mkdir(mode=_SHUT)
        sandbox.directory.chmod(_OPEN)  # by mkdir alone the umask would have a say
    except OSError as error:  # the disk is full, or somebody has removed the state directory
        raise SandboxFailure(f"cannot make a sandbox: {error}") from error
    labels = {**request.labels, SANDBOX_LABEL: sandbox.sandbox_id, USER_LABEL: str(sandbox.user)}
    binds = (*request.binds, Bind(sandbox.directory, SOCKET_DIRECTORY, read_only=False))
    config = kit.config(replace(request, user=sandbox.user, labels=labels, binds=binds))
    sandbox.container = await kit.engine.create(config, sandbox.container)
    await _start(kit, sandbox)
    await _wait_for_socket(kit, sandbox)
    sandbox.directory.chmod(_SHUT)
    check_socket(sandbox)


def check_socket(sandbox: DockerSandbox) -> None:
    """Makes sure that a socket is there, and no link to one, in a directory that is shut. Raises SandboxFailure."""
    try:
        directory, socket = sandbox.directory.lstat(), sandbox.endpoint.socket_path.lstat()
    except OSError as error:
        raise SandboxFailure(f"the socket of sandbox {sandbox.sandbox_id} is gone: {error}") from error
    if not stat.S_ISDIR(directory.st_mode) or stat.S_IMODE(directory.st_mode) != _SHUT:
        raise SandboxFailure(f"the directory of sandbox {sandbox.sandbox_id} is not shut")
    if not stat.S_ISSOCK(socket.st_mode):
        raise NoSocket(f"sandbox {sandbox.sandbox_id} made something else than a socket")


async def _start(kit: Kit, sandbox: DockerSandbox) -> None:
    try:
        await kit.engine.start(sandbox.container)
    except EngineFailure as failure:
        if failure.status is None:
            raise
        # The Engine says no to a command that does not exist as it does to anything else; the state tells which it was.
        state = await kit.engine.state(sandbox.container)
        if state is not None and state.exit_code in _NO_COMMAND:
            raise EndedEarly(state.exit_code) from failure
        raise


async def _wait_for_socket(kit: Kit, sandbox: DockerSandbox) -> None:
    """Looks for it: a guest has it some 30 ms after the container has started."""
    loop = asyncio.get_running_loop()
    deadline, pause_s, ask_at = loop.time() + _SOCKET_TIMEOUT_S, _FIRST_POLL_S, loop.time() + _ALIVE_INTERVAL_S
    while not os.path.lexists(sandbox.endpoint.socket_path):
        now = loop.time()
        if now > deadline:
            raise NoSocket(f"its container makes no socket in {sandbox.directory} within {_SOCKET_TIMEOUT_S:g} s")
        if now > ask_at:
            state = await kit.engine.state(sandbox.container)
            if state is None:
                raise SandboxFailure("its container was removed while it started")
            if not state.running:
                raise EndedEarly(state.exit_code)
            ask_at = loop.time() + _ALIVE_INTERVAL_S
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_POLL_S)
