"""Makes one sandbox whose guest has answered."""

from __future__ import annotations

import asyncio

from executor_server.backends import Backend, Sandbox
from executor_server.backends.channel import READY_TIME_S, GuestChannel, GuestEndpoint, UnreachedError
from executor_server.core import SandboxSpec
from executor_server.sessions.pool.fail_over import create_with
from executor_server.sessions.pool.kind import ReadySandbox

# Connections that are tried to a new sandbox, where connections break by themselves.
_FIRST_CONNECTIONS_MAX = 3


async def make_ready(backend: Backend, spec: SandboxSpec, *, warm: bool) -> ReadySandbox:
    """Makes a sandbox and waits for its guest. Raises SandboxFailure; nothing is left behind then.

    A guest that does not answer counts as a failure of its backend: the next backend is asked, if there is one.
    """

    async def connected(sandbox: Sandbox) -> ReadySandbox:
        channel = GuestChannel(sandbox.endpoint)
        try:
            await _connect(channel, sandbox.endpoint)
        except BaseException:
            channel.close()
            await asyncio.shield(sandbox.destroy())
            raise
        return ReadySandbox(sandbox, channel, warm)

    return await create_with(backend, spec, connected)


async def _connect(channel: GuestChannel, endpoint: GuestEndpoint) -> None:
    """Connects to the guest; in several attempts where a connection may break by itself before the guest answers."""
    give_up_s = asyncio.get_running_loop().time() + READY_TIME_S
    for retries in reversed(range(_FIRST_CONNECTIONS_MAX if endpoint.breaks_by_itself else 1)):
        left_s = give_up_s - asyncio.get_running_loop().time()
        try:
            await channel.connect(left_s, answer_s=READY_TIME_S / 3 if retries else READY_TIME_S)
            return
        except UnreachedError:
            if not retries or left_s <= 0:
                raise
