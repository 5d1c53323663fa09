"""The environment variables of the processes that calls start."""

from __future__ import annotations

import os

from ..wire.frames import FrameError
from ..wire.lean import NotJson, loads
from ..wire.paths import ENVIRONMENT_PROGRAMS, ENVIRONMENT_SITE

_ZONES = "/usr/share/zoneinfo"


def process_environment(own: dict[str, str], session: dict[str, str], *, has_environment: bool) -> dict[str, str]:
    """Returns the variables of one process: `own` override the session's, which override the sandbox's.

    With an environment of packages, the process finds its programs and modules, as the interpreter does.
    """
    variables = dict(os.environ)
    if has_environment:
        variables["PATH"] = _ahead(ENVIRONMENT_PROGRAMS, variables.get("PATH", os.defpath))
        variables["PYTHONPATH"] = _ahead(ENVIRONMENT_SITE, variables.get("PYTHONPATH", ""))
    variables.update(session)
    variables.update(own)
    return variables


def read_variables(data: bytes) -> dict[str, str]:
    """Reads an object of environment variables. Raises FrameError."""
    try:
        variables = loads(data)
    except NotJson as error:
        raise FrameError("environment variables that are not JSON") from error
    if not isinstance(variables, dict) or not all(map(is_text, variables)) or not all(map(is_text, variables.values())):
        raise FrameError("environment variables that are not an object of texts")
    if not all(name and "=" not in name for name in variables):
        raise FrameError("an environment variable with a name that the system refuses")
    return variables


def check_time_zone(variables: dict[str, str]) -> str:
    """Returns the reason if the image lacks the time zone of TZ; the C library would silently use UTC."""
    zone, zones = variables.get("TZ", "").lstrip(":"), variables.get("TZDIR", _ZONES)
    if "/" not in zone or "," in zone or os.path.exists(os.path.join(zones, zone)):
        return ""
    return f"env.TZ: the image has no time zone {zone!r} in {zones}; use another one, or an offset such as UTC-3"


def is_text(value: object) -> bool:
    """True for a text that the system accepts as an argument or in a variable."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
        return False
    return True


def _ahead(directory: str, others: str) -> str:
    return f"{directory}{os.pathsep}{others}" if others else directory
