"""Names the Python of a machine in a cloud to uv, which then chooses packages for it in a workshop on this host."""

from __future__ import annotations

from executor_server.backends import Interpreter
from executor_server.core import EnvironmentFailed
from executor_server.environments.uv import ForeignPython

# The second numbers of the manylinux platforms that uv knows; the first is 2. Wheels for an older one will do.
_MANYLINUX = (17, 28, *range(31, 41))
_MACHINES = ("x86_64", "aarch64")


def foreign_python(interpreter: Interpreter) -> ForeignPython:
    """Raises EnvironmentFailed when uv knows no platform for it."""
    version = ".".join(map(str, interpreter.version))
    if interpreter.machine in _MACHINES and interpreter.libc == "musl":
        return ForeignPython(version, f"{interpreter.machine}-unknown-linux-musl")
    known = [f"2_{minor}" for minor in _MANYLINUX if (2, minor) <= interpreter.libc_version]
    if interpreter.machine in _MACHINES and interpreter.libc == "glibc" and known:
        return ForeignPython(version, f"{interpreter.machine}-manylinux_{known[-1]}")
    raise EnvironmentFailed(
        "there are no packages for the machines of this image: their processor or C library has none"
    )
