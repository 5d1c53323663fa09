"""Imports the image's modules in the zygote, and gives each child random numbers of its own afterwards.

Only modules that are known to be fit for this are imported here (the daemon's list): a module may keep threads, open
files or random state, which would be the same in every sandbox. Others are imported ahead in each sandbox.
"""

from __future__ import annotations

import importlib
import os
import sys

from ..wire.lean import signal

# Seconds to import one module; large ones take some on a loaded machine.
_MODULE_TIME_S = 30.0
_SEED_BYTES = 64


def import_modules(names: list[str]) -> list[str]:
    """Imports what the image has of these, as its interpreters would; returns what could be imported.

    `sys.path` is restored: the guest's own processes find the standard library and the guest there, and nothing else.
    """
    kept = list(sys.path)
    imported = []
    try:
        if names:
            sys.path.pop(0)  # the guest's archive
            import site

            site.main()
        for name in names:
            # Code that never comes back ends this process; the daemon goes on with bubblewrap.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, _MODULE_TIME_S)
            try:
                importlib.import_module(name)
                imported.append(name)
            except Exception:  # noqa: BLE001 (the border of the image's code)
                continue
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        sys.path[:] = kept
    return imported


def renew_random_state() -> None:
    """In a forked child: replaces what is random in modules and was inherited, the same in all children.

    `random` does it by itself, `secrets` and `uuid4` ask the kernel. The rest is known by name, and a test compares
    children of one zygote. The trap with process ids: `tempfile` and OpenSSL take a process for the one that seeded
    them when it has the same id, and in pid namespaces of their own two children do.
    """
    import random

    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # the state behind the functions of numpy.random; generators are seeded where they are made
    for module, names in (("tempfile", ("_name_sequence", "tempdir")), ("uuid", ("_node", "_last_timestamp"))):
        if module in sys.modules:
            for name in names:
                setattr(sys.modules[module], name, None)
    ssl = sys.modules.get("_ssl")
    if ssl is not None:
        ssl.RAND_add(os.urandom(_SEED_BYTES), float(_SEED_BYTES))
