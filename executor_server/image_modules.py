"""Which authorized modules an image lacks, so that whoever asked for them learns it before any code runs.

The guest is asked, in a new sandbox and before anybody's code has run there; what it answers is remembered for the
image that the sandbox was made of. Modules of the standard library are not asked for: they count as there.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence

_IMAGES_KNOWN_MAX = 64
_MODULES_KNOWN_MAX = 4_096
"""Modules that are remembered of one image."""
ASKED_MAX = 256
"""Modules that are asked about for one session; an answer about more of them would be nothing that anybody reads."""

Ask = Callable[[Sequence[str]], Awaitable[Sequence[str]]]


class ImageModules:
    """Remembers which modules images have and lack, by the images' fingerprints."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, bool]] = {}

    async def missing(self, fingerprint: str, patterns: Iterable[str], ask: Ask) -> tuple[str, ...]:
        """The top-level modules of these patterns that the image lacks; `ask` says which of some are missing."""
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
    """The modules that patterns of imports are about, without those of the standard library; "*" is about none."""
    tops = dict.fromkeys(pattern.partition(".")[0] for pattern in patterns)
    return [name for name in tops if name != "*" and name not in sys.stdlib_module_names][:ASKED_MAX]
