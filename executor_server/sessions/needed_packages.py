"""Finds the modules that a session needs and its image lacks. If the policy adds packages by itself, also finds the
packages that bring these modules.

The guest of a new sandbox looks for the modules before any client code has run there, so that the client learns early
which are missing. The daemon remembers the answer by the image's fingerprint, and the last fingerprint of each spec. So
the next session of the same spec gets its packages at once, a repeated request uses up no sandbox while its environment
is being built, and a refusal can name images that have the modules. Modules of the standard library count as present.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from executor_server.backends import Sandbox
from executor_server.core import SandboxFailure, SandboxSpec, SessionSpec
from executor_server.policy import Policy

_IMAGES_KNOWN_MAX = 64
_MODULES_KNOWN_MAX = 4_096
"""Modules remembered for one image."""
ASKED_MAX = 256
"""Modules looked up for one session; nobody would read a longer answer."""

_SPECS_KNOWN_MAX = 256

Key = TypeVar("Key")
Ask = Callable[[Sequence[str]], Awaitable[Sequence[str]]]


class NeededPackages:
    """Decides for each session whether its image needs additional packages."""

    def __init__(
        self, fingerprint: Callable[[SandboxSpec], Awaitable[str]], policy: Callable[[], Policy | None]
    ) -> None:
        """`fingerprint` returns the backend's current fingerprint of a spec. `policy` returns the one in force."""
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
            is_same = False  # creating the sandbox reports the failure
        return added if is_same else spec

    async def missing(self, sandbox: Sandbox, spec: SessionSpec, modules: Sequence[str], ask: Ask) -> tuple[str, ...]:
        """Returns the modules, authorized or in `modules`, that a new sandbox lacks, by their top-level names."""
        self._modules.note(spec.sandbox, sandbox.fingerprint)
        return await self._modules.missing(sandbox.fingerprint, (*spec.authorized_imports, *modules), ask)

    def added(self, spec: SessionSpec, missing: Sequence[str], modules: Sequence[str]) -> SessionSpec | None:
        """Returns the spec with the packages that bring the missing modules; None if the policy adds none by itself.

        `modules` are as for `foreseen`.
        """
        policy = self._policy()
        added = policy.with_packages(spec, _in_full(missing, modules)) if policy is not None and missing else None
        return None if added is None or added.sandbox == spec.sandbox else added

    def images_with(self, modules: Sequence[str]) -> tuple[str, ...]:
        """Returns the images known to have all these modules; none for no modules."""
        return self._modules.images_with(modules) if modules else ()


def _in_full(missing: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Returns the full names of missing modules: "google.cloud.storage" instead of "google"."""
    named: list[str] = []
    for name in missing:
        below = [each for each in modules if each.startswith(f"{name}.")]
        named += below or [name]
    return named


@dataclass(frozen=True)
class Recalled:
    """The modules that sandboxes of a spec lacked when they had this fingerprint."""

    fingerprint: str
    missing: tuple[str, ...]


class ImageModules:
    """Remembers by fingerprint which modules images have and lack."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, bool]] = {}
        self._specs: dict[SandboxSpec, str] = {}  # the last fingerprint of each, the newest last
        self._images: dict[str, str] = {}  # the last fingerprint of each image without packages

    def note(self, spec: SandboxSpec, fingerprint: str) -> None:
        """Notes the fingerprint of a sandbox that was made from this spec."""
        _put_newest(self._specs, spec, fingerprint, _SPECS_KNOWN_MAX)
        if spec.packages is None:
            _put_newest(self._images, spec.image, fingerprint, _IMAGES_KNOWN_MAX)

    def recall(self, spec: SandboxSpec, patterns: Iterable[str]) -> Recalled | None:
        """Returns the modules of the patterns that sandboxes of this spec lacked; None unless all are known."""
        fingerprint = self._specs.get(spec, "")
        known, modules = self._known.get(fingerprint, {}), top_modules(patterns)
        if any(name not in known for name in modules):
            return None
        return Recalled(fingerprint, tuple(name for name in modules if not known[name]))

    def images_with(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Returns the images that have all these modules, as far as sessions have asked."""
        wanted = tuple(modules)
        return tuple(
            sorted(
                image
                for image, fingerprint in self._images.items()
                if all(self._known.get(fingerprint, {}).get(name) for name in wanted)
            )
        )

    async def missing(self, fingerprint: str, patterns: Iterable[str], ask: Ask) -> tuple[str, ...]:
        """Returns the top-level modules of the patterns that the image lacks; `ask` finds those among given modules."""
        known = self._known_of(fingerprint)
        modules = top_modules(patterns)
        unknown = [name for name in modules if name not in known]
        if unknown:
            lacking = frozenset(await ask(unknown))
            if len(known) + len(unknown) > _MODULES_KNOWN_MAX:
                known.clear()
            known.update((name, name not in lacking) for name in modules if name in unknown)
            return tuple(name for name in modules if name in lacking or not known.get(name, True))
        return tuple(name for name in modules if not known[name])

    def _known_of(self, fingerprint: str) -> dict[str, bool]:
        known = self._known.pop(fingerprint, {})
        self._known[fingerprint] = known  # the newest last
        while len(self._known) > _IMAGES_KNOWN_MAX:
            del self._known[next(iter(self._known))]
        return known


def _put_newest(known: dict[Key, str], key: Key, value: str, most: int) -> None:
    known.pop(key, None)
    known[key] = value
    while len(known) > most:
        del known[next(iter(known))]


def top_modules(patterns: Iterable[str]) -> list[str]:
    """Returns the top-level modules that import patterns name, without the standard library; "*" names none."""
    tops = dict.fromkeys(pattern.partition(".")[0] for pattern in patterns)
    return [name for name in tops if name != "*" and name not in sys.stdlib_module_names][:ASKED_MAX]
