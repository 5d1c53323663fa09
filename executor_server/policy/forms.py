"""The forms of values in a policy file: limits, patterns, names of certificates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field
from pydantic_core import InitErrorDetails

from executor_server.core.config import DAY_S, KIB, MIB, Form, ImportPattern, Section, WrittenSize, contradiction

T = TypeVar("T")

# Below these no interpreter starts in a sandbox, nothing could run, and no output could be kept.
MIN_MEMORY_BYTES = 32 * MIB
MIN_PROCESSES = 4
MIN_DISK_BYTES = 64 * KIB
MIN_FILES = 64
MIN_TIME_S = 0.001
MIN_OUTPUT_BYTES = 2

MAX_PATTERNS = 1024

_CERTIFICATE_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_CERTIFICATE_CHARS = 255
_MAX_TOOL_PATTERN_CHARS = 200
_MAX_VERSION_CHARS = 64


def _is_tool_pattern(text: str) -> bool:
    return len(text) <= _MAX_TOOL_PATTERN_CHARS and (text == "*" or text.removesuffix("*").isidentifier())


def is_tool_within(pattern: str, wider: str) -> bool:
    """True when `wider` stands for every tool name that `pattern` stands for."""
    return pattern == wider or (wider.endswith("*") and pattern.startswith(wider[:-1]))


def _is_certificate(text: str) -> bool:
    if text.startswith("sha256:"):
        return _CERTIFICATE_FINGERPRINT.fullmatch(text) is not None
    return 0 < len(text) <= _MAX_CERTIFICATE_CHARS and text.isprintable() and text == text.strip()


def _is_version(text: str) -> bool:
    return 0 < len(text) <= _MAX_VERSION_CHARS and text.isprintable()


_TOOL_PATTERN = Form('a tool ("search"), the beginning of some ("web_*"), or "*"', _is_tool_pattern)
_CERTIFICATE = Form(
    f'a name of 1 to {_MAX_CERTIFICATE_CHARS} characters, or "sha256:" and 64 of 0-9 a-f', _is_certificate
)
_VERSION = Form(f"1 to {_MAX_VERSION_CHARS} characters that can be printed", _is_version)

Flag = Annotated[bool, Field(strict=True)]
Time = Annotated[float, Field(strict=True, ge=MIN_TIME_S, le=365 * DAY_S, allow_inf_nan=False)]
Memory = Annotated[int, WrittenSize, Field(strict=True, ge=MIN_MEMORY_BYTES, lt=2**63)]
Processes = Annotated[int, Field(strict=True, ge=MIN_PROCESSES, le=1_000_000)]
Output = Annotated[int, WrittenSize, Field(strict=True, ge=MIN_OUTPUT_BYTES, lt=2**63)]
Disk = Annotated[int, WrittenSize, Field(strict=True, ge=MIN_DISK_BYTES, lt=2**63)]
Files = Annotated[int, Field(strict=True, ge=MIN_FILES, lt=2**31)]
Cpus = Annotated[float, Field(strict=True, ge=0.01, le=1024, allow_inf_nan=False)]
ImportPatterns = Annotated[tuple[ImportPattern, ...], Field(max_length=MAX_PATTERNS)]
ToolPattern = Annotated[str, AfterValidator(_TOOL_PATTERN)]
ToolPatterns = Annotated[tuple[ToolPattern, ...], Field(max_length=MAX_PATTERNS)]
Placement = Literal["host", "sandbox"]
Version = Annotated[str, AfterValidator(_VERSION)]
Certificate = Annotated[str, AfterValidator(_CERTIFICATE)]
Uid = Annotated[int, Field(strict=True, ge=0, lt=2**32 - 1)]


def value_of(kind: type[T], table: Section, **others: Any) -> T:
    """Returns a value of the daemon: its fields are the keys of a table with the same names, and `others`."""
    names = [each.name for each in fields(kind) if each.name not in others]  # type: ignore[arg-type]
    return kind(**{name: getattr(table, name) for name in names}, **others)


def granted_already(
    ask: Sequence[str], granted: Sequence[tuple[str, Sequence[str]]], is_within: Callable[[str, str], bool]
) -> Iterator[InitErrorDetails]:
    """Finds entries of `ask` that are granted anyway, so that nobody would be asked."""
    for index, each in enumerate(ask):
        for key, patterns in granted:
            if any(is_within(each, pattern) for pattern in patterns):
                yield contradiction(("ask", index), f"is granted already by `{key}`", each, also=[(key,)])
