"""The section [console]: the process that serves pages for people."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from executor_server.core.config.key_types import AbsolutePath, Form, HostPort, Section

_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[0-9]{1,5})?")


class ConsoleSection(Section):
    """The console, `executor-server console`: pages for people. A process of its own; the daemon does not read this
    section."""

    listen: HostPort = "127.0.0.1:8088"
    """The address for browsers, `HOST:PORT`. Addresses that other machines can reach need `tls_cert`."""
    daemon: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """The daemon's address, `HOST:PORT` or `unix:PATH`. Not set: the socket in the state directory."""
    daemon_tls_ca: AbsolutePath | None = None
    """The CA of the daemon's certificate (PEM). Not set: for a daemon on another machine, the system's CAs."""
    token_file: AbsolutePath | None = None
    """The file with the console's token; only its user may read the file. Everyone who signs in has the token's rights.
    Not set: the token in the state directory, which is an admin's."""
    actions: bool = False
    """Lets people act: decide approvals, end sessions, drain, reload. Without it the console only shows."""
    hosts: Annotated[
        tuple[Annotated[str, AfterValidator(Form("a host name in lower case, or NAME:PORT", _HOST.fullmatch))], ...],
        Field(max_length=16),
    ] = ()
    """Names by which browsers open the console, `NAME` or `NAME:PORT`; links have the last one. Requests with another
    Host header are refused. Empty: the address of `listen`, and `localhost` for a loopback address."""
    tls_cert: AbsolutePath | None = None
    """The console's certificate (PEM)."""
    tls_key: AbsolutePath | None = None
    """The key of the certificate."""

    @model_validator(mode="after")
    def _check(self) -> ConsoleSection:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be given together")
        return self
