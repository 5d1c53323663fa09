"""Makes sandboxes: creates a machine in the cloud, examines its template's Python once, and starts the guest in it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from executor_server.backends.e2b.failures import CloudFailure, Failed, Final, Missing, TryLater
from executor_server.backends.e2b.guests import (
    NOTHING_MORE,
    SANDBOX_UID,
    Additions,
    GuestFile,
    egress_command,
    relay_command,
    start_guest,
)
from executor_server.backends.e2b.retry import with_retries
from executor_server.backends.e2b.sandbox import SANDBOX_KEY, E2BSandbox, Lifetime, cloud_clock_s
from executor_server.backends.e2b.templates import Prepared, Templates
from executor_server.backends.environments import Environment
from executor_server.core import BackendFull, SandboxFailure, SandboxSpec
from executor_server.core.config import E2BImage

if TYPE_CHECKING:
    from executor_server.backends.e2b.cloud import Cloud, Machine

DAEMON_KEY = "executor-daemon"
FINGERPRINT_KEY = "executor-fingerprint"
USER_KEY = "executor-user"
GUEST_KEY = "executor-guest"

RETRY_FULL_S = 5.0
"""Seconds after which a client may try again, if the time until there is room is unknown."""

_TEMPLATE_HASH_CHARS = 16

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class SandboxFactory:
    """The parts that all sandboxes of one daemon are made with."""

    cloud: Cloud
    daemon_id: str
    guest: GuestFile
    templates: Templates
    lifetime: Lifetime
    reconnect_s: float
    is_taken: Callable[[str], bool]  # True for the cloud's id of a machine that belongs to a sandbox here

    def fingerprint(self, spec: SandboxSpec, ca_bundle: Path | None, environment: Environment | None) -> str:
        """Contains the template's name: the cloud does not say from which build a sandbox was made.

        `ca_bundle` is the file of certificate authorities that it gets; its path changes with its content.
        """
        template = self.templates.of(spec.image).template
        template_hash = hashlib.sha256(template.encode()).hexdigest()[:_TEMPLATE_HASH_CHARS]
        made_of = f"{spec.fingerprint}-{template_hash}-{self.guest.version}-{SANDBOX_UID}"
        parts = [made_of]
        if ca_bundle is not None:
            parts.append(ca_bundle.stem)
        if environment is not None:
            parts.append(environment.environment_id)
        return "-".join(parts)

    def new_sandbox(
        self,
        sandbox_id: str,
        *,
        image: E2BImage,
        fingerprint: str,
        token: bytes,
        forget: Callable[[E2BSandbox], None],
        has_egress: bool = False,
        guest_version: str | None = None,
    ) -> E2BSandbox:
        """A sandbox without a machine yet. `guest_version` is for one that an earlier daemon made."""
        return E2BSandbox(
            sandbox_id,
            cloud=self.cloud,
            lifetime=self.lifetime,
            template=image.template,
            fingerprint=fingerprint,
            token=token,
            relay=relay_command(guest_version or self.guest.version, sandbox_id),
            egress=egress_command(guest_version or self.guest.version, sandbox_id) if has_egress else None,
            reconnect_s=self.reconnect_s,
            forget=forget,
        )

    async def build(self, sandbox: E2BSandbox, spec: SandboxSpec, additions: Additions = NOTHING_MORE) -> Prepared:
        """Makes the machine; its guest listens when this returns. Raises SandboxFailure; the caller destroys it."""
        image = self.templates.of(spec.image)
        machine = await self._make_machine(sandbox, spec, image)
        try:
            prepared = await self.templates.prepared(spec.image, machine)
            await start_guest(
                machine,
                prepared,
                guest=self.guest,
                sandbox_id=sandbox.sandbox_id,
                token=sandbox.endpoint.token,
                spec=spec,
                preload=image.preload,
                additions=additions,
            )
        except SandboxFailure as failure:
            self.templates.forget(spec.image)
            if isinstance(failure, Missing):  # the machine: the cloud has just found the template
                raise CloudFailure(f"the sandbox vanished while it was made: {failure}") from failure
            raise
        sandbox.is_complete = True
        return prepared

    async def _make_machine(self, sandbox: E2BSandbox, spec: SandboxSpec, image: E2BImage) -> Machine:
        metadata = {
            DAEMON_KEY: self.daemon_id,
            SANDBOX_KEY: sandbox.sandbox_id,
            FINGERPRINT_KEY: sandbox.fingerprint,
            USER_KEY: str(SANDBOX_UID),
            GUEST_KEY: self.guest.version,
        }

        request_ids = (f"{sandbox.sandbox_id}-{number}" for number in itertools.count())
        request_id = next(request_ids)

        async def ask() -> Machine:
            nonlocal request_id
            asked_at_s, existed = cloud_clock_s(), sandbox.may_exist
            sandbox.may_exist = True
            try:
                machine = await self.cloud.create(
                    image.template,
                    lifetime_s=self.lifetime.lifetime_s,
                    metadata=metadata,
                    # When an answer was lost, the request is repeated, and the cloud makes one sandbox for equal ids.
                    request_id=request_id,
                )
            except TryLater as full:  # not retried: another backend may have room
                sandbox.may_exist = existed
                raise BackendFull(f"E2B has no room: {full}", full.retry_after_s or RETRY_FULL_S) from full
            except Final:
                sandbox.may_exist = existed
                raise
            except Failed:
                request_id = next(request_ids)  # the cloud may remember an answer by this id, a failure too
                raise
            if self.is_taken(machine.cloud_id):
                request_id = next(request_ids)
                raise Failed("E2B gave a sandbox that another session has")
            sandbox.made(machine, asked_at_s)
            if existed:
                await self._end_duplicates(sandbox)
            return machine

        try:
            return await with_retries(ask)
        except Missing as missing:
            reason = f"has a template that E2B does not know: {image.template}"
            raise self.templates.refuse(spec.image, reason) from missing

    async def _end_duplicates(self, sandbox: E2BSandbox) -> None:
        """Ends surplus machines, if the cloud has made several for equal request ids."""
        try:
            await sandbox.end_duplicates()
        except CloudFailure as failure:  # the next sweep ends them: their id belongs to a sandbox with another machine
            _log.warning("sandbox_left_over", sandbox_id=sandbox.sandbox_id, reason=str(failure))
