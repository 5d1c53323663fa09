"""The digest of a value: the same for the same value, another one after any change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from executor_api.values import EncodeError, ValueLimits, digest

LIMITS = ValueLimits()


def digest_of(value: object) -> bytes:
    return digest(value, LIMITS, lambda unlike: b"%d" % id(unlike))


def _array() -> Any:
    return np.arange(100_000, dtype=np.float64)


CHANGES: dict[str, tuple[Any, Any]] = {
    "list": ([1, [2]], lambda value: value[1].append(3)),
    "dict": ({"a": {1, 2}}, lambda value: value["a"].remove(1)),
    "array": (_array(), lambda value: value.__setitem__(99_999, -1.0)),
    "empty array": (np.zeros((0, 3)), lambda value: value.resize((1, 3), refcheck=False)),
    "strided array": (_array()[::3], lambda value: value.__setitem__(5, -1.0)),
    "table": (pd.DataFrame({"a": [1, 2], "b": ["x", None]}), lambda value: value.loc.__setitem__((1, "b"), "y")),
    "bytearray": (bytearray(100_000), lambda value: value.__setitem__(5, 1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_changes_with_the_value_and_with_nothing_else(name: str) -> None:
    value, change = CHANGES[name]
    before = digest_of(value)
    assert digest_of(value) == before
    change(value)
    assert digest_of(value) != before


def test_reading_a_table_changes_nothing() -> None:
    table = pd.DataFrame({"a": [1, 2, 3]})
    before = digest_of(table)
    table.describe()
    assert table.index.is_unique
    assert table.loc[1, "a"] == 2
    assert digest_of(table) == before


def test_a_value_beyond_the_limit_has_none() -> None:
    with pytest.raises(EncodeError, match="total_bytes"):
        digest(_array(), ValueLimits(total_bytes=1000), lambda unlike: b"")
