"""Finds the modules that a session needs and its image lacks, so that the client learns of them before any code runs.

The guest is asked in a new sandbox, before any code of a client has run there; the answer is remembered by the image's
fingerprint. Modules of the standard library are not asked about: they count as present.

It is also remembered which fingerprint a sandbox of each spec had last, and each image without packages: so the next
session of the spec need not make a sandbox to learn what is missing, and a refusal can name images that have it.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from executor_server.core import SandboxSpec

_IMAGES_KNOWN_MAX = 64
_MODULES_KNOWN_MAX = 4_096
"""Modules remembered for one image."""
ASKED_MAX = 256
"""Modules asked about for one session; a longer answer would not be read by a person or a model."""

_SPECS_KNOWN_MAX = 256

Key = TypeVar("Key")
Ask = Callable[[Sequence[str]], Awaitable[Sequence[str]]]


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
        self._images: dict[str, str] = {}  # the same of each image without packages

    def note(self, spec: SandboxSpec, fingerprint: str) -> None:
        """Notes the fingerprint of a sandbox that was made of this spec."""
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
        """Returns the top-level modules of the patterns that the image lacks; `ask` returns those of some."""
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
