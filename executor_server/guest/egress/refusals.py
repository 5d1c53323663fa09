"""Refusals: why a connection or a request is not served, and the answer to the program in the sandbox.

The sentence goes into the reason phrase as well as into the body, because clients that fail on CONNECT (urllib,
requests) show the phrase alone: "Tunnel connection failed: 403 api.x.com:443 is not allowed …".
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Dict

from . import reasons

MESSAGE_CHARACTERS = 600
PHRASE_CHARACTERS = 200
SHOWN_CHARACTERS = 100

# HTTP statuses; every other reason is a 403.
STATUSES: Dict[str, int] = {
    reasons.BAD_REQUEST: 400,
    reasons.BAD_NAME: 400,
    reasons.AMBIGUOUS_PATH: 400,
    reasons.HEAD_TIMEOUT: 408,
    reasons.MISDIRECTED: 421,
    reasons.TOO_MANY_CONNECTIONS: 429,
    reasons.TOO_MANY_NEW: 429,
    reasons.HEAD_TOO_LARGE: 431,
    reasons.UNRESOLVED: 502,
    reasons.UNREACHED: 502,
    reasons.UPSTREAM_CERTIFICATE: 502,
    reasons.SECRET_MISSING: 502,
    reasons.PROXY_FAILED: 502,
    reasons.RESOLVER_TIMEOUT: 504,
}


class Refusal(Exception):
    """A connection or a request is refused, with one of `reasons` and a sentence that a model can act on."""

    def __init__(
        self, reason: str, message: str, *, host: str = "", port: int = 0, address: str = "", parting: bytes = b""
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message[:MESSAGE_CHARACTERS]
        self.host = host  # empty: the connection's target
        self.port = port
        self.address = address  # the address that was refused; never part of the message, see dial.py
        self.parting = parting  # sent to a client that had its 200 already: a TLS alert


def failure(error: Exception) -> Refusal:
    """Returns the refusal for an unexpected exception. Its id connects the program's answer with the log."""
    incident = f"incident {secrets.token_hex(4)}"
    asyncio.get_running_loop().call_exception_handler({"message": incident, "exception": error})
    message = (
        f"the egress proxy failed, and the request is not the cause; tell the administrator that its log has {incident}"
    )
    return Refusal(reasons.PROXY_FAILED, message)


class Ended(Exception):
    """A connection is over before both sides ended it; the reason is one of `reasons.ENDS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def shown(text: str) -> str:
    """Returns a sandbox's text fit for records and messages: shortened, without control characters."""
    printable = "".join(character if character.isprintable() else "?" for character in text[: SHOWN_CHARACTERS + 1])
    return printable if len(printable) <= SHOWN_CHARACTERS else printable[:SHOWN_CHARACTERS] + "…"


def response_to(refusal: Refusal, *, with_body: bool = True) -> bytes:
    """Returns the HTTP response for a refusal. In the status line, everything but printable ASCII becomes `?`."""
    status = STATUSES.get(refusal.reason, 403)
    phrase = "".join(character if " " <= character <= "~" else "?" for character in refusal.message)
    body = (refusal.message + "\n").encode("utf-8", "replace")
    head = (
        f"HTTP/1.1 {status} {phrase[:PHRASE_CHARACTERS]}\r\n"
        "Content-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n"
        f"X-Egress-Reason: {refusal.reason}\r\n\r\n"
    )
    return head.encode("ascii") + (body if with_body else b"")
