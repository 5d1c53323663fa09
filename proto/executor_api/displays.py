"""Display data: the texts that show an object, by MIME type, packed as one JSON object.

It comes from agent code: a receiver checks its form here and renders none of it. A program that shows `text/html`
does so where scripts can do no harm.
"""

from __future__ import annotations

from executor_api.limits import DISPLAY_BYTES_MAX, DISPLAY_TYPES_MAX
from executor_api.strict_json import NotJson, reader, writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Union

DISPLAY_TYPE = "application/vnd.executor.display+json"
_MIME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.+-_")
_MIME_PART_CHARS = 127

_read = reader()
_write = writer(ascii_only=True)


def pack(data: Mapping[str, str]) -> bytes:
    """Packs texts of known size."""
    return _write(dict(data)).encode("ascii")


def unpack(packed: Union[bytes, memoryview]) -> dict[str, str]:
    """Returns the texts by MIME type. Raises ValueError for anything else."""
    if len(packed) > DISPLAY_BYTES_MAX:
        raise ValueError(f"display data of {len(packed)} bytes; the limit is {DISPLAY_BYTES_MAX}")
    data = _read(bytes(packed))
    if type(data) is not dict or not 0 < len(data) <= DISPLAY_TYPES_MAX:
        raise NotJson("display data is a JSON object of some texts")
    for mime_type, text in data.items():
        if type(text) is not str or not is_mime_type(mime_type):
            raise NotJson("display data has texts by MIME type")
    return data


def is_mime_type(name: object) -> bool:
    """True for the name of a type without parameters."""
    parts = name.split("/") if isinstance(name, str) else ()
    return len(parts) == 2 and all(0 < len(part) <= _MIME_PART_CHARS and _MIME_CHARS.issuperset(part) for part in parts)
