"""The form of a forwarded port on the command line: [[HOST:]PORT:]PORT."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

PORT_MAX = 65_535
LOCAL_HOST = "127.0.0.1"

_FORM = re.compile(r"(?:(?:(?P<host>\[[0-9a-fA-F:.%a-z]+\]|[^:\[\]]+):)?(?P<local>[0-9]{0,5}):)?(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class PortPair:
    """A port of a session, and the local address that forwards to it. `local_port` 0: any free port."""

    port: int
    local_port: int
    host: str = LOCAL_HOST


def parse_forward(text: str) -> PortPair:
    """Parses 8000 (the same port here), 9000:8000, :8000 (any port here) and HOST:9000:8000.

    Raises ArgumentTypeError.
    """
    found = _FORM.fullmatch(text) if text.isascii() else None
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: write 8000, 9000:8000 or 127.0.0.1:9000:8000")
    port = int(found["port"])
    local_port = port if found["local"] is None else int(found["local"] or 0)
    if not 1 <= port <= PORT_MAX or local_port > PORT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: use 1 to {PORT_MAX:,}")
    return PortPair(port, local_port, (found["host"] or LOCAL_HOST).strip("[]"))
