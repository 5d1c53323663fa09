"""The configuration of package environments: the index, and limits of building and keeping them.

The policy names the packages that sessions may have. Without such packages none of this is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import InitErrorDetails

from executor_server.core.config.key_types import (
    GIB,
    MIB,
    UNSHOWN,
    AbsolutePath,
    Bytes,
    ReadForm,
    Seconds,
    Section,
    WrittenSize,
)
from executor_server.core.config.problems import contradiction, refuse
from executor_server.guest.egress.host_names import HostPattern, is_within

PUBLIC_INDEX_HOST = "pypi.org"
PUBLIC_INDEX_HOSTS = ("pypi.org:443", "files.pythonhosted.org:443")
"""The hosts of the public index: its pages, and the files that they lead to."""
MAX_INDEX_HOSTS = 64
MAX_URL_CHARS = 512
MAX_HEADER_CHARS = 1024

_URL = re.compile(
    r"(?P<scheme>https?)://(?P<authority>[^*/@?#\s][^/@?#\s]*)(?P<path>(?:/[A-Za-z0-9._~!$&'()*+,;=:%-]*)*)"
)
_HEADER = re.compile(r"(?:Basic|Bearer) \$\{[A-Za-z0-9][A-Za-z0-9._-]{0,63}\}")
_PORTS = {"https": 443, "http": 80}


def _url_of(text: str) -> str:
    """Returns the URL of an index without slashes at its end. Raises ValueError with a clause."""
    if len(text) > MAX_URL_CHARS:
        raise ValueError(f"is longer than {MAX_URL_CHARS} characters")
    if "@" in text:
        raise ValueError("has a user or a password; name a secret in index_authorization")
    match = _URL.fullmatch(text)
    if match is None:
        raise ValueError("is not a directory URL")
    return f"{match['scheme']}://{HostPattern.parse(match['authority']).text}{match['path'].rstrip('/')}"


def _host_of(text: str) -> str:
    return HostPattern.parse(text).text


def _authorization_of(text: str) -> str:
    if len(text) > MAX_HEADER_CHARS or _HEADER.fullmatch(text) is None:
        raise ValueError("is not a scheme and the name of a secret")
    return text


_URL_FORM = ReadForm('the URL of an index, as "https://packages.example.com/simple"', _url_of)
_HOST_FORM = ReadForm('a host by name, as "packages.example.com:443"', _host_of)
_AUTHORIZATION_FORM = ReadForm(
    '"Basic ${NAME}" or "Bearer ${NAME}", with a secret of egress.secrets', _authorization_of
)


class EnvironmentsSection(Section):
    """Environments of packages that sessions have in addition to their image's. Each is built once, in a sandbox that
    reaches only the index, and shared read-only by all sessions with the same packages."""

    uv: AbsolutePath | None = None
    """The uv to use. Not set: the one next to the daemon's Python, else the system's."""
    index_url: Annotated[Annotated[str, AfterValidator(_URL_FORM)] | None, UNSHOWN] = None
    """The package index (simple API). Not set: PyPI. With an index of your own a policy can allow `"*"`, every package
    in it."""
    index_hosts: Annotated[
        tuple[Annotated[str, AfterValidator(_HOST_FORM)], ...], Field(max_length=MAX_INDEX_HOSTS)
    ] = ()
    """The hosts of the index and of its files. Empty: the host of `index_url`; for PyPI, both of its hosts. Private
    addresses must be in `egress.internal`."""
    index_authorization: Annotated[Annotated[str, AfterValidator(_AUTHORIZATION_FORM)] | None, UNSHOWN] = None
    """The header `Authorization` for the host of `index_url`. The egress proxy sets it; no sandbox sees it. For `Basic`
    the secret is the Base64 of `USER:PASSWORD`."""
    cache: AbsolutePath | None = None
    """The folder for environments and downloaded wheels, on one file system. Not set: `environments` in the state
    directory."""
    max_bytes: Bytes = 20 * GIB
    """Bytes of that folder. The least recently used environments and wheels are removed, except those in use."""
    build_timeout_s: Seconds = 600.0
    """Seconds that building one environment may take."""
    max_archive_bytes: Annotated[int, WrittenSize, Field(strict=True, gt=0, le=GIB)] = 256 * MIB
    """Bytes of the archive of an environment for an E2B sandbox. Larger environments are refused there."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Patterns of the hosts of the index."""
        if self.index_hosts:
            return self.index_hosts
        if self.index_url is None or not self.has_own_index:
            return PUBLIC_INDEX_HOSTS
        return (_host_of_url(self.index_url).text,)

    @property
    def has_own_index(self) -> bool:
        """True when the operator chose the contents of the index, so that all of it may be allowed."""
        return self.index_url is not None and _host_of_url(self.index_url).host != PUBLIC_INDEX_HOST

    def directory_in(self, state_dir: Path) -> Path:
        """The folder of the environments."""
        return self.cache or state_dir / "environments"

    @model_validator(mode="after")
    def _check_index(self) -> EnvironmentsSection:
        refuse(self, list(self._contradictions()))
        return self

    def _contradictions(self) -> Iterator[InitErrorDetails]:
        if self.index_url is None:
            for key in ("index_hosts", "index_authorization"):
                if getattr(self, key):
                    yield contradiction((key,), "needs index_url, which is not set", getattr(self, key))
            return
        own = _host_of_url(self.index_url)
        if self.index_hosts and not any(is_within(own, HostPattern.parse(each)) for each in self.index_hosts):
            text = f"lacks the host of index_url, {own.text}"
            yield contradiction(("index_hosts",), text, self.index_hosts, also=[("index_url",)])
        if self.index_authorization is not None and self.index_url.startswith("http:"):
            text = "needs an index_url of https, or it would be sent unencrypted"
            yield contradiction(("index_authorization",), text, self.index_authorization, also=[("index_url",)])


def _host_of_url(url: str) -> HostPattern:
    """The host of an index with its port."""
    parts = urlsplit(url)
    host = HostPattern.parse(parts.netloc)
    return host if host.port is not None else replace(host, port=_PORTS[parts.scheme])
