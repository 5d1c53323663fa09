"""Requests of clients, and the checks that hold for every policy.

A value that no policy could grant (NaN, zero, a label of a megabyte) is an InvalidRequest. A value that passes is small
and can be compared, shown and sent; `Policy.decide` decides whether it is granted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from executor_server.core import PATTERN_FORM, InvalidRequest, Reason, is_pattern
from executor_server.guest.egress.host_names import BadName
from executor_server.policy.hosts import pattern_of
from executor_server.policy.limits_table import LimitValues
from executor_server.policy.requirement import (
    MAX_MARKERS,
    REQUIREMENT_FORM,
    BadRequirement,
    Requirement,
    merged,
    read_requirement,
)

MAX_REQUESTED_IMPORTS = 256
MAX_REQUESTED_HOSTS = 64  # each is compared with every host of the policy
MAX_REQUESTED_PACKAGES = 256
MAX_REQUESTED_PACKAGES_CHARS = 8 * 1024
"""Characters of all packages together without their markers: the bounds are compared with the policy's, in the daemon's
only loop."""
MAX_REQUESTED_TEXT_CHARS = 256
MAX_LABELS = 16
MAX_LABEL_KEY_CHARS = 64
MAX_LABEL_VALUE_CHARS = 256
MAX_PRELUDE_BYTES = 256 * 1024
MAX_NUMBER = 2**64 - 1  # an unsigned number of the wire


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
    session_operations: int | None = None
    owner_grace_s: float | None = None
    max_files: int | None = None


LIMIT_NAMES = tuple(each.name for each in fields(RequestedLimits))


@dataclass(frozen=True)
class RequestedSession:
    """A session as a client asks for it; an empty image or backend means the default."""

    image: str = ""
    backend: str = ""
    network: tuple[str, ...] = ()  # patterns of hosts
    packages: tuple[str, ...] = ()
    authorized_imports: tuple[str, ...] = ()
    limits: RequestedLimits = RequestedLimits()
    labels: Mapping[str, str] = field(default_factory=dict)
    prelude: str = ""
    name: str = ""  # unique among the caller's sessions; empty: none
    env_names: tuple[str, ...] = ()  # names of environment variables


# As in the policy file. A smaller number can only be a mistake: with it, nothing could run.
_MINIMA: Mapping[str, float] = {
    name: bound.ge
    for name, limit in LimitValues.model_fields.items()
    for bound in limit.metadata
    if hasattr(bound, "ge")
}


def check_request(request: RequestedSession) -> None:
    """Raises InvalidRequest for the first field that no policy could grant."""
    _check_text("image", request.image)
    _check_text("backend", request.backend)
    check_hosts(request.network)
    check_packages(request.packages)
    check_limits(request.limits)
    check_imports(request.authorized_imports)
    _check_labels(request.labels)
    _check_prelude(request.prelude)


def check_limits(requested: RequestedLimits) -> None:
    """Raises InvalidRequest for the first limit that no policy could grant."""
    for name in LIMIT_NAMES:
        value = getattr(requested, name)
        if value is None:
            continue
        if isinstance(value, int) and value > MAX_NUMBER:  # before anything prints it
            raise invalid(f"limits.{name}", f"must be at most {MAX_NUMBER:,}")
        if not value > 0 or not math.isfinite(value):
            raise invalid(f"limits.{name}", "must be a finite number above 0")
        if value < _MINIMA.get(name, 0):
            raise invalid(f"limits.{name}", f"is {value}; it must be at least {_MINIMA[name]:,}")


def invalid(path: str, problem: str) -> InvalidRequest:
    return InvalidRequest(Reason.INVALID_FIELD, f"{path} {problem}", path)


def check_hosts(patterns: Sequence[str]) -> None:
    """Raises InvalidRequest for the first malformed host pattern, or for too many."""
    _check_texts("network", patterns, MAX_REQUESTED_HOSTS)
    for index, text in enumerate(patterns):
        try:
            pattern_of(text)
        except BadName as error:
            raise invalid(f"network[{index}]", str(error)) from error


def check_packages(texts: Sequence[str]) -> tuple[Requirement, ...]:
    """Returns the requirements in canonical form. Raises InvalidRequest for the first malformed one, or too many."""
    if len(texts) > MAX_REQUESTED_PACKAGES:
        raise invalid("packages", f"has more than {MAX_REQUESTED_PACKAGES} entries")
    found: list[Requirement] = []
    chars = 0
    for index, text in enumerate(texts):
        try:
            found.append(read_requirement(text))
        except BadRequirement as error:
            raise invalid(f"packages[{index}]", f"{error}; write {REQUIREMENT_FORM}") from error
        chars += len(text.partition(";")[0])
        if chars > MAX_REQUESTED_PACKAGES_CHARS:
            most = f"{MAX_REQUESTED_PACKAGES_CHARS:,} characters without markers"
            problem = f"has more than {most}; request fewer packages or bounds"
            raise invalid("packages", problem)
        if len({each.marker for each in found if each.marker}) > MAX_MARKERS:
            raise invalid("packages", f"has more than {MAX_MARKERS} different markers")
    try:
        return merged(found)
    except BadRequirement as error:
        raise invalid("packages", str(error)) from error


def check_imports(patterns: Sequence[str]) -> None:
    """Raises InvalidRequest for the first malformed pattern, or for too many."""
    if len(patterns) > MAX_REQUESTED_IMPORTS:
        raise invalid("authorized_imports", f"has more than {MAX_REQUESTED_IMPORTS} patterns")
    for index, pattern in enumerate(patterns):
        if not is_pattern(pattern):
            raise invalid(f"authorized_imports[{index}]", f"must be {PATTERN_FORM}")


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > MAX_LABELS:
        raise invalid("labels", f"has more than {MAX_LABELS} pairs")
    for key, value in labels.items():
        if not 0 < len(key) <= MAX_LABEL_KEY_CHARS or len(value) > MAX_LABEL_VALUE_CHARS:
            raise invalid(
                "labels",
                f"a key has 1 to {MAX_LABEL_KEY_CHARS} characters and a value at most {MAX_LABEL_VALUE_CHARS}",
            )
        if not (_is_unicode(key) and _is_unicode(value)):
            raise invalid("labels", "have text that is not valid Unicode")


def _check_prelude(prelude: str) -> None:
    if len(prelude) > MAX_PRELUDE_BYTES or len(prelude.encode("utf-8", "surrogatepass")) > MAX_PRELUDE_BYTES:
        raise invalid("prelude", f"is larger than {MAX_PRELUDE_BYTES:,} bytes")
    if "\0" in prelude:
        raise invalid("prelude", "holds a NUL character")
    if not _is_unicode(prelude):
        raise invalid("prelude", "is not valid Unicode")


def _check_texts(path: str, texts: Sequence[str], most: int) -> None:
    if len(texts) > most:
        raise invalid(path, f"has more than {most} entries")
    for index, text in enumerate(texts):
        _check_text(f"{path}[{index}]", text)


def _check_text(path: str, text: str) -> None:
    """Refusals and logs will show the text, so it is short and printable."""
    if len(text) > MAX_REQUESTED_TEXT_CHARS:
        raise invalid(path, f"is longer than {MAX_REQUESTED_TEXT_CHARS} characters")
    if not text.isprintable():
        raise invalid(path, "has unprintable characters")


def _is_unicode(text: str) -> bool:
    """True when the text can be written in UTF-8: half a surrogate pair can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
