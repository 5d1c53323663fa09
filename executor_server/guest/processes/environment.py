"""The environment variables of the processes that calls start: those of the sandbox's other programs, and its own."""

from __future__ import annotations

import os

from ..wire.paths import ENVIRONMENT_PROGRAMS, ENVIRONMENT_SITE


def process_environment(own: dict[str, str], session: dict[str, str], *, has_environment: bool) -> dict[str, str]:
    """Returns the variables of one process: `own` go before those of the session, which go before the sandbox's.

    With an environment of packages, its programs and modules are found as in the interpreter.
    """
    variables = dict(os.environ)
    if has_environment:
        variables["PATH"] = _ahead(ENVIRONMENT_PROGRAMS, variables.get("PATH", os.defpath))
        variables["PYTHONPATH"] = _ahead(ENVIRONMENT_SITE, variables.get("PYTHONPATH", ""))
    variables.update(session)
    variables.update(own)
    return variables


def _ahead(directory: str, others: str) -> str:
    return f"{directory}{os.pathsep}{others}" if others else directory
