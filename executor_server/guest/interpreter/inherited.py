"""The state that an interpreter inherits of a process that has imported modules already.

In a sandbox of a nursery that was its zygote, in every other one there is nothing of this.
"""

from __future__ import annotations

import os
import sys

from ..wire.paths import GUEST_PATH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

_SEED_BYTES = 64

_site_path: Optional[list[str]] = None


def leave_archive() -> None:
    """Takes the archive off `sys.path`, where it is for sources: its packages know where their modules are."""
    if GUEST_PATH in sys.path:
        sys.path.remove(GUEST_PATH)


def add_site() -> None:
    """Adds the image's packages to `sys.path`, as Python does at its start: once, also for the forks of this process.

    It runs code of the image (`.pth` files, sitecustomize).
    """
    global _site_path
    if _site_path is not None:
        sys.path += _site_path
        return
    import site

    before = list(sys.path)
    site.main()
    if sys.path[: len(before)] == before:
        _site_path = sys.path[len(before) :]


def renew_random_state() -> None:
    """Replaces what is random in modules that were imported already, the same in all forks of the process that did it.

    `random` does it by itself, `secrets` and `uuid4` ask the kernel. The rest is known by name, and a test compares
    children of one zygote. The trap with process ids: `tempfile` and OpenSSL take a process for the one that seeded
    them when it has the same id, and in pid namespaces of their own two interpreters do.
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
