"""The server's side of a TLS connection for one host: the client must name that host."""

from __future__ import annotations

import ssl
import sys
from typing import Any

from executor_server.guest.egress.host_names import BadName, canonical_host
from executor_server.guest.egress.refusals import shown


class NamedServer(ssl.SSLObject):
    """Created by `ssl`. `expect` must be called before the handshake; otherwise no name is accepted."""

    _host = ""
    _is_address = False
    refusal = ""
    """The reason why the client's server name was refused, as a clause; empty if it was not."""

    def expect(self, host: str, *, is_address: bool) -> None:
        self._host = host
        self._is_address = is_address

    def check(self, server_name: str | None) -> int | None:
        """Returns None to continue, or the alert that ends the handshake."""
        if server_name is None:
            if self._is_address:  # addresses are not server names
                return None
            self.refusal = "its ClientHello has no server name"
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        try:
            same = canonical_host(server_name) == self._host
        except BadName:
            same = False
        if same:
            return None
        self.refusal = f"its ClientHello names {shown(server_name)} instead"
        return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME


def check_server_names(context: ssl.SSLContext) -> None:
    """Makes `context.wrap_bio` return a NamedServer that checks."""
    context.sslobject_class = NamedServer
    context.sni_callback = _check


def _check(server: Any, server_name: str | None, _context: ssl.SSLContext) -> int | None:
    assert isinstance(server, NamedServer)
    return server.check(server_name)


def ignore_unreadable_names(unraisable: Any) -> None:
    """A sys.unraisablehook that drops the tracebacks of server names that are not ASCII.

    Such a name fails its handshake. `ssl` reports it as an exception that no caller can catch, so a sandbox could fill
    the log.
    """
    if not isinstance(unraisable.exc_value, UnicodeDecodeError):
        sys.__unraisablehook__(unraisable)
