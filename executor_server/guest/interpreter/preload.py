"""Imports modules of the image before a program asks for them, so that the program's own import costs nothing.

It happens in a warm interpreter, before any agent code runs there. A module that is missing, raises or exits is left
out. One that takes too long, or ends the process, ends the warm interpreter: each module is reported before its import,
so that the supervisor knows which one that was.
"""

from __future__ import annotations

import importlib
import os

from ..wire.lean import signal
from ..wire.link_messages import Importing, LinkMessage, NotImported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

# Seconds to import one module; large ones take some on a loaded machine.
MODULE_TIME_S = 30.0


def import_ahead(modules: list[str], report: Callable[[LinkMessage], None]) -> None:
    """Imports the modules one after the other. May end the process; raises no exception of a module."""
    own_pid = os.getpid()
    for name in modules:
        report(Importing(name=name))
        # The kernel's default action and no handler: code that never comes back to Python has to end too.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, MODULE_TIME_S)
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 (the border of the image's code: sys.exit comes here too)
            if os.getpid() == own_pid:
                report(NotImported(name=name, why=type(error).__name__[:64]))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if os.getpid() != own_pid:
            os._exit(0)  # a process that the module forked came back to here
