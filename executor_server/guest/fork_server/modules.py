"""Imports the image's modules in the template process.

Only modules that are known to be fit for this are imported here (the daemon's list): a module may keep threads, open
files or random state, which would be the same in every sandbox. Others are imported ahead in each sandbox.
"""

from __future__ import annotations

import importlib
import sys

from ..interpreter.site_packages import add_site, leave_archive
from ..wire.lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

# Seconds to import one module, and to find them all; large ones take some on a loaded machine.
_MODULE_TIME_S = 30.0


def import_modules(names: list[str]) -> list[str]:
    """Imports those of these modules that the image has, as its interpreters would; returns the imported ones.

    `sys.path` is restored: the guest's own processes find the standard library and the guest there, and nothing else.
    """
    kept = list(sys.path)
    imported = []
    try:
        leave_archive()
        _in_time(add_site)
        for name in names:
            try:
                _in_time(importlib.import_module, name)
                imported.append(name)
            except Exception:  # noqa: BLE001 (the border of the image's code)
                continue
    finally:
        sys.path[:] = kept
    return imported


def _in_time(act: Callable[..., object], *arguments: str) -> None:
    """Calls it. Code of the image that never comes back ends this process; the daemon goes on with bubblewrap."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _MODULE_TIME_S)
    try:
        act(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
