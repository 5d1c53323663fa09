"""Reads numbers of bytes as people write them: `8GB`, `512 MiB`, `65536`.

kB, MB, GB and TB are powers of 1,000; KiB, MiB, GiB and TiB, of 1,024. The B may be left out, and case does not matter.
"""

from __future__ import annotations

import re
from fractions import Fraction

FORM = 'bytes, as a number or like "8GB", "1.5 GiB" or "512MiB"'
_MAX_CHARS = 40

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def bytes_of(text: str) -> int:
    """Returns the number of bytes that a text names. Raises ValueError that describes the form."""
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _MAX_CHARS else None
    if match is None:
        raise ValueError(f"must be {FORM}")
    number, unit, binary = match.groups(default="")
    size = Fraction(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()]
    if size.denominator != 1:
        raise ValueError(f"must be a whole number of bytes, {FORM}")
    return int(size)
