"""Starts the guest in a sandbox's container, and reports its standard error when it does not start."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor_server.backends.docker.containers import SOCKET_INSIDE, EndedEarly, last_words, make_container
from executor_server.backends.docker.options import Bind, ContainerRequest
from executor_server.backends.docker.probe import PreparedImage
from executor_server.backends.docker.resources import FINGERPRINT_LABEL, Resources
from executor_server.backends.docker.sandbox import DockerSandbox
from executor_server.backends.environments import Mount, have_environment
from executor_server.backends.settings import BACKLOG, CA_BUNDLE, egress_environment, guest_config
from executor_server.core import SandboxFailure, SandboxSpec
from executor_server.guest.wire.paths import GUEST_BOOT
from executor_server.guest.wire.tokens import CHAIN_LENGTH

_LAST_WORDS_BYTES = 2000


@dataclass(frozen=True)
class Plan:
    """The parts that a sandbox is made of."""

    image: PreparedImage
    spec: SandboxSpec
    preload: Sequence[str]
    ca_bundle: Path | None  # the file of the egress proxy's certificate authorities, where it has a network
    mounts: tuple[Mount, ...] = ()  # besides those of every sandbox
    shares_user: bool = False  # other sandboxes run as its user, too


async def start_guest(resources: Resources, sandbox: DockerSandbox, plan: Plan) -> None:
    """Makes the container; its guest then accepts connections. Raises SandboxFailure; the caller destroys the rest."""
    request = _request(resources, sandbox, plan)
    try:
        await make_container(resources, sandbox, request)
    except EndedEarly as ended:
        try:
            words = await last_words(resources, request)
            text = words[-_LAST_WORDS_BYTES:].decode("utf-8", "backslashreplace").strip()
        except SandboxFailure as failure:
            text = f"a second attempt failed: {failure}"
        raise SandboxFailure(f"the guest does not start, {ended}: {text or 'it says nothing'}") from ended


def _request(resources: Resources, sandbox: DockerSandbox, plan: Plan) -> ContainerRequest:
    spec = plan.spec
    config = {
        "listen_path": SOCKET_INSIDE,
        "backlog": BACKLOG,
        **guest_config(
            spec,
            token=sandbox.endpoint.token,
            connections_max=CHAIN_LENGTH,
            memory_bytes=spec.memory_bytes,
            watch_memory=not resources.facts.abilities.limits_memory,
            preload=plan.preload,
            has_environment=have_environment(plan.mounts),
        ),
    }
    return ContainerRequest(
        image_id=plan.image.image_id,
        image_volumes=plan.image.volumes,
        command=(plan.image.python, "-I", "-S", "-c", GUEST_BOOT, json.dumps(config), "-1"),
        user=sandbox.user,
        spec=spec,
        labels={
            FINGERPRINT_LABEL: sandbox.fingerprint,
            "executor.spec": spec.fingerprint,
            "executor.image": plan.image.image_id,
            "executor.guest": resources.guest.version,
            "executor.orphan_time_s": f"{spec.orphan_time_s:g}",
        },
        binds=(*resources.binds, *_binds(plan)),
        environment={} if plan.ca_bundle is None else egress_environment(),
        shares_user=plan.shares_user,
    )


def _binds(plan: Plan) -> Iterator[Bind]:
    if plan.ca_bundle is not None:
        yield Bind(plan.ca_bundle, CA_BUNDLE, read_only=True)
    for mount in plan.mounts:
        yield Bind(mount.source, mount.target, read_only=mount.read_only)
