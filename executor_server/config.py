"""The daemon's configuration: every key with its default, read from TOML.

Nothing needs to be configured. What is configured is checked as a whole: `load` raises one ConfigError that lists every
problem with the path of its key and what would be allowed. The values are frozen; the command line's settings are
merged in before the check, so the result is what is in effect.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from executor_server.import_patterns import PATTERN_FORM, is_pattern
from executor_server.state_dir import default_state_dir

MAX_CONFIG_BYTES = 1 << 20

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
DAY_S = 86_400.0

DEFAULT_TCP_ADDRESS = "127.0.0.1:50051"

# What smolagents authorizes by itself (BASE_BUILTIN_MODULES), so that its prompts hold here too.
SMOLAGENTS_BASE_IMPORTS = (
    "collections",
    "datetime",
    "itertools",
    "math",
    "queue",
    "random",
    "re",
    "stat",
    "statistics",
    "time",
    "unicodedata",
)

_IMAGE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
# github.com/distribution/reference: [HOST[:PORT]/]PATH[:TAG][@DIGEST]. It admits no space, no quote, no leading dash.
_IMAGE_REFERENCE = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?/)?"
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_MAX_REFERENCE_CHARS = 255
_MODULE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
_ENGINE_HOST = re.compile(r"(?:unix:///|tcp://|ssh://|https?://)\S{1,255}")


class ConfigError(Exception):
    """The configuration can't be used. `problems` holds one sentence for each thing to mend."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def _check_pattern(text: str) -> str:
    if not is_pattern(text):
        raise ValueError(f"must be {PATTERN_FORM}")
    return text


def _check_image_name(text: str) -> str:
    if not _IMAGE_NAME.fullmatch(text):
        raise ValueError("must be 1 to 64 of a-z 0-9 . _ -, beginning with a letter or a digit")
    return text


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


def _check_absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("must be an absolute path")
    return path


Count = Annotated[int, Field(strict=True, gt=0, lt=2**63)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Bytes = Annotated[int, Field(strict=True, gt=0, lt=2**63)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=365 * DAY_S, allow_inf_nan=False)]
ImportPattern = Annotated[str, AfterValidator(_check_pattern)]
ImageName = Annotated[str, AfterValidator(_check_image_name)]
ImageReference = Annotated[str, AfterValidator(_check_image_reference)]
ModuleName = Annotated[str, AfterValidator(_check_module_name)]
EngineHost = Annotated[str, AfterValidator(_check_engine_host)]
AbsolutePath = Annotated[Path, AfterValidator(_check_absolute)]
Preload = Annotated[tuple[ModuleName, ...], Field(max_length=64)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerSection(_Section):
    """Where the daemon listens and what a connection may do."""

    # Empty: the Unix socket of the state directory and DEFAULT_TCP_ADDRESS.
    listen: tuple[str, ...] = ()
    state_dir: AbsolutePath = Field(default_factory=default_state_dir)
    backend: Literal["local", "docker"] = "local"
    tls_cert: AbsolutePath | None = None
    tls_key: AbsolutePath | None = None
    # Set: TCP clients must show a certificate of this authority, besides the token.
    tls_client_ca: AbsolutePath | None = None
    max_message_bytes: Annotated[int, Field(strict=True, ge=2 * MIB, le=64 * MIB)] = 4 * MIB
    max_metadata_bytes: Annotated[int, Field(strict=True, ge=4 * KIB, le=MIB)] = 16 * KIB
    max_concurrent_streams: Count = 256
    max_concurrent_calls: Count = 1024
    connection_idle_s: Seconds = 600.0
    keepalive_s: Seconds = 60.0
    keepalive_timeout_s: Seconds = 20.0

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


class LocalImage(_Section):
    """A Python environment of this host."""

    # The environment's folder, or an interpreter.
    python: AbsolutePath
    # Imported ahead in every sandbox, so that its first import of them costs nothing.
    preload: Preload = ()


class DockerImage(_Section):
    """An image of the Engine."""

    reference: ImageReference
    preload: Preload = ()


class LocalSection(_Section):
    """The local backend."""

    # Name to environment. The first is the default image.
    images: Annotated[dict[ImageName, Annotated[LocalImage, BeforeValidator(_from_path)]], Field(min_length=1)] = Field(
        default_factory=lambda: {"base": LocalImage(python=Path(sys.executable))}
    )
    # None: the system's, else the one that comes with the package.
    bwrap: AbsolutePath | None = None


class DockerSection(_Section):
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


PoolSize = Annotated[int, Field(strict=True, ge=0, le=1024)]


class WarmSection(_Section):
    """One kind of sandbox to keep ready: of an image, with the default limits unless others are given."""

    image: ImageName
    size: PoolSize
    memory_bytes: Bytes | None = None
    processes: Count | None = None
    disk_bytes: Bytes | None = None


class PoolSection(_Section):
    """Sandboxes that are kept ready."""

    # Of the default image with the default limits, when `warm` names none. 0 turns the pool off.
    size: PoolSize = 2
    warm: Annotated[tuple[WarmSection, ...], Field(max_length=64)] = ()
    # How many are made at a time, and the waits after one could not be made.
    concurrency: Annotated[int, Field(strict=True, gt=0, le=64)] = 1
    backoff_s: Seconds = 1.0
    max_backoff_s: Seconds = 60.0


class SessionsSection(_Section):
    """How many sessions, and what the daemon keeps for one."""

    max_sessions: Count = 64
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


class _LimitValues(_Section):
    wall_time_s: Seconds
    cpu_time_s: Seconds
    operations: Count
    memory_bytes: Bytes
    processes: Annotated[int, Field(strict=True, gt=0, le=1_000_000)]
    output_bytes: Bytes
    disk_bytes: Bytes
    idle_time_s: Seconds
    session_time_s: Seconds


class DefaultLimits(_LimitValues):
    """What a session gets that asks for nothing."""

    wall_time_s: Seconds = 60.0
    cpu_time_s: Seconds = 120.0
    operations: Count = 100_000_000
    memory_bytes: Bytes = 2 * GIB
    processes: Annotated[int, Field(strict=True, gt=0, le=1_000_000)] = 128
    output_bytes: Bytes = MIB
    disk_bytes: Bytes = GIB
    idle_time_s: Seconds = 1800.0
    session_time_s: Seconds = 28_800.0


class MaxLimits(_LimitValues):
    """What a session can ask for at most."""

    wall_time_s: Seconds = 3600.0
    cpu_time_s: Seconds = 7200.0
    operations: Count = 10**12
    memory_bytes: Bytes = 16 * GIB
    processes: Annotated[int, Field(strict=True, gt=0, le=1_000_000)] = 4096
    output_bytes: Bytes = 16 * MIB
    disk_bytes: Bytes = 16 * GIB
    idle_time_s: Seconds = DAY_S
    session_time_s: Seconds = 7 * DAY_S


class LimitsSection(_Section):
    """Defaults and ceilings of what clients may ask for."""

    default: DefaultLimits = DefaultLimits()
    max: MaxLimits = MaxLimits()
    # Processors that a sandbox may use at a time. None: all, shared evenly.
    cpus: Annotated[float, Field(strict=True, ge=0.01, le=1024, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _check_order(self) -> LimitsSection:
        above = [name for name in _LimitValues.model_fields if getattr(self.default, name) > getattr(self.max, name)]
        if above:
            raise ValueError("default is above max for " + ", ".join(above))
        return self


class PolicySection(_Section):
    """What agent code may import."""

    # Authorized without being asked for.
    default_imports: tuple[ImportPattern, ...] = SMOLAGENTS_BASE_IMPORTS
    # What a client may add. Isolation is the wall; imports are a guard-rail, which the single user sets per session.
    allowed_imports: tuple[ImportPattern, ...] = ("*",)
    # Whether an image that the Engine lacks may be fetched from its registry.
    pull_images: bool = False


class LogSection(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    # auto: console on a terminal, else json.
    format: Literal["auto", "console", "json"] = "auto"


class Config(_Section):
    """The whole configuration."""

    server: ServerSection = Field(default_factory=ServerSection)
    local: LocalSection = Field(default_factory=LocalSection)
    docker: DockerSection = Field(default_factory=DockerSection)
    pool: PoolSection = PoolSection()
    sessions: SessionsSection = SessionsSection()
    limits: LimitsSection = LimitsSection()
    policy: PolicySection = PolicySection()
    log: LogSection = LogSection()

    @property
    def listen_addresses(self) -> tuple[str, ...]:
        default = (f"unix:{self.server.state_dir / 'executor.sock'}", DEFAULT_TCP_ADDRESS)
        return self.server.listen or default


def load(path: Path | None = None, overrides: Mapping[str, Mapping[str, object]] | None = None) -> Config:
    """The configuration in `path` (None: all defaults) with `overrides` on top. Raises ConfigError."""
    sections = _read(path) if path is not None else {}
    for section, keys in (overrides or {}).items():
        found = sections.setdefault(section, {})
        if isinstance(found, dict):  # else the check below says what is wrong with it
            found.update(keys)
    try:
        return Config.model_validate(sections)
    except ValidationError as error:
        raise ConfigError([_sentence(problem) for problem in error.errors()]) from error


def to_toml(config: Config) -> str:
    """The configuration as TOML that `load` reads back to the same values; keys that are not set are comments."""
    return "\n".join(_toml_lines("", config.model_dump(mode="json"))).lstrip("\n") + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError([f"The configuration file {path} can't be read: {error.strerror}."]) from error
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError([f"The configuration file {path} is larger than {MAX_CONFIG_BYTES} bytes."])
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"The configuration file {path} is not TOML: {error}."]) from error


def _sentence(problem: ErrorDetails) -> str:
    """One problem of pydantic's as `key.path: what is allowed (it is VALUE)`."""
    location = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    if problem["type"] == "extra_forbidden":
        return f"{location}: no such key; there are {', '.join(_known_keys(problem['loc'][:-1]))}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if isinstance(problem["input"], (dict, BaseModel)):
        return f"{location}: {message}"
    return f"{location}: {message} (it is {_shown(problem['input'])})"


def _known_keys(location: Sequence[int | str]) -> Iterator[str]:
    model: type[BaseModel] = Config
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    yield from model.model_fields


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"


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
