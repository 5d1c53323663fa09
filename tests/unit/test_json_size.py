"""The values of a JSON text are counted before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from executor_api.json_size import JSON_VALUES_MAX, has_too_many_values

MORE = JSON_VALUES_MAX + 2


class Marks(bytes):
    """Passes the steps of the count on, and notes its pieces."""

    pieces = 0

    def translate(self, *arguments: Any) -> Marks:
        return Marks(super().translate(*arguments))

    def replace(self, *arguments: Any) -> Marks:
        return Marks(super().replace(*arguments))

    def split(self, *arguments: Any) -> list[bytes]:
        pieces = super().split(*arguments)
        Marks.pieces += len(pieces)
        return pieces


@pytest.mark.parametrize(
    "value",
    [
        [[]] * MORE,
        [""] * MORE,
        ["a,b"] * MORE,
        {str(number): "," for number in range(MORE)},
        ["\\", '"', *[0] * MORE],
    ],
)
def test_values_are_counted_whatever_they_are(value: object) -> None:
    assert has_too_many_values(json.dumps(value).encode())


@pytest.mark.parametrize(
    "value", ["," * MORE, {"code": '[1,\\n"' * MORE}, ["\\", "," * MORE], {str(n): "," for n in range(JSON_VALUES_MAX)}]
)
def test_commas_in_strings_are_no_values(value: object) -> None:
    assert not has_too_many_values(json.dumps(value).encode())


def test_a_text_of_very_many_strings_is_not_taken_apart() -> None:
    """Its pieces took two seconds and hundreds of megabytes for 12 MiB of them."""
    assert has_too_many_values(Marks(b"[" + b'"x,",' * 1_000_000 + b'""]'))
    assert Marks.pieces <= 4 * JSON_VALUES_MAX + 1
