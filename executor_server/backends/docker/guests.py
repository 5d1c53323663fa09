"""The guest in a sandbox's container: how it is started, and what it says when it does not start."""

from __future__ import annotations

import json
from collections.abc import Sequence

from executor_server.backends.docker.containers import SOCKET_INSIDE, EndedEarly, make_container
from executor_server.backends.docker.kit import FINGERPRINT_LABEL, Kit
from executor_server.backends.docker.options import WORKSPACE, ContainerRequest
from executor_server.backends.docker.probe import PreparedImage
from executor_server.backends.docker.sandbox import DockerSandbox
from executor_server.errors import SandboxFailure
from executor_server.guest.tokens import CHAIN_LENGTH, chained
from executor_server.guest_archive import GUEST_BOOT
from executor_server.model import SandboxSpec

_BACKLOG = 8  # one daemon connects; the rest is room for its retries
_LAST_WORDS_BYTES = 2000


async def start_guest(
    kit: Kit, sandbox: DockerSandbox, image: PreparedImage, spec: SandboxSpec, preload: Sequence[str]
) -> None:
    """Makes the container; its guest then accepts connections. Raises SandboxFailure; the caller destroys the rest."""
    request = _request(kit, sandbox, image, spec, preload)
    try:
        await make_container(kit, sandbox, request)
    except EndedEarly as ended:
        words = await kit.last_words(request)
        told = words[-_LAST_WORDS_BYTES:].decode("utf-8", "backslashreplace").strip()
        raise SandboxFailure(f"the guest does not start, {ended}: {told or 'it says nothing'}") from ended


def _request(
    kit: Kit, sandbox: DockerSandbox, image: PreparedImage, spec: SandboxSpec, preload: Sequence[str]
) -> ContainerRequest:
    config = {
        "listen_path": SOCKET_INSIDE,
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
            FINGERPRINT_LABEL: sandbox.fingerprint,
            "executor.spec": spec.fingerprint,
            "executor.image": image.image_id,
            "executor.guest": kit.guest.version,
            "executor.orphan_time_s": f"{spec.orphan_time_s:g}",
        },
        binds=kit.binds,
    )
