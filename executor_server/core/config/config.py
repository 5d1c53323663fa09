"""The daemon's configuration: every key with its default, read from TOML.

No key needs to be set. The file is validated as a whole: `load` raises one ConfigError that lists each problem with its
key and the allowed values. Command line options are merged in first, so the frozen result is the configuration in
effect.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from executor_server.core import secret_names
from executor_server.core.config.backend_config import DockerSection, E2BSection, LocalSection
from executor_server.core.config.console_config import ConsoleSection
from executor_server.core.config.egress_config import EgressSection
from executor_server.core.config.environments_config import EnvironmentsSection
from executor_server.core.config.fleet_config import FleetSection
from executor_server.core.config.gateway_config import GatewaySection
from executor_server.core.config.key_types import (
    KIB,
    MIB,
    AbsolutePath,
    BackendName,
    Bytes,
    Count,
    ImageName,
    Name,
    Seconds,
    Section,
    WrittenSize,
    each_once,
)
from executor_server.core.config.problems import contradiction, refuse, some_of, validated
from executor_server.core.config.state_dir import default_state_dir
from executor_server.core.config.toml_file import read_toml

DEFAULT_TCP_ADDRESS = "127.0.0.1:50051"

_BYTES_PER_SESSION = 24 * MIB
_FEWEST_SESSIONS, _MOST_SESSIONS = 64, 1000


class ServerSection(Section):
    """Addresses of the daemon, its backends, and limits of connections."""

    listen: tuple[str, ...] = ()
    """Addresses for clients, `HOST:PORT` or `unix:PATH`, in addition to the Unix socket in the state directory. Empty:
    127.0.0.1:50051, if it is free."""
    state_dir: AbsolutePath = Field(default_factory=default_state_dir)
    """The folder for the daemon's token, socket, sessions and audit log. One daemon at a time uses it."""
    backend: BackendName = "local"
    """The backend that makes sandboxes, unless a profile of the policy lists others."""
    other_backends: Annotated[tuple[BackendName, ...], AfterValidator(each_once)] = ()
    """More backends, for profiles of the policy that list them."""
    tls_cert: AbsolutePath | None = None
    """The daemon's certificate (PEM). Required for addresses that other machines can reach."""
    tls_key: AbsolutePath | None = None
    """The key of the certificate."""
    tls_client_ca: AbsolutePath | None = None
    """TCP clients need a certificate of this CA. A certificate that the policy maps to a tenant replaces the token."""
    peer_socket: AbsolutePath | None = None
    """A Unix socket that identifies users of this host by uid; the policy maps a uid to a tenant."""
    token_file: AbsolutePath | None = None
    """Tokens of tenants, made by `executor-server token new`. Not set: `tokens.json` in the state directory."""
    max_concurrent_calls: Count = 1024
    """Open calls of all clients together."""

    @model_validator(mode="after")
    def _check_backends(self) -> ServerSection:
        if self.backend in self.other_backends:
            raise ValueError(f"other_backends lists {self.backend!r}, which is the backend")
        return self

    @property
    def backends(self) -> tuple[BackendName, ...]:
        """All backends that run, the daemon's own first."""
        return (self.backend, *self.other_backends)

    @model_validator(mode="after")
    def _check_tls(self) -> ServerSection:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be given together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return self


PoolSize = Annotated[int, Field(strict=True, ge=0, le=1024)]


class WarmSection(Section):
    """One kind of sandbox to keep ready, with the limits of a profile unless others are given."""

    image: ImageName
    """The name of the image."""
    size: PoolSize
    """Sandboxes of this kind to keep ready."""
    profile: Name | None = None
    """The profile with their limits. Not set: the default profile."""
    memory_bytes: Bytes | None = None
    """Bytes of memory of each. Not set: the profile's."""
    processes: Count | None = None
    """Processes of each. Not set: the profile's."""
    disk_bytes: Bytes | None = None
    """Bytes of files of each. Not set: the profile's."""
    max_files: Count | None = None
    """Files in each file system of each. Not set: the profile's."""
    network: bool = False
    """True for sessions that request hosts. Sandboxes of a profile with default hosts always have a network."""
    packages: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    """Packages of each, as sessions request them. The daemon builds their environment after its start."""


class PoolSection(Section):
    """Warm sandboxes, kept ready for sessions."""

    size: PoolSize = 2
    """Sandboxes of the default image and limits to keep ready, if `warm` is empty. 0: no pool."""
    warm: Annotated[tuple[WarmSection, ...], Field(max_length=64)] = ()
    """The kinds of sandboxes to keep ready, instead of the default kind."""


def sessions_for(memory_bytes: int) -> int:
    """Returns how many sessions this memory is enough for; an idle local sandbox needs about 13 MiB."""
    return max(_FEWEST_SESSIONS, min(_MOST_SESSIONS, memory_bytes // _BYTES_PER_SESSION))


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class SessionsSection(Section):
    """The number of sessions, and the resources that the daemon keeps for them."""

    max_sessions: Count = Field(default_factory=lambda: sessions_for(_memory_bytes()))
    """Sessions of all tenants at a time. Not set: one for each 24 MiB of the host's memory, from 64 to 1,000."""
    journal_bytes: Bytes = 64 * MIB
    """Bytes of kept events of one session's executions."""
    journal_total_bytes: Bytes = 512 * MIB
    """Bytes of kept events of all sessions' executions, shared fairly among tenants."""
    silence_s: Seconds = 60.0
    """Seconds that a sandbox may take to answer a ping before its session is lost."""
    drain_s: Seconds = 30.0
    """Seconds that a stopping daemon waits for running executions."""
    orphan_time_s: Seconds = 600.0
    """Seconds without a daemon until a sandbox ends itself."""

    @property
    def ping_interval_s(self) -> float:
        """Seconds of silence after which a sandbox gets a ping. Several pings fit into either time."""
        return min(self.silence_s / 6, self.orphan_time_s / 4)


class StateSection(Section):
    """Exported states of sessions."""

    key_file: AbsolutePath | None = None
    """A private file with a key, shared by daemons that restore each other's states. Not set: the daemon's own key."""


class PolicySection(Section):
    """The policy file."""

    file: AbsolutePath | None = None
    """The policy file. Not set: the built-in policy, which is all defaults (docs/policy.md)."""


class AuditSection(Section):
    """The audit log."""

    enabled: bool = True
    """True to write the audit log."""
    directory: AbsolutePath | None = None
    """The folder of the log. Not set: `audit` in the state directory."""
    max_file_bytes: Annotated[int, WrittenSize, Field(strict=True, ge=64 * KIB, lt=2**40)] = 64 * MIB
    """Bytes of a file of the log, after which the next begins."""
    max_files: Count | None = None
    """Files to keep; older ones are removed. Not set: all."""
    sync: Literal["always", "interval", "never"] = "interval"
    """When records are synced to disk: after each (`always`), each second (`interval`), or when the system does it
    (`never`)."""


class MetricsSection(Section):
    """The endpoint for Prometheus."""

    listen: str | None = None
    """The endpoint's address, `HOST:PORT`; it needs no token. Not set: no endpoint."""


class TracingSection(Section):
    """OpenTelemetry traces."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s…]{1,255}$")] | None = None
    """The URL for spans, OTLP over HTTP. Not set: no traces."""
    service_name: Name = "remote-executor"
    """The name of the service in its spans."""
    sample_ratio: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 1.0
    """The fraction of traces recorded, for traces that begin here. The client decides about those that it begins."""


class LogSection(Section):
    """The daemon's own log, on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level of written messages."""
    format: Literal["auto", "console", "json"] = "auto"
    """`auto` is `console` on a terminal, else `json`."""


class Config(Section):
    """The whole configuration."""

    server: ServerSection = Field(default_factory=ServerSection)
    local: LocalSection = Field(default_factory=LocalSection)
    docker: DockerSection = Field(default_factory=DockerSection)
    e2b: E2BSection = Field(default_factory=E2BSection)
    pool: PoolSection = PoolSection()
    sessions: SessionsSection = SessionsSection()
    policy: PolicySection = PolicySection()
    egress: EgressSection = EgressSection()
    environments: EnvironmentsSection = EnvironmentsSection()
    fleet: FleetSection = FleetSection()
    gateway: GatewaySection = GatewaySection()
    console: ConsoleSection = ConsoleSection()
    state: StateSection = StateSection()
    audit: AuditSection = AuditSection()
    metrics: MetricsSection = MetricsSection()
    tracing: TracingSection = TracingSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _check_index_secret(self) -> Config:
        key, header = ("environments", "index_authorization"), self.environments.index_authorization
        for name in secret_names(header or ""):
            if name not in self.egress.secrets:
                has = f"it has {some_of(self.egress.secrets)}" if self.egress.secrets else "it has none"
                text = f"names the secret {name!r}, which egress.secrets lacks; {has}"
                refuse(self, [contradiction(key, text, header, also=[("egress", "secrets")])])
        return self

    @property
    def listen_addresses(self) -> tuple[str, ...]:
        """All addresses, the Unix socket of the state directory first."""
        return tuple(dict.fromkeys((self._own_socket, *(self.server.listen or (DEFAULT_TCP_ADDRESS,)))))

    @property
    def unasked_addresses(self) -> frozenset[str]:
        """The default addresses. If one is taken, the daemon starts without it, as long as another remains."""
        return frozenset({self._own_socket, DEFAULT_TCP_ADDRESS}) - frozenset(self.server.listen)

    @property
    def _own_socket(self) -> str:
        return f"unix:{self.server.state_dir / 'executor.sock'}"

    def alone(self, backend: BackendName) -> Config:
        """Returns this configuration with that backend, and no other."""
        server = self.server.model_copy(update={"backend": backend, "other_backends": ()})
        return self.model_copy(update={"server": server})

    @property
    def audit_directory(self) -> Path:
        return self.audit.directory or self.server.state_dir / "audit"


def load(path: Path | None = None, overrides: Mapping[str, Mapping[str, object]] | None = None) -> Config:
    """Returns the configuration in `path` (None: all defaults) with `overrides` on top. Raises ConfigError."""
    sections = read_toml(path, "configuration file") if path is not None else {}
    for section, keys in (overrides or {}).items():
        found = sections.setdefault(section, {})
        if isinstance(found, dict):  # else `validated` reports it
            found.update(keys)
    return validated(Config, sections, None if path is None else path.absolute().parent)


def to_toml(config: Config) -> str:
    """Returns the configuration as TOML that `load` reads back to the same values; unset keys are comments."""
    return "\n".join(_toml_lines("", config.model_dump(mode="json"))).lstrip("\n") + "\n"


def _toml_lines(prefix: str, table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        if value is None:
            yield f"# {key} is not set"
        elif not isinstance(value, dict):
            yield f"{_toml_key(key)} = {_toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            name = f"{prefix}{_toml_key(key)}"
            yield f"\n[{name}]"
            yield from _toml_lines(f"{name}.", value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _toml_value(value: object) -> str:
    """JSON's strings, numbers, booleans and arrays of them are valid TOML, except that DEL must be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
