"""The daemon's configuration: every key with its default, read from TOML.

Nothing needs to be configured. What is configured is checked as a whole: `load` raises one ConfigError that lists every
problem with the path of its key and what would be allowed. The values are frozen; the command line's settings are
merged in before the check, so the result is what is in effect.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from executor_server.settings import (
    DAY_S,
    GIB,
    KIB,
    MIB,
    AbsolutePath,
    BackendName,
    Bytes,
    Count,
    CountOrZero,
    ImageName,
    Name,
    Seconds,
    Section,
    each_once,
    read_toml,
    validated,
)
from executor_server.state_dir import default_state_dir

DEFAULT_TCP_ADDRESS = "127.0.0.1:50051"

# github.com/distribution/reference: [HOST[:PORT]/]PATH[:TAG][@DIGEST]. It admits no space, no quote, no leading dash.
_IMAGE_REFERENCE = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?/)?"
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_MAX_REFERENCE_CHARS = 255
_MODULE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
_ENGINE_HOST = re.compile(r"(?:unix:///|tcp://|ssh://|https?://)\S{1,255}")


def _check_image_reference(text: str) -> str:
    if len(text) > _MAX_REFERENCE_CHARS or not _IMAGE_REFERENCE.fullmatch(text):
        raise ValueError("must be an image reference like name, host/path/name:tag or name@sha256:DIGEST")
    return text


def _check_module_name(text: str) -> str:
    if not _MODULE_NAME.fullmatch(text):
        raise ValueError("must be the dotted name of a module")
    return text


def _check_engine_host(text: str) -> str:
    if not _ENGINE_HOST.fullmatch(text):
        raise ValueError("must be unix:///PATH, tcp://HOST:PORT or ssh://HOST")
    return text


ImageReference = Annotated[str, AfterValidator(_check_image_reference)]
ModuleName = Annotated[str, AfterValidator(_check_module_name)]
HttpUrl = Annotated[str, Field(pattern=r"^https?://[^\s/]{1,255}/?$")]
EngineHost = Annotated[str, AfterValidator(_check_engine_host)]
Preload = Annotated[tuple[ModuleName, ...], Field(max_length=64)]


class ServerSection(Section):
    """Where the daemon listens and what a connection may do."""

    # Empty: the Unix socket of the state directory and DEFAULT_TCP_ADDRESS.
    listen: tuple[str, ...] = ()
    state_dir: AbsolutePath = Field(default_factory=default_state_dir)
    backend: BackendName = "local"
    # That run beside it, for the profiles of the policy that list them.
    other_backends: Annotated[tuple[BackendName, ...], AfterValidator(each_once)] = ()
    tls_cert: AbsolutePath | None = None
    tls_key: AbsolutePath | None = None
    # Set: TCP clients must show a certificate of this authority. One that the policy maps to a tenant needs no token.
    tls_client_ca: AbsolutePath | None = None
    # A Unix socket at which the user who connects is known by its number, which the policy maps to a tenant.
    peer_socket: AbsolutePath | None = None
    # Tokens of tenants, made by `executor-server token new`. None: `tokens.json` in the state directory.
    token_file: AbsolutePath | None = None
    max_message_bytes: Annotated[int, Field(strict=True, ge=2 * MIB, le=64 * MIB)] = 4 * MIB
    max_metadata_bytes: Annotated[int, Field(strict=True, ge=4 * KIB, le=MIB)] = 16 * KIB
    max_concurrent_streams: Count = 256
    max_concurrent_calls: Count = 1024
    connection_idle_s: Seconds = 600.0
    keepalive_s: Seconds = 60.0
    keepalive_timeout_s: Seconds = 20.0

    @model_validator(mode="after")
    def _check_backends(self) -> ServerSection:
        if self.backend in self.other_backends:
            raise ValueError(f"other_backends lists {self.backend!r}, which is the backend")
        return self

    @property
    def backends(self) -> tuple[BackendName, ...]:
        """All that run, the daemon's own first."""
        return (self.backend, *self.other_backends)

    @model_validator(mode="after")
    def _check_tls(self) -> ServerSection:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be given together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return self


def _from_path(value: object) -> object:
    """An image may be given as the path alone."""
    return {"python": value} if isinstance(value, (str, Path)) else value


def _from_reference(value: object) -> object:
    """An image may be given as the reference alone."""
    return {"reference": value} if isinstance(value, str) else value


class LocalImage(Section):
    """A Python environment of this host."""

    # The environment's folder, or an interpreter.
    python: AbsolutePath
    # Imported ahead in every sandbox, so that its first import of them costs nothing.
    preload: Preload = ()


class DockerImage(Section):
    """An image of the Engine."""

    reference: ImageReference
    preload: Preload = ()


class LocalSection(Section):
    """The local backend."""

    # Name to environment. The first is the default image.
    images: Annotated[dict[ImageName, Annotated[LocalImage, BeforeValidator(_from_path)]], Field(min_length=1)] = Field(
        default_factory=lambda: {"base": LocalImage(python=Path(sys.executable))}
    )
    # None: the system's, else the one that comes with the package.
    bwrap: AbsolutePath | None = None


class DockerSection(Section):
    """The Docker backend."""

    # Name to image. The first is the default image.
    images: Annotated[
        dict[ImageName, Annotated[DockerImage, BeforeValidator(_from_reference)]], Field(min_length=1)
    ] = Field(
        default_factory=lambda: {
            name: DockerImage(reference=f"remote-executor/{name}") for name in ("base", "data", "browser")
        }
    )
    # None: $DOCKER_HOST, else the Engine of this host.
    host: EngineHost | None = None
    # One of the Engine's runtimes: runsc, kata, crun. None: its default.
    runtime: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    # For one request to the Engine, and for fetching one image.
    request_timeout_s: Seconds = 30.0
    pull_timeout_s: Seconds = 1800.0
    # Requests to the Engine at one time.
    concurrency: Annotated[int, Field(strict=True, gt=0, le=64)] = 8
    # How long it may go unnoticed that a name has come to mean another image.
    image_refresh_s: Seconds = 10.0


class E2BImage(Section):
    """A template of the E2B account."""

    template: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]
    preload: Preload = ()


def _from_template(value: object) -> object:
    """An image may be given as the template alone."""
    return {"template": value} if isinstance(value, str) else value


class E2BSection(Section):
    """The E2B backend."""

    # Name to template. The first is the default image.
    images: Annotated[dict[ImageName, Annotated[E2BImage, BeforeValidator(_from_template)]], Field(min_length=1)] = (
        Field(default_factory=lambda: {"base": E2BImage(template="code-interpreter-v1")})
    )
    # A file that holds the key and that nobody else can read. None: $E2B_API_KEY.
    api_key_file: AbsolutePath | None = None
    # None: what the SDK reads from its own environment variables, else E2B's cloud.
    api_url: HttpUrl | None = None
    sandbox_url: HttpUrl | None = None
    # How long a sandbox outlives the last daemon that cared for it; put off all the time while one does.
    lifetime_s: Annotated[float, Field(strict=True, ge=60, le=DAY_S)] = 600.0
    # That the account may have at one time.
    max_sandboxes: Count = 20
    # A sandbox without use for so long is paused until it is used again. None: never.
    pause_idle_s: Seconds | None = None
    # How long a way to a sandbox may be gone before its session is lost.
    reconnect_s: Seconds = 120.0
    # For one request, and how many at one time.
    request_timeout_s: Seconds = 30.0
    concurrency: Annotated[int, Field(strict=True, gt=0, le=64)] = 8


PoolSize = Annotated[int, Field(strict=True, ge=0, le=1024)]


class WarmSection(Section):
    """One kind of sandbox to keep ready: of an image, with the limits of a profile unless others are given."""

    image: ImageName
    size: PoolSize
    # Whose sandboxes; None: those of the default profile.
    profile: Name | None = None
    memory_bytes: Bytes | None = None
    processes: Count | None = None
    disk_bytes: Bytes | None = None


class PoolSection(Section):
    """Sandboxes that are kept ready."""

    # Of the default image with the default limits, when `warm` names none. 0 turns the pool off.
    size: PoolSize = 2
    warm: Annotated[tuple[WarmSection, ...], Field(max_length=64)] = ()
    # How many are made at a time, and the waits after one could not be made.
    concurrency: Annotated[int, Field(strict=True, gt=0, le=64)] = 1
    backoff_s: Seconds = 1.0
    max_backoff_s: Seconds = 60.0


class SessionsSection(Section):
    """How many sessions, and what the daemon keeps for one."""

    max_sessions: Count = 64
    # Sandboxes that are made at a time for whoever waits for one; tenants take turns.
    creations: Annotated[int, Field(strict=True, gt=0, le=64)] = 4
    max_queued_executions: CountOrZero = 16
    # Executions whose events are kept after their end, to be attached to.
    max_finished_executions: Count = 64
    # Events kept of one session's executions.
    journal_bytes: Bytes = 64 * MIB
    # One blob that is uploaded for a later message.
    staging_bytes: Bytes = 256 * MIB
    # One file that is put or got.
    max_file_bytes: Bytes = GIB
    sweep_interval_s: Seconds = 0.5
    # A guest that was silent for so long is asked for a sign of life, and given up when none comes.
    ping_interval_s: Seconds = 10.0
    silence_s: Seconds = 60.0
    # How long a stopping daemon lets running executions go on.
    drain_s: Seconds = 30.0
    # How long a starting daemon waits for the sandboxes that an earlier one left.
    recovery_s: Seconds = 15.0
    # How often the host is searched for what belongs to nobody.
    host_sweep_interval_s: Seconds = 60.0
    # A sandbox that no daemon has spoken to for so long ends itself.
    orphan_time_s: Seconds = 600.0

    @model_validator(mode="after")
    def _check_orphan_time(self) -> SessionsSection:
        if self.orphan_time_s < 3 * self.ping_interval_s:
            raise ValueError(
                "orphan_time_s must be at least 3 times ping_interval_s, or quiet sandboxes end themselves"
            )
        return self


class StateSection(Section):
    """The state of sessions that clients write down."""

    # A key that nobody else can read, to be shared by daemons that restore each other's states. None: one of its own.
    key_file: AbsolutePath | None = None


class PolicySection(Section):
    """Where the policy is."""

    # None: the built-in policy, which is all defaults (docs/policy.md).
    file: AbsolutePath | None = None
    # How often it is looked at for changes.
    watch_interval_s: Seconds = 2.0


class AuditSection(Section):
    """The audit log."""

    enabled: bool = True
    # None: the folder `audit` of the state directory.
    directory: AbsolutePath | None = None
    # A file that is larger is followed by the next; the oldest of more than `max_files` are removed, none when not set.
    max_file_bytes: Annotated[int, Field(strict=True, ge=64 * KIB, lt=2**40)] = 64 * MIB
    max_files: Count | None = None
    # When what is written is forced to the disk: after each record, every `sync_interval_s`, or when the system likes.
    sync: Literal["always", "interval", "never"] = "interval"
    sync_interval_s: Seconds = 1.0


class MetricsSection(Section):
    """The endpoint for Prometheus."""

    # HOST:PORT; None: there is none. Nobody is asked for a token there.
    listen: str | None = None


class TracingSection(Section):
    """OpenTelemetry traces."""

    # Where spans go, by OTLP over HTTP; None: nowhere.
    endpoint: Annotated[str, Field(pattern=r"^https?://\S{1,255}$")] | None = None
    service_name: Name = "remote-executor"
    # Of the traces that begin here; one that a client began is recorded when it says so.
    sample_ratio: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 1.0


class LogSection(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    # auto: console on a terminal, else json.
    format: Literal["auto", "console", "json"] = "auto"


class Config(Section):
    """The whole configuration."""

    server: ServerSection = Field(default_factory=ServerSection)
    local: LocalSection = Field(default_factory=LocalSection)
    docker: DockerSection = Field(default_factory=DockerSection)
    e2b: E2BSection = Field(default_factory=E2BSection)
    pool: PoolSection = PoolSection()
    sessions: SessionsSection = SessionsSection()
    policy: PolicySection = PolicySection()
    state: StateSection = StateSection()
    audit: AuditSection = AuditSection()
    metrics: MetricsSection = MetricsSection()
    tracing: TracingSection = TracingSection()
    log: LogSection = LogSection()

    @property
    def listen_addresses(self) -> tuple[str, ...]:
        default = (f"unix:{self.server.state_dir / 'executor.sock'}", DEFAULT_TCP_ADDRESS)
        return self.server.listen or default

    def alone(self, backend: BackendName) -> Config:
        """This configuration with that backend, and none beside it."""
        server = self.server.model_copy(update={"backend": backend, "other_backends": ()})
        return self.model_copy(update={"server": server})

    @property
    def audit_directory(self) -> Path:
        return self.audit.directory or self.server.state_dir / "audit"


def load(path: Path | None = None, overrides: Mapping[str, Mapping[str, object]] | None = None) -> Config:
    """The configuration in `path` (None: all defaults) with `overrides` on top. Raises ConfigError."""
    sections = read_toml(path, "configuration file") if path is not None else {}
    for section, keys in (overrides or {}).items():
        found = sections.setdefault(section, {})
        if isinstance(found, dict):  # else the check below says what is wrong with it
            found.update(keys)
    return validated(Config, sections)


def to_toml(config: Config) -> str:
    """The configuration as TOML that `load` reads back to the same values; keys that are not set are comments."""
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
    """JSON's strings, numbers, booleans and arrays of them are TOML's too; DEL alone must be escaped there."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
