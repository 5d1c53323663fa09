"""Values on their way to the sandbox: what is too large is refused early, and in words."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from executor_api.values import EncodeError, ValueLimits
from executor_client._core.values import pack

PIECE_BYTES = 1 << 20


class Huge:
    """Its pickle has no end."""

    def __reduce__(self) -> Any:
        return list, (), None, (bytes(PIECE_BYTES) for _ in iter(int, 1))


def test_pickling_stops_at_the_limit_of_a_value() -> None:
    pack(object())  # imports for the first one are not to be counted
    tracemalloc.start()
    try:
        with pytest.raises(EncodeError, match=r"a Huge cannot be sent: .*total_bytes"):
            pack(Huge())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The pickler holds on to each piece, lest it meets it again.
    assert peak_bytes < 3.5 * ValueLimits().total_bytes
