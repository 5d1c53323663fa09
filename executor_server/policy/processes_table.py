"""The processes and the ports of a profile in the policy file."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from executor_server.core import PortRules, ProcessRules
from executor_server.core.config import ReadForm, Section
from executor_server.policy.forms import MAX_PATTERNS, Flag, Output

_PORTS = re.compile(r"([1-9][0-9]{0,4})(?:-([1-9][0-9]{0,4}))?")
_MAX_PORT = 65_535


def port_range(text: str) -> tuple[int, int]:
    """Returns the first and the last port of "8000" or "8000-8999". Raises ValueError with a clause."""
    found = _PORTS.fullmatch(text)
    if found is None:
        raise ValueError("is neither a port nor a range of ports")
    low, high = int(found[1]), int(found[2] or found[1])
    if high > _MAX_PORT:
        raise ValueError(f"goes past {_MAX_PORT}, the last port")
    if low > high:
        raise ValueError("ends before it begins")
    return low, high


def _checked(text: str) -> str:
    port_range(text)
    return text


_PORTS_FORM = ReadForm('a port ("8000") or a range of them ("8000-8999")', _checked)
PortRanges = Annotated[tuple[Annotated[str, AfterValidator(_PORTS_FORM)], ...], Field(max_length=MAX_PATTERNS)]


class ProcessesTable(Section):
    """Processes that clients start in a session: commands, terminals. They run next to executions, as the same user and
    under the same limits. `language.dangerous_functions` decides about processes that agent code starts itself."""

    allowed: Flag | None = None
    """True when clients may start processes. Not set: true, but false where `language.preset` is `strict`."""
    pty: Flag = ProcessRules.pty
    """True when a process may have a terminal."""
    max: Annotated[int, Field(strict=True, gt=0, le=256)] = ProcessRules.max
    """Processes of one session at one time."""
    max_output_bytes: Output = ProcessRules.max_output_bytes
    """Bytes of one process's output that leave the sandbox; output beyond them is counted and dropped."""


class PortsTable(Section):
    """TCP ports of a session that a client may have forwarded to itself, through the daemon. The sandbox needs no
    network for that."""

    allowed: PortRanges | None = None
    """Ports that may be forwarded: `["8000", "3000-3999"]`. Not set: all, but none where `language.preset` is
    `strict`."""
    max_connections: Annotated[int, Field(strict=True, gt=0, le=1024)] = PortRules.max_connections
    """Forwarded connections of one session at one time."""
