"""Starts an interpreter with the environment variables of its session.

An interpreter is a fork of its supervisor or, in a forked sandbox, of a process that has imported libraries. Python,
the C library and some libraries read variables once, when they start. If the session has one of these, the fork
executes Python again. That costs a tenth of a second, and the modules imported ahead are lost.
"""

from __future__ import annotations

import os
import sys
import time

from ..wire.lean import dumps, loads, socket
from ..wire.paths import INTERPRETER_BOOT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

# Variables that Python, the C library, the loader and libraries read once, when they start.
_READ_ONCE = (
    *("PYTHON", "LANG", "LC_", "LD_", "GLIBC_", "MALLOC_"),
    *("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_", "BLIS_", "NUMEXPR_", "NPY_", "ARROW_", "POLARS_", "MPL"),
)
_PATH = "PYTHONPATH"
_KEPT = ("workspace", "memory_bytes", "processes", "watch_memory", "mark", "egress_listener", "has_environment")


def need_new_process(variables: dict[str, str]) -> bool:
    """True if some of these variables would have no effect in a fork."""
    return any(name.startswith(_READ_ONCE) and name != _PATH for name in variables)


def apply_variables(variables: dict[str, str]) -> None:
    """Sets the variables before anything of the image is imported."""
    os.environ.update(variables)
    if "TZ" in variables:
        time.tzset()


def python_path(variables: dict[str, str]) -> list[str]:
    """Returns the session's directories of modules. As in every Python they come first, but after the guest's."""
    return [os.path.abspath(each) for each in variables.get(_PATH, "").split(os.pathsep) if each]


def execute(sock: socket.socket, config: Any, modules: list[str]) -> NoReturn:
    """Executes Python for `interpret` of main.py. Not with -I, which makes Python ignore its variables."""
    settings = {name: getattr(config, name) for name in _KEPT}
    values = os.memfd_create("settings")
    os.write(values, dumps({"config": settings, "variables": config.variables, "modules": modules}))
    for fd in (values, sock.fileno()):
        os.set_inheritable(fd, True)
    environment = {**os.environ, **config.variables}
    environment.pop(_PATH, None)  # the guest's own imports must not search it
    # `-c` puts the workspace first on the path.
    program = f"import sys; sys.path[:] = filter(None, sys.path)\n{INTERPRETER_BOOT}"
    command = [sys.executable, "-s", "-S", "-c", program, str(values), str(sock.fileno())]
    os.execve(sys.executable, command, environment)


def executed() -> tuple[socket.socket, dict[str, Any]]:
    """Returns the link and the settings, in the process that `execute` has made."""
    fd = int(sys.argv[2])
    os.set_inheritable(fd, False)
    with open(int(sys.argv[1]), "rb") as file:
        file.seek(0)
        values = loads(file.read())
    return socket.socket(fileno=fd), values
