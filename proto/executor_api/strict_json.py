"""Reads and writes JSON with the C cores of `json`, without the Python around them: compact, and without NaN.

`json` compiles patterns when it is imported: 3 ms and 0.1 MiB, which the start of every sandbox would cost.
"""

from __future__ import annotations

from _json import encode_basestring, encode_basestring_ascii, make_encoder, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Union


class NotJson(ValueError):
    """The text is not compact JSON, or can't be read where the reader runs."""


class _Settings:
    """The settings that the scanner reads."""

    strict = True
    object_hook = None
    object_pairs_hook = None

    def __init__(self, parse_int: Callable[[str], int], parse_float: Callable[[str], float]) -> None:
        self.parse_int = parse_int
        self.parse_float = parse_float

    @staticmethod
    def parse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")


def reader(
    parse_int: Callable[[str], int] = int, parse_float: Callable[[str], float] = float
) -> Callable[[Union[bytes, str]], Any]:
    """Returns a function like json.loads, for compact JSON. It raises NotJson and no other exception."""
    scan = make_scanner(_Settings(parse_int, parse_float))  # type: ignore[arg-type]

    def read(data: Union[bytes, str]) -> Any:
        try:
            text = data if isinstance(data, str) else data.decode()
            value, end = scan(text, 0)
        except Exception as error:  # noqa: BLE001
            # The scanner takes the class of its exception from json.decoder, and ends with SystemError or ImportError
            # where that is missing. A sender also chooses StopIteration, RecursionError and MemoryError.
            raise NotJson((str(error) if isinstance(error, ValueError) else "") or "not JSON") from None
        if end != len(text):
            raise NotJson("more than one JSON value")
        return value

    return read


def writer(*, ascii_only: bool) -> Callable[[object], str]:
    """Returns a function like json.dumps. It raises TypeError for a value that is not JSON, ValueError for NaN."""
    text = encode_basestring_ascii if ascii_only else encode_basestring
    encode = make_encoder(None, _refuse, text, None, ":", ",", False, False, False)
    return lambda value: "".join(encode(value, 0))


def _refuse(value: object) -> None:
    raise TypeError(f"{type(value).__name__} is not JSON")
