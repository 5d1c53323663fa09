"""Reports authorized modules that a session's image lacks: once in the log, or in an error.

A list of imports is often longer than needed, so a plain client only gets a warning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

from executor_api.distributions import likeliest
from executor_client.results import SessionInfo

_log = logging.getLogger(__name__)

_WARNED_MAX = 1_000
_LISTED_MAX = 20
_warned: set[tuple[str, tuple[str, ...]]] = set()
_warned_lock = threading.Lock()


def asked_for(info: SessionInfo, authorized_imports: Iterable[str]) -> tuple[str, ...]:
    """Returns the missing modules that the caller named, without the policy's defaults."""
    named = {str(each).partition(".")[0] for each in authorized_imports}
    return tuple(module for module in info.missing_modules if module in named)


def warn(info: SessionInfo, authorized_imports: Iterable[str]) -> None:
    """Warns in the log, once for each image and set of missing modules."""
    missing = asked_for(info, authorized_imports)
    with _warned_lock:
        if not missing or (info.image, missing) in _warned or len(_warned) >= _WARNED_MAX:
            return
        _warned.add((info.image, missing))
    _log.warning(
        "image %r has no %s: the import is authorized but will fail, unless the workspace has the module",
        info.image,
        _listed(missing),
    )


def refusal(info: SessionInfo, missing: Sequence[str], images: Sequence[str]) -> str:
    """Returns the error for an agent's author, raised before the first call of the model.

    `images` are the policy's images.
    """
    packages = ", ".join(f'"{name}"' for name in likeliest(missing)[:_LISTED_MAX])
    return (
        f"Non-installed authorized modules: {_listed(missing)}. The image {info.image!r} does not have them: "
        f"{_elsewhere(info, images)}ask for packages=[{packages}], which the policy must allow, "
        "or remove them from the authorized imports; modules that the agent writes itself need not be in them"
    )


def _elsewhere(info: SessionInfo, images: Sequence[str]) -> str:
    having = [image for image in info.images_with_missing if image in images]
    if having:
        return f"take an image that has them ({_listed(list(map(repr, having)))}), "
    others = [image for image in images if image != info.image]
    return f"take another image (the policy has {_listed(list(map(repr, others)))}), " if others else ""


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED_MAX
    return ", ".join(names[:_LISTED_MAX]) + (f" and {more} more" if more > 0 else "")
