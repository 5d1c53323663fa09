"""Imports modules of the image in a warm interpreter, so that a program's own import costs nothing.

No agent code has run there yet. Modules that are missing, raise or exit are skipped. A module that takes too long, or
ends the process, ends the warm interpreter. Each import is reported before it begins, so the supervisor knows which
module it was.
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
    """Imports the modules in turn. May end the process; no exception of a module gets out."""
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
