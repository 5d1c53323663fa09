"""The ids of sessions in a fleet: `NODE-RANDOM`, so that an id alone says which node has the session."""

from __future__ import annotations

import re
import secrets

_RANDOM_BYTES = 16
_NODE = re.compile(r"[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?")
_RANDOM = re.compile(r"[0-9a-f]{32}")


def is_node_name(text: str) -> bool:
    """Returns True for 1 to 24 of a-z, 0-9 and inner hyphens."""
    return _NODE.fullmatch(text) is not None


def new_session_id(node: str) -> str:
    assert is_node_name(node)
    return f"{node}-{secrets.token_hex(_RANDOM_BYTES)}"


def node_of(session_id: str) -> str | None:
    """Returns the node that the id names; None for an id that no node of a fleet has made."""
    node, _, random = session_id.rpartition("-")
    return node if is_node_name(node) and _RANDOM.fullmatch(random) else None
