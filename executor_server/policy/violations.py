"""Makes the violations of a refusal: texts of a bounded length, and the key of the policy behind each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from executor_server.core import Violation, ViolationKind
from executor_server.core.config import dotted

MAX_SHOWN_CHARS = 256
_ADVISED_NAMES = 5


def rule_of(profile: str, key: str) -> str:
    """The path of a profile's key in the policy file."""
    return f"{dotted(('profiles', profile))}.{key}"


def above_ceiling(field: str, requested: float, ceiling: float, rule: str, whose: str = "") -> Violation:
    return Violation(field, ViolationKind.ABOVE_CEILING, number(requested), f"at most {number(ceiling)}{whose}", rule)


def not_allowed(field: str, requested: str, allowed: Iterable[str], rule: str, nothing: str = "nothing") -> Violation:
    return Violation(field, ViolationKind.NOT_ALLOWED, shortened(requested), listed(allowed, nothing), rule)


def denied_import(field: str, requested: str, denied: Iterable[str], profile: str) -> Violation:
    allowed = shortened(f"nothing of {listed(denied, '')}")
    return Violation(field, ViolationKind.DENIED, requested, allowed, rule_of(profile, "imports.denied"))


def with_advice(violations: Sequence[Violation], name_of: Callable[[str], str] = str) -> tuple[Violation, ...]:
    """Adds to the violations of a daemon without a policy file how its only user can allow the packages or hosts."""
    if not violations:
        return ()
    names = ", ".join(json.dumps(name_of(each.requested)) for each in violations[:_ADVISED_NAMES])
    advice = (
        "none: the daemon has no policy file. Its owner can allow them by a file of three lines, "
        f'`default = "default"`, `[profiles.default.{violations[0].field}]` and `allowed = [{names}]`, '
        "given to `executor-server serve --policy FILE`"
    )
    return (*violations[:-1], replace(violations[-1], allowed=advice))


def listed(names: Iterable[str], nothing: str) -> str:
    return shortened(", ".join(names)) or nothing


def number(value: float) -> str:
    """Counts and sizes with all digits, seconds without needless zeros."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.12g}"


def shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"
