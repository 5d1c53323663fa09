"""Importing modules of the image before anybody asks for them, so that a program's own import costs nothing.

It happens in a spare interpreter that nobody waits for (see crew.py), before any agent code runs there. A module that
is missing, raises or exits is left out. One that takes too long, or ends the process, costs the spare its life: whoever
started it is told before each module which one it is.
"""

from __future__ import annotations

import importlib
import os

from .lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

MODULE_TIME_S = 30.0


def import_ahead(modules: list[str], tell: Callable[[dict[str, Any]], None]) -> None:
    """Imports them, one after the other. May end the process; raises nothing for what a module does."""
    own_pid = os.getpid()
    for name in modules:
        tell({"t": "importing", "name": name})
        # The kernel's doing and not a handler's: code that never comes back to Python has to end too.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, MODULE_TIME_S)
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 (the border of the image's code: sys.exit comes here too)
            if os.getpid() == own_pid:
                tell({"t": "not_imported", "name": name, "why": type(error).__name__[:64]})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if os.getpid() != own_pid:
            os._exit(0)  # a process that the module forked fell through to here
