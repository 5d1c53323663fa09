"""Makes the container of a sandbox and waits until its guest can be reached.

How the daemon and a guest meet. Each sandbox has a directory of its own on the host, mounted writable into its
container for one purpose: the guest binds its socket there, under another name first, so that the socket is ready when
it is seen. A writable mount is a hole in the wall, to the host's disk at least. So as soon as the socket is there, and
before anything is sent to the guest, the daemon shuts the directory: it is the daemon's own, and from then on the
container's user can neither enter it nor list it. Code that runs later finds a closed door, while the daemon has its
socket on the other side. What that socket is, is looked at after the door was shut: nobody can exchange it any more.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Sequence

from executor_server.backends.directory import SOCKET_NAME
from executor_server.backends.docker.images import PreparedImage
from executor_server.backends.docker.kit import DAEMON_LABEL, FINGERPRINT_LABEL, SANDBOX_LABEL, USER_LABEL, Kit
from executor_server.backends.docker.options import WORKSPACE, Bind, ContainerRequest
from executor_server.backends.docker.sandbox import DockerSandbox
from executor_server.errors import SandboxFailure
from executor_server.guest.tokens import CHAIN_LENGTH, chained
from executor_server.guest_archive import GUEST_BOOT
from executor_server.model import SandboxSpec

SOCKET_DIRECTORY = "/run/executor/socket"
"""Where a container sees its own directory."""

_GUEST_TIMEOUT_S = 20.0
_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.02
_ALIVE_INTERVAL_S = 0.5
_LAST_WORDS_TIMEOUT_S = 3.0
_LAST_WORDS_BYTES = 2000
_BACKLOG = 8  # one daemon connects; the rest is room for its retries
# Others may put something into the directory, and not see what is there; and of others only the container comes this
# far, since the directories above are the daemon's.
_OPEN, _SHUT = 0o733, 0o700


async def make_container(
    kit: Kit, sandbox: DockerSandbox, image: PreparedImage, spec: SandboxSpec, preload: Sequence[str]
) -> None:
    """Makes the container of `sandbox`. Raises SandboxFailure; the caller then destroys the sandbox."""
    sandbox.directory.mkdir(mode=0o700)
    sandbox.directory.chmod(_OPEN)
    request = _request(kit, sandbox, image, spec, preload)
    sandbox.container = await kit.engine.create(kit.config(request), sandbox.container)
    await kit.engine.start(sandbox.container)
    await _wait_for_guest(kit, sandbox, request)
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
        raise SandboxFailure(f"sandbox {sandbox.sandbox_id} made something else than a socket")


def _request(
    kit: Kit, sandbox: DockerSandbox, image: PreparedImage, spec: SandboxSpec, preload: Sequence[str]
) -> ContainerRequest:
    config = {
        "listen_path": f"{SOCKET_DIRECTORY}/{SOCKET_NAME}",
        "backlog": _BACKLOG,
        "token_hash": chained(sandbox.endpoint.token, CHAIN_LENGTH).hex(),
        "workspace": WORKSPACE,
        "orphan_time_s": spec.orphan_time_s,
        "memory_bytes": spec.memory_bytes,
        "processes": spec.processes,
        "watch_memory": not kit.facts.abilities.limits_memory,
        "preload": list(preload),
    }
    return ContainerRequest(
        image_id=image.image_id,
        image_volumes=image.volumes,
        command=(image.python, "-I", "-S", "-c", GUEST_BOOT, json.dumps(config), "-1"),
        user=sandbox.user,
        spec=spec,
        labels={
            DAEMON_LABEL: kit.daemon_id,
            SANDBOX_LABEL: sandbox.sandbox_id,
            FINGERPRINT_LABEL: sandbox.fingerprint,
            USER_LABEL: str(sandbox.user),
            "executor.spec": spec.fingerprint,
            "executor.image": image.image_id,
            "executor.guest": kit.guest.version,
            "executor.orphan_time_s": f"{spec.orphan_time_s:g}",
        },
        binds=(*kit.binds, Bind(sandbox.directory, SOCKET_DIRECTORY, read_only=False)),
        runtime=kit.runtime,
    )


async def _wait_for_guest(kit: Kit, sandbox: DockerSandbox, request: ContainerRequest) -> None:
    """Looks for the socket: it is there some 30 ms after the container has started. Raises SandboxFailure."""
    loop = asyncio.get_running_loop()
    deadline, pause_s, ask_at = loop.time() + _GUEST_TIMEOUT_S, _FIRST_POLL_S, loop.time() + _ALIVE_INTERVAL_S
    while not os.path.lexists(sandbox.endpoint.socket_path):
        now = loop.time()
        if now > deadline:
            raise SandboxFailure(
                f"no socket of the guest appears within {_GUEST_TIMEOUT_S:g} s; the Engine may live on another host or "
                f"in a virtual machine, where {sandbox.directory} is another directory"
            )
        if now > ask_at:
            state = await kit.engine.state(sandbox.container)
            if state is None:
                raise SandboxFailure("the container was removed while it started")
            if not state.running:
                words = await _last_words(kit, request)
                raise SandboxFailure(f"the guest ended at once (exit code {state.exit_code}): {words}")
            ask_at = loop.time() + _ALIVE_INTERVAL_S
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_POLL_S)


async def _last_words(kit: Kit, request: ContainerRequest) -> str:
    """What such a guest says: sandboxes have no log, so another one is made that has. Names host paths perhaps."""
    run = await kit.run_briefly(request, _LAST_WORDS_TIMEOUT_S)
    return run.stderr[-_LAST_WORDS_BYTES:].decode("utf-8", "backslashreplace").strip() or "it says nothing"
