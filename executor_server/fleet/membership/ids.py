"""The ids of sessions in a fleet: `NODE-EPOCHRANDOM`.

An id alone names the node of a session, and the node's epoch in which it began. So a front knows that a session of an
earlier epoch is lost, even if it has forgotten the session or never knew it.
"""

from __future__ import annotations

import re
import secrets

MAX_EPOCH = 2**32 - 1
_EPOCH_DIGITS = 8
_RANDOM_BYTES = 12
_NODE = re.compile(r"[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?")
_TAIL = re.compile(r"[0-9a-f]{32}")


def is_node_name(text: str) -> bool:
    """Returns True for 1 to 24 of a-z, 0-9 and inner hyphens."""
    return _NODE.fullmatch(text) is not None


def new_session_id(node: str, epoch: int) -> str:
    assert is_node_name(node) and 0 < epoch <= MAX_EPOCH
    return f"{node}-{epoch:0{_EPOCH_DIGITS}x}{secrets.token_hex(_RANDOM_BYTES)}"


def node_of(session_id: str) -> str | None:
    """Returns the node that the id names; None for an id that no node of a fleet has made."""
    node, _, tail = session_id.rpartition("-")
    return node if is_node_name(node) and _TAIL.fullmatch(tail) else None


def epoch_of(session_id: str) -> int:
    """Returns the epoch in which the session began. Requires that `node_of` names a node."""
    return int(session_id.rpartition("-")[2][:_EPOCH_DIGITS], 16)
