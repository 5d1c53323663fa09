"""The section [gateway]: the process that serves HTTP, the Connect protocol and E2B's protocol."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from executor_server.core.config.key_types import AbsolutePath, Form, HostPort, ImageName, Section

_DOMAIN = re.compile(
    r"(?=.{1,200}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*(:[0-9]{1,5})?"
)
_ORIGIN = re.compile(r"https?://[a-z0-9.-]{1,253}(:[0-9]{1,5})?")


class GatewaySection(Section):
    """The gateway, `executor-server gateway`: HTTP, the Connect protocol and E2B's protocol. A process of its own; the
    daemon does not read this section."""

    listen: HostPort = "127.0.0.1:3000"
    """The address for clients, `HOST:PORT`. Addresses that other machines can reach need `tls_cert`."""
    daemon: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """The daemon's address, `HOST:PORT` or `unix:PATH`. Not set: the socket in the state directory."""
    daemon_tls_ca: AbsolutePath | None = None
    """The CA of the daemon's certificate (PEM). Not set: for a daemon on another machine, the system's CAs."""
    domain: Annotated[str, AfterValidator(Form("a DNS name in lower case, or NAME:PORT", _DOMAIN.fullmatch))] | None = (
        None
    )
    """The domain of sandboxes: `PORT-ID.DOMAIN` leads to a port of a sandbox. With a port, if clients need one:
    `localhost:3000`. Not set: there are no such names."""
    tls_cert: AbsolutePath | None = None
    """The gateway's certificate (PEM), with `*.DOMAIN` among its names if `domain` is set."""
    tls_key: AbsolutePath | None = None
    """The key of the certificate."""
    allowed_origins: Annotated[
        tuple[Annotated[str, AfterValidator(Form("an origin, like https://app.example", _ORIGIN.fullmatch))], ...],
        Field(max_length=256),
    ] = ()
    """Origins whose web pages may call the gateway (CORS), besides the gateway's own pages."""
    templates: Annotated[dict[Annotated[str, Field(max_length=128)], ImageName], Field(max_length=256)] = Field(
        default_factory=lambda: {"code-interpreter-v1": "base"}
    )
    """Images for E2B's names of templates: `"code-interpreter-v1" = "data"`. Other names are names of images.
    Clients that name no template ask for `base` or `code-interpreter-v1`."""

    users: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=32)], ...], Field(max_length=16)] = ()
    """Further names for the only user of a sandbox, besides `user`. `["root"]` is for E2B's clients that name `root` in
    each call. It gives them no rights of root."""

    @model_validator(mode="after")
    def _check(self) -> GatewaySection:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be given together")
        return self
