"""Where the guest is in every sandbox, and the program that starts it there."""

from __future__ import annotations

GUEST_PATH = "/run/executor/guest.pyz"
"""The path of the archive in every sandbox; tracebacks of the guest name it, never a path of the host."""

ENVIRONMENT_PATH = "/run/executor/environment"
"""The sandbox's environment, read-only, if it has one: packages in `site`, their programs in `site/bin`."""

ENVIRONMENT_SITE = f"{ENVIRONMENT_PATH}/site"
ENVIRONMENT_PROGRAMS = f"{ENVIRONMENT_SITE}/bin"

WORK_PATH = "/run/executor/work"
"""The writable directory of a sandbox in which an environment is made; no session's sandbox has it."""

PROGRAMS_PATH = "/run/executor/programs"
"""The programs that make an environment, read-only, in such a sandbox."""

BYTECODE = "bytecode"
"""The first entry of the archive, which is stored as it is; see guest/bytecode.py."""

_ZIP_HEADER_BYTES = 30


def import_program(archive: str) -> str:
    """Returns the lines of Python that make the guest importable. `archive` is an expression: the archive's path."""
    return f"""\
import marshal, sys, _frozen_importlib_external
archive = {archive}
with open(archive, "rb") as file:
    file.seek({_ZIP_HEADER_BYTES + len(BYTECODE)})
    if file.read(4) == _frozen_importlib_external.MAGIC_NUMBER:
        names = {{"__name__": "executor_guest.bytecode"}}
        exec(marshal.load(file), names)
        names["install"](archive, file)
    else:
        sys.path.insert(0, archive)
"""


INTERPRETER_BOOT = f"{import_program(repr(GUEST_PATH))}from executor_guest.main import interpret; interpret()"
"""The program of an interpreter that is not a fork of its supervisor."""

GUEST_BOOT = f"{import_program(repr(GUEST_PATH))}from executor_guest.main import boot; boot()"
"""The program for `python -c` in an existing sandbox. Running the archive would import runpy: 4 ms."""
