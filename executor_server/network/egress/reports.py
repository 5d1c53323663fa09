"""Reads the reports of the proxy, which is as untrusted as the sandboxes whose bytes it parses.

Text is cut and made printable instead of refused: it may come from a sandbox, and an overlooked character must not let
one sandbox bring down the proxy of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executor_server.core import EgressConnection, EgressDenial
from executor_server.guest.egress.host_names import BadName, LiteralAddress, parse_authority
from executor_server.guest.egress.reasons import ENDS, REFUSALS

_MAX_ID_CHARS = 64
_MAX_HOST_CHARS = 256
_MAX_RULE_CHARS = 300
_MAX_ADDRESS_CHARS = 64
_MAX_MESSAGE_CHARS = 700
_MAX_HEADER_CHARS = 128
_MAX_COUNT = 2**53


class BadReport(Exception):
    """A report does not have the form of its type; the message is a clause without text of the report."""


def connection_of(values: object, *, ended: bool) -> EgressConnection:
    """Reads a connection that was opened, or has ended. Raises BadReport."""
    fields = _object(values)
    reason = text(fields.get("reason"), _MAX_ID_CHARS)
    if ended and reason not in ENDS | REFUSALS:
        raise BadReport("the reason of an end is unknown")
    return EgressConnection(
        connection_id=text(fields.get("connection_id"), _MAX_ID_CHARS),
        host=text(fields.get("host"), _MAX_HOST_CHARS),
        port=_port(fields.get("port")),
        address=text(fields.get("address"), _MAX_ADDRESS_CHARS),
        rule=text(fields.get("rule"), _MAX_RULE_CHARS),
        sent_bytes=count(fields.get("sent_bytes")),
        received_bytes=count(fields.get("received_bytes")),
        duration_s=_duration(fields.get("duration_s")),
        reason=reason if ended else "",
        secret_used=text(fields.get("secret_used"), _MAX_HEADER_CHARS),
    )


def denial_of(values: object) -> EgressDenial:
    """Reads a refusal. Raises BadReport."""
    fields = _object(values)
    reason = text(fields.get("reason"), _MAX_ID_CHARS)
    if reason not in ENDS | REFUSALS:
        raise BadReport("the reason of a refusal is unknown")
    return EgressDenial(
        host=text(fields.get("host"), _MAX_HOST_CHARS),
        port=_port(fields.get("port")),
        reason=reason,
        message=text(fields.get("message"), _MAX_MESSAGE_CHARS),
        address=text(fields.get("address"), _MAX_ADDRESS_CHARS),
    )


def target_of(fields: Mapping[str, Any]) -> tuple[str, int]:
    """Reads a host in canonical form, and a port. Raises BadReport."""
    host, port = text(fields.get("host"), _MAX_HOST_CHARS), _port(fields.get("port"))
    try:
        target = parse_authority(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except LiteralAddress as literal:
        if literal.target is None:
            raise BadReport("an address does not have its canonical form") from None
        target = literal.target
    except BadName:
        raise BadReport("a host is no name") from None
    if target != (host, port):
        raise BadReport("a host does not have its canonical form")
    return host, port


def count(value: object) -> int:
    """Reads a number of things or bytes. Raises BadReport."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise BadReport("a number is none, or too large")
    return value


def text(value: object, max_chars: int) -> str:
    """Reads text, and makes it fit into one line of a log. Raises BadReport."""
    if not isinstance(value, str):
        raise BadReport("a text is none")
    return "".join(character if character.isprintable() else "?" for character in value[:max_chars])


def _object(values: object) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise BadReport("a record is none")
    return values


def _port(value: object) -> int:
    port = count(value)
    if port >= 2**16:
        raise BadReport("a port is too large")
    return port


def _duration(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MAX_COUNT:
        raise BadReport("a duration is none")
    return float(value)
