"""The state that an interpreter inherits from a process that has imported modules already.

In a fork server's sandbox that process is the template process; in every other sandbox it is the supervisor, which has
imported few modules.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

_SEED_BYTES = 64

_register_at_fork = os.register_at_fork
_deferred: list[dict[str, Callable[[], object]]] = []


def defer_fork_handlers() -> None:
    """Keeps the functions that modules register for forks until `take_fork_handlers`, from the next import on.

    Each fork would call those of threading, random, logging and others, and copy 230 pages for it: too much for a
    supervisor and a checker, which use none of these modules.
    """
    os.register_at_fork = _defer  # type: ignore[assignment]  # takes the same keywords


def _defer(**handlers: Callable[[], object]) -> None:
    if os.register_at_fork is _register_at_fork:  # a module has kept this function under a name of its own
        _register_at_fork(**handlers)
    else:
        _deferred.append(handlers)


def take_fork_handlers() -> None:
    """Calls the deferred functions for the forks that led to this process, and registers them for its own forks."""
    os.register_at_fork = _register_at_fork
    for handlers in _deferred:
        after = handlers.get("after_in_child")
        try:
            if after is not None:
                after()
        except Exception:  # noqa: BLE001 - code of the image: as in Python itself, its failure does not fail the fork
            pass
        _register_at_fork(**handlers)
    _deferred.clear()


def renew_random_state() -> None:
    """Renews the random state of imported modules, which all forks of the process that imported them share.

    `random` does it by itself, `secrets` and `uuid4` ask the kernel. The rest is listed by name, and a test compares
    children of one template process. The trap with process ids: `tempfile` and OpenSSL seed themselves again only if
    the process id has changed, and two interpreters in pid namespaces of their own can have the same id.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # The functions of numpy.random, and the seed sequence behind them. Generators are seeded where they are made.
        numpy_random.seed()
    for module, names in (("tempfile", ("_name_sequence", "tempdir")), ("uuid", ("_node", "_last_timestamp"))):
        if module in sys.modules:
            for name in names:
                setattr(sys.modules[module], name, None)
    ssl = sys.modules.get("_ssl")
    if ssl is not None:
        ssl.RAND_add(os.urandom(_SEED_BYTES), float(_SEED_BYTES))
