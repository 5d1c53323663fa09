"""The output of a step in smolagents' form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from smolagents.local_python_executor import CodeOutput

from executor_api.values import OpaqueValue, ValueLimits
from executor_client._core.value_text import holds_values, text_chars, value_text

WRITTEN_CHARS_MAX = 1 << 30
"""Characters of a step's value as text, before smolagents cuts it. Only values with shared parts can have more."""


@dataclasses.dataclass
class RemoteCodeOutput(CodeOutput):  # type: ignore[misc]  # smolagents is untyped
    """smolagents' `CodeOutput`, which can also be unpacked as (output, logs, is_final_answer)."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.output, self.logs, self.is_final_answer))


def writable(value: Any) -> Any:
    """Returns the value, or an `OpaqueValue` if its text would exhaust the memory.

    smolagents calls `str` on each step's value. The codec keeps shared parts shared, so a small message can hold a list
    with a million references to a string of 100 MB. Values without parts are bounded by their own bytes.
    """
    if not holds_values(value) or text_chars(value) <= WRITTEN_CHARS_MAX:
        return value
    return OpaqueValue(type(value).__name__, value_text(value, ValueLimits().repr_chars))
