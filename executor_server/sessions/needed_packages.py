"""Finds the modules that a session needs and its image lacks, and the packages that bring them where the policy adds
packages by itself.

A sandbox has to be made and asked to learn what an image lacks. That is remembered, so the next session of the same
spec gets its packages at once, and a request that is repeated while its environment is being made uses up no sandbox.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from executor_server.backends import Sandbox
from executor_server.core import SandboxFailure, SandboxSpec, SessionSpec
from executor_server.policy import Policy
from executor_server.sessions.image_modules import Ask, ImageModules


class NeededPackages:
    """Decides for each session whether its image needs packages beside it."""

    def __init__(
        self, fingerprint: Callable[[SandboxSpec], Awaitable[str]], policy: Callable[[], Policy | None]
    ) -> None:
        """`fingerprint` is the backend's, of what it would make of a spec now. `policy` returns the one in force."""
        self._fingerprint = fingerprint
        self._policy = policy
        self._modules = ImageModules()

    async def foreseen(self, spec: SessionSpec, modules: Sequence[str]) -> SessionSpec:
        """Returns the spec with the packages that its image is known to need.

        `modules` are those that tools of the session need, besides the authorized ones.
        """
        recalled = self._modules.recall(spec.sandbox, (*spec.authorized_imports, *modules))
        added = self.added(spec, recalled.missing, modules) if recalled is not None else None
        if recalled is None or added is None:
            return spec
        try:
            is_same = await self._fingerprint(spec.sandbox) == recalled.fingerprint
        except SandboxFailure:
            is_same = False  # a sandbox that is made will show it
        return added if is_same else spec

    async def missing(self, sandbox: Sandbox, spec: SessionSpec, modules: Sequence[str], ask: Ask) -> tuple[str, ...]:
        """Returns which of the authorized modules, and of these, a new sandbox lacks, by their first names."""
        self._modules.note(spec.sandbox, sandbox.fingerprint)
        return await self._modules.missing(sandbox.fingerprint, (*spec.authorized_imports, *modules), ask)

    def added(self, spec: SessionSpec, missing: Sequence[str], modules: Sequence[str]) -> SessionSpec | None:
        """Returns the spec with the packages that bring what is missing; None when the policy adds none by itself.

        `modules` are as for `foreseen`.
        """
        policy = self._policy()
        added = policy.with_packages(spec, _in_full(missing, modules)) if policy is not None and missing else None
        return None if added is None or added.sandbox == spec.sandbox else added

    def images_with(self, modules: Sequence[str]) -> tuple[str, ...]:
        """Returns the images that have all these modules, as far as sessions have asked; none for no modules."""
        return self._modules.images_with(modules) if modules else ()


def _in_full(missing: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Returns the full names of missing modules: "google" says little where "google.cloud.storage" is needed."""
    named: list[str] = []
    for name in missing:
        below = [each for each in modules if each.startswith(f"{name}.")]
        named += below or [name]
    return named
