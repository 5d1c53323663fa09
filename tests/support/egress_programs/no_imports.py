"""The proxy's process, in which every import fails once it is confined.

So it is where the proxy's user can't enter the directory of Python: a daemon of root with a Python below /root.
"""

from __future__ import annotations

import sys
from typing import Any

from executor_server.network.proxy import server
from executor_server.network.proxy.confinement import Confinement, confine


class _NoImports:
    def find_spec(self, name: str, *_: object) -> Any:
        sys.stderr.write(f"{name} is imported after confinement\n")
        raise ModuleNotFoundError(f"no module named {name} can be imported now")


def confine_and_import_nothing(confinement: Confinement) -> None:
    confine(confinement)
    sys.meta_path[:] = [_NoImports()]


server.confine = confine_and_import_nothing  # type: ignore[attr-defined]
sys.exit(server.serve(int(sys.argv[1])))
