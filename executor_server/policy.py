"""The policy: what a client may have. Pure decisions, made in one place.

`Policy.decide` turns a request into an approved SessionSpec or refuses it with every violation listed; it never grants
less than was asked for in silence, and never more. Nothing else in the daemon makes a SandboxSpec, so a backend can't
be handed anything that was not decided here.

Two kinds of no: a value that means nothing (NaN, zero, a label of a megabyte) is an InvalidRequest; one that means
something and is not granted is a PolicyViolation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from executor_server.config import ConfigError, LimitsSection, PolicySection, PoolSection
from executor_server.errors import ExecutorError, InvalidRequest, PolicyViolation, Reason, Violation
from executor_server.import_patterns import PATTERN_FORM, is_covered, is_pattern
from executor_server.model import ExecutionLimits, Limits, Principal, SandboxSpec, SessionSpec

MAX_REQUESTED_IMPORTS = 256
MAX_LABELS = 16
MAX_LABEL_KEY_CHARS = 64
MAX_LABEL_VALUE_CHARS = 256
MAX_PRELUDE_BYTES = 256 * 1024

# Below these no interpreter comes up in a sandbox, so asking for less is a mistake and not a wish.
MIN_MEMORY_BYTES = 32 * 1024 * 1024
MIN_PROCESSES = 4
MIN_DISK_BYTES = 64 * 1024
# Below these nothing could run, and no output could be kept.
MIN_TIME_S = 0.001
MIN_OUTPUT_BYTES = 2


@dataclass(frozen=True)
class RequestedLimits:
    """Limits as a client asks for them; None means the default."""

    wall_time_s: float | None = None
    cpu_time_s: float | None = None
    operations: int | None = None
    memory_bytes: int | None = None
    processes: int | None = None
    output_bytes: int | None = None
    disk_bytes: int | None = None
    idle_time_s: float | None = None
    session_time_s: float | None = None


@dataclass(frozen=True)
class RequestedSession:
    """A session as a client asks for it; an empty image means the default."""

    image: str = ""
    authorized_imports: tuple[str, ...] = ()
    limits: RequestedLimits = RequestedLimits()
    labels: Mapping[str, str] = field(default_factory=dict)
    prelude: str = ""


@dataclass(frozen=True)
class WarmSandboxes:
    """So many sandboxes of one spec, to be kept ready."""

    spec: SandboxSpec
    size: int


@dataclass(frozen=True)
class PolicySummary:
    """What a client may ask for, as GetPolicy tells it."""

    name: str
    default_limits: Limits
    max_limits: Limits
    default_imports: tuple[str, ...]
    allowed_imports: tuple[str, ...]
    images: tuple[str, ...]
    backend: str
    tool_placements: tuple[str, ...]
    network: str


# On whose behalf the pool asks.
_POOL = Principal("", "pool")
_LIMIT_NAMES = tuple(f.name for f in fields(Limits))
_EXECUTION_LIMIT_NAMES = tuple(f.name for f in fields(ExecutionLimits))
_MINIMA: Mapping[str, float] = {
    "wall_time_s": MIN_TIME_S,
    "cpu_time_s": MIN_TIME_S,
    "output_bytes": MIN_OUTPUT_BYTES,
    "memory_bytes": MIN_MEMORY_BYTES,
    "processes": MIN_PROCESSES,
    "disk_bytes": MIN_DISK_BYTES,
}


class Policy:
    """The built-in policy: one tenant, its imports and its limits from the configuration."""

    def __init__(
        self,
        section: PolicySection,
        limits: LimitsSection,
        *,
        images: Sequence[str],
        backend: str,
        orphan_time_s: float,
    ) -> None:
        self._section = section
        self._defaults = Limits(**limits.default.model_dump())
        self._maxima = Limits(**limits.max.model_dump())
        self._cpus = limits.cpus
        self._images = tuple(images)
        self._backend = backend
        self._orphan_time_s = orphan_time_s

    def decide(self, principal: Principal, request: RequestedSession) -> SessionSpec:
        """The approved session. Raises InvalidRequest or PolicyViolation.

        Every principal gets the same here; it is a parameter because whoever decides must know who asks.
        """
        _check_form(request)
        image = self._known_image(request.image)
        limits = self._limits(request.limits)
        violations = (*self._limit_violations(limits), *self._import_violations(request.authorized_imports))
        if violations:
            raise PolicyViolation(violations)
        return SessionSpec(
            sandbox=self._sandbox(image, limits),
            limits=limits,
            authorized_imports=tuple(sorted({*self._section.default_imports, *request.authorized_imports})),
            prelude=request.prelude,
            labels=dict(request.labels),
        )

    def warm_sandboxes(self, pool: PoolSection) -> tuple[WarmSandboxes, ...]:
        """The sandboxes to have ready: those named, else those of sessions that ask for nothing special.

        Raises ConfigError for those that no session could get.
        """
        if not pool.warm:
            return (WarmSandboxes(self._sandbox(self._images[0], self._defaults), pool.size),)
        warm, problems = [], []
        for number, entry in enumerate(pool.warm):
            limits = RequestedLimits(
                memory_bytes=entry.memory_bytes, processes=entry.processes, disk_bytes=entry.disk_bytes
            )
            request = RequestedSession(image=entry.image, limits=limits)
            try:
                warm.append(WarmSandboxes(self.decide(_POOL, request).sandbox, entry.size))
            except ExecutorError as refusal:
                problems.append(f"pool.warm.{number}: {refusal.message} (it is {entry.image!r})")
        if problems:
            raise ConfigError(problems)
        return tuple(warm)

    def describe(self) -> PolicySummary:
        return PolicySummary(
            name="default",
            default_limits=self._defaults,
            max_limits=self._maxima,
            default_imports=tuple(sorted(self._section.default_imports)),
            allowed_imports=self._section.allowed_imports,
            images=self._images,
            backend=self._backend,
            tool_placements=("host",),
            network="none",
        )

    def _sandbox(self, image: str, limits: Limits) -> SandboxSpec:
        return SandboxSpec(
            image=image,
            memory_bytes=limits.memory_bytes,
            processes=limits.processes,
            disk_bytes=limits.disk_bytes,
            orphan_time_s=self._orphan_time_s,
            cpus=self._cpus,
            may_pull=self._section.pull_images,
        )

    def _known_image(self, name: str) -> str:
        if not name:
            return self._images[0]
        if name not in self._images:
            raise InvalidRequest(Reason.UNKNOWN_IMAGE, f"no such image; there are {', '.join(self._images)}", "image")
        return name

    def _limits(self, requested: RequestedLimits) -> Limits:
        asked = {name: getattr(requested, name) for name in _LIMIT_NAMES}
        return Limits(
            **{name: getattr(self._defaults, name) if value is None else value for name, value in asked.items()}
        )

    def _limit_violations(self, limits: Limits) -> Iterator[Violation]:
        for name in _LIMIT_NAMES:
            value, ceiling = getattr(limits, name), getattr(self._maxima, name)
            if value > ceiling:
                yield Violation(f"limits.{name}", _number(value), f"at most {_number(ceiling)}")

    def _import_violations(self, asked: Sequence[str]) -> Iterator[Violation]:
        allowed = self._section.allowed_imports
        for pattern in asked:
            if not is_covered(pattern, allowed) and not is_covered(pattern, self._section.default_imports):
                yield Violation("authorized_imports", pattern, ", ".join(allowed) or "nothing more than the defaults")


def execution_limits(spec: SessionSpec, requested: RequestedLimits) -> ExecutionLimits:
    """The limits of one execution: the session's, or lower where the request says so. Raises InvalidRequest."""
    _check_limits(requested)
    chosen = {}
    for name in _LIMIT_NAMES:
        value, ceiling = getattr(requested, name), getattr(spec.limits, name)
        if value is None:
            value = ceiling
        elif name not in _EXECUTION_LIMIT_NAMES:
            raise _invalid(f"limits.{name}", f"can't be set for one execution; {', '.join(_EXECUTION_LIMIT_NAMES)} can")
        elif value > ceiling:
            raise _invalid(f"limits.{name}", f"is {_number(value)}, above the session's {_number(ceiling)}")
        if name in _EXECUTION_LIMIT_NAMES:
            chosen[name] = value
    return ExecutionLimits(**chosen)


def _check_form(request: RequestedSession) -> None:
    _check_limits(request.limits)
    _check_imports(request.authorized_imports)
    _check_labels(request.labels)
    if len(request.prelude.encode()) > MAX_PRELUDE_BYTES:
        raise _invalid("prelude", f"is larger than {MAX_PRELUDE_BYTES:,} bytes")
    if "\0" in request.prelude:
        raise _invalid("prelude", "holds a NUL character")


def _check_limits(requested: RequestedLimits) -> None:
    for name in _LIMIT_NAMES:
        value = getattr(requested, name)
        if value is None:
            continue
        if not math.isfinite(value) or value <= 0:
            raise _invalid(f"limits.{name}", f"is {value}; it must be a finite number above 0")
        if value < _MINIMA.get(name, 0):
            raise _invalid(f"limits.{name}", f"is {value}; it must be at least {_MINIMA[name]}")


def _check_imports(patterns: Sequence[str]) -> None:
    if len(patterns) > MAX_REQUESTED_IMPORTS:
        raise _invalid("authorized_imports", f"has more than {MAX_REQUESTED_IMPORTS} patterns")
    for index, pattern in enumerate(patterns):
        if not is_pattern(pattern):
            raise _invalid(f"authorized_imports[{index}]", f"must be {PATTERN_FORM}")


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > MAX_LABELS:
        raise _invalid("labels", f"has more than {MAX_LABELS} pairs")
    for key, value in labels.items():
        if not 0 < len(key) <= MAX_LABEL_KEY_CHARS or len(value) > MAX_LABEL_VALUE_CHARS:
            raise _invalid(
                "labels",
                f"a key has 1 to {MAX_LABEL_KEY_CHARS} characters and a value at most {MAX_LABEL_VALUE_CHARS}",
            )


def _number(value: float) -> str:
    """Counts and sizes in full, seconds without needless zeros."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _invalid(path: str, problem: str) -> InvalidRequest:
    return InvalidRequest(Reason.INVALID_FIELD, f"{path} {problem}", path)
