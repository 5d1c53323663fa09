"""Finds the authorized modules that an image lacks, so that the client learns of them before any code runs.

The guest is asked in a new sandbox, before any code of a client has run there; the answer is remembered by the image's
fingerprint. Modules of the standard library are not asked about: they count as present.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence

_IMAGES_KNOWN_MAX = 64
_MODULES_KNOWN_MAX = 4_096
"""Modules remembered for one image."""
ASKED_MAX = 256
"""Modules asked about for one session; a longer answer would not be read by a person or a model."""

Ask = Callable[[Sequence[str]], Awaitable[Sequence[str]]]


class ImageModules:
    """Remembers by fingerprint which modules images have and lack."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, bool]] = {}

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


def top_modules(patterns: Iterable[str]) -> list[str]:
    """Returns the top-level modules that import patterns name, without the standard library; "*" names none."""
    tops = dict.fromkeys(pattern.partition(".")[0] for pattern in patterns)
    return [name for name in tops if name != "*" and name not in sys.stdlib_module_names][:ASKED_MAX]
