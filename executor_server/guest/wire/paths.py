"""Where the guest is in every sandbox, and the program that starts it there."""

from __future__ import annotations

GUEST_PATH = "/run/executor/guest.pyz"
"""The path of the archive in every sandbox; tracebacks of the guest name it, never a path of the host."""

ENVIRONMENT_PATH = "/run/executor/environment"
"""The sandbox's environment, read-only, where it has one: packages in `site`, their programs in `site/bin`."""

ENVIRONMENT_SITE = f"{ENVIRONMENT_PATH}/site"
ENVIRONMENT_PROGRAMS = f"{ENVIRONMENT_SITE}/bin"

WORK_PATH = "/run/executor/work"
"""The writable directory of a sandbox in which an environment is made; no session's sandbox has it."""

PROGRAMS_PATH = "/run/executor/programs"
"""The programs that make an environment, read-only, in such a sandbox."""

GUEST_BOOT = f"""\
import sys; sys.path.insert(0, {GUEST_PATH!r})
from executor_guest.main import boot; boot()
"""
"""The program for `python -c`, in a sandbox that is there. Running the archive would import runpy: 4 ms."""
