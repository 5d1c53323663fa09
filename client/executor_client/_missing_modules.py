"""Authorized modules that the image of a session lacks: told once in the log, and in words where that is an error.

A list of imports is often longer than what the code will need, so a plain client is only told.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

from executor_client._distributions import distributions_of
from executor_client.results import SessionInfo

_log = logging.getLogger(__name__)

_TOLD_MAX = 1_000
_LISTED_MAX = 20
_told: set[tuple[str, tuple[str, ...]]] = set()
_telling = threading.Lock()


def asked_for(info: SessionInfo, authorized_imports: Iterable[str]) -> tuple[str, ...]:
    """Those of the missing modules that the caller has named, and not the policy for everybody."""
    named = {str(each).partition(".")[0] for each in authorized_imports}
    return tuple(module for module in info.missing_modules if module in named)


def tell(info: SessionInfo, authorized_imports: Iterable[str]) -> None:
    """Says it in the log, once for an image and what it lacks."""
    missing = asked_for(info, authorized_imports)
    with _telling:
        if not missing or (info.image, missing) in _told or len(_told) >= _TOLD_MAX:
            return
        _told.add((info.image, missing))
    _log.warning("image %r has no %s: importing that will fail, though it is authorized", info.image, _listed(missing))


def refusal(info: SessionInfo, missing: Sequence[str], images: Sequence[str]) -> str:
    """Return the message to an agent's author, which comes before the model is asked anything."""
    others = [image for image in images if image != info.image]
    elsewhere = f"take another image (the policy has {_listed(list(map(repr, others)))}), " if others else ""
    return (
        f"Non-installed authorized modules: {_listed(missing)}. The image {info.image!r} does not have them: "
        f"{elsewhere}install {_listed(distributions_of(missing))} in this one, "
        "or remove them from the authorized imports"
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED_MAX
    return ", ".join(names[:_LISTED_MAX]) + (f" and {more} more" if more > 0 else "")
